"""Generates with a copy of the policy on the same device, so that the policy can be trained meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from posttrain.core.distributed import is_in_pieces
from posttrain.core.models.wrapping import unwrap
from posttrain.rl.generation.protocol import Completions, Generator, Sampling


class CopiedGenerator:
    """A local engine with its own weights: a second copy of the model in memory.

    Generation and training share the device, so this gains time where rewards, tools or environments are slow.

    Args:
        generator: generates with the model that it is given.
    """

    has_own_weights = True

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self._copy: nn.Module | None = None

    @torch.no_grad()
    def sync_weights(self, model: nn.Module) -> None:
        """Copy the weights.

        Raises:
            ValueError: the model is sharded.
        """
        model = unwrap(model)
        if is_in_pieces(*model.parameters()):
            raise ValueError(
                "max_staleness above 0 generates with a copy of the weights, and this model is sharded over several "
                "processes. Set use_vllm=True with vllm_mode='server', or max_staleness=0."
            )
        if self._copy is None:
            gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
            for parameter, _ in gradients:
                parameter.grad = None
            self._copy = copy.deepcopy(model).requires_grad_(False).eval()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            self.generator.sync_weights(self._copy)
            return
        for mine, theirs in zip(_tensors(self._copy), _tensors(model), strict=True):
            mine.copy_(theirs, non_blocking=True)

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> Completions:
        """See `Generator.generate`."""
        return self.generator.generate(prompts, n, sampling, seeds)

    def steps(self) -> Any:
        """See `posttrain.rl.generation.local.LocalGenerator.steps`."""
        make = getattr(self.generator, "steps", None)
        return None if make is None else make()


def _tensors(model: nn.Module) -> list[Any]:
    return [*model.parameters(), *model.buffers()]
