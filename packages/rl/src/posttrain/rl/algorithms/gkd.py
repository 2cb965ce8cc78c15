"""Generalised knowledge distillation under trl's names: `posttrain.rl.algorithms.distillation` with GKD's defaults.

MiniLLM's single-step form is ``DistillationConfig(loss_type="policy_gradient")``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from posttrain.core.config import opt, other_default
from posttrain.core.data.collators import IGNORE_INDEX
from posttrain.core.fields.old_names import Removed
from posttrain.rl.algorithms.distillation import DistillationConfig, DistillationTrainer


@dataclass
class GKDConfig(DistillationConfig):
    """Arguments of `GKDTrainer`: those of `DistillationTrainer`, of which some have other defaults."""

    learning_rate: float = opt(2e-5, "Peak learning rate.", min=0)
    temperature: float = opt(0.9, "Logits are divided by it in sampling; larger explores more.", above=0)
    loss_temperature: float | None = other_default(DistillationConfig, "loss_temperature", 1.0)
    beta: float = other_default(DistillationConfig, "beta", 0.5)
    lmbda: float = other_default(DistillationConfig, "lmbda", 0.5)
    max_completion_length: int = opt(
        128, "Tokens of a completion at most; longer ones are cut there.", min=1, aliases=("max_new_tokens",)
    )
    disable_dropout: bool = other_default(DistillationConfig, "disable_dropout", True)

    OLD_NAMES = {
        "packing": Removed("completions are sampled, and not packed.", harmless=(None, False)),
        "eval_packing": Removed("completions are sampled, and not packed.", harmless=(None, False)),
        "packing_strategy": Removed("completions are sampled, and not packed.", harmless=None),
        "padding_free": Removed("completions are sampled, and not packed.", harmless=(None, False)),
        "completion_only_loss": Removed("the loss is that of completions, always.", harmless=(None, True)),
        "assistant_only_loss": Removed("the loss is that of the last turn.", harmless=(None, False)),
        "dataset_text_field": Removed("give rows of messages, or of prompt and completion.", harmless=("text",)),
        "dataset_num_proc": Removed("prompts are read when they are sampled from.", harmless=None),
        "truncation_mode": Removed("completions are cut at their end, and prompts never.", harmless=("keep_start",)),
        "chat_template_path": Removed("set tokenizer.chat_template of the processing_class.", harmless=(None,)),
        "eos_token": Removed("set it on the processing_class.", harmless=(None,)),
        "pad_token": Removed("set it on the processing_class.", harmless=(None,)),
        "use_liger_kernel": Removed("logits are never held whole, without Liger too.", harmless=None),
        "dataset_kwargs": Removed("rows of messages, or of prompt and completion, need no preparation.", harmless=None),
    }

    @property
    def max_new_tokens(self) -> int:
        """The name of `max_completion_length` in trl."""
        return self.max_completion_length


class GKDTrainer(DistillationTrainer):
    """Trains a student on its own completions and on the dataset's. Arguments: see `DistillationTrainer`."""

    config_class: type[GKDConfig] = GKDConfig
    args: GKDConfig
    tag_names = ("posttrain", "gkd")

    @staticmethod
    @torch.no_grad()
    def generate_on_policy_outputs(
        model: Any, inputs: dict[str, torch.Tensor], generation_config: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(ids, attention mask, labels), each (B, P + C), of completions by the model's ``generate``, for scripts.
        `inputs`: ``prompts`` and ``prompt_attention_mask``, (B, P), padded on the left.
        """
        prompts, mask = inputs["prompts"], inputs["prompt_attention_mask"]
        written = model.generate(
            input_ids=prompts, attention_mask=mask, generation_config=generation_config, return_dict_in_generate=True
        )
        ids, width, ends = written.sequences, prompts.shape[1], generation_config.eos_token_id
        completion = ids[:, width:]
        is_end = torch.isin(completion, torch.tensor([] if ends is None else ends, device=ids.device))
        is_kept = is_end.long().cumsum(1) - is_end.long() == 0  # the token that ends it included
        nothing = torch.full_like(prompts, IGNORE_INDEX)
        labels = torch.cat([nothing, completion.masked_fill(~is_kept, IGNORE_INDEX)], 1)
        return ids, torch.cat([mask, is_kept.to(mask.dtype)], 1), labels
