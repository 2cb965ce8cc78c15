"""The command ``posttrain export``: a folder, or a GGUF file with an Ollama Modelfile, that other programs read."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from posttrain.cli import parse
from posttrain.cli.tools import load
from posttrain.cli.tools.merge import TOLERANCE, merge
from posttrain.core.checkpoint.weights import save_weights
from posttrain.core.errors import CheckpointError
from posttrain.core.files import write_text
from posttrain.lm.loading import loading

HELP = """posttrain export MODEL TARGET [--dtype TYPE] [--llama_cpp FOLDER] [--base MODEL] [--tolerance SHARE] ...

Write a model, or an adapter merged into its base, for other programs. A TARGET that ends in .gguf is written by
llama.cpp's own converter and read back through transformers; any other is a folder of safetensors with the tokenizer,
which transformers, vLLM and SGLang read.

  --dtype TYPE         float32, bfloat16 or float16; by default that of the checkpoint. Of GGUF also q8_0; of a folder
                       nf4 and int8, the 4 and 8 bits of bitsandbytes
  --llama_cpp FOLDER   a clone of https://github.com/ggml-org/llama.cpp, for GGUF; by default $LLAMA_CPP
  --base MODEL         folder or name of the base weights of an adapter; by default those named in it
  --tolerance SHARE    share of an adapter's effect that merging may lose [default 0.1]
  --trust_remote_code  run code from the model's repository
"""
KINDS = {"base": str, "dtype": str, "llama_cpp": str, "tolerance": float, "trust_remote_code": bool}
CONVERTER = "convert_hf_to_gguf.py"
#: What the converter calls the types.
OUTTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "q8_0": "q8_0"}
#: The arguments of `BitsAndBytesConfig` behind the types of a folder whose linear layers are quantized.
BITS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "int8": {"load_in_8bit": True},
}
#: The largest part of a weight matrix's spread that its rounding may change.
ROUNDING = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-9, "q8_0": 2**-5}


@dataclasses.dataclass(frozen=True)
class Export:
    """What was written.

    Args:
        target: the folder or file.
        dtype: of its weights.
        largest: of the absolute differences between a weight and what was read back, as a part of the spread of its
            matrix; the mean over each matrix, and the largest of all. Of GGUF alone.
        modelfile: an Ollama Modelfile for it. Of GGUF alone.
    """

    target: str
    dtype: str
    largest: float | None = None
    modelfile: str | None = None

    def __str__(self) -> str:
        target = Path(self.target)
        size = sum(file.stat().st_size for file in (target, *target.rglob("*")) if file.is_file()) / 2**20
        said = f"{self.target}: {size:,.0f} MiB in {self.dtype}."
        if self.largest is not None:
            said += f" Read back, its weights differ by {self.largest:.2g} of their spread at most, in a matrix's mean."
        return said + (f" For Ollama: ollama create NAME -f {self.modelfile}" if self.modelfile else "")


def run(words: list[str]) -> None:
    """Write the model, and print what was written."""
    what = "a model and the folder or file to write"
    names, given = parse.typed_flags("export", words, KINDS, 2, what, dtypes=(*OUTTYPES, *BITS))
    with parse.reported("export"):
        print(export(*names, **given))


def export(
    model: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    base: str | None = None,
    llama_cpp: str | os.PathLike[str] | None = None,
    tolerance: float = TOLERANCE,
    trust_remote_code: bool = False,
) -> Export:
    """Write `model`, or an adapter merged into its base, as one folder of safetensors or one GGUF file. Raises a
    `CheckpointError` where the converter fails, or what it wrote is another model; a `FileExistsError` where `target`
    is there; and a `FileNotFoundError` where there is no such model, or no converter.

    Args:
        model: folder or Hub name of a model, or the folder of an adapter.
        target: the folder to write, or a file that ends in .gguf; there must be nothing yet.
        dtype: of the weights: float32, bfloat16, float16, of GGUF also q8_0, of a folder also nf4 and int8; by default
            that of the checkpoint.
        base: the base of an adapter; by default the one named in it.
        llama_cpp: a clone of llama.cpp, for GGUF; by default the environment's LLAMA_CPP.
        tolerance: share of an adapter's effect that merging may lose.
    """
    target = Path(target)
    is_gguf = target.suffix == ".gguf"
    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise FileExistsError(f"There is something in {target} already; name another target.")
    if dtype is not None and (dtype not in {*OUTTYPES, *BITS} or dtype in ({*BITS} if is_gguf else {"q8_0"})):
        raise ValueError(
            f"dtype={dtype!r}: a model is written in float32, bfloat16 or float16, as GGUF also in q8_0, and as a "
            "folder also in nf4 or int8."
        )
    converter = find_converter(llama_cpp) if is_gguf else None
    target.parent.mkdir(parents=True, exist_ok=True)
    kept = None if dtype == "q8_0" or dtype in BITS else dtype
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as beside:
        folder = Path(beside) / "model"
        if loading.is_adapter(model):
            merge(model, folder, base, kept, tolerance, trust_remote_code)
        else:
            whole, tokenizer = load.load(model, base, kept, device="cpu", trust_remote_code=trust_remote_code)
            save_weights(whole, folder)
            tokenizer.save_pretrained(folder)
        if bits := BITS.get(dtype or ""):
            rounded: Any = loading.load_causal_lm(folder, {"dtype": "auto", **bits})
            tokenizer, folder = loading.load_tokenizer(folder), Path(beside) / "quantized"
            rounded.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        dtype = dtype or str(loading.load_causal_lm(folder, {"dtype": "auto"}).dtype).removeprefix("torch.")
        if converter is None:
            if target.exists():
                target.rmdir()
            folder.rename(target)
            return Export(str(target), dtype)
        file = Path(beside) / target.name
        _convert(converter, folder, file, dtype)
        largest = compare_gguf(folder, file)
        if not largest <= ROUNDING[dtype]:
            raise CheckpointError(
                f"What {converter} wrote is another model: read back, its weights differ by {largest:.2g} of their "
                f"spread, where {dtype} rounds by {ROUNDING[dtype]:.2g}. Nothing was kept."
            )
        shutil.move(file, target)
        whole = loading.load_tokenizer(folder)
        stops = [] if whole.eos_token is None else [whole.eos_token]
        beside_it = write_modelfile(target, whole, stops)
    return Export(str(target), dtype, largest, str(beside_it))


def find_converter(llama_cpp: str | os.PathLike[str] | None = None) -> Path:
    """llama.cpp's converter. Raises a `FileNotFoundError` without it, an `ImportError` without its package gguf."""
    folder = llama_cpp or os.environ.get("LLAMA_CPP")
    absent = [name for name in ("gguf", "sentencepiece") if importlib.util.find_spec(name) is None]
    packages = f" GGUF needs packages that are not installed. Run: pip install {' '.join(absent)}" if absent else ""
    if not folder:
        raise FileNotFoundError(
            "GGUF is written by llama.cpp's own converter. Get it: git clone --depth 1 "
            "https://github.com/ggml-org/llama.cpp, and name the folder: --llama_cpp llama.cpp (or LLAMA_CPP)."
            + packages
        )
    if not (found := Path(folder) / CONVERTER).is_file():
        raise FileNotFoundError(f"There is no {CONVERTER} in {folder}; name a clone of llama.cpp.{packages}")
    if absent:
        raise ImportError(packages.strip(), name=absent[0])
    return found


def _convert(converter: Path, folder: Path, file: Path, dtype: str) -> None:
    command = [sys.executable, str(converter), str(folder), "--outfile", str(file), "--outtype", OUTTYPES[dtype]]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not file.is_file():
        last = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()][-3:]
        absent = re.search(r"No module named '(\w+)", " ".join(last))
        needs = f" Run: pip install {absent[1]} (its requirements.txt pins another transformers)" if absent else ""
        raise CheckpointError(f"{converter} failed with status {done.returncode}: {' '.join(last)}.{needs}")


def compare_gguf(folder: str | os.PathLike[str], file: str | os.PathLike[str]) -> float:
    """The largest mean difference between a weight of the model in `folder` and of the GGUF `file`, as transformers
    reads it, by the standard deviation of that weight. Raises a `CheckpointError` where the file lacks one.
    """
    file = Path(file)
    expected: Any = loading.load_causal_lm(folder, {"dtype": "float32"}).state_dict()
    found: Any = loading.load_causal_lm(file.parent, {"dtype": "float32", "gguf_file": file.name}).state_dict()
    if absent := sorted(expected.keys() ^ found.keys()):
        raise CheckpointError(f"{file.name} does not hold the weights of {folder}: {', '.join(absent[:3])} ...")
    gaps = [
        (found[name] - weight).abs().mean() / weight.std().clamp_min(1e-6)
        for name, weight in expected.items()
        if weight.numel() > 1 and weight.is_floating_point()
    ]
    return float(torch.stack(gaps).max())


_MARKS = {"system": "posttrain5ystem", "user": "posttrainu5er", "assistant": "posttraina55istant"}


def write_modelfile(gguf: Path, tokenizer: Any, stops: list[str]) -> Path:
    """Write ``NAME.Modelfile`` beside the file `gguf`. `stops`: the texts that end an answer."""
    lines = [f"# ollama create {gguf.stem} -f {gguf.stem}.Modelfile", f"FROM ./{gguf.name}"]
    if tokenizer.chat_template is not None:
        template, system = template_of(tokenizer)
        if template is None:
            lines.append("# Its chat template is not made of one turn after another: Ollama reads the one in the file.")
        else:
            lines.append(f'TEMPLATE """{template}"""')
            lines += [f'SYSTEM """{system}"""'] if system else []
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if '"' not in stop]
    path = gguf.with_suffix(".Modelfile")
    write_text(path, "\n".join(lines) + "\n")
    return path


def template_of(tokenizer: Any) -> tuple[str | None, str]:
    """(the chat template in the language of Ollama, the system message that it has by itself).

    None where a conversation is not its turns one after another. The beginning of text is left out: Ollama adds it.
    """
    begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]

    def render(*roles: str, asks: bool = False) -> str:
        messages = [{"role": role, "content": _MARKS[role]} for role in roles]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        return text.removeprefix(tokenizer.bos_token) if begins else text

    try:
        whole = render("system", "user", "assistant", "user")
        parts = {"system": render("system", "user")[: -len(_turn(render, "user"))], "user": _turn(render, "user")}
        parts["assistant"] = render("system", "user", "assistant").removeprefix(parts["system"] + parts["user"])
    except Exception:  # a template of any author's, which may refuse an order of roles by any error
        return None, ""
    beginning = render("system", "user", asks=True).removeprefix(parts["system"] + parts["user"])
    if "".join(parts[role] for role in ("system", "user", "assistant", "user")) != whole:
        return None, ""
    if any(parts[role].count(mark) != 1 or '"""' in parts[role] for role, mark in _MARKS.items()):
        return None, ""
    before, after = parts["system"].split(_MARKS["system"])
    own = render("user").removesuffix(parts["user"])
    if own and not (own.startswith(before) and own.endswith(after)):
        return None, ""
    turns = {role: text.replace(_MARKS[role], "{{ .Content }}") for role, text in parts.items()}
    system, user, assistant = (turns[role] for role in _MARKS)
    template = (
        f'{{{{ range .Messages }}}}{{{{ if eq .Role "system" }}}}{system}{{{{ else if eq .Role "user" }}}}{user}'
        f'{{{{ else if eq .Role "assistant" }}}}{assistant}{{{{ end }}}}{{{{ end }}}}{beginning}'
    )
    return template, own[len(before) : len(own) - len(after)] if own else ""


def _turn(render: Any, role: str) -> str:
    """The text of one more turn of a user, as in a conversation that goes on."""
    shorter, longer = render("system", "user", "assistant"), render("system", "user", "assistant", role)
    if not longer.startswith(shorter):
        raise ValueError("a turn changes those before it")
    return longer[len(shorter) :]
