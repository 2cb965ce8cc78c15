"""Takes the figures of README.md and docs/speed.md again, script after script, and prints one table of their ratios.

    python benchmarks/figures.py                     all of them: some hours on a machine that does nothing else
    python benchmarks/figures.py imports counts      these alone

Every script runs ours and the peer in turns and leaves its figures in benchmarks/results, with the commit; the table is
benchmarks/results/figures.md. A script that fails is named, and the command then ends with status 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from results import RESULTS, commit

#: Each script with the arguments of each of its figures.
RUNS = {
    "imports": [[]], "counts": [["--size", "64"]], "loop": [[]], "losses": [[]], "preparation": [[]], "sft": [[]],
    "shared_beginning": [[]], "dpo": [[]], "grpo": [[]], "distillation": [[], ["--prompts", "32"]],
    "generation": [["--write"]], "seq2seq": [[]], "evaluation": [[]], "resume": [[]], "checkpoint": [[]],
}  # fmt: skip


def ratios(figures: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """(name, value) of the numbers that compare two contestants."""
    if isinstance(figures, dict):
        for key, value in figures.items():
            yield from ratios(value, f"{name} {key}".strip())
    elif isinstance(figures, (int, float)) and any(word in name for word in (" ratio", "times_")):
        yield name, figures


def main(names: list[str]) -> int:
    if unknown := sorted({*names} - {*RUNS}):
        sys.exit(f"{', '.join(unknown)}: not among {', '.join(RUNS)}")
    lines = ["| script | figure | ratio | commit |", "|---|---|---|---|"]
    failed = []
    for name in names or RUNS:
        for given in RUNS[name]:
            before = {path: path.stat().st_mtime_ns for path in RESULTS.glob("*.json")}
            words = [str(RESULTS.parent / f"{name}.py"), *given]
            if subprocess.run([sys.executable, *words]).returncode:
                failed.append(" ".join([name, *given]))
            for path in sorted(RESULTS.glob("*.json")):
                if path.stat().st_mtime_ns != before.get(path):
                    found = ratios(json.loads(path.read_text()))
                    lines += [f"| {path.stem} | {key} | {value:.3g} | {commit()} |" for key, value in found]
    print("\n".join(lines))
    (RESULTS / "figures.md").write_text("\n".join(lines) + "\n")
    if failed:
        print(f"Failed: {'; '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
