"""A loss on completions alone teaches an answer better than one on the whole rows (Dettmers et al. 2023,
https://arxiv.org/abs/2305.14314, appendix B.3; Shi et al. 2024, https://arxiv.org/abs/2405.14394, find the reverse for
long prompts, short answers and few rows).

python examples/claims/completion_only.py

A new model of half a million parameters learns to add and subtract on calculator steps of GSM8K: equal rows, updates
and learning rate; the loss is on the result, or on the problem too, which cannot be foreseen.
"""

from __future__ import annotations

import tempfile

import arms
import calculator
from datasets import concatenate_datasets

from posttrain.sft import SFTConfig, SFTTrainer

SETTINGS = {"updates": 200, "batch": 64, "learning_rate": 3e-3, "problems": 800}
SMOKE = {"updates": 1, "batch": 8, "problems": 20}


def measure(arm: str, seed: int, updates: int, batch: int, learning_rate: float, problems: int) -> arms.Figures:
    """The share of held-out steps whose most probable answer is right, and the loss of the result in nats a token."""
    known, new, held_out = calculator.read(seed, digits=2, signs="+-")
    held_out = held_out.select(range(problems))
    tokenizer = calculator.make_tokenizer()
    model = calculator.make_model(tokenizer, seed)
    with tempfile.TemporaryDirectory() as out:
        usual = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
        args = SFTConfig(
            out, max_steps=updates, per_device_train_batch_size=batch, learning_rate=learning_rate, seed=seed,
            lr_scheduler_type="cosine", warmup_steps=30, weight_decay=0.1, gradient_checkpointing=False,
            completion_only_loss=arm == "completion", **usual,
        )  # fmt: skip
        rows = concatenate_datasets([known, new]).rename_column("result", "completion")
        SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer).train()
        # The loss of the results, whatever was trained on.
        args = SFTConfig(out, per_device_eval_batch_size=400, **usual)
        aside = held_out.rename_column("result", "completion")
        scorer = SFTTrainer(model, args, train_dataset=aside, eval_dataset=aside, processing_class=tokenizer)
        loss = scorer.evaluate()["eval_loss"]
    answers = calculator.answer(model, tokenizer, held_out)
    return {"accuracy": sum(calculator.right(answers, held_out["result"])) / len(answers), "answer_loss": loss}


def verdict(figures: dict[str, list[arms.Figures]]) -> str:
    mean, low, high = arms.bounds(arms.differences(figures, "completion", "whole rows", "accuracy"))
    loss = arms.interval(arms.differences(figures, "completion", "whole rows", "answer_loss"))
    found = arms.shown(low, high)
    return (
        f"{found}: completion minus whole rows {100 * mean:+.1f} points of right answers [{100 * low:+.1f}, "
        f"{100 * high:+.1f}], and {loss} nats a token of the answer."
    )


if __name__ == "__main__":
    arms.run(
        "A loss on completions alone teaches the answer better", "https://arxiv.org/abs/2305.14314, appendix B.3",
        ["completion", "whole rows"], measure, verdict, SETTINGS, SMOKE,
    )  # fmt: skip
