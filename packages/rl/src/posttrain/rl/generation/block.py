"""Rows that were admitted together: their prompts' keys and values, each stored once, and those of their own tokens.

Rows of a block advance in lockstep, so only the padding of shorter prompts is masked. The queries of all rows of a
prompt meet its keys in one matrix product.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from posttrain.core.data import accelerator
from posttrain.rl.generation import decode_kernels

Pair = tuple[torch.Tensor, torch.Tensor]
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
        steps, positions: (R,) `step` for each row, and the position of the token that it reads next; both in place.
        room: rows that the cache has room for; some of them may have left.
        max_new: tokens that a row gets at most.
    """

    def __init__(self, lengths: Sequence[int], copies: int, device: torch.device, max_new: int = sys.maxsize) -> None:
        self.device, self.max_new, self.room = device, max_new, len(lengths) * copies
        self._lengths = torch.tensor(lengths)  # on the CPU, where rows are placed; the device has its own
        self._owners = torch.arange(len(lengths)).repeat_interleave(copies)
        self.width, self.step, self.is_ragged = max(lengths), 0, min(lengths) < max(lengths)
        self.prompts: dict[int, Pair] = {}  # of each layer, keys and values: (P, G, width, D)
        self.own: dict[int, Pair] = {}  # (R, G, at least step, D)
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

    def keep(self, rows: list[int]) -> list[int]:
        """Keep only these rows; their new order: later rows fill the gaps, so that little is copied."""
        count, kept = len(rows), set(rows)
        holes = [row for row in range(count) if row not in kept]
        movers = [row for row in rows if row >= count]
        order = list(range(count))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        if holes:
            to, source = (torch.tensor(places).to(self.device, non_blocking=True) for places in (holes, movers))
            for part in itertools.chain(*self.own.values()):
                part[to, :, : self.step] = part[source, :, : self.step]
        self._owners = self._owners[torch.tensor(order, dtype=torch.long)]
        is_loose = 2 * len(order) <= self.room  # so each row is moved about once, and half of the room is in use
        self.room = len(order) if is_loose else self.room
        for layer, pair in self.own.items():
            keys, values = (part[: len(order)].clone() if is_loose else part[: len(order)] for part in pair)
            self.own[layer], self._slots[layer] = (keys, values), (keys.unbind(2), values.unbind(2))
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
        self._biases: dict[int | None, torch.Tensor] = {}
        placed = (t.to(self.device, non_blocking=True) for t in (lengths, owners, places, sources, lengths[owners]))
        self.lengths, self.owners, self._places, self._sources, first = placed
        self.steps, self.positions = torch.full_like(self.owners, self.step), first + self.step

    # ------------------------------------------------------------------------------------------------ in the forward

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take the (1, G, N, D) keys and values of the prompts, which are one after the other in N."""
        parts = [tensor[0].transpose(0, 1).split(self._lengths.tolist()) for tensor in (keys, values)]
        padded = (nn.utils.rnn.pad_sequence(some, batch_first=True) for some in parts)
        stored_keys, stored_values = (tensor.transpose(1, 2).contiguous() for tensor in padded)
        self.prompts[layer] = stored_keys, stored_values

    def _grow(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make room for more tokens with (R, G, D) keys and values like these, behind those of the rows so far."""
        self.room, slots = len(keys), min(max(SLOTS, 2 * self.step), self.max_new)
        # Zeros: what is masked must be finite.
        new_keys, new_values = (x.new_zeros(*x.shape[:2], slots, x.shape[2]) for x in (keys, values))
        if layer in self.own:
            for new, old in zip((new_keys, new_values), self.own[layer], strict=True):
                new[:, :, : self.step] = old[:, :, : self.step]
        self.own[layer], self._slots[layer] = (new_keys, new_values), (new_keys.unbind(2), new_values.unbind(2))

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
        prompts, step = self.prompts[layer], self.step
        if layer not in self.own or self.own[layer][0].shape[2] <= step:
            self._grow(layer, key, value)
        for slots, new in zip(self._slots[layer], (key, value), strict=True):
            slots[step].copy_(new)
        written: Pair = self.own[layer][0][:, :, : step + 1], self.own[layer][1][:, :, : step + 1]
        if softcap or sinks is not None or (window is not None and self.longest >= window):
            return self._under_a_rule(query, *prompts, *written, scale, window, softcap, sinks).reshape(rows, -1)
        bias = self._prompt_bias(query.dtype) if self.is_ragged else None
        out, sums = _attention(self._by_prompt(query), *prompts, bias, scale)
        own, own_sums = _attention(query, *written, None, scale)
        # Both are softmaxes of their own; what they were divided by joins them.
        if self._is_sorted:
            group = (self._most, heads // groups)
            out, sums = (part.unflatten(2, group).transpose(1, 2) for part in (out, sums))
            own, own_sums = (part.unflatten(0, (-1, self._most)) for part in (own, own_sums))
        else:
            out, sums = (
                self._by_row(out, heads // groups),
                self._by_row(sums.unsqueeze(-1), heads // groups).squeeze(-1),
            )
        share = (sums - own_sums).sigmoid_().unsqueeze(-1)
        return own.lerp_(out, share.to(own.dtype)).reshape(rows, -1)

    def _under_a_rule(self, query, keys, values, own_keys, own_values, scale, window, softcap, sinks) -> torch.Tensor:
        """The same under a sliding window, bounded scores or sinks: with the scores at hand, in float32."""
        rows, groups, heads, _ = query.shape
        width, query = self.width, query * scale
        scores = query.new_empty(rows, groups, heads, width + self.step + 1, dtype=torch.float32)
        scores[..., :width] = self._by_row(torch.matmul(self._by_prompt(query), keys.transpose(2, 3)), heads)
        scores[..., width:] = torch.matmul(query, own_keys.transpose(2, 3))
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if self.is_ragged or (window is not None and self.longest >= window):
            scores += self._seen(window, scores.shape[-1], self.step)[self.owners].unsqueeze(1)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float().view(1, groups, heads, 1).expand(rows, -1, -1, 1)], -1)
        shares = scores.softmax(-1).to(values.dtype)[..., : width + self.step + 1]
        out = self._by_row(torch.matmul(self._by_prompt(shares[..., :width]), values), heads)
        return out + torch.matmul(shares[..., width:], own_values)

    def _prompt_bias(self, dtype: torch.dtype) -> torch.Tensor:
        """(P, 1, 1, width) -inf where a prompt is padded. Made anew where prompts have left."""
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

    def _seen(self, window: int | None, total: int, step: int | torch.Tensor) -> torch.Tensor:
        """(P, 1, total) -inf where rows of a prompt, with `step` tokens written, do not see. Made once a token."""
        window = None if window is None or self.longest < window else window
        bias = self._biases.get(window)
        if bias is None:
            lengths, places = self.lengths.unsqueeze(1), torch.arange(total, device=self.device)
            behind = places - self.width
            is_own = behind >= 0
            hidden = torch.where(is_own, behind > step, places >= lengths)
            if window is not None:
                position = torch.where(is_own, lengths + behind, places)
                hidden |= lengths + step - position >= window
            bias = torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, -torch.inf).unsqueeze(1)
            self._biases[window] = bias
        return bias

    def advance(self) -> None:
        """The model has read one more token of each row."""
        self.step += 1
        self.steps += 1
        self.positions += 1
        self._biases.clear()


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


# ---------------------------------------------------------------------------------------------------- on a GPU

_VERSIONS = itertools.count()


class _Grid(NamedTuple):
    """The B = P * G * copies places of rows. A place without a row computes what row 0 asks, and no row reads it."""

    rows: torch.Tensor  # (B,) the row in each place
    groups: torch.Tensor  # (B,) the head group in each place
    places: torch.Tensor  # (R, G)
    padding: torch.Tensor  # (P * G, 1, width) -inf where a prompt is padded; (1, 1, 1) zeros where none is


class _Views(NamedTuple):
    """The cache of a layer as products read it: views of `Block.prompts` and `Block.own`."""

    keys: torch.Tensor  # (P * G, D, width)
    values: torch.Tensor  # (P * G, width, E)
    own_keys: torch.Tensor  # (B, D, slots)
    own_values: torch.Tensor  # (B, slots, E)


class FixedBlock(Block):
    """A `Block` for a GPU, where the number of operations decides and not the number of additions in them.

    The cache has a fixed size until it is full, tokens that are not yet written are masked, and which one is written is
    a tensor. So the operations of all tokens are the same, at the same addresses: `StepGraph` replays them.

    Rows lie in a grid of prompts, head groups and copies, in this order. There the queries of a head group are one
    matrix for the product with the keys of their prompt, and are already split by row for that with each row's own
    keys. `own` has (B, slots, D) for each layer.

    Attributes:
        version: another number whenever a tensor that a token reads is replaced; no two blocks share one.
    """

    def __init__(self, lengths, copies: int, device: torch.device, max_new: int = sys.maxsize) -> None:
        self._shape, self._cells = (0, 0), torch.empty(0, dtype=torch.long)  # (P, copies); (R,) in P * copies
        self._grids: dict[int, _Grid] = {}  # by the number of head groups
        self._views: dict[int, _Views] = {}
        self._written = torch.zeros(1, dtype=torch.long, device=device)  # `step`, for a graph that must not change
        self._unwritten = torch.zeros(1, 1, 0, device=device)  # (1, 1, slots) -inf where nothing is written yet
        super().__init__(lengths, copies, device, max_new)

    # ----------------------------------------------------------------------------------------------- rows that leave

    def keep(self, rows: list[int]) -> list[int]:
        """Keep only these rows, in their order. The cache is copied only where the grid becomes smaller."""
        shape, cells = self._shape, self._cells[rows]
        self._owners = self._owners[rows]
        if rows:
            self._drop_prompts()
            self._cells = cells
            self._place_rows()
            if self._shape != shape:
                self._move(shape[1], cells)
            self._look_up()
        return rows

    def _place_rows(self) -> None:
        """Rows stay where they are while the grid keeps its shape."""
        lengths, owners = self._lengths, self._owners
        shape = len(lengths), int(owners.bincount().max())
        if shape != self._shape:
            self._shape, self._cells = shape, owners * shape[1] + copy_numbers(owners, len(lengths))
            self.room = shape[0] * shape[1]
        self._grids, self._biases = {}, {}
        placed = (t.to(self.device, non_blocking=True) for t in (lengths, owners, lengths[owners]))
        self.lengths, self.owners, first = placed
        self.steps, self.positions = self._written.expand(len(owners)), first + self._written

    def _move(self, copies: int, cells: torch.Tensor) -> None:
        """Bring the tokens of rows that were in these `cells` of a grid with so many `copies` to where they are now."""
        for layer, (keys, values) in self.own.items():
            groups = self.prompts[layer][0].shape[1]
            sources = torch.zeros(self._shape[0] * groups * self._shape[1], dtype=torch.long)
            sources[_places(self._cells, groups, self._shape[1])] = _places(cells, groups, copies)
            sources = sources.to(self.device, non_blocking=True)
            self.own[layer] = keys[sources], values[sources]

    # ------------------------------------------------------------------------------------------------ in the forward

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take the (1, G, N, D) keys and values of the prompts, which are one after the other in N."""
        super().store(layer, keys, values)
        places, slots = self.room * keys.shape[1], min(SLOTS, self.max_new)
        # Zeros: what is masked must be finite.
        self.own[layer] = (
            keys.new_zeros(places, slots, keys.shape[-1]),
            values.new_zeros(places, slots, values.shape[-1]),
        )
        self._look_up(layer)

    def _own_of(self, layer: int, row: int, step: int) -> list[torch.Tensor]:
        places = self._grids[self.prompts[layer][0].shape[1]].places[row]
        return [part[places, :step] for part in self.own[layer]]

    def _look_up(self, *layers: int) -> None:
        """Find again what a token reads, of these layers or of all."""
        self.version = next(_VERSIONS)
        for layer in layers or self.own:
            (keys, values), (own_keys, own_values) = self.prompts[layer], self.own[layer]
            own_keys = own_keys.transpose(1, 2)
            self._views[layer] = _Views(keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1), own_keys, own_values)
            if self._unwritten.shape[2] != own_values.shape[1]:
                unwritten = torch.arange(own_values.shape[1], device=self.device) > self._written
                bias = torch.zeros(unwritten.shape, device=self.device, dtype=own_values.dtype)
                self._unwritten = bias.masked_fill_(unwritten, -torch.inf)[None, None]
            if keys.shape[1] not in self._grids:
                self._grids[keys.shape[1]] = self._grid(keys.shape[1])

    def _grid(self, groups: int) -> _Grid:
        prompts, copies = self._shape
        places = _places(self._cells, groups, copies)
        rows = torch.zeros(prompts * groups * copies, dtype=torch.long)
        rows[places] = torch.arange(self.num_rows)[:, None]
        columns = torch.arange(groups).repeat_interleave(copies).repeat(prompts)
        padding = torch.zeros_like(self._unwritten[:, :, :1])
        if self.is_ragged:
            padding = self._prompt_bias(self._unwritten.dtype).expand(-1, groups, -1, -1).flatten(0, 1)
        rows, columns, places = (tensor.to(self.device, non_blocking=True) for tensor in (rows, columns, places))
        return _Grid(rows, columns, places, padding)

    def attend(self, layer, query, key, value, scale, window, softcap=None, sinks=None) -> torch.Tensor:
        """Attention of each row's new token to its prompt and to what it has generated: (R, H, D) -> (R, H * E)."""
        rows, groups, _ = key.shape
        grid, cache = self._grids[groups], self._views[layer]
        own_keys, own_values = self.own[layer]
        is_ruled = bool(softcap) or sinks is not None or (window is not None and self.longest >= window)
        if not is_ruled and accelerator.has_kernels(query):
            rule = grid.places, self.owners, self.lengths, self._written, scale
            return decode_kernels.attend(query, key, value, self.prompts[layer], self.own[layer], *rule).flatten(1)
        own_keys.index_put_((grid.places, self._written), key)
        own_values.index_put_((grid.places, self._written), value)
        query = query.unflatten(1, (groups, -1))[grid.rows, grid.groups]  # (B, H / G, D)
        by_prompt = query.view(len(cache.keys), -1, query.shape[-1])
        # Where a rule changes the scores, what is hidden is hidden afterwards.
        read_beta, own_beta = (0, 0) if is_ruled else (int(self.is_ragged), 1)
        read = torch.baddbmm(grid.padding, by_prompt, cache.keys, beta=read_beta, alpha=scale)
        own = torch.baddbmm(self._unwritten, query, cache.own_keys, beta=own_beta, alpha=scale)
        scores = torch.cat([read.view(*own.shape[:2], -1), own], -1)
        if is_ruled:
            shares = self._ruled(scores.float(), window, softcap, sinks)
        else:
            shares = scores.softmax(-1, dtype=torch.float32)
        read, own = shares.to(value.dtype).split((self.width, own.shape[-1]), -1)
        out = torch.bmm(read.view(len(cache.keys), -1, self.width), cache.values)
        out = torch.baddbmm(out.view(*query.shape[:2], -1), own, cache.own_values)
        return out[grid.places].view(rows, -1)

    def _ruled(self, scores, window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
        """(B, H / G, width + slots) shares under a sliding window, bounded scores or sinks."""
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        prompts, copies = self._shape
        shape, total = scores.shape, scores.shape[-1]
        scores = (scores.view(prompts, -1, total) + self._seen(window, total, self._written)).view(shape)
        if sinks is not None:  # (H,)
            sinks = sinks.float().view(1, -1, 1, shape[1], 1).expand(prompts, -1, copies, -1, -1)
            scores = torch.cat([scores, sinks.reshape(*shape[:2], 1)], -1)
        return scores.softmax(-1)[..., :total]

    def advance(self) -> None:
        """The model has read one more token of each row."""
        self.step += 1
        self._biases.clear()
        self._written += bool(self.own)  # and so `steps`, a view of it
        self.positions += bool(self.own)
        slots = self._unwritten.shape[2]
        if self.step < slots:
            self._unwritten.index_fill_(2, self._written, 0)
        elif self.own:
            more = min(slots, self.max_new - slots)
            for layer, (keys, values) in self.own.items():
                self.own[layer] = (nn.functional.pad(keys, (0, 0, 0, more)), nn.functional.pad(values, (0, 0, 0, more)))
            self._look_up()


def _places(cells: torch.Tensor, groups: int, copies: int) -> torch.Tensor:
    """(R, G) places in the grid of rows in these (R,) `cells` of prompts and copies."""
    prompts, numbers = cells // copies, cells % copies
    return (prompts[:, None] * groups + torch.arange(groups)) * copies + numbers[:, None]
