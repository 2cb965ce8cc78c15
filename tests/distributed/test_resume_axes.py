"""A run of one process goes on with its weights, rows or experts divided over two, and from there with one again, to
what one process leads to: one trainer of each kind, on every axis.
"""

from pathlib import Path

import pytest
import torch

from tests.distributed import jobs

USUAL = {"optim": "adamw_torch", "adam_epsilon": 1e-3, "learning_rate": 1e-2, "evaluate": False}
#: One process with the micro-batches of two: the loss of a router is one of a micro-batch.
SMALL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
AXES = {
    "dp_replicate": {},
    "dp_shard": {"fsdp": "full_shard", "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}},
    "tp": {"parallelism_config": {"tp_size": 2}},
    "cp": {"parallelism_config": {"cp_size": 2}},
    "ep": {"parallelism_config": {"ep_size": 2}},
}
KINDS = ["causal-lm", "sft", "sft-packed", "dpo", "reward", "grpo"]
#: Trainers that are resumed on an axis. A step of adapters is one of few weights, so one kind of trainer has them.
NAMES = {axis: [*KINDS, "sft-lora"] for axis in AXES}


@pytest.fixture(scope="session")
def ways(shared):
    def make(folder: Path):
        def work(label, name, axis, before=None, **changes):
            function = "mixture" if axis == "ep" else "train"
            resume = {} if before is None else {"resume": str(folder / before)}
            return [label, function, USUAL | {"name": name, "out": str(folder / label)} | resume | changes]

        def alone(axis):
            return SMALL if axis == "ep" else {}

        first = [("", "dp_replicate"), ("mixture ", "ep")]
        straight = [(kind, axis, name) for kind, axis in first for name in NAMES[axis]]
        jobs.do(1, [work(f"{kind}{name}", name, axis, **alone(axis)) for kind, axis, name in straight], folder)
        begun = [work(f"{kind}{name} begun", name, axis, cut=1, **alone(axis)) for kind, axis, name in straight]
        jobs.do(1, begun, folder)
        every = [(axis, name, "mixture " if axis == "ep" else "") for axis in AXES for name in NAMES[axis]]
        there = [
            work(f"{axis} {name}", name, axis, f"{kind}{name} begun", cut=3, **AXES[axis]) for axis, name, kind in every
        ]
        jobs.do(2, there, folder)
        back = [work(f"{axis} {name} back", name, axis, f"{axis} {name}", **alone(axis)) for axis, name, _ in every]
        jobs.do(1, back, folder)

    return jobs.once(shared, "axes", make)


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "name"), [(axis, name) for axis in AXES for name in NAMES[axis]])
def test_a_run_goes_there_and_back(axis, name, ways):
    expected = jobs.result(ways, f"mixture {name}" if axis == "ep" else name)
    there, found = jobs.result(ways, f"{axis} {name}"), jobs.result(ways, f"{axis} {name} back")
    assert there["step"] == 3 < found["step"] == expected["step"]
    for key, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], value, rtol=0, atol=2e-6, msg=key)
