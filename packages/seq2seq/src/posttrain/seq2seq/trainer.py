"""Sequence-to-sequence training: the core's loop, with evaluations that generate."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from posttrain.core import Trainer, evaluation, generation, models, objective
from posttrain.core.collators import DataCollatorForSeq2Seq
from posttrain.core.state import EvalLoopOutput, PredictionOutput
from posttrain.seq2seq.arguments import Seq2SeqTrainingArguments
from posttrain.seq2seq.collators import MasksPadding, PromptTargetCollator
from posttrain.seq2seq.decoding import LeanGenerator

logger = logging.getLogger(__name__)


class Seq2SeqTrainer(Trainer):
    """Trains models that read one text and write another, and evaluates what they write.

    Rows hold ``input_ids`` and ``labels``, the tokens of source and target (see `posttrain.seq2seq.tokenize`). Without a
    `data_collator` both are padded. A model without an encoder works too: prompt and target become one row, and evaluations
    generate from the prompt alone.

    With ``args.predict_with_generate``, `compute_metrics` gets the generated token ids, filled up with the pad token, and the
    labels, filled up with -100. Arguments are those of `Trainer`; the tokenizer is `processing_class`.
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
            kind = type(args).__name__
            raise TypeError(f"args is of type {kind}; pass Seq2SeqTrainingArguments(output_dir=...).")
        wanted = None if args is None else args.generation_config
        self._generation_config = None if wanted is None else self.load_generation_config(wanted)
        self._given: dict[str, Any] = {}
        self._gen_kwargs: dict[str, Any] = {}
        self._is_evaluating = False
        self._orders: list[tuple[Any, generation.LongestFirst | None]] = []
        #: The rows of the last evaluation that generated, as the log showed them.
        self.generated_samples: list[dict[str, str]] = []
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            **others,
        )
        if data_collator is None and hasattr(self._tokenizer, "pad"):
            self.data_collator = self._usual_collator()
        if self.args.predict_with_generate:
            self._check_generation()

    # ------------------------------------------------------------------------------------------------ the loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Cross-entropy of the labels, shape (). Logits exist only where `return_outputs` asks for them."""
        if (
            return_outputs
            or self.compute_loss_func is not None
            or "labels" not in inputs
            or not self._in_head(model, inputs)
        ):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        items = self.count_items(inputs) if num_items_in_batch is None else num_items_in_batch
        return self._loss_sum(model, inputs, self.args.label_smoothing_factor) / items

    # ------------------------------------------------------------------------------------------------ evaluation

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """As the core's; `gen_kwargs` (max_length, num_beams, generation_config, ...) go to ``generate``."""
        with self._generating(gen_kwargs):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """As the core's; `gen_kwargs` (max_length, num_beams, generation_config, ...) go to ``generate``."""
        with self._generating(gen_kwargs):
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ) -> EvalLoopOutput:
        """As the core's; what was generated is shown in the log."""
        if self.args.predict_with_generate:
            longest = getattr(getattr(dataloader, "sampler", None), "longest_target", None)
            self._gen_kwargs = generation.options(self.args, self._given, self.model, longest)
            self._lean.refresh()
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if self.args.predict_with_generate and self.dist.is_main:
            self._show_samples(dataloader, output, metric_key_prefix)
        return output

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """(loss, generated tokens, labels) of one evaluation batch; logits instead of tokens where nothing is generated.

        Args:
            gen_kwargs: arguments of ``generate``; by default those of the `evaluate` or `predict` that is running.
        """
        if not self.args.predict_with_generate or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        compute_loss = objective.with_items(self.compute_loss, self.count_items(inputs), self.metrics.add)
        chosen = generation.options(self.args, gen_kwargs, model, None) if gen_kwargs else self._gen_kwargs
        place = {"label_names": self.label_names, "pad_token_id": self.prediction_fill, "lean": self._lean}
        synced = self.is_fsdp_enabled or self.is_deepspeed_enabled
        with self.compute_loss_context_manager():
            return generation.predict_batch(model, inputs, compute_loss, chosen, synced=synced, **place)

    @property
    def prediction_fill(self) -> int:
        """What fills up generated rows: the pad token; -100 where logits are kept."""
        return generation.padding_id(self.processing_class, self.model) if self.args.predict_with_generate else -100

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """The `GenerationConfig` that is passed, or named by a path or the name of a model; see `posttrain.core.generation`."""
        return generation.load_generation_config(gen_config_arg)

    # ------------------------------------------------------------------------------------------------ data

    def _get_eval_sampler(self, eval_dataset: Any) -> torch.utils.data.Sampler | None:
        args = self.args
        # What is seen or kept batch by batch is seen in the order of the dataset.
        by_batch = evaluation.by_batch(self.compute_metrics, args.batch_eval_metrics) is not None
        if by_batch or args.dataloader_drop_last or not args.eval_do_concat_batches or not args.predict_with_generate:
            return super()._get_eval_sampler(eval_dataset)
        return self._longest_first(eval_dataset)

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        # Where a loss of the trainer keeps the labels from the model, it cannot make its decoder's inputs of them.
        keeps = self.label_smoother is not None or self.compute_loss_func is not None
        return self._with_decoder_inputs(inputs) if keeps else inputs

    # ------------------------------------------------------------------------------------------------ behind the doors

    def _set_model(self, model: nn.Module) -> None:
        super()._set_model(model)
        if self._generation_config is not None:
            models.base_model(model).generation_config = copy.deepcopy(self._generation_config)
        self._lean = LeanGenerator(model)
        self._has_loss_in_head: bool | None = None

    def _with_decoder_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """`inputs` with what the model itself makes of its labels for the decoder, where it does so."""
        shift = getattr(models.base_model(self.model), "prepare_decoder_input_ids_from_labels", None)
        if shift is not None and inputs.get("decoder_input_ids") is None and inputs.get("labels") is not None:
            inputs["decoder_input_ids"] = shift(labels=inputs["labels"])
        return inputs

    def _loss_sum(self, model: nn.Module, inputs: dict[str, Any], label_smoothing: float = 0.0) -> torch.Tensor:
        """The summed cross-entropy, shape (), taken in the head, so that the logits are never held whole."""
        inputs = self._with_decoder_inputs(dict(inputs))
        labels = inputs.pop("labels")
        options = {"shifted": not self._loss_shifts_labels, "label_smoothing": label_smoothing, "return_stats": False}
        with models.loss_in_head(model, labels, **options):
            return model(**inputs).logits.sum()

    @torch.no_grad()
    def _in_head(self, model: nn.Module, inputs: dict[str, Any]) -> bool:
        """Whether the model's own loss is what `_loss_sum` gives: tried on the first batch."""
        if self._has_loss_in_head is None:
            self._has_loss_in_head = models.supports_loss_in_head(model) is None
            items, whole = self.count_items(inputs), models.unwrap(model)
            if self._has_loss_in_head and items:
                with evaluation.eval_mode(whole):
                    own = objective.model_loss(whole, inputs, pass_count=False)[0]
                    ours = self._loss_sum(whole, inputs) / items
                close = 1e-3 if ours.dtype == own.dtype == torch.float32 and self.dist.precision == "no" else 3e-2
                self._has_loss_in_head = torch.allclose(own.float(), ours.float(), rtol=close)
            if not self._has_loss_in_head:
                logger.info("The logits of each batch are held whole: the loss of this model is not taken in its head.")
        return self._has_loss_in_head

    def _without_unused_columns(self, dataset: Any, collator: Any, description: str | None) -> tuple[Any, Any]:
        pad = getattr(self._tokenizer, "pad_token_id", None)
        if collator is not None and pad is not None:
            collator = MasksPadding(collator, pad, is_eos=pad == self._tokenizer.eos_token_id)
        return super()._without_unused_columns(dataset, collator, description)

    @property
    def _tokenizer(self) -> Any:
        return getattr(self.processing_class, "tokenizer", self.processing_class)

    def _usual_collator(self) -> Callable[[list[Any]], Any]:
        if generation.is_encoder_decoder(self.model):
            return DataCollatorForSeq2Seq(self._tokenizer, model=models.base_model(self.model))
        return PromptTargetCollator(generation.padding_id(self.processing_class, self.model))

    def _check_generation(self) -> None:
        """What an evaluation would fail on, before training."""
        if not callable(getattr(self.model, "generate", None)):
            raise TypeError(
                f"predict_with_generate=True needs a model with a method generate, and {type(self.model).__name__} has none."
            )
        sets = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        for dataset in sets:
            order = self._longest_first(dataset)
            generation.options(self.args, {}, self.model, None if order is None else order.longest_target)

    def _longest_first(self, dataset: Any) -> generation.LongestFirst | None:
        for known, order in self._orders:
            if known is dataset:
                return order
        tokenizer = self._tokenizer
        pad = getattr(tokenizer, "pad_token_id", None)
        pad = None if pad == getattr(tokenizer, "eos_token_id", None) else pad
        order = generation.longest_first(dataset, self._main_input, pad)
        self._orders = [*self._orders[-7:], (dataset, order)]
        return order

    @contextlib.contextmanager
    def _generating(self, gen_kwargs: dict[str, Any]) -> Iterator[None]:
        """What the caller asks for holds for all datasets of a dict, each of which `evaluate` is called for."""
        outermost, self._is_evaluating = not self._is_evaluating, True
        if outermost or gen_kwargs:
            self._given = gen_kwargs
        try:
            yield
        finally:
            self._is_evaluating = not outermost

    def _show_samples(self, dataloader: Any, output: EvalLoopOutput, prefix: str) -> None:
        number, dataset = self.args.generation_samples, getattr(dataloader, "dataset", None)
        encodes = generation.is_encoder_decoder(self.model)
        options = {"main_input": self._main_input, "encodes": encodes}
        self.generated_samples = generation.samples(
            dataset, output.predictions, output.label_ids, self._tokenizer, number, **options
        )
        if self.generated_samples:
            shown = generation.table(self.generated_samples)
            logger.info("%s at step %d, the first rows:\n%s", prefix, self.state.global_step, shown)

    def _pad_tensors_to_max_len(self, tensor: torch.Tensor, max_length: int) -> torch.Tensor:
        """(B, T) filled up with the pad token to (B, max_length). For scripts that override `prediction_step`."""
        pad = generation.padding_id(self.processing_class, self.model)
        return nn.functional.pad(tensor, (0, max_length - tensor.shape[-1]), value=pad)
