"""Which engine generates, as the arguments of a trainer ask for it."""

from __future__ import annotations

from typing import Any

from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.generation.protocol import Generator
from posttrain.rl.generation.transformers import TransformersGenerator


def make_generator(tokenizer: Any, args: Any) -> Generator:
    """The engine for `args`, a `posttrain.rl.rollout_config.GenerationArguments`.

    Ours, unless something is set that only transformers' generate understands.
    """
    settings = {k: v for k, v in (args.generation_kwargs or {}).items() if k not in ("stop", "stop_strings")}
    if args.cache_implementation:
        settings["cache_implementation"] = args.cache_implementation
    return TransformersGenerator(tokenizer, settings) if settings else LocalGenerator(tokenizer)
