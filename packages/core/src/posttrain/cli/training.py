"""Trains as a command line asks, and says at the end where the model is, or what was saved, and what can follow."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from posttrain.cli import parse
from posttrain.cli.method import checked
from posttrain.core.errors import CheckpointError
from posttrain.core.fields import durations
from posttrain.core.fields.redaction import masked_words
from posttrain.core.registry import Method, Run

# Two optimizer steps with every part of a run: logging, evaluation, a checkpoint.
SMOKE: dict[str, Any] = {
    "max_steps": 2,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 2,
    "overwrite_output_dir": True,
    "resume_from_checkpoint": None,
    "report_to": "none",
    "push_to_hub": False,
    "check_saved_model": True,
}
# Then one more, from the checkpoint.
SMOKE_RESUME: dict[str, Any] = {"max_steps": 3, "resume_from_checkpoint": "true"}
SMOKE_ROWS = 32


def train(
    method: Method, settings: dict[str, Any], problems: list[str], words: Sequence[str], smoke: bool = False
) -> int:
    """Run `method` with `settings`, `problems` having been found in them before; the exit status.

    Args:
        words: the command line, after ``posttrain``. smoke: in a few steps on a few rows, of which nothing is kept.
    """
    run = checked(method, settings, problems)
    from posttrain.cli.report import run_record
    from posttrain.core.hub import uploads  # after the checks: this imports torch

    uploads.USED.clear()
    with run_record.asked(method.name, {name: setting.value for name, setting in settings.items()}):
        _smoke(method, run) if smoke else _run_to_its_end(method, run, words)
    return 3 if any(one.failed for one in uploads.USED) else 0


def _smoke(method: Method, run: Run) -> None:
    """Train two optimizer steps on a few rows in a temporary folder, read the model back, resume and train a third."""
    folder, is_main = Path(f"{run.config.output_dir}-smoke"), run.config.process_index == 0  # the same in every process
    evaluate = {} if run.config.eval_strategy == "no" else {"eval_strategy": "steps", "eval_steps": 2}
    duration = durations.if_tokens(run.config.max_duration)  # the schedule follows it
    run.config = dataclasses.replace(run.config, output_dir=str(folder), max_duration=duration, **SMOKE, **evaluate)
    run.data = dataclasses.replace(run.data, max_rows=SMOKE_ROWS)
    try:
        method.run(run)
        if is_main:
            print("Two optimizer steps are made. Now the run is resumed from their checkpoint, for a third one.")
        method.run(dataclasses.replace(run, config=dataclasses.replace(run.config, **SMOKE_RESUME)))
    finally:
        if is_main:
            shutil.rmtree(folder, ignore_errors=True)
    if is_main:
        evaluation = "evaluation, " if evaluate else ""
        print(
            f"The smoke run passed: data, model, training, {evaluation}a checkpoint, resuming from it and reading the "
            "saved model back work. Nothing was kept."
        )


def _run_to_its_end(method: Method, run: Run, words: Sequence[str]) -> None:
    """Train, and say what is there afterwards and what can follow."""
    from posttrain.core.distributed import environment
    from posttrain.core.training.preemption import saves_on_signal

    began, before = time.time(), signal.getsignal(signal.SIGTERM)
    if environment.world_size() == 1 and not saves_on_signal(run.config) and before is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # after it was said what is left
    try:
        method.run(run)
    except BaseException as error:
        if _has_begun(run.config, began):
            text = _stopped(run.config, words, error)
            if isinstance(error, Exception):
                error.add_note(text)
            else:
                print(f"\n{text}", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if _has_begun(run.config, began):
        print(_finished(run.config, words))


def _has_begun(config: Any, since: float) -> bool:
    """Whether this is the main process, and training has begun after the time `since`, in seconds of the epoch."""
    from posttrain.core.checkpoint.manifest import RECORD

    record = Path(config.output_dir) / RECORD
    return config.process_index == 0 and record.is_file() and record.stat().st_mtime >= since


def _finished(config: Any, words: Sequence[str]) -> str:
    """What a run has left behind, and the commands that fit."""
    from posttrain.cli.report.report import REPORT

    folder = Path(config.output_dir)
    about = _about(folder)
    base = about.get("base_model_name_or_path")
    what = "The model" if base is None else f"The adapter (base: {base})"
    how = _how(folder)
    lines = [f"{how}. {what} is in {folder}."]
    lines += [f"Report: {folder / REPORT}"] if (folder / REPORT).is_file() else []
    commands = [*_commands(folder, str(about.get("task_type") or about.get("architectures")), base is not None)]
    length, purpose = "max_steps" if config.max_steps > 0 else "num_train_epochs", "train twice as long"
    goes_on = _go_on(config, parse.take_flags(words, (length,))[0], f"--{length}", f"{2 * vars(config)[length]:g}")
    if " ended " in how:  # by its time limit
        purpose, goes_on = "go on", _go_on(config, words)
    if goes_on is not None and not config.max_duration:
        commands += [(goes_on[1], f"{purpose}, from {goes_on[0].name}")]
    width = max((len(command) for command, _ in commands if len(command) <= 60), default=0)  # a longer one sticks out
    return "\n".join([*lines, *(f"  {command:<{width}}  # {purpose}" for command, purpose in commands)])


def _about(folder: Path) -> dict[str, Any]:
    """The config of the adapter in `folder`, or of the model; empty where there is none."""
    files = [file for name in ("adapter_config.json", "config.json") if (file := folder / name).is_file()]
    return json.loads(files[0].read_text(encoding="utf-8")) if files else {}


def _how(folder: Path) -> str:
    from posttrain.cli.report import run_record

    try:
        how = str(run_record.read(folder)["starts"][-1].get("ended", {}).get("how", ""))
    except CheckpointError:  # deleted or damaged meanwhile
        how = ""
    return f"The run {how or 'stopped before its end'}"


def _commands(folder: Path, kind: str, is_adapter: bool) -> Iterator[tuple[str, str]]:
    """(command, purpose) of what can be done with the model in `folder`, whose task or classes are `kind`."""
    from posttrain.cli.tools.load import arguments_of_run

    name, writes = shlex.quote(str(folder)), "CausalLM" in kind or "CAUSAL_LM" in kind
    encodes = "SEQ_2_SEQ_LM" in kind or "source_column" in arguments_of_run(folder)
    if writes:
        yield f"posttrain chat {name}", "talk to it"
    if writes or encodes:
        yield f"posttrain evaluate {name} --data rows.jsonl", "measure it on rows of yours"
    elif "ForSequenceClassification" in kind or "SEQ_CLS" in kind:
        yield f"posttrain evaluate {name} --data pairs.jsonl", "measure it on pairs of yours"
    if is_adapter:
        yield f"posttrain merge {name} {name}-merged", "one model of base and adapter"
    if writes:
        yield f"posttrain export {name} {name}.gguf --llama_cpp llama.cpp", "with a clone of llama.cpp"


def _stopped(config: Any, words: Sequence[str], error: BaseException) -> str:
    """What is left of a run that `error` or a signal ended, and how it goes on."""
    if (goes_on := _go_on(config, words)) is not None:
        return f"{goes_on[0]} is saved. To go on from it:\n  {goes_on[1]}"
    how = "save_strategy is 'no'" if config.save_strategy == "no" else "no checkpoint was written"
    instead = "save_on_signal, which saves a checkpoint at Ctrl-C"
    if isinstance(error, Exception):
        instead = "save_on_exception, which saves the last whole step"
    return f"Nothing was saved: {how}. Set save_strategy and save_steps, or {instead}."


def _go_on(config: Any, words: Sequence[str], *more: str) -> tuple[Path, str] | None:
    """The newest checkpoint, and the command that resumes from it, with `more` words."""
    from posttrain.core.checkpoint import Store

    if (newest := Store(config.output_dir).newest_whole()) is None:
        return None
    resumes = any(word.startswith("--resume_from_checkpoint") for word in words)
    resume = () if resumes else ("--resume_from_checkpoint", "true")
    return newest, shlex.join(masked_words(["posttrain", *words, *resume, *more]))
