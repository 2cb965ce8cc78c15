"""Rows that were admitted together: their prompts' keys and values, each stored once, and those of their own tokens.

Rows of a block advance in lockstep, so only the padding of shorter prompts is masked. The queries of all rows of a
prompt meet its keys in one matrix product.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

Text = dict[int, tuple[torch.Tensor, ...]]
"""Of each layer, the keys and values of a text of L tokens: (G, L, D) each."""
SLOTS = 64
"""Tokens of a row that a new cache has room for. A full one doubles, up to what a row can get."""


class Block:
    """Prompts of similar length, `copies` rows of each, and the tokens of these rows so far.

    Attributes:
        lengths: (P,) tokens of each prompt.
        owners: (R,) the prompt of each row.
        width: tokens of the longest prompt. step: generated tokens of each row that are in the cache.
        room: rows that the cache has room for; some of them may have left.
        max_new: tokens that a row gets at most.
    """

    def __init__(self, lengths: Sequence[int], copies: int, device: torch.device, max_new: int = sys.maxsize) -> None:
        self.device, self.max_new, self.room = device, max_new, len(lengths) * copies
        self._lengths = torch.tensor(lengths)  # on the CPU, where rows are placed; the device has its own
        self._owners = torch.arange(len(lengths)).repeat_interleave(copies)
        self.width, self.step, self.is_ragged = max(lengths), 0, min(lengths) < max(lengths)
        self.prompts: dict[
            int, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # of each layer, keys and values: (P, G, width, D)
        self.own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # (R, G, at least step, D)
        self._slots: dict[int, tuple[tuple[torch.Tensor, ...], ...]] = {}  # of each step, (R, G, D) of these
        self._padding: torch.Tensor | None = None
        self._place_rows()

    @property
    def num_rows(self) -> int:
        """Rows that are still generating."""
        return len(self._owners)

    @property
    def longest(self) -> int:
        """No row has a larger position."""
        return self.width + self.step

    @property
    def reserved(self) -> int:
        """Tokens that the cache has room for when it is as large as it can become: a prompt counts once."""
        return len(self._lengths) * self.width + self.room * self.max_new

    @property
    def newest(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(R,) `step` for each row, and the position of the token that it reads next."""
        return torch.full_like(self.owners, self.step), self._first + self.step

    def keep(self, rows: list[int]) -> list[int]:
        """Keep only these rows.

        Returns:
            their new order. Later rows fill the gaps, so that little is copied.
        """
        count, kept = len(rows), set(rows)
        holes = [row for row in range(count) if row not in kept]
        movers = [row for row in rows if row >= count]
        order = list(range(count))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        if holes:
            to, source = (torch.tensor(places).to(self.device, non_blocking=True) for places in (holes, movers))
            for keys, values in self.own.values():
                keys[to, :, : self.step] = keys[source, :, : self.step]
                values[to, :, : self.step] = values[source, :, : self.step]
        self._owners = self._owners[torch.tensor(order, dtype=torch.long)]
        is_loose = 2 * len(order) <= self.room  # so each row is moved about once, and half of the room is in use
        self.room = len(order) if is_loose else self.room
        for layer, pair in self.own.items():
            keys, values = (part[: len(order)].clone() if is_loose else part[: len(order)] for part in pair)
            self._set_own(layer, keys, values)
        self._drop_prompts()
        self._place_rows()
        return order

    def rows(self) -> list[Block]:
        """A block for each row, of a block of one prompt in which nothing is written. They share what was read."""
        found = [Block([self.width], 1, self.device, self.max_new) for _ in range(self.num_rows)]
        for block in found:
            block.prompts = self.prompts
        return found

    def text(self, row: int, step: int) -> Text:
        """The keys and values of the prompt of `row` and of its first `step` tokens behind it, copied."""
        owner = int(self._owners[row])
        length, found = int(self._lengths[owner]), {}
        for layer, prompts in self.prompts.items():
            own = self._own_of(layer, row, step) if step else (part[owner, :, :0] for part in prompts)
            pairs = zip(prompts, own, strict=True)
            found[layer] = tuple(torch.cat([prompt[owner, :, :length], part], 1) for prompt, part in pairs)
        return found

    def _own_of(self, layer: int, row: int, step: int) -> Sequence[torch.Tensor]:
        return [part[row, :, :step] for part in self.own[layer]]

    def _drop_prompts(self) -> None:
        left, owners = self._owners.unique(return_inverse=True)
        if 0 < len(left) < len(self._lengths):
            self._lengths, self._owners, self._padding = self._lengths[left], owners, None
            left = left.to(self.device, non_blocking=True)
            for layer, (keys, values) in self.prompts.items():
                self.prompts[layer] = keys[left], values[left]

    def _place_rows(self) -> None:
        """The positions of each row's queries, sorted by prompt and padded to equal counts."""
        lengths, owners, rows = self._lengths, self._owners, len(self._owners)
        counts = owners.bincount(minlength=len(lengths))
        self._most = int(counts.max()) if rows else 0
        places, steps = owners * self._most + copy_numbers(owners, len(lengths)), torch.arange(rows)
        self._is_sorted = rows == len(lengths) * self._most and torch.equal(places, steps)
        sources = torch.zeros(len(lengths) * self._most, dtype=torch.long)
        sources[places] = steps
        self._biases: dict[int | None, torch.Tensor | None] = {}
        placed = (t.to(self.device, non_blocking=True) for t in (lengths, owners, places, sources, lengths[owners]))
        self.lengths, self.owners, self._places, self._sources, self._first = placed

    # ------------------------------------------------------------------------------------------------ in the forward

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take the (1, G, N, D) keys and values of the prompts, which are one after the other in N."""
        lengths = self._lengths.tolist()
        stored_keys, stored_values = (
            nn.utils.rnn.pad_sequence([part.transpose(0, 1) for part in tensor[0].split(lengths, 1)], batch_first=True)
            .transpose(1, 2)
            .contiguous()
            for tensor in (keys, values)
        )
        self.prompts[layer] = stored_keys, stored_values

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put (R, G, D) of a token behind what the rows have generated; all of it: (R, G, step + 1, D)."""
        step = self.step
        if layer not in self.own or self.own[layer][0].shape[2] <= step:
            before = self.own.get(layer, (None, None))
            self._set_own(layer, self._grown(before[0], keys), self._grown(before[1], values))
        key_slots, value_slots = self._slots[layer]
        key_slots[step].copy_(keys)
        value_slots[step].copy_(values)
        own_keys, own_values = self.own[layer]
        return own_keys[:, :, : step + 1], own_values[:, :, : step + 1]

    def _grown(self, old: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        rows, heads, size = like.shape
        self.room, slots = rows, min(max(SLOTS, 2 * self.step), self.max_new)
        new = like.new_zeros(rows, heads, slots, size)  # zeros: what is masked must be finite
        if old is not None:
            new[:, :, : self.step] = old[:, :, : self.step]
        return new

    def _set_own(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.own[layer], self._slots[layer] = (keys, values), (keys.unbind(2), values.unbind(2))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of each row's new token to its prompt and to what it has generated: (R, H, D) -> (R, H * E)."""
        rows, heads, size = query.shape
        groups = key.shape[1]
        query = query.reshape(rows, groups, heads // groups, size)
        ruled = softcap or sinks is not None or (window is not None and self.width + self.step >= window)
        own_keys, own_values = self.append(layer, key, value)
        keys, values = self.prompts[layer]
        if ruled:
            pair = own_keys, own_values
            return self._under_a_rule(query, keys, values, *pair, scale, window, softcap, sinks).reshape(rows, -1)
        out, sums = _attention(self._by_prompt(query), keys, values, self._prompt_bias(query.dtype), scale)
        own, own_sums = _attention(query, own_keys, own_values, None, scale)
        # Both are softmaxes of their own; what they were divided by joins them.
        if self._is_sorted:
            group = (self._most, heads // groups)
            out, sums = (part.unflatten(2, group).transpose(1, 2) for part in (out, sums))
            own, own_sums = (part.unflatten(0, (-1, self._most)) for part in (own, own_sums))
            share = (sums - own_sums).sigmoid_().unsqueeze(-1)
        else:
            out, sums = self._by_row(out, heads // groups), self._by_row(sums.unsqueeze(-1), heads // groups)
            share = (sums - own_sums.unsqueeze(-1)).sigmoid_()
        share = share if share.dtype == own.dtype else share.to(own.dtype)
        return own.lerp_(out, share).reshape(rows, -1)

    def _under_a_rule(self, query, keys, values, own_keys, own_values, scale, window, softcap, sinks) -> torch.Tensor:
        """The same under a sliding window, bounded scores or sinks: with the scores at hand, in float32."""
        rows, groups, heads, _ = query.shape
        width, query = self.width, query * scale
        scores = query.new_empty(rows, groups, heads, width + self.step + 1, dtype=torch.float32)
        scores[..., :width] = self._by_row(torch.matmul(self._by_prompt(query), keys.transpose(2, 3)), heads)
        scores[..., width:] = torch.matmul(query, own_keys.transpose(2, 3))
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        bias = self._bias(window)
        if bias is not None:
            scores += bias
        if sinks is not None:
            scores = torch.cat([scores, sinks.float().view(1, groups, heads, 1).expand(rows, -1, -1, 1)], -1)
        shares = scores.softmax(-1).to(values.dtype)[..., : width + self.step + 1]
        out = self._by_row(torch.matmul(self._by_prompt(shares[..., :width]), values), heads)
        return out + torch.matmul(shares[..., width:], own_values)

    def _prompt_bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        """(P, 1, 1, width) -inf where a prompt is padded; None where none is. Made anew where prompts have left."""
        if not self.is_ragged:
            return None
        if self._padding is None or self._padding.dtype != dtype:
            hidden = torch.arange(self.width, device=self.lengths.device) >= self.lengths.unsqueeze(1)
            bias = torch.zeros(hidden.shape, device=hidden.device, dtype=dtype)
            self._padding = bias.masked_fill_(hidden, -torch.inf)[:, None, None]
        return self._padding

    def _by_prompt(self, rows: torch.Tensor) -> torch.Tensor:
        """(R, G, H / G, X) -> (P, G, most rows of a prompt * H / G, X)."""
        if not self._is_sorted:
            rows = rows[self._sources]
        rows = rows.unflatten(0, (-1, self._most)).transpose(1, 2)
        return rows.reshape(*rows.shape[:2], -1, rows.shape[-1])

    def _by_row(self, grid: torch.Tensor, heads: int) -> torch.Tensor:
        """The inverse of `_by_prompt`."""
        rows = grid.unflatten(2, (self._most, heads)).transpose(1, 2).flatten(0, 1)
        return rows if self._is_sorted else rows[self._places]

    def _bias(self, window: int | None) -> torch.Tensor | None:
        """(R, 1, 1, width + step + 1) -inf where a row does not see; None where each sees all. Made once a step."""
        if window is not None and self.width + self.step < window:
            window = None
        key = window
        if key in self._biases:
            return self._biases[key]
        bias = None
        if self.is_ragged or window is not None:
            device = self.owners.device
            lengths = self.lengths[self.owners].unsqueeze(1)
            places = torch.arange(self.width, device=device)
            written = torch.arange(self.step + 1, device=device)
            position = torch.cat([places.expand(self.num_rows, -1), lengths + written], 1)
            hidden = torch.cat([places >= lengths, (written < 0).expand(self.num_rows, -1)], 1)
            if window is not None:
                hidden |= lengths + self.step - position >= window
            bias = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)[:, None, None]
        self._biases[key] = bias
        return bias

    def advance(self) -> torch.Tensor:
        """The model has read one more token of each row: (R,) `step`, for each."""
        self.step += 1
        self._biases.clear()
        return torch.full_like(self.owners, self.step)


def _attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention without a causal rule, (B, G, Q, E), and the logarithm of what it was divided by, (B, G, Q)."""
    if query.device.type == "cpu" and query.shape[-1] == values.shape[-1]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, keys, values, 0.0, False, attn_mask=bias, scale=scale)
    scores = torch.matmul(query, keys.transpose(2, 3)).float() * scale
    scores = scores if bias is None else scores + bias
    sums = scores.logsumexp(-1)
    return torch.matmul((scores - sums.unsqueeze(-1)).exp_().to(values.dtype), values), sums


def copy_numbers(owners: torch.Tensor, count: int) -> torch.Tensor:
    """(R,) how many earlier rows have the same owner, of 0 to `count` - 1."""
    is_owner = owners.unsqueeze(0) == torch.arange(count)[:, None]
    return is_owner.cumsum(1).gather(0, owners.unsqueeze(0)).squeeze(0) - 1
