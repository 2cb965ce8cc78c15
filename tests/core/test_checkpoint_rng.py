"""The global random number generators go on where they stood."""

import random

import numpy as np
import pytest
import torch

from posttrain.core.checkpoint import directory_bytes, load_tree, rng_state, save_tree, set_rng_state
from posttrain.core.errors import CheckpointError


def draw():
    return (
        [random.random(), random.gauss(0, 1), random.getrandbits(64)],
        [np.random.rand(), np.random.randn(), np.random.randint(2**31)],
        [*torch.rand(2).tolist(), *torch.randn(3).tolist()],
    )


@pytest.mark.parametrize("draws_before", [0, 1, 5])
def test_every_generator_goes_on_where_it_stood(draws_before, tmp_path):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    for _ in range(draws_before):
        draw()  # an odd number of normal draws leaves a second one waiting in python's and numpy's generators
    save_tree(rng_state(), tmp_path / "rng")
    expected = [draw() for _ in range(700)]  # past the 624 words of a Mersenne twister
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    set_rng_state(load_tree(tmp_path / "rng"))
    assert [draw() for _ in range(700)] == expected


def test_reading_the_state_draws_nothing():
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = draw()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    rng_state()
    assert draw() == expected


def test_the_state_is_small(tmp_path):
    save_tree(rng_state(), tmp_path / "rng")
    assert directory_bytes(tmp_path) < 12_000


def test_another_bit_generator_of_numpy_goes_round(tmp_path):
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        save_tree(rng_state(), tmp_path / "rng")
        expected = np.random.rand(3).tolist()
        set_rng_state(load_tree(tmp_path / "rng"))
        assert np.random.rand(3).tolist() == expected
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize("tree", [{}, {"python": 3}, None, [1]])
def test_something_else_is_refused(tree):
    with pytest.raises(CheckpointError, match="not a state of the random number generators"):
        set_rng_state(tree)


def test_states_of_more_devices_than_there_are_are_warned_about(caplog):
    state = rng_state()
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)
    if torch.cuda.is_available():
        state["cuda"] = [torch.cuda.get_rng_state(0)] * (torch.cuda.device_count() + 1)
    set_rng_state(state)
    assert "CUDA devices" in caplog.text
