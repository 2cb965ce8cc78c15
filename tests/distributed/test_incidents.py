"""Two gloo processes: numbers that are not finite on one of them stop both, loss terms are exact, and each machine may
save.
"""

import json

import pytest

from tests import programs
from tests.contract.trainers import causal_lm
from tests.core.test_loss_terms import Scaled

WORKER = str(programs.ROOT / "tests/distributed/incidents.py")


def do(what, folder, nodes=1):
    done = programs.together(2, [WORKER, what, str(folder)], nodes=nodes)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("incidents")
    do("pair", folder)
    return json.loads((folder / "found.json").read_text())


def test_what_is_not_finite_on_one_process_stops_all_with_one_message(pair):
    first, second = pair["stop"]
    assert first == second and "Step 2: the loss is nan" in first and "on rank 1" in first and "on rank 0" not in first
    assert "the loss itself is NaN" in first
    assert "weights are those of step 1" in first and pair["finite"] == [True, True]


def test_a_loss_that_is_infinite_with_a_finite_gradient_is_skipped_by_all(pair):
    assert pair["skipped"] == [[1], [1]] and pair["same_weights"]


def test_the_batch_of_each_process_is_saved(pair):
    assert pair["saved"] == ["rank-0.json", "rank-0.safetensors", "rank-1.json", "rank-1.safetensors"]


def test_terms_of_a_loss_are_those_of_one_process(pair, tmp_path):
    alone = causal_lm(Scaled)(tmp_path, max_steps=4)
    alone.train()
    expected = [
        record[name] for record in alone.state.log_history if "loss" in record for name in ("loss", "nll", "peak")
    ]
    assert pair["terms"] == pytest.approx(expected, rel=1e-5)


def test_the_first_process_of_each_machine_saves_when_it_is_asked_to(tmp_path):
    do("nodes", tmp_path, nodes=2)
    for name in ("node-0", "node-1"):
        kept = sorted(path.name for path in (tmp_path / name / "out").glob("checkpoint-*"))
        assert kept == ["checkpoint-3", "checkpoint-4"]  # rotated on both
        files = {path.name for path in (tmp_path / name / "out/checkpoint-4").iterdir()}
        assert {"manifest.json", "model.safetensors", "optimizer.json", "trainer_state.json"} <= files
