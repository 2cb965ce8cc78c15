"""Scripts gather what they have of each row, also where the last batch of an epoch does not go round."""

import json
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from posttrain.core import Trainer
from posttrain.core.arguments import TrainingArguments
from posttrain.core.errors import DataError
from tests import tiny
from tests.contract.trainers import arguments, pad
from tests.programs import together

WIDTH = 16


def wide(rows):
    """Batches of one width, as `gather` needs."""
    fill = {"labels": -100}
    batch = pad(rows)
    return {
        name: torch.nn.functional.pad(value, (0, WIDTH - value.shape[1]), value=fill.get(name, 0))
        for name, value in batch.items()
    }


class Gathers(Trainer):
    """Gathers the tokens of the rows that it is evaluated on, and of those that it is trained on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = {True: [], False: []}

    def _gather(self, inputs):
        rows = self.accelerator.gather_for_metrics({"ids": inputs["input_ids"], "mask": inputs["attention_mask"]})
        self.seen[self.model.training] += [ids[mask.bool()].tolist() for ids, mask in zip(*rows.values(), strict=True)]

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        self._gather(inputs)
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)

    def training_step(self, model, inputs, num_items_in_batch=None):
        self._gather(self._prepare_inputs(inputs))
        return super().training_step(model, inputs, num_items_in_batch)


class OwnLoader(Gathers):
    def get_eval_dataloader(self, eval_dataset=None):
        return self.accelerator.prepare(DataLoader(self.eval_dataset, batch_size=2, collate_fn=self.data_collator))


class OwnLoss(OwnLoader):
    """Its loss gathers through torch, which needs as many rows on each process."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = inputs["input_ids"].contiguous()
        parts = [torch.zeros_like(ids) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, ids)
        assert torch.equal(parts[torch.distributed.get_rank()], ids)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def get_train_dataloader(self):
        rows = [self.train_dataset[place] for place in range(len(self.train_dataset) // 4 * 4)]
        return self.accelerator.prepare(DataLoader(rows, batch_size=2, collate_fn=self.data_collator))


def measured(kind, rows, folder):
    args = arguments(TrainingArguments, folder, per_device_train_batch_size=2, per_device_eval_batch_size=2,
                     num_train_epochs=1, train_sampling_strategy="sequential")  # fmt: skip
    held_out = tiny.token_rows(rows, seed=1)
    trainer = kind(tiny.causal_lm(), args, wide, tiny.token_rows(rows), held_out,
                   compute_metrics=lambda found: {"rows": len(found.predictions)})  # fmt: skip
    metrics = trainer.evaluate()
    trainer.train()
    seen = {name: sorted(trainer.seen[name]) for name in (True, False)}
    own = []
    for batch in trainer.get_eval_dataloader():  # a loop of the script's own
        own += trainer.accelerator.gather_for_metrics(trainer._prepare_inputs(batch)["input_ids"]).tolist()
    assert sorted(own) == sorted(wide(held_out)["input_ids"].tolist())
    return [metrics["eval_loss"], metrics["eval_rows"], seen[True], seen[False]]


@pytest.mark.parametrize("rows", [5, 7, 8])  # with 5, one process has no row in the last batch
def test_rows_are_gathered_once_each_and_evaluated_once_each(rows, tmp_path):
    done = together(2, [__file__, str(rows), str(tmp_path)])
    assert done.returncode == 0, done.stderr[-4000:]
    alone = measured(Gathers, rows, tmp_path)
    assert alone[2] == sorted(row["input_ids"] for row in tiny.token_rows(rows))
    for name in ("Gathers", "OwnLoader"):
        loss, *others = json.loads((tmp_path / f"{name}.json").read_text())
        assert loss == pytest.approx(alone[0], rel=1e-5) and others == alone[1:], name
    for name in ("OwnLoss", "OwnLossAlone"):
        loss, found, trained, evaluated = json.loads((tmp_path / f"{name}.json").read_text())
        assert loss == pytest.approx(as_accelerate_fills_up(rows), rel=1e-5) and found == rows and evaluated == alone[3]
    repeated = [row["input_ids"] for row in tiny.token_rows(rows)[: -rows % 4]]
    assert trained == sorted(alone[2] + repeated)


def as_accelerate_fills_up(rows):
    """The mean of the losses of batches of two, the last filled up with the first row, by the tokens that count."""
    held_out, model = tiny.token_rows(rows, seed=1), tiny.causal_lm()
    total = items = 0
    for start in range(0, rows, 2):
        batch = held_out[start : start + 2]
        counted = sum(len(row["labels"]) - 1 for row in batch)
        with torch.no_grad():
            total += float(model(**wide((batch + held_out[:1])[:2])).loss) * counted
        items += counted
    return total / items


def check_gather(accelerator):
    """Of other numbers of rows, of equal ones, of scalars, and nested."""
    rank = accelerator.process_index
    rows = torch.full((rank + 1, 2), float(rank))
    assert accelerator.gather(rows).tolist() == [[0, 0], [1, 1], [1, 1]]
    assert accelerator.gather([rows[:0] if rank else rows])[0].tolist() == [[0, 0]]
    assert accelerator.gather({"same": rows[:1]})["same"].tolist() == [[0, 0], [1, 1]]
    assert accelerator.gather(torch.tensor(rank)).tolist() == [0, 1]
    with pytest.raises(TypeError, match="Unsupported types"):
        accelerator.gather("text")


class OwnLossAlone(OwnLoss):
    """Its loaders are those of the trainer."""

    get_eval_dataloader, get_train_dataloader = Trainer.get_eval_dataloader, Trainer.get_train_dataloader


def check_streams(folder):
    """Whose last batch cannot be filled up, and batches of any size: refused before a step."""
    given = {"data_collator": wide, "eval_dataset": tiny.token_rows(7)}
    stream = Dataset.from_list(tiny.token_rows(7)).to_iterable_dataset()
    trainer = OwnLossAlone(tiny.causal_lm(), arguments(TrainingArguments, folder), train_dataset=stream, **given)
    with pytest.raises(DataError, match="OwnLossAlone gathers rows .* Set dataloader_drop_last=True"):
        trainer.get_train_dataloader()
    args = arguments(TrainingArguments, folder, max_batch_tokens=64)
    trainer = OwnLossAlone(tiny.causal_lm(), args, train_dataset=tiny.token_rows(7), **given)
    trainer.row_lengths = lambda dataset: [len(row["input_ids"]) for row in dataset]
    with pytest.raises(DataError, match="are made by the lengths of rows. Set per_device_train_batch_size"):
        trainer.get_train_dataloader()


if __name__ == "__main__":  # two processes, started by the test above
    torch.set_num_threads(1)
    rows, folder = int(sys.argv[1]), Path(sys.argv[2])
    found = {
        kind.__name__: measured(kind, rows, folder / kind.__name__)
        for kind in (Gathers, OwnLoader, OwnLoss, OwnLossAlone)
    }
    check_gather(Trainer(tiny.causal_lm(), arguments(TrainingArguments, folder / "last")).accelerator)
    check_streams(folder / "streams")
    if torch.distributed.get_rank() == 0:
        for name, value in found.items():
            (folder / f"{name}.json").write_text(json.dumps(value))
    torch.distributed.destroy_process_group()
