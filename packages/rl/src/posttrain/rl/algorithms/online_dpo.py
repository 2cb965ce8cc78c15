r"""Online DPO, Guo et al. 2024 (OAIF), https://arxiv.org/abs/2402.04792.

The policy writes two completions of each prompt; rewards or a judge say which is the better, w, and which the worse, l.
Then with :math:`r = \log\pi(y|x) - \log\pi_{ref}(y|x)`, algorithm 1:

.. math:: -\log\sigma(\beta (r_w - r_l)), \quad \text{or with } ipo \quad (r_w - r_l - \tfrac{1}{2\beta})^2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from posttrain.core.config import opt
from posttrain.core.fields.old_names import Removed, Renamed
from posttrain.core.training.preflight import passed_on
from posttrain.rl.losses.advantages import total_rewards
from posttrain.rl.losses.policy_losses import of_trajectory
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.online.trainer import RolloutTrainer
from posttrain.rl.policy.logprobs import CompletionLogps
from posttrain.rl.rewards.scorers import JudgeReward, PairwiseJudge, functions_by_name
from posttrain.rl.rewards.scoring import Scores
from posttrain.rl.samples.samples import Sample

LOSSES = ("sigmoid", "ipo")


@dataclass
class OnlineDPOConfig(RolloutConfig):
    """Arguments of `OnlineDPOTrainer`. Batch sizes count prompts, of which each has two completions."""

    learning_rate: float = opt(5e-7, "Peak learning rate.", min=0)
    num_generations: int = opt(2, "Completions of each prompt: a pair.", min=2, max=2)
    temperature: float = opt(
        0.9, "Logits are divided by it in sampling; larger explores more. The loss is at temperature 1.", above=0
    )
    max_completion_length: int = opt(
        64, "Tokens of a completion at most; longer ones are cut there.", min=1, aliases=("max_new_tokens",)
    )
    vllm_gpu_memory_utilization: float = opt(0.55, "Share of the GPU's memory for a colocated vLLM.", above=0, max=1)
    disable_dropout: bool = opt(True, "Switch dropout off, so that a completion has one probability.")
    beta: list[float] = opt(  # type: ignore[assignment]  # one for each epoch
        [0.1], "Pull towards the reference; larger stays closer. Several: one for each epoch."
    )
    loss_type: str = opt("sigmoid", "The loss of DPO, or of IPO.", choices=LOSSES)
    missing_eos_penalty: float | None = opt(
        None, "Taken off the first reward of a completion that does not end by itself.", above=0
    )

    OLD_NAMES = {
        "max_length": Removed("prompts are never cut; filter the dataset by length.", harmless=None),
        "reward_model_path": Renamed("reward_funcs", lambda path: [path], ignore=(None,)),
        "dataset_num_proc": Removed("prompts are read when they are sampled from.", harmless=None),
    }

    @classmethod
    def accept_old_names(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        """``beta=0.1``."""
        kwargs = super().accept_old_names(kwargs)
        one = isinstance(kwargs.get("beta"), (int, float))
        return kwargs | ({"beta": [float(kwargs["beta"])]} if one else {})

    @property
    def reward_model_path(self) -> str | None:
        """The only name in `reward_funcs`, which scripts for trl read to load that model themselves."""
        return self.reward_funcs[0] if self.reward_funcs and len(self.reward_funcs) == 1 else None

    @property
    def micro_batch_completions(self) -> int:
        return self.per_device_train_batch_size * self.num_generations

    @property
    def train_batch_size(self) -> int:
        return super().train_batch_size * self.num_generations

    @property
    def eval_batch_size(self) -> int:
        return super().eval_batch_size * self.num_generations

    def _problems(self) -> Iterator[str]:
        if not self.beta or not all(beta > 0 for beta in self.beta):
            yield f"beta={self.beta} must hold numbers above 0, one or one for each epoch"
        if self.epsilon != 0.2 or self.epsilon_high is not None:
            yield "epsilon and epsilon_high clip ratios to an old policy, which this loss does not have; leave them out"


class OnlineDPOTrainer(RolloutTrainer):
    """Trains a policy to prefer the better of two completions that it wrote itself.

    Args:
        ref_model: the reference; None: the weights that the model begins with.
        reward_funcs: as of `RolloutTrainer`; the sum of their rewards says which completion is better.
        judge: says so instead, see `posttrain.rl.rewards.scorers.PairwiseJudge`.

    The other arguments are those of `RolloutTrainer`.
    """

    config_class: type[OnlineDPOConfig] = OnlineDPOConfig
    args: OnlineDPOConfig
    tag_names = ("posttrain", "online-dpo")
    reads_besides = "the other completion of its pair"

    def __init__(
        self,
        model: nn.Module | str | None = None,
        ref_model: nn.Module | None = None,
        reward_funcs: Any = None,
        args: OnlineDPOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        peft_config: Any = None,
        judge: PairwiseJudge | None = None,
        quantization_config: Any = None,
        **others: Any,
    ) -> None:
        given = passed_on(locals(), "ref_model", "data_collator", "judge")
        if data_collator is not None:
            raise TypeError("data_collator: batches are made of the completions that the policy writes. Leave it out.")
        named = functions_by_name(args) if isinstance(args, RolloutConfig) else None
        if judge is not None and (reward_funcs is not None or named):
            raise ValueError(
                "Both judge and reward_funcs (of the config too) say which completion is better. Pass one of them."
            )
        self.given_reference = ref_model
        super().__init__(**given if judge is None else given | {"reward_funcs": JudgeReward(judge)})

    def score(self, samples: list[Sample]) -> Scores:
        """As the base's, less ``missing_eos_penalty``."""
        scores, penalty = super().score(samples), self.args.missing_eos_penalty
        ended = torch.tensor([sample.finished for sample in samples])
        self.metrics.add_sum("val/contain_eos_token", int(ended.sum()), len(samples))
        if penalty is None:
            return scores
        rewards = scores.rewards.clone()
        rewards[:, 0] -= penalty / self.rewards.weights[0] * ~ended
        return replace(scores, rewards=rewards)

    def compute_advantages(self, rewards: torch.Tensor, group_size: int, kl: torch.Tensor | None) -> torch.Tensor:
        """(N,) 1 for the better completion of each pair, the first of two equal ones; -1 for the worse; 0 for both of
        a pair without rewards.
        """
        pairs = total_rewards(rewards, self.rewards.weights).view(-1, 2)
        first = torch.where(pairs[:, 0] >= pairs[:, 1], 1.0, -1.0)
        first = torch.where(pairs.isnan().any(1), 0.0, first)
        known = pairs[first != 0]
        if len(known) and self.model.training:
            self.log_metric("objective/scores", known.mean())
            self.log_metric("objective/scores_margin", (known[:, 0] - known[:, 1]).abs().mean())
        return torch.stack([first, -first], 1).flatten()

    #: The loss compares whole completions with the reference, and never with the policy that wrote them.
    needs_old_logps = False

    @property
    def logps_temperature(self) -> float:
        return 1.0

    def policy_loss(self, policy: CompletionLogps, inputs: dict[str, Any]) -> torch.Tensor:
        """The loss of its pair for each completion, (N, 1)."""
        beta, mask, side = self.current_beta, inputs["loss_mask"], inputs["advantages"]
        logps, ratios = (policy.logps * mask).sum(1), ((policy.logps - inputs["ref_logps"]) * mask).sum(1)
        trajectories = inputs.get("trajectories")
        if trajectories is not None:  # a completion of several sequences is one
            firsts = inputs["first_sequences"]
            logps, ratios = (of_trajectory(values, trajectories)[firsts] for values in (logps, ratios))
            side = side[firsts]
        margins = (ratios * side).view(-1, 2).sum(1, keepdim=True)
        losses = (margins - 1 / (2 * beta)).square() if self.args.loss_type == "ipo" else -F.logsigmoid(beta * margins)
        self._log_pairs(logps.detach(), ratios.detach(), margins.detach(), side)
        losses = (losses * (side.view(-1, 2)[:, :1] != 0)).expand(-1, 2).reshape(-1, 1)
        return losses if trajectories is None else losses[trajectories]

    def _log_pairs(self, logps, ratios, margins, side) -> None:
        beta, add = self.current_beta, self.metrics.add_sum
        for name, chosen in (("chosen", side > 0), ("rejected", side < 0)):
            add(f"rewards/{name}", beta * (ratios * chosen).sum(), chosen.sum())
            add(f"logps/{name}", (logps * chosen).sum(), chosen.sum())
        known = side.view(-1, 2)[:, 0] != 0
        add("rewards/margins", beta * (margins[:, 0] * known).sum(), known.sum())
        add("rewards/accuracies", ((margins[:, 0] > 0) & known).sum(), known.sum())
        add("objective/kl", ratios.sum(), len(ratios))
        add("beta", beta, 1)

    @property
    def current_beta(self) -> float:
        """The beta of this epoch."""
        return self.args.beta[min(int(self.state.epoch or 0), len(self.args.beta) - 1)]
