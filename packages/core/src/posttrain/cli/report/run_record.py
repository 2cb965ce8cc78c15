"""Writes ``run.json``, from which ``posttrain rerun`` repeats a run and lists differences."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import xxhash

from posttrain.core.callbacks import TrainerCallback
from posttrain.core.checkpoint.blocks import cores
from posttrain.core.checkpoint.codec import read_document
from posttrain.core.checkpoint.manifest import RECORD
from posttrain.core.data import accelerator
from posttrain.core.distributed import sharding
from posttrain.core.errors import CheckpointError
from posttrain.core.fields.redaction import masked_words, without_secrets
from posttrain.core.files import write_text
from posttrain.core.hub import card
from posttrain.core.models.wrapping import base_name
from posttrain.core.state import strict

logger = logging.getLogger(__name__)

FORMAT, VERSION = "posttrain-run", 1
PACKAGES = """
    posttrain-core posttrain-sft posttrain-seq2seq posttrain-rl torch transformers accelerate datasets tokenizers
    safetensors peft bitsandbytes vllm numpy
""".split()
#: Larger datasets are hashed from this many evenly spaced rows or bytes.
HASHED_ROWS, HASHED_BYTES = 10_000, 16 * 2**20
_GIT_PATIENCE = 5.0  # seconds; a work tree may be large, or on a slow disk

_asked: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("asked", default=None)


class RunRecordCallback(TrainerCallback):
    """Writes ``run.json`` into the output directory when training begins, and the model card when it ends. A resumed
    run adds an entry.

    ``{"format", "version", "starts": [...]}``; each start holds what `start` lists.
    """

    def on_train_begin(self, args, state, control, model=None, train_dataloader=None, data_reports=None, **kwargs):
        if not state.is_world_process_zero:
            return
        path, before = Path(args.output_dir) / RECORD, []
        if state.global_step and path.is_file():
            with contextlib.suppress(CheckpointError):  # a damaged one is no reason not to train
                before = read(path)["starts"]
        now = start(args, model, getattr(train_dataloader, "dataset", None), state.global_step)
        now["data_reports"] = {name: report.lines() for name, report in (data_reports or {}).items() if report.rows_in}
        if before:
            _warn_of_other_rows(before[-1].get("data") or {}, now["data"], path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, [*before, now])

    def on_train_end(self, args, state, control, model=None, **kwargs):
        if not state.is_world_process_zero or model is None:
            return
        best_step = state.best_global_step if args.load_best_model_at_end else None
        about = card.of_run(args, model, state.log_history, args.world_size)
        card.write_model_card(args.output_dir, **about, best_step=best_step)


def _warn_of_other_rows(then: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    names = {"rows": "there were {} and there are {}", "xxh128": "their checksum was {} and is {}"}
    if any(column.startswith("ref_") for column in now.get("columns", ())):
        del names["xxh128"]  # computed by a model, and not to the bit on every device
    for name, text in names.items():
        before, after = then.get(name), now.get(name)
        if before is not None and after is not None and before != after:
            logger.warning(
                "The training rows are not those of the run that is resumed (%s; see %s). The position in the data "
                "stays the same, so some rows of this epoch may be read twice and some not at all. To train on other "
                "data, start a new run from the weights.",
                text.format(before, after),
                path,
            )
            return


@contextlib.contextmanager
def asked(method: str, settings: dict[str, Any]) -> Iterator[None]:
    """In this context a run comes from the command line: `method`, and the text of each setting by its name."""
    token = _asked.set({"method": method, "settings": without_secrets(settings)})
    try:
        yield
    finally:
        _asked.reset(token)


def by_command() -> bool:
    """Whether the command line runs this context."""
    return _asked.get() is not None


def start(args: Any, model: torch.nn.Module | None, rows: Any, step: int = 0) -> dict[str, Any]:
    """All facts of a run at its start, as JSON.

    Args:
        args: `TrainingArguments`; secrets are masked.
        rows: the prepared training data.
        step: earlier optimizer steps.
    """
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "from_step": step,
        "command": masked_words(sys.orig_argv),
        "directory": _directory(),
        "asked": _asked.get(),
        "processes": args.world_size,
        "arguments": json.loads(args.to_json_string()),
        "changed": changed(args),
        "model": of_model(model) if isinstance(model, torch.nn.Module) else None,
        "adapter": card.adapter_arguments(model),
        "data": of_rows(rows),
        "code": code(_folder_of_program()),
        "packages": packages(),
        "hardware": hardware(),
    }


def _directory() -> str | None:
    """The working directory; None where it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _folder_of_program() -> str:
    """Where the program lies, or the working directory where there is none; empty where that has been deleted."""
    directory = _directory()
    if sys.argv[0] and (directory is not None or os.path.isabs(sys.argv[0])):
        return str(Path(sys.argv[0]).resolve().parent)
    return directory or ""


def add_end(folder: Path, facts: dict[str, Any]) -> None:
    """Add to the record in `folder`, if there is one, how its last start ended; `CheckpointError` if it is damaged."""
    if (folder / RECORD).is_file():
        *before, last = read(folder)["starts"]
        _write(folder / RECORD, [*before, last | {"ended": facts}])


def _write(path: Path, starts: list[dict[str, Any]]) -> None:
    record = {"format": FORMAT, "version": VERSION, "starts": starts}
    unfinished = path.with_suffix(".json.tmp")
    write_text(unfinished, json.dumps(strict(record), indent=1, allow_nan=False) + "\n")
    unfinished.replace(path)


def read(path: str | Path) -> dict[str, Any]:
    """The record at `path`, the file or its folder; `CheckpointError` if there is none, or another program wrote it."""
    path = Path(path)
    path = path / RECORD if path.is_dir() else path
    record = read_document(path, FORMAT, VERSION, "is not the record of a run")
    if not record.get("starts"):
        raise CheckpointError(f"{path} is not the record of a run: it holds no starts.")
    return record


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A line for each fact of two `start` that may change the numbers of a run."""
    found = []
    for group in ("packages", "hardware", "code", "data", "model"):
        before, after = then.get(group) or {}, now.get(group) or {}
        found += [
            f"{group}: {name} was {before.get(name)!r} and is {after.get(name)!r}"
            for name in {**before, **after}
            if before.get(name) != after.get(name)
        ]
    if then["processes"] != now["processes"]:
        found.append(f"there were {then['processes']} processes and there are {now['processes']}")
    return found


def changed(args: Any) -> list[str]:
    """The names of arguments that are not what they are by default, beside the output folder."""
    try:
        plain = type(args)(args.output_dir)
    except Exception:  # a class of the user's, with arguments that must be given
        return []
    follow = {"do_eval", "eval_steps"}  # what they were set to by other arguments, unless they were given
    follow -= vars(args).get("_given", follow)
    names = [field.name for field in dataclasses.fields(args) if field.init and field.name not in follow]
    return [name for name in names if vars(args)[name] != vars(plain)[name]]


def of_model(model: torch.nn.Module) -> dict[str, Any]:
    """Class, name and size of `model`."""
    parameters = list(model.parameters())
    return {
        "class": type(model).__name__,
        "name": base_name(model) or None,
        "parameters": sharding.count(parameters),
        "trained": sharding.count(parameter for parameter in parameters if parameter.requires_grad),
    }


def of_rows(rows: Any) -> dict[str, Any]:
    """How many `rows`, and a XXH128 of some (`HASHED_ROWS`, `HASHED_BYTES`) where they are a `datasets` dataset."""
    facts: dict[str, Any] = {"class": type(rows).__name__}
    with contextlib.suppress(TypeError):  # a stream has no length
        facts["rows"] = len(rows)
    if "datasets" in sys.modules and isinstance(rows, sys.modules["datasets"].Dataset):
        facts["columns"] = rows.column_names
        try:
            facts["xxh128"] = _hash_of(rows)
        except Exception as error:  # of another library, about types of columns without number: not worth a run
            logger.warning("No checksum of the rows is in %s (%s: %s).", RECORD, type(error).__name__, error)
    return facts


def _hash_of(rows: Any) -> str:
    """A XXH128 of rows from all over `rows`, the same wherever they are kept."""
    import pyarrow as pa

    state, table, read, size = xxhash.xxh3_128(), rows.with_format("arrow"), 0, 0
    chosen = _spread(len(rows), HASHED_ROWS)

    class Sink:
        closed = False

        def write(self, block: Any) -> int:
            state.update(memoryview(block))
            return len(block)

    while read < len(chosen) and size < HASHED_BYTES:
        # Twice as many each time, limited by the mean size of rows so far.
        room = (HASHED_BYTES - size) * read // size if size else read
        part = chosen[read : read + max(min(read, room), 1)]
        found = table[part].combine_chunks().replace_schema_metadata()
        with pa.ipc.new_stream(pa.PythonFile(Sink(), mode="w"), found.schema) as stream:
            stream.write_table(found)
        read, size = read + len(part), size + found.nbytes
    return state.hexdigest()


def _spread(count: int, most: int) -> list[int]:
    """Up to `most` of `count` indices, the first and the last among them; any beginning of the list is spread too."""
    even = list(range(count)) if count <= most else [i * (count - 1) // (most - 1) for i in range(most)]
    found, step = even[:1] + even[-1:] if len(even) > 1 else even, 1 << len(even).bit_length()
    seen = set(found)
    while step:
        new = [index for index in even[step::step] if index not in seen]
        seen.update(new)
        found += new
        step //= 2
    return found


@functools.cache
def packages() -> dict[str, str]:
    """Versions of Python and of what training uses."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


@functools.cache
def hardware() -> dict[str, str]:
    """The machine: system, processor, memory, accelerators."""
    facts = {"platform": platform.platform(), "cpu": f"{_cpu_name()}, {cores()} cores usable"}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    facts["cuda of torch"] = str(torch.version.cuda)
    if (kind := accelerator.gpu()) is None:
        facts["accelerator"] = "mps" if torch.backends.mps.is_available() else "none"
        return facts
    for index in range(torch.accelerator.device_count()):
        gpu = accelerator.module(kind).get_device_properties(index)
        facts[f"gpu {index}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB"
    return facts


@functools.cache
def code(folder: str) -> dict[str, Any]:
    """The git commit of `folder`, and whether tracked files differ from it; empty if unknown."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, timeout=_GIT_PATIENCE)
        done.check_returncode()
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return {"commit": commit, "changed": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
