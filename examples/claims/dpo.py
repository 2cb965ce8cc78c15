"""DPO raises the accuracy on held-out preference pairs (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290).

python examples/claims/dpo.py

A model of 0.9 million parameters is fine-tuned on GSM8K problems from nothing, then trained on right against wrong
solutions that real models wrote (POSTTRAIN_DATA: all of them; else a slice of them). A held-out pair counts as right
if training has raised the probability of the right solution more than that of the wrong one: 50% is chance. No problem
of a held-out pair is trained on by DPO.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import arms
import torch
from datasets import Dataset
from quickstart import measure as completions_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from posttrain.rl import DPOTrainer, KTOTrainer
from posttrain.rl.preference.trainer import PreferenceTrainer
from posttrain.sft import SFTConfig, SFTTrainer

SETTINGS = {"supervised_steps": 250, "pairs": 2202, "held_out": 224, "batch": 16, "learning_rate": 3e-4, "beta": 0.1}
SMOKE = {"supervised_steps": 2, "pairs": 16, "held_out": 6, "batch": 8}
SIDES = ("chosen", "rejected")
USUAL = {"report_to": "none", "save_strategy": "no", "gradient_checkpointing": False, "disable_tqdm": True}


def read(name: str) -> list[dict[str, str]]:
    lines = (arms.DATA / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@functools.cache
def supervised(steps: int) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """A new model after fine-tuning on solved problems."""
    rows = [{"prompt": f"{row['question']}\n", "completion": row["answer"]} for row in read("gsm8k/train.jsonl")]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>"]
    trainer = trainers.BpeTrainer(vocab_size=2048, special_tokens=special, show_progress=False)
    bpe.train_from_iterator((row["prompt"] + row["completion"] for row in rows), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=special[0], eos_token=special[1])
    torch.manual_seed(0)
    size = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "max_position_embeddings": 1024}
    size |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": True}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **size))
    with tempfile.TemporaryDirectory() as out:
        args = SFTConfig(
            out, max_steps=steps, per_device_train_batch_size=8, learning_rate=3e-3, lr_scheduler_type="cosine",
            warmup_steps=20, completion_only_loss=False, packing=True, max_length=512, **USUAL,
        )  # fmt: skip
        SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer).train()
    return model, tokenizer


def pairs(split: str, limit: int | None = None) -> Dataset:
    rows = read(f"gsm8k_preferences/{split}.jsonl")[:limit]
    return Dataset.from_list([{"prompt": f"{row['prompt']}\n"} | {side: row[side] for side in SIDES} for row in rows])


def scores(model: PreTrainedModel, tokenizer: Any, rows: Dataset, **usual: Any) -> torch.Tensor:
    """Log-probabilities of the right and the wrong solution of each pair: (pairs, 2)."""
    both = Dataset.from_list([{"prompt": row["prompt"], "completion": row[side]} for row in rows for side in SIDES])
    with tempfile.TemporaryDirectory() as out:
        args = SFTConfig(out, per_device_eval_batch_size=32, max_length=None, **USUAL, **usual)
        scorer = SFTTrainer(model, args, train_dataset=both, eval_dataset=both, processing_class=tokenizer)
        return torch.tensor(completions_of(scorer)[1]).view(-1, 2)


@functools.cache
def scores_before(steps: int, held_out: int) -> torch.Tensor:
    return scores(*supervised(steps), pairs("test", held_out))


def measure(arm: str, seed: int, supervised_steps: int, **settings: Any) -> arms.Figures:
    """What training by DPO or KTO does to held-out pairs: see `trained`."""
    train, test = pairs("train"), pairs("test", settings["held_out"])
    train = train.select(random.Random(seed).sample(range(len(train)), min(settings["pairs"], len(train))))
    before = scores_before(supervised_steps, settings["held_out"])
    return trained({"dpo": DPOTrainer, "kto": KTOTrainer}[arm], *supervised(supervised_steps), train, test, before,
                   seed, **settings)  # fmt: skip


def trained(
    trainer_class: type[PreferenceTrainer], model: PreTrainedModel, tokenizer: Any, train: Dataset, test: Dataset,
    before: torch.Tensor, seed: int, *, batch: int, learning_rate: float, beta: float, accumulation: int = 1,
    bf16: bool = False, **_: Any,
) -> arms.Figures:  # fmt: skip
    """What training a copy of `model` does to held-out pairs.

    accuracy: of the rewards. margin: of the rewards. likelier_before, likelier_after: the share of pairs whose right
    solution is the more probable one.
    """
    policy = copy.deepcopy(model)
    with tempfile.TemporaryDirectory() as out:
        args = trainer_class.config_class(
            out, num_train_epochs=1, per_device_train_batch_size=batch * (2 if trainer_class is KTOTrainer else 1),
            gradient_accumulation_steps=accumulation, learning_rate=learning_rate, lr_scheduler_type="linear",
            warmup_steps=5, max_length=None, beta=beta, seed=seed, bf16=bf16, **USUAL,
        )  # fmt: skip
        trainer_class(policy, args=args, train_dataset=train, processing_class=tokenizer).train()
    after = scores(policy, tokenizer, test, bf16=bf16)
    rewards = beta * (after - before)
    return {
        "accuracy": share(rewards),
        "margin": (rewards[:, 0] - rewards[:, 1]).mean().item(),
        "likelier_before": share(before),
        "likelier_after": share(after),
    }


def share(values: torch.Tensor) -> float:
    """Of the pairs, those with the larger value at the right solution."""
    return (values[:, 0] > values[:, 1]).double().mean().item()


def verdict(figures: dict[str, list[arms.Figures]]) -> str:
    mean, low, high = arms.bounds(arms.column(figures, "dpo", "accuracy"))
    error = (mean * (1 - mean) / SETTINGS["held_out"]) ** 0.5  # of the pairs, which all seeds share
    found = (
        f"held-out accuracy {mean:.1%} [{low:.1%}, {high:.1%}] over the seeds, with a standard error of {error:.1%} "
        "for the choice of pairs, against a chance of 50%"
    )
    return f"{'Holds' if min(low, mean - 1.96 * error) > 0.5 else 'Not shown'}: {found}."


def recorded() -> list[arms.Figures]:
    """What this script has measured before."""
    return json.loads(Path(arms.RESULTS / "dpo.json").read_text(encoding="utf-8"))["figures"]["dpo"]


if __name__ == "__main__":
    arms.run(
        "DPO raises the accuracy on held-out preference pairs", "https://arxiv.org/abs/2305.18290", ["dpo"], measure,
        verdict, SETTINGS, SMOKE,
    )  # fmt: skip
