"""A softmax over a vocabulary of which each process has a slice: no process holds whole logits or the whole head.

With z the logits of a token, m their largest and v the tokens of all slices,

    log p_y = z_y - m - log sum over v of exp(z_v - m)

needs two small exchanges between the processes, of the largest logits and of the sums (Shoeybi et al. 2019,
Megatron-LM, https://arxiv.org/abs/1909.08053, Sec. 3). The gradient of the logits, p - 1[y], is then known slice by
slice; that of the hidden states is a sum over slices, one more exchange.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from posttrain.core.distributed.sharding import is_piece


class Slice(NamedTuple):
    """The part of a vocabulary that a process has.

    Attributes:
        start: its first token. size: tokens of the whole vocabulary. group: the processes that have it between them.
    """

    start: int
    size: int
    group: Any

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """`values` summed over the slices, in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def highest(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of `values` over the slices, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def own(self, labels: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(the places of (n,) `labels` in this slice of `width` tokens, which of them it has: bool)."""
        places = labels - self.start
        is_own = (places >= 0) & (places < width)
        return torch.where(is_own, places, 0), is_own


def of_weight(weight: Any) -> tuple[torch.Tensor, Slice | None]:
    """(the rows of an output embedding that this process has, which they are); (`weight`, None) if it is whole.

    Rows that are split otherwise are gathered; the gradient is cut again.
    """
    if not is_piece(weight):
        return weight, None
    mesh, (placement, *others) = weight.device_mesh, weight.placements
    if others or not placement.is_shard(0):
        return weight.full_tensor(), None
    chunk = -(-weight.shape[0] // mesh.size())  # as torch.chunk cuts
    start = min(chunk * mesh.get_local_rank(), weight.shape[0])
    return weight.to_local(), Slice(start, weight.shape[0], mesh.get_group())


def softmax(logits: torch.Tensor, part: Slice, out: torch.Tensor) -> torch.Tensor:
    """(n, width) probabilities of this slice's tokens, in `out`."""
    highest = part.highest(_highest(logits))
    torch.exp(logits - highest.unsqueeze(1), out=out)
    return out.div_(part.total(out.sum(1)).unsqueeze(1))


def score(
    logits: torch.Tensor,
    labels: torch.Tensor,
    part: Slice,
    stats: tuple[str, ...],
    smoothing: float,
    out: torch.Tensor,
) -> list[torch.Tensor]:
    """The losses of n tokens, and each of `stats` (`language_modeling.TOKEN_STATS`): (n,) each, on all processes alike.

    Args:
        logits: (n, width) of this slice. labels: (n,) of the whole vocabulary.
        smoothing: of the labels, as in `posttrain.core.losses.cross_entropy`.
        out: (n, width), in which the probabilities are left.
    """
    own_highest = _highest(logits)
    highest = part.highest(own_highest.clone())
    places, is_own = part.own(labels, logits.shape[1])
    distance = logits - highest.unsqueeze(1)
    torch.exp(distance, out=out)
    sums = {"exp": out.sum(1), "target": torch.zeros_like(highest)}
    if logits.shape[1]:
        sums["target"] = torch.where(is_own, logits.gather(1, places.unsqueeze(1)).squeeze(1), 0.0)
    if smoothing or "mean_logit" in stats:
        sums["logits"] = logits.sum(1)
    if "entropy" in stats:
        sums["weighted"] = distance.clamp_(min=-1e30).mul_(out).sum(1)  # a masked logit is -inf, and 0 * -inf is NaN
    if "log_collision" in stats:
        sums["squares"] = out.square().sum(1)
    sums = dict(zip(sums, part.total(torch.stack([*sums.values()])).unbind(), strict=True))
    normal, target, found = sums["exp"], sums["target"], {}
    out.div_(normal.unsqueeze(1))
    if smoothing:
        target = (1 - smoothing) * target + smoothing * sums["logits"] / part.size
    if "correct" in stats:
        first = torch.full_like(labels, -part.size)  # of the most probable tokens
        if logits.shape[1]:
            first = torch.where(own_highest == highest, -(part.start + logits.argmax(1)), first)
        found["correct"] = (-part.highest(first) == labels).to(logits.dtype)
    if "mean_logit" in stats:
        found["mean_logit"] = sums["logits"] / part.size
    if "entropy" in stats:
        found["entropy"] = normal.log() - sums["weighted"] / normal
    if "log_collision" in stats:
        found["log_collision"] = sums["squares"].log() - 2 * normal.log()
    return [highest + normal.log() - target, *(found[name] for name in stats)]


def _highest(logits: torch.Tensor) -> torch.Tensor:
    return logits.amax(1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
