r"""Group Relative Policy Optimization, Shao et al. 2024, https://arxiv.org/abs/2402.03300, and its successors' losses.

Of completions :math:`o_i` of one prompt with rewards :math:`r_i` and ratios :math:`\rho_{it}` of the policy to the one
that made the rollout, eq. 3 as a loss, for ``loss_type="grpo"``:

.. math::
    A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r)}, \quad
    -\frac{1}{G} \sum_i \frac{1}{|o_i|} \sum_t \min\big(\rho_{it} A_i,
    \mathrm{clip}(\rho_{it}, 1 - \epsilon, 1 + \epsilon) A_i\big) + \beta\,KL(\pi_\theta \| \pi_{ref})

The other losses are in `posttrain.rl.losses.policy_losses`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from posttrain.compat.trainer_names import reads_from_arguments
from posttrain.core.config import opt
from posttrain.core.training.preflight import Parts
from posttrain.rl.losses import credit, policy_losses
from posttrain.rl.losses.advantages import decoupled_advantages, group_advantages, total_rewards
from posttrain.rl.losses.policy_losses import LOSSES, Policy
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.online.reporting import log_clipping
from posttrain.rl.online.trainer import RolloutTrainer
from posttrain.rl.policy.logprobs import CompletionLogps

logger = logging.getLogger(__name__)

OF_TOKENS = ("bnpo", "dr_grpo", "dapo", "cispo")
"""Losses that sum over tokens and divide by a constant."""

UNCLIPPED = ("cispo", "sapo", "vespo")
"""Losses without PPO's clip."""


@dataclass
class GRPOConfig(RolloutConfig):
    """Arguments of `GRPOTrainer`."""

    loss_type: str = opt(
        "dapo",
        "A loss in `posttrain.rl.losses.policy_losses.LOSSES`, which also sets its normalization.",
        choices=tuple(LOSSES),
    )
    importance_sampling_level: str = opt(
        "token",
        "Ratio to the old policy of each token, or of each completion (with loss_type='grpo': GSPO); sequence_token: "
        "of each completion, with each token's gradient and advantage (GSPO-token).",
        choices=("token", "sequence", "sequence_token"),
    )
    scale_rewards: str = opt(
        "group",
        "Standard deviation that advantages are divided by: of the group, of the batch, or none.",
        choices=("group", "batch", "none"),
    )
    multi_objective_aggregation: str = opt(
        "sum_then_normalize",
        "Several rewards are summed and then normalised, or normalised each and then summed (GDPO).",
        choices=("sum_then_normalize", "normalize_then_sum"),
    )
    turn_credit: str = opt(
        "outcome",
        "What each turn of a completion earns: outcome gives all of them the same; process adds the rewards of turns "
        "from it on; returns compares discounted returns of turns; gigpo adds a comparison of the turns of a group "
        "that answer the same.",
        choices=("outcome", "process", "returns", "gigpo"),
    )
    turn_discount: float = opt(1.0, "Weight of the next turn's return in that of a turn (gamma).", min=0, max=1)
    turn_weight: float = opt(1.0, "Weight of what turns earn beside the outcome.", min=0)
    delta: float | None = opt(
        None, "Upper bound of the ratio for tokens with a negative advantage; None: no bound.", above=0, max=math.inf
    )
    sapo_temperature_neg: float = opt(1.05, "Steepness of SAPO's gate for bad tokens.", above=0, needs="loss_type=sapo")
    sapo_temperature_pos: float = opt(1.0, "Steepness of SAPO's gate for good tokens.", above=0, needs="loss_type=sapo")
    vespo_k_pos: float = opt(2.0, "VESPO's exponent k for good completions.", min=0, needs="loss_type=vespo")
    vespo_lambda_pos: float = opt(3.0, "VESPO's rate lambda for good completions.", min=0, needs="loss_type=vespo")
    vespo_k_neg: float = opt(3.0, "VESPO's exponent k for bad completions.", min=0, needs="loss_type=vespo")
    vespo_lambda_neg: float = opt(2.0, "VESPO's rate lambda for bad completions.", min=0, needs="loss_type=vespo")
    use_bias_correction_kl: bool = opt(
        True,
        "Multiply the KL term by the importance ratio, which makes its gradient unbiased (DeepSeek-V3.2).",
        needs="beta",
    )
    top_entropy_quantile: float = opt(
        1.0, "Train only on this share of the tokens, those with the highest entropy.", above=0, max=1
    )
    entropy_coef: float = opt(0.0, "Weight of the entropy bonus; needs the whole logits in memory.", min=0)
    use_adaptive_entropy: bool = opt(False, "Adapt entropy_coef to keep the entropy near entropy_target.")
    entropy_coef_min: float = opt(0.0, "Lower bound of the adapted entropy_coef.", min=0, needs="use_adaptive_entropy")
    entropy_coef_max: float = opt(1.0, "Upper bound of the adapted entropy_coef.", min=0, needs="use_adaptive_entropy")
    entropy_coef_delta: float = opt(
        0.005, "Change of entropy_coef in an optimizer step.", min=0, needs="use_adaptive_entropy"
    )
    entropy_target: float = opt(
        0.2, "Entropy in nats per token below which the bonus applies.", min=0, needs="use_adaptive_entropy"
    )
    off_policy_mask_threshold: float | None = opt(
        None,
        "Leave out completions with a negative advantage whose mean log-ratio to the sampling policy exceeds this.",
        above=0,
        max=math.inf,
    )
    log_completions_hub_repo: str | None = opt(None, "Dataset on the Hub to which completions are uploaded.")

    @property
    def compares_groups(self) -> bool:
        """Whether a completion is compared with the others of its prompt."""
        return True

    def _normalize(self) -> None:
        # Earlier versions took True and False, which are words on a command line.
        earlier = {"true": "group", "false": "none"}
        self.scale_rewards = earlier.get(str(self.scale_rewards).lower(), self.scale_rewards)

    def _problems(self) -> Iterator[str]:
        if self.num_generations == 1 and self.compares_groups:
            yield "num_generations=1 leaves no other completion to compare with; set 2 or more"
        if self.log_completions_hub_repo is not None and not self.log_completions:
            yield "log_completions_hub_repo needs log_completions=True"
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.delta is not None and self.delta <= 1 + high:
            yield f"delta={self.delta} must be above 1 + epsilon_high, or it undoes the clip"
        if self.delta is not None and self.loss_type in UNCLIPPED:
            yield f"delta has no effect with loss_type={str(self.loss_type)!r}, which does not clip; leave it out"
        if self.turn_credit != "outcome" and self.multi_objective_aggregation == "normalize_then_sum":
            yield f"turn_credit={self.turn_credit!r} sums rewards; leave out multi_objective_aggregation"
        if self.turn_credit != "outcome" and self.loss_type == "vespo":
            yield f"turn_credit={self.turn_credit!r} does not go with loss_type='vespo', which weighs whole completions"
        if self.turn_credit == "gigpo" and self.scale_rewards == "batch":
            yield "turn_credit='gigpo' compares turns within groups; set scale_rewards to 'group' or 'none'"
        if self.entropy_coef_min > self.entropy_coef_max:
            yield f"entropy_coef_min={self.entropy_coef_min} must not be above entropy_coef_max={self.entropy_coef_max}"


@reads_from_arguments(
    *"importance_sampling_level loss_type multi_objective_aggregation off_policy_mask_threshold".split(),
    *"scale_rewards top_entropy_quantile use_adaptive_entropy".split(),
)
class GRPOTrainer(RolloutTrainer):
    """Trains a policy on groups of completions of the same prompt.

    Arguments: see `RolloutTrainer`.
    """

    config_class = GRPOConfig
    args: GRPOConfig
    tag_names = ("posttrain", "grpo")
    corrects_itself = True

    def look_at_model(self, parts: Parts) -> None:
        """As the base's; makes the entropy bonus, and says what of the loss is unusual."""
        super().look_at_model(parts)
        args, kind, level = self.args, self.args.loss_type, self.args.importance_sampling_level
        if kind == "luspo" and level == "token":
            logger.warning(
                "loss_type='luspo' is meant for ratios of sequences; set importance_sampling_level='sequence'."
            )
        if kind == "cispo" and args.epsilon_high is None:
            logger.warning("loss_type='cispo' bounds its weights by epsilon_high, %g here; papers use 5.", args.epsilon)
        if kind in OF_TOKENS and level != "token":
            logger.warning(
                f"importance_sampling_level={level!r} with loss_type={kind!r} weights each sequence by its completion "
                "length, because every token has the ratio of the sequence. GSPO weights all sequences equally: set "
                "loss_type='grpo'."
            )
        self.learns_entropy = bool(args.entropy_coef) or args.use_adaptive_entropy
        self.entropy_bonus = EntropyBonus(args) if self.learns_entropy else None

    @property
    def entropy_coef(self) -> float:
        """The current weight of the entropy bonus."""
        return self.args.entropy_coef if self.entropy_bonus is None else float(self.entropy_bonus.coefficient)

    @property
    def average(self) -> str:
        return LOSSES[self.args.loss_type].average

    @property
    def _corrects_engine(self) -> bool:
        # Log-probabilities from a user's function are used as the engine's only with vLLM, as in trl.
        known = self.rollout_func is None or self.args.use_vllm or self.args.max_staleness > 0
        # The policy's own samples need no correction: in bfloat16 their ratios are rounding errors, and the product
        # over a long completion is noise that would mask it.
        return self.args.vllm_importance_sampling_correction and known and not self.sampler.can.shares_weights

    def compute_advantages(self, rewards: torch.Tensor, group_size: int, kl: torch.Tensor | None) -> torch.Tensor:
        """Rewards relative to the mean of their group; see `posttrain.rl.losses.advantages`."""
        if self.args.multi_objective_aggregation == "normalize_then_sum":
            return decoupled_advantages(rewards, group_size, self.rewards.weights)
        return group_advantages(total_rewards(rewards, self.rewards.weights), group_size, self.args.scale_rewards)

    @property
    def credits_turns(self) -> bool:
        return self.args.turn_credit != "outcome"

    def compute_turn_advantages(self, advantages: torch.Tensor, turns: credit.Turns, group_size: int) -> torch.Tensor:
        """As ``turn_credit`` says; see `posttrain.rl.losses.credit`."""
        args, scale = self.args, self.args.scale_rewards
        if args.turn_credit == "process":
            outcome = group_advantages(turns.outcomes, group_size, scale).unsqueeze(1)
            return outcome + args.turn_weight * credit.process_advantages(turns.rewards, group_size, scale)
        returns = turns.returns(args.turn_discount)
        if args.turn_credit == "returns":
            return credit.return_advantages(returns, group_size, scale)
        steps = credit.step_advantages(returns, turns.states, group_size, scale)
        return advantages.unsqueeze(1) + args.turn_weight * steps

    def policy_loss(self, policy: CompletionLogps, inputs: dict[str, Any]) -> torch.Tensor:
        """The loss ``args.loss_type`` with the configured masks and weights and the KL term."""
        args, logps, mask, loss_type = self.args, policy.logps, inputs["loss_mask"], LOSSES[self.args.loss_type]
        advantages, correction = inputs["advantages"], inputs.get("correction")
        advantages = advantages.unsqueeze(1) if advantages.ndim == 1 else advantages
        old_logps = inputs.get("old_logps", logps.detach())
        level, trajectories = args.importance_sampling_level, inputs.get("trajectories")
        ratio = policy_losses.importance_ratio(logps, old_logps, mask, level, trajectories)
        parts = Policy(logps, old_logps, ratio, advantages, mask, correction)
        loss = loss_type.of_tokens(parts, args)
        if "entropy_mask" in inputs:
            loss = loss * inputs["entropy_mask"]
        loss, ratio = self._weighted(loss, parts, inputs), ratio.detach()
        weight = mask if max(ratio.shape[1], advantages.shape[1]) > 1 else torch.ones_like(ratio)
        if args.loss_type == "cispo":
            bounded = ((ratio > self.epsilon_high) & (advantages > 0)) * weight
            self.metrics.add_sum("cispo_clip_ratio", bounded.sum(), weight.sum())
        elif args.loss_type == "vespo":
            weights = policy_losses.vespo_weight_of(parts, args)
            self.metrics.add_sum("vespo/phi_seq_mean", weights.sum(), len(weights))
        elif args.loss_type != "sapo":
            log_clipping(self.metrics, ratio, advantages, weight, args.epsilon, self.epsilon_high)
        return loss

    def _weighted(self, loss: torch.Tensor, parts: Policy, inputs: dict[str, Any]) -> torch.Tensor:
        """`loss` of tokens or of completions, masked and weighted as configured, with the KL term."""
        args, mask = self.args, parts.mask
        if (threshold := args.off_policy_mask_threshold) is not None:
            sampled = inputs.get("sampling_logps", parts.old_logps)
            loss = loss * self.get_off_policy_mask(parts.advantages, parts.logps, sampled, mask, threshold)
        if parts.correction is not None and not LOSSES[args.loss_type].corrects_itself:
            loss = loss * parts.correction
        if self.beta:
            kl = policy_losses.k3(parts.logps, inputs["ref_logps"])
            kl = kl * parts.ratio if args.use_bias_correction_kl else kl
            loss = loss + self.beta * kl
            self.metrics.add_sum("kl", (kl.detach() * mask).sum(), mask.sum())
        return loss

    @staticmethod
    def get_off_policy_mask(
        advantages: torch.Tensor,
        per_token_logps: torch.Tensor,
        sampling_per_token_logps: torch.Tensor,
        mask: torch.Tensor,
        off_policy_threshold: float,
    ) -> torch.Tensor:
        """1 for completions to train on, 0 for those to leave out; see `policy_losses.off_policy_mask`."""
        given = per_token_logps, sampling_per_token_logps, advantages, mask, off_policy_threshold
        return policy_losses.off_policy_mask(*given)

    # ------------------------------------------------------------------------------------------------ entropy bonus

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Subtracts the entropy bonus from the loss."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if self.entropy_bonus is not None and "window_tokens" in inputs:
            mask = inputs.get("entropy_mask", inputs["loss_mask"])
            share = 1.0 if num_items_in_batch is None else self.count_items(inputs) / num_items_in_batch.clamp(min=1)
            self.metrics.add_sum("policy_loss", loss.detach(), share)  # which sum to 1 over an optimizer step
            loss = loss - self.entropy_bonus((outputs["entropies"] * mask).sum(), mask.sum(), inputs["window_tokens"])
        return (loss, outputs) if return_outputs else loss

    def train_on_window(self, model: nn.Module, window: list[Any], num_items: torch.Tensor | None = None) -> None:
        """Adds the tokens of the window, over which the entropy is averaged, and adapts the weight of its bonus."""
        if self.entropy_bonus is None:
            return super().train_on_window(model, window, num_items)
        tokens = sum(part.get("entropy_mask", part["loss_mask"]).sum() for part in window)
        tokens = self.dist.sum(tokens.to(self.dist.device, torch.float32, non_blocking=True))
        super().train_on_window(model, [part | {"window_tokens": tokens} for part in window], num_items)
        self.entropy_bonus.update(self.dist.sum)
        self.log_metric("entropy_coef", self.entropy_bonus.coefficient)

    def state_dict(self) -> dict[str, Any]:
        """Adds the weight of the entropy bonus."""
        own = {} if self.entropy_bonus is None else {"entropy_bonus": self.entropy_bonus.state_dict()}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        super().load_state_dict(state)
        if self.entropy_bonus is not None and "entropy_bonus" in state:
            self.entropy_bonus.load_state_dict(state["entropy_bonus"])


class EntropyBonus:
    """Entropy bonus with an optionally adaptive weight: Skywork-OR1, https://arxiv.org/abs/2505.22312, section 4.2.

    The weight grows after an optimizer step whose mean entropy is at or below the target, while it also applies, and
    falls after the others.
    """

    def __init__(self, args: GRPOConfig) -> None:
        self.args = args
        self.coefficient = torch.tensor(float(args.entropy_coef))
        self.last_entropy = torch.tensor(torch.inf)  # nothing is measured yet: the first optimizer step has no bonus
        self._sums = torch.zeros(2)

    def __call__(self, entropy_sum: torch.Tensor, count: torch.Tensor, window_count: torch.Tensor) -> torch.Tensor:
        """The bonus of a micro-batch, shape (): its share of the mean over the window."""
        device = entropy_sum.device
        self._sums = self._sums.to(device, non_blocking=True) + torch.stack([entropy_sum.detach(), count])
        weight = self.coefficient.to(device, non_blocking=True)
        if self.args.use_adaptive_entropy:
            weight = weight * (self.last_entropy.to(device, non_blocking=True) <= self.args.entropy_target)
        return weight * entropy_sum / window_count.clamp(min=1)

    def update(self, sum_over_processes: Any) -> None:
        """Adapt the weight after an optimizer step, without waiting for the device."""
        total, count = sum_over_processes(self._sums)
        self._sums = torch.zeros_like(self._sums)
        if self.args.use_adaptive_entropy:
            self.last_entropy = total / count.clamp(min=1)
            step = torch.where(self.last_entropy <= self.args.entropy_target, 1.0, -1.0) * self.args.entropy_coef_delta
            moved = self.coefficient.to(step.device) + step
            self.coefficient = moved.clamp(self.args.entropy_coef_min, self.args.entropy_coef_max)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"coefficient": self.coefficient.clone(), "last_entropy": self.last_entropy.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.coefficient, self.last_entropy = state["coefficient"].clone(), state["last_entropy"].clone()
