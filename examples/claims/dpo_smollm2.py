"""DPO raises a chat model's accuracy on held-out preference pairs (Rafailov et al. 2023,
https://arxiv.org/abs/2305.18290).

make quickstart                                     # installs SmolLM2-135M-Instruct
python examples/claims/dpo_smollm2.py

SmolLM2-135M-Instruct is trained on right against wrong solutions of GSM8K problems, as in dpo.py, but as it is, in
conversations, and on fewer of the pairs (POSTTRAIN_DATA: drawn from all of them; else from a slice).
"""

from __future__ import annotations

import functools
import random
from typing import Any

import arms
import dpo
import pretrained
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.lm.text.layouts import as_messages
from posttrain.rl import DPOTrainer

SETTINGS = {"pairs": 384, "held_out": 224, "batch": 4, "accumulation": 4, "learning_rate": 1e-5, "beta": 0.1}
SMOKE = {"pairs": 4, "held_out": 2, "batch": 2, "accumulation": 1}


@functools.cache
def begin(held_out: int) -> tuple[Any, ...]:
    """(model, tokenizer, held-out pairs, their scores)."""
    folder = pretrained.needed()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # its files are in bfloat16
    tokenizer, rows = AutoTokenizer.from_pretrained(folder), as_messages(dpo.pairs("test", held_out))
    return model, tokenizer, rows, dpo.scores(model, tokenizer, rows, bf16=True)


def measure(arm: str, seed: int, pairs: int, held_out: int, **settings: Any) -> arms.Figures:
    """What DPO does to held-out pairs: see `dpo.trained`."""
    model, tokenizer, test, before = begin(held_out)
    train = as_messages(dpo.pairs("train"))
    train = train.select(random.Random(seed).sample(range(len(train)), pairs))
    return dpo.trained(DPOTrainer, model, tokenizer, train, test, before, seed, bf16=True, **settings)


if __name__ == "__main__":
    arms.run(
        "DPO raises a chat model's accuracy on held-out preference pairs", "https://arxiv.org/abs/2305.18290", ["dpo"],
        measure, dpo.verdict, SETTINGS, SMOKE,
    )  # fmt: skip
