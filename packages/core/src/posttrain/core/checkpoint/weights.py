"""A model's weights on disk, as ``from_pretrained`` reads them: safetensors, whole or in shards, adapters alone."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from posttrain.core.errors import CheckpointError

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"


def save_weights(model: nn.Module, directory: str | Path) -> None:
    """Write `model` (not wrapped) into `directory`: with its config where it has one, the adapters alone of a PEFT model."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "save_pretrained"):
        with _without_progress_bar():
            model.save_pretrained(str(directory))
    else:
        from safetensors.torch import save_model

        save_model(model, str(directory / WEIGHTS), metadata={"format": "pt", "class": type(model).__name__})


@contextlib.contextmanager
def _without_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_weights(model: nn.Module, directory: str | Path) -> None:
    """Copy the weights in `directory` into `model` (not wrapped), in place.

    Raises:
        CheckpointError: there are no weights, or they are those of another model; the message names the tensors.
    """
    directory = Path(directory)
    if hasattr(model, "peft_config"):
        return _load_adapters(model, directory)
    tensors = read_tensors(directory)
    outcome = model.load_state_dict(tensors, strict=False)
    missing, unexpected = _really_missing(model, outcome.missing_keys, tensors), list(outcome.unexpected_keys)
    if (missing or unexpected) and hasattr(model, "save_pretrained"):
        # transformers renames the tensors of some architectures when it saves: it alone can read them back.
        twin = type(model).from_pretrained(str(directory), dtype=next(model.parameters()).dtype)
        missing = unexpected = []
        outcome = model.load_state_dict(twin.state_dict(), strict=False)
        missing, unexpected = _really_missing(model, outcome.missing_keys, twin.state_dict()), outcome.unexpected_keys
    if missing or unexpected:
        raise CheckpointError(
            f"The weights in {directory} are not those of this {type(model).__name__}: missing {missing[:5]} "
            f"({len(missing)} in all), not known to the model {unexpected[:5]} ({len(unexpected)} in all)."
        )


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the weights in `directory`, mapped from disk rather than read."""
    from safetensors.torch import load_file

    if (directory / WEIGHTS).is_file():
        return load_file(str(directory / WEIGHTS))
    index = directory / f"{WEIGHTS}.index.json"
    if not index.is_file():
        raise CheckpointError(f"There are no weights in {directory}: neither {WEIGHTS} nor {index.name} is there.")
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())):
        if Path(name).name != name:
            raise CheckpointError(
                f"{index} names {name!r}, which is not a file in its own folder; refusing to read it."
            )
        tensors |= load_file(str(directory / name))
    return tensors


def _load_adapters(model: nn.Module, directory: Path) -> None:
    from peft.utils import set_peft_model_state_dict
    from safetensors.torch import load_file

    for adapter in model.peft_config:
        # peft writes the adapter named "default" into the folder itself and every other into one of its own.
        file = next((d / ADAPTER for d in (directory / adapter, directory) if (d / ADAPTER).is_file()), None)
        if file is None:
            raise CheckpointError(f"There is no adapter {adapter!r} in {directory}: {ADAPTER} is missing.")
        outcome = set_peft_model_state_dict(model, load_file(str(file)), adapter_name=adapter)
        if unexpected := getattr(outcome, "unexpected_keys", None):
            raise CheckpointError(f"{file} holds tensors that the adapter {adapter!r} lacks: {unexpected[:5]}.")


def _really_missing(model: nn.Module, missing: list[str], loaded: dict[str, torch.Tensor]) -> list[str]:
    """Of the keys that were not in the file, those that no tied, loaded tensor fills, and that are saved at all."""
    if not missing:
        return []
    state = model.state_dict()
    filled = {state[name].data_ptr() for name in loaded if name in state}
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return [name for name in missing if state[name].data_ptr() not in filled and name not in ignored]
