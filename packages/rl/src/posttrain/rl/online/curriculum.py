r"""Which prompts are sampled: those that the policy sometimes gets right.

    pass rates -> choose prompts -> (sampled and scored) -> pass rates

The gradient of a prompt grows with the variance of its rewards, :math:`p (1 - p)` for a pass rate p: learnability,
Foster et al. 2025, https://arxiv.org/abs/2502.12272. Completions are never learned from a second time: a prompt that
comes again is sampled again, with the weights of then.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.core.config import opt
from posttrain.core.data.samplers import mix

logger = logging.getLogger(__name__)

NUMBER = "posttrain_row_number"
"""The column with the place of a row in the dataset, between the loader and the samples."""


@dataclass
class CurriculumArguments:
    """Which prompts are sampled."""

    curriculum: bool = opt(
        False,
        "Sample prompts by their pass rate p so far: one is kept with probability 4p(1-p), else one drawn in "
        "proportion to p(1-p) takes its place. A completion passes if the first reward function gives at least "
        "pass_threshold, all its turns together.",
    )
    curriculum_explore: float = opt(
        0.1,
        "Probability with which a prompt is kept whatever its pass rate, so that solved and hopeless ones are tried "
        "again; 0 drops those for good.",
        min=0,
        max=1,
        needs="curriculum",
    )
    curriculum_update: float = opt(
        0.5, "Weight of the newest completions of a prompt in its pass rate.", above=0, max=1, needs="curriculum"
    )


class Curriculum:
    """The prompts of a dataset that are chosen, by their pass rates: (prompts,) float64, NaN for those not sampled
    yet.
    """

    def __init__(self, dataset: Any, args: CurriculumArguments, seed: int) -> None:
        self.dataset, self.args, self.seed = dataset, args, seed
        self.rates = torch.full((len(dataset),), torch.nan, dtype=torch.float64)
        self._reach: torch.Tensor | None = None  # the sum of the weights up to each prompt

    def choose(self, rows: list[dict[str, Any]], places: Sequence[int], rollout: int) -> list[dict[str, Any]]:
        """`rows`, some of which others have taken the place of: the same one in all rows of a prompt, whose `places` in
        the rollout are given.
        """
        chosen: dict[int, dict[str, Any]] = {}
        for row, place in zip(rows, places, strict=True):
            if place not in chosen and NUMBER in row:
                number = self.choice(row[NUMBER], mix(self.seed, rollout, place))
                chosen[place] = row if number == row[NUMBER] else Numbered(self.dataset)[number]
        return [chosen.get(place, row) for row, place in zip(rows, places, strict=True)]

    def choice(self, number: int, seed: int) -> int:
        """The prompt `number`, or the one that takes its place."""
        rate = self.rates[number].item()
        if rate != rate:
            return number
        generator = torch.Generator().manual_seed(seed)
        kept, drawn = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        explore = self.args.curriculum_explore
        if kept < explore + (1 - explore) * 4 * rate * (1 - rate):
            return number
        if self._reach is None:
            self._reach = (self.rates * (1 - self.rates)).nan_to_num(nan=0.0).cumsum(0)
        total = self._reach[-1].item()
        if total == 0:
            return number
        return int(torch.searchsorted(self._reach, drawn * total, right=True))

    def update(self, passed: Sequence[tuple[int, float]]) -> None:
        """Count completions of one rollout: the number of the prompt of each, and whether it passed, 0 or 1; NaN: not
        known.
        """
        found: dict[int, list[float]] = {}
        for number, value in passed:
            if value == value:
                found.setdefault(number, []).append(value)
        for number, values in found.items():
            mean, before = sum(values) / len(values), self.rates[number]
            self.rates[number] = mean if before.isnan() else before + self.args.curriculum_update * (mean - before)
        self._reach = None

    def metrics(self) -> dict[str, float]:
        """Shares of the prompts that were sampled: ``curriculum/solved``, all right; ``curriculum/hopeless``, none; and
        of all prompts, those that were: ``curriculum/known``.
        """
        known = self.rates[~self.rates.isnan()]
        if not len(known):
            return {}
        shares = {"solved": known > 0.99, "hopeless": known < 0.01}
        found = {f"curriculum/{name}": marks.double().mean().item() for name, marks in shares.items()}
        return found | {"curriculum/known": len(known) / len(self.rates)}

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["rates"]) != len(self.rates):
            logger.warning(
                "The checkpoint's curriculum has pass rates of %d prompts, and there are %d: they are counted again "
                "from the beginning. Resume with the same prompts to keep them.",
                len(state["rates"]),
                len(self.rates),
            )
            return
        self.rates, self._reach = state["rates"].clone(), None


def passed(numbers: Sequence[int | None], rewards: torch.Tensor, threshold: float) -> list[tuple[int, float]]:
    """The number of the prompt of each completion that has one, and whether its reward, of (n,), is at least
    `threshold`, 0 or 1; NaN: not known.
    """
    found = torch.where(rewards.isnan(), torch.nan, (rewards >= threshold).float()).tolist()
    return [(number, value) for number, value in zip(numbers, found, strict=True) if number is not None]


class Numbered:
    """Rows with their place in the dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {**self.dataset[number], NUMBER: number}
