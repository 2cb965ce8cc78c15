"""A run of one process goes on with its weights, rows or experts divided over two, and from there with one again, to
what one process leads to.
"""

from pathlib import Path

import pytest
import torch

from tests.distributed import jobs
from tests.distributed.test_experts import FREE, RUNS, SMALL

#: AdamW whose epsilon is not small: else a rounding in a tiny gradient becomes a whole step.
USUAL = {"optim": "adamw_torch", "adam_epsilon": 1e-3, "learning_rate": 1e-2, "evaluate": False}
AXES = {
    "dp_replicate": {},
    "dp_shard": {"fsdp": "full_shard", "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}},
    "tp": {"parallelism_config": {"tp_size": 2}},
    "cp": {"parallelism_config": {"cp_size": 2}},
    "ep": {"parallelism_config": {"ep_size": 2}},
}
#: Trainers that are resumed on each axis: one of each kind of loss, of rows, and of weights that are trained.
NAMES = sorted({label for label in RUNS if " " not in label})


def work(folder, label, axis, name, goes_on_from=None, alone=False, **changes):
    """A piece of work of a mixture, on the axis of experts, or of the trainer's own model."""
    changes = USUAL | {"name": name, "out": str(folder / label)} | changes
    if goes_on_from:
        changes["resume"] = str(goes_on_from)
    if axis != "ep":
        return [label, "train", changes]
    # The router's loss is one of a micro-batch: an epoch's short last window is cut otherwise by two processes.
    free = {} if name in ("causal-lm", "reward") else FREE
    return [label, "mixture", changes | free | (SMALL if alone else {})]


def begun_alone(shared, axis):
    """Runs of one process to the end, and to their first checkpoint; of a mixture, or of each trainer's own model."""
    of = "mixture" if axis == "ep" else "own"

    def make(folder: Path):
        jobs.do(1, [work(folder, name, axis, name, alone=True) for name in NAMES], folder)
        jobs.do(1, [work(folder, f"{name} begun", axis, name, alone=True, cut=1) for name in NAMES], folder)

    return jobs.once(shared, f"axes-{of}-alone", make)


def there_and_back(shared, axis, begun):
    """The runs that were begun go on by two processes to the third update, and to the end by one."""

    def make(folder: Path):
        there = [work(folder, name, axis, name, begun / f"{name} begun", cut=3, **AXES[axis]) for name in NAMES]
        jobs.do(2, there, folder)
        jobs.do(1, [work(folder, f"{n} back", axis, n, folder / n, alone=True) for n in NAMES], folder)

    return jobs.once(shared, f"axes-{axis}", make)


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "name"), [(axis, name) for axis in AXES for name in NAMES])
def test_a_run_goes_there_and_back(axis, name, shared):
    begun = begun_alone(shared, axis)
    runs = there_and_back(shared, axis, begun)
    expected, there, found = (jobs.result(*one) for one in ((begun, name), (runs, name), (runs, f"{name} back")))
    assert there["step"] == 3 < found["step"] == expected["step"]
    for key, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], value, rtol=0, atol=2e-6, msg=key)
