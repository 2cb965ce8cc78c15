"""A checkpoint goes on with any number of processes, with whole weights or with pieces, to what one process leads to.

Runs are broken off inside a logging interval and inside an epoch, so that the next process count must take over sums
and rows.
"""

import pytest
import torch

from tests import rotation, versions
from tests.distributed import jobs

#: AdamW whose epsilon is not small: else a rounding in a tiny gradient becomes a whole step.
USUAL = {"name": "causal-lm", "optim": "adamw_torch", "adam_epsilon": 1e-3, "learning_rate": 1e-2, "logging_steps": 3}
FULL = {"fsdp": "full_shard", "max_shard_size": "30KB"}  # files that the processes write between them
PARTS = {"fsdp": "full_shard"} | {"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
SPLIT = {"parallelism_config": {"tp_size": 2}}
BOTH = PARTS | {"parallelism_config": {"tp_size": 2, "dp_shard_size": 2}}
SLICED = {"parallelism_config": {"cp_size": 2}}
HYBRID = {"fsdp_config": PARTS["fsdp_config"], "parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 2}}


def step(folder, label, goes_on_from=None, **changes):
    changes = USUAL | {"out": str(folder / label), "evaluate": False} | changes
    if goes_on_from:
        changes["resume"] = str(folder / goes_on_from)
    return [label, "train", changes]


def runs_here(label):
    """Whether transformers can split matrices, "t", if the way of this label asks for it."""
    return versions.IS_CURRENT or "t" not in label.partition("-")[2]


#: The processes of each job, and its work: a label, what it goes on from, and what is set.
CUT, LORA = {"cut": 4}, {"name": "sft-lora"}
JOBS = [
    (1, [("straight", None, {}), ("1", None, {"cut": 2}), ("lora", None, LORA | {"cut": 2}),
         ("straight-lora", None, LORA)]),
    (2, [("1-2", "1", CUT), ("1-2f", "1", CUT | FULL), ("1-2p", "1", CUT | PARTS | {"save_async": True}),
         ("1-2-2p", "1-2", PARTS), ("1-2f-2p", "1-2f", PARTS), ("1-2p-2", "1-2p", {}), ("1-2p-2f", "1-2p", FULL),
         ("lora-2p", "lora", LORA | CUT | PARTS), ("lora-2t", "lora", LORA | CUT | SPLIT), ("1-2t", "1", CUT | SPLIT),
         ("1-2p-2t", "1-2p", SPLIT), ("1-2t-2f", "1-2t", FULL)]),
    (2, [("1-2c", "1", CUT | SLICED), ("1-2p-2cp", "1-2p", PARTS | SLICED), ("1-2c-2p", "1-2c", PARTS)]),
    (1, [("1-2-1", "1-2", {}), ("1-2p-1", "1-2p", {}), ("1-2f-1", "1-2f", {}), ("1-2t-1", "1-2t", {}),
         ("1-2c-1", "1-2c", {}), ("lora-2p-1", "lora-2p", LORA), ("lora-2t-1", "lora-2t", LORA)]),
    (4, [("1-2p-4p", "1-2p", PARTS), ("1-2-4", "1-2", {}), ("1-2p-4h", "1-2p", HYBRID), ("1-2t-4tp", "1-2t", BOTH),
         ("1-2c-4c", "1-2c", SLICED)]),
]  # fmt: skip


@pytest.fixture(scope="session")
def runs(request, shared):
    """The ways through which a run is carried that a test asks for; each is broken off after updates 2 and 4 of 6."""
    asked = {"straight", "straight-lora", "1", "1-2f", "1-2p", "lora-2p"}
    asked |= {path for path in rotation.wanted(request.session, "runs", PATHS) if runs_here(path)}
    for label, before, _ in reversed([one for _, work in JOBS for one in work]):
        asked |= {before} if before and label in asked else set()

    def make(folder):
        for processes, work in JOBS:
            todo = [step(folder, label, before, **changes) for label, before, changes in work if label in asked]
            if todo:
                jobs.do(processes, todo, folder)

    return jobs.once(shared, "elsewhere", make)


PATHS = [
    "1-2-1",
    "1-2f-1",
    "1-2p-1",
    "1-2-2p",
    "1-2f-2p",
    "1-2p-2",
    "1-2p-2f",
    "1-2-4",
    "1-2p-4p",
    "1-2p-4h",
    "1-2t-1",
    "1-2p-2t",
    "1-2t-2f",
    "1-2t-4tp",
    "1-2c-1",
    "1-2p-2cp",
    "1-2c-2p",
    "1-2c-4c",
    "lora-2p-1",
    "lora-2t-1",
]


@pytest.mark.rotated
@pytest.mark.parametrize("path", [path for path in PATHS if runs_here(path)])
def test_the_run_goes_on_as_if_nothing_had_changed(path, runs):
    expected = jobs.result(runs, "straight-lora" if path.startswith("lora") else "straight")
    found = jobs.result(runs, path)
    assert found["step"] == expected["step"] == 6
    for key, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], value, rtol=0, atol=1e-6, msg=key)
    for key in ("loss", "train_loss"):
        values = [
            [(r["step"], pytest.approx(r[key], rel=1e-5)) for r in run["log"] if key in r] for run in (found, expected)
        ]
        assert values[0] == values[1] and values[0]


def files(runs, label):
    return {path.name for path in next((runs / label).glob("checkpoint-*")).iterdir()}


def test_who_writes_what(runs):
    alone, whole, parts = files(runs, "1"), files(runs, "1-2f"), files(runs, "1-2p")
    assert {"model.safetensors", "optimizer.safetensors", "rank-0.json"} <= alone and "rank-1.json" not in alone
    optimizer = {f"optimizer-{rank}-of-2.{end}" for rank in (0, 1) for end in ("json", "safetensors")}
    assert {"model.safetensors.index.json", "rank-1.json"} | optimizer <= whole and "model.safetensors" not in whole
    assert {f"weights-{rank}-of-2.safetensors" for rank in (0, 1)} | optimizer | {"config.json"} <= parts
    assert "model.safetensors" not in parts
    sizes = [
        (path.name, path.stat().st_size) for path in (runs / "1-2p" / "checkpoint-4").glob("weights-*.safetensors")
    ]
    assert max(size for _, size in sizes) < 0.7 * (runs / "1" / "checkpoint-2" / "model.safetensors").stat().st_size


def test_a_checkpoint_of_adapters_holds_adapters_alone(runs):
    saved = files(runs, "lora-2p")
    assert "adapter_model.safetensors" in saved and not any(name.startswith(("model", "weights-")) for name in saved)


def test_weights_in_parts_become_a_model_that_anyone_loads(runs, tmp_path):
    from transformers import AutoModelForCausalLM

    from posttrain.cli import main

    assert main(["consolidate", str(runs / "1-2p" / "checkpoint-4"), str(tmp_path)]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(next((runs / "1-2f").glob("checkpoint-4")))
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=1e-6, msg=key)


# ---- another global batch ----


def test_a_larger_update_reads_on_where_the_data_stood(tmp_path, caplog):
    """22 rows twice, 4 of an update; after 3 updates 8 of one: 32 rows are left, which is 10 of epoch 1 and 22 of epoch
    2.
    """
    small = USUAL | {"logging_steps": 1}
    jobs.do(1, [step(tmp_path, "small", cut=3, per_device_train_batch_size=4, **small)], tmp_path)
    with caplog.at_level("WARNING"):
        jobs.do(1, [step(tmp_path, "large", "small", per_device_train_batch_size=8, **small)], tmp_path)
    found = jobs.result(tmp_path, "large")
    assert found["step"] == 3 + 2 + 3
    epochs = [record["epoch"] for record in found["log"] if "loss" in record]
    assert epochs[:3] == pytest.approx([1 / 6, 2 / 6, 3 / 6], abs=1e-6)
    assert epochs[3:] == pytest.approx([3 / 3, 3 / 3, 4 / 3, 5 / 3, 6 / 3], abs=0.34)
    assert "A step holds 8 rows" in caplog.text and "held 4" in caplog.text
