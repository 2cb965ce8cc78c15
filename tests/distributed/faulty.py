"""Run by torchrun: a training in which rank 1 does something bad in its second update."""

import os
import signal
import sys
import time
from types import SimpleNamespace

import torch

from posttrain.core import TrainerCallback
from posttrain.core.training.nonfinite import OnItsWay
from tests.contract.trainers import TRAINERS


def raises():
    raise KeyError("the reward file has no row 7")


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def is_stuck():
    time.sleep(600)


class Bad(TrainerCallback):
    """`on_device`: the collectives of rank 0 return at once, as NCCL's do, and it waits where it next reads a number
    of its device.
    """

    def __init__(self, act, on_device):
        self.act, self.on_device = act, on_device

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1 and args.process_index == 1:
            print(f"at {time.time()}", file=sys.stderr, flush=True)
            self.act()
        elif state.global_step == 1 and self.on_device:
            OnItsWay(torch.ones(()), SimpleNamespace(synchronize=is_stuck)).read()


class Before:
    """Process 1 does something bad before its second rollout."""

    def __init__(self, sampler, act, rank):
        self.act, self.rank, self.begin, self.count = act, rank, sampler.weights_to_generate, 0
        sampler.weights_to_generate = self

    def __call__(self, model):
        self.count += 1
        if self.count == 2 and self.rank == 1:
            print(f"at {time.time()}", file=sys.stderr, flush=True)
            self.act()
        return self.begin(model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, act, mode = sys.argv[1:]
    changes = {"fsdp": "full_shard"} if mode == "fsdp" else {}
    changes |= {"save_strategy": "steps", "save_steps": 100} if mode == "saves" else {}
    changes |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "ddp_timeout": 6}
    if mode == "rollouts":
        trainer = TRAINERS["grpo-sync"](out, fsdp="full_shard", **changes)
        Before(trainer.sampler, globals()[act], trainer.args.process_index)
    else:
        trainer = TRAINERS["causal-lm"](out, callbacks=[Bad(globals()[act], mode == "device")], **changes)
    trainer.train()
