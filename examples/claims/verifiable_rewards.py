"""Rewards that a program verifies teach a fine-tuned model to follow instructions more precisely (Lambert et al. 2024,
https://arxiv.org/abs/2411.15124, section 6).

make quickstart                                     # installs SmolLM2-135M-Instruct
python examples/claims/verifiable_rewards.py

SmolLM2-135M-Instruct is told to write one short sentence with three given words of a description of Multi30k. It is
fine-tuned on a part of the descriptions (`known`); then GRPO goes on with words of the others, whose descriptions it
does not see, and a reward of 1 for an answer that is as it was told. `sft` is fine-tuned on all descriptions instead.
Both are measured on words of descriptions that neither saw. The settings were chosen with seed 100, which is not
measured.
"""

from __future__ import annotations

import random
import re
import tempfile
from typing import Any

import arms
import pretrained
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.sft import SFTConfig, SFTTrainer

SETTINGS = {
    "known": 128, "epochs": 2.0, "sft_rate": 1e-4, "sft_batch": 16,
    "updates": 40, "batch": 64, "grpo_rate": 2e-5, "prompts": 160,
}  # fmt: skip
SMOKE = {"known": 16, "epochs": 1.0, "updates": 1, "batch": 8, "prompts": 8}
LONGEST = 16  # words
SLICE = arms.HERE.parent / "data" / "multi30k"  # whatever POSTTRAIN_DATA is: the figures are of this slice


def rows_of(name: str, seed: int, draws: int) -> list[dict[str, Any]]:
    """So many draws of three words for each short description, one description after another."""
    rng, rows = random.Random(seed), []
    for line in Dataset.from_json(str(SLICE / f"{name}.jsonl"), keep_in_memory=True)["en"]:
        words = sorted(set(re.findall(r"\b[a-z]{4,}\b", line)))
        if len(line.split()) > LONGEST or len(words) < 3:
            continue
        for _ in range(draws):
            chosen = rng.sample(words, 3)
            prompt = f"Write one short sentence with the words {', '.join(chosen)}.\n"
            rows.append({"prompt": prompt, "completion": line, "words": chosen})
    return rows


def as_told(completions: list[str], words: list[list[str]], **_: Any) -> list[float]:
    """The reward: 1 for one sentence of at most 16 words that has the three given ones, else 0."""
    found = [re.findall(r"[a-z]+", completion.lower()) for completion in completions]
    return [
        float(set(asked) <= set(used) and len(used) <= LONGEST and text.count(".") == 1 and text.endswith("."))
        for text, used, asked in zip(completions, found, words, strict=True)
    ]


def usual(seed: int) -> dict[str, Any]:
    """The arguments of every run here."""
    return {"bf16": True, "seed": seed, "gradient_checkpointing": False, "save_strategy": "no", "report_to": "none",
            "logging_strategy": "no", "disable_tqdm": True}  # fmt: skip


def fine_tuned(described: list[dict[str, Any]], seed: int, out: str, epochs: float, rate: float, batch: int) -> Any:
    """SmolLM2 in float32 after fine-tuning on these descriptions."""
    model = AutoModelForCausalLM.from_pretrained(pretrained.needed(), dtype=torch.float32)  # its files: bfloat16
    args = SFTConfig(
        out, num_train_epochs=epochs, per_device_train_batch_size=batch, learning_rate=rate,
        lr_scheduler_type="cosine", warmup_steps=5, **usual(seed),
    )  # fmt: skip
    SFTTrainer(model, args, train_dataset=Dataset.from_list(described).remove_columns("words")).train()
    return model


def reinforcing(
    model: Any, others: list[dict[str, Any]], prompts: int, seed: int, out: str, updates: int, batch: int, rate: float,
    **given: Any,
) -> GRPOTrainer:  # fmt: skip
    """GRPO on words of other descriptions; what it evaluates are so many held-out prompts, four answers to each."""
    args = GRPOConfig(
        out, max_steps=updates, per_device_train_batch_size=batch, learning_rate=rate, warmup_steps=5,
        lr_scheduler_type="constant_with_warmup", num_generations=8, max_completion_length=28,
        num_generations_eval=4, per_device_eval_batch_size=batch, **(usual(seed) | given),
    )  # fmt: skip
    held_out = Dataset.from_list(rows_of("test", 0, draws=4)[:prompts]).remove_columns("completion")
    new = Dataset.from_list(others).remove_columns("completion")
    tokenizer = AutoTokenizer.from_pretrained(pretrained.needed())
    return GRPOTrainer(model, as_told, args, new, held_out, tokenizer)


def shuffled(seed: int) -> list[dict[str, Any]]:
    rows = rows_of("train", seed, draws=1)
    random.Random(seed).shuffle(rows)
    return rows


def measure(
    arm: str,
    seed: int,
    known: int,
    epochs: float,
    sft_rate: float,
    sft_batch: int,
    updates: int,
    batch: int,
    grpo_rate: float,
    prompts: int,
) -> arms.Figures:
    """The share of answers, four drawn to each held-out prompt, that are as told: after fine-tuning and at the end."""
    rows = shuffled(seed)
    described, others = (rows, rows) if arm == "sft" else (rows[:known], rows[known:])
    with tempfile.TemporaryDirectory() as out:
        model = fine_tuned(described, seed, out, epochs, sft_rate, sft_batch)
        trainer = reinforcing(model, others, prompts, seed, out, updates, batch, grpo_rate)
        figures = {"fine-tuned": trainer.evaluate()["eval_reward"]}
        if arm == "grpo":
            trainer.train()
        return figures | {"end": trainer.evaluate()["eval_reward"] if arm == "grpo" else figures["fine-tuned"]}


def verdict(figures: dict[str, list[arms.Figures]]) -> str:
    mean, low, high = (100 * bound for bound in arms.bounds(arms.differences(figures, "grpo", "sft", "end")))
    first, last = (100 * arms.bounds(arms.column(figures, "grpo", name))[0] for name in ("fine-tuned", "end"))
    every = 100 * arms.bounds(arms.column(figures, "sft", "end"))[0]
    found = arms.shown(low, high)
    return (
        f"{found}: from {first:.1f}% of the answers GRPO came to {last:.1f}%, fine-tuning on all descriptions to "
        f"{every:.1f}%: {mean:+.1f} points [{low:+.1f}, {high:+.1f}]."
    )


if __name__ == "__main__":
    arms.run(
        "Verifiable rewards raise the precision with which instructions are followed",
        "https://arxiv.org/abs/2411.15124", ["sft", "grpo"], measure, verdict, SETTINGS, SMOKE,
    )  # fmt: skip
