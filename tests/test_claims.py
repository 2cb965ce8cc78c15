"""The claims of examples/claims: each script starts, and what it says follows from its figures."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "claims"
SCRIPTS = (
    *("agents", "completion_only", "distillation", "dpo", "dpo_smollm2", "kto", "lora", "lora_smollm2", "packing"),
    *("sequence_ratio", "verifiable_rewards"),
)
ON_SMOLLM2 = {"agents", "dpo_smollm2", "lora_smollm2", "sequence_ratio", "verifiable_rewards"}
#: Its smoke run takes about two seconds.
QUICK = "completion_only"


@pytest.fixture
def claims(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(FOLDER), str(FOLDER.parent), *sys.path])
    monkeypatch.delenv("POSTTRAIN_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:  # modules called "arms" or "dpo" are no other test's
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("name", [n if n == QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SCRIPTS])
def test_the_script_of_a_claim_runs(name, claims, monkeypatch, capsys):
    import pretrained

    if name in ON_SMOLLM2 and pretrained.folder() is None:
        pytest.skip("SmolLM2 is not installed")
    results = {path: path.read_bytes() for path in FOLDER.glob("results/*")}
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--smoke"])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "seed 0: " in printed and "seed 1: " in printed
    assert printed.rstrip().rsplit("\n", 1)[-1].startswith(("Holds", "Does not hold", "Not shown"))
    assert results == {path: path.read_bytes() for path in FOLDER.glob("results/*")}  # a smoke run records nothing


def test_intervals_are_students_and_differences_are_taken_seed_by_seed(claims):
    import arms

    mean, low, high = arms.bounds([1.0, 2.0, 3.0])  # standard error 1/sqrt(3), t(2) = 4.303
    assert mean == 2 and high - mean == pytest.approx(4.303 / 3**0.5) and mean - low == pytest.approx(high - mean)
    assert arms.bounds([5.0]) == (5.0, 5.0, 5.0)
    figures = {"a": [{"x": 1.0}, {"x": 5.0}], "b": [{"x": 0.0}, {"x": 4.5}]}
    assert arms.differences(figures, "a", "b", "x") == [1.0, 0.5]


def test_a_claim_is_recorded_with_its_settings_and_versions_and_may_not_hold(claims, monkeypatch, tmp_path, capsys):
    import arms

    def measure(arm, seed, size):
        return {"x": size + seed + (arm == "b")}

    def verdict(figures):
        return "Holds." if arms.bounds(arms.differences(figures, "a", "b", "x"))[1] > 0 else "Does not hold."

    monkeypatch.setattr(sys, "argv", ["claim.py", "--out", str(tmp_path), "--size", "3", "--seeds", "4", "5", "6"])
    arms.run("a is more", "somebody", ["a", "b"], measure, verdict, {"size": 1.0}, {"size": 0.0})
    assert "Does not hold." in capsys.readouterr().out
    record = json.loads((tmp_path / "claim.json").read_text(encoding="utf-8"))
    assert record["figures"]["a"] == [{"x": 7.0}, {"x": 8.0}, {"x": 9.0}]
    assert record["verdict"] == "Does not hold." and record["settings"] == {"size": 3.0}
    assert record["seeds"] == [4, 5, 6] and "torch" in record["versions"]


def test_the_page_states_what_the_results_say(claims):
    """Each recorded verdict stands in the table as it was recorded."""
    page = (FOLDER.parents[1] / "docs" / "results.md").read_text(encoding="utf-8")
    for name in SCRIPTS:
        row = next(line for line in page.splitlines() if f"examples/claims/{name}.py" in line and line.startswith("|"))
        path = FOLDER / "results" / f"{name}.json"
        if path.is_file():
            record = json.loads(path.read_text(encoding="utf-8"))
            assert record["verdict"].split(": ", 1)[1].rstrip(".") in row, name
            assert record["verdict"].split(":")[0] in row and record["source"].split(",")[0] in row, name
        else:
            assert "not measured yet" in row, name
