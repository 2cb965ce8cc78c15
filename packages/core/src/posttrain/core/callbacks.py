"""Defines the sixteen callback events, the callback handler and the default callbacks."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from posttrain.core.data.samplers import has_length
from posttrain.core.errors import did_you_mean
from posttrain.core.fields.durations import Passing
from posttrain.core.files import means_disk_full
from posttrain.core.logging import terminal
from posttrain.core.state import ExportableState, TrainerControl, TrainerState, has_state, merit, metric_key, with_state

logger = logging.getLogger(__name__)

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


#: `log_metric` of the trainer whose event is being called.
_log_of_event: Callable[..., None] | None = None


class TrainerCallback:
    """Reacts to the events of a run and controls *when* to log, evaluate, save and stop.

    Each method receives ``(args, state, control, **kwargs)`` with `model`, `processing_class`, `optimizer`,
    `lr_scheduler`, `train_dataloader` and `eval_dataloader` in `kwargs`, and may return nothing, the control, or a dict
    of control flags such as ``{"should_training_stop": True}``. The order of events in the loop::

        on_init_end                          the trainer was built
        on_train_begin
            on_epoch_begin
                on_step_begin                one optimizer step begins
                    on_substep_end           after each micro-batch but the last
                    on_pre_optimizer_step    gradients are there, clipped
                    on_optimizer_step        weights have moved, gradients are still there
                on_step_end                  then, if due: on_log, on_evaluate, on_save
            on_epoch_end                     then, if due: on_log, on_evaluate, on_save
        on_train_end
        on_prediction_step, on_evaluate, on_predict, on_push_begin: whenever they happen

    With several processes, a flag that is set on one of them is set on all, at the end of the same optimizer step.

    Attributes:
        may_fail: an error of this callback is logged and training goes on. Else it ends the run, with a note that names
            callback and event; of posttrain's own callbacks, a full disk does not.
    """

    may_fail = False

    def log_metric(self, name: str, value: Any, weight: Any = 1, reduce: str = "mean", per_epoch: bool = False) -> None:
        """In an event: log the mean of `value` in the next record, or what else `Trainer.log_metric` can do.

        Raises:
            RuntimeError: no trainer is calling a callback.
        """
        if _log_of_event is None:
            raise RuntimeError(
                f"{type(self).__name__}.log_metric({name!r}, ...) was called outside of an event, where no trainer is "
                "known. Call it in a method such as on_step_end."
            )
        _log_of_event(name, value, weight, reduce, per_epoch)

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_predict(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> Any: ...
    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_push_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...


EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


class ClosingCallback(TrainerCallback):
    """A callback that gives something back when training ends, also by an error, where `on_train_end` is not called."""

    def close(self) -> None:
        """Called once training is over, perhaps a second time."""


def as_list(callbacks: Any) -> list[Any]:
    """A trainer's `callbacks`, of which one may be given alone."""
    return [] if callbacks is None else list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def is_callback(value: Any) -> bool:
    """Whether `value` is a callback or a class of callbacks: it has a method for one of the events."""
    return any(hasattr(value, event) for event in EVENTS)


def problems_of_callbacks(callbacks: Any, args: Any) -> Iterator[str | Exception]:
    """Problems with a trainer's `callbacks`; a callback may define ``preflight(args)`` for its own checks."""
    for callback in as_list(callbacks):
        kind = callback if isinstance(callback, type) else type(callback)
        if not is_callback(callback):
            yield TypeError(f"{callback!r} is no callback: callbacks are TrainerCallback instances or classes.")
        elif isinstance(callback, type) and (needed := _needed_arguments(callback)):
            yield TypeError(
                f"callbacks holds the class {callback.__name__}, which cannot be made without {', '.join(needed)}: "
                f"pass an instance, {callback.__name__}(...)."
            )
        elif hasattr(kind, "preflight"):
            yield from (kind() if isinstance(callback, type) else callback).preflight(args)


def _needed_arguments(kind: type) -> list[str]:
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in positional]


class CallbackHandler:
    """The callbacks of a trainer, in order, and the objects that they receive.

    The list may change at any time. The callbacks of each event are cached until it changes, because most callbacks
    implement few events and an optimizer step fires at least four.
    """

    def __init__(self, callbacks: Iterable[Any], model=None, processing_class=None, optimizer=None, lr_scheduler=None):
        self.callbacks: list[Any] = []
        self.model, self.processing_class = model, processing_class
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        #: What callbacks log with, see `TrainerCallback.log_metric`.
        self.log_metric: Callable[..., None] | None = None
        self._listed: list[Any] = []  # the list for which the cache is valid
        self._listeners: dict[str, list[Any]] = {event: [] for event in EVENTS}
        for callback in callbacks:
            self.add_callback(callback)

    def add_callback(self, callback: Any) -> None:
        """Append a callback, given as an instance or as a class to instantiate."""
        instance = callback() if isinstance(callback, type) else callback
        if not is_callback(instance):
            raise TypeError(f"{callback!r} is no callback: callbacks are TrainerCallback instances or classes.")
        if any(type(present) is type(instance) for present in self.callbacks):
            present, name = self.callback_list.replace("\n", ", "), type(instance).__name__
            logger.warning(
                f"A {name} was added to a trainer that already has one; both will run. The callbacks now are: {present}"
            )
        self.callbacks.append(instance)

    def pop_callback(self, callback: Any) -> Any | None:
        """Take out and return the first callback that is `callback`, or of that class; None if there is none."""
        for place, present in enumerate(self.callbacks):
            if present is callback or (isinstance(callback, type) and _is_a(present, callback)):
                del self.callbacks[place]
                return present
        return None

    def restore(self, states: dict[str, Any]) -> None:
        """Put callbacks saved in a checkpoint in place of those present, class by class and in order.

        Args:
            states: `TrainerState.stateful_callbacks`.
        """
        for name, saved in states.items():
            saved = saved if isinstance(saved, list) else [saved]
            places = [i for i, cb in enumerate(self.callbacks) if type(cb).__name__ == name and has_state(cb)]
            if len(places) < len(saved) and name != "TrainerControl":
                logger.warning(
                    f"The checkpoint holds the state of {len(saved)} {name} and the trainer has {len(places)} such "
                    "callbacks: the state of the others is not loaded. Pass them to the trainer to restore it."
                )
            for place, entry in zip(places, saved, strict=False):
                self.callbacks[place] = with_state(self.callbacks[place], entry)

    def remove_callback(self, callback: Any) -> None:
        self.pop_callback(callback)

    @property
    def may_differ(self) -> bool:
        """Whether these callbacks may ask for something on one process alone: ours and transformers' never do."""
        return any(type(one).__module__.split(".")[0] not in ("posttrain", "transformers") for one in self.callbacks)

    @property
    def callback_list(self) -> str:
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def _listening(self, event: str) -> list[Any]:
        """The callbacks in the list that implement `event`, which may be a custom event."""
        now, known = self.callbacks, self._listed
        if len(now) != len(known) or not all(map(operator.is_, now, known)):
            self._listed = list(now)
            self._listeners = {event: [cb for cb in now if hears(cb, event)] for event in EVENTS}
        return self._listeners[event] if event in self._listeners else [cb for cb in now if hasattr(cb, event)]

    def look_again(self) -> None:
        """Find out again which event each callback implements, since a script may have given it methods."""
        self._listed = []

    def _in_turn(self, event: str, listening: list[Any]) -> Iterator[Any]:
        """Those `listening`, and those that they add meanwhile; none that they take out."""
        before = list(self.callbacks)
        yield from (callback for callback in listening if self.callbacks == before or callback in self.callbacks)
        if self.callbacks != before:
            yield from (callback for callback in self._listening(event) if callback not in before)

    def nobody_hears(self, event: str) -> bool:
        """Whether no callback implements `event`."""
        return not self._listening(event)

    def call_event(
        self, event: str, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Call every callback that implements `event`, in order; returns the resulting control."""
        global _log_of_event
        if not (listening := self._listening(event)):
            return control
        before, _log_of_event = _log_of_event, self.log_metric  # an event may lead to another trainer's
        try:
            for callback in self._in_turn(event, listening):
                try:
                    answer = getattr(callback, event)(
                        args,
                        state,
                        control,
                        model=self.model,
                        processing_class=self.processing_class,
                        tokenizer=self.processing_class,  # the name in older callbacks of transformers
                        optimizer=self.optimizer,
                        lr_scheduler=self.lr_scheduler,
                        train_dataloader=self.train_dataloader,
                        eval_dataloader=self.eval_dataloader,
                        **kwargs,
                    )
                except Exception as error:
                    if not self._goes_on(callback, event, state, error):
                        raise
                    continue
                if answer is not None:
                    control = _apply(answer, control, f"{type(callback).__name__}.{event}")
        finally:
            _log_of_event = before
        return control

    def _goes_on(self, callback: Any, event: str, state: TrainerState, error: Exception) -> bool:
        """Whether training goes on after `callback` raised `error`, which a warning or a note of the error says."""
        name = type(callback).__name__
        unwritten = means_disk_full(error) or (isinstance(error, OSError) and error.filename)  # as of a lost mount
        is_record = bool(unwritten) and type(callback).__module__.startswith("posttrain.")
        if is_record or getattr(callback, "may_fail", False):
            raised = f"{type(error).__name__}: {error}"
            remedy = "; free some space" if means_disk_full(error) else ""
            why = f"a record is not worth the run{remedy}" if is_record else "its may_fail is set"
            logger.warning(
                f"The callback {name} raised in {event} at step {state.global_step}: {raised}. Training goes on, for "
                f"{why}.",
                exc_info=not is_record,
            )
            return True
        error.add_note(
            f"Raised by the callback {name} in {event}, at step {state.global_step}. To train on without what it does, "
            f"set {name}.may_fail = True. The callbacks, in order: {self.callback_list.replace(chr(10), ', ')}."
        )
        return False

    # Each event as a method, for scripts that override `log` or write their own loop.

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any) -> TrainerControl:
        return self.call_event("on_evaluate", args, state, control, metrics=metrics)

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any) -> TrainerControl:
        return self.call_event("on_predict", args, state, control, metrics=metrics)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any) -> TrainerControl:
        return self.call_event("on_log", args, state, control, logs=logs)

    def __getattr__(self, event: str) -> Any:
        if event not in EVENTS:
            raise AttributeError(f"CallbackHandler has no {event!r}{did_you_mean(event, EVENTS)}")
        return functools.partial(self.call_event, event)


def _is_a(callback: Any, wanted: type) -> bool:
    """Whether `callback` is of the class `wanted`; transformers' progress bar and similar count as ours."""
    namesakes = wanted.__module__ == "transformers.trainer_callback" and type(callback).__name__ == wanted.__name__
    return isinstance(callback, wanted) or namesakes


def hears(callback: Any, event: str) -> bool:
    """Whether `callback` implements `event`; the empty method of a `TrainerCallback` does not count."""
    kind: Any = type(callback)
    method = None if event in getattr(callback, "__dict__", ()) else getattr(kind, event, None)
    if method is None or kind.__getattribute__ is not object.__getattribute__:  # it has what it returns when asked
        return hasattr(callback, event)
    place = getattr(method, "__module__", ""), getattr(method, "__qualname__", "")
    empty = place == ("transformers.trainer_callback", f"TrainerCallback.{event}")
    return not empty and method is not vars(TrainerCallback)[event]


def _apply(answer: Any, control: TrainerControl, where: str) -> TrainerControl:
    if isinstance(answer, dict):
        for name, value in answer.items():
            if name not in FLAGS:
                near = did_you_mean(name, FLAGS, ".")
                raise ValueError(f"{where} returned {answer!r}: unknown key {name!r}{near} Valid: {', '.join(FLAGS)}.")
            setattr(control, name, bool(value))
        return control
    if all(hasattr(answer, flag) for flag in FLAGS):
        return answer
    raise TypeError(
        f"{where} returned {answer!r}; return nothing, the control, or a dict of control flags ({', '.join(FLAGS)})."
    )


class DefaultFlowCallback(TrainerCallback):
    """Sets the flags to log, evaluate, save and stop, as the arguments require."""

    _passing: Passing | None = None
    _max_tokens = math.inf

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._passing, self._max_tokens = Passing(state), args.max_tokens

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step, intervals = state.global_step, (args.logging_steps, args.eval_steps, args.save_steps)
        log = evaluate = save = False
        if self._passing is not None and any(isinstance(each, str) for each in intervals):
            log, evaluate, save = self._passing.step(state, *intervals)
        last = step >= state.max_steps or state.num_input_tokens_seen >= self._max_tokens
        if args.logging_strategy == "steps" and (log or step % state.logging_steps == 0):
            control.should_log = True
        if step == 1 and args.logging_first_step:
            control.should_log = True
        evaluate = evaluate or step % state.eval_steps == 0 or last
        if args.eval_strategy == "steps" and args.eval_delay <= step and evaluate:
            control.should_evaluate = True
        if args.save_strategy == "steps" and (save or step % state.save_steps == 0 or last):
            control.should_save = True
        if last:
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The last step of a run that ends with its stream shows only now.
        last = state.known_steps is None and state.epoch >= state.num_train_epochs
        if args.logging_strategy == "epoch":
            control.should_log = True
        evaluates = args.eval_strategy == "epoch" or (last and args.eval_strategy == "steps")
        if evaluates and args.eval_delay <= (state.epoch if args.eval_strategy == "epoch" else state.global_step):
            control.should_evaluate = True
        if args.save_strategy == "epoch" or (last and args.save_strategy == "steps"):
            control.should_save = True


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stop when the metric has not improved for `early_stopping_patience` evaluations in a row.

    Args:
        early_stopping_patience: tolerated evaluations without improvement.
        early_stopping_threshold: how much the metric must improve to count.

    Needs ``metric_for_best_model`` and an ``eval_strategy``; checked when the trainer is built.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0
        # A separate copy: the trainer may update the state's best before this callback is called.
        # The best of all evaluations, as in transformers: improvements below the threshold update it too.
        self.best_metric: float | None = None

    def preflight(self, args: Any) -> Iterator[Exception]:
        """What `args` lack for this callback, before a model is loaded."""
        if args.metric_for_best_model is None:
            yield ValueError("EarlyStoppingCallback needs a metric: set metric_for_best_model.")
        if args.eval_strategy == "no":
            yield ValueError("EarlyStoppingCallback needs evaluations: set eval_strategy to 'steps' or 'epoch'.")

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        for problem in self.preflight(args):
            raise problem

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.on_init_end(args, state, control)  # for one that was added to a trainer already built
        if state.global_step and self.early_stopping_patience_counter >= self.early_stopping_patience:
            logger.warning(
                f"EarlyStoppingCallback had stopped the run at step {state.global_step} or before, after "
                f"{self.early_stopping_patience_counter} evaluations without improvement "
                f"(early_stopping_patience={self.early_stopping_patience}), and stops it again. To continue, leave the "
                "callback out, or set restore_callback_states_from_checkpoint=False to restart its count."
            )
            control.should_training_stop = True

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        value = metrics.get(metric_key(args.metric_for_best_model))
        if value is None:
            return  # another one of several datasets: its metrics have another prefix
        self.check_metric_value(args, state, control, value)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def check_metric_value(self, args, state, control, metric_value: float) -> None:
        """Count an evaluation with the result `metric_value`. Override it for other criteria."""
        best = state.best_metric if self.best_metric is None else self.best_metric
        gain = math.inf if best is None else merit(metric_value - best, args.greater_is_better)
        counts = gain > self.early_stopping_threshold
        self.early_stopping_patience_counter = 0 if counts else self.early_stopping_patience_counter + 1
        if not math.isnan(metric_value):
            self.best_metric = metric_value if gain > 0 else best

    def state(self) -> dict[str, Any]:
        args = ("early_stopping_patience", "early_stopping_threshold")
        changed = ("early_stopping_patience_counter", "best_metric")
        return {"args": {n: vars(self)[n] for n in args}, "attributes": {n: vars(self)[n] for n in changed}}


class ProgressCallback(TrainerCallback):
    """A progress bar over optimizer steps: loss, tokens per second, share without padding, time left. Where no bar can
    be drawn, in a file, a line for each log record.
    """

    def __init__(self, max_str_len: int = 100) -> None:
        self.max_str_len = max_str_len
        self.training_bar: Any = None
        self.prediction_bar: Any = None
        self.drawn = 0.0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero and terminal.draws_bars():
            from tqdm.auto import tqdm

            options = {"initial": state.global_step, "dynamic_ncols": True, "unit": "step"}
            self.training_bar = tqdm(total=state.known_steps, **options)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Drawing takes as long as a small step, so it happens a few times a second.
        if self.training_bar is not None and (
            time.monotonic() - self.drawn > 0.3 or state.global_step >= state.max_steps
        ):
            self.drawn = time.monotonic()
            self.training_bar.update(state.global_step - self.training_bar.n)

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and eval_dataloader is not None and terminal.draws_bars():
            if self.prediction_bar is None:
                from tqdm.auto import tqdm

                total = len(eval_dataloader) if has_length(eval_dataloader) else None  # a stream is counted, to no end
                leave = self.training_bar is None
                self.prediction_bar = tqdm(total=total, leave=leave, dynamic_ncols=True, unit="batch")
            self.prediction_bar.update(1)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.prediction_bar is not None:
            self.prediction_bar.close()
            self.prediction_bar = None

    on_predict: Any = on_evaluate

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix_str(terminal.summary(logs), refresh=False)
        elif self.training_bar is not None and logs:
            terminal.write(terminal.line(logs, self.max_str_len))
        elif state.is_world_process_zero and logs and not terminal.draws_bars():
            terminal.write(terminal.with_speed(logs, state))

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.training_bar.n)
            self.training_bar.close()
            self.training_bar = None


class PrinterCallback(TrainerCallback):
    """Prints each log record as a line; used where the progress bar is switched off."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if state.is_local_process_zero and logs:
            terminal.write(terminal.with_speed(logs, state))
