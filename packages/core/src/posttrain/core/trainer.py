"""The training loop, and every method that a subclass overrides to change it.

`Trainer.train` is the loop. The other public methods are hooks: ten lines or fewer that call into modules which know no
trainer. Override a hook to change what happens; use a callback to change when. What a run does around its steps is in
`posttrain.core.training.run`, its set-up in `posttrain.core.training.lifetime`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from posttrain.core import hub, registry
from posttrain.core.arguments import TrainingArguments
from posttrain.core.callbacks import CallbackHandler, DefaultFlowCallback, PrinterCallback, ProgressCallback, as_list
from posttrain.core.checkpoint import Store, codec, weights
from posttrain.core.checkpoint.manager import CheckpointManager
from posttrain.core.data import pipeline
from posttrain.core.data.batch_limits import explain_lookup
from posttrain.core.data.loaders import Loaders, keep_columns
from posttrain.core.distributed import make_strategy
from posttrain.core.distributed.world import NOTHING
from posttrain.core.evaluation import eval_loop
from posttrain.core.files import naming
from posttrain.core.logging import trackers
from posttrain.core.logging.memory import MemoryTracker
from posttrain.core.logging.metrics import Clock, Metrics, is_performance, num_tokens_in
from posttrain.core.losses import normalization
from posttrain.core.models import embeddings, float8, gradient_checkpointing, liger, trainable, wrapping
from posttrain.core.optim import builder, lr_scheduler
from posttrain.core.state import EvalLoopOutput, PredictionOutput, TrainerControl, TrainerState, TrainOutput
from posttrain.core.training import lifetime, nonfinite, override_checks, preflight, resume
from posttrain.core.training.evaluator import Evaluator
from posttrain.core.training.plan import Plan, make_plan
from posttrain.core.training.preflight import Parts, Problem
from posttrain.core.training.record import Record
from posttrain.core.training.run import Run
from posttrain.core.training.saving import Saving
from posttrain.core.training.scaling import Scaling

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

    from posttrain.compat.trainer_names import TrainerNames, follow_old_names
else:  # of what stands on the core, which therefore does not import it
    TrainerNames, follow_old_names = map(registry.load, (registry.TRAINER_NAMES, registry.FOLLOW_OLD_NAMES))

logger = logging.getLogger(__name__)

DEFAULT_CALLBACKS: list[type] = [DefaultFlowCallback, trackers.JSONLinesCallback]


class Trainer(TrainerNames):
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
    record: Record
    metrics: Metrics
    clock: Clock
    # What `lifetime.look_up` finds out of each model.
    model_accepts_loss_kwargs: bool
    loss_shifts_labels: bool
    label_names: list[str]
    can_return_loss: bool
    label_smoother: normalization.LabelSmoother | None
    main_input: str
    _non_blocking: bool
    _signature_columns: list[str] | None
    _flops_parameters: int | None
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
    #: What the Hub finds models of this trainer by; `_tag_names` is trl's name.
    tag_names: tuple[str, ...] = ()
    _tag_names: Iterable[str] = ()
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
            processing_class, callbacks = preflight.renamed_parts(type(self), old_names, processing_class, callbacks)
        preflight.check_types(type(self).__name__, self.config_class, model, model_init, args)
        if args is None:
            args = self.config_class()
            logger.warning("No args were given: defaults are used, and the output goes to %s.", args.output_dir)
        self.args = args
        trackers.set_verbosity(args.get_process_log_level())
        self.run_preflight(args, Parts.of(locals()))
        pipeline.enable_full_determinism(args.seed) if args.full_determinism else pipeline.set_seed(args.seed)
        self.dist = make_strategy(args, model)
        self._memory_tracker = MemoryTracker(self.dist.device, on=not args.skip_memory_metrics)
        setup = contextlib.ExitStack()
        setup.enter_context(self._memory_tracker.stage("init"))
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
        self._made_with: dict[str, Any] = {}  # the arguments that the optimizer follows, as they were then
        self._owns_optimizer = self._owns_scheduler = True
        owner = weakref.proxy(self)  # a trainer that is dropped must free its memory at once
        lifetime.find_owners(owner)
        self.run, self.loaders = Run(owner), Loaders(owner)
        self.saving, self._evaluator = Saving(owner), Evaluator(owner)
        lifetime.new_record(owner)
        follow_old_names(self)
        self.set_model(model if model is not None else self.call_model_init())
        self.store, self.uploader = Store(args.output_dir, args.remote), hub.Uploader(args, args.output_dir)
        # Made by all processes together, at the start of `train`.
        self.checkpoints: CheckpointManager = lifetime.NOT_MADE
        self.dist.on_main(lambda: Path(args.output_dir).mkdir(parents=True, exist_ok=True))
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        self.is_in_train = False
        self._train_batch_size = args.train_batch_size
        self.control = TrainerControl()
        builtin = DEFAULT_CALLBACKS + [registry.load(path) for path in registry.CALLBACKS]
        listed = [*builtin, *trackers.tracker_callbacks(args.report_to), *as_list(callbacks)]
        self.callback_handler = CallbackHandler(listed, self.model, processing_class)
        self.callback_handler.log_metric = lambda *args, **kwargs: owner.log_metric(*args, **kwargs)
        self.add_callback(PrinterCallback if args.disable_tqdm else ProgressCallback)
        self.state = lifetime.new_state(owner)
        setup.close()
        self._fire("on_init_end")

    # ------------------------------------------------------------------------------------------------- checks and model

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
        first; the base class then skips it.
        """
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
            trainable.check_trainable(model)
            nonfinite.check_float16(model, self.dist.precision, self.dist.uses_deepspeed)
        self.model = self.model_wrapped = model
        lifetime.look_up(self, model)
        self.scaling = Scaling(weakref.proxy(self))
        self.dist.place(model, trained=True)
        for config in wrapping.configs(model):
            config.use_cache = self.args.use_cache

    def loss_is_scaled(self) -> bool | None:
        """Whether this class' `compute_loss` returns ``sum / num_items_in_batch``; None where only trying shows it."""
        own = self.compute_loss_func is None and self.label_smoother is None
        return False if own and not self.model_accepts_loss_kwargs else None

    # --------------------------------------------------------------------------------------------------------- the loop

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
        follow_old_names(self)
        self.store.output_dir = Path(self._get_output_dir(trial))
        self.checkpoints = CheckpointManager(weakref.proxy(self))  # with `args` as they are now
        checkpoint = self.checkpoints.find(resume_from_checkpoint)
        loader = self.loaders.adopt(self.get_train_dataloader())
        plan = self.make_plan(loader)
        plan = plan if checkpoint is None else self.resume_plan(plan, loader, checkpoint)
        self.dist.meet("the beginning of training")
        run = lifetime.set_up(weakref.proxy(self), plan, loader, checkpoint, trial, ignore_keys_for_eval)
        with lifetime.under_way(run) as model:
            for epoch in run.epochs():
                for window, num_items in self.windows_left(plan, loader, epoch):  # the micro-batches of one step
                    self._fire("on_step_begin")
                    self.train_on_window(model, window, num_items)
                    if run.after_step(len(window)):
                        break
        return run.finish()

    def train_on_window(self, model: nn.Module, window: list[Any], num_items: torch.Tensor | None = None) -> None:
        """One optimizer step over the micro-batches of `window`.

        Args:
            num_items: items in the window over all processes, shape (); counted here if not given.
        """
        run, dist, clock, scaling = self.run, self.dist, self.clock, self.scaling
        # Counted before the first forward: the divisor must be known when the first micro-batch runs backward.
        num_items = self.count_window(window) if num_items is None else normalization.scalar(num_items, dist.device)
        if not model.training:
            eval_loop.train_mode(model, self.optimizer)
        clock.begin()
        if scaling.objective.may_change:
            scaling.objective.begin_step(self.state.global_step + 1)
        run.num_items = num_items  # for a training_step that leaves it out
        if run.splitter is None:
            losses = self.accumulate(model, window, num_items)
        else:
            window, losses = run.splitter.run(
                window, self.state.global_step + 1, lambda part: self.accumulate(model, part, num_items), run.undo_point
            )
        if scaling.objective.counts is not None:
            losses, num_items = scaling.divided(losses, scaling.objective.counts, num_items)
        loss = sum(losses[1:], start=losses[0])
        grad_norm = dist.clip_gradients(run.parameters, self.args.max_grad_norm, self.optimizer)
        clock.lap("backward" if clock.has_laps else "forward_backward")
        self._fire("on_pre_optimizer_step")
        run.progress.grad_norm, run.progress.learning_rate = grad_norm, self._get_learning_rate()  # that this step uses
        run.rates = [group["lr"] for group in self.optimizer.param_groups]
        may_step, applied = run.may_step(window, losses, loss, grad_norm, num_items), True
        run.is_stepping = True  # until the step is counted, no checkpoint can be written
        if may_step or dist.scaler is not None:  # a loss scaler skips by itself, and must see each step
            applied = dist.optimizer_step(self.optimizer)
        self._fire("on_optimizer_step")
        if self.args.include_num_input_tokens_seen != "no":  # the schedule may follow them, and callbacks may stop
            self.store_flos()
        if applied:
            lr_scheduler.step(self.lr_scheduler, self.state.num_input_tokens_seen)
        for parameter in run.parameters:
            parameter.grad = None
        if run.ema is not None:
            run.ema.update(self.state.global_step + 1)
        clock.lap("optimizer", last=True)
        self.record.step(loss, num_items, scaling.objective.take_terms())
        run.num_items = None

    def accumulate(self, model: nn.Module, window: list[Any], num_items: torch.Tensor | None) -> list[torch.Tensor]:
        """Forward and backward of each micro-batch of `window`; their shares of its loss, shape () each. Apart from
        `train_on_window`, which repeats it with smaller micro-batches where memory runs out.
        """
        self.current_gradient_accumulation_steps = self.run.window_size = len(window)
        losses, device = [], self.dist.device
        for number, inputs in enumerate(window, start=1):
            given: tuple[Any, ...] = (model, inputs, num_items)
            self.accelerator.sync_gradients = number == len(window)  # scripts ask it
            at_hand = self.dist.computing(inputs, self.metrics) if self.dist.num_processes > 1 else NOTHING
            sync = self.dist.sync_gradients(model, when=number == len(window) or self.run.sync_each_batch)
            scaled = self.scaling.as_of_transformers(*given) if self.scaling.has_own_step else NOTHING
            with sync, self.dist.in_step(), at_hand, scaled:
                try:
                    losses.append(normalization.of_step(self.training_step(*given[: self.run.step_takes]), device))
                except (IndexError, KeyError) as error:  # an id or a column that is not there, most often: say which
                    explain_lookup(error, inputs, self.id_limits())
                    raise
            if not pipeline.is_filler(inputs):
                self.record.read(inputs, self.main_input, self.floating_point_ops(inputs))
            if number < len(window):
                self._fire("on_substep_end")
        self.run.window_size = 0
        return losses

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch; the one place where a loss is scaled.

        Returns:
            The detached share of the window's loss, shape (). The window's loss is the mean of the processes' sums.
        """
        scaling, objective = self.scaling, self.scaling.objective
        num_items = self.run.num_items if num_items_in_batch is None else num_items_in_batch
        # Counted before the loss is computed: old code pops the labels from its inputs.
        needs_items = num_items is not None and (objective.is_open or objective.returns_mean is not False)
        items = self.count_items(inputs) if needs_items and scaling.has_own_inputs else None
        inputs = self.prepare_inputs(inputs)
        if needs_items and not scaling.has_own_inputs:
            items = self.count_items(inputs)
        with self.compute_loss_context_manager():
            if objective.is_open and num_items is not None:
                scaling.find_out(model, inputs, num_items, items)
            loss, is_mean = objective(scaling.covered or self.compute_loss, model, inputs, num_items, items)
        weight, is_filler = None, pipeline.is_filler(inputs)
        if is_mean and items is not None and num_items is not None:
            loss, weight = normalization.weighted(loss, items, num_items)
        if is_filler:  # it only keeps the processes in step
            loss = loss * 0
        if scaling.factor != 1:  # processes average their gradients, and each holds a share of one sum
            loss = loss * scaling.factor
        if objective.terms is not None:
            objective.keep_terms(weight, 0 if is_filler else scaling.factor)
        if not (is_mean or scaling.steps_in_backward) or scaling.may_go_backward(loss, items if is_mean else None):
            self.clock.lap("forward")
            self.dist.backward(loss)
            self.clock.lap("backward")
        return loss.detach()

    # --------------------------------------------------------------------------------------------------------- its data

    def make_plan(self, loader: Any) -> Plan:
        """How many optimizer steps the run has; see `posttrain.core.training.plan`."""
        args, length = self.args, len(loader) if pipeline.has_length(loader) else None
        epochs = args.num_train_epochs
        return make_plan(length, args.gradient_accumulation_steps, epochs, args.max_steps, args.epochs_of_stream)

    def resume_plan(self, plan: Plan, loader: Any, checkpoint: Path) -> Plan:
        """`plan` for resuming from `checkpoint`, whose optimizer steps may have held another number of rows."""
        return resume.resume_plan(self, plan, loader, checkpoint)

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
        another. Override to make training data on the way, as online reinforcement learning does.
        """
        batches, device, count = iter(loader), self.args.device, plan.accumulation
        draw = override_checks.drawing(self, Trainer.get_batch_samples)
        takes = len(override_checks.taken(draw, batches, count, device))
        # Old code calls `next` `num_batches` times; transformers passes at most how many batches are left.
        length = None if override_checks.is_ours(self, "get_batch_samples") else plan.batches_per_epoch
        self.restore_rng()  # the first row that is read must find the random numbers of the checkpoint
        while self.state.global_step < plan.max_steps and not self.control.should_training_stop:
            if length is not None and (count := min(count, length - self.run.progress.batches)) < 1:
                next(batches, None)  # so that the loader ends its epoch
                return
            began = time.perf_counter()
            window, num_items = draw(*(batches, count, device)[:takes])
            self.clock.add("data", time.perf_counter() - began)
            if not window:
                return
            yield window, num_items

    # --------------------------------------------------------------------------------------------------------- the loss

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
            model,
            inputs,
            num_items_in_batch,
            pass_count=self.model_accepts_loss_kwargs,
            loss_func=self.compute_loss_func,
            shifted=self.loss_shifts_labels,
            label_smoothing=0.0 if self.label_smoother is None else self.label_smoother.epsilon,
        )
        return (loss, outputs) if return_outputs else loss

    def count_items(self, inputs: dict[str, Any]) -> torch.Tensor | int:
        """How many items the loss of this micro-batch is a mean over: predicted tokens, or rows without labels."""
        return 0 if pipeline.is_filler(inputs) else normalization.count_items(inputs, self.loss_shifts_labels)

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager[Any]:
        """Where the forward pass and the loss are computed: autocast, when a lower precision was asked for."""
        return self.dist.autocast()

    def log_metric(
        self,
        name: str,
        value: float | torch.Tensor,
        weight: float | torch.Tensor = 1,
        reduce: str = "mean",
        per_epoch: bool = False,
    ) -> None:
        """Log `value` from anywhere: its "mean" (weighted), "sum", "min" or "max" over micro-batches and processes,
        once per log record, or, `per_epoch`, over all of an epoch in a record at its end.
        """
        self.metrics.log(name, value, weight, reduce, per_epoch)

    # ------------------------------------------------------------------------------------------------------------- data

    @property
    def train_batch_size(self) -> int:
        """Rows of a micro-batch on each process."""
        return self._train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Rows of an evaluation batch on each process."""
        return self.args.eval_batch_size

    @property
    def data_seed(self) -> int:
        """The seed of the order of rows."""
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Rows of one optimizer step, over all its micro-batches and all processes."""
        return self._train_batch_size * args.gradient_accumulation_steps * self.dist.world_size

    def get_train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        """The loader of training micro-batches, `_train_batch_size` rows each on every process."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        return self.make_dataloader(self.train_dataset, "Training", self.train_batch_size, is_training=True)

    @property
    def prediction_fill(self) -> int:
        """Fills up predictions of ragged width; an evaluation that generates sets its pad token."""
        return -100

    def get_eval_dataloader(self, eval_dataset: Any = None) -> torch.utils.data.DataLoader[Any]:
        """The loader of `eval_dataset`: a dataset, the name of one of several, or the trainer's own."""
        if eval_dataset is None and self.eval_dataset is None:
            raise ValueError("Trainer: evaluation requires an eval_dataset.")
        name = eval_dataset if isinstance(eval_dataset, str) else "eval"
        if isinstance(eval_dataset, str):
            eval_dataset = pipeline.named_dataset(self.eval_dataset, eval_dataset)
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        follow_old_names(self)
        return self.make_dataloader(dataset, "Evaluation", self.eval_batch_size, dataloader_key=name)

    def get_test_dataloader(self, test_dataset: Any) -> torch.utils.data.DataLoader[Any]:
        """The loader that `predict` reads."""
        pipeline.check_dataset(test_dataset, "test_dataset")
        follow_old_names(self)
        return self.make_dataloader(test_dataset, "test", self.eval_batch_size)

    def make_dataloader(
        self, dataset, description, batch_size, sampler_fn=None, is_training=False, dataloader_key=None
    ) -> torch.utils.data.DataLoader[Any]:
        """The loader of `dataset`, whichever of the three above asks for it.

        Args:
            batch_size: rows of a batch on each process.
            sampler_fn: ``dataset -> sampler``, for a dataset that has a length; by default `train_sampler` in training.
            dataloader_key: the name under which workers that persist are kept.
        """
        sampler_fn = sampler_fn or (self.train_sampler if is_training else None)
        return self.loaders.make(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)

    def train_sampler(self, dataset: Any) -> torch.utils.data.Sampler[Any] | None:
        """The order of the training rows; None: that of the dataset."""
        strategy, drop_last = self.args.train_sampling_strategy, self.args.dataloader_drop_last
        size = self.train_batch_size, self.args.gradient_accumulation_steps, self.dist.world_size
        return pipeline.make_train_sampler(dataset, strategy, self.data_seed, self.row_lengths, size, drop_last)

    def row_lengths(self, dataset: Any) -> list[int]:
        """Tokens that the model reads of each row; batches are made of rows of similar length. Override it where the
        rows have neither a column of lengths nor the model's main input.
        """
        return pipeline.row_lengths(dataset, self.args.length_column_name, self.main_input)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | None]:
        """(the next `num_batches` micro-batches, or fewer at an epoch's end; the items in them on all processes)."""
        window = list(itertools.islice(epoch_iterator, num_batches))
        return window, self.count_window(window) if window else None

    def prepare_inputs(self, inputs: Any) -> Any:
        """A micro-batch as the model gets it, on the device."""
        return self.complete_inputs(self._prepare_input(inputs))

    def _prepare_input(self, data: Any) -> Any:
        return pipeline.to_device(data, self.dist.device, non_blocking=self._non_blocking)

    def complete_inputs(self, inputs: Any) -> Any:
        """`inputs`, on the device, with columns that the collator does not make. Extend it for columns of yours."""
        return inputs

    def without_unused_columns(self, dataset: Any, collator: Any, description: str | None) -> tuple[Any, Any]:
        """(`dataset`, `collator`) without the columns that are not read (`remove_unused_columns`)."""
        return keep_columns(self, dataset, collator, description)

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None and self.signature_columns is not None:
            self._signature_columns = list(self.signature_columns)
        if self._signature_columns is None:
            columns = pipeline.signature_columns(wrapping.base_model(self.model).forward)
            self._signature_columns = columns and [*columns, *self.label_names]

    def id_limits(self) -> dict[str, int]:
        """How many ids the model knows, by column; labels only where its own loss reads them."""
        stock = override_checks.is_stock(self, "compute_loss") and self.compute_loss_func is None
        return {name: n for name, n in embeddings.id_limits(self.model).items() if stock or "labels" not in name}

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A fresh model from ``model_init``, called with the trial where it takes one."""
        if self.model_init is None:
            raise ValueError("The trainer was built without model_init; pass a function that makes a model.")
        return trainable.model_of(self.model_init, trial)

    # ----------------------------------------------------------------------------------------------------- optimization

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
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type, dict[str, Any]]:
        """(class, arguments) of the optimizer named by ``args.optim``."""
        return builder.optimizer_class_and_kwargs(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Parameters under weight decay: all but biases and norms."""
        return builder.decay_parameter_names(model)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Make ``self.lr_scheduler`` unless one was given."""
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = self._made_scheduler = lr_scheduler.make(self.args, optimizer, num_training_steps)
        return self.lr_scheduler

    def _get_learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])  # which may be a tensor

    # ------------------------------------------------------------------------------------------------------- evaluation

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
        with self._evaluator.timed(loader, "Evaluation", ignore_keys, metric_key_prefix) as output:
            self.log(output.metrics)
            self._fire("on_evaluate", metrics=output.metrics)
        return output.metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions and labels of every row, with metrics where there are labels."""
        loader = self.get_test_dataloader(test_dataset)
        with self._evaluator.timed(loader, "Prediction", ignore_keys, metric_key_prefix, keep=True) as output:
            self._fire("on_predict", metrics=output.metrics)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ) -> EvalLoopOutput:
        """One pass over `dataloader` without gradients; `evaluate` and `predict` share it."""
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        return self._evaluator.loop(dataloader, description, loss_only, ignore_keys, metric_key_prefix)

    def evaluation_model(self) -> nn.Module:
        """The model as an evaluation runs it: sharded where training shards it, and on the device."""
        return self._evaluator.model()

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        return self.run.evaluate(lambda: self.evaluate(ignore_keys=ignore_keys_for_eval), skip_scheduler)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        return self._evaluator.is_best(metrics)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """(loss, logits, labels) of one evaluation batch; None for what is not there, or not asked for."""
        inputs = self.prepare_inputs(inputs)
        compute_loss = self.evaluation_loss(inputs)
        known: dict[str, Any] = {"label_names": self.label_names, "can_return_loss": self.can_return_loss}
        with self.compute_loss_context_manager():
            return eval_loop.predict_batch(
                model, inputs, compute_loss, loss_only=prediction_loss_only, ignore_keys=ignore_keys, **known
            )

    def evaluation_loss(self, inputs: Any) -> Callable[..., Any]:
        """`compute_loss` for an evaluation batch, which returns a mean, for a `prediction_step` of your own: terms of
        a dict are logged, and counts of pairs ``(sum, count)`` kept as its weight.
        """
        return self.scaling.objective.in_evaluation(self.compute_loss, self.count_items(inputs), self.metrics.add)

    # ----------------------------------------------------------------------------------------------------- log and save

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
        et al. 2020, arXiv:2001.08361, section 2.1); 0 for models that cannot say. `state.total_flos` is their sum.
        """
        if self._flops_parameters is None:
            self._flops_parameters = normalization.flops_parameters(self.model)
        return 6 * normalization.count_slots(inputs, self.main_input) * self._flops_parameters

    def store_flos(self) -> None:
        """Bring `num_input_tokens_seen` and `total_flos` of the state up to now, over all processes."""
        self.record.store_counts(self.state)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, as ``from_pretrained`` reads it, with its tokenizer and the arguments of the run."""
        with self.saving.averages(), naming(folder := output_dir or self.args.output_dir):
            self.saving.model(folder, _internal_call, type(self)._save is not Trainer._save)
        if not _internal_call:
            self.saving.copy_files()
            if self.args.push_to_hub:
                self.push_to_hub(commit_message="Model save")

    def save_state(self) -> None:
        """Write ``trainer_state.json`` into the output directory."""
        if self.dist.is_main:
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(Path(self.args.output_dir) / "trainer_state.json")

    def state_dict(self) -> dict[str, Any]:
        """What this process must remember to resume exactly, beside weights, optimizer and random numbers. Extend it in
        a subclass that keeps state of its own; plain containers, numbers and tensors are saved.
        """
        return self.run.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.run.load_state_dict(state)
        if self.run.progress.own_count:
            self.scaling.objective.settle("mixed", for_good=True)

    def checkpoint_parts(self) -> dict[str, Stateful]:
        """More objects that a checkpoint holds, by the name of their file; their state is the same on every process."""
        return {}

    def write_checkpoint(self, directory: Path) -> None:
        """Write this process' files of a checkpoint. Extend it for files of your own."""
        self.checkpoints.write(directory)

    def load_checkpoint(self, checkpoint: str | Path, model: nn.Module | None = None) -> None:
        """Load the weights of `checkpoint`, and the state of `checkpoint_parts`."""
        model = wrapping.unwrap(self.model if model is None else model)
        with self.dist.writable(model):
            weights.load_weights(model, checkpoint)
        for name, part in self.checkpoint_parts().items():
            if Path(checkpoint, f"{name}.json").is_file():
                part.load_state_dict(codec.load_tree(Path(checkpoint, name)))

    def _save_checkpoint(self, model: nn.Module, trial: Any = None, metrics: Any = None) -> None:
        self.saving.checkpoint()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        self.saving.write(Path(output_dir or self.args.output_dir), state_dict)

    # -------------------------------------------------------------------------------------------------------- callbacks

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

    def _fire(self, event: str, state: TrainerState | None = None, **kwargs: Any) -> None:
        self.control = self.callback_handler.call_event(event, self.args, state or self.state, self.control, **kwargs)

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
        return self.dist.prepare_model(model, self.optimizer)

    def restore_rng(self) -> None:
        """Set the random numbers of the checkpoint, once. To be called when the first row after it is read."""
        self.run.restore_rng()

    # ----------------------------------------------------------------------------------------------- the loss of a step

    def count_window(self, window: list[Any]) -> torch.Tensor | None:
        """Items of an accumulation window, shape (), on the device: over all processes, unless
        `average_tokens_across_devices` is off.

        None where they are not needed: a mean over the only micro-batch there is, is the mean over the window.
        """
        items, objective = sum(self.count_items(inputs) for inputs in window), self.scaling.objective
        needed = objective.own_count or (objective.takes_count and not self.scaling.is_own_loss)
        if len(window) == 1 and self.dist.world_size == 1 and objective.returns_mean and not needed:
            if (not isinstance(items, torch.Tensor) or items.is_cpu) and items:  # which takes no wait to know
                return None
        items = normalization.scalar(items, self.dist.device)
        if self.dist.world_size == 1:
            return items
        # A process without labels has no mean, and no part in the mean of the others.
        return self.dist.sum(items) if self.args.average_tokens_across_devices else items.clamp(min=1)
