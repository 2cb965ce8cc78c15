"""The trainer for supervised fine-tuning with token cross-entropy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from posttrain.compat.trainer_names import reads_from_arguments
from posttrain.core import TrainingArguments
from posttrain.core.data import accelerator
from posttrain.core.data.pipeline import is_filler
from posttrain.core.data.samplers import PartSampler
from posttrain.core.errors import DataError
from posttrain.core.fields.old_names import moved_arguments
from posttrain.core.losses import normalization
from posttrain.core.losses.logits import cross_entropy, dynamic_weights
from posttrain.core.models.embeddings import id_limits
from posttrain.core.models.gradient_checkpointing import checkpointing_problem
from posttrain.core.models.special_tokens import tokenizer_of
from posttrain.core.models.wrapping import base_model, config_of, is_encoder_decoder, replaced
from posttrain.core.state import EvalLoopOutput
from posttrain.core.training import preflight
from posttrain.core.training.preflight import Parts, Problem
from posttrain.lm.attention import document_positions, flash_attention, varlen_attention
from posttrain.lm.attention.segments import with_segments, without_padding
from posttrain.lm.generate.predict_with_generate import GeneratesText
from posttrain.lm.images.images import columns_of
from posttrain.lm.images.vision import check_model
from posttrain.lm.loading import loading
from posttrain.lm.loss import lm_head
from posttrain.lm.loss.language_modeling import group_sums
from posttrain.lm.trainer import LanguageModelTrainer
from posttrain.sft import vision
from posttrain.sft.collators import SFTCollator, collator_problems, usable
from posttrain.sft.config import FORMERLY_ITS_OWN, SFTConfig
from posttrain.sft.dataset import DataReport, check_ready, prepare_sets, refuse_mixing, shuffled
from posttrain.sft.mixture import Mixture, budgets_of, check_parts, named_sets, representative, stages_of
from posttrain.sft.packing import refuse_leaks
from posttrain.sft.vision import VisionCollator

logger = logging.getLogger(__name__)

#: Positions whose logits are turned into float32 together, where they must be held whole.
POSITIONS_AT_ONCE = 1024


class _Statistics(NamedTuple):
    """Sums over the labelled tokens of a micro-batch: correct ones, entropy in nats; per dataset, losses and counts."""

    correct: torch.Tensor
    entropy: torch.Tensor
    losses: Any = ()
    counts: Any = ()


@reads_from_arguments("completion_only_loss", "padding_free", "router_aux_loss_coef")
class SFTTrainer(GeneratesText, LanguageModelTrainer):
    """Fine-tunes a causal language model on text, on prompts and completions, or on conversations.

    Args:
        model: a causal language model, or the name or folder of one to load.
        args: an `SFTConfig`; plain `TrainingArguments` are converted, with the defaults of `SFTConfig` for the rest.
        data_collator: makes a batch of prepared rows; by default `SFTCollator`.
        train_dataset: rows with a `text`, a `prompt` and a `completion`, `messages`, or `input_ids`; or a dict of
            several datasets by name, which are mixed, each with its own loss in the log.
        eval_dataset: such rows, or a dict of several sets by name.
        processing_class: the tokenizer, or the processor for rows with images; by default the model's own.
        quantization_config: loads a model given by name in 4 or 8 bits.
        peft_config: train adapters (LoRA and others) instead of the model's own weights.
        formatting_func: ``row -> text`` (or a list of texts), for rows of any other shape.

    The other arguments are those of `Trainer`.
    """

    logs_num_tokens = True
    config_class = SFTConfig
    args: SFTConfig
    takes = "SFTTrainer takes a causal language model, or the name or folder of one."
    report_class = DataReport
    INSTEAD = {"_prepare_dataset": "pass formatting_func, or dataset_kwargs={'skip_prepare_dataset': True}"}
    tag_names = ("posttrain", "sft")
    evaluation_metrics = tuple(
        "mean_token_accuracy entropy aux_loss num_tokens perplexity loss/* token_share/*".split()
    )
    fixed_at_construction = tuple(
        (
            "assistant_only_loss chat_template_kwargs chat_template_path completion_only_loss dataset_kwargs "
            "dataset_max_tokens dataset_text_field dataset_weights eos_token eval_packing max_length packing "
            "packing_strategy pad_to_multiple_of padding_free too_long train_on truncation_mode"
        ).split()
    )
    signature_columns: tuple[str, ...] | None = tuple(
        "input_ids labels position_ids seq_lengths attention_mask source sources".split()
    )

    def __init__(
        self,
        model: nn.Module | str | None = None,
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
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[dict[str, Any]], str | list[str]] | None = None,
        model_init: Callable[..., nn.Module] | None = None,
        **old_names: Any,
    ) -> None:
        moved = {name: old_names.pop(name) for name in list(old_names) if name in FORMERLY_ITS_OWN}
        args = preflight.as_config("SFTTrainer", SFTConfig, args, moved_arguments("SFTTrainer", SFTConfig, moved))
        preflight.refuse_unknown(SFTTrainer, old_names)
        self._formatting_func, self._dft = formatting_func, args.loss_type == "dft"
        self.mixture: Mixture | None = None
        self._sources: tuple[str, ...] = ()
        self._skip_preparation = bool((args.dataset_kwargs or {}).get("skip_prepare_dataset"))
        sets = (*named_sets(train_dataset, "train"), *named_sets(eval_dataset))
        datasets = {f"{name}_dataset": dataset for name, dataset in sets}
        parts = Parts.of(locals(), others={"formatting_func": formatting_func})
        super().__init__(args, parts, preprocess_logits_for_metrics, **old_names)
        self.look_at_model(parts)
        self.prepare_datasets(train_dataset, eval_dataset)
        self.check_generation()

    @classmethod
    def preflight(cls, args: TrainingArguments, parts: Parts) -> Iterator[Problem]:
        """Adds problems with the names in a mixture, with the collator and with `formatting_func`."""
        if isinstance(parts.train_dataset, Mapping):
            yield from preflight.caught(check_parts, parts.train_dataset)
            names = tuple(map(str, parts.train_dataset))
            if isinstance(args, SFTConfig):
                yield from preflight.caught(stages_of, names, args.dataset_weights) if args.dataset_weights else ()
                yield from preflight.caught(budgets_of, names, args.dataset_max_tokens or {})
        elif parts.train_dataset is not None and isinstance(args, SFTConfig):
            yield from preflight.caught(refuse_mixing, args)
        yield from super().preflight(args, parts)
        yield from collator_problems(args, parts.data_collator)
        function = parts.others.get("formatting_func")
        if function is not None and not callable(function):
            yield TypeError(f"formatting_func must be a function of a row, not {function!r}.")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Cross-entropy of the labelled tokens, shape (). Logits exist only if `return_outputs` is True.

        Also logs `mean_token_accuracy` and `entropy` (in nats), from the same pass over the vocabulary; and of several
        datasets ``loss/NAME`` and ``token_share/NAME``, the share of the trained tokens that are of it.
        """
        items, is_real = self.count_items(inputs), not is_filler(inputs)
        count = items if num_items_in_batch is None else num_items_in_batch
        whole = return_outputs or self.compute_loss_func is not None or self._needs_logits
        inputs, sources = self._arranged(inputs, whole)
        if whole:
            loss, outputs = self._loss_of_logits(model, inputs, num_items_in_batch, count)
            found = self._statistics_of(outputs, inputs.get("labels"), sources) if is_real else None
        else:
            loss, outputs, found = self._loss_in_head(model, inputs, sources)
            loss = loss / count
        if self._aux_loss_coef:
            loss = loss + self._aux_loss_coef * outputs.aux_loss * (items / count)  # its share of the trained tokens
        if is_real:
            self._log_statistics(found, outputs, items)
        return (loss, outputs) if return_outputs else loss

    def loss_is_scaled(self) -> bool | None:
        own_logits = self.compute_loss_func is not None or (self._needs_logits and not self._dft)
        return super().loss_is_scaled() if own_logits else True

    def _arranged(self, inputs: dict[str, Any], whole: bool) -> tuple[dict[str, Any], torch.Tensor | None]:
        """The inputs of the model, and (B, T) the number of each token's dataset where several are mixed."""
        if self._aux_loss_coef:
            inputs = {**inputs, "output_router_logits": True}
        if self._reads_segments:  # the noise of NEFTune is scaled by the length of a row, which must then stay
            stay = whole or self.args.neftune_noise_alpha or self._aux_loss_coef
            shown = real_tokens(inputs) if self._aux_loss_coef and "seq_lengths" in inputs else {}
            inputs = (with_segments(inputs) if stay else without_padding(inputs)) | shown
        sources, of_rows, labels = (inputs.get(name) for name in ("sources", "source", "labels"))
        if sources is None and of_rows is not None and labels is not None and len(of_rows) == len(labels):
            sources = of_rows[:, None].expand_as(labels)  # another collator than ours
        return {name: value for name, value in inputs.items() if name not in ("source", "sources")}, sources

    def _loss_in_head(
        self, model: nn.Module, inputs: dict[str, Any], sources: torch.Tensor | None
    ) -> tuple[torch.Tensor, Any, _Statistics]:
        """(summed loss, outputs without logits, statistics) from one pass over the vocabulary, tile by tile."""
        labels, inputs = inputs["labels"], {name: value for name, value in inputs.items() if name != "labels"}
        options: dict[str, Any] = {"label_smoothing": self.args.label_smoothing_factor, "dft": self._dft}
        with lm_head.loss_in_head(model, labels, groups=sources, num_groups=len(self._sources), **options):
            outputs = model(**inputs)
        loss, correct, entropy, *by_source = outputs.logits
        of_each = len(self._sources)
        return loss, outputs, _Statistics(correct, entropy, by_source[:of_each], by_source[of_each:])

    def _loss_of_logits(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None, count: Any
    ) -> tuple[torch.Tensor, Any]:
        """(loss without the router's, outputs) where logits are held whole."""
        if self._dft and self.compute_loss_func is None:
            return normalization.model_loss(model, inputs, count, pass_count=False, loss_func=_dft_loss)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        models_own = self.compute_loss_func is None and not self.args.label_smoothing_factor
        if self._aux_loss_coef and models_own:
            loss = loss - self._aux_loss_coef * outputs.aux_loss  # the model added it, once for each micro-batch
        return loss, outputs

    def row_lengths(self, dataset: Any) -> list[int]:
        """As the core's; of rows with images, the tokens that their images become are counted too."""
        columns = columns_of(dataset) or (dataset[0] if len(dataset) else ())
        if self._image_rows is None or self.args.length_column_name in columns:
            return super().row_lengths(dataset)
        return vision.row_lengths(dataset, self._image_rows)

    def train_sampler(self, dataset: Any) -> torch.utils.data.Sampler[Any] | None:
        """As the core's; the rows of a mixture that is laid over the run are read in their order."""
        epochs = self.args.epochs_of_mixture
        is_ordered = self.mixture is not None and (len(self.mixture.stages) > 1 or epochs != 1)
        is_ordered = is_ordered and dataset is self.train_dataset
        return PartSampler(len(dataset), epochs) if is_ordered else super().train_sampler(dataset)

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ) -> EvalLoopOutput:
        """Adds ``perplexity``, the exponential of the mean loss, where that is plain cross-entropy."""
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        loss, is_plain = output.metrics.get(f"{metric_key_prefix}_loss"), self.compute_loss_func is None
        is_plain = is_plain and not (self._dft or self._aux_loss_coef or self.args.label_smoothing_factor)
        if loss is not None and is_plain:
            output.metrics[f"{metric_key_prefix}_perplexity"] = math.exp(loss) if loss < 700 else math.inf
        return output

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **gen_kwargs: Any
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """As the core's, where the predictions of a mixture of experts are its logits, and not those of its routers."""
        if ignore_keys is None and self._aux_loss_coef:
            ignore_keys = ["past_key_values", "aux_loss", "router_logits", "hidden_states", "attentions"]
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)

    # ------------------------------------------------------------------------------------------------ internals

    def look_at_model(self, parts: Parts) -> None:
        if problem := flash_attention.precision_problem(self.model, self.dist.precision):
            raise ValueError(problem)
        self._packs = self.args.packing or self.args.eval_packing or self.args.padding_free
        document_positions.check_packing(self.model, self.args.max_length if self._packs else 0)
        self._reads_segments = self._enable_segments()
        if self._packs and not self._reads_segments:
            self._refuse_leaks()

    def load(
        self, model: nn.Module | str, tokenizer: Any, args: Any, quantization_config: Any, peft_config: Any
    ) -> tuple[nn.Module, Any]:
        model, tokenizer = super().load(model, tokenizer, args, quantization_config, peft_config)
        if args.activation_checkpointing and (problem := checkpointing_problem(model)):
            raise ValueError(problem)
        self._aux_loss_coef = _aux_loss_coef(model, args.router_aux_loss_coef)
        self.aux_loss_enabled = self._aux_loss_coef != 0
        if why_not := lm_head.supports_loss_in_head(model):
            logger.info("The logits of each batch are held whole: %s", why_not)
        self._needs_logits = why_not is not None
        return model, tokenizer

    def check_model(self, model: Any) -> None:
        """Raise TypeError for a model that is no causal language model."""
        base = base_model(model)
        config, name = config_of(base), type(base).__name__
        if config is None or is_encoder_decoder(base) or loading.has_other_head(base):
            raise TypeError(
                f"model is a {name}; SFTTrainer trains causal language models, as AutoModelForCausalLM loads them. Use "
                "posttrain.core.Trainer for other models."
            )

    def set_up_batches(self, model: nn.Module, tokenizer: Any, args: Any, parts: Parts) -> Any:
        if self.sees:
            vision.check_config(args, tokenizer)
            check_model(base_model(model))
            own_columns = columns_of(parts.train_dataset, parts.eval_dataset)
            self.signature_columns = (*vision.COLUMNS, vision.PACKED, *own_columns)
        parts.train_dataset = representative(parts.train_dataset)  # until they are mixed
        own = usable(args, parts.data_collator)
        collator = own or _collator(args, tokenizer, model, self.sees, self._formatting_func)
        self._image_rows = collator.prepare if isinstance(collator, VisionCollator) else None
        return collator

    def _enable_segments(self) -> bool:
        """Attend to each document by itself, which needs no mask; flash attention gets where documents end."""
        if flash_attention.reads_boundaries(self.model):
            if isinstance(self.data_collator, SFTCollator):
                # The noise of NEFTune is scaled by the length of a row, which must then stay.
                layout = {"flash_kwargs": True, "keep_rows": bool(self.args.neftune_noise_alpha)}
                self.data_collator = dataclasses.replace(self.data_collator, **layout)
            return False
        if self.dist.device.type not in ("cpu", *accelerator.KINDS) or self.args.torch_compile:
            return False
        if self._aux_loss_coef and (not self._packs or self._image_rows is not None):
            logger.info("Attention goes over whole rows, under a mask, by which the router's loss leaves padding out.")
            return False
        example = None if self._image_rows is None else self._image_rows.vision.example()
        problem: str | None = vision.PADDED
        if not example or self._packs:
            with self.dist.autocast(), silent_routers(self.model):  # kernels differ by precision
                problem = varlen_attention.segments_problem(self.model, example)
        if problem:
            logger.info("Attention goes over whole rows, under a mask: %s", problem)
            return False
        with silent_routers(self.model):
            varlen_attention.enable_segments(self.model, example)
        if isinstance(self.data_collator, (SFTCollator, VisionCollator)):
            self.data_collator = dataclasses.replace(self.data_collator, seq_lengths=True)
        return True

    def _refuse_leaks(self) -> None:
        """Test packed rows as in training: two in a batch, on its device, in its precision."""
        collate, of_images = self.data_collator, None
        if isinstance(collate, VisionCollator):
            one_row = flash_attention.reads_boundaries(self.model)
            seeing = self.data_collator = dataclasses.replace(collate, one_row=one_row)
            collate, of_images = seeing.of_tokens, functools.partial(vision.images_leak, collate=seeing)
        elif not isinstance(collate, SFTCollator):
            collate = SFTCollator(0, flash_kwargs=flash_attention.reads_boundaries(self.model))
        with self.dist.autocast():
            refuse_leaks(self.model, self.dist.device, collate, of_images)

    def _statistics_of(
        self, outputs: Any, labels: torch.Tensor | None, sources: torch.Tensor | None
    ) -> _Statistics | None:
        """The statistics of `loss_in_head`, from whole logits; None without logits."""
        logits = outputs["logits"] if isinstance(outputs, dict) and "logits" in outputs else None
        if labels is None or not isinstance(logits, torch.Tensor) or logits.shape[1] < labels.shape[1]:
            return None
        logits = logits.detach()[:, -labels.shape[1] :]  # prompt tuning puts virtual tokens before them
        targets = labels[:, 1:].to(logits.device)
        correct = entropy = torch.zeros((), device=logits.device)
        losses = []
        for places in (targets != -100).nonzero().split(POSITIONS_AT_ONCE):
            logps = logits[places[:, 0], places[:, 1]].float().log_softmax(-1)
            chosen = targets[places[:, 0], places[:, 1]]
            losses.append(-logps.gather(1, chosen[:, None]).squeeze(1))
            correct = correct + (logps.argmax(-1) == chosen).sum()
            entropy = entropy - (logps.exp() * logps).sum()
        if sources is None or not losses:
            return _Statistics(correct, entropy)
        joined = torch.cat(losses)
        joined = joined * dynamic_weights(joined) if self._dft else joined
        groups = sources[:, 1:].to(logits.device)[targets != -100]
        return _Statistics(correct, entropy, *group_sums(joined, groups, len(self._sources)))

    def _log_statistics(self, found: _Statistics | None, outputs: Any, items: torch.Tensor | int) -> None:
        if self._aux_loss_coef:
            self.log_metric("aux_loss", outputs.aux_loss.detach(), items)
        if found is None:
            return
        self.metrics.add_sum("mean_token_accuracy", found.correct.detach(), items)
        self.metrics.add_sum("entropy", found.entropy.detach(), items)
        if len(found.losses):
            for name, loss, count in zip(self._sources, found.losses, found.counts, strict=True):
                self.metrics.add_sum(f"loss/{name}", loss.detach(), count.detach())
                self.metrics.add_sum(f"token_share/{name}", count.detach(), items)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs; a mixture's dataset without tokens since the last record has no loss to log."""
        empty = {f"loss/{name}" for name in self._sources if logs.get(f"token_share/{name}") == 0}
        super().log({name: value for name, value in logs.items() if name not in empty}, start_time)

    def prepare_dataset(self, dataset: Any, role: str, name: str | None = None) -> Any:
        """`dataset` tokenized, masked and packed; as it is where ``skip_prepare_dataset`` is set."""
        if self.sees or not self._skip_preparation:
            return super().prepare_dataset(dataset, role, name)
        if isinstance(dataset, Mapping):
            raise DataError(
                "skip_prepare_dataset takes the rows without preparation, and datasets are mixed only after "
                "preparation. Pass one dataset, or leave skip_prepare_dataset out."
            )
        if isinstance(self.data_collator, SFTCollator):
            check_ready(dataset, role if name is None else name)
        return shuffled(dataset, self.args.seed) if self.args.shuffle_dataset and role == "train" else dataset

    def prepare_rows(self, dataset: Any, role: str, name: str) -> Any:
        # Rows to predict on stay apart, so that each has its prediction.
        packing = bool({"train": self.args.packing, "eval": self.args.eval_packing}.get(role))
        if self._image_rows is not None:
            return vision.ready_rows(dataset, self.args, self._image_rows, packing, name)
        with self.dist.main_first():  # one process writes the cache, the others read it
            done = prepare_sets(
                dataset,
                self.text_tokenizer,
                self.args,
                name=name,
                packing=packing,
                formatting_func=self._formatting_func,
                limits=id_limits(self.model),
                invocation=document_positions.invocation_tokens(self.model),
                rows_per_step=self.get_total_train_batch_size(self.args),
            )
        self.report_rows(done.reports)
        if done.sources:
            self._sources, self.mixture = done.sources, done.mixture
        if done.mixture is not None and self.dist.is_main:
            logger.info("%s", "\n".join([f"{name}: a mixture", *done.mixture.lines()]))
        return done.dataset


def _aux_loss_coef(model: nn.Module, wanted: float | None) -> float:
    """The weight of the router's loss, which `model` then gives its own loss too; 0 for a model without routers."""
    weight, base = loading.router_coefficient(model, wanted), base_model(model)
    config = base.config.get_text_config()
    for holder in (config, base):  # a model may have taken it over from its config when it was made
        if wanted is not None and hasattr(holder, "router_aux_loss_coef"):
            holder.router_aux_loss_coef = wanted
    if loading.has_routers(config):
        config.output_router_logits = weight > 0
    return weight


def silent_routers(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Segments are tried without the routers' loss: it reads a mask of the tokens, which training hands over."""
    config = base_model(model).config.get_text_config()
    asked = loading.has_routers(config) and config.output_router_logits
    return replaced(config, "output_router_logits", False) if asked else contextlib.nullcontext()


def real_tokens(packed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The mask by which the router's loss leaves the padding of packed rows out; attention follows the segments."""
    ids, lengths = packed["input_ids"], packed["seq_lengths"].sum(1, keepdim=True)
    return {"attention_mask": (torch.arange(ids.shape[1], device=ids.device) < lengths).long()}


def _collator(
    args: SFTConfig, tokenizer: Any, model: nn.Module, sees: bool, formatting_func: Callable[..., Any] | None
) -> SFTCollator | VisionCollator:
    multiple = args.pad_to_multiple_of
    if multiple == "auto":
        multiple = 8 if accelerator.gpu() and not args.use_cpu and (args.bf16 or args.fp16) else None
    if sees:
        return vision.vision_collator(tokenizer, base_model(model), args, formatting_func, multiple)
    pad = tokenizer_of(tokenizer).pad_token_id
    return SFTCollator(pad, pad_to_multiple_of=multiple, padding_free=args.padding_free)


def _dft_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int) -> torch.Tensor:
    logits = outputs["logits"][:, -labels.shape[1] :]  # prompt tuning puts virtual tokens before them
    return cross_entropy(logits, labels, num_items_in_batch, dft=True)
