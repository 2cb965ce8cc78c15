"""Reads a saved model back, as a program without posttrain would, and compares it with the one that was trained."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.core.checkpoint import weights
from posttrain.core.checkpoint.store import final_path
from posttrain.core.data import rng
from posttrain.core.data.accelerator import for_float64
from posttrain.core.errors import CheckpointError
from posttrain.core.logging import memory
from posttrain.core.models import wrapping

logger = logging.getLogger(__name__)

#: Largest difference of two logits, as a share of their size and standard deviation, by the type of the weights.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
COARSE = 5e-2


def check_if_cheap(model: nn.Module, folder: str | Path, logits: bool) -> None:
    """As `check`, where the host has memory for a copy of `model`; what it finds is a warning. To compare `logits` too,
    `model` must not be in the middle of its training.
    """
    size, free = sum(parameter.nbytes for parameter in model.parameters()), memory.free_memory()
    if free < 2 * size:
        logger.info(
            f"The model in {final_path(folder)} was not read back: a copy takes {size / 2**30:.1f} GiB of host memory, "
            f"and {free / 2**30:.1f} GiB are free."
        )
        return
    try:
        check(model, folder, logits=logits)
    except Exception as error:  # of any kind: the code of the model reads it
        logger.warning(
            f"The model saved in {final_path(folder)} could not be read back as the one that is trained: "
            f"{type(error).__name__}: {error} Its files are kept. check_saved_model=True makes this an error of "
            "save_model, False leaves the comparison out."
        )


def check(
    model: nn.Module, folder: str | Path, state_dict: dict[str, torch.Tensor] | None = None, logits: bool = True
) -> None:
    """Compare the model in `folder`, loaded by ``from_pretrained``, with `model` (not wrapped). Raises a
    `CheckpointError` where something differs; the message names it.

    Every weight must be there with the same numbers, those of the gathered weights in `state_dict` if `model` is
    sharded. Of a text model that is not, `logits` may be compared too, of a few tokens. Of a PEFT model the adapters
    are compared, of any other module its weights.
    """
    where = final_path(folder)
    if wrapping.adapters_of(model):
        weights.check_adapters(model, folder, state_dict)
        logger.info("The adapters in %s were read back and are those that were trained.", where)
        return
    own = model.state_dict() if state_dict is None else state_dict
    if not wrapping.is_pretrained(model):
        _compare(own, weights.read_tensors(Path(folder)), where, tied=True)
        logger.info("The weights in %s were read back and are those that were trained.", where)
        return
    kind: Any = wrapping.plain_class(model)
    random = rng.rng_state()  # a run that is resumed draws the same numbers, and reads nothing back
    try:
        with weights.quiet():
            twin = kind.from_pretrained(str(folder)).eval()
        _compare(own, twin.state_dict(), where)
        largest = _largest_difference(model, twin) if logits and state_dict is None else None
    finally:
        rng.set_rng_state(random)
    also = "" if largest is None else f", and logits that differ by {largest:.2g} of their size at most"
    logger.info(f"The model in {where} was read back by {kind.__name__}.from_pretrained: the same weights{also}.")
    limit = TOLERANCES.get(next(iter(own.values())).dtype, COARSE)
    if largest is not None and not largest <= limit:
        raise CheckpointError(
            f"The model in {where} has the trained weights, and its logits differ by {largest:.3g} of "
            f"their size (at most {limit:g} is rounding): its config does not describe what was trained. Compare "
            "config.json with the config of the trained model."
        )


def _compare(own: dict[str, torch.Tensor], saved: dict[str, torch.Tensor], folder: Path, tied: bool = False) -> None:
    missing = [name for name in own if name not in saved and not tied]
    wrong = [
        f"{name} ({saved[name].dtype} instead of {value.dtype})" if saved[name].dtype != value.dtype else name
        for name, value in own.items()
        if name in saved
        and not (saved[name].dtype == value.dtype and torch.equal(value.detach().cpu(), saved[name].cpu()))
    ]
    if missing or wrong or not saved:
        faults = {"missing": missing, "different": wrong}
        listed = "; ".join(f"{what}: {names[:5]} ({len(names)} in all)" for what, names in faults.items() if names)
        raise CheckpointError(f"The model in {folder}, read back, is not the one that was trained: {listed}.")


@torch.no_grad()
def _largest_difference(model: Any, twin: Any) -> float | None:
    """How far two models' logits, or whatever they give first, are apart, by their size and standard deviation; None
    where they do not read a text of a few tokens.
    """
    if getattr(model, "main_input_name", "") != "input_ids":
        return None
    ids = torch.arange(2, 8).unsqueeze(0)
    device = next(model.parameters()).device
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if wrapping.is_encoder_decoder(model):
        inputs["decoder_input_ids"] = ids
    inputs = {name: value.to(device) for name, value in inputs.items()}
    # Its weights are those of `model`, as was just compared: these are computed with, and take no memory twice.
    # Kept as parameters, since those that are tied must be one object.
    tensors = {name: buffer.to(device) for name, buffer in twin.named_buffers()} | model.state_dict(keep_vars=True)
    with wrapping.evaluating(model):
        try:
            trained = _first(model(**inputs))
        except Exception:  # of any kind: it reads more than one text, as models of multiple choice do, or other columns
            return None
        read = _first(torch.func.functional_call(twin, tensors, kwargs=inputs))
    return float(((trained - read).abs() / (trained.std(correction=0) + trained.abs()).clamp(min=1e-12)).max())


def _first(outputs: Any) -> torch.Tensor:
    return for_float64(outputs["logits"] if "logits" in outputs else outputs[0]).double()
