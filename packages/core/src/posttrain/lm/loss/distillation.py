r"""Divergences of a student's next-token distributions from a teacher's, in tiles, so that neither's logits are stored.

The generalised Jensen-Shannon divergence of Agarwal et al. 2023, https://arxiv.org/abs/2306.13649, eq. 1, with
:math:`m = \beta p_T + (1-\beta) p_S`, is

.. math:: D_\beta = \beta\,KL(p_T \| m) + (1-\beta)\,KL(p_S \| m), \quad
   \frac{\partial D_\beta}{\partial z_S} = (1-\beta)\,p_S\left(\log\frac{p_S}{m} - KL(p_S \| m)\right)

and at the ends :math:`D_0 = KL(p_T \| p_S)` (forward), :math:`D_1 = KL(p_S \| p_T)` (reverse).

Each tile of the student's logits is computed together with the same tile of the teacher's, scored, replaced by its
gradient in place, and overwritten by the next: 4 matrix products with those of the gradients of hidden states and
head. Only the student has gradients.

Shapes: M positions, H hidden size, V vocabulary, K kept tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from posttrain.core.data.collators import IGNORE_INDEX
from posttrain.lm.loss.language_modeling import labelled_places
from posttrain.lm.loss.tiles import Gradients, Options, Tiles, needs_grad, product_dtype, spend_gradients


class HeadStates(NamedTuple):
    """What a teacher's logits at M positions are computed from.

    hidden: (M, H). weight: (V, H), bias: (V,) or None, of its head. softcap, scale: as of `linear_cross_entropy`.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0


def logits_of(states: torch.Tensor, head: Any) -> torch.Tensor:
    """(M, H) hidden states -> (M, V) logits in float32, by a `HeadStates` or a `CausalHead`."""
    weight, bias = head.weight, head.bias
    logits: torch.Tensor = F.linear(states.to(weight.dtype), weight, bias).float() * head.scale
    return logits if head.softcap is None else torch.tanh(logits / head.softcap) * head.softcap


class TopK(NamedTuple):
    """What is known of a teacher's distributions at M positions: some tokens and their log-probabilities.

    ids: (M, K), without repetition. logps: (M, K), -inf where a row has fewer tokens.
    """

    ids: torch.Tensor
    logps: torch.Tensor


@dataclass(frozen=True)
class Measure:
    """How the distributions are compared.

    beta: 0 is the forward divergence KL(teacher || student), 1 the reverse, between them Jensen-Shannon. temperature:
    divides the logits of both. by_rank: compare sorted probabilities instead, see `linear_divergence`. add_tail: where
    some tokens are known, let one more stand for all others; without it, both distributions are normalised over
    them.
    """

    beta: float = 1.0
    temperature: float = 1.0
    by_rank: bool = False
    add_tail: bool = True


def divergence_terms(student_logps: torch.Tensor, teacher_logps: torch.Tensor, beta: float) -> torch.Tensor:
    """The terms of the generalised Jensen-Shannon divergence, whose sum over the last dimension it is. Returns (...,
    V); 0 for a token that has no probability under either.

    Args:
        student_logps, teacher_logps: (..., V) log-probabilities. beta: see `Measure`.
    """
    student, teacher = (logps.clamp(min=-1e30) for logps in (student_logps, teacher_logps))
    if beta == 0:
        return teacher.exp() * (teacher - student)
    if beta == 1:
        return student.exp() * (student - teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * teacher.exp() * (teacher - mixture) + (1 - beta) * student.exp() * (student - mixture)


def completed(logps: torch.Tensor, add_tail: bool) -> torch.Tensor:
    """(M, K) as a distribution: with a token for the rest, (M, K + 1), or normalised."""
    total = logps.logsumexp(1, keepdim=True)
    if not add_tail:
        return logps - total
    return torch.cat([logps, torch.log(-torch.expm1(total.clamp(max=-torch.finfo(logps.dtype).eps)))], 1)


def linear_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    teacher: HeadStates | TopK,
    measure: Measure | None = None,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    chunk_size: int = 256,
    softcap: float | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""The divergence of the student's distributions from the teacher's, summed over the positions with a label.

    Vocabularies of different sizes are compared over the tokens that both have. With ``measure.by_rank`` they need
    not hold the same tokens: the loss is :math:`\sum_i |p_S^{(i)} - p_T^{(i)}|` of probabilities in descending order,
    with zeros behind the shorter (universal logit distillation, Boizard et al. 2024, https://arxiv.org/abs/2402.12030,
    eq. 4).

    Args:
        hidden: (B, T, H) or (N, H) of the student. weight: (V, H), bias: (V,) of its head.
        labels: (B, T) or (N,), `ignore_index` where nothing is compared; its M other positions are those of `teacher`,
            in the same order.
        chunk_size, softcap, scale: as of `linear_cross_entropy`.

    Returns:
        (the sum, the student's summed entropy in nats, detached), 0-d in float32; 0 without a position. Gradients are
        kept for one backward.
    """
    measure = measure or Measure()
    rows = labelled_places(labels, ignore_index).to(hidden.device)
    known = len(teacher[0])
    if len(rows) != known:
        raise ValueError(f"labels have {len(rows)} positions to compare, and the teacher has {known}.")
    if isinstance(teacher, HeadStates) and not measure.by_rank and len(teacher.weight) != len(weight):
        both = min(len(weight), len(teacher.weight))
        weight, bias = weight[:both], None if bias is None else bias[:both]
        own_bias = None if teacher.bias is None else teacher.bias[:both]
        teacher = teacher._replace(weight=teacher.weight[:both], bias=own_bias)
    dtype = product_dtype(hidden, weight)
    if dtype == torch.float16:  # gradients are made before a loss scale multiplies them, and would underflow
        dtype, hidden = torch.float32, hidden.float()
    options = Options(dtype, chunk_size, softcap, scale, measure.temperature, 0.0)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    needs = needs_grad(hidden, weight, bias)
    return _SummedDivergence.apply(hidden, weight, bias, rows, teacher, measure, options, needs)


class _SummedDivergence(torch.autograd.Function):
    """(summed divergence, summed entropy), with gradients computed in the forward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, rows, teacher, measure, options, needs):
        with torch.autocast(hidden.device.type, enabled=False):
            tiles = Tiles(hidden, weight, bias, options, len(rows), None if len(rows) == len(hidden) else rows)
            gradients, scores = Gradients(tiles, weight, needs), tiles.scores(2)
            if isinstance(teacher, TopK):
                compare: Any = _WithTopK(teacher, measure, tiles)
            else:
                compare = (_ByRank if measure.by_rank else _ByToken)(teacher, measure, options, tiles)
            for start, stop in tiles:
                tile = tiles.multiply(start, stop)
                compare.begin(start, stop)
                for a, b in tiles.blocks(tile):
                    logits, slope = tiles.logits(tile[a:b], with_slope=any(needs))
                    gradient = compare.block(logits, a, b, scores[:, start + a : start + b])
                    if any(needs):
                        gradients.write(tile[a:b], gradient, slope)
                if any(needs):
                    gradients.of_tile(start, stop, tile)
            divergence, entropy = scores.sum(1)
        ctx.gradients, ctx.factor, ctx.dtype = gradients.sums(), options.scale / options.temperature, weight.dtype
        ctx.mark_non_differentiable(entropy)
        return divergence, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _):
        return spend_gradients(ctx, grad_loss, "linear_divergence")


class _WithHead:
    """A comparison with whole distributions of the teacher, whose tiles are computed beside the student's."""

    def __init__(self, teacher: HeadStates, measure: Measure, options: Options, tiles: Tiles) -> None:
        own = options._replace(softcap=teacher.softcap, scale=teacher.scale)
        self.measure, self.student = measure, tiles
        self.tiles = Tiles(teacher.hidden, teacher.weight, teacher.bias, own, len(teacher.hidden), None)
        self.mixture = torch.empty_like(tiles.probabilities) if 0 < measure.beta < 1 else None

    def begin(self, start: int, stop: int) -> None:
        self.tile = self.tiles.multiply(start, stop)

    def distributions(
        self, logits: torch.Tensor, a: int, b: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(p_S, log p_S, p_T, log p_T) of rows `a` to `b`, in shared buffers: `logits` becomes log p_S."""
        own, _ = self.tiles.logits(self.tile[a:b], with_slope=False)
        return *_normalised(logits, self.student), *_normalised(own, self.tiles)


def _normalised(logits: torch.Tensor, tiles: Tiles) -> tuple[torch.Tensor, torch.Tensor]:
    """(softmax, log-softmax) of (n, V), the second in place; -1e30 stands for -inf, so that 0 times it is 0."""
    probabilities = tiles.softmax(logits)
    log_sums = logits.amax(1) - probabilities.amax(1).log()  # the largest of exp(logits - highest) is 1
    return probabilities, logits.sub_(log_sums.unsqueeze(1)).clamp_(min=-1e30)


class _ByToken(_WithHead):
    def block(self, logits: torch.Tensor, a: int, b: int, scores: torch.Tensor) -> torch.Tensor:
        """Write divergences and entropies of n rows into `scores`, (2, n); return the gradient of their logits."""
        beta, (student, log_s, teacher, log_t) = self.measure.beta, self.distributions(logits, a, b)
        torch.neg(_dot(student, log_s), out=scores[1])
        if beta == 0:
            scores[0] = _dot(teacher, log_t.sub_(log_s))
            return student.sub_(teacher)
        if beta == 1:
            scores[0] = _dot(student, log_s.sub_(log_t))
            return student.mul_(log_s.sub_(scores[0].unsqueeze(1)))
        assert self.mixture is not None  # of this beta
        mixture = torch.lerp(student, teacher, beta, out=self.mixture[: len(student)])
        log_m = mixture.clamp_(min=torch.finfo(mixture.dtype).tiny).log_()
        to_student, to_teacher = _dot(student, log_s.sub_(log_m)), _dot(teacher, log_t.sub_(log_m))
        scores[0] = beta * to_teacher + (1 - beta) * to_student
        return student.mul_(log_s.sub_(to_student.unsqueeze(1))).mul_(1 - beta)


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(n,) the dot products of the rows of two (n, V). A product of matrices of one row takes six times as long."""
    return torch.linalg.vecdot(a, b)


class _ByRank(_WithHead):
    def block(self, logits: torch.Tensor, a: int, b: int, scores: torch.Tensor) -> torch.Tensor:
        """As `_ByToken.block`."""
        student, log_s, teacher, _ = self.distributions(logits, a, b)
        torch.neg(_dot(student, log_s), out=scores[1])
        ranked, order = student.sort(1, descending=True)
        other = teacher.sort(1, descending=True).values
        both = min(ranked.shape[1], other.shape[1])
        ranked[:, :both] -= other[:, :both]  # now the gap of each rank; behind the shorter it is to 0
        scores[0] = ranked.abs().sum(1) + other[:, both:].sum(1)
        slope = log_s.scatter_(1, order, ranked.sign_())
        return student.mul_(slope.sub_(_dot(student, slope).unsqueeze(1)))


class _WithTopK:
    """A comparison over the tokens that are known of the teacher."""

    def __init__(self, teacher: TopK, measure: Measure, tiles: Tiles) -> None:
        self.teacher, self.measure, self.tiles, self.start = teacher, measure, tiles, 0

    def begin(self, start: int, stop: int) -> None:
        self.start = start

    def block(self, logits: torch.Tensor, a: int, b: int, scores: torch.Tensor) -> torch.Tensor:
        """As `_ByToken.block`."""
        ids = self.teacher.ids[self.start + a : self.start + b]
        known = self.teacher.logps[self.start + a : self.start + b].to(logits.dtype)
        student, log_s = _normalised(logits, self.tiles)
        torch.neg(_dot(student, log_s), out=scores[1])
        with torch.enable_grad():
            own = log_s.gather(1, ids).masked_fill(known.isinf(), -torch.inf).requires_grad_()
            mine, theirs = (completed(logps, self.measure.add_tail) for logps in (own, known))
            losses = divergence_terms(mine, theirs, self.measure.beta).sum(1)
            (slope,) = torch.autograd.grad(losses.sum(), own)
        scores[0] = losses.detach()
        slope = slope.nan_to_num(0.0)  # of tokens that are not there
        return student.mul_(-slope.sum(1, keepdim=True)).scatter_add_(1, ids, slope)
