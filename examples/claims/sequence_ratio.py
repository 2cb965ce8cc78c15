"""Where many steps learn from a rollout, importance ratios of sequences (GSPO) train better than those of tokens
(Zheng et al. 2025, https://arxiv.org/abs/2507.18071, section 5.1).

make quickstart                                     # installs SmolLM2-135M-Instruct
python examples/claims/sequence_ratio.py

The task and the fine-tuned model of verifiable_rewards.py. A rollout is learned from in eight optimizer steps, so that
the last sees answers that are seven updates old. Each ratio is clipped as in the paper: tokens by 0.2 and 0.27,
sequences by 3e-4 and 4e-4. All else is equal.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from typing import Any

import arms
import verifiable_rewards as task

SETTINGS = {
    "known": 128, "epochs": 2.0, "sft_rate": 1e-4, "sft_batch": 16,
    "updates": 32, "stale": 8, "batch": 64, "grpo_rate": 2e-5, "prompts": 120,
}  # fmt: skip
SMOKE = {"known": 16, "epochs": 1.0, "updates": 2, "stale": 2, "batch": 8, "prompts": 8}
RATIOS: dict[str, dict[str, Any]] = {
    "token": {"importance_sampling_level": "token", "epsilon": 0.2, "epsilon_high": 0.27},
    "sequence": {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
}


@functools.lru_cache(maxsize=1)
def fine_tuned(seed: int, known: int, epochs: float, rate: float, batch: int) -> Any:
    """What both arms of a seed begin with."""
    with tempfile.TemporaryDirectory() as out:
        return task.fine_tuned(task.shuffled(seed)[:known], seed, out, epochs, rate, batch)


def measure(
    arm: str,
    seed: int,
    known: int,
    epochs: float,
    sft_rate: float,
    sft_batch: int,
    updates: int,
    stale: int,
    batch: int,
    grpo_rate: float,
    prompts: int,
) -> arms.Figures:
    """The share of answers to held-out prompts that are as told at the end, and of those sampled for the first and the
    last rollout.
    """
    model, others = copy.deepcopy(fine_tuned(seed, known, epochs, sft_rate, sft_batch)), task.shuffled(seed)[known:]
    with tempfile.TemporaryDirectory() as out:
        trainer = task.reinforcing(
            model, others, prompts, seed, out, updates, batch, grpo_rate, steps_per_generation=stale, loss_type="grpo",
            logging_strategy="steps", logging_steps=stale, **RATIOS[arm],
        )  # fmt: skip
        trainer.train()
        rewards = [record["reward"] for record in trainer.state.log_history if "reward" in record]
        return {"first": rewards[0], "last": rewards[-1], "end": trainer.evaluate()["eval_reward"]}


def verdict(figures: dict[str, list[arms.Figures]]) -> str:
    mean, low, high = (100 * bound for bound in arms.bounds(arms.differences(figures, "sequence", "token", "end")))
    first, token, sequence = (
        100 * arms.bounds(arms.column(figures, arm, name))[0]
        for arm, name in (("token", "first"), ("token", "end"), ("sequence", "end"))
    )
    found = arms.shown(low, high)
    return (
        f"{found}: from {first:.1f}% of the answers as told, ratios of tokens came to {token:.1f}%, of sequences to "
        f"{sequence:.1f}%: {mean:+.1f} points [{low:+.1f}, {high:+.1f}]."
    )


if __name__ == "__main__":
    arms.run(
        "Importance ratios of sequences train better than those of tokens on old rollouts",
        "https://arxiv.org/abs/2507.18071", list(RATIOS), measure, verdict, SETTINGS, SMOKE,
    )  # fmt: skip
