"""Attention over segments in blocks: the queries of some segments, and one range of keys that they attend to.

Each block is full or causal, so no mask is built. The blocks of a query are merged with the logarithm of their
normalisers, the way Milakov and Gimelshein (2018, https://arxiv.org/abs/1805.02867) sum a softmax in parts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from posttrain.lm.attention.segments import Segments


@dataclass(frozen=True)
class Layout:
    """Where the queries and keys of segments lie.

    Attributes:
        own: the segments whose queries there are, one after another.
        key_starts: where the keys of each segment begin. All segments have keys.
    """

    segments: Segments
    own: tuple[int, ...]
    key_starts: tuple[int, ...]

    @functools.cached_property
    def query_starts(self) -> tuple[int, ...]:
        """Where the queries of each of `own` begin."""
        return tuple(accumulate((self.segments.lengths[i] for i in self.own[:-1]), initial=0))

    def seen(self, segment: int) -> list[list[int]]:
        """The ranges ``[start, stop)`` of the keys that `segment` continues, in order, adjacent ones as one."""
        ranges: list[list[int]] = []
        for j in self.segments.ancestors(segment):
            _extend(ranges, self.key_starts[j], self.segments.lengths[j])
        return ranges


def _extend(ranges: list[list[int]], start: int, length: int) -> None:
    """Add ``[start, start + length)`` to `ranges`, to the last one where it goes on there."""
    if ranges and ranges[-1][1] == start:
        ranges[-1][1] += length
    else:
        ranges.append([start, start + length])


@functools.lru_cache(maxsize=64)
def layout_of(segments: Segments) -> Layout:
    """All queries and keys, in the order of `segments`."""
    return Layout(segments, tuple(range(len(segments.lengths))), segments.starts)


def piece_by_piece(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    """Each segment against the keys it sees, gathered: any device, any rule. Shapes as in `segment_attention`."""
    segments, pieces = layout.segments, []
    for i, start in zip(layout.own, layout.query_starts, strict=True):
        length, before, first = segments.lengths[i], segments.offsets[i], layout.key_starts[i]
        queries = query[:, :, start : start + length]
        seen = [*layout.seen(i), [first, first + length]]
        keys, values = (torch.cat([tensor[:, :, a:b] for a, b in seen], 2) for tensor in (key, value))
        mask: Any = None
        if before and window is None and query.is_cuda and not softcap and sinks is None:
            from torch.nn.attention.bias import causal_lower_right  # loads torch._dynamo: a second

            mask = causal_lower_right(length, before + length)  # the kernels know it without building it
        elif before or window is not None:
            position = torch.arange(before + length, device=query.device)
            distance = position[before:, None] - position
            mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        if softcap or sinks is not None:
            pieces.append(_eager(queries, keys, values, mask, scale, softcap, sinks, dropout))
        else:
            causal = mask is None
            pieces.append(
                F.scaled_dot_product_attention(
                    queries, keys, values, mask, dropout, causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
                )
            )
    return torch.cat([piece.transpose(1, 2) for piece in pieces], 1).transpose(1, 2)


def _eager(queries, keys, values, mask, scale, softcap, sinks, dropout) -> torch.Tensor:
    heads, groups = queries.shape[1], keys.shape[1]
    keys, values = (tensor.repeat_interleave(heads // groups, 1) for tensor in (keys, values))
    scores = torch.matmul(queries, keys.transpose(2, 3)).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    weights = F.dropout(scores.softmax(-1), dropout)[..., : keys.shape[2]]
    return torch.matmul(weights.to(values.dtype), values)


class _Block(NamedTuple):
    """Queries [start, stop) of the row against its keys [key_start, key_stop)."""

    start: int
    stop: int
    key_start: int
    key_stop: int
    causal: bool
    first: bool
    """No block before this one had these queries."""


@functools.lru_cache(maxsize=64)
def _blocks(layout: Layout) -> tuple[_Block, ...]:
    """The blocks of a row: each segment with itself, then adjacent segments with what they continue."""
    blocks: list[_Block] = []
    merged: dict[tuple[int, int], list[list[int]]] = {}
    for i, start in zip(layout.own, layout.query_starts, strict=True):
        length, first = layout.segments.lengths[i], layout.key_starts[i]
        blocks.append(_Block(start, start + length, first, first + length, True, True))
        for key_start, key_stop in layout.seen(i):
            _extend(merged.setdefault((key_start, key_stop), []), start, length)
    blocks += [
        _Block(start, stop, first, last, False, False) for (first, last), runs in merged.items() for start, stop in runs
    ]
    return tuple(blocks)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
#: Below this many keys, torch 2.13's kernel is slower in bfloat16 than in float32 on the CPUs that were measured.
HALF_FROM = 768


class Blocks(torch.autograd.Function):
    """Attention on the CPU, block after block: ``(query, key, value, layout, scale)``."""

    @staticmethod
    def forward(ctx, query, key, value, layout, scale):
        _, heads, num_tokens, size = query.shape
        out = query.new_empty(1, num_tokens, heads, size).transpose(1, 2)
        log_sums = query.new_empty(1, num_tokens, heads, dtype=torch.float32).transpose(1, 2)
        if query.dtype == torch.float64:
            log_sums = log_sums.double()
        wide: Any = None  # `out` in the type of the sums, once blocks are merged
        for block in _blocks(layout):
            q, k, v = _block_inputs(block, query, key, value)
            part, part_sums = _flash(q, k, v, 0.0, block.causal, scale=scale)
            at = slice(block.start, block.stop)
            if block.first:
                out[:, :, at], log_sums[:, :, at] = part, part_sums
                continue
            if wide is None:
                wide = out.to(log_sums.dtype)
            sums = torch.logaddexp(log_sums[:, :, at], part_sums)
            old, new = (log_sums[:, :, at] - sums).exp_(), (part_sums - sums).exp_()
            wide[:, :, at] = wide[:, :, at] * old.unsqueeze(-1) + part * new.unsqueeze(-1)
            log_sums[:, :, at] = sums
        if wide is not None:
            out = wide.to(out.dtype)
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        query, key, value, out, log_sums = ctx.saved_tensors
        gradients = [torch.zeros_like(t, dtype=log_sums.dtype) for t in (query, key, value)]
        for block in _blocks(ctx.layout):
            q, k, v = _block_inputs(block, query, key, value)
            at, keys = slice(block.start, block.stop), slice(block.key_start, block.key_stop)
            grad, result = grad_out[:, :, at].to(q.dtype), out[:, :, at].to(q.dtype)
            parts = _flash_backward(grad, q, k, v, result, log_sums[:, :, at], 0.0, block.causal, scale=ctx.scale)
            for gradient, part, where in zip(gradients, parts, (at, keys, keys), strict=True):
                gradient[:, :, where] += part
        rounded = []
        while gradients:  # one at a time: of a long row they are the most that lives
            rounded.append(gradients.pop(0).to(query.dtype))
        return *rounded, None, None


def _block_inputs(
    block: _Block, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    keys = slice(block.key_start, block.key_stop)
    inputs = query[:, :, block.start : block.stop], key[:, :, keys], value[:, :, keys]
    short = block.key_stop - block.key_start < HALF_FROM and query.dtype in (torch.bfloat16, torch.float16)
    return tuple(tensor.float() for tensor in inputs) if short else inputs
