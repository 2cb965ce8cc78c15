r"""Reward models from pairs: Bradley and Terry 1952, as in Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, eq. 1.

With r the model's scalar output for a prompt with a completion, and an optional margin m of a pair (Touvron et al.
2023, https://arxiv.org/abs/2307.09288, eq. 2):

.. math:: -\log\sigma(r_w - r_l - m) + c (r_w + r_l)^2

The second term keeps rewards near 0, which differences alone do not determine (Eisenstein et al. 2023,
https://arxiv.org/abs/2312.09244, eq. 2).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from posttrain.core import opt
from posttrain.core.config import set_among
from posttrain.core.data import pipeline
from posttrain.core.data.samplers import columns_of
from posttrain.core.errors import DataError, warn
from posttrain.core.fields.old_names import Removed
from posttrain.core.models import wrapping
from posttrain.core.models.special_tokens import tokenizer_of
from posttrain.core.training.preflight import passed_on
from posttrain.lm.images.image_features import features_once
from posttrain.rl.policy.overrides import has_own_loss
from posttrain.rl.preference.arguments import PreferenceConfig
from posttrain.rl.preference.batches import PreferenceCollator, column_at_hand
from posttrain.rl.preference.reference_free import ReferenceFreeTrainer, whole_texts
from posttrain.rl.preference.rows import LONG, PAIR
from posttrain.rl.preference.trainer import Losses
from posttrain.rl.rewards.score_heads import TASK, load_reward_model, set_pad_token
from posttrain.rl.samples.prompts import rows_listed

HOW_TO_READ = f"Load it by {TASK}.from_pretrained(..., num_labels=1)."
HOW_TO_SEE = (
    "Pass the model's name, to which a head is added, or posttrain.rl.rewards.score_heads.with_score_head(model) of a "
    "loaded one."
)


def bradley_terry(
    chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor | float = 0.0, centering: float = 0.0
) -> torch.Tensor:
    """The loss of each pair of rewards: (B,), (B,) -> (B,); `centering` is c above."""
    losses = -F.logsigmoid(chosen - rejected - margin)
    return losses + centering * (chosen + rejected).square() if centering else losses


@dataclass
class RewardConfig(PreferenceConfig):
    """Arguments of `RewardTrainer`."""

    learning_rate: float = opt(1e-4, "Peak learning rate; a new head takes more than a trained model.", min=0)
    center_rewards_coefficient: float | None = opt(
        None, "Weight of the square of the sum of a pair's rewards, which holds them near 0; None: 0.", min=0
    )
    chat_template_path: str | None = opt(
        None, "A Jinja file, or a tokenizer's folder or name, whose chat template replaces the tokenizer's own."
    )
    eos_token: str | None = opt(None, "Token that ends a row, instead of the tokenizer's own.")
    long_rows: str = opt("drop", "What becomes of pairs with a text longer than max_length.", choices=LONG)

    OLD_NAMES = {"max_prompt_length": Removed("a pair is judged as a whole, by max_length.", harmless=None)}

    def _problems(self):
        for name in set_among(self, "shared_prefix", "padding_free"):
            yield f"{name}=True has no effect: a reward is read off the last token of a padded row; leave it out"
        if self.num_eval_samples:
            yield f"num_eval_samples={self.num_eval_samples} has no effect: a reward model writes nothing; set it to 0"


class RewardCollator(PreferenceCollator):
    """Prepared pairs -> ``input_ids`` and ``attention_mask``, (2B, T): all chosen, then all rejected; ``margin`` (B,)
    if there. Texts stand behind ``prompt_ids``, if there.
    """

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super().__call__([{"prompt_ids": (), **row} for row in rows])
        del batch["completion_mask"]  # a reward is of the whole text
        if "margin" in rows[0]:
            batch["margin"] = torch.tensor([row["margin"] for row in rows], dtype=torch.float32)
        return batch


class RewardTrainer(ReferenceFreeTrainer):
    """Trains a sequence classifier with one output to score the chosen completion of each pair higher.

    Args:
        model: such a classifier, or the name or folder of a model to which a head with one output is added.
        train_dataset: pairs as `posttrain.rl.DPOTrainer` takes them; a column `margin` is the minimum difference of
            each pair's rewards.

    The other arguments are those of `posttrain.rl.algorithms.dpo.DPOTrainer`, without ``ref_model``.
    """

    config_class = RewardConfig
    args: RewardConfig
    tag_names = ("posttrain", "reward-trainer")
    signature_columns: tuple[str, ...] | None = ("chosen_ids", "rejected_ids", "margin")

    def _losses(self, model: nn.Module, inputs: dict[str, Any]) -> Losses:
        given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
        if self.sees:
            given = {name: value for name, value in inputs.items() if name not in ("margin", "image_copies")}
        with features_once(model, inputs.get("image_copies"), given) as shown:
            outputs = model(**shown)
        chosen, rejected = outputs.logits.squeeze(-1).float().chunk(2)
        centering = self.args.center_rewards_coefficient or 0.0
        losses = bradley_terry(chosen, rejected, inputs.get("margin", 0.0), centering)
        rewards = torch.stack([chosen, rejected], 1).detach()
        return losses, rewards, None, lambda: self._log_rewards(rewards)

    def __init__(
        self,
        model: nn.Module | str | None = None,
        args: RewardConfig | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable[..., dict[str, float]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        **old_names: Any,
    ) -> None:
        super().__init__(**passed_on(locals(), rest="old_names"))

    def count_items(self, inputs: dict[str, Any]) -> int:
        """The pairs of a micro-batch."""
        return 0 if pipeline.is_filler(inputs) else len(inputs["input_ids"]) // 2

    def prepare_dataset(self, dataset: Any, role: str, name: str | None = None) -> Any:
        """As the base's; also checks the margins of pairs."""
        _check_margins(dataset, name or role)
        return super().prepare_dataset(_with_prompt_ids(dataset), role, name)

    def arrange(self, dataset: Any) -> Any:
        """Rows with each text whole as `chosen_ids` and `rejected_ids`: the model reads nothing else."""
        return dataset.map(whole_texts, batched=True, remove_columns=["prompt_ids"], fn_kwargs={"ending": "_ids"})

    def make_collator(self, tokenizer: Any, args: Any) -> Callable[[list[Any]], Any]:
        """What makes a batch of prepared rows."""
        return RewardCollator(tokenizer_of(tokenizer).pad_token_id, pad_to_multiple_of=args.pad_to_multiple_of)

    def load(
        self, model: nn.Module | str, tokenizer: Any, args: Any, quantization_config: Any, peft_config: Any
    ) -> tuple[nn.Module, Any]:
        """(model, tokenizer), loaded where they are given by name, with the adapter of `peft_config`."""
        if isinstance(model, (str, os.PathLike)):
            model = load_reward_model(model, args.model_init_kwargs, quantization_config, args.trust_remote_code)
        model, tokenizer = super().load(model, tokenizer, args, quantization_config, peft_config)
        set_pad_token(model, tokenizer_of(tokenizer).pad_token_id)
        return model, tokenizer

    def check_model(self, model: Any) -> None:
        """Raise ValueError for a model that gives no single number for a text."""
        base: Any = wrapping.base_model(model)
        kind, labels = type(base), getattr(wrapping.config_of(base), "num_labels", "unknown")
        of_another_task = kind.__module__.startswith("transformers.") and "SequenceClassification" not in kind.__name__
        if labels != 1 or of_another_task:
            raise ValueError(
                f"The model is a {kind.__name__} with {labels} labels, and reward models require `num_labels=1`: one "
                f"number for a text. {HOW_TO_SEE if self.sees else HOW_TO_READ}"
            )

    def _choose_layout(self, models: list[nn.Module], args: Any, tokenizer: Any) -> None:
        self._shared, self.router_aux_loss_coef, self.aux_loss_enabled = False, 0.0, False
        self._own_loss = has_own_loss(type(self))

    def _log_rewards(self, rewards: torch.Tensor) -> None:
        pairs, differences = len(rewards), rewards[:, 0] - rewards[:, 1]
        self.metrics.add_sum("mean_reward", rewards.mean(1).sum(), pairs)
        self.metrics.add_sum("accuracy", (differences > 0).sum(), pairs)
        self.metrics.add_sum("margin", differences.sum(), pairs)
        self.metrics.add_extreme("min_reward", rewards.min(), "min")
        self.metrics.add_extreme("max_reward", rewards.max(), "max")


def _check_margins(dataset: Any, name: str) -> None:
    """Raise DataError where the column `margin` holds no finite number, with the first such rows."""
    margins = column_at_hand(dataset, "margin")
    wrong = [at for at, value in enumerate(margins) if not isinstance(value, (int, float)) or not math.isfinite(value)]
    if wrong:
        raise DataError(
            f"{name}: margin is no finite number in {rows_listed(wrong)} (the first holds {margins[wrong[0]]!r}). "
            "Correct or filter those rows, or drop the column."
        )


def _with_prompt_ids(dataset: Any) -> Any:
    """Rows of tokens that hold each text whole, as `chosen_ids` and `rejected_ids`, with a prompt of no tokens."""
    columns = columns_of(dataset)
    for name in ("{}_input_ids", "input_ids_{}"):
        earlier = {name.format(side): f"{side}_ids" for side in PAIR}
        if set(earlier) <= set(columns):
            warn(
                f"The columns {' and '.join(earlier)} are called {' and '.join(earlier.values())} now; the earlier "
                "names will not be supported in v1.",
                FutureWarning,
            )
            masks = [column for column in columns if column.startswith("attention_mask_")]
            dataset = dataset.map(_tokens_of, remove_columns=[*earlier, *masks], fn_kwargs={"columns": earlier})
            columns = dataset.column_names
    if "prompt_ids" in columns or not {f"{side}_ids" for side in PAIR} <= set(columns):
        return dataset
    return dataset.map(lambda row: {"prompt_ids": []})


def _tokens_of(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, list[int]]:
    """The tokens in `columns`, without the padding that an ``attention_mask_chosen`` marks."""
    found = {}
    for column, name in columns.items():
        mask = row.get(f"attention_mask_{name.removesuffix('_ids')}") or [1] * len(row[column])
        found[name] = [token for token, real in zip(row[column], mask, strict=True) if real]
    return found
