"""Scores a tile of logits on a GPU in one kernel, which reads it twice and writes its gradient in place.

The operations of torch that it stands for pass over the tile some 15 times. One program scores one row (Triton):

    x_v = softcap * tanh(scale * y_v / softcap) / temperature        of the products y
    loss = log sum exp(x) - (1 - smoothing) * x_label - smoothing * mean(x)
    gradient_v = exp(x_v) / sum exp(x) - smoothing / V - (1 - smoothing) [v = label], times the slope of the softcap

Sums are kept beside the highest logit so far (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867), in
float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from posttrain.core.data import accelerator

#: Logits of a row that a program reads at a time.
WIDTH = 4096


def can_score(tile: torch.Tensor) -> bool:
    """Whether the kernel runs on such a tile: on a CUDA device, where Triton is.

    Not in float16, whose gradients are weighted before they are rounded, so that they do not vanish.
    """
    return tile.dtype in (torch.bfloat16, torch.float32) and accelerator.has_kernels(tile)


def score(
    tile: torch.Tensor,
    labels: torch.Tensor,
    scores: torch.Tensor,
    stats: Sequence[str],
    *,
    softcap: float | None,
    scale: float,
    temperature: float,
    smoothing: float,
    with_gradient: bool,
) -> None:
    """Write the losses of a tile and each of `stats` into `scores`.

    Args:
        tile: (n, V) products, contiguous; replaced by the gradient of the summed loss with respect to the scaled
            products, if asked for.
        labels: (n,). scores: (1 + len(stats), n) float32, its columns adjacent.
        stats: of `posttrain.lm.loss.language_modeling.TOKEN_STATS`.
    """
    rows, vocabulary = tile.shape
    places = {name: number for number, name in enumerate(stats, start=1)}
    _kernel()[(rows,)](
        tile,
        labels,
        scores,
        tile.stride(0),
        scores.stride(0),
        vocabulary,
        softcap or 1.0,
        scale,
        temperature,
        smoothing,
        HAS_SOFTCAP=bool(softcap),
        WITH_GRADIENT=with_gradient,
        CORRECT=places.get("correct", 0),
        ENTROPY=places.get("entropy", 0),
        MEAN=places.get("mean_logit", 0),
        COLLISION=places.get("log_collision", 0),
        WIDTH=WIDTH,
        num_warps=8,
    )


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    globals()["tl"] = tl  # where the compiler looks names of the kernel up
    return triton.jit(_score_row)


tl: Any = None


def _score_row(
    tile,
    labels,
    scores,
    tile_stride,
    score_stride,
    vocabulary,
    softcap,
    scale,
    temperature,
    smoothing,
    HAS_SOFTCAP: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    CORRECT: tl.constexpr,
    ENTROPY: tl.constexpr,
    MEAN: tl.constexpr,
    COLLISION: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    products, label = tile + row * tile_stride, tl.load(labels + row)
    columns = tl.arange(0, WIDTH)
    # of the logits so far: the highest and where it is; with d = x - highest the sums of e^d, d e^d and e^2d; of x
    highest = float("-inf")
    best, total, spread, squares, plain, at_label = 0, 0.0, 0.0, 0.0, 0.0, 0.0
    for start in range(0, vocabulary, WIDTH):
        inside = start + columns < vocabulary
        x = tl.load(products + start + columns, mask=inside, other=0.0).to(tl.float32) * scale
        if HAS_SOFTCAP:
            x = softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)
        x = x / temperature
        plain += tl.sum(tl.where(inside, x, 0.0))
        at_label += tl.sum(tl.where(start + columns == label, x, 0.0))
        x = tl.where(inside, x, -float("inf"))
        top = tl.max(x)
        if CORRECT:
            place = tl.min(tl.where(x == top, start + columns, vocabulary))
            best = tl.where(top > highest, place, best)
        raised = tl.maximum(highest, top)
        shrink = tl.where(total > 0, tl.exp(highest - raised), 0.0)
        distance = tl.maximum(x - raised, -1e30)  # a masked logit is -inf, and 0 * -inf is not a number
        power = tl.exp(distance)
        if ENTROPY:
            moved = tl.where(total > 0, highest - raised, 0.0)
            spread = shrink * (spread + total * moved) + tl.sum(power * distance)
        if COLLISION:
            squares = shrink * shrink * squares + tl.sum(power * power)
        total = shrink * total + tl.sum(power)
        highest = raised
    log_total = tl.log(total)
    expected = tl.where(smoothing != 0, (1 - smoothing) * at_label + smoothing * plain / vocabulary, at_label)
    tl.store(scores + row, highest + log_total - expected)
    if CORRECT:
        tl.store(scores + CORRECT * score_stride + row, (best == label).to(tl.float32))
    if ENTROPY:
        tl.store(scores + ENTROPY * score_stride + row, log_total - spread / total)
    if MEAN:
        tl.store(scores + MEAN * score_stride + row, plain / vocabulary)
    if COLLISION:
        tl.store(scores + COLLISION * score_stride + row, tl.log(squares) - 2 * log_total)
    if WITH_GRADIENT:
        for start in range(0, vocabulary, WIDTH):
            inside = start + columns < vocabulary
            x = tl.load(products + start + columns, mask=inside, other=0.0).to(tl.float32) * scale
            slope = 1.0
            if HAS_SOFTCAP:
                bent = 2 * tl.sigmoid(2 * x / softcap) - 1
                x, slope = softcap * bent, 1 - bent * bent
            gradient = tl.exp(x / temperature - highest) / total - smoothing / vocabulary
            gradient = tl.where(start + columns == label, gradient - (1 - smoothing), gradient) * slope
            tl.store(products + start + columns, gradient.to(tile.dtype.element_ty), mask=inside)
