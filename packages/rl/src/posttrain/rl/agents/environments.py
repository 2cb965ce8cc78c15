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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from posttrain.core.errors import DataError, did_you_mean
from posttrain.core.models import wrapping
from posttrain.lm.images.images import IMAGE_PARTS
from posttrain.rl.rewards import background
from posttrain.rl.rewards.process import RolloutProcess
from posttrain.rl.samples.prompts import PromptCodec
from posttrain.rl.samples.samples import Sample
from posttrain.rl.tools.formats import Call
from posttrain.rl.tools.protocol import names_all

logger = logging.getLogger(__name__)

NOT_TOOLS = ("reset", "get_reward")


class Environments:
    """The tools of the policy, and an environment for each completion.

    Args:
        tools: functions, sync or async, whose type hints and docstring become their description for the model.
        factory: makes an environment, or ``{name: factory}`` for rows with a column ``environment``. An environment has
            ``reset(**row)``, which may return an addition to the prompt; its other public methods are tools;
            ``get_reward()``, if it exists, is a reward function. It is made once and reset for each completion.
        process: where tools and environments run; None: in this one.

    Attributes:
        reward_functions: one for each class of environments with a ``get_reward``.
        counts: tool calls and failed ones since the counts were last read.
        overlaps: completions begin before others are scored, which `give_back` ends. Else all are over when the next
            ones begin.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]] | None = None,
        factory: Any = None,
        max_turns: int | None = None,
        process: RolloutProcess | None = None,
    ) -> None:
        self.max_turns, self.process = max_turns, process
        self.set_tools(tools)
        self.factories = factory if isinstance(factory, Mapping) else {None: factory} if factory is not None else {}
        if process is not None:
            self.factories = {name: process.factory(make) for name, make in self.factories.items()}
        self.by_name = isinstance(factory, Mapping)
        self.pools: dict[Any, list[Any]] = {name: [make()] for name, make in self.factories.items()}
        self.counts = {"calls": 0, "failures": 0}
        self.overlaps = False
        self._busy: set[int] = set()
        self._lock = threading.Lock()
        self.reward_functions = []
        for instance in {type(pool[0]): pool[0] for pool in self.pools.values()}.values():
            if not callable(getattr(instance, "reset", None)):
                raise TypeError(f"{type(instance).__name__} has no reset(), which begins each completion.")
            if callable(getattr(instance, "get_reward", None)):
                self.reward_functions.append(_reward_of(type(instance)))

    def __bool__(self) -> bool:
        return bool(self.tools or self.factories)

    def set_tools(self, tools: Sequence[Callable[..., Any]] | None) -> None:
        """Give every completion from the next one on these tools, beside those of its environment."""
        here = [tool if self.process is None else self.process.tool(tool) for tool in tools or ()]
        self.tools = {tool.__name__: tool for tool in here}
        for tool in self.tools.values():
            schema_of(tool)

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
        """Test the chat template with every tool before sampling. Returns the tokens that end a turn with calls.

        Args:
            row: the first of the dataset, where it is known.

        Raises:
            ValueError: the template does not support tools, see `ToolProtocol`; or the row has no conversation.
        """
        everyone = [Sample({}, None, [], environment=pool[0]) for pool in self.pools.values()] or [Sample({}, None, [])]
        tried = [codec.protocol(schemas) for schemas in map(self.schemas_of, everyone) if schemas]
        if tried:
            _require_messages(dict(row or {}).get("prompt"))
        return {token for protocol in tried for token in protocol.end_ids}

    def check_prompt(self, sample: Sample, schemas: Sequence[dict[str, Any]], codec: PromptCodec) -> None:
        """Reject a prompt that does not describe the tools to the policy.

        Raises:
            DataError: the prompt is a text, or neither the template nor the prompt names the tools.
        """
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

    def answer(self, asked: Sequence[tuple[Sample, Sequence[Call]]], example: str = "") -> list[list[dict[str, Any]]]:
        """Make the calls of several samples: for each sample the messages of its tools, one for each call.

        A sample's calls are made in their order. Plain functions run in the thread that generates, as `reset` does, one
        after the other; async ones of all samples run side by side.

        Args:
            example: how a call is written, for one that could not be read.
        """
        results = _make_calls([(self.tools_of(sample), calls) for sample, calls in asked], example)
        self.counts["calls"] += sum(len(calls) for _, calls in asked)
        self.counts["failures"] += sum(failed for found in results for _, failed in found)
        return [
            [_message(call, text) for call, (text, _) in zip(calls, found, strict=True)]
            for (_, calls), found in zip(asked, results, strict=True)
        ]

    def converse(
        self,
        samples: Sequence[Sample],
        codec: PromptCodec,
        next_turn: Callable[[list[Sample], int, int], list[Sample]],
        max_tokens: int,
        context: int | None = None,
    ) -> list[Sample]:
        """`samples` after their tool calls and further turns, until they call no tool or reach the length limit.

        Args:
            next_turn: ``(samples, turn, tokens at most)`` completes samples whose `prompt_ids` hold the conversation so
                far.
            max_tokens: of a completion, tool answers included. An answer that does not fit is left out.
            context: tokens of prompt and completion that the model reads at most, see `context_length`; None: any
                number.
        """
        room_of = partial(_room, max_tokens=max_tokens, context=context)
        found = [replace(sample, learn=[True] * len(sample.ids)) for sample in samples]
        last = {place: sample.ids for place, sample in enumerate(found) if self.tools_of(sample)}  # turn of each
        turn = 0
        while last and (self.max_turns is None or turn < self.max_turns):
            turn += 1
            asking = []
            for place, ids in last.items():
                sample, schemas = found[place], self.schemas_of(found[place])
                protocol = codec.protocol(schemas)
                if sample.finished and room_of(sample) > 0:
                    if calls := protocol.read(ids, schemas, sample.prompt_ids).calls:
                        asking.append((place, calls, schemas, protocol))
            asked = [(found[place], calls) for place, calls, *_ in asking]
            answered = self.answer(asked, asking[0][3].example if asking else "")
            last = {}
            for (place, _, schemas, protocol), answers in zip(asking, answered, strict=True):
                sample = found[place]
                ids = protocol.answer_ids(sample.ids, answers, schemas)
                if len(ids) < room_of(sample):
                    sample = replace(sample, completion=[*sample.completion, *answers])
                    found[place], last[place] = sample.extended(ids, [0.0] * len(ids), chosen=False), []
            turns = _next_turns([found[place] for place in last], next_turn, turn, room_of, context)
            for place, more in zip(last, turns, strict=True):
                found[place], last[place] = _joined(found[place], more, room_of(found[place]))
        return found


def _next_turns(
    samples: list[Sample],
    next_turn: Callable[[list[Sample], int, int], list[Sample]],
    turn: int,
    room_of: Callable[[Sample], int],
    context: int | None,
) -> list[Sample]:
    """The next turn of each of `samples`, as a sample whose prompt is the conversation before it."""
    prompts = [
        Sample(s.row, s.prompt, s.prompt_ids + s.ids, environment=s.environment, seed=s.seed, shown=s.shown)
        for s in samples
    ]
    most = max(map(room_of, samples), default=0)
    return complete_in_room(prompts, most, context, lambda some, tokens: next_turn(some, turn, tokens))


def _joined(sample: Sample, turn: Sample, room: int) -> tuple[Sample, list[int]]:
    """`sample` with the tokens of its next `turn` behind it, as far as there is `room`; and these tokens."""
    ids, versions = turn.ids[:room], None if turn.versions is None else turn.versions[:room]
    logps = None if turn.logps is None else turn.logps[:room]
    joined = replace(
        sample.extended(ids, logps, chosen=True, versions=versions),
        finished=turn.finished and len(turn.ids) <= room,
        is_exact=sample.is_exact and turn.is_exact,
        completion=[*sample.completion, *turn.completion],
    )
    return joined, ids


def context_length(config: Any, engine: int | None = None) -> int | None:
    """Tokens of prompt and completion together that a model reads at most; None: its config names no limit.

    Args:
        engine: the limit of the engine that generates, where it has one of its own.
    """
    text = wrapping.text_config(config)
    limits = [getattr(text, "max_position_embeddings", None), engine]
    return min((limit for limit in limits if limit and limit > 0), default=None)


def complete_in_room(
    samples: Sequence[Sample], most: int, context: int | None, complete: Callable[[list[Sample], int], list[Sample]]
) -> list[Sample]:
    """`samples` with completions of `most` tokens, or fewer near the end of the `context`.

    Args:
        complete: ``(samples, tokens at most)``, called once for all samples with the same room.
    """
    by_room: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        limit = most if context is None else min(most, context - len(sample.prompt_ids))
        if limit < 1:
            raise DataError(
                f"A prompt has {len(sample.prompt_ids)} tokens, and the model reads at most {context} of prompt and "
                f"completion together, so there is no room for a completion. It begins: {str(sample.prompt)[:80]!r}. "
                "Drop or shorten such prompts."
            )
        by_room.setdefault(limit, []).append(place)
    found = list(samples)
    for limit, places in by_room.items():
        for place, sample in zip(places, complete([samples[place] for place in places], limit), strict=True):
            found[place] = sample
    return found


def _room(sample: Sample, max_tokens: int, context: int | None) -> int:
    """Tokens that may still be added to a completion."""
    left = max_tokens - len(sample.ids)
    return left if context is None else min(left, context - len(sample.prompt_ids) - len(sample.ids))


def _reset(environment: Any, row: Mapping[str, Any]) -> Any:
    """What its ``reset(**row)`` returns.

    Raises:
        RuntimeError: it could not reach something. The engine's errors of that kind are not those of environments.
    """
    try:
        return background.call(partial(environment.reset, **row))
    except ConnectionError as error:
        raise RuntimeError(
            f"{type(environment).__name__}.reset() has failed: {type(error).__name__}: {error}. If it asks another "
            "process, see that it runs, and resume the run from its last checkpoint."
        ) from error


@functools.cache
def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a tool, from its type hints and docstring.

    Raises:
        TypeError: they are incomplete.
    """
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:
        raise TypeError(
            f"The tool {tool.__name__!r} cannot be described to the model: {error}. A tool has a type hint for each "
            "argument, and a docstring with a section 'Args:' that describes each."
        ) from error


def _make_calls(
    asked: Sequence[tuple[Mapping[str, Callable[..., Any]], Sequence[Call]]], example: str
) -> list[list[tuple[str, bool]]]:
    """(the tool's answer, whether it failed) for each call of each sample."""
    waiting = [deque(calls) for _, calls in asked]
    results: list[list[Any]] = [[] for _ in asked]
    while any(waiting):
        running: list[tuple[list[Any], int, Any]] = []  # a position in `results` and the awaitable for it
        for (tools, _), calls, found in zip(asked, waiting, results, strict=True):
            has_begun = False
            while calls and not (has_begun and not background.is_async(tools.get(calls[0].name, len))):
                result = _begin(tools, calls.popleft(), example)
                found.append(result)
                if inspect.isawaitable(result):
                    has_begun = True
                    running.append((found, len(found) - 1, result))
        done = background.gather([result for *_, result in running]) if running else []
        for (found, place, _), result in zip(running, done, strict=True):
            found[place] = result
    return results


def _begin(tools: Mapping[str, Callable[..., Any]], call: Call, example: str) -> Any:
    """The result of a call: (text, whether it failed), or an awaitable of it."""
    if call.arguments is None:
        return f"error: this call cannot be read{f'; a call is written {example}' if example else ''}", True
    if call.name not in tools:
        near = did_you_mean(call.name, tools)
        return f"error: there is no tool {call.name!r}{near}; there are {', '.join(tools)}", True
    try:
        with _naming_slow(call.name):
            result = tools[call.name](**call.arguments)
    except Exception as error:
        return _failure(error)
    return _finish(call.name, result) if inspect.isawaitable(result) else (_as_text(call.name, result), False)


def _naming_slow(name: str) -> contextlib.AbstractContextManager[None]:
    remedy = "The rollout waits for it: give what it waits for a time limit of its own, and return a text after that."
    return background.naming_slow(f"The tool {name!r}", remedy)


async def _finish(name: str, awaitable: Any) -> tuple[str, bool]:
    try:
        with _naming_slow(name):
            result = await awaitable
    except Exception as error:
        return _failure(error)
    return _as_text(name, result), False


def _as_text(name: str, result: Any) -> str:
    """What a tool returned, as the policy reads it: of parts of a message, their texts.

    Raises:
        TypeError: it shows an image, or an object of which a text would say its address alone.
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


def _failure(error: Exception) -> tuple[str, bool]:
    """The message to the policy about an error of a tool or in its arguments."""
    if problem := _of_threads(error):
        raise RuntimeError(
            f"A tool failed because of the thread that it runs in, not because of the policy: {problem}. Async tools "
            "run on an event loop in a separate thread, plain ones in the main thread, or with max_staleness above 0 "
            "in the thread that samples. Make the tool a plain function, or create its resources inside it."
        ) from error
    return f"error: {type(error).__name__}: {error}", True


def _of_threads(error: Exception) -> str | None:
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
