"""GRPO that samples on vLLM servers while it trains, under trl's names: `posttrain.rl.algorithms.grpo` with its
defaults.

Completions are at most `max_staleness` optimizer steps old when they are learned from, each token is weighted by the
ratio of the policy to the weights that wrote it, and weights change while completions are written; see
`posttrain.rl.online.asynchronous`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from posttrain.core.config import opt, other_default, value_of
from posttrain.core.errors import checked_args
from posttrain.core.fields.old_names import Removed, Renamed
from posttrain.core.training.preflight import passed_on
from posttrain.rl.algorithms.grpo import GRPOConfig, GRPOTrainer
from posttrain.rl.generation import Sampling
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.online.rollout_worker import RolloutWorker, ScoredCompletion, WeightTransfer, WorkerEngine
from posttrain.rl.rewards.scoring import Scores
from posttrain.rl.samples.samples import Sample


@dataclass
class AsyncArguments:
    """What trl's asynchronous trainers do not share with the others: samples of vLLM servers while the policy is
    trained, and the settings of trl's loop that mean nothing here.
    """

    logging_steps: float | str = other_default(RolloutConfig, "logging_steps", 1)
    max_completion_length: int = other_default(RolloutConfig, "max_completion_length", 2048)
    max_staleness: int = opt(
        4,
        "Optimizer steps between the weights that sample a completion and the first that learns from its rollout.",
        min=1,
    )
    use_vllm: bool = opt(True, "Generate with vLLM.")
    vllm_mode: str = opt("server", "vLLM on a server.", choices=("server",))
    vllm_server_base_url: str | None = other_default(RolloutConfig, "vllm_server_base_url", "http://localhost:8000")
    vllm_request_timeout: float = other_default(
        RolloutConfig, "vllm_request_timeout", 600.0, aliases=("request_timeout",)
    )

    OLD_NAMES: ClassVar[dict[str, Renamed | Removed]] = {
        "token_budget": Removed(
            "micro-batches are completions, and results do not depend on them; per_device_train_batch_size bounds the "
            "memory.",
            harmless=None,
            says_nothing=(None, -1),
        ),
        "max_inflight_tasks": Removed(
            "what max_staleness allows is on its way; set sample_ahead for less, generation_batch_size for more.",
            harmless=(-1,),
        ),
        "queue_maxsize": Removed("max_staleness bounds what waits.", harmless=None),
        "weight_sync_steps": Removed("weights are sent after each optimizer step.", harmless=(1,)),
        "weight_sync_timeout": Removed("set vllm_request_timeout.", harmless=(1800,)),
        "heartbeat_stale_after_s": Removed(
            "rollouts are threads of this process: their errors end the run, and calls that hang are named.",
            harmless=None,
        ),
        "dtype": Removed("set model_init_kwargs={'dtype': ...}.", harmless=(None, "float32")),
    }

    def _problems(self) -> Iterator[str]:
        if not self.use_vllm:
            yield "use_vllm=False leaves nothing to sample with while the policy is trained; use the other trainer"


def refuse_loop_of_trl(**given: Any) -> None:
    """Raise a ValueError that names an object of trl's own asynchronous loop, where one is given."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name} is an object of trl's own loop. Pass an engine as generator: it has generate() and "
                "sync_weights(), see posttrain.rl.generation.protocol."
            )


def worker_engine(worker: Any, transfer: Any, args: Any, given: dict[str, Any]) -> WorkerEngine | None:
    """The engine that a rollout worker and a weight transfer make; None without a worker. Raises ValueError where they
    lack a method, or where the arguments `given` are for completions that the trainer samples itself.
    """
    if worker is None:
        refuse_loop_of_trl(weight_transfer=transfer)
        return None
    needed = {"rollout_worker": (worker, RolloutWorker), "weight_transfer": (transfer, WeightTransfer)}
    for name, (found, protocol) in needed.items():
        names = [n for n in (*vars(protocol), *protocol.__annotations__) if not n.startswith("_")]
        lacks = [] if found is None else [n for n in names if not hasattr(found, n)]
        if lacks:
            raise ValueError(f"{name} has no {', '.join(lacks)}, see posttrain.rl.online.rollout_worker.")
    for name in ("generator", "rollout_func", "agent"):
        if given.get(name) is not None:
            raise ValueError(f"rollout_worker gives whole completions, and {name} others; pass one of the two.")
    for name in ("dynamic_sampling", "curriculum", "router_replay"):
        if value_of(args, name):
            raise ValueError(f"{name}=True chooses among prompts and completions, and a rollout_worker does so itself.")
    # Steps that learn from a rollout after its first one, at most: it may begin in the middle of a window.
    window, parts = args.gradient_accumulation_steps, args.steps_per_generation * args.num_iterations
    later = (window - math.gcd(window, parts) + parts - 1) // window
    if later > args.max_staleness:
        raise ValueError(
            f"Up to {later + 1} optimizer steps learn from a rollout (steps_per_generation={args.steps_per_generation} "
            f"* num_iterations={args.num_iterations} micro-batches, gradient_accumulation_steps={window}): in the last "
            f"its completions are {later} steps old, above max_staleness={args.max_staleness}. Raise max_staleness, or "
            "leave steps_per_generation, generation_batch_size and num_iterations out."
        )
    return WorkerEngine(worker, transfer, args.max_staleness - later, args.heartbeat_stale_after_s)


@dataclass
class AsyncGRPOConfig(AsyncArguments, GRPOConfig):
    """Arguments of `AsyncGRPOTrainer`: those of `GRPOTrainer`, of which some have other defaults."""

    lr_scheduler_type: str = other_default(GRPOConfig, "lr_scheduler_type", "constant")
    loss_type: str = other_default(GRPOConfig, "loss_type", "bnpo")
    vllm_importance_sampling_mode: str = other_default(GRPOConfig, "vllm_importance_sampling_mode", "token_truncate")
    heartbeat_stale_after_s: float = opt(
        300.0, "Seconds after which a rollout_worker that shows no sign of life counts as hung.", above=0
    )

    OLD_NAMES = {
        "fork_threshold_tokens": Removed(
            "answers are learned from as they were sampled, and a changed history begins a sequence.", harmless=None
        ),
    }


class AsyncGRPOTrainer(GRPOTrainer):
    """Trains a policy on groups of completions that are sampled meanwhile. Arguments: see `GRPOTrainer`.

    Args:
        rollout_worker: samples and scores completions in place of an engine, as
            `posttrain.rl.online.rollout_worker.RolloutWorker` says. Its rewards are logged, and its advantages learned
            from; the reward functions are not called, and the rows of `train_dataset` only count the steps of an epoch.
            What would be older than ``max_staleness`` in the last step that learns from it is left out. The first
            process alone talks to it.
        weight_transfer: sends it the weights, as `posttrain.rl.online.rollout_worker.WeightTransfer` says.
    """

    config_class: type[AsyncGRPOConfig] = AsyncGRPOConfig
    args: AsyncGRPOConfig
    tag_names = ("posttrain", "async-grpo")

    def __init__(
        self,
        model: nn.Module | str | None = None,
        reward_funcs: Any = None,
        args: AsyncGRPOConfig | None = None,
        train_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        environment_factory: Any = None,
        rollout_worker: Any = None,
        weight_transfer: Any = None,
        quantization_config: Any = None,
        **others: Any,
    ) -> None:
        given = passed_on(locals(), "rollout_worker", "weight_transfer")
        given["args"] = args = self.config_class() if args is None else checked_args(args, self.config_class)
        self.worker = worker_engine(rollout_worker, weight_transfer, args, given)
        self._advantages = torch.empty(0)
        super().__init__(**given | ({} if self.worker is None else {"generator": self.worker}))
        if self.worker is not None:
            self.worker.on_main, self.learns_from_rewards = self.dist.on_main, False
            self.worker.is_shared = self.dist.num_processes > 1
            self.rollout_maker.are_there = partial(_are_given, weakref.proxy(self))

    def generate(self, samples: list[Sample], sampling: Sampling) -> list[Sample]:
        """As the base's, or completions of the rollout worker in the places of `samples`."""
        if self.worker is None or samples[0].is_evaluated:
            return super().generate(samples, sampling)
        taken = self.dist.broadcast_object(self.worker.take(self.layout.per_process * self.layout.world_size))
        self._advantages = torch.tensor([float(one.advantage) for one in taken])
        if self.dist.is_main:
            self.metrics.add("staleness/dropped", self.worker.dropped)
        return [_in_place_of(sample, taken[sample.place], sampling.eos_token_ids) for sample in samples]

    def score(self, samples: list[Sample]) -> Scores:
        """As the base's, or what the rollout worker has measured."""
        if self.worker is None:
            return super().score(samples)
        given = [sample.extra["metrics"] for sample in samples]
        names, weights = self.rewards.names, self.rewards.weights
        rewards = torch.tensor([[own.get(f"rewards/{name}", math.nan) for name in names] for own in given])
        if rewards.isnan().all():  # it tells the sum alone
            rewards[:, 0] = torch.tensor([own["reward"] for own in given]) / weights[0]
        return Scores(rewards.float(), torch.zeros_like(rewards, dtype=torch.bool), [0.0] * len(names))

    def compute_advantages(self, rewards: torch.Tensor, group_size: int, kl: torch.Tensor | None) -> torch.Tensor:
        """As the base's, or those of the rollout worker."""
        return super().compute_advantages(rewards, group_size, kl) if self.worker is None else self._advantages


def _are_given(trainer: Any, rollouts: int) -> bool:
    """Whether the rollout worker has given completions for the next `rollouts`."""
    trainer.rollout_maker.sync()  # it may write nothing before
    return bool(trainer.worker.has(rollouts * trainer.layout.per_process * trainer.layout.world_size))


def _in_place_of(sample: Sample, one: ScoredCompletion, ends: Sequence[int]) -> Sample:
    """`sample` with the tokens of `one`."""
    ids, mask = [int(token) for token in one.input_ids], [bool(mark) for mark in one.completion_mask]
    start = mask.index(True)
    return replace(
        sample,
        prompt=one.prompt,
        prompt_ids=ids[:start],
        ids=ids[start:],
        learn=mask[start:],
        logps=[float(value) for value in one.old_log_probs[start:]],
        versions=[int(one.model_version)] * len(ids[start:]),
        completion=one.completion,
        finished=ids[-1] in ends,
        extra=sample.extra | {"metrics": one.metrics},
    )
