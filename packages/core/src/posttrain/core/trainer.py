"""The training loop, and every method that a subclass overrides to change it.

`Trainer.train` is the loop. The other public methods are hooks: ten lines or fewer that call into modules which know no
trainer. Override a hook to change what happens; use a callback to change when. Below the hooks stands a run from its
set-up to its end, in the order in which it happens.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from posttrain.cli.report import report, run_record
from posttrain.core import hub
from posttrain.core.arguments import TrainingArguments
from posttrain.core.callbacks import (
    FLAGS,
    CallbackHandler,
    ClosingCallback,
    DefaultFlowCallback,
    PrinterCallback,
    ProgressCallback,
)
from posttrain.core.checkpoint import Store, codec, manager, reload, shares, weights
from posttrain.core.checkpoint.manager import CheckpointManager, Contents, Stateful
from posttrain.core.data import pipeline, rng
from posttrain.core.data.batch_limits import check_limits
from posttrain.core.distributed import make_strategy, sharding
from posttrain.core.distributed.stragglers import Pace
from posttrain.core.errors import DataError
from posttrain.core.evaluation import best_model, eval_loop
from posttrain.core.fields.durations import as_steps
from posttrain.core.logging import trackers
from posttrain.core.logging.input_counter import InputCounter
from posttrain.core.logging.memory import MemoryTracker, explain_shortage
from posttrain.core.logging.metrics import (
    FLOPS,
    TOKENS,
    Clock,
    Metrics,
    clock_of,
    is_performance,
    means,
    num_tokens_in,
    speed_metrics,
)  # fmt: skip
from posttrain.core.losses import normalization, scale_check
from posttrain.core.models import (
    compiling,
    embeddings,
    float8,
    gradient_checkpointing,
    liger,
    regularization,
    special_tokens,
    wrapping,
)
from posttrain.core.optim import builder, lr_scheduler, schedule
from posttrain.core.state import EvalLoopOutput, PredictionOutput, TrainerControl, TrainerState, TrainOutput
from posttrain.core.training import (
    allocator,
    argument_changes,
    ema,
    loss_spikes,
    nonfinite,
    nonfinite_report,
    override_checks,
    preemption,
    preflight,
    resume,
)
from posttrain.core.training.hf_compat import HFCompat, accept_old_names
from posttrain.core.training.oom import BatchSplitter
from posttrain.core.training.plan import Plan, Progress, check_intervals, make_plan, steps_left, windows
from posttrain.core.training.preflight import Parts, Problem
from posttrain.core.training.run import RunState
from posttrain.lm.loading import adapters, loading

logger = logging.getLogger(__name__)

#: What stands for a model, an optimizer or a manager until the run makes it.
NOT_MADE: Any = None

DEFAULT_CALLBACKS = [
    DefaultFlowCallback, trackers.JSONLinesCallback, run_record.RunRecordCallback, report.RunReportCallback,
]  # fmt: skip


class Trainer(HFCompat):
    """Trains, evaluates and saves a PyTorch model.

    Args:
        model: a transformers model, or any module that returns a loss (in a dict, or first in a tuple).
        args: the `TrainingArguments`; defaults are taken where it is omitted.
        data_collator: makes a batch of a list of rows; by default pads with `processing_class`, or stacks.
        train_dataset: rows to train on: anything with ``__getitem__`` and ``__len__``, or an iterable dataset.
        eval_dataset: rows to evaluate on, or a dict of such sets by name.
        processing_class: tokenizer or processor; saved with the model.
        model_init: makes a fresh model at each `train`, instead of `model`.
        compute_loss_func: ``(outputs, labels, num_items_in_batch) -> loss``, instead of the model's own loss.
        compute_metrics: ``EvalPrediction -> {name: value}``, or a `StreamingMetric`, for which no prediction is stored.
        callbacks: `TrainerCallback` instances or classes, called after the built-in ones.
        optimizers: ``(optimizer, lr_scheduler)`` to use as they are; either may be None.
        optimizer_cls_and_kwargs: ``(class, arguments)`` of the optimizer, with the usual parameter groups.
        preprocess_logits_for_metrics: ``(logits, labels) -> what is kept`` of each evaluation batch.
    """

    config_class = TrainingArguments
    #: What earlier versions called arguments of the constructor.
    OLD_ARGUMENTS: ClassVar[dict[str, str]] = {"tokenizer": "processing_class", "callback": "callbacks"}
    #: Columns of the dataset that the collator reads; None: the parameters of the model's forward, and the labels.
    signature_columns: tuple[str, ...] | None = None
    #: Arguments that are read when the trainer is built: a hyperparameter search cannot vary them.
    fixed_at_construction: tuple[str, ...] = ()
    #: Names or patterns of the metrics that an evaluation gives without `compute_metrics`; None: not known beforehand.
    evaluation_metrics: tuple[str, ...] | None = ()
    #: Whether `compute_loss` returns ``sum / num_items_in_batch`` (True), a mean (False) or terms of both ("mixed": it
    #: is given the items of each micro-batch). None finds out, by computing it for one micro-batch with one count and
    #: with twice that, at steps 1, 2, 4, 8, ... (`posttrain.core.losses.scale_check`).
    loss_is_scaled_for_ga: bool | str | None = None
    #: What the Hub finds models of this trainer by.
    tag_names: tuple[str, ...] = ()
    #: Whether records of training and of evaluations say how many tokens were trained on so far, as trl's do.
    logs_num_tokens = False
    #: What became of the rows of each dataset, by its name, in trainers that prepare rows.
    data_reports: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, float]] | eval_loop.StreamingMetric | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        **old_names: Any,
    ) -> None:
        if old_names:
            processing_class, callbacks = accept_old_names(self, old_names, processing_class, callbacks)
        preflight.check_types(type(self).__name__, self.config_class, model, model_init, args)
        if args is None:
            args = self.config_class()
            logger.warning("No args were given: defaults are used, and the output goes to %s.", args.output_dir)
        self.args = args
        trackers.set_verbosity(args.get_process_log_level())
        parts = Parts(
            model=model, train_dataset=train_dataset, eval_dataset=eval_dataset, data_collator=data_collator,
            model_init=model_init, compute_loss_func=compute_loss_func, compute_metrics=compute_metrics,
            callbacks=callbacks, optimizers=optimizers, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )  # fmt: skip
        self.run_preflight(args, parts)
        pipeline.enable_full_determinism(args.seed) if args.full_determinism else pipeline.set_seed(args.seed)
        self.dist = make_strategy(args, model)
        self._memory = MemoryTracker(self.dist.device, on=not args.skip_memory_metrics)
        setup = contextlib.ExitStack()
        setup.enter_context(self._memory.stage("init"))
        self.accelerator = self.dist.accelerator
        self.processing_class = processing_class
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.data_collator = data_collator or pipeline.default_collator(processing_class)
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.model_init = model_init
        self._made_optimizer: Any = None  # what this trainer made itself; anything else is the user's, used as it is
        self._made_scheduler: Any = None
        self._check_owners()
        self.run = RunState()
        self.set_model(model if model is not None else self.call_model_init())
        self.store, self.uploader = Store(args.output_dir, args.remote), hub.Uploader(args, args.output_dir)
        self.checkpoints: CheckpointManager = NOT_MADE  # made by all processes together, at the start of `train`
        self.dist.on_main(lambda: Path(args.output_dir).mkdir(parents=True, exist_ok=True))
        self._kept_loaders: dict[str, tuple[Any, Any]] = {}
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        self.is_in_train = False
        self.metrics, self.clock = Metrics(), Clock()
        self._train_batch_size = args.train_batch_size
        self.control = TrainerControl()
        builtin = [*DEFAULT_CALLBACKS, *trackers.tracker_callbacks(args.report_to)]
        self.callback_handler = CallbackHandler([*builtin, *_as_list(callbacks)], self.model, processing_class)
        self.callback_handler.log_metric = _weakly(self, "log_metric")
        self.add_callback(PrinterCallback if args.disable_tqdm else ProgressCallback)
        self.state = self._new_state()
        setup.close()
        self._fire("on_init_end")

    # ------------------------------------------------------------------------------------------------ checks and model

    @classmethod
    def preflight(cls, args: TrainingArguments, parts: Parts) -> Iterator[Problem]:
        """What is wrong with a run, as far as it shows before a model is loaded or made: sentences, or exceptions.

        Extend it with ``yield from super().preflight(args, parts)``. All problems are raised in one message.

        Args:
            parts: what the trainer was handed beside `args`; see `posttrain.core.training.preflight`.
        """
        yield from preflight.of_arguments(args)
        yield from preflight.of_parts(args, parts)

    _preflight_passed = False

    def run_preflight(self, args: TrainingArguments, parts: Parts) -> None:
        """Raise all problems of the run before a model is loaded. A trainer that loads its model itself calls this
        first; the base class then skips it."""
        if self._preflight_passed:
            return
        parts.trainer_class = type(self)
        preflight.raise_together(type(self).__name__, self.preflight(args, parts))
        self._preflight_passed = True
        for warning in (override_checks.unheard(type(self)), hub.missing_token(args) if args.should_save else None):
            if warning is not None:
                logger.warning(warning)

    def set_model(self, model: nn.Module) -> None:
        """Take `model` as the one to train, and look up once what the run needs to know of it."""
        if self.train_dataset is not None:
            adapters.check_trainable(model)
            nonfinite.check_float16(model, self.dist.precision, self.dist.uses_deepspeed)
        self.model = self.model_wrapped = model
        self._look_up(model, wrapping.base_model(model))
        self._set_objective()
        self.dist.place(model, trained=True)
        for config in wrapping.configs(model):
            config.use_cache = self.args.use_cache

    def _look_up(self, model: nn.Module, base: nn.Module) -> None:
        self.model_accepts_loss_kwargs = normalization.accepts_loss_kwargs(model)
        self.loss_shifts_labels = normalization.shifts_labels(base)
        self.label_names = normalization.label_names(base) if self.args.label_names is None else self.args.label_names
        self.can_return_loss = normalization.can_return_loss(base)
        self.label_smoother = normalization.label_smoother(model, self.args.label_smoothing_factor)
        self.main_input = getattr(base, "main_input_name", "input_ids")
        self._signature_columns: list[str] | None = None
        self._flops_parameters: int | None = None
        pad, count = getattr(self.processing_class, "pad_token_id", None), self.args.include_num_input_tokens_seen
        self._input_counter = InputCounter(self.main_input, pad, count == "non_padding")
        tags = [*self.tag_names, *getattr(self, "_tag_names", ())]
        add_tags: Any = getattr(base, "add_model_tags", None)  # the model's own push_to_hub and the card use them
        if tags and add_tags is not None:
            add_tags(tags)

    def _set_objective(self) -> None:
        """Look at `compute_loss` and `training_step` as they are now: a script may have replaced them since."""
        mixed = self.loss_is_scaled_for_ga == "mixed"
        self._objective = normalization.Objective(self.compute_loss, mixed or self._declared_mean(), own_count=mixed)
        self._is_own_loss = override_checks.is_ours(self, "compute_loss") and self.compute_loss_func is None
        self._step_takes = len(override_checks.taken(self.training_step, None, None, None))
        self._loss_scale = self.dist.world_size if self.args.average_tokens_across_devices else 1
        self._non_blocking = self.args.non_blocking
        self._sync_each_batch = bool(self.args.accelerator_config.accumulation.get("sync_each_batch"))

    def _declared_mean(self) -> bool | None:
        """Whether `compute_loss` is declared to return a mean; None: not declared. What our trainers know of their own
        losses does not hold for a method that replaced them."""
        scaled = self.loss_is_scaled_for_ga
        if scaled is None and override_checks.is_ours(self, "compute_loss"):
            scaled = self.loss_is_scaled()
        return None if scaled is None else not scaled

    def loss_is_scaled(self) -> bool | None:
        """Whether this class' `compute_loss` returns ``sum / num_items_in_batch``; None where only trying shows it."""
        own = self.compute_loss_func is None and self.label_smoother is None
        return False if own and not self.model_accepts_loss_kwargs else None

    # ------------------------------------------------------------------------------------------------ the loop

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train from the start, or go on from a checkpoint bit for bit, also where a callback had stopped the run.

        Args:
            resume_from_checkpoint: a checkpoint directory; True for the newest whole one in ``args.output_dir``; "auto"
                for that, or a start from the beginning where there is none.
            trial: the trial of a hyperparameter search that this run belongs to.
            ignore_keys_for_eval: outputs of the model that are no predictions, in evaluations along the way.
        """
        self.args.validate()  # what was assigned since construction
        self.store.output_dir = Path(self._get_output_dir(trial))
        self.checkpoints = CheckpointManager(self.args, self.dist, self.store)  # as `args` are now
        checkpoint = self.checkpoints.find(resume_from_checkpoint)
        loader = self._adopt(self.get_train_dataloader())
        plan = self.make_plan(loader)
        plan = plan if checkpoint is None else self.resume_plan(plan, loader, checkpoint)
        self.dist.meet("the beginning of training")
        with self._training(plan, loader, checkpoint, trial) as model:
            self._fire("on_train_begin", data_reports=self.data_reports)
            if preemption.may_save(self.args):
                self.checkpoints.check_state(self._contents(), self.state, self._callbacks_with_state())
            self._meet("what callbacks do when training begins")
            epochs = self._epochs_left(plan)
            if self.args.eval_on_start and checkpoint is None:
                self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
            if preemption.unanswered(self.control):  # by the run that was interrupted
                self.restore_rng()
                self._log_evaluate_save(model, trial, ignore_keys_for_eval)
            for epoch in epochs:
                self._begin_epoch(epoch)
                for window, num_items in self.windows_left(plan, loader, epoch):  # the micro-batches of one step
                    self._fire("on_step_begin")
                    self.train_on_window(model, window, num_items)
                    self._advance(plan, len(window))
                    self._fire("on_step_end")
                    self._log_evaluate_save(model, trial, ignore_keys_for_eval)
                    if self.control.should_epoch_stop or self.control.should_training_stop:
                        break
                self._end_epoch(plan, model, trial)
                self._log_evaluate_save(model, trial, ignore_keys_for_eval)
                if self.control.should_training_stop or self._is_over(plan):
                    break
        return self._finish()

    def make_plan(self, loader: Any) -> Plan:
        """How many optimizer steps the run has; see `posttrain.core.training.plan`."""
        args, length = self.args, len(loader) if pipeline.has_length(loader) else None
        epochs = args.num_train_epochs
        return make_plan(length, args.gradient_accumulation_steps, epochs, args.max_steps, args.epochs_of_stream)

    def resume_plan(self, plan: Plan, loader: Any, checkpoint: Path) -> Plan:
        """`plan` for resuming from `checkpoint`, whose optimizer steps may have held another number of rows."""
        place, by_steps = (self.dist.rank, self.dist.world_size), self.args.max_steps > 0
        rows = self.get_total_train_batch_size(self.args)
        return resume.resume_plan(plan, loader, checkpoint, rows, self.batches_left, *place, by_steps)

    def batches_left(self, loader: Any, saved: dict[str, Any]) -> int:
        """Micro-batches, as this run makes them, that are left of the epoch in which a checkpoint was saved.

        Args:
            saved: its `state_dict`, of a run that may have had another batch size or number of processes.
        """
        is_read = saved["loader"]["epoch"] > saved["progress"]["epoch"]
        return 0 if is_read else loader.batches_left(saved["loader"])

    def windows_left(self, plan: Plan, loader: Any, epoch: int) -> Iterator[tuple[list[Any], torch.Tensor | None]]:
        """`windows` of the rest of an epoch; override where they outlive the loader.

        None is left where the checkpoint was saved after the last one, for which the loader had begun the next epoch,
        or where a callback had ended the epoch.
        """
        if loader.epoch == epoch and not self.run.epoch_stopped:
            return self.windows(plan, loader)
        self.run.epoch_stopped = False
        self.restore_rng()
        return iter(())

    def windows(self, plan: Plan, loader: Any) -> Iterator[tuple[list[Any], torch.Tensor | None]]:
        """The data of an epoch, as training sees it: ``(micro-batches, items in them)`` of one optimizer step after
        another. Override to make training data on the way, as online reinforcement learning does."""
        batches = iter(loader)
        asked = override_checks.taken(self.get_batch_samples, batches, plan.accumulation, self.args.device)
        self.restore_rng()  # the first row that is read must find the random numbers of the checkpoint
        while self.state.global_step < plan.max_steps and not self.control.should_training_stop:
            with self.clock("data"):
                window, num_items = self.get_batch_samples(*asked)
            if not window:
                return
            yield window, num_items

    def train_on_window(self, model: nn.Module, window: list[Any], num_items: torch.Tensor | None = None) -> None:
        """One optimizer step over the micro-batches of `window`.

        Args:
            num_items: items in the window over all processes, shape (); counted here if not given.
        """
        if num_items is None:
            # Counted before the first forward: the divisor must be known when the first micro-batch runs backward.
            num_items = self.count_window(window)
        else:
            num_items = normalization.scalar(num_items, self.dist.device)
        if not model.training:
            self._set_train_mode(model)
        run, clock = self.run, self.clock
        clock.begin()
        self._objective.begin_step(self.state.global_step + 1)
        window, losses = run.splitter.run(
            window, self.state.global_step + 1, lambda part: self.accumulate(model, part, num_items), self._undo_point
        )
        losses, num_items = self._objective.divide(
            losses, run.parameters, num_items, self.dist.sum, self._why_no_counts
        )
        loss = sum(losses[1:], start=losses[0])
        grad_norm = run.progress.grad_norm = self.dist.clip_gradients(
            run.parameters, self.args.max_grad_norm, self.optimizer
        )
        clock.lap("backward" if clock.has_laps else "forward_backward")
        self._fire("on_pre_optimizer_step")
        run.progress.learning_rate = self._get_learning_rate()  # the one this step uses, for the log
        run.group_rates = builder.rates_of_groups(self.optimizer)
        may_step, applied = self._may_step(window, losses, loss, grad_norm, num_items), True
        run.is_stepping = True  # until the step is counted, no checkpoint can be written
        if may_step or self.dist.scaler is not None:  # a loss scaler skips by itself, and must see each step
            applied = self.dist.optimizer_step(self.optimizer)
        self._fire("on_optimizer_step")
        if self.args.include_num_input_tokens_seen != "no":  # the schedule may follow them, and callbacks may stop
            self.store_flos()
        if applied:
            schedule.step(self.lr_scheduler, self.state.num_input_tokens_seen)
        for parameter in run.parameters:
            parameter.grad = None
        if run.ema is not None:
            run.ema.update(self.state.global_step + 1)
        clock.lap("optimizer", last=True)
        self._log_step_loss(loss, num_items)

    def accumulate(self, model: nn.Module, window: list[Any], num_items: torch.Tensor | None) -> list[torch.Tensor]:
        """Forward and backward of each micro-batch of `window`; their shares of its loss, shape () each."""
        self.current_gradient_accumulation_steps, losses = len(window), []
        for number, inputs in enumerate(window, start=1):
            with self.dist.sync_gradients(model, when=number == len(window) or self._sync_each_batch):
                losses.append(self._step_on(model, inputs, num_items))
            if not pipeline.is_filler(inputs):
                self._input_counter.add(self.metrics, inputs, self.floating_point_ops(inputs))
            if number < len(window):
                self._fire("on_substep_end")
        return losses

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch; the one place where a loss is scaled.

        Returns:
            The detached share of the window's loss, shape (). The window's loss is the mean of the processes' sums.
        """
        inputs = self.prepare_inputs(inputs)
        if num_items_in_batch is None:  # an override need not hand it on
            num_items_in_batch = self.run.num_items
        # Counted before the loss is computed: old code pops the labels from its inputs.
        count = self._objective.may_be_mean or self._objective.is_open
        items = self.count_items(inputs) if count and num_items_in_batch is not None else None
        with self.compute_loss_context_manager():
            if num_items_in_batch is not None and self._objective.is_open:
                self._find_out_scale(model, inputs, num_items_in_batch, items)
            loss, is_mean = self._objective(self.compute_loss, model, inputs, num_items_in_batch, items)
        weight = None
        if is_mean and items is not None and num_items_in_batch is not None:
            loss, weight = normalization.weighted(loss, items, num_items_in_batch)
        if pipeline.is_filler(inputs):  # it only keeps the processes in step
            loss = loss * 0
        if self._loss_scale != 1:  # processes average their gradients, and each holds a share of one sum
            loss = loss * self._loss_scale
        if self._objective.terms is not None:
            self._objective.keep_terms(weight, 0 if pipeline.is_filler(inputs) else self._loss_scale)
        if self._may_go_backward(loss, items if is_mean else None):
            self.clock.lap("forward")
            self.dist.backward(loss)
            self.clock.lap("backward")
        return loss.detach()

    # ------------------------------------------------------------------------------------------------ the loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """The loss of one micro-batch, shape (). The usual method to override.

        It may also be a pair ``(sum, count)`` of this micro-batch: the trainer divides by all counts of the window, and
        of an evaluation.
        A dict ``{"loss": ..., "kl": ...}`` may take the loss' place: its other values, terms of the loss in the same
        scale, are logged under their names.

        Args:
            return_outputs: return ``(loss, outputs)``.
            num_items_in_batch: items in the window of this optimizer step, over all micro-batches and processes, shape
                (). Return ``sum / num_items_in_batch``; or leave it alone and return a mean, which is then weighted.
        """
        loss, outputs = normalization.model_loss(
            model, inputs, num_items_in_batch, pass_count=self.model_accepts_loss_kwargs,
            loss_func=self.compute_loss_func, shifted=self.loss_shifts_labels,
            label_smoothing=0.0 if self.label_smoother is None else self.label_smoother.epsilon,
        )  # fmt: skip
        return (loss, outputs) if return_outputs else loss

    def count_items(self, inputs: dict[str, Any]) -> torch.Tensor | int:
        """How many items the loss of this micro-batch is a mean over: predicted tokens, or rows without labels."""
        return 0 if pipeline.is_filler(inputs) else normalization.count_items(inputs, self.loss_shifts_labels)

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager:
        """Where the forward pass and the loss are computed: autocast, when a lower precision was asked for."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> contextlib.AbstractContextManager:
        return self.dist.autocast()

    def log_metric(
        self, name: str, value: float | torch.Tensor, weight: float | torch.Tensor = 1, reduce: str = "mean",
        per_epoch: bool = False,
    ) -> None:  # fmt: skip
        """Log `value` from anywhere: its "mean" (weighted), "sum", "min" or "max" over micro-batches and processes,
        once per log record, or, `per_epoch`, over all of an epoch in a record at its end."""
        self.metrics.log(name, value, weight, reduce, per_epoch)

    # ------------------------------------------------------------------------------------------------ data

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        """The loader of training micro-batches, `_train_batch_size` rows each on every process."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        return self.make_dataloader(self.train_dataset, "Training", self.train_batch_size, is_training=True)

    @property
    def prediction_fill(self) -> int:
        """Fills up predictions of ragged width; an evaluation that generates sets its pad token."""
        return -100

    def get_eval_dataloader(self, eval_dataset: Any = None) -> torch.utils.data.DataLoader:
        """The loader of `eval_dataset`: a dataset, the name of one of several, or the trainer's own."""
        if eval_dataset is None and self.eval_dataset is None:
            raise ValueError("Trainer: evaluation requires an eval_dataset.")
        name = eval_dataset if isinstance(eval_dataset, str) else "eval"
        if isinstance(eval_dataset, str):
            eval_dataset = pipeline.named_dataset(self.eval_dataset, eval_dataset)
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        return self.make_dataloader(dataset, "Evaluation", self.eval_batch_size, dataloader_key=name)

    def get_test_dataloader(self, test_dataset: Any) -> torch.utils.data.DataLoader:
        """The loader that `predict` reads."""
        pipeline.check_dataset(test_dataset, "test_dataset")
        return self.make_dataloader(test_dataset, "test", self.eval_batch_size)

    def make_dataloader(
        self, dataset, description, batch_size, sampler_fn=None, is_training=False, dataloader_key=None
    ) -> torch.utils.data.DataLoader:
        """The loader of `dataset`, whichever of the three above asks for it.

        Args:
            batch_size: rows of a batch on each process.
            sampler_fn: ``dataset -> sampler``, for a dataset that has a length; by default `train_sampler` in training.
            dataloader_key: the name under which workers that persist are kept.
        """
        sampler_fn = sampler_fn or (self._train_sampler_of if is_training else self._get_eval_sampler)
        return self._get_dataloader(
            dataset=dataset, description=description, batch_size=batch_size, sampler_fn=sampler_fn,
            is_training=is_training, dataloader_key=dataloader_key,
        )  # fmt: skip

    def _get_dataloader(
        self, dataset, description, batch_size, sampler_fn=None, is_training=False, dataloader_key=None
    ) -> torch.utils.data.DataLoader:
        read, kept = dataset, self._kept_loaders.get(dataloader_key)
        if kept is not None and kept[0] is dataset:
            return kept[1]
        if description == "Evaluation" and self.args.limit_eval_batches is not None:
            dataset = pipeline.first_rows(dataset, self.args.limit_eval_batches * batch_size * self.dist.world_size)
        sampler = sampler_fn(dataset) if sampler_fn is not None and pipeline.has_length(dataset) else None
        if is_training and self.args.max_batch_tokens is not None:
            sampler = pipeline.token_batches(
                dataset, self.row_lengths, self.args.max_batch_tokens, self.data_seed, self.dist.world_size
            )
        dataset, collator = self.without_unused_columns(dataset, self.data_collator, description)
        limits, device_type = self.id_limits(), self.dist.device.type
        if device_type == "cpu":  # an unknown id raises there; elsewhere it ends the process
            limits = {name: n for name, n in limits.items() if name == "labels_per_token"}
        loader = pipeline.build_loader(
            dataset, is_training=is_training, batch_size=batch_size, collate_fn=collator, sampler=sampler,
            args=self.args, seed=self.data_seed, rank=self.dist.rank, world_size=self.dist.world_size,
            device_type=device_type, limits=limits,
        )  # fmt: skip
        if dataloader_key is not None and self.args.dataloader_persistent_workers:  # its workers are worth keeping
            self._kept_loaders[dataloader_key] = (read, loader)
        return loader

    def _train_sampler_of(self, dataset: Any) -> torch.utils.data.Sampler | None:
        return self._get_train_sampler(*override_checks.taken(self._get_train_sampler, dataset))

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler | None:
        return self.train_sampler(self.train_dataset if train_dataset is None else train_dataset)

    def train_sampler(self, dataset: Any) -> torch.utils.data.Sampler | None:
        """The order of the training rows; None: that of the dataset."""
        return pipeline.make_train_sampler(
            dataset, strategy=self.args.train_sampling_strategy, seed=self.data_seed,
            batch_size=self.train_batch_size * self.args.gradient_accumulation_steps,
            lengths=self.row_lengths(dataset) if self.args.train_sampling_strategy == "group_by_length" else (),
        )  # fmt: skip

    def row_lengths(self, dataset: Any) -> list[int]:
        """Tokens that the model reads of each row; batches are made of rows of similar length. Override it where the
        rows have neither a column of lengths nor the model's main input."""
        return pipeline.row_lengths(dataset, self.args.length_column_name, self.main_input)

    def _get_eval_sampler(self, eval_dataset: Any) -> torch.utils.data.Sampler | None:
        return None

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | None]:
        """(the next `num_batches` micro-batches, or fewer at an epoch's end; the items in them on all processes)."""
        window = next(windows(epoch_iterator, num_batches), [])
        return window, self.count_window(window) if window else None

    def prepare_inputs(self, inputs: Any) -> Any:
        """A micro-batch as the model gets it, on the device. Override `_prepare_inputs`, as in transformers."""
        return self._prepare_inputs(inputs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        return self.complete_inputs(self._prepare_input(inputs))

    def _prepare_input(self, data: Any) -> Any:
        return pipeline.to_device(data, self.dist.device, non_blocking=self._non_blocking)

    def complete_inputs(self, inputs: Any) -> Any:
        """`inputs`, on the device, with columns that the collator does not make. Extend it for columns of yours."""
        return inputs

    def without_unused_columns(self, dataset: Any, collator: Any, description: str | None) -> tuple[Any, Any]:
        """(`dataset`, `collator`) without the columns that nobody reads (`remove_unused_columns`)."""
        if pipeline.can_drop_columns(dataset):
            return self._remove_unused_columns(dataset, description=description), collator
        return dataset, self._get_collator_with_removed_columns(collator, description=description)

    def _keep_columns(self, dataset: Any, collator: Any, description: str | None) -> tuple[Any, Any]:
        if not self.args.remove_unused_columns:
            return dataset, collator
        self._set_signature_columns_if_needed()
        if (columns := self._signature_columns) is None:  # an override may leave it open
            return dataset, collator
        return pipeline.keep_columns(dataset, collator, columns, description or "dataset")

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None and self.signature_columns is not None:
            self._signature_columns = list(self.signature_columns)
        if self._signature_columns is None:
            forward = wrapping.base_model(self.model).forward
            self._signature_columns = [*pipeline.signature_columns(forward), *self.label_names]

    def id_limits(self) -> dict[str, int]:
        """How many ids the model knows, by column; labels only where its own loss reads them."""
        stock = getattr(self.compute_loss, "__qualname__", "") == "Trainer.compute_loss"
        stock = stock and self.compute_loss_func is None
        return {name: n for name, n in embeddings.id_limits(self.model).items() if stock or "labels" not in name}

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A fresh model from ``model_init``, called with the trial where it takes one."""
        if self.model_init is None:
            raise ValueError("The trainer was built without model_init; pass a function that makes a model.")
        return loading.model_of(self.model_init, trial)

    # ------------------------------------------------------------------------------------------------ optimization

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make ``self.optimizer`` and ``self.lr_scheduler`` unless they were given. Override one or the other below."""
        self.create_optimizer()
        self.create_scheduler(*override_checks.taken(self.create_scheduler, num_training_steps, self.optimizer))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make ``self.optimizer`` unless one was given. Override to group parameters your own way."""
        if self.optimizer is None:
            model = self.model if model is None else model
            chosen = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
            self.optimizer = builder.build(model, self.args, self.get_decay_parameter_names(model), chosen)
            self._made_optimizer = self.optimizer
        return self.optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: nn.Module | None = None) -> tuple[type, dict]:
        """(class, arguments) of the optimizer named by ``args.optim``."""
        return builder.optimizer_class_and_kwargs(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Parameters under weight decay: all but biases and norms."""
        return builder.decay_parameter_names(model)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Make ``self.lr_scheduler`` unless one was given."""
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = self._made_scheduler = schedule.make(self.args, optimizer, num_training_steps)
        return self.lr_scheduler

    def _get_learning_rate(self) -> float:
        rate = self.optimizer.param_groups[0]["lr"]
        return rate.item() if isinstance(rate, torch.Tensor) else rate

    # ------------------------------------------------------------------------------------------------ evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate, log and return the metrics; of a dict of datasets each under ``<prefix>_<name>_...``."""
        datasets = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(datasets, dict):
            # The trainer's own sets go by name, so that an overridden get_eval_dataloader sees which is meant.
            sets = {f"{metric_key_prefix}_{n}": n if eval_dataset is None else ds for n, ds in datasets.items()}
            parts = [self.evaluate(ds, ignore_keys=ignore_keys, metric_key_prefix=p) for p, ds in sets.items()]
            return {name: value for part in parts for name, value in part.items()}
        loader = self.get_eval_dataloader(eval_dataset)
        metrics = self._timed_pass(loader, "Evaluation", ignore_keys, metric_key_prefix).metrics
        self.log(metrics)
        self._fire("on_evaluate", metrics=metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions and labels of every row, with metrics where there are labels."""
        output = self._timed_pass(
            self.get_test_dataloader(test_dataset), "Prediction", ignore_keys, metric_key_prefix, keep=True
        )
        self._fire("on_predict", metrics=output.metrics)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ) -> EvalLoopOutput:
        """One pass over `dataloader` without gradients; `evaluate` and `predict` share it."""
        args = self.args
        loss_only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        with self._trained_weights_kept():
            return self._evaluation_pass(dataloader, description, loss_only, ignore_keys, metric_key_prefix)

    def _evaluation_pass(self, dataloader, description, loss_only, ignore_keys, metric_key_prefix) -> EvalLoopOutput:
        args, model = self.args, self.evaluation_model()
        compute_metrics = None if loss_only else self.compute_metrics
        batch_metrics = eval_loop.by_batch(compute_metrics, args.batch_eval_metrics)
        of_all: Any = compute_metrics if batch_metrics is None else None
        self.callback_handler.eval_dataloader = dataloader
        with self._metrics_apart() as metrics, eval_loop.eval_mode(model, self.optimizer):
            kept, named, num_samples = eval_loop.run(
                dataloader,
                lambda inputs: self._predict(model, inputs, loss_only, ignore_keys),
                count_items=self.count_items,
                weight=self._objective.take_weight,
                metrics=metrics,
                keep=not loss_only,
                keep_with_batch_metrics=description == "Prediction",  # which is to return them
                is_filler=pipeline.is_filler,
                preprocess_logits=self.preprocess_logits_for_metrics,
                batch_metrics=batch_metrics,
                include=args.include_for_metrics,
                main_input=self.main_input,
                on_batch=lambda: self._after_evaluation_batch(dataloader),
                gather=self.dist.gather_object,
                num_batches=len(dataloader) if pipeline.has_length(dataloader) else None,
                accumulate=args.eval_accumulation_steps,
                concatenate=args.eval_do_concat_batches,
                order=eval_loop.reading_order(dataloader),
                fill=self.prediction_fill,
            )
        has_both = kept.predictions is not None and kept.label_ids is not None
        if of_all is not None and has_both:
            named |= eval_loop.as_metrics(of_all(kept))
        prefixed = {
            n if n.startswith(f"{metric_key_prefix}_") else f"{metric_key_prefix}_{n}": v
            for n, v in eval_loop.plain(named).items()
        }
        return EvalLoopOutput(kept.predictions, kept.label_ids, prefixed, num_samples)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """(loss, logits, labels) of one evaluation batch; None for what is not there, or not asked for."""
        inputs = self.prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            return eval_loop.predict_batch(
                model, inputs, self.evaluation_loss(inputs), loss_only=prediction_loss_only,
                label_names=self.label_names, can_return_loss=self.can_return_loss, ignore_keys=ignore_keys,
            )  # fmt: skip

    def evaluation_loss(self, inputs: Any) -> Callable[..., Any]:
        """`compute_loss` for an evaluation batch, which returns a mean, for a `prediction_step` of your own: terms of
        a dict are logged, and counts of pairs ``(sum, count)`` kept as its weight."""
        return self._objective.in_evaluation(self.compute_loss, self.count_items(inputs), self.metrics.add)

    # ------------------------------------------------------------------------------------------------ log and save

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the epoch to a record, keep it in ``state.log_history`` and hand it to the callbacks.

        The ``perf/`` values are for the callbacks alone: the history of two equal runs is equal.
        """
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        if self.logs_num_tokens and (name := num_tokens_in(logs)) is not None:
            logs[name] = self.state.num_input_tokens_seen
        history = {name: value for name, value in logs.items() if not is_performance(name)}
        self.state.log_history.append({**history, "step": self.state.global_step})
        self._fire("on_log", logs=logs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Operations of forward and backward for a micro-batch: 6 x tokens x parameters outside the embeddings (Kaplan
        et al. 2020, arXiv:2001.08361, section 2.1); 0 for models that cannot say. `state.total_flos` is their sum."""
        if self._flops_parameters is None:
            self._flops_parameters = normalization.flops_parameters(self.model)
        return 6 * normalization.count_slots(inputs, self.main_input) * self._flops_parameters

    def store_flos(self) -> None:
        """Bring `num_input_tokens_seen` and `total_flos` of the state up to now, over all processes."""
        self._count_inputs(self.metrics.drain(self.dist.gather_object, only=(TOKENS, FLOPS)))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, as ``from_pretrained`` reads it, with its tokenizer and the arguments of the run."""
        with self._averages():
            self._save_whole(output_dir or self.args.output_dir, of_checkpoint=_internal_call)
        if not _internal_call:
            self._copy_files()
            if self.args.push_to_hub:
                self.push_to_hub(commit_message="Model save")

    def save_state(self) -> None:
        """Write ``trainer_state.json`` into the output directory."""
        if self.dist.is_main:
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(Path(self.args.output_dir) / "trainer_state.json")

    def state_dict(self) -> dict[str, Any]:
        """What this process must remember to resume exactly, beside weights, optimizer and random numbers. Extend it in
        a subclass that keeps state of its own; plain containers, numbers and tensors are saved."""
        return {
            "progress": dataclasses.asdict(self.run.progress) | {"grad_norm": float(self.run.progress.grad_norm)},
            "plan": [self.run.plan.accumulation, self.run.plan.batches_per_epoch, self.run.plan.resized_at],
            "loader": self.run.loader.state_dict(),
            "metrics": self.metrics.state_dict(),
            "health": self.run.guard.state_dict(),
            "cuts": self.run.splitter.cuts,
            "epoch_stops": self.control.should_epoch_stop and not self.run.progress.epoch_ended,
            "left": preemption.unanswered(self.control),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        run = self.run
        run.progress, run.splitter.cuts = Progress(**state["progress"]), state["cuts"]
        self.metrics.load_state_dict(state["metrics"])
        run.guard.load_state_dict(state["health"])
        run.epoch_stopped = state.get("epoch_stops", False)
        if run.progress.own_count:
            self._objective.settle("mixed", for_good=True)
        for flag in state["left"]:
            setattr(self.control, flag, True)
        run.seek(state["loader"], skip_data=not self.args.ignore_data_skip)

    def checkpoint_parts(self) -> dict[str, Stateful]:
        """More objects that a checkpoint holds, by the name of their file; their state is the same on every process."""
        return {}

    def write_checkpoint(self, directory: Path) -> None:
        """Write this process' files of a checkpoint. Extend it for files of your own."""

        def save_model(folder: Path) -> None:
            self.save_model(str(folder), _internal_call=True)

        callbacks = self._callbacks_with_state()
        self.checkpoints.write(directory, self._contents(), self.state, callbacks, save_model, self._save_beside)

    def load_checkpoint(self, checkpoint: str | Path, model: nn.Module | None = None) -> None:
        """Load the weights of `checkpoint`, and the state of `checkpoint_parts`."""
        model = wrapping.unwrap(self.model if model is None else model)
        with self.dist.writable(model):
            weights.load_weights(model, checkpoint)
        for name, part in self.checkpoint_parts().items():
            if Path(checkpoint, f"{name}.json").is_file():
                part.load_state_dict(codec.load_tree(Path(checkpoint, name)))

    def _load_from_checkpoint(self, resume_from_checkpoint: str | Path, model: nn.Module | None = None) -> None:
        self.load_checkpoint(resume_from_checkpoint, model)

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        self._settle_save()
        with self._averages():  # resuming goes on from them, as this run does
            self.checkpoints.save(self.state, self._contents(), self.write_checkpoint)
        if not self.args.save_async:
            self._settle_save()

    # ------------------------------------------------------------------------------------------------ callbacks

    def add_callback(self, callback: Any) -> None:
        """Add a `TrainerCallback` instance or class, to be called after those present."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any | None:
        """Take out a callback, by instance or class, and return it."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Take out a callback, by instance or class."""
        self.callback_handler.remove_callback(callback)

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks in the order in which they are called."""
        return self.callback_handler.callbacks

    # ------------------------------------------------------------------------------------------------ a run: set-up

    @contextlib.contextmanager
    def _training(self, plan: Plan, loader: Any, checkpoint: Path | None, trial: Any) -> Iterator[nn.Module]:
        """Everything that is set up before the first step and taken down after the last, whatever happens between."""
        args, handler = self.args, self.callback_handler
        check_intervals(plan, args)
        self._check_owners()
        if self.model_init is not None:
            pipeline.set_seed(args.seed)
            self._drop_model()
            self.set_model(self.call_model_init(trial))
        if checkpoint is not None:
            self._load_from_checkpoint(checkpoint)
        special_tokens.align_special_tokens(self.model, self.processing_class)
        self.model_wrapped = self._wrap_model(self.model)
        self._make_optimizer_and_scheduler(plan.max_steps)
        self.state, self.control = self._new_state(), TrainerControl()
        self.state.train_batch_size, self.state.is_hyper_param_search = self.train_batch_size, trial is not None
        self.metrics, self.clock = Metrics(), clock_of(self.model, self.dist)
        self.run = self._new_run(plan, loader)
        self.checkpoints.check_space(self._contents(), self._number_of_saves(plan))
        loader.set_epoch(0)
        self._set_objective()
        if checkpoint is not None:
            self._resume(checkpoint, plan)
        self.state.compute_steps(args, plan.max_steps)
        self.state.max_steps, self.state.num_train_epochs = plan.max_steps, min(plan.num_epochs, 2**31)
        first = self.run.first_step = self.state.global_step
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.train_dataloader = loader
        self.is_in_train = True
        size = loader.rows_per_turn and f"about {loader.rows_per_turn / self.dist.world_size:.1f}"
        shape = (size or self.train_batch_size, plan.accumulation, self.dist.world_size)
        logger.info(
            "Training %s parameters for %s of %s x %d x %d rows (batch x accumulation x processes)%s.",
            f"{sharding.count(p for p in self.run.parameters if p.requires_grad):,}",
            f"{args.max_duration}, in steps" if plan.is_open else f"{plan.max_steps} steps",
            *shape, f", from step {first}" if first else "",
        )  # fmt: skip
        if not self._objective.takes_count:
            logger.info(
                "%s.compute_loss takes no num_items_in_batch: its loss is treated as a mean over the micro-batch, and "
                "weighted by the items of each in the step.", type(self).__name__,
            )  # fmt: skip
        self._set_train_mode(self.model_wrapped)
        if self.dist.num_processes > 1:
            self.run.callbacks_may_differ = any(self.dist.gather_patiently(handler.may_differ or args.goes_by_time))
        try:
            self.run.watch.begin()
            debug = nonfinite.watched(self.model) if args.debug else contextlib.nullcontext()
            memory = self._memory.stage("train")
            noise = regularization.neftune(self.model, args.neftune_noise_alpha)
            kept = allocator.freed_memory_kept(args.keep_freed_memory and self.dist.device.type == "cpu")
            with kept, noise, debug, self._compiled(), memory as self.run.memory:
                yield self.model_wrapped
            self._settle_save()
            reason = self.run.watch.settle(self.dist.gather_patiently)
            if reason > preemption.TIME_IS_UP:  # a signal during the last step; a time limit has no meaning any more
                self._interrupt(self.model_wrapped, trial, reason)
        except preemption.Left as left:
            if (end := left.exit()) is not None:
                raise end from None
        except Exception as error:
            explain_shortage(error, self.model, self.optimizer, self.dist.device)
            if args.save_on_exception:
                self._save_after(error)
            raise
        finally:
            self.run.watch.end()
            self.is_in_train = False
            for reads in [loader, *(kept for _, kept in self._kept_loaders.values())]:
                reads.end_workers()
            self.checkpoints.close()  # after an error; else everything is settled
            for callback in handler.callbacks:
                if isinstance(callback, ClosingCallback):
                    callback.close()  # on_train_end is not called when training raises
            self._keep_averages()  # also after an error

    def _check_owners(self) -> None:
        """Find out which of optimizer and schedule the user has set: those are used as they are."""
        self._owns_optimizer = self.optimizer is None or self.optimizer is self._made_optimizer
        self._owns_scheduler = self.lr_scheduler is None or self.lr_scheduler is self._made_scheduler
        if self.model_init is not None and not (self._owns_optimizer and self._owns_scheduler):
            raise ValueError(
                "model_init makes new parameters at each train, which the optimizer in optimizers (or set as "
                "trainer.optimizer, or behind trainer.lr_scheduler) does not know; pass a model, or "
                "optimizer_cls_and_kwargs, or override create_optimizer."
            )

    def _drop_model(self) -> None:
        """Drop the model and optimizer of an earlier run before the next is made: two need not fit at once."""
        handler = self.callback_handler
        self.model = self.model_wrapped = handler.model = NOT_MADE
        self.run = RunState()
        if self._owns_optimizer:
            self.optimizer = handler.optimizer = NOT_MADE

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if not training:
            return model
        args = self.args
        if args.activation_checkpointing:
            gradient_checkpointing.enable_gradient_checkpointing(model, args.activation_checkpointing_kwargs)
        if args.use_liger_kernel and (why_not := liger.apply_liger(model, args.liger_kernel_config)):
            logger.warning("use_liger_kernel: %s", why_not)
        if args.fp8:
            float8.use_float8(model, compiled=args.torch_compile)
        return self.dist.prepare_model(model, bool(args.activation_checkpointing), self.optimizer)

    def _compiled(self) -> contextlib.AbstractContextManager:
        args = self.args
        if not args.torch_compile or args.debug:  # which looks at every module as it runs
            return contextlib.nullcontext()
        return compiling.compiled(self.model, args.torch_compile_backend, args.torch_compile_mode)

    def _make_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """The optimizer and the schedule of this run: the user's, or new ones."""
        if self._owns_scheduler:
            self.lr_scheduler = None
        self.create_optimizer_and_scheduler(num_training_steps)
        if not self._owns_optimizer:
            builder.check_given_optimizer(self.optimizer, self.model_wrapped)
        if not self._owns_scheduler:
            builder.check_given_schedule(self.lr_scheduler, self.optimizer)
        self.model_wrapped, self.optimizer = self.dist.start(self.model_wrapped, self.optimizer)
        self._made_optimizer = self.optimizer if self._owns_optimizer else None
        self._made_scheduler = self.lr_scheduler if self._owns_scheduler else None

    def _callbacks_with_state(self) -> list[Any]:
        return [*self.callback_handler.callbacks, self.control]

    def _new_state(self) -> TrainerState:
        return TrainerState(
            is_local_process_zero=self.dist.is_local_main,
            is_world_process_zero=self.dist.is_main,
            stateful_callbacks=self._callbacks_with_state(),
        )

    def _new_run(self, plan: Plan, loader: Any) -> RunState:
        args = self.args
        limit = preemption.seconds(args.max_time) if args.max_time else None
        on_signals = preemption.saves_on_signal(args)
        return RunState(
            plan=plan,
            loader=loader,
            parameters=list(self.model_wrapped.parameters()),
            guard=self._new_guard(),
            splitter=BatchSplitter(args.auto_find_batch_size, self.train_batch_size, args.gradient_accumulation_steps),
            watch=preemption.Watch(
                on_signals,
                limit,
                self.dist.num_processes,
                self.dist.device,
                Path(args.output_dir, preemption.SAVE_NOW) if self.dist.is_main else None,
            ),
            pace=Pace(self.dist.seconds_waited, self.dist.process_index),
            ema=ema.make(self.model, args, self.optimizer),
        )

    def _new_guard(self) -> nonfinite.FiniteGuard:
        args, dist, policy = self.args, self.dist, self.args.on_nonfinite
        if policy == "stop" and dist.scaler is None and nonfinite.has_float16(self.model):
            policy = "skip"  # as a loss scaler would: that one batch overflows in 16 bits is no fault of the run
        report = nonfinite_report.Reporter(
            self.model, args.on_nonfinite, args.output_dir, rank=dist.rank, world_size=dist.world_size,
            gather=dist.gather_object, rows_of=_weakly(self, "_rows_of"), find=_weakly(self, "_find_fault"),
        )  # fmt: skip
        total = dist.sum if dist.world_size > 1 else None
        spikes = loss_spikes.watch(args, total, dist.world_size, report.named)
        return nonfinite.FiniteGuard(policy, args.max_nonfinite_steps, report, total, spikes=spikes)

    def _number_of_saves(self, plan: Plan) -> int:
        if plan.is_open:
            return 1  # as many as one may be sure of
        every = {"steps": as_steps(self.args.save_steps, plan.max_steps), "epoch": plan.steps_per_epoch}
        return -(-plan.max_steps // max(every.get(str(self.args.save_strategy)) or plan.max_steps, 1))

    def _contents(self) -> Contents:
        return Contents(
            model=wrapping.unwrap(self.model), optimizer=self.optimizer, lr_scheduler=self.lr_scheduler,
            ema=self.run.ema, trainer=self, scaler=self.dist.scaler,
            rows_per_step=self.get_total_train_batch_size(self.args), parts=self.checkpoint_parts(),
        )  # fmt: skip

    def _adopt(self, loader: Any, is_training: bool = True) -> Any:
        place = {"rank": self.dist.rank, "world_size": self.dist.world_size, "seed": self.data_seed}
        return pipeline.adopt(loader, is_training=is_training, **place)

    # ------------------------------------------------------------------------------------------------ a run: resuming

    def _resume(self, checkpoint: Path, plan: Plan) -> None:
        fresh, args, run = self.state, self.args, self.run
        ema.load(run.ema, checkpoint)
        self.state = TrainerState.load_from_json(checkpoint / "trainer_state.json")
        for name in ("is_local_process_zero", "is_world_process_zero", "train_batch_size", "is_hyper_param_search"):
            setattr(self.state, name, getattr(fresh, name))
        if (best := self.state.best_model_checkpoint) is not None:
            is_there = self.dist.on_main(lambda: Path(best).is_dir() or self.store.is_remote(best))
            resume.drop_missing_best(self.state, args.metric_for_best_model, is_there)
        if args.restore_callback_states_from_checkpoint:
            self.callback_handler.restore(self.state.stateful_callbacks)
        step = self.state.global_step
        options = argument_changes.group_options(self.optimizer)
        if not manager.has_training_state(checkpoint):
            taken = self.checkpoints.read_foreign(checkpoint, self._contents())
            changed = argument_changes.of_groups(options, self.optimizer, checkpoint, self.state.epoch)
            argument_changes.apply(changed, self.optimizer, options, self.lr_scheduler)
            skips = not args.ignore_data_skip
            return resume.without_position(checkpoint, plan, self.state, run, self.lr_scheduler, taken, skips)
        changed = argument_changes.found(checkpoint, args, self.state.epoch)
        position = self.checkpoints.read(checkpoint, self._contents(), args.seed, step, pipeline.set_seed)
        argument_changes.apply(changed, self.optimizer, options, self.lr_scheduler)
        self.load_state_dict(position["trainer"])
        if plan.resized_at is not None and plan.resized_at[:2] == (step, run.progress.epoch):
            if not args.ignore_data_skip:  # a micro-batch holds another number of rows now
                run.progress.batches = (plan.batches_per_epoch or 0) - plan.resized_at[2]
        run.loader.number(run.progress.batches)
        run.rng = position["rng"]

    def restore_rng(self) -> None:
        """Set the random numbers of the checkpoint, once. To be called when the first row after it is read."""
        self.run.restore_rng()

    def _epochs_left(self, plan: Plan) -> range:
        """The epochs to train; none, with a warning, where a callback does not let the run begin."""
        step, epochs = self.state.global_step, range(self.run.progress.epoch, plan.num_epochs)
        if self.control.should_training_stop:
            logger.warning(
                "A callback asked to stop in on_train_begin: training ends at step %d, where it began.", step
            )
            return range(0)
        if not self._is_over(plan):
            return epochs
        if step == plan.max_steps == 0:
            logger.info("num_train_epochs=0: nothing is trained.")
        elif step >= plan.max_steps:
            logger.warning(
                "The checkpoint is of step %d and the run has %d: nothing is left to train. To train on, set a "
                "larger max_steps or num_train_epochs.", step, plan.max_steps,
            )  # fmt: skip
        else:
            logger.warning(
                "The checkpoint has read %d tokens and the run ends with max_duration=%r: nothing is left to train. To "
                "train on, set a larger max_duration.", self.state.num_input_tokens_seen, self.args.max_duration,
            )  # fmt: skip
        self.control.should_training_stop = True
        # Saved with the last step, the checkpoint stands before what callbacks ask for at the end of the epoch.
        return range(0) if self.run.progress.ended_at == step else epochs

    def _is_over(self, plan: Plan) -> bool:
        """Whether the run has made its optimizer steps, or has read its tokens."""
        state = self.state
        return state.global_step >= plan.max_steps or state.num_input_tokens_seen >= self.args.max_tokens

    # ------------------------------------------------------------------------------------------------ a run: a step

    def count_window(self, window: list[Any]) -> torch.Tensor | None:
        """Items of an accumulation window, shape (), on the device: over all processes, unless
        `average_tokens_across_devices` is off.

        None where nobody needs them: a mean over the only micro-batch there is, is the mean over the window.
        """
        items = sum(self.count_items(inputs) for inputs in window)
        needed = self._objective.own_count or (self._objective.takes_count and not self._is_own_loss)
        if len(window) == 1 and self.dist.world_size == 1 and self._objective.returns_mean and not needed:
            on_host = not isinstance(items, torch.Tensor) or items.is_cpu
            if on_host and items:
                return None
        items = normalization.scalar(items, self.dist.device)
        if self.args.average_tokens_across_devices:
            return self.dist.sum(items)
        # A process without labels has no mean, and no part in the mean of the others.
        return items if self.dist.world_size == 1 else items.clamp(min=1)

    def _step_on(self, model: nn.Module, inputs: Any, num_items: torch.Tensor | None) -> torch.Tensor:
        try:
            with self.dist.in_step():
                return self._call_training_step(model, inputs, num_items)
        except IndexError:  # an id that the model does not know, most often: say which
            check_limits(inputs, self.id_limits())
            raise

    def _call_training_step(self, model: nn.Module, inputs: Any, num_items: torch.Tensor | None) -> torch.Tensor:
        self.run.num_items = num_items
        try:
            with self._measuring(inputs):
                given: tuple[Any, ...] = (model, inputs, num_items)
                return self.training_step(*given[: self._step_takes])
        finally:
            self.run.num_items = None

    def _predict(self, model: nn.Module, inputs: Any, loss_only: bool, ignore_keys: list[str] | None) -> Any:
        with self._measuring(inputs):
            return self.prediction_step(model, inputs, loss_only, ignore_keys=ignore_keys)

    def _measuring(self, inputs: Any) -> contextlib.AbstractContextManager[Any]:
        """Where a batch is computed: a metric of one that only keeps this process in step counts for nothing."""
        return self._metrics_apart() if pipeline.is_filler(inputs) else contextlib.nullcontext()

    def _find_out_scale(self, model: nn.Module, inputs: Any, num_items: torch.Tensor, items: Any) -> None:
        """Find out whether `compute_loss` returns a mean: all processes together, also those without a label."""
        own = self._is_own_loss
        ratio = scale_check.loss_ratio(self.compute_loss, model, inputs, num_items, self, moves=not own)
        ratios = self.dist.gather_object(ratio if items else None)
        if self._objective.settle(scale_check.kind_of(ratios, own), for_good=own):
            self.run.progress.own_count = True
            logger.warning(
                "From step %d on, %s.compute_loss divides only a part of its loss by num_items_in_batch. It is given "
                "the items of each micro-batch, and weighted by their share of the step, so every part is a mean over "
                "the step's items. To say so from the beginning, set %s.loss_is_scaled_for_ga = 'mixed'; to sum the "
                "losses of micro-batches instead, set it to True.",
                self.state.global_step + 1, type(self).__name__, type(self).__name__,
            )  # fmt: skip

    def _may_go_backward(self, loss: torch.Tensor, items: torch.Tensor | int | None) -> bool:
        """False where the backward pass itself would put a loss that is not finite into the weights, and of a mean over
        nothing, whose gradient may be 0 / 0, where that is known without a wait and no other process waits for it."""
        known = items is not None and (not isinstance(items, torch.Tensor) or items.is_cpu)
        if known and not items and self.dist.num_processes == 1 and not self.dist.uses_deepspeed:
            return False
        if not getattr(self.optimizer, "steps_in_backward", False) or self.args.on_nonfinite == "warn":
            return True
        return bool(torch.isfinite(loss))

    def _why_no_counts(self) -> str | None:
        """Why gradients of a loss given as (sum, count) could not be divided afterwards; None: they can."""
        if self.dist.world_size > 1 and not self.args.average_tokens_across_devices:
            return "average_tokens_across_devices=False averages over processes, whatever they counted."
        if self.dist.uses_deepspeed or getattr(self.optimizer, "steps_in_backward", False):
            return "the weights are changed, or gradients taken over, during the backward pass."
        return None

    def _undo_point(self) -> Callable[[], None]:
        """Remember what an attempt at an accumulation window changes; the function that puts it back."""
        random, metrics = rng.rng_state(), self.metrics.copy()

        def undo() -> None:
            for parameter in self.run.parameters:
                parameter.grad = None
            self._objective.take_terms()
            self.dist.empty_cache()
            self.metrics = metrics.copy()
            rng.set_rng_state(random)

        return undo

    def _may_step(
        self, window: list[Any], losses: list[torch.Tensor], loss: Any, grad_norm: Any, num_items: Any
    ) -> bool:
        """Whether the optimizer step of `window` may be made; see `posttrain.core.training.nonfinite.FiniteGuard`."""
        progress, scaler = self.run.progress, self.dist.scaler
        place = (self.state.global_step, progress.epoch, progress.batches)
        update = nonfinite.Update(*place, window, losses, loss, grad_norm, num_items, self.run.splitter.origins)
        return self.run.guard.before_step(self.optimizer, update, None if scaler is None else scaler.get_scale)

    def _rows_of(self, epoch: int, number: int) -> list[int] | None:
        """Indices of the dataset in micro-batch `number` of `epoch`; None where batches are made in some other way."""
        if not all(override_checks.is_from(self, method, "Trainer") for method in ("windows", "get_batch_samples")):
            return None
        return self.run.loader.rows_of(epoch, number)

    def _find_fault(self, update: nonfinite.Update) -> str | None:
        """Where the numbers of `update` go bad, found by running it again; nothing of that is kept."""

        def run(batch: Any) -> torch.Tensor:
            if not getattr(self.optimizer, "steps_in_backward", False):
                return self._call_training_step(self.model, batch, update.num_items)
            with torch.no_grad(), self.compute_loss_context_manager():
                inputs = self.prepare_inputs(batch)
                return self._objective(self.compute_loss, self.model, inputs, update.num_items)[0]

        with contextlib.ExitStack() as apart:
            for context in (self._metrics_apart(), self._objective.frozen(), compiling.uncompiled()):
                apart.enter_context(context)
            apart.callback(self._objective.take_terms)
            return nonfinite_report.find_fault(update, self.model, self.run.parameters, run)

    def _log_step_loss(self, loss: torch.Tensor, num_items: torch.Tensor | None) -> None:
        """Log the loss of an optimizer step, and its terms; a window without a label has none."""
        if num_items is None:
            self.log_metric("loss", loss)
        else:
            there = num_items != 0
            self.log_metric("loss", torch.where(there, loss, 0.0), there.long())
        for name, value in self._objective.take_terms().items():
            self.metrics.add(name, value)

    def _advance(self, plan: Plan, num_batches: int) -> None:
        run, state = self.run, self.state
        as_read = override_checks.is_from(self, "windows", "Trainer")
        run.advance(num_batches, run.loader.rows_per_turn or self.train_batch_size * self.dist.world_size, as_read)
        state.global_step += 1
        run.is_stepping, self.checkpoints.boundary = False, None
        if run.splitter.cuts:
            state.train_batch_size = run.splitter.rows
        if state.global_step == run.first_step + 1 and preemption.may_save(self.args):
            self.checkpoints.check_optimizer_state(self.optimizer)
        state.epoch = plan.epoch_at(run.progress.epoch, run.progress.batches, state.global_step)
        every = self.args.torch_empty_cache_steps
        if every is not None and state.global_step % every == 0:
            self.dist.empty_cache()

    # ------------------------------------------------------------------------------------------------ a run: epochs

    def _begin_epoch(self, epoch: int) -> None:
        self.run.progress.epoch, self.run.progress.epoch_ended = epoch, False
        self.control.should_epoch_stop = False
        self._fire("on_epoch_begin")
        self._agree()

    def _end_epoch(self, plan: Plan, model: nn.Module, trial: Any) -> None:
        progress, is_over = self.run.progress, self._is_over(plan)
        has_rest = self.run.is_inside_epoch and not self.control.should_epoch_stop
        # Stopped by a callback, or at the end of the run: a resumed one trains the rest of the epoch.
        is_left, is_cut = has_rest and self.control.should_training_stop and not is_over, has_rest and is_over
        if progress.batches == 0 and not is_over and not self.control.should_training_stop:
            if self.state.global_step == 0:
                raise DataError(
                    "The training data gave not one batch, so nothing was trained. See whether the stream is empty or "
                    "used up, or whether every row of it was dropped.\n"
                    + "\n".join(line for report in self.data_reports.values() for line in report.lines())
                )
            logger.warning("The training data gave no batch in epoch %d; training stops here.", progress.epoch)
            self.control.should_training_stop = True
        if is_over:
            progress.ended_at = self.state.global_step
        if not is_left and not (is_cut and progress.batches > 0):
            progress.epoch_ended, progress.batches = True, 0
            self.run.loader.set_epoch(progress.epoch + 1)
            if plan.is_open:  # a stream's epoch has no fractions
                self.state.epoch = progress.epoch + 1.0
        self._fire("on_epoch_end")
        if progress.epoch_ended and (pairs := self.metrics.drain(self.dist.gather_object, epoch=True)):
            self.log(means(pairs))
        self._agree()
        if is_left and self.control.should_save:
            self._save_inside_epoch(model, trial)

    def _save_inside_epoch(self, model: nn.Module, trial: Any) -> None:
        """Save before the run logs and evaluates a part of an epoch: the resumed run does so with the whole one."""
        asked = {flag: getattr(self.control, flag) for flag in preemption.LEFT_TO_DO}
        for flag in asked:
            setattr(self.control, flag, False)
        self._save_now(model, trial)
        for flag in asked:
            setattr(self.control, flag, getattr(self.control, flag) or (asked[flag] and flag != "should_save"))

    # ------------------------------------------------------------------------------------------------ a run: records

    def _fire(self, event: str, **kwargs: Any) -> None:
        if self.callback_handler.nobody_hears(event):
            return
        self.control = self.callback_handler.call_event(event, self.args, self.state, self.control, **kwargs)

    def _meet(self, what: str) -> None:
        """Wait until the callbacks of every process have done `what`."""
        self.dist.meet(what)
        self._agree()

    def _agree(self) -> None:
        """Set on every process the flags of the control that are set on one: what they ask for takes all of them."""
        if self.run.callbacks_may_differ:
            found = self.dist.highest([int(getattr(self.control, flag)) for flag in FLAGS])
            for flag, is_set in zip(FLAGS, found, strict=True):
                setattr(self.control, flag, bool(is_set))

    def _set_train_mode(self, model: nn.Module) -> None:
        model.train()
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def _log_evaluate_save(self, model: nn.Module, trial: Any, ignore_keys: list[str] | None) -> None:
        """Do what the flags of the control ask for, and clear them."""
        self.run.pace.pause()
        self._agree()
        if reason := self.run.watch.due():
            self._interrupt(model, trial, reason)
        self.control.should_save |= self.run.watch.asks_for_save
        self.run.watch.asks_for_save = False
        if preemption.unanswered(self.control):
            self.run.guard.settle()
        if self.checkpoints.pending is not None and (self.dist.num_processes == 1 or self.control.should_log):
            self._settle_save(wait=False)
        if self.control.should_log and self.state.global_step > self.run.progress.last_logged:
            self._log_training()
        self.control.should_log = False
        if self.control.should_evaluate:
            self.store_flos()
            metrics = self._evaluate_or_interrupt(model, trial, ignore_keys)
            self.control.should_evaluate = False
            improved = self._determine_best_metric(metrics=metrics, trial=trial)
            if self.args.save_strategy == "best":
                self.control.should_save |= improved  # or a callback asked for it
        if self.control.should_save:
            self.control.should_save = False
            self.store_flos()
            with self.clock("save"):
                self._save_checkpoint(model, trial)
        if self.args.save_on_exception:
            self.checkpoints.boundary = copy.deepcopy(self._contents().position())
        self.dist.enter_step(self.state.global_step + 1, self.run.progress.batches)
        self.run.pace.resume()

    def _log_training(self) -> None:
        """A record of the steps since the last: the one place of a run that waits for the device."""
        progress, pace, step = self.run.progress, self.run.pace, self.state.global_step
        steps = max(step - max(progress.last_logged, self.run.first_step), 1)  # of this process: its clock began then
        pairs = self.metrics.drain(pace.gathering(self.dist.gather_object, self.clock.phases, steps))
        self._count_inputs(pairs)
        progress.add_losses(*pairs["loss"])
        progress.grad_norm = float(progress.grad_norm)
        if not pairs["loss"][1]:  # nothing was learned from, as where every completion of a record is masked
            del pairs["loss"]
        logs = {"loss": 0.0} | means(pairs) | {"grad_norm": progress.grad_norm, "learning_rate": progress.learning_rate}
        logs |= self.run.group_rates | self.run.guard.logged()
        logs |= self.clock.performance(steps, steps_left(self.state, self.args.max_tokens))
        logs |= pace.logged(logs["perf/step_seconds"])
        progress.last_logged = step
        self.log(logs)
        self._agree()

    def _count_inputs(self, pairs: dict[str, tuple[float, float]]) -> None:
        """Move what the steps since the last call have read from drained metrics to the state."""
        tokens, slots = pairs.pop(TOKENS, (0, 0))
        self.state.num_input_tokens_seen += int(slots if self.args.include_num_input_tokens_seen == "all" else tokens)
        flops = float(pairs.pop(FLOPS, (0, 0))[0])
        self.state.total_flos += flops
        self.clock.count(tokens, slots, flops)

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        with self.clock("eval"):
            metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)
            self._meet("what callbacks do after an evaluation")
        if self.args.metric_for_best_model is not None:  # a missing one raises at the first evaluation
            eval_loop.named_metric(metrics, self.args.metric_for_best_model)
        if lr_scheduler.follows_a_metric(self.lr_scheduler) and not skip_scheduler:
            self.lr_scheduler.step(eval_loop.named_metric(metrics, self.args.metric_for_best_model or "loss"))
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Remember the metric to keep the best model by; True where it has improved."""
        args, state = self.args, self.state
        if args.metric_for_best_model is None:
            return False
        value = eval_loop.named_metric(metrics, args.metric_for_best_model)
        if not best_model.is_better(value, state.best_metric, bool(args.greater_is_better)):
            return False
        state.best_metric, state.best_global_step = value, state.global_step
        # Saved before it is evaluated, where steps are saved and epochs evaluated.
        saved = state.global_step in (self.checkpoints.saved_step, self.checkpoints.pending)
        kept = saved or args.save_strategy == "best" or self.control.should_save
        state.best_model_checkpoint = str(self.store.path(state.global_step)) if kept else None
        return True

    def _timed_pass(
        self, loader: Any, description: str, ignore_keys: list[str] | None, prefix: str, keep: bool = False
    ) -> EvalLoopOutput:
        if not self.is_in_train:  # a process that has prepared something may come hours after the others
            self.dist.meet("the beginning of an evaluation")
        started, loader = time.perf_counter(), self._adopt(loader, is_training=False)
        loss_only = None if keep or self.compute_metrics is not None else True
        average = self.run.ema if self.is_in_train and self.args.ema_use != "final" else None
        weights = contextlib.nullcontext() if average is None else average.swapped_in()
        with weights, self._memory.stage(prefix) as memory, self._ending_workers(loader):
            output = self.evaluation_loop(
                loader, description=description, prediction_loss_only=loss_only, ignore_keys=ignore_keys,
                metric_key_prefix=prefix,
            )  # fmt: skip
        seconds, size = time.perf_counter() - started, self.args.eval_batch_size * self.dist.world_size
        output.metrics.update(speed_metrics(prefix, seconds, output.num_samples, -(-output.num_samples // size)))
        output.metrics.update(memory)
        if self.logs_num_tokens:
            self.store_flos()
        return output

    @contextlib.contextmanager
    def _ending_workers(self, loader: pipeline.Loader) -> Iterator[None]:
        """After this context no process reads for `loader`, unless the next evaluation of this training will use it."""
        try:
            yield
        finally:
            if not self.is_in_train or all(loader is not kept for _, kept in self._kept_loaders.values()):
                loader.end_workers()

    def evaluation_model(self) -> nn.Module:
        """The model as an evaluation runs it: sharded where training shards it, and on the device."""
        # Without the DDP wrapper: an evaluation has no gradients to average, and processes need not move in step.
        if self.dist.uses_deepspeed and self.is_in_train:
            return self.model_wrapped
        if self.dist.shards:
            return self.dist.shard(self.model, self.optimizer)
        if not self.is_in_train:
            self.dist.place(self.model)
            if self.args.bf16_full_eval or self.args.fp16_full_eval:
                self.model.to(torch.bfloat16 if self.args.bf16_full_eval else torch.float16)
        return self.model

    def _trained_weights_kept(self) -> contextlib.AbstractContextManager[None]:
        """Where a whole model is evaluated in half precision. What was trained comes back as it was; another model
        stays in half precision, which takes half the memory."""
        halves = self.args.bf16_full_eval or self.args.fp16_full_eval
        if not halves or self.is_in_train or self.optimizer is None or self.dist.shards:
            return contextlib.nullcontext()
        self.dist.place(self.model)
        return eval_loop.weights_kept(self.model)

    @contextlib.contextmanager
    def _metrics_apart(self) -> Iterator[Metrics]:
        """What `log_metric` adds in here belongs to the evaluation, not to the training step around it."""
        training, self.metrics = self.metrics, Metrics(has_epochs=False)
        try:
            yield self.metrics
        finally:
            self.metrics = training

    # ------------------------------------------------------------------------------------------------ a run: saves

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        directory = Path(output_dir or self.args.output_dir)
        weights.save_weights(wrapping.unwrap(self.model), directory, state_dict, self.args.max_shard_size)
        self._save_beside(directory)

    def _save_whole(self, directory: str, of_checkpoint: bool) -> None:
        """Write the model and what belongs to it; large sharded weights by all processes, each its share."""
        args, model, ours = self.args, wrapping.unwrap(self.model), type(self)._save is Trainer._save
        check = bool(args.check_saved_model) and not of_checkpoint
        alone = check or args.save_on_each_node or not ours
        if not alone and shares.save(model, directory, self.dist, args.max_shard_size):
            if args.should_save:
                self._save_beside(Path(directory))
            return
        whole = self.dist.whole_state_dict(self.model, weights.is_saved(model), lambda name: args.should_save)
        if args.should_save:
            self._save(directory, **({} if whole is None else {"state_dict": whole}))
            if check:
                reload.check(model, directory, whole, logits=self.dist.cp_size == 1)
            elif args.check_saved_model is None and ours and whole is None:
                if not of_checkpoint or self.checkpoints.is_first_save(model):
                    reload.check_if_cheap(model, directory, logits=not of_checkpoint and self.dist.cp_size == 1)

    def _averages(self) -> contextlib.AbstractContextManager[None]:
        """Where a model is saved: with the averages of an optimizer that keeps them."""
        return eval_loop.averages_in(self.optimizer, otherwise=self.is_in_train)

    def _save_beside(self, directory: Path) -> None:
        """What belongs to the model, besides its weights."""
        processor: Any = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if hasattr(processor, "save_pretrained"):
            processor.save_pretrained(str(directory))
        (directory / "training_args.json").write_text(self.args.to_json_string() + "\n", encoding="utf-8")

    def _save_now(self, model: nn.Module, trial: Any = None) -> None:
        self.store_flos()
        self._save_checkpoint(model, trial)
        self._settle_save()

    def _settle_save(self, wait: bool = True) -> None:
        """Take in that a checkpoint is there now: upload it, remove older ones, call the callbacks."""
        outcome = self.checkpoints.settle(wait)
        if outcome is None:
            return
        if outcome.path is None:
            if self.state.best_global_step == outcome.step:
                self.state.best_model_checkpoint = None
            return
        # One that was written in the background is of an earlier step.
        now, self.state = self.state, self.checkpoints.state_at_save
        try:
            self._upload(outcome.path)
            self._rotate(now.best_model_checkpoint)
            self._copy_files()
            self._fire("on_save")
            self._meet("what callbacks do after a save")
        finally:
            self.state = now

    def _copy_files(self) -> None:
        """Copy log and model to the remote folder, where there is one."""
        if self.store.remote is not None:
            self.dist.on_main(self.store.push_files, "the copy of log and model")

    def _rotate(self, best: str | None) -> None:
        args, keep = self.args, [*([Path(best)] if best else [])]
        if args.save_top_k is not None and (metric := args.metric_for_best_model) is not None:
            steps = best_model.best_steps(self.state.log_history, metric, bool(args.greater_is_better))
            keep += [path for step in steps if (path := self.store.path(step)).is_dir()][: args.save_top_k]
        self.checkpoints.rotate([*keep, *(self.uploader.in_use if args.push_to_hub else [])])

    def _upload(self, checkpoint: Path | None, at_end: bool = False) -> None:
        """Queue for the Hub what the strategy asks for; the thread that uploads never stops the run."""
        if not self.args.push_to_hub:
            return
        self._fire("on_push_begin")
        message = "End of training" if at_end else f"Training in progress, step {self.state.global_step}"
        for folder, path, ignore in hub.jobs(self.args.hub_strategy, checkpoint, self.args.output_dir, at_end):
            if self.dist.is_main:
                self.uploader.push(folder, path, message, ignore)

    # ------------------------------------------------------------------------------------------------ a run: its end

    def _interrupt(self, model: nn.Module, trial: Any, reason: int) -> NoReturn:
        """Save where the run stands, and end it: a signal, or the time limit."""
        self._settle_save()
        if preemption.unanswered(self.control) or self.checkpoints.saved_step != self.state.global_step:
            self._save_now(model, trial)
        if (step := self.checkpoints.saved_step) is not None:  # an earlier one, if this save has failed
            logger.warning(
                "The run stops after optimizer step %d. To go on from %s, set resume_from_checkpoint=True.",
                self.state.global_step, self.store.path(step),
            )  # fmt: skip
        raise preemption.Left(reason)

    def _evaluate_or_interrupt(self, model: nn.Module, trial: Any, ignore_keys: list[str] | None) -> dict[str, float]:
        before = rng.rng_state()
        self.run.records_before_evaluation = len(self.state.log_history)
        try:
            return self._evaluate(trial, ignore_keys)
        except preemption.EvaluationLeft as left:
            rng.set_rng_state(before)
            self._interrupt(model, trial, left.reason)
        finally:
            self.run.records_before_evaluation = None

    def _after_evaluation_batch(self, loader: Any) -> None:
        self._fire("on_prediction_step")
        # Not once a set of several is evaluated and logged. Our own loaders have as many batches on every process, so
        # that all ask equally often.
        may_stop = len(self.state.log_history) == self.run.records_before_evaluation
        if may_stop and (self.dist.num_processes == 1 or isinstance(loader, pipeline.Loader)):
            if reason := self.run.watch.due():
                raise preemption.EvaluationLeft(reason)

    def _save_after(self, error: Exception) -> None:
        """Save the last whole optimizer step after `error`, as far as it can be had."""
        checkpoints, why_not = self.checkpoints, None
        if self.run.is_stepping:
            why_not = "the weights were being updated"
        elif self.dist.num_processes > 1 and (self.dist.shards or self.dist.uses_deepspeed):
            why_not = "the weights are divided over the processes, which may be elsewhere"
        elif not self.dist.all_come(f"error after {self.state.global_step} {checkpoints.boundary is None}"):
            why_not = "the other processes have not ended in the same step"
        elif checkpoints.saved_step == self.state.global_step and checkpoints.boundary is not None:
            return  # it is there
        if why_not is None:
            try:
                if checkpoints.boundary is None:
                    self.store_flos()
                self._save_checkpoint(self.model_wrapped)
                self._settle_save()
                what = f"{self.store.path(self.state.global_step)} holds the last whole step; resume from it"
            except Exception as another:
                what = f"no checkpoint could be saved ({type(another).__name__}: {another})"
        else:
            what = f"no checkpoint was saved, for {why_not}"
        logger.warning("Training ended by %s: %s.", type(error).__name__, what)

    def _finish(self) -> TrainOutput:
        """The last record, the best model where it was asked for, and what `train` returns."""
        run, state = self.run, self.state
        run.guard.finish()
        rest = self.metrics.drain(self.dist.gather_object)
        rest |= self.metrics.drain(self.dist.gather_object, epoch=True)  # of a part of one
        self._count_inputs(rest)
        run.progress.add_losses(*rest.pop("loss", (0.0, 0)))
        train_loss = run.progress.mean_loss(had_losses=run.guard.count > 0)
        metrics = speed_metrics("train", self.clock.total(), run.rows_read, state.global_step - run.first_step)
        metrics |= {"total_flos": float(state.total_flos), "train_loss": train_loss}
        metrics |= {"nonfinite_steps": run.guard.count} if run.guard.count else {}
        metrics |= run.memory
        for data_report in self.data_reports.values():
            data_report.log_more(logger)
        self.log(means(rest) | metrics)  # with what the algorithm measured since the last record
        self._keep_averages()
        self._restore_best_model()
        if run.ema is not None and self.args.ema_use != "eval":
            run.ema.copy_to_model()
        if self.args.push_to_hub:
            self.save_model(_internal_call=True)
            self.create_model_card()
            self._upload(None, at_end=True)
            self.dist.on_main(self.uploader.finish, "the last uploads")
            self._rotate(state.best_model_checkpoint)
        self._copy_files()
        self._fire("on_train_end")
        return TrainOutput(state.global_step, train_loss, metrics)

    def _keep_averages(self) -> None:
        """Leave the averages of an optimizer that keeps them in the model."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    def _restore_best_model(self) -> None:
        state, best = self.state, self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None:
            logger.info("Loading the best model, from %s (%s).", best, state.best_metric)
            folder = self.dist.on_main(lambda: self.store.resolve(best))
            self._load_from_checkpoint(folder)
            ema.load(self.run.ema, folder)
        elif self.args.load_best_model_at_end:
            why = f"there is no checkpoint of the best step ({state.best_global_step}, {state.best_metric})"
            if state.best_metric is None:
                why = f"no evaluation gave a number for metric_for_best_model={self.args.metric_for_best_model!r}"
            logger.warning("load_best_model_at_end: %s, so the model stays that of step %d.", why, state.global_step)


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _weakly(trainer: Trainer, method: str) -> Callable[..., Any]:
    """The method of that name, without keeping the trainer alive: one that is dropped must free its memory at once."""
    reference = weakref.ref(trainer)
    return lambda *args, **kwargs: getattr(reference(), method)(*args, **kwargs)
