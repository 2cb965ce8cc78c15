"""Which trainer is compared on which axis of a mesh, read from the parameters of the tests that do it: the table of
docs/distributed.md.

    python -m tests.distributed.axes --write
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.contract.trainers import EXACT
from tests.distributed import test_equal, test_experts, test_resume_axes

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
START, END = "<!-- made by python -m tests.distributed.axes -->\n", "<!-- end -->"

#: By axis, the tests of two processes that compare weights and evaluation with one process.
EQUAL: dict[str, list[Callable[..., None]]] = {
    "dp_replicate": [test_equal.test_two_processes_do_what_one_does],
    "dp_shard": [test_equal.test_two_processes_do_what_one_does],  # in both of `test_equal.MODES`
    "tp": [
        test_equal.test_two_processes_that_split_matrices_do_what_one_does,
        test_equal.test_every_trainer_splits_matrices,
    ],
    "cp": [test_equal.test_two_processes_that_split_rows_do_what_one_does, test_equal.test_every_trainer_splits_rows],
    "ep": [test_experts.test_two_processes_that_divide_the_experts_do_what_one_does],
}
#: By axis, the test of the sentence with which a trainer's model is refused.
REFUSED: dict[str, Callable[..., None]] = {
    "tp": test_equal.test_what_is_split_says_what_cannot_be,
    "cp": test_equal.test_rows_that_cannot_be_cut_are_refused_by_the_models_name,
    "ep": test_experts.test_a_model_without_experts_is_refused,
}


def parameters(test: Callable[..., None] | None) -> list[Any]:
    """What `test` is parametrized with."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    return [value for mark in marks for value in mark.args[1]]


def cell(axis: str, name: str) -> str:
    """Letters of what is compared: E weights, V evaluation, G what is generated, R the end of a resumed run."""
    if name in parameters(REFUSED.get(axis)):
        return "refused"
    equal = {label.split()[0] for test in EQUAL[axis] for label in parameters(test)}
    if name not in equal:
        return "–"
    resumes = (axis, name) in parameters(test_resume_axes.test_a_run_goes_there_and_back)
    return "E V" + " G" * name.startswith(test_equal.SAMPLES) + " R" * resumes


def table() -> str:
    """The table, in Markdown; trainers of the same cells share a line."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for name in EXACT:
        lines.setdefault(tuple(cell(axis, name) for axis in EQUAL), []).append(f"`{name}`")
    head = [f"| trainer | {' | '.join(EQUAL)} |", "|---" * (len(EQUAL) + 1) + "|"]
    return "\n".join([*head, *(f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in lines.items())])


def written() -> tuple[str, str, str]:
    """The page of the documentation: before the table, the table, and after it."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    found, _, after = rest.partition(END)
    return before, found.strip(), after


if __name__ == "__main__":
    if "--write" in sys.argv:
        before, _, after = written()
        PAGE.write_text(f"{before}{START}\n{table()}\n\n{END}{after}", encoding="utf-8")
    else:
        print(table())
