"""Lets the vision part take part in every forward of several processes, also where a batch has no images.

Sharded weights are gathered, and gradients averaged, by all processes together: one whose rows are text alone would
leave the others waiting in the vision tower. It encodes a blank image instead, whose features are added to the embedded
text multiplied by 0: the outputs are the same, and the gradients of the vision part are 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from posttrain.core.models.wrapping import base_model, sees


def always_see(model: nn.Module, blank: Mapping[str, torch.Tensor]) -> None:
    """Show `model` the image tensors `blank` whenever it is called without any, until the process ends.

    Calls with a cache of keys and values, and those of a generation engine, are left alone. Copies of the model do the
    same.

    Args:
        model: a vision-language model, wrapped or not; sharded later.
        blank: of one small image, as the processor makes them.
    """
    base = base_model(model)
    owner = base.model
    if _of(owner) is not None:
        return
    shown = _Blank(owner, dict(blank))
    owner.register_forward_pre_hook(shown.look, with_kwargs=True)
    base.get_decoder().register_forward_pre_hook(shown.add, with_kwargs=True)


def see_alike(model: nn.Module, other: nn.Module) -> None:
    """Show `model` a blank image where `other` is shown one."""
    base = base_model(other)
    if sees(base) and (shown := _of(base.model)) is not None:
        always_see(model, shown.blank)


def _of(owner: nn.Module) -> _Blank | None:
    found = (getattr(hook, "__self__", None) for hook in owner._forward_pre_hooks.values())
    return next((one for one in found if isinstance(one, _Blank)), None)


class _Blank:
    """The hooks of one model; copying the model copies them, with the copy as their owner."""

    def __init__(self, owner: Any, blank: dict[str, torch.Tensor]) -> None:
        self.owner, self.blank, self.is_due = owner, blank, False

    def look(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = {name for name, value in kwargs.items() if value is not None}
        self.is_due = not given & (self.blank.keys() | {"cache", "past_key_values", "decoding"})

    def add(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not self.is_due:
            return None
        self.is_due = False  # recomputed layers do not come here again
        embedded = kwargs["inputs_embeds"]
        known = inspect.signature(type(self.owner).get_image_features).parameters
        inputs = {name: value.to(embedded.device) for name, value in self.blank.items() if name in known}
        found = self.owner.get_image_features(**inputs)
        features = [found.pooler_output, getattr(found, "deepstack_features", None)]
        parts = [part.sum() for part in tree_leaves(features) if isinstance(part, torch.Tensor)]
        nothing = torch.stack(parts).sum() * 0
        return args, kwargs | {"inputs_embeds": embedded + nothing.to(embedded.dtype)}
