"""LoRA learns what full fine-tuning learns, at about ten times its learning rate (Schulman et al. 2025,
https://thinkingmachines.ai/blog/lora/).

make quickstart                     # installs SmolLM2-135M-Instruct
python examples/claims/lora_smollm2.py

SmolLM2-135M-Instruct, which knows no German, learns to translate 300 descriptions of Multi30k: all its weights, or
LoRA of rank 1 or 16 with alpha 32 on all linear layers, at learning rates that are a factor of about 3 apart. The best
is the one with the lowest loss on 50 held-out descriptions.
"""

from __future__ import annotations

import arms
import lora
import pretrained
from datasets import Dataset

OF_LORA = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
RATES = {"full": (1e-5, 3e-5, 1e-4, 3e-4, 1e-3), "lora 1": OF_LORA, "lora 16": OF_LORA}
SETTINGS = {"steps": 30, "batch": 16}
SMOKE = {"steps": 1, "batch": 2, "rates": 1}


def rows_of(name: str) -> Dataset:
    rows = Dataset.from_json(str(arms.HERE.parent / "data" / "multi30k" / f"{name}.jsonl"), keep_in_memory=True)
    return Dataset.from_list([{"prompt": f"{row['en']}\nIn German: ", "completion": row["de"]} for row in rows])


def measure(arm: str, seed: int, steps: int, batch: int, rates: int | None = None) -> arms.Figures:
    rank = 0 if arm == "full" else int(arm.split()[1])
    return lora.sweep(
        RATES[arm][:rates], rank, pretrained.needed, rows_of("train"), rows_of("test"), max_steps=steps, seed=seed,
        per_device_train_batch_size=batch, per_device_eval_batch_size=50, bf16=True,
        model_init_kwargs={"dtype": "float32"},  # its files are in bfloat16
    )  # fmt: skip


def verdict(figures: dict[str, list[arms.Figures]]) -> str:
    told, all_hold = [], True
    for arm in ("lora 1", "lora 16"):
        holds, rate, gap = lora.beside_full(figures, arm)
        all_hold &= holds
        told.append(f"of rank {arm.split()[1]} the best learning rate is {rate}, and its loss there differs by {gap}")
    return f"{'Holds' if all_hold else 'Does not hold'}: {'; '.join(told)}."


if __name__ == "__main__":
    arms.run(
        "LoRA equals full fine-tuning at about ten times the learning rate", "https://thinkingmachines.ai/blog/lora/",
        list(RATES), measure, verdict, SETTINGS, SMOKE,
    )  # fmt: skip
