"""The small model that claims begin with: it has learned to add and subtract on calculator steps of GSM8K."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import arms  # which makes the examples importable
import calculator
from datasets import Dataset
from transformers import AutoModelForCausalLM


@functools.cache
def fine_tuned(seed: int, epochs: float, width: int = 128) -> tuple[Any, Any, Dataset, Dataset]:
    """(model, tokenizer, steps that fine-tuning never saw, held-out steps).

    The seed sets the split, the first weights and the order. Once trained, a model is kept in `arms.KEPT`.
    """
    known, new, held_out = calculator.read(seed, digits=2, signs="+-")
    tokenizer = calculator.make_tokenizer()
    folder = arms.KEPT / f"arithmetic-{seed}-{epochs:g}-{width}"
    if (folder / "config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(folder), tokenizer, new, held_out
    model = calculator.make_model(tokenizer, seed, width)
    with tempfile.TemporaryDirectory() as out:
        calculator.fine_tune(model, tokenizer, known, epochs, seed, Path(out))
    model.save_pretrained(folder)
    return model, tokenizer, new, held_out
