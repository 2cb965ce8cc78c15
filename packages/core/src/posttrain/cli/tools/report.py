"""The command ``posttrain report``, which writes one page about a run, or about several side by side."""

from __future__ import annotations

from pathlib import Path

from posttrain.cli import parse
from posttrain.cli.report import report
from posttrain.core.errors import ConfigError

HELP = """usage: posttrain report FOLDER [FOLDER ...] [--output FILE]

Write a page (HTML, readable without a network) of curves, results, times and arguments of the runs with these output
folders, from their log.jsonl and run.json. Several runs are compared. The page of one run goes to FOLDER/report.html,
of several to report.html in the working directory, unless --output names another file."""


def run(words: list[str]) -> None:
    """Write the page."""
    many = max(len(parse.read_flags(words)[0]), 1)
    folders, given = parse.typed_flags("report", words, {"output": str}, many, what="output folders of runs")
    page = Path(given.get("output") or Path(folders[0] if many == 1 else ".", report.REPORT))
    try:
        print(f"Wrote {report.write(folders, page)}.")
    except OSError as error:
        raise ConfigError("report", [f"{page} cannot be written: {error.strerror or error}"]) from error
