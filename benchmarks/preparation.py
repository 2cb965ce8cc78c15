"""Preparing a dataset for supervised fine-tuning beside TRL: rows to tokens, labels and packed rows.

    python benchmarks/preparation.py [--rounds 3] [--threads 1 2]

Rows are GSM8K problems as conversations: the whole file where POSTTRAIN_DATA names a folder that has it, else the rows
in examples/data three times over. Tasks: plain; packed into rows of 1,024 (best fit); trained on the assistant's turns
alone. What is timed is the making of an SFTTrainer, less that of one over 20 rows: in CPU seconds with one thread, and
by the clock with several, which are the tokenizer's. Each run is a process of its own; contestants take turns, and the
first round is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sft import CHATML, ROWS, tokenizer

TASKS = {"plain": {}, "packed": {"packing": True}, "assistant": {"assistant_only_loss": True}}


def rows() -> list[dict]:
    folder = os.environ.get("POSTTRAIN_DATA")
    whole = Path(folder or "") / "gsm8k" / "train.jsonl"
    path, times = (whole, 1) if folder and whole.is_file() else (ROWS, 3)
    read = [json.loads(line) for line in path.open(encoding="utf-8")] * times
    turns = (("user", "question"), ("assistant", "answer"))
    return [{"messages": [{"role": role, "content": row[name]} for role, name in turns]} for row in read]


def run(contestant: str, task: str, threads: int) -> dict[str, float]:
    import torch
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    if contestant == "posttrain":
        from posttrain.sft import SFTConfig, SFTTrainer
    else:
        from trl import SFTConfig, SFTTrainer
    size = {"vocab_size": 8000, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = Qwen3ForCausalLM(Qwen3Config(**size, num_attention_heads=2, num_key_value_heads=1, head_dim=8))
    clock = time.process_time if threads == 1 else time.perf_counter
    reader = tokenizer()
    reader.chat_template = CHATML

    def prepare(data: list[dict]) -> tuple[float, int]:
        dataset = Dataset.from_list(data)
        with tempfile.TemporaryDirectory() as folder:
            args = SFTConfig(output_dir=folder, max_length=1024, report_to="none", use_cpu=True, **TASKS[task])
            started = clock()
            trainer = SFTTrainer(model, args, train_dataset=dataset, processing_class=reader)
            seconds = clock() - started
        return seconds, sum(map(len, trainer.train_dataset["input_ids"]))

    data = rows()
    prepare(data[:20])
    overhead, _ = prepare(data[:20])
    seconds, tokens = prepare(data)
    return {"seconds": seconds - overhead, "rows_per_second": len(data) / (seconds - overhead), "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        contestant, task, threads = options.one
        print("RESULT", json.dumps(run(contestant, task, int(threads))))
        return
    from results import write

    figures = {}
    for threads in options.threads:
        for task in TASKS:
            found: dict[str, list[dict[str, float]]] = {"posttrain": [], "trl": []}
            for number in range(options.rounds + 1):
                for name, runs in found.items():
                    command = [sys.executable, __file__, "--one", name, task, str(threads)]
                    parallel = {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": str(threads > 1).lower()}
                    environment = os.environ | parallel | {"OMP_NUM_THREADS": "1"}
                    done = subprocess.run(command, capture_output=True, text=True, env=environment)
                    if done.returncode:
                        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
                    if number:
                        runs.append(json.loads(done.stdout.split("RESULT", 1)[1].splitlines()[0]))
            table = {n: {key: statistics.median(r[key] for r in runs) for key in runs[0]} for n, runs in found.items()}
            pairs = zip(found["posttrain"], found["trl"], strict=True)
            gain = statistics.median(theirs["seconds"] / ours["seconds"] for ours, theirs in pairs)
            figures[f"{task}, {threads} threads"] = {"table": table, "times_faster": gain}
            for name, row in table.items():
                print(
                    f"{task:9s} {threads} threads {name:10s} {row['seconds']:6.2f} s  {row['rows_per_second']:7.0f} "
                    f"rows/s  {row['tokens']:9.0f} tokens")  # fmt: skip
            print(f"{task:9s} {threads} threads posttrain / trl: {gain:.2f} x as fast", flush=True)
            write("preparation", {"rounds": options.rounds, "tasks": figures})


if __name__ == "__main__":
    main()
