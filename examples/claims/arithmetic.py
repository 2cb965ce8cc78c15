"""The small model that claims begin with: it has learned to add and subtract on calculator steps of GSM8K."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import arms  # which makes the examples importable
import calculator
from datasets import Dataset
from transformers import AutoModelForCausalLM

EPOCHS = 30.0
MARKS = 8
LONGEST = 16  # tokens of an answer
#: How GRPO goes on from there, in all claims.
POLICY = {
    "num_generations": 8, "max_completion_length": LONGEST, "warmup_steps": 5, "gradient_checkpointing": False,
    "lr_scheduler_type": "constant_with_warmup", "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
}  # fmt: skip


@functools.cache
def fine_tuned(
    seed: int, epochs: float = EPOCHS, marks: int = MARKS, width: int = 128
) -> tuple[Any, Any, Dataset, Dataset]:
    """(model, tokenizer, steps that fine-tuning never saw, held-out steps).

    A result is followed by fewer than `marks` times `=`, at random. The seed sets the split, the first weights and the
    order. Once trained, a model is kept in `arms.KEPT`.
    """
    known, new, held_out = calculator.read(seed, digits=2, signs="+-")
    tokenizer = calculator.make_tokenizer()
    folder = arms.KEPT / f"arithmetic-{seed}-{epochs:g}-{marks}-{width}"
    if (folder / "config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(folder), tokenizer, new, held_out
    draw = random.Random(seed)
    known = known.map(lambda row: {"result": row["result"] + "=" * draw.randrange(marks)})
    model = calculator.make_model(tokenizer, seed, width)
    with tempfile.TemporaryDirectory() as out:
        calculator.fine_tune(model, tokenizer, known, epochs, seed, Path(out))
    model.save_pretrained(folder)
    return model, tokenizer, new, held_out
