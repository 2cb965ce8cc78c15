"""Fine-tune a pretrained model on conversations with LoRA.

python examples/sft.py                                        # a few minutes on one GPU
torchrun --nproc-per-node 4 examples/sft.py                   # the same on four
python examples/sft.py --model my/model --data my/dataset     # rows with "messages", or "question" and "answer"
python examples/sft.py --data path/to/gsm8k/train.jsonl       # a file
"""

from __future__ import annotations

import argparse

from datasets import Dataset, load_dataset
from peft import LoraConfig

from posttrain.cli.report.plots import loss_curve
from posttrain.sft import SFTConfig, SFTTrainer


def read(name: str) -> Dataset:
    """Rows of a JSON Lines file or of a dataset on the Hub, as conversations."""
    is_file = name.endswith((".json", ".jsonl"))
    rows = load_dataset("json", data_files=name, split="train") if is_file else load_dataset(name, split="train")
    if "question" not in rows.column_names:
        return rows
    return rows.map(
        lambda row: {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        },
        remove_columns=rows.column_names,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="name on the Hub, or a folder")
    parser.add_argument("--data", default="trl-lib/Capybara", help="name on the Hub, or a JSON Lines file")
    parser.add_argument("--output", default="out/sft", help="where the adapter, its tokenizer and the loss curve go")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    given = parser.parse_args()

    rows = read(given.data)
    parts = rows.train_test_split(test_size=min(200, len(rows) // 10), seed=0)
    trainer = SFTTrainer(
        model=given.model,
        args=SFTConfig(
            output_dir=given.output,
            max_steps=given.steps,
            learning_rate=2e-4,  # ten times that of full fine-tuning
            max_length=2048,
            packing=True,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            eval_strategy="steps",
            eval_steps=50,
            assistant_only_loss=True,
        ),
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()
    loss_curve(trainer.state.log_history, f"{given.output}/loss.svg", title=given.model)
    print(f"Loss curve: {given.output}/loss.svg")


if __name__ == "__main__":
    main()
