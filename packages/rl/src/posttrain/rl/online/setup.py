"""Sets up a trainer that samples: its prompts, its environments, and what its model can do."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from posttrain.core.data.samplers import is_stream
from posttrain.core.errors import DataError
from posttrain.lm.attention import router_replay, varlen_attention
from posttrain.lm.images.image_positions import ImageExample
from posttrain.lm.preparation.rows import is_invoked
from posttrain.rl.agents.environments import Environments
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.online.sampler import encode
from posttrain.rl.policy.shared_prefix import sharing_problem
from posttrain.rl.samples.prompts import PromptCodec, check_prompts, rows_listed, with_room
from posttrain.rl.samples.samples import Sample

logger = logging.getLogger(__name__)


def turn_problems(args: RolloutConfig, names: list[str]) -> Iterator[str]:
    """What does not go together with further turns of the policy, which the arguments called `names` make."""
    if "agent" in names and len(names) > 1:
        yield f"agent makes whole episodes, and {names[0]} makes others; pass one of the two"
    for name in names:
        if args.data_parallel_size < args.world_size:
            yield (
                f"{name} may answer the processes that split a matrix (tp_size) or a row (cp_size) differently, and "
                "they must sample alike. Set both to 1, or shard the model by fsdp"
            )
        if args.router_replay:
            yield (
                f"router_replay=True replays the experts chosen in sampling, and of the turns of {name} they are not "
                "known; leave one of the two out"
            )


def rows_without_prompts(args: RolloutConfig) -> list[dict[str, Any]]:
    """Rows for environments whose ``reset()`` makes the prompts: as many as the run reads, or those of one rollout."""
    rollouts = 1
    if args.max_staleness:
        micro_batches = args.max_steps * args.gradient_accumulation_steps
        rollouts = -(-micro_batches // (args.steps_per_generation * args.num_iterations))
        rollouts *= args.dynamic_sampling_rounds if args.dynamic_sampling else 1
    return [{}] * (rollouts * args.generation_batch_size // args.num_generations)


def prompts_with_room(
    datasets: Any, name: str, at_least: int, codec: PromptCodec, environments: Environments, context: Any, drops: bool
) -> Any:
    """`datasets`, one or several by name, without prompts that are too long; see `with_room`."""

    def fitting(dataset: Any, name: str) -> Any:
        def count(row: dict[str, Any]) -> int:
            return len(_tokens_of(row, codec, environments))

        found = None if dataset is None else with_room(dataset, name, count, context, drops)
        if found is not dataset:
            check_prompts(found, name, at_least)
        return found

    if isinstance(datasets, Mapping):
        return {key: fitting(dataset, key) for key, dataset in datasets.items()}
    return fitting(datasets, name)


def check_invocation(
    dataset: Any, codec: PromptCodec, environments: Environments, invocation: Sequence[int], refuses: bool
) -> None:
    """Warn of prompts to train on without `invocation`, the tokens at which the adapter begins (aLoRA).

    Raises:
        DataError: instead, if `refuses`.
    """
    if not invocation or dataset is None or is_stream(dataset) or "prompt" not in dataset[0]:
        return
    prompts = (_tokens_of(dataset[number], codec, environments) for number in range(len(dataset)))
    without = [number for number, ids in enumerate(prompts) if not is_invoked([*ids, -1], invocation)]
    if not without:
        return
    problem = (
        f"train_dataset: {len(without)} of {len(dataset)} prompts lack alora_invocation_tokens, at which the adapter "
        f"begins ({rows_listed(without)}): their completions do not change it, unless they hold these tokens themselves"
    )
    if refuses:
        raise DataError(f"{problem}. End each prompt with these tokens, or filter those rows.")
    logger.warning("%s. End each prompt with these tokens.", problem)


def _tokens_of(row: dict[str, Any], codec: PromptCodec, environments: Environments) -> Sequence[int]:
    schemas = environments.schemas_of(Sample(row, row["prompt"], []))
    return encode(row, row["prompt"], schemas, codec)[0]


def shares_prompts(
    models: list[nn.Module], args: RolloutConfig, batch_size: int, example: ImageExample | None, router_coef: float
) -> bool:
    """Whether completions go behind one copy of their prompt in training; if so, `models` are prepared for it.

    Args:
        batch_size: completions of a micro-batch. router_coef: weight of the routers' load-balancing loss.

    Raises:
        ValueError: it is asked for, and a model cannot.
    """
    wanted = args.share_prompts
    if wanted is False or args.num_generations == 1 or (wanted is None and batch_size == 1):
        return False
    problem = sharing_problem(models, example, router_coef, args.torch_compile)
    if problem is None:
        for model in models:
            varlen_attention.enable_segments(model, example)
        return True
    if wanted:
        raise ValueError(f"share_prompts=True cannot be had: {problem}")
    logger.info("The prompt is read once for each completion: %s", problem)
    return False


def enable_router_replay(model: nn.Module, sees: bool) -> None:
    """Let `model` replay the experts chosen in sampling.

    Args:
        sees: there are prompts with images.

    Raises:
        ValueError: it cannot.
    """
    problem = "rows with images are not laid out with their routes." if sees else router_replay.problem_of(model)
    if problem:
        raise ValueError(f"router_replay=True: {problem} Set it to False.")
    router_replay.enable(model)
