"""The ledger of a run: a line for each completion, with the weights that wrote it and the step that learned from it.

Each process writes ``samples-<rank>.jsonl`` in the output folder. A line is one of these:

    {"began": 0, "max_staleness": 2}        a run from the start: nothing above counts
    {"resumed": 40, "max_staleness": 2}     from the checkpoint of step 40: nothing above with a later step counts
    {"rollout": 7, "sample": 3, "prompt": "5e88", "versions": [5, 6], "engine": "...", "tokens": 90, "reward": 1.0,
     "step": 8}                             a completion, and the first optimizer step that learns from it
    {"rollout": 9, "dropped": "..."}        a batch of prompts that was not learned from, and why

``step`` is None for a completion that dynamic sampling left out. A process may be killed while it writes: what is left
of such a line is skipped.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.lm.generate.samples import append_lines, lines_of
from posttrain.rl.samples.samples import Sample

KEPT_DIGITS = 16
"""Of the SHA-256 of a prompt's tokens."""


class Ledger:
    """Writes the lines of one process, `rank`, into the `folder` of the run. `engine` is its name in the lines."""

    def __init__(self, folder: str | Path, rank: int, engine: str) -> None:
        self.path, self.engine = Path(folder) / f"samples-{rank}.jsonl", engine

    def began(self, max_staleness: int) -> None:
        append_lines(self.path, [{"began": 0, "max_staleness": max_staleness}])

    def resumed(self, step: int, max_staleness: int) -> None:
        """A run goes on from the checkpoint of `step`."""
        append_lines(self.path, [{"resumed": step, "max_staleness": max_staleness}])

    def dropped(self, rollout: int, why: str) -> None:
        append_lines(self.path, [{"rollout": rollout, "dropped": why}])

    def used(self, samples: Sequence[Sample], rewards: Sequence[float], version: int, step: int | None) -> None:
        """`samples` are learned from in the optimizer step `step`, and perhaps later ones; None: they are left out.
        `rewards` are summed; `version` is of the weights, where samples have none.
        """
        lines = [
            {
                "rollout": sample.rollout,
                "sample": sample.place,
                "prompt": prompt_id(sample.prompt_ids),
                "versions": [min(sample.versions or [version]), max(sample.versions or [version])],
                "engine": self.engine,
                "tokens": len(sample.ids),
                "reward": None if math.isnan(reward) else reward,
                "step": step,
            }
            for sample, reward in zip(samples, rewards, strict=True)
        ]
        append_lines(self.path, lines)


def prompt_id(ids: Sequence[int]) -> str:
    """A name for a prompt, from its tokens."""
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()[:KEPT_DIGITS]


@dataclass(frozen=True)
class Audit:
    """What the ledgers of a folder say.

    Attributes:
        used: the lines of the completions that count, in the order of their rollouts.
        left_out: those of completions that dynamic sampling left out.
        dropped: rollouts that were dropped, with the reason.
        problems: completions learned from twice or not at all, and those older than the bound.
    """

    used: list[dict[str, Any]]
    left_out: list[dict[str, Any]]
    dropped: dict[int, str]
    problems: list[str]


def audit(folder: str | Path) -> Audit:
    """Read the ledgers of all processes of a run, from its start over all its resumptions."""
    found: list[dict[str, Any]] = []
    dropped: dict[int, str] = {}
    bound = 0
    for path in sorted(Path(folder).glob("samples-*.jsonl")):
        lines, some, bound = _effective(path)
        found += lines
        dropped |= some
    used = sorted((line for line in found if line["step"] is not None), key=lambda line: _place(line))
    left_out = [line for line in found if line["step"] is None]
    problems = [
        f"sample {place} was used {times} times" for place, times in Counter(map(_place, used)).items() if times > 1
    ]
    runs = {line["rollout"]: line["run"] for line in found}
    places = {run: {line["sample"] for line in found if line["run"] == run} for run in runs.values()}
    seen = {_place(line) for line in found}
    for rollout in range(max([*runs, *dropped], default=-1) + 1):
        if rollout not in runs and rollout not in dropped:
            problems.append(f"rollout {rollout} has no line")
        elif rollout not in dropped and (lacks := sorted(n for n in places[runs[rollout]] if (rollout, n) not in seen)):
            problems.append(f"rollout {rollout} lacks the samples {lacks}")
    for line in used:
        age = line["step"] - 1 - line["versions"][0]
        if age > bound:
            problems.append(f"sample {_place(line)} was {age} steps old in step {line['step']}, above {bound}")
    return Audit(used, left_out, dropped, problems)


def _effective(path: Path) -> tuple[list[dict[str, Any]], dict[int, str], int]:
    """(lines of completions that count, dropped rollouts, the bound on staleness) of one process."""
    lines: list[dict[str, Any]] = []
    dropped: dict[int, str] = {}
    bound, last, run = 0, 0, 0  # begun or resumed, with rollouts of another size perhaps
    for line in lines_of(path):
        if "began" in line or "resumed" in line:
            bound, run = line["max_staleness"], run + 1
            step = line.get("resumed", -1)
            lines = [one for one in lines if one["at"] <= step]
            dropped = {} if "began" in line else dropped
        elif "dropped" in line:
            dropped[line["rollout"]] = line["dropped"]
        else:
            last = last if line["step"] is None else line["step"]
            lines.append(line | {"at": last, "run": run})
            dropped.pop(line["rollout"], None)  # it was on its way when a run ended, and was sampled again
    return lines, dropped, bound


def _place(line: dict[str, Any]) -> tuple[int, int]:
    return line["rollout"], line["sample"]
