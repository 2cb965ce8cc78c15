r"""Self-Distillation Fine-Tuning, Shenfeld et al. 2026, https://arxiv.org/abs/2601.19897.

The policy completes a prompt :math:`x`, and learns to predict each token as its teacher does, which is the policy with
a demonstration :math:`c` in its prompt:

.. math::
    E_{y \sim \pi(\cdot|x)} \frac{1}{|y|} \sum_t D_\alpha\big(\pi_T(\cdot | x, c, y_{<t}), \pi(\cdot | x, y_{<t})\big)

with the divergences of `posttrain.rl.algorithms.self_distillation`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from posttrain.core.config import opt
from posttrain.core.data.samplers import is_stream
from posttrain.core.errors import DataError
from posttrain.core.training.preflight import passed_on
from posttrain.rl.algorithms.self_distillation import (
    SelfDistillationConfig,
    SelfDistillationTrainer,
    rewritten,
    text_of,
)
from posttrain.rl.generation import Sampling
from posttrain.rl.losses import policy_losses
from posttrain.rl.samples.prompts import rows_listed
from posttrain.rl.samples.samples import Rollout, Sample


@dataclass
class SDFTConfig(SelfDistillationConfig):
    """Arguments of `SDFTTrainer`."""

    teacher_prompt_template: str = opt(
        "{prompt}\n\n{privileged_context}", "The teacher's prompt, of a row's prompt and privileged_context."
    )
    generate_from_teacher: bool = opt(False, "Let the teacher's prompt be completed instead of the policy's own.")
    num_loss_tokens_to_skip: int = opt(0, "First tokens of each completion that are not learned from.", min=0)

    def _problems(self) -> Iterator[str]:
        for name in ("prompt", "privileged_context"):
            if f"{{{name}}}" not in self.teacher_prompt_template:
                yield f"teacher_prompt_template={self.teacher_prompt_template!r} has no {{{name}}}; add it"


class SDFTTrainer(SelfDistillationTrainer):
    """Trains a policy on its own completions, to predict what it predicts with a demonstration in its prompt.

    Args:
        model: the policy.
        train_dataset: rows with a `prompt` and its `privileged_context`, each a text or messages.

    The other arguments are those of `RolloutTrainer`. Reward functions are metrics.
    """

    config_class: type[SDFTConfig] = SDFTConfig
    args: SDFTConfig
    tag_names = ("posttrain", "sdft")
    reads_besides = "the privileged_context of its row"
    learns_from_rewards = False
    does_not_take = ("agent", "environment_factory")

    def __init__(
        self,
        model: nn.Module | str | None = None,
        args: SDFTConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        reward_funcs: Any = None,
        **others: Any,
    ) -> None:
        super().__init__(**passed_on(locals()))

    def get_train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        """As the base's. Raise DataError if a row, also one of an evaluation, has no privileged_context."""
        evaluated = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {"eval_dataset": self.eval_dataset}
        for name, rows in {"train_dataset": self.train_dataset, **evaluated}.items():
            rows = () if rows is None or is_stream(rows) else rows
            if missing := [number for number, row in enumerate(rows) if row.get("privileged_context") is None]:
                raise DataError(
                    f"{name}: privileged_context is null or absent ({rows_listed(missing)}). It is the demonstration "
                    "that the teacher reads; give each row one, or filter those rows."
                )
        return super().get_train_dataloader()

    def compute_advantages(self, rewards: torch.Tensor, group_size: int, kl: torch.Tensor | None) -> torch.Tensor:
        """(N,) zeros: nothing is learned from rewards."""
        return torch.zeros(len(rewards))

    @property
    def needs_old_logps(self) -> bool:
        """As the base's; of completions of the teacher's prompt there is no ratio."""
        return super().needs_old_logps and not self.args.generate_from_teacher

    @property
    def _corrects_engine(self) -> bool:
        """A divergence takes any completions."""
        return False

    def generate(self, samples: list[Sample], sampling: Sampling) -> list[Sample]:
        """As the base's, or completions of the teacher's prompts."""
        if not self.args.generate_from_teacher:
            return super().generate(samples, sampling)
        asked = [self._teacher_prompt(sample) for sample in samples]
        given = [replace(s, prompt=p, prompt_ids=self.codec.encode(p)) for s, p in zip(samples, asked, strict=True)]
        return [
            replace(done, prompt=own.prompt, prompt_ids=own.prompt_ids, logps=None, is_exact=False)
            for own, done in zip(samples, super().generate(given, sampling), strict=True)
        ]

    def complete_rollout(self, rollout: Rollout, samples: list[Sample]) -> Rollout:
        """Adds what the teacher reads."""
        rollout, known = super().complete_rollout(rollout, samples), dict[str, list[int]]()
        prompts = [self._teacher_prompt(sample) for sample in samples]
        for prompt in prompts:  # the completions of a row have the same one
            known.setdefault(repr(prompt), self.codec.encode(prompt))
        ids = [known[repr(prompt)] for prompt in prompts]
        return self.with_teacher_rows(rollout, samples, ids, self.args.num_loss_tokens_to_skip)

    def _teacher_prompt(self, sample: Sample) -> Any:
        if (context := sample.row.get("privileged_context")) is None:
            raise DataError(f"A row has no privileged_context, the demonstration of its teacher: {sample.prompt!r}.")
        template, context = self.args.teacher_prompt_template, text_of(context)
        return rewritten(sample.prompt, lambda text: template.format(prompt=text, privileged_context=context))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """The mean over completions of the mean loss of their tokens, shape ()."""
        of_tokens, compared = self.distillation(model, inputs)
        summed = policy_losses.summed(of_tokens, compared, "sequences")
        loss = self.mean_loss(summed, inputs, num_items_in_batch, None)
        return (loss, {"distillation": of_tokens.detach()}) if return_outputs else loss
