"""Judges of pairs, which say which of two completions is better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class PairwiseJudge(Protocol):
    """Whatever has a method ``judge``; a judge of earlier versions of trl is one."""

    def judge(self, prompts: list[Any], completions: list[list[Any]]) -> Sequence[int]:
        """For each prompt the place of the better of its two completions, 0 or 1; -1 where it cannot tell."""
        ...


class JudgeReward:
    """A judge as a reward function: 1 for the better completion of each pair, 0 for the other, None for both where the
    judge cannot tell. Completions of a prompt are adjacent, two of each.
    """

    def __init__(self, judge: PairwiseJudge) -> None:
        self.judge = judge
        self.__name__ = type(judge).__name__

    def __call__(self, prompts: list[Any], completions: list[Any]) -> list[float | None]:
        pairs = [completions[first : first + 2] for first in range(0, len(completions), 2)]
        better = list(self.judge.judge(prompts[::2], pairs))
        if len(better) != len(pairs):
            raise ValueError(f"The judge {self.__name__} gave {len(better)} verdicts on {len(pairs)} pairs.")
        if wrong := [place for place in better if place not in (0, 1, -1, None)]:
            raise ValueError(
                f"The judge {self.__name__} gave the verdict {wrong[0]!r} on a pair. A verdict is the place of the "
                "better completion, 0 or 1, or -1 where the judge cannot tell; of a probability, return int(p < 0.5)."
            )
        rewards: list[float | None] = []
        for place in better:
            rewards += [float(place == 0), float(place == 1)] if place in (0, 1) else [None, None]
        return rewards
