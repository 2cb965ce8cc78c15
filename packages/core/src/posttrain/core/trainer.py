"""The training loop, and every door through which a subclass changes it.

`Trainer.train` is the loop. Each other public method is a door: ten lines or fewer that call into the room below, a module
that knows nothing of trainers. Override the door to change what happens; use a callback to change when.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from posttrain.core import hub
from posttrain.core.arguments import TrainingArguments
from posttrain.core.callbacks import CallbackHandler, DefaultFlowCallback, PrinterCallback, ProgressCallback
from posttrain.core.checkpoint import Store, weights
from posttrain.core.data import pipeline
from posttrain.core.distributed import Distributed
from posttrain.core.errors import did_you_mean
from posttrain.core.evaluation import eval_loop
from posttrain.core.logging import run_record, trackers
from posttrain.core.logging.metrics import FLOPS, TOKENS, Clock, Metrics, is_performance
from posttrain.core.losses import normalization
from posttrain.core.models import wrapping
from posttrain.core.optim import builder, lr_scheduler
from posttrain.core.state import EvalLoopOutput, PredictionOutput, TrainerControl, TrainOutput
from posttrain.core.training import preemption, preflight
from posttrain.core.training.hf_compat import Questions
from posttrain.core.training.lifecycle import Lifecycle
from posttrain.core.training.memory import MemoryTracker
from posttrain.core.training.plan import Plan, Progress, make_plan, windows
from posttrain.core.training.preflight import Parts, Problem

logger = logging.getLogger(__name__)

DEFAULT_CALLBACKS = [DefaultFlowCallback, trackers.JSONLinesCallback, run_record.RunRecordCallback]


class Trainer(Lifecycle, Questions):
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
        callbacks: `TrainerCallback` instances or classes, heard after the built-in ones.
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
    #: Whether `compute_loss` returns ``sum / num_items_in_batch`` (True) or a mean (False); None finds out, by computing it
    #: twice for one micro-batch, with one count and with twice that (`posttrain.core.losses.scale_check`).
    loss_is_scaled_for_ga: bool | None = None
    #: Fills up predictions of ragged width; an evaluation that generates sets its pad token.
    prediction_fill: int = -100

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
            processing_class, callbacks = _accept_old_names(type(self).__name__, old_names, processing_class, callbacks)
        if (model is None) == (model_init is None):
            given = "neither was given" if model is None else "both were given"
            raise ValueError(f"{type(self).__name__} needs a model or a model_init, and {given}.")
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(
                f"model is of type {type(model).__name__}; {type(self).__name__} takes a loaded one, for instance from "
                "AutoModelForCausalLM.from_pretrained(...)."
            )
        if args is not None and not isinstance(args, TrainingArguments):
            raise TypeError(
                f"args is of type {type(args).__name__}; pass {self.config_class.__name__}(output_dir=...)."
            )
        if args is None:
            args = self.config_class()
            logger.warning("No args were given: defaults are used, and the output goes to %s.", args.output_dir)
        self.args = args
        trackers.set_verbosity(args.get_process_log_level())
        parts = Parts(
            model=model, train_dataset=train_dataset, eval_dataset=eval_dataset, data_collator=data_collator,
            model_init=model_init, compute_loss_func=compute_loss_func, compute_metrics=compute_metrics, callbacks=callbacks,
            optimizers=optimizers, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )  # fmt: skip
        self._preflight(args, parts)
        pipeline.enable_full_determinism(args.seed) if args.full_determinism else pipeline.set_seed(args.seed)
        self.dist = Distributed(args)
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
        self._ask_whose_parts()
        self._set_model(model if model is not None else self.call_model_init())
        self.store, self.uploader = Store(args.output_dir, args.remote), hub.Uploader(args, args.output_dir)
        self.dist.on_main(lambda: Path(args.output_dir).mkdir(parents=True, exist_ok=True))
        self._kept_loaders: dict[str, tuple[Any, Any]] = {}
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        self.is_in_train = False
        self.metrics, self.clock, self._ema = Metrics(), Clock(), None
        self._train_batch_size = args.train_batch_size
        self.control = TrainerControl()
        builtin = [*DEFAULT_CALLBACKS, *trackers.tracker_callbacks(args.report_to)]
        self.callback_handler = CallbackHandler([*builtin, *_as_list(callbacks)], self.model, processing_class)
        self.add_callback(PrinterCallback if args.disable_tqdm else ProgressCallback)
        self.state = self._new_state()
        setup.close()
        self._fire("on_init_end")

    # ------------------------------------------------------------------------------------------------ before a model

    @classmethod
    def preflight(cls, args: TrainingArguments, parts: Parts) -> Iterator[Problem]:
        """What is wrong with a run, as far as it shows before a model is loaded or made: sentences, or exceptions.

        Extend it with ``yield from super().preflight(args, parts)``. All problems are raised in one message.

        Args:
            parts: what the trainer was handed beside `args`; see `posttrain.core.training.preflight`.
        """
        yield from preflight.of_arguments(args)
        yield from preflight.of_parts(args, parts)

    # ------------------------------------------------------------------------------------------------ the loop

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train from the start, or go on from a checkpoint bit for bit, also where a callback had stopped the run.

        Args:
            resume_from_checkpoint: a checkpoint directory, or True for the newest whole one in ``args.output_dir``.
            trial: the trial of a hyperparameter search that this run belongs to.
            ignore_keys_for_eval: outputs of the model that are no predictions, in evaluations along the way.
        """
        self.args.validate()  # what was assigned since construction
        checkpoint = self._find_checkpoint(resume_from_checkpoint)
        loader = self._adopt(self.get_train_dataloader())
        plan = self._plan_of_resume(self.make_plan(loader), loader, checkpoint)
        self.dist.meet("the beginning of training")
        with self._training(plan, loader, checkpoint, trial) as model:
            self._fire("on_train_begin")
            self._check_state()
            self.dist.meet("what callbacks do when training begins")
            epochs = self._epochs_left(plan)
            if self.args.eval_on_start and checkpoint is None:
                self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
            self._do_what_was_left(model, trial, ignore_keys_for_eval)
            for epoch in epochs:
                self._begin_epoch(epoch)
                for window, num_items in self._windows_left(plan, loader, epoch):  # the micro-batches of one update
                    self._fire("on_step_begin")
                    self.train_on_window(model, window, num_items)
                    self._advance(plan, len(window))
                    self._fire("on_step_end")
                    self._log_evaluate_save(model, trial, ignore_keys_for_eval)
                    if self.control.should_epoch_stop or self.control.should_training_stop:
                        break
                self._end_epoch(plan, model, trial)
                self._log_evaluate_save(model, trial, ignore_keys_for_eval)
                if self.control.should_training_stop or self.state.global_step >= plan.max_steps:
                    break
        return self._finish()

    def make_plan(self, loader: Any) -> Plan:
        """How many updates the run has; see `posttrain.core.training.plan`."""
        args, length = self.args, len(loader) if pipeline.has_length(loader) else None
        return make_plan(length, args.gradient_accumulation_steps, args.num_train_epochs, args.max_steps)

    def windows(self, plan: Plan, loader: Any) -> Iterator[tuple[list[Any], torch.Tensor | None]]:
        """The data of an epoch, as training sees it: ``(micro-batches, items in them)`` of one optimizer step after
        another. Override to make training data on the way, as online reinforcement learning does."""
        batches = iter(loader)
        self._restore_rng()  # the first row that is read must find the random numbers of the checkpoint
        while self.state.global_step < plan.max_steps and not self.control.should_training_stop:
            with self.clock("data"):
                window, num_items = self.get_batch_samples(batches, plan.accumulation, self.args.device)
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
            num_items = self._count_window(window)
        if not model.training:
            self._set_train_mode(model)
        self.clock.begin()
        window, losses = self._accumulate_or_cut(model, window, num_items)
        loss = sum(losses[1:], start=losses[0])
        grad_norm = self.progress.grad_norm = self.dist.clip_gradients(
            self._parameters, self.args.max_grad_norm, self.optimizer
        )
        self.clock.lap("forward_backward")
        self._fire("on_pre_optimizer_step")
        self.progress.learning_rate = self._get_learning_rate()  # the one this step uses, for the log
        may_step, applied = self._may_step(window, losses, loss, grad_norm, num_items), True
        self._is_moving = True  # until the update is counted, no checkpoint can be written
        if may_step or self.dist.scaler is not None:  # a loss scaler skips by itself, and must hear of each step
            applied = self.dist.optimizer_step(self.optimizer)
        self._fire("on_optimizer_step")
        if applied and not lr_scheduler.follows_a_metric(self.lr_scheduler):
            self.lr_scheduler.step()
        for parameter in self._parameters:
            parameter.grad = None
        if self._ema is not None:
            self._ema.update(self.state.global_step + 1)
        self.clock.lap("optimizer")
        self._log_window_loss(loss, num_items)
        if self._loss_terms:
            self._log_terms()

    def accumulate(self, model: nn.Module, window: list[Any], num_items: torch.Tensor | None) -> list[torch.Tensor]:
        """Forward and backward of each micro-batch of `window`; their shares of its loss, shape () each."""
        self.current_gradient_accumulation_steps, losses = len(window), []
        for number, inputs in enumerate(window, start=1):
            with self.dist.sync_gradients(model, when=number == len(window) or self._sync_each_batch):
                losses.append(self._step_of(model, inputs, num_items))
            if not pipeline.is_filler(inputs):
                self._count_input(inputs)
            if number < len(window):
                self._fire("on_substep_end")
        return losses

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch; the one place where a loss is scaled.

        Returns:
            The detached share of the window's loss, shape (); the mean of the processes' sums over a window is its loss.
        """
        inputs = self._prepare_inputs(inputs)
        # Counted before the loss is computed: old code pops the labels from its inputs.
        count = num_items_in_batch is not None and self._objective.may_be_mean
        items = self.count_items(inputs) if count else None
        with self.compute_loss_context_manager():
            if count and self._objective.is_open:
                self._find_out_scale(model, inputs, num_items_in_batch, items)
            loss, is_mean = self._objective(self.compute_loss, model, inputs, num_items_in_batch)
        weight = None
        if is_mean and items is not None:
            loss, weight = normalization.weighted(loss, items, num_items_in_batch)
        if pipeline.is_filler(inputs):  # it only keeps the processes in step
            loss = loss * 0
        if self._loss_scale != 1:  # processes average their gradients, and each holds a share of one sum
            loss = loss * self._loss_scale
        if self._objective.terms is not None:
            self._keep_terms(weight, pipeline.is_filler(inputs))
        if self._may_go_backward(loss, items):
            self.dist.backward(loss)
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

        A dict ``{"loss": ..., "kl": ...}`` may take the loss' place: its other values, terms of the loss in the same scale,
        are logged under their names.

        Args:
            return_outputs: return ``(loss, outputs)``.
            num_items_in_batch: items in the window of this optimizer step, over all micro-batches and processes, shape
                (). Return ``sum / num_items_in_batch``; or leave it alone and return a mean, which is then weighted.
        """
        options = {"pass_count": self.model_accepts_loss_kwargs, "loss_func": self.compute_loss_func}
        smoothing = 0.0 if self.label_smoother is None else self.label_smoother.epsilon
        options |= {"label_smoothing": smoothing, "shifted": self._loss_shifts_labels}
        loss, outputs = normalization.model_loss(model, inputs, num_items_in_batch, **options)
        return (loss, outputs) if return_outputs else loss

    def count_items(self, inputs: dict[str, Any]) -> torch.Tensor | int:
        """How many items the loss of this micro-batch is a mean over: predicted tokens, or rows without labels."""
        return 0 if pipeline.is_filler(inputs) else normalization.count_items(inputs, self._loss_shifts_labels)

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager:
        """Where the forward pass and the loss are computed: autocast, when a lower precision was asked for."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> contextlib.AbstractContextManager:
        return self.dist.autocast()

    def log_metric(self, name: str, value: float | torch.Tensor, weight: float | torch.Tensor = 1) -> None:
        """Log the mean of `value` from anywhere: weighted, over micro-batches and processes, reduced once per log."""
        self.metrics.add(name, value, weight)

    # ------------------------------------------------------------------------------------------------ data

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        """The loader of training micro-batches, `_train_batch_size` rows each on every process."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        size, sampler = self._train_batch_size, self._get_train_sampler
        return self._get_dataloader(self.train_dataset, "Training", size, sampler, is_training=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> torch.utils.data.DataLoader:
        """The loader of `eval_dataset`: a dataset, the name of one of several, or the trainer's own."""
        if eval_dataset is None and self.eval_dataset is None:
            raise ValueError("Trainer: evaluation requires an eval_dataset.")
        name = eval_dataset if isinstance(eval_dataset, str) else "eval"
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        size, sampler = self.args.eval_batch_size, self._get_eval_sampler
        return self._get_dataloader(dataset, "Evaluation", size, sampler, dataloader_key=name)

    def get_test_dataloader(self, test_dataset: Any) -> torch.utils.data.DataLoader:
        """The loader that `predict` reads."""
        return self._get_dataloader(test_dataset, "test", self.args.eval_batch_size, self._get_eval_sampler)

    def _get_dataloader(
        self, dataset, description, batch_size, sampler_fn=None, is_training=False, dataloader_key=None
    ) -> torch.utils.data.DataLoader:
        read, kept = dataset, self._kept_loaders.get(dataloader_key)
        if kept is not None and kept[0] is dataset:
            return kept[1]
        collator, build = self.data_collator, pipeline.build_train_loader if is_training else pipeline.build_eval_loader
        sampler = sampler_fn(dataset) if sampler_fn is not None and pipeline.has_length(dataset) else None
        dataset, collator = self._without_unused_columns(dataset, collator, description)
        place = {"rank": self.dist.rank, "world_size": self.dist.world_size, "device_type": self.dist.device.type}
        options = {"batch_size": batch_size, "collate_fn": collator, "sampler": sampler, "seed": self._data_seed}
        options["limits"] = self._limits()
        if (
            self.dist.device.type == "cpu"
        ):  # an id that the model does not know raises there; elsewhere it ends the process
            options["limits"] = {name: n for name, n in options["limits"].items() if name == "labels_per_token"}
        loader = build(dataset, args=self.args, **options, **place)
        if dataloader_key is not None and self.args.dataloader_persistent_workers:  # its workers are worth keeping
            self._kept_loaders[dataloader_key] = (read, loader)
        return loader

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        size = self._train_batch_size * self.args.gradient_accumulation_steps
        options = {"strategy": self.args.train_sampling_strategy, "seed": self._data_seed, "batch_size": size}
        names = {"length_column_name": self.args.length_column_name, "main_input": self._main_input}
        return pipeline.make_train_sampler(dataset, **options, **names)

    def _get_eval_sampler(self, eval_dataset: Any) -> torch.utils.data.Sampler | None:
        return None

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | None]:
        """(the next `num_batches` micro-batches or fewer at the end of an epoch, the items in them on all processes)."""
        window = next(windows(epoch_iterator, num_batches), [])
        return window, self._count_window(window) if window else None

    def _prepare_inputs(self, inputs: Any) -> Any:
        return pipeline.to_device(inputs, self.dist.device, non_blocking=self.args.non_blocking)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        return self._without_unused_columns(dataset, None, description)[0]

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        return self._without_unused_columns(None, data_collator, description)[1]

    def _without_unused_columns(self, dataset: Any, collator: Any, description: str | None) -> tuple[Any, Any]:
        if not self.args.remove_unused_columns:
            return dataset, collator
        self._set_signature_columns_if_needed()
        return pipeline.keep_columns(dataset, collator, self._signature_columns, description or "dataset")

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None and self.signature_columns is not None:
            self._signature_columns = list(self.signature_columns)
        if self._signature_columns is None:
            forward = wrapping.base_model(self.model).forward
            self._signature_columns = [*pipeline.signature_columns(forward), *self.label_names]

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A fresh model from ``model_init``, called with the trial where it takes one."""
        parameters = inspect.signature(self.model_init).parameters.values()
        takes_trial = any(
            p.name == "trial" or (p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD) for p in parameters
        )
        model = self.model_init(trial) if takes_trial else self.model_init()
        if model is None:
            raise RuntimeError("model_init returned None; it must return a model.")
        return model

    # ------------------------------------------------------------------------------------------------ optimization

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make ``self.optimizer`` and ``self.lr_scheduler`` unless they were given. Override one or the other below."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps, self.optimizer)

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
            args, optimizer = self.args, self.optimizer if optimizer is None else optimizer
            warmup = lr_scheduler.warmup_steps(args, num_training_steps)
            options = dict(args.lr_scheduler_kwargs or {})
            if args.lr_scheduler_type in lr_scheduler.FOLLOW_A_METRIC and args.greater_is_better:
                options.setdefault("mode", "max")
            self.lr_scheduler = self._made_scheduler = lr_scheduler.build(
                args.lr_scheduler_type, optimizer, warmup, num_training_steps, **options
            )
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
            sets = datasets if eval_dataset is not None else dict(zip(datasets, datasets, strict=True))
            parts = [self.evaluate(ds, ignore_keys, f"{metric_key_prefix}_{name}") for name, ds in sets.items()]
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
        model = self._evaluation_model()
        compute_metrics = None if loss_only else self.compute_metrics
        batch_metrics = eval_loop.by_batch(compute_metrics, args.batch_eval_metrics)
        self.callback_handler.eval_dataloader = dataloader
        with self._metrics_apart() as metrics, eval_loop.eval_mode(model, self.optimizer):
            kept, named, num_samples = eval_loop.run(
                dataloader,
                lambda inputs: self.prediction_step(model, inputs, loss_only, ignore_keys),
                count_items=self.count_items,
                metrics=metrics,
                keep=not loss_only,
                keep_with_batch_metrics=description == "Prediction",  # which is to return them
                is_filler=pipeline.is_filler,
                preprocess_logits=self.preprocess_logits_for_metrics,
                batch_metrics=batch_metrics,
                include=args.include_for_metrics,
                main_input=self._main_input,
                on_batch=lambda: self._after_evaluation_batch(dataloader),
                gather=self.dist.gather_object,
                num_batches=len(dataloader) if pipeline.has_length(dataloader) else None,
                accumulate=args.eval_accumulation_steps,
                concatenate=args.eval_do_concat_batches,
                order=eval_loop.reading_order(dataloader),
                fill=self.prediction_fill,
            )
        has_both = kept.predictions is not None and kept.label_ids is not None
        if compute_metrics is not None and batch_metrics is None and has_both:
            named |= compute_metrics(kept)
        prefixed = {
            n if n.startswith(f"{metric_key_prefix}_") else f"{metric_key_prefix}_{n}": v
            for n, v in eval_loop.plain(named).items()
        }
        return EvalLoopOutput(kept.predictions, kept.label_ids, prefixed, num_samples)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """(loss, logits, labels) of one evaluation batch; None for what is not there, or not asked for."""
        inputs = self._prepare_inputs(inputs)
        options = {"label_names": self.label_names, "can_return_loss": self.can_return_loss, "ignore_keys": ignore_keys}
        compute_loss = normalization.with_items(self.compute_loss, self.count_items(inputs), self.metrics.add)
        with self.compute_loss_context_manager():
            return eval_loop.predict_batch(model, inputs, compute_loss, loss_only=prediction_loss_only, **options)

    # ------------------------------------------------------------------------------------------------ log and save

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the epoch to a record, keep it in ``state.log_history`` and hand it to the callbacks.

        The ``perf/`` values are for the callbacks alone: the history of two equal runs is equal.
        """
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        history = {name: value for name, value in logs.items() if not is_performance(name)}
        self.state.log_history.append({**history, "step": self.state.global_step})
        self._fire("on_log", logs=logs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Operations of forward and backward for a micro-batch: 6 x tokens x parameters outside the embeddings (Kaplan et
        al. 2020, arXiv:2001.08361, section 2.1); 0 for models that cannot say. `state.total_flos` is their sum."""
        if self._flops_parameters is None:
            self._flops_parameters = normalization.flops_parameters(self.model)
        return 6 * normalization.count_slots(inputs, self._main_input) * self._flops_parameters

    def store_flos(self) -> None:
        """Bring `num_input_tokens_seen` and `total_flos` of the state up to now, over all processes."""
        self._count_inputs(self.metrics.drain(self.dist.gather_object, only=(TOKENS, FLOPS)))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, as ``from_pretrained`` reads it, with its tokenizer and the arguments of the run."""
        whole = self.dist.whole_state_dict(self.model, weights.is_saved(self.model))
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, **({} if whole is None else {"state_dict": whole}))
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
        """What this process must remember to go on exactly, beside weights, optimizer and random numbers. Extend it in a
        subclass that keeps state of its own; plain containers, numbers and tensors are saved."""
        return {
            "progress": dataclasses.asdict(self.progress) | {"grad_norm": float(self.progress.grad_norm)},
            "loader": self._loader.state_dict(),
            "metrics": self.metrics.state_dict(),
            "health": self._guard.state_dict(),
            "cuts": self._cuts,
            "epoch_stops": self.control.should_epoch_stop and not self.progress.epoch_ended,
            "left": [flag for flag in preemption.LEFT_TO_DO if getattr(self.control, flag)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.progress = Progress(**state["progress"])
        self.metrics.load_state_dict(state["metrics"])
        self._guard.load_state_dict(state["health"])
        self._cuts = state["cuts"]
        self._epoch_stops = state.get("epoch_stops", False)
        for flag in state["left"]:
            setattr(self.control, flag, True)
        self._seek(state["loader"])

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        self._settle_save()
        later = self.args.save_async
        self._state_at_save = copy.copy(self.state) if later else self.state
        self._processes_at_save = {} if self.args.save_only_model else self._process_states()
        self._saver.save(self.state.global_step, self._write_checkpoint, later)
        if not later:
            self._settle_save()

    def _load_from_checkpoint(self, resume_from_checkpoint: str | Path, model: nn.Module | None = None) -> None:
        model = wrapping.unwrap(self.model if model is None else model)
        with self.dist.writable(model):
            weights.load_weights(model, resume_from_checkpoint)

    # ------------------------------------------------------------------------------------------------ above one run

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: str | None = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Train again and again with other arguments, to find the best; see `posttrain.core.training.hyperparameter_search.search`."""
        from posttrain.core.training.hyperparameter_search import search

        self.hp_name, self.hp_search_backend = hp_name, backend or "optuna"
        return search(self, hp_space, compute_objective, n_trials, direction, backend, hp_name, **kwargs)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> Any:
        """Upload the model with its card; returns the address, or the upload under way where not `blocking`."""
        self.save_model(_internal_call=True)
        self.create_model_card(**card)
        if not self.dist.is_main:
            return None
        [(folder, path, ignore)] = hub.jobs(self.args.hub_strategy, None, self.args.output_dir, at_end=True)
        place = {"revision": revision, "token": token, "private": private}
        upload = self.uploader.push(folder, path, commit_message, ignore, blocking, **place)
        return upload.url if blocking else upload

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> str | None:
        """Make the repository on the Hub now; training itself makes it at the first upload."""
        return self.uploader.create_repo(token, private) if self.dist.is_main else None

    def create_model_card(self, model_name: str | None = None, finetuned_from: str | None = None, **card: Any) -> None:
        """Write a README.md about the model into the output directory, unless a person wrote one there.

        Args:
            card: fields of `posttrain.core.hub.model_card`; those that describe the run are filled in.
        """
        base = finetuned_from or getattr(getattr(self.model, "config", None), "_name_or_path", None)
        about = {"log_history": self.state.log_history, "base_model": base or None}
        about |= {"hyperparameters": hub.hyperparameters(self.args, self.dist.world_size)}
        about |= {"library_name": "peft" if wrapping.is_peft_model(self.model) else "transformers"}
        own = getattr(wrapping.base_model(self.model), "model_tags", None)
        tags = [*hub.names(card.pop("tags", None)), *(own or ())]
        if self.dist.is_main:
            hub.write_model_card(
                self.args.output_dir, model_name or self.uploader.repo_name.split("/")[-1], tags=tags, **(about | card)
            )

    # ------------------------------------------------------------------------------------------------ callbacks

    def add_callback(self, callback: Any) -> None:
        """Add a `TrainerCallback` instance or class, to be heard after those present."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any | None:
        """Take out a callback, by instance or class, and return it."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Take out a callback, by instance or class."""
        self.callback_handler.remove_callback(callback)

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks in the order in which they hear events."""
        return self.callback_handler.callbacks

    @property
    def tokenizer(self) -> Any:
        """Earlier name of `processing_class`."""
        return self.processing_class


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _accept_old_names(trainer: str, old: dict[str, Any], processing_class: Any, callbacks: Any) -> tuple[Any, Any]:
    """``tokenizer=`` and ``callback=``, as earlier versions called them, with one warning each."""
    for name, value in old.items():
        new = Trainer.OLD_ARGUMENTS.get(name)
        current = processing_class if new == "processing_class" else callbacks
        if new is None:
            known = [*inspect.signature(Trainer.__init__).parameters][1:-1]
            raise TypeError(f"{trainer} got an unknown argument {name!r}{did_you_mean(name, known)}")
        if current is not None:
            raise ValueError(f"{trainer} got both {new}= and its earlier name {name}=; pass {new}= alone.")
        warnings.warn(f"{trainer}: {name}= is now {new}=; both work.", FutureWarning, stacklevel=4)
        processing_class, callbacks = (value, callbacks) if name == "tokenizer" else (processing_class, value)
    return processing_class, callbacks
