r"""Distributions over two vocabularies, compared at texts that tokens of both cover.

The distribution of a text :math:`y_{1..k}` of :math:`k` tokens is that of its last one times the probabilities of those
before it, by the chain rule: :math:`p(\cdot | x, y_{<k}) \prod_{j<k} p(y_j | x, y_{<j})`. Two of them are compared by
the universal logit distillation of Boizard et al. 2024, https://arxiv.org/abs/2402.12030, eq. 4, or as GOLD, Patiño et
al. 2025, https://huggingface.co/spaces/HuggingFaceH4/on-policy-distillation, does: tokens that both vocabularies have
by the generalised Jensen-Shannon divergence, and the others by rank.

Shapes: N completions, M tokens, S of them in texts, G texts, V and W the sizes of the vocabularies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from posttrain.core.config import value_of
from posttrain.core.data.collators import IGNORE_INDEX
from posttrain.core.data.host_copies import on_host
from posttrain.lm.loss.distillation import divergence_terms

logger = logging.getLogger(__name__)

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


def common_tokens(student: Any, teacher: Any, device: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of the tokens that both tokenizers have: (K,) of the student's and (K,) of the teacher's."""
    own, other = student.get_vocab(), teacher.get_vocab()
    words = sorted(own.keys() & other.keys(), key=other.__getitem__)
    first, second = (torch.tensor([vocabulary[word] for word in words], device=device) for vocabulary in (own, other))
    return first, second


def common_texts(own: Sequence[int], other: Sequence[int]) -> list[tuple[slice, slice]]:
    """The shortest texts that tokens of both cover: (where in `own`, where in `other`), which are the bytes that tokens
    reach up to.
    """
    found, i, j, start, begin = [], 0, 0, 0, 0
    while i < len(own) and j < len(other):
        first, second = own[i], other[j]
        i, j = i + (first <= second), j + (second <= first)
        if first == second:
            found.append((slice(start, i), slice(begin, j)))
            start, begin = i, j
    return found


class ULDLoss(nn.Module):
    """The loss of `GOLDTrainer` with ``use_uld_loss``, of whole logits: trl's class, for scripts with their own loop.

    Args:
        config: has the fields ``uld_...`` and ``beta`` of `GOLDConfig`. ``use_extended_uld=False`` compares the tokens
            of both one by one, instead of texts.
        student_tokenizer, teacher_tokenizer: for ``uld_use_hybrid_loss``, whose parts are `last_matched_loss` and
            `last_unmatched_loss`, without their weights.
    """

    def __init__(
        self, config: Any, student_tokenizer: Any = None, teacher_tokenizer: Any = None, device: Any = None
    ) -> None:
        super().__init__()
        self.config, self.by_text = config, value_of(config, "use_extended_uld") is not False
        if value_of(config, "uld_token_merge_strategy") == "observed":
            logger.warning(
                "uld_token_merge_strategy='observed' reads a token's probability at the position behind it; ULDLoss "
                "takes the one that predicts it, by the chain rule ('bayesian')."
            )
        is_hybrid = value_of(config, "uld_use_hybrid_loss") and None not in (student_tokenizer, teacher_tokenizer)
        self.shared = common_tokens(student_tokenizer, teacher_tokenizer, device) if is_hybrid else None
        self.last_matched_loss: torch.Tensor | None = None
        self.last_unmatched_loss: torch.Tensor | None = None

    def forward(
        self,
        student_logits: torch.Tensor,
        teacher_logits: torch.Tensor,
        student_labels: torch.Tensor,
        teacher_labels: torch.Tensor,
        student_input_ids: torch.Tensor,
        teacher_input_ids: torch.Tensor,
        student_byte_offsets: torch.Tensor | None = None,
        teacher_byte_offsets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The mean over completions, shape ().

        Args:
            student_logits, teacher_logits: (N, T, V), (N, U, W); those at a position predict the token behind it.
            student_labels, teacher_labels: (N, T), (N, U); -100 where nothing is compared.
            student_byte_offsets, teacher_byte_offsets: (N, T, 2), (N, U, 2) the bytes of the completion that each
                token stands for, see `posttrain.rl.samples.byte_offsets`.

        Raises:
            ValueError: there are no offsets, and texts are compared.
        """
        config = self.config
        own, other = self._texts((student_labels, teacher_labels), (student_byte_offsets, teacher_byte_offsets))
        tokens = [ids.roll(-1, 1).flatten() for ids in (student_input_ids, teacher_input_ids)]

        def student(places: torch.Tensor) -> torch.Tensor:
            return student_logits.flatten(0, 1)[places] / float(config.uld_student_temperature)

        def teacher(places: torch.Tensor) -> torch.Tensor:
            return teacher_logits.flatten(0, 1)[places] / float(config.uld_teacher_temperature)

        def compared(how: Vocabularies) -> torch.Tensor:
            number = len(student_logits)
            return universal_divergence(student, tokens[0], own, teacher, tokens[1], other, how, number).mean()

        if self.shared is None:
            loss = compared(Vocabularies())
        else:
            shared, beta = (self.shared[0].to(tokens[0].device), self.shared[1].to(tokens[0].device)), config.beta
            share = len(shared[1]) / teacher_logits.shape[2]
            matched, unmatched = share, 1 - share
            if value_of(config, "uld_hybrid_matched_weight") is not None:
                matched, unmatched = config.uld_hybrid_matched_weight, config.uld_hybrid_unmatched_weight
            self.last_matched_loss = compared(Vocabularies(shared, beta, (1.0, 0.0)))
            self.last_unmatched_loss = compared(Vocabularies(shared, beta, (0.0, 1.0)))
            loss = matched * self.last_matched_loss + unmatched * self.last_unmatched_loss
        loss = loss * float(config.uld_distillation_weight)
        if not config.uld_crossentropy_weight:
            return loss
        predicted = student_logits[:, :-1].flatten(0, 1), student_labels[:, 1:].flatten()
        return loss + float(config.uld_crossentropy_weight) * F.cross_entropy(*predicted, ignore_index=IGNORE_INDEX)

    def _texts(self, labels: Sequence[torch.Tensor], offsets: Sequence[torch.Tensor | None]) -> tuple[Texts, Texts]:
        """What is compared of student and teacher, among all positions with a logit."""
        if self.by_text and None in [one if one is None else 0 for one in offsets]:
            raise ValueError("Byte offsets are required, or use_extended_uld=False, which compares token by token.")
        config = self.config
        labels, skips = [on_host(one) for one in labels], (config.uld_skip_student_eos, config.uld_skip_teacher_eos)
        reached = [on_host(one)[..., 1] for one in offsets if one is not None]
        marks = [torch.full(one.shape, -1) for one in labels]
        for row in range(len(labels[0])):
            places = [(one[row] != IGNORE_INDEX).nonzero().squeeze(1) for one in labels]
            places = [at[: len(at) - bool(skip)] for at, skip in zip(places, skips, strict=True)]
            counted = [range(len(at)) for at in places]
            ends = [one[row, at].tolist() for one, at in zip(reached, places, strict=True)] if self.by_text else counted
            for number, parts in enumerate(common_texts(*ends)):
                at = [whole[part] - 1 for whole, part in zip(places, parts, strict=True)]  # where they are predicted
                if min(int(one[0]) for one in at) < 0:
                    continue  # nothing predicts the first token of a row
                for mark, one in zip(marks, at, strict=True):
                    mark[row, one] = number
        own, other = map(Texts.marked, marks)
        return own, other
