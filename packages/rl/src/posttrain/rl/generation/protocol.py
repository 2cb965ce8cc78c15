"""The protocol of generation engines for online training."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import nn

from posttrain.lm.images.images import Video

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
        never: tokens that are never drawn, such as those that stand for images. Log-probabilities of vLLM are among the
            other tokens alone, if it was started to scale them.
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
            trainer computes them. This, `versions` and `routes` are None if the engine does not return them.
        finished: whether each ended before `max_new_tokens`.
        is_exact: `logps` come from the trainer's weights in its precision, up to float32 rounding, so no second pass is
            needed.
        versions: for each token the `version` of the engine that wrote it; None: that with which the call began.
        routes: of each, (P + C - 1, layers, k) int16: with which experts of a mixture each of the P tokens of its
            prompt and of its own, but the last, was read.
    """

    ids: list[list[int]]
    logps: list[list[float]] | None
    finished: list[bool]
    is_exact: bool = False
    versions: list[list[int]] | None = None
    routes: list[torch.Tensor] | None = None


NO_IMAGES = (
    "The vLLM server at {} takes no prompts with images. Use `vllm serve` of vLLM 0.32 or newer, started with "
    "--enable-scale-out, on the model that is trained."
)


@dataclass(frozen=True)
class Pictured:
    """A prompt with images, as engines take it that read them with a processor of their own.

    ids: its tokens, with one that stands for each image. images: decoded PIL images, in their order. whole: the tokens
    that the model reads, with those of the images.
    """

    ids: list[int]
    images: Sequence[Any]
    whole: list[int]

    def __post_init__(self) -> None:
        if any(isinstance(image, Video) for image in self.images):
            raise ValueError("A prompt shows a video, which vLLM is not given. Set use_vllm=False.")

    @functools.cached_property
    def urls(self) -> list[str]:
        """The images as data URLs, without loss."""
        found = [io.BytesIO() for _ in self.images]
        for image, held in zip(self.images, found, strict=True):
            image.save(held, "png", compress_level=1)
        return [f"data:image/png;base64,{base64.b64encode(held.getvalue()).decode()}" for held in found]

    def check(self, read: Sequence[int] | None, who: str) -> None:
        """Raise ValueError where the engine `who` has read other tokens than `whole`."""
        if read is None or list(read) != self.whole:
            raise ValueError(
                f"{who} reads a prompt with {len(self.images)} images as {len(read or ())} tokens, and the trainer as "
                f"{len(self.whole)} (they differ): its processor has other settings. Serve the model's own folder with "
                "the processor that is passed as processing_class."
            )


Prompt = Sequence[int] | Pictured
"""A prompt as an engine takes it: token ids, or more where it shows images."""


class Generator(Protocol):
    """An engine that generates.

    Optional: the attributes of `Abilities`, set to True; ``version``, which is set to the optimizer step before each
    `sync_weights`; ``session()``, a context around calls of `generate` that every process enters and leaves, for
    engines that generate jointly: inside, each process calls as often as it needs, and one with no more requests still
    takes part in the others'; and ``steps()``, see `posttrain.rl.generation.local.LocalGenerator.steps`.
    """

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> Completions:
        """Complete each of the `prompts`, token ids, `n` times.

        `seeds` has one for each completion, ``len(prompts) * n`` in the order of the result. The same seed gives the
        same completion, whatever else is in the batch. None: random.
        """
        ...

    def sync_weights(self, model: nn.Module) -> None:
        """Use the current weights of `model`. Called after optimizer steps, before the next `generate`."""
        ...


@dataclass(frozen=True)
class Abilities:
    """What an engine declares by its optional attributes."""

    #: It takes prompts that are `Pictured`.
    reads_images: bool
    #: It uses the trainer's own model, so that log-probabilities differ by rounding alone.
    shares_weights: bool
    #: It holds a copy of the weights, so that the policy need not be gathered.
    has_own_weights: bool
    #: `sync_weights` may be called while another thread is in `generate`, whose completions go on under new weights.
    updates_in_flight: bool
    #: Several threads may be in `generate`, whose completions the engine writes together.
    is_concurrent: bool
    #: It completes prompts before it is asked to, so that nothing is sampled in the background, until ``close()``.
    runs_ahead: bool

    @classmethod
    def of(cls, generator: Generator) -> Abilities:
        """Those of `generator`."""
        return cls(**{each.name: bool(getattr(generator, each.name, False)) for each in fields(cls)})
