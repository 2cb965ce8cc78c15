"""The base of trainers of language models: it loads model and tokenizer, and prepares rows."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from posttrain.core.data import pipeline
from posttrain.core.distributed import environment
from posttrain.core.models import trainable
from posttrain.core.trainer import Trainer
from posttrain.core.training import preflight as checks
from posttrain.core.training.preflight import Parts, Problem, caught
from posttrain.lm.attention.activation_offloading import offloading, with_offloading
from posttrain.lm.images.images import has_images
from posttrain.lm.images.vision import CountedBatch
from posttrain.lm.loading import adapters, loading, quantization
from posttrain.lm.preparation.pipeline import TokenReport
from posttrain.lm.preparation.row_reports import naming_undecodable
from posttrain.lm.text import chat_template

logger = logging.getLogger(__name__)


class LanguageModelTrainer(Trainer):
    """A `Trainer` whose model and tokenizer may be given by name, and whose rows are text, messages or images.

    Args:
        args: a config of `config_class`.
        parts: what the trainer was given besides. Model and tokenizer are loaded where they are names or left out.
        preprocess_logits_for_metrics: as for `Trainer`.
        old_names: arguments under their earlier names, see `Trainer.OLD_ARGUMENTS`.

    A subclass makes the config and `parts` of its own arguments, calls this constructor, `look_at_model` and
    `prepare_datasets`.

    Attributes:
        sees: whether rows have images, which a processor reads.
        data_reports: what became of the rows of each dataset, by name.
    """

    #: What the model may be, for the message about anything else.
    takes: ClassVar[str] = "pass a language model, or the name of one."
    #: Whether rows may have images.
    reads_images = True
    #: Counts the rows of a dataset.
    report_class: ClassVar[type[TokenReport]] = TokenReport

    def __init__(
        self,
        args: Any,
        parts: checks.Parts,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        **old_names: Any,
    ) -> None:
        if old_names:
            given = checks.renamed_parts(type(self), old_names, parts.processing_class, parts.callbacks)
            parts.processing_class, parts.callbacks = given
        with naming_undecodable(parts.train_dataset, "train"):
            self.sees = self.shows_images(args, parts)
            self._auto_classes = loading.SEEING if self.sees else loading.READING
            parts.auto_class = self._auto_classes[1]
            self.run_preflight(args, parts)
        self.before_loading(args, parts)
        pipeline.set_seed(args.seed)  # an adapter's first weights are random
        model = parts.model if parts.model_init is None else trainable.model_of(parts.model_init)
        model, tokenizer = self.load(model, parts.processing_class, args, parts.quantization_config, parts.peft_config)
        self.data_reports: dict[str, Any] = {}
        self._prepared: list[Any] = []
        super().__init__(
            model=model,
            args=args,
            data_collator=self.set_up_batches(model, tokenizer, args, parts),
            train_dataset=parts.train_dataset,
            eval_dataset=parts.eval_dataset,
            processing_class=tokenizer,
            compute_loss_func=parts.compute_loss_func,
            compute_metrics=parts.compute_metrics,
            callbacks=parts.callbacks,
            optimizers=parts.optimizers,
            optimizer_cls_and_kwargs=parts.optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self.model_init = parts.model_init
        self._parts: Any = None if parts.model_init is None else parts  # those of each further model
        self._offload = offloading(self.model, self.dist.device) if args.activation_offloading else None

    # ------------------------------------------------------------------------------------------------ for subclasses

    @classmethod
    def preflight(cls, args: Any, parts: checks.Parts) -> Iterator[checks.Problem]:
        """Adds problems with the model, its adapter and its tokenizer."""
        yield from model_problems(args, parts, cls.takes)
        yield from super().preflight(args, parts)
        yield from cls.dataset_problems(args, parts)
        yield from tokenizer_problems(args, parts)

    @classmethod
    def dataset_problems(cls, args: Any, parts: checks.Parts) -> Iterator[checks.Problem]:
        """Problems with the datasets, before anything is loaded."""
        if parts.train_dataset is None and parts.eval_dataset is None:
            yield ValueError("`train_dataset` is required: pass one, or an eval_dataset to evaluate alone.")

    def shows_images(self, args: Any, parts: checks.Parts) -> bool:
        """Whether the model and the tokenizer are those of a model that sees: rows have images."""
        datasets = (parts.train_dataset, parts.eval_dataset)
        return self.reads_images and parts.data_collator is None and any(map(has_images, datasets))

    def before_loading(self, args: Any, parts: checks.Parts) -> None:
        """What is made of `args` and `parts` once the checks have passed, before the model is loaded."""

    def load(
        self, model: nn.Module | str, tokenizer: Any, args: Any, quantization_config: Any, peft_config: Any
    ) -> tuple[nn.Module, Any]:
        """(model, tokenizer), loaded where they are given by name, with the adapter of `peft_config`."""
        if isinstance(model, (str, os.PathLike)):
            kwargs = dict(args.model_init_kwargs or {})
            if quantization.asked_bits(kwargs, quantization_config):  # else it goes to the first GPU
                kwargs.setdefault("device_map", {"": str(environment.device(args.use_cpu))})
            options = (quantization_config, args.trust_remote_code, self._auto_classes[0])
            model = loading.load_causal_lm(model, kwargs, *options)
        self.check_model(model)
        loading.obey_softcap(model)
        if tokenizer is None:
            tokenizer = loading.load_tokenizer(model, args.trust_remote_code, self._auto_classes[1])
        tokenizer = self.set_tokens(tokenizer, args)
        return adapters.set_trained(model, peft_config, args.train_parts), tokenizer

    def check_model(self, model: Any) -> None:
        """Raise TypeError for a model that this trainer does not train."""

    def set_tokens(self, tokenizer: Any, args: Any) -> Any:
        """`tokenizer` with the chat template and the special tokens that `args` names, and with one for padding."""
        chat_template.set_up_tokenizer(tokenizer, args)
        return tokenizer

    def look_at_model(self, parts: checks.Parts) -> None:
        """Set up what hangs on the model as it is on its device: that of the constructor, and each of `model_init`."""

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """As the core's; the model gets the adapter, and what the constructor changes in a model."""
        made, parts = super().call_model_init(trial), self._parts
        assert parts is not None  # there is a model_init
        model, _ = self.load(made, self.processing_class, self.args, None, parts.peft_config)
        self.data_collator = self.set_up_batches(model, self.processing_class, self.args, parts)
        return model

    def set_model(self, model: nn.Module) -> None:
        """As the core's, and `look_at_model` for a model of `model_init`."""
        super().set_model(model)
        if self.model_init is not None and self._parts is not None:
            self.look_at_model(self._parts)

    def set_up_batches(self, model: nn.Module, tokenizer: Any, args: Any, parts: checks.Parts) -> Any:
        """The collator: that of `parts`, or one for this model, which is loaded and not yet on its device."""
        return parts.data_collator

    def prepare_rows(self, dataset: Any, role: str, name: str) -> Any:
        """The rows that the collator takes, see `prepare_dataset`; what became of them goes to `report_rows`."""
        return dataset

    # --------------------------------------------------------------------------------------------------- datasets

    def prepare_datasets(self, train_dataset: Any, eval_dataset: Any) -> None:
        """Prepare the datasets that the constructor was given, by name where there are several to evaluate on."""
        if train_dataset is not None:
            self.train_dataset = self.prepare_dataset(train_dataset, "train")
        if isinstance(eval_dataset, Mapping):
            self.eval_dataset = {name: self.prepare_dataset(part, "eval", name) for name, part in eval_dataset.items()}
        elif eval_dataset is not None:
            self.eval_dataset = self.prepare_dataset(eval_dataset, "eval")

    def prepare_dataset(self, dataset: Any, role: str, name: str | None = None) -> Any:
        """`dataset` as rows that the collator takes; one that this has made comes back as it is.

        Args:
            role: "train", "eval" or "test". name: in the report; by default the role.
        """
        name = role if name is None else name
        if any(dataset is ready for ready in self._prepared):
            return dataset
        self._prepared.append(self.prepare_rows(dataset, role, name))
        return self._prepared[-1]

    def report_rows(self, reports: Mapping[str, TokenReport]) -> None:
        """Log what became of the rows of datasets, by name, and keep it in `data_reports`."""
        self.data_reports |= reports
        for report in reports.values() if self.dist.is_main else ():
            if report.rows_in:
                report.log(logger)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> torch.utils.data.DataLoader:
        """As the core's; rows that were not prepared at construction are prepared here."""
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self.prepare_dataset(eval_dataset, "eval")
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> torch.utils.data.DataLoader:
        """As the core's; the rows are prepared here."""
        return super().get_test_dataloader(self.prepare_dataset(test_dataset, "test"))

    def prepare_inputs(self, inputs: Any) -> Any:
        """As the core's; what became of rows with images goes into their data report."""
        if isinstance(inputs, CountedBatch) and (facts := inputs.take_facts()) is not None:
            name = "train" if self.model.training else "eval"
            rows = len(self.train_dataset) if name == "train" and pipeline.has_length(self.train_dataset) else None
            report = self.data_reports.setdefault(name, self.report_class(name))
            report.add_read(facts, self.args.on_bad_rows, logger, rows)
        return super().prepare_inputs(inputs)

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager:
        """Moves activations to host memory if ``activation_offloading`` is set."""
        context = super().compute_loss_context_manager()
        # Nothing is saved where there are no gradients, as in sampling, which may run in other threads meanwhile.
        if self._offload is None or not torch.is_grad_enabled():
            return context
        return with_offloading(context, self._offload)


def model_problems(args: Any, parts: Parts, wanted: str) -> Iterator[Problem]:
    """Problems with the model, or with the loading options of a named one, and with its adapter.

    Args:
        parts: gets a `read_config`, where a named model can be read.
        wanted: what the trainer takes, for the message about anything else.
    """
    if parts.model_init is not None:
        if parts.model is not None:
            yield ValueError("model and model_init were both given; pass one of them.")
        if isinstance(parts.model_init, nn.Module):
            yield TypeError("model_init is a model; pass the function that makes it, without calling it.")
    elif not parts.is_named and not isinstance(parts.model, nn.Module):
        yield TypeError(f"model is of type {type(parts.model).__name__}; {wanted}")
    kwargs = args.model_init_kwargs
    if parts.is_named:
        if loading.missing_folder(parts.model) is None:
            read = loading.explain_missing(os.fspath(parts.model), "model")(loading.config_of)
            parts.read_config = lambda: read(parts.model, kwargs or {}, args.trust_remote_code)
        yield from loading.loading_problems(parts.model, kwargs, parts.quantization_config)
        bits = quantization.asked_bits(kwargs, parts.quantization_config)
        is_adapter = loading.is_adapter(parts.model)
        if bits and parts.peft_config is None and parts.train_dataset is not None and not is_adapter:
            yield (
                f"{bits}=True loads quantized weights, which cannot be trained themselves. Pass peft_config (e.g. "
                "peft.LoraConfig()) to train an adapter on them, or load the model unquantized"
            )
    elif kwargs is not None or parts.quantization_config is not None:
        yield ValueError("A model was passed: leave out model_init_kwargs and quantization_config, which load one.")
    if isinstance(parts.ref_model, nn.Module) and parts.ref_model is parts.model:
        yield ValueError("ref_model is the model itself, so it would move with it. Leave it out: a copy is made.")
    if isinstance(parts.ref_model, (str, os.PathLike)):
        yield from loading.loading_problems(parts.ref_model, kwargs, None)
    if parts.peft_config is not None:
        yield from caught(adapters.check_peft_config, parts.peft_config)


def tokenizer_problems(args: Any, parts: Parts) -> Iterator[Problem]:
    """Problems with the tokenizer or the named special tokens; loads a named model's tokenizer, which is small."""
    if parts.processing_class is None and parts.is_named and loading.missing_folder(parts.model) is None:
        try:
            parts.processing_class = loading.load_tokenizer(parts.model, args.trust_remote_code, parts.auto_class)
        except (OSError, ValueError, ImportError) as error:
            yield error
    if parts.processing_class is not None:
        yield from chat_template.token_problems(parts.processing_class, args)
    if (template := vars(args).get("chat_template_path")) is not None:
        yield from caught(chat_template.load_template, template, args.trust_remote_code)
