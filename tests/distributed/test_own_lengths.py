"""Loaders of a script's own that give one process more batches than another: no process waits for the others."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from posttrain.core import Trainer
from posttrain.core.arguments import TrainingArguments
from posttrain.core.errors import DataError
from tests import tiny
from tests.contract.trainers import arguments, pad
from tests.programs import together

ROWS = 10
#: The rows of each process, in batches of two: other numbers of batches, and of the last rows.
PARTS = [range(6), range(6, ROWS)]
KINDS = ["sized", "unsized", "same first", "growing", "stream", "sized stream", "batches", "workers"]


class Batches:
    """A batch sampler: the `same` rows first, or with each epoch more of them (`growing`)."""

    def __init__(self, same=False, growing=False):
        self.same, self.growing, self.epoch = same, growing, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rank = torch.distributed.get_rank()
        rows = [*PARTS[rank]] if not self.same or rank == 0 else [0, 1, *PARTS[1]][: ROWS - 6]
        rows = rows[: 2 + 2 * self.epoch * (1 - rank)] if self.growing else rows
        return iter([rows[place : place + 2] for place in range(0, len(rows), 2)])


class SizedBatches(Batches):
    def __len__(self):
        return len([*iter(self)])


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = [rows[place] for place in PARTS[torch.distributed.get_rank()]]

    def __iter__(self):
        return iter(self.rows)


class SizedStream(Stream):
    def __len__(self):
        return len(self.rows)


class Reader:
    """No `DataLoader`."""

    def __init__(self, rows):
        self.rows = Stream(rows).rows

    def __iter__(self):
        return iter(DataLoader(self.rows, batch_size=2, collate_fn=pad))


def loader_of(kind, rows):
    if kind == "batches":
        return Reader(rows)
    if kind.endswith("stream"):
        return DataLoader((Stream if kind == "stream" else SizedStream)(rows), batch_size=2, collate_fn=pad)
    sampler = Batches() if kind == "unsized" else SizedBatches(kind == "same first", kind == "growing")
    return DataLoader(rows, batch_sampler=sampler, collate_fn=pad, num_workers=2 * (kind == "workers"))


def trainer_of(kind, folder, seen, **changes):
    rows = tiny.token_rows(ROWS)

    class Reads(Trainer):
        def get_train_dataloader(self):
            return loader_of(kind, rows)

        def get_eval_dataloader(self, eval_dataset=None):
            return loader_of(kind, rows)

        def prediction_step(self, model, inputs, *args, **kwargs):
            seen["evaluated"].append(inputs["input_ids"].shape[0])
            return super().prediction_step(model, inputs, *args, **kwargs)

        def training_step(self, model, inputs, num_items_in_batch=None):
            seen["trained"].append(inputs["input_ids"][0, 0].item())
            return super().training_step(model, inputs, num_items_in_batch)

    args = arguments(
        TrainingArguments,
        folder,
        **({"num_train_epochs": 2, "lr_scheduler_type": "constant", "ddp_timeout": 90} | changes),
    )
    return Reads(tiny.causal_lm(), args, pad, rows, rows)


def measured(kind, folder):
    open_end = (
        {"max_steps": 3 if kind == "growing" else 4} if kind in ("growing", "unsized", "stream", "batches") else {}
    )
    seen = {"trained": [], "evaluated": []}
    trainer = trainer_of(kind, folder, seen, **open_end)
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    found = trainer.evaluate()
    return {
        "losses": losses, "eval_loss": found["eval_loss"], "epoch": trainer.state.epoch,
        "seen": trainer.dist.gather_object(seen),
    }  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lengths")
    done = together(2, [__file__, str(folder)], timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


def alone(parts, epochs, folder):
    """The losses of a process that reads in each step what the two read, and that of all rows after it."""
    rows = tiny.token_rows(ROWS)
    trainer = Trainer(tiny.causal_lm(), arguments(TrainingArguments, folder), pad, rows, rows)
    optimizer, losses = torch.optim.SGD(trainer.model.parameters(), 0.05), []
    for _ in range(epochs):
        for step in parts:
            batch = pad([rows[place] for place in step])
            loss = trainer.model(**batch).loss
            losses.append(loss.item())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses, trainer.evaluate()["eval_loss"]


#: What is read in each step of an epoch.
ALL = [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5]]


@pytest.mark.parametrize("kind", ["sized", "workers"])
def test_every_row_by_index_is_read_once_and_weighs_as_much(found, kind, tmp_path):
    losses, evaluated = alone(ALL, 2, tmp_path)
    assert found[kind]["losses"] == pytest.approx(losses, rel=1e-5)
    assert found[kind]["eval_loss"] == pytest.approx(evaluated, rel=1e-5) and found[kind]["epoch"] == 2


@pytest.mark.parametrize("kind", ["unsized", "stream", "sized stream", "batches"])
def test_an_epoch_without_known_numbers_ends_with_the_first_process_and_all_rows_are_evaluated(found, kind, tmp_path):
    losses, evaluated = alone(ALL[:2], 2, tmp_path)
    assert found[kind]["losses"] == pytest.approx(losses, rel=1e-5)
    assert found[kind]["eval_loss"] == pytest.approx(evaluated, rel=1e-5)


def test_loaders_that_begin_alike_and_end_otherwise_are_not_divided(found):
    trained = [len(one["trained"]) for one in found["same first"]["seen"]]
    assert trained == [6, 6] and len(found["same first"]["losses"]) == 6


def test_numbers_that_change_with_the_epoch_are_compared_in_each(found):
    assert [len(one["trained"]) for one in found["growing"]["seen"]] == [3, 3]


def check_empty(folder):
    """A process without a batch: a sentence on all, at once."""
    PARTS[1] = range(0)
    with pytest.raises(DataError, match="batches of an epoch are 3 on rank 0, 0 on rank 1, and a process needs one"):
        trainer_of("sized", folder, {"trained": [], "evaluated": []}).train()


if __name__ == "__main__":  # two processes, started by the fixture above
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    result = {kind: measured(kind, folder / kind) for kind in KINDS}
    check_empty(folder / "empty")
    if torch.distributed.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()
