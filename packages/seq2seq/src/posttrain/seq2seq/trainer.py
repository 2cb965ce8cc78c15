"""The sequence-to-sequence trainer, whose evaluations generate."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from posttrain.core import Trainer
from posttrain.core.data.collators import DataCollatorForSeq2Seq
from posttrain.core.errors import wrong_args
from posttrain.core.evaluation import eval_loop
from posttrain.core.losses import normalization
from posttrain.core.models import embeddings, wrapping
from posttrain.core.training.preflight import passed_on
from posttrain.lm.generate import generate
from posttrain.lm.generate.predict_with_generate import GeneratesText
from posttrain.lm.loss import lm_head
from posttrain.seq2seq.arguments import Seq2SeqTrainingArguments
from posttrain.seq2seq.collators import MasksPadding, PromptTargetCollator, unclear_rows
from posttrain.seq2seq.decoding import LeanGenerator

logger = logging.getLogger(__name__)


class Seq2SeqTrainer(GeneratesText, Trainer):
    """Trains text-to-text models and evaluates their generated texts.

    Rows hold ``input_ids`` and ``labels``, the tokens of source and target (see `posttrain.seq2seq.tokenize`). Without
    a `data_collator` both are padded. A model without an encoder works too: prompt and target become one row, and
    evaluations generate from the prompt alone.

    With ``args.predict_with_generate``, `compute_metrics` gets the generated token ids, filled up with the pad token,
    and the labels, filled up with -100. Arguments are those of `Trainer`; the tokenizer is `processing_class`.
    """

    config_class = Seq2SeqTrainingArguments

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Seq2SeqTrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, float]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        **others: Any,
    ) -> None:
        if args is not None and not isinstance(args, Seq2SeqTrainingArguments):
            raise wrong_args(args, Seq2SeqTrainingArguments)
        super().__init__(**passed_on(locals()))
        if data_collator is None and hasattr(self.text_tokenizer, "pad"):
            self.data_collator = self._usual_collator()
        self.check_generation()

    # ------------------------------------------------------------------------------------------------ the loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Cross-entropy of the labels, shape (). Logits exist only if `return_outputs` is True."""
        if (
            return_outputs
            or self.compute_loss_func is not None
            or "labels" not in inputs
            or not self._in_head(model, inputs)
        ):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        items = self.count_items(inputs) if num_items_in_batch is None else num_items_in_batch
        return self._loss_sum(model, inputs, self.args.label_smoothing_factor) / items

    # ------------------------------------------------------------------------------------------------ data

    def complete_inputs(self, inputs: Any) -> Any:
        """As the core's, with the decoder's inputs where the model cannot make them itself."""
        inputs = super().complete_inputs(inputs)
        # Where a loss of the trainer keeps the labels from the model, it cannot make its decoder's inputs of them.
        keeps = self.label_smoother is not None or self.compute_loss_func is not None
        return self._with_decoder_inputs(inputs) if keeps else inputs

    # ------------------------------------------------------------------------------------------------ internals

    def loss_is_scaled(self) -> bool | None:
        return None  # it depends on where the loss is taken, which the first batch shows

    def set_model(self, model: nn.Module) -> None:
        """As the core's; looks up how to generate with `model`, and whether its loss is taken in its head."""
        super().set_model(model)
        self.lean_generator = LeanGenerator(model)
        self._has_loss_in_head: bool | None = None
        self._said_whole = False

    def _with_decoder_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """`inputs` with what the model itself makes of its labels for the decoder, where it does so."""
        shift = getattr(wrapping.base_model(self.model), "prepare_decoder_input_ids_from_labels", None)
        if shift is not None and inputs.get("decoder_input_ids") is None and inputs.get("labels") is not None:
            inputs["decoder_input_ids"] = shift(labels=inputs["labels"])
        return inputs

    def _loss_sum(self, model: nn.Module, inputs: dict[str, Any], label_smoothing: float = 0.0) -> torch.Tensor:
        """The summed cross-entropy, shape (), taken in the head, so that the logits are never held whole."""
        inputs = self._with_decoder_inputs(dict(inputs))
        labels = inputs.pop("labels")
        options: dict[str, Any] = {
            "shifted": not self.loss_shifts_labels,
            "label_smoothing": label_smoothing,
            "return_stats": False,
        }
        with lm_head.loss_in_head(model, labels, **options):
            return model(**inputs).logits.sum()

    @torch.no_grad()
    def _in_head(self, model: nn.Module, inputs: dict[str, Any]) -> bool:
        """Whether the model's loss equals `_loss_sum`, tested on the first batch with labels of any process."""
        if self._has_loss_in_head is None and lm_head.supports_loss_in_head(model) is not None:
            self._has_loss_in_head = False
        if self._has_loss_in_head is None:
            items, whole = self.count_items(inputs), wrapping.unwrap(model)
            with eval_loop.eval_mode(whole):
                own = normalization.model_loss(whole, inputs, pass_count=False)[0]
                ours = self._loss_sum(whole, inputs) / max(items, 1)
            close = 1e-3 if ours.dtype == own.dtype == torch.float32 and self.dist.precision == "no" else 3e-2
            is_same = torch.allclose(own.float(), ours.float(), rtol=close) if items else None
            answers = [one for one in self.dist.gather_object(is_same) if one is not None]
            self._has_loss_in_head = all(answers) if answers else None
        if self._has_loss_in_head is False and not self._said_whole:
            self._said_whole = True
            logger.info("The logits of each batch are held whole: the loss of this model is not taken in its head.")
        return bool(self._has_loss_in_head)

    def without_unused_columns(self, dataset: Any, collator: Any, description: str | None) -> tuple[Any, Any]:
        pad = getattr(self.text_tokenizer, "pad_token_id", None)
        if collator is not None and pad is not None:
            collator = MasksPadding(collator, pad, is_eos=pad == self.text_tokenizer.eos_token_id)
        return super().without_unused_columns(dataset, collator, description)

    def id_limits(self) -> dict[str, int]:
        stock = getattr(self.compute_loss, "__qualname__", "") == "Seq2SeqTrainer.compute_loss"
        known = embeddings.id_limits(self.model)
        return known if stock and self.compute_loss_func is None else super().id_limits()

    def _usual_collator(self) -> Callable[[list[Any]], Any]:
        if wrapping.is_encoder_decoder(self.model):
            return DataCollatorForSeq2Seq(self.text_tokenizer, model=wrapping.base_model(self.model))
        parts = self.eval_dataset if self.train_dataset is None else self.train_dataset
        unclear = unclear_rows(next(iter(parts.values())) if isinstance(parts, dict) else parts)
        return PromptTargetCollator(generate.padding_id(self.processing_class, self.model), unclear=unclear)
