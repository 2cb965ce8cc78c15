"""A run that was stopped anywhere goes on to the same bits: weights, optimizer, schedule, log."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from posttrain.core import EarlyStoppingCallback, TrainerCallback
from posttrain.core.checkpoint import blocks, codec
from posttrain.core.checkpoint.store import Store
from posttrain.core.logging.metrics import is_timing
from tests import programs, tiny
from tests.contract.trainers import ROWS, TRAINERS, pad, weights

ARGS = dict(
    optim="adamw_torch", learning_rate=1e-2, per_device_train_batch_size=3, gradient_accumulation_steps=2, save_steps=1,
    save_strategy="steps", logging_steps=3, eval_strategy="steps", eval_steps=4,
)  # fmt: skip


class Stop(TrainerCallback):
    """Ends the run like a power cut, at the beginning of a step."""

    def __init__(self, step, how):
        self.step, self.how = step, how

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.how()


class At(TrainerCallback):
    """Does `how` at one event of one step."""

    def __init__(self, event, step, how):
        setattr(self, event, lambda args, state, control, **kwargs: how() if state.global_step == step else None)


class PowerCut(Exception):
    pass


def cut():
    raise PowerCut


class Ask(TrainerCallback):
    """Sets a flag of the control at one event of one step, as a time limit or a deadline of the user's own does."""

    def __init__(self, event, step, flag="should_training_stop"):
        def hear(args, state, control, **kwargs):
            self.calls += state.global_step == step
            if state.global_step == step and self.calls == 1:
                setattr(control, flag, True)

        self.calls = 0
        setattr(self, event, hear)


def tree_equal(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(tree_equal(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(tree_equal, left, right))
    return left == right


def log_of(trainer):
    return [{k: v for k, v in record.items() if not is_timing(k)} for record in trainer.state.log_history]


def assert_same_run(resumed, straight):
    assert resumed.state.global_step == straight.state.global_step
    expected = weights(straight)
    assert [k for k, v in weights(resumed).items() if not torch.equal(v, expected[k])] == []
    assert tree_equal(resumed.optimizer.state_dict(), straight.optimizer.state_dict())
    assert resumed.lr_scheduler.state_dict() == straight.lr_scheduler.state_dict()
    assert log_of(resumed) == log_of(straight)


class Copies(TrainerCallback):
    """Copies the folder of a run at the beginning of each step but the first: what a power cut there leaves."""

    def __init__(self, folder):
        self.folder = folder

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step:
            shutil.copytree(args.output_dir, self.folder / f"cut-at-{state.global_step}", copy_function=self.copy)

    def copy(self, source, target):
        """By a second name for the files of checkpoints, which are written once."""
        (os.link if Path(source).parent.name.startswith("checkpoint-") else shutil.copy2)(source, target)


class EpochEnds(TrainerCallback):
    """Records the steps after which epochs end: with dynamic sampling it depends on the rewards."""

    def __init__(self):
        self.steps = []

    def on_epoch_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)


@pytest.fixture(scope="module")
def straight_run(tmp_path_factory):
    """A trainer that has trained with ARGS, its first weights, the folder of its `Copies`, and its `EpochEnds`.

    Each is trained once. Only its numbers are looked at.
    """
    known = {}

    def trained(name):
        if name not in known:
            folder, ends = tmp_path_factory.mktemp(name), EpochEnds()
            straight = TRAINERS[name](folder / "straight", callbacks=[Copies(folder), ends], **ARGS)
            before = weights(straight)
            straight.train()
            known[name] = straight, before, folder, ends
        return known[name]

    return trained


@pytest.mark.rotated
@pytest.mark.parametrize("name", TRAINERS)
def test_resuming_at_any_step_is_bit_exact(name, straight_run, tmp_path):
    straight, before, folder, _ = straight_run(name)
    total = straight.state.global_step
    assert total >= 4 and any(not torch.equal(value, before[key]) for key, value in weights(straight).items())
    for step in sorted({1, total // 2, total // 2 + 1, total - 1}):
        out = tmp_path / f"cut-at-{step}"
        shutil.copytree(folder / out.name, out)
        resumed = TRAINERS[name](out, **ARGS)
        torch.rand(7)  # whatever happened before must not matter
        resumed.train(resume_from_checkpoint=True)
        assert_same_run(resumed, straight)


@pytest.mark.rotated(one_in=8)
@pytest.mark.parametrize("name", TRAINERS)
def test_checkpoints_written_in_the_background_resume_to_the_same_bits(name, straight_run, tmp_path, monkeypatch):
    straight = straight_run(name)[0]
    monkeypatch.setattr(blocks, "SMALL", 1)  # else files as small as these are written at once
    step = straight.state.global_step // 2
    with pytest.raises(PowerCut):
        TRAINERS[name](tmp_path / "cut", callbacks=[Stop(step, cut)], save_async=True, **ARGS).train()
    resumed = TRAINERS[name](tmp_path / "cut", save_async=True, **ARGS)
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(resumed, straight)
    assert all(resumed.store.verify(path) == [] for path in resumed.store.checkpoints())


# ---- runs that a callback stopped ----


def stops(straight, edge):
    """Where a callback may stop a run whose first epoch ends with step `edge`.

    Each place is (event, step at which it is heard, updates done when the run has ended).
    """
    last = straight.state.global_step - 1
    places = [
        ("on_substep_end", 0, 1), ("on_step_begin", 1, 2), ("on_log", 3, 3), ("on_epoch_end", edge, edge),
        ("on_evaluate", 4, 4), ("on_save", edge + 1, edge + 1), ("on_optimizer_step", edge + 1, edge + 2),
        ("on_step_end", last, last),
    ]  # fmt: skip
    done, in_order = 0, []
    for place in places:
        if place[2] > done:
            done = place[2]
            in_order.append(place)
    return in_order


def stopped_again_and_again(make, out, places, **changes):
    """A run that a callback stops at each of `places`, gone on with each time, and then to its end."""
    for event, step, done in places:
        trainer = make(out, callbacks=[Ask(event, step)], **changes)
        trainer.train(resume_from_checkpoint=True if Store(out).checkpoints() else None)
        assert trainer.state.global_step == done, (event, step)
    resumed = make(out, **changes)
    resumed.train(resume_from_checkpoint=True)
    return resumed


def assert_goes_on_wherever_it_is_stopped(name, straight_run, folder, first=0, every=1):
    straight, _, _, ends = straight_run(name)
    places = stops(straight, ends.steps[0])[first::every]
    assert_same_run(stopped_again_and_again(TRAINERS[name], folder / "stopped", places, **ARGS), straight)


@pytest.mark.rotated(one_in=8)
@pytest.mark.parametrize("name", TRAINERS)
def test_a_run_that_a_callback_stopped_goes_on_to_the_same_bits(name, straight_run, tmp_path):
    assert_goes_on_wherever_it_is_stopped(name, straight_run, tmp_path, first=list(TRAINERS).index(name) % 2, every=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_a_run_that_a_callback_stopped_at_every_event_goes_on_to_the_same_bits(name, straight_run, tmp_path):
    assert_goes_on_wherever_it_is_stopped(name, straight_run, tmp_path)


@pytest.mark.rotated
@pytest.mark.parametrize("strategy", ["steps", "epoch"])
@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_begin"])
@pytest.mark.parametrize("name", ["causal-lm", "dropout", "sft-packed", "grpo", "grpo-reused"])
def test_the_rest_of_an_epoch_in_which_a_callback_stopped_is_trained_when_the_run_goes_on(
    name, event, strategy, tmp_path
):
    changes = ARGS | dict(save_strategy="epoch", eval_strategy=strategy, logging_strategy=strategy, eval_steps=3)
    straight = TRAINERS[name](tmp_path / "straight", **changes)
    straight.train()
    edge = straight.state.global_step // 2
    places = [(event, s, s) for s in ([edge] if event == "on_epoch_begin" else [edge - 1, edge])]
    assert_same_run(stopped_again_and_again(TRAINERS[name], tmp_path / "stopped", places, **changes), straight)


@pytest.mark.parametrize("name", ["causal-lm", "sft-packed", "grpo-reused"])
def test_the_rest_of_an_epoch_in_which_max_steps_ended_the_run_is_trained_with_a_larger_max_steps(name, tmp_path):
    changes = ARGS | dict(save_strategy="epoch", eval_strategy="no", lr_scheduler_type="constant")
    straight = TRAINERS[name](tmp_path / "straight", **changes)
    straight.train()
    total = straight.state.global_step
    for step in sorted({1, total // 2, total - 1}):  # inside epochs, and where one ends
        out = tmp_path / f"{step}"
        TRAINERS[name](out, **changes | dict(max_steps=step)).train()
        resumed = TRAINERS[name](out, **changes | dict(max_steps=total))
        resumed.train(resume_from_checkpoint=True)
        expected = weights(straight)
        assert resumed.state.global_step == total and resumed.state.epoch == straight.state.epoch
        assert [k for k, v in weights(resumed).items() if not torch.equal(v, expected[k])] == []
        assert tree_equal(resumed.optimizer.state_dict()["state"], straight.optimizer.state_dict()["state"])


@pytest.mark.parametrize("name", ["causal-lm", "grpo-reused"])
def test_an_epoch_that_a_callback_ended_is_not_taken_up_again(name, tmp_path):
    def make(out, *callbacks):
        return TRAINERS[name](out, callbacks=[Ask("on_step_end", 2, "should_epoch_stop"), *callbacks], **ARGS)

    straight = make(tmp_path / "straight")
    straight.train()
    with pytest.raises(PowerCut):
        make(tmp_path / "cut", At("on_epoch_end", 2, cut)).train()
    resumed = make(tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)
    assert straight.state.global_step < TRAINERS[name](tmp_path / "plain", **ARGS).train().global_step
    assert_same_run(resumed, straight)


def test_early_stopping_stops_a_resumed_run_again_and_says_so(tmp_path, caplog):
    straight = of_kind("early stopping, best model", tmp_path)
    straight.train()
    stopped_at = straight.state.global_step
    assert stopped_at < straight.state.max_steps
    again = of_kind("early stopping, best model", tmp_path)
    again.train(resume_from_checkpoint=True)
    assert_same_run(again, straight)
    assert f"stopped the run at step {stopped_at}" in caplog.text and "restore_callback_states" in caplog.text
    on = of_kind("early stopping, best model", tmp_path)
    on.args.restore_callback_states_from_checkpoint = False
    on.train(resume_from_checkpoint=True)
    assert on.state.global_step > stopped_at


# ---- kinds of data, of schedules, of precision ----


def random_pad(rows):
    """A collator that draws random numbers of every kind."""
    batch = pad(rows)
    drawn = torch.rand(batch["input_ids"].shape), np.random.rand(*batch["input_ids"].shape), random.random()
    batch["input_ids"] = torch.where(
        drawn[0] + torch.from_numpy(drawn[1]) < 0.3 + 0.1 * drawn[2], 4, batch["input_ids"]
    )
    return batch


class RandomRows(torch.utils.data.Dataset):
    """Rows that are drawn as they are read, and counts of how often each was read."""

    def __init__(self):
        self.rows, self.read = tiny.token_rows(ROWS), []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.read.append(index)
        row = self.rows[index]
        noise = torch.randint(4, 9, (len(row["input_ids"]),)).tolist()
        return row | {"input_ids": [a if b != 5 else b for a, b in zip(row["input_ids"], noise, strict=True)]}


class Stream(torch.utils.data.IterableDataset):
    """A stream that knows where it is, and how many rows were read of it."""

    def __init__(self):
        self.rows, self.at, self.read = tiny.token_rows(ROWS), 0, 0

    def __iter__(self):
        start, self.at = self.at, 0
        for number in range(start, len(self.rows)):
            self.at, self.read = number + 1, self.read + 1
            yield self.rows[number]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def hf(num_workers=0, shuffled=False):
    def make():
        dataset = datasets.Dataset.from_list(tiny.token_rows(ROWS)).to_iterable_dataset(num_shards=2)
        return dataset.shuffle(seed=3, buffer_size=5) if shuffled else dataset

    return make


EARLY = dict(
    metric_for_best_model="loss",
    load_best_model_at_end=True,
    eval_steps=1,
    save_steps=1,
    learning_rate=0.5,
    num_train_epochs=4,
)
#: What differs from `ARGS`: arguments, and parts of the trainer that are replaced.
KINDS = {
    "random rows": (dict(), dict(train_dataset=RandomRows)),
    "random rows, 2 workers": (dict(dataloader_num_workers=2), dict(train_dataset=RandomRows)),
    "random collator": (dict(), dict(data_collator=lambda: random_pad)),
    "random collator, 2 workers": (dict(dataloader_num_workers=2), dict(data_collator=lambda: random_pad)),
    "stream": (dict(max_steps=9), dict(train_dataset=Stream)),
    "stream of datasets": (dict(max_steps=9), dict(train_dataset=hf())),
    "stream of datasets, shuffled": (dict(max_steps=9), dict(train_dataset=hf(shuffled=True))),
    "stream of datasets, 2 workers": (dict(max_steps=9, dataloader_num_workers=2), dict(train_dataset=hf())),
    "sequential": (dict(train_sampling_strategy="sequential"), dict()),
    "group_by_length": (dict(train_sampling_strategy="group_by_length"), dict()),
    "batch_rebalance": (dict(train_sampling_strategy="batch_rebalance"), dict()),
    "drop_last": (dict(dataloader_drop_last=True), dict()),
    "bf16": (dict(bf16=True), dict()),
    "cosine with warm-up": (dict(lr_scheduler_type="cosine", warmup_steps=3), dict()),
    "restarts": (dict(lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 2}), dict()),
    "plateau": (dict(lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0}, eval_steps=1),
    dict()), "inside a logging interval": (dict(logging_steps=5), dict()),
    "adafactor": (dict(optim="adafactor"), dict()),
    "early stopping, best model": (EARLY, dict()),
    "averaged weights": (dict(ema_decay=0.9), dict()),
}  # fmt: skip


def of_kind(kind, out, callbacks=()):
    changes, parts = KINDS[kind]
    callbacks = [*callbacks, *([EarlyStoppingCallback(2)] if changes is EARLY else [])]
    trainer = TRAINERS["dropout"](out, callbacks=callbacks, **ARGS | changes)
    for name, make in parts.items():
        setattr(trainer, name, make())
    return trainer


@pytest.mark.rotated
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_goes_on_to_the_same_bits(kind, tmp_path):
    straight = of_kind(kind, tmp_path / "straight")
    straight.train()
    total = straight.state.global_step
    assert total < straight.state.max_steps if KINDS[kind][0] is EARLY else total == straight.state.max_steps
    for step in sorted({total // 2, total - 1}):
        out = tmp_path / f"cut-at-{step}"
        with pytest.raises(PowerCut):
            of_kind(kind, out, [Stop(step, cut)]).train()
        resumed = of_kind(kind, out)
        torch.rand(3), np.random.rand(5), random.random()
        resumed.train(resume_from_checkpoint=True)
        assert_same_run(resumed, straight)


@pytest.mark.rotated
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_that_a_callback_stopped_goes_on_to_the_same_bits(kind, tmp_path):
    straight = of_kind(kind, tmp_path / "straight")
    straight.train()
    total = straight.state.global_step
    for event, step in {"on_substep_end": total // 2, "on_step_end": total - 1}.items():
        of_kind(kind, tmp_path / "stopped", [Ask(event, step)]).train(resume_from_checkpoint=event == "on_step_end")
    resumed = of_kind(kind, tmp_path / "stopped")
    torch.rand(3), np.random.rand(5), random.random()
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(resumed, straight)


@pytest.mark.parametrize("kind", ["random rows", "stream"])
def test_going_on_reads_no_row_again(kind, tmp_path):
    straight = of_kind(kind, tmp_path / "straight")
    straight.train()
    with pytest.raises(PowerCut):
        of_kind(kind, tmp_path / "cut", [Stop(3, cut)]).train()
    resumed = of_kind(kind, tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)
    before, after = straight.train_dataset.read, resumed.train_dataset.read
    if kind == "stream":
        assert after == before - 18  # three updates of two micro-batches of three rows
    else:
        assert after == before[18:]


def test_a_stream_that_can_be_read_once_is_said_to_be(tmp_path, caplog):
    def once():
        rows = iter(tiny.token_rows(ROWS) * 3)

        class Once(torch.utils.data.IterableDataset):
            def __iter__(self):
                return rows

        return Once()

    KINDS["once"] = (dict(max_steps=5), dict(train_dataset=once))
    try:
        with pytest.raises(PowerCut):
            of_kind("once", tmp_path, [Stop(2, cut)]).train()
        of_kind("once", tmp_path).train(resume_from_checkpoint=True)
    finally:
        del KINDS["once"]
    assert "resuming may not reproduce its order" in caplog.text


def test_ignoring_the_position_of_the_data_starts_the_epoch_afresh(tmp_path):
    with pytest.raises(PowerCut):
        of_kind("random rows", tmp_path, [Stop(2, cut)]).train()
    resumed = TRAINERS["dropout"](tmp_path, **ARGS | dict(ignore_data_skip=True, max_steps=3))
    resumed.train_dataset = RandomRows()
    first = TRAINERS["dropout"](tmp_path / "first", **ARGS | dict(max_steps=1))
    first.train_dataset = RandomRows()
    resumed.train(resume_from_checkpoint=True), first.train()
    assert resumed.train_dataset.read == first.train_dataset.read and resumed.state.global_step == 3


@pytest.mark.parametrize("save", ["steps", "epoch"])
def test_resuming_at_the_edge_of_an_epoch_repeats_nothing_and_skips_nothing(save, tmp_path):
    changes = ARGS | dict(save_strategy=save, eval_strategy="epoch", logging_strategy="epoch", num_train_epochs=3)
    straight = TRAINERS["causal-lm"](tmp_path / "straight", **changes)
    straight.train()
    edge = straight.state.global_step // 3
    with pytest.raises(PowerCut):
        TRAINERS["causal-lm"](tmp_path / "cut", callbacks=[Stop(edge, cut)], **changes).train()
    resumed = TRAINERS["causal-lm"](tmp_path / "cut", **changes)
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(resumed, straight)


def test_a_finished_run_is_not_trained_further(tmp_path):
    first = TRAINERS["causal-lm"](tmp_path, **(ARGS | dict(max_steps=5)))
    first.train()
    again = TRAINERS["causal-lm"](tmp_path, **(ARGS | dict(max_steps=5)))
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 5
    expected = weights(first)
    assert all(torch.equal(value, expected[key]) for key, value in weights(again).items())


class Heard(TrainerCallback):
    """Lists the events of epochs, evaluations and saves."""

    def __init__(self):
        self.events = []
        for event in ("on_epoch_begin", "on_epoch_end", "on_evaluate", "on_save"):
            setattr(self, event, lambda *args, event=event, **kwargs: self.events.append(event))


LAST = ["on_epoch_begin", "on_epoch_end", "on_evaluate"]


@pytest.mark.parametrize(
    ("how", "at"), [({"max_steps": 5}, 1.25), ({"max_duration": "250tok"}, 0.75), ({"max_steps": 4}, 1)]
)
@pytest.mark.parametrize(("save", "left"), [("epoch", []), ("best", []), ("steps", LAST)])
def test_a_finished_run_that_is_resumed_does_and_logs_nothing_twice(save, left, how, at, tmp_path):
    """Also where it ended inside an epoch. A checkpoint of the last step alone stands before the end of the epoch."""
    changes = dict(save_strategy=save, save_steps=100, eval_strategy="epoch", per_device_train_batch_size=6)
    changes |= dict(metric_for_best_model="loss", logging_steps=3, **how)
    first = TRAINERS["causal-lm"](tmp_path, **changes)
    first.train()
    assert first.state.epoch == at
    heard = Heard()
    again = TRAINERS["causal-lm"](tmp_path, callbacks=[heard], **changes)
    again.train(resume_from_checkpoint=True)
    assert heard.events == left
    assert log_of(again) == log_of(first)
    assert [record["epoch"] for record in log_of(again) if "eval_loss" in record][-1] == at


def test_an_evaluation_at_the_end_of_a_run_that_a_signal_broke_off_is_made_once(tmp_path):
    changes = dict(save_strategy="epoch", eval_strategy="epoch", per_device_train_batch_size=6, max_steps=5)
    straight = TRAINERS["causal-lm"](tmp_path / "straight", **changes)
    straight.train()
    stop = At("on_prediction_step", 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        TRAINERS["causal-lm"](tmp_path / "cut", callbacks=[stop], **changes).train()
    heard = Heard()
    resumed = TRAINERS["causal-lm"](tmp_path / "cut", callbacks=[heard], **changes)
    resumed.train(resume_from_checkpoint=True)
    assert heard.events == ["on_evaluate", "on_save"]
    assert_same_run(resumed, straight)


CHILD = """
import os, signal, sys
from tests.contract.test_resume import ARGS, Stop
from tests.contract.trainers import TRAINERS
name, out, step = sys.argv[1:]
stop = [Stop(int(step), lambda: os.kill(os.getpid(), signal.SIGKILL))] if step != "never" else None
trainer = TRAINERS[name](out, callbacks=stop, **ARGS)
trainer.train(resume_from_checkpoint=step == "never")
"""


@pytest.mark.parametrize(("name", "step"), [("causal-lm", 3), ("sft-lora", 2)])
def test_a_killed_process_is_continued_by_a_new_one(name, step, tmp_path):
    straight = TRAINERS[name](tmp_path / "straight", **ARGS)
    straight.train()
    killed, finished = (
        programs.run(["-c", CHILD, name, str(tmp_path / "killed"), until]) for until in (str(step), "never")
    )
    assert killed.returncode == -signal.SIGKILL
    assert finished.returncode == 0, finished.stderr
    last = f"checkpoint-{straight.state.global_step}"
    theirs, ours = tmp_path / "killed" / last, tmp_path / "straight" / last
    assert tree_equal(codec.load_tree(theirs / "optimizer"), codec.load_tree(ours / "optimizer"))
    assert tree_equal(codec.load_tree(theirs / "rank-0"), codec.load_tree(ours / "rank-0"))
    for file in ours.glob("*.safetensors"):
        assert file.read_bytes() == (theirs / file.name).read_bytes()


BUSY = """
import sys, torch
from posttrain.core.checkpoint import blocks
from tests.contract.test_resume import ARGS
from tests.contract.trainers import TRAINERS
blocks.SMALL = 1
changes = dict(save_async=sys.argv[2] == "True", save_steps=2, max_steps=100_000)
trainer = TRAINERS["causal-lm"](sys.argv[1], **ARGS | changes)
class Tell(__import__("posttrain.core").core.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print("step", state.global_step, flush=True)
trainer.add_callback(Tell())
trainer.train(resume_from_checkpoint=True if trainer.store.checkpoints() else None)
"""


def kills(count, later, out):
    """Kill a run that saves every other update at random moments, and go on each time: what it had done when it
    died.
    """
    draw = random.Random(0)
    reached = 0
    for _ in range(count):
        child = programs.Program(["-c", BUSY, str(out), str(later)])
        told = (line for line in child.stdout if line.startswith("step "))
        first = next(told, "")
        assert first, child.stderr.read()
        assert int(first.split()[1]) > reached - 2 - 2 * later, "more than save_steps updates were lost"
        started = time.perf_counter()
        some = [
            next(told) for _ in range(draw.randrange(6))
        ]  # of the updates, and then a part of one, however long it takes
        each = (time.perf_counter() - started) / len(some) if some else 0.1
        time.sleep(draw.uniform(0, each))
        child.kill()
        lines = [line.split() for line in [first, *some, *child.stdout.read().splitlines()]]
        child.wait()
        reached = max(int(words[1]) for words in lines if len(words) == 2 and words[0] == "step" and words[1].isdigit())
        named = Store(out).checkpoints()
        assert [path for path in named if Store(out).verify(path)] == []
    return reached


@pytest.mark.parametrize("later", [False, True])
def test_a_run_killed_at_random_moments_goes_on_from_a_whole_checkpoint(later, tmp_path):
    assert kills(3, later, tmp_path) > 0


@pytest.mark.slow
@pytest.mark.parametrize("later", [False, True])
def test_a_run_killed_at_fifty_random_moments_goes_on_from_a_whole_checkpoint(later, tmp_path):
    assert kills(50, later, tmp_path) > 50
