"""Numbers the positions of tokens and images as a model does that has several axes of them, before its forward.

Models with M-RoPE (Qwen2-VL: Wang et al. 2024, https://arxiv.org/abs/2409.12191, section 2.1) give each token a time, a
height and a width, and count on after an image from its larger side. In a row that is no single text they would count
through it, and are given the positions instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from posttrain.core.models.wrapping import base_model


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt as a model that sees reads it.

    ids: its tokens. numbers: inputs with a number for each token, such as ``mm_token_type_ids``. tensors: the
    processor's, for its images.
    """

    ids: Sequence[int]
    numbers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ImageExample:
    """What a model that sees can be tried with.

    prompt: with an image. words: tokens of a text without one.
    """

    prompt: SeenPrompt
    words: Sequence[int]

    def prompts(self) -> tuple[SeenPrompt, SeenPrompt]:
        """Two prompts of other lengths with that image."""
        before = self.words[:2]
        numbers = {name: [*[0] * len(before), *row] for name, row in self.prompt.numbers.items()}
        return self.prompt, replace(self.prompt, ids=[*before, *self.prompt.ids], numbers=numbers)


class ImagePositions:
    """The positions of prompts as models of one class and config number them. It holds no weights."""

    def __init__(self, kind: type[nn.Module], config: Any) -> None:
        self.kind, self.config = kind, config

    @classmethod
    def of(cls, model: nn.Module) -> ImagePositions | None:
        """Those of `model`; None where a token's position is how many are before it."""
        owner = seeing_part(model)
        return cls(type(owner), owner.config) if hasattr(owner, "get_rope_index") else None

    def __call__(self, prompt: SeenPrompt) -> torch.Tensor:
        """(A, P + 1) positions of the P tokens, and of a text token after them, on A axes."""
        length = len(prompt.ids) + 1
        shell: Any = self.kind.__new__(self.kind)  # numbering reads the config alone
        nn.Module.__init__(shell)
        shell.config = self.config
        count = shell.get_rope_index
        known = inspect.signature(count).parameters
        given = {name: tensor for name, tensor in prompt.tensors.items() if name in known}
        if not given:
            return torch.arange(length).expand(3, -1)
        given |= {name: torch.tensor([[*row, 0]]) for name, row in prompt.numbers.items() if name in known}
        return count(torch.tensor([[*prompt.ids, 0]]), **given)[0][-3:, 0]


def seeing_part(model: nn.Module) -> Any:
    """The module of `model` that joins text with what its vision tower sees."""
    owner: Any = base_model(model)
    while hasattr(getattr(owner, "model", None), "get_image_features"):
        owner = owner.model
    return owner


def shared_positions(positions: Iterable[torch.Tensor], groups: Iterable[tuple[int, Sequence[int]]]) -> torch.Tensor:
    """(A, 1, N) positions of a row of prompts, each followed by segments that continue it.

    Args:
        positions: of each prompt, (A, P + 1) as `ImagePositions` gives them.
        groups: of each prompt, how many of its tokens come first, and how many each segment has that goes on there.
    """
    found = []
    for of_prompt, (length, segments) in zip(positions, groups, strict=True):
        found.append(of_prompt[:, :length])
        for size in segments:
            begun = of_prompt[:, length : length + size]
            found += [begun, of_prompt[:, -1:] + torch.arange(1, 1 + size - begun.shape[1])]
    return torch.cat(found, 1).unsqueeze(1)
