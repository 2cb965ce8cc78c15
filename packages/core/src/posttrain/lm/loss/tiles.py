"""Scores a head in tiles, so that whole logits are never stored: what the losses of a head share.

For a tile of rows

    logits = temperature^-1 * softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)      (tile, V)

is computed, scored, replaced by its gradient in place, and overwritten by the next tile. Shapes: N tokens, H hidden
size, V vocabulary. Softmax and sums are in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from posttrain.core.losses.logits import dynamic_weights
from posttrain.lm.loss import fused_scores, vocabulary_slices
from posttrain.lm.loss.vocabulary_slices import Slice

BLOCK_ELEMENTS = 2**19  # logits of a tile that are scored at a time on a CPU, whose cache they should not leave
BLOCK_ELEMENTS_ON_DEVICES = 2**23  # and on others, which should be kept busy
TILE_ELEMENTS_ON_DEVICES = 2**28  # of a tile there: its products with the hidden size then fill a large GPU
ARGMAX_WIDTH = 128
VOCAB_ROWS = 8192  # rows of a 16 bit weight gradient that are added to the float32 sum at a time


class Options(NamedTuple):
    dtype: torch.dtype
    chunk_size: int
    softcap: float | None
    scale: float
    temperature: float
    label_smoothing: float
    dft: bool = False
    part: Slice | None = None


def needs_grad(*tensors: torch.Tensor | None) -> tuple[bool, ...]:
    return tuple(t is not None and t.requires_grad and torch.is_grad_enabled() for t in tensors)


def product_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """The type of the matrix products: autocast's where it is on, else the wider of the two."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(hidden.dtype, weight.dtype)


class Tiles:
    """Computes ``hidden @ weight.T + bias`` in large tiles and processes them in small blocks.

    A tile has enough rows for efficient matrix products: `chunk_size` in float32, twice as many in 16 bits; on a GPU
    those of half a GiB in 16 bits. It is scored and overwritten in blocks that fit in the cache, in the type of the
    statistics, or by one kernel. All tiles and blocks of a call share their buffers.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: Options,
        num_rows: int,
        rows: torch.Tensor | None,
    ) -> None:
        self.dtype = options.dtype
        self.hidden, self.rows, self.num_rows, self.options = hidden, rows, num_rows, options
        self.weight = weight.to(self.dtype)
        self.bias = None if bias is None else bias.to(self.dtype)
        vocabulary, new = weight.shape[0], hidden.new_empty
        on_cpu = hidden.device.type == "cpu"
        block_rows = max((BLOCK_ELEMENTS if on_cpu else BLOCK_ELEMENTS_ON_DEVICES) // vocabulary, 1)
        tile_rows = options.chunk_size * (2 if self.dtype.itemsize == 2 else 1)
        if not on_cpu:
            tile_rows = max(tile_rows, TILE_ELEMENTS_ON_DEVICES // vocabulary)
        self.tile_rows = min(tile_rows, max(num_rows, 1))
        self.tile = new(self.tile_rows, vocabulary, dtype=self.dtype)
        # Each block of a slice of the vocabulary is an exchange between processes.
        self.block_rows = min(block_rows if options.part is None else self.tile_rows, self.tile_rows)
        self.statistics_dtype = torch.promote_types(self.dtype, torch.float32)
        #: The rule of `fused_scores.score`.
        self.rule: dict[str, Any] = {"softcap": options.softcap, "scale": options.scale}
        self.rule |= {"temperature": options.temperature, "smoothing": options.label_smoothing}
        #: Whether one kernel scores a tile; not where it would also sum gradients over rows, or weigh them.
        is_plain = options.part is None and bias is None and not options.dft
        self.fuses = is_plain and not on_cpu and fused_scores.can_score(self.tile)

    @functools.cached_property
    def probabilities(self) -> torch.Tensor:
        """Of a block."""
        return self.hidden.new_empty(self.block_rows, self.tile.shape[1], dtype=self.statistics_dtype)

    @functools.cached_property
    def converted(self) -> torch.Tensor | None:
        """For the products of a block in the type of the statistics; None where they have it."""
        return None if self.dtype == self.statistics_dtype else torch.empty_like(self.probabilities)

    def __iter__(self):
        """(start, stop) of each tile, counted in labelled rows."""
        for start in range(0, self.num_rows, self.tile_rows):
            yield start, min(start + self.tile_rows, self.num_rows)

    def scores(self, columns: int) -> torch.Tensor:
        """(columns, M) to be filled block by block: small tensors that are kept between large ones would break memory
        up.
        """
        return self.hidden.new_empty(columns, self.num_rows, dtype=self.statistics_dtype)

    def multiply(self, start: int, stop: int) -> torch.Tensor:
        """(n, V) products of n labelled rows, in the shared buffer; `states` are then their hidden states."""
        rows = self.hidden[start:stop] if self.rows is None else self.hidden.index_select(0, self.rows[start:stop])
        self.states, tile = rows.to(self.dtype), self.tile[: stop - start]
        if self.bias is None:
            return torch.mm(self.states, self.weight.t(), out=tile)
        return torch.addmm(self.bias, self.states, self.weight.t(), out=tile)

    def blocks(self, tile: torch.Tensor):
        """(start, stop) of each block of `tile`."""
        for start in range(0, len(tile), self.block_rows):
            yield start, min(start + self.block_rows, len(tile))

    def logits(self, products: torch.Tensor, with_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(n, V) logits of a block, and d(logits)/d(what the softcap was given) if there is a softcap."""
        softcap, scale, temperature = self.options.softcap, self.options.scale, self.options.temperature
        logits = products if self.converted is None else self.converted[: len(products)].copy_(products)
        slope = None
        if scale != 1.0:
            logits.mul_(scale)
        if softcap is not None:
            logits.div_(softcap).tanh_()
            slope = logits.square().neg_().add_(1.0) if with_slope else None
            logits.mul_(softcap)
        if temperature != 1.0:
            logits.div_(temperature)
        return logits, slope

    def softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """(n, V) probabilities of a block, in the shared buffer."""
        out, part = self.probabilities[: len(logits)], self.options.part
        return torch.softmax(logits, 1, out=out) if part is None else vocabulary_slices.softmax(logits, part, out)


class Gradients:
    """Gradients of hidden, weight and bias, filled tile by tile; None where not needed."""

    def __init__(self, tiles: Tiles, weight: torch.Tensor, needs: tuple[bool, ...]) -> None:
        needs_hidden, needs_weight, needs_bias = needs
        statistics = tiles.statistics_dtype
        self.tiles, self.part = tiles, tiles.options.part
        self.hidden = torch.zeros_like(tiles.hidden) if needs_hidden else None
        self.weight = torch.zeros_like(weight, dtype=statistics) if needs_weight else None
        self.bias = weight.new_zeros(len(weight), dtype=statistics) if needs_bias else None

    def of_block(
        self, products: torch.Tensor, labels: torch.Tensor, slope: torch.Tensor | None, factor: torch.Tensor | None
    ) -> None:
        """Overwrite a block of a tile with its gradient times the upstream gradient `factor`, (n,)."""
        gradient, smoothing = self.tiles.probabilities[: len(products)], self.tiles.options.label_smoothing
        here, vocabulary = torch.arange(len(labels), device=labels.device), gradient.shape[1]
        if self.part is not None:
            vocabulary, (labels, is_own) = self.part.size, self.part.own(labels, gradient.shape[1])
            here, labels = here[is_own], labels[is_own]
        gradient[here, labels] -= 1 - smoothing
        if smoothing:
            gradient.sub_(smoothing / vocabulary)
        self.write(products, gradient, slope, factor)

    def write(
        self,
        products: torch.Tensor,
        gradient: torch.Tensor,
        slope: torch.Tensor | None,
        factor: torch.Tensor | None = None,
    ) -> None:
        """Overwrite a block of a tile with the `gradient` of its (n, V) logits, which is changed, times `factor`."""
        if slope is not None:
            gradient.mul_(slope)
        if self.bias is not None:
            self.bias.add_(gradient.sum(0) if factor is None else factor @ gradient)
        if factor is not None and self.tiles.dtype == torch.float16:  # else small probabilities underflow
            gradient.mul_(factor.unsqueeze(1))
        products.copy_(gradient)

    def of_tile(self, start: int, stop: int, tile: torch.Tensor, factor: torch.Tensor | None = None) -> None:
        """Add a tile whose gradient with respect to ``hidden @ weight.T`` is ``tile * factor[:, None]``.

        The factor is multiplied into the H wide operand, not into the V wide tile.
        """
        tiles = self.tiles
        factor = None if factor is None or tiles.dtype == torch.float16 else factor.unsqueeze(1)
        if self.hidden is not None:
            gradient = tile @ tiles.weight
            gradient = (gradient if factor is None else gradient * factor).to(self.hidden.dtype)
            if tiles.rows is None:
                self.hidden[start:stop] = gradient
            else:
                self.hidden.index_copy_(0, tiles.rows[start:stop], gradient)
        if self.weight is not None:
            weighted = tiles.states if factor is None else (tiles.states * factor).to(tile.dtype)
            if tile.dtype == self.weight.dtype:
                self.weight.addmm_(tile.t(), weighted)
            else:  # each tile's product is rounded to 16 bits, their sum is not
                for a in range(0, len(self.weight), VOCAB_ROWS):
                    self.weight[a : a + VOCAB_ROWS] += tile[:, a : a + VOCAB_ROWS].t() @ weighted

    def sums(self) -> list[torch.Tensor | None]:
        """[hidden, weight, bias], of all slices of the vocabulary; the types are those of the statistics."""
        if self.part is not None and self.hidden is not None:
            self.part.total(self.hidden)
        return [self.hidden, self.weight, self.bias]


def _score(
    logits: torch.Tensor, tiles: Tiles, labels: torch.Tensor, stats: tuple[str, ...], scores: torch.Tensor
) -> None:
    """Write losses and `stats` of n rows into `scores`, (1 + len(stats), n); their logits become probabilities."""
    smoothing, part, found = tiles.options.label_smoothing, tiles.options.part, {}
    if part is not None:
        out = tiles.probabilities[: len(logits)]
        scores.copy_(torch.stack(vocabulary_slices.score(logits, labels, part, stats, smoothing, out)))
        return
    expected = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    if smoothing:
        expected = (1 - smoothing) * expected + smoothing * logits.mean(1)
    if "correct" in stats:
        highest, best = _highest(logits)
        found["correct"] = (best == labels).to(logits.dtype)
    else:
        highest = logits.amax(1)
    if "mean_logit" in stats:
        found["mean_logit"] = logits.mean(1)
    probabilities = tiles.softmax(logits)
    log_sums = -probabilities.amax(1).log()  # of exp(logits - highest), whose largest is 1
    if "entropy" in stats:
        # With d = logits - highest:  -sum p log p = log(sum e^d) - sum p d. A masked logit is -inf, and 0 * -inf is
        # NaN.
        distance = logits.sub_(highest.unsqueeze(1)).clamp_(min=-1e30)
        found["entropy"] = log_sums - distance.mul_(probabilities).sum(1)
    if "log_collision" in stats:
        found["log_collision"] = 2 * torch.linalg.vector_norm(probabilities, dim=1).log()
    for row, values in zip(scores, (highest + log_sums - expected, *(found[name] for name in stats)), strict=True):
        row.copy_(values)


def _highest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum of each row of (n, V) and its first index; on the CPU argmax of torch 2.13 takes 7 times as long."""
    whole = logits.shape[1] // ARGMAX_WIDTH * ARGMAX_WIDTH
    if logits.device.type != "cpu" or not whole:
        return logits.max(1)
    stretches = logits[:, :whole].view(len(logits), -1, ARGMAX_WIDTH)
    highest, stretch = stretches.amax(2).max(1)
    place = stretch * ARGMAX_WIDTH + stretches[torch.arange(len(logits)), stretch].argmax(1)
    if whole == logits.shape[1]:
        return highest, place
    last, place_in_last = logits[:, whole:].max(1)
    return torch.maximum(highest, last), torch.where(last > highest, whole + place_in_last, place)


def _score_all(
    tiles: Tiles,
    labels: torch.Tensor,
    stats: tuple[str, ...],
    gradients: Gradients | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """(1 + len(stats), M) losses and `stats`; `gradients`: of the sum, `weights` (M,) those of `dynamic_weights`."""
    scores = tiles.scores(1 + len(stats))
    for start, stop in tiles:
        tile = tiles.multiply(start, stop)
        if tiles.fuses:
            given = tile, labels[start:stop], scores[:, start:stop], stats
            fused_scores.score(*given, **tiles.rule, with_gradient=gradients is not None)
        for a, b in () if tiles.fuses else tiles.blocks(tile):
            rows = slice(start + a, start + b)
            logits, slope = tiles.logits(tile[a:b], with_slope=gradients is not None)
            _score(logits, tiles, labels[rows], stats, scores[:, rows])
            if weights is not None:
                weights[rows] = dynamic_weights(scores[0, rows])
            if gradients is not None:
                gradients.of_block(tile[a:b], labels[rows], slope, None if weights is None else weights[rows])
        if gradients is not None:
            gradients.of_tile(start, stop, tile, None if weights is None else weights[start:stop])
    return scores


def spend_gradients(ctx, grad_loss: torch.Tensor, what: str, otherwise: str = "") -> tuple[torch.Tensor | None, ...]:
    """The gradients of a function of (hidden, weight, bias, and five more) whose forward made them, for one backward.
    Raises a `RuntimeError` the second time, which names the function `what`, and what to do `otherwise`.
    """
    if ctx.gradients is None:
        raise RuntimeError(
            f"The loss of {what} was differentiated a second time, but its gradients are kept for one backward only. "
            f"Sum the losses before one backward(){otherwise}."
        )
    gradients, ctx.gradients = ctx.gradients, None  # the optimizer's .grad may take the memory over without a copy
    factor = grad_loss * ctx.factor
    hidden, *of_head = (None if g is None else g.mul_(factor.to(g.dtype)) for g in gradients)
    return hidden, *(None if g is None else g.to(ctx.dtype) for g in of_head), *[None] * 5


class SummedLoss(torch.autograd.Function):
    """Sum of the losses, with gradients computed in the forward. Returns (sum, losses (M,), and each of `stats`
    (M,)).
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, rows, options, stats, needs):
        with torch.autocast(hidden.device.type, enabled=False):
            tiles = Tiles(hidden, weight, bias, options, len(labels), rows)
            gradients = Gradients(tiles, weight, needs)
            weights = tiles.scores(1)[0] if options.dft else None
            scores = _score_all(tiles, labels, stats, gradients if any(needs) else None, weights)
            if weights is not None:
                scores[0] *= weights
            losses, *found = scores
        ctx.gradients, ctx.factor, ctx.dtype = gradients.sums(), options.scale / options.temperature, weight.dtype
        ctx.mark_non_differentiable(losses, *found)
        return losses.sum(), losses, *found

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, *_):
        return spend_gradients(ctx, grad_loss, "linear_cross_entropy", ", or set reduction='none' and sum yourself")


class TokenLosses(torch.autograd.Function):
    """Each loss separately; the backward recomputes the tiles. Returns (losses, and each of `stats`), each (M,)."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, rows, options, stats, needs):
        with torch.autocast(hidden.device.type, enabled=False):
            tiles = Tiles(hidden, weight, bias, options, len(labels), rows)
            losses, *found = (column.clone() for column in _score_all(tiles, labels, stats))
        ctx.save_for_backward(hidden, weight, bias, labels, rows)
        ctx.options, ctx.needs = options, needs
        ctx.mark_non_differentiable(*found)
        return losses, *found

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_losses, *_):
        hidden, weight, bias, labels, rows = ctx.saved_tensors
        options = ctx.options
        factors = grad_losses * (options.scale / options.temperature)
        with torch.autocast(hidden.device.type, enabled=False):
            tiles = Tiles(hidden, weight, bias, options, len(labels), rows)
            gradients, scores = Gradients(tiles, weight, ctx.needs), tiles.scores(1)
            for start, stop in tiles:
                tile, factor = tiles.multiply(start, stop), factors[start:stop]
                if tiles.fuses:
                    given = tile, labels[start:stop], scores[:, start:stop], ()
                    fused_scores.score(*given, **tiles.rule, with_gradient=True)
                for a, b in () if tiles.fuses else tiles.blocks(tile):
                    logits, slope = tiles.logits(tile[a:b], with_slope=True)
                    tiles.softmax(logits)
                    gradients.of_block(tile[a:b], labels[start + a : start + b], slope, factor[a:b])
                gradients.of_tile(start, stop, tile, factor)
            hidden, *of_head = gradients.sums()
        return hidden, *(None if g is None else g.to(weight.dtype) for g in of_head), *[None] * 5
