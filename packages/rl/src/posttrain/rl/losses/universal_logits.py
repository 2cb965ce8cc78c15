r"""Distributions over two vocabularies, compared at texts that tokens of both cover.

The distribution of a text :math:`y_{1..k}` of :math:`k` tokens is that of its last one times the probabilities of those
before it, by the chain rule: :math:`p(\cdot | x, y_{<k}) \prod_{j<k} p(y_j | x, y_{<j})`. Two of them are compared by
the universal logit distillation of Boizard et al. 2024, https://arxiv.org/abs/2402.12030, eq. 4, or as GOLD, Patiño et
al. 2025, https://huggingface.co/spaces/HuggingFaceH4/on-policy-distillation, does: tokens that both vocabularies have
by the generalised Jensen-Shannon divergence, and the others by rank.

Shapes: N completions, M tokens, S of them in texts, G texts, V and W the sizes of the vocabularies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from posttrain.lm.loss.distillation import divergence_terms

TEXTS_AT_ONCE = 256
"""Texts, or tokens, whose distributions are held at the same time."""

LogitsAt = Callable[[torch.Tensor], torch.Tensor]
"""``places -> logits``: (n,) of M tokens -> (n, V)."""


class Texts(NamedTuple):
    """Which tokens are of which text; on the CPU, in ascending order. at: (S,) the tokens among all with a logit. of:
    (S,) the text of each. last: (G,) the last token of each in `at`. rows: (G,) the completion that each is of.
    """

    at: torch.Tensor
    of: torch.Tensor
    last: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def marked(cls, groups: torch.Tensor) -> Texts:
        """Of (N, C) `groups`, as `Rollout.groups`: tokens below -1 have no logit, and those of -1 no text."""
        at = (groups[groups >= -1] >= 0).nonzero().squeeze(1)
        row, column = (groups >= 0).nonzero(as_tuple=True)
        keys = row * groups.shape[1] + groups[row, column]  # a row has no more texts than tokens
        _, of, sizes = torch.unique_consecutive(keys, return_inverse=True, return_counts=True)
        last = sizes.cumsum(0) - 1
        return cls(at, of, last, row[last])

    def part(self, start: int, stop: int) -> Texts:
        """The texts `start` to `stop`."""
        first = int(self.last[start - 1]) + 1 if start else 0
        tokens = slice(first, int(self.last[stop - 1]) + 1)
        return Texts(self.at[tokens], self.of[tokens] - start, self.last[start:stop] - first, self.rows[start:stop])


class Vocabularies(NamedTuple):
    """How two distributions are compared.

    shared: the ids of the tokens that both vocabularies have, (K,) of the student's and (K,) of the teacher's; None:
    all are compared by rank. beta: as of `divergence_terms`. weights: of the shared and of the others; None: the share
    of the teacher's vocabulary that they are.
    """

    shared: tuple[torch.Tensor, torch.Tensor] | None = None
    beta: float = 0.5
    weights: tuple[float, float] | None = None

    def compare(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """(G, V), (G, W) log-probabilities -> (G,)."""
        p, q = student.exp(), teacher.exp()
        if self.shared is None:
            return by_rank(p, q)
        own, other = self.shared
        weights = self.weights or (len(other) / q.shape[1], 1 - len(other) / q.shape[1])
        terms = divergence_terms(student[:, own], teacher[:, other], self.beta).sum(1)
        return weights[0] * terms + weights[1] * by_rank(p.index_fill(1, own, 0), q.index_fill(1, other, 0))


def by_rank(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    r""":math:`\sum_i |p^{(i)} - q^{(i)}|` of probabilities in descending order, with zeros behind the shorter: (G, V),
    (G, W) -> (G,).
    """
    p, q = (part.sort(1, descending=True).values for part in (p, q))
    width = max(p.shape[1], q.shape[1])
    p, q = (F.pad(part, (0, width - part.shape[1])) for part in (p, q))
    return (p - q).abs().sum(1)


def merged(logits: torch.Tensor, tokens: torch.Tensor, texts: Texts) -> torch.Tensor:
    """The log-probabilities behind each text: (S, V) logits of its tokens, (S,) -> (G, V)."""
    logps, last, of = logits.log_softmax(1), texts.last.to(logits.device), texts.of.to(logits.device)
    earlier = logps.gather(1, tokens.unsqueeze(1)).squeeze(1).index_fill(0, last, 0)
    return logps[last] + earlier.new_zeros(len(last)).index_add(0, of, earlier).unsqueeze(1)


def of_tokens(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """``function(places, tokens there)``, (n,), (n,) -> (n,), of some of the (M,) `tokens` at a time: (M,)."""
    places = torch.arange(len(tokens), device=tokens.device)
    pairs = zip(*(torch.split(part, TEXTS_AT_ONCE) for part in (places, tokens)), strict=True)
    parts = [checkpoint(function, *pair, use_reentrant=False) for pair in pairs]
    return torch.cat(parts) if parts else tokens.new_zeros(0, dtype=torch.float32)


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """(n, V) -> (n,) in nats."""
    logps = logits.log_softmax(1)
    return -(logps.exp() * logps.clamp(min=-1e30)).sum(1)


def universal_divergence(
    student: LogitsAt,
    tokens: torch.Tensor,
    texts: Texts,
    teacher: LogitsAt,
    teacher_tokens: torch.Tensor,
    teacher_texts: Texts,
    vocabularies: Vocabularies,
    num_rows: int,
) -> torch.Tensor:
    """The mean over the texts of each completion: (N,), 0 for one without any. `tokens` and `teacher_tokens`, (M,) of
    the student, are those that the logits predict. Both have the same texts.
    """

    def some(own: Texts, other: Texts) -> torch.Tensor:
        at, places = own.at.to(tokens.device), other.at.to(tokens.device)
        theirs = merged(teacher(places), teacher_tokens[places], other)
        return vocabularies.compare(merged(student(at), tokens[at], own), theirs)

    spans = [(i, min(i + TEXTS_AT_ONCE, len(texts.last))) for i in range(0, len(texts.last), TEXTS_AT_ONCE)]
    parts = [checkpoint(some, texts.part(*s), teacher_texts.part(*s), use_reentrant=False) for s in spans]
    shares = (1 / torch.bincount(texts.rows, minlength=num_rows).clamp(min=1))[texts.rows].to(tokens.device)
    found = torch.cat([*parts, student(tokens[:0]).flatten()])
    return found.new_zeros(num_rows).index_add(0, texts.rows.to(tokens.device), found * shares)
