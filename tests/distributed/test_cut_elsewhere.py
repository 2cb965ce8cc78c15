"""Weights that FSDP cuts along another dimension than the first: the numbers, checkpoints and saved models stay."""

import pytest
import torch
from torch.distributed.tensor import Shard

from posttrain.core.distributed import sharding
from tests import rotation
from tests.distributed import jobs
from tests.distributed.test_equal import SPLIT, assert_equal_runs
from tests.distributed.test_experts import EXPERTS, FREE, SMALL
from tests.distributed.test_resume_elsewhere import PARTS, USUAL

SHARDED = {"fsdp": "full_shard"}
#: What is trained by so many processes, by label.
RUNS = {
    "causal-lm": (2, SHARDED | {"name": "causal-lm"}),
    "sft-lora": (2, SHARDED | {"name": "sft-lora"}),
    "sft-packed, matrices split": (4, SHARDED | SPLIT | {"name": "sft-packed"}),
    "sft-packed, experts divided": (
        4,
        SHARDED | EXPERTS | FREE | {"name": "sft-packed", "experts": 4, "gradient_accumulation_steps": 2},
    ),
}


@pytest.fixture(scope="module")
def runs(request, shared):
    asked = rotation.wanted(request.session, "runs", RUNS)

    def make(folder):
        for processes in (2, 4):
            work = [
                [label, "cut_elsewhere", {"out": str(folder / label), **given}]
                for label, (wanted, given) in RUNS.items()
                if wanted == processes and label in asked
            ]
            if processes == 2:
                cut = USUAL | PARTS | {"name": "sft-lora", "out": str(folder / "cut"), "evaluate": False, "cut": 2}
                work.append(["cut", "cut_elsewhere", cut])
            if work:
                jobs.do(processes, work, folder)
        alone = {
            "causal-lm": {"name": "causal-lm"},
            "sft-lora": {"name": "sft-lora"},
            "sft-packed, matrices split": {"name": "sft-packed"},
        }
        work = [[f"alone {label}", "train", {"out": str(folder / label / "alone")} | alone[label]] for label in alone]
        experts = FREE | SMALL | {"name": "sft-packed", "out": str(folder / "mixture")}
        work.append(["alone sft-packed, experts divided", "mixture", experts])
        same = USUAL | {"name": "sft-lora", "evaluate": False}
        work.append(["straight", "train", same | {"out": str(folder / "straight")}])
        work.append(["resumed", "train", same | {"out": str(folder / "resumed"), "resume": str(folder / "cut")}])
        jobs.do(1, work, folder)

    return jobs.once(shared, "cut-elsewhere", make)


@pytest.mark.rotated(one_in=2)
@pytest.mark.parametrize("label", RUNS)
def test_processes_that_cut_weights_along_another_dimension_do_what_one_does(label, runs):
    found = jobs.result(runs, label)
    assert found["is_fsdp"]
    (embedding,) = (shape for name, shape in found["held"].items() if name.endswith("embed_tokens.weight"))
    assert embedding[1] == (8 if "experts" in label else 16)  # of 32, by 4 processes or by 2
    assert_equal_runs(found, jobs.result(runs, f"alone {label}"), padding="packed" not in label)


def test_a_run_goes_on_from_such_shards_in_one_process(runs):
    found, straight = jobs.result(runs, "resumed"), jobs.result(runs, "straight")
    assert found["step"] == straight["step"]
    for key, value in straight["weights"].items():
        torch.testing.assert_close(found["weights"][key], value, rtol=0, atol=1e-6, msg=key)


class _Mesh:
    def __init__(self, size):
        self.processes = size

    def __getitem__(self, name):
        assert name == "shard"
        return self

    def size(self):
        return self.processes


@pytest.mark.parametrize(
    ("shape", "processes", "expected"),
    [
        ((1024, 64), 64, None),  # it divides
        ((1000, 64), 64, None),  # little is filled up: 1,024 rows
        ((16, 4096), 64, Shard(1)),  # an adapter
        ((2, 100, 4096), 8, Shard(2)),  # two experts
        ((2, 100, 30), 8, None),  # nothing divides
        ((16,), 64, None),
    ],
)
def test_the_dimension_is_the_first_unless_most_of_it_were_filling(shape, processes, expected):
    place = sharding._placement(_Mesh(processes))
    assert place(torch.nn.Parameter(torch.empty(shape))) == expected
