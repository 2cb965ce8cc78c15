"""``posttrain preview run.yaml``: what a run would be trained on, token by token, without training."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from posttrain.core.cli import parse, registry
from posttrain.core.cli.registry import Method, Run
from posttrain.core.errors import ConfigError
from posttrain.core.tools import preview

ROWS = 3
USAGE = f"""usage: posttrain preview [<method>] [run.yaml ...] [--rows N] [--html FILE] [--name value ...]

Prepares the data of a run as training does and shows its first rows: which tokens are trained on, which are only read, and where
documents begin. Takes all that the method takes (posttrain <method> --help); nothing is trained.

  --rows N     how many rows to show [default {ROWS}]
  --html FILE  write a page instead of showing them here

Colours are left out where NO_COLOR is set or the output is no terminal, unless FORCE_COLOR is set."""


def run(words: list[str], read: Callable[[Method, list[str]], Run]) -> None:
    """Prepare the data of a run as training does, and show its first rows below the data report.

    Args:
        words: a method (it may be left out: then the first that has a preview, sft if it is installed), files and flags, among
            them ``--rows N`` and ``--html FILE``.
        read: makes a run of a method and its words.
    """
    if {"-h", "--help"} & set(words):
        print(USAGE)
        return
    words, options = _take_options(words)
    found = _method(words)
    words = words[1:] if words and words[0] == found.name else words
    rows, report = found.preview(read(found, words), options["rows"])
    if options["html"] is not None:
        path = Path(options["html"]).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(preview.as_html(rows, report), encoding="utf-8")
        print("\n".join(report))
        print(f"The first {len(rows)} rows are shown in {path}.")
        return
    color = wants_color(sys.stdout)
    print("\n".join([*report, "", preview.legend(color), preview.as_text(rows, color)]))


def wants_color(stream: TextIO) -> bool:
    """Whether to colour what is written to `stream`: not with NO_COLOR (https://no-color.org); else with FORCE_COLOR, or on a
    terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


def _method(words: list[str]) -> Method:
    having = {name: found for name, found in registry.methods().items() if found.preview is not None}
    if words and not words[0].startswith("-") and not words[0].endswith((".yaml", ".yml")):
        found = registry.method(words[0])
        if found.preview is None:
            raise ConfigError(
                "posttrain preview", [f"{found.name} has no preview; {', '.join(having) or 'no method'} has"]
            )
        return found
    if not having:
        raise ConfigError(
            "posttrain preview", ["no installed method has a preview; pip install posttrain-sft adds one"]
        )
    return having.get("sft") or next(iter(having.values()))


def _take_options(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    options: dict[str, Any] = {"rows": ROWS, "html": None}
    rest, given = parse.take_flags(words, options)
    problems = []
    for name, value in given:
        if not value or value.startswith("--"):
            problems.append(f"--{name} needs a value")
        elif name == "rows":
            if not value.isdecimal() or not int(value):
                problems.append(f"--rows {value} must be a whole number above 0")
            else:
                options["rows"] = int(value)
        else:
            options[name] = value
    if problems:
        raise ConfigError("posttrain preview", problems)
    return rest, options
