"""Reinforcement learning on real data in minutes on a CPU: the calculator steps of GSM8K, such as ``48/2=24``.

A model of half a million parameters is fine-tuned on a third of them. Then GRPO goes on, on prompts that fine-tuning
never saw, told by a checker which of the model's own answers are right. Accuracy is measured on steps that neither saw.

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

from posttrain.cli.report.plots import loss_curve, metric_curves
from posttrain.core import TrainerCallback
from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.sft import SFTConfig, SFTTrainer

DATA = Path(__file__).parent / "data" / "gsm8k" / "steps.txt"
HELD_OUT = 800
GREEDY, SAMPLED = "eval_greedy_pass@1", "eval_sampled_pass@1"


def read(seed: int, digits: int = 3, signs: str = "+-*/") -> tuple[Dataset, Dataset, Dataset]:
    """Distinct steps in three parts: a third to fine-tune on, `HELD_OUT` to measure on, and the rest for GRPO.

    Steps with another of `signs` or a longer number are left out. Every number has so many `digits`: with leading zeros
    the places of all numbers line up, as in 048/002=024.
    """
    lines = DATA.read_text(encoding="utf-8").splitlines()
    short = [
        line
        for line in lines
        if re.search(f"[{re.escape(signs)}]", line) and not re.search(rf"\d{{{digits + 1}}}", line)
    ]
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


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int, width: int = 128) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    size = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 3}
    size |= {"num_attention_heads": width // 32, "num_key_value_heads": width // 32, "head_dim": 32}
    size |= {"max_position_embeddings": 32, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **size, **tokens))


def fine_tune(model: Qwen3ForCausalLM, tokenizer, rows: Dataset, epochs: float, seed: int, out: Path) -> SFTTrainer:
    args = SFTConfig(
        output_dir=str(out / "sft"),
        num_train_epochs=epochs,
        per_device_train_batch_size=64,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=50,
        weight_decay=0.1,
        gradient_checkpointing=False,
        logging_first_step=True,
        logging_steps=50,
        save_strategy="no",
        seed=seed,
    )
    rows = rows.rename_column("result", "completion")
    trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    return trainer


@torch.no_grad()
def answer(model: Qwen3ForCausalLM, tokenizer, rows: Dataset, **options) -> list[str]:
    """One answer to each problem: the most probable, or with ``do_sample=True`` one that is drawn."""
    model.eval()
    inputs = tokenizer(list(rows["prompt"]), return_tensors="pt").to(model.device)  # all of one length
    longest = len(rows[0]["result"]) + 1
    options = {"do_sample": False, "pad_token_id": tokenizer.pad_token_id, "max_new_tokens": longest} | options
    found = model.generate(**inputs, **options)
    return tokenizer.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def shares(model: Qwen3ForCausalLM, tokenizer, rows: Dataset, draws: int = 8) -> list[float]:
    """For each problem, which share of so many drawn answers is right."""
    torch.manual_seed(0)
    drawn = [right(answer(model, tokenizer, rows, do_sample=True, top_k=0), rows["result"]) for _ in range(draws)]
    return [sum(each) / draws for each in zip(*drawn, strict=True)]


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
    model, tokenizer, new: Dataset, held_out: Dataset, updates: int, minutes: float, seed: int, out: Path, changes: dict
) -> Calculator:
    options = dict(
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
        eval_steps=0.25,  # of all updates
        per_device_eval_batch_size=4 * HELD_OUT,
        logging_first_step=True,
        logging_steps=10,
        save_strategy="no",
        seed=seed,
    )
    args = GRPOConfig(output_dir=str(out), **(options | changes))
    trainer = Calculator(model, right, args, new, held_out, tokenizer, callbacks=[TimeLimit(minutes)])
    trainer.train()
    trainer.save_model()
    return trainer


def verdict(before: list[float], after: list[float], done: int, updates: int) -> str:
    """What the same held-out problems show of GRPO before and after it, and what they do not."""
    gains = torch.tensor(after, dtype=torch.double) - torch.tensor(before, dtype=torch.double)
    gain, error = 100 * gains.mean().item(), 100 * gains.std().item() / len(gains) ** 0.5
    found = f"{gain:+.1f} points on {len(gains)} problems, standard error {error:.1f}"
    if done < updates:
        return f"Time ran out after {done} of {updates} updates, too early to judge GRPO ({found})."
    if abs(gain) <= 2 * error:
        return f"GRPO did not change the model by more than chance may: {found}."
    return f"GRPO made the model {'better' if gain > 0 else 'worse'}: {found}."


def show(rows: Dataset, answers: list[str], count: int = 5) -> None:
    for problem, result, text in list(zip(rows["prompt"], rows["result"], answers, strict=True))[:count]:
        note = "right" if text == result else f"wrong, {result}"
        print(f"  {problem}{text or '(nothing)':<8} {note}")


def run(
    seed: int = 0,
    epochs: float = 40,
    updates: int = 400,
    minutes: float = 60,
    out: Path = Path("out/calculator"),
    digits: int = 3,
    signs: str = "+-*/",
    **changes,
) -> list[tuple[int, float, float]]:
    """(updates of GRPO, greedy accuracy, sampled accuracy) on held-out steps, from fine-tuning on. `changes` are
    arguments of GRPO.
    """
    started = time.monotonic()
    known, new, held_out = read(seed, digits, signs)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"Model: Qwen3 architecture, new, {size:.2f} million parameters; each digit is a token")
    print(f"Data:  {len(known):,} calculator steps to fine-tune on, {len(new):,} for GRPO, {len(held_out):,} held out")
    answers = answer(model, tokenizer, held_out)
    nothing = sum(right(answers, held_out["result"])) / len(held_out)
    print("\nBefore training, on held-out steps:")
    show(held_out, answers)

    print("\nFine-tuning")
    fine_tuning = fine_tune(model, tokenizer, known, epochs, seed, out)
    losses = out / "loss.svg"
    loss_curve(fine_tuning.state.log_history, losses, title="Fine-tuning on calculator steps")
    print("\nAfter fine-tuning:")
    show(held_out, answer(model, tokenizer, held_out))
    before = shares(model, tokenizer, held_out)

    print("\nGRPO on steps that fine-tuning never saw; the reward is 1 for exactly the right number")
    trainer = reinforce(model, tokenizer, new, held_out, updates, minutes, seed, out, changes)
    history, done = trainer.state.log_history, trainer.state.global_step
    after = shares(trainer.model, tokenizer, held_out)

    greedy, sampled = ({r["step"]: r[key] for r in history if key in r} for key in (GREEDY, SAMPLED))
    curve = [(step, greedy[step], sampled[step]) for step in sampled]
    print("\nHeld-out accuracy, which neither saw\n\n  updates   greedy   sampled")
    for step, most, drawn in curve:
        print(f"  {step:7d}  {most:7.1%}   {drawn:7.1%}  {'#' * round(50 * drawn)}")
    lines = {SAMPLED: "held out, sampled", GREEDY: "held out, greedy", "reward": "GRPO's own prompts, sampled"}
    accuracy = out / "accuracy.svg"
    metric_curves(history, lines, accuracy, "GRPO on calculator steps", "share right")
    print(f"\nFine-tuning     {nothing:.1%} -> {curve[0][1]:.1%} of {len(held_out)} held-out steps right (greedy)")
    print(f"GRPO            {sum(before) / len(before):.1%} -> {sum(after) / len(after):.1%} right (sampled)")
    print(f"                {verdict(before, after, done, updates)}")
    print(f"Time            {time.monotonic() - started:.0f} s")
    print(f"Model           {out.resolve()}")
    print(f"Loss curve      {losses.resolve()}")
    print(f"Accuracy curve  {accuracy.resolve()}")
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="of the split, the first weights and the samples")
    parser.add_argument("--epochs", type=float, help="of fine-tuning")
    parser.add_argument("--updates", type=int, help="of GRPO, of 128 prompts each")
    parser.add_argument("--digits", type=int, help="of the largest numbers: 3, or 2 for the easier half of the steps")
    parser.add_argument("--signs", help="which steps: + - * / or some of them")
    parser.add_argument("--minutes", type=float, help="that GRPO may take; it ends there")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the model and the curve go")
    run(**{name: value for name, value in vars(parser.parse_args()).items() if value is not None})


if __name__ == "__main__":
    main()
