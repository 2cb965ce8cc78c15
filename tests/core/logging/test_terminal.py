"""What a terminal shows of a run: bars, records and messages, each in lines of its own."""

import fcntl
import logging
import os
import struct
import subprocess
import sys
import termios
import threading
import warnings

import pytest

from posttrain.core import Trainer, TrainerCallback, TrainerState, TrainingArguments
from posttrain.core.callbacks import PrinterCallback
from posttrain.core.logging import terminal
from posttrain.core.logging.trackers import set_verbosity
from tests import tiny
from tests.contract.trainers import arguments, pad


def screen(written: str) -> list[str]:
    """The lines that a terminal shows: a bar is drawn over itself, and text that follows one stands beside it."""
    lines, row, column = [""], 0, 0
    written = written.replace("\x1b[A", "\x01")
    for letter in written:
        if letter == "\r":
            column = 0
        elif letter == "\x01":
            row = max(row - 1, 0)
        elif letter == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        else:
            line = lines[row].ljust(column)
            lines[row], column = line[:column] + letter + line[column + 1 :], column + 1
    return [line.rstrip() for line in lines if line.strip()]


@pytest.fixture
def on_a_terminal(monkeypatch):
    """`on_a_terminal(function)`: the lines on the terminal after it was called."""

    def run(function):
        reader, writer = os.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        stream, parts = os.fdopen(writer, "w", buffering=1), []

        def read():
            while part := os.read(reader, 4096):
                parts.append(part)
                if b"\x04" in part:
                    return

        thread = threading.Thread(target=read)
        thread.start()
        log = logging.getLogger("posttrain")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream), patch.setattr(sys, "stderr", stream)
            patch.setattr(log, "handlers", []), patch.setattr(log, "propagate", False)
            function()
            stream.write("\x04"), stream.flush()
            thread.join()
            stream.close()
        os.close(reader)
        return screen(b"".join(parts).decode().replace("\x04", ""))

    return run


def test_messages_and_records_do_not_run_into_the_bar(on_a_terminal, tmp_path):
    class Talks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            logging.getLogger("posttrain.test").info("a message at step %d", state.global_step)
            terminal.write(f"a table at step {state.global_step}")

    def train():
        set_verbosity(logging.INFO)
        options = dict(max_steps=4, eval_strategy="steps", eval_steps=2, logging_steps=1, disable_tqdm=False)
        args = arguments(TrainingArguments, tmp_path, **options)
        Trainer(
            tiny.causal_lm(), args, pad, tiny.token_rows(8), tiny.token_rows(4, seed=1), callbacks=[Talks()]
        ).train()

    lines = on_a_terminal(train)
    for step in range(1, 5):
        assert f"INFO a message at step {step}" in lines and f"a table at step {step}" in lines
    assert len([line for line in lines if line.startswith("eval_loss ")]) == 2
    bars = [line for line in lines if "step" in line and "%|" in line]
    assert len(bars) == 1, lines
    assert "4/4" in bars[0] and bars[0].startswith("100%")


RECORD = {f"eval_completions/{name}": 0.5 for name in ("mean_length", "min_length", "max_length", "clipped_ratio")}
RECORD |= {f"eval_{name}": 0.25 for name in ("runtime", "samples_per_second", "steps_per_second", "loss", "reward")}
RECORD |= {f"eval_sampling/{name}": 1.0 for name in "abcdef"} | {"eval_rewards/right/mean": 0.125, "epoch": 1.0}


def test_a_record_of_many_numbers_is_shown_by_those_that_people_read():
    shown = terminal.line(RECORD)
    assert len(shown) < 240 and "runtime" not in shown and "per_second" not in shown
    for text in ("eval_loss 0.25", "eval_reward 0.25", "eval_rewards/right/mean 0.125", "epoch 1"):
        assert text in shown.split("  ")
    assert shown.endswith(f"({len(RECORD) - 3 - terminal.SHOWN} more in log.jsonl)")
    assert terminal.line({"loss": 1.23456, "learning_rate": 1e-5}) == "loss 1.235  learning_rate 1e-05"
    assert terminal.line({"train_runtime": 2.0}) == "train_runtime 2"  # there is nothing else to show


@pytest.mark.parametrize("watched", ["rewards/margins", "eval_rewards/accuracies", "frac_reward_zero_std"])
def test_what_the_guides_say_to_watch_is_shown(watched):
    others = (
        "rewards/chosen",
        "rewards/rejected",
        "mean_token_accuracy",
        "reward_std",
        "rewards/right/mean",
        "entropy",
    )
    record = dict.fromkeys(
        ("loss", *others, *(f"logps/{name}" for name in "abc"), watched, "learning_rate", "epoch"), 0.5
    )
    assert f"{watched} 0.5" in terminal.line(record).split("  ")


def test_lines_without_a_bar_begin_with_the_step_and_end_with_the_pace(capsys):
    state = TrainerState(global_step=3, max_steps=4)
    logs = {"loss": 2.0, "perf/tokens_per_second": 1234.0, "perf/time_left_seconds": 61.0, "perf/step_seconds": 0.1}
    PrinterCallback().on_log(None, state, None, logs=logs)
    assert capsys.readouterr().out == "step 3/4  loss 2  (1,234 tok/s, 1:01 left)\n"


class OnlyWrites:
    """What scripts put in the place of a stream, to keep a copy of it."""

    def write(self, text):
        return len(text)

    def flush(self):
        pass


@pytest.mark.parametrize("stream", [None, OnlyWrites(), open(os.devnull, "w")], ids=["none", "writes", "file"])
def test_a_stream_that_is_no_terminal_shows_a_record_whole(stream, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", stream), monkeypatch.setattr(sys, "stderr", stream)
    assert not terminal.draws_bars() and not terminal.is_terminal(stream)
    assert terminal.line({"loss": 1.5, "x" * 90: 2}) == f"loss 1.5  {'x' * 90} 2"
    args = arguments(TrainingArguments, tmp_path, max_steps=1)
    trainer = Trainer(tiny.causal_lm(), args, pad, tiny.token_rows(8))
    assert trainer.train().global_step == 1


def test_what_a_library_prints_goes_into_no_file_where_the_streams_were_closed(tmp_path):
    program = """
import os, sys
from posttrain.core.logging import terminal
terminal.open_streams()
files = [open(path, "w") for path in sys.argv[1:]]
print("of Python", file=sys.stderr), input if sys.stdin.read() else print("of Python")
os.write(1, b"of a library"), os.write(2, b"of a library")
for file in files:
    file.write("whole"), file.close()
subprocess = __import__("subprocess").run([sys.executable, "-c", "print('of a child')"])
sys.exit(subprocess.returncode)
"""
    paths = [str(tmp_path / name) for name in "abc"]
    command = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", sys.executable, "-c", program, *paths]
    assert subprocess.run(command).returncode == 0
    assert [open(path).read() for path in paths] == ["whole"] * 3


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_under_the_output_is_one_sentence_and_the_exit_code_stays():
    program = "import sys; from posttrain.cli import main; sys.exit(main(['env']))"
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" > /dev/full', "sh", sys.executable, "-c", program], capture_output=True
    )
    said = [line for line in done.stderr.decode().splitlines() if "standard output" in line]
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    assert said == [
        "The standard output cannot be written: No space left on device. Nothing more is printed there, and the "
        "command goes on. Free some space."
    ]


def test_a_warning_that_repeats_is_written_once_and_counted(capsys, monkeypatch):
    log = logging.getLogger("posttrain.repeats")
    monkeypatch.setattr(log, "propagate", False)
    monkeypatch.setattr(log, "handlers", [terminal.Handler()])
    for step in range(12):
        log.warning("Step %d was left out.", step)
    log.warning("Another one.")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["Step 0 was left out.", "Step 9 was left out. (the 10th time)", "Another one."]


def test_noise_of_other_libraries_is_left_out_and_their_other_messages_are_not(caplog, monkeypatch):
    terminal.quiet()
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    for name in ("bitsandbytes", "bitsandbytes.backends", "bitsandbytes.backends.cpu", log.name):  # as if not imported
        for attribute, value in {"propagate": True, "disabled": False, "level": logging.NOTSET}.items():
            monkeypatch.setattr(logging.getLogger(name), attribute, value)
    log.warning("Failed to load CPU gemm_4bit_forward from somewhere: %s", "no kernels")
    log.warning("The weights are broken.")
    assert caplog.messages == ["The weights are broken."]
    filters = len(log.filters)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        terminal.quiet()
        warnings.warn("`is_gradient_checkpointing` is deprecated and will be removed", FutureWarning, stacklevel=1)
        warnings.warn("Another one", FutureWarning, stacklevel=1)
    assert [str(one.message) for one in seen] == ["Another one"]
    assert len(log.filters) == filters  # each config asks for silence
