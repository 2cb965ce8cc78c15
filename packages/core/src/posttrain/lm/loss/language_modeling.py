"""Language modeling losses in tiles, so that whole logits are never stored.

A plain loss needs three allocations of (tokens, vocabulary); `linear_cross_entropy` and `token_logps` need one buffer
of `chunk_size` rows: positions without a label are dropped, then the rest are scored tile by tile, see `tiles`.
`linear_cross_entropy` takes the gradients in the forward (3 matrix products); `token_logps`, whose upstream gradient is
unknown in the forward, recomputes each tile in the backward (4 products).

Shapes: N tokens, H hidden size, V vocabulary. Softmax and sums are in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from posttrain.core.data.collators import IGNORE_INDEX
from posttrain.core.data.host_copies import host_copy, send
from posttrain.core.losses.logits import dynamic_weights
from posttrain.lm.loss.tiles import Options, SummedLoss, TokenLosses, needs_grad, product_dtype
from posttrain.lm.loss.vocabulary_slices import Slice


class LossStats(NamedTuple):
    """Statistics from the loss's pass over the logits. Detached, 0-d, float32."""

    num_correct: torch.Tensor
    """How many targets are the most probable token."""
    entropy_sum: torch.Tensor
    """Entropy of the predicted distributions, in nats, summed over the targets."""


#: Further statistics that `token_logps` computes for each predicted distribution: whether the target is the most
#: probable token (1 or 0), the entropy in nats, the mean of the logits over the vocabulary, and log sum p^2, the
#: logarithm of the probability that two draws agree.
TOKEN_STATS = ("correct", "entropy", "mean_logit", "log_collision")


def labelled_places(labels: torch.Tensor, ignore_index: int = IGNORE_INDEX) -> torch.Tensor:
    """(M,) where the flattened `labels` hold one; waits for the device only where the host knows nothing of them."""
    copy = host_copy(labels)
    places = torch.ne(labels if copy is None else copy, ignore_index).reshape(-1).nonzero().squeeze(1)
    return places if copy is None else send(places, labels.device)


# --------------------------------------------------------------------------------------------------- from hidden states


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    chunk_size: int = 256,
    softcap: float | None = None,
    scale: float = 1.0,
    label_smoothing: float = 0.0,
    reduction: str = "sum",
    return_stats: bool = False,
    dft: bool = False,
    groups: torch.Tensor | None = None,
    num_groups: int = 0,
    part: Slice | None = None,
) -> torch.Tensor | tuple[torch.Tensor, LossStats] | tuple[torch.Tensor, LossStats, tuple[torch.Tensor, torch.Tensor]]:
    """Cross-entropy of ``hidden @ weight.T + bias`` without the (N, V) logits, labels smoothed as in `cross_entropy`.

    The forward computes the required gradients of hidden, weight and bias, which are kept for one backward; a frozen
    head needs none. Dropping unlabelled positions synchronizes with the device once per call.

    Args:
        hidden: (B, T, H) or (N, H), aligned with the labels: see `shift_labels`.
        weight: (V, H). bias: (V,).
        labels: (B, T) or (N,) integers in [0, V), or `ignore_index`.
        chunk_size: rows of a tile, of which 16 bit types take twice as many; the memory used is about
            ``chunk_size * V * 4`` bytes plus the gradients. On a GPU a tile has at least 2**23 logits.
        softcap: logits are bounded to (-softcap, softcap) by a tanh (Gemma 2). scale: multiplies them before that.
        reduction: "sum", "mean" over the targets, or "none" for the shape of labels. "none" recomputes the tiles in the
            backward, as `token_logps` does.
        return_stats: also return `LossStats`, at the cost of two more passes over the logits.
        dft: weight each loss as `dynamic_weights` has it.
        groups: in the shape of labels, the group of each, from 0 to `num_groups` - 1; needs `return_stats`.
        part: the tokens of the vocabulary that `weight` and `bias` are of, where other processes have the others; None:
            all. They must call with the same hidden states and labels.

    Returns:
        The loss in float32; 0 without targets. With `return_stats`, ``(loss, stats)``; with `groups` besides,
        ``(loss, stats, (losses, targets))``, the summed loss and the number of targets of each group, as `group_sums`
        has them.
    """
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(f"reduction={reduction!r} is not one of sum, mean, none.")
    if dft and label_smoothing:
        raise ValueError(
            f"dft weights a target by its probability; label_smoothing={label_smoothing} has several. Set it to 0."
        )
    options = Options(product_dtype(hidden, weight), chunk_size, softcap, scale, 1.0, label_smoothing, dft, part)
    # In float16 a gradient made before the loss scaler multiplied it would underflow: wait for the upstream gradient.
    wait = reduction == "none" or options.dtype == torch.float16
    names = ("correct", "entropy") if return_stats else ()
    function = TokenLosses if wait else SummedLoss
    (loss, *stats), rows = _score(function, hidden, weight, bias, labels, ignore_index, options, names)
    if wait:
        losses = loss = loss * dynamic_weights(loss) if dft else loss
    else:
        losses, *stats = stats
    if reduction == "none":
        loss = _scatter(loss, rows, labels)
    elif wait:
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / max(losses.numel(), 1)
    if not return_stats:
        return loss
    found = LossStats(*(stat.sum() for stat in stats))
    if groups is None:
        return loss, found
    groups = groups.reshape(-1).to(losses.device)
    return loss, found, group_sums(losses.detach(), groups if rows is None else groups[rows], num_groups)


def group_sums(values: torch.Tensor, groups: torch.Tensor, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of `values`, how many they are) of each group, both (G,) in float32: (N,) values, (N,) groups from 0 to G -
    1.

    Never waits for the device, and adds in a fixed order, as scattering does not.
    """
    member = groups == torch.arange(num_groups, device=groups.device)[:, None]
    return torch.where(member, values.float(), 0.0).sum(1), member.sum(1).float()


def token_logps(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    ignore_index: int = IGNORE_INDEX,
    chunk_size: int = 256,
    softcap: float | None = None,
    scale: float = 1.0,
    stats: tuple[str, ...] = (),
    part: Slice | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """``log p(label)`` at every position of `labels` without the (N, V) logits; 0 without a label.

    The arguments are those of `linear_cross_entropy`; `temperature` divides the logits last. Differentiable for any
    upstream gradient.

    Returns:
        float32, in the shape of `labels`. With `stats`, names in `TOKEN_STATS`, ``(logps, *stats)``, those detached.
    """
    if unknown := sorted({*stats} - {*TOKEN_STATS}):
        raise ValueError(f"stats holds {unknown[0]!r}, which is not one of {', '.join(TOKEN_STATS)}.")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature!r} must be > 0.")
    options = Options(product_dtype(hidden, weight), chunk_size, softcap, scale, temperature, 0.0, part=part)
    (losses, *found), rows = _score(TokenLosses, hidden, weight, bias, labels, ignore_index, options, stats)
    logps = _scatter(-losses, rows, labels)
    return (logps, *(_scatter(stat, rows, labels) for stat in found)) if stats else logps


def _score(
    function: type[SummedLoss | TokenLosses],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    ignore_index: int,
    options: Options,
    stats: tuple[str, ...],
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """(what `function` gives for the M labels that count, their rows in the flattened hidden states; None for all)."""
    if options.chunk_size < 1:
        raise ValueError(f"chunk_size={options.chunk_size!r} must be >= 1.")
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} must be the shape of labels {tuple(labels.shape)} with one more dimension, "
            f"as wide as weight {tuple(weight.shape)}."
        )
    places = labelled_places(labels, ignore_index).to(hidden.device)
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).to(hidden.device)
    rows = None if places.numel() == labels.numel() else places
    labels = labels if rows is None else labels[rows]
    needs = needs_grad(hidden, weight, bias)
    return list(function.apply(hidden, weight, bias, labels, rows, options, stats, needs)), rows


def _scatter(values: torch.Tensor, rows: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """(M,) `values` at their rows of a zero tensor in the shape of `like`."""
    if rows is not None:
        values = values.new_zeros(like.numel()).index_copy(0, rows, values)
    return values.view(like.shape)
