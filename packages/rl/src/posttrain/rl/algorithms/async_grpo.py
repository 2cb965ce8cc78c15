"""GRPO that samples on vLLM servers while it trains, under trl's names: `posttrain.rl.algorithms.grpo` with its
defaults.

Completions are at most `max_staleness` optimizer steps old when they are learned from, each token is weighted by the
ratio of the policy to the weights that wrote it, and weights change while completions are written; see
`posttrain.rl.online.asynchronous`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from posttrain.core.config import opt
from posttrain.core.fields.old_names import Removed
from posttrain.core.optim.lr_scheduler import SCHEDULES
from posttrain.rl.algorithms.grpo import GRPOConfig, GRPOTrainer
from posttrain.rl.generation.protocol import Generator
from posttrain.rl.losses.policy_losses import LOSSES
from posttrain.rl.online.arguments import AsyncArguments, refuse_loop_of_trl


@dataclass
class AsyncGRPOConfig(AsyncArguments, GRPOConfig):
    """Arguments of `AsyncGRPOTrainer`: those of `GRPOTrainer`, of which some have other defaults."""

    lr_scheduler_type: str = opt(
        "constant", "Curve that the learning rate follows over the run, after the warm-up.", choices=SCHEDULES
    )
    loss_type: str = opt(
        "bnpo",
        "A loss in `posttrain.rl.losses.policy_losses.LOSSES`, which also sets its normalization.",
        choices=tuple(LOSSES),
    )

    OLD_NAMES = {
        "fork_threshold_tokens": Removed(
            "answers are learned from as they were sampled, and a changed history begins a sequence.", harmless=None
        ),
    }


class AsyncGRPOTrainer(GRPOTrainer):
    """Trains a policy on groups of completions that are sampled meanwhile.

    Args:
        rollout_worker, weight_transfer: of trl; refused: an engine of your own is passed as `generator`.

    The other arguments are those of `GRPOTrainer`.

    Raises:
        ValueError: `rollout_worker` or `weight_transfer` is given.
    """

    config_class: type[AsyncGRPOConfig] = AsyncGRPOConfig
    args: AsyncGRPOConfig
    tag_names = ("posttrain", "async-grpo")

    def __init__(
        self,
        model: nn.Module | str,
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
        generator: Generator | None = None,
        **others: Any,
    ) -> None:
        refuse_loop_of_trl(rollout_worker=rollout_worker, weight_transfer=weight_transfer)
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            tools=tools,
            environment_factory=environment_factory,
            generator=generator,
            **others,
        )
