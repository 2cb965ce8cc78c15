"""Agents in the rollout process: they train as in the trainer's process, and what happens to them there reaches it."""

import asyncio
import importlib.machinery
import os
import signal
import time

import httpx
import pytest

from posttrain.rl import Agent
from posttrain.rl.agents.agent import Episode
from posttrain.rl.agents.endpoint import Endpoint
from posttrain.rl.agents.messages import RequestError
from posttrain.rl.agents.recorder import Recorder
from posttrain.rl.agents.remote import RemoteAgent
from posttrain.rl.generation.protocol import Sampling
from posttrain.rl.rewards import background
from posttrain.rl.rewards import process as processes
from posttrain.rl.rewards.process import RemoteError, RolloutProcess
from posttrain.rl.samples.prompts import PromptCodec
from tests.rl.agents.scripted import ScriptedEngine
from tests.rl.agents.test_agent import ROWS, TOKENIZER, add, equal, trainer, weights_of
from tests.rl.agents.test_agent import scripted as calling_engine


def made(tmp_path, agent, **given):
    given["args"] = dict(rollout_process=True, max_completion_length=400) | given.get("args", {})
    return trainer(tmp_path, agent=agent, **given)


def rewards_of(run, rows=ROWS[:2]):
    done = run.rollout_maker.sample(run.new_samples([{**row} for row in rows]))
    return done, run.rollout_maker.score(done).rewards[:, 0].tolist()


def asks_twice():
    """An agent of no module, which is sent as its code; its turns and the whole earn."""

    async def agent(episode, row):
        first = await episode.generate(row["prompt"], max_tokens=8)
        episode.reward(len(first["content"]) % 5)
        again = [*row["prompt"], first, {"role": "user", "content": "Sure?"}]
        return len((await episode.generate(again, max_tokens=8))["content"]) % 7

    return agent


def says(prompt):
    """Texts of many lengths, whichever prompts are written together."""
    return "the cat sat on it"[: sum(map(ord, prompt)) % 13]


@pytest.mark.parametrize(
    ("options", "bounds", "engine"),
    [({}, {}, lambda: ScriptedEngine(TOKENIZER, says)), ({"max_staleness": 1}, {"inflight": 1}, lambda: None)],
    ids=["side by side", "ahead of training"],
)
def test_a_run_is_the_same_as_in_the_trainers_process(tmp_path, options, bounds, engine):
    given, agent = dict(max_completion_length=60, turn_credit="returns", **options), Agent(asks_twice(), **bounds)
    runs = [
        made(tmp_path / str(i), agent, args=given | dict(rollout_process=bool(i)), generator=engine()) for i in range(2)
    ]
    assert equal(*map(weights_of, runs))
    here, there = (
        [{name: value for name, value in entry.items() if name.startswith(("loss", "reward", "agent/turns", "compl"))}
         for entry in run.state.log_history]
        for run in runs
    )  # fmt: skip
    assert here == there and here[0]["agent/turns"] == 2


def test_episodes_and_tools_run_side_by_side_there(tmp_path):
    async def agent(episode, row):
        messages = list(row["prompt"])
        while (answer := await episode.generate(messages, tools=[add])).get("tool_calls"):
            (one,) = answer["tool_calls"]
            await asyncio.sleep(0.3)  # one after the other these 16 would take 4.8 seconds
            value = sum(one["function"]["arguments"].values())
            messages += [answer, {"role": "tool", "tool_call_id": one["id"], "content": str(value)}]
        return {"reward": float(str(row["sum"]) in answer["content"]), "pid": os.getpid()}

    run = made(tmp_path, agent, generator=calling_engine())
    rewards_of(run)  # the process is begun
    began = time.perf_counter()
    done, rewards = rewards_of(run, ROWS)
    assert time.perf_counter() - began < 4 and rewards == [1.0] * 8
    assert len({one.extra["pid"] for one in done}) == 1 and done[0].extra["pid"] != os.getpid()


@pytest.mark.parametrize("how", ["client", "thread"])
def test_it_asks_over_http_too(tmp_path, how):
    async def client(episode, row):
        asked = {"model": episode.model, "messages": row["prompt"], "max_tokens": 4}
        async with episode.client() as policy:
            answer = await policy.chat.completions.create(**asked)
        return float(answer.usage.completion_tokens)

    def thread(episode, row):
        headers = {"authorization": f"Bearer {episode.api_key}"}
        asked = {"messages": row["prompt"], "max_tokens": 4}
        httpx.post(f"{episode.base_url}/chat/completions", json=asked, headers=headers).raise_for_status()
        episode.reward(4)

    if how == "client" and importlib.machinery.PathFinder.find_spec("openai") is None:
        pytest.skip("openai is not installed")
    done, rewards = rewards_of(made(tmp_path, locals()[how]))
    assert rewards == [4.0, 4.0] and [sum(one.learn) for one in done] == [4, 4]


def test_an_error_comes_with_its_traceback(tmp_path):
    async def agent(episode, row):
        await episode.generate(row["prompt"], max_tokens=4)
        raise KeyError("lost")

    with pytest.raises(RuntimeError, match="The agent 'agent' failed on the row .*KeyError: 'lost'") as caught:
        rewards_of(made(tmp_path, agent))
    remote = caught.value.__cause__.__cause__
    assert isinstance(remote, RemoteError) and 'raise KeyError("lost")' in str(remote)


def test_what_the_trainer_raises_reaches_the_agent_and_ends_the_run(tmp_path):
    async def agent(episode, row):
        await episode.generate(row["prompt"])
        try:
            await episode.generate(row["prompt"])
        except RequestError as error:
            return error.status

    def answer(prompt):
        return 1 / 0 if fails else "Yes."

    fails = False
    run = made(tmp_path, Agent(agent, turns=1), generator=ScriptedEngine(TOKENIZER, answer))
    assert rewards_of(run)[1] == [400.0, 400.0]
    fails = True
    with pytest.raises(ZeroDivisionError):
        rewards_of(run)


def test_a_bound_in_seconds_ends_the_turn_and_then_the_agent(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 0.5)
    mark = str(tmp_path / "mark")

    async def agent(episode, row):
        await episode.generate(row["prompt"])
        if row["sum"] == 0:
            return 1.0
        try:
            await asyncio.sleep(60)
        finally:
            open(mark, "w").close()

    run = made(tmp_path, Agent(agent, seconds=2.0), generator=ScriptedEngine(TOKENIZER, lambda prompt: "Yes."))
    rewards_of(run, ROWS[:1])  # the process is begun
    done, rewards = rewards_of(run)
    assert rewards == [1.0, 0.0] and [one.ending for one in done] == ["", "seconds"]
    assert is_soon(lambda: os.path.exists(mark))


def is_soon(is_so):
    until = time.monotonic() + 20
    while not is_so() and time.monotonic() < until:
        time.sleep(0.01)
    return is_so()


def test_a_turn_that_nobody_waits_for_is_cancelled():
    ended = []

    async def generate(ids, sampling, seed):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def agent(episode, row):
        await episode.generate("the cat")

    there, recorder = RolloutProcess(seed=0, timeout=None), Recorder(PromptCodec(TOKENIZER), generate, Sampling(8))
    episode = Episode(recorder, Endpoint())
    with pytest.raises(TimeoutError):
        background.wait_for(RemoteAgent(agent, there, None)(episode, {}), 10)
    background.event_loop().call_soon_threadsafe(episode.close)
    assert is_soon(lambda: ended)
    there.close()


def test_a_turn_that_is_asked_for_too_late_is_refused(tmp_path):
    """Else its task would be pending when the program ends."""
    said = []

    async def agent(episode, row):
        async def later():
            await asyncio.sleep(0.2)
            try:
                await episode.generate(row["prompt"])
            except RequestError as error:
                said.append(error.status)

        said.append(asyncio.create_task(later()))
        if row["sum"]:  # this turn is being written when the episode ends
            said.append(asyncio.create_task(episode.generate(row["prompt"])))
            await asyncio.sleep(0)
        return 1.0

    def answer(prompt):
        time.sleep(0.1)
        return "Yes."

    assert rewards_of(
        made(tmp_path, agent, args={"rollout_process": False}, generator=ScriptedEngine(TOKENIZER, answer))
    )
    assert is_soon(lambda: said.count(410) == 2)
    assert is_soon(lambda: all(task.done() for task in said if task != 410))


def test_a_process_that_dies_is_named_and_another_begins(tmp_path):
    async def agent(episode, row):
        await episode.generate(row["prompt"], max_tokens=4)
        if row["sum"] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(60)

    run = made(tmp_path, agent, args=dict(reward_on_error="mask"))
    done, rewards = rewards_of(run)
    assert [one.ending for one in done] == ["failed"] * 2 and [reward != reward for reward in rewards] == [True] * 2

    run = made(tmp_path, agent)
    with pytest.raises(RuntimeError, match=r"ChildProcessError: The process of .* agents is gone: it ended with .* -9"):
        rewards_of(run)


def test_an_agent_that_cannot_be_interrupted_ends_the_process_and_another_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 0.3)

    async def agent(episode, row):
        while row["sum"] == 0:
            pass
        await episode.generate(row["prompt"], max_tokens=4)
        return 1.0

    run = made(tmp_path, Agent(agent, seconds=4.0), args=dict(reward_on_error="mask"))
    assert rewards_of(run, ROWS[:1])[1] == [0.0]
    assert is_soon(lambda: rewards_of(run, ROWS[1:2])[1] == [1.0])
