"""Generates with transformers' continuous batching, ``model.generate_batch``, and its paged cache.

Requests have no seeds, and a thread schedules them, so completions differ from run to run. Verified on the CPU; not yet
on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from posttrain.core.data import accelerator
from posttrain.core.data.samplers import mix
from posttrain.core.models.wrapping import base_model, evaluating, unwrap
from posttrain.lm.attention.varlen_attention import PREFIX
from posttrain.rl.generation.decoding import attention_set
from posttrain.rl.generation.protocol import Completions, Sampling
from posttrain.rl.generation.sampling import check_logps, cut, is_float32, prefers_probable, rope_limit
from posttrain.rl.generation.transformers import generation_config
from posttrain.rl.generation.weights import refuse_virtual_tokens

PAGE = 256  # tokens of a block of the cache, unless the settings say another number


class ContinuousGenerator:
    """Generates with the model that is trained, with transformers' scheduler and paged cache.

    Args:
        tokenizer: decodes completions to search them for stop strings.
        settings: fields of `transformers.ContinuousBatchingConfig`, such as ``max_memory_percent`` or ``num_blocks``.
    """

    shares_weights = True

    def __init__(self, tokenizer: Any, settings: dict[str, Any] | None = None) -> None:
        from transformers import ContinuousBatchingConfig

        self.tokenizer = tokenizer
        self.settings = {"return_logprobs": True} | (settings or {})
        try:
            ContinuousBatchingConfig(**self.settings)
        except TypeError as error:
            raise ValueError(f"transformers_continuous_batching_config: {error}.") from error
        self.model: nn.Module | None = None  # that of `sync_weights`

    def sync_weights(self, model: nn.Module) -> None:
        """Generate with `model` itself, so there is nothing to copy. Raise ValueError if an adapter puts virtual tokens
        before each text.
        """
        refuse_virtual_tokens(model, "transformers' continuous batching")
        self.model = unwrap(model)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> Completions:
        """See `Generator.generate`; `seeds` together seed the call. Completions are cut at stop strings afterwards.

        Raises:
            ValueError: continuous batching does not support a setting in `sampling`.
            RuntimeError: not every completion came back.
        """
        from transformers import ContinuousBatchingConfig, __version__

        if problem := sampling_problem(sampling):
            raise ValueError(problem)
        if (model := self.model) is None:
            raise RuntimeError("There is no model yet: call sync_weights before generate.")
        draws = sampling.temperature > 0
        copies = n if draws else 1
        asked, of_each = prompts, copies
        if __version__.startswith("5.17."):  # of several completions of a prompt it hands back one
            asked, of_each = [prompt for prompt in prompts for _ in range(copies)], 1
        config = generation_config(sampling, self.tokenizer, {"num_return_sequences": of_each})
        seed = int(torch.randint(2**31, ())) if seeds is None else mix(*seeds) % 2**31
        base = base_model(model)
        devices = [p.device for p in list(base.parameters())[:1] if accelerator.has_memory(p.device)]
        kind = devices[0].type if devices else "cpu"
        limits = {} if devices else cache_limits(asked, of_each, sampling.max_new_tokens, self.settings)
        options: dict[str, Any] = {"seed": seed} | limits | self.settings
        # It seeds and draws from the generators that training draws its dropout from.
        plain = base.config._attn_implementation.removeprefix(PREFIX)  # which continuous batching supports
        with evaluating(model), attention_set(base, plain), torch.random.fork_rng(devices, device_type=kind):
            done = base.generate_batch(
                [list(prompt) for prompt in asked],
                generation_config=config,
                continuous_batching_config=ContinuousBatchingConfig(**options),
                progress_bar=False,
            )
        results, errors = list(done.values()), [one.error for one in done.values() if one.error is not None]
        if len(results) < len(prompts) * copies or errors:
            raise RuntimeError(
                f"transformers' continuous batching returned {len(results)} of {len(prompts) * copies} completions: "
                f"{errors[0] if errors else 'no error is known'}. Set transformers_continuous_batching_config, for "
                "example max_memory_percent, or leave use_transformers_continuous_batching out."
            )
        results = [result for result in results for _ in range(n // copies)]
        ids, finished = cut([list(result.generated_tokens) for result in results], sampling, self.tokenizer)
        logps, is_plain = None, draws and not (sampling.never or prefers_probable(sampling))
        if is_plain and all(len(result.logprobs or ()) for result in results):
            logps = [list(result.logprobs)[: len(row)] for result, row in zip(results, ids, strict=True)]
            check_logps(logps)
        is_exact = logps is not None and is_float32(model) and rope_limit(model) == math.inf
        return Completions(ids, logps, finished, is_exact)


def cache_limits(
    prompts: Sequence[Sequence[int]], copies: int, new_tokens: int, settings: Mapping[str, Any]
) -> dict[str, int]:
    """The size of the cache that these completions need at once, for the CPU: by itself transformers takes most of the
    memory that is free, which on a host belongs to others too. Empty where `settings` say a size.
    """
    if {"num_blocks", "max_memory_percent"} & set(settings):
        return {}
    page = settings.get("page_size") or settings.get("block_size") or PAGE
    blocks = sum(-(-(len(prompt) + new_tokens) // page) for prompt in prompts) * copies
    tokens = sum(len(prompt) for prompt in prompts)
    return {"num_blocks": blocks + 2, "max_batch_tokens": min(max(tokens, 64), 4096)}


def sampling_problem(sampling: Any) -> str | None:
    """What of `sampling`, or of arguments with the same names, is left out there, as a sentence; None if nothing is."""
    penalty, min_p = ("repetition_penalty", sampling.repetition_penalty, (1.0,)), ("min_p", sampling.min_p, (None, 0))
    for name, value, off in (penalty, min_p):
        if value not in off:
            return (
                f"{name}={value} is not supported by transformers' continuous batching; set "
                "use_transformers_continuous_batching=False."
            )
    return None
