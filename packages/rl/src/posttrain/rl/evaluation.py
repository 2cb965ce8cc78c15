"""Evaluates a model in an environment, or through an agent, without training it."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from typing import Any

from torch import nn

from posttrain.core.callbacks import PrinterCallback
from posttrain.core.errors import DataError
from posttrain.rl.agents import public_environments
from posttrain.rl.agents.agent import Agent
from posttrain.rl.algorithms.grpo import GRPOConfig, GRPOTrainer
from posttrain.rl.online.trajectories import stored
from posttrain.rl.rewards.scorers import named_function
from posttrain.rl.rewards.scoring import Scores
from posttrain.rl.samples.samples import Sample

PUBLIC: dict[str, Callable[[str], dict[str, Any]]] = {
    "reasoning_gym": public_environments.reasoning_gym,
    "verifiers": public_environments.verifiers,
}
"""Environments of others by the word before the colon; behind it stands the name of a task."""


def environment_of(name: str) -> dict[str, Any]:
    """The arguments of a trainer that ``kind:task`` or ``module:object`` stands for.

    An object is an agent, ``(episode, row)``; a dict of arguments, such as ``environment_factory``, ``tools``,
    ``reward_funcs`` and ``eval_dataset``; or a function without parameters that returns one.

    Raises:
        ValueError: it cannot be imported. TypeError: it is none of these.
    """
    kind, _, task = name.partition(":")
    if kind in PUBLIC:
        return PUBLIC[kind](task)
    found: Any = named_function(name, "")
    if isinstance(found, Agent):
        return {"agent": found}
    if callable(found):
        needed = [p for p in inspect.signature(found).parameters.values() if p.default is p.empty]
        if len(needed) == 2:
            return {"agent": found}
        found = found() if not needed else found
    if not isinstance(found, dict):
        raise TypeError(
            f"{name} is of type {type(found).__name__}; give an agent (episode, row), a dict of arguments of a "
            "trainer, or a function without parameters that returns one."
        )
    return dict(found)


class _Evaluation(GRPOTrainer):
    """Keeps the episodes that are scored."""

    episodes_seen: list[dict[str, Any]]

    def score(self, samples: list[Sample]) -> Scores:
        scores = super().score(samples)
        zeros = scores.rewards.new_zeros(len(samples))
        found = stored(samples, scores, zeros, 0, self.codec.tokenizer)
        left_out = ("sequences", "step", "rollout", "sample", "advantage")
        self.episodes_seen += [{name: one[name] for name in one if name not in left_out} for one in found]
        return scores


def evaluate(
    model: nn.Module, tokenizer: Any, environment: dict[str, Any], k: int = 1, limit: int | None = None, **settings: Any
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """(metrics, every episode) of `k` episodes of each row: ``avg@k``, ``pass@1``, ``pass@k`` with their standard
    errors over rows, ``<name>_stderr``, and the rewards and lengths that training logs.

    Args:
        environment: arguments of a trainer. limit: rows at most. settings: further arguments of `GRPOConfig`.

    Raises:
        DataError: the environment has no rows.
    """
    given = {name: value for name, value in environment.items() if name not in ("eval_dataset", "train_dataset")}
    rows = environment.get("eval_dataset", environment.get("train_dataset"))
    if rows is None:
        raise DataError("the environment has no rows to evaluate on: give it an eval_dataset, or name --data ROWS.")
    rows = [row for row, _ in zip(rows, range(len(rows) if limit is None else limit), strict=False)]
    with tempfile.TemporaryDirectory(prefix="posttrain-evaluate-") as folder:
        usual: dict[str, Any] = {"num_generations": max(k, 2)}
        usual |= {"per_device_train_batch_size": max(k, 2), "num_generations_eval": k}
        usual |= {"per_device_eval_batch_size": max(k, 8), "output_dir": folder, "report_to": "none", "report": False}
        usual |= {"disable_tqdm": True, "save_strategy": "no", "use_cpu": next(model.parameters()).device.type == "cpu"}
        trainer = _Evaluation(
            model, args=GRPOConfig(**(usual | settings)), eval_dataset=rows, processing_class=tokenizer, **given
        )
        trainer.remove_callback(PrinterCallback)  # its line names a file that does not stay
        trainer.episodes_seen = []
        metrics = trainer.evaluate()
    return {name.removeprefix("eval_"): value for name, value in metrics.items()}, trainer.episodes_seen
