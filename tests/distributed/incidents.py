"""The processes of `test_incidents`: what goes wrong on one process, and what each machine saves."""

import json
import os
import sys
from pathlib import Path

import torch

from posttrain.core import Trainer
from posttrain.core.checkpoint.weights import read_tensors
from posttrain.core.errors import NonFiniteError
from tests.contract.trainers import causal_lm, weights
from tests.core.test_loss_terms import Scaled

SPLIT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4}


class Bad(Trainer):
    """On process 1 the loss of update 2 is NaN, or infinite with the gradient of a finite one."""

    value = float("nan")

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.dist.rank == 1 and self.state.global_step == 1:
            return loss + self.value
        return loss


def log(trainer, *names):
    return [[record[name] for name in names] for record in trainer.state.log_history if "loss" in record]


def pair(folder: Path) -> None:
    stopped = causal_lm(Bad)(folder / "stop", **SPLIT)
    try:
        stopped.train()
        message = "nothing was raised"
    except NonFiniteError as error:
        message = str(error)
    gather = stopped.dist.gather_object
    finite = all(bool(torch.isfinite(value).all()) for value in weights(stopped).values())
    found = {"stop": gather(message), "finite": gather(finite)}
    found["saved"] = sorted(path.name for path in (folder / "stop/nonfinite-step-2").iterdir())
    skipped = causal_lm(Bad)(folder / "skip", on_nonfinite="skip", **SPLIT)
    skipped.value = float("inf")
    skipped.train()
    counts = [r["nonfinite_steps"] for r in skipped.state.log_history if "loss" in r and "nonfinite_steps" in r]
    found["skipped"] = gather(counts)
    one, other = gather({name: value.tolist() for name, value in weights(skipped).items()})
    found["same_weights"] = one == other
    trainer = causal_lm(Scaled)(folder / "terms", **SPLIT)
    trainer.train()
    found["terms"] = sum(log(trainer, "loss", "nll", "peak"), [])
    if trainer.is_world_process_zero():
        (folder / "found.json").write_text(json.dumps(found))


def nodes(folder: Path) -> None:
    mine = folder / f"node-{os.environ['GROUP_RANK']}"  # a disk of this machine: the same relative path, other files
    mine.mkdir()
    os.chdir(mine)
    options = {"save_on_each_node": True, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, **SPLIT}
    trainer, resumed = causal_lm()("out", **options), causal_lm()("out", **options)
    trainer.train()
    resumed.train(resume_from_checkpoint="out/checkpoint-3")
    assert all(torch.equal(value, weights(trainer)[name]) for name, value in weights(resumed).items())
    sharded = causal_lm()("sharded", fsdp="full_shard", save_on_each_node=True, max_shard_size="30KB", **SPLIT)
    sharded.train()
    sharded.save_model("final")
    found = read_tensors(mine / "final")
    assert all(torch.allclose(value, found[name], atol=1e-6) for name, value in weights(trainer).items())


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"pair": pair, "nodes": nodes}[sys.argv[1]](Path(sys.argv[2]))
