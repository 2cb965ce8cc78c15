"""Supervised fine-tuning beside TRL: the same model, rows and arguments; tokens a second and peak memory.

    python benchmarks/sft.py                                 every task in float32 and bfloat16, about an hour
    python benchmarks/sft.py --tasks packed-8 --dtypes bf16

Rows are GSM8K problems. The tokenizer knows 8,000 tokens and the model 32,000; it has 4 layers of width 256. Tasks:

    packed, packed-8   text packed into rows of 512 by each one's own best fit, 2 or 8 rows a batch
    plain              one row of text each, 8 rows a batch, padded
    assistant          conversations, of which the answers alone are trained, 8 rows a batch, padded
    lora               as packed, with adapters of rank 16 on all linear layers

Each run is a process of its own, contestants take turns, and the first round is not counted. Time is that of the steps
after the second, in CPU seconds on one thread. Tokens are those of the data, without padding.
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
VOCABULARY, LENGTH = 32_000, 512
BATCH = {"packed": 2, "packed-8": 8, "plain": 8, "assistant": 8, "lora": 2}
CHATML = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}<|end|>{% endgeneration %}{% else %}{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
)


def tokenizer():
    """Byte-level, of common pairs; with fewer entries than the model has, whose vocabulary is of realistic size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = (row["question"] + row["answer"] for row in map(json.loads, ROWS.open(encoding="utf-8")))
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=8_000, special_tokens=special, show_progress=False))
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=special[0], eos_token=special[1], chat_template=CHATML
    )


def rows_of(task: str) -> list[dict]:
    rows = map(json.loads, ROWS.open(encoding="utf-8"))
    if task == "assistant":
        turns = (("user", "question"), ("assistant", "answer"))
        return [{"messages": [{"role": role, "content": row[name]} for role, name in turns]} for row in rows]
    return [{"text": row["question"] + "\n" + row["answer"]} for row in rows]


def run(contestant: str, task: str, steps: int, dtype: str) -> dict[str, float]:
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
    adapter = None
    if task == "lora":
        from peft import LoraConfig

        adapter = LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
    times = []

    class Timer(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            times.append(time.process_time())

    batch = BATCH[task]
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            output_dir=folder, packing=task in ("packed", "packed-8", "lora"), assistant_only_loss=task == "assistant",
            max_length=LENGTH, per_device_train_batch_size=batch, max_steps=steps, bf16=dtype == "bf16",
            gradient_checkpointing=False, learning_rate=1e-3, logging_steps=2, save_strategy="no", report_to="none",
            use_cpu=True, train_sampling_strategy="sequential",
        )  # fmt: skip
        trainer = SFTTrainer(
            model, args, train_dataset=Dataset.from_list(rows_of(task)), processing_class=tokenizer(),
            peft_config=adapter, callbacks=[Timer()],
        )  # fmt: skip
        prepared = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        real = [len(row) for row in trainer.train_dataset.select(range(steps * batch))["input_ids"]]
        trainer.train()
    tokens = sum(real[2 * batch :])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return {
        "tokens_per_second": tokens / (times[-1] - times[1]), "peak_mib": peak, "extra_mib": peak - prepared,
        "last_loss": float(losses[-1]), "tokens": tokens,
    }  # fmt: skip


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
    table = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()
    }
    pairs = list(zip(found["posttrain"], found["trl"], strict=True))
    ratios = {
        key: statistics.median(a[key] / b[key] for a, b in pairs)
        for key in ("tokens_per_second", "peak_mib", "extra_mib")
    }
    for name, row in table.items():
        print(
            f"{task:9s} {dtype} {name:10s} {row['tokens_per_second']:7.0f} tokens/s  peak {row['peak_mib']:6.0f} "
            f"MiB  (+{row['extra_mib']:.0f} in training)  loss {row['last_loss']:.4f}")  # fmt: skip
    print(
        f"{task:9s} {dtype} posttrain / trl: {ratios['tokens_per_second']:.2f} x the speed, {ratios['peak_mib']:.2f} "
        f"x the peak, {ratios['extra_mib']:.2f} x what training adds", flush=True)  # fmt: skip
    return {"table": table, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=tuple(BATCH), default=[*BATCH])
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="0: one round, which counts")
    parser.add_argument("--output", default="sft", help="Name of the file in results/.")
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
