"""What keeping freed memory gains on the CPU: a training step with `keep_freed_memory` and without.

    python benchmarks/allocator.py [--steps 10] [--rounds 3]

Two models: T5 of 2 + 2 layers, width 64, vocabulary 8,000, 32 rows of 24 tokens; Qwen3 of 8 layers, width 512,
vocabulary 32,000, 4 rows of 256 tokens under bfloat16 autocast. Each run is a process of its own on one thread; runs
take turns, and the first round is not counted. Seconds are CPU seconds of a step after the second.
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

MODELS = ("t5", "qwen3")


def run(name: str, keep: bool, steps: int) -> dict[str, float]:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, T5Config, T5ForConditionalGeneration

    from posttrain.core import Trainer, TrainerCallback, TrainingArguments

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if name == "t5":
        size = {"vocab_size": 8000, "d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 2, "num_heads": 4}
        model, rows, length, vocabulary = (
            T5ForConditionalGeneration(T5Config(**size, decoder_start_token_id=0)),
            32,
            24,
            8000,
        )
    else:
        size = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
        size |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
        model, rows, length, vocabulary = Qwen3ForCausalLM(Qwen3Config(**size)), 4, 256, 32000
    tokens = torch.randint(2, vocabulary, (rows * (steps + 2), length))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    times, faults = [], []

    class Timer(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            times.append(time.process_time())
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=rows, max_steps=steps + 2, use_cpu=True,
            bf16=name == "qwen3", save_strategy="no", report_to="none", disable_tqdm=True, keep_freed_memory=keep,
        )  # fmt: skip
        Trainer(model, args, train_dataset=data, callbacks=[Timer()]).train()
    return {
        "step_seconds": (times[-1] - times[1]) / steps,
        "faults_per_step": (faults[-1] - faults[1]) / steps,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("RESULT", json.dumps(run(options.one[0], options.one[1] == "kept", options.steps)))
        return
    from results import write

    figures = {}
    for model in MODELS:
        found: dict[str, list[dict[str, float]]] = {"kept": [], "given back": []}
        for number in range(options.rounds + 1):
            for how, runs in found.items():
                command = [sys.executable, __file__, "--one", model, how, "--steps", str(options.steps)]
                done = subprocess.run(
                    command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
                )
                if done.returncode:
                    raise SystemExit(done.stderr[-3000:])
                if number:
                    runs.append(json.loads(done.stdout.split("RESULT", 1)[1].splitlines()[0]))
        table = {how: {key: statistics.median(r[key] for r in runs) for key in runs[0]} for how, runs in found.items()}
        gain = statistics.median(
            b["step_seconds"] / a["step_seconds"] for a, b in zip(found["kept"], found["given back"], strict=True)
        )
        figures[model] = {"table": table, "times_faster": gain}
        for how, row in table.items():
            print(
                f"{model:6s} {how:10s} {row['step_seconds'] * 1e3:7.1f} ms a step  {row['faults_per_step']:8.0f} "
                f"faults  peak {row['peak_mib']:5.0f} MiB")  # fmt: skip
        print(f"{model:6s} {gain:.2f} x as fast", flush=True)
    write("allocator", {"steps": options.steps, "rounds": options.rounds, "models": figures})


if __name__ == "__main__":
    main()
