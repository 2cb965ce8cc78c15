"""Environments, tasks and checkers of other projects as arguments of an online trainer, in one line.

    GRPOTrainer("Qwen/Qwen3-0.6B", args=args, **reasoning_gym("leg_counting", size=500))
    GRPOTrainer("Qwen/Qwen3-0.6B", args=args, **verifiers("gsm8k-v1"))
    GRPOTrainer("Qwen/Qwen3-0.6B", args=args, **openenv("http://localhost:8000", EchoAction))

Each function imports its package when it is called: ``pip install "posttrain-rl[environments]"``.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.core.errors import require
from posttrain.rl.rewards import background
from posttrain.rl.rewards.functions import final_answer, text_of

EXTRA = "posttrain-rl[environments]"


def reasoning_gym(task: str, size: int = 500, seed: int = 0, system_prompt: str | None = None, **options: Any) -> dict:
    """A task of reasoning-gym (https://github.com/open-thought/reasoning-gym) with its own checker.

    Args:
        task: its name, such as "leg_counting". size: prompts. options: of the task.
        system_prompt: goes before each question.

    Returns:
        ``train_dataset`` and ``reward_funcs``. A reward is between 0 and 1: that of the answer in ``<answer>``, or the
        one that `posttrain.rl.rewards.functions.final_answer` finds, or of the whole text, whichever is best.
    """
    gym = require("reasoning_gym", EXTRA, "reasoning_gym()")
    tasks = gym.create_dataset(task, size=size, seed=seed, **options)
    before = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    entries = [dict(entry) for entry in tasks]
    rows = [
        {"prompt": [*before, {"role": "user", "content": entry["question"]}], "entry": number}
        for number, entry in enumerate(entries)
    ]

    def reasoning_gym_reward(completions: Sequence[Any], entry: Sequence[int]) -> list[float]:
        def best(completion: Any, number: int) -> float:
            text = text_of(completion)
            tagged = text.rpartition("<answer>")[2].partition("</answer>")[0] if "<answer>" in text else None
            found = [tagged, final_answer(text), text]
            return max(float(tasks.score_answer(one.strip(), entries[number])) for one in found if one is not None)

        return [best(completion, number) for completion, number in zip(completions, entry, strict=True)]

    return {"train_dataset": rows, "reward_funcs": [reasoning_gym_reward]}


def verifiers(taskset: Any, num_tasks: int | None = None) -> dict:
    """A taskset of verifiers 0.4 (https://github.com/PrimeIntellect-ai/verifiers) whose tasks are one question each.

    Args:
        taskset: the id of an installed one, or a `verifiers.v1.Taskset`. num_tasks: at most; None: all.

    Returns:
        ``train_dataset`` and ``reward_funcs``: the sum of the task's own weighted rewards.

    Raises:
        ValueError: a task needs a container or tool servers, or the taskset never ends.
    """
    vf = require("verifiers.v1", EXTRA, "verifiers()")
    if isinstance(taskset, str):
        from verifiers.v1.utils.loaders import taskset_class

        kind = taskset_class(taskset)
        config = next((hint for hint in _type_arguments(kind) if issubclass(hint, vf.TasksetConfig)), vf.TasksetConfig)
        taskset = kind(config(id=taskset))
    if num_tasks is None and not taskset.bounded:
        raise ValueError(f"{type(taskset).__name__} has no end; set num_tasks.")
    tasks = list(itertools.islice(taskset, num_tasks))
    for task in tasks[:1]:
        if task.NEEDS_CONTAINER or type(task).toolsets(task.config):
            raise ValueError(
                f"{type(task).__name__} needs a container or tool servers, which its own harness provides: train that "
                "as an agent, or pass its tools as an environment_factory."
            )

    def verifiers_reward(prompts: Sequence[Any], completions: Sequence[Any], task: Sequence[int]) -> list[float]:
        made = [_trace(vf, tasks[number], *pair) for number, *pair in zip(task, prompts, completions, strict=True)]
        background.begin([tasks[number].score(trace) for number, trace in zip(task, made, strict=True)]).result()
        return [trace.reward for trace in made]

    rows = [{"prompt": _messages_of(task.data), "task": number} for number, task in enumerate(tasks)]
    return {"train_dataset": rows, "reward_funcs": [verifiers_reward]}


def openenv(server: str | Callable[[], Any], action: type, tool: str = "step") -> dict:
    """An environment behind an OpenEnv server (https://github.com/meta-pytorch/OpenEnv) as an environment with one
    tool, which takes one action. Its reward is the sum of those of the steps.

    Args:
        server: its address, or a function that makes a client with ``reset`` and ``step``.
        action: the environment's action, a pydantic model; its fields are the arguments of the tool.
        tool: the name of the tool.

    Returns:
        ``environment_factory``.
    """
    if isinstance(server, str):
        core, address = require("openenv.core", EXTRA, "openenv()"), server

        def connect() -> Any:
            return core.GenericEnvClient(base_url=address).sync()

        server = connect
    make = server

    class OpenEnvironment:
        def __init__(self) -> None:
            self._client, self._reward, self._is_done = make(), 0.0, False

        def reset(self, **row: Any) -> str | None:
            self._reward, self._is_done = 0.0, False
            seen = _text(self._client.reset().observation)
            return seen or None

        def get_reward(self) -> float:
            return self._reward

        def _step(self, **fields: Any) -> str:
            if self._is_done:
                return "The episode is over."
            result = self._client.step(action(**fields).model_dump())
            self._reward, self._is_done = self._reward + float(result.reward or 0.0), bool(result.done)
            return _text(result.observation) + ("\nThe episode is over." if self._is_done else "")

    setattr(OpenEnvironment, tool, _tool_of(action, tool, OpenEnvironment._step))
    OpenEnvironment.__name__ = f"{action.__name__.removesuffix('Action')}Environment"
    return {"environment_factory": OpenEnvironment}


def _tool_of(action: Any, name: str, step: Callable[..., str]) -> Callable[..., str]:
    """A method whose signature and docstring are those of the fields of `action`."""
    fields = {key: field for key, field in action.model_fields.items() if key != "metadata"}

    def tool(self: Any, *given: Any, **named: Any) -> str:
        return step(self, **dict(zip(fields, given, strict=False)), **named)

    kinds = inspect.Parameter
    parameters = [kinds("self", kinds.POSITIONAL_OR_KEYWORD)]
    for key, field in fields.items():
        default = kinds.empty if field.is_required() else field.get_default(call_default_factory=True)
        parameters.append(kinds(key, kinds.POSITIONAL_OR_KEYWORD, default=default, annotation=field.annotation))
    lines = [f"    {key}: {field.description or key}" for key, field in fields.items()]
    summary = (inspect.getdoc(action) or "Take a step.").strip().splitlines()[0]
    tool.__name__ = tool.__qualname__ = name
    tool.__doc__ = "\n".join([summary, "", "Args:", *lines])
    tool.__annotations__ = {key: field.annotation for key, field in fields.items()} | {"return": str}
    tool.__signature__ = inspect.Signature(parameters, return_annotation=str)  # type: ignore[attr-defined]
    return tool


def _text(observation: Any) -> str:
    """An observation as a text: what it says, without what a server adds."""
    if hasattr(observation, "model_dump"):
        observation = observation.model_dump()
    if isinstance(observation, dict):
        observation = {
            k: v for k, v in observation.items() if k not in ("done", "reward", "metadata") and v is not None
        }
        if len(observation) == 1:
            return str(next(iter(observation.values())))
    return observation if isinstance(observation, str) else json.dumps(observation, default=str)


def _messages_of(data: Any) -> list[dict[str, Any]]:
    """The prompt of a task of verifiers."""
    before = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        return [*before, {"role": "user", "content": data.prompt}]
    return [*before, *({"role": one.role, "content": text_of([{"content": one.content}])} for one in data.prompt or [])]


def _trace(vf: Any, task: Any, prompt: Sequence[Any], completion: Sequence[Any]) -> Any:
    """What verifiers scores: a conversation of `prompt` and the `completion` of the policy."""
    kinds = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
    written = [{"role": "assistant", "content": text_of(completion)}]
    nodes = [
        vf.MessageNode(
            parent=place - 1 if place else None,
            sampled=place >= len(prompt),
            message=kinds[message["role"]](content=message["content"]),
        )
        for place, message in enumerate([*prompt, *written])
    ]
    config = vf.AgentConfig.model_construct()
    about = {"task": vf.TraceTask(type=type(task).__name__, data=task.data)}
    return vf.Trace(**about, agent=vf.AgentInfo.model_construct(config=config), nodes=nodes, ok=True, is_completed=True)


def _type_arguments(kind: type) -> list[type]:
    """The classes that the generic bases of `kind` were given."""
    bases = [base for one in kind.__mro__ for base in getattr(one, "__orig_bases__", ())]
    return [one for base in bases for one in getattr(base, "__args__", ()) if isinstance(one, type)]
