"""Asynchronous beside synchronous GRPO on the calculator task, with vLLM on the CPU and a reward that takes a while.

    make test-vllm                                              # once: it installs vLLM for the CPU
    .venv-vllm/bin/python benchmarks/asynchronous.py            # 2 cores: an hour

For each seed, runs of both kinds follow one another on the same server, the same prompts and the same first model.
Written for each: rewards, held-out accuracy, optimizer steps per hour, the shares of the time in which the trainer
waited for completions and sent weights, and what the ledger says of staleness and of lost samples.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import calculator  # noqa: E402
import engines  # noqa: E402
import results  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from posttrain.core import TrainerCallback  # noqa: E402
from posttrain.rl import GRPOConfig, GRPOTrainer  # noqa: E402
from posttrain.rl.generation.vllm import VLLMServerGenerator  # noqa: E402
from posttrain.rl.online.ledger import audit  # noqa: E402
from tests.vllm import servers  # noqa: E402

WARM_UP = 3
"""Rollouts before the clock is started: the queue is full by then."""


class Records(TrainerCallback):
    """Seconds of a run after the warm-up, by what the trainer did."""

    NAMES = ("wait", "sync", "generate", "score")

    def __init__(self, first: int) -> None:
        self.first, self.steps, self.started = first, 0, None
        self.seconds = dict.fromkeys(self.NAMES, 0.0)
        self.waits: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is None or "grad_norm" not in logs:
            return
        if self.started is not None:
            for name in self.NAMES:
                self.seconds[name] += logs.get(f"perf/{name}_seconds", 0.0)
            self.waits.append(logs.get("perf/wait_seconds", 0.0))
            self.steps, self.ended = self.steps + 1, time.perf_counter()
        elif state.global_step == self.first:
            self.started = time.perf_counter()


def train(url: str, folder: Path, bound: int, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run from the model in `folder`."""
    out = options.out / "run"
    shutil.rmtree(out, ignore_errors=True)
    records = Records(WARM_UP * options.iterations)
    _, new, held_out = calculator.read(seed, 2, "+-")
    tokenizer, model = calculator.make_tokenizer(), AutoModelForCausalLM.from_pretrained(folder)

    def right(completions: list[str], result: list[str], **_: Any) -> list[float]:
        time.sleep(options.sleep)
        return calculator.right(completions, result)

    before = statistics.mean(calculator.shares(model, tokenizer, held_out, 4))
    args = GRPOConfig(
        output_dir=str(out), max_steps=options.rollouts * options.iterations, num_iterations=options.iterations,
        per_device_train_batch_size=options.completions, num_generations=8, learning_rate=options.learning_rate,
        max_completion_length=len(new[0]["result"]) + 1, lr_scheduler_type="linear", warmup_steps=5, use_cpu=True,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none", seed=seed,
        disable_tqdm=True, use_vllm=True, vllm_mode="server", max_staleness=bound, sample_ledger=True,
        reward_concurrency=2,
    )  # fmt: skip
    generator = VLLMServerGenerator(url, group_port=0, in_flight=bound > 0)
    trainer = GRPOTrainer(model, right, args, new, None, tokenizer, callbacks=[records], generator=generator)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    rewards = [record["reward"] for record in trainer.state.log_history if "reward" in record]
    seconds, found = records.ended - records.started, audit(out)
    waited = ("wait",) if bound else ("generate", "score")
    return {
        "max_staleness": bound, "seed": seed, "before": before,
        "after": statistics.mean(calculator.shares(trainer.model, tokenizer, held_out, 4)),
        "last_rewards": statistics.mean(rewards[-10:]), "rewards": rewards, "steps": records.steps, "seconds": seconds,
        "steps_per_hour": 3600 * records.steps / seconds,
        "share_waited": sum(records.seconds[name] for name in waited) / seconds,
        "share_of_sync": records.seconds["sync"] / seconds,
        "seconds_of": records.seconds, "longest_wait": max(records.waits),
        "stalest": max(line["step"] - 1 - line["versions"][0] for line in found.used),
        "samples": len(found.used), "problems": found.problems,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rollouts", type=int, default=24)
    parser.add_argument("--completions", type=int, default=1024, help="of a rollout")
    parser.add_argument("--iterations", type=int, default=2, help="optimizer steps on each rollout")
    parser.add_argument("--ahead", type=int, default=2, help="rollouts that are sampled ahead: the bound on staleness")
    parser.add_argument("--sleep", type=float, default=3.0, help="seconds of the reward")
    parser.add_argument("--learning_rate", type=float, default=2e-4)
    parser.add_argument("--epochs", type=float, default=45, help="of fine-tuning before")
    parser.add_argument("--url", help="of a server on such a model, instead of one that is started")
    parser.add_argument("--out", type=Path, default=Path("out/asynchronous"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    folders = {seed: engines.begin(seed, options.epochs, options.out) for seed in options.seeds}
    rows = []
    with contextlib.ExitStack() as stack:
        flags = [*servers.FLAGS, "--max-model-len", "32"]
        url = options.url or stack.enter_context(servers.server(folders[options.seeds[0]], flags))
        for seed, folder in folders.items():
            for bound in (0, options.ahead * options.iterations):
                rows.append(train(url, folder, bound, seed, options))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    told = ("rollouts", "completions", "iterations", "ahead", "sleep", "learning_rate")
    print(results.write("asynchronous", {"options": {name: getattr(options, name) for name in told}, "runs": rows}))


if __name__ == "__main__":
    main()
