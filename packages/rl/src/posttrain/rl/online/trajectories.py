"""Samples as the trajectories that a run stores, see `posttrain.lm.generate.trajectories`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from posttrain.lm.generate.trajectories import FINISHED, Trajectory
from posttrain.rl.losses.advantages import total_rewards
from posttrain.rl.rewards.scoring import Scores
from posttrain.rl.samples.samples import Sample


def stored(
    samples: Sequence[Sample],
    names: Sequence[str],
    scores: Scores,
    weights: torch.Tensor,
    advantages: torch.Tensor,
    step: int,
    tokenizer: Any,
) -> list[Trajectory]:
    """A trajectory for each sample.

    Args:
        names, weights: of the reward functions. advantages: (n,). step: that learns from them.
    """
    totals = total_rewards(scores.rewards, weights).tolist()
    found = []
    for i, sample in enumerate(samples):
        given = scores.turns[i].values() if scores.turns else ()
        one = {
            "step": step,
            "rollout": sample.rollout,
            "sample": sample.place,
            "prompt": sample.prompt,
            "completion": sample.completion,
            "rewards": {n: _known(r) for n, r in zip(names, scores.rewards[i].tolist(), strict=True)},
            "reward": _known(totals[i]),
            "advantage": advantages[i].item(),
            "ending": sample.ending or (FINISHED if sample.finished else "length"),
            "turns": sample.num_turns,
            "tokens": sample.num_chosen,
            "sequences": [_sequence(each, tokenizer) for each in sample.sequences],
        }
        if of_turns := [turns.turns for turns in given]:
            one["turn_rewards"] = [_sum(rewards) for rewards in zip(*of_turns, strict=True)]
        found.append(one)
    return found


def _sequence(sample: Sample, tokenizer: Any) -> dict[str, Any]:
    return {
        "prompt": tokenizer.decode(sample.prompt_ids),
        "prompt_ids": sample.prompt_ids,
        "ids": sample.ids,
        "tokens": tokenizer.batch_decode([[token] for token in sample.ids]),
        "learn": [int(chosen) for chosen in sample.learn or [True] * len(sample.ids)],
        "logps": None if sample.logps is None else [_known(round(logp, 5)) for logp in sample.logps],
        "versions": sample.versions,
    }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
