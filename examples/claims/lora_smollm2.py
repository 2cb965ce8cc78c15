"""LoRA learns what full fine-tuning learns, at about ten times its learning rate (Schulman et al. 2025,
https://thinkingmachines.ai/blog/lora/).

make quickstart                     # installs SmolLM2-135M-Instruct
python examples/claims/lora_smollm2.py

SmolLM2-135M-Instruct, which knows no German, learns to translate 300 descriptions of Multi30k: all its weights, or
LoRA of rank 1 or 16 with alpha 32 on all linear layers, at learning rates that are a factor of about 3 apart. The best
is the one with the lowest loss on 50 held-out descriptions.
"""

from __future__ import annotations

import math
import tempfile

import arms
import pretrained
from datasets import Dataset
from peft import LoraConfig

from posttrain.sft import SFTConfig, SFTTrainer

OF_LORA = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
RATES = {"full": (1e-5, 3e-5, 1e-4, 3e-4, 1e-3), "lora 1": OF_LORA, "lora 16": OF_LORA}
SETTINGS = {"steps": 30, "batch": 16}
SMOKE = {"steps": 1, "batch": 2, "rates": 1}


def rows_of(name: str) -> Dataset:
    rows = Dataset.from_json(str(arms.HERE.parent / "data" / "multi30k" / f"{name}.jsonl"), keep_in_memory=True)
    return Dataset.from_list([{"prompt": f"{row['en']}\nIn German: ", "completion": row["de"]} for row in rows])


def measure(arm: str, seed: int, steps: int, batch: int, rates: int | None = None) -> arms.Figures:
    """The best learning rate (log10) and its held-out loss in nats a token."""
    rank = 0 if arm == "full" else int(arm.split()[1])
    losses = {}
    for rate in RATES[arm][:rates]:
        with tempfile.TemporaryDirectory() as out:
            args = SFTConfig(
                out, max_steps=steps, logging_strategy="no", per_device_train_batch_size=batch,
                per_device_eval_batch_size=50, seed=seed, learning_rate=rate, warmup_steps=5, bf16=True,
                lr_scheduler_type="constant_with_warmup", report_to="none", gradient_checkpointing=False,
                save_strategy="no", disable_tqdm=True,
                model_init_kwargs={"dtype": "float32"},  # its files are in bfloat16
            )  # fmt: skip
            trainer = SFTTrainer(
                pretrained.needed(), args, train_dataset=rows_of("train"), eval_dataset=rows_of("test"),
                peft_config=LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear") if rank else None,
            )  # fmt: skip
            trainer.train()
            losses[rate] = trainer.evaluate()["eval_loss"]
    best = min(losses, key=losses.__getitem__)
    return {"best_rate": math.log10(best), "loss": losses[best]} | {f"loss at {r:g}": v for r, v in losses.items()}


def verdict(figures: dict[str, list[arms.Figures]]) -> str:
    told, holds = [], True
    for arm in ("lora 1", "lora 16"):
        mean, low, high = arms.bounds(arms.differences(figures, arm, "full", "best_rate"))
        gap, gap_low, gap_high = arms.bounds(arms.differences(figures, arm, "full", "loss"))
        holds &= gap_low <= 0 <= gap_high and low <= 1 <= high
        told.append(
            f"of rank {arm.split()[1]} the best learning rate is {10**mean:.1f} times that of full fine-tuning "
            f"[{10**low:.1f}, {10**high:.1f}], and its loss there differs by {gap:+.4f} nats a token "
            f"[{gap_low:+.4f}, {gap_high:+.4f}]"
        )
    return f"{'Holds' if holds else 'Does not hold'}: {'; '.join(told)}."


if __name__ == "__main__":
    arms.run(
        "LoRA equals full fine-tuning at about ten times the learning rate", "https://thinkingmachines.ai/blog/lora/",
        list(RATES), measure, verdict, SETTINGS, SMOKE,
    )  # fmt: skip
