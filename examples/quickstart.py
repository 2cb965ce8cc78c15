"""Train a small language model, and its tokenizer, from nothing on real maths problems; then look at what it learned.
Then, in a second act, teach a smaller one arithmetic by reinforcement learning: see `calculator.py` beside this file.

make quickstart                                 # about six minutes on two cores, no download
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
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from posttrain.core.report import loss_curve
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


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    size = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "max_position_embeddings": 1024}
    size |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **size, **tokens))


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


def main() -> None:
    started, name = time.time(), os.environ.get("MODEL")
    train, held_out = read("train"), read("test")
    recipe = {"per_device_train_batch_size": 8, "max_length": 256, "packing": True, "completion_only_loss": False}
    if name:
        from peft import LoraConfig

        model, tokenizer, adapter = name, None, LoraConfig(r=16, target_modules="all-linear")
        recipe |= {"learning_rate": 2e-4, "max_steps": 60, "eval_steps": 20, "completion_only_loss": True}
    else:
        tokenizer = make_tokenizer(train)
        model, adapter = make_model(tokenizer), None
        recipe |= {"learning_rate": 2e-3, "num_train_epochs": 2, "eval_steps": 100, "weight_decay": 0.1}
        # Half the time where the processor multiplies bfloat16 itself, and no faster where it does not.
        native = torch.cpu.get_capabilities()
        recipe |= {"bf16": bool(torch.cuda.is_available() or native.get("avx512_bf16") or native.get("amx_bf16"))}

    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(OUT),
            lr_scheduler_type="cosine",
            warmup_steps=20,
            logging_steps=10,
            eval_strategy="steps",
            eval_on_start=True,
            save_strategy="no",
            gradient_checkpointing=False,
            **recipe,
        ),
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=adapter,
    )
    model, tokenizer = trainer.model, trainer.processing_class
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"Model: {name or 'Qwen3 architecture, new'}, {size:.1f} million parameters")
    print(f"Data:  {len(train):,} GSM8K problems to learn from, {len(held_out)} held out")
    few = held_out.select(range(3))
    show("Before training, on held-out problems:", few, solve(model, tokenizer, list(few["prompt"])))

    print("\nTraining")
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model()

    tried = few if name else held_out
    solutions = solve(model, tokenizer, list(tried["prompt"]))
    show("After training, on the same problems:", few, solutions)
    losses = [record["eval_loss"] for record in trainer.state.log_history if "eval_loss" in record]
    answers = [result(text) for text in solutions]
    right = sum(a is not None and a == result(row["completion"]) for a, row in zip(answers, tried, strict=True))
    picture = loss_curve(trainer.state.log_history, OUT / "loss.html", title=f"Quickstart: {name or 'from nothing'}")
    print(f"\nHeld-out loss      {losses[0]:.2f} -> {after['eval_loss']:.2f} nats a token")
    print(f"Solutions finished {sum(a is not None for a in answers)} of {len(tried)} end in '#### number'")
    print(
        f"Answers right      {right} of {len(tried)}"
        + ("" if name else " (form comes first; arithmetic takes a larger model)")
    )
    print(f"Time               {time.time() - started:.0f} s")
    print(f"Model              {OUT.resolve()}")
    print(f"Loss curve         {picture.resolve()}")
    if not name:
        print("\nSecond act: the arithmetic, by fine-tuning and then by reinforcement learning")
        calculator.run(epochs=18, updates=60, minutes=1.5, out=OUT / "calculator")
    print("\nNext: make quickstart MODEL=Qwen/Qwen3-0.6B      fine-tunes a pretrained model on the same problems")


if __name__ == "__main__":
    main()
