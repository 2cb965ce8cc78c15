"""Evaluation beside transformers at a vocabulary of 32,000: seconds and peak memory by number of rows, for what is
asked of the predictions.

    python benchmarks/evaluation.py [--rows 16 32 64 128] [--rounds 2]

`loss` asks for no metric. `metrics` keeps all logits for `compute_metrics`, which does nothing with them, so that what
is measured is the keeping. `argmax` keeps what `preprocess_logits_for_metrics` makes of them. `by batch` computes
metrics batch by batch (an object with update and compute; batch_eval_metrics in transformers). Rows have 128 tokens,
batches 8 rows, and the model is one layer of width 64: its time hardly counts. Each run is a process of its own,
contestants take turns, the first round is not counted, nor the first evaluation of each run, of 8 rows. Memory is what
the peak during the evaluation lies above what was resident before it. Needs Linux.
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

VOCABULARY, LENGTH, BATCH = 32_000, 128, 8
MODES = ("loss", "metrics", "argmax", "by batch")


class Rows:
    """A streaming metric that does nothing with the logits."""

    def __init__(self) -> None:
        self.rows = 0

    def update(self, predictions, labels) -> None:
        self.rows += len(predictions)

    def compute(self) -> dict[str, float]:
        return {"rows": self.rows}


def memory(field: str) -> float:
    """MiB of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def run(contestant: str, mode: str, rows: int) -> dict[str, float]:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    if contestant == "posttrain":
        from posttrain.core import Trainer, TrainingArguments
    else:
        from transformers import Trainer, TrainingArguments
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=LENGTH, tie_word_embeddings=True,
        )
    )  # fmt: skip
    ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in ids]
    counted = Rows()

    def of_batch(batch, compute_result):
        counted.update(batch.predictions, batch.label_ids)
        return counted.compute() if compute_result else {}

    whole = lambda prediction: {"rows": len(prediction.predictions)}  # noqa: E731
    streamed = Rows() if contestant == "posttrain" else of_batch
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_eval_batch_size=BATCH, use_cpu=True, report_to="none", disable_tqdm=True,
            batch_eval_metrics=mode == "by batch" and contestant != "posttrain",
        )  # fmt: skip
        trainer = Trainer(
            model, args, eval_dataset=data,
            compute_metrics={"loss": None, "metrics": whole, "argmax": whole, "by batch": streamed}[mode],
            preprocess_logits_for_metrics=(lambda logits, labels: logits.argmax(-1)) if mode == "argmax" else None,
        )  # fmt: skip
        trainer.evaluate(data[:BATCH])
        counted.rows = 0
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts afresh
        started, cpu = time.perf_counter(), time.process_time()
        metrics = trainer.evaluate()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    assert metrics.get("eval_rows", rows) == rows
    extra = memory("VmHWM") - before
    return {"seconds": seconds, "cpu_seconds": cpu, "extra_mib": extra, "eval_loss": metrics["eval_loss"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        contestant, mode, rows = options.one
        print("RESULT", json.dumps(run(contestant, mode, int(rows))))
        return
    from results import write

    table = []
    for mode in MODES:
        for rows in options.rows:
            found: dict[str, list[dict[str, float]]] = {"posttrain": [], "transformers": []}
            for number in range(options.rounds + 1):
                for name in found:
                    command = [sys.executable, __file__, "--one", name, mode, str(rows)]
                    done = subprocess.run(
                        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
                    )
                    if done.returncode:
                        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
                    line = next(text for text in done.stdout.splitlines() if text.startswith("RESULT"))
                    if number:  # a virtual machine may have to fetch the memory itself the first time
                        found[name].append(json.loads(line.removeprefix("RESULT")))
            medians = {
                n: {key: statistics.median(r[key] for r in runs) for key in runs[0]} for n, runs in found.items()
            }
            ours, theirs = medians["posttrain"], medians["transformers"]
            logits = rows * LENGTH * VOCABULARY * 4 / 2**20
            table.append({"mode": mode, "rows": rows, "logits_mib": logits} | medians)
            print(f"{mode:9s} {rows:4d} rows, logits {logits:5.0f} MiB:  seconds {ours['cpu_seconds']:6.2f} / "
                  f"{theirs['cpu_seconds']:6.2f} = {ours['cpu_seconds'] / theirs['cpu_seconds']:.2f}   peak "
                  f"+{ours['extra_mib']:5.0f} / +{theirs['extra_mib']:5.0f} MiB = "
                  f"{ours['extra_mib'] / max(theirs['extra_mib'], 1):.2f}", flush=True)  # fmt: skip
    settings = {"vocabulary": VOCABULARY, "length": LENGTH, "batch": BATCH, "rounds": options.rounds}
    write("evaluation", settings | {"table": table})


if __name__ == "__main__":
    main()
