"""Adds noise to input embeddings (NEFTune) and disables dropout."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from posttrain.core.models.wrapping import base_model, is_encoder_decoder


@contextlib.contextmanager
def neftune(model: nn.Module, alpha: float | None) -> Iterator[None]:
    r"""Noise on the input embeddings, in training mode only, until the context is left.

    Jain et al. 2023, https://arxiv.org/abs/2310.05914: :math:`x + \frac{\alpha}{\sqrt{Ld}} u` with u uniform in
    [-1, 1], for L positions of width d. No noise where alpha is None or 0.
    """
    if not alpha:
        yield
        return

    def add_noise(module: nn.Module, inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return embedded
        bound = alpha / math.sqrt(embedded.shape[-2] * embedded.shape[-1])
        return embedded + torch.empty_like(embedded).uniform_(-bound, bound)

    base = base_model(model)
    reads = is_encoder_decoder(base) and hasattr(base, "get_encoder")
    # A model with an encoder: the encoder's embedding, which may be a separate module with shared weights.
    with (base.get_encoder() if reads else base).get_input_embeddings().register_forward_hook(add_noise):
        yield


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability in `model` to 0: of dropout modules, and those kept as a plain number."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("_pdrop")):
                setattr(module, name, 0.0)
