"""Reinforcement learning on real data in minutes on a CPU: the calculator steps of GSM8K, such as ``48/2=24``.

A model of half a million parameters is fine-tuned on a third of them. Then GRPO goes on, on prompts that fine-tuning never
saw, told by a checker which of the model's own answers are right. Accuracy is measured on steps that neither saw.

python examples/calculator.py
python examples/calculator.py --seed 1 --updates 1000 --minutes 10
"""

from __future__ import annotations

import argparse
import random
import re
import time
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from posttrain.core import TrainerCallback
from posttrain.core.report import metric_curves
from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.sft import SFTConfig, SFTTrainer

DATA = Path(__file__).parent / "data" / "gsm8k" / "steps.txt"
HELD_OUT = 800
GREEDY, SAMPLED = "eval_greedy_pass@1", "eval_sampled_pass@1"


def read(seed: int, digits: int = 3) -> tuple[Dataset, Dataset, Dataset]:
    """Distinct steps in three parts: a third to fine-tune on, `HELD_OUT` to measure on, and the rest for GRPO.

    Every number has so many `digits`: with leading zeros the places of all numbers line up, as in 048/002=024.
    """
    lines = DATA.read_text(encoding="utf-8").splitlines()
    short = [line for line in lines if max(map(len, re.findall(r"\d+", line))) <= digits]
    steps = [re.sub(r"\d+", lambda number: number[0].zfill(digits), line).partition("=") for line in short]
    rows = [{"prompt": f"{problem}=", "result": result} for problem, _, result in steps]
    random.Random(seed).shuffle(rows)
    third, rest = len(rows) // 3, len(rows) - HELD_OUT
    return Dataset.from_list(rows[:third]), Dataset.from_list(rows[third:rest]), Dataset.from_list(rows[rest:])


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Each character is a token, read from left to right."""
    special = {"pad_token": "<|pad|>", "eos_token": "<|end|>"}
    vocabulary = {token: i for i, token in enumerate([*special.values(), *"0123456789+-*/="])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<|pad|>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=characters, model_input_names=names, **special)


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "max_position_embeddings": 32}
    size |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **size, **tokens))


def fine_tune(model: Qwen3ForCausalLM, tokenizer, rows: Dataset, epochs: float, seed: int, out: Path) -> None:
    args = SFTConfig(
        output_dir=str(out / "sft"),
        num_train_epochs=epochs,
        per_device_train_batch_size=64,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=50,
        weight_decay=0.1,
        gradient_checkpointing=False,
        logging_steps=100,
        save_strategy="no",
        seed=seed,
    )
    SFTTrainer(
        model, args, train_dataset=rows.rename_column("result", "completion"), processing_class=tokenizer
    ).train()


def right(completions: list[str], result: list[str], **_) -> list[float]:
    """The reward: 1 for exactly the right number, else 0."""
    return [float(completion == number) for completion, number in zip(completions, result, strict=True)]


class Calculator(GRPOTrainer):
    """Evaluates twice: the most probable answers, and four of each prompt drawn at temperature 1."""

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        found = {}
        for name, self.args.eval_temperature, self.num_generations_eval in (("greedy", 0.0, 1), ("sampled", 1.0, 4)):
            found |= super().evaluate(eval_dataset, ignore_keys, f"{metric_key_prefix}_{name}")
        return found


class TimeLimit(TrainerCallback):
    """Ends training, with a last evaluation, after so many minutes."""

    def __init__(self, minutes: float) -> None:
        self.seconds = 60 * minutes

    def on_train_begin(self, args, state, control, **_) -> None:
        self.ends = time.monotonic() + self.seconds

    def on_step_end(self, args, state, control, **_) -> None:
        if time.monotonic() > self.ends:
            control.should_evaluate = control.should_training_stop = True


def reinforce(
    model,
    tokenizer,
    new: Dataset,
    held_out: Dataset,
    updates: int,
    minutes: float,
    seed: int,
    evaluations: int,
    out: Path,
) -> Calculator:
    args = GRPOConfig(
        output_dir=str(out),
        max_steps=updates,
        per_device_train_batch_size=1024,
        num_generations=8,
        max_completion_length=len(new[0]["result"]) + 1,  # and the end
        learning_rate=5e-4,
        lr_scheduler_type="linear",
        warmup_steps=10,
        gradient_checkpointing=False,
        eval_strategy="steps",
        eval_on_start=True,
        eval_steps=max(1, updates // evaluations),
        per_device_eval_batch_size=4 * HELD_OUT,
        logging_first_step=True,
        logging_steps=10,
        save_strategy="no",
        seed=seed,
    )
    trainer = Calculator(model, right, args, new, held_out, tokenizer, callbacks=[TimeLimit(minutes)])
    trainer.train()
    trainer.save_model()
    return trainer


def standard_error(share: float) -> float:
    """Of a share of `HELD_OUT` prompts. Four samples of a prompt count as one, since they are alike."""
    return (share * (1 - share) / HELD_OUT) ** 0.5


def verdict(curve: list[tuple[int, float, float]], updates: int) -> str:
    """What the curve shows of GRPO, and what it does not."""
    (_, _, before), (done, _, after) = curve[0], curve[-1]
    if done < updates:
        return f"Time ran out after {done} of {updates} updates: too early to say what GRPO gains here."
    gain, noise = after - before, (standard_error(before) ** 2 + standard_error(after) ** 2) ** 0.5
    told = "GRPO made the model better" if gain > 2 * noise else "No gain that stands out from chance"
    return f"{told}: {100 * gain:+.1f} points of sampled answers, standard error {100 * noise:.1f}."


def run(
    seed: int = 0,
    epochs: float = 40,
    updates: int = 400,
    minutes: float = 60,
    out: Path = Path("out/calculator"),
    digits: int = 3,
    evaluations: int = 4,
) -> list[tuple[int, float, float]]:
    """(updates of GRPO, greedy accuracy, sampled accuracy) on held-out steps, from fine-tuning on."""
    started = time.monotonic()
    known, new, held_out = read(seed, digits)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"Model: Qwen3 architecture, new, {size:.2f} million parameters; each digit is a token")
    print(f"Data:  {len(known):,} calculator steps to fine-tune on, {len(new):,} for GRPO, {len(held_out):,} held out")
    print("\nFine-tuning")
    fine_tune(model, tokenizer, known, epochs, seed, out)
    print("\nGRPO on steps that fine-tuning never saw; the reward is 1 for exactly the right number")
    trainer = reinforce(model, tokenizer, new, held_out, updates, minutes, seed, evaluations, out)
    history = trainer.state.log_history

    greedy, sampled = ({r["step"]: r[key] for r in history if key in r} for key in (GREEDY, SAMPLED))
    curve = [(step, greedy[step], sampled[step]) for step in sampled]
    print(
        f"\nAccuracy on {len(held_out):,} steps that neither saw, with standard errors\n\n  updates         greedy        sampled"
    )
    for step, *shares in curve:
        shown = "   ".join(f"{share:6.1%} ± {100 * standard_error(share):.1f}" for share in shares)
        print(f"  {step:7d}   {shown}  {'#' * round(50 * shares[-1])}")
    print(f"\n{verdict(curve, updates)}")
    lines = {SAMPLED: "held out, sampled", GREEDY: "held out, greedy", "reward": "GRPO's own prompts, sampled"}
    picture = metric_curves(history, lines, out / "accuracy.html", "GRPO on calculator steps", "share right")
    print(f"\nTime            {time.monotonic() - started:.0f} s")
    print(f"Model           {out.resolve()}")
    print(f"Accuracy curve  {picture.resolve()}")
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="of the split, the first weights and the samples")
    parser.add_argument("--epochs", type=float, help="of fine-tuning")
    parser.add_argument("--updates", type=int, help="of GRPO, of 128 prompts each")
    parser.add_argument("--digits", type=int, help="of the largest numbers: 3, or 2 for the easier half of the steps")
    parser.add_argument("--minutes", type=float, help="that GRPO may take; it ends there")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the model and the curve go")
    run(**{name: value for name, value in vars(parser.parse_args()).items() if value is not None})


if __name__ == "__main__":
    main()
