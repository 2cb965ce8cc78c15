"""The mixin for trainers whose evaluations generate: `Seq2SeqTrainer` and `SFTTrainer`.

Place it before `Trainer` in a class whose arguments include `GenerationArguments`. `evaluation.generate` does the work.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from posttrain.core.data.samplers import inner_sampler
from posttrain.core.errors import checked_args
from posttrain.core.evaluation import eval_loop
from posttrain.core.models import wrapping
from posttrain.core.models.special_tokens import tokenizer_of
from posttrain.core.state import EvalLoopOutput, PredictionOutput
from posttrain.lm.generate import generate
from posttrain.lm.generate import samples as written

if TYPE_CHECKING:
    from posttrain.core.trainer import Trainer
else:
    Trainer = object  # a mixin: the trainer is a base class beside it

logger = logging.getLogger(__name__)


class GeneratesText(Trainer):
    """Adds ``predict_with_generate`` to a trainer: `evaluate` and `predict` generate, and take arguments of
    ``generate``.
    """

    #: Generates in place of ``model.generate`` where it can; see `posttrain.lm.generate.generate.predict_batch`.
    lean_generator: Any = None
    #: The rows of the last evaluation that generated, as the log showed them.
    generated_samples: list[dict[str, str]] = []
    _given: dict[str, Any] = {}
    _gen_kwargs: dict[str, Any] = {}
    _is_evaluating = False
    _orders: tuple[tuple[Any, generate.LongestFirst | None], ...] = ()

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
        """Evaluates, then logs generated texts."""
        if self._generation.predict_with_generate:
            longest = getattr(inner_sampler(dataloader), "longest_target", None)
            self._gen_kwargs = generate.options(self._generation, self._given, self.model, longest)
            if self.lean_generator is not None:
                self.lean_generator.refresh()
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if self._generation.predict_with_generate and self.dist.is_main:
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
        """(loss, generated tokens, labels) of one evaluation batch; logits instead of tokens where nothing is
        generated.

        Args:
            gen_kwargs: arguments of ``generate``; by default those of the `evaluate` or `predict` that is running.
        """
        if not self._generation.predict_with_generate or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self.prepare_inputs(inputs)
        compute_loss = self.evaluation_loss(inputs)
        chosen = generate.options(self._generation, gen_kwargs, model, None) if gen_kwargs else self._gen_kwargs
        place: dict[str, Any] = {
            "label_names": self.label_names,
            "pad_token_id": self.prediction_fill,
            "lean": self.lean_generator,
        }
        synced = self.is_fsdp_enabled or self.is_deepspeed_enabled
        with self.compute_loss_context_manager():
            return generate.predict_batch(model, inputs, compute_loss, chosen, synced=synced, **place)

    @property
    def prediction_fill(self) -> int:
        """What fills up generated rows: the pad token; -100 where logits are kept."""
        return (
            generate.padding_id(self.processing_class, self.model) if self._generation.predict_with_generate else -100
        )

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """The `GenerationConfig` that is passed, or named by a path or the name of a model; see
        `posttrain.lm.generate.generate`.
        """
        return generate.load_generation_config(gen_config_arg)

    def _get_eval_sampler(self, eval_dataset: Any) -> torch.utils.data.Sampler | None:
        args = self.args
        # Outputs that are used batch by batch need the order of the dataset.
        by_batch = eval_loop.by_batch(self.compute_metrics, args.batch_eval_metrics) is not None
        by_batch = by_batch or args.dataloader_drop_last or not args.eval_do_concat_batches
        if by_batch or not self._generation.predict_with_generate:
            return super()._get_eval_sampler(eval_dataset)
        return self._longest_first(eval_dataset)

    # ------------------------------------------------------------------------------------------------ internals

    def set_model(self, model: nn.Module) -> None:
        """As the core's, with the generation config that the arguments name."""
        super().set_model(model)
        if self._generation.generation_config is not None:
            given, base = self.load_generation_config(self._generation.generation_config), wrapping.base_model(model)
            base.generation_config = generate.with_token_ids(given, wrapping.generation_config(base))

    @property
    def _generation(self) -> generate.GenerationArguments:
        return checked_args(self.args, generate.GenerationArguments)

    @property
    def text_tokenizer(self) -> Any:
        """The tokenizer: `processing_class`, or the one in it."""
        return tokenizer_of(self.processing_class)

    def check_generation(self) -> None:
        """What an evaluation would fail on, before training. For the end of a constructor."""
        if not self._generation.predict_with_generate:
            return
        if not callable(getattr(self.model, "generate", None)):
            raise TypeError(
                f"predict_with_generate=True needs a model with a method generate, and {type(self.model).__name__} "
                "has none."
            )
        sets = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        for dataset in sets:
            order = self._longest_first(dataset)
            generate.options(self._generation, {}, self.model, None if order is None else order.longest_target)

    def _longest_first(self, dataset: Any) -> generate.LongestFirst | None:
        for known, order in self._orders:
            if known is dataset:
                return order
        tokenizer = self.text_tokenizer
        pad = getattr(tokenizer, "pad_token_id", None)
        pad = None if pad == getattr(tokenizer, "eos_token_id", None) else pad
        order = generate.longest_first(dataset, self.main_input, pad)
        self._orders = (*self._orders[-7:], (dataset, order))
        return order

    @contextlib.contextmanager
    def _generating(self, gen_kwargs: dict[str, Any]) -> Iterator[None]:
        """The caller's options apply to all datasets of a dict, for each of which `evaluate` is called."""
        outermost, self._is_evaluating = not self._is_evaluating, True
        if outermost or gen_kwargs:
            self._given = gen_kwargs
        try:
            yield
        finally:
            self._is_evaluating = not outermost

    def _show_samples(self, dataloader: Any, output: EvalLoopOutput, prefix: str) -> None:
        number, dataset = self._generation.generation_samples, getattr(dataloader, "dataset", None)
        self.generated_samples = generate.samples(
            dataset,
            output.predictions,
            output.label_ids,
            self.text_tokenizer,
            number,
            main_input=self.main_input,
            encodes=wrapping.is_encoder_decoder(self.model),
        )
        if self.generated_samples:
            shown = generate.table(self.generated_samples)
            logger.info("%s at step %d, the first rows:\n%s", prefix, self.state.global_step, shown)
            if self.is_in_train:
                written.append(self.generated_samples, self.state.global_step, self.args.output_dir)

    def _pad_tensors_to_max_len(self, tensor: torch.Tensor, max_length: int) -> torch.Tensor:
        """(B, T) filled up with the pad token to (B, max_length). For scripts that override `prediction_step`."""
        pad = generate.padding_id(self.processing_class, self.model)
        return nn.functional.pad(tensor, (0, max_length - tensor.shape[-1]), value=pad)
