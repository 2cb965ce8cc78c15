"""One run of `Trainer.train`: where it stands, its epochs and steps, what callbacks ask for, and its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from posttrain.core.callbacks import FLAGS
from posttrain.core.checkpoint.transaction import Outcome
from posttrain.core.data import rng
from posttrain.core.distributed.stragglers import Pace
from posttrain.core.errors import CheckpointError, DataError, UnsavedError
from posttrain.core.evaluation import eval_loop
from posttrain.core.models import trainable
from posttrain.core.models.wrapping import unwrap
from posttrain.core.optim import builder, lr_scheduler
from posttrain.core.state import TrainOutput, unanswered
from posttrain.core.training import ema, guards, nonfinite, override_checks, preemption
from posttrain.core.training.ema import EMA
from posttrain.core.training.guards import BatchSplitter, Guard
from posttrain.core.training.loss_spikes import SpikeWatch
from posttrain.core.training.plan import Plan, Progress

if TYPE_CHECKING:
    from posttrain.core.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """Made at the start of `train`; that of the last run stays until the next."""

    owner: Trainer  # by a weak reference
    plan: Plan = field(default_factory=lambda: Plan(1, None, 0, 0))  # its length
    loader: Any = None  # of the training micro-batches
    trial: Any = None  # of a hyperparameter search
    ignore_keys: list[str] | None = None  # outputs that are no predictions, in evaluations
    progress: Progress = field(default_factory=Progress)  # in its data and its log; saved in checkpoints
    parameters: list[nn.Parameter] = field(default_factory=list)  # those of the wrapped model
    known: set[int] = field(default_factory=set)  # the `id` of those that were trained when it began
    begun: dict[str, bool] = field(default_factory=dict)  # whether each was, once callbacks had been called
    switched: dict[str, bool] = field(default_factory=dict)  # those that were frozen or trained since, in a checkpoint
    finite: nonfinite.FiniteGuard = field(default_factory=nonfinite.FiniteGuard)
    spikes: SpikeWatch | None = None  # looks for spikes of the loss, where `on_loss_spike` asks for it
    splitter: BatchSplitter | None = None  # with `auto_find_batch_size`
    watch: preemption.Watch = field(default_factory=lambda: preemption.Watch(on_signals=False))
    pace: Pace | None = None  # how long this process takes for its part of a step, where there are several
    ema: EMA | None = None  # the averaged weights, where there are any
    rows_per_batch: float = 1  # of a micro-batch over all processes; on average where it holds as many as fit
    reads_as_given: bool = True  # micro-batches are those of the loader: the last one of an epoch may be short
    rates: list[Any] = field(default_factory=list)  # the learning rate of each group of parameters in the last step
    is_new: bool = True  # it does not start from a checkpoint
    first_step: int = 0  # the optimizer step it started from
    rows_read: int = 0  # over all processes, since it started
    rng: dict[str, Any] | None = None  # random numbers of the checkpoint, until the first row is read
    epoch_stopped: bool = False  # a callback had ended the epoch when the checkpoint was saved
    is_stepping: bool = False  # the optimizer is changing the weights: no checkpoint can be saved now
    unsaved: Outcome | None = None  # of the last save, where it failed and the model is in no other file
    records_before_evaluation: int | None = None  # length of the log history, while an evaluation may be interrupted
    memory: dict[str, int] = field(default_factory=dict)  # metrics of the memory that training took, once it is done
    callbacks_may_differ: bool = False  # callbacks may ask for something on one process alone
    step_takes: int = 3  # arguments that `training_step` takes
    sync_each_batch: bool = False  # processes average their gradients after each micro-batch
    num_items: Any = None  # of the accumulation window, over all processes, while its micro-batches are trained
    window_size: int = 0  # micro-batches of the accumulation window, while they are trained; else 0
    guards: list[Guard] = field(init=False)  # what looks at each optimizer step before it is applied
    _total_rows: int | None = None

    def __post_init__(self) -> None:
        self.guards = [guard for guard in (self.finite, self.spikes) if guard is not None]

    @classmethod
    def make(cls, owner: Trainer, plan: Plan, loader: Any, trial: Any, ignore_keys: list[str] | None) -> Run:
        """A run of `owner`, whose model and optimizer are there, over `loader`."""
        args, dist, rows = owner.args, owner.dist, owner.train_batch_size
        limit = preemption.seconds(args.max_time) if args.max_time else None
        asks = Path(args.output_dir, preemption.SAVE_NOW) if dist.is_main else None
        run = cls(owner, plan, loader, trial, ignore_keys)
        run.finite, run.spikes = guards.make(owner)
        parameters = list(owner.model_wrapped.parameters())
        return replace(
            run,
            parameters=parameters,
            known={id(parameter) for parameter in parameters if parameter.requires_grad},
            splitter=BatchSplitter(rows, args.gradient_accumulation_steps) if args.auto_find_batch_size else None,
            watch=preemption.Watch(preemption.saves_on_signal(args), limit, dist.num_processes, dist.device, asks),
            pace=Pace(dist.seconds_waited, dist.process_index) if dist.num_processes > 1 else None,
            ema=ema.make(owner.model, args, owner.optimizer),
            rows_per_batch=loader.rows_per_turn or rows * dist.world_size,
            reads_as_given=override_checks.is_stock(owner, "windows"),
            step_takes=len(override_checks.taken(owner.training_step, None, None, None)),
            sync_each_batch=bool(args.accelerator_config.accumulation.get("sync_each_batch")),
        )

    # ---- its beginning ----

    def _begin(self) -> range:
        """Call the callbacks, evaluate or do what an interrupted run had left where that is due; the epochs to do."""
        owner, args = self.owner, self.owner.args
        owner._fire("on_train_begin", data_reports=owner.data_reports)
        self.begun = trainable.switch(unwrap(owner.model), self.switched)
        if preemption.may_save(args):
            owner.checkpoints.check_state()
        self.meet("what callbacks do when training begins")
        epochs = self._epochs_left()
        if args.eval_on_start and self.is_new:
            owner._evaluate(self.trial, self.ignore_keys, skip_scheduler=True)
        if unanswered(owner.control):  # by the run that was interrupted
            self.restore_rng()
            self.answer()
        return epochs

    # ---- resuming ----

    def state_dict(self) -> dict[str, Any]:
        """Where this process stands, of what `Trainer.state_dict` saves; without a wait for the device, on which the
        `metrics` and the norm of the gradients may be: see `CheckpointManager.remember`.
        """
        control, progress, plan = self.owner.control, self.progress, self.plan
        spikes = {} if self.spikes is None else {"spikes": self.spikes.state_dict()}
        trained = {name: parameter.requires_grad for name, parameter in unwrap(self.owner.model).named_parameters()}
        return {
            "progress": dict(vars(progress)),
            "plan": [plan.accumulation, plan.batches_per_epoch, plan.resized_at],
            "loader": self.loader.state_dict(),
            "metrics": self.owner.metrics.sums(),
            "health": asdict(self.finite.counts) | spikes,
            "cuts": 0 if self.splitter is None else self.splitter.cuts,
            "epoch_stops": control.should_epoch_stop and not progress.epoch_ended,
            "left": unanswered(control),
            "switched": {name: now for name, now in trained.items() if now != self.begun.get(name, now)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.progress = Progress(**state["progress"])
        if self.splitter is not None:
            self.splitter.cuts = state["cuts"]
        self.owner.metrics.load_state_dict(state["metrics"])
        health = dict(state["health"])
        spikes, self.finite.counts = health.pop("spikes", None), nonfinite.Counts(**health)
        if self.spikes is not None and spikes is not None:
            self.spikes.load_state_dict(spikes)
        self.epoch_stopped, self.switched = state["epoch_stops"], state.get("switched", {})
        for flag in state["left"]:
            setattr(self.owner.control, flag, True)
        self.seek(state["loader"], skip_data=not self.owner.args.ignore_data_skip)

    def seek(self, position: dict[str, Any], skip_data: bool = True) -> None:
        """Let the data continue from `position`, or from the beginning of the epoch."""
        if skip_data:
            self.loader.load_state_dict(position)
        elif not self.progress.epoch_ended:
            self.progress.batches = 0
            self.loader.set_epoch(self.progress.epoch)
        if self.progress.epoch_ended:
            self.progress.epoch += 1
            self.loader.set_epoch(self.progress.epoch)

    def restore_rng(self) -> None:
        """Set the random numbers of the checkpoint, once: the first row that is read must find them."""
        if self.rng is not None:
            rng.set_rng_state(self.rng)
            self.rng = None

    # ---- epochs ----

    @property
    def is_over(self) -> bool:
        """Whether the run has made its optimizer steps, or has read its tokens."""
        state = self.owner.state
        return state.global_step >= self.plan.max_steps or state.num_input_tokens_seen >= self.owner.args.max_tokens

    def epochs(self) -> Iterator[int]:
        """The epochs to train, one after another. Between them, and before the first, callbacks are called, and what
        they ask for is done.
        """
        for epoch in self._begin():
            self._begin_epoch(epoch)
            yield epoch
            self._end_epoch()
            self.answer()
            if self.owner.control.should_training_stop or self.is_over:
                return

    def _epochs_left(self) -> range:
        """The epochs to train; none, with a warning, where a callback does not let the run begin."""
        control, state, max_steps = self.owner.control, self.owner.state, self.plan.max_steps
        step, epochs = state.global_step, range(self.progress.epoch, self.plan.num_epochs)
        if control.should_training_stop:
            logger.warning(f"A callback asked to stop in on_train_begin: training ends at step {step}, where it began.")
            return range(0)
        if not self.is_over:
            return epochs
        if step == max_steps == 0:
            logger.info("num_train_epochs=0: nothing is trained.")
        elif step >= max_steps:
            logger.warning(
                f"The checkpoint is of step {step} and the run has {max_steps}: nothing is left to train. To train on, "
                "set a larger max_steps or num_train_epochs."
            )
        else:
            logger.warning(
                f"The checkpoint has read {state.num_input_tokens_seen} tokens and the run ends with "
                f"max_duration={self.owner.args.max_duration!r}: nothing is left to train. To train on, set a larger "
                "max_duration."
            )
        control.should_training_stop = True
        # Saved with the last step, the checkpoint stands before what callbacks ask for at the end of the epoch.
        return range(0) if self.progress.ended_at == step else epochs

    def _begin_epoch(self, epoch: int) -> None:
        self.progress.epoch, self.progress.epoch_ended = epoch, False
        self.owner.control.should_epoch_stop = False
        self.owner._fire("on_epoch_begin")
        self.agree()
        counts_rows = self.reads_as_given and self.loader.rows_per_batch == self.rows_per_batch
        self._total_rows = self.loader.total_rows if counts_rows else None

    def _end_epoch(self) -> None:
        owner, progress, is_over = self.owner, self.progress, self.is_over
        length = self.plan.batches_per_epoch  # None: not known, and more is assumed to come
        has_rest = (length is None or progress.batches < length) and not owner.control.should_epoch_stop
        # Stopped by a callback, or at the end of the run: a resumed one trains the rest of the epoch.
        is_left, is_cut = has_rest and owner.control.should_training_stop and not is_over, has_rest and is_over
        if progress.batches == 0 and not is_over and not owner.control.should_training_stop:
            if owner.state.global_step == 0:
                raise DataError(
                    "The training data gave not one batch, so nothing was trained. See whether the stream is empty or "
                    "used up, or whether every row of it was dropped.\n"
                    + "\n".join(line for report in owner.data_reports.values() for line in report.lines())
                )
            logger.warning("The training data gave no batch in epoch %d; training stops here.", progress.epoch)
            owner.control.should_training_stop = True
        if is_over:
            progress.ended_at = owner.state.global_step
        if not is_left and not (is_cut and progress.batches > 0):
            progress.epoch_ended, progress.batches = True, 0
            self.loader.set_epoch(progress.epoch + 1)
            if self.plan.is_open:  # a stream's epoch has no fractions
                owner.state.epoch = progress.epoch + 1.0
        owner._fire("on_epoch_end")
        if progress.epoch_ended and (logs := owner.record.of_epoch()):
            owner.log(logs)
        self.agree()
        if is_left and owner.control.should_save:
            self._save_inside_epoch()

    def _save_inside_epoch(self) -> None:
        """Save before the run logs and evaluates a part of an epoch: the resumed run does so with the whole one."""
        owner = self.owner
        asked = unanswered(owner.control)
        for flag in asked:
            setattr(owner.control, flag, False)
        owner.saving.now()
        for flag in {*asked} - {"should_save"}:
            setattr(owner.control, flag, True)

    # ---- steps ----

    def undo_point(self) -> Callable[[], None]:
        """Remember what an attempt at an accumulation window changes; the function that puts it back."""
        owner = self.owner
        random, sums = rng.rng_state(), owner.metrics.copy()

        def undo() -> None:
            for parameter in self.parameters:
                parameter.grad = None
            owner.scaling.objective.take_terms()
            owner.dist.empty_cache()
            owner.metrics.restore(sums)
            rng.set_rng_state(random)

        return undo

    def may_step(
        self, window: list[Any], losses: list[torch.Tensor], loss: Any, grad_norm: Any, num_items: Any
    ) -> bool:
        """Whether the guards let the optimizer step of `window` be made."""
        owner, progress, scaler = self.owner, self.progress, self.owner.dist.scaler
        place = (owner.state.global_step, progress.epoch, progress.batches)
        origins = None if self.splitter is None else self.splitter.origins
        update = nonfinite.Update(*place, window, losses, loss, grad_norm, num_items, origins)
        scale = None if scaler is None else scaler.get_scale
        return all(guard.may_step(owner.optimizer, update, scale) for guard in self.guards)

    def after_step(self, num_batches: int) -> bool:
        """Count an optimizer step over `num_batches` micro-batches, call the callbacks and do what they ask for;
        returns whether the epoch ends here.
        """
        owner, state = self.owner, self.owner.state
        self.advance(num_batches)
        state.global_step += 1
        self.is_stepping, owner.checkpoints.boundary = False, None
        if self.splitter is not None and self.splitter.cuts:
            state.train_batch_size = self.splitter.rows
        if state.global_step == self.first_step + 1 and preemption.may_save(owner.args):
            owner.checkpoints.check_optimizer_state()
        state.epoch = self.plan.epoch_at(self.progress.epoch, self.progress.batches, state.global_step)
        every = owner.args.torch_empty_cache_steps
        if every is not None and state.global_step % every == 0:
            owner.dist.empty_cache()
        owner._fire("on_step_end")
        self.answer()
        return owner.control.should_epoch_stop or owner.control.should_training_stop

    def advance(self, num_batches: int) -> None:
        """Count the `num_batches` micro-batches of an optimizer step, and their rows."""
        first, last = self.progress.batches, self.progress.batches + num_batches
        self.progress.batches = last
        rows, total = self.rows_per_batch, self._total_rows
        read = num_batches * rows if total is None else min(last * rows, total) - min(first * rows, total)
        self.rows_read += round(read)

    # ---- what callbacks ask for ----

    def agree(self) -> None:
        """Set on every process the flags of the control that are set on one: what they ask for takes all of them."""
        if self.callbacks_may_differ:
            control = self.owner.control
            found = self.owner.dist.highest([int(getattr(control, flag)) for flag in FLAGS])
            for flag, is_set in zip(FLAGS, found, strict=True):
                setattr(control, flag, bool(is_set))

    def meet(self, what: str) -> None:
        """Wait until the callbacks of every process have done `what`."""
        self.owner.dist.meet(what)
        self.agree()

    def answer(self) -> None:
        """Do what the flags of the control ask for, and clear them."""
        owner, args, watch, saving = self.owner, self.owner.args, self.watch, self.owner.saving
        if self.pace is not None:
            self.pace.pause()
        if self.callbacks_may_differ:
            self.agree()
        if reason := watch.due():
            self.interrupt(reason)
        owner.control.should_save |= watch.asks_for_save
        watch.asks_for_save = False
        control = owner.control
        if control.should_log or control.should_evaluate or control.should_save:
            for guard in self.guards:
                guard.settle()
        if args.save_async and owner.checkpoints.saver.pending is not None:
            if owner.dist.num_processes == 1 or control.should_log:
                saving.settle(wait=False)
        if owner.control.should_log and owner.state.global_step > self.progress.last_logged:
            self._log()
        owner.control.should_log = False
        if owner.control.should_evaluate:
            self._evaluate()
        if owner.control.should_save:
            owner.control.should_save = False
            owner.store_flos()
            with owner.clock("save"):
                saving.ask()
        if args.save_on_exception:
            owner.checkpoints.remember()
        if self.pace is not None:
            owner.dist.enter_step(owner.state.global_step + 1, self.progress.batches)
            self.pace.resume()

    def _log(self) -> None:
        owner = self.owner
        if not owner.dist.shards:  # which replaces the parameters while a layer runs
            self._find_untrained()
        beside = builder.named_rates(owner.optimizer, self.rates)
        for guard in self.guards:
            beside |= guard.logged()
        owner.log(owner.record.of_steps(owner.state, self.progress, self.first_step, beside, self.pace))
        self.agree()

    def _find_untrained(self) -> None:
        """Warn of parameters that became trainable, or came, since the run began, and that no optimizer changes."""
        parameters = self.owner.model_wrapped.named_parameters()
        new = {name: id(p) for name, p in parameters if p.requires_grad and id(p) not in self.known}
        if not new:
            return
        held = {id(p) for group in self.owner.optimizer.param_groups for p in group["params"]}
        if names := [name for name, number in new.items() if number not in held]:
            logger.warning(
                "Parameters are to be trained that were not when the run began, and the optimizer holds none of them, "
                f"so they stay as they are: {', '.join(names[:3])}{f' ({len(names)} in all)' if names[3:] else ''}. "
                "Replace modules before train(); to unfreeze parameters later, let them be trainable when train() "
                "begins, and freeze them in on_train_begin of a callback."
            )
        self.known.update(new.values())

    def _evaluate(self) -> None:
        owner, before = self.owner, rng.rng_state()
        owner.store_flos()
        self.records_before_evaluation = len(owner.state.log_history)
        try:
            metrics = owner._evaluate(self.trial, self.ignore_keys)
        except preemption.EvaluationLeft as left:
            rng.set_rng_state(before)
            self.interrupt(left.reason)
        finally:
            self.records_before_evaluation = None
        owner.control.should_evaluate = False
        improved = owner._determine_best_metric(metrics=metrics, trial=self.trial)
        if owner.args.save_strategy == "best":
            owner.control.should_save |= improved  # or a callback asked for it

    def evaluate(self, evaluate: Callable[..., dict[str, float]], skip_scheduler: bool) -> dict[str, float]:
        """An evaluation along the way: its metrics, which a schedule may follow. They are those of the main process,
        which alone may have measured some: what they decide, all processes do.
        """
        owner, named = self.owner, self.owner.args.metric_for_best_model
        with owner.clock("eval"):
            own = evaluate()
            self.meet("what callbacks do after an evaluation")
            metrics: dict[str, float] = owner.dist.broadcast_object(own)
        if named is not None:  # a missing one raises at the first evaluation
            eval_loop.named_metric(metrics, named)
        if lr_scheduler.follows_a_metric(owner.lr_scheduler) and not skip_scheduler:
            owner.lr_scheduler.step(eval_loop.named_metric(metrics, named or "loss"))
        return metrics

    def interrupt(self, reason: int) -> NoReturn:
        """Save where the run stands, and end it: a signal, or the time limit."""
        owner = self.owner
        owner.saving.settle()
        if unanswered(owner.control) or owner.checkpoints.saved_step != owner.state.global_step:
            owner.saving.now()
        step = owner.checkpoints.saved_step  # an earlier one, if this save has failed
        if owner.dist.is_main:
            where = "" if step is None else f" To go on from {owner.store.path(step)}, set resume_from_checkpoint=True."
            logger.warning("The run stops after optimizer step %d.%s", owner.state.global_step, where)
        raise preemption.Left(reason)

    # ---- its end ----

    def finish(self) -> TrainOutput:
        """The last record, the best model where it was asked for, and what `train` returns."""
        owner, state, average = self.owner, self.owner.state, self.ema
        self.finite.finish()
        if self.spikes is not None:
            self.spikes.settle()
        rest, metrics = owner.record.of_run(
            state, self.progress, self.first_step, self.rows_read, self.finite.counts.count
        )
        for data_report in owner.data_reports.values():
            data_report.log_more(logger)
        metrics |= self.memory
        owner.log(rest | metrics)
        metrics["epoch"] = state.epoch
        if owner.args.include_num_input_tokens_seen != "no":
            metrics["num_input_tokens_seen"] = state.num_input_tokens_seen
        eval_loop.keep_averages(owner.optimizer)
        self._restore_best_model()
        if average is not None and owner.args.ema_use != "eval":
            average.copy_to_model()
        owner.saving.at_end()
        owner._fire("on_train_end")
        self._check_last_save()
        return TrainOutput(state.global_step, metrics["train_loss"], metrics)

    def _check_last_save(self) -> None:
        if self.unsaved is not None:
            store, saved = self.owner.store, self.owner.checkpoints.saved_step
            newest = (
                "There is no other checkpoint" if saved is None else f"The newest checkpoint is {store.path(saved)}"
            )
            raise UnsavedError(
                f"Training is over, and its last save failed: {store.path(self.unsaved.step)} is not there "
                f"({self.unsaved.why}). {newest}. The trained weights are in the memory of this process alone: free "
                "some space, or take another folder, and call trainer.save_model(folder) before the process ends."
            )

    def _restore_best_model(self) -> None:
        owner, state, best = self.owner, self.owner.state, self.owner.state.best_model_checkpoint
        if owner.args.load_best_model_at_end and best is not None:
            logger.info("Loading the best model, from %s (%s).", best, state.best_metric)
            try:
                folder = owner.dist.on_main(lambda: owner.store.resolve(best))
            except CheckpointError as error:
                step = owner.checkpoints.saved_step
                last = "" if step is None else f" Its last weights are in {owner.store.path(step)}."
                error.add_note(
                    f"It holds the best model ({state.best_metric}), which load_best_model_at_end was to load. "
                    f"Training is finished, after step {state.global_step}.{last}"
                )
                raise
            owner._load_from_checkpoint(str(folder))
            ema.load(self.ema, folder)
            self.unsaved = None
        elif owner.args.load_best_model_at_end:
            why = f"there is no checkpoint of the best step ({state.best_global_step}, {state.best_metric})"
            if state.best_metric is None:
                why = f"no evaluation gave a number for metric_for_best_model={owner.args.metric_for_best_model!r}"
            logger.warning("load_best_model_at_end: %s, so the model stays that of step %d.", why, state.global_step)
