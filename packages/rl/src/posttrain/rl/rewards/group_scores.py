"""Scores each group of completions when its last one has ended, while others are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from posttrain.rl.rewards import background
from posttrain.rl.samples.samples import Sample

if TYPE_CHECKING:
    from posttrain.rl.rewards.scoring import Scores

READ = ("row", "prompt", "ids", "completion", "extra", "environment")
"""What reward functions are given of a sample."""


class GroupScores:
    """The scores of the completions of a rollout, which end one after the other.

    Args:
        score: of the completions of a group. groups: of each completion, which one it is of. threads: groups that are
            scored at a time.
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
            if len(samples) != len(ended) or any(_differ(one, ended[place]) for place, one in enumerate(samples)):
                return None
            return joined([self._scores[group].result() for group in sizes], [*sizes.values()])
        finally:
            self.close()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _differ(one: Sample, other: Sample) -> bool:
    return any(vars(one)[name] is not vars(other)[name] for name in READ)


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
