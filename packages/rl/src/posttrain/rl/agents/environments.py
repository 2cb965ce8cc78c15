"""Runs multi-turn completions in which the policy calls tools, and the environments that own the tools.

A tool's answer is part of the completion but not trained on: `Sample.learn` is False there.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import reprlib
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import groupby
from queue import SimpleQueue
from typing import Any

from posttrain.core.data.samplers import mix
from posttrain.core.errors import DataError, did_you_mean
from posttrain.lm.images.images import IMAGE_PARTS
from posttrain.rl.agents.scheduler import Opening, serve
from posttrain.rl.generation.protocol import Sampling
from posttrain.rl.rewards import background
from posttrain.rl.rewards.process import RolloutProcess, is_remote
from posttrain.rl.samples.prompts import PromptCodec
from posttrain.rl.samples.samples import Sample, copied, room_for, room_left
from posttrain.rl.tools.formats import Call
from posttrain.rl.tools.protocol import names_all

logger = logging.getLogger(__name__)

NOT_TOOLS = ("reset", "get_reward")
CUT = ("turns", "tokens", "seconds")
COUNTED = ("calls", "failures", *CUT)


class Environments:
    """The tools of the policy, and an environment for each completion.

    Args:
        tools: functions, sync or async, whose type hints and docstring become their description for the model.
        factory: makes an environment, or ``{name: factory}`` for rows with a column ``environment``. An environment has
            ``reset(**row)``, which may return an addition to the prompt; its other public methods are tools;
            ``get_reward()``, if it exists, is a reward function. It is made once and reset for each completion.
        process: where tools and environments run; None: in this one.
        max_turns: with tool calls. seconds: from the beginning of a conversation on in which tools are called.

    Attributes:
        reward_functions: one for each class of environments with a ``get_reward``.
        overlaps: completions begin before others are scored, which `give_back` ends. Else all are over when the next
            ones begin.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]] | None = None,
        factory: Any = None,
        max_turns: int | None = None,
        process: RolloutProcess | None = None,
        seconds: float | None = None,
    ) -> None:
        self.max_turns, self.process, self.seconds = max_turns, process, seconds
        self.set_tools(tools)
        self.factories = factory if isinstance(factory, Mapping) else {None: factory} if factory is not None else {}
        if process is not None:
            self.factories = {name: process.factory(make) for name, make in self.factories.items()}
        self.by_name = isinstance(factory, Mapping)
        self.pools: dict[Any, list[Any]] = {name: [make()] for name, make in self.factories.items()}
        self._counts = threading.local()  # in each thread one rollout is completed at a time
        self.overlaps = False
        self._busy: set[int] = set()
        self._lock = threading.Lock()
        self.reward_functions = []
        for instance in {type(pool[0]): pool[0] for pool in self.pools.values()}.values():
            if not callable(getattr(instance, "reset", None)):
                raise TypeError(f"{type(instance).__name__} has no reset(), which begins each completion.")
            if callable(getattr(instance, "get_reward", None)):
                self.reward_functions.append(_reward_of(type(instance)))

    @property
    def counts(self) -> dict[str, int]:
        """Tool calls and failed ones of conversations in this thread, and conversations that a bound has ended, since
        they were last set to 0.
        """
        numbers: dict[str, int] = vars(self._counts).setdefault("numbers", dict.fromkeys(COUNTED, 0))
        return numbers

    @property
    def run_beside(self) -> bool:
        """Whether tools and environments run beside each other: all of them are async, or in another process."""
        resets = [pool[0].reset for pool in self.pools.values()]
        return self.process is not None or all(map(background.is_async, [*self.all_tools(), *resets]))

    def set_tools(self, tools: Sequence[Callable[..., Any]] | None) -> None:
        """Give every completion from the next one on these tools, beside those of its environment."""
        here = [tool if self.process is None else self.process.tool(tool) for tool in tools or ()]
        self.tools = {tool.__name__: tool for tool in here}
        for tool in self.tools.values():
            schema_of(tool)

    def __getitem__(self, place: int) -> Any:
        """An environment that was made, the first of each kind at first."""
        return [one for pool in self.pools.values() for one in pool][place]

    def begin(self, samples: Sequence[Sample]) -> list[Sample]:
        """`samples`, each with a reset environment, and the output of ``reset()`` added to its prompt."""
        if not self.overlaps:
            self._busy.clear()
        found = []
        for sample in samples if self.factories else ():
            name = sample.row.get("environment") if self.by_name else None
            if name not in self.pools:
                raise DataError(
                    f"A row has environment={name!r}, which is not among the environments ("
                    f"{', '.join(map(str, self.pools))}){did_you_mean(str(name), map(str, self.pools)) or '.'}"
                )
            environment = self._free(name)
            row = {key: value for key, value in sample.row.items() if not (self.by_name and key == "environment")}
            prompt = _with_observation(sample.prompt, _reset(environment, row), type(environment).__name__)
            found.append(replace(sample, prompt=prompt, environment=environment))
        return found or list(samples)

    def _free(self, name: Any) -> Any:
        """An environment that no other completion has."""
        with self._lock:
            found = next((one for one in self.pools[name] if id(one) not in self._busy), None)
            if found is None:
                found = self.factories[name]()
                self.pools[name].append(found)
            self._busy.add(id(found))
        return found

    def give_back(self, samples: Sequence[Sample]) -> None:
        """Let others have the environments of `samples`, which are scored."""
        with self._lock:
            self._busy.difference_update(id(sample.environment) for sample in samples)

    def check(self, codec: PromptCodec, row: Mapping[str, Any] | None = None) -> set[int]:
        """Test the chat template with every tool before sampling. Returns the tokens that end a turn with calls. Raises
        ValueError where the template does not support tools, see `ToolProtocol`, or `row`, the first of the dataset,
        has no conversation.
        """
        everyone = [Sample({}, None, [], environment=pool[0]) for pool in self.pools.values()] or [Sample({}, None, [])]
        tried = [codec.protocol(schemas) for schemas in map(self.schemas_of, everyone) if schemas]
        if tried:
            _require_messages(dict(row or {}).get("prompt"))
        return {token for protocol in tried for token in protocol.end_ids}

    def check_prompt(self, sample: Sample, schemas: Sequence[dict[str, Any]], codec: PromptCodec) -> None:
        """Raise DataError where the prompt is a text, or neither the template nor the prompt names the tools."""
        if not schemas:
            return
        _require_messages(sample.prompt)
        if not codec.protocol(schemas).describes and not names_all(codec.tokenizer.decode(sample.prompt_ids), schemas):
            raise DataError(
                "The chat template does not describe the tools to the model, and the prompt does not name all of "
                "them. Describe them in a message of the role 'system', or set chat_template_path to a template that "
                "shows tools."
            )

    def tools_of(self, sample: Sample) -> dict[str, Callable[..., Any]]:
        """The tools of one sample, by name."""
        if sample.environment is None:
            return self.tools
        kind = type(sample.environment)
        names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
        return self.tools | {name: getattr(sample.environment, name) for name in names if name not in NOT_TOOLS}

    def all_tools(self) -> list[Callable[..., Any]]:
        """The tools for all, and those of every kind of environment."""
        found = dict(self.tools)
        for pool in self.pools.values():
            found |= self.tools_of(Sample({}, None, [], environment=pool[0]))
        return list(found.values())

    def schemas_of(self, sample: Sample) -> list[dict[str, Any]]:
        """The description of one sample's tools in the chat template."""
        return [schema_of(getattr(tool, "__func__", tool)) for tool in self.tools_of(sample).values()]

    def answers(
        self, sample: Sample, calls: Sequence[Call], example: str = ""
    ) -> Generator[list[Any], list[Any], list[dict[str, Any]]]:
        """Make the calls of one turn, in their order: the messages of their tools. Plain functions run in the thread
        that goes on with this generator. It yields awaitables of async ones, which run side by side where they follow
        each other, and of those in another process; and is sent their results. `example` shows how a call is written,
        for one that could not be read.
        """
        tools, results = self.tools_of(sample), []
        for is_async, some in groupby(calls, lambda call: background.is_async(tools.get(call.name, len))):
            for part in [[*some]] if is_async else [[call] for call in some]:
                made = [_begin(tools, call, sample.name, example) for call in part]
                if waiting := [result for result in made if inspect.isawaitable(result)]:
                    done = iter((yield waiting))
                    made = [next(done) if inspect.isawaitable(result) else result for result in made]
                results += made
        self.counts["calls"] += len(calls)
        self.counts["failures"] += sum(failed for _, failed in results)
        return [_message(call, text) for call, (text, _) in zip(calls, results, strict=True)]

    def converse(
        self,
        samples: Sequence[Sample],
        codec: PromptCodec,
        open_turns: Opening,
        sampling: Sampling,
        context: int | None = None,
        ended: Callable[[int, Sample], None] | None = None,
    ) -> list[Sample]:
        """`samples` after the turns of the policy and of its tools, until it calls no tool or reaches the length limit
        of `sampling`, which counts answers of tools too, or the `context` of the model; an answer that does not fit is
        left out. Each conversation goes on as soon as its own turn or tools have ended, and `ended` is called in this
        thread with its place and its sample. Plain tools run in this thread, one at a time, so the engine waits for
        them unless it is in another process; async ones run while it writes.
        """
        found = list(samples)
        going = {place: self._conversation(sample, codec, sampling, context) for place, sample in enumerate(samples)}
        asked: SimpleQueue[Any] = SimpleQueue()
        running: dict[int, Future[Any]] = {}

        def go_on(place: int, value: Any) -> None:
            try:
                wanted = going[place].send(value)
            except StopIteration as end:
                found[place] = end.value
                del going[place]
                if ended is not None:
                    ended(place, end.value)
                if not going:
                    asked.put(None)
                return
            if isinstance(wanted, list):
                running[place] = tools = background.begin(wanted)
                tools.add_done_callback(lambda _: asked.put(lambda: go_on(place, running.pop(place).result())))
            else:
                asked.put((place, place, *wanted))

        try:
            for place in range(len(samples)):
                go_on(place, None)
            serve(asked, open_turns, go_on)
        finally:  # where one has failed, the tools of the others end too
            for tools in running.values():
                tools.cancel()
        return found

    def _conversation(
        self, sample: Sample, codec: PromptCodec, sampling: Sampling, context: int | None
    ) -> Generator[Any, Any, Sample]:
        """One conversation: yields turns to write, ``(sample with its prompt, sampling)``, and awaitables of tools."""
        most, began = sampling.max_new_tokens, time.monotonic()
        turn = yield sample, replace(sampling, max_new_tokens=room_for(sample, most, context))
        sample, schemas, turns = replace(turn, learn=[True] * len(turn.ids)), self.schemas_of(sample), 0
        written = sample.ids
        while schemas and sample.finished and room_left(sample, most, context) > 0:
            protocol = codec.protocol(schemas)
            if not (calls := protocol.read(written, schemas, sample.prompt_ids).calls):
                break
            if turns == self.max_turns:
                return self._cut(sample, "turns")
            if self.seconds is not None and time.monotonic() - began > self.seconds:
                return self._cut(sample, "seconds")
            answers = yield from self.answers(sample, calls, protocol.example)
            ids = codec.next_ids(sample.ids, answers, schemas)
            if len(ids) >= (room := room_left(sample, most, context)):
                return self._cut(sample, "tokens")
            sample = replace(sample, completion=[*sample.completion, *answers])
            sample, room, turns = sample.extended(ids, [0.0] * len(ids), chosen=False), room - len(ids), turns + 1
            asking = replace(
                sample, prompt_ids=sample.prompt_ids + sample.ids, ids=[], learn=None, seed=mix(sample.seed, turns)
            )
            turn = yield asking, replace(sampling, max_new_tokens=room)
            sample, written = _joined(sample, turn), turn.ids
        return sample

    def _cut(self, sample: Sample, why: str) -> Sample:
        """`sample`, whose last calls a bound has left without answers."""
        self.counts[why] += 1
        return replace(sample, ending=why)


def _joined(sample: Sample, turn: Sample) -> Sample:
    """`sample` with its next `turn` behind it."""
    return replace(
        sample.extended(turn.ids, turn.logps, chosen=True, versions=turn.versions, routes=turn.routes),
        finished=turn.finished,
        is_exact=sample.is_exact and turn.is_exact,
        completion=[*sample.completion, *turn.completion],
    )


def _reset(environment: Any, row: dict[str, Any]) -> Any:
    """What its ``reset(**row)`` returns; a RuntimeError where it could not reach something, as a ConnectionError is the
    engine's.
    """
    what = f"{type(environment).__name__}.reset() for the row {reprlib.repr(row)}"
    try:
        return background.call(partial(environment.reset, **copied(row)), None, what, "The rollout waits for it.")
    except ConnectionError as error:
        raise RuntimeError(
            f"{type(environment).__name__}.reset() has failed: {type(error).__name__}: {error}. If it asks another "
            "process, see that it runs, and resume the run from its last checkpoint."
        ) from error


@functools.cache
def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a tool, from its type hints and docstring; a TypeError where they are incomplete."""
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:
        raise TypeError(
            f"The tool {tool.__name__!r} cannot be described to the model: {str(error).rstrip('!')}. A tool has a "
            "type hint for each argument, and a docstring with a section 'Args:' that describes each."
        ) from error


def _begin(tools: Mapping[str, Callable[..., Any]], call: Call, trajectory: str, example: str) -> Any:
    """The result of a call: (text, whether it failed), or an awaitable of it."""
    if call.arguments is None:
        return f"error: this call cannot be read{f'; a call is written {example}' if example else ''}", True
    if call.name not in tools:
        near = did_you_mean(call.name, tools)
        return f"error: there is no tool {call.name!r}{near}; there are {', '.join(tools)}", True
    tool = tools[call.name]
    if background.is_async(tool):
        return _finish(call, tool, trajectory)
    if is_remote(tool):  # it waits in another thread, and this one goes on
        return _finish(call, partial(background.awaited, tool), trajectory)
    try:
        with _naming_slow(call, trajectory):
            result = tool(**call.arguments)
    except (Exception, SystemExit) as error:  # of code that the policy wrote, perhaps
        return _failure(error)
    return _as_text(call.name, result), False


def _naming_slow(call: Call, trajectory: str) -> contextlib.AbstractContextManager[None]:
    what = f"The tool {call.name!r}, which trajectory {trajectory} has called with {reprlib.repr(call.arguments)},"
    remedy = "The rollout waits for it: give what it waits for a time limit of its own, and return a text after that."
    return background.naming_slow(what, remedy)


async def _finish(call: Call, tool: Callable[..., Awaitable[Any]], trajectory: str) -> tuple[str, bool]:
    try:
        with _naming_slow(call, trajectory):
            result = await background.outcome(tool(**(call.arguments or {})))
    except Exception as error:
        return _failure(error)
    return _as_text(call.name, result), False


def _as_text(name: str, result: Any) -> str:
    """What a tool returned, as the policy reads it: of parts of a message, their texts. Raises TypeError where it shows
    an image, or an object of which a text would say its address alone.
    """
    if isinstance(result, list) and result and all(isinstance(part, Mapping) and "text" in part for part in result):
        if all(part.get("type") == "text" for part in result):
            return "".join(part["text"] for part in result)
    if not _is_readable(result):
        raise TypeError(
            f"The tool {name!r} returned {reprlib.repr(result)}, which is no text: the policy reads texts of its "
            "tools, and images in prompts alone. Return a text that describes it, or show the image in the prompt, "
            "in a column 'images' or from reset() of an environment."
        )
    return str(result)


def _is_readable(value: Any) -> bool:
    if isinstance(value, Mapping):  # a part of a message names its image after its type
        shows = value.get("type") in (*IMAGE_PARTS, "video") and value["type"] in value
        return not shows and all(map(_is_readable, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_readable, value))
    kind = type(value)
    return not kind.__module__.startswith("PIL.") and (kind.__repr__, kind.__str__) != (object.__repr__, object.__str__)


def _failure(error: BaseException) -> tuple[str, bool]:
    """The message to the policy about an error of a tool or in its arguments."""
    if problem := _of_threads(error):
        raise RuntimeError(
            f"A tool failed because of the thread that it runs in, not because of the policy: {problem}. Async tools "
            "run on an event loop in a separate thread, plain ones in the main thread, or with max_staleness above 0 "
            "in the thread that samples. Make the tool a plain function, or create its resources inside it."
        ) from error
    return f"error: {type(error).__name__}: {error}", True


def _of_threads(error: BaseException) -> str | None:
    signs = {
        sqlite3.ProgrammingError: ("same thread",),
        ValueError: ("signal only works in main thread",),
        RuntimeError: ("no current event loop", "attached to a different loop", "bound to a different event loop"),
    }
    text = str(error)
    found = any(isinstance(error, kind) and any(sign in text for sign in some) for kind, some in signs.items())
    return f"{type(error).__name__}: {text}" if found else None


def _message(call: Call, text: str) -> dict[str, Any]:
    message = {"role": "tool", "name": call.name, "content": text}
    return message if call.id is None else message | {"tool_call_id": call.id}


def _require_messages(prompt: Any) -> None:
    if isinstance(prompt, str):
        raise DataError(
            "Tools are called in conversations, and the prompt is a text. Give prompts as lists of messages, "
            '[{"role": "user", "content": ...}].'
        )


def _with_observation(prompt: Any, observation: Any, kind: str) -> Any:
    """A prompt with the output of an environment's ``reset()`` appended."""
    if not isinstance(observation, (str, list, type(None))):
        raise TypeError(
            f"reset() of {kind} returned a {type(observation).__name__}; return a text, a list of parts of content, or "
            "nothing."
        )
    if prompt is None:
        if observation is None:
            _warn_of_no_question(kind)
        return [{"role": "user", "content": "" if observation is None else observation}]
    if observation is None:
        return prompt
    if isinstance(prompt, str):
        return prompt + (
            observation if isinstance(observation, str) else "".join(part.get("text", "") for part in observation)
        )
    before = prompt[-1]["content"] or ""
    if isinstance(before, list) != isinstance(observation, list):
        before, observation = (
            part if isinstance(part, list) else [{"type": "text", "text": part}] for part in (before, observation)
        )
    return [*prompt[:-1], {**prompt[-1], "content": before + observation}]


@functools.cache
def _warn_of_no_question(kind: str) -> None:
    logger.warning(
        "A row has no prompt and reset() of %s returned nothing: the prompt is empty apart from the tools. Return a "
        "text from reset(), or give the rows a column 'prompt'.",
        kind,
    )


def _reward_of(kind: type[Any]) -> Callable[..., list[Any]]:
    def get_reward(environments: list[Any]) -> list[Any]:
        return [background.call(one.get_reward) if type(one) is kind else None for one in environments]

    get_reward.__name__ = kind.__name__
    return get_reward
