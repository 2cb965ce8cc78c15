"""Completions of several turns: the policy calls tools, reads what they say, and goes on; environments that own the tools.

What a tool has written is part of the completion, and the policy does not learn from it: `Sample.learn` is False there.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from posttrain.core import chat
from posttrain.core.errors import DataError, did_you_mean
from posttrain.rl import background
from posttrain.rl.prompts import PromptCodec
from posttrain.rl.samples import Sample

TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
NOT_TOOLS = ("reset", "get_reward")


class Environments:
    """What the policy can act on: tools for all, and an environment for each completion.

    Args:
        tools: functions with type hints and a docstring, of which their description for the model is made; sync or async.
        factory: makes an environment, or ``{name: factory}`` for rows with a column ``environment``. An environment has
            ``reset(**row)``, which may return what is added to the prompt; its other public methods are tools of its own;
            ``get_reward()``, if it has one, is a reward function. It is made once and reset for each completion.

    Attributes:
        reward_functions: one for each class of environments with a ``get_reward``.
        counts: tool calls, and failures among them, since they were last taken.
    """

    def __init__(
        self, tools: Sequence[Callable[..., Any]] | None = None, factory: Any = None, max_turns: int | None = None
    ) -> None:
        self.tools, self.max_turns = {tool.__name__: tool for tool in tools or ()}, max_turns
        self.factories = factory if isinstance(factory, Mapping) else {None: factory} if factory is not None else {}
        self.by_name = isinstance(factory, Mapping)
        self.pools: dict[Any, list[Any]] = {name: [make()] for name, make in self.factories.items()}
        self.counts = {"calls": 0, "failures": 0}
        for tool in self.tools.values():
            schema_of(tool)
        self.reward_functions = []
        for instance in {type(pool[0]): pool[0] for pool in self.pools.values()}.values():
            if not callable(getattr(instance, "reset", None)):
                raise TypeError(f"{type(instance).__name__} has no reset(), which begins each completion.")
            if callable(getattr(instance, "get_reward", None)):
                self.reward_functions.append(_reward_of(type(instance)))

    def __bool__(self) -> bool:
        return bool(self.tools or self.factories)

    def begin(self, samples: Sequence[Sample]) -> None:
        """Give each sample an environment that was reset, and its prompt what that says."""
        taken = dict.fromkeys(self.pools, 0)
        for sample in samples if self.factories else ():
            name = sample.row.get("environment") if self.by_name else None
            if name not in self.pools:
                raise DataError(
                    f"A row asks for environment={name!r}{did_you_mean(str(name), map(str, self.pools))}; there are: "
                    f"{', '.join(map(str, self.pools))}."
                )
            if taken[name] == len(self.pools[name]):
                self.pools[name].append(self.factories[name]())
            sample.environment = self.pools[name][taken[name]]
            taken[name] += 1
            row = {key: value for key, value in sample.row.items() if not (self.by_name and key == "environment")}
            told = background.call(partial(sample.environment.reset, **row))
            if told is not None:
                sample.prompt = _with_observation(sample.prompt, told)

    def tools_of(self, sample: Sample) -> dict[str, Callable[..., Any]]:
        """The tools of one sample, by name."""
        if sample.environment is None:
            return self.tools
        kind = type(sample.environment)
        names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
        return self.tools | {name: getattr(sample.environment, name) for name in names if name not in NOT_TOOLS}

    def schemas_of(self, sample: Sample) -> list[dict[str, Any]]:
        """What the chat template tells the model of the tools of one sample."""
        return [schema_of(getattr(tool, "__func__", tool)) for tool in self.tools_of(sample).values()]

    def answer(self, sample: Sample) -> list[dict[str, Any]]:
        """Do what the last message of `sample` asks tools for: a message for each call; none where it asks for nothing."""
        calls, tools = tool_calls(sample.completion[-1]), self.tools_of(sample)
        results = background.gather([_call(tools, name, arguments) for name, arguments in calls])
        self.counts["calls"] += len(calls)
        self.counts["failures"] += sum(failed for _, failed in results)
        return [
            {"role": "tool", "name": name, "content": text} for (name, _), (text, _) in zip(calls, results, strict=True)
        ]

    def converse(
        self,
        samples: Sequence[Sample],
        codec: PromptCodec,
        go_on: Callable[[list[Sample], int, int], None],
        max_tokens: int,
    ) -> None:
        """Let `samples`, whose first turn is written, call tools and go on until they ask for none, or are full.

        Args:
            go_on: ``(samples, turn, tokens at most)``: completes samples whose `prompt_ids` are all that was said so far.
            max_tokens: of a completion, what tools write included. An answer that does not fit is left out.
        """
        for sample in samples:
            sample.learn = [True] * len(sample.ids)
        active, turn = list(samples), 0
        while active and (self.max_turns is None or turn < self.max_turns):
            turn += 1
            asking = [sample for sample in active if sample.finished and len(sample.ids) < max_tokens]
            active = []
            for sample in asking:
                answers = self.answer(sample)
                written = suffix_ids(codec, sample, answers, self.schemas_of(sample)) if answers else []
                if not answers or len(sample.ids) + len(written) >= max_tokens:
                    continue
                sample.completion = [*sample.completion, *answers]
                sample.ids += written
                sample.learn += [False] * len(written)
                if sample.logps is not None:
                    sample.logps += [0.0] * len(written)
                active.append(sample)
            self._go_on(active, go_on, turn, max_tokens)

    def _go_on(
        self, samples: list[Sample], go_on: Callable[[list[Sample], int, int], None], turn: int, max_tokens: int
    ) -> None:
        if not samples:
            return
        turns = [Sample(s.row, s.prompt, s.prompt_ids + s.ids, seed=s.seed) for s in samples]
        go_on(turns, turn, max(max_tokens - len(sample.ids) for sample in samples))
        for sample, more in zip(samples, turns, strict=True):
            room = max_tokens - len(sample.ids)
            sample.finished = more.finished and len(more.ids) <= room
            sample.ids += more.ids[:room]
            sample.learn += [True] * len(more.ids[:room])
            sample.logps = None if None in (sample.logps, more.logps) else sample.logps + more.logps[:room]
            sample.is_exact &= more.is_exact
            sample.completion = [*sample.completion, *more.completion]


@functools.cache
def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """The description of a tool, of its type hints and its docstring.

    Raises:
        TypeError: what they lack.
    """
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:
        raise TypeError(
            f"The tool {tool.__name__!r} cannot be described to the model: {error}. A tool has a type hint for each argument, and "
            "a docstring with a section 'Args:' that says what each is."
        ) from error


def tool_calls(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(name, arguments) of each call in a message of the assistant: of its ``tool_calls``, or of ``<tool_call>{...}</tool_call>``
    in its text. What cannot be read has the arguments None."""
    calls = message.get("tool_calls")
    if calls is None:
        calls = [_read_call(text) for text in TOOL_CALL.findall(chat_text(message))]
    functions = [call.get("function", call) for call in calls]
    return [(str(function.get("name")), function.get("arguments")) for function in functions]


def chat_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _read_call(text: str) -> dict[str, Any]:
    try:
        call = json.loads(text)
    except json.JSONDecodeError:
        call = None
    return call if isinstance(call, dict) else {"name": "unreadable", "arguments": None}


async def _call(tools: Mapping[str, Callable[..., Any]], name: str, arguments: Any) -> tuple[str, bool]:
    """(what the tool said, whether it failed). A call that cannot be made is answered with what is wrong."""
    if arguments is None:
        return 'error: a call is {"name": ..., "arguments": {...}} in JSON', True
    if name not in tools:
        return f"error: there is no tool {name!r}{did_you_mean(name, tools)}; there are {', '.join(tools)}", True
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        result = tools[name](**arguments)
        return str(await result if inspect.isawaitable(result) else result), False
    except Exception as error:  # of a tool of the user's, or of what the policy has given it: the policy is to see it
        return f"error: {type(error).__name__}: {error}", True


def suffix_ids(
    codec: PromptCodec, sample: Sample, answers: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> list[int]:
    """The tokens that the chat template puts between the policy's turn and its next one: the answers of tools.

    Raises:
        DataError: the template shows nothing of them.
    """
    tokenizer, template = codec.tokenizer, codec.template(tools)
    calls = [{"type": "function", "function": {"name": answer["name"], "arguments": {}}} for answer in answers]
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": chat.PLACEHOLDER, "tool_calls": calls}]
    before, after = template.render(said), template.render([*said, *answers], add_generation_prompt=True)
    if not after.startswith(before) or answers[0]["content"] not in after[len(before) :]:
        raise DataError(
            "The chat template does not render what tools say after the assistant's turn. Use a template that knows the role "
            "'tool', or leave tools out."
        )
    last = tokenizer.decode(sample.ids[-1:])
    ending = before[before.rfind(chat.PLACEHOLDER) + len(chat.PLACEHOLDER) :]
    end = template.turn_ending().strip()
    place = ending.rfind(last if last and last in ending else end)
    if last and last in ending:
        ending = ending[place + len(last) :]  # the policy has written the token that ends its turn
    elif place >= 0:
        ending = ending[place:]
    return chat.encode_texts(tokenizer, [ending + after[len(before) :]])[0].ids


def _with_observation(prompt: Any, told: Any) -> Any:
    if prompt is None:
        return [{"role": "user", "content": told}]
    if isinstance(prompt, str):
        return prompt + str(told)
    return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + told}]


def _reward_of(kind: type) -> Callable[..., list[Any]]:
    def get_reward(environments: list[Any]) -> list[Any]:
        return [background.call(one.get_reward) if type(one) is kind else None for one in environments]

    get_reward.__name__ = kind.__name__
    return get_reward


def take_rollout(samples: Sequence[Sample], output: Mapping[str, Any], codec: PromptCodec) -> None:
    """Put what a ``rollout_func`` returned into `samples`.

    Args:
        output: ``prompt_ids``, ``completion_ids`` and ``logprobs``, one of each for each sample; ``env_mask``, 0 at tokens that
            the policy did not choose; whatever else it holds is for the reward functions.

    Raises:
        ValueError: something is missing, or of another length.
    """
    needed = ("prompt_ids", "completion_ids", "logprobs")
    if missing := [name for name in needed if name not in output]:
        raise ValueError(f"rollout_func must return {', '.join(needed)} in its dict; {', '.join(missing)} is missing.")
    others = {name: value for name, value in output.items() if name not in (*needed, "env_mask", "completions")}
    for name in (*needed[:2], *(["env_mask"] if output.get("env_mask") is not None else [])):
        if len(output[name]) != len(samples):
            raise ValueError(
                f"rollout_func returned {len(output[name])} of {name} for {len(samples)} prompts; one for each is needed "
                "(a prompt comes num_generations times)."
            )
    for i, sample in enumerate(samples):
        sample.prompt_ids, sample.ids = list(output["prompt_ids"][i]), list(output["completion_ids"][i])
        if not sample.prompt_ids or not sample.ids:
            raise ValueError(
                f"rollout_func returned no tokens for prompt {i}; a prompt and a completion have at least one."
            )
        sample.logps = None if output["logprobs"] is None else _plain_logps(output["logprobs"][i])
        sample.learn = None if output.get("env_mask") is None else [bool(m) for m in output["env_mask"][i]]
        sample.completion = codec.decode(sample.prompt, sample.ids)
        sample.finished = sample.ids[-1] in {codec.tokenizer.eos_token_id, codec.tokenizer.pad_token_id}
        for name, values in others.items():
            sample.extra[name] = values[i] if isinstance(values, list) and i < len(values) else values


def _plain_logps(values: Any) -> list[float]:
    first = [value[0] if isinstance(value, (list, tuple)) else value for value in values]  # top-k lists, best first
    return [float("nan") if value is None else float(value) for value in first]
