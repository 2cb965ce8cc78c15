"""The protocol of generation engines for online training."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

MAX_ROWS = 256
"""Completions that a local engine writes at once, unless one prompt needs more."""


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
        never: tokens that are never drawn, such as those that stand for images.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    never: tuple[int, ...] = ()


@dataclass(frozen=True)
class Completions:
    """`n` completions of each prompt: those of the first prompt, of the second, ...

    Attributes:
        ids: the tokens of each, with the one that ended it, without padding.
        logps: log-probability of each of these tokens under softmax(logits / temperature), before any filter, as the
            trainer computes them; None if the engine does not return them.
        finished: whether each ended before `max_new_tokens`.
        is_exact: `logps` come from the trainer's weights in its precision, up to float32 rounding, so no second pass is
            needed.
        versions: for each token the `version` of the engine that wrote it; None if the engine does not return them, and
            the weights count as those with which the call began.
    """

    ids: list[list[int]]
    logps: list[list[float]] | None
    finished: list[bool]
    is_exact: bool = False
    versions: list[list[int]] | None = None


class Generator(Protocol):
    """An engine that generates.

    Optional: ``has_own_weights = True``, if the engine holds a copy of the weights, so that the policy need not be
    gathered; ``updates_in_flight = True``, if `sync_weights` may be called while another thread is in `generate`, whose
    completions go on under the new weights; ``version``, which is set to the optimizer step before each `sync_weights`;
    and ``session()``, see `session`.
    """

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> Completions:
        """Complete each prompt `n` times.

        Args:
            prompts: token ids.
            seeds: one for each completion, ``len(prompts) * n`` in the order of the result. The same seed gives the
                same completion, whatever else is in the batch. None: random.
        """
        ...

    def sync_weights(self, model: nn.Module) -> None:
        """Use the current weights of `model`. Called after optimizer steps, before the next `generate`."""
        ...


def has_own_weights(generator: Generator) -> bool:
    """Whether `generator` writes with a copy of the weights, and not with the model that is trained."""
    return bool(getattr(generator, "has_own_weights", False))


def updates_in_flight(generator: Generator) -> bool:
    """Whether `generator` takes new weights while it generates."""
    return bool(getattr(generator, "updates_in_flight", False))


def shares_weights(generator: Generator) -> bool:
    """Whether `generator` uses the trainer's own model, so that log-probabilities differ by rounding alone."""
    return bool(getattr(generator, "shares_weights", False))


def session(generator: Generator) -> contextlib.AbstractContextManager[None]:
    """A context around calls of `Generator.generate` that every process must enter and leave.

    Inside, each process calls as often as it needs. Engines that generate jointly use this: a process with no more
    requests still takes part in the others'.
    """
    make = getattr(generator, "session", None)
    return contextlib.nullcontext() if make is None else make()
