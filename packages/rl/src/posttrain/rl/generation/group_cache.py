"""A key-value cache that stores each prompt once for all completions of its group.

A model reads a `Decoding` as a keyword of its forward, which transformers hands down to the attention function:

    with decoding_attention(model):
        decoding, options = Decoding(device), {"use_cache": False}
        with decoding.read(lengths=[5, 3], copies=4) as block:                                   # row: (1, 8)
            logits = model(input_ids=row, position_ids=..., decoding=decoding, **options).logits
        logits = model(input_ids=tokens, position_ids=..., decoding=decoding, **options).logits  # tokens: (8, 1)
        block.advance()

Rows that were admitted together are a `Block`; on a GPU a `FixedBlock`, with the same shapes for each token.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from posttrain.core.models.wrapping import PretrainedModel, base_model, text_part
from posttrain.lm.attention.attention_blocks import Layout, piece_by_piece
from posttrain.lm.attention.segments import Segments
from posttrain.lm.attention.varlen_attention import layer_window, segment_attention
from posttrain.rl.generation.block import Block, Text
from posttrain.rl.generation.fixed_block import FixedBlock

IMPLEMENTATION = "posttrain_decoding"
Known = tuple[int, "Text | None"]
"""How many tokens of a prompt are read already, and their keys and values; None where there are none."""


@contextlib.contextmanager
def decoding_attention(model: nn.Module) -> Iterator[None]:
    """Within this context the forward of `model` takes ``decoding``, and must be given it; of a model that sees, its
    decoder of text does.
    """
    reader = text_part(base_model(model))
    before = reader.config._attn_implementation
    _register()
    reader.set_attn_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        reader.set_attn_implementation(before)


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface

    # Without a mask function transformers makes no masks; a `Decoding` handles visibility.
    AttentionInterface.register(IMPLEMENTATION, _attention_function)


class Decoding:
    """The input of a forward: the prompts of a new block, or one token of each row of all blocks.

    Attributes:
        blocks: the active ones, in the order of the rows.
        reading: the block in prefill; None in decoding.
        is_fixed: the shapes of a step do not depend on how many tokens are written; by default on a device.
        filler: rows behind those of the blocks, which attend to nothing.
    """

    def __init__(self, device: torch.device, is_fixed: bool | None = None) -> None:
        self.device = device
        self.is_fixed = device.type != "cpu" if is_fixed is None else is_fixed
        self.blocks: list[Block] = []
        self.filler = 0
        self.reading: Block | None = None
        self._segments: Segments | None = None
        self._known: list[Text | None] = []
        self._behind: Layout | None = None

    @property
    def reserved(self) -> int:
        """Tokens that the caches of all blocks have room for when they are as large as they can become."""
        return sum(block.reserved for block in self.blocks)

    @contextlib.contextmanager
    def read(
        self, lengths: Sequence[int], copies: int, max_new: int = sys.maxsize, known: Sequence[Known] = ()
    ) -> Iterator[Block]:
        """Within this context a forward reads prompts of these lengths, in one row of (1, sum of lengths) tokens.

        Args:
            max_new: tokens that a row gets at most; the cache never has room for more.
            known: of each prompt; these tokens are not in that row.
        """
        kind = FixedBlock if self.is_fixed else Block
        self.reading = kind(lengths, copies, self.device, max_new)
        self._segments = Segments.documents(lengths)
        if any(before for before, _ in known):
            self._known, self._behind = [text for _, text in known], _behind([before for before, _ in known], lengths)
        try:
            yield self.reading
            self.blocks.append(self.reading)
        finally:
            self.reading = self._segments = self._behind = None
            self._known = []

    def attend(self, layer: int, query, key, value, scale, window, softcap, sinks) -> torch.Tensor:
        """(B, H, T, D) of (1, H, N, D) of prompts or (R, H, 1, D) of rows -> (B, T, H, E)."""
        if self.reading is not None and self._segments is not None:
            options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
            if self._behind is not None:
                key, value = (self._joined(self._behind, layer, place, new) for place, new in enumerate((key, value)))
            self.reading.store(layer, key, value)
            if self._behind is not None:
                return piece_by_piece(query, key, value, self._behind, **options, dropout=0.0).transpose(1, 2)
            return segment_attention(query, key, value, self._segments, **options).transpose(1, 2)
        query, key, value = query.squeeze(2), key.squeeze(2), value.squeeze(2)
        out = self.attend_rows(layer, query, key, value, scale, window, softcap, sinks)
        return out.view(len(query), 1, query.shape[1], -1)

    def _joined(self, behind: Layout, layer: int, place: int, new: torch.Tensor) -> torch.Tensor:
        """(1, G, N, D) keys, or values, of whole prompts: those that are known, and the `new` ones behind them."""
        counts = [behind.segments.lengths[own] for own in behind.own]
        parts: list[torch.Tensor] = []
        for text, own in zip(self._known, torch.split(new[0], counts, 1), strict=True):
            parts += [own] if text is None else [text[layer][place], own]
        return torch.cat(parts, 1).unsqueeze(0)

    def attend_rows(self, layer: int, query, key, value, *rule: Any) -> torch.Tensor:
        """(R, H, D) queries and (R, G, D) keys and values of the newest token of all rows -> (R, H * E)."""
        if len(self.blocks) == 1 and not self.filler:
            return self.blocks[0].attend(layer, query, key, value, *rule)
        counts = [*(block.num_rows for block in self.blocks), self.filler]
        parts = zip(self.blocks, query.split(counts), key.split(counts), value.split(counts), strict=False)
        out = torch.cat([block.attend(layer, *part, *rule) for block, *part in parts])
        return nn.functional.pad(out, (0, 0, 0, self.filler)) if self.filler else out


def _behind(before: Sequence[int], lengths: Sequence[int]) -> Layout:
    """Prompts of these `lengths`, of which so many tokens `before` are known, and the rest is read."""
    sizes: list[int] = []
    parents: list[int] = []
    own: list[int] = []
    for known, length in zip(before, lengths, strict=True):
        if known:
            parents.append(-1)
            sizes.append(known)
        parents.append(len(sizes) - 1 if known else -1)
        own.append(len(sizes))
        sizes.append(length - known)
    segments = Segments(tuple(sizes), tuple(parents))
    return Layout(segments, tuple(own), segments.starts)


class HandsNothingOn(Exception):
    """The layers of a model call their attention without the keyword arguments that the model was called with."""


def _attention_function(
    module: PretrainedModel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    decoding: Decoding | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each attention layer: (B, T, H, D) of (B, H, T, D) queries, keys and values."""
    if decoding is None:
        raise HandsNothingOn
    scaling = kwargs.get("scaling", args[0] if args else None)
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    with torch.autocast(device, enabled=False):
        out = decoding.attend(
            module.layer_idx,
            query.to(dtype),
            key.to(dtype),
            value.to(dtype),
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            layer_window(module, kwargs.get("sliding_window")),
            kwargs.get("softcap"),
            kwargs.get("s_aux"),
        )
    return out, None
