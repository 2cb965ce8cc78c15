"""Supervised fine-tuning: rows of text in, token cross-entropy out. Loop, checkpoints and processes are the core's."""

from __future__ import annotations

import dataclasses
import json
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from posttrain.core import Trainer, TrainingArguments, chat, models
from posttrain.core.errors import ConfigError, DataError
from posttrain.sft.collators import SFTCollator
from posttrain.sft.config import SFTConfig
from posttrain.sft.dataset import DataReport, prepare_dataset
from posttrain.sft.packing import documents_leak, pack_dataset

logger = logging.getLogger(__name__)

#: Arguments that the trainer itself took in earlier versions, and the fields of `SFTConfig` that they are now.
MOVED_TO_CONFIG = {
    "dataset_text_field": "dataset_text_field",
    "max_seq_length": "max_length",
    "max_length": "max_length",
    "packing": "packing",
    "eval_packing": "eval_packing",
    "dataset_num_proc": "dataset_num_proc",
    "dataset_kwargs": "dataset_kwargs",
    "model_init_kwargs": "model_init_kwargs",
}


class SFTTrainer(Trainer):
    """Fine-tunes a causal language model on text, on prompts and completions, or on conversations.

    Args:
        model: a causal language model, or the name or folder of one to load.
        args: an `SFTConfig`; plain `TrainingArguments` are taken over, with the defaults of `SFTConfig` for the rest.
        data_collator: makes a batch of prepared rows; by default `SFTCollator`.
        train_dataset: rows with a `text`, a `prompt` and a `completion`, `messages`, or `input_ids`.
        eval_dataset: such rows, or a dict of several sets by name.
        processing_class: the tokenizer; by default the one that belongs to the model.
        peft_config: train adapters (LoRA and kin) instead of the model's own weights.
        formatting_func: ``row -> text`` (or a list of texts), for rows of any other shape.
        quantization_config: loads a model given by name in 4 or 8 bits.

    The other arguments are those of `Trainer`.
    """

    config_class = SFTConfig
    signature_columns = ("input_ids", "labels", "position_ids", "seq_lengths", "attention_mask")

    def __init__(
        self,
        model: nn.Module | str,
        args: SFTConfig | TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, float]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        peft_config: Any = None,
        formatting_func: Callable[[dict[str, Any]], str | list[str]] | None = None,
        quantization_config: Any = None,
        **old_names: Any,
    ) -> None:
        args = as_sft_config(args, {name: old_names.pop(name) for name in list(old_names) if name in MOVED_TO_CONFIG})
        tokenizer = processing_class or old_names.pop("tokenizer", None)
        model, tokenizer = self._load(model, tokenizer, args, quantization_config, peft_config)
        self._formatting_func, self.data_reports = formatting_func, {}
        self._skip_preparation = bool(_as_dict(args.dataset_kwargs).get("skip_prepare_dataset"))
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator or _collator(args, tokenizer),
            processing_class=tokenizer,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            **old_names,
        )
        if args.packing or args.eval_packing or args.padding_free:
            _refuse_leaks(self.model)
        if train_dataset is not None:
            self.train_dataset = self._prepare(train_dataset, "train", args.packing)
        if isinstance(eval_dataset, dict):
            self.eval_dataset = {n: self._prepare(part, n, args.eval_packing) for n, part in eval_dataset.items()}
        elif eval_dataset is not None:
            self.eval_dataset = self._prepare(eval_dataset, "eval", args.eval_packing)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Cross-entropy of the labelled tokens, shape (). Logits exist only where `return_outputs` asks for them.

        Also logs `mean_token_accuracy` and `entropy` (in nats), from the same pass over the vocabulary.
        """
        if return_outputs or self.compute_loss_func is not None or self._needs_logits:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        items = self.count_items(inputs)
        unlabelled = {name: value for name, value in inputs.items() if name != "labels"}
        smoothing = self.args.label_smoothing_factor
        with models.loss_in_head(model, inputs["labels"], label_smoothing=smoothing):
            loss_sum, correct, entropy = model(**unlabelled).logits
        self.metrics.add_sum("mean_token_accuracy", correct.detach(), items)
        self.metrics.add_sum("entropy", entropy.detach(), items)
        return loss_sum / (items if num_items_in_batch is None else num_items_in_batch)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> torch.utils.data.DataLoader:
        """As the core's; rows that were not prepared at construction are prepared here."""
        if eval_dataset is not None and not isinstance(eval_dataset, str) and not self._skip_preparation:
            eval_dataset = self._prepare(eval_dataset, "eval", self.args.eval_packing)
        return super().get_eval_dataloader(eval_dataset)

    # ------------------------------------------------------------------------------------------------ behind the doors

    def _load(
        self, model: nn.Module | str, tokenizer: Any, args: SFTConfig, quantization_config: Any, peft_config: Any
    ) -> tuple[nn.Module, Any]:
        if isinstance(model, str):
            options = {"quantization_config": quantization_config, "trust_remote_code": args.trust_remote_code}
            model = models.load_causal_lm(model, _as_dict(args.model_init_kwargs), **options)
        elif args.model_init_kwargs is not None or quantization_config is not None:
            raise ValueError("model_init_kwargs and quantization_config load a model by name, but a model was passed.")
        if tokenizer is None:
            tokenizer = models.load_tokenizer(model, trust_remote_code=args.trust_remote_code)
        if args.chat_template_path is not None:
            tokenizer.chat_template = chat.load_template(args.chat_template_path)
        for name in ("eos_token", "pad_token"):
            token = getattr(args, name)
            if token is not None and tokenizer.convert_tokens_to_ids(token) in (None, tokenizer.unk_token_id):
                raise ValueError(f"{name}={token!r} is not in the tokenizer's vocabulary; name a token that is.")
            if token is not None:
                setattr(tokenizer, name, token)
        if done := models.ensure_pad_token(tokenizer):
            logger.info(done)
        if peft_config is not None:
            model = models.add_adapter(model, peft_config)
        elif models.is_quantized(model) and not models.is_peft_model(model):
            raise ValueError("A quantised model cannot be trained by itself; pass peft_config to train adapters on it.")
        why_not = models.supports_loss_in_head(model)
        if getattr(model.config, "output_router_logits", False):
            why_not = "the router's auxiliary loss is computed together with the logits."
        if why_not:
            logger.info("The logits of each batch are held whole: %s", why_not)
        self._needs_logits = why_not is not None
        return model, tokenizer

    def _prepare(self, dataset: Any, name: str, packing: bool | None) -> Any:
        """`dataset` tokenised, masked and packed; what happened to its rows is logged and kept in `data_reports`."""
        if self._skip_preparation:
            return dataset
        args = self.args
        with self.dist.main_first():  # one process writes the cache, the others read it
            dataset, report = prepare_dataset(
                dataset,
                self.processing_class,
                text_field=args.dataset_text_field,
                max_length=None if packing and args.packing_strategy != "bfd" else args.max_length,
                truncation=args.truncation_mode,
                completion_only_loss=args.completion_only_loss,
                assistant_only_loss=args.assistant_only_loss,
                formatting_func=self._formatting_func,
                eos_token=args.eos_token,
                num_proc=args.dataset_num_proc,
                name=name,
            )
            if packing and not hasattr(dataset, "__len__"):
                raise DataError(
                    f"{name}: packing fits whole documents together, so it must know them all, and a stream ends nobody "
                    "knows where. Set packing=False, or load the rows with streaming=False."
                )
            if packing:
                dataset = dataset.shuffle(seed=args.seed) if args.shuffle_dataset and name == "train" else dataset
                dataset = pack_dataset(dataset, args.max_length, args.packing_strategy)
        self.data_reports[name]: DataReport = report
        if self.dist.is_main:
            for line in report.lines():
                logger.info(line)
        return dataset


def as_sft_config(args: TrainingArguments | None, moved: dict[str, Any]) -> SFTConfig:
    """The `SFTConfig` that `args` and the arguments that earlier versions took elsewhere amount to."""
    if args is None:
        args = SFTConfig(**{MOVED_TO_CONFIG[name]: value for name, value in moved.items()})
    elif not isinstance(args, SFTConfig):
        fields = {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.init}
        known = {field.name for field in dataclasses.fields(SFTConfig)}
        args = SFTConfig(**{name: value for name, value in fields.items() if name in known})
        logger.info("Plain TrainingArguments were given: data preparation follows the defaults of SFTConfig.")
    changes, problems = {}, []
    default = {field.name: field.default for field in dataclasses.fields(SFTConfig)}
    for old, value in moved.items():
        new = MOVED_TO_CONFIG[old]
        if getattr(args, new) not in (default[new], value):
            problems.append(f"{old}={value!r} was passed to SFTTrainer, and {new}={getattr(args, new)!r} in its args")
        changes[new] = value
        warnings.warn(f"SFTTrainer: {old}= is now SFTConfig({new}=...); both work.", FutureWarning, stacklevel=3)
    if problems:
        raise ConfigError("SFTTrainer", problems)
    return dataclasses.replace(args, **changes) if changes else args


def _refuse_leaks(model: nn.Module) -> None:
    leak = documents_leak(model)
    if leak > 1e-4:
        raise ValueError(
            f"{type(models.base_model(model)).__name__} lets the documents of a packed row see each other (its logits differ "
            f"by {leak:.2g} from those of a document alone). Set packing=False and padding_free=False, or load the model with "
            "attn_implementation='sdpa' or 'flash_attention_2' if it knows them."
        )


def _collator(args: SFTConfig, tokenizer: Any) -> SFTCollator:
    multiple = args.pad_to_multiple_of
    if multiple == "auto":
        multiple = 8 if torch.cuda.is_available() and not args.use_cpu and (args.bf16 or args.fp16) else None
    return SFTCollator(tokenizer.pad_token_id, pad_to_multiple_of=multiple, padding_free=args.padding_free)


def _as_dict(value: dict[str, Any] | str | None) -> dict[str, Any]:
    return json.loads(value) if isinstance(value, str) else value or {}
