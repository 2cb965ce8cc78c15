"""Where log records go: a file of JSON lines always, experiment trackers when named."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.callbacks import TrainerCallback
from posttrain.core.errors import did_you_mean
from posttrain.core.fields import opt
from posttrain.core.state import strict

LOG_LEVELS = ("passive", "detail", "debug", "info", "warning", "error", "critical")


@dataclass
class LoggingArguments:
    """What is logged, how often and where to."""

    logging_strategy: str = opt("steps", "Log never, every `logging_steps` updates, or after each epoch.",
                                choices=("no", "steps", "epoch"))  # fmt: skip
    logging_steps: float = opt(500, "Updates between log records; below 1 a share of all updates.", above=0)
    logging_first_step: bool = opt(False, "Also log after the very first update.")
    log_level: str = opt("passive", "Level of messages on the main process; passive keeps the program's own (INFO).",
                         choices=LOG_LEVELS)  # fmt: skip
    log_level_replica: str = opt("warning", "Level of messages on all other processes.", choices=LOG_LEVELS)
    log_on_each_node: bool = opt(True, "Use `log_level` on the first process of each machine, not of the first alone.")
    include_num_input_tokens_seen: str | bool = opt(
        "no", "Log `num_input_tokens_seen`: all tokens, or those that are not padding."
    )
    report_to: None | str | list[str] = opt(
        "none", "Experiment trackers to report to, such as tensorboard, wandb, trackio, mlflow; none and all also work."
    )
    run_name: str | None = opt(None, "Name of the run in the trackers.")
    project: str = opt("huggingface", "Project that the run belongs to in the trackers.")
    disable_tqdm: bool | None = opt(None, "Print log records as lines instead of drawing a progress bar.")

    def _normalize(self) -> None:
        if self.report_to is None:
            self.report_to = []
        elif isinstance(self.report_to, str):
            self.report_to = [self.report_to]
        self.report_to = [name for name in self.report_to if name != "none"]
        if self.include_num_input_tokens_seen in (True, False):
            self.include_num_input_tokens_seen = "all" if self.include_num_input_tokens_seen else "no"

    def _problems(self) -> Iterator[str]:
        if self.include_num_input_tokens_seen not in ("no", "all", "non_padding"):
            yield (
                f"include_num_input_tokens_seen={self.include_num_input_tokens_seen!r} "
                "is not one of no, all, non_padding, True, False"
            )


def set_verbosity(level: int) -> None:
    """Let messages of posttrain from `level` on be seen: on the program's own handlers, or on stderr if it has none."""
    log = logging.getLogger("posttrain")
    log.setLevel(level)
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        log.addHandler(handler)


class JSONLinesCallback(TrainerCallback):
    """Writes every log record to ``log.jsonl`` in the output directory, as strict JSON.

    A resumed run first drops the records that lie after its checkpoint, so that no step stands there twice.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        self.path = Path(args.output_dir) / "log.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(strict(record), allow_nan=False) + "\n" for record in state.log_history)
        unfinished = self.path.with_suffix(".jsonl.tmp")
        unfinished.write_text(lines, encoding="utf-8")
        unfinished.replace(self.path)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and hasattr(self, "path") and state.log_history:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(strict(state.log_history[-1]), allow_nan=False) + "\n")


def tracker_callbacks(report_to: list[str]) -> list[Any]:
    """The callbacks of the trackers named, from `transformers.integrations`.

    Raises:
        ImportError: a tracker is not installed; the message holds the pip command.
        ValueError: there is no tracker of that name.
    """
    if not report_to:
        return []
    from transformers import integrations

    if report_to == ["all"]:
        report_to = integrations.get_available_reporting_integrations()
    known = integrations.integration_utils.INTEGRATION_TO_CALLBACK
    callbacks = []
    for name in report_to:
        if name not in known:
            raise ValueError(f"report_to={name!r} is no tracker{did_you_mean(name, known)} Known: {', '.join(known)}.")
        try:
            callbacks.append(known[name]())
        except (RuntimeError, ImportError) as error:
            package = {"azure_ml": "azureml-sdk", "comet_ml": "comet-ml"}.get(name, name)
            raise ImportError(f"report_to={name!r}: {error} Run: pip install {package}") from None
    return callbacks
