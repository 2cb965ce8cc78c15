"""Truncated importance sampling rescues training whose engine samples from other probabilities (Yao et al. 2025,
https://fengyao.notion.site/off-policy-rl).

python examples/claims/sampling_mismatch.py

GRPO on calculator steps of GSM8K (arithmetic.py), with an engine that generates by a copy of the weights with
fewer bits, as engines do for speed; here with so few that the mismatch is large. `exact`: by the weights themselves.
`ignored`: with the copy, as if its samples were the policy's. `truncated`: each token is weighted by the ratio of the
policy's to the engine's probability, at most 2. The model has an eighth of a million parameters, and writes results
of two digits and nothing else.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from typing import Any

import arithmetic
import arms
import calculator
import torch

from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.generation.protocol import Completions, Sampling

ARMS = ("exact", "ignored", "truncated")
DIGITS, WIDTH = 2, 64
SETTINGS = {"bits": 4, "updates": 120, "batch": 256, "learning_rate": 3e-4, "problems": 800, "epochs": 60.0}
SMOKE = {"epochs": 0.2, "updates": 1, "batch": 16, "problems": 10}


class RoundedGenerator:
    """Generates with a copy of the weights whose matrices have `bits` bits, one scale for each row."""

    has_own_weights = True

    def __init__(self, tokenizer: Any, bits: int) -> None:
        self.engine, self.levels = LocalGenerator(tokenizer), 2 ** (bits - 1) - 1

    @torch.no_grad()
    def sync_weights(self, model: torch.nn.Module) -> None:
        rounded = copy.deepcopy(model).eval()
        for module in rounded.modules():
            if isinstance(module, torch.nn.Linear) and module is not rounded.get_output_embeddings():
                scale = module.weight.abs().amax(1, keepdim=True) / self.levels
                module.weight.copy_((module.weight / scale).round() * scale)
        self.engine.sync_weights(rounded)

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> Completions:
        found = self.engine.generate(prompts, n, sampling, seeds)
        return Completions(found.ids, found.logps, found.finished)  # the log-probabilities are the copy's: not exact


def measure(
    arm: str,
    seed: int,
    bits: int,
    updates: int,
    batch: int,
    learning_rate: float,
    problems: int,
    epochs: float = arithmetic.EPOCHS,
) -> arms.Figures:
    """Accuracy of drawn answers to held-out problems, with the policy's own weights; and how far the engine is off, in
    nats a token in the mean, where training looks at it."""
    known, tokenizer, new, held_out = arithmetic.fine_tuned(seed, epochs, marks=1, width=WIDTH)
    held_out = held_out.select(range(problems))
    with tempfile.TemporaryDirectory() as out:
        args = GRPOConfig(
            out, max_steps=updates, per_device_train_batch_size=batch, learning_rate=learning_rate, seed=seed,
            vllm_importance_sampling_correction=arm == "truncated", vllm_importance_sampling_mode="token_truncate",
            vllm_importance_sampling_clip_max=2.0, **(arithmetic.POLICY | {"max_completion_length": DIGITS + 1}),
        )  # fmt: skip
        engine = None if arm == "exact" else RoundedGenerator(tokenizer, bits)
        trainer = GRPOTrainer(
            copy.deepcopy(known), calculator.right, args, new, processing_class=tokenizer, generator=engine
        )  # fmt: skip
        trainer.train()
        log = trainer.state.log_history
    gaps = [
        value for record in log for name, value in record.items() if name == "sampling/sampling_logp_difference/mean"
    ]
    before, after = (drawn_right(model, tokenizer, held_out) for model in (known, trainer.model))
    return {"before": before, "accuracy": after} | ({"logp_gap": sum(gaps) / len(gaps)} if gaps else {})


def drawn_right(model: Any, tokenizer: Any, rows: Any) -> float:
    """The share of right ones among four drawn answers to each problem."""
    shares = calculator.shares(model, tokenizer, rows, draws=4)
    return sum(shares) / len(shares)


def verdict(figures: dict[str, list[arms.Figures]]) -> str:
    pairs = ("ignored", "exact"), ("truncated", "ignored"), ("truncated", "exact")
    harm, gain, left = (arms.bounds(arms.differences(figures, *pair, "accuracy")) for pair in pairs)
    told = [f"{100 * mean:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]" for mean, low, high in (harm, gain, left)]
    learned = 100 * arms.bounds(arms.differences(figures, "exact", "exact", "accuracy", "before"))[0]
    gap = arms.bounds(arms.column(figures, "truncated", "logp_gap"))[0]
    harms, helps = harm[2] < 0, gain[1] > 0  # there is nothing to rescue where the mismatch does no harm
    fails = gain[2] < 0 or (harms and not helps and left[2] < 0)
    found = "Holds" if harms and helps else "Does not hold" if fails else "Not shown"
    return (
        f"{found}: with an engine {gap:.2f} nats a token off, accuracy differs by {told[0]} from that of the exact "
        f"engine, which adds {learned:.1f}; truncated importance sampling adds {told[1]}, to {told[2]} from the exact."
    )


if __name__ == "__main__":
    arms.run(
        "Truncated importance sampling rescues a mismatched engine", "https://fengyao.notion.site/off-policy-rl", ARMS,
        measure, verdict, SETTINGS, SMOKE,
    )  # fmt: skip
