"""A block for a GPU, where the number of operations decides and not the number of additions in them.

The cache has a fixed size until it is full, tokens that are not yet written are masked, and which one is written is a
tensor. So the operations of all tokens are the same, at the same addresses: `step_graph` replays them.

Rows lie in a grid of prompts, head groups and copies, in this order. There the queries of a head group are one matrix
for the product with the keys of their prompt, and are already split by row for that with each row's own keys.
"""

from __future__ import annotations

import itertools
import sys
from typing import NamedTuple

import torch
from torch.nn import functional

from posttrain.core.data import accelerator
from posttrain.rl.generation import decode_kernels
from posttrain.rl.generation.block import SLOTS, Block, copy_numbers

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
    """A `Block` whose shapes do not depend on how many tokens are written. `own` has (B, slots, D) for each layer.

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

    @property
    def newest(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(R,) `step` for each row, and the position of the token that it reads next."""
        return self._written.expand(self.num_rows), self._first + self._written

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
        self.lengths, self.owners, self._first = placed

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
        bias = self._prompt_bias(self._unwritten.dtype)
        padding = torch.zeros_like(self._unwritten[:, :, :1])
        if bias is not None:
            padding = bias.expand(-1, groups, -1, -1).flatten(0, 1)
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
        scores = (scores.view(prompts, -1, total) + self._seen(window, total)).view(shape)
        if sinks is not None:  # (H,)
            sinks = sinks.float().view(1, -1, 1, shape[1], 1).expand(prompts, -1, copies, -1, -1)
            scores = torch.cat([scores, sinks.reshape(*shape[:2], 1)], -1)
        return scores.softmax(-1)[..., :total]

    def _seen(self, window: int | None, total: int) -> torch.Tensor:
        """(P, 1, width + slots) -inf where the rows of a prompt do not see. Made once a token."""
        window = None if window is None or self.longest < window else window
        bias = self._biases.get(window)
        if bias is None:
            lengths, places = self.lengths.unsqueeze(1), torch.arange(total, device=self.device)
            behind = places - self.width
            is_own = behind >= 0
            hidden = torch.where(is_own, behind > self._written, places >= lengths)
            if window is not None:
                position = torch.where(is_own, lengths + behind, places)
                hidden |= lengths + self._written - position >= window
            bias = torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, -torch.inf).unsqueeze(1)
            self._biases[window] = bias
        return bias

    def advance(self) -> torch.Tensor:
        """The model has read one more token of each row: (R,) `step`, for each."""
        self.step += 1
        self._biases.clear()
        self._written += bool(self.own)
        slots = self._unwritten.shape[2]
        if self.step < slots:
            self._unwritten.index_fill_(2, self._written, 0)
        elif self.own:
            more = min(slots, self.max_new - slots)
            for layer, (keys, values) in self.own.items():
                self.own[layer] = (functional.pad(keys, (0, 0, 0, more)), functional.pad(values, (0, 0, 0, more)))
            self._look_up()
        return self._written.expand(self.num_rows)


def _places(cells: torch.Tensor, groups: int, copies: int) -> torch.Tensor:
    """(R, G) places in the grid of rows in these (R,) `cells` of prompts and copies."""
    prompts, numbers = cells // copies, cells % copies
    return (prompts[:, None] * groups + torch.arange(groups)) * copies + numbers[:, None]
