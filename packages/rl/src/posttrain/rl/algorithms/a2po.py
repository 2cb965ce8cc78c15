r"""Policy optimization by regression onto optimal advantages (A*-PO), Brantley et al. 2025,
https://arxiv.org/abs/2505.20686.

Before training, n completions of each prompt by the reference estimate the value of the best policy; then completions y
of the policy are learned from:

.. math::
    \hat V^*(x) = \beta_1 \log \frac{1}{n} \sum_i e^{r(x, y_i) / \beta_1}, \quad
    L = \Big(\beta_2 \log \frac{\pi(y|x)}{\pi_{ref}(y|x)} - \big(r(x, y) - \hat V^*(x)\big)\Big)^2
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from posttrain.core.arguments import TrainingArguments
from posttrain.core.config import opt, value_of
from posttrain.core.data.samplers import is_stream, mix
from posttrain.core.errors import DataError
from posttrain.core.files import write_text
from posttrain.core.state import EvalLoopOutput, TrainOutput
from posttrain.core.training.preflight import Parts, Problem
from posttrain.rl.losses.advantages import total_rewards
from posttrain.rl.losses.policy_losses import of_trajectory
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.online.trainer import RolloutTrainer
from posttrain.rl.policy.logprobs import CompletionLogps
from posttrain.rl.rewards.scoring import Scores
from posttrain.rl.samples.prompts import rows_at
from posttrain.rl.samples.samples import Rollout, Sample

logger = logging.getLogger(__name__)

FILE = "optimal_values.jsonl"
"""In the output folder: how the reference sampled, then the rewards of each prompt's completions, a line each."""


@dataclass
class A2POConfig(RolloutConfig):
    """Arguments of `A2POTrainer`."""

    learning_rate: float = opt(5e-5, "Peak learning rate.", min=0)
    num_generations: int = opt(1, "Completions of each prompt that are learned from.", min=1)
    max_completion_length: int = opt(256, "Tokens of a completion at most; longer ones are cut there.", min=1)
    num_value_samples: int = opt(8, "Completions of each prompt by the reference, before training.", min=1)
    beta1: float = opt(0.5, "Temperature of the value that is estimated from them.", above=0)
    beta2: float = opt(1e-3, "Weight of the log-ratio to the reference in the regression.", above=0)
    filter_all_incorrect: bool = opt(True, "Leave out prompts of which all completions of the reference scored 0.")

    def _problems(self) -> Iterator[str]:
        if self.beta:
            yield f"beta={self.beta} has no effect: beta2 weights the log-ratio to the reference; leave it out"


class A2POTrainer(RolloutTrainer):
    """Trains a policy to be as much more probable than its reference as its completions are better than expected.

    Arguments: see `posttrain.rl.online.trainer.RolloutTrainer`. Rewards are meant to be 0 or 1. The rewards of the
    reference's completions are kept in ``optimal_values.jsonl`` in the output folder, and read from there by a run
    with the same reference and sampling.
    """

    config_class: type[A2POConfig] = A2POConfig
    args: A2POConfig
    tag_names = ("posttrain", "a2po")
    reads_besides = "the value of its prompt"
    does_not_take = ("agent", "environment_factory")

    def before_loading(self, args: Any, parts: Parts) -> None:
        super().before_loading(args, parts)
        self.reference_rewards: dict[str, list[float]] = {}

    @classmethod
    def preflight(cls, args: TrainingArguments, parts: Parts) -> Iterator[Problem]:
        """Adds prompts that cannot be gone through before training."""
        yield from super().preflight(args, parts)
        if is_stream(parts.train_dataset):
            yield ValueError("A2PO reads all prompts before training; give a train_dataset that is no stream.")

    @property
    def uses_reference(self) -> bool:
        return True

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """As the base's, once the values of all prompts are known."""
        self.estimate_values()
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """As the base's, once the values of all prompts are known."""
        if not self.state.global_step:
            self.estimate_values()
        return super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    def estimate_values(self) -> None:
        """Let the policy, which is the reference as yet, complete the prompts whose value is not known, and leave out
        those of ``filter_all_incorrect``.
        """
        sets = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {"eval": self.eval_dataset}
        rows = {key_of(row["prompt"]): row for data in (self.train_dataset, *sets.values()) for row in data or ()}
        if not self.reference_rewards:
            self._read()
        missing = [row for key, row in rows.items() if key not in self.reference_rewards]
        if missing and self.state.global_step:
            raise DataError(
                f"{len(missing)} prompts have no value, which the reference estimates before the first optimizer step. "
                "Give all prompts, those of evaluations too, when the trainer is made."
            )
        if missing:
            self._sample_values(missing)
        if self.args.filter_all_incorrect and self.train_dataset is not None:
            kept = [i for i, row in enumerate(self.train_dataset) if any(self.reference_rewards[key_of(row["prompt"])])]
            if not kept:
                raise DataError(
                    "All completions of the reference scored 0, so no prompt is left. Give easier prompts, raise "
                    "num_value_samples, or set filter_all_incorrect=False."
                )
            self.train_dataset = rows_at(self.train_dataset, kept)

    def _sample_values(self, rows: Sequence[Any]) -> None:
        size, n = self.layout.per_process, self.args.num_value_samples
        mine = rows[self.dist.rank :: self.dist.world_size]
        found: list[tuple[str, list[float]]] = []
        for start in range(0, math.ceil(len(rows) / self.dist.world_size), max(1, size // n)):
            some = mine[start : start + max(1, size // n)]
            samples = self.new_samples([row for row in some for _ in range(n)])
            seeds = [mix(self.args.seed, i % n, *sample.prompt_ids) for i, sample in enumerate(samples)]
            samples = [replace(s, seed=seed, is_evaluated=True) for s, seed in zip(samples, seeds, strict=True)]
            samples = self.rollout_maker.sample(samples)  # by every process, also one that has none
            if samples:
                rewards = total_rewards(self.rollout_maker.score(samples).rewards, self.rewards.weights).view(-1, n)
                known = [[one for one in each if not math.isnan(one)] or [0.0] for each in rewards.tolist()]
                found += zip([key_of(row["prompt"]) for row in some], known, strict=True)
        for part in self.dist.gather_object(found):
            self.reference_rewards |= dict(part)
        if self.dist.rank == 0:
            lines = [{"prompt": json.loads(key), "rewards": rewards} for key, rewards in self.reference_rewards.items()]
            path = Path(self.args.output_dir, FILE)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, "".join(json.dumps(line) + "\n" for line in (self._header(), *lines)))
        logger.info("The reference completed %d prompts %d times each; see %s.", len(rows), n, FILE)

    def _read(self) -> None:
        path = Path(self.args.output_dir, FILE)
        header, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.is_file() else ["{}"])
        if header == self._header():
            self.reference_rewards = {key_of(line["prompt"]): line["rewards"] for line in lines}
        elif header:
            logger.warning("%s is of another reference or sampling, and is made again.", path)

    def _header(self) -> dict[str, Any]:
        args, reference = self.args, self.reference
        names = ("num_value_samples", "max_completion_length", "temperature", "top_p", "top_k", "seed")
        state = {} if reference is None else reference.state_dict()
        return {"reference": state.get("fingerprint")} | {name: value_of(args, name) for name in names}

    def value(self, prompt: Any) -> float:
        """The estimated value of a prompt under the best policy. Raise DataError if it was not among those that the
        reference completed.
        """
        if (rewards := self.reference_rewards.get(key_of(prompt))) is None:
            raise DataError(f"No value was estimated of the prompt {prompt!r}. Call train() or estimate_values().")
        scaled = torch.tensor(rewards, dtype=torch.float32) / self.args.beta1
        return self.args.beta1 * (float(scaled.logsumexp(0)) - math.log(len(rewards)))

    def compute_advantages(self, rewards: torch.Tensor, group_size: int, kl: torch.Tensor | None) -> torch.Tensor:
        """(N,) the rewards, from which `complete_scored` subtracts the values."""
        return total_rewards(rewards, self.rewards.weights).nan_to_num(nan=0.0)

    def complete_scored(self, rollout: Rollout, samples: list[Sample], scores: Scores) -> Rollout:
        """Subtracts the values of the prompts from the rewards; completions without a reward are not learned from."""
        values = torch.tensor([self.value(sample.row["prompt"]) for sample in samples])
        advantages = total_rewards(scores.rewards, self.rewards.weights) - values
        known = ~advantages.isnan()
        self.metrics.add_sum("v_star", values.sum(), len(values))
        self.metrics.add_sum("advantage", advantages.nansum(), known.sum())
        mask = rollout.loss_mask & rollout.of_completions(known).unsqueeze(1)
        return replace(rollout, advantages=rollout.of_completions(advantages.nan_to_num(nan=0.0)), loss_mask=mask)

    def policy_loss(self, policy: CompletionLogps, inputs: dict[str, Any]) -> torch.Tensor:
        """The squared gap of each completion, (N, 1)."""
        mask, advantages = inputs["loss_mask"], inputs["advantages"].unsqueeze(1)
        log_ratio = ((policy.logps - inputs["ref_logps"]) * mask).sum(1, keepdim=True)
        implicit = self.args.beta2 * of_trajectory(log_ratio, inputs.get("trajectories"))
        self.metrics.add_sum("implicit_reward", implicit.detach().sum(), len(implicit))
        return (implicit - advantages).square()


def key_of(prompt: Any) -> str:
    """What a prompt, a text or messages, is known by."""
    return json.dumps(prompt, sort_keys=True)
