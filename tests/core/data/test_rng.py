"""The global random number generators go on where they stood."""

import random

import numpy as np
import pytest
import torch

from posttrain.core.checkpoint.codec import load_tree, save_tree
from posttrain.core.data.rng import rng_state, set_rng_state
from posttrain.core.errors import CheckpointError
from posttrain.core.files import directory_bytes


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


class Devices:
    """Stands in for torch.xpu and torch.mps, of which tests have neither: generators on the CPU."""

    def __init__(self, count=1, initialized=True):
        self.generators, self.initialized = [torch.Generator().manual_seed(i) for i in range(count)], initialized
        self.is_initialized, self.is_available = lambda: self.initialized, lambda: bool(self.generators)
        self.device_count = lambda: len(self.generators)
        self.get_rng_state_all = lambda: [generator.get_state() for generator in self.generators]
        self.get_rng_state = lambda: self.generators[0].get_state()
        self.set_rng_state = lambda state, device=0: self.generators[device].set_state(state)

    def draw(self):
        return [torch.rand(3, generator=generator).tolist() for generator in self.generators]


@pytest.mark.parametrize(("kind", "count"), [("xpu", 2), ("mps", 1)])
def test_the_generators_of_other_devices_go_on_where_they_stood(kind, count, tmp_path, monkeypatch, caplog):
    devices = Devices(count)
    monkeypatch.setattr(torch, kind, devices)
    monkeypatch.setattr(torch.backends, "mps", devices if kind == "mps" else Devices(0))
    devices.draw()
    save_tree(rng_state(), tmp_path / "rng")
    expected = devices.draw()
    assert devices.draw() != expected
    set_rng_state(load_tree(tmp_path / "rng"))
    assert devices.draw() == expected and not caplog.text
    del devices.generators[-1]  # the run moves to a machine with one device less
    set_rng_state(load_tree(tmp_path / "rng"))
    assert f"{count} {kind.upper()} devices and this process sees {count - 1}" in caplog.text


def test_devices_that_this_process_does_not_use_are_left_alone(monkeypatch):
    plain = rng_state()
    monkeypatch.setattr(torch, "xpu", Devices(2, initialized=False))
    assert set(rng_state()) == set(plain)  # as checkpoints of earlier versions have it
    set_rng_state(plain)
