"""Teach a model to prefer right solutions to wrong ones: a supervised stage on problems, then DPO on pairs of
solutions.

python examples/dpo.py                                   # Qwen3-0.6B with LoRA, a few minutes on one GPU
python examples/dpo.py --model my/model --steps 200      # a Hub name or a folder
python examples/dpo.py --method kto                      # the same solutions one by one, called good or bad

The pairs are right and wrong solutions that four models wrote for GSM8K problems. A slice of them ships in
examples/data; POSTTRAIN_DATA names a folder with all of them (gsm8k_preferences/train.jsonl and test.jsonl).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig

from posttrain.rl import DPOTrainer, KTOTrainer
from posttrain.sft import SFTConfig, SFTTrainer

DATA = Path(__file__).parent / "data"
PAIRS = Path(os.environ.get("POSTTRAIN_DATA", DATA)) / "gsm8k_preferences"


def read(folder: Path, split: str):
    return load_dataset("json", data_files=str(folder / f"{split}.jsonl"), split="train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="name on the Hub, or a folder")
    parser.add_argument("--method", choices=("dpo", "kto"), default="dpo")
    parser.add_argument("--output", default="out/dpo", help="where the adapter and samples.jsonl go")
    parser.add_argument("--sft-steps", type=int, default=60, help="updates on solved problems first; 0 for none")
    parser.add_argument("--steps", type=int, default=100, help="updates on pairs")
    parser.add_argument("--learning-rate", type=float, default=2e-5, help="of the DPO stage")
    given = parser.parse_args()

    solved = read(DATA / "gsm8k", "train").rename_columns({"question": "prompt", "answer": "completion"})
    solved = solved.map(lambda row: {"completion": "\n" + row["completion"]})
    lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    usual = {"per_device_train_batch_size": 8, "report_to": "none", "save_strategy": "no"}
    sft = SFTConfig(given.output, max_steps=max(given.sft_steps, 1), learning_rate=2e-4, max_length=512, **usual)
    stage = SFTTrainer(given.model, sft, train_dataset=solved, peft_config=lora)
    if given.sft_steps:
        stage.train()
    policy = stage.model.merge_and_unload()  # the reference of the next stage is the model as it is now

    train, held_out = (
        read(PAIRS, split).map(lambda row: {side: "\n" + row[side] for side in ("chosen", "rejected")})
        for split in ("train", "test")
    )
    trainer_class = {"dpo": DPOTrainer, "kto": KTOTrainer}[given.method]
    args = trainer_class.config_class(
        given.output, max_steps=given.steps, learning_rate=given.learning_rate, max_length=768, beta=0.1,
        eval_strategy="steps", eval_steps=max(given.steps // 4, 1), eval_on_start=True, num_eval_samples=2,
        max_sample_tokens=160, **usual,
    )  # fmt: skip
    trainer = trainer_class(
        policy, args=args, train_dataset=train, eval_dataset=held_out, processing_class=stage.processing_class,
        peft_config=lora
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    metrics = trainer.evaluate()
    told = {
        name: value for name, value in metrics.items() if name in ("eval_rewards/accuracies", "eval_rewards/margins")
    }
    print("Held-out solutions:", ", ".join(f"{name} {value:.3f}" for name, value in told.items()))
    print(f"Policy and reference, side by side: {given.output}/samples.jsonl")


if __name__ == "__main__":
    main()
