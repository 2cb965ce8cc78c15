"""Replays one token of all rows as a CUDA graph: one launch for the hundreds of kernels of a decoder's layers.

A graph reads and writes the addresses that it was captured with. Those of a `FixedBlock` and of a `DecoderStep` stay
until rows leave, a cache grows or a table of positions does; then the step is captured again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from posttrain.core.data import accelerator
from posttrain.rl.generation.fixed_block import FixedBlock

if TYPE_CHECKING:
    from posttrain.rl.generation.decoder_step import Attend, DecoderStep
    from posttrain.rl.generation.group_cache import Decoding

logger = logging.getLogger(__name__)

LASTS = 32
"""Tokens for which a graph is worth capturing."""

Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], Any], torch.Tensor]]


class StepGraph:
    """A `DecoderStep` that is called as it is for two tokens of new addresses, and replayed from then on.

    After a graph that lasted it is replayed from the first.

    Args:
        capture: ``work -> (replay, result)``; None: that of CUDA.
    """

    def __init__(self, step: DecoderStep, decoding: Decoding, capture: Capture | None = None) -> None:
        self.step, self.decoding, self.prepare = step, decoding, step.prepare
        self._capture: Capture | None = capture or accelerator.CaptureGraphs()
        self._addresses: tuple[Any, ...] | None = None
        self._replay: Callable[[], Any] | None = None
        self._times, self._first = 0, 2

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """As that of `DecoderStep`; the logits are overwritten by the next call."""
        if (addresses := self._now(tokens)) != self._addresses:
            # A capture for a few tokens costs more than it saves; a graph that lasted has compiled all its kernels.
            self._first = 0 if self._times >= LASTS and self._replay is not None else 2
            self._addresses, self._replay, self._times = addresses, None, 0
        if self._replay is None and self._times == self._first:
            self._try_to_capture(tokens, positions, attend)
        self._times += 1
        if addresses is None or self._replay is None:
            return self.step(tokens, positions, attend)
        self._tokens.copy_(tokens)
        self._positions.copy_(positions)
        self._replay()
        return self._logits

    def _try_to_capture(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> None:
        if self._addresses is None or self._capture is None:
            return
        self._tokens, self._positions = tokens.clone(), positions.clone()
        try:
            self._replay, self._logits = self._capture(lambda: self.step(self._tokens, self._positions, attend))
        except RuntimeError as error:
            self._capture = None
            logger.warning(
                "Each token's kernels are launched one by one, which is slower: no CUDA graph (%s).", str(error)
            )

    def _now(self, tokens: torch.Tensor) -> tuple[Any, ...] | None:
        """What changes where an address does; None for a step whose operations depend on the position."""
        blocks, turns = [block for block in self.decoding.blocks if isinstance(block, FixedBlock)], self.step.turns
        if len(blocks) < len(self.decoding.blocks):
            return None
        longest = max(block.longest for block in blocks)
        if turns is None or any(layer.window is not None and longest >= layer.window for layer in self.step.layers):
            return None
        return len(tokens), len(turns[0]), *(block.version for block in blocks)
