"""Lengths with a unit."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from posttrain.core import Trainer, TrainerCallback, TrainingArguments
from posttrain.core.errors import ConfigError
from posttrain.core.fields import durations
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


# ---- intervals ----


def events(tmp_path, rows=28, **changes):
    """The steps at which a run logs, evaluates and saves; 2 rows of 5 tokens a step, 14 steps of 2 epochs."""
    seen = {"on_log": [], "on_evaluate": [], "on_save": []}

    class Notes(TrainerCallback):
        pass

    for name in seen:
        setattr(Notes, name, lambda self, args, state, control, of=name, **kwargs: seen[of].append(state.global_step))
    options = {"per_device_train_batch_size": 2, "num_train_epochs": 2, "eval_strategy": "steps", "disable_tqdm": True}
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **(options | changes))
    data = [{"input_ids": torch.arange(5)}] * rows
    stream = changes.get("max_steps") and Stream(data)
    trainer = Trainer(Model(), args, train_dataset=stream or data, eval_dataset=data[:2], callbacks=[Notes()])
    trainer.train(resume_from_checkpoint=(tmp_path / "checkpoint-7").is_dir())
    return {name: sorted(set(steps)) for name, steps in seen.items()}


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def test_intervals_count_epochs_tokens_and_steps(tmp_path):
    # An epoch has 7 steps of 10 tokens: half of it is over within step 4, and 25 tokens within step 3.
    seen = events(tmp_path / "a", rows=14, logging_steps="25tok", eval_steps="0.5ep", save_steps="1ep")
    assert seen["on_save"] == [7, 14] and seen["on_evaluate"] == [4, 7, 11, 14]
    assert set(seen["on_log"]) == {3, 5, 8, 10, 13} | {4, 7, 11, 14}  # evaluations are logged
    seen = events(tmp_path / "b", rows=14, logging_steps="100st", eval_steps="6st", save_steps="45tok")
    assert (seen["on_evaluate"], seen["on_save"]) == ([6, 12, 14], [5, 9, 14])


def test_a_resumed_run_goes_on_with_the_same_intervals(tmp_path):
    options = {
        "rows": 14,
        "logging_steps": "100st",
        "eval_steps": "30tok",
        "save_steps": "30tok",
        "max_duration": "7st",
    }
    first = events(tmp_path, **options)
    rest = events(tmp_path, **options | {"max_duration": "14st"})
    assert first["on_save"] == [3, 6, 7] and rest["on_save"] == rest["on_evaluate"] == [9, 12, 14]


def test_intervals_of_time(tmp_path, monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(durations.time, "monotonic", lambda: next(clock) * 0.4)
    state = SimpleNamespace(epoch=0.0, num_input_tokens_seen=0)
    passing = durations.Passing(state)
    assert [passing.step(state, "2s", 5, "1min")[0] for _ in range(10)].count(True) == 2


def test_best_checkpoints_compare_intervals_of_one_kind():
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "output_dir": "out"}
    TrainingArguments(eval_steps="0.5ep", save_steps="1ep", **best)
    with pytest.raises(ConfigError, match="set save_steps=20000tok"):
        TrainingArguments(eval_steps="10ktok", save_steps="25ktok", **best)
    with pytest.raises(ConfigError, match="tokens and epochs cannot guarantee"):
        TrainingArguments(eval_steps="10ktok", save_steps="1ep", **best)


@pytest.mark.parametrize("name", ["logging_steps", "eval_steps", "save_steps"])
def test_an_interval_needs_a_known_unit_and_a_stream_has_no_epochs(name, tmp_path):
    with pytest.raises(ConfigError, match=f"{name}='5parsecs' must be a number above 0 with a unit"):
        TrainingArguments("out", **{name: "5parsecs"})
    assert getattr(TrainingArguments("out", **{name: "500st"}), name) == 500
    with pytest.raises(ValueError, match=f"{name}='1ep' counts epochs, but the training data has no known length"):
        events(tmp_path, max_steps=3, **{name: "1ep"})
