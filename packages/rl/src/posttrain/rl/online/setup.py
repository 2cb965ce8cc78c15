"""Sets up a trainer that samples: its prompts, its environments, and what its model can do."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from posttrain.core.data.samplers import columns_of, is_stream, transforms_rows
from posttrain.core.errors import DataError, missing
from posttrain.core.training.override_checks import is_stock
from posttrain.core.training.preflight import Parts, Problem
from posttrain.lm.attention import router_replay, varlen_attention
from posttrain.lm.images.image_positions import ImageExample
from posttrain.lm.preparation.rows import is_invoked
from posttrain.rl.agents.agent import Agent, within
from posttrain.rl.agents.command import AgentCommand
from posttrain.rl.agents.environments import Environments
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.online.sampler import encode
from posttrain.rl.policy.logprobs import sharing_problem
from posttrain.rl.rewards.process import RolloutProcess
from posttrain.rl.rewards.scorers import NO_REWARDS, RewardModel, reward_functions, reward_problems
from posttrain.rl.rewards.scoring import Rewards
from posttrain.rl.samples.prompts import PromptCodec, image_problems, prompt_problems, rows_listed
from posttrain.rl.samples.samples import Sample

if TYPE_CHECKING:
    from posttrain.rl.online.trainer import RolloutTrainer

logger = logging.getLogger(__name__)


def problems(args: RolloutConfig, parts: Parts, trainer: type[RolloutTrainer]) -> Iterator[Problem]:
    """Problems of a `trainer` with prompts, with what answers the policy, and with reward functions."""
    name = trainer.__name__
    yield from prompt_problems(args, parts)
    yield from image_problems(args, parts, trainer.reads_images)
    names = [name for name in ("rollout_func", "tools", "environment_factory", "agent") if parts.others[name]]
    yield from turn_problems(args, names)
    agent = parts.others["agent"]
    if agent and isinstance(Agent.of(agent).run, AgentCommand):  # which reaches the policy over HTTP alone
        if error := missing("starlette", "posttrain-rl[agents]", "agents that speak HTTP"):
            yield error
    if parts.compute_metrics is not None:
        yield (
            f"compute_metrics is never called by {name}: its evaluations sample and score completions, and log the "
            "rewards. Use a reward function as a metric, or add to the record in a callback's on_evaluate"
        )
    given = parts.others["reward_funcs"]
    if trainer.learns_from_rewards or given is not None:
        makes_rewards = parts.others["environment_factory"] or parts.others["agent"]
        rows = parts.train_dataset
        may_add = bool(names) or not trainer.__module__.startswith("posttrain.") or transforms_rows(rows)
        yield from reward_problems(given, args.reward_weights, makes_rewards, () if may_add else columns_of(rows))
    for part in trainer.does_not_take:
        if parts.others.get(part):
            yield f"{name} reads the prompts of rows, with one sequence of tokens each; leave out {part}"


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
        if args.router_replay and name == "rollout_func":
            yield (
                "router_replay=True replays the experts chosen in sampling, and of what a rollout_func returns they "
                "are not known; leave one of the two out"
            )


def rows_without_prompts(args: RolloutConfig) -> list[dict[str, Any]]:
    """Rows for environments whose ``reset()`` makes the prompts: as many as the run reads, or those of one rollout."""
    rollouts = 1
    if args.max_staleness:
        micro_batches = args.max_steps * args.gradient_accumulation_steps
        rollouts = -(-micro_batches // (args.steps_per_generation * args.num_iterations))
        rollouts *= args.dynamic_sampling_rounds if args.dynamic_sampling else 1
    return [{}] * (rollouts * args.generation_batch_size // args.num_generations)


def make_rewards(args: RolloutConfig, parts: Parts, learns: bool) -> tuple[Environments, Rewards]:
    """The environments, and the reward functions, theirs among them; `parts` gets the agent, and rows where others make
    the prompts. Raises ValueError if there are none, and the trainer `learns` from them.
    """
    given = parts.others
    agent = given["agent"] = None if given["agent"] is None else Agent.of(given["agent"])
    makes_prompts = given["environment_factory"] is not None or agent is not None
    if parts.train_dataset is None and makes_prompts and args.max_steps > 0:
        parts.train_dataset = rows_without_prompts(args)
    process = RolloutProcess(args.seed, args.reward_timeout) if args.rollout_process else None
    if process is not None and agent is not None:
        agent = given["agent"] = within(agent, process)
    limits = args.max_tool_calling_iterations, process, args.max_tool_calling_seconds
    environments = Environments(given["tools"], given["environment_factory"], *limits)
    tokenizers = given["reward_processing_classes"]
    functions = reward_functions(given["reward_funcs"], tokenizers, args.trust_remote_code)
    if process is not None:
        functions = [one if isinstance(one, RewardModel) else process.reward(one) for one in functions]
    own = environments.reward_functions + ([] if agent is None else [agent.reward_function()])
    functions += own
    if not functions and learns:
        raise ValueError(NO_REWARDS)
    if args.curriculum and not functions:
        raise ValueError("curriculum=True counts what passes by a reward function, and there is none: pass one.")
    return environments, Rewards(functions, args, len(own))


def check_invocation(
    dataset: Any, codec: PromptCodec, environments: Environments, invocation: Sequence[int], refuses: bool
) -> None:
    """Warn of prompts to train on without `invocation`, the tokens at which the adapter begins (aLoRA); a DataError
    instead, if `refuses`.
    """
    if not invocation or dataset is None or is_stream(dataset) or "prompt" not in dataset[0]:
        return
    prompts = (tokens_of(dataset[number], codec, environments) for number in range(len(dataset)))
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


def generates_alone(trainer: RolloutTrainer) -> bool:
    """Whether no process waits for another while it generates, so that it can be left there."""
    dist, is_ours = trainer.dist, trainer.rollout_func is None and is_stock(trainer, "generate", "RolloutTrainer")
    # A session is of engines that generate jointly; a method that is not ours may meet the other processes.
    return dist.num_processes == 1 or (dist.peers == 1 and is_ours and trainer.sampler.session is nullcontext)


def tokens_of(row: dict[str, Any], codec: PromptCodec, environments: Environments) -> Sequence[int]:
    """The tokens of the prompt of a row, with what its tools add."""
    schemas = environments.schemas_of(Sample(row, row["prompt"], []))
    return encode(row, row["prompt"], schemas, codec)[0]


def shares_prompts(
    models: list[nn.Module], args: RolloutConfig, batch_size: int, example: ImageExample | None, router_coef: float
) -> bool:
    """Whether completions, `batch_size` of a micro-batch, go behind one copy of their prompt in training; if so,
    `models` are prepared for it. `router_coef` weighs the routers' loss. Raises ValueError where it is asked for, and a
    model cannot.
    """
    wanted = args.share_prompts
    if wanted is False or args.num_generations == 1 or (wanted is None and batch_size == 1):
        return False
    problem = sharing_problem(models, example, router_coef, args.torch_compile)
    if problem is None:
        for model in models:
            varlen_attention.enable_segments(model, example)
        if isinstance(args.pad_to_multiple_of, int):
            why = "the completions of a prompt are one row, which has no padding; share_prompts=False pads each of them"
            logger.warning("pad_to_multiple_of=%d has no effect: %s.", args.pad_to_multiple_of, why)
        return True
    if wanted:
        raise ValueError(f"share_prompts=True cannot be had: {problem}")
    logger.info("The prompt is read once for each completion: %s", problem)
    return False


def enable_router_replay(model: nn.Module, sees: bool) -> None:
    """Let `model` replay the experts chosen in sampling; a ValueError where it cannot, or prompts have images
    (`sees`).
    """
    problem = "rows with images are not laid out with their routes." if sees else router_replay.problem_of(model)
    if problem:
        raise ValueError(f"router_replay=True: {problem} Set it to False.")
    router_replay.enable(model)
