"""Positions of the documents of packed rows, also where those of images have several axes."""

from __future__ import annotations

import torch
from torch import nn

from posttrain.core.models.image_positions import ImagePositions, SeenPrompt


class DocumentPositions:
    """Numbers the tokens of one document, by itself.

    Where positions have several axes, the plain numbers come before them: transformers separates documents by them.

    Args:
        model: whose rule it is; its weights are not kept, so that workers can be given this.
    """

    def __init__(self, model: nn.Module) -> None:
        self._axes = ImagePositions.of(model)
        #: 4 where positions are in time, height and width, else 1.
        self.dimensions = 1 if self._axes is None else 4

    def __call__(self, document: SeenPrompt) -> torch.Tensor:
        """(dimensions, T) positions of the T tokens of `document`, from 0 on."""
        plain = torch.arange(len(document.ids))[None]
        return plain if self._axes is None else torch.cat([plain, self._axes(document)[:, :-1]])
