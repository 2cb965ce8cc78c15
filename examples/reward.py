"""Train a reward model to tell right solutions from wrong ones, on pairs that real models wrote for GSM8K problems.

python examples/reward.py                                # a small model from nothing: minutes on two cores, no download
python examples/reward.py --model Qwen/Qwen3-0.6B        # LoRA on a pretrained one: a Hub name or a folder

A slice of the pairs ships in examples/data; POSTTRAIN_DATA names a folder with all of them (gsm8k_preferences/*.jsonl).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from datasets import load_dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification

from posttrain.rl import RewardConfig, RewardTrainer

PAIRS = Path(os.environ.get("POSTTRAIN_DATA", Path(__file__).parent / "data")) / "gsm8k_preferences"


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """2,048 tokens of byte-level BPE, learned from `texts`. Each digit is a token: numbers are read digit by digit."""
    bpe = Tokenizer(models.BPE())
    by_digit = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([by_digit, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    special = {"pad_token": "<|pad|>", "eos_token": "<|end|>"}
    alphabet = {"special_tokens": [*special.values()], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=2048, show_progress=False, **alphabet))
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=bpe, model_input_names=names, model_max_length=1024, **special)


def make_model(tokenizer) -> Qwen3ForSequenceClassification:
    torch.manual_seed(0)
    size = {"hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 3, "num_attention_heads": 4}
    size |= {"num_key_value_heads": 2, "head_dim": 48, "vocab_size": len(tokenizer), "num_labels": 1}
    return Qwen3ForSequenceClassification(Qwen3Config(pad_token_id=tokenizer.pad_token_id, **size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="name on the Hub, or a folder; by default a new small one")
    parser.add_argument("--output", default="out/reward", help="where the model goes")
    parser.add_argument("--epochs", type=float, default=2.0, help="passes over the pairs")
    given = parser.parse_args()

    parts = {
        split: load_dataset("json", data_files=str(PAIRS / f"{split}.jsonl"), split="train")
        for split in ("train", "test")
    }
    parts = {s: part.map(lambda row: {k: "\n" + row[k] for k in ("chosen", "rejected")}) for s, part in parts.items()}
    model, tokenizer, adapter, rate = given.model, None, None, 2e-4
    if model is None:
        tokenizer, rate = make_tokenizer([row["prompt"] + row["chosen"] for row in parts["train"]]), 5e-4
        model = make_model(tokenizer)
    else:
        adapter = LoraConfig(r=16, target_modules="all-linear", task_type="SEQ_CLS")
    args = RewardConfig(
        given.output, num_train_epochs=given.epochs, learning_rate=rate, per_device_train_batch_size=16, max_length=512,
        lr_scheduler_type="cosine", weight_decay=0.1, center_rewards_coefficient=0.01, gradient_checkpointing=False,
        eval_strategy="epoch", eval_on_start=True, save_strategy="no", report_to="none",
    )  # fmt: skip
    trainer = RewardTrainer(
        model, args, train_dataset=parts["train"], eval_dataset=parts["test"], processing_class=tokenizer,
        peft_config=adapter
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    print(f"Held-out pairs: the right solution gets the higher reward in {trainer.evaluate()['eval_accuracy']:.1%}")


if __name__ == "__main__":
    main()
