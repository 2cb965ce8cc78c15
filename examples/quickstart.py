"""Teach a small new model to add and subtract, on steps of real maths problems: first by fine-tuning, then by
reinforcement learning (`calculator.py` beside this file). Or fine-tune a pretrained model on the problems themselves.

make quickstart                                 # two minutes on two idle cores, no download
make quickstart MODEL=Qwen/Qwen3-0.6B           # LoRA on a pretrained model instead: a Hub name or a folder
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import calculator
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from posttrain.core.logging.plots import loss_curve
from posttrain.sft import SFTConfig, SFTTrainer

DATA = Path(__file__).parent / "data" / "gsm8k"
OUT = Path("out/quickstart")


def read(split: str) -> Dataset:
    """Problems with their worked solutions, without the marks for a calculator (``<<48/2=24>>``)."""
    rows = [json.loads(line) for line in (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = [(row["question"] + "\n", re.sub(r"<<.*?>>", "", row["answer"])) for row in rows]
    return Dataset.from_list([{"prompt": question, "completion": answer} for question, answer in texts])


def make_tokenizer(rows: Dataset) -> PreTrainedTokenizerFast:
    """2,048 tokens of byte-level BPE, learned from `rows`. Each digit is a token: numbers are read digit by digit."""
    bpe = Tokenizer(models.BPE())
    by_digit = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([by_digit, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = {"pad_token": "<|pad|>", "eos_token": "<|end|>"}
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=[*special.values()], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator((row["prompt"] + row["completion"] for row in rows), trainer)
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=bpe, model_input_names=names, model_max_length=1024, **special)


@torch.no_grad()
def solve(model: torch.nn.Module, tokenizer, prompts: list[str]) -> list[str]:
    model.eval()
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    rows = model.generate(**inputs, max_new_tokens=120, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return [text.strip() for text in tokenizer.batch_decode(rows[:, inputs["input_ids"].shape[1] :], True)]


def result(solution: str) -> str | None:
    found = re.search(r"#### *\$?(-?[\d.,]+)\s*$", solution)
    return found and found.group(1).replace(",", "")


def show(title: str, rows: Dataset, solutions: list[str]) -> None:
    print(f"\n{title}")
    for row, solution in zip(rows, solutions, strict=False):
        print(f"\n  {row['prompt'].strip()}")
        print("\n".join(f"    > {line}" for line in (solution or "(nothing)")[:300].splitlines()))


def from_nothing() -> None:
    """Two acts, each judged on problems that it never saw."""
    options = {"per_device_train_batch_size": 256, "learning_rate": 2e-4, "eval_steps": 40}
    calculator.run(epochs=45, updates=120, minutes=2.5, out=OUT, digits=2, signs="+-", **options)
    print("\nNext: make quickstart MODEL=Qwen/Qwen3-0.6B      fine-tunes a pretrained model on whole maths problems")


def fine_tune(name: str) -> None:
    from peft import LoraConfig

    started = time.time()
    train, held_out = read("train"), read("test")
    trainer = SFTTrainer(
        model=name,
        args=SFTConfig(
            output_dir=str(OUT),
            per_device_train_batch_size=8,
            max_length=256,
            packing=True,
            completion_only_loss=True,
            learning_rate=2e-4,
            lr_scheduler_type="cosine",
            warmup_steps=20,
            max_steps=60,
            logging_steps=10,
            eval_strategy="steps",
            eval_on_start=True,
            eval_steps=20,
            save_strategy="no",
            gradient_checkpointing=False,
        ),
        train_dataset=train,
        eval_dataset=held_out,
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
    )
    model, tokenizer = trainer.model, trainer.processing_class
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"Model: {name}, {size:.1f} million parameters")
    print(f"Data:  {len(train):,} GSM8K problems to learn from, {len(held_out)} held out")
    few = held_out.select(range(3))
    show("Before training, on held-out problems:", few, solve(model, tokenizer, list(few["prompt"])))

    print("\nTraining")
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model()

    solutions = solve(model, tokenizer, list(few["prompt"]))
    show("After training, on the same problems:", few, solutions)
    losses = [record["eval_loss"] for record in trainer.state.log_history if "eval_loss" in record]
    answers = [result(text) for text in solutions]
    right = sum(a is not None and a == result(row["completion"]) for a, row in zip(answers, few, strict=True))
    curve = OUT / "loss.svg"
    loss_curve(trainer.state.log_history, curve, title=f"Quickstart: {name}")
    print(f"\nHeld-out loss      {losses[0]:.2f} -> {after['eval_loss']:.2f} nats a token")
    print(f"Solutions finished {sum(a is not None for a in answers)} of {len(few)} end in '#### number'")
    print(f"Answers right      {right} of {len(few)}")
    print(f"Time               {time.time() - started:.0f} s")
    print(f"Model              {OUT.resolve()}")
    print(f"Loss curve         {curve.resolve()}")


def main() -> None:
    if name := os.environ.get("MODEL"):
        fine_tune(name)
    else:
        from_nothing()


if __name__ == "__main__":
    main()
