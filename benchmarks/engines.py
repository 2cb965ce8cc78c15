"""The calculator task of the quickstart with each engine: whether completions of vLLM teach as the trainer's own do.

One model is fine-tuned for each seed; GRPO then starts from it with each engine, on the same prompts. Written: the
rewards of the updates, the held-out accuracy, and the largest gap between the engine's log-probabilities and the
trainer's.

make test-vllm                                              # once: it installs vLLM for the CPU
.venv-vllm/bin/python benchmarks/engines.py --seeds 3       # 2 cores: half an hour
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import calculator  # noqa: E402
import results  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from posttrain.rl import GRPOConfig, GRPOTrainer  # noqa: E402
from posttrain.rl.generation.vllm import VLLMServerGenerator  # noqa: E402
from posttrain.rl.generation.vllm_colocated import VLLMColocatedGenerator  # noqa: E402
from tests.vllm import servers  # noqa: E402

ENGINES = ("local", "server", "colocated")


def begin(seed: int, epochs: float, out: Path) -> Path:
    """The folder of a model that is fine-tuned on a third of the steps, and its tokenizer."""
    folder = out / f"begin-{seed}"
    if not (folder / "config.json").exists():
        known, _, _ = calculator.read(seed, 2, "+-")
        tokenizer = calculator.make_tokenizer()
        model = calculator.make_model(tokenizer, seed)
        calculator.fine_tune(model, tokenizer, known, epochs, seed, out)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def train(engine: str, generator, folder: Path, seed: int, updates: int, out: Path) -> dict:
    """GRPO from the model in `folder`."""
    _, new, held_out = calculator.read(seed, 2, "+-")
    tokenizer = calculator.make_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = statistics.mean(calculator.shares(model, tokenizer, held_out, 4))
    args = GRPOConfig(
        output_dir=str(out / "run"), max_steps=updates, per_device_train_batch_size=256, num_generations=8,
        max_completion_length=len(new[0]["result"]) + 1, learning_rate=2e-4, lr_scheduler_type="linear",
        warmup_steps=5, gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none", seed=seed,
        use_cpu=True, disable_tqdm=True, use_vllm=engine != "local", vllm_importance_sampling_correction=True,
    )  # fmt: skip
    trainer = GRPOTrainer(model, calculator.right, args, new, None, tokenizer, generator=generator)
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    records = [record for record in trainer.state.log_history if "grad_norm" in record]
    last = [record["reward"] for record in records][-10:]
    return {
        "engine": engine, "seed": seed, "before": before, "seconds": time.perf_counter() - started,
        "after": statistics.mean(calculator.shares(trainer.model, tokenizer, held_out, 4)),
        "first_rewards": statistics.mean(record["reward"] for record in records[:5]),
        "last_rewards": statistics.mean(last), "updates": len(records),
        "mean_gap": max(record.get("sampling/sampling_logp_difference/mean", 0.0) for record in records),
        "largest_gap": max(record.get("sampling/sampling_logp_difference/max", 0.0) for record in records),
    }  # fmt: skip


def part(engine: str, seeds: list[int], options: argparse.Namespace) -> list[dict]:
    """The runs of one engine, one after the other."""
    with contextlib.ExitStack() as stack:
        generator = None
        if engine == "server":
            served = options.out / f"begin-{seeds[0]}"
            flags = [*servers.FLAGS, "--max-model-len", "32"]
            url = options.url or stack.enter_context(servers.server(served, flags))
            generator = VLLMServerGenerator(url, group_port=0)
        if engine == "colocated":
            os.environ |= servers.ENVIRONMENT
            generator = VLLMColocatedGenerator({"enforce_eager": True, "max_model_len": 32})
        found = []
        for seed in seeds:
            folder = options.out / f"begin-{seed}"
            found.append(train(engine, generator, folder, seed, options.updates, options.out))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=45, help="of fine-tuning")
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--url", help="of a server on such a model, instead of one that is started")
    parser.add_argument("--out", type=Path, default=Path("out/engines"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = list(range(options.seeds))
    for seed in seeds:
        begin(seed, options.epochs, options.out)
    if len(options.engines) > 1:  # each in a process of its own: a colocated vLLM stays in its process
        for engine in options.engines:
            command = [sys.executable, __file__, *sys.argv[1:]]
            subprocess.run([*command, "--engines", engine], check=True)
        rows = [json.loads(line) for line in (options.out / "engines.jsonl").read_text().splitlines()]
        print(results.write("engines", {"runs": rows}))
        return
    rows = part(options.engines[0], seeds, options)
    with (options.out / "engines.jsonl").open("a") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
