"""How a run leaves checkpoints behind: the end of each save, and ends that come early, by a signal, by time or by an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from posttrain.core.checkpoint import check_space, rng, weights
from posttrain.core.data.stateful_dataloader import Loader
from posttrain.core.models import wrapping
from posttrain.core.optim import builder
from posttrain.core.training import preemption
from posttrain.core.training.plan import as_steps

if TYPE_CHECKING:
    from posttrain.core.arguments import TrainingArguments
    from posttrain.core.checkpoint import Store
    from posttrain.core.distributed import Distributed
    from posttrain.core.state import TrainerControl, TrainerState
    from posttrain.core.training.plan import Plan, Progress

logger = logging.getLogger(__name__)


class Leaving:
    """The part of a `Lifecycle` that leaves; a mixin, which reads the attributes named here."""

    args: TrainingArguments
    dist: Distributed
    model: nn.Module
    optimizer: torch.optim.Optimizer
    store: Store
    state: TrainerState
    control: TrainerControl
    progress: Progress
    windows: Callable[..., Iterator[tuple[list[Any], torch.Tensor | None]]]
    _watch: preemption.Watch
    _boundary: dict[str, Any] | None  # the position after the last whole update, where errors are to save it
    _epoch_stops: bool  # a callback had ended the epoch when the checkpoint was taken that the run goes on from
    _saved_step: int | None  # of the newest checkpoint of this run
    _may_leave_at: int | None = None  # records in the log while an evaluation may be given up

    @property
    def _saves_on_signal(self) -> bool:
        if self.args.save_on_signal is None:
            return self.args.save_strategy != "no" or self.args.enable_jit_checkpoint
        return self.args.save_on_signal

    def _check_space(self, plan: Plan) -> None:
        """Say now that the disk is too small for the checkpoints of this run, not after hours."""
        args = self.args
        if args.save_strategy == "no" or not self.dist.is_main:
            return
        every = {"steps": as_steps(args.save_steps, plan.max_steps), "epoch": plan.steps_per_epoch}
        saves = -(-plan.max_steps // (every.get(str(args.save_strategy)) or plan.max_steps))
        limit = args.most_checkpoints
        count = saves if limit is None else min(saves, limit + 1)  # the oldest goes after the newest is there
        is_saved = weights.is_saved(wrapping.unwrap(self.model))
        least = sum(p.nbytes for name, p in wrapping.unwrap(self.model).named_parameters() if is_saved(name))
        each = least if args.save_only_model else least + builder.state_bytes(self.optimizer)
        if (problem := check_space(self.store.output_dir, each * count, count, least)) is not None:
            logger.warning("%s", problem)

    def _copy_files(self) -> None:
        if self.store.remote is not None:
            self.dist.on_main(self.store.push_files, "the copy of log and model")

    def _seek(self, position: dict[str, Any]) -> None:
        """Let the data go on from `position`, or start the epoch's data afresh if that was asked for."""
        if not self.args.ignore_data_skip:
            self._loader.load_state_dict(position)
        elif not self.progress.epoch_ended:
            self.progress.batches = 0
            self._loader.set_epoch(self.progress.epoch)
        if self.progress.epoch_ended:
            self.progress.epoch += 1
            self._loader.set_epoch(self.progress.epoch)

    def _epochs_left(self, plan: Plan) -> range:
        """The epochs that are to be trained; none where a callback does not let the run begin, which is said."""
        step, epochs = self.state.global_step, range(self.progress.epoch, plan.num_epochs)
        if self.control.should_training_stop:
            logger.warning(
                "A callback asked to stop in on_train_begin: training ends at update %d, where it began.", step
            )
            return range(0)
        if step >= plan.max_steps:
            logger.warning(
                "The checkpoint is of update %d and the run has %d: nothing is left to train. To train on, set a larger "
                "max_steps or num_train_epochs.", step, plan.max_steps,
            )  # fmt: skip
        return epochs

    def _leaves_the_epoch(self, plan: Plan) -> bool:
        """Whether a callback has stopped the run inside an epoch, of which the rest is trained when it goes on."""
        if not self.control.should_training_stop or self.control.should_epoch_stop:
            return False
        length = plan.batches_per_epoch
        return self.state.global_step < plan.max_steps and (length is None or self.progress.batches < length)

    def _save_before_the_rest(self, model: nn.Module, trial: Any) -> None:
        """Save where the run stands before it logs and evaluates the part of an epoch: the whole one will be, by the run
        that goes on."""
        asked = {flag: getattr(self.control, flag) for flag in preemption.LEFT_TO_DO}
        for flag in asked:
            setattr(self.control, flag, False)
        self.store_flos()
        self._save_checkpoint(model, trial)
        self._settle_save()
        for flag in asked:
            setattr(self.control, flag, getattr(self.control, flag) or (asked[flag] and flag != "should_save"))

    def _windows_left(self, plan: Plan, loader: Any, epoch: int) -> Iterator[tuple[list[Any], torch.Tensor | None]]:
        """The windows of an epoch. There is none left where the checkpoint was saved after the last, for which the loader
        had come to its end and begun the next epoch, or a callback had asked for the epoch to end."""
        if loader.epoch == epoch and not self._epoch_stops:
            return self.windows(plan, loader)
        self._epoch_stops = False
        self._restore_rng()
        return iter(())

    def _do_what_was_left(self, model: nn.Module, trial: Any, ignore_keys: list[str] | None) -> None:
        """Log, evaluate and save what the run that this one goes on from had no time for."""
        if any(getattr(self.control, flag) for flag in preemption.LEFT_TO_DO):
            self._restore_rng()
            self._log_evaluate_save(model, trial, ignore_keys)

    def _evaluate_or_leave(self, model: nn.Module, trial: Any, ignore_keys: list[str] | None) -> dict[str, float]:
        before = rng.rng_state()
        self._may_leave_at = len(self.state.log_history)  # not once a set of several is evaluated and logged
        try:
            return self._evaluate(trial, ignore_keys)
        except preemption.EvaluationLeft as left:
            rng.set_rng_state(before)
            self._leave(model, trial, left.reason)
        finally:
            self._may_leave_at = None

    def _after_evaluation_batch(self, loader: Any) -> None:
        self._fire("on_prediction_step")
        # Loaders of our own have as many batches on every process, so that all ask equally often.
        if len(self.state.log_history) == self._may_leave_at and (
            self.dist.world_size == 1 or isinstance(loader, Loader)
        ):
            if reason := self._watch.due():
                raise preemption.EvaluationLeft(reason)

    def _leave(self, model: nn.Module, trial: Any, reason: int) -> NoReturn:
        """Save where the run stands, and end it."""
        self._settle_save()
        left_to_do = any(getattr(self.control, flag) for flag in preemption.LEFT_TO_DO)
        if left_to_do or self._saved_step != self.state.global_step:
            self.store_flos()
            self._save_checkpoint(model, trial)
            self._settle_save()
        raise preemption.Left(reason)

    def _leave_after_the_last(self, trial: Any) -> None:
        """A signal that came in the last update; that the time is up means nothing any more."""
        reason = self._watch.settle(self.dist.gather_object)
        if reason > preemption.TIME_IS_UP:
            self._leave(self.model_wrapped, trial, reason)

    def _save_after(self, error: Exception) -> None:
        """Save the last whole update, as far as that can be had."""
        why_not = None
        if self._is_moving:
            why_not = "the weights were being updated"
        elif self.dist.world_size > 1:
            why_not = "the other processes may be elsewhere"
        elif self._saved_step == self.state.global_step and self._boundary is not None:
            return  # it is there
        if why_not is None:
            try:
                if self._boundary is None:
                    self.store_flos()
                self._save_checkpoint(self.model_wrapped)
                self._settle_save()
                what = f"{self.store.path(self.state.global_step)} holds the last whole update; go on from it"
            except Exception as another:
                what = f"no checkpoint could be saved ({type(another).__name__}: {another})"
        else:
            what = f"no checkpoint was saved, for {why_not}"
        logger.warning("Training ended by %s: %s.", type(error).__name__, what)

    def _settle_save(self, wait: bool = True) -> None:
        """Tell the Hub and the callbacks of a checkpoint that is there now, and let older ones go."""
        outcome = self._saver.settle(wait)
        if outcome is None:
            return
        if outcome.path is None:
            if self.state.best_global_step == outcome.step:
                self.state.best_model_checkpoint = None
            return
        self._saved_step = outcome.step
        now, self.state = self.state, self._state_at_save  # one written in the background is of an earlier step
        try:
            self._upload(outcome.path)
            self._rotate(now.best_model_checkpoint)
            self._copy_files()
            self._fire("on_save")
            self.dist.meet("what callbacks do after a save")
        finally:
            self.state = now
