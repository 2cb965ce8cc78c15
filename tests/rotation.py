"""Which tests a quick run takes.

Of the cases of large products: one for each mechanism, and a share of the others by commit. Of the comparisons with
other trainers: all where something that they compare has changed, else none.
"""

from __future__ import annotations

import re
import subprocess
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
#: Of the cases of a test one in so many.
SHARE = 8
ROOT = Path(__file__).parents[1]
PARITY = ROOT / "tests" / "parity"
#: The files whose change can make a loss or a message differ from those of the other trainers in `PARITY`.
COMPARED = re.compile(r"constraints\.txt|(.*/)?pyproject\.toml|tests/parity/.*|packages/.*/(losses|loss|algorithms)/.*")


def commit() -> str:
    """The hash of the commit that is checked out, "" where git or its folder is missing."""
    from posttrain.cli.report import run_record

    return run_record.code(str(Path(__file__).parent)).get("commit", "")


def changed() -> list[str] | None:
    """The files that differ from where this branch left main, or on main itself from the commit before.

    None where git does not know that commit.
    """

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    start = git("merge-base", "HEAD", "origin/main") or git("merge-base", "HEAD", "main")
    if start == git("rev-parse", "HEAD"):
        start = git("rev-parse", "--verify", "HEAD^")
    if not start:
        return None
    return [*git("diff", "--name-only", start).split(), *git("ls-files", "--others", "--exclude-standard").split()]


def compares(files: list[str] | None) -> str:
    """Why a run in which `files` have changed takes the tests of `PARITY`; "" where it leaves them out."""
    if files is None:
        return "git does not know what has changed"
    return next((f"{name} has changed" for name in files if COMPARED.fullmatch(name)), "")


def taken(cases: list[tuple[str, list[Any]]], seed: str, share: int = SHARE) -> set[str]:
    """The ids of the cases of one test that are run: one in `share` of those of each representative, and of the others.

    Args:
        cases: ``(id, values of the parameters)`` of each.
        seed: another one takes other cases; tests that share ids take the same, because they share what is set up.
    """
    kinds = defaultdict(list)
    for name, values in sorted(cases, key=lambda case: zlib.crc32(f"{seed} {case[0]}".encode())):
        kinds[next((str(value) for value in values if str(value) in REPRESENTATIVES), "")].append(name)
    return {name for names in kinds.values() for name in names[: -(-len(names) // share)]}


def leave_out(items: list[Any], seed: str) -> list[Any]:
    """Take the cases that are not run out of `items`, in place, and return them.

    A test's cases are those of its parameters. Tests of a file with the same ``rotated("group")`` are cases of one.
    Of a test with ``rotated(one_in=16)`` one in 16 of all cases is run: another test has each representative.
    """
    tests, shares = defaultdict(dict), {}
    for item in items:
        if mark := item.get_closest_marker("rotated"):
            file, _, test = item.nodeid.partition("::")
            name, spec = test.partition("[")[0], getattr(item, "callspec", None)
            one_in, key = mark.kwargs.get("one_in"), (file, *(mark.args or [name]))
            values = list(spec.params.values()) if spec and not one_in else []
            tests[key][item] = (spec.id, values) if spec and not mark.args else (test, [])
            shares[key] = one_in or SHARE
    left = []
    for key, cases in tests.items():
        ids = taken(list(cases.values()), seed, shares[key])
        left += [item for item, (name, _) in cases.items() if name not in ids]
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
