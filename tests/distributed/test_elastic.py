"""A job that loses processes goes on by itself, with the same rows and to the same weights."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from posttrain.core import TrainingArguments
from posttrain.core.checkpoint.elastic import starting_point
from posttrain.core.checkpoint.store import Store
from posttrain.core.distributed import arguments, waits
from posttrain.core.errors import CheckpointError, ConfigError
from tests.distributed import elastic

RESTARTS = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "0"}


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "out")
    for step in (2, 4):
        (store.begin(step) / "weights").write_text(str(step))
        store.commit(next((tmp_path / "out").glob(f".tmp-checkpoint-{step}.*")))
    return store


def test_auto_is_the_newest_whole_checkpoint_or_the_beginning(store, tmp_path):
    assert starting_point(store, "auto", {}) == store.path(4)
    (store.path(4) / "weights").write_text("torn")
    assert starting_point(store, "auto", {}) == store.path(2)
    assert starting_point(Store(tmp_path / "empty"), "auto", {}) is None


@pytest.mark.parametrize("wanted", [None, False, True, "auto", "checkpoint-2"])
def test_a_restarted_job_goes_on_from_its_newest_checkpoint_whatever_it_was_asked_for(store, wanted):
    wanted = str(store.path(2)) if wanted == "checkpoint-2" else wanted
    assert starting_point(store, wanted, RESTARTS | {"TORCHELASTIC_RESTART_COUNT": "1"}) == store.path(4)


def test_a_job_that_may_be_restarted_does_not_begin_beside_checkpoints_of_another_run(store, tmp_path):
    for wanted in (None, str(store.path(2))):
        with pytest.raises(CheckpointError, match="checkpoint-4, of an earlier run.*'auto'"):
            starting_point(store, wanted, RESTARTS)
    assert starting_point(store, str(store.path(4)), RESTARTS) == store.path(4)
    assert starting_point(store, True, RESTARTS) == store.path(4)
    assert starting_point(Store(tmp_path / "new"), str(store.path(2)), RESTARTS) == store.path(2)
    assert starting_point(store, None, {}) is None


@pytest.mark.parametrize(
    ("rows", "processes", "most", "expected"),
    [(8, 4, 2, (2, 1)), (8, 2, 2, (2, 2)), (8, 1, 8, (8, 1)), (24, 3, 2, (2, 4)), (16, 4, 8, (4, 1)), (9, 3, 2, (1, 3)),
     (16, 3, 2, (1, 5)), (2, 4, 8, (1, 1))],
)  # fmt: skip
def test_a_step_is_dealt_to_any_number_of_processes(rows, processes, most, expected):
    assert arguments.dealt(rows, processes, most) == expected
    size, steps = expected
    if rows % processes == 0:
        assert size * steps * processes == rows and arguments.note(rows, processes) is None
    else:
        assert f"holds {size * steps * processes} rows" in arguments.note(rows, processes)


def test_global_batch_size_sets_the_accumulation(tmp_path, monkeypatch):
    def of(processes, **changes):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        args = TrainingArguments(str(tmp_path), global_batch_size=16, per_device_train_batch_size=4, **changes)
        args.validate()  # once more: what follows from it stays
        return args.per_device_train_batch_size, args.gradient_accumulation_steps

    assert of(1) == (4, 4) and of(2) == (4, 2) and of(4) == (4, 1) and of(8) == (2, 1)
    assert of(4, parallelism_config={"cp_size": 2}) == (4, 2)
    with pytest.raises(ConfigError, match="global_batch_size counts rows"):
        of(1, max_batch_tokens=64)


def test_the_processes_of_a_start_agree_on_a_name_whatever_earlier_ones_have_left():
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def start(size):
        with ThreadPoolExecutor(size) as pool:
            asked = [pool.submit(waits.agreed_name, store, rank, size, 20) for rank in reversed(range(size))]
            return {one.result() for one in asked}

    found = [start(size) for size in (4, 4, 2, 4, 1)]
    assert all(len(names) == 1 for names in found) and len(set.union(*found)) == 5
    with pytest.raises(TimeoutError, match="no word from ranks 1"):
        waits.agreed_name(store, 0, 2, 0.1)


def test_only_a_job_that_restarts_with_one_store_needs_a_name():
    own = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "1"}
    assert waits.init_method(own) == "posttrain-attempt://"
    assert waits.init_method(own | {"TORCHELASTIC_MAX_RESTARTS": "0"}) is None
    assert waits.init_method(own | {"TORCHELASTIC_USE_AGENT_STORE": "False"}) is waits.init_method({}) is None


@pytest.mark.slow
def test_killed_processes_cost_no_row_and_no_digit(tmp_path):
    job, moments = elastic.kill_processes(tmp_path / "killed", 24, 3, random.Random(0))
    found = elastic.judged(job, elastic.undisturbed(tmp_path / "whole", 24, dropout=0.1), 24)
    assert len(moments) == 3
    assert (
        found["steps"] and found["rows of each step as undisturbed"] and found["epochs with each row once"] == "3 of 3"
    )
    assert found["largest gap of the weights"] <= 1e-6


@pytest.mark.slow
def test_a_lost_machine_leaves_the_step_as_large_and_a_new_one_joins(tmp_path):
    job, moments = elastic.lose_machines(tmp_path / "killed", 60, 1, random.Random(0))
    found = elastic.judged(job, elastic.undisturbed(tmp_path / "whole", 60, dropout=0.0), 60)
    assert len(moments) == 1 and {2, 4} == set(found["processes started"])
    assert (
        found["steps"] and found["rows of each step as undisturbed"] and found["epochs with each row once"] == "8 of 8"
    )
    assert found["largest gap of the weights"] <= 1e-5
