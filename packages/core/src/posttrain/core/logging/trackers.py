"""Writes log records to ``log.jsonl`` and to experiment trackers."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from posttrain.core.callbacks import EVENTS, ClosingCallback, hears
from posttrain.core.config import Resolved, opt
from posttrain.core.errors import did_you_mean
from posttrain.core.fields.redaction import redact
from posttrain.core.files import naming, write_text
from posttrain.core.logging import terminal
from posttrain.core.logging.metrics import is_performance
from posttrain.core.state import strict

logger = logging.getLogger(__name__)

# What pip calls a tracker, where that is not its name in `report_to`.
PACKAGES = {"azure_ml": "azureml-sdk", "comet_ml": "comet-ml", "flyte": "flytekitplugins-deck-standard"}
LOG_LEVELS = ("passive", "detail", "debug", "info", "warning", "error", "critical")


@dataclass
class LoggingArguments:
    """The arguments of logging."""

    logging_strategy: str = opt(
        "steps",
        "Log never, every `logging_steps` optimizer steps, or after each epoch.",
        choices=("no", "steps", "epoch"),
    )
    logging_steps: float | str = opt(
        500, "Optimizer steps between log records; below 1 a share of all steps; or 0.5ep, 10Mtok or 30min.", above=0
    )
    logging_first_step: bool = opt(False, "Also log after the first optimizer step.")
    log_level: str = opt(
        "passive", "Level of messages on the main process; passive keeps the program's own (INFO).", choices=LOG_LEVELS
    )
    log_level_replica: str = opt("warning", "Level of messages on all other processes.", choices=LOG_LEVELS)
    log_on_each_node: bool = opt(True, "Use `log_level` on the first process of each machine, not of the first alone.")
    include_num_input_tokens_seen: str | bool = opt(
        "no", "Log `num_input_tokens_seen`: all tokens, or those that are not padding."
    )
    report_to: Resolved[list[str] | None | str, list[str]] = opt(  # in this order, HfArgumentParser takes several words
        "none", "Experiment trackers to report to, such as tensorboard, wandb, trackio, mlflow; none and all also work."
    )
    report: bool = opt(
        True, "Write report.html into output_dir when training ends: curves, results, times, warnings, arguments."
    )
    run_name: str | None = opt(None, "Name of the run in the trackers.")
    logging_dir: str | None = opt(
        None, "Folder of TensorBoard's files. None: TENSORBOARD_LOGGING_DIR, or runs/ below output_dir."
    )
    project: str = opt("huggingface", "Project that the run belongs to in the trackers.")
    trackio_space_id: str | None = opt(
        None, "Space on the Hub that shows Trackio's records as they come; None keeps them on this machine."
    )
    trackio_bucket_id: str | None = opt(None, "Bucket on the Hub for the records of that Space; None: one of its name.")
    trackio_static_space_id: str | None | Literal[False] = opt(
        None, "Space on the Hub for the records of a finished run that had a live one; None names it, False makes none."
    )
    disable_tqdm: bool | None = opt(None, "Print log records as lines instead of drawing a progress bar.", flag=True)

    def _normalize(self) -> None:
        given: list[str] | str | None = self.report_to
        if given is None or isinstance(given, (str, list, tuple)):
            names = [given] if isinstance(given, str) else given or []
            self.report_to = [name for name in names if name != "none"]
        inside_kubeflow = os.environ.get("KUBEFLOW_TRAINER_SERVER_URL") is not None
        if inside_kubeflow and os.environ.get("DISABLE_KUBEFLOW_INTEGRATION", "").upper() != "TRUE":
            self.report_to = list(dict.fromkeys([*self.report_to, "kubeflow"]))  # the cluster waits for its progress
        if str(self.trackio_static_space_id).lower() == "false":  # from a command line
            self.trackio_static_space_id = False
        if self.include_num_input_tokens_seen in (True, False):
            self.include_num_input_tokens_seen = "all" if self.include_num_input_tokens_seen else "no"

    def _problems(self) -> Iterator[str]:
        if self.include_num_input_tokens_seen not in ("no", "all", "non_padding"):
            yield (
                f"include_num_input_tokens_seen={self.include_num_input_tokens_seen!r} "
                "is not one of no, all, non_padding, True, False"
            )
        if self.trackio_static_space_id is True:
            yield "trackio_static_space_id=True names no Space; give its name, None for one made up, or False for none"

    def _preflight(self) -> Iterator[str | Exception]:
        for name in dict.fromkeys(self.report_to):
            if name != "all" and not _is_installed(name):
                try:
                    tracker_callbacks([name])
                except (ValueError, ImportError) as error:  # which names what the tracker lacks
                    yield error


_levels: tuple[int, int] = (logging.NOTSET, logging.NOTSET)  # that a trainer has set, and that of the program before


def level_of_program() -> int:
    """The level that the program itself has set for messages of posttrain; 0: none."""
    level = logging.getLogger("posttrain").level
    return _levels[1] if level and level == _levels[0] else level


def set_verbosity(level: int) -> None:
    """Let messages of posttrain from `level` on be seen: on the program's own handlers, or on stderr if it has none."""
    global _levels
    log = logging.getLogger("posttrain")
    _levels = (level, level_of_program())
    if log.level != level:  # it empties a cache of each logger of the program
        log.setLevel(level)
    if not log.hasHandlers():
        handler = terminal.Handler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        log.addHandler(handler)
    for known in log.handlers:
        if isinstance(known, terminal.Handler):  # what another run has said, this one says again
            known.repeats = terminal.Repeats()


class JSONLinesCallback(ClosingCallback):
    """Writes every log record to ``log.jsonl`` in the output directory, as strict JSON.

    A run touches the file with its first record, not before. A new run renames the log of an earlier run to
    ``log-1.jsonl`` and so on. A resumed run drops the records after its checkpoint, so that no step appears twice.
    """

    def __init__(self) -> None:
        self.folder: str | None = None
        self.file: TextIO | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.folder, self.path, self.file = args.output_dir, Path(args.output_dir) / "log.jsonl", None
        self.history: list[dict[str, Any]] | None = list(state.log_history)
        self.is_resumed = state.global_step > 0

    def _take_over(self) -> None:
        """Let the file hold the history of this run, and nothing after it."""
        history, self.history = self.history or [], None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = {}  # its lines hold more than the history: how fast the machine was
        if self.path.is_file() and self.path.stat().st_size and not self.is_resumed:
            names = (self.path.with_stem(f"{self.path.stem}-{number}") for number in itertools.count(1))
            self.path.rename(next(name for name in names if not name.exists()))
        elif self.path.is_file():
            written = {_history_of(line): line for line in self.path.read_text(encoding="utf-8").splitlines()}
        lines = [json.dumps(strict(record), allow_nan=False) for record in history]
        unfinished = self.path.with_suffix(".jsonl.tmp")
        write_text(unfinished, "".join(written.get(_history_of(x), x) + "\n" for x in lines))
        unfinished.replace(self.path)
        self.file = open(self.path, "a", encoding="utf-8", buffering=1)  # closed when training ends

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        # Only in the folder in which training began: a search restores the trainer's own folder after the trials.
        if state.is_world_process_zero and self.folder == args.output_dir:
            if self.file is not None and not self.path.exists():
                logger.warning("%s was deleted while the run wrote it. It is written again.", self.path)
                self.close()
                self.history, self.is_resumed = state.log_history[:-1], True  # the last one is this record
            if self.history is not None:
                self._take_over()
            line = json.dumps(strict({**(logs or {}), "step": state.global_step}), allow_nan=False) + "\n"
            with naming(self.path):
                if self.file is not None:
                    self.file.write(line)
                else:  # an evaluation after training
                    with open(self.path, "a", encoding="utf-8") as file:
                        file.write(line)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; records that follow, of evaluations after training, open it for themselves."""
        file, self.file = self.file, None
        if file is not None:
            with contextlib.suppress(OSError):  # of a line that a full disk has no room for, as said when it was logged
                file.close()


def _history_of(line: str) -> str:
    """The part of a line of ``log.jsonl`` that the history of the run holds; empty where the line is broken."""
    try:
        record = {name: value for name, value in json.loads(line).items() if not is_performance(name)}
    except (ValueError, AttributeError):
        return ""
    return json.dumps(record, sort_keys=True)


def tracker_callbacks(report_to: list[str]) -> list[Any]:
    """The callbacks of the trackers named, from `transformers.integrations`, each kept `apart` from the run. Raises an
    `ImportError` where a tracker cannot be used, with the pip command, and a `ValueError` where there is no tracker of
    that name.
    """
    if not report_to:
        return []
    from transformers import integrations

    known = integrations.integration_utils.INTEGRATION_TO_CALLBACK
    if "all" in report_to:
        report_to = [*integrations.get_available_reporting_integrations(), *(n for n in report_to if n != "all")]
    callbacks = []
    for name in dict.fromkeys(report_to):
        if name not in known:
            near = did_you_mean(name, [*known, "all", "none"])
            raise ValueError(f"report_to={name!r} is no tracker{near or '.'} Known: {', '.join(known)}, all, none.")
        try:
            callbacks.append(apart(name, known[name]()))
        except (RuntimeError, ImportError, ValueError) as error:  # each of them raises another kind
            command = f"pip install {PACKAGES.get(name, name)}"
            is_there = _is_installed(name) and not isinstance(error, ModuleNotFoundError)
            run = "" if is_there or command in str(error) or name == "kubeflow" else f" Run: {command}"
            raise ImportError(f"report_to={name!r}: {error}{run}") from error
    return callbacks


def _is_installed(name: str) -> bool:
    """Whether the package of transformers' integration `name` is installed, without creating a tracker."""
    from transformers.integrations import integration_utils

    short = {"azure_ml": "azureml", "comet_ml": "comet", "flyte": "flytekit"}.get(name, name)
    is_available = vars(integration_utils).get(f"is_{short}_available", lambda: False)
    return name in integration_utils.INTEGRATION_TO_CALLBACK and bool(is_available())


def apart(name: str, callback: Any) -> Any:
    """Keep a failing tracker from ending the run: `callback` itself, its methods guarded.

    An error when training begins is raised, since nothing is lost yet. A later one (the network is down, the disk is
    full) is a warning, once; ``log.jsonl`` has every record in any case.
    """
    failed = False

    def guard(event: str, method: Any) -> Any:
        def guarded(args, state, control, **kwargs):
            nonlocal failed
            try:
                if event == "on_train_begin":
                    _begin(name, callback, method, args, state, control, **kwargs)
                else:
                    method(_TrackerArguments(args), state, control, **kwargs)
            except Exception as error:
                what = f"{type(error).__name__}: {redact(str(error))}"
                if event == "on_train_begin":
                    raise RuntimeError(
                        f"report_to={name!r}: the tracker did not start ({what}). Fix that, or remove it from "
                        "report_to."
                    ) from error
                if not failed:
                    logger.warning(
                        f"{name} failed in {event} ({what}). Training continues, and this is logged once; the records "
                        f"are in {Path(args.output_dir) / 'log.jsonl'}."
                    )
                failed = True

        return guarded

    for event in EVENTS:
        if hears(callback, event):
            setattr(callback, event, guard(event, getattr(callback, event)))
    callback.kept_apart_as = name
    return callback


def as_new(callback: Any) -> Any:
    """A new tracker in place of one, which may serve only one run (MLflow's does); any other `callback` as it is."""
    name = getattr(callback, "kept_apart_as", None)
    return callback if name is None else apart(name, type(callback)())


# ---- resuming the tracker's run ----


def _begin(name: str, callback: Any, method: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
    """Call ``on_train_begin`` of a tracker with the run in ``state.tracker_runs``, which is updated afterwards."""
    saved = None if state.is_hyper_param_search else state.tracker_runs.get(name)
    arguments = {}
    if name == "tensorboard" and callback.logging_dir is None:
        callback.logging_dir = args.logging_dir
    if saved is not None and state.is_world_process_zero:
        arguments = _resume(saved, name, callback, args, state)
    if name == "swanlab" and state.is_world_process_zero:
        _start_swanlab(callback._swanlab, args, state)
    method(_TrackerArguments(args, arguments), state, control, **kwargs)
    run = _run_of(name, callback, args) if state.is_world_process_zero else None
    if run is not None:
        state.tracker_runs[name] = run
        logger.info("%s %s the run %s.", name, "continues" if run == saved else "reports to", run)


def _resume(saved: str, name: str, callback: Any, args: Any, state: Any) -> dict[str, Any]:
    """Point a tracker to the run `saved`, unless the user has pointed it to one; returns arguments to show to it."""
    if name == "wandb" and callback._wandb.run is None and "WANDB_RUN_ID" not in os.environ:
        project = os.environ.get("WANDB_PROJECT", "huggingface")  # where its callback would have begun a run
        callback._wandb.init(project=project, name=args.run_name, id=saved, resume="allow")
    elif name == "mlflow" and callback._ml_flow.active_run() is None:
        os.environ.setdefault("MLFLOW_RUN_ID", saved)  # MLflow takes it out when it starts the run
    elif name == "trackio":
        return {"run_name": saved}  # it identifies runs by name
    elif name == "tensorboard" and callback.tb_writer is None:
        # Its files are a journal, so later steps of an earlier writer are purged.
        make = callback._SummaryWriter
        callback._SummaryWriter = lambda log_dir: make(log_dir=log_dir, purge_step=state.global_step + 1)
        callback.logging_dir = callback.logging_dir or str(Path(args.output_dir) / saved)
    return {}


def _start_swanlab(library: Any, args: Any, state: Any) -> None:
    """Begin a run unless one is under way: the callback asks for it, and swanlab 0.10 raises where there is none."""
    try:
        library.get_run()
    except RuntimeError:
        name = "-".join(each for each in (args.run_name, state.trial_name) if each) or None
        library.init(project=os.environ.get("SWANLAB_PROJECT"), experiment_name=name)


def _run_of(name: str, callback: Any, args: Any) -> str | None:
    """The id of a tracker's run; None for trackers that cannot resume one."""
    if name == "wandb":
        run = callback._wandb.run
        return None if run is None else run.id
    if name == "mlflow":
        run = callback._ml_flow.active_run()
        return None if run is None else run.info.run_id
    if name == "trackio":
        run = callback._trackio.context_vars.current_run.get()
        return None if run is None else run.name
    folder = callback.logging_dir if name == "tensorboard" else None
    return None if folder is None else os.path.relpath(folder, args.output_dir)  # the folder of a run may be moved


class _TrackerArguments:
    """The arguments of a run as the trackers of transformers read them: read-only, for some overwrite ``run_name``."""

    fsdp_plugin_args = _setup_devices = None  # W&B's and DVCLive's save the model by a trainer of transformers

    def __init__(self, args: Any, changed: dict[str, Any] | None = None) -> None:
        vars(self)["_args"], vars(self)["_changed"] = args, changed or {}

    def __getattr__(self, name: str) -> Any:
        changed = vars(self)["_changed"]
        return changed[name] if name in changed else getattr(vars(self)["_args"], name)

    def __setattr__(self, name: str, value: Any) -> None: ...

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:  # for training_args.bin beside a kept model: plain data, without tokens
        return OrderedDict, (self.to_dict(),)


def show_table(rows: list[dict[str, Any]], name: str, report_to: list[str]) -> None:
    """Send `rows` of texts, numbers and lists of images as the table `name` to trackers with tables and a run."""
    columns = list(rows[0]) if rows else []

    def cells(image: Callable[[Any], Any]) -> list[list[Any]]:
        return [[[*map(image, one)] if isinstance(one, list) else one for one in row.values()] for row in rows]

    asked = {*report_to}
    wanted = {one: sys.modules.get(one) for one in ("wandb", "trackio", "comet_ml") if {one, "all"} & asked}
    wandb, trackio, comet = wanted.get("wandb"), wanted.get("trackio"), wanted.get("comet_ml")
    if wandb is not None and wandb.run is not None:
        wandb.log({name: wandb.Table(columns=columns, data=cells(wandb.Image))})
    if trackio is not None and trackio.context_vars.current_run.get() is not None:
        import pandas

        trackio.log({name: trackio.Table(dataframe=pandas.DataFrame(cells(trackio.Image), columns=columns))})
    if comet is not None and (experiment := comet.get_running_experiment()) is not None:
        import pandas

        experiment.log_table(tabular_data=pandas.DataFrame(cells(str), columns=columns), filename=f"{name}.csv")
