"""Run as several processes: runs in which rank 0 is busy, here and there, for longer than a collective may take."""

import sys
import time
from pathlib import Path

import torch

from posttrain.core import TrainerCallback
from tests.contract.trainers import TRAINERS


def slow(work, args, seconds):
    """`work`, for which rank 0 needs so long."""

    def slowly(*positional, **named):
        if args.process_index == 0:
            print("busy", getattr(work, "__name__", work), flush=True)
            time.sleep(seconds)
        return work(*positional, **named)

    return slowly


class Busy(TrainerCallback):
    """A tracker that takes its time."""

    def __init__(self, seconds):
        self.seconds, self.heard = seconds, set()

    def wait(self, args, event):
        if args.process_index == 0 and event not in self.heard:
            self.heard.add(event)
            slow(lambda: None, args, self.seconds)()

    def on_train_begin(self, args, state, control, **kwargs):
        self.wait(args, "begin")

    def on_save(self, args, state, control, **kwargs):
        self.wait(args, "save")

    def on_evaluate(self, args, state, control, **kwargs):
        self.wait(args, "evaluate")


def main(out, kind, where, timeout, seconds):
    changes = {"per_device_train_batch_size": 2, "max_steps": 2, "ddp_timeout": int(timeout), "logging_steps": 1}
    seconds = float(seconds)
    if where == "preparation":
        if kind.startswith("sft"):
            from posttrain.sft import trainer as module

            name = "prepare_sets"
        else:
            from posttrain.rl.preference import trainer as module

            name = "prepare_preferences"
        prepare = getattr(module, name)
        setattr(module, name, lambda *given, **named: slow(prepare, Rank(), seconds)(*given, **named))
    if where == "callbacks":
        changes |= {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer = TRAINERS[kind](out, callbacks=[Busy(seconds)] if where == "callbacks" else None, **changes)
    if where == "loader":
        trainer.get_train_dataloader = slow(trainer.get_train_dataloader, trainer.args, seconds)
    if where == "saving":
        trainer.args.save_strategy, trainer.args.save_steps = "steps", 1
        trainer.store.commit = slow(trainer.store.commit, trainer.args, seconds)
    trainer.train()
    if where == "own work":
        with trainer.args.main_process_first():
            slow(lambda: None, trainer.args, seconds)()
        slow(lambda: None, trainer.args, seconds)()
        trainer.evaluate()
    Path(out, f"done-{trainer.args.process_index}").touch()


class Rank:
    @property
    def process_index(self):
        return torch.distributed.get_rank()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
