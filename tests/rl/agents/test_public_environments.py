"""Tasks and environments of other projects, each with its package where that is installed."""

import importlib.util
import threading
import time

import pytest

from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.rl.agents.public_environments import openenv, reasoning_gym, verifiers
from posttrain.rl.rewards.functions import math_verify_reward
from tests import tiny
from tests.contract.trainers import arguments


def needs(module):
    """Skips a test where `module` is not installed."""
    there = importlib.util.find_spec(module) is not None
    return pytest.mark.skipif(not there, reason=f"{module} is not installed: pip install 'posttrain-rl[environments]'")


def train(out, given, template=tiny.CHATML, **changes):
    usual = {"num_generations": 4, "max_completion_length": 8, "gradient_checkpointing": False, "max_steps": 2}
    trainer = GRPOTrainer(
        tiny.causal_lm(initializer_range=0.1, max_position_embeddings=2048),
        args=arguments(GRPOConfig, out, num_train_epochs=5, **(usual | changes)),
        processing_class=tiny.tokenizer(chat_template=template),
        **given,
    )
    trainer.train()
    assert trainer.state.global_step == 2
    return trainer


def said(text):
    return [{"role": "assistant", "content": text}]


@needs("math_verify")
def test_answers_in_latex_are_compared_by_what_they_mean():
    right = [r"$\frac{1}{2}$", r"$\{1, 2\}$", r"\boxed{x^2 + 2x + 1}", "7", ""]
    given = [said("It is $0.5$."), r"so $\{2, 1\}$", r"$(x+1)^2$", "The answer is 8.", "3"]
    assert math_verify_reward(given, right) == [1.0, 1.0, 1.0, 0.0, None]


@needs("math_verify")
def test_they_are_compared_in_a_thread_too():
    found = []
    thread = threading.Thread(target=lambda: found.extend(math_verify_reward(["$2/4$"], ["$0.5$"])))
    thread.start()
    thread.join()
    assert found == [1.0]


@needs("reasoning_gym")
@pytest.mark.parametrize("bound", [0, 1])
def test_a_task_of_reasoning_gym_in_one_line(bound, tmp_path):
    given = reasoning_gym("leg_counting", size=12, seed=3, system_prompt="Answer with a number.")
    import reasoning_gym as package

    entries = package.create_dataset("leg_counting", size=12, seed=3)
    rows, (reward,) = given["train_dataset"], given["reward_funcs"]
    assert rows[5]["prompt"][-1]["content"] == entries[5]["question"] and len(rows) == 12
    answers = [f"I think <answer>{entries[4]['answer']}</answer>", f"In all {entries[5]['answer']}", "many"]
    found = reward([said(answer) for answer in answers], [4, 5, 6])
    assert found[:2] == [1.0, 1.0] and found[2] < 0.1
    train(tmp_path, given, max_staleness=bound)


@needs("verifiers")
def test_a_taskset_of_verifiers_in_one_line(tmp_path):
    import verifiers.v1 as vf

    class SumData(vf.TaskData):
        answer: int

    class SumTask(vf.Task[SumData]):
        @vf.reward(weight=2.0)
        async def right(self, task: SumData, trace: vf.Trace) -> float:
            return float(trace.last_reply == str(task.answer))

        @vf.reward
        async def short(self, trace: vf.Trace) -> float:
            return 1.0 / max(len(trace.last_reply), 1)

    class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
        def load(self):
            return [SumTask(SumData(prompt=f"{a} + 1 =", system_prompt="Add.", answer=a + 1)) for a in range(20)]

    given = verifiers(Sums(vf.TasksetConfig()), num_tasks=9)
    rows, (reward,) = given["train_dataset"], given["reward_funcs"]
    assert len(rows) == 9
    assert rows[3]["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "3 + 1 ="}]
    prompts = [rows[3]["prompt"], rows[4]["prompt"]]
    assert reward(prompts, [said("4"), said("12")], [3, 4]) == [3.0, 0.5]
    train(tmp_path, given)

    class Boxed(SumTask):
        NEEDS_CONTAINER = True

    class InBoxes(vf.Taskset[Boxed, vf.TasksetConfig]):
        def load(self):
            return [Boxed(SumData(prompt="?", answer=1))]

    with pytest.raises(ValueError, match="needs a container"):
        verifiers(InBoxes(vf.TasksetConfig()))


@pytest.fixture
def guessing():
    """(address, action) of an OpenEnv server: guess a number between 0 and 9."""
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
    from pydantic import Field

    class GuessAction(Action):
        """Guess a number."""

        number: int = Field(description="between 0 and 9")

    class GuessObservation(Observation):
        text: str = ""

    class Guess(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            return GuessObservation(text="I think of a number.", done=False, reward=0.0)

        def step(self, action, timeout_s=None, **kwargs):
            right = action.number == 7
            return GuessObservation(text="right" if right else "wrong", done=right, reward=1.0 if right else -0.25)

        @property
        def state(self):
            return State()

    app = create_fastapi_app(Guess, GuessAction, GuessObservation, max_concurrent_envs=64)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not server.started and time.monotonic() < until:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", GuessAction
    server.should_exit = True
    thread.join(30)


@needs("openenv")
def test_an_environment_of_openenv_in_one_line(guessing, tmp_path):
    address, action = guessing
    made = openenv(address, action, tool="guess")["environment_factory"]
    one, other = made(), made()
    assert one.reset() == other.reset() == "I think of a number."
    assert one.guess(number=3) == "wrong" and one.guess(7) == "right\nThe episode is over."
    assert one.guess(number=7) == "The episode is over." and one.get_reward() == 0.75
    assert other.get_reward() == 0.0
    assert one.reset() == "I think of a number." and one.get_reward() == 0.0

    trainer = train(tmp_path, {"environment_factory": made}, template=tiny.CHATML_WITH_TOOLS)
    (schema,) = trainer.environments.schemas_of(trainer.new_samples([{}])[0])
    assert schema["function"]["name"] == "guess" and schema["function"]["description"] == "Guess a number."
    assert schema["function"]["parameters"]["properties"] == {
        "number": {"type": "integer", "description": "between 0 and 9"}
    }
    assert trainer.reward_func_names == ["GuessEnvironment"]


def test_a_missing_package_is_named(monkeypatch):
    import sys

    for name in ("reasoning_gym", "verifiers", "verifiers.v1", "openenv", "openenv.core", "math_verify"):
        monkeypatch.setitem(sys.modules, name, None)
    calls = [lambda: reasoning_gym("x"), lambda: verifiers("x"), lambda: openenv("http://x", object),
             lambda: math_verify_reward(["1"], ["1"])]  # fmt: skip
    for call in calls:
        with pytest.raises(ImportError, match=r"posttrain-rl\[environments\]"):
            call()
