"""The base of preference trainers: scores pairs under the policy and a reference and computes a loss for each pair.

An algorithm is a subclass with a config and one method, ``preference_loss(chosen, rejected, inputs)``, which returns a
loss for each of B pairs from the `Completions` of both sides.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.core import TrainingArguments
from posttrain.core.data import pipeline
from posttrain.core.evaluation import eval_loop
from posttrain.core.losses import normalization
from posttrain.core.models import embeddings, regularization, wrapping
from posttrain.core.models.special_tokens import tokenizer_of
from posttrain.core.state import TrainOutput
from posttrain.core.training import preflight as checks
from posttrain.lm.attention import varlen_attention
from posttrain.lm.attention.document_positions import invocation_tokens
from posttrain.lm.generate import samples as written
from posttrain.lm.generate.completion_callbacks import Prompt, complete
from posttrain.lm.images.images import columns_of
from posttrain.lm.images.vision import VisionProcessor
from posttrain.lm.loading import loading
from posttrain.lm.loss import lm_head
from posttrain.lm.trainer import LanguageModelTrainer
from posttrain.rl.policy import reference as references
from posttrain.rl.policy.loading import refuse_other_models
from posttrain.rl.policy.logprobs import CompletionScores, Encoder, score_completions, sharing_problem
from posttrain.rl.policy.overrides import PREFERENCE_METHODS, has_own_loss
from posttrain.rl.preference import precomputed
from posttrain.rl.preference.arguments import PreferenceConfig, as_config
from posttrain.rl.preference.batches import Completions, PreferenceCollator, pair_metrics
from posttrain.rl.preference.data import PreferenceReport, prepare_preferences
from posttrain.rl.preference.images import COLUMNS, check_images, image_collator, row_lengths, rows_with_images
from posttrain.rl.preference.rows import REFERENCE_COLUMNS, preparation_options

logger = logging.getLogger(__name__)

Losses = tuple[torch.Tensor, torch.Tensor, "torch.Tensor | None", Callable[[], None]]
"""(loss of each row, (B,), rewards without a gradient, auxiliary loss of routers, what logs the metrics)."""


class PreferenceTrainer(LanguageModelTrainer):
    """The shared half of the trainers of preferences; see `posttrain.rl.algorithms.dpo.DPOTrainer` for the arguments.

    Attributes:
        reference: where reference log-probabilities come from; None where they are not needed.
        ref_model: the reference, called like the model; None where they are precomputed, or not needed.
    """

    config_class = PreferenceConfig
    args: PreferenceConfig
    report_class = PreferenceReport
    evaluation_metrics = None
    logs_num_tokens = True
    signature_columns: tuple[str, ...] | None = ("prompt_ids", "chosen_ids", "rejected_ids", *REFERENCE_COLUMNS)
    fixed_at_construction: tuple[str, ...] = tuple(
        "disable_dropout faulty_rows long_rows max_length pad_to_multiple_of padding_free precompute_ref_log_probs "
        "shared_prefix sync_ref_model truncation_mode".split()
    )
    #: Pairs, or single completions with a verdict ("unpaired_preference").
    data_kind = "preference"

    @property
    def completions_per_row(self) -> int:
        """The chosen, the rejected, and others, which `preference_loss` finds as ``inputs["more_completions"]``."""
        return 2

    #: Whether the loss compares the policy with a reference.
    needs_reference = True
    INSTEAD = PREFERENCE_METHODS
    _model_hash: str | None = None
    _starts_at_reference = False

    def __init__(
        self,
        model: nn.Module | str | None = None,
        ref_model: nn.Module | str | None = None,
        args: PreferenceConfig | TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable[..., dict[str, float]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        **old_names: Any,
    ) -> None:
        if isinstance(ref_model, TrainingArguments):
            raise TypeError(f"{type(self).__name__} takes ref_model before args, as trl's does; pass args=...")
        args = as_config(type(self), args, old_names)
        optimizer_cls_and_kwargs = old_names.pop("optimizer_cls_and_kwargs", None)
        parts = checks.Parts.of(locals())
        super().__init__(args, parts, **old_names)
        self.reference: references.Reference | None = None
        self.ref_model: Any = None
        self.look_at_model(parts)
        self.prepare_datasets(train_dataset, eval_dataset)

    # ------------------------------------------------------------------------------------------------ for algorithms

    @property
    def token_stats(self) -> tuple[str, ...]:
        """What is computed for each completion token in addition to its log-probability."""
        return "entropy", "correct", "mean_logit"

    @property
    def reference_columns(self) -> tuple[str, ...]:
        """What `reference_logp` gives of each row, by the names under which it is kept where it is precomputed."""
        return REFERENCE_COLUMNS

    def preference_loss(self, chosen: Completions, rejected: Completions, inputs: dict[str, Any]) -> torch.Tensor:
        """The loss of each pair, (B,). An algorithm is this method."""
        raise TypeError(f"{type(self).__name__} has no preference_loss(chosen, rejected, inputs); define it.")

    def completion_logp(self, scores: CompletionScores) -> torch.Tensor:
        """(K,) from (K, T): what the log-probability of a completion is made of. The sum over its tokens."""
        return scores.logps.sum(1)

    def make_collator(self, tokenizer: Any, args: Any) -> Callable[[list[Any]], Any]:
        """What makes a batch of prepared rows."""
        pad = tokenizer_of(tokenizer).pad_token_id
        return PreferenceCollator(pad, self._shared, args.padding_free, args.pad_to_multiple_of, self._encoder)

    def look_at_model(self, parts: checks.Parts) -> None:
        """Makes the reference."""
        if not self.needs_reference:
            return
        args, given = references.arguments_of(self.args), parts.ref_model
        is_fresh = parts.peft_config is not None and not loading.is_adapter(parts.model)
        movers = references.movers(self.callback_handler.callbacks, self.model, args.precompute_ref_log_probs)
        plain = self.args.disable_dropout and not self.args.neftune_noise_alpha
        self._starts_at_reference = given is None and plain
        if args.precompute_ref_log_probs and given is None and self.model_init is not None:
            raise ValueError(
                "precompute_ref_log_probs=True computes the reference once, and model_init makes another at each "
                "train; set it to False, or pass ref_model."
            )
        if args.precompute_ref_log_probs and given is None and not wrapping.is_peft_model(self.model):
            self.reference = references.PolicyAsReference(self.model)
            return
        reference = references.set_up_reference(self.model, given, is_fresh, args, self.dist, movers)
        self.reference, self.ref_model = reference, reference.model
        if args.sync_ref_model:
            self.remove_callback(references.SyncReference)  # of the model before
            steps = args.ref_model_mixup_alpha, args.ref_model_sync_steps
            self.add_callback(references.SyncReference(reference, *steps))

    def check_model(self, model: Any) -> None:
        """Raise TypeError for a model without a head for tokens."""
        refuse_other_models(model, needs_config=True)

    def set_up_batches(self, model: nn.Module, tokenizer: Any, args: Any, parts: checks.Parts) -> Any:
        """Also loads the reference."""
        if self.sees:
            check_images(args, tokenizer, wrapping.base_model(model))
        if isinstance(parts.ref_model, (str, os.PathLike)):
            auto_class = (loading.SEEING if self.sees else loading.READING)[0]
            loaded = (args.model_init_kwargs, None, args.trust_remote_code, auto_class)
            parts.ref_model = loading.load_causal_lm(parts.ref_model, *loaded)
        if parts.ref_model is not None:
            references.check_vocabulary(parts.ref_model, model, tokenizer)
        both = [one for one in (model, parts.ref_model) if one is not None]
        for one in both if args.disable_dropout else ():
            regularization.disable_dropout(one)
        self._encoder = Encoder.of(model, tokenizer)
        self._choose_layout(both, args, tokenizer)
        collate = parts.data_collator or self.make_collator(tokenizer, args)
        if not self.sees:
            return collate
        self.signature_columns = (*COLUMNS, *columns_of(parts.train_dataset, parts.eval_dataset))
        return image_collator(tokenizer, model, args, self.data_kind, collate, not self._own_loss, self._shared)

    def arrange(self, dataset: Any) -> Any:
        """Prepared rows plus whatever else the collator needs; called before anything is computed from them."""
        return dataset

    # ---------------------------------------------------------------------------------------------- overridable methods

    def row_lengths(self, dataset: Any) -> list[int]:
        read = self.signature_columns or (), self.completions_per_row
        return row_lengths(dataset, self.data_collator, *read, self._shared, self.args.padding_free)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Starts training; a reference that is the policy itself can no longer be evaluated."""
        if isinstance(self.reference, references.PolicyAsReference):
            self.reference.let_go()
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The mean loss over the rows of the window, shape (), with that of the routers.

        With `return_outputs` also ``{"rewards": ...}``: (B, 2) of the chosen and the rejected completion of each pair,
        (B,) of completions that are no pairs.
        """
        losses, rewards, aux_loss, log = self._losses(model, inputs)
        if aux_loss is not None:
            losses = losses + self.router_aux_loss_coef * aux_loss
        if not pipeline.is_filler(inputs):
            if aux_loss is not None:
                self.metrics.add_sum("aux_loss", aux_loss.detach() * len(losses), len(losses))
            log()
        loss = losses.sum() / (len(losses) if num_items_in_batch is None else num_items_in_batch)
        return (loss, {"rewards": rewards}) if return_outputs else loss

    def _losses(self, model: nn.Module, inputs: dict[str, Any]) -> Losses:
        """Of the rows of a batch."""
        chosen, rejected, aux_loss = self.score(model, inputs)
        losses = self.preference_loss(chosen, rejected, inputs)
        rewards = torch.stack([self.rewards(chosen), self.rewards(rejected)], 1).detach()

        def log() -> None:
            for name, total, count in pair_metrics(chosen, rejected, rewards, self.compared_logp):
                self.metrics.add_sum(name, total, count)

        return losses, rewards, aux_loss, log

    def score(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Completions, Completions, torch.Tensor | None]:
        """(chosen, rejected, auxiliary loss of a mixture of experts) of a batch; the reference without gradients."""
        (chosen, rejected, *more), aux_loss = self._sides(model, inputs)
        inputs.update({"more_completions": more} if more else {})
        return chosen, rejected, aux_loss

    def _sides(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[list[Completions], torch.Tensor | None]:
        """(each completion of all rows, auxiliary loss) of a batch."""
        options = {"output_router_logits": True} if self.router_aux_loss_coef else {}
        scores = score_completions(model, inputs, stats=self.token_stats, **options)
        logp = self.completion_logp(scores)
        ref_logp = self.reference_logp(inputs) if self.needs_reference else None
        size, sides = len(logp) // self.completions_per_row, []
        for part in (slice(first, first + size) for first in range(0, len(logp), size)):
            stats = {name: stat[part] for name, stat in scores.stats.items()}
            tokens = CompletionScores(scores.logps[part], scores.mask[part], stats)
            sides.append(Completions(logp[part], None if ref_logp is None else ref_logp[part], tokens))
        self._check_start(model, sides, lambda: self._sides(model, inputs)[0])
        return sides, scores.aux_loss if self.router_aux_loss_coef else None

    def reference_logp(self, inputs: dict[str, Any]) -> torch.Tensor:
        """(K,) log-probability of each completion in `inputs` under the reference."""
        if self.reference_columns[0] in inputs:
            return torch.cat([inputs[column] for column in self.reference_columns if column in inputs])
        chosen, rejected = self.compute_ref_log_probs(self.model, inputs)
        return chosen if rejected is None else torch.cat([chosen, rejected])

    def compute_ref_log_probs(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B,) log-probabilities of chosen and rejected completions; for the policy itself, those of the reference."""
        chosen, rejected = self._logp_under(model, inputs).chunk(2)
        return chosen, rejected

    def _logp_under(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """(K,) log-probability of each completion under `model`; for the policy itself, under the reference."""
        assert self.reference is not None  # `needs_reference`
        with self.reference.use() as reference:
            asked = reference if wrapping.unwrap(model) is wrapping.unwrap(self.model) else model
            return self.completion_logp(score_completions(asked, inputs))

    def compared_logp(self, side: Completions) -> torch.Tensor:
        """(B,) what of the log-probability of a completion is compared and logged: of the whole, or of a token."""
        return side.logp

    def rewards(self, side: Completions) -> torch.Tensor:
        """(B,) implicit rewards of the policy, for the log."""
        return getattr(self.args, "beta", 1.0) * (side.log_ratio if self.needs_reference else self.compared_logp(side))

    def count_items(self, inputs: dict[str, Any]) -> int:
        """The pairs of a micro-batch."""
        return 0 if pipeline.is_filler(inputs) else len(inputs["completion_mask"]) // self.completions_per_row

    def _weight_of_tokens(self, window: Sequence[Any], side: int) -> torch.Tensor:
        """(), rows of a window for each token of their completions number `side`, over all processes."""
        masks = [inputs["completion_mask"] for inputs in window if not pipeline.is_filler(inputs)]
        sides = [mask.chunk(self.completions_per_row)[side] for mask in masks]
        both = sum(map(self.count_items, window)), sum(mask.sum() for mask in sides)
        rows, tokens = self.dist.sum(torch.stack([normalization.scalar(n, self.dist.device).long() for n in both]))
        return rows / tokens.clamp_min(1)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """(loss, rewards, labels) of an evaluation batch."""
        inputs, loss_only = self.prepare_inputs(inputs), prediction_loss_only
        options: dict[str, Any] = {"label_names": [], "can_return_loss": True, "ignore_keys": ignore_keys}
        compute_loss = self.evaluation_loss(inputs)
        with self.compute_loss_context_manager():
            loss, logits, _ = eval_loop.predict_batch(model, inputs, compute_loss, loss_only=loss_only, **options)
        return loss, logits, None if loss_only else self._verdicts(inputs)

    def _verdicts(self, inputs: dict[str, Any]) -> torch.Tensor:
        """(B,) the label of each pair: the column of its chosen completion, 0."""
        return torch.zeros(self.count_items(inputs), dtype=torch.long)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate; with ``num_eval_samples``, also write answers of policy and reference to samples.jsonl."""
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        one = not isinstance(chosen, Mapping)  # a dict comes one by one
        if one and self.args.num_eval_samples:
            self._write_samples(self.callback_handler.eval_dataloader.dataset)
        return metrics

    # ------------------------------------------------------------------------------------------------ internals

    def loss_is_scaled(self) -> bool:
        return True

    def _choose_layout(self, models: list[nn.Module], args: Any, tokenizer: Any) -> None:
        """Whether prompts are shared, and the reason if not; `models` are the policy and the reference, if it is
        another.
        """
        model = models[0]
        self.router_aux_loss_coef = loading.router_coefficient(model, args.router_aux_loss_coef)
        self.aux_loss_enabled = self.router_aux_loss_coef != 0
        self._own_loss, wanted = has_own_loss(type(self)), args.shared_prefix is not False
        example = VisionProcessor(tokenizer, wrapping.base_model(model)).example() if self.sees and wanted else None
        problem = sharing_problem(models, example, self.router_aux_loss_coef, args.torch_compile)
        if self._own_loss:
            problem = f"{type(self).__name__} overrides compute_loss, which gets a padded row for each completion."
        if problem and (args.shared_prefix or args.padding_free):
            name = "shared_prefix" if args.shared_prefix else "padding_free"
            raise ValueError(f"{name}=True cannot be: {problem} Set {name}=False.")
        self._shared = problem is None and wanted
        if problem and wanted:
            logger.info("Prompts are not shared between completions: %s", problem)
        if self._shared or args.padding_free:
            for one in models:
                varlen_attention.enable_segments(one, example)
            if args.pad_to_multiple_of is not None:
                why = "a batch is one row, which has no padding; shared_prefix=False and padding_free=False pad each"
                logger.warning("pad_to_multiple_of=%d has no effect: %s.", args.pad_to_multiple_of, why)
        if why_not := lm_head.supports_loss_in_head(model):
            logger.info("The logits of each batch are held whole: %s", why_not)

    def _check_start(self, model: nn.Module, sides: Sequence[Completions], score: Callable[[], Any]) -> None:
        """Check once, before the first optimizer step, that policy and reference agree: all margins must be 0."""
        # Without gradients the loss may only be measured, at other weights.
        if not self._starts_at_reference or self.state.global_step > 0 or not torch.is_grad_enabled():
            return
        self._starts_at_reference = False
        half = bool(self.args.bf16 or self.args.fp16)

        def problem_of(sides: Sequence[Completions]) -> str | None:
            reference = torch.cat([side.ref_logp for side in sides if side.ref_logp is not None])
            return references.start_problem(torch.cat([side.logp for side in sides]), reference, half)

        problem = problem_of(sides)
        if self.dist.sum(int(problem is not None)):  # routers with jitter are random in training, and not in evaluation
            with torch.no_grad(), eval_loop.eval_mode(model):
                problem = problem_of(score())
        if problem is not None:
            raise ValueError(problem)

    def _write_samples(self, dataset: Any) -> None:
        from transformers import GenerationConfig

        config: Any = GenerationConfig
        prompts = [row["prompt_ids"] for row in islice(dataset, self.args.num_eval_samples) if len(row["prompt_ids"])]
        models = [model for model in (self.model, self.ref_model) if isinstance(model, nn.Module)]
        with self.dist.gathered(*models):
            if not self.dist.is_main:
                return
            greedy = config(do_sample=False, use_cache=True, max_new_tokens=self.args.max_sample_tokens)
            tokenizer, asked = tokenizer_of(self.processing_class), [Prompt("", prompt) for prompt in prompts]
            columns = {"prompt": tokenizer.batch_decode(prompts)}
            with self.compute_loss_context_manager(), eval_loop.eval_mode(self.model):
                columns["policy"] = complete(self.model, tokenizer, asked, greedy)
            if self.reference is not None and not self.reference.is_gone:
                with self.compute_loss_context_manager(), self.reference.use() as model:
                    columns["reference"] = complete(model, tokenizer, asked, greedy)
        samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        written.append(samples, self.state.global_step, self.args.output_dir)

    def prepare_rows(self, dataset: Any, role: str, name: str) -> Any:
        """`dataset` as tokens, with the reference's log-probabilities if precomputed."""
        if self.sees:
            return rows_with_images(dataset, self.data_kind, name)
        args = self.args
        with self.dist.main_first():  # one process writes the cache, the others read it
            dataset, report = prepare_preferences(
                dataset,
                self.processing_class,
                kind=self.data_kind,
                num_proc=args.dataset_num_proc,
                limits=embeddings.id_limits(self.model),
                on_bad_rows=args.on_bad_rows,
                name=name,
                invocation=invocation_tokens(self.model),
                **preparation_options(args),
            )
        self.report_rows({name: report})
        dataset = self.arrange(dataset)
        if self.needs_reference and references.arguments_of(args).precompute_ref_log_probs:
            dataset = self._precompute(dataset, name)
        return dataset

    @torch.no_grad()
    def _precompute(self, dataset: Any, name: str) -> Any:
        """`dataset` with the reference's log-probability of each completion; every process computes a share of them."""
        if not pipeline.has_length(dataset):
            raise ValueError(precomputed.OF_NO_LENGTH.format(name=name))
        if set(self.reference_columns) <= set(dataset.column_names):
            return dataset
        columns, size = self.reference_columns, len(dataset)
        path = self.dist.on_main(lambda: self._place_of_logps(dataset))
        found = self.dist.on_main(lambda: precomputed.read(path, columns, size))
        if found is not None:
            if self.dist.is_main:
                logger.info("%s: the reference's log-probabilities are those in %s, of an earlier start.", name, path)
        elif self.reference is None or self.reference.is_gone:
            raise ValueError(precomputed.TOO_LATE.format(name=name))
        else:
            found = self._compute_logps(dataset)
            self.dist.on_main(lambda: precomputed.write(path, found))
        for column in columns:
            dataset = dataset.add_column(column, found[column].tolist())
        return dataset

    def _compute_logps(self, dataset: Any) -> dict[str, torch.Tensor]:
        args = self.args
        batch_size = references.arguments_of(args).precompute_ref_batch_size or args.per_device_train_batch_size
        if self.dist.shards:
            self.evaluation_model()  # the policy may be the reference and is on the device only after sharding

        def ask(rows: list[int]) -> torch.Tensor:
            inputs = self.prepare_inputs(self.data_collator([dataset[row] for row in rows]))
            with self.compute_loss_context_manager():
                return self.reference_logp(inputs)

        with eval_loop.eval_mode(self.model):
            return precomputed.compute(len(dataset), batch_size, self.reference_columns, ask, self.dist)

    def _place_of_logps(self, dataset: Any) -> Path | None:
        """Where log-probabilities of `dataset` are kept; None where code of the user's own has a part in them."""
        methods = ("completion_logp", "compute_ref_log_probs", "reference_logp", "_compute_logps")
        owners = [next(kind for kind in type(self).__mro__ if method in vars(kind)) for method in methods]
        if not all(owner.__module__.startswith("posttrain.") for owner in (*owners, type(self.data_collator))):
            return None
        if self._model_hash is None and self.reference is not None and not self.reference.is_gone:
            self._model_hash = precomputed.of_reference(self.reference)  # before sharding and before training
        if self._model_hash is None:
            return None
        args, facts = self.args, dict[str, Any](trainer=type(self).__qualname__, model=self._model_hash)
        facts |= {"precision": self.dist.precision, "columns": self.reference_columns}
        facts |= {"ld_alpha": vars(args).get("ld_alpha"), "max_length": args.max_length}
        return precomputed.place_of(dataset, args.output_dir, facts)

    def checkpoint_parts(self) -> dict[str, Any]:
        """As the core's, with the reference."""
        return super().checkpoint_parts() | ({} if self.reference is None else {"reference": self.reference})
