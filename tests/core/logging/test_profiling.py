"""Profiles of optimizer steps and records of live memory."""

import json

import pytest
import torch
from torch import nn

from posttrain.core import MemorySnapshotCallback, ProfilerCallback, Trainer, TrainingArguments
from posttrain.core.logging import memory


class Model(nn.Module):
    def __init__(self, fails_at=None):
        super().__init__()
        self.layer, self.calls, self.fails_at = nn.Linear(1000, 100, bias=False), 0, fails_at

    def forward(self, x):
        self.calls += 1
        hidden = self.layer(x)
        if self.calls == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return {"loss": hidden.square().mean()}


def train(folder, callbacks=(), fails_at=None, **changes):
    options = {"max_steps": 4, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    args = TrainingArguments(str(folder), per_device_train_batch_size=2, **(options | changes))
    rows = [{"x": torch.ones(1000)}] * 8
    trainer = Trainer(Model(fails_at), args, train_dataset=rows, callbacks=list(callbacks))
    trainer.train()
    return trainer


def test_the_steps_that_were_asked_for_are_profiled(tmp_path):
    train(tmp_path, [ProfilerCallback(first_step=1, steps=2)])
    trace = json.loads((tmp_path / "profile" / "trace-rank-0.json").read_text())
    products = [event for event in trace["traceEvents"] if event.get("name") == "aten::linear"]
    assert len(products) == 2  # one a step
    assert "aten::linear" in (tmp_path / "profile" / "operations-rank-0.txt").read_text()
    with pytest.raises(ValueError, match="steps=0"):
        ProfilerCallback(steps=0)


def test_live_memory_is_counted_by_owner(tmp_path):
    train(tmp_path, [MemorySnapshotCallback(every=2)])
    entries = json.loads((tmp_path / "memory" / "live-rank-0.json").read_text())
    assert [entry["step"] for entry in entries] == [2, 4]
    owners, weights = entries[-1]["owners"], 1000 * 100 * 4
    assert owners["weights"] == weights and owners["gradients"] == 0
    assert 2 * weights <= owners["optimizer state"] <= 2 * weights + 64  # two moments, and a step
    assert entries[-1]["largest"][0]["bytes"] >= weights
    assert any(one["name"] == "layer.weight" for one in entries[-1]["largest"])


def test_an_error_for_want_of_memory_names_what_held_it(tmp_path):
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(tmp_path, [MemorySnapshotCallback()], fails_at=3)
    [note] = [note for note in raised.value.__notes__ if note.startswith("What held memory")]
    assert (
        "weights 0.4 MiB" in note and "optimizer state 0.8 MiB" in note and "weights layer.weight (100, 1000)" in note
    )
    [entry] = json.loads((tmp_path / "memory" / "live-rank-0.json").read_text())
    assert entry["step"] == 2 and entry["when"].startswith("OutOfMemoryError")


def test_a_tensor_that_vmap_has_left_behind_is_no_error():
    kept = []
    torch.func.vmap(lambda row: kept.append(row) or row.sum())(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="storage"):
        kept[0].untyped_storage()
    assert memory.live(None, None, "cpu")["owners"]


def test_memory_that_tensors_share_counts_once():
    layer = nn.Linear(100, 100, bias=False)
    model = nn.ModuleDict({"a": layer, "b": nn.Linear(100, 100, bias=False)})
    model["b"].weight = nn.Parameter(layer.weight.data.t())
    assert memory.live(model, None, "cpu")["owners"]["weights"] == 40_000
