"""Scores completions with reward functions and reward models, with time limits and checks."""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from posttrain.core.config import opt
from posttrain.core.errors import DataError, did_you_mean
from posttrain.rl.losses.advantages import total_rewards
from posttrain.rl.losses.credit import TurnRewards
from posttrain.rl.rewards import background
from posttrain.rl.rewards.process import is_remote
from posttrain.rl.samples.samples import Sample

logger = logging.getLogger(__name__)

RESERVED = {"prompt", "completion", "completions", "completion_ids", "prompts"}
"""Columns that reward functions get by other names, or from elsewhere."""
PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "environments", "log_metric", "log_extra")
"""What they get beside the columns of the rows."""


class RewardError(RuntimeError):
    """A reward function failed, or gave something that is no reward. The message shows a prompt and its completion."""


@dataclass
class RewardArguments:
    """How completions are scored."""

    reward_funcs: list[str] | None = opt(
        None,
        "Reward functions by name, for the command line: those of posttrain.rl.rewards, 'module:function' or "
        "'module.function', also of a file in the current folder, and reward models.",
    )
    reward_model_name_or_path: str | None = opt(
        None, "A reward model by name, for the command line; it is scored with before `reward_funcs`."
    )
    reward_weights: list[float] | None = opt(None, "Weight of each reward function in the sum; None: 1 each.")
    reward_on_error: str = opt(
        "raise",
        "When a reward function fails, is too slow or gives NaN: raise stops the run, value scores those "
        "completions `reward_error_value`, mask leaves the function out for them.",
        choices=("raise", "value", "mask"),
    )
    reward_error_value: float = opt(
        0.0, "Reward of a completion whose scoring failed, with reward_on_error='value'.", needs="reward_on_error=value"
    )
    reward_timeout: float | None = opt(
        600.0, "Time limit in seconds of one call of a reward function; None: no limit.", above=0
    )
    reward_on_none: str = opt(
        "skip",
        "If no reward function returns a reward for any completion of a rollout: skip logs it and trains on "
        "nothing, raise stops the run.",
        choices=("skip", "raise"),
    )
    reward_concurrency: int = opt(
        1,
        "Reward functions that run at the same time, in threads; async ones always run side by side. Above 1, a group "
        "of completions with tools, or of an agent, is scored when its last one has ended, while others are written. "
        "With max_staleness above 0, also the rollouts that are scored at the same time.",
        min=1,
    )


@dataclass(frozen=True)
class Scores:
    """What the reward functions made of N completions.

    Attributes:
        rewards: (N, F) float32 on the CPU; NaN where a function does not apply, or failed and is masked.
        failed: (N, F) bool, where a function failed.
        seconds: of each function.
        metrics: ``{name: values}`` that functions gave to ``log_metric``.
        columns: ``{name: N values}`` that functions gave to ``log_extra``, for the table of completions.
        turns: of each completion, what functions gave its turns, by the place of the function.
        names: of the functions. weights: (F,) of the functions; None: 1 each.
    """

    rewards: torch.Tensor
    failed: torch.Tensor
    seconds: list[float]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    turns: list[dict[int, TurnRewards]] = field(default_factory=list)
    names: Sequence[str] = ()
    weights: torch.Tensor | None = None

    @property
    def totals(self) -> torch.Tensor:
        """(N,) the weighted sum over the functions; NaN where none applied."""
        return total_rewards(self.rewards, self.weights)


class Rewards:
    """Several reward functions as one.

    Args:
        functions: ``function(...) -> one number a completion``, or a list of one number a turn, or `TurnRewards`; None
            for completions and turns that it does not apply to. It is called with those of these that its
            signature names: ``prompts``, ``completions``, ``completion_ids``, every column of the dataset as a list,
            ``trainer_state``, ``log_metric(name, value)``, ``log_extra(column, values)``.
        options: the policy on errors and the limits.
        from_environments: how many functions at the end are environments' own. Weights may leave them out: they count
            1.

    Attributes:
        groups: the scores of the next samples to score, of which groups are scored already; None: none is.
    """

    groups: GroupScores | None = None

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        options: RewardArguments | None = None,
        from_environments: int = 0,
    ) -> None:
        self.functions, self.options = list(functions), options or RewardArguments()
        names = [background.name_of(function) for function in self.functions]
        # Those that stand there several times have their places behind them, and so metrics of their own.
        self.names = [f"{name}_{place}" if names.count(name) > 1 else name for place, name in enumerate(names)]
        self._waits = [background.is_async(function) for function in self.functions]
        timeout = self.options.reward_timeout  # functions of the rollout process have their own
        self._limits = [None if is_remote(function) else timeout for function in self.functions]
        weights = self.options.reward_weights
        if weights is not None and len(weights) == len(self.functions) - from_environments:
            weights = [*weights, *[1.0] * from_environments]
        if weights is not None and len(weights) != len(self.functions):
            raise ValueError(
                f"reward_weights has {len(weights)} numbers and there are {len(self.functions)} reward functions "
                f"({', '.join(self.names)}). Give one for each; rewards of environments may be left out."
            )
        self.weights = torch.tensor(weights or [1.0] * len(self.functions), dtype=torch.float32)
        self._told: set[str] = set()

    def of(self, samples: Sequence[Sample], trainer_state: Any = None) -> Scores:
        """Score N completed samples; columns are those of their rows, and what a ``rollout_func`` returned.

        Raises:
            RewardError: a function failed and ``reward_on_error`` is "raise", or no function applied to any completion
                and ``reward_on_none`` is "raise".
        """
        groups, self.groups = self.groups, None
        scores = None if groups is None else groups.of(samples)
        scores = self.of_part(samples, trainer_state) if scores is None else scores
        if self.functions and (unknown := scores.rewards.isnan().all(1)).any():
            self._report_nothing(unknown, samples)
        return scores

    def of_part(self, samples: Sequence[Sample], trainer_state: Any) -> Scores:
        """As `of`, of some of the samples that are learned from together."""
        names = {name for sample in samples for name in (*sample.row, *sample.extra)} - RESERVED
        metrics: dict[str, list[float]] = {}
        table: dict[str, list[Any]] = {}
        given = {
            "trainer_state": trainer_state,
            "environments": [sample.environment for sample in samples],
            "log_metric": lambda name, value: metrics.setdefault(name, []).append(float(value)),
            "log_extra": lambda column, values: table.update({column: list(values)}),
            **{name: [sample.extra.get(name, sample.row.get(name)) for sample in samples] for name in sorted(names)},
            "prompts": [sample.prompt for sample in samples],
            "completions": [sample.completion for sample in samples],
            "completion_ids": [sample.ids for sample in samples],
        }
        calls = [partial(self._score, number, samples, given) for number in range(len(self.functions))]
        threads = self.options.reward_concurrency > 1 or any(self._waits)
        # Otherwise here, in the main thread, where signals and the debugger work.
        found = self._run_in_threads(calls) if threads else [call() for call in calls]
        shape = len(calls), len(samples)
        rewards = torch.tensor([values for values, *_ in found], dtype=torch.float32).view(shape).t()
        failed = torch.tensor([marks for _, marks, *_ in found], dtype=torch.bool).view(shape).t()
        seconds, turns = [seconds for _, _, seconds, _ in found], [turns for *_, turns in found]
        of_each = [{f: own[i] for f, own in enumerate(turns) if i in own} for i in range(len(samples))]
        kept = self.names, self.weights
        return Scores(rewards.contiguous(), failed.contiguous(), seconds, metrics, table, of_each, *kept)

    def _run_in_threads(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """The result of each call: async ones side by side, and `reward_concurrency` of the others at a time."""
        at_once, waits = self.options.reward_concurrency, self._waits
        pool_of = partial(ThreadPoolExecutor, initializer=background.keep_device())
        with pool_of(max(sum(waits), 1)) as waiting, pool_of(at_once) as working:
            pools = [waiting if wait else working if at_once > 1 else None for wait in waits]
            begun = [None if pool is None else pool.submit(call) for pool, call in zip(pools, calls, strict=True)]
            return [call() if one is None else one.result() for one, call in zip(begun, calls, strict=True)]

    def _score(
        self, number: int, samples: Sequence[Sample], given: Mapping[str, Any]
    ) -> tuple[list[float], list[bool], float, dict[int, TurnRewards]]:
        """(rewards, which failed, seconds, rewards of turns by completions) of one function."""
        name, size, started = self.names[number], len(samples), time.perf_counter()
        arguments = asked_for(self.functions[number], name, given)
        turns: dict[int, TurnRewards] = {}
        cause: Exception | None = None
        try:
            values, turns = with_totals(self._call(number, arguments, size), samples)
            failed = [value is not None and not math.isfinite(value) for value in values]
            wrong = sorted({repr(value) for value, bad in zip(values, failed, strict=True) if bad})
            problem = f"returned {' and '.join(wrong)} for {sum(failed)} of {size} completions"
        except Exception as error:
            cause, values, failed = error, [None] * size, [True] * size
            problem = f"failed on {size} completions: {type(error).__name__}: {error}"
            if isinstance(error, TimeoutError):
                problem += ". Mend it, or set reward_timeout to more seconds, or to None for no limit"
        if any(failed):
            self._report_failure(name, problem, samples[failed.index(True)], cause)
        instead = self.options.reward_error_value if self.options.reward_on_error == "value" else math.nan
        rewards = [
            instead if bad else math.nan if value is None else value for value, bad in zip(values, failed, strict=True)
        ]
        turns = {place: given for place, given in turns.items() if not failed[place]}
        return rewards, failed, time.perf_counter() - started, turns

    def _call(self, number: int, arguments: dict[str, Any], size: int) -> list[Any]:
        """What a function returned, `size` numbers, Nones or rewards of turns."""
        # Lists of their own, so that a function that changes them changes nothing here.
        own = {key: list(value) if isinstance(value, list) else value for key, value in arguments.items()}
        slow = f"The reward function {self.names[number]!r}", f"reward_timeout={self.options.reward_timeout} bounds it."
        returned = background.call(partial(self.functions[number], **own), self._limits[number], *slow)
        if hasattr(returned, "tolist"):  # a tensor or an array
            returned = returned.tolist()
        if not isinstance(returned, (list, tuple)):
            raise TypeError(f"it returned {_short(returned)}, not a list of {size} numbers")
        if len(returned) != size:
            raise ValueError(f"it returned {len(returned)} rewards for {size} completions; one for each is needed")
        return list(returned)

    def _report_failure(self, name: str, problem: str, sample: Sample, cause: Exception | None) -> None:
        message = f"The reward function {name!r} {problem}\n{_shown(sample)}"
        if self.options.reward_on_error == "raise":
            remedy = "reward_on_error='mask' leaves such completions out, 'value' gives them reward_error_value."
            raise RewardError(f"{message}\n{remedy}") from cause
        if name not in self._told:  # the first failure in full; the share of the later ones is in the log
            self._told.add(name)
            what = "left out" if self.options.reward_on_error == "mask" else f"scored {self.options.reward_error_value}"
            logger.warning("%s\nThese are %s; later failures are counted in rewards/%s/failed.", message, what, name)

    def _report_nothing(self, unknown: torch.Tensor, samples: Sequence[Sample]) -> None:
        which = _shown(samples[int(unknown.nonzero()[0])])
        if unknown.all() and self.options.reward_on_none == "raise":
            raise RewardError(
                f"No reward function gave a reward for any of {len(unknown)} completions ({', '.join(self.names)} "
                f"returned None, or failed and were masked): there is nothing to learn from.\n{which}"
            )
        if "" not in self._told:
            self._told.add("")
            logger.warning(
                "All reward functions returned None for the following kwargs:\n%s\nSo it was for %d of %d "
                "completions, which teach nothing; their share is logged as rewards/none. reward_on_none='raise' "
                "stops the run where it is so for all.",
                which,
                int(unknown.sum()),
                len(unknown),
            )


def _shown(sample: Sample) -> str:
    return f"  prompt: {_short(sample.prompt)}\n  completion: {_short(sample.completion)}"


def with_totals(
    returned: Sequence[Any], samples: Sequence[Sample]
) -> tuple[list[float | None], dict[int, TurnRewards]]:
    """(the reward of each completion, the rewards of turns of those that have any) of what a function `returned`.
    Raises TypeError where a reward is no number, ValueError where there are more or fewer than one for each turn.
    """
    values: list[float | None] = []
    turns: dict[int, TurnRewards] = {}
    for place, value in enumerate(returned):
        if isinstance(value, (list, tuple)):
            value = None if all(reward is None for reward in value) else TurnRewards(value)
        if not isinstance(value, TurnRewards):
            values.append(_number(value))
            continue
        if len(value.turns) != (number := samples[place].num_turns):
            raise ValueError(
                f"it returned {len(value.turns)} rewards of turns for a completion of {number} turns of the policy; "
                "give one for each, and None for those without"
            )
        turns[place] = TurnRewards([_number(reward) for reward in value.turns], float(value.outcome))
        values.append(turns[place].total)
    return values, turns


def _number(value: Any) -> float | None:
    value = value.item() if hasattr(value, "item") else value
    if value is not None and not isinstance(value, (int, float)):
        raise TypeError(f"it returned {_short(value)} among its rewards, which is no number")
    return None if value is None else float(value)


def _short(value: Any, length: int = 300) -> str:
    text = repr(value)
    return text if len(text) <= length else text[:length] + "..."


def asked_for(function: Callable[..., Any], name: str, available: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the `available` arguments that the signature of `function` names; all of them for ``**kwargs``. Raises
    DataError where it needs one that is not there.
    """
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for parameter in named:
        if parameter.name not in available and parameter.default is parameter.empty:
            raise DataError(
                f"The reward function {name!r} has the parameter {parameter.name!r}, which is no column of the "
                f"dataset{did_you_mean(parameter.name, available, '.')} There are: {', '.join(sorted(available))}. "
                "Give a column this name (rename_columns on the command line), or the parameter a default."
            )
    takes_all, names = any(p.kind is p.VAR_KEYWORD for p in parameters), {p.name for p in named}
    return {name: value for name, value in available.items() if takes_all or name in names}


READ = ("row", "prompt", "ids", "completion", "extra", "environment")
"""What reward functions are given of a sample."""


class GroupScores:
    """The scores of the completions of a rollout, which end one after the other, by `score` of a group; `groups` says
    of each completion which one it is of. So many `threads` score groups at a time.
    """

    def __init__(self, score: Callable[[list[Sample]], Scores], groups: Sequence[int], threads: int) -> None:
        self._score, self._groups, self._left = score, groups, Counter(groups)
        self._ended: dict[int, Sample] = {}
        self._scores: dict[int, Future[Scores]] = {}
        self._threads = ThreadPoolExecutor(threads, "posttrain-score", background.keep_device())

    def ended(self, place: int, sample: Sample) -> None:
        """The completion at `place` is `sample`: its group is scored if it was the last. Raises what another group
        could not be scored for.
        """
        for scores in self._scores.values():
            if scores.done():
                scores.result()
        self._ended[place], group = sample, self._groups[place]
        self._left[group] -= 1
        if not self._left[group]:
            members = [self._ended[other] for other, number in enumerate(self._groups) if number == group]
            self._scores[group] = self._threads.submit(self._score, members)

    def of(self, samples: Sequence[Sample]) -> Scores | None:
        """The scores of `samples`, waited for; None where they are not those that have ended."""
        ended, sizes = self._ended, Counter(self._groups)
        try:
            changes = (vars(one)[x] is not vars(ended[place])[x] for place, one in enumerate(samples) for x in READ)
            if len(samples) != len(ended) or any(changes):
                return None
            return joined([self._scores[group].result() for group in sizes], [*sizes.values()])
        finally:
            self.close()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def joined(parts: Sequence[Scores], sizes: Sequence[int]) -> Scores:
    """The scores of all `parts`, of so many completions each, by the same functions."""
    metrics: dict[str, list[float]] = {}
    columns: dict[str, list[Any]] = {}
    for part in parts:
        for name, values in part.metrics.items():
            metrics.setdefault(name, []).extend(values)
    for name in dict.fromkeys(name for part in parts for name in part.columns):
        given: list[Mapping[str, list[Any]]] = [part.columns for part in parts]
        columns[name] = [v for own, size in zip(given, sizes, strict=True) for v in own.get(name, [None] * size)]
    return replace(
        parts[0],
        rewards=torch.cat([part.rewards for part in parts]),
        failed=torch.cat([part.failed for part in parts]),
        seconds=[sum(each) for each in zip(*(part.seconds for part in parts), strict=True)],
        metrics=metrics,
        columns=columns,
        turns=[turns for part in parts for turns in part.turns],
    )
