"""Asynchronous beside synchronous GRPO on a vLLM server, with a reward that takes a while.

    python benchmarks/asynchronous.py URL MODEL_FOLDER [rounds]

MODEL_FOLDER is what the server serves. Runs of both kinds follow one another in turn. Prints for each the optimizer
steps per hour, the share of the time in which the trainer waited for completions, and the greatest staleness.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.core import TrainerCallback
from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.rl.generation.vllm import VLLMServerGenerator

SECONDS = 1.0
"""That the reward sleeps."""
ITERATIONS = 16
"""Optimizer steps on each rollout."""
STEPS = 256


class Records(TrainerCallback):
    """What a run logs about its speed."""

    def __init__(self) -> None:
        self.waited, self.stalest, self.started, self.steps = 0.0, 0.0, None, 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        now = time.perf_counter()
        if self.started is not None and logs is not None and "loss" in logs:
            names = ("perf/wait_seconds",) if args.max_staleness else ("perf/generate_seconds", "perf/score_seconds")
            self.waited += sum(logs.get(name, 0.0) for name in names)
            self.stalest, self.steps = max(self.stalest, logs.get("staleness/max", 0.0)), self.steps + 1
            self.seconds = now - self.started
        if self.started is None and state.global_step == 2 * ITERATIONS:  # the queue is full, and everything is warm
            self.started = now


def run(url: str, folder: str, max_staleness: int, seed: int) -> dict[str, float]:
    """One run."""
    records, out = Records(), tempfile.mkdtemp()

    def reward(completion_ids: list[list[int]]) -> list[float]:
        time.sleep(SECONDS)
        return [len(set(ids)) / len(ids) for ids in completion_ids]

    args = GRPOConfig(
        out, per_device_train_batch_size=16, num_generations=8, max_completion_length=32, num_iterations=ITERATIONS,
        max_steps=STEPS, seed=seed, max_staleness=max_staleness, reward_concurrency=4, learning_rate=1e-3,
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder), reward, args, processing_class=tokenizer, callbacks=[records],
        train_dataset=[{"prompt": f"{a} + {b} ="} for a in range(20) for b in range(10)],
        generator=VLLMServerGenerator(
            url, 60.0, 0, tokenizer=tokenizer, folder=f"{folder}/shared", in_flight=max_staleness > 0
        ),
    )  # fmt: skip
    trainer.train()
    last = [record["reward"] for record in trainer.state.log_history if "reward" in record][-5:]
    return {
        "max_staleness": max_staleness, "steps_per_hour": round(3600 * records.steps / records.seconds),
        "share_waited": round(records.waited / records.seconds, 3), "stalest": records.stalest,
        "reward": round(sum(last) / len(last), 3),
    }  # fmt: skip


if __name__ == "__main__":
    for number in range(int(sys.argv[3]) if len(sys.argv) > 3 else 3):
        for bound in (0, 4 * ITERATIONS):
            print(json.dumps(run(sys.argv[1], sys.argv[2], bound, number)), flush=True)
