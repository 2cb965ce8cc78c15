"""What is read of another trainer's files, and what is refused."""

from __future__ import annotations

import pickle
import random
import re

import numpy as np
import pytest
import torch

from posttrain.core.checkpoint import foreign
from posttrain.core.data import rng
from posttrain.core.errors import CheckpointError


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def trained(net, steps=3, **options):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(steps):
        net(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return optimizer, schedule


def write(folder, **files):
    for name, value in files.items():
        torch.save(value, folder / f"{name}.pt")
    return folder


def test_what_pickles_only_objects_is_refused_by_name_and_read_only_when_it_is_allowed(tmp_path):
    made = tmp_path / "made by the pickle"
    torch.save({"state": Payload(made)}, tmp_path / "optimizer.pt")
    with pytest.raises(pickle.UnpicklingError, match="holds Python objects: _?io.open.*set allow_pickle=True"):
        foreign.read(tmp_path / "optimizer.pt")
    assert not made.exists()
    foreign.read(tmp_path / "optimizer.pt", allow_pickle=True)
    assert made.exists()


def test_a_damaged_file_is_an_error_and_not_passed_over(tmp_path):
    optimizer, schedule = trained(model())
    write(tmp_path, optimizer=optimizer.state_dict())
    content = (tmp_path / "optimizer.pt").read_bytes()
    (tmp_path / "optimizer.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="optimizer.pt is damaged"):
        foreign.take(tmp_path, optimizer, schedule, None)


def test_optimizer_and_schedule_stand_where_they_were_saved(tmp_path):
    saved = trained(model())
    write(tmp_path, optimizer=saved[0].state_dict(), scheduler=saved[1].state_dict())
    optimizer, schedule = trained(model(), steps=0)
    taken = foreign.take(tmp_path, optimizer, schedule, None)
    assert taken.parts == ["optimizer", "schedule"]
    assert taken.lacks == ["the random numbers (there is none)"] and taken.rng is None
    assert schedule.last_epoch == 3 and optimizer.param_groups[0]["lr"] == saved[0].param_groups[0]["lr"] == 0.1 / 4
    for mine, theirs in zip(optimizer.state.values(), saved[0].state.values(), strict=True):
        assert mine["step"] == 3 and torch.equal(mine["exp_avg_sq"], theirs["exp_avg_sq"])


@pytest.mark.parametrize(("other", "reason"), [
    (lambda net: torch.optim.SGD(net.parameters(), lr=0.1), "it is not a SGD, going by .*betas.*momentum"),
    (lambda net: torch.optim.AdamW(list(net.parameters())[:3]), r"groups of \[4\] parameters, .* of \[3\]"),
    (lambda net: torch.optim.AdamW([*net.parameters()][::-1]), r"its parameter 0 has the shape \(4, 3\), and here"),
])  # fmt: skip
def test_a_state_that_fits_another_optimizer_is_left_with_the_reason(tmp_path, other, reason):
    saved = trained(model())
    write(tmp_path, optimizer=saved[0].state_dict(), scheduler=saved[1].state_dict())
    optimizer = other(model())
    taken = foreign.take(tmp_path, optimizer, None, None)
    assert taken.parts == [] and re.search(reason, taken.lacks[0]) and not optimizer.state


def test_options_that_choose_a_kernel_stay_those_of_this_run(tmp_path):
    saved = trained(model(), foreach=True, betas=(0.5, 0.6))
    write(tmp_path, optimizer=saved[0].state_dict(), scheduler=saved[1].state_dict())
    optimizer, schedule = trained(model(), steps=0, foreach=False)
    foreign.take(tmp_path, optimizer, schedule, None)
    assert optimizer.param_groups[0]["foreach"] is False and optimizer.param_groups[0]["betas"] == (0.5, 0.6)


def test_random_numbers_of_another_number_of_processes_are_left(tmp_path):
    for rank in range(2):
        torch.save({}, tmp_path / f"rng_state_{rank}.pth")
    optimizer, schedule = trained(model(), steps=0)
    taken = foreign.take(tmp_path, optimizer, schedule, None)
    assert "the random numbers (saved by 2 processes, and this run has 1)" in taken.lacks


@pytest.mark.parametrize(("file", "lack"), [("optimizer.pt", "param_groups"), ("rng_state.pth", "python")])
def test_a_file_that_holds_something_else_is_left(file, lack, tmp_path):
    saved = trained(model())
    write(tmp_path, optimizer=saved[0].state_dict(), scheduler=saved[1].state_dict())
    torch.save({}, tmp_path / file)
    optimizer, schedule = trained(model(), steps=0)
    taken = foreign.take(tmp_path, optimizer, schedule, None)
    assert any(lack in one for one in taken.lacks) and taken.rng is None


def test_the_generators_continue(tmp_path):
    torch.save(
        {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()},
        tmp_path / "rng_state.pth",
    )
    expected = random.random(), np.random.rand(), torch.rand(3)
    optimizer, schedule = trained(model(), steps=0)
    rng.set_rng_state(foreign.take(tmp_path, optimizer, schedule, None).rng)
    drawn = random.random(), np.random.rand(), torch.rand(3)
    assert drawn[:2] == expected[:2] and torch.equal(drawn[2], expected[2])
