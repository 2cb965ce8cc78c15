"""Run by torchrun: does the named pieces of work one after another in one process group, and writes what each led to.

A piece of work is a function below; its arguments come as JSON. What it returns on rank 0 is saved as ``<label>.pt``.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch

from posttrain.core import TrainerCallback
from posttrain.core.checkpoint import get_last_checkpoint
from posttrain.core.metrics import is_timing
from tests.contract.trainers import TRAINERS, causal_lm

#: As one process does it with 8 x 1: for 2 processes, and for 4.
SPLITS = {1: (8, 1), 2: (2, 2), 4: (1, 2)}


class PowerCut(Exception):
    pass


class CutAfter(TrainerCallback):
    """Saves after a step and breaks the run off at the beginning of the next."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == self.step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise PowerCut


def split(processes):
    batch, accumulation = SPLITS[processes]
    return {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}


def whole(trainer):
    """The weights, put together; on rank 0 alone where they are in pieces."""
    state = trainer.dist.whole_state_dict(trainer.model)
    return {k: v.detach().clone() for k, v in trainer.model.state_dict().items()} if state is None else state


def history(trainer):
    return [{k: v for k, v in record.items() if not is_timing(k)} for record in trainer.state.log_history]


def train(name, out, cut=None, resume=None, evaluate=True, **changes):
    """Train one of the contract's trainers, with the rows of an update dealt to all processes.

    Args:
        cut: train only until after that step, whose checkpoint is written.
        resume: the output directory of the run to go on from.
    """
    resume = resume and get_last_checkpoint(resume)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    changes = split(processes) | {"per_device_eval_batch_size": 2} | changes
    trainer = TRAINERS[name](out, callbacks=[CutAfter(cut)] if cut else None, **changes)
    with contextlib.suppress(PowerCut):
        trainer.train(resume_from_checkpoint=resume)
    found = {"weights": whole(trainer), "log": history(trainer), "class": type(trainer.model).__name__}
    found |= {"is_fsdp": trainer.is_fsdp_enabled, "step": trainer.state.global_step}
    if evaluate:
        found["eval"] = trainer.evaluate()
        output = trainer.predict(trainer.eval_dataset)
        found |= {"predictions": output.predictions, "label_ids": output.label_ids, "test": output.metrics}
    trainer.save_model(str(Path(out) / "final"))
    return found


def tied(out):
    trainer = causal_lm(tie_word_embeddings=True)(out, fsdp="full_shard", **split(2))
    trainer.train()
    trainer.save_model(str(Path(out) / "final"))
    model = trainer.model
    return {"weights": whole(trainer), "is_one": model.lm_head.weight is model.model.embed_tokens.weight}


def given_optimizer(out):
    trainer = TRAINERS["causal-lm"](out, fsdp="full_shard", **split(2))
    trainer.optimizer, trainer._owns_optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.05), False
    trainer.train()
    return whole(trainer)


def low_precision(out):
    seen = set()

    def look(module, inputs):
        seen.update(parameter.dtype for parameter in module.parameters())

    trainer = TRAINERS["causal-lm"](out, fsdp="full_shard", bf16=True, max_steps=1, **split(2))
    trainer.model.model.layers[0].mlp.register_forward_pre_hook(look)
    trainer.train()
    kept = {parameter.dtype for parameter in trainer.model.parameters()}
    return {"kept": kept, "gathered": seen, "loss": trainer.state.log_history[0]["loss"]}


def generate(out, **changes):
    """What each process writes before an update and after it, of the prompts of all; those of rank 0 are returned."""
    from posttrain.rl.generation.local import problem

    ranks = int(os.environ.get("WORLD_SIZE", 1))
    trainer = TRAINERS["grpo"](out, max_completion_length=24, max_steps=1, **split(ranks), **changes)
    trainer.train()
    rank, forwards = trainer.dist.rank, []
    trainer.model.register_forward_pre_hook(lambda module, inputs: forwards.append(1))
    found = {"ids": [], "logps": []}
    with trainer.dist.gathered(trainer.model):
        sampling, told = trainer.sampling(), problem(trainer.model)
        forwards.clear()
        for number in range(4) if ranks == 1 else [rank, rank + 2]:
            done = trainer.generator.generate([[9 + number, 30, 31]], 2, sampling, [2 * number, 2 * number + 1])
            found["ids"].append((number, done.ids))
            found["logps"].append((number, [torch.tensor(logps) for logps in done.logps]))
    parts = trainer.dist.gather_object(found)
    joined = {
        name: [value for _, value in sorted((x for p in parts for x in p[name]), key=lambda x: x[0])] for name in found
    }
    return {
        "ids": joined["ids"],
        "logps": [logps for pair in joined["logps"] for logps in pair],
        "engine": type(trainer.generator).__name__,
        "problems": told,
        "forwards": trainer.dist.gather_object(len(forwards)),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for label, function, arguments in json.loads(sys.argv[2]):
        started = time.perf_counter()
        result = globals()[function](**arguments)
        if os.environ.get("RANK", "0") == "0":
            torch.save(result, folder / f"{label}.pt")
            print(f"{label}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
