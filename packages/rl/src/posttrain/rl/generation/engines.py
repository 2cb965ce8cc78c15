"""Selects the generation engine from a trainer's arguments."""

from __future__ import annotations

import logging
from typing import Any

from posttrain.core.models.image_positions import ImageExample
from posttrain.rl.generation.copied import CopiedGenerator
from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.generation.protocol import Generator
from posttrain.rl.generation.transformers import TransformersGenerator

logger = logging.getLogger(__name__)


def make_generator(tokenizer: Any, args: Any, example: ImageExample | None = None) -> Generator:
    """The engine for `args`, a `posttrain.rl.rollout_config.GenerationArguments`.

    The local engine, unless another is set or an option is set that only transformers' generate supports.

    Args:
        example: of a model that sees images, what it is tried with.

    Raises:
        ValueError: the chosen engine does not support another setting.
    """
    settings = _settings(args)
    if args.use_vllm:
        return _vllm(tokenizer, args, settings)
    if args.use_transformers_continuous_batching:
        from posttrain.rl.generation.continuous import ContinuousGenerator

        return ContinuousGenerator(tokenizer, args.transformers_continuous_batching_config, settings)
    local: Generator = LocalGenerator(
        tokenizer, args.generation_max_rows, args.generation_cache_tokens, example, args.router_replay
    )
    if not shares_prompts(args):
        cache = {"cache_implementation": args.cache_implementation} if args.cache_implementation else {}
        local = TransformersGenerator(tokenizer, settings | cache)
    return CopiedGenerator(local) if args.max_staleness else local


def shares_prompts(args: Any) -> bool:
    """Whether the engine for `args` is the local one, whose cache holds a prompt once for all its completions."""
    others = args.use_vllm, args.use_transformers_continuous_batching, args.cache_implementation, _settings(args)
    return not any(others)


def _settings(args: Any) -> dict[str, Any]:
    return {k: v for k, v in (args.generation_kwargs or {}).items() if k not in ("stop", "stop_strings")}


def _vllm(tokenizer: Any, args: Any, settings: dict[str, Any]) -> Generator:
    if args.vllm_structured_outputs_regex:
        settings["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}
    if args.vllm_mode == "server":
        from posttrain.rl.generation.vllm import VLLMServerGenerator

        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        return VLLMServerGenerator(
            url, args.vllm_server_timeout, args.vllm_group_port, settings, tokenizer, folder=args.vllm_weight_folder,
            request_timeout=args.vllm_request_timeout, in_flight=args.max_staleness > 0,
        )  # fmt: skip
    from posttrain.rl.generation.vllm_colocated import VLLMColocatedGenerator

    engine = {
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "max_model_len": args.vllm_max_model_length,
        "model_impl": args.vllm_model_impl,
        "trust_remote_code": args.trust_remote_code,
    }
    if args.router_replay:
        engine["enable_return_routed_experts"] = True
    if args.bf16 or args.fp16:  # what the trainer computes in
        engine["dtype"] = "bfloat16" if args.bf16 else "float16"
    return VLLMColocatedGenerator(engine, settings, args.vllm_enable_sleep_mode, args.vllm_tensor_parallel_size)
