"""Signals, time limits and errors: the update is finished, a checkpoint is there, and the run goes on to the same
bits.
"""

import logging
import os
import pty
import shutil
import signal
import sys
import threading
import time
from collections import Counter

import pytest
import torch

from posttrain.core import TrainerCallback, TrainingArguments
from posttrain.core.errors import ConfigError
from posttrain.core.training import preemption
from tests import programs
from tests.contract.test_resume import ARGS, assert_same_run
from tests.contract.trainers import TRAINERS, weights

MAKE = TRAINERS["causal-lm"]


@pytest.fixture(autouse=True)
def interruptible():
    """Ctrl-C interrupts, also where the tests run in the background of a shell, which ignores it for them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class At(TrainerCallback):
    """Calls `what` at the given event of the given step."""

    def __init__(self, event, step, what):
        def hear(args, state, control, **kwargs):
            if state.global_step == step and not self.done:
                self.done = True
                what()

        self.done = False
        setattr(self, event, hear)


@pytest.fixture(autouse=True)
def looks_at_each_step(monkeypatch):
    monkeypatch.setattr(preemption, "INTERVAL", 0)


def send(number):
    return lambda: os.kill(os.getpid(), number)


def test_processes_agree_without_a_process_group_of_their_own():
    from torch.testing._internal.distributed import fake_pg

    torch.distributed.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    try:
        watch = preemption.Watch(world_size=2)
        assert [watch.due() for _ in range(5)] == [0] * 5
        watch._notice(signal.SIGTERM, None)
        assert 128 + signal.SIGTERM in [watch.due() for _ in range(200)]
        assert len(torch.distributed.distributed_c10d._world.pg_map) == 1
    finally:
        torch.distributed.destroy_process_group()


# ---- a file that asks for a checkpoint ----


def test_processes_agree_on_a_checkpoint_that_a_file_asks_for(tmp_path):
    from torch.testing._internal.distributed import fake_pg

    torch.distributed.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    try:
        watch = preemption.Watch(world_size=2, file=tmp_path / "save_now")
        (tmp_path / "save_now").touch()
        assert not any(watch.due() for _ in range(200)) and watch.asks_for_save
        assert not (tmp_path / "save_now").exists()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("strategy", ["no", "steps"])
def test_a_file_asks_for_a_checkpoint_and_the_run_goes_on(strategy, tmp_path):
    ask = At("on_step_end", 2, (tmp_path / "save_now").touch)
    trainer = MAKE(tmp_path, [ask], max_steps=4, save_strategy=strategy, save_steps=4)
    trainer.train()
    assert trainer.state.global_step == 4 and not (tmp_path / "save_now").exists()
    saved = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert saved == {"checkpoint-2"} | ({"checkpoint-4"} if strategy == "steps" else set())


# ---- durations ----


@pytest.mark.parametrize(
    ("text", "expected"), [(90, 90), (0.5, 0.5), ("90", 90), ("1.5", 1.5), ("1:30:00", 5400), ("2:00:00:05", 172805)]
)
def test_durations(text, expected):
    assert preemption.seconds(text) == expected


@pytest.mark.parametrize("text", ["soon", "1:30", "1:60:00", "", "0", "-3", "0:00:00", 0])
def test_what_is_no_duration_is_refused_with_the_config(text):
    with pytest.raises(ConfigError, match="max_time="):
        TrainingArguments(max_time=text)


# ---- signals ----


@pytest.mark.rotated
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("number", "error", "code"),
    [
        (signal.SIGTERM, SystemExit, 143),
        (signal.SIGINT, KeyboardInterrupt, 130),
        (signal.SIGHUP, SystemExit, 129),
    ],
)
@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step", "on_step_end", "on_prediction_step"])
def test_a_signal_ends_the_run_after_a_checkpoint_from_which_it_goes_on_to_the_same_bits(
    event, number, error, code, later, tmp_path, capfd
):
    changes = ARGS | dict(save_steps=100, save_async=later)
    straight = MAKE(tmp_path / "straight", **changes)
    straight.train()
    # Step 4 has an evaluation; the steps before have not.
    step = 4 if event == "on_prediction_step" else 2
    before = [signal.getsignal(n) for n in preemption.SIGNALS]
    stopped = MAKE(tmp_path / "run", callbacks=[At(event, step, send(number))], **changes)
    with pytest.raises(error) as caught:
        stopped.train()
    assert caught.value.code == code
    assert [signal.getsignal(n) for n in preemption.SIGNALS] == before
    at = step if event in ("on_step_end", "on_prediction_step") else step + 1
    assert stopped.state.global_step == at and [path.name for path in stopped.store.checkpoints()] == [
        f"checkpoint-{at}"
    ]
    assert not any("eval_loss" in record for record in stopped.state.log_history)
    assert "finishing this optimizer step" in capfd.readouterr().err
    resumed = MAKE(tmp_path / "run", **changes)
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(resumed, straight)


def test_a_signal_in_the_last_update_ends_the_program_too(tmp_path):
    total = 6
    trainer = MAKE(tmp_path, callbacks=[At("on_step_end", total, send(signal.SIGTERM))], **ARGS | dict(max_steps=total))
    with pytest.raises(SystemExit) as caught:
        trainer.train()
    assert caught.value.code == 143 and trainer.state.global_step == total
    again = MAKE(tmp_path, **ARGS | dict(max_steps=total))
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == total and "train_loss" in again.state.log_history[-1]


def test_a_checkpoint_that_is_there_already_is_not_written_again(tmp_path):
    trainer = MAKE(tmp_path, callbacks=[At("on_save", 3, send(signal.SIGTERM))], **ARGS | dict(eval_strategy="no"))
    with pytest.raises(SystemExit):
        trainer.train()
    assert trainer.store.path(4).is_dir()  # the signal came after the question of update 3
    assert trainer.state.global_step == 4


@pytest.mark.parametrize("changes", [{"save_strategy": "no"}, {"save_on_signal": False}])
def test_who_wants_no_checkpoint_has_signals_as_ever(changes, tmp_path):
    trainer = MAKE(tmp_path, callbacks=[At("on_step_begin", 1, send(signal.SIGINT))], **ARGS | changes)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 1


def test_a_handler_of_the_program_stays(tmp_path):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        MAKE(tmp_path, callbacks=[At("on_step_begin", 1, send(signal.SIGTERM))], **ARGS).train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [1]


def test_training_in_a_thread_leaves_signals_alone(tmp_path):
    failures = []

    def run():
        try:
            MAKE(tmp_path, **ARGS | dict(max_steps=2)).train()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start(), thread.join(60)
    assert failures == []


def test_the_name_that_transformers_has_for_it_is_understood(tmp_path):
    changes = ARGS | dict(save_strategy="no", enable_jit_checkpoint=True)
    with pytest.raises(SystemExit):
        MAKE(tmp_path, callbacks=[At("on_step_begin", 1, send(signal.SIGTERM))], **changes).train()
    assert (tmp_path / "checkpoint-2").is_dir()


CHILD = """
import sys, time, torch
from tests import programs
from tests.contract.test_resume import ARGS
from tests.contract.trainers import TRAINERS
from tests.core.training import test_preemption as here
out, mode, workers = sys.argv[1:]
class Slow(torch.utils.data.Dataset):
    def __init__(self, rows): self.rows = rows
    def __len__(self): return len(self.rows)
    def __getitem__(self, i):
        time.sleep(0.05)
        return self.rows[i]
class Tell(here.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print("step", state.global_step, flush=True)
if __name__ == "__main__":
    changes = ARGS | dict(save_steps=100, eval_strategy="no", dataloader_num_workers=int(workers))
    trainer = TRAINERS["causal-lm"](out, callbacks=[Tell()] if mode == "first" else None, **changes)
    trainer.train_dataset = Slow(trainer.train_dataset)
    trainer.train(resume_from_checkpoint=mode == "again")
    torch.save(here.weights(trainer), out + "/weights.pt")
"""


def child(out, mode, workers, **options):
    return programs.Program(["-c", CHILD, str(out), mode, str(workers)], **options)


@pytest.mark.long
@pytest.mark.rotated
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_whole_group_while_data_is_read(number, workers, tmp_path):
    """As a terminal and many schedulers send it: to the workers of the loader too."""
    first = child(tmp_path / "run", "first", workers, start_new_session=True)
    for line in first.stdout:
        if line == "step 2\n":
            break
    time.sleep(0.1)  # now it waits for rows
    os.killpg(first.pid, number)
    started = time.monotonic()
    _, err = first.communicate(timeout=60)
    assert first.returncode == 128 + number, err
    assert time.monotonic() - started < 20
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 1, err
    again = child(tmp_path / "run", "again", workers)
    assert again.wait(120) == 0, again.stderr.read()
    straight = MAKE(tmp_path / "straight", **ARGS | dict(save_steps=100, eval_strategy="no"))
    straight.train()
    expected = weights(straight)
    assert all(torch.equal(value, expected[name]) for name, value in torch.load(tmp_path / "run/weights.pt").items())


@pytest.mark.long
def test_a_run_whose_terminal_is_closed_saves_though_nobody_can_read_what_it_prints(tmp_path):
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", CHILD, str(tmp_path), "first", "2"])
    shown = b""
    while b"step 2" not in shown:
        shown += os.read(terminal, 1000)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 129, shown
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1


def test_a_second_signal_ends_at_once(tmp_path):
    first = child(tmp_path, "first", 0)
    for line in first.stdout:
        if line == "step 1\n":
            break
    os.kill(first.pid, signal.SIGTERM)
    time.sleep(0.02)
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait(10) == -signal.SIGTERM
    assert list(tmp_path.glob("checkpoint-*")) == []


# ---- time ----


def test_when_the_time_is_up_the_run_stops_with_a_checkpoint_and_can_go_on(tmp_path, caplog):
    changes = ARGS | dict(save_steps=100)
    straight = MAKE(tmp_path / "straight", **changes)
    straight.train()
    slow = At("on_step_begin", 2, lambda: time.sleep(1.2))
    stopped = MAKE(tmp_path / "run", callbacks=[slow], max_time=1.0, **changes)
    with caplog.at_level(logging.WARNING, "posttrain"):
        output = stopped.train()
    assert "stops after optimizer step 3. To go on from" in caplog.text and str(stopped.store.path(3)) in caplog.text
    assert output.global_step == stopped.state.global_step == 3 and stopped.store.path(3).is_dir()
    resumed = MAKE(tmp_path / "run", max_time="1:00:00", **changes)
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(resumed, straight)


# ---- errors ----


def raising():
    raise ValueError("broken")


@pytest.mark.parametrize("event", ["on_step_begin", "on_substep_end", "on_step_end", "on_evaluate"])
def test_an_error_leaves_the_last_whole_update(event, tmp_path, caplog):
    changes = ARGS | dict(save_steps=100, save_on_exception=True)
    straight = TRAINERS["dropout"](tmp_path / "straight", **changes)
    straight.train()
    step = 4 if event in ("on_evaluate", "on_step_end") else 3
    failing = TRAINERS["dropout"](tmp_path / "run", callbacks=[At(event, step, raising)], **changes)
    with pytest.raises(ValueError, match="broken"), caplog.at_level(logging.WARNING, "posttrain"):
        failing.train()
    assert f"checkpoint-{step} holds the last whole step" in caplog.text
    resumed = TRAINERS["dropout"](tmp_path / "run", **changes)
    resumed.train(resume_from_checkpoint=True)
    if event != "on_evaluate":  # there the evaluation was in the log when the error came, and is made again
        assert_same_run(resumed, straight)
    expected = weights(straight)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())


@pytest.mark.parametrize(
    ("event", "says"),
    [("on_save", "checkpoint-2 holds the last whole step"), ("on_step_end", "no checkpoint could be saved")],
)
def test_the_warning_says_of_a_failed_callback_and_of_a_failed_save_what_is_there(event, says, tmp_path, caplog):
    folder = tmp_path / "run"

    def fail():
        callback.done = False  # the save after the error meets it again
        if event == "on_step_end":
            shutil.rmtree(folder)
            folder.write_text("no folder any more")
        raise ValueError("broken")

    callback = At(event, 2, fail)
    failing = MAKE(folder, callbacks=[callback], **ARGS | dict(save_steps=2, save_on_exception=True))
    with pytest.raises(ValueError, match="broken"), caplog.at_level(logging.WARNING, "posttrain"):
        failing.train()
    [said] = [text for text in caplog.messages if text.startswith("Training ended by ValueError")]
    assert says in said and (folder / "checkpoint-2" / "manifest.json").exists() == (event == "on_save")


def test_to_remember_the_last_whole_update_waits_for_nothing(tmp_path, monkeypatch):
    reads = Counter()
    for name in ("item", "tolist", "__float__"):
        own = vars(torch._C.TensorBase)[name] if name in vars(torch._C.TensorBase) else vars(torch.Tensor)[name]
        monkeypatch.setattr(torch.Tensor, name, counting(own, reads), raising=False)
    found = []
    for remembers in (False, True):
        reads.clear()
        MAKE(tmp_path / str(remembers), **ARGS | dict(save_strategy="no", save_on_exception=remembers)).train()
        found.append(dict(reads))
    assert found[0] == found[1] and found[0]


def counting(method, reads):
    def counted(self, *args):
        reads[method.__name__] += 1
        return method(self, *args)

    return counted


def test_an_error_while_the_weights_move_leaves_no_checkpoint(tmp_path, caplog):
    changes = ARGS | dict(save_steps=100, save_on_exception=True)
    failing = MAKE(tmp_path, callbacks=[At("on_optimizer_step", 2, raising)], **changes)
    with pytest.raises(ValueError, match="broken"), caplog.at_level(logging.WARNING, "posttrain"):
        failing.train()
    assert "the weights were being updated" in caplog.text and failing.store.checkpoints() == []


def test_without_being_asked_an_error_saves_nothing(tmp_path):
    failing = MAKE(tmp_path, callbacks=[At("on_step_begin", 3, raising)], **ARGS | dict(save_steps=100))
    with pytest.raises(ValueError, match="broken"):
        failing.train()
    assert failing.store.checkpoints() == []
