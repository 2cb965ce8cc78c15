"""GRPO that samples on vLLM servers while it trains, under trl's names: `posttrain.rl.algorithms.grpo` with its
defaults.

Completions are at most `max_staleness` optimizer steps old when they are learned from, each token is weighted by the
ratio of the policy to the weights that wrote it, and weights change while completions are written; see
`posttrain.rl.online.asynchronous`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from posttrain.core.config import opt, other_default
from posttrain.core.fields.old_names import Removed, Renamed
from posttrain.core.training.preflight import passed_on
from posttrain.rl.algorithms.grpo import GRPOConfig, GRPOTrainer
from posttrain.rl.online.arguments import RolloutConfig


@dataclass
class AsyncArguments:
    """What trl's asynchronous trainers do not share with the others: samples of vLLM servers while the policy is
    trained, and the settings of trl's loop that mean nothing here.
    """

    logging_steps: float | str = other_default(RolloutConfig, "logging_steps", 1)
    max_completion_length: int = other_default(RolloutConfig, "max_completion_length", 2048)
    max_staleness: int = opt(
        4, "Optimizer steps between the weights that sample a completion and the first step that learns from it.", min=1
    )
    use_vllm: bool = opt(True, "Generate with vLLM.")
    vllm_mode: str = opt("server", "vLLM on a server.", choices=("server",))
    vllm_server_base_url: str | None = other_default(RolloutConfig, "vllm_server_base_url", "http://localhost:8000")
    vllm_request_timeout: float = other_default(
        RolloutConfig, "vllm_request_timeout", 600.0, aliases=("request_timeout",)
    )

    OLD_NAMES: ClassVar[dict[str, Renamed | Removed]] = {
        "token_budget": Removed("micro-batches are completions; set per_device_train_batch_size.", harmless=(None,)),
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


@dataclass
class AsyncGRPOConfig(AsyncArguments, GRPOConfig):
    """Arguments of `AsyncGRPOTrainer`: those of `GRPOTrainer`, of which some have other defaults."""

    lr_scheduler_type: str = other_default(GRPOConfig, "lr_scheduler_type", "constant")
    loss_type: str = other_default(GRPOConfig, "loss_type", "bnpo")

    OLD_NAMES = {
        "fork_threshold_tokens": Removed(
            "answers are learned from as they were sampled, and a changed history begins a sequence.", harmless=None
        ),
    }


class AsyncGRPOTrainer(GRPOTrainer):
    """Trains a policy on groups of completions that are sampled meanwhile. Arguments: see `GRPOTrainer`.

    trl's `rollout_worker` and `weight_transfer` raise a ValueError: an engine of your own is passed as `generator`.
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
        refuse_loop_of_trl(rollout_worker=rollout_worker, weight_transfer=weight_transfer)
        super().__init__(**passed_on(locals(), "rollout_worker", "weight_transfer"))
