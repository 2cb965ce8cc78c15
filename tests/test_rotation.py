"""The quick run takes every test, every representative, and in time every case."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import rotation
from tests.contract.trainers import TRAINERS

CASES = [(f"{name}-{size}", [name, size]) for name in TRAINERS for size in (1, 2)]


def test_each_mechanism_is_in_every_run():
    assert set(rotation.REPRESENTATIVES) <= set(TRAINERS)
    for seed in "abc":
        names = rotation.taken(CASES, seed)
        assert all(names & {f"{name}-1", f"{name}-2"} for name in rotation.REPRESENTATIVES)


def test_a_share_of_the_others_is_run_and_over_commits_all_of_them():
    others = 2 * (len(TRAINERS) - len(rotation.REPRESENTATIVES))
    runs = [rotation.taken(CASES, str(seed)) for seed in range(200)]
    assert {len(run) for run in runs} == {len(rotation.REPRESENTATIVES) + -(-others // rotation.SHARE)}
    assert set.union(*runs) == {name for name, _ in CASES}
    assert rotation.taken(CASES, "a") == rotation.taken(CASES[::-1], "a")


def test_a_test_keeps_at_least_one_case():
    for number in range(1, 9):
        assert rotation.taken([(str(one), [one]) for one in range(number)], "") != set()


class Item(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def marked(*group, **options):
    return SimpleNamespace(args=group, kwargs=options)


def test_only_marked_tests_lose_cases():
    def made(number, is_marked):
        spec, mark = SimpleNamespace(id=str(number), params={"n": number}), marked() if is_marked else None
        return Item(nodeid=f"t.py::{is_marked}[{number}]", callspec=spec, get_closest_marker=lambda _: mark)

    items = [made(number, is_marked) for is_marked in (True, False) for number in range(2 * rotation.SHARE)]
    left = rotation.leave_out(items, "")
    assert len(items) == 2 * rotation.SHARE + 2 and {"True" in one.nodeid for one in left} == {True}


def test_a_test_may_leave_the_representatives_to_another_and_takes_a_share_of_all_cases():
    def made(number, mark):
        spec = SimpleNamespace(id=CASES[number][0], params=dict(enumerate(CASES[number][1])))
        return Item(nodeid=f"t.py::{mark.kwargs}[{spec.id}]", callspec=spec, get_closest_marker=lambda _: mark)

    for one_in in (8, 30):
        own, usual = marked(one_in=one_in), marked()
        items = [made(number, mark) for mark in (own, usual) for number in range(len(CASES))]
        rotation.leave_out(items, "")
        ids = [{item.callspec.id for item in items if item.get_closest_marker("") is mark} for mark in (own, usual)]
        assert len(ids[0]) == -(-len(CASES) // one_in) and len(ids[0] - ids[1]) <= 1  # they share what is set up


def test_tests_of_one_group_are_cases_of_one():
    mark = marked("launchers")
    items = [Item(nodeid=f"t.py::test_{number}", get_closest_marker=lambda _: mark) for number in range(4)]
    assert len(rotation.leave_out(items, "")) == 3


def test_a_fixture_runs_what_is_asked_of_it():
    spec = SimpleNamespace(params={"name": "b"})
    items = [Item(fixturenames=["runs"], callspec=spec), Item(fixturenames=["x"], callspec=spec), Item(fixturenames=[])]
    assert rotation.wanted(SimpleNamespace(items=items), "runs", ["a", "b"]) == ["b"]
    assert rotation.wanted(SimpleNamespace(items=items), "other", ["a", "b"]) == []


@pytest.mark.parametrize(
    "path",
    [
        "constraints.txt", "pyproject.toml", "packages/rl/pyproject.toml", "tests/parity/test_dpo.py",
        "packages/core/src/posttrain/core/losses/base.py", "packages/core/src/posttrain/lm/loss/lm_head.py",
        "packages/rl/src/posttrain/rl/algorithms/dpo.py",
    ],
)  # fmt: skip
def test_a_change_of_what_is_compared_with_other_trainers_compares_it(path):
    assert rotation.compares(["README.md", path]) == f"{path} has changed"


def test_other_changes_leave_the_comparisons_out_unless_git_does_not_know_them():
    files = ["docs/loop.md", "tests/rl/algorithms/test_dpo.py", "packages/core/src/posttrain/core/trainer.py"]
    assert rotation.compares(files) == rotation.compares([]) == ""
    assert rotation.compares(None)


def test_changes_are_those_since_the_branch_left_main_and_of_main_those_of_its_last_commit(tmp_path, monkeypatch):
    def git(*words):
        own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *own, *words], cwd=tmp_path, check=True, capture_output=True)

    def commit(name):
        (tmp_path / name).touch()
        git("add", name)
        git("commit", "-m", name)

    monkeypatch.setattr(rotation, "ROOT", tmp_path)
    assert rotation.changed() is None
    git("init", "-b", "main")
    commit("a")
    assert rotation.changed() is None  # the first commit is all there is
    commit("b")
    assert rotation.changed() == ["b"]
    git("checkout", "-b", "branch")
    commit("c")
    commit("d")
    (tmp_path / "a").write_text("more")
    (tmp_path / "new").touch()
    assert rotation.changed() == ["a", "c", "d", "new"]


def test_contributors_are_told_what_stands_for_what():
    page = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `([\w-]+)` \| (.+) \|$", page, re.MULTILINE)) == rotation.REPRESENTATIVES
