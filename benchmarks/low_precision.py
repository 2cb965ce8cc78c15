"""What bfloat16 in weights and optimizer state costs in loss, on the CPU.

    python benchmarks/low_precision.py [--steps 400] [--seeds 3]

A small language model learns sequences in which each token follows from the two before it. The loss of rows that it has
not seen is given for each way of keeping weights and state, as mean and standard deviation over seeds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

import torch
from datasets import Dataset

from posttrain.core import Trainer, TrainingArguments
from tests import tiny

WAYS: dict[str, tuple[torch.dtype, str, str]] = {
    "weights and state in float32": (torch.float32, "adamw_torch", ""),
    "state in bfloat16, stochastic": (torch.float32, "adamw_bf16", ""),
    "state in bfloat16, to the nearest": (torch.float32, "adamw_bf16", "stochastic_rounding=False"),
    "weights and state in bfloat16, stochastic": (torch.bfloat16, "adamw_bf16", ""),
    "weights and state in bfloat16, to the nearest": (torch.bfloat16, "adamw_bf16", "stochastic_rounding=False"),
}


def rows(count: int, seed: int) -> Dataset:
    """Rows of 32 tokens of 64: a token is a fixed function of the two before it, but one in ten is random."""
    table = torch.randint(4, 68, (68, 68), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1000 + seed)
    ids = torch.randint(4, 68, (count, 32), generator=generator)
    is_random = torch.rand(count, 32, generator=generator) < 0.1
    for place in range(2, 32):
        follows = table[ids[:, place - 2], ids[:, place - 1]]
        ids[:, place] = torch.where(is_random[:, place], ids[:, place], follows)
    return Dataset.from_list([{"input_ids": row, "labels": row} for row in ids.tolist()])


def final_loss(way: str, steps: int, seed: int) -> float:
    dtype, optim, options = WAYS[way]
    model = tiny.causal_lm(seed=seed, hidden_size=64, intermediate_size=128, vocab_size=68).to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        args: dict[str, Any] = {"optim": optim, "optim_args": options or None, "max_steps": steps, "seed": seed}
        args |= {"learning_rate": 3e-3, "per_device_train_batch_size": 32, "warmup_steps": 20, "adam_beta2": 0.999}
        args |= {"lr_scheduler_type": "cosine", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
        config = TrainingArguments(folder, use_cpu=True, logging_steps=steps, report=False, **args)
        trainer = Trainer(model, config, train_dataset=rows(4000, seed), eval_dataset=rows(500, 999))
        trainer.train()
        return trainer.evaluate()["eval_loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for way in WAYS:
        found = [final_loss(way, asked.steps, seed) for seed in range(asked.seeds)]
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        print(f"{way:48} {statistics.mean(found):.4f} +- {spread:.4f}", flush=True)


if __name__ == "__main__":
    main()
