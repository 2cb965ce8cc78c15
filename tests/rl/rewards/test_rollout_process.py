"""Reward functions, tools and environments in a process of their own."""

import asyncio
import functools
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.rl.agents.environments import Environments
from posttrain.rl.rewards import process as processes
from posttrain.rl.rewards.process import RemoteError, RolloutProcess, unsendable
from posttrain.rl.rewards.scoring import RewardArguments, RewardError, Rewards
from posttrain.rl.samples.samples import Sample
from posttrain.rl.tools.formats import Call
from tests import tiny
from tests.rl.agents.conversations import answered, converse
from tests.rl.agents.test_environments import CODEC, Clock, Counter, Database, asked, call, sample, writer


@pytest.fixture
def process():
    made = RolloutProcess(seed=0, timeout=20.0)
    yield made
    made.close()


def score(process, function, **options):
    made = zip(["p", "q"], [[1], [2, 2]], ["x", "yy"], strict=True)
    samples = [Sample({}, prompt, [1], ids, completion=completion) for prompt, ids, completion in made]
    return Rewards([process.reward(function)], RewardArguments(**options)).of(samples)


def test_a_reward_runs_in_the_main_thread_of_another_process(process):
    def judge(completions, log_metric, log_extra, **others):
        log_metric("pid", os.getpid())
        log_metric("main", threading.current_thread() is threading.main_thread())
        log_extra("text", completions)
        return [len(text) for text in completions]

    scores = score(process, judge)
    assert scores.rewards.tolist() == [[1.0], [2.0]]
    assert scores.metrics["pid"] != [os.getpid()] and scores.metrics["main"] == [1.0]
    assert scores.columns == {"text": ["x", "yy"]}


def test_async_rewards_are_awaited_there(process):
    async def judge(completions):
        await asyncio.sleep(0)
        return [os.getpid()] * len(completions)

    assert score(process, judge).rewards[0, 0] != os.getpid()


class Judge:
    def __call__(self, completions):
        return [1.0] * len(completions)


def test_functions_have_the_names_that_they_have_here(process):
    def judge(completions, bonus):
        return [len(text) + bonus for text in completions]

    for function in (judge, functools.partial(judge, bonus=1), Judge()):
        assert Rewards([process.reward(function)]).names == Rewards([function]).names
    assert score(process, functools.partial(judge, bonus=1)).rewards.tolist() == [[2.0], [3.0]]
    assert score(process, Judge()).rewards.tolist() == [[1.0], [1.0]]


def test_its_errors_come_with_their_traceback(process):
    def judge(completions):
        return 1 / len(completions[2:])

    with pytest.raises(RewardError, match="'judge' failed on 2 completions: ZeroDivisionError") as caught:
        score(process, judge)
    remote = caught.value.__cause__.__cause__
    assert isinstance(remote, RemoteError) and "in judge" in str(remote)

    def leaves(completions):
        sys.exit(3)

    with pytest.raises(RewardError, match="RuntimeError: SystemExit: 3"):
        score(process, leaves)


def test_a_call_beyond_its_time_limit_is_interrupted_and_the_process_goes_on():
    process = RolloutProcess(seed=0, timeout=0.5)

    def judge(completions):
        while True:
            pass

    with pytest.raises(RewardError, match=r"no answer after 0\.5 seconds.*set reward_timeout to more"):
        score(process, judge)
    assert score(process, lambda completions: [1.0, 2.0]).rewards.tolist() == [[1.0], [2.0]]
    process.close()


def test_a_call_that_cannot_be_interrupted_ends_the_process_and_another_begins(monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 0.3)
    process = RolloutProcess(seed=0, timeout=0.5)
    environments = Environments(factory=Counter, process=process)
    (one,) = environments.begin([Sample({}, None, [])])

    def judge(completions):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})
        while True:
            pass

    with pytest.raises(RewardError, match=r"no answer after 0\.5 seconds"):
        score(process, judge)
    assert score(process, lambda completions: [3.0, 4.0]).rewards.tolist() == [[3.0], [4.0]]
    with pytest.raises(ChildProcessError, match="Environments that were in it are lost"):
        one.environment.reset()
    process.close()


def test_a_process_that_dies_is_named_and_another_begins(process):
    def judge(completions):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RewardError, match=r"it ended with exit code -9 \(killed by a signal\)"):
        score(process, judge)
    assert score(process, lambda completions: [1.0, 2.0]).rewards.shape == (2, 1)


def test_what_cannot_be_sent_is_named_with_the_way_out(process):
    numbers = (number for number in range(9))

    def judge(completions):
        return [float(next(numbers)) for _ in completions]

    with pytest.raises(TypeError, match="The function 'judge' cannot be sent.*inside of it at the first call, or set"):
        process.reward(judge)

    with pytest.raises(
        RewardError, match="A result cannot be sent from the rollout process: .*Return numbers, texts, lis"
    ):
        score(process, lambda completions: (one for one in completions))


class Holder:
    def __init__(self, held):
        self.held, self.itself = held, self


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"reward": 1.0, "trace": [1, Holder(threading.Lock())]}, r"\['trace'\]\[1\].held is of the class lock: Type"),
        ({"page": Holder(iter([]).__length_hint__), "ids": (n for n in ())}, r"\['ids'\] is of the class generator"),
    ],
)
def test_the_part_that_cannot_be_sent_is_named(process, value, named):
    kept = process.function(lambda: None, None)
    with pytest.raises(TypeError, match=f"What the rollout process is asked cannot be sent to .*: {named}"):
        kept(value)
    assert unsendable(value | {"ids": (), "trace": []}, pickle.dumps) == ""


def test_environments_and_tools_live_there(process):
    environments = Environments(factory=Counter, process=process)
    samples = environments.begin([Sample({"start": s}, [{"role": "user", "content": "count"}], []) for s in (0, 5)])
    assert [s.prompt[-1]["content"] for s in samples] == ["count from 0", "count from 5"]
    assert [schema["function"]["name"] for schema in environments.schemas_of(samples[0])] == ["step"]
    assert answered(environments, [(s, [Call("step", {"by": 2})]) for s in samples])[1][0]["content"] == "7"
    rewards = environments.reward_functions[0]
    assert rewards.__name__ == "Counter" and rewards([s.environment for s in samples]) == [2.0, 7.0]
    assert samples[1].environment.count == 7

    counts = process.reward(lambda environments, completions: [one.count for one in environments])
    assert counts(environments=[s.environment for s in samples], completions=[]) == [
        2,
        7,
    ]

    def total(a: int, b: int) -> int:
        """Add.

        Args:
            a: One.
            b: Another.
        """
        return a + b

    tools = Environments([total], process=process)
    assert tools.schemas_of(Sample({}, None, []))[0]["function"]["parameters"]["required"] == ["a", "b"]
    assert answered(tools, [(Sample({}, None, []), [Call("total", {"a": 1, "b": 2})])])[0][0]["content"] == "3"


def test_things_of_one_thread_and_alarms_work_there(process):
    def make():
        return Database()

    calls = [Call("note", {"word": "a"}), Call("wait", {}), Call("note", {"word": "b"})]
    told = asked(Environments(factory=make, process=process), [Sample({}, None, [])] * 2, *calls)
    assert told == [["1", "error: TimeoutError: it took too long", "2"]] * 2


def test_async_tools_run_side_by_side_there(process):
    environments = Environments(factory=Clock, process=process)
    asked(environments, [Sample({}, None, [])] * 8, Call("look", {}))  # the process and 8 environments are begun
    samples = environments.begin([sample(call("sleep", name="a") + call("look")) for _ in range(8)])
    began = time.perf_counter()
    told = converse(environments, samples, CODEC, writer(*["done"] * 8)[0], 900)  # a busy machine ends them apart
    assert [[m["content"] for m in one.completion if m["role"] == "tool"] for one in told] == [["['a']", "['a']"]] * 8
    assert time.perf_counter() - began < 1.2, "one after the other takes 1.6 seconds"


def pause(seconds: float):
    """Sleep.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)


def test_a_plain_tool_there_does_not_hold_up_those_that_write(process):
    environments, ended = Environments([pause], process=process), []
    slow, fast = sample(call("pause", seconds=1.0)), sample("nothing to do" + call("no", a=1))

    def go_on(samples, turn, tokens):
        ended.extend((one.seed, time.perf_counter() - began < 0.8) for one in samples)
        return writer(*["done"] * 5)[0](samples, turn, tokens)

    answered(environments, [(slow, [Call("pause", {"seconds": 0.0})])])  # the process is begun
    began = time.perf_counter()
    converse(environments, [slow, fast], CODEC, go_on, 900)
    assert [in_time for _, in_time in ended] == [True, False]


@pytest.mark.parametrize("options", [{}, {"max_staleness": 1}], ids=["in turn", "ahead"])
def test_a_run_is_the_same_as_without(options, tmp_path):
    weights = []
    for rollout_process in (False, True):
        args = GRPOConfig(
            str(tmp_path / str(rollout_process)), rollout_process=rollout_process, max_steps=3, learning_rate=1e-2,
            per_device_train_batch_size=4, num_generations=4, max_completion_length=6, report_to="none", **options,
        )  # fmt: skip
        trainer = GRPOTrainer(
            tiny.causal_lm(initializer_range=0.2),
            lambda completion_ids, trainer_state, **others: [
                (sum(ids) + trainer_state.max_steps) % 11 / 11 for ids in completion_ids
            ],
            args,
            [{"prompt": "the cat"}, {"prompt": "a dog sat"}] * 6,
            processing_class=tiny.tokenizer(),
        )
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert torch.equal(*weights)


def test_a_script_needs_no_main_guard_and_a_killed_trainer_leaves_no_process(tmp_path):
    (tmp_path / "of_mine.py").write_text("numbers = (number for number in range(3))\nlength = len\n")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, sys
            from dataclasses import dataclass
            import of_mine
            from posttrain.rl.rewards.process import RolloutProcess

            @dataclass
            class Verdict:
                value: int

            def helper(text):
                return Verdict(of_mine.length(text))

            def judge(completions):
                return [helper(text).value for text in completions], os.getpid()

            process = RolloutProcess(seed=0, timeout=None)
            values, pid = process.reward(judge)(completions=["a", "bb"])
            assert values == [1, 2]
            print(pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    pid = int(ended.stdout)
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("The process of the reward function is still there.")
