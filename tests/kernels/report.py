"""Compiles the kernels of `cases` for an A100, an H100 and a B200; prints a table and compares it with the budget.

    python -m tests.kernels.report                    # `make kernels`
    python -m tests.kernels.report 90 flex-64         # one card, one case
    python -m tests.kernels.report 90 --write         # and record its spills as the budget

A kernel that does not compile, that needs more shared memory than a block may have, or that spills more bytes of its
registers than `budget.json` allows, ends it with status 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.kernels.absent_gpu import ARCHITECTURES
from tests.kernels.cases import CASES

BUDGET = Path(__file__).with_name("budget.json")
COLUMNS = ("seconds", "registers", "spills", "shared", "matrices", "warps", "stages")


def compiled(number: int, names: list[str]) -> list[dict[str, Any]]:
    """What `cases` prints for one architecture, by a process of its own."""
    command = [sys.executable, "-m", "tests.kernels.cases", str(number), *names]
    done = subprocess.run(command, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        rows.append({"case": "all", "error": f"status {done.returncode}: {done.stderr[-2000:]}"})
    return [{"number": number} | row for row in rows]


def key(row: dict[str, Any]) -> str:
    """By what the budget knows a kernel: its architecture, its case and its name."""
    return f"{row['number']} {row['case']} {row['kernel']['name']}"


def problems(rows: list[dict[str, Any]], budget: dict[str, int]) -> list[str]:
    """What does not compile, does not fit, or spills more than `budget` allows (0 bytes for those it does not name).

    A configuration that does not fit is left out by torch, so one of a kernel's configurations has to.
    """
    found, fits = [], {key(row) for row in rows if "kernel" in row and shared_left(row) >= 0}
    for row in rows:
        if "error" in row:
            found.append(f"{row['number']} {row['case']}: {row['error']}")
        elif key(row) not in fits:
            found.append(f"{key(row)}: {-shared_left(row):,} bytes of shared memory more than a block can have")
        elif row["kernel"]["spills"] > (allowed := budget.get(key(row), 0)):
            spills = row["kernel"]["spills"]
            found.append(f"{key(row)}: {spills:,} bytes of spilled registers, and the budget allows {allowed:,}")
    return found


def shared_left(row: dict[str, Any]) -> int:
    """Bytes of shared memory that a block has beside a kernel's."""
    return ARCHITECTURES[row["number"]].shared - row["kernel"]["shared"]


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each kernel, in each of its configurations."""
    lines = [f"{'machine':8}" + "".join(f"{column:>12}" for column in COLUMNS) + "  case, kernel"]
    for row in rows:
        if "kernel" in row:
            kernel = row["kernel"] | {"seconds": round(row["kernel"]["seconds"], 1)}
            cells = "".join(f"{kernel[column]:>12}" for column in COLUMNS)
            lines.append(f"{kernel['architecture']:8}{cells}  {row['case']} {kernel['name']}")
    return "\n".join(lines)


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--write"]
    numbers = [int(argument) for argument in arguments if argument.isdigit()] or list(ARCHITECTURES)
    names = [argument for argument in arguments if not argument.isdigit()]
    names = names or list(CASES)
    tasks = [(number, half) for half in (names[::2], names[1::2]) for number in numbers if half]  # for two cores
    with ThreadPoolExecutor(2) as two:
        rows = [row for found in two.map(lambda task: compiled(*task), tasks) for row in found]
    print(table(rows))
    budget = json.loads(BUDGET.read_text())
    if "--write" in sys.argv:
        compiled_now = {f"{row['number']} {row['case']} " for row in rows}
        budget = {name: size for name, size in budget.items() if not name.startswith(tuple(compiled_now))}
        for row in rows:
            if "kernel" in row and (spills := row["kernel"]["spills"]):
                budget[key(row)] = max(spills, budget.get(key(row), 0))
        BUDGET.write_text(json.dumps(budget, indent=1, sort_keys=True) + "\n")
    found = problems(rows, budget)
    print("\n".join(found) or f"{sum('kernel' in row for row in rows)} kernels compiled, within the budget.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
