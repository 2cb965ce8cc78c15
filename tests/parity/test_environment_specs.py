"""Task suites that trl opens, Harbor and OpenReward, given to `GRPOTrainer` as its documentation gives them to trl."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("trl")

from trl.experimental.harbor import HarborBashEnv, HarborSpec
from trl.experimental.openreward import OpenRewardSpec

from posttrain.rl import GRPOConfig, GRPOTrainer
from tests import tiny
from tests.contract.trainers import arguments
from tests.rl.agents.scripted import ScriptedEngine, call

TOKENIZER = tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS)
SERVER = """
from openreward.environments import Environment, Server, TextBlock, ToolOutput, tool
from pydantic import BaseModel

class Answer(BaseModel):
    answer: int

class Sums(Environment):
    def __init__(self, task_spec={}, secrets={}, **options):
        super().__init__(task_spec)
        self.task = task_spec

    @classmethod
    def list_splits(cls):
        return ["train"]

    @classmethod
    def list_tasks(cls, split):
        return [{"id": str(a), "a": a, "b": 3} for a in range(4)]

    def get_prompt(self):
        return [TextBlock(text=f"Submit {self.task['a']} plus {self.task['b']}.")]

    @tool
    async def submit(self, params: Answer) -> ToolOutput:
        "Submits the answer."
        right = params.answer == self.task["a"] + self.task["b"]
        return ToolOutput(blocks=[TextBlock(text="done")], reward=float(right), finished=True)

Server([Sums]).run(port=PORT)
"""


class LocalShell(HarborBashEnv):
    """Harbor's environment with a folder and a shell of this machine in place of its sandbox, and its own verifier."""

    async def _start(self, task_dir):
        self._task = self._env = Path(task_dir)
        (self._task / "answer.txt").unlink(missing_ok=True)
        return (self._task / "instruction.md").read_text()

    def _exec(self, command, timeout=180):
        done = subprocess.run(command, shell=True, cwd=self._task, capture_output=True, text=True, timeout=timeout)
        return done.stdout + done.stderr or f"(empty output, rc={done.returncode})"

    async def _verify(self):
        answer = self._task / "answer.txt"
        return float(answer.exists() and answer.read_text() == (self._task / "tests" / "right.txt").read_text())

    async def _stop(self):
        self._env = None


def rewards_of(tmp_path, spec, answer, **changes):
    """The reward of each completion of one step over `spec`, after a look at what was learned."""
    engine = ScriptedEngine(TOKENIZER, answer)
    usual = dict(per_device_train_batch_size=4, num_generations=2, max_completion_length=400, shuffle_dataset=False)
    run = GRPOTrainer(
        tiny.causal_lm(max_position_embeddings=8192),
        args=arguments(GRPOConfig, tmp_path / "out", max_steps=1, **usual, **changes),
        train_dataset=spec.train_dataset, environment_factory=spec.environment_factory, reward_funcs=spec.reward_funcs,
        processing_class=TOKENIZER, generator=engine,
    )  # fmt: skip
    rollouts, make = [], run.make_rollout
    run.make_rollout = lambda batches: rollouts.append(make(batches)) or rollouts[-1]
    run.train()
    (rollout,) = rollouts
    learned = [ids[learn].tolist() for ids, learn in zip(rollout.completion_ids, rollout.loss_mask, strict=True)]
    turns = [ids for _, ids in engine.written]
    assert sorted(map(len, learned)) == sorted(len(a) + len(b) for a, b in zip(turns[:4], turns[4:], strict=True))
    return run.state.log_history[0]["reward"]


@pytest.mark.parametrize("process", [False, True], ids=["threads", "rollout process"])
def test_harbors_tasks(tmp_path, process):
    for number in range(2):
        task = tmp_path / "tasks" / str(number)
        (task / "tests").mkdir(parents=True)
        (task / "task.toml").write_text('[metadata]\ngold_answer = "5"\n')
        (task / "instruction.md").write_text(f"Task {number}: what is 2 and 3?")
        (task / "tests" / "right.txt").write_text("5")
    spec = HarborSpec(str(tmp_path), agent=LocalShell)

    def answer(prompt):
        if "<tool_response>" in prompt.rpartition("<|im_start|>user\n")[2]:
            return "Done."
        return call("bash", command=f"echo -n {5 if 'Task 0' in prompt else 6} > answer.txt")

    assert rewards_of(tmp_path, spec, answer, rollout_process=process) == 0.5


@pytest.mark.skipif(importlib.util.find_spec("openreward") is None, reason="openreward is not installed")
def test_a_server_of_openreward(tmp_path, monkeypatch):
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://localhost:{port}"
    for name in ("API", "SESSION"):
        monkeypatch.setenv(f"OPENREWARD_{name}_URL", address)  # else it asks api.localhost
    (tmp_path / "server.py").write_text(SERVER.replace("PORT", str(port)))
    server = subprocess.Popen([sys.executable, tmp_path / "server.py"], env=os.environ | {"NO_PROXY": "*"})
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(address + "/health", timeout=1)
                break
            except OSError:
                time.sleep(0.1)
        spec = OpenRewardSpec(address, env_name="sums", indices=[1, 2])

        def answer(prompt):
            if "<tool_response>" in prompt.rpartition("<|im_start|>user\n")[2]:
                return "Done."
            first, second = map(int, re.search(r"Submit (\d+) plus (\d+)", prompt).groups())
            return call("submit", answer=first + second if first == 1 else 0)

        assert rewards_of(tmp_path, spec, answer) == 0.5
    finally:
        server.kill()
