"""DPO beside TRL: the same model, pairs, batches and arguments; pairs a second and peak memory.

    python benchmarks/dpo.py [--steps 8] [--rounds 3] [--dtype fp32] [--shots 2]

Pairs are right and wrong solutions of GSM8K problems, in one shuffled order; each problem stands behind `--shots`
solved examples, as it does when a base model is asked. With 2, about three quarters of the tokens of a pair are its
prompt's; the share is printed. The tokenizer has 32,000 entries, the model 4 layers of width 256, a batch 4 pairs. Each
run is a process of its own, contestants take turns, and the first round is not counted. Time is that of the steps after
the second, in CPU seconds on one thread. Both compare with a copy of the model that is passed to them as the reference.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sft import VOCABULARY, tokenizer

DATA = Path(__file__).parents[1] / "examples" / "data"
BATCH = 4


def pairs(shots: int, count: int) -> list[dict[str, str]]:
    """GSM8K preference pairs behind solved examples, completions from their first space on."""
    rows = [json.loads(line) for line in (DATA / "gsm8k_preferences" / "train.jsonl").open(encoding="utf-8")]
    solved = [json.loads(line) for line in (DATA / "gsm8k" / "test.jsonl").open(encoding="utf-8")]
    draw = random.Random(0)
    draw.shuffle(rows)
    made = []
    for row in rows[:count]:
        examples = [f"Question: {one['question']}\nAnswer: {one['answer']}\n\n" for one in draw.sample(solved, shots)]
        prompt = "".join(examples) + f"Question: {row['prompt']}\nAnswer:"
        made.append({"prompt": prompt, "chosen": " " + row["chosen"], "rejected": " " + row["rejected"]})
    return made


def run(contestant: str, steps: int, dtype: str, shots: int) -> dict[str, float]:
    import copy

    import torch
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    if contestant == "posttrain":
        from posttrain.core import TrainerCallback
        from posttrain.rl import DPOConfig, DPOTrainer
    else:
        from transformers import TrainerCallback
        from trl import DPOConfig, DPOTrainer
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
        )
    )  # fmt: skip
    times = []

    class Timer(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            times.append(time.process_time())

    words = tokenizer()
    rows = pairs(shots, steps * BATCH)
    lengths = {name: sum(len(words(row[name])["input_ids"]) for row in rows) for name in rows[0]}
    lengths["prompt"] *= 2  # a pair is two rows, each with the prompt
    with tempfile.TemporaryDirectory() as folder:
        args = DPOConfig(
            output_dir=folder, per_device_train_batch_size=BATCH, max_steps=steps, bf16=dtype == "bf16",
            max_length=2048, gradient_checkpointing=False, learning_rate=1e-4, logging_steps=2, save_strategy="no",
            report_to="none", use_cpu=True, train_sampling_strategy="sequential", disable_tqdm=True,
        )  # fmt: skip
        trainer = DPOTrainer(
            model,
            ref_model=copy.deepcopy(model),
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=words,
            callbacks=[Timer()],
        )
        prepared = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return {
        "pairs_per_second": BATCH * (steps - 2) / (times[-1] - times[1]), "peak_mib": peak,
        "extra_mib": peak - prepared, "last_loss": float(losses[-1]),
        "prompt_share": lengths["prompt"] / sum(lengths.values()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shots", type=int, default=2)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--one", choices=("posttrain", "trl"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("RESULT", json.dumps(run(options.one, options.steps, options.dtype, options.shots)))
        return
    from results import write

    found: dict[str, list[dict[str, float]]] = {"posttrain": [], "trl": []}
    settings = {"steps": options.steps, "dtype": options.dtype, "shots": options.shots}
    for number in range(options.rounds + 1):
        for name in found:
            command = [sys.executable, __file__, "--one", name]
            command += [text for key, value in settings.items() for text in (f"--{key}", str(value))]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
            line = next(text for text in done.stdout.splitlines() if text.startswith("RESULT"))
            if number or not options.rounds:
                found[name].append(json.loads(line.removeprefix("RESULT")))
    table = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()
    }
    both = list(zip(found["posttrain"], found["trl"], strict=True))
    ratios = {
        key: statistics.median(a[key] / b[key] for a, b in both)
        for key in ("pairs_per_second", "peak_mib", "extra_mib")
    }
    for name, row in table.items():
        print(f"{name:10s} {row['pairs_per_second']:6.2f} pairs/s  peak {row['peak_mib']:6.0f} MiB  "
              f"(+{row['extra_mib']:.0f} in training)  loss {row['last_loss']:.5f}")  # fmt: skip
    print(
        f"{table['trl']['prompt_share']:.0%} of the tokens are prompt. posttrain / trl: "
        f"{ratios['pairs_per_second']:.2f} x the speed, {ratios['peak_mib']:.2f} x the peak, "
        f"{ratios['extra_mib']:.2f} x what training adds")  # fmt: skip
    write(
        f"dpo_{options.dtype}_{options.shots}", settings | {"rounds": options.rounds, "table": table, "ratios": ratios}
    )


if __name__ == "__main__":
    main()
