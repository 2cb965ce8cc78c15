"""GRPO beside TRL: the same model, prompts and sizes; seconds a step, where they go, and peak memory.

    python benchmarks/grpo.py                                     every task in float32 and bfloat16
    python benchmarks/grpo.py --tasks step-256 --dtypes fp32

A step is 2 prompts x 8 completions of 64 tokens, one update, beta 0. The model has 16 million parameters: 4 layers of
width 384 and 32,000 tokens. Tasks: `step` generates and trains, `train` trains on completions that are given; 256 or
1024 tokens a prompt; ragged: prompts of a quarter of that length up to it.

Each run is a process of its own, contestants take turns, and the first round is not counted. Time is that of the steps
after the second, in CPU seconds on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

VOCABULARY, GROUP, PROMPTS, NEW = 32_000, 8, 2, 64
TASKS = ("step-256", "step-1024", "step-256-ragged", "train-256", "train-1024", "train-256-ragged")


def tokenizer():
    """One token for each number; what is generated stands for nothing."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1} | {str(i): i for i in range(2, VOCABULARY)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def rows_of(task: str) -> list[dict]:
    import torch

    _, length, *ragged = task.split("-")
    generator, rows = torch.Generator().manual_seed(0), []
    for number in range(64):
        size = int(length) if not ragged else int(length) * (1 + number % 4) // 4
        ids = torch.randint(2, VOCABULARY, (size,), generator=generator).tolist()
        rows.append({"prompt": " ".join(map(str, ids))})
    return rows


def given(prompts, trainer):
    """Completions that cost nothing to make."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    completions = [[2 + (31 * i + 7 * t) % (VOCABULARY - 2) for t in range(NEW)] for i in range(len(prompts))]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def digit_sum(completion_ids, **kwargs):
    return [sum(ids) % 101 / 101 for ids in completion_ids]


def run(contestant: str, task: str, steps: int, dtype: str) -> dict[str, float]:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import torch
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    if contestant == "posttrain":
        from posttrain.core import TrainerCallback
        from posttrain.rl import GRPOConfig, GRPOTrainer
    else:
        from transformers import TrainerCallback
        from trl import GRPOConfig, GRPOTrainer
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=6,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True, pad_token_id=0,
            eos_token_id=1,
        )
    )  # fmt: skip
    if dtype == "bf16":
        model = model.bfloat16()
    times = []

    class Timer(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            times.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
            max_completion_length=NEW, max_steps=steps, learning_rate=1e-6, beta=0.0, bf16=False,
            gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
            disable_tqdm=True,
        )  # fmt: skip
        options = {"rollout_func": given} if task.startswith("train") else {}
        trainer = GRPOTrainer(
            model, digit_sum, args, Dataset.from_list(rows_of(task)), processing_class=tokenizer(),
            callbacks=[Timer()], **options,
        )  # fmt: skip
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds = (times[-1] - times[1]) / (len(times) - 2)
    return {"seconds_per_step": seconds, "peak_mib": peak, "extra_mib": peak - before}


def compare(task: str, dtype: str, steps: int, rounds: int) -> dict:
    found: dict[str, list[dict[str, float]]] = {"posttrain": [], "trl": []}
    for number in range(rounds + 1):
        for name in found:
            command = [sys.executable, __file__, "--one", name, task, dtype, str(steps)]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
            line = next(text for text in done.stdout.splitlines() if text.startswith("RESULT"))
            if number or not rounds:
                found[name].append(json.loads(line.removeprefix("RESULT")))
    table = {name: {k: statistics.median(r[k] for r in runs) for k in runs[0]} for name, runs in found.items()}
    pairs = list(zip(found["posttrain"], found["trl"], strict=True))
    speed = statistics.median(theirs["seconds_per_step"] / ours["seconds_per_step"] for ours, theirs in pairs)
    peak = statistics.median(ours["peak_mib"] / theirs["peak_mib"] for ours, theirs in pairs)
    extra = statistics.median(ours["extra_mib"] / theirs["extra_mib"] for ours, theirs in pairs)
    for name, row in table.items():
        print(f"{task:16s} {dtype} {name:10s} {row['seconds_per_step']:7.2f} s/step  peak {row['peak_mib']:6.0f} MiB  "
              f"(+{row['extra_mib']:.0f} in training)")  # fmt: skip
    print(
        f"{task:16s} {dtype} posttrain / trl: {speed:.2f} x the speed, {peak:.2f} x the peak, {extra:.2f} x what "
        "training adds", flush=True)  # fmt: skip
    return {"table": table, "ratios": {"speed": speed, "peak_mib": peak, "extra_mib": extra}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="0: one round, which counts")
    parser.add_argument("--output", default="grpo", help="Name of the file in results/.")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        contestant, task, dtype, steps = options.one
        print("RESULT", json.dumps(run(contestant, task, int(steps), dtype)))
        return
    from results import write

    figures: dict[str, dict] = {}
    for task in options.tasks:
        for dtype in options.dtypes:
            figures[f"{task} {dtype}"] = compare(task, dtype, options.steps, options.rounds)
            write(options.output, {"steps": options.steps, "rounds": options.rounds, "tasks": figures})


if __name__ == "__main__":
    main()
