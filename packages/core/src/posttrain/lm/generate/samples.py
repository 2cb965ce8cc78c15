"""What a model has written during a run: appended to ``samples.jsonl``, and read again for the page about the run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.core.files import naming

SAMPLES = "samples.jsonl"
#: The folder of rollouts, whose files end in their optimizer step: ``<name>_00010.parquet``, or ``.jsonl``.
ROLLOUTS = "completions"
#: Optimizer steps and rows of each that are read: the page shows some.
MOST_STEPS, MOST_ROWS = 6, 4

Row = dict[str, Any]


def append(samples: Iterable[Mapping[str, Any]], step: int, directory: str | Path) -> None:
    """Append `samples` of optimizer step `step` to the file `SAMPLES` in `directory` as JSON lines."""
    append_lines(Path(directory) / SAMPLES, ({"step": step, **sample} for sample in samples))


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add `rows` to a file of JSON lines, with a text in place of a value that JSON does not have. The last line there
    may be cut, since its writer was killed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    with naming(path), path.open("a+b") as file:
        if file.seek(0, 2):
            file.seek(-1, 2)
            text = text if file.read(1) == b"\n" else "\n" + text
        file.write(text.encode())


def read(directory: str | Path, last_step: int, since: float = 0.0) -> dict[str, list[Row]]:
    """Rows with their ``step``, of some steps from the first to the last, by where they come from.

    Args:
        directory: the output directory of a run.
        last_step: of the run: later steps are an earlier run's.
        since: files of rollouts that are older are an earlier run's, in seconds since 1970.
    """
    directory = Path(directory)
    found: dict[str, list[Row]] = {}
    by_step: dict[int, list[Row]] = {}
    for row in lines_of(directory / SAMPLES):
        if isinstance(step := row.get("step"), int) and step <= last_step:
            by_step.setdefault(step, []).append(row)
    if by_step:
        # A step that is repeated after a resume, or by a later run in this folder: the newest rows come last.
        found["samples"] = [row for step in _some(by_step) for row in _different(reversed(by_step[step]))[::-1]]
    for name, files in _rollouts(directory / ROLLOUTS, last_step, since).items():
        rows = [{**row, "step": step} for step in _some(files) for row in _different(_table(files[step]))]
        if rows:
            found[name] = rows
    return found


def _some(steps: Iterable[int]) -> list[int]:
    """At most `MOST_STEPS` of them, evenly spaced, with the first and the last."""
    ordered = sorted(steps)
    if len(ordered) <= MOST_STEPS:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (MOST_STEPS - 1))] for i in range(MOST_STEPS)]


def _different(rows: Iterable[Row]) -> list[Row]:
    """The first rows with different prompts; a prompt counts as its first value that is no step."""
    firsts: dict[str, Row] = {}
    for row in rows:
        firsts.setdefault(str(next((value for name, value in row.items() if name != "step"), "")), row)
        if len(firsts) == MOST_ROWS:
            break
    return list(firsts.values())


def _rollouts(folder: Path, last_step: int, since: float) -> dict[str, dict[int, Path]]:
    """{name: {step: file}}."""
    found: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.glob("*_*")) if folder.is_dir() else ():
        name, _, step = path.stem.rpartition("_")
        is_table = path.suffix in (".parquet", ".jsonl") and step.isdecimal()
        if is_table and int(step) <= last_step and path.stat().st_mtime >= since:
            found.setdefault(name, {})[int(step)] = path
    return found


def _table(path: Path) -> Sequence[Row]:
    """The rows of a file of rollouts, without the images of prompts."""
    if path.suffix == ".jsonl":
        return [{name: value for name, value in row.items() if name != "images"} for row in lines_of(path)]
    try:
        from pyarrow import ArrowInvalid, parquet

        names = [name for name in parquet.read_schema(path).names if name != "images"]
        return parquet.read_table(path, columns=names).to_pylist()
    except (ImportError, ArrowInvalid):  # of a run that was killed
        return []


def lines_of(path: Path) -> Iterator[Row]:
    """The objects in a file of JSON lines, such as a run writes; none where there is no file."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:  # the last line of a run that was killed
                continue
            if isinstance(row, dict):
                yield row
