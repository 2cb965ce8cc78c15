"""Says at the end of a run where its model is, or what was saved, and which commands can follow."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.cli.report import report, run_record
from posttrain.core.checkpoint import Store
from posttrain.core.errors import CheckpointError
from posttrain.core.fields.redaction import masked_words


def finished(config: Any, words: Sequence[str]) -> str:
    """What a run has left behind, and the commands that fit.

    Args:
        config: the arguments of the run. words: those of its command line, after ``posttrain``.
    """
    folder, base = Path(config.output_dir), _base(config.output_dir)
    what = "The model" if base is None else f"The adapter (base: {base})"
    lines = [f"{_how(folder)}. {what} is in {folder}."]
    lines += [f"Report: {folder / report.REPORT}"] if (folder / report.REPORT).is_file() else []
    commands = [*_commands(folder, is_adapter=base is not None), *_go_on(config, words)]
    width = max((len(command) for command, _ in commands if len(command) <= 60), default=0)  # a longer one sticks out
    return "\n".join([*lines, *(f"  {command:<{width}}  # {purpose}" for command, purpose in commands)])


def stopped(config: Any, words: Sequence[str]) -> str:
    """What is left of a run that did not come to its end, and how it goes on."""
    if commands := _go_on(config, words):
        return f"{Store(config.output_dir).newest_whole()} is saved. To go on from it:\n  {commands[0][0]}"
    how = "save_strategy is 'no'" if config.save_strategy == "no" else "no step with a checkpoint was reached"
    return (
        f"Nothing was saved: {how}. Set save_strategy and save_steps, or save_on_signal, which saves a checkpoint at "
        "Ctrl-C."
    )


def has_begun(config: Any, since: float) -> bool:
    """Whether training has begun after the time `since`, in seconds of the epoch."""
    record = Path(config.output_dir) / run_record.RECORD
    return record.is_file() and record.stat().st_mtime >= since


def _how(folder: Path) -> str:
    try:
        how = str(run_record.read(folder)["starts"][-1].get("ended", {}).get("how", ""))
    except CheckpointError:  # deleted or damaged meanwhile
        how = ""
    return f"The run {how or 'stopped before its end'}"


def _base(folder: str | Path) -> str | None:
    """The base of the adapter in `folder`; None where there is none."""
    path = Path(folder) / "adapter_config.json"
    return json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"] if path.is_file() else None


def _commands(folder: Path, is_adapter: bool) -> list[tuple[str, str]]:
    """(command, purpose) of what can be done with the model in `folder`."""
    name, kind = shlex.quote(str(folder)), _kind(folder)
    made = []
    if "CausalLM" in kind or "CAUSAL_LM" in kind:
        made += [(f"posttrain chat {name}", "talk to it")]
        made += [(f"posttrain evaluate {name} --data rows.jsonl", "measure it on rows of yours")]
    elif "ForSequenceClassification" in kind or "SEQ_CLS" in kind:
        made += [(f"posttrain evaluate {name} --data pairs.jsonl", "measure it on pairs of yours")]
    made += [(f"posttrain merge {name} {name}-merged", "one model of base and adapter")] if is_adapter else []
    if "CausalLM" in kind or "CAUSAL_LM" in kind:
        made += [(f"posttrain export {name} {name}.gguf --llama_cpp llama.cpp", "with a clone of llama.cpp")]
    return made


def _kind(folder: Path) -> str:
    """What the model in `folder` is for: the task of an adapter, or the names of its classes."""
    for file, field in (("adapter_config.json", "task_type"), ("config.json", "architectures")):
        if (folder / file).is_file():
            return str(json.loads((folder / file).read_text(encoding="utf-8")).get(field))
    return ""


def _go_on(config: Any, words: Sequence[str]) -> list[tuple[str, str]]:
    newest = Store(config.output_dir).newest_whole()
    if newest is None:
        return []
    resume = [] if any(word.startswith("--resume_from_checkpoint") for word in words) else ["true"]
    command = masked_words(["posttrain", *words, *(["--resume_from_checkpoint", *resume] if resume else [])])
    return [(shlex.join(command), f"go on from {newest.name}, with a larger max_steps or num_train_epochs")]
