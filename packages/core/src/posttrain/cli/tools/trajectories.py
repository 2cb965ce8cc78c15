"""The command ``posttrain trajectories``, which shows what a run has sampled, token for token."""

from __future__ import annotations

from pathlib import Path

from posttrain.cli import parse
from posttrain.cli.report import trajectories
from posttrain.core.config import field_types
from posttrain.core.files import write_text
from posttrain.lm.generate.trajectories import Filter

HELP = """usage: posttrain trajectories FOLDER [--show NAME] [--page] [filters]

List the trajectories that a run with log_trajectories has stored in its output folder: turns, calls of tools, sampled
tokens, reward, and how each ended.

  --show NAME         one of them in full, by its name in the list, such as 7/3
  --page              write FOLDER/trajectories.html, with every token, its log-probability and the weights of it
  --step N            those that this optimizer step learned from first
  --min_reward R --max_reward R
  --min_tokens N      those with at least so many sampled tokens
  --unfinished        those that failed, or were ended by a bound
  --contains TEXT     those whose messages have this text"""
KINDS = {"show": str, "page": bool} | {name: kinds[0] for name, kinds in field_types(Filter).items()}


def run(words: list[str]) -> None:
    """Show what the run has sampled."""
    (folder,), given = parse.typed_flags("trajectories", words, KINDS, 1, what="the output folder of a run")
    show, page = given.pop("show", None), given.pop("page", False)
    if show is not None:
        print(trajectories.text(trajectories.named(show, folder, Filter(**given))))
        return
    found = trajectories.stored(folder, Filter(**given))
    if page:
        path = Path(folder) / trajectories.PAGE
        write_text(path, trajectories.page(found, f"Trajectories of {Path(folder).resolve().name}"))
        print(f"Wrote {path}.")
    else:
        print(trajectories.lines(found))
