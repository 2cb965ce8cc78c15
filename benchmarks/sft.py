"""Packed supervised fine-tuning beside TRL: the same model, rows and arguments; tokens a second and peak memory.

    python benchmarks/sft.py [--steps 8] [--rounds 3] [--dtype fp32]

Rows are GSM8K problems as text, packed into rows of 512 by each one's own best fit, so batches hold other documents; the tokenizer has 32,000 entries, the model 4 layers of
width 256. Each run is a process of its own, contestants take turns, and the first round is not counted. Time is that of the
steps after the second, in CPU seconds on one thread.
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
from pathlib import Path

ROWS = Path(__file__).parents[1] / "examples" / "data" / "gsm8k" / "train.jsonl"
VOCABULARY, LENGTH, BATCH = 32_000, 512, 2


def tokenizer():
    """One token a byte pair of common words; padded with unused entries to a vocabulary of realistic size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = (row["question"] + row["answer"] for row in map(json.loads, ROWS.open(encoding="utf-8")))
    special = ["<|pad|>", "<|end|>"]
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=8_000, special_tokens=special, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=special[0], eos_token=special[1])


def run(contestant: str, steps: int, dtype: str) -> dict[str, float]:
    import torch
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    if contestant == "posttrain":
        from posttrain.core import TrainerCallback
        from posttrain.sft import SFTConfig, SFTTrainer
    else:
        from transformers import TrainerCallback
        from trl import SFTConfig, SFTTrainer
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=LENGTH, tie_word_embeddings=True,
        )
    )  # fmt: skip
    rows = [{"text": row["question"] + "\n" + row["answer"]} for row in map(json.loads, ROWS.open(encoding="utf-8"))]
    times = []

    class Timer(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            times.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            output_dir=folder, packing=True, max_length=LENGTH, per_device_train_batch_size=BATCH, max_steps=steps,
            bf16=dtype == "bf16", gradient_checkpointing=False, learning_rate=1e-3, logging_steps=2, save_strategy="no",
            report_to="none", use_cpu=True, train_sampling_strategy="sequential",
        )  # fmt: skip
        trainer = SFTTrainer(
            model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), callbacks=[Timer()]
        )
        prepared = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        real = [len(row) for row in trainer.train_dataset.select(range(steps * BATCH))["input_ids"]]
        trainer.train()
    tokens = sum(real[2 * BATCH :])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return {
        "tokens_per_second": tokens / (times[-1] - times[1]), "peak_mib": peak, "extra_mib": peak - prepared,
        "last_loss": float(losses[-1]), "tokens": tokens,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--one", choices=("posttrain", "trl"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("RESULT", json.dumps(run(options.one, options.steps, options.dtype)))
        return
    from results import write

    found: dict[str, list[dict[str, float]]] = {"posttrain": [], "trl": []}
    for number in range(options.rounds + 1):
        for name in found:
            command = [sys.executable, __file__, "--one", name, "--steps", str(options.steps), "--dtype", options.dtype]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
            line = next(text for text in done.stdout.splitlines() if text.startswith("RESULT"))
            if number:
                found[name].append(json.loads(line.removeprefix("RESULT")))
    table = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()
    }
    pairs = list(zip(found["posttrain"], found["trl"], strict=True))
    ratios = {
        "tokens_per_second": statistics.median(a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs),
        "peak_mib": statistics.median(a["peak_mib"] / b["peak_mib"] for a, b in pairs),
        "extra_mib": statistics.median(a["extra_mib"] / b["extra_mib"] for a, b in pairs),
    }
    for name, row in table.items():
        print(f"{name:10s} {row['tokens_per_second']:7.0f} tokens/s  peak {row['peak_mib']:6.0f} MiB  "
              f"(+{row['extra_mib']:.0f} in training)  loss {row['last_loss']:.4f}")  # fmt: skip
    print(f"posttrain / trl: {ratios['tokens_per_second']:.2f} x the speed, {ratios['peak_mib']:.2f} x the peak, "
          f"{ratios['extra_mib']:.2f} x what training adds")  # fmt: skip
    settings = {"steps": options.steps, "rounds": options.rounds, "dtype": options.dtype}
    write(f"sft_{options.dtype}", settings | {"table": table, "ratios": ratios})


if __name__ == "__main__":
    main()
