"""A loss on completions alone teaches an answer better than one on the whole rows (Dettmers et al. 2023,
https://arxiv.org/abs/2305.14314, appendix B.3; Shi et al. 2024, https://arxiv.org/abs/2405.14394, find the reverse for
long prompts, short answers and few rows).

python examples/claims/completion_only.py

SmolLM2-135M with LoRA answers in one word whether a review is positive, as in examples/quickstart.py: equal rows,
updates and learning rate; the loss is on the answer, or on the question too.
"""

from __future__ import annotations

import random
import tempfile

import arms
import quickstart
import torch
from peft import LoraConfig

from posttrain.sft import SFTConfig, SFTTrainer

SETTINGS = {"updates": 16, "batch": 16, "held_out": 150, "learning_rate": 5e-4}
SMOKE = {"updates": 1, "batch": 2, "held_out": 4}


def measure(arm: str, seed: int, updates: int, batch: int, held_out: int, learning_rate: float) -> arms.Figures:
    """Shares of held-out reviews: answered exactly, the right word more probable; the answer's loss in nats a token."""
    name = str(quickstart.pretrained.folder())
    _, train, aside = quickstart.read_reviews()
    train, aside = random.Random(seed).sample(train, updates * batch), aside[:held_out]
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as out:
        args = SFTConfig(
            out, max_steps=updates, per_device_train_batch_size=batch, per_device_eval_batch_size=50, max_length=512,
            learning_rate=learning_rate, lr_scheduler_type="linear", warmup_steps=2, seed=seed, save_strategy="no",
            completion_only_loss=arm == "completion", model_init_kwargs={"dtype": quickstart.precision()},
            gradient_checkpointing=False, logging_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        rows = {key: quickstart.as_turns(part, True) for key, part in (("train", train), ("eval", aside))}
        lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
        trainer = SFTTrainer(
            name, args, train_dataset=rows["train"], eval_dataset=rows["eval"], peft_config=lora
        )  # fmt: skip
        trainer.train()
    # On the answers alone, whatever was trained on.
    with tempfile.TemporaryDirectory() as out:
        args = SFTConfig(out, per_device_eval_batch_size=50, max_length=512, report_to="none")
        scorer = SFTTrainer(
            trainer.model, args, train_dataset=rows["eval"], eval_dataset=rows["eval"],
            processing_class=trainer.processing_class,
        )  # fmt: skip
        right, scores, loss = quickstart.measure(scorer)
        wrong = quickstart.measure(scorer, quickstart.as_turns(quickstart.swapped(aside), True))[1]
    likelier = [a > b for a, b in zip(scores, wrong, strict=True)]
    return {"exact": sum(right) / len(right), "likelier": sum(likelier) / len(likelier), "answer_loss": loss}


def verdict(figures: dict[str, list[arms.Figures]]) -> str:
    mean, low, high = arms.bounds(arms.differences(figures, "completion", "whole rows", "exact"))
    loss = arms.interval(arms.differences(figures, "completion", "whole rows", "answer_loss"))
    found = "Holds" if low > 0 else "Does not hold" if high < 0 else "Not shown"
    return (
        f"{found}: completion minus whole rows {100 * mean:+.1f} points of exact answers [{100 * low:+.1f}, "
        f"{100 * high:+.1f}], and {loss} nats a token of the answer."
    )


if __name__ == "__main__":
    arms.run(
        "A loss on completions alone teaches the answer better", "https://arxiv.org/abs/2305.14314, appendix B.3",
        ["completion", "whole rows"], measure, verdict, SETTINGS, SMOKE,
    )  # fmt: skip
