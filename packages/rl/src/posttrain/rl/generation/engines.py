"""Which engine generates, as the arguments of a trainer ask for it."""

from __future__ import annotations

from typing import Any

from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.generation.protocol import Generator
from posttrain.rl.generation.transformers import TransformersGenerator


def make_generator(tokenizer: Any, args: Any) -> Generator:
    """The engine for `args`, a `posttrain.rl.rollout_config.GenerationArguments`.

    Ours, unless a vLLM server is asked for, or something is set that only transformers' generate understands.

    Raises:
        ValueError: an engine is asked for that is not there.
    """
    settings = {k: v for k, v in (args.generation_kwargs or {}).items() if k not in ("stop", "stop_strings")}
    if args.use_transformers_continuous_batching:
        raise ValueError(
            "use_transformers_continuous_batching=True is not in this version; leave it out: the local engine lets completions "
            "leave the batch and others take their places too."
        )
    if args.use_vllm:
        if args.vllm_mode != "server":
            raise ValueError("use_vllm=True with vllm_mode='colocate' is not in this version; set vllm_mode='server'.")
        from posttrain.rl.generation.vllm import VLLMServerGenerator

        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        if args.vllm_structured_outputs_regex:
            settings["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}
        return VLLMServerGenerator(url, args.vllm_server_timeout, args.vllm_group_port, settings)
    if args.cache_implementation:
        settings["cache_implementation"] = args.cache_implementation
    return TransformersGenerator(tokenizer, settings) if settings else LocalGenerator(tokenizer)
