"""How many tokens a completion may have, within its own limit and within the context of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from posttrain.core.errors import DataError
from posttrain.core.models import wrapping
from posttrain.rl.generation.protocol import Sampling
from posttrain.rl.samples.samples import Sample


def context_length(config: Any, engine: int | None = None) -> int | None:
    """Tokens of prompt and completion together that a model reads at most; None: its config names no limit.

    Args:
        engine: the limit of the engine that generates, where it has one of its own.
    """
    limits = [getattr(wrapping.text_config(config), "max_position_embeddings", None), engine]
    return min((limit for limit in limits if limit and limit > 0), default=None)


def complete_in_room(
    samples: Sequence[Sample],
    sampling: Sampling,
    context: int | None,
    complete: Callable[[list[Sample], Sampling], list[Sample]],
) -> list[Sample]:
    """`samples` completed as `sampling` says, with fewer tokens near the end of the `context`.

    Args:
        complete: is called once for all samples with the same room.
    """
    by_room: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        by_room.setdefault(room_for(sample, sampling.max_new_tokens, context), []).append(place)
    found = list(samples)
    for limit, places in by_room.items():
        done = complete([samples[place] for place in places], replace(sampling, max_new_tokens=limit))
        for place, sample in zip(places, done, strict=True):
            found[place] = sample
    return found


def room_for(sample: Sample, most: int, context: int | None) -> int:
    """Tokens that a completion of `sample` may have: `most`, or fewer near the end of the `context`.

    Raises:
        DataError: none.
    """
    if (room := room_left(sample, most, context)) < 1:
        raise DataError(
            f"A prompt has {len(sample.prompt_ids)} tokens, and the model reads at most {context} of prompt and "
            f"completion together, so there is no room for a completion. It begins: {str(sample.prompt)[:80]!r}. "
            "Drop or shorten such prompts."
        )
    return room


def room_left(sample: Sample, max_tokens: int, context: int | None) -> int:
    """Tokens that may still be added to a completion."""
    left = max_tokens - len(sample.ids)
    return left if context is None else min(left, context - len(sample.prompt_ids) - len(sample.ids))
