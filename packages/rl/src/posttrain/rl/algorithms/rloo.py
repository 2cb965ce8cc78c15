r"""REINFORCE Leave-One-Out, Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740.

A completion :math:`y_i` is one action, and its baseline the mean reward of the others of its group. With
:math:`R_i = r_i - \beta \log(\pi(y_i|x) / \pi_{ref}(y_i|x))`, eq. 8 is the gradient

.. math:: \frac{1}{G} \sum_i \Big(R_i - \frac{1}{G - 1} \sum_{j \ne i} R_j\Big) \nabla \log\pi(y_i|x)

Here it is that of PPO's clipped surrogate, for several steps on a rollout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from posttrain.compat.trainer_names import reads_from_arguments
from posttrain.core.config import Resolved, opt
from posttrain.core.errors import warn
from posttrain.core.fields.old_names import Removed, Renamed
from posttrain.core.training.preflight import passed_on, renamed_arguments
from posttrain.rl.losses.advantages import leave_one_out_advantages, total_rewards, whitened
from posttrain.rl.losses.policy_losses import clipped, of_trajectory
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.online.reporting import log_clipping
from posttrain.rl.online.trainer import RolloutTrainer
from posttrain.rl.policy.logprobs import CompletionLogps


@dataclass
class RLOOConfig(RolloutConfig):
    """Arguments of `RLOOTrainer`."""

    num_generations: Resolved[int | None, int] = opt(
        2, "Completions of each prompt: a group, compared with one another.", min=2
    )
    beta: float = opt(0.05, "Weight of the divergence from the reference model, taken off the rewards. 0: none.", min=0)
    normalize_advantages: bool = opt(False, "Normalize the advantages of a rollout to mean 0 and standard deviation 1.")
    reward_clip_range: list[float] | None = opt(None, "Bounds (low, high) that rewards are kept within.", max=math.inf)

    #: Of trl's trainer of this name before 0.23, and its version 0.22.
    OLD_NAMES = {
        "rloo_k": Renamed("num_generations"),
        "num_ppo_epochs": Renamed("num_iterations"),
        "response_length": Renamed("max_completion_length"),
        "kl_coef": Renamed("beta"),
        "cliprange": Renamed("epsilon"),
        "normalize_advantage": Renamed("normalize_advantages"),
        "reward_model_path": Renamed("reward_funcs", lambda path: [path]),
        "token_level_kl": Removed("the divergence is that of whole completions.", harmless=(None, False)),
        "normalize_reward": Removed("set normalize_advantages=True.", harmless=(None, False)),
        "missing_eos_penalty": Removed("write a reward function that looks at the end of a completion."),
        "total_episodes": Removed("set max_steps; an optimizer step has per_device_train_batch_size x accumulation."),
        "num_mini_batches": Removed("set steps_per_generation.", harmless=(None, 1)),
        "local_rollout_forward_batch_size": Removed("completions are scored in micro-batches.", harmless=None),
        "num_sample_generations": Removed("set log_completions=True.", harmless=(None, 0, 10)),
        "stop_token": Removed("a completion ends at the model's end tokens.", harmless=(None, "eos")),
        "stop_token_id": Removed("a completion ends at the model's end tokens."),
        "exp_name": Removed("set run_name.", harmless=None),
        "dataset_num_proc": Removed("prompts are read when they are sampled from.", harmless=None),
    }

    def _problems(self) -> Iterator[str]:
        bounds = self.reward_clip_range
        numbers = bounds is None or (len(bounds) == 2 and all(isinstance(bound, (int, float)) for bound in bounds))
        if not numbers or (bounds is not None and not bounds[0] < bounds[1]):  # nor where one is NaN
            yield f"reward_clip_range={bounds!r} must be two numbers, the lower one first"


@reads_from_arguments("normalize_advantages", "reward_clip_range")
class RLOOTrainer(RolloutTrainer):
    """Trains a policy by REINFORCE on whole completions. Arguments: see `RolloutTrainer`.

    Those of trl's trainer of this name before 0.23 are taken too: ``config``, ``policy``, ``ref_policy``, the reference
    where it is not what the policy begins with, and ``reward_model``.
    """

    config_class = RLOOConfig
    args: RLOOConfig
    tag_names = ("posttrain", "rloo")
    average = "sequences"
    needs_kl_of_samples = True
    OLD_ARGUMENTS: ClassVar[dict[str, str]] = RolloutTrainer.OLD_ARGUMENTS | {
        "config": "args",
        "policy": "model",
        "reward_model": "reward_funcs",
    }

    def __init__(
        self,
        model: nn.Module | str | None = None,
        reward_funcs: Any = None,
        args: RLOOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        ref_policy: nn.Module | None = None,
        **others: Any,
    ) -> None:
        if others.pop("data_collator", None) is not None:
            warn(
                "RLOOTrainer: data_collator= has no effect: prompts are tokenized when they are sampled from.",
                FutureWarning,
            )
        given = passed_on(locals(), "ref_policy")
        if ref_policy is not None and not isinstance(ref_policy, nn.Module):
            raise TypeError(f"ref_policy is of type {type(ref_policy).__name__}; pass a loaded model.")
        self.given_reference = ref_policy
        super().__init__(**renamed_arguments(type(self), given))

    def compute_advantages(self, rewards: torch.Tensor, group_size: int, kl: torch.Tensor | None) -> torch.Tensor:
        """Equation 8 of the paper, of rewards less ``beta`` times the divergence (section 2)."""
        total = total_rewards(rewards, self.rewards.weights)
        if self.args.reward_clip_range is not None:
            total = total.clamp(*self.args.reward_clip_range)
        if kl is not None:
            total = total - self.beta * kl
            self.log_metric("reward_kl", kl.mean())
        advantages = leave_one_out_advantages(total, group_size)
        return whitened(advantages) if self.args.normalize_advantages else advantages

    def policy_loss(self, policy: CompletionLogps, inputs: dict[str, Any]) -> torch.Tensor:
        """PPO's surrogate of whole completions: (N, 1).

        A completion is one action, and its ratio a product over its tokens, those of all sequences of a trajectory.
        """
        mask = inputs["loss_mask"]
        old_logps = inputs.get("old_logps", policy.logps.detach())
        log_ratio = ((policy.logps - old_logps) * mask).sum(1, keepdim=True)
        ratio = of_trajectory(log_ratio, inputs.get("trajectories")).exp()
        advantages = inputs["advantages"].unsqueeze(1)
        of_all, bounds = torch.ones_like(ratio), (self.args.epsilon, self.epsilon_high)
        log_clipping(self.metrics, ratio.detach(), advantages, of_all, *bounds)
        if "ref_logps" in inputs and not self.model.training:  # in training it gets each rollout
            self.metrics.add_sum("kl", ((policy.logps - inputs["ref_logps"]).detach() * mask).sum(), mask.sum())
        return clipped(ratio, advantages, *bounds)
