"""Builds flex attention's block mask from `Segments`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from posttrain.lm.attention.segments import Segments

#: Queries, and keys, of a block.
BLOCK = 128
#: Tensors of a mask: which blocks of keys those of queries see in part and in full, and by which they are seen.
BLOCKS = tuple(
    f"{full}{kind}_{what}" for kind in ("kv", "q") for full in ("", "full_") for what in ("num_blocks", "indices")
)


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
    lengths = segments.num_tokens, segments.num_tokens
    options: dict[str, Any] = {"mask_mod": rule, "seq_lengths": lengths}
    made = BlockMask.from_kv_blocks(partly, partly_at, fully, fully_at, BLOCK_SIZE=BLOCK, **options)
    # Which queries see a block of keys is found on the CPU: on a GPU it takes 60 kernels.
    moved: dict[str, Any] = {name: getattr(made, name).to(device, non_blocking=True) for name in BLOCKS}
    return BlockMask(BLOCK_SIZE=made.BLOCK_SIZE, **options, **moved)


def _seen_of_blocks(segments: Segments, window: int | None) -> torch.Tensor:
    """(n, n) the number of visible pairs in a block of BLOCK x BLOCK queries and keys, for n = N / BLOCK rounded up.

    A token attends to a range of its own segment and of each segment that this one continues.
    """
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
