"""Encodes the images of a prompt once, where a batch has several rows with that prompt.

The model asks its own `get_image_features` within its forward. Within `features_once` the answer is computed from the
images of each prompt once and then repeated, so that wrappers for several processes see an ordinary forward, and
gradients of all rows flow into one encoding.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from posttrain.core.data.host_copies import send
from posttrain.core.models.wrapping import replaced
from posttrain.lm.images.image_positions import seeing_part

#: Inputs of videos, which have an encoding of their own.
OF_VIDEOS = re.compile("video|second_per_grid")


@dataclass(frozen=True)
class ImageCopies:
    """Which images each row of a batch shows.

    Attributes:
        tokens: of each prompt, how many tokens stand for features of its images.
        order: of each row of the batch, the number of its prompt.
        entries: of each image tensor, how many of its entries each prompt has.
    """

    tokens: tuple[int, ...]
    order: tuple[int, ...]
    entries: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def repeated(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """An image tensor of the prompts as one of the rows."""
        return tensor[send(_places(self.entries[name], self.order), tensor.device)]


def _places(counts: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    starts = [0, *accumulate(counts)]
    return torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order])


@contextlib.contextmanager
def features_once(model: nn.Module, copies: ImageCopies | None, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Within this context `model` may be called with the inputs that this gives.

    Args:
        copies: None where each row has image tensors of its own.
        inputs: of the model, with the image tensors of each prompt once. Those of videos are repeated.
    """
    if copies is None or not copies.entries:
        yield dict(inputs)
        return
    owner = seeing_part(model)
    encode = owner.get_image_features
    names = list(inspect.signature(encode).parameters)
    # An input of each image of each row, which models read beside the features, to number positions.
    once = {name: inputs[name] for name in ("image_grid_thw",) if name in inputs}
    rest = {name: inputs[name] for name in copies.entries if OF_VIDEOS.search(name) and name in inputs}
    shown = dict(inputs) | {name: copies.repeated(name, tensor) for name, tensor in {**once, **rest}.items()}
    if not any(copies.tokens):
        yield shown
        return

    @functools.wraps(encode)  # `generate` looks at the names of its parameters
    def encode_once(*args: Any, **kwargs: Any) -> Any:
        args = tuple(once.get(name, value) for name, value in zip(names, args, strict=False))
        found = encode(*args, **{name: once.get(name, value) for name, value in kwargs.items()})
        for name in ("pooler_output", "deepstack_features"):
            if (features := getattr(found, name, None)) is not None:
                setattr(found, name, _expanded(features, copies, several=name != "pooler_output"))
        return found

    with replaced(owner, "get_image_features", encode_once):
        yield shown


def _expanded(features: Any, copies: ImageCopies, several: bool) -> Any:
    """Features of the prompts' images as those of the rows; of `several` layers one by one."""
    if several:
        return type(features)(_expanded(layer, copies, False) for layer in features)
    whole = features if isinstance(features, torch.Tensor) else torch.cat(list(features))
    size = whole.shape[-2] if whole.ndim == 3 else 1  # tokens of an entry
    if len(whole) * size != sum(copies.tokens):
        raise ValueError(
            f"The images have {len(whole) * size} features, and the prompts {sum(copies.tokens)} tokens for them."
        )
    whole = whole[send(_places([tokens // size for tokens in copies.tokens], copies.order), whole.device)]
    return whole if isinstance(features, torch.Tensor) else type(features)([whole])
