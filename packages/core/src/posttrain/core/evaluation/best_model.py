"""Which evaluation was the best, and which checkpoints are kept for their evaluations."""

from __future__ import annotations

import math
from typing import Any

from posttrain.core.evaluation.eval_loop import metric_key


def is_better(value: float, best: float | None, greater_is_better: bool) -> bool:
    """Whether `value` is better than `best`; NaN never is, and of None everything but NaN is."""
    if best is None:
        best = -math.inf if greater_is_better else math.inf
    return value > best if greater_is_better else value < best


def best_steps(log_history: list[dict[str, Any]], metric: str, greater_is_better: bool) -> list[int]:
    """The optimizer steps that were evaluated, the best first; of two alike, the later.

    Args:
        metric: with or without ``eval_``.
    """
    name, sign = metric_key(metric), 1 if greater_is_better else -1
    scores = {record["step"]: record[name] for record in log_history if name in record}
    # NaN is no score; in a log that was read from a checkpoint it is None.
    scored = [(sign * score, step) for step, score in scores.items() if score is not None and score == score]
    return [step for _, step in sorted(scored, reverse=True)]
