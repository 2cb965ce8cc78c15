"""A loss that gathers the rows of both processes, or divides them by the batch size: transformers' Trainer and ours
fill up a last batch alike.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Trainer as TheirTrainer
from transformers import TrainingArguments as TheirArguments

from posttrain.core import Trainer
from posttrain.core.arguments import TrainingArguments
from tests import tiny
from tests.programs import together

LENGTH = 6


def rows_of(number, seed=0):
    """Rows of one length, so that each micro-batch has as many tokens."""
    tokens = torch.randint(5, 200, (number, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in tokens]


def stacked(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}


def of_all(rows):
    """Those of all processes, with a gradient for those of this one."""
    parts = [torch.zeros_like(rows) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, rows.detach().contiguous())
    parts[torch.distributed.get_rank()] = rows
    return torch.cat(parts)


class Contrast(nn.Module):
    """Each row is to be more like itself, shifted by a token, than like any other row of all processes."""

    def forward(self, one, other):
        scores = one @ of_all(other).T
        return nn.functional.cross_entropy(scores, torch.arange(len(one)) + len(one) * torch.distributed.get_rank())


class Contrasts:
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.contrast, self.seen = Contrast(), []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], output_hidden_states=True)
        hidden = outputs.hidden_states[-1]
        loss = self.contrast(hidden[:, :-1].mean(1), hidden[:, 1:].mean(1))
        return (loss, outputs) if return_outputs else loss


class Theirs(Contrasts, TheirTrainer):
    pass


class Ours(Contrasts, Trainer):
    pass


class Times:
    """The way of Tevatron and of those made after it: only the rows of a process have a gradient, and processes average
    theirs, so a loss is multiplied with their number.
    """

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        result = super().compute_loss(model, inputs, return_outputs)
        factor = self.args.world_size
        return (result[0] * factor, result[1]) if return_outputs else result * factor


class Groups(Contrasts):
    """The way of rerankers: scores are divided into as many groups as a batch has rows by the arguments."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], output_hidden_states=True)
        loss = -outputs.logits[:, -1].view(self.args.train_batch_size, -1).log_softmax(-1)[:, 7].mean()
        return (loss, outputs) if return_outputs else loss


class TheirsGroups(Groups, TheirTrainer):
    pass


class OursGroups(Groups, Trainer):
    pass


class TheirsTimes(Times, Theirs):
    pass


class OursTimes(Times, Ours):
    pass


def measured(name, rows, folder):
    kind = globals()[name]
    config = TheirArguments if issubclass(kind, TheirTrainer) else TrainingArguments
    args = config(
        str(folder), per_device_train_batch_size=2, per_device_eval_batch_size=2, num_train_epochs=2, use_cpu=True,
        train_sampling_strategy="sequential", logging_steps=1, report_to="none", save_strategy="no", optim="sgd",
        learning_rate=0.5, lr_scheduler_type="constant", disable_tqdm=True, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = kind(
        model=tiny.causal_lm(), args=args, data_collator=stacked, train_dataset=rows_of(rows),
        eval_dataset=rows_of(rows, seed=1), compute_metrics=lambda found: {"rows": len(found.predictions[0])},
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    norm = torch.stack([p.detach().norm() for p in trainer.model.parameters()]).norm()
    return {"losses": losses, "norm": float(norm), "rows": metrics["eval_rows"], "eval_loss": metrics["eval_loss"]}


@pytest.mark.parametrize("rows", [5, 7])  # of 5, one process has none of the last batch
@pytest.mark.parametrize("loss", ["", "Times", "Groups"])
def test_the_last_batch_is_filled_up_as_by_the_peer(loss, rows, tmp_path):
    found = {}
    for name in (f"Theirs{loss}", f"Ours{loss}"):
        done = together(2, [__file__, name, str(rows), str(tmp_path)])
        assert done.returncode == 0, done.stderr[-4000:]
        found[name] = json.loads((tmp_path / f"{name}.json").read_text())
    theirs, ours = found.values()
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4) and len(ours["losses"]) == 4
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-5)
    assert ours["rows"] == theirs["rows"] == rows


if __name__ == "__main__":  # two processes, started by the test above
    torch.set_num_threads(1)
    name, rows, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    found = measured(name, rows, folder / name)
    if torch.distributed.get_rank() == 0:
        (folder / f"{name}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
