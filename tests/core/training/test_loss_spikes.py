"""Losses far above those before them: found, named with their rows, skipped, and remembered in checkpoints."""

import logging

import pytest
import torch
from torch import nn

from posttrain.core import Trainer, TrainingArguments
from posttrain.core.errors import LossSpikeError
from posttrain.core.training.loss_spikes import NEEDED, SpikeWatch
from posttrain.core.training.nonfinite import Update


def update(loss, step=0):
    return Update(step, 0, step, [None], [torch.tensor(loss)], torch.tensor(loss), torch.tensor(1.0))


def fed(policy, losses, threshold=8.0):
    watch = SpikeWatch(policy, threshold)
    return watch, [watch.may_step(None, update(loss, step)) for step, loss in enumerate(losses)]


LEVEL = [2.0 + 0.1 * (-1) ** step for step in range(NEEDED)]  # mean 2, standard deviation 0.1


def test_the_height_of_a_loss_is_in_standard_deviations_above_the_mean():
    assert fed("skip", [*LEVEL, 2.79])[1][-1] and not fed("skip", [*LEVEL, 2.81])[1][-1]
    assert fed("skip", [*LEVEL, 2.31], threshold=3.2)[1][-1] and not fed("skip", [*LEVEL, 2.33], threshold=3.2)[1][-1]


def test_few_losses_and_low_ones_are_no_spikes():
    assert all(fed("skip", [*LEVEL[:-1], 100.0])[1]) and all(fed("skip", [*LEVEL, 0.0, float("nan"), float("inf")])[1])


def test_a_spike_is_not_compared_with_but_a_new_level_is_taken_in_the_end():
    watch, may = fed("skip", [*LEVEL, *[9.0] * (NEEDED + 5)])
    assert may.count(False) == NEEDED and may[-1] and watch.logged() == {"loss_spikes": NEEDED} and watch.logged() == {}


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(()))

    def forward(self, x, labels):
        return {"loss": ((self.a * x - labels) ** 2).mean()}


def run(tmp_path, name, checkpoint=None, **changes):
    rows = [{"x": torch.tensor(1.0), "labels": torch.tensor(1.0 + 0.01 * (i % 5))} for i in range(40)]
    rows[29]["labels"] = torch.tensor(100.0)
    options = {"learning_rate": 1e-3, "per_device_train_batch_size": 1, "logging_steps": 40, "save_strategy": "no"}
    options |= {"train_sampling_strategy": "sequential", "num_train_epochs": 1, "report_to": "none", "use_cpu": True}
    args = TrainingArguments(output_dir=str(tmp_path / name), disable_tqdm=True, **(options | changes))
    trainer = Trainer(Line(), args, train_dataset=rows)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def test_a_row_that_makes_the_loss_jump_is_named_and_can_be_left_out(tmp_path, caplog):
    ignored = run(tmp_path, "ignore")
    with caplog.at_level(logging.WARNING):
        warned = run(tmp_path, "warn", on_loss_spike="warn")
    [message] = [text for text in caplog.messages if "spike" in text]
    assert message.startswith("Step 30: the loss 9") and "batch 29 of epoch 0 (rows 29)" in message
    assert "Step 30" in (tmp_path / "warn" / "report.html").read_text()
    assert warned.state.log_history[0]["loss_spikes"] == 1 and "loss_spikes" not in ignored.state.log_history[0]
    assert torch.equal(warned.model.a, ignored.model.a)
    changes = {"on_loss_spike": "skip", "optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    skipped = run(tmp_path, "skip", save_strategy="steps", save_steps=25, **changes)
    plain = run(tmp_path, "plain", **changes | {"on_loss_spike": "ignore"})
    assert plain.model.a - skipped.model.a > 0.1  # the gradient of the one row is about 200
    resumed = run(tmp_path, "resumed", str(tmp_path / "skip" / "checkpoint-25"), **changes)
    assert torch.equal(resumed.model.a, skipped.model.a)  # the losses before the checkpoint are known
    with pytest.raises(LossSpikeError, match=r"Step 30: .*rows 29.*on_loss_spike='stop'"):
        run(tmp_path, "stop", on_loss_spike="stop")
