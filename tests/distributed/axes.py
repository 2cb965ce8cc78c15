"""Which trainer is compared on which axis of a mesh, read from the parameters of the tests that do it: the table of
docs/compared.md.

    python -m tests.distributed.axes --write
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.contract.trainers import EXACT
from tests.distributed import test_equal, test_experts, test_resume_axes, test_resume_elsewhere

PAGE = Path(__file__).parents[2] / "docs" / "compared.md"
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


#: By way of a run that goes from one process to two and back, its axis and trainer.
WAYS = {
    "1-2-1": ("dp_replicate", "causal-lm"),
    "1-2p-1": ("dp_shard", "causal-lm"),
    "1-2t-1": ("tp", "causal-lm"),
    "1-2c-1": ("cp", "causal-lm"),
    "lora-2p-1": ("dp_shard", "sft-lora"),
    "lora-2t-1": ("tp", "sft-lora"),
    "1-e-1": ("ep", "sft"),
}
RESUMED = [
    test_resume_elsewhere.test_the_run_goes_on_as_if_nothing_had_changed,
    test_experts.test_a_run_goes_on_with_experts_divided_otherwise,
    test_resume_axes.test_a_run_goes_there_and_back,
]


def parameters(test: Callable[..., None]) -> list[Any]:
    """What `test` is parametrized with."""
    return [value for mark in _marks(test, "parametrize") for value in mark.args[1]]


def _marks(test: Callable[..., None], name: str) -> list[Any]:
    return [mark for mark in getattr(test, "pytestmark", []) if mark.name == name]


def how(tests: list[Callable[..., None]], letters: str, is_of: Callable[[Any], bool]) -> str:
    """`letters`, in brackets if every test that has a parameter of the cell is slow, and nothing if there is none."""
    found = [test for test in tests if any(map(is_of, parameters(test)))]
    return f"({letters})" if found and all(_marks(test, "slow") for test in found) else letters * bool(found)


def cell(axis: str, name: str) -> str:
    """Letters of what is compared: E weights, V evaluation, G what is generated, R the end of a resumed run."""
    if axis in REFUSED and name in parameters(REFUSED[axis]):
        return "refused"
    letters = "E V G" if name.startswith(test_equal.SAMPLES) else "E V"
    equal = how(EQUAL[axis], letters, lambda label: label.split()[0] == name)
    resumed = how(RESUMED, "R", lambda way: WAYS.get(way, way) == (axis, name))
    return f"{equal} {resumed}".strip() or "–"


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
