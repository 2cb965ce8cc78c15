"""LoRA learns what full fine-tuning learns, at about ten times its learning rate (Schulman et al. 2025,
https://thinkingmachines.ai/blog/lora/).

python examples/claims/lora.py

A model of half a million parameters has learned calculator steps of GSM8K (arithmetic.py), and learns to write the
results backwards: all its weights, or LoRA of rank 16 with alpha 32 on all linear layers, at learning rates
that are a factor of about 3 apart. The best is the one with the lowest held-out loss.
"""

from __future__ import annotations

import copy
import math
import tempfile

import arithmetic
import arms
from datasets import Dataset
from peft import LoraConfig

from posttrain.sft import SFTConfig, SFTTrainer

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
SETTINGS = {"steps": 60, "batch": 64}
SMOKE = {"epochs": 0.1, "steps": 1, "rates": 1}


def backwards(rows: Dataset) -> Dataset:
    return Dataset.from_list([{"prompt": row["prompt"], "completion": row["result"][::-1]} for row in rows])


def measure(
    arm: str, seed: int, steps: int, batch: int, epochs: float = 30.0, rates: int | None = None
) -> arms.Figures:
    """The best learning rate (log10) and its held-out loss in nats a token."""
    known, tokenizer, train, held_out = arithmetic.fine_tuned(seed, epochs)
    train, held_out = backwards(train), backwards(held_out)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if arm == "lora" else None
    losses = {}
    for rate in RATES[:rates]:
        with tempfile.TemporaryDirectory() as out:
            args = SFTConfig(
                out, max_steps=steps, logging_strategy="no", per_device_train_batch_size=batch,
                per_device_eval_batch_size=400, seed=seed, learning_rate=rate, warmup_steps=5,
                lr_scheduler_type="constant_with_warmup", report_to="none", gradient_checkpointing=False,
                save_strategy="no", disable_tqdm=True,
            )  # fmt: skip
            trainer = SFTTrainer(
                copy.deepcopy(known), args, train_dataset=train, eval_dataset=held_out, processing_class=tokenizer,
                peft_config=lora,
            )  # fmt: skip
            trainer.train()
            losses[rate] = trainer.evaluate()["eval_loss"]
    best = min(losses, key=losses.__getitem__)
    return {"best_rate": math.log10(best), "loss": losses[best]} | {f"loss at {r:g}": v for r, v in losses.items()}


def verdict(figures: dict[str, list[arms.Figures]]) -> str:
    mean, low, high = arms.bounds(arms.differences(figures, "lora", "full", "best_rate"))
    gap, gap_low, gap_high = arms.bounds(arms.differences(figures, "lora", "full", "loss"))
    equal, tenfold = gap_low <= 0 <= gap_high, low <= 1 <= high
    return (
        f"{'Holds' if equal and tenfold else 'Does not hold'}: the best learning rate of LoRA is {10**mean:.1f} times "
        f"that of full fine-tuning [{10**low:.1f}, {10**high:.1f}]; its loss there differs by {gap:+.4f} nats a token "
        f"[{gap_low:+.4f}, {gap_high:+.4f}]."
    )


if __name__ == "__main__":
    arms.run(
        "LoRA equals full fine-tuning at about ten times the learning rate", "https://thinkingmachines.ai/blog/lora/",
        ["full", "lora"], measure, verdict, SETTINGS, SMOKE,
    )  # fmt: skip
