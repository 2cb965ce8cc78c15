r"""Kahneman-Tversky Optimization, Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306.

With :math:`r = \log\pi(y|x) - \log\pi_{ref}(y|x)` and :math:`z_0 = KL(\pi \| \pi_{ref})` as the reference point, eq. 8
is

.. math:: \lambda_D (1 - \sigma(\beta(r - z_0)))\ \text{for good } y, \quad
    \lambda_U (1 - \sigma(\beta(z_0 - r)))\ \text{for bad } y

The KL is estimated on prompts with completions of other rows (section 4.1), never below 0 and without a gradient. It is
one number for all rows of an optimizer step, over micro-batches and processes, so the loss does not depend on how the
rows are split.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from posttrain.compat.trainer_names import reads_from_arguments
from posttrain.core import opt
from posttrain.core.data import pipeline
from posttrain.core.data.samplers import columns_of
from posttrain.core.evaluation import eval_loop
from posttrain.core.losses import normalization
from posttrain.core.models.special_tokens import tokenizer_of
from posttrain.core.models.wrapping import replaced
from posttrain.rl.policy.logprobs import score_completions
from posttrain.rl.policy.reference import ReferenceArguments
from posttrain.rl.preference.arguments import WITH_REFERENCE, PreferenceConfig
from posttrain.rl.preference.batches import PreferenceCollator, column_at_hand, positions_of, read_lengths
from posttrain.rl.preference.trainer import Completions, Losses, PreferenceTrainer

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------------------------- losses


def kto(log_ratio: torch.Tensor, is_good: torch.Tensor, kl: torch.Tensor, beta: float) -> torch.Tensor:
    """Eq. 8 without its weights: (B,) log-ratios, (B,) bool, () KL -> (B,)."""
    return 1 - torch.sigmoid(beta * torch.where(is_good, log_ratio - kl, kl - log_ratio))


def apo_zero_unpaired(log_ratio: torch.Tensor, is_good: torch.Tensor, kl: torch.Tensor, beta: float) -> torch.Tensor:
    """APO-zero, D'Oosterlinck et al. 2024, https://arxiv.org/abs/2408.06266, eq. 7, for unpaired rows; no KL."""
    return torch.sigmoid(beta * torch.where(is_good, -log_ratio, log_ratio))


LOSSES = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired}


def one_sided(labels: Sequence[Any]) -> str | None:
    """What is wrong where all rows are good, or all bad, as their `labels` say; None where there are both."""
    good = sum(map(bool, labels))
    if good not in (0, len(labels)) or not labels:
        return None
    kind, other, effect = ("good", "bad", "raises") if good else ("bad", "good", "lowers")
    return (
        f"all {len(labels):,} rows are {kind} (label={bool(good)}) and none is {other}. KTO then only {effect} their "
        f"likelihood against the reference, with nothing to tell {kind} from {other}, and logs no rewards/margins. Add "
        f"rows with label={not good}, or see how the column label was made"
        f"{'; to imitate good completions alone, use posttrain.sft.SFTTrainer' if good else ''}."
    )


def others_of(prompts: Sequence[Sequence[int]]) -> list[int]:
    """For each prompt the index of a row whose completion serves for the KL: of another prompt if there is one.

    Each completion is used once: rows are sorted by prompt and shifted by the count of the most frequent prompt (by one
    if all prompts differ). If that prompt has more than half of the rows, its rows cycle through the others'
    completions.
    """
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(tuple(prompt), []).append(row)
    groups = list(rows_of.values())
    order = [row for group in groups for row in group]
    largest = max(groups, key=len, default=[])
    step = len(largest) if len(groups) > 1 else 1
    taken = dict(zip(order, order[-step:] + order[:-step], strict=True))
    if len(groups) > 1 and 2 * len(largest) > len(order):
        rest = [row for group in groups if group is not largest for row in group]
        taken |= {row: rest[place % len(rest)] for place, row in enumerate(largest)}
    return [taken[row] for row in range(len(order))]


@dataclass
class KTOConfig(ReferenceArguments, PreferenceConfig):
    """Arguments of `KTOTrainer`."""

    beta: float = opt(0.1, "Strength of the pull towards the reference. Larger stays closer.", above=0)
    loss_type: str = opt("kto", "A loss in `posttrain.rl.algorithms.kto.LOSSES`.", choices=tuple(LOSSES))
    desirable_weight: float = opt(1.0, "Weight of good completions; raise it where there are fewer of them.", above=0)
    undesirable_weight: float = opt(1.0, "Weight of bad completions; raise it where there are fewer of them.", above=0)

    OLD_NAMES = WITH_REFERENCE

    def _problems(self) -> Iterator[str]:
        if self.max_batch_tokens is not None or self.train_sampling_strategy == "batch_rebalance":
            yield (
                "max_batch_tokens and batch_rebalance make micro-batches of rows of similar length, and KTO compares "
                "the rows of one with each other; set per_device_train_batch_size instead"
            )


@dataclass
class KTOCollator(PreferenceCollator):
    """Prepared rows -> a batch of B completions, ``label`` (B,), and under ``kl`` prompts with completions of others.

    Args:
        max_length: maximum tokens of a prompt with another's completion. with_kl: the loss needs the second half.

    The other arguments are those of `PreferenceCollator`.
    """

    max_length: int | None = None
    with_kl: bool = True

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        prompts, positions = [row["prompt_ids"] for row in rows], positions_of(rows)

        def batch_of(completions: list[Any]) -> dict[str, Any]:
            return self.lay_out([(p, [one]) for p, one in zip(prompts, completions, strict=True)], positions)

        batch = batch_of([row["completion_ids"] for row in rows])
        batch["label"] = torch.tensor([bool(row["label"]) for row in rows])
        if self.with_kl:
            taken = others_of(prompts)  # of a stream, where each takes another's in its batch
            others = [row.get("kl_ids", rows[i]["completion_ids"]) for row, i in zip(rows, taken, strict=True)]
            if self.max_length is not None:
                others = [o[: max(self.max_length - len(p), 1)] for p, o in zip(prompts, others, strict=True)]
            batch["kl"] = batch_of(others)
        for name in ("ref_logps", "ref_kl_logps"):
            if name in rows[0]:
                batch[name] = torch.tensor([row[name] for row in rows])
        return batch


@reads_from_arguments(
    "beta", "desirable_weight", "loss_type", "undesirable_weight", precompute_ref_logps="precompute_ref_log_probs"
)
class KTOTrainer(PreferenceTrainer):
    """Trains a policy towards good completions and away from bad ones, which need not be pairs.

    Args:
        train_dataset: rows with `prompt`, `completion` and `label` (True for a good one), as text or messages; pairs
            become two rows each.
        compute_metrics: of the rewards (N,); the labels are the verdicts.

    The other arguments are those of `posttrain.rl.algorithms.dpo.DPOTrainer`.
    """

    config_class = KTOConfig
    args: KTOConfig
    tag_names = ("posttrain", "kto")
    data_kind = "unpaired_preference"
    signature_columns: tuple[str, ...] | None = tuple(
        "prompt_ids completion_ids label kl_ids ref_logps ref_kl_logps".split()
    )
    fixed_at_construction: tuple[str, ...] = (*PreferenceTrainer.fixed_at_construction, "loss_type")

    _kl: torch.Tensor | None = None

    @property
    def completions_per_row(self) -> int:
        """The row's own: the one that is lent to it is read in another pass."""
        return 1

    def _losses(self, model: nn.Module, inputs: dict[str, Any]) -> Losses:
        args, is_good = self.args, inputs["label"]
        own = {name: value for name, value in inputs.items() if name not in ("kl", "ref_kl_logps")}
        (side,), aux_loss = self._sides(model, own)
        # Without one, this is called directly: the batch is the whole window.
        kl = self.divergence(model, [inputs]) if self._kl is None else self._kl
        losses = LOSSES[args.loss_type](side.log_ratio, is_good, kl, args.beta)
        losses = losses * torch.where(is_good, args.desirable_weight, args.undesirable_weight)
        rewards = self.rewards(side).detach()
        return losses, rewards, aux_loss, lambda: self._log_rows(side, rewards, is_good, kl)

    @torch.no_grad()
    def divergence(self, model: nn.Module, window: Iterable[dict[str, Any]], everywhere: bool = False) -> torch.Tensor:
        """z_0 above, shape (): the mean log-ratio of prompts with others' completions, 0 at least. `everywhere`: over
        all processes, which must all call.
        """
        total = torch.zeros(2, device=self.dist.device)  # float32: MPS has no float64
        if self.needs_kl:
            for inputs in window:
                inputs = self.prepare_inputs(inputs)
                with self.compute_loss_context_manager():
                    known = inputs.get("ref_kl_logps")
                    reference = self._logp_under(self.model, inputs["kl"]) if known is None else known
                    ratio = self.completion_logp(score_completions(model, inputs["kl"])) - reference
                if not pipeline.is_filler(inputs):
                    total += torch.stack([ratio.float().sum(), normalization.scalar(len(ratio), ratio.device)])
        total = self.dist.sum(total) if everywhere else total
        return (total[0] / total[1].clamp_min(1)).clamp_min(0).float()

    @property
    def needs_kl(self) -> bool:
        return self.args.loss_type == "kto"

    @property
    def reference_columns(self) -> tuple[str, ...]:
        return ("ref_logps", "ref_kl_logps") if self.needs_kl else ("ref_logps",)

    def compute_ref_log_probs(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B,) log-probabilities of the completions, and of the others' completions if `inputs` has them."""
        own = {k: v for k, v in inputs.items() if k not in ("label", "kl", "ref_logps", "ref_kl_logps")}
        return self._logp_under(model, own), self._logp_under(model, inputs["kl"]) if "kl" in inputs else None

    def prepare_dataset(self, dataset: Any, role: str, name: str | None = None) -> Any:
        """As the base's; warns where all rows have one verdict."""
        ready = super().prepare_dataset(dataset, role, name)
        # Rows with images are prepared when they are read, and have their labels all the same.
        labels = column_at_hand(ready, "label") or column_at_hand(dataset, "label")
        if role == "train" and self.dist.is_main and (problem := one_sided(labels)):
            logger.warning("train: %s", problem)
        return ready

    # ---------------------------------------------------------------------------------------------- overridable methods

    def train_on_window(self, model: nn.Module, window: list[Any], num_items: torch.Tensor | None = None) -> None:
        """Computes the reference point of the window before its micro-batches."""
        with replaced(self, "_kl", self.divergence(model, window, everywhere=True)):
            super().train_on_window(model, window, num_items)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """As the core's, with one point of reference for the whole dataset: one more pass over it."""
        model = self.evaluation_model()
        with eval_loop.eval_mode(model, self.optimizer):
            kl = self.divergence(model, dataloader if self.needs_kl else (), everywhere=True)
        with replaced(self, "_kl", kl):
            return super().evaluation_loop(dataloader, *args, **kwargs)

    def arrange(self, dataset: Any) -> Any:
        """Rows with another's completion as ``kl_ids``, see `others_of`; for streams `KTOCollator` adds it."""
        if not self.needs_kl or not pipeline.has_length(dataset):
            return dataset
        taken = dataset.select(others_of(dataset["prompt_ids"][:]))
        return dataset.add_column("kl_ids", taken["completion_ids"][:])

    def row_lengths(self, dataset: Any) -> list[int]:
        """Tokens of each row in both passes: with its own completion, and with the one that is lent to it."""
        own = super().row_lengths(dataset)
        if "kl_ids" not in columns_of(dataset):
            return own
        layout = self._shared, self.args.padding_free
        lent = read_lengths(dataset, ("prompt_ids", "kl_ids"), 1, *layout, self.args.max_length)
        return [tokens + more for tokens, more in zip(own, lent, strict=True)]

    def make_collator(self, tokenizer: Any, args: Any) -> KTOCollator:
        """What makes a batch of prepared rows."""
        flat = self._shared or args.padding_free
        layout = tokenizer_of(tokenizer).pad_token_id, flat, flat, args.pad_to_multiple_of, self._encoder
        return KTOCollator(*layout, max_length=args.max_length, with_kl=args.loss_type == "kto")

    def _verdicts(self, inputs: dict[str, Any]) -> torch.Tensor:
        """(B,) 1 for a good completion, 0 for a bad one."""
        return inputs["label"].long()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As the core's; the margin is between the mean rewards of good and bad completions, which are no pairs."""
        for name in [name for name in logs if name.endswith(("/chosen", "/rejected")) and math.isnan(logs[name])]:
            del logs[name]  # there was no such row
        for name in [name for name in logs if name.endswith("rewards/chosen")]:
            other = name.removesuffix("chosen") + "rejected"
            if other in logs:
                logs[name.removesuffix("chosen") + "margins"] = logs[name] - logs[other]
        super().log(logs, start_time)

    def _log_rows(self, side: Completions, rewards: torch.Tensor, is_good: torch.Tensor, kl: torch.Tensor) -> None:
        add = self.metrics.add_sum
        for name, which in (("chosen", is_good), ("rejected", ~is_good)):
            rows, tokens = which.sum(), (side.lengths * which).sum()
            add(f"rewards/{name}", (rewards * which).sum(), rows)
            add(f"logps/{name}", (side.logp.detach() * which).sum(), rows)
            add(f"logits/{name}", (side.tokens.stats["mean_logit"].sum(1) * which).sum(), tokens)
        add("entropy", side.tokens.stats["entropy"].sum(), side.lengths.sum())
        add("kl", kl * len(rewards), len(rewards))
