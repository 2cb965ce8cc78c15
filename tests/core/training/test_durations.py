"""Lengths with a unit."""

import pytest
import torch
from torch import nn

from posttrain.core import Trainer, TrainingArguments
from posttrain.core.errors import ConfigError
from posttrain.core.training import durations
from posttrain.core.training.preemption import seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [("500st", (500, "steps")), ("3ba", (3, "steps")), ("1.5ep", (1.5, "epochs")), ("10Mtok", (1e7, "tokens")),
     ("2.5ktok", (2500, "tokens")), ("90min", (5400, "seconds")), ("2 h", (7200, "seconds")),
     ("1d", (86400, "seconds"))],
)  # fmt: skip
def test_a_length_is_a_number_and_a_unit(text, expected):
    assert durations.parse(text) == expected


@pytest.mark.parametrize("text", ["10", "ep", "0ep", "-1ep", "10parsecs", "2Mep", "1.5st", ""])
def test_a_length_without_a_known_unit_is_refused(text):
    with pytest.raises(ConfigError, match=r"max_duration='.*' must be a number above 0 with a unit"):
        TrainingArguments("out", max_duration=text)


def test_times_take_units_too():
    assert [seconds(time) for time in ("90min", "1:30:00", "5400", 5400)] == [5400] * 4
    with pytest.raises(ConfigError, match="max_time='2ep' is no time"):
        TrainingArguments("out", max_time="2ep")


class Model(nn.Module):
    main_input_name = "input_ids"

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 1)

    def forward(self, input_ids):
        return {"loss": self.table(input_ids).square().mean()}


def steps_of(tmp_path, **changes):
    options = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 100, "disable_tqdm": True}
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **(options | changes))
    trainer = Trainer(Model(), args, train_dataset=[{"input_ids": torch.arange(5)}] * 12)
    trainer.train()
    return trainer.state.global_step, trainer.state.num_input_tokens_seen


def test_a_run_ends_after_so_many_steps_epochs_or_tokens(tmp_path):
    assert steps_of(tmp_path / "a", max_duration="4st")[0] == 4
    assert steps_of(tmp_path / "b", max_duration="1.5ep", max_steps=100)[0] == 9
    # Ten tokens an optimizer step; the one that reaches the number is the last, and is saved.
    assert steps_of(tmp_path / "c", max_duration="45tok") == (5, 50)
    assert (tmp_path / "c" / "checkpoint-5").is_dir()
