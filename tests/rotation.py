"""Which cases of the large products a quick run takes: one for each mechanism, and a share of the others by commit."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: The trainer of `tests.contract.trainers` that stands for a mechanism: it is in every run.
REPRESENTATIVES = {
    "causal-lm": "the core loop",
    "sft-packed": "packed rows",
    "sft-lora": "adapters",
    "dpo": "preferences",
    "kto": "unpaired preferences",
    "grpo-reused": "online training",
    "gkd": "distillation",
    "sft-mixture": "mixtures of datasets",
    "seq2seq": "encoder-decoders",
    "dpo-images": "images",
}
#: Of the other cases of a test, one in so many.
SHARE = 4


def commit() -> str:
    """The hash of the commit that is checked out, "" where git or its folder is missing."""
    from posttrain.cli.report import run_record

    return run_record.code(str(Path(__file__).parent)).get("commit", "")


def taken(cases: list[tuple[str, list[Any]]], seed: str) -> set[str]:
    """The ids of the cases of one test that are run.

    Args:
        cases: ``(id, values of the parameters)`` of each.
        seed: another one takes other cases; tests that share ids take the same, because they share what is set up.
    """
    always = {name for name, values in cases if any(str(value) in REPRESENTATIVES for value in values)}
    others = [name for name, _ in cases if name not in always]
    others.sort(key=lambda name: zlib.crc32(f"{seed} {name}".encode()))
    return always | set(others[: -(-len(others) // SHARE)])


def leave_out(items: list[Any], seed: str) -> list[Any]:
    """Take the cases that are not run out of `items`, in place, and return them."""
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("rotated"):
            tests[item.nodeid.partition("[")[0]].append(item)
    left = []
    for cases in tests.values():
        ids = taken([(case.callspec.id, list(case.callspec.params.values())) for case in cases], seed)
        left += [case for case in cases if case.callspec.id not in ids]
    out = set(left)
    items[:] = [item for item in items if item not in out]
    return left


def wanted(session: Any, fixture: str, names: Iterable[str], *values: Any) -> list[str]:
    """Those of `names` for which a test that was not left out asks `fixture`, for a fixture that runs all together in
    one job of several processes.

    Args:
        values: only of tests that have these parameters too.
    """
    asked: set[str] = set()
    for item in session.items:
        if fixture in getattr(item, "fixturenames", ()) and hasattr(item, "callspec"):
            given = {str(value) for value in item.callspec.params.values()}
            asked |= given if given.issuperset(map(str, values)) else set()
    return [name for name in names if name in asked]
