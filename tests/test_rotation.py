"""The quick run takes every test, every representative, and in time every case."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

from tests import rotation
from tests.contract.trainers import TRAINERS

CASES = [(f"{name}-{size}", [name, size]) for name in TRAINERS for size in (1, 2)]


def test_each_mechanism_is_in_every_run():
    assert set(rotation.REPRESENTATIVES) <= set(TRAINERS)
    for seed in "abc":
        names = rotation.taken(CASES, seed)
        assert {f"{name}-{size}" for name in rotation.REPRESENTATIVES for size in (1, 2)} <= names


def test_a_share_of_the_others_is_run_and_over_commits_all_of_them():
    others = 2 * (len(TRAINERS) - len(rotation.REPRESENTATIVES))
    runs = [rotation.taken(CASES, str(seed)) for seed in range(60)]
    assert {len(run) for run in runs} == {2 * len(rotation.REPRESENTATIVES) + -(-others // rotation.SHARE)}
    assert set.union(*runs) == {name for name, _ in CASES}
    assert rotation.taken(CASES, "a") == rotation.taken(CASES[::-1], "a")


def test_a_test_keeps_at_least_one_case():
    for number in range(1, 9):
        assert rotation.taken([(str(one), [one]) for one in range(number)], "") != set()


class Item(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def test_only_marked_tests_lose_cases():
    def made(number, marked):
        spec = SimpleNamespace(id=str(number), params={"n": number})
        return Item(nodeid=f"t.py::{marked}[{number}]", callspec=spec, get_closest_marker=lambda _: marked or None)

    items = [made(number, marked) for marked in (True, False) for number in range(8)]
    left = rotation.leave_out(items, "")
    assert len(left) == 6 and len(items) == 10 and {"True" in one.nodeid for one in left} == {True}


def test_a_fixture_runs_what_is_asked_of_it():
    spec = SimpleNamespace(params={"name": "b"})
    items = [Item(fixturenames=["runs"], callspec=spec), Item(fixturenames=["x"], callspec=spec), Item(fixturenames=[])]
    assert rotation.wanted(SimpleNamespace(items=items), "runs", ["a", "b"]) == ["b"]
    assert rotation.wanted(SimpleNamespace(items=items), "other", ["a", "b"]) == []


def test_contributors_are_told_what_stands_for_what():
    page = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `([\w-]+)` \| (.+) \|$", page, re.MULTILINE)) == rotation.REPRESENTATIVES
