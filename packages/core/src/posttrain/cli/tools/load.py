"""Loads a trained model or adapter to be used, for the commands after training; no command of its own."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.cli import parse
from posttrain.core.data import accelerator
from posttrain.core.errors import CheckpointError, require
from posttrain.core.models import special_tokens
from posttrain.core.models.wrapping import is_encoder_decoder, is_peft_model, unwrap
from posttrain.lm.loading import adapters, loading
from posttrain.lm.text import chat_template

#: The flags of all commands that load a model, and their types.
KINDS: dict[str, type] = {"base": str, "dtype": str, "device": str, "trust_remote_code": bool}
FLAGS = """  --base MODEL         folder or name of the base weights of an adapter; by default those named in it
  --dtype TYPE         of the weights: float32, bfloat16 or float16; by default that of the checkpoint
  --device DEVICE      such as cuda or cpu; by default a GPU where there is one
  --trust_remote_code  run code from the model's repository"""
NO_TEMPLATE = (
    "The tokenizer has no chat template, so it cannot read messages: give a text, or train the model on conversations "
    "with chat_template_path set."
)


def load(
    model: str | os.PathLike[str],
    base: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    may_score: bool = False,
) -> tuple[Any, Any]:
    """A language model, or an adapter on its base, ready to generate, and its tokenizer. Raises a `CheckpointError`
    where the adapter names no base, a `FileNotFoundError` where there is no such model, and a `ValueError` where there
    is no such device, or it is a reward model.

    Args:
        model: folder or Hub name of a model, or the folder of an adapter.
        base: folder or Hub name of the base weights of an adapter; by default those named in it.
        dtype: of the weights; by default that of the checkpoint.
        device: by default a GPU where there is one.
        may_score: it may also be a reward model.
    """
    path, place = os.fspath(model), _device(device)
    if (absent := loading.missing_folder(path)) is not None:
        raise absent
    adapter, options = path if loading.is_adapter(path) else None, dict[str, Any](dtype=dtype or "auto")
    if adapter is not None:
        config, path, tokenizer = of_adapter(adapter, base, trust_remote_code)
        scores = config.task_type == "SEQ_CLS"
        options |= changes_of_run(adapter, path, trust_remote_code)
    elif base is not None:
        raise CheckpointError(f"base={base!r} has no use: {path} holds no adapter.")
    with loading.explain_missing(path, "model"):
        about = loading.config_of(path, {}, trust_remote_code)
    if adapter is None:
        kinds = about.architectures or ()
        scores, tokenizer = any(kind.endswith("ForSequenceClassification") for kind in kinds), None
    if scores and not may_score:
        raise ValueError(f"{model} is a reward model: it scores texts, and writes none. posttrain evaluate takes it.")
    tokenizer = tokenizer or loading.load_tokenizer(path, trust_remote_code)
    special_tokens.ensure_pad_token(tokenizer)
    options |= {"num_labels": 1} if scores else {}
    auto_class = "AutoModelForSeq2SeqLM" if about.is_encoder_decoder else loading.READING[0]
    auto_class = "AutoModelForSequenceClassification" if scores else auto_class
    found: Any = loading.load_causal_lm(path, options, trust_remote_code=trust_remote_code, auto_class=auto_class)
    if adapter is not None:
        peft = require("peft", "posttrain-core[peft]", why=f"the adapter in {adapter}")
        found = peft.PeftModel.from_pretrained(found, adapter)
        adapters.find_cache_in_generation(found)
    return found.to(place).eval(), tokenizer


def of_adapter(adapter: str, base: str | None, trust_remote_code: bool = False) -> tuple[Any, str, Any]:
    """(the config of the adapter in this folder, its base, or that of this name, its tokenizer, or that of its base).

    Raises `CheckpointError` where it names no base, and `base` is None.
    """
    config = adapters.saved_config(adapter)
    base = base or config.base_model_name_or_path
    if not base:
        raise CheckpointError(f"The adapter in {adapter} does not name its base. Name it: --base MODEL")
    has_tokenizer = (Path(adapter) / "tokenizer_config.json").is_file()
    return config, base, loading.load_tokenizer(adapter if has_tokenizer else base, trust_remote_code)


def changes_of_run(adapter: str | os.PathLike[str], base: str, trust_remote_code: bool = False) -> dict[str, Any]:
    """What the run that saved `adapter` had changed in the config of its base (``model_init_kwargs``).

    An adapter does not hold it, and computes something else on a base without it.
    """
    given: dict[str, Any] = arguments_of_run(adapter).get("model_init_kwargs") or {}
    changed = given.keys() - {"attn_implementation", "dtype", "revision", "use_cache"}
    with loading.explain_missing(base, "model"):
        known = loading.config_of(base, {}, trust_remote_code).to_dict() if changed else {}
    return {name: given[name] for name in known.keys() & changed}


def arguments_of_run(model: str | os.PathLike[str]) -> dict[str, Any]:
    """The arguments of the run that saved `model`; empty where it is no folder of one."""
    file = Path(model) / "training_args.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def read_words(command: str, words: list[str], kinds: dict[str, type]) -> tuple[str, dict[str, Any]]:
    """The model that the words of a command name, and its flags: those of `KINDS`, and others of these `kinds`."""
    [name], given = parse.typed_flags(command, words, KINDS | kinds, 1, what="a model: its folder or its name")
    return name, given


def of_command(command: str, model: str, given: dict[str, Any], may_score: bool = False) -> tuple[Any, Any]:
    """`load` with the flags in `given`, which are taken out; its errors become those of `parse.reported`."""
    with parse.reported(command):
        return load(model, **{name: given.pop(name) for name in KINDS if name in given}, may_score=may_score)


def _device(name: str | None) -> torch.device:
    """The device of that name; None: a GPU where there is one."""
    try:
        place = torch.device(name or accelerator.gpu() or "cpu")
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # AssertionError: a PyTorch without CUDA
        why = str(error).strip().splitlines()[0]
        raise ValueError(f"device={name!r} cannot be used here ({why}). Leave it out, or set cpu.") from error
    return place


@contextlib.contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Within this context `model` is its base; `ValueError` where it has no adapter."""
    if not is_peft_model(model):
        raise ValueError("This model has no adapter that could be taken off.")
    with model.disable_adapter():  # type: ignore[operator]  # of peft.PeftModel
        yield


def encode(tokenizer: Any, prompt: str | list[dict[str, Any]]) -> list[int]:
    """The tokens of a prompt: of a text, or of messages, as the chat template has them before an answer.

    Raises `ValueError` where there are messages, and the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if tokenizer.chat_template is None:
        raise ValueError(NO_TEMPLATE)
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]


def ends(model: nn.Module, tokenizer: Any) -> list[int]:
    """The tokens that end an answer: those of the model's generation config and the end of a turn in its template."""
    own: Any = unwrap(model).generation_config.eos_token_id
    listed = own if isinstance(own, (list, tuple)) else [] if own is None else [own]
    return sorted({*listed, *chat_template.end_tokens(tokenizer)})


def sampling(temperature: float, top_p: float = 1.0) -> dict[str, Any]:
    """The arguments of ``generate`` for a temperature; 0 takes the most probable token."""
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}


@torch.no_grad()
def write(model: nn.Module, tokenizer: Any, prompts: list[list[int]], **options: Any) -> torch.Tensor:
    """The tokens that follow each of `prompts`, (rows, longest), with what ended them; `options`: of ``generate``."""
    encodes = is_encoder_decoder(model)  # its answer is a row of its own, after the token that begins it
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="right" if encodes else "left", return_tensors="pt")
    batch = batch.to(next(model.parameters()).device)
    options |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": ends(model, tokenizer)}
    rows: torch.Tensor = model.generate(**batch, **options)  # type: ignore[operator]  # of transformers' models
    return rows[:, 1 if encodes else batch["input_ids"].shape[1] :]
