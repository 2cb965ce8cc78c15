"""General On-policy Logit Distillation (GOLD), Patiño et al. 2025, under trl's names:
https://huggingface.co/spaces/HuggingFaceH4/on-policy-distillation.

Generalised knowledge distillation, and with ``use_uld_loss`` that of a teacher with other tokens, by
`posttrain.rl.losses.universal_logits`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from posttrain.core.config import opt, other_default
from posttrain.core.data.collators import IGNORE_INDEX
from posttrain.core.data.host_copies import on_host
from posttrain.core.data.samplers import columns_of
from posttrain.core.fields.old_names import Removed
from posttrain.core.models import wrapping
from posttrain.lm.loss import lm_head
from posttrain.lm.loss.distillation import logits_of
from posttrain.lm.loss.language_modeling import labelled_places
from posttrain.rl.algorithms.distillation import prompt_and_completion
from posttrain.rl.algorithms.gkd import GKDConfig, GKDTrainer
from posttrain.rl.losses.universal_logits import (
    LogitsAt,
    Texts,
    Vocabularies,
    common_tokens,
    entropy,
    of_tokens,
    universal_divergence,
)
from posttrain.rl.online.teachers import AlignedTeacher, rows_to_read
from posttrain.rl.policy.reference import FrozenReference
from posttrain.rl.samples.prompts import PromptCodec


@dataclass
class GOLDConfig(GKDConfig):
    """Arguments of `GOLDTrainer`."""

    learning_rate: float = other_default(GKDConfig, "learning_rate", 1e-7)
    top_p: float = other_default(GKDConfig, "top_p", 0.95)
    loss_temperature: float | None = other_default(GKDConfig, "loss_temperature", None)
    use_uld_loss: bool = opt(False, "Compare with a teacher of other tokens, at texts that tokens of both cover.")
    teacher_tokenizer_name_or_path: str | None = opt(
        None, "Tokenizer of that teacher; None: the one beside its weights.", needs="use_uld_loss"
    )
    uld_use_hybrid_loss: bool = opt(
        False, "Compare tokens of both vocabularies by the divergence, and the others by rank.", needs="use_uld_loss"
    )
    uld_hybrid_matched_weight: float | None = opt(
        None, "Weight of the former; None: their share of the teacher's vocabulary.", min=0, needs="uld_use_hybrid_loss"
    )
    uld_hybrid_unmatched_weight: float | None = opt(
        None, "Weight of the latter; None: the rest.", min=0, needs="uld_use_hybrid_loss"
    )
    uld_crossentropy_weight: float = opt(
        0.0, "Weight of the mean cross-entropy of each completion.", min=0, needs="use_uld_loss"
    )
    uld_distillation_weight: float = opt(1.0, "Weight of the comparison.", min=0, needs="use_uld_loss")
    uld_student_temperature: float = opt(1.0, "Divides the student's logits there.", above=0, needs="use_uld_loss")
    uld_teacher_temperature: float = opt(1.0, "Divides the teacher's logits there.", above=0, needs="use_uld_loss")
    uld_skip_student_eos: bool = opt(
        True, "Do not compare the ends of completions.", needs="use_uld_loss", aliases=("uld_skip_teacher_eos",)
    )

    OLD_NAMES = {
        "use_extended_uld": Removed("tokens of any tokenizer are aligned by their characters.", harmless=(True,)),
        "uld_token_merge_strategy": Removed(
            "probabilities are merged by the chain rule; trl's 'observed' reads a token's at the position behind it.",
            harmless=("bayesian",),
        ),
        "callbacks": Removed("pass them to the trainer.", harmless=([], None)),
    }

    def _problems(self) -> Iterator[str]:
        if self.use_uld_loss and (self.teacher_urls or self.loss_type != "divergence"):
            yield "use_uld_loss=True needs a teacher in this process and loss_type='divergence'; leave out servers"
        if (self.uld_hybrid_matched_weight is None) != (self.uld_hybrid_unmatched_weight is None):
            yield "uld_hybrid_matched_weight and uld_hybrid_unmatched_weight are weights beside each other; set both"


class GOLDTrainer(GKDTrainer):
    """Trains a student on its own completions and on the dataset's. Arguments: see `DistillationTrainer`."""

    config_class: type[GOLDConfig] = GOLDConfig
    args: GOLDConfig
    tag_names = ("posttrain", "gold")

    @property
    def average(self) -> str:  # type: ignore[override]
        """Texts are a mean of each completion, so that a completion counts once; whole distributions of each token."""
        return "sequences" if self.args.use_uld_loss else "tokens"

    def prepare_rows(self, dataset: Any, role: str, name: str) -> Any:
        """As the base's, with columns for scripts: `tokens_of` each row, where they are known before an episode."""
        kept = super().prepare_rows(dataset, role, name)
        if self.sees or self.sampler.has_tools or self.episodes is not None or self.rollout_func is not None:
            return kept
        add = partial(tokens_of, codec=self.codec, context=self.sampler.context)
        if isinstance(kept, list):
            return [{**row, **add(row)} for row in kept]
        return kept.map(add) if columns_of(kept) else kept

    def generate_on_policy_outputs(  # type: ignore[override]
        self, model: Any, inputs: dict[str, torch.Tensor], generation_config: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[str], list[str]]:
        """As `GKDTrainer.generate_on_policy_outputs`, with the texts of the prompts and of the completions."""
        ids, mask, labels = super().generate_on_policy_outputs(model, inputs, generation_config)
        asked = zip(inputs["prompts"], inputs["prompt_attention_mask"].bool(), strict=True)
        prompts = [row[is_read].tolist() for row, is_read in asked]
        written = [row[is_kept].tolist() for row, is_kept in zip(ids, labels != IGNORE_INDEX, strict=True)]
        decode = partial(self.processing_class.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return ids, mask, labels, [decode(row) for row in prompts], [decode(row) for row in written]

    def tokenizer_of_teacher(self, reference: FrozenReference) -> str | None:
        """With ``use_uld_loss``, by default that beside the teacher's weights. Raise ValueError if it is not known."""
        if not self.args.use_uld_loss:
            return None
        beside = wrapping.base_name(reference.model)
        if name := self.args.teacher_tokenizer_name_or_path or beside:
            return str(name)
        raise ValueError("use_uld_loss=True needs the teacher's tokenizer: set teacher_tokenizer_name_or_path.")

    def translated_teacher(self, *parts: Any) -> AlignedTeacher:
        """As the base's, which is asked of whole texts."""
        args, (_, student, codec, _) = self.args, parts
        shared = common_tokens(student, codec.tokenizer, self.dist.device) if args.uld_use_hybrid_loss else None
        given = args.uld_hybrid_matched_weight, args.uld_hybrid_unmatched_weight
        weights = None if given[0] is None or given[1] is None else (given[0], given[1])
        self.vocabularies = Vocabularies(shared, args.beta, weights)
        return AlignedTeacher(*parts, compares_ends=not args.uld_skip_student_eos)

    def compared_in_head(self, model: nn.Module, inputs: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
        """With ``use_uld_loss``, the model's `logits` are the sum over completions of their mean losses, and the
        student's summed entropy.
        """
        if not isinstance(self.teacher, AlignedTeacher):
            return super().compared_in_head(model, inputs)
        args, device = self.args, inputs["input_ids"].device
        read, groups = rows_to_read(inputs), on_host(inputs["groups"])
        labels = read.pop("labels")
        known, theirs = self.teacher.states(read, labels), labels.flatten()[labelled_places(labels)]
        marks = on_host(inputs["teacher_groups"])
        own, other = Texts.marked(groups), Texts.marked(torch.where(marks < 0, -2, marks))
        tokens = inputs["labels"].flatten()[labelled_places(inputs["labels"])]
        rows = (groups >= -1).nonzero()[:, 0]
        shares = (1 / torch.bincount(rows, minlength=len(groups)).clamp(min=1))[rows].to(device)

        def teacher(places: torch.Tensor) -> torch.Tensor:
            return logits_of(known.hidden[places], known) / args.uld_teacher_temperature

        def loss(logits: LogitsAt) -> torch.Tensor:
            heated = lambda places: logits(places) / args.uld_student_temperature  # noqa: E731
            compared = universal_divergence(heated, tokens, own, teacher, theirs, other, self.vocabularies, len(groups))
            total = args.uld_distillation_weight * compared.sum()
            if args.uld_crossentropy_weight:
                predicted = of_tokens(lambda at, ids: F.cross_entropy(logits(at), ids, reduction="none"), tokens)
                total = total + args.uld_crossentropy_weight * (predicted * shares).sum()
            with torch.no_grad():
                uncertainty = of_tokens(lambda at, ids: entropy(logits(at)), tokens)
            return torch.stack([total, uncertainty.sum()])

        return lm_head.function_in_head(model, inputs["labels"], loss)


def tokens_of(row: Mapping[str, Any], codec: PromptCodec, context: int | None = None) -> dict[str, list[int]]:
    """``input_ids`` of the prompt and the completion of a row, and ``completion_mask``, 1 at those of the latter, which
    is cut where the `context` is full.
    """
    row = prompt_and_completion(row)
    prompt, written = row["prompt"], row.get("completion")
    ids = codec.encode(prompt)
    whole = ids if written is None else [*ids, *codec.encode_completion(prompt, written)][:context]
    return {"input_ids": whole, "completion_mask": [0] * len(ids) + [1] * (len(whole) - len(ids))}
