"""Selects the generation engine from a trainer's arguments, and copies the policy for one that samples meanwhile."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from posttrain.core.distributed.sharding import is_in_pieces
from posttrain.core.models.wrapping import config_of, is_peft_model, unwrap
from posttrain.lm.images.image_positions import ImageExample
from posttrain.lm.loading.loading import has_routers
from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.generation.protocol import Completions, Generator, Sampling
from posttrain.rl.generation.sampling import rope_limit
from posttrain.rl.generation.transformers import TransformersGenerator

logger = logging.getLogger(__name__)

#: What generation_kwargs say of `Sampling`, in the words of transformers and of vLLM, and the argument for the same.
FOLDED = {
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
ENDS = ("stop", "stop_strings", "eos_token_id", "stop_token_ids")
_WHY_REFUSED = {
    "it counts the prompt too; set max_completion_length": "max_length",
    "set num_generations": "n num_return_sequences best_of",
    "each completion has a seed of its own, made from the argument seed; leave it out": "seed",
    "it is that of the tokenizer; leave it out": "pad_token_id",
    "nothing reads it; leave it out": """
        bos_token_id decoder_start_token_id renormalize_logits output_attentions output_hidden_states output_scores
        output_logits return_dict_in_generate logprobs prompt_logprobs detokenize
    """,
    "tokens are drawn by posttrain's sampler, which has none; set top_p, top_k or min_p": """
        typical_p epsilon_cutoff eta_cutoff top_h watermarking_config
    """,
}
#: What of generation_kwargs no engine can follow, and what to do instead.
REFUSED = {name: why for why, names in _WHY_REFUSED.items() for name in names.split()}


def refused(args: Any) -> Iterator[str]:
    """What of ``args.generation_kwargs`` the engine for `args` would not follow, as sentences."""
    for name, value in settings_of(args).items():
        if (why := REFUSED.get(name)) and value is not None:
            yield f"generation_kwargs: {name}={value!r} is not taken: {why}"
        elif args.generation_batch_invariant or args.use_transformers_continuous_batching:
            invariant, continuous = "generation_batch_invariant", "use_transformers_continuous_batching"
            yield (
                f"generation_kwargs: {name!r} is followed by transformers' generate alone; leave it out, or set "
                f"{invariant if args.generation_batch_invariant else continuous}=False"
            )


def cause_of_gap(model: nn.Module, settings: Mapping[str, Any], lengths: torch.Tensor, wrong: torch.Tensor) -> str:
    """Why log-probabilities of an engine may not be those of `model`, as a sentence.

    Args:
        settings: of the engine. lengths: (N,) tokens of each prompt. wrong: (N,) whether those of its completion are.
    """
    config, short = config_of(model), lengths < lengths.max()
    if settings:
        return f"The cause may be generation_kwargs, which change logits: {', '.join(sorted(settings))}."
    if rope_limit(model) < math.inf:
        return "The cause may be rotary embeddings whose angles depend on the length of the text."
    if short.any() and wrong[short].any() and not wrong[~short].any():
        return "The cause may be padding: completions of the longest prompts are right, and those of others are not."
    if is_peft_model(model):
        kinds = sorted({one.peft_type for one in unwrap(model).peft_config.values()})
        return f"The cause may be the adapter ({', '.join(kinds)})."
    if has_routers(config):
        return "The cause may be the routers, which choose other experts in sampling than in training."
    return "The cause is the engine: report it with the model's name."


def make_generator(tokenizer: Any, args: Any, example: ImageExample | None = None) -> Generator:
    """The engine for `args`, a `posttrain.rl.online.arguments.GenerationArguments`.

    The local engine, unless another is set or an option is set that only transformers' generate supports.

    Args:
        example: of a model that sees images, what it is tried with.

    Raises:
        ValueError: the chosen engine does not support another setting.
    """
    settings = settings_of(args)
    if args.use_vllm:
        return _vllm(args, settings)
    if args.use_transformers_continuous_batching:
        from posttrain.rl.generation.continuous import ContinuousGenerator

        return ContinuousGenerator(tokenizer, args.transformers_continuous_batching_config)
    if settings:
        local: Generator = TransformersGenerator(tokenizer, settings)
    else:
        limits = args.generation_max_rows, args.generation_cache_tokens
        local = LocalGenerator(tokenizer, *limits, example, args.router_replay, args.generation_batch_invariant)
    return CopiedGenerator(local) if args.max_staleness else local


def shares_prompts(args: Any) -> bool:
    """Whether the engine for `args` is the local one, whose cache holds a prompt once for all its completions."""
    return not (args.use_vllm or args.use_transformers_continuous_batching or settings_of(args))


def settings_of(args: Any) -> dict[str, Any]:
    """The generation_kwargs of `args` that are for the engine, and not for `Sampling`, and its kind of cache."""
    given = args.generation_kwargs or {}
    given = given | ({"cache_implementation": args.cache_implementation} if args.cache_implementation else {})
    return {k: v for k, v in given.items() if k not in (*FOLDED, *ENDS, "do_sample")}


def server_url(args: Any) -> str:
    """The address of the server that samples; of several, between commas."""
    return args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"


def _vllm(args: Any, settings: dict[str, Any]) -> Generator:
    if args.vllm_structured_outputs_regex:
        settings["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}
    if args.vllm_mode == "server":
        from posttrain.rl.generation.vllm import VLLMServerGenerator

        return VLLMServerGenerator(
            server_url(args),
            args.vllm_server_timeout,
            args.vllm_group_port,
            settings,
            folder=args.vllm_weight_folder,
            request_timeout=args.vllm_request_timeout,
            in_flight=args.max_staleness > 0,
            with_routes=args.router_replay,
        )
    from posttrain.rl.generation.vllm_colocated import VLLMColocatedGenerator

    engine = {
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "max_model_len": args.vllm_max_model_length,
        "model_impl": args.vllm_model_impl,
        "trust_remote_code": args.trust_remote_code,
    }
    engine |= {"enable_return_routed_experts": True} if args.router_replay else {}
    if args.bf16 or args.fp16:  # what the trainer computes in
        engine["dtype"] = "bfloat16" if args.bf16 else "float16"
    return VLLMColocatedGenerator(engine, settings, args.vllm_enable_sleep_mode, args.vllm_tensor_parallel_size)


class CopiedGenerator:
    """A local engine with its own weights: a second copy of the model in memory.

    Generation and training share the device, so this gains time where rewards, tools or environments are slow.

    Args:
        generator: generates with the model that it is given.
    """

    has_own_weights = True

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self._copy: nn.Module | None = None

    @torch.no_grad()
    def sync_weights(self, model: nn.Module) -> None:
        """Copy the weights. Raise ValueError if the model is sharded."""
        model = unwrap(model)
        if is_in_pieces(*model.parameters()):
            raise ValueError(
                "max_staleness above 0 generates with a copy of the weights, and this model is sharded over several "
                "processes. Set use_vllm=True with vllm_mode='server', or max_staleness=0."
            )
        if self._copy is None:
            self._copy = copy.deepcopy(model).requires_grad_(False).eval()  # without the gradients
            self.generator.sync_weights(self._copy)
            return
        tensors = ([*one.parameters(), *one.buffers()] for one in (self._copy, model))
        for mine, theirs in zip(*tensors, strict=True):
            mine.copy_(theirs, non_blocking=True)

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> Completions:
        """See `Generator.generate`."""
        return self.generator.generate(prompts, n, sampling, seeds)

    def steps(self) -> Any:
        """See `posttrain.rl.generation.local.LocalGenerator.steps`."""
        make = getattr(self.generator, "steps", None)
        return None if make is None else make()
