"""The state, control flags and results of a run."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from posttrain.core.config import value_of
from posttrain.core.errors import CheckpointError
from posttrain.core.fields.durations import NEVER, as_steps
from posttrain.core.files import write_text

TRACKER_RUNS = "tracker_runs.json"


class ExportableState:
    """A callback (or the control) whose state is saved in each checkpoint and restored from it.

    Override `state` to return ``{"args": constructor arguments, "attributes": what changed since}``; either may be left
    out.
    """

    def state(self) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} is an ExportableState and must define state(self) -> dict.")

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> ExportableState:
        instance = cls(**state.get("args", {}))
        for name, value in state.get("attributes", {}).items():
            setattr(instance, name, value)
        return instance


def has_state(callback: Any) -> bool:
    """Whether `callback` is an `ExportableState`, of ours or of transformers."""
    return callable(getattr(callback, "state", None)) and callable(getattr(type(callback), "from_state", None))


def with_state(callback: Any, state: dict[str, Any]) -> Any:
    """A callback like `callback` in the `state` of one of its class, as `ExportableState.from_state` makes it. One of a
    subclass with a constructor of its own, which takes none of the arguments in `state`, is copied instead.
    """
    state = {"args": {}, "attributes": {}} | state  # transformers' own `from_state` wants both keys
    try:
        inspect.signature(type(callback)).bind(**state["args"])
    except TypeError:
        if type(callback).from_state.__qualname__ == "ExportableState.from_state":
            copied = copy.copy(callback)
            vars(copied).update(state["attributes"])
            return copied
    return type(callback).from_state(state)


@dataclass
class TrainerState:
    """The state of a run; saved as ``trainer_state.json`` in each checkpoint and passed to every callback.

    Attributes:
        epoch: passes over the data done, as a fraction.
        global_step: completed optimizer steps.
        max_steps: total optimizer steps of this run; 2**31 where they are unknown, see `known_steps`.
        logging_steps, eval_steps, save_steps: intervals in optimizer steps, after ratios were resolved; 2**31 for those
            in epochs, tokens or time.
        num_input_tokens_seen: tokens in all batches so far, over all processes, if counting is on.
        log_history: every log record of the run so far, across resumes.
        best_model_checkpoint: the current path of the best checkpoint. The file holds it relative to the run's folder,
            which may be moved.
        tracker_runs: the id of the run in each tracker that can resume one, by the tracker's name in `report_to`. Saved
            in ``tracker_runs.json``, because transformers' `TrainerState` reads the file too.
        stateful_callbacks: callbacks that are `ExportableState`, by class name, as they were saved.
    """

    epoch: float = 0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: Any = None
    tracker_runs: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.stateful_callbacks is None or isinstance(self.stateful_callbacks, dict):
            self.stateful_callbacks = self.stateful_callbacks or {}
        else:
            self.collect(self.stateful_callbacks)

    def collect(self, callbacks: Iterable[Any]) -> None:
        """Take in the state of every `ExportableState` among `callbacks`; several of one class keep their order."""
        self.stateful_callbacks = {}
        for callback in callbacks:
            if has_state(callback):
                name, entry = type(callback).__name__, callback.state()
                present = self.stateful_callbacks.get(name)
                if present is None:
                    self.stateful_callbacks[name] = entry
                else:
                    self.stateful_callbacks[name] = (present if isinstance(present, list) else [present]) + [entry]

    @property
    def known_steps(self) -> int | None:
        """`max_steps`; None where tokens, time or a stream of unknown length end the run."""
        return None if self.max_steps >= NEVER else self.max_steps

    def compute_steps(self, args: Any, max_steps: int) -> None:
        """Convert the intervals of `args` to optimizer steps; ratios are shares of `max_steps`."""
        for name in ("logging_steps", "eval_steps", "save_steps"):
            if (interval := value_of(args, name)) is not None:
                setattr(self, name, as_steps(interval, max_steps))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save_to_json(self, json_path: str | Path) -> None:
        """Write strict JSON: a value that is NaN or infinite becomes null."""
        path, plain = Path(json_path), strict(self.to_dict())
        if self.best_model_checkpoint is not None:
            full = Path(self.best_model_checkpoint).absolute()  # named alone in the folder of the same run
            is_here = full.parent in [run.absolute() for run in _runs_of(path)]
            plain["best_model_checkpoint"] = full.name if is_here else str(full)
        if runs := plain.pop("tracker_runs"):
            write_text(path.with_name(TRACKER_RUNS), json.dumps(runs, indent=2, sort_keys=True) + "\n")
        write_text(path, json.dumps(plain, indent=2, sort_keys=True, allow_nan=False) + "\n")

    @classmethod
    def load_from_json(cls, json_path: str | Path) -> TrainerState:
        """The state in a file of `save_to_json`; a `CheckpointError` where it is damaged."""
        known, path = {f.name for f in dataclasses.fields(cls)}, Path(json_path)
        saved = _read_object(path)
        if path.with_name(TRACKER_RUNS).is_file():
            saved["tracker_runs"] = _read_object(path.with_name(TRACKER_RUNS))
        if isinstance(best := saved.get("best_model_checkpoint"), str):
            saved["best_model_checkpoint"] = _where_it_is(best, path)
        return cls(**{name: value for name, value in saved.items() if name in known})


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: it is not a JSON object ({error}).") from error


def _runs_of(file: Path) -> list[Path]:
    """The folders that may be the run's: `file` is in one of its checkpoints, or in its folder itself."""
    return [file.parent.parent, file.parent]


def _where_it_is(checkpoint: str, file: Path) -> str:
    """The current path of the `checkpoint` named in `file`: next to it, even if the folder was moved."""
    name = Path(checkpoint).name
    beside = [run / name for run in _runs_of(file)]
    otherwise = beside[0] if name == checkpoint else checkpoint  # gone, or not fetched yet
    return str(next((path for path in beside if path.is_dir()), otherwise))


#: What JSON holds as it is.
PLAIN = (str, int, float, bool, type(None))


def strict(value: Any) -> Any:
    """`value` as JSON: NaN and infinities become null, numpy and torch scalars plain numbers."""
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if type(value) not in PLAIN and _is_scalar(value):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, PLAIN) else str(value)


def lossy(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """(place, value) of what `strict` can only make text of."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from lossy(item, f"{where}[{key!r}]" if where else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from lossy(item, f"{where}[{number}]")
    elif not (isinstance(value, PLAIN) or _is_scalar(value)):
        yield where, value


def _is_scalar(value: Any) -> bool:
    """Whether `value` is one number of numpy or torch."""
    return hasattr(value, "item") and getattr(value, "ndim", 0) == 0


@dataclass
class TrainerControl(ExportableState):
    """The requests of callbacks to the loop, which clears each flag when it is done."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def state(self) -> dict[str, Any]:
        return {"args": dataclasses.asdict(self), "attributes": {}}


def merit(value: float, greater_is_better: bool | None) -> float:
    """The `value` of a metric so that more is better; NaN is neither more nor less than any other."""
    return value if greater_is_better else -value


def metric_key(name: str) -> str:
    """The name of a metric of evaluations with its ``eval_`` prefix, which may be left out."""
    return name if name.startswith("eval_") else f"eval_{name}"


#: Control flags that are pending when a run stops; they are handled when it resumes.
LEFT_TO_DO = ("should_log", "should_evaluate", "should_save")


def unanswered(control: TrainerControl) -> list[str]:
    """The flags of `LEFT_TO_DO` that are set."""
    return [flag for flag in LEFT_TO_DO if getattr(control, flag)]


class TrainOutput(NamedTuple):
    """What `train` returns."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class PredictionOutput(NamedTuple):
    """What `predict` returns. `predictions` and `label_ids` are arrays of shape (rows, ...) or tuples of them."""

    predictions: np.ndarray | tuple[np.ndarray, ...]
    label_ids: np.ndarray | tuple[np.ndarray, ...] | None
    metrics: dict[str, float]


class EvalLoopOutput(NamedTuple):
    """What `evaluation_loop` returns; `num_samples` counts rows over all processes, each once."""

    predictions: np.ndarray | tuple[np.ndarray, ...]
    label_ids: np.ndarray | tuple[np.ndarray, ...] | None
    metrics: dict[str, float]
    num_samples: int


class EvalPrediction:
    """The argument of `compute_metrics`: unpacks as ``predictions, label_ids``, with ``inputs, losses`` if included."""

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None) -> None:
        self.predictions, self.label_ids, self.inputs, self.losses = predictions, label_ids, inputs, losses
        self.elements = (predictions, label_ids)
        self.elements += tuple(extra for extra in (inputs, losses) if extra is not None)

    def __iter__(self):
        return iter(self.elements)

    def __getitem__(self, index: int) -> Any:
        return self.elements[index]

    def __len__(self) -> int:
        return len(self.elements)
