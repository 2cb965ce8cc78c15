"""Floating-point operations of training on prompts with images, beside TRL: of the vision tower and of everything.

    python benchmarks/images.py                        every task
    python benchmarks/images.py --tasks grpo-smolvlm   some

Counted are matrix products, attention and convolutions of two optimizer steps on the CPU, forward and backward, of GRPO
with 8 completions of 8 tokens of one prompt, with generation, and of DPO with 4 pairs of different prompts, whose
answers have about as many tokens.

The models have the widths and layers of SmolVLM-256M and Qwen2.5-VL-3B in proportion, an eighth of each, and four
patches for a token. An image has 64 x 64 pixels: how many times fewer operations all of it takes grows with the tokens
of the prompt, which TRL reads once for each completion; for the tower alone it does not.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

TASKS = ("grpo-smolvlm", "grpo-qwen2_5_vl", "dpo-smolvlm", "dpo-qwen2_5_vl")
ANSWERS = {"chosen": "It is a red one", "rejected": "There is none at all"}
STEPS, PIXELS = 2, 64


def model_of(family: str) -> tuple[Any, Any]:
    """(model, processor)."""
    from tests import tiny_vision as tiny

    if family == "smolvlm":
        tiny.SIGHT.update(hidden_size=96, intermediate_size=384, num_attention_heads=2)
        tiny.TEXT.update(
            hidden_size=72, intermediate_size=192, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2,
            head_dim=36,
        )  # fmt: skip
        return tiny.smolvlm()
    tiny.TEXT.update(
        hidden_size=256, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64,
    )  # fmt: skip
    tiny.MROPE["rope_parameters"]["mrope_section"] = [8, 12, 12]
    sight = {"depth": 4, "hidden_size": 160, "num_heads": 4, "intermediate_size": 428, "out_hidden_size": 256}
    sight |= {"fullatt_block_indexes": [3], "window_size": 32}
    return tiny._qwen("Qwen2_5_VL", tiny.MROPE, sight, 0, "Qwen2_5_VLProcessor")


def rows_of(method: str) -> Any:
    from datasets import Dataset

    from tests import tiny_vision

    sides = {"width": PIXELS, "height": PIXELS}
    row = {"prompt": [{"role": "user", "content": "Is it red ?"}]}
    if method == "dpo":
        row |= {name: [{"role": "assistant", "content": text}] for name, text in ANSWERS.items()}
    rows = [row] * 8
    columns = Dataset.from_list(rows)
    return columns.add_column("images", [[_png(tiny_vision.image(i, **sides))] for i in range(8)]).cast_column(
        "images", _images()
    )


def _png(image: Any) -> dict[str, Any]:
    import io

    held = io.BytesIO()
    image.save(held, "png")
    return {"bytes": held.getvalue(), "path": None}


def _images() -> Any:
    from datasets import Image, List

    return List(Image())


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(place % 3) for place in range(len(completions))]


def measure(contestant: str, task: str) -> dict[str, int]:
    """Operations of a step: of the vision tower, and of all."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    if contestant == "posttrain":
        import posttrain.rl as library
    else:
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        import trl as library
    torch.set_num_threads(1)
    method, _, family = task.partition("-")
    model, processor = model_of(family)
    model.set_attn_implementation("eager")  # whose products are counted one by one
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = dict(
            output_dir=folder, max_steps=STEPS, learning_rate=1e-6, bf16=False, save_strategy="no", report_to="none",
            disable_tqdm=True, gradient_checkpointing=False, use_cpu=True,
        )  # fmt: skip
        parts = {"model": model, "train_dataset": rows_of(method), "processing_class": processor}
        if method == "grpo":
            common |= {"per_device_train_batch_size": 8, "num_generations": 8, "max_completion_length": 8}
            trainer = library.GRPOTrainer(**parts, reward_funcs=reward, args=library.GRPOConfig(**common))
        else:
            common |= {"per_device_train_batch_size": 4, "max_length": None}
            parts["ref_model"] = copy.deepcopy(model)  # TRL cannot load one that has no name
            trainer = library.DPOTrainer(**parts, args=library.DPOConfig(**common))
        trainer.train()  # what is done once is not counted
        with FlopCounterMode(display=False) as counter:
            trainer.train()
    towers = {"visual", "vision_model", "vision_tower"}
    of_tower = [
        sum(counts.values()) for name, counts in counter.get_flop_counts().items() if name.split(".")[-1] in towers
    ]
    return {"vision_tower": sum(of_tower) // STEPS, "all": counter.get_total_flops() // STEPS}


def compare(task: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("posttrain", "trl"):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, __file__, "--one", name, task]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        line = next((text for text in done.stdout.splitlines() if text.startswith("RESULT")), None)
        if line is None:
            raise RuntimeError(f"{task}: {name} failed:\n{done.stderr[-2000:]}")
        found[name] = json.loads(line.removeprefix("RESULT"))
    found["times_fewer"] = {key: round(found["trl"][key] / value, 2) for key, value in found["posttrain"].items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--output", default="images", help="name of the file in results/; empty: none is written")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("RESULT", json.dumps(measure(*options.one)))
        return
    sys.path.insert(0, str(Path(__file__).parent))
    from results import write

    figures = {}
    for task in options.tasks:
        figures[task] = compare(task)
        print(task, json.dumps(figures[task]), flush=True)
        if options.output:
            write(options.output, {"steps": STEPS, "pixels": PIXELS, "tasks": figures})


if __name__ == "__main__":
    main()
