"""What online training asks of an engine that generates."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The filters work in this order: repetition penalty, temperature, top-k, top-p, min-p.

    Attributes:
        max_new_tokens: tokens of a completion at most.
        temperature: logits are divided by it; 0 takes the most probable token.
        top_p: keep the most probable tokens that together reach this probability; 1: all.
        top_k: keep so many most probable tokens; 0: all.
        min_p: keep tokens of at least this share of the highest probability; None: all.
        repetition_penalty: divides positive logits of tokens seen before, and multiplies negative ones; 1: none.
        stop: strings after which a completion ends; they stay in it.
        eos_token_ids: tokens after which a completion ends; they stay in it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Completions:
    """`n` completions of each prompt: those of the first prompt, of the second, ...

    Attributes:
        ids: the tokens of each, with the one that ended it, without padding.
        logps: log-probability of each of these tokens under softmax(logits / temperature), before any filter: what the
            trainer computes of the policy; None where the engine does not tell.
        finished: whether it ended by itself; False where `max_new_tokens` cut it.
        is_exact: `logps` are those of the trainer's own weights in its own precision, up to rounding in float32, so
            that no further pass over the completions is needed for them.
    """

    ids: list[list[int]]
    logps: list[list[float]] | None
    finished: list[bool]
    is_exact: bool = False


class Generator(Protocol):
    """An engine that generates.

    It may also have ``has_own_weights = True``, which says that it holds a copy of the weights and the policy need not
    be put together for it; and ``session()``, see `session`.
    """

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> Completions:
        """Complete each prompt `n` times.

        Args:
            prompts: token ids.
            seeds: one for each completion, ``len(prompts) * n`` in the order of the result. The same seed gives the
                same completion, whatever else is generated beside it. None: any.
        """
        ...

    def sync_weights(self, model: nn.Module) -> None:
        """Generate with the weights that `model` has now. Called after updates, before the next `generate`."""
        ...


def has_own_weights(generator: Generator) -> bool:
    """Whether `generator` writes with a copy of the weights, and not with the model that is trained."""
    return bool(getattr(generator, "has_own_weights", False))


def shares_weights(generator: Generator) -> bool:
    """Whether `generator` writes with the trainer's own model, so that their log-probabilities differ by rounding
    alone.
    """
    return bool(getattr(generator, "shares_weights", False))


def session(generator: Generator) -> contextlib.AbstractContextManager[None]:
    """Around calls of `Generator.generate`. Every process must enter it and leave it; within it each calls as often as
    it needs.

    Engines whose processes write together need this: one that has no more to ask goes on to take part in what others
    ask.
    """
    make = getattr(generator, "session", None)
    return contextlib.nullcontext() if make is None else make()
