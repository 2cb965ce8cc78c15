"""Measures whether a loss is divided by the count of items, by computing it with two counts.

The count of a micro-batch with items is doubled. A loss that halves is a sum divided by the count; one that stays is a
mean; any other, such as a divided sum plus a penalty that is not divided, is given the items of its own micro-batch, as
in evaluation, and is then a mean. The measurement has no side effects.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from posttrain.core.checkpoint import rng
from posttrain.core.losses.normalization import split_terms
from posttrain.core.models.compiling import uncompiled

SMALL = 512  # containers of more entries are data
DEPTH = 3
DATA = ("train_dataset", "eval_dataset")
# Of a loss in 32 bits and in 16, how far its ratio may be from 1/2 or from 1.
TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3}
COARSE = 2e-2


def loss_ratio(
    compute_loss: Callable[..., Any], model: nn.Module, inputs: Any, num_items: torch.Tensor, owner: Any
) -> tuple[float, float] | None:
    """(the loss with twice the count as a share of the loss, its tolerance); None if the loss is 0 or NaN.

    Without gradients, uncompiled, and with the same random numbers both times. Afterwards these, the buffers of `model`
    and the attributes of `owner` are restored.

    Args:
        owner: the object with `compute_loss`; its changes during the measurement are undone.
    """
    found = []
    random = rng.rng_state()
    with uncompiled(), torch.no_grad():
        for count in (num_items, num_items * 2):
            with restored(model, owner):
                try:
                    # It may take the labels out of its inputs, of a dict or of what tokenizers give.
                    loss, _ = split_terms(compute_loss(model, copy.copy(inputs), num_items_in_batch=count))
                except RuntimeError as error:
                    if "grad" in str(error):  # it computes a gradient itself
                        error.add_note(
                            "compute_loss is called twice without gradients here, to see whether it divides by "
                            "num_items_in_batch. Set loss_is_scaled_for_ga on the trainer (True: it divides by it; "
                            "False: it returns a mean) to leave that out."
                        )
                    raise
                found.append(loss)
            rng.set_rng_state(random)
    exact = TOLERANCES.get(found[0].dtype, COARSE)
    once, twice = (float(loss) for loss in found)
    return (twice / once, exact) if once and math.isfinite(once) and math.isfinite(twice) else None


def returns_mean(ratios: list[tuple[float, float] | None], moves_alone: bool) -> bool | None:
    """Whether a loss with this `loss_ratio` on each process is a mean, or becomes one (`is_mixed`); None if all ratios
    are None.

    Args:
        moves_alone: any change with the count means a sum, because the other terms are known to be small.
    """
    shown = [ratio for ratio in ratios if ratio is not None]
    if not shown:
        return None
    return all(abs(ratio - 1) <= exact for ratio, exact in shown) or is_mixed(ratios, moves_alone)


def is_mixed(ratios: list[tuple[float, float] | None], moves_alone: bool) -> bool:
    """Whether the loss neither stays nor halves: only a part of it is divided by the count."""
    shown = [ratio for ratio in ratios if ratio is not None]
    stays, halves = (all(abs(ratio - share) <= exact for ratio, exact in shown) for share in (1, 0.5))
    return not (stays or halves or moves_alone)


@contextlib.contextmanager
def restored(model: nn.Module, owner: Any) -> Iterator[None]:
    """Put the buffers of `model` and the attributes of `owner` back at the end; ``owner.log`` does nothing
    meanwhile.
    """
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    attributes = dict(vars(owner))
    contents = [keep for name in attributes.keys() - DATA for keep in _contents(attributes[name], DEPTH)]
    if hasattr(owner, "log"):
        owner.log = lambda *args, **kwargs: None
    if hasattr(owner, "metrics"):
        owner.metrics = owner.metrics.copy()
    try:
        yield
    finally:
        vars(owner).clear()
        vars(owner).update(attributes)
        for container, content in contents:
            if _has_changed(container, content):
                container.clear()
                (container.extend if hasattr(container, "extend") else container.update)(content)
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                module._buffers[name] = buffer


def _contents(value: Any, depth: int) -> Iterator[tuple[Any, Any]]:
    """(container, its current content) of `value` and of nested containers."""
    if not isinstance(value, (list, dict, set, deque)) or len(value) > SMALL:
        return
    yield value, dict(value) if isinstance(value, dict) else list(value)
    if depth > 1:
        for inner in list(value.values()) if isinstance(value, dict) else list(value):
            yield from _contents(inner, depth - 1)


def _has_changed(container: Any, content: Any) -> bool:
    if len(container) != len(content):
        return True
    if isinstance(content, dict):
        return any(container.get(name, content) is not value for name, value in content.items())
    return any(now is not before for now, before in zip(container, content, strict=True))
