r"""On-policy distillation, Agarwal et al. 2023 (GKD), https://arxiv.org/abs/2306.13649.

With :math:`m = \beta p_T + (1-\beta) p_S` at each token of completions, a share :math:`\lambda` of which the student
writes itself, eq. 1 and algorithm 1:

.. math:: \beta\,KL(p_T \| m) + (1-\beta)\,KL(p_S \| m), \quad KL(p_T \| p_S) \text{ at } \beta = 0,
   \quad KL(p_S \| p_T) \text{ at } \beta = 1

The policy gradient of the last, with the advantage :math:`\log p_T(y_t) - \log p_S(y_t)` of each written token, is that
of MiniLLM, Gu et al. 2023, https://arxiv.org/abs/2306.08543, eq. 3, in its single-step form.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from posttrain.core import TrainingArguments
from posttrain.core.config import JSONObject, opt, other_default, set_among, value_of
from posttrain.core.data import pipeline
from posttrain.core.data.collators import IGNORE_INDEX
from posttrain.core.data.samplers import mix
from posttrain.core.errors import DataError, checked_args
from posttrain.core.fields.old_names import Removed
from posttrain.core.losses import normalization
from posttrain.core.models import wrapping
from posttrain.core.training.preflight import Parts, Problem, passed_on
from posttrain.lm.images.image_features import features_once
from posttrain.lm.images.images import IMAGE_COLUMNS, VIDEO_COLUMNS, has_images
from posttrain.lm.loading import loading
from posttrain.lm.loss import lm_head
from posttrain.lm.loss.distillation import Measure, divergence_terms
from posttrain.lm.text import chat_template
from posttrain.rl.generation import Generator, Sampling
from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.generation.transformers import TransformersGenerator
from posttrain.rl.losses.policy_losses import clipped
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.online.teachers import (
    LocalTeacher,
    ServerTeacher,
    TranslatedTeacher,
    image_problem,
    vocabulary_problem,
)
from posttrain.rl.online.trainer import RolloutTrainer
from posttrain.rl.policy.logprobs import CompletionLogps, inputs_of
from posttrain.rl.policy.reference import FrozenReference
from posttrain.rl.samples.prompts import PromptCodec
from posttrain.rl.samples.samples import Rollout, Sample

ANOTHER_TEACHER = (
    "The run in {where} had another teacher than this one: the weights differ. Pass the teacher that the run began "
    "with, as teacher_model or teacher_model_name_or_path; or begin a new run, with the weights of the checkpoint as "
    "the model."
)

BEHIND_SERVERS = "teacher_model_server_url|teacher_server_urls"
TOP_K = "Most probable tokens that a teacher's server is asked for. One here compares all, which 0 asks for too."


@dataclass
class DistillationConfig(RolloutConfig):
    """Arguments of `DistillationTrainer`."""

    num_generations: int = opt(1, "Completions that the student writes of each prompt.", min=1)
    beta: float = opt(
        1.0, "0: the forward divergence KL(teacher || student); 1: the reverse; between: both.", min=0, max=1
    )
    router_aux_loss_coef: float | None = other_default(RolloutConfig, "router_aux_loss_coef", 0.0)
    lmbda: float = opt(1.0, "Share of completions that the student writes; the rest are the dataset's.", min=0, max=1)
    seq_kd: bool = opt(False, "Let the teacher write the completions that the student does not.")
    max_length: int | None = opt(
        None, "Tokens of prompt and completion at most; completions are cut there. Prompts: see long_prompts.", min=2
    )
    loss_type: str = opt(
        "divergence",
        "The divergence of whole distributions, or the policy gradient of the reverse one.",
        choices=("divergence", "policy_gradient"),
    )
    loss_temperature: float | None = opt(
        None, "Both models' logits are divided by it in the divergence; None: temperature.", above=0
    )
    teacher_model_name_or_path: str | None = opt(None, "The teacher by name, where it is not passed to the trainer.")
    teacher_model_revision: str | None = opt(None, "Revision of a teacher given by name.")
    teacher_model_init_kwargs: JSONObject = opt(
        None, 'Arguments of from_pretrained for a teacher given by name; {"load_in_4bit": true} makes it small.'
    )
    teacher_tokenizer_name_or_path: str | None = opt(
        None, "Tokenizer of a teacher with other tokens: sorted probabilities are compared where tokens of both begin."
    )
    teacher_model_server_url: str | None = opt(None, "A teacher behind `vllm serve`, such as http://host:8000.")
    teacher_server_urls: JSONObject = opt(
        None, "{name: address} of several such teachers; the column teacher_id of a row names its own."
    )
    teacher_request_timeout: float = opt(
        1800.0, "Seconds within which a teacher's server must answer a request.", above=0, needs=BEHIND_SERVERS
    )
    loss_top_k: int = opt(20, TOP_K, min=0, needs=BEHIND_SERVERS)
    loss_add_tail: bool = opt(
        True, "Compare the rest of the vocabulary as one token, where a server tells the others.", needs=BEHIND_SERVERS
    )

    OLD_NAMES = {
        "reverse_kl_top_1_mode": Removed(
            "the token that was written is always among those compared.", harmless=("sampled",)
        ),
        "use_uld_loss": Removed("set teacher_tokenizer_name_or_path.", harmless=(None, False)),
    }

    def _problems(self) -> Iterator[str]:
        if self.sync_ref_model:
            yield "sync_ref_model=True moves a reference towards the policy; a teacher stays as it is. Leave it out"
        if self.router_replay:
            yield "router_replay=True replays what a policy chose in sampling, and distillation does not; leave it out"
        if self.loss_type == "policy_gradient" and self.lmbda < 1:
            yield f"loss_type='policy_gradient' learns from what the student wrote, and lmbda={self.lmbda}; set lmbda=1"
        if self.loss_type == "policy_gradient" and self.teacher_tokenizer_name_or_path:
            yield "loss_type='policy_gradient' needs a teacher with the student's tokens; set 'divergence'"
        if self.max_staleness and self.seq_kd and self.lmbda < 1:
            yield (
                "max_staleness above 0 samples while the loss reads the teacher, and with seq_kd=True the teacher "
                "writes too; set max_staleness=0, or give its completions as those of the dataset"
            )
        if self.teacher_model_server_url and self.teacher_server_urls:
            yield "teacher_model_server_url is one teacher, and teacher_server_urls has several; leave one out"
        if self.teacher_urls and self.measured_at != 1:
            yield (
                f"A server tells log-probabilities at temperature 1, and the divergence is at {self.measured_at}; set "
                "loss_temperature=1"
            )
        if self.teacher_urls and not self.loss_top_k:
            yield "loss_top_k=0 compares the whole vocabulary, and a server tells some tokens; set a number, such as 20"
        if self.teacher_urls and self.seq_kd:
            yield "seq_kd=True needs a teacher in this process; leave out the address of a server"

    @property
    def teacher_urls(self) -> dict[str, str]:
        """``{name: address}`` of the teachers behind servers."""
        return {"": self.teacher_model_server_url} if self.teacher_model_server_url else self.teacher_server_urls or {}

    @property
    def measured_at(self) -> float:
        """The temperature of the divergence."""
        return self.temperature if self.loss_temperature is None else self.loss_temperature


class DistillationTrainer(RolloutTrainer):
    """Trains a student to predict what its teacher predicts, by default on completions that the student writes.

    Args:
        model: the student.
        teacher_model: a causal language model, or the name or folder of one; None: as `args` name it.
        train_dataset: rows with a `prompt`, and for ``lmbda`` below 1 a `completion`; or `messages`, whose last turn is
            the completion.
        reward_funcs: metrics of the completions; they change nothing of the loss.

    The other arguments are those of `RolloutTrainer`.
    """

    config_class: type[DistillationConfig] = DistillationConfig
    args: DistillationConfig
    tag_names = ("posttrain", "distillation")
    signature_columns = ("prompt", "completion", "messages", *IMAGE_COLUMNS, *VIDEO_COLUMNS)
    average = "tokens"
    learns_from_rewards = False
    INSTEAD = RolloutTrainer.INSTEAD | {"generalized_jsd_loss": "override compute_loss"}

    def __init__(
        self,
        model: nn.Module | str | None = None,
        teacher_model: nn.Module | str | None = None,
        args: DistillationConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Any] | None = None,
        reward_funcs: Any = None,
        **others: Any,
    ) -> None:
        given = passed_on(locals(), "teacher_model")
        args = given["args"] = self.config_class() if args is None else args
        named = value_of(args, "teacher_model_name_or_path")
        self.given_reference = named if teacher_model is None else teacher_model
        super().__init__(**given)
        self.teacher_model, self.lmbda, self.seq_kd = self.ref_model, args.lmbda, args.seq_kd
        by_rank = bool(args.teacher_tokenizer_name_or_path)
        self.measure = Measure(args.beta, args.measured_at, by_rank, args.loss_add_tail)
        self.teacher = self._make_teacher()
        model = self.teacher_model
        self._teacher_parameters = 0 if model is None else normalization.flops_parameters(wrapping.unwrap(model))

    @classmethod
    def preflight(cls, args: TrainingArguments, parts: Parts) -> Iterator[Problem]:
        """Adds problems with the teacher, and with completions that are not there."""
        args = checked_args(args, DistillationConfig)
        given = parts.train_dataset, parts.eval_dataset
        parts.train_dataset, parts.eval_dataset = map(with_prompts, given, ("train_dataset", "eval_dataset"))
        yield from super().preflight(args, parts)
        if (parts.ref_model is None) == (not args.teacher_urls):
            how = "No teacher" if parts.ref_model is None else "Two teachers"
            yield ValueError(
                f"{how}: pass teacher_model, or set one of teacher_model_name_or_path, teacher_model_server_url and "
                "teacher_server_urls."
            )
        if not isinstance(parts.ref_model, (str, os.PathLike)):
            for name in set_among(args, "teacher_model_init_kwargs", "teacher_model_revision"):
                yield ValueError(f"{name} is for a teacher given by name, which this one is not; leave it out.")
        if any(map(has_images, (parts.train_dataset, parts.eval_dataset))):
            for name in set_among(args, *BEHIND_SERVERS.split("|"), "teacher_tokenizer_name_or_path", "use_uld_loss"):
                yield f"{name} is not supported for prompts with images, which the teacher reads too"
        if args.max_length is not None and parts.others.get("agent"):
            yield ValueError(
                "max_length is for prompts of rows, and an agent makes its own; set max_completion_length."
            )
        row = _first(parts.train_dataset)
        if args.lmbda < 1 and not args.seq_kd and row is not None and row.get("completion") is None:
            yield DataError(
                f"lmbda={args.lmbda} learns from the dataset's completions too, and the first row has none. Give rows "
                "of prompt and completion, or of messages; or set lmbda=1, or seq_kd=True."
            )
        parts.train_dataset, parts.eval_dataset = given  # rows of messages are read when they are sampled from

    @staticmethod
    def generalized_jsd_loss(
        student_logits: torch.Tensor,
        teacher_logits: torch.Tensor,
        labels: torch.Tensor | None = None,
        beta: float = 0.5,
        temperature: float = 1.0,
        reduction: str = "batchmean",
        num_items_in_batch: torch.Tensor | int | None = None,
        logits_are_probs: bool = False,
    ) -> torch.Tensor:
        """The divergence of whole logits (B, T, V), for scripts that call it; training never holds them.

        Args:
            labels: (B, T), aligned with the logits; -100 where nothing is compared.
            reduction: "sum", "mean" over the terms, "none" for them, or "batchmean": the sum divided by the positions
                compared, by B without labels. num_items_in_batch: divides the sum instead.
            logits_are_probs: both are probabilities instead, of which `temperature` changes nothing.
        """
        given = student_logits, teacher_logits
        if logits_are_probs:
            student, teacher = (probs.clamp(min=1e-8).log() for probs in given)
        else:
            student, teacher = ((logits / temperature).log_softmax(-1) for logits in given)
        terms = divergence_terms(student, teacher, beta)
        count = torch.tensor(len(student_logits))
        if labels is not None:
            mask = labels != IGNORE_INDEX
            terms, count = terms[mask], mask.sum()
        if num_items_in_batch is not None or reduction == "batchmean":
            return terms.sum() / (count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        return terms if reduction == "none" else terms.mean() if reduction == "mean" else terms.sum()

    def prepare_rows(self, dataset: Any, role: str, name: str) -> Any:
        """As the base's. Rows of messages stay, unless some of them are dropped."""
        if self.sees:  # prompts with images are read as they are sampled from
            return dataset
        read = with_prompts(dataset, f"{role}_dataset")
        kept = super().prepare_rows(read, role, name)
        return dataset if kept is read else kept

    def new_samples(self, rows: Sequence[Mapping[str, Any]]) -> list[Sample]:
        """A sample without a completion for each row, whose messages are prompt and completion."""
        return super().new_samples([prompt_and_completion(row) for row in rows])

    def generate(self, samples: list[Sample], sampling: Sampling) -> list[Sample]:
        """The `samples` completed: the share of the student by itself, the others by the dataset or the teacher."""
        own = [sample for sample in samples if self._is_written(sample)]
        others = [sample for sample in samples if not self._is_written(sample)]
        written = iter(super().generate(own, sampling) if own else [])
        if self.seq_kd:
            given = iter(self._written_by_teacher(others, sampling) if others else [])
        else:
            given = (self._with_completion(sample, sampling.max_new_tokens) for sample in others)
        return [next(written if self._is_written(sample) else given) for sample in samples]

    def _with_completion(self, sample: Sample, most: int) -> Sample:
        """`sample` with the dataset's completion, of `most` tokens at most."""
        completion, context = sample.row["completion"], self.sampler.context
        if self.image_prompts is None:
            ids = self.codec.encode_completion(sample.prompt, completion)
        else:
            ids = self.image_prompts.encode_completion(self.codec, sample.row, sample.prompt, completion)
        most = most if context is None else min(most, context - len(sample.prompt_ids))
        return replace(sample, completion=completion, ids=ids[:most], finished=True)

    def compute_advantages(self, rewards: torch.Tensor, group_size: int, kl: torch.Tensor | None) -> torch.Tensor:
        """(N,) zeros: the advantages are those of tokens, see `policy_loss`."""
        return torch.zeros(len(rewards))

    def policy_loss(self, policy: CompletionLogps, inputs: dict[str, Any]) -> torch.Tensor:
        """The clipped policy gradient of the reverse divergence, (N, C)."""
        old_logps = inputs.get("old_logps", policy.logps.detach())
        advantages, ratio, args = inputs["ref_logps"] - old_logps, (policy.logps - old_logps).exp(), self.args
        self.metrics.add_sum("divergence", -(advantages * inputs["loss_mask"]).sum(), inputs["loss_mask"].sum())
        return clipped(ratio, advantages, args.epsilon, self.epsilon_high)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """The mean divergence of a token, shape (), or the policy loss."""
        if self.args.loss_type == "policy_gradient":
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        divergence, entropy, aux_loss = self.divergence(model, inputs)
        tokens = inputs["loss_mask"].sum()
        self.metrics.add_sum("divergence", divergence.detach(), self.count_items(inputs))
        self.metrics.add_sum("entropy", entropy, tokens)
        loss = self.mean_loss(divergence, inputs, num_items_in_batch, aux_loss)
        return (loss, {"divergence": divergence.detach(), "entropy": entropy}) if return_outputs else loss

    def divergence(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(divergence of a micro-batch, entropy of the student), summed over its tokens, and the router's loss."""
        given = inputs_of(inputs) | ({"output_router_logits": True} if self.router_aux_loss_coef else {})
        whole = isinstance(self.teacher, LocalTeacher) and not self._in_head
        replaced = contextlib.nullcontext() if whole else self.compared_in_head(model, inputs)
        with replaced, features_once(model, inputs.get("image_copies"), given) as shown:
            outputs = model(**shown)
        if isinstance(self.teacher, LocalTeacher) and whole:
            at, heat = inputs["labels"] != IGNORE_INDEX, self.measure.temperature
            own = (outputs.logits[:, -at.shape[1] :][at].float() / heat).log_softmax(-1)
            other = (self.teacher.logits(inputs).float() / heat).log_softmax(-1)
            divergence = divergence_terms(own, other, self.measure.beta).sum()
            summed = -(own.exp() * own.clamp(min=-1e30)).sum()
        else:
            divergence, summed = outputs.logits
        return divergence, summed.detach(), outputs.aux_loss if self.router_aux_loss_coef else None

    def compared_in_head(self, model: nn.Module, inputs: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        """Within this context the `logits` of `model` are two numbers of a micro-batch: its divergence and entropy."""
        return lm_head.divergence_in_head(model, inputs["labels"], self.teacher.known(inputs), self.measure)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As the core's, with the forward of a local teacher: 2 x tokens x parameters. Sampling is not counted."""
        ops = super().floating_point_ops(inputs)
        if type(self.teacher) is ServerTeacher or self.args.loss_type == "policy_gradient":
            return ops  # the policy gradient reads the teacher when the completions are sampled
        column = "teacher_rows" if isinstance(self.teacher, TranslatedTeacher) else "input_ids"
        return ops + 2 * normalization.count_slots(inputs, column) * self._teacher_parameters

    # ------------------------------------------------------------------------------------------------ the teacher

    @property
    def uses_reference(self) -> bool:
        """Whether the teacher's log-probabilities of the written tokens are needed, and come from a model here."""
        return self.args.loss_type == "policy_gradient" and self.reference is not None

    @property
    def _corrects_engine(self) -> bool:
        """Only the policy gradient is an average over completions of the policy; a divergence takes any."""
        return super()._corrects_engine and self.args.loss_type == "policy_gradient"

    def complete_rollout(self, rollout: Rollout, samples: list[Sample]) -> Rollout:
        """Adds what the teacher has to say."""
        return self.teacher.complete(super().complete_rollout(rollout, samples), samples)

    def _make_reference(self, fresh_adapter: bool) -> FrozenReference | None:
        teacher, args = self.given_reference, self.args
        if isinstance(teacher, (str, os.PathLike)):
            revision = {"revision": args.teacher_model_revision} if args.teacher_model_revision else {}
            options = revision | dict(args.teacher_model_init_kwargs or {})
            model_class, _ = loading.READING if self.image_prompts is None else loading.SEEING
            teacher = loading.load_causal_lm(teacher, options, None, args.trust_remote_code, model_class)
        if teacher is None:
            return None
        reference = FrozenReference(teacher, another=ANOTHER_TEACHER)
        reference.place(self.dist)
        return reference

    def tokenizer_of_teacher(self, reference: FrozenReference) -> str | None:
        """The name of the tokenizer of a teacher with other tokens."""
        return self.args.teacher_tokenizer_name_or_path

    def translated_teacher(self, *parts: Any) -> TranslatedTeacher:
        """A teacher with other tokens; the arguments are those of `TranslatedTeacher`."""
        return TranslatedTeacher(*parts)

    def _make_teacher(self) -> LocalTeacher | ServerTeacher:
        args, reference, why_not = self.args, self.reference, lm_head.supports_loss_in_head(self.model)
        if not isinstance(reference, FrozenReference):
            teacher: LocalTeacher | ServerTeacher = ServerTeacher(
                args.teacher_urls, args.loss_top_k, args.teacher_request_timeout
            )
        elif name := self.tokenizer_of_teacher(reference):
            codec = PromptCodec(loading.load_tokenizer(name, args.trust_remote_code), args.chat_template_kwargs)
            ends = self.sampling().eos_token_ids
            teacher = self.translated_teacher(reference, self.processing_class, codec, ends)
        else:
            sizes = [wrapping.base_model(m).config.get_text_config().vocab_size for m in (self.model, reference.model)]
            problem = vocabulary_problem(*sizes)
            if self.image_prompts is not None:
                problem = problem or image_problem(self.model, reference.model)
            if problem:
                raise ValueError(problem)
            teacher = LocalTeacher(reference)
            why_not = why_not or lm_head.supports_loss_in_head(reference.model)
        self._in_head = why_not is None
        if why_not and type(teacher) is not LocalTeacher:
            raise ValueError(f"A teacher with other tokens or behind a server needs the student's head: {why_not}")
        return teacher

    def _make_sampler(self, generator: Generator | None, agent: Any) -> None:
        super()._make_sampler(generator, agent)
        limits = [limit for limit in (self.args.max_length, self.sampler.context) if limit is not None]
        self.sampler.context = min(limits, default=None)

    def _is_written(self, sample: Sample) -> bool:
        """Whether the student writes this completion. Evaluations read those of the dataset, if training does."""
        if sample.is_evaluated:
            return self.lmbda == 1
        return mix(sample.seed, 1) % 2**30 < self.lmbda * 2**30

    def _written_by_teacher(self, samples: list[Sample], sampling: Sampling) -> list[Sample]:
        args, tokenizer = self.args, self.codec.tokenizer
        engine: Generator = LocalGenerator(tokenizer, args.generation_max_rows, args.generation_cache_tokens)
        if self.image_prompts is not None:
            engine = TransformersGenerator(tokenizer)
        assert isinstance(self.teacher_model, nn.Module)  # a server does not write, see `_problems`
        engine.sync_weights(self.teacher_model)
        with self.sampler.engine(engine):
            samples = super().generate(samples, sampling)
        return [replace(sample, logps=None, is_exact=False) for sample in samples]


def with_prompts(dataset: Any, name: str) -> Any:
    """Dataset `name`, or each of a dict of them, whose rows of ``messages`` are turned into prompt and completion.
    Raise DataError if the messages of a row are no conversation; names the row.
    """
    if isinstance(dataset, Mapping):
        return {part: with_prompts(rows, f"{name}[{part!r}]") for part, rows in dataset.items()}
    row = _first(dataset)
    if row is None or "prompt" in row or "messages" not in row:
        return dataset

    def numbered(row: Mapping[str, Any], number: int) -> dict[str, Any]:
        try:
            return prompt_and_completion(row)
        except DataError as error:
            raise DataError(f"{name}: {error} (rows {number}). Correct or filter that row.") from None

    if hasattr(dataset, "map"):
        return dataset.map(numbered, with_indices=True, remove_columns=["messages"])
    return [numbered(row, number) for number, row in enumerate(dataset)]


def prompt_and_completion(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of ``messages`` with ``prompt`` and ``completion``, the assistant's last turn, instead; others stay."""
    if "prompt" in row or "messages" not in row:
        return dict(row)
    messages = chat_template.to_messages(row["messages"])
    rest = {name: value for name, value in row.items() if name != "messages"}
    if messages[-1]["role"] != "assistant":
        return rest | {"prompt": messages, "completion": None}
    return rest | {"prompt": messages[:-1], "completion": messages[-1:]}


def _first(dataset: Any) -> Any:
    known = dataset is not None and not pipeline.is_stream(dataset) and pipeline.has_length(dataset) and len(dataset)
    return dataset[0] if known and isinstance(dataset[0], Mapping) else None
