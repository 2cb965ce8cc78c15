"""Batches of pairs, and their log-probabilities under policy and reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.core.data.samplers import columns_of, has_length
from posttrain.rl.policy.logprobs import CompletionScores, Encoder, padded_rows, reorder, shared_rows
from posttrain.rl.preference.rows import PAIR, REFERENCE_COLUMNS


@dataclass(frozen=True)
class Completions:
    """One side of B pairs, as policy and reference see it.

    logp: (B,) log-probability of the completion under the policy. ref_logp: (B,) under the reference, None without one.
    tokens: its tokens one by one.
    """

    logp: torch.Tensor
    ref_logp: torch.Tensor | None
    tokens: CompletionScores

    @property
    def log_ratio(self) -> torch.Tensor:
        """(B,) log pi(y|x) - log pi_ref(y|x)."""
        if self.ref_logp is None:
            raise TypeError("log_ratio compares with a reference, and the trainer has none: needs_reference is False.")
        return self.logp - self.ref_logp

    @property
    def lengths(self) -> torch.Tensor:
        """(B,) scored tokens."""
        return self.tokens.lengths

    @property
    def mean_logp(self) -> torch.Tensor:
        """(B,) log-probability of a token, on average."""
        return self.logp / self.lengths.clamp_min(1)


def pair_metrics(
    chosen: Completions, rejected: Completions, rewards: torch.Tensor, logp_of: Callable[[Completions], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | int]]:
    """(name, sum, count) of what is logged of B pairs with rewards (B, 2). `logp_of` a side gives the log-probabilities
    that are logged, (B,).
    """
    pairs, totals = len(rewards), rewards.sum(0)
    for i, (name, side) in enumerate((("chosen", chosen), ("rejected", rejected))):
        yield f"rewards/{name}", totals[i], pairs
        yield f"logps/{name}", logp_of(side).detach().sum(), pairs
        tokens = side.lengths.sum()
        yield f"logits/{name}", side.tokens.stats["mean_logit"].sum(), tokens
        yield "entropy", side.tokens.stats["entropy"].sum(), tokens
        if name == "chosen":
            yield "mean_token_accuracy", side.tokens.stats["correct"].sum(), tokens
    yield "rewards/accuracies", (rewards[:, 0] > rewards[:, 1]).sum(), pairs
    yield "rewards/margins", totals[0] - totals[1], pairs


def column_at_hand(dataset: Any, name: str) -> list[Any]:
    """The values of a column; none where not all rows have one, or it takes to read a stream, or to make rows."""
    if isinstance(dataset, list):
        values = [row[name] for row in dataset if isinstance(row, Mapping) and name in row]
        return values if len(values) == len(dataset) else []
    return list(dataset[name]) if has_length(dataset) and name in columns_of(dataset) else []


def read_lengths(
    dataset: Any, columns: Sequence[str], completions: int, shared: bool, flat: bool = False, most: int | None = None
) -> list[int]:
    """Tokens that a model reads of each prepared row in one pass, see `read_length`: of the prompt and the first
    `completions` among `columns`, those of the collator, of which those of tokens end in ``_ids``.
    """
    read = [name for name in columns if name.endswith("_ids") and name != "prompt_ids"][:completions]
    prompts = dataset["prompt_ids"] if "prompt_ids" in columns else [()] * len(dataset)
    rows = zip(prompts, *(dataset[name] for name in read), strict=True)
    return [read_length(len(prompt), list(map(len, texts)), shared, flat, most) for prompt, *texts in rows]


def read_length(
    prompt: int, completions: Sequence[int], shared: bool, flat: bool = False, most: int | None = None
) -> int:
    """Tokens of a prompt and its completions as a model reads them in one pass: padded to the longest, by default.

    Args:
        shared: the prompt is read once for all completions.
        flat: it is read with each of them, without padding.
        most: tokens of a prompt with one completion at most.
    """
    if most is not None:
        prompt = min(prompt, most)
        completions = [min(length, most - prompt) for length in completions]
    # Without padding, the last token of the prompt begins each completion, whose own last token is not read.
    if shared:
        return max(prompt - 1, 0) + sum(completions)
    if flat:
        return sum(prompt + length - 1 for length in completions)
    return len(completions) * (prompt + max(completions))


class SidedBatch(dict):
    """A batch with the chosen completions of all pairs, then the rejected ones, then others, each a row.

    Attributes:
        sides: how many completions each prompt has.
    """

    sides: int = 2

    def halves(self) -> tuple[SidedBatch, SidedBatch]:
        """The first and second half of the pairs, each with all its completions. Raise ValueError if it has one pair,
        or its rows do not lie one below the other.
        """
        pairs, rest = divmod(max(map(len, self.values())), self.sides)
        if rest or any(len(value) not in (pairs, pairs * self.sides) for value in self.values()):
            raise ValueError("the batch holds prompts once for several completions, and cannot be cut by rows")
        if pairs < 2:
            raise ValueError("the batch has one pair, and cannot be cut any more")
        halves = SidedBatch(), SidedBatch()
        for half, rows in zip(halves, torch.arange(pairs).chunk(2), strict=True):
            half.sides = self.sides
            half |= {n: torch.cat([side[rows] for side in value.split(pairs)]) for n, value in self.items()}
        return halves


def positions_of(rows: Sequence[Mapping[str, Any]]) -> list[torch.Tensor] | None:
    """The positions of the rows' prompts, where they have them, see `shared_rows`."""
    return [row["positions"] for row in rows] if rows and "positions" in rows[0] else None


@dataclass
class PreferenceCollator:
    """Prepared pairs -> a batch of 2B completions: the chosen ones of all pairs, then the rejected ones, then others.

    Args:
        shared: one row, each prompt once, see `shared_rows`. flat: one row, without padding. Neither: a row each.
        encoder: of a model that reads prompts in an encoder. names: of a row's completions.
    """

    pad_token_id: int
    shared: bool = False
    flat: bool = False
    pad_to_multiple_of: int | None = None
    encoder: Encoder | None = None
    names: tuple[str, ...] = PAIR

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        groups = [(row["prompt_ids"], [row[f"{name}_ids"] for name in self.names]) for row in rows]
        batch = self.lay_out(groups, positions_of(rows))
        size = len(self.names)
        batch = reorder(batch, [place for side in range(size) for place in range(side, size * len(rows), size)])
        for name in REFERENCE_COLUMNS:
            if name in rows[0]:
                batch[name] = torch.tensor([row[name] for row in rows])
        sided = SidedBatch(batch)
        sided.sides = size
        return sided

    def lay_out(self, groups: list[tuple[Any, Any]], positions: Sequence[torch.Tensor] | None = None) -> dict[str, Any]:
        """A batch of prompts with their completions."""
        if self.shared or self.flat:
            return shared_rows(groups, self.shared, positions)
        return padded_rows(groups, self.pad_token_id, self.pad_to_multiple_of, self.encoder)
