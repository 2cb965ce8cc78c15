"""The programs of `test_workers`: runs that read data in one way and end in one way, and what is left of them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import datasets
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from posttrain.core import TrainerCallback
from tests import tiny
from tests.contract.trainers import TRAINERS, pad

NUM_ROWS = 12


class Rows(Dataset):
    rows = tiny.token_rows(NUM_ROWS)

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        return self.rows[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Rows.rows)


class Broken(Rows):
    def __getitem__(self, index):
        raise ValueError("broken")


class Stuck(Rows):
    """A worker that hears no signal, as one in the code of a library that never comes back."""

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info().id == 1:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            time.sleep(1000)
        return self.rows[index]


class BrokenStream(Stream):
    def __iter__(self):
        yield from Rows.rows[:5]
        raise ValueError("broken")


class StuckStream(Stream):
    def __iter__(self):
        yield from Rows.rows[:4]
        yield Stuck()[0]


def columns(rows):
    return {name: [row[name] for row in rows] for name in rows[0]}


def rows_of(kind, how):
    if how == "error in a worker":
        return Broken() if kind == "map" else BrokenStream()
    if how == "stuck worker":
        return Stuck() if kind == "map" else StuckStream()
    if kind in ("map", "iterable"):
        return Rows() if kind == "map" else Stream()
    table = datasets.Dataset.from_dict(columns(Rows.rows))
    if kind == "datasets":
        return table
    stream = table.to_iterable_dataset(num_shards=2)
    if kind == "stream":
        return stream.shuffle(seed=0, buffer_size=4)
    return datasets.interleave_datasets(
        [stream, table.to_iterable_dataset(num_shards=3)], probabilities=[0.5, 0.5], seed=0
    )


class At(TrainerCallback):
    def __init__(self, event, what):
        self.what = what
        setattr(self, event, self.hear)

    def hear(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.what()


def error():
    raise RuntimeError("in the middle of an epoch")


def children():
    pids = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    own = [pid for pid in pids if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return [pid for pid in own if b"forkserver" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


def make(folder, workers, persistent, rows, how, trainer, prefetch, context, **changes):
    if workers:
        changes |= {"dataloader_persistent_workers": persistent, "dataloader_prefetch_factor": prefetch}
        changes |= {"dataloader_multiprocessing_context": context}
    changes |= {"dataloader_num_workers": workers, "per_device_train_batch_size": 2, "num_train_epochs": 2}
    changes |= {"eval_strategy": "epoch", "logging_steps": 100}
    made = TRAINERS[trainer](folder, **changes)
    if trainer == "causal-lm":
        made.train_dataset, made.eval_dataset = rows_of(rows, how), rows_of(rows, None)
    return made


def run(
    folder, how=None, trainer="causal-lm", rows="map", workers=2, persistent=True, prefetch=None, context=None, status=0
):
    """Runs until `how`, in place of a user's program; what it returns stays in a variable until the end."""
    place = dict(workers=workers, persistent=persistent, rows=rows, how=how, trainer=trainer, prefetch=prefetch)
    if rows in ("iterable", "stream", "interleaved") and trainer == "causal-lm":
        place["max_steps"] = 3 if how in ("error", None) else 8
    changes = {"save_strategy": "no" if how == "sigterm without saving" else "steps", "save_steps": 1000}
    if how == "steps":
        changes["max_steps"] = 2
    if how == "handler":
        signal.signal(signal.SIGTERM, lambda *_: None)
    made = make(folder, context=context, **place | changes)
    sent = {
        "sigterm": [signal.SIGTERM], "sigterm without saving": [signal.SIGTERM], "sigint": [signal.SIGINT],
        "sigterm twice": [signal.SIGTERM] * 2, "sigkill": [signal.SIGKILL], "handler": [signal.SIGTERM],
    }  # fmt: skip
    if how in sent:
        made.add_callback(At("on_step_begin", lambda: send(sent[how])))
    if how in ("error", "error caught", "del"):
        made.add_callback(At("on_step_begin", error))
    if how == "exit":
        made.add_callback(At("on_step_begin", lambda: sys.exit(3)))
    kept = [made]
    if how in ("evaluate", "predict", "stuck worker"):
        pass
    elif how == "several trainers":
        for number in range(3):
            made.train()
            print("children", len(children()))
            kept.append(made := make(f"{folder}-{number}", context=context, **place | changes))
    elif how == "thread":
        thread = threading.Thread(target=made.train)
        thread.start(), thread.join()
    elif how == "search":
        made.model_init = tiny.causal_lm
        kept.append(search(folder, made))
    elif how in ("own loader", "own evaluation loader"):
        name = "train" if how == "own loader" else "eval"
        options = {"num_workers": workers, "persistent_workers": persistent, "batch_size": 2, "collate_fn": pad}
        setattr(made, f"get_{name}_dataloader", lambda *_: DataLoader(rows_of(rows, None), **options))
        made.train()
    elif how in ("error caught", "del"):
        try:
            made.train()
        except RuntimeError as caught:
            kept.append(caught)
        if how == "del":
            del made
            kept.clear()
    else:
        made.train()
    if how == "evaluate":
        made.evaluate(), made.evaluate()
    if how == "predict":
        made.predict(rows_of(rows, None))
    if how not in ("iterator kept", "stuck worker"):
        print("children", len(children()))
    else:
        kept.append(batches := iter(made.get_train_dataloader()))
        next(batches)
    return kept


def import_all(folder, cases):
    """Run each trainer once, so that no program has to import what it needs."""
    for name in {case.get("trainer", "causal-lm") for case in cases}:
        make(f"{folder}/{name}", 0, False, "map", None, name, None, None).train()


def search(folder, made):
    made.args.set_evaluate(strategy="epoch")
    return made.hyperparameter_search(lambda trial: {"learning_rate": trial.suggest_float("a", 0.1, 0.2)}, n_trials=2)


def send(numbers):
    for number in numbers:
        os.killpg(os.getpgid(0), number)
        time.sleep(0.05)


def session_of(stat):
    return int(stat.rpartition(")")[2].split()[3])


def left_of(session):
    """Processes of `session` that run still."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            stat = path.read_text()
        except OSError:  # it has just ended
            continue
        if session_of(stat) == session and stat.rpartition(")")[2].split()[0] != "Z":
            found += 1
    return found


def watch(child, patience):
    """(exit status, seconds, processes left behind) of a program; one that does not end is killed."""
    start = time.monotonic()
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid or time.monotonic() - start > patience:
            break
        time.sleep(0.02)
    seconds = round(time.monotonic() - start, 1)
    code = os.waitstatus_to_exitcode(status) if pid else "it never ended"
    # Of a process that was killed, the workers find out every five seconds.
    until = time.monotonic() + 12
    while (left := left_of(child)) and pid and time.monotonic() < until:
        time.sleep(0.05)
    if left or not pid:
        subprocess.run(["pkill", "-KILL", "-s", str(child)], check=False)
    if not pid:
        os.waitpid(child, 0)
    return code, seconds, left
