"""Loaders of a script's own: divided over the processes, unless each process reads other rows from them already."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from posttrain.core import Trainer
from posttrain.core.arguments import TrainingArguments
from tests import tiny
from tests.contract.trainers import arguments, pad
from tests.programs import together

ROWS = 12


def part():
    """This process, of how many, as scripts ask torch; read when rows are, so that loaders can be made before."""
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


class OwnOrder(Sampler):
    """The rows of this process, in an order that changes with each pass over them."""

    def __init__(self, divided):
        self.divided, self.passes = divided, 0

    def __len__(self):
        return ROWS // (part()[1] if self.divided else 1)

    def __iter__(self):
        rank, world = part() if self.divided else (0, 1)
        mine, self.passes = list(range(rank, ROWS, world)), self.passes + 1
        return iter([mine[place] for place in torch.randperm(len(mine), generator=self._generator())])

    def _generator(self):
        return torch.Generator().manual_seed(self.passes)


class OwnStream(IterableDataset):
    def __init__(self, rows, divided):
        self.rows, self.divided = rows, divided

    def __iter__(self):
        rank, world = part() if self.divided else (0, 1)
        return iter(self.rows[rank::world])


class KnowsItsPlace(OwnStream):
    """As streams for many machines do, it is asked for its position with what was read of it."""

    def state_dict(self, num_samples, from_beginning):
        raise AssertionError("nobody knows these")

    def load_state_dict(self, state):
        raise AssertionError("nobody has one")


class OwnBatches:
    """No `DataLoader`: gives batches."""

    def __init__(self, rows, divided):
        self.rows, self.divided = rows, divided

    def __len__(self):
        return ROWS // 2 // (part()[1] if self.divided else 1)

    def __iter__(self):
        return iter(DataLoader(OwnStream(self.rows, self.divided), batch_size=2, collate_fn=pad))


def loader_of(kind, rows, divided):
    if kind == "batches":
        return OwnBatches(rows, divided)
    if kind == "sampler":
        return DataLoader(rows, batch_size=2, collate_fn=pad, sampler=OwnOrder(divided))
    stream = {"stream": OwnStream, "knows its place": KnowsItsPlace}[kind]
    return DataLoader(stream(rows, divided), batch_size=2, collate_fn=pad)


def read(kind, divided, folder):
    """The rows that this process is trained and evaluated on."""
    rows, seen = tiny.token_rows(ROWS), {True: [], False: []}

    class Reads(Trainer):
        def get_train_dataloader(self):
            return loader_of(kind, rows, divided)

        def get_eval_dataloader(self, eval_dataset=None):
            return loader_of(kind, rows, divided)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
                seen[model.training].append(ids[mask.bool()].tolist())
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    Reads.loss_is_scaled_for_ga = True  # or it would be called once more to find out
    args = arguments(TrainingArguments, folder, max_steps=3, gradient_accumulation_steps=1)
    trainer = Reads(tiny.causal_lm(), args, pad, rows, rows)
    trainer.train()
    trainer.evaluate()
    return trainer.dist.gather_object([seen[True], seen[False]])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    done = together(2, [__file__, str(folder)])
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("kind", ["sampler", "stream", "knows its place", "batches"])
def test_every_row_is_read_once_whoever_divides_them(found, kind, divided):
    rows = sorted(row["input_ids"] for row in tiny.token_rows(ROWS))
    trained, evaluated = zip(*found[f"{kind} {divided}"], strict=True)
    assert sorted(sum(trained, [])) == sorted(sum(evaluated, [])) == rows
    assert [*map(len, trained)] == [*map(len, evaluated)] == [ROWS // 2] * 2


if __name__ == "__main__":  # two processes, started by the fixture above
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    cases = [(kind, divided) for kind in ("sampler", "stream", "knows its place", "batches") for divided in (0, 1)]
    result = {f"{kind} {bool(divided)}": read(kind, divided, folder / f"{kind}{divided}") for kind, divided in cases}
    if torch.distributed.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()
