"""Dr. GRPO's loss removes the length bias of GRPO's (Liu et al. 2025, https://arxiv.org/abs/2503.20783).

python examples/claims/length_bias.py

GRPO divides the loss of each completion by its length: a long wrong answer is pushed down less than a short one, a long
right answer up less. So wrong answers grow, and right ones shrink, although the reward looks at neither length. Dr.
GRPO divides by a constant. Here a model of half a million parameters writes the result of a calculator step of GSM8K
(arithmetic.py), and behind it so many `=` as it likes: in fine-tuning 0 to 7 of them, at random.
"""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import arithmetic
import arms
import calculator
import torch
from datasets import Dataset

from posttrain.rl import GRPOConfig, GRPOTrainer

DIGITS = 2
#: loss_type, scale_rewards
ARMS = {"grpo": ("grpo", "group"), "dr_grpo": ("dr_grpo", "none")}
SETTINGS = {"updates": 40, "batch": 256, "learning_rate": 3e-4, "problems": 400}
SMOKE = {"epochs": 0.2, "updates": 1, "batch": 16, "problems": 10}


def right(completions: list[str], result: list[str], **_: Any) -> list[float]:
    """1 for the right number, whatever follows it."""
    return [float(text[:DIGITS] == number) for text, number in zip(completions, result, strict=True)]


def look(model: Any, tokenizer: Any, rows: Dataset) -> tuple[float, float, float]:
    """(accuracy, mean length of wrong answers, of right ones), of drawn answers to held-out problems."""
    torch.manual_seed(0)
    model.eval()
    texts = [text for _ in range(4) for text in drawn(model, tokenizer, rows)]
    marks = torch.tensor(right(texts, list(rows["result"]) * 4)).bool()
    lengths = torch.tensor([float(len(text)) for text in texts])
    return marks.double().mean().item(), lengths[~marks].mean().item(), lengths[marks].mean().item()


def drawn(model: Any, tokenizer: Any, rows: Dataset) -> list[str]:
    return calculator.answer(model, tokenizer, rows, do_sample=True, top_k=0, max_new_tokens=arithmetic.LONGEST)


def measure(
    arm: str,
    seed: int,
    updates: int,
    batch: int,
    learning_rate: float,
    problems: int,
    epochs: float = arithmetic.EPOCHS,
) -> arms.Figures:
    """Changes of the mean lengths of wrong and of right answers, in tokens, and of the accuracy."""
    known, tokenizer, new, held_out = arithmetic.fine_tuned(seed, epochs)
    held_out = held_out.select(range(problems))
    before = look(known, tokenizer, held_out)
    loss_type, scale = ARMS[arm]
    with tempfile.TemporaryDirectory() as out:
        args = GRPOConfig(
            out, loss_type=loss_type, scale_rewards=scale, max_steps=updates, per_device_train_batch_size=batch,
            learning_rate=learning_rate, seed=seed, **arithmetic.POLICY,
        )  # fmt: skip
        trainer = GRPOTrainer(copy.deepcopy(known), right, args, new, processing_class=tokenizer)
        trainer.train()
    after = look(trainer.model, tokenizer, held_out)
    names = ("accuracy", "wrong_length", "right_length")
    found = {f"{name}_before": value for name, value in zip(names, before, strict=True)}
    return found | {f"{name}_change": b - a for name, a, b in zip(names, before, after, strict=True)}


def verdict(figures: dict[str, list[arms.Figures]]) -> str:
    of = {arm: arms.bounds(arms.column(figures, arm, "wrong_length_change")) for arm in figures}
    more = arms.bounds(arms.differences(figures, "grpo", "dr_grpo", "wrong_length_change"))
    told = [f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]" for mean, low, high in (of["grpo"], of["dr_grpo"], more)]
    found = "Holds" if more[1] > 0 and of["dr_grpo"][1] <= 0 <= of["dr_grpo"][2] else "Not shown"
    found = "Does not hold" if more[2] < 0 or of["dr_grpo"][1] > 0 else found
    return (
        f"{found}: wrong answers changed their length by {told[0]} tokens with GRPO and by {told[1]} with Dr. GRPO, a "
        f"difference of {told[2]}."
    )


if __name__ == "__main__":
    arms.run(
        "Dr. GRPO's loss removes GRPO's length bias", "https://arxiv.org/abs/2503.20783", list(ARMS), measure, verdict,
        SETTINGS, SMOKE,
    )  # fmt: skip
