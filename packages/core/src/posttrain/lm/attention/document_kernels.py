"""What kernels of a GPU need for documents of different lengths that lie in one row.

In 16 bits a kernel is given the borders of documents, without a mask; flex attention a block mask, from `Segments`.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from posttrain.core.data import accelerator
from posttrain.lm.attention.segments import Segments

Kernel = Callable[..., torch.Tensor]


def document_kernel(with_softcap: bool) -> Kernel | None:
    """(N, H, D) queries, (N, G, D) keys and values, the borders of documents, the longest, scale, window and softcap ->
    (N, H, D). What transformers loaded for a model's `attn_implementation`, FlashAttention 2, 3 or 4; else flash-attn's
    where it is installed; else torch's, which knows no softcap; None where none is there.
    """
    of_transformers = sys.modules.get("transformers.modeling_flash_attention_utils")
    is_named = getattr(of_transformers, "_flash_varlen_fn", None) is not None
    return _by_name if is_named else _choose(with_softcap, _has_flash_attn())


@functools.cache
def _choose(with_softcap: bool, has_flash_attn: bool) -> Kernel | None:
    if has_flash_attn:
        return _by_flash_attn
    return _by_torch if not with_softcap and (accelerator.capability() or (0, 0)) >= (8, 0) else None


def _has_flash_attn() -> bool:
    if (loaded := sys.modules.get("flash_attn")) is not None:
        return "flash_attn_varlen_func" in vars(loaded)
    spec = importlib.util.find_spec("flash_attn")
    return spec is not None and spec.origin is not None  # flash-attn-4 alone is a folder without a file of its own


def _by_name(*given: Any) -> torch.Tensor:
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    query, key, value, bounds, longest, scale, window, softcap = given
    sizes: dict[str, Any] = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    sizes |= {"max_length_q": longest, "max_length_k": longest, "sliding_window": window, "softcap": softcap or None}
    sizes |= {"attention_mask": None, "query_length": len(query), "is_causal": True, "softmax_scale": scale}
    found: torch.Tensor = _flash_attention_forward(*(tensor[None] for tensor in (query, key, value)), **sizes)
    return found[0]


def _by_flash_attn(query, key, value, bounds, longest, scale, window, softcap) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    sees = (-1, -1) if window is None else (window - 1, 0)
    options = {"softmax_scale": scale, "causal": True, "window_size": sees, "softcap": softcap}
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    return flash_attn_varlen_func(query, key, value, bounds, bounds, longest, longest, **options)


def _by_torch(query, key, value, bounds, longest, scale, window, softcap) -> torch.Tensor:
    from torch.nn.attention import varlen

    options = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if query.shape[1] != key.shape[1]:
        if _takes_groups(varlen.varlen_attn):
            options["enable_gqa"] = True
        else:  # torch 2.11
            key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    out = varlen.varlen_attn(query, key, value, bounds, bounds, longest, longest, **options)
    assert isinstance(out, torch.Tensor)  # a pair only if the logarithms of the normalisers are asked for
    return out


@functools.cache
def _takes_groups(kernel: Kernel) -> bool:
    return "enable_gqa" in inspect.signature(kernel).parameters


@functools.lru_cache(maxsize=8)
def bounds_of(segments: Segments, device: torch.device) -> torch.Tensor:
    """(S + 1,) where each segment begins, and the end of the last."""
    return torch.tensor([*segments.starts, segments.num_tokens], dtype=torch.int32).to(device, non_blocking=True)


# --------------------------------------------------------------------------- the blocks of flex attention

#: Queries, and keys, of a block.
BLOCK = 128


@functools.lru_cache(maxsize=8)
def block_mask(segments: Segments, window: int | None, device: torch.device) -> Any:
    """The blocks of 128 x 128 that hold anything seen, and the rule within them.

    From the segments' borders: torch's `create_block_mask` evaluates the rule for each of N x N pairs first.
    """
    from torch.nn.attention.flex_attention import BlockMask

    parts = *segments.reach(), segments.position_ids()[0].int()
    number, end, positions = (part.to(device, non_blocking=True) for part in parts)

    # Numbers of 32 bits for each token, and no table for pairs of segments: a table is read for each pair of tokens,
    # with an address of 64 bits each, which alone fills a thread's registers.
    def rule(batch, head, q, kv):
        seen = (number[kv] <= number[q]) & (number[q] < end[kv])
        return seen if window is None else seen & (positions[q] - positions[kv] < window)

    count = _seen_of_blocks(segments, window)
    full = count == BLOCK**2
    listed = []
    for blocks in ((count > 0) & ~full, full):
        order = blocks.int().argsort(dim=1, descending=True, stable=True)
        listed += [blocks.sum(1)[None, None], order[None, None]]
    partly, partly_at, fully, fully_at = (tensor.to(torch.int32) for tensor in listed)
    options: dict[str, Any] = {"mask_mod": rule, "seq_lengths": (segments.num_tokens, segments.num_tokens)}
    made = BlockMask.from_kv_blocks(partly, partly_at, fully, fully_at, BLOCK_SIZE=BLOCK, **options)
    # Which queries see a block of keys is found on the CPU: on a GPU it takes 60 kernels.
    sides = [f"{full}{side}" for side in ("kv", "q") for full in ("", "full_")]
    names = [f"{side}_{what}" for side in sides for what in ("num_blocks", "indices")]
    moved: dict[str, Any] = {name: getattr(made, name).to(device, non_blocking=True) for name in names}
    return BlockMask(BLOCK_SIZE=made.BLOCK_SIZE, **options, **moved)


def _seen_of_blocks(segments: Segments, window: int | None) -> torch.Tensor:
    """(n, n) the visible pairs of each BLOCK x BLOCK queries and keys: of a segment, and of those it continues."""
    lengths, starts = torch.tensor(segments.lengths), torch.tensor(segments.starts)
    offsets, parents = torch.tensor(segments.offsets), torch.tensor(segments.parents)
    ids, positions = segments.segment_ids(), segments.position_ids()[0]
    blocks = -(-len(ids) // BLOCK)
    rows = torch.arange(len(ids)) // BLOCK
    # For each range [low, high): whole blocks from that of `low` up to that of `high`, then corrections at both ends.
    steps, ends = torch.zeros(2, blocks, blocks + 1, dtype=torch.long)
    above = ids
    while above.max() >= 0:
        seen, at = above >= 0, above.clamp_min(0)
        first = torch.zeros_like(positions) if window is None else positions - window + 1
        low = starts[at] + (first - offsets[at]).clamp_min(0)
        high = starts[at] + torch.minimum(lengths[at], positions - offsets[at] + 1)
        seen &= low < high
        for bound, sign in ((low[seen], 1), (high[seen], -1)):
            block, where = bound // BLOCK, rows[seen]
            steps.index_put_((where, block), torch.full_like(block, sign * BLOCK), accumulate=True)
            ends.index_put_((where, block), -sign * (bound - block * BLOCK), accumulate=True)
        above = torch.where(above >= 0, parents[at], -1)
    return (steps.cumsum(1) + ends)[:, :blocks]
