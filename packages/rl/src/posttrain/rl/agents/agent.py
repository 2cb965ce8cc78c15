"""Episodes of an agent: any program that asks the policy through the recorder or the endpoint, as samples.

row -> agent (a function or a command) <-> recorder <-> engine, then the sequences of tokens as a sample
"""

from __future__ import annotations

import asyncio
import logging
import reprlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from posttrain.core.errors import require
from posttrain.core.logging.metrics import Metrics
from posttrain.rl.agents.command import AgentCommand
from posttrain.rl.agents.endpoint import MODEL, Access, Endpoint, allow_connections
from posttrain.rl.agents.environments import schema_of
from posttrain.rl.agents.messages import Message, Request, assistant
from posttrain.rl.agents.openai_api import read_message
from posttrain.rl.agents.recorder import Recorder, Written
from posttrain.rl.agents.remote import RemoteAgent, called
from posttrain.rl.agents.scheduler import Opening, serve
from posttrain.rl.generation.protocol import Sampling
from posttrain.rl.losses.credit import TurnRewards
from posttrain.rl.rewards import background
from posttrain.rl.rewards.background import name_of
from posttrain.rl.rewards.process import RolloutProcess
from posttrain.rl.rewards.scoring import RewardArguments
from posttrain.rl.samples.prompts import PromptCodec
from posttrain.rl.samples.samples import Sample, copied

logger = logging.getLogger(__name__)

REWARD = "agent_reward"
"""The column with what the agent itself has given as its reward."""
TURNS = "agent_turn_rewards"
"""The column with what it has given its turns, and the whole; None where it has given none."""
CUT_REWARD = 0.0
"""Reward of an episode that a bound has ended, and whose agent gave none."""


@dataclass(frozen=True)
class Agent:
    """An agent to train, and the bounds of its episodes.

    Args:
        run: ``async (episode, row)``, or a plain function, which runs in a thread, or a command, a text or a list of
            words. It returns its reward, a dict with ``reward`` and further columns for reward functions, or None.
        seconds: of an episode at most; None: no limit. turns: of the policy at most; None: any number.
        inflight: episodes that run at a time, of all rollouts that overlap; None: any number.
        host: the address that the endpoint listens at. At 0.0.0.0, agents get the address of this machine.

    Raises:
        TypeError: `run` is none of these.
    """

    run: Callable[..., Any]
    seconds: float | None = 600.0
    turns: int | None = None
    inflight: int | None = None
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if isinstance(self.run, (str, list, tuple)):
            object.__setattr__(self, "run", AgentCommand(self.run))
        if not callable(self.run):
            raise TypeError(f"agent is of type {type(self.run).__name__}; pass a function (episode, row) or a command.")

    @classmethod
    def of(cls, given: Any) -> Agent:
        """`given`, which may be what it runs, as an agent."""
        return given if isinstance(given, cls) else cls(given)

    @property
    def name(self) -> str:
        """In the log."""
        return name_of(self.run)

    def reward_function(self) -> Callable[..., list[Any]]:
        """The rewards that the agent itself gives, as a reward function."""

        def given(agent_reward: list[Any], agent_turn_rewards: list[Any]) -> list[Any]:
            pairs = zip(agent_reward, agent_turn_rewards, strict=True)
            return [total if of_turns is None else of_turns for total, of_turns in pairs]

        given.__name__ = self.name
        return given


def within(agent: Agent, process: RolloutProcess) -> Agent:
    """`agent` with its function in `process`; a command is a process by itself."""
    is_command = isinstance(agent.run, AgentCommand)
    return agent if is_command else replace(agent, run=RemoteAgent(agent.run, process, agent.seconds))


class Episode:
    """One run of the agent, on one row.

    Attributes:
        model: the name of the policy.
    """

    model = MODEL

    def __init__(self, recorder: Recorder, endpoint: Endpoint) -> None:
        self._recorder, self._endpoint = recorder, endpoint
        self._access: Access | None = None
        self.rewards: list[tuple[int, float]] = []

    def _open(self) -> Access:
        if self._access is None:
            self._access = self._endpoint.open(self._recorder.reply)
        return self._access

    def close(self) -> None:
        """Refuse what is asked from now on."""
        self._recorder.end()
        if self._access is not None:
            self._endpoint.shut(self._access)

    @property
    def base_url(self) -> str:
        """Of the policy, for clients of OpenAI's API."""
        return f"{self._open().url}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """Of the policy, for clients of Anthropic's API."""
        return self._open().url

    @property
    def api_key(self) -> str:
        """The key of this episode."""
        return self._open().key

    def client(self, **options: Any) -> Any:
        """An ``openai.AsyncOpenAI`` that asks the policy."""
        openai = require("openai", "openai", "episode.client()")
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, **options)

    def reward(self, value: float) -> None:
        """Add `value` to the reward of this episode, and to that of its last turn."""
        self.rewards.append((len(self._recorder.turns) - 1, float(value)))

    async def generate(
        self,
        messages: Sequence[Message] | str,
        tools: Sequence[Any] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Any:
        """The policy's next message, without HTTP: ``content``, and ``tool_calls`` with arguments as dicts; of a text,
        the text that it writes behind it.

        Args:
            messages: the conversation. tools: functions, or schemas in OpenAI's form.

        Raises:
            RequestError: the trajectory has reached a bound, or the chat template refuses the conversation.
        """
        history = messages if isinstance(messages, str) else [read_message(message) for message in messages]
        schemas = tuple(dict(tool) if isinstance(tool, Mapping) else schema_of(tool) for tool in tools)
        reply = await self._recorder.reply(Request(history, schemas, max_tokens=max_tokens, stop=tuple(stop)))
        return reply.text if isinstance(history, str) else assistant(reply.text, reply.calls, reply.thoughts)


@dataclass(frozen=True)
class Ended:
    """How an episode has ended.

    Attributes:
        reward: that the agent gave; None: none. turns: that it gave to turns. columns: for reward functions.
        failed: the agent raised an error, or its command failed.
    """

    recorder: Recorder
    reward: float | None
    turns: TurnRewards | None
    columns: dict[str, Any]
    failed: bool
    seconds: float


class Episodes:
    """Runs an agent on rows.

    Args:
        codec: prompts to tokens. context: tokens that the model reads at most; None: any number.
        options: what follows where the agent fails, as where a reward function does.
    """

    def __init__(self, agent: Agent, codec: PromptCodec, context: int | None, options: RewardArguments) -> None:
        self.agent, self.codec, self.context, self.options = agent, codec, context, options
        self.endpoint = Endpoint(agent.host)
        allow_connections()
        self._places: Any = nullcontext() if agent.inflight is None else asyncio.Semaphore(agent.inflight)

    def run(
        self,
        samples: Sequence[Sample],
        sampling: Sampling,
        open_turns: Opening,
        metrics: Metrics,
        ended: Callable[[int, Sample], None] | None = None,
    ) -> list[Sample]:
        """The `samples` after an episode of each, in their order; in each a sequence has so many tokens behind its
        first prompt as `sampling` says. Episodes run on the program's event loop. `ended` is called in this thread with
        the place of each that has ended, and with the sample.
        """
        loop, found = background.event_loop(), list(samples)
        going: dict[int, Recorder] = {}
        asked: SimpleQueue[Any] = SimpleQueue()

        def take(place: int, one: Ended) -> None:
            found[place] = self._sample(samples[place], one)
            if ended is not None:
                ended(place, found[place])

        async def generate(place: int, ids: list[int], sampling: Sampling, seed: int) -> Sample:
            future: asyncio.Future[Sample] = loop.create_future()
            asked.put((place, future, Sample({}, "", ids, seed=seed), sampling))
            return await future

        async def one(place: int, sample: Sample) -> Ended:
            async with self._places:
                call = partial(generate, place)
                going[place] = Recorder(self.codec, call, sampling, sample.seed, self.context, self.agent.turns)
                done = await self._episode(sample, going[place])
                del going[place]
            asked.put(partial(take, place, done))
            return done

        def stalled() -> None:
            name_stalled(self.agent.name, [(samples[place], recorder) for place, recorder in list(going.items())])

        episodes = background.begin([one(*each) for each in enumerate(samples)])
        episodes.add_done_callback(lambda _: asked.put(None))
        try:
            tell = loop.call_soon_threadsafe
            serve(asked, open_turns, lambda *done: tell(_answer, *done), asyncio.Future.cancelled, stalled)
            log(metrics, episodes.result())
        except BaseException:
            episodes.cancel()
            raise
        return found

    async def _episode(self, sample: Sample, recorder: Recorder) -> Ended:
        episode, started = Episode(recorder, self.endpoint), time.perf_counter()
        returned, failed = None, False
        try:
            async with asyncio.timeout(self.agent.seconds) as limit:
                returned = await called(self.agent.run, episode, copied(sample.row))
        except Exception as error:
            if recorder.error is not None:
                raise recorder.error from None
            if limit.expired():
                recorder.cut = "seconds"
            elif recorder.cut is None:
                failed = True
                self._report(error, sample)
        finally:
            episode.close()
        reward, columns = read_reward(returned, [value for _, value in episode.rewards], self.agent.name)
        turns = turn_rewards(reward, episode.rewards, len(recorder.turns))
        if reward is None and failed and self.options.reward_on_error == "value":
            reward = self.options.reward_error_value
        if reward is None and recorder.cut is not None:
            reward = CUT_REWARD
        return Ended(recorder, reward, turns, columns, failed, time.perf_counter() - started)

    def _report(self, error: Exception, sample: Sample) -> None:
        what = f"The agent {self.agent.name!r} failed on the row {reprlib.repr(sample.row)}"
        if self.options.reward_on_error == "raise":
            why = f"{type(error).__name__}: {error}".rstrip(".")
            raise RuntimeError(f"{what}: {why}. Mend it, or set reward_on_error to 'mask' or 'value'.") from error
        logger.warning("%s.", what, exc_info=error)

    def _sample(self, sample: Sample, ended: Ended) -> Sample:
        """`sample` with what the policy has written in its episode."""
        extra = sample.extra | ended.columns | {REWARD: ended.reward, TURNS: ended.turns}
        own = replace(sample, extra=extra, ending="failed" if ended.failed else ended.recorder.cut or "")
        sequences = ended.recorder.sequences()
        if not sequences:  # nothing to learn from
            end = self.codec.tokenizer.eos_token_id or 0
            return replace(own, prompt=sample.prompt or "", prompt_ids=[end], ids=[end], learn=[False], logps=[0.0])
        seen: set[int] = set()
        first, *others = [_row(own, turns, seen, ended.recorder.turns) for turns in sequences]
        root, last = sequences[0][0], sequences[0][-1]
        prompt, completion = root.history[: root.num_asked], last.history[root.num_asked :]
        finished = last.finished and not ended.failed and ended.recorder.cut is None
        others = [replace(one, finished=finished) for one in others]
        prompt = sample.row.get("prompt", prompt)
        return replace(first, prompt=prompt, completion=completion, finished=finished, others=tuple(others))


def _answer(future: asyncio.Future[Any], sample: Sample) -> None:
    if not future.done():
        future.set_result(sample)


def name_stalled(agent: str, going: Sequence[tuple[Sample, Recorder]]) -> None:
    """Warn that nothing has gone on for `background.SLOW` seconds, and of what each trajectory waits for."""
    each = [
        f"{sample.name} waits for {'the engine' if recorder.is_asking else 'the agent'} after {len(recorder.turns)} "
        f"turns (row {reprlib.repr(sample.row)})"
        for sample, recorder in going
    ]
    logger.warning(
        "No trajectory of the agent %r has gone on for %g seconds. %d have not ended: %s. Agent(seconds=) bounds them.",
        agent,
        background.SLOW,
        len(each),
        "; ".join([*each[:3], *["..."] * (len(each) > 3)]),
    )


def read_reward(returned: Any, given: Sequence[float], name: str) -> tuple[float | None, dict[str, Any]]:
    """(the reward that an agent `returned`, or has `given` on the way; its columns for reward functions). Raises
    TypeError where it returned something else.
    """
    columns = dict(returned) if isinstance(returned, Mapping) else {}
    value = columns.pop("reward", None) if isinstance(returned, Mapping) else returned
    with suppress(ValueError, RuntimeError):  # of an array with several numbers
        value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, (int, float, type(None))):
        raise TypeError(
            f"The agent {name!r} returned {reprlib.repr(returned)}; return a number, a dict with 'reward', or None."
        )
    if value is None and not given:
        return None, columns
    return float(value or 0) + sum(given), columns


def turn_rewards(total: float | None, given: Sequence[tuple[int, float]], number: int) -> TurnRewards | None:
    """The rewards of `number` turns, where an agent has `given` some of the `total` to turns; None where it has not."""
    found: list[float | None] = [None] * number
    for turn, value in given:
        if turn >= 0:  # else before the first turn
            found[turn] = (found[turn] or 0.0) + value
    if all(value is None for value in found):
        return None
    return TurnRewards(found, (total or 0.0) - sum(value for turn, value in given if turn >= 0))


def _row(sample: Sample, turns: Sequence[Written], seen: set[int], written: Sequence[Written]) -> Sample:
    """`sample` with the tokens of one sequence, of which those turns are learned from that were not `seen` before;
    `written` are all turns of the trajectory.
    """
    own = next(i for i, turn in enumerate(turns) if id(turn) not in seen)
    seen.update(map(id, turns))
    first, learned = turns[own], turns[own:]
    before = first.before.tokens if first.before is not None else []
    row = replace(sample, prompt_ids=[*before, *first.asked], learn=[], logps=[], versions=[], ids=[])
    for turn in learned:
        if turn is not first:
            row = row.extended(turn.asked, [0.0] * len(turn.asked), chosen=False)
        row = row.extended(turn.ids, turn.logps, chosen=True, versions=turn.versions)
    places = {id(turn): place for place, turn in enumerate(written)}
    numbers = tuple((places[id(turn)], len(turn.ids)) for turn in learned)
    routes = [turn.routes for turn in turns if turn.routes is not None]
    row = replace(row, routes=torch.cat(routes) if len(routes) == len(turns) else None)
    return replace(row, is_exact=all(turn.is_exact for turn in learned), turns=numbers)


def log(metrics: Metrics, ended: Sequence[Ended]) -> None:
    """Log what the episodes of a rollout were like."""
    number = len(ended)
    sums = {
        "turns": sum(len(one.recorder.turns) for one in ended),
        "sequences": sum(len(one.recorder.sequences()) for one in ended),
        "seconds": sum(one.seconds for one in ended),
        "failed": sum(one.failed for one in ended),
        **{f"cut/{why}": sum(one.recorder.cut == why for one in ended) for why in ("turns", "tokens", "seconds")},
    }
    for name, value in sums.items():
        metrics.add_sum(f"agent/{name}", value, number)
