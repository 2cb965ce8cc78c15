"""Two kernels of a decoding step on a GPU (Triton), which stand for some 30 of torch's operations in each layer.

One program of `attend` has the queries of a row that share keys, and keeps their softmax beside the highest score so
far (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867); one of `turn` has a head of a row. Sums are in
float32.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton takes the types of a kernel's arguments for its own.
from __future__ import annotations

import functools
from typing import Any

import torch

#: Bytes of keys that a program reads at a time: small cards have 99 KiB of shared memory for three of these, twice.
BYTES = 2**13
WARPS, STAGES = 2, 3


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prompts: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor],
    places: torch.Tensor,
    owners: torch.Tensor,
    lengths: torch.Tensor,
    written: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of each row's new token to its prompt, to what it has generated, and to itself.

    Args:
        query: (R, H, D). key: (R, G, D). value: (R, G, E); each head's numbers adjacent.
        prompts: (P, G, width, D) keys and (P, G, width, E) values, contiguous.
        own: (B, slots, D) and (B, slots, E), contiguous; the new `key` and `value` are written into them.
        places: (R, G) in B. owners: (R,) in P. lengths: (P,) tokens of a prompt.
        written: (1,) tokens of each row that `own` holds.

    Returns:
        (R, H, E).
    """
    rows, heads, size = query.shape
    groups, value_size = value.shape[1:]
    out = query.new_empty(rows, heads, value_size)
    _compiled("attend")[(rows, groups)](
        query,
        key,
        value,
        *prompts,
        *own,
        out,
        places,
        owners,
        lengths,
        written,
        *(stride for tensor in (query, key, value) for stride in tensor.stride()[:2]),
        prompts[0].shape[2],
        own[0].shape[1],
        scale,
        GROUPS=groups,
        SHARE=heads // groups,
        QUERIES=max(16, _power(heads // groups)),  # a product on tensor cores has at least 16 rows
        SIZE=size,
        KEY=max(16, _power(size)),
        VALUE_SIZE=value_size,
        VALUE=max(16, _power(value_size)),
        WIDTH=max(16, min(BYTES // 256, BYTES // (_power(max(size, value_size)) * query.element_size()))),
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out


def turn(
    mixed: torch.Tensor, count: int, weight: torch.Tensor | None, eps: float, cosine: torch.Tensor, sine: torch.Tensor
) -> torch.Tensor:
    """The first `count` heads of (R, heads, D), normalised if there is a `weight`, and turned by their positions.

    Args:
        weight: (count, D). cosine, sine: (R, 1, D), contiguous; the half of `sine` that is subtracted is negative.

    Returns:
        (R, count, D), contiguous.
    """
    rows, _, size = mixed.shape
    out = mixed.new_empty(rows, count, size)
    _compiled("turn")[(rows, count)](
        mixed,
        mixed if weight is None else weight,
        cosine,
        sine,
        out,
        mixed.stride(0),
        mixed.stride(1),
        eps,
        COUNT=count,
        HAS_WEIGHT=weight is not None,
        SIZE=size,
        WIDTH=_power(size),
        num_warps=1,
    )
    return out


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


@functools.cache
def _compiled(name: str) -> Any:
    import triton
    import triton.language as tl

    globals()["tl"] = tl  # where the compiler looks names of the kernel up
    if name == "turn":
        return triton.jit(_turn_head)
    # Whatever these are: a kernel cannot be compiled while a CUDA graph is captured.
    return triton.jit(_attend_row, do_not_specialize=["width", "slots"])


tl: Any = None


def _attend_row(
    queries,
    new_keys,
    new_values,
    prompt_keys,
    prompt_values,
    own_keys,
    own_values,
    out,
    places,
    owners,
    lengths,
    written,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    width,
    slots,
    scale,
    GROUPS: tl.constexpr,
    SHARE: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place, prompt = tl.load(places + row * GROUPS + group), tl.load(owners + row)
    step, length = tl.load(written), tl.load(lengths + prompt)
    heads, k, v, columns = tl.arange(0, QUERIES), tl.arange(0, KEY), tl.arange(0, VALUE), tl.arange(0, WIDTH)
    in_k, in_v = k < SIZE, v < VALUE_SIZE
    is_head = (heads < SHARE)[:, None]
    asked = queries + row * query_row + (group * SHARE + heads)[:, None] * query_head + k[None, :]
    query = tl.load(asked, mask=is_head & in_k[None, :], other=0.0)
    key = tl.load(new_keys + row * key_row + group * key_head + k, mask=in_k, other=0.0)
    value = tl.load(new_values + row * value_row + group * value_head + v, mask=in_v, other=0.0)
    kept_keys, kept_values = own_keys + place * slots * SIZE, own_values + place * slots * VALUE_SIZE
    tl.store(kept_keys + step * SIZE + k, key, mask=in_k)
    tl.store(kept_values + step * VALUE_SIZE + v, value, mask=in_v)
    # of the scores so far: the highest; with d = score - highest the sum of e^d, and that of e^d times the values
    highest = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
    total = tl.full((QUERIES,), 1.0, tl.float32)
    mixed = tl.zeros((QUERIES, VALUE), tl.float32) + value.to(tl.float32)[None, :]
    for part in tl.static_range(2):
        if part == 0:
            keys = prompt_keys + (prompt * GROUPS + group) * width * SIZE
            values, count = prompt_values + (prompt * GROUPS + group) * width * VALUE_SIZE, length
        else:
            keys, values, count = kept_keys, kept_values, step
        for start in range(0, count, WIDTH):
            seen = start + columns < count
            them = keys + (start + columns)[None, :] * SIZE + k[:, None]
            some = tl.load(them, mask=seen[None, :] & in_k[:, None], other=0.0)
            scores = tl.dot(query, some, input_precision="ieee") * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            raised = tl.maximum(highest, tl.max(scores, 1))
            shares, shrink = tl.exp(scores - raised[:, None]), tl.exp(highest - raised)
            them = values + (start + columns)[:, None] * VALUE_SIZE + v[None, :]
            some = tl.load(them, mask=seen[:, None] & in_v[None, :], other=0.0)
            added = tl.dot(shares.to(some.dtype), some, input_precision="ieee")
            total, mixed, highest = total * shrink + tl.sum(shares, 1), mixed * shrink[:, None] + added, raised
    found = mixed / total[:, None]
    to = out + ((row * GROUPS + group) * SHARE + heads)[:, None] * VALUE_SIZE + v[None, :]
    tl.store(to, found.to(out.dtype.element_ty), mask=is_head & in_v[None, :])


def _turn_head(
    mixed,
    weights,
    cosines,
    sines,
    out,
    mixed_row,
    mixed_head,
    eps,
    COUNT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    inside, others = columns < SIZE, (columns + SIZE // 2) % SIZE
    source = mixed + row * mixed_row + head * mixed_head
    x = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(source + others, mask=inside, other=0.0).to(tl.float32)
    if HAS_WEIGHT:
        length = tl.rsqrt(tl.sum(x * x) / SIZE + eps)
        x *= length * tl.load(weights + head * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        y *= length * tl.load(weights + head * SIZE + others, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    found = (x * cosine + y * sine).to(out.dtype.element_ty)
    tl.store(out + (row * COUNT + head) * SIZE + columns, found, mask=inside)
