"""CPU seconds that `torch_compile=True` adds to the first optimizer step, for a model of Qwen3-0.6B's shape.

    python benchmarks/compiling.py [--layers 28] [--length 64] [--whole]

Weights are random, in bfloat16 (1.2 GB), on the CPU. A step of SGD on one row; the first compiles, the third does not.
Those of the C++ compiler are counted, one after another as on one core, and torch's cache of compiled code is an empty
folder, as on a fresh machine; "seconds" are those of the clock. `--whole`: the model is one graph, as
``torch.compile(model)`` makes it, instead of one graph for all layers.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from typing import Any


def now() -> tuple[float, float]:
    """(CPU seconds of this process and of those that it has waited for, seconds)."""
    spent = os.times()
    return sum(spent[:4]), time.perf_counter()


def seconds(layers: int, length: int, whole: bool) -> list[tuple[float, float]]:
    """`now` for each of the first three optimizer steps, from its beginning to its end."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from posttrain.core import Trainer, TrainerCallback, TrainingArguments
    from posttrain.core.models import compiling

    config = Qwen3Config(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    if whole:
        compiling.compiled_parts = lambda model: [model]

    class Clock(TrainerCallback):
        times: list[tuple[float, float]] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = now()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            cpu, clock = (after - before for before, after in zip(self.started, now(), strict=True))
            self.times.append((cpu, clock))

    ids = torch.arange(length).tolist()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, torch_compile=True, per_device_train_batch_size=1, max_steps=3, optim="sgd", learning_rate=1e-4,
            report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True, bf16=False,
        )  # fmt: skip
        rows = [{"input_ids": ids, "labels": ids}] * 3
        Trainer(model, args, train_dataset=rows, callbacks=[Clock()]).train()
    return Clock.times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        first, _, third = seconds(options.layers, options.length, options.whole)
    cpu, clock = (round(one - other, 1) for one, other in zip(first, third, strict=True))
    print(json.dumps(vars(options) | {"compiling, CPU seconds": cpu, "seconds": clock}))


if __name__ == "__main__":
    main()
