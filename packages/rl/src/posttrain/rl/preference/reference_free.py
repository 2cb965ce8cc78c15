"""The base of preference trainers without a reference: CPO, ORPO and reward models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from posttrain.core import TrainingArguments
from posttrain.core.data.pipeline import can_drop_columns
from posttrain.core.training.preflight import passed_on
from posttrain.rl.preference.arguments import PreferenceConfig
from posttrain.rl.preference.trainer import PreferenceTrainer


class ReferenceFreeTrainer(PreferenceTrainer):
    """A `PreferenceTrainer` whose loss needs no reference."""

    needs_reference = False

    def __init__(
        self,
        model: nn.Module | str | None = None,
        args: PreferenceConfig | TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        peft_config: Any = None,
        compute_metrics: Callable[..., dict[str, float]] | None = None,
        quantization_config: Any = None,
        **others: Any,
    ) -> None:
        super().__init__(**passed_on(locals()))

    def arrange(self, dataset: Any) -> Any:
        """Rows also with each text whole, as ``chosen_input_ids`` and ``rejected_input_ids``: what scripts and
        collators of earlier versions read.
        """
        return dataset.map(whole_texts, batched=True)

    def without_unused_columns(self, dataset: Any, collator: Any, description: str | None) -> tuple[Any, Any]:
        """As the base's; of columns that `arrange` adds nothing is said."""
        if self.args.remove_unused_columns and can_drop_columns(dataset):
            added = {"chosen_input_ids", "rejected_input_ids"} - {*(self.signature_columns or ())}
            dataset = dataset.remove_columns([*added & {*dataset.column_names}])
        return super().without_unused_columns(dataset, collator, description)


def whole_texts(columns: dict[str, list[Any]], ending: str = "_input_ids") -> dict[str, list[Any]]:
    """The prompts with their chosen and with their rejected completions, as columns with this `ending`."""
    prompts = columns["prompt_ids"]
    return {
        side + ending: [[*prompt, *ids] for prompt, ids in zip(prompts, columns[f"{side}_ids"], strict=True)]
        for side in ("chosen", "rejected")
    }
