r"""Self-Distillation Policy Optimization, 2026, https://arxiv.org/abs/2601.20802.

The teacher is the policy with feedback :math:`f` in its prompt: a completion of the same group that succeeded, or the
words of an environment. With the loss of GRPO and a weight :math:`w`, and :math:`m_i = 1` where there is feedback:

.. math::
    (1 - w) L_{GRPO} + w \frac{1}{N} \sum_i \frac{m_i}{|y_i|} \sum_t
    D_\alpha\big(\pi_T(\cdot | x, f_i, y_{i,<t}), \pi(\cdot | x, y_{i,<t})\big)

with the divergences of `posttrain.rl.algorithms.self_distillation`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from posttrain.core.config import opt, other_default
from posttrain.core.fields.old_names import Removed
from posttrain.core.state import EvalLoopOutput
from posttrain.core.training.plan import Plan
from posttrain.rl.algorithms.grpo import GRPOConfig, GRPOTrainer
from posttrain.rl.algorithms.self_distillation import SelfDistillationConfig, SelfDistillationTrainer, rewritten
from posttrain.rl.losses import policy_losses
from posttrain.rl.losses.advantages import total_rewards
from posttrain.rl.rewards.scoring import Scores
from posttrain.rl.samples.samples import Rollout, Sample

THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)


@dataclass
class SDPOConfig(SelfDistillationConfig, GRPOConfig):
    """Arguments of `SDPOTrainer`."""

    distillation_mode: str = other_default(SelfDistillationConfig, "distillation_mode", "sampled_token")
    distillation_alpha: float = other_default(SelfDistillationConfig, "distillation_alpha", 1.0)
    distillation_topk: int | None = other_default(SelfDistillationConfig, "distillation_topk", None)
    teacher_model_kind: str = other_default(SelfDistillationConfig, "teacher_model_kind", "ema")
    distillation_weight: float = opt(
        1.0, "Share of the distillation in the loss; the rest is GRPO's. Between 0 and 1: two forwards.", min=0, max=1
    )
    use_successful_as_teacher: bool = opt(True, "Show the teacher a completion of the group that succeeded.")
    success_reward_threshold: float = opt(1.0, "A completion succeeds if its reward is at least this.")
    dont_reprompt_on_self_success: bool = opt(True, "Never show the teacher the completion that it is asked about.")
    include_environment_feedback: bool = opt(False, "Show the teacher the privileged_context of the row.")
    environment_feedback_only_without_solution: bool = opt(
        False, "Show it only where no other completion succeeded.", needs="include_environment_feedback"
    )
    max_reprompt_len: int = opt(10240, "Tokens of the teacher's prompt at most; of longer ones, the last.", min=1)
    reprompt_template: str = opt(
        "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n", "The teacher's prompt."
    )
    solution_template: str = opt(
        "\nCorrect solution:\n\n{successful_previous_attempt}\n\n", "Its part with the completion that succeeded."
    )
    feedback_template: str = opt(
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n",
        "Its part with the privileged_context.",
    )
    remove_thinking_from_demonstration: bool = opt(False, "Leave <think>...</think> out of the shown completion.")

    OLD_NAMES = {
        "diagnostics_warning_interval": Removed("records that show no learning are warned of.", harmless=None),
        "diagnostics_flat_tolerance": Removed("records that show no learning are warned of.", harmless=None),
    }

    @property
    def compares_groups(self) -> bool:
        """As the base's; the distillation alone reads one completion."""
        return self.distillation_weight < 1

    def _problems(self) -> Iterator[str]:
        if self.use_teacher_server and self.distillation_weight != 1:
            yield "use_teacher_server=True is for distillation alone; set distillation_weight=1"
        shows = self.use_successful_as_teacher and (self.num_generations > 1 or not self.dont_reprompt_on_self_success)
        if not (shows or self.include_environment_feedback):
            yield (
                f"use_successful_as_teacher={self.use_successful_as_teacher} with num_generations="
                f"{self.num_generations} and include_environment_feedback=False show the teacher nothing; set "
                "include_environment_feedback=True, or use_successful_as_teacher=True with several completions"
            )


class SDPOTrainer(SelfDistillationTrainer, GRPOTrainer):
    """Trains a policy on groups of completions, to predict what it predicts once it was shown one that succeeded.

    Args:
        train_dataset: rows with a `prompt`, and for ``include_environment_feedback`` a text as `privileged_context`.

    The other arguments are those of `GRPOTrainer`.
    """

    config_class: type[SDPOConfig] = SDPOConfig
    args: SDPOConfig
    tag_names = ("posttrain", "sdpo")
    reads_besides = "the other completions of its group"
    does_not_take = ("agent", "environment_factory")

    @property
    def average(self) -> str:
        return "sequences" if self.args.distillation_weight == 1 else super().average

    @property
    def _corrects_engine(self) -> bool:
        """A divergence takes any completions."""
        return super()._corrects_engine and self.args.distillation_weight < 1

    def complete_scored(self, rollout: Rollout, samples: list[Sample], scores: Scores) -> Rollout:
        """Adds what the teacher reads: of each group, its first completion that succeeded."""
        rewards = total_rewards(scores.rewards, self.rewards.weights).nan_to_num(nan=0.0).tolist()
        texts = [self.codec.tokenizer.decode(sample.ids, skip_special_tokens=True) for sample in samples]
        everyone, numbers = list(zip(rewards, texts, strict=True)), [*range(len(samples))]
        size = self.num_generations_eval
        if not samples[0].is_evaluated:
            dealt = [one for part in self.dist.gather_object(everyone) for one in part]
            everyone, size = [dealt[place] for place in self.layout.dealt().argsort()], self.num_generations
            numbers = self.layout.numbers(self.dist.rank).tolist()
        good = [reward >= self.args.success_reward_threshold for reward, _ in everyone]
        prompts, shown = [], []
        for sample, number in zip(samples, numbers, strict=True):
            group = range(number // size * size, number // size * size + size)
            others = [i for i in group if good[i] and not (self.args.dont_reprompt_on_self_success and i == number)]
            has_solution = bool(others) and self.args.use_successful_as_teacher
            prompt = self._teacher_prompt(sample, everyone[others[0]][1] if has_solution else None)
            prompts.append(None if prompt is None else self.codec.encode(prompt)[-self.args.max_reprompt_len :])
            shown.append(has_solution)
        self.metrics.add_sum("self_distillation/success_sample_fraction", sum(shown), len(shown))
        asked = sum(prompt is not None for prompt in prompts)
        self.metrics.add_sum("self_distillation/reprompt_sample_fraction", asked, len(prompts))
        return self.with_teacher_rows(rollout, samples, prompts)

    def _teacher_prompt(self, sample: Sample, solution: str | None) -> Any:
        """The teacher's prompt with a completion that succeeded and with feedback; None where there is neither."""
        args, feedback = self.args, sample.row.get("privileged_context")
        parts, alone = {"solution": "", "feedback": ""}, args.environment_feedback_only_without_solution
        if solution is not None:
            text = THINKING.sub("", solution).strip() if args.remove_thinking_from_demonstration else solution
            parts["solution"] = args.solution_template.format(successful_previous_attempt=text)
        is_said = args.include_environment_feedback and isinstance(feedback, str) and bool(feedback.strip())
        if is_said and (solution is None or not alone):
            parts["feedback"] = args.feedback_template.format(feedback_raw=feedback)
        elif solution is None:
            return None
        return rewritten(sample.prompt, lambda text: args.reprompt_template.format(prompt=text, **parts))

    def windows(self, plan: Plan, loader: Any) -> Iterator[tuple[list[Any], torch.Tensor | None]]:
        """Adds the completions of the whole window, over which the distillation is averaged."""
        for window, num_items in super().windows(plan, loader):
            rows = torch.tensor(float(sum(len(part["loss_mask"]) for part in window)), device=self.dist.device)
            rows = self.dist.sum(rows)
            yield [part | {"window_rows": rows} for part in window], num_items

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """As the base's; of the two losses each is a mean of its own, over tokens and over completions."""
        given = dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        output, weight = super().evaluation_loop(*given), self.args.distillation_weight
        if 0 < weight < 1 and output.metrics:
            names = [f"{metric_key_prefix}_self_distillation/{name}" for name in ("policy_loss", "loss_of_completions")]
            policy, distilled = (output.metrics[name] for name in names)
            output.metrics[f"{metric_key_prefix}_loss"] = (1 - weight) * policy + weight * distilled
        return output

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """The weighted mean of the distillation and of GRPO's loss, shape ()."""
        weight, outputs = self.args.distillation_weight, dict[str, Any]()
        loss = inputs["loss_mask"].new_zeros(())
        if weight < 1:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            items = self.count_items(inputs)
            whole = loss.detach() * (items if num_items_in_batch is None else num_items_in_batch)
            self.metrics.add_sum("self_distillation/policy_loss", whole, items)
        if weight > 0:
            of_tokens, compared = self.distillation(model, inputs)
            summed = policy_losses.summed(of_tokens, compared, "sequences")
            loss = (1 - weight) * loss + weight * summed / inputs.get("window_rows", float(len(compared)))
            self.metrics.add_sum("self_distillation/loss_of_completions", summed.detach(), float(len(compared)))
            outputs["distillation"] = of_tokens.detach()
        return (loss, outputs) if return_outputs else loss
