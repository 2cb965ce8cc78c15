r"""What SDFT and SDPO share: a policy that learns from itself, as it predicts where its prompt holds more than the
policy's own.

Of each token of a completion, with :math:`p_S` behind the prompt and :math:`p_T` behind the teacher's prompt:
:math:`D_\alpha(p_T, p_S)`, the generalised Jensen-Shannon divergence of `posttrain.lm.loss.distillation`, or with
``distillation_mode="sampled_token"`` the policy gradient of :math:`KL(p_S \| p_T)`; times the ratio to the policy that
sampled, bounded by ``distillation_is_clip``, where that is another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from posttrain.core.config import opt, other_default, value_of
from posttrain.core.data.host_copies import host_copy, know, places_of
from posttrain.core.errors import DataError
from posttrain.core.evaluation.eval_loop import eval_mode
from posttrain.core.training.preflight import Parts
from posttrain.lm.loss.distillation import TopK, completed, divergence_terms
from posttrain.rl.generation import Sampling
from posttrain.rl.generation.engines import server_url
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.online.teachers import ServerTeacher, rows_to_read
from posttrain.rl.online.trainer import RolloutTrainer
from posttrain.rl.policy.logprobs import ROWS_AT_ONCE, inputs_of
from posttrain.rl.policy.reference import FrozenReference, MovableReference, SyncReference, make_reference
from posttrain.rl.samples.samples import Rollout, Sample

AS_MANY_TOKENS = -20.0, 20.0
"""Between these the log-ratio to the policy that sampled counts."""


@dataclass
class SelfDistillationConfig(RolloutConfig):
    """Arguments of a trainer whose teacher is the policy itself."""

    learning_rate: float = opt(5e-5, "Peak learning rate.", min=0)
    num_generations: int = opt(8, "Completions of each prompt.", min=1)
    max_completion_length: int = opt(256, "Tokens of a completion at most; longer ones are cut there.", min=1)
    disable_dropout: bool = other_default(RolloutConfig, "disable_dropout", True)
    router_aux_loss_coef: float | None = other_default(RolloutConfig, "router_aux_loss_coef", 0.0)
    distillation_mode: str = opt(
        "topk_logits",
        "Compare whole distributions, those over the student's distillation_topk tokens, or the written token.",
        choices=("sampled_token", "full_logits", "topk_logits"),
    )
    distillation_alpha: float = opt(
        0.5, "0: the forward divergence KL(teacher || student); 1: the reverse; between: both.", min=0, max=1
    )
    distillation_topk: int | None = opt(100, "Most probable tokens that are compared.", min=1)
    distillation_add_tail: bool = opt(
        False, "Compare the other tokens as one; without it, probabilities are those among the most probable."
    )
    distillation_is_clip: float | None = opt(
        2.0, "Bound of the ratio to the policy that sampled; None: no ratio.", above=0
    )
    teacher_model_kind: str = opt(
        "base",
        "The teacher: the weights that the policy begins with, those it has, or their moving average.",
        choices=("base", "live", "ema"),
    )
    teacher_update_rate: float = opt(
        0.05,
        "Share of the policy in the average after an update. Of an adapter, its factors are averaged.",
        above=0,
        max=1,
        needs="teacher_model_kind=ema",
    )
    teacher_sync_steps: int = opt(
        1, "Optimizer steps between updates of the average.", min=1, needs="teacher_model_kind=ema"
    )

    use_teacher_server: bool = opt(
        False,
        "Ask the vLLM server that samples for the teacher's distillation_topk most probable tokens, or for the written "
        "one, instead of a forward of the teacher. Its weights are those that sampled.",
    )

    def _problems(self) -> Iterator[str]:
        if self.use_teacher_server:
            for name, needed in (("use_vllm", True), ("vllm_mode", "server"), ("teacher_model_kind", "live")):
                if value_of(self, name) != needed:
                    yield f"use_teacher_server=True asks the server that samples, of the policy: set {name}={needed!r}"
            if self.distillation_mode == "full_logits":
                yield "use_teacher_server=True: a server tells some tokens alone; set distillation_mode='topk_logits'"
            if self.temperature != 1:
                yield "use_teacher_server=True: a server tells log-probabilities at temperature 1; set temperature=1"
        if self.distillation_mode == "sampled_token" and self.distillation_alpha != 1:
            yield (
                f"distillation_mode='sampled_token' is the reverse divergence, and distillation_alpha="
                f"{self.distillation_alpha}; set distillation_alpha=1"
            )
        if self.distillation_mode == "topk_logits" and self.distillation_topk is None:
            yield "distillation_mode='topk_logits' compares distillation_topk tokens; set their number, such as 100"
        if self.beta:
            yield f"beta={self.beta} needs a reference besides the teacher, which is not held; set beta=0"
        if self.sync_ref_model:
            yield "sync_ref_model=True moves a reference, and here is a teacher; set teacher_model_kind='ema'"
        if self.router_aux_loss_coef != 0:
            yield f"router_aux_loss_coef={self.router_aux_loss_coef} is not added to the distillation; set it to 0"
        if self.router_replay:
            yield "router_replay=True replays what a policy chose in sampling, and distillation does not; leave it out"


class SelfDistillationTrainer(RolloutTrainer):
    """The base of `SDFTTrainer` and `SDPOTrainer`. The whole logits of both are in memory while they are compared."""

    config_class: type[SelfDistillationConfig] = SelfDistillationConfig
    args: SelfDistillationConfig
    reads_images = False
    signature_columns = ("prompt", "privileged_context")

    def look_at_model(self, parts: Parts) -> None:
        """As the base's; the reference is the teacher."""
        super().look_at_model(parts)
        self.teacher_model = self.model if self.reference is None else self.reference.model
        asked = self.args.distillation_topk if self.args.distillation_mode == "topk_logits" else None
        where = {"": server_url(self.args).partition(",")[0]}
        given = where, asked or 1, self.args.vllm_request_timeout, "vllm_request_timeout"
        self.teacher_server = ServerTeacher(*given) if self.args.use_teacher_server else None
        if self.reference is not None and self.args.teacher_model_kind == "ema":
            self.remove_callback(SyncReference)  # of the model before
            rate, every = self.args.teacher_update_rate, self.args.teacher_sync_steps
            self.add_callback(SyncReference(self.reference, rate, every))

    def _make_reference(self, fresh_adapter: bool) -> MovableReference | None:
        kind = self.args.teacher_model_kind
        if kind == "live":
            return None
        reference = make_reference(self.model, None, fresh_adapter, moves=kind == "ema")
        if isinstance(reference, FrozenReference):
            reference.place(self.dist)
        return reference

    @contextlib.contextmanager
    def _teacher(self, model: nn.Module) -> Iterator[nn.Module]:
        """What the teacher's predictions are computed with, while `model` is trained."""
        if self.reference is not None:
            with self.reference.use() as teacher:
                yield teacher
            return
        with torch.no_grad(), eval_mode(model):
            yield model

    def generate(self, samples: list[Sample], sampling: Sampling) -> list[Sample]:
        """As the base's. Callbacks may implement ``on_generation_prompts_selected(args, state, control,
        generation_prompts, ...)``, as with trl.
        """
        self._call("on_generation_prompts_selected", lambda: {"generation_prompts": [one.prompt for one in samples]})
        return super().generate(samples, sampling)

    def with_teacher_rows(
        self, rollout: Rollout, samples: Sequence[Sample], prompts: Sequence[list[int] | None], skipped: int = 0
    ) -> Rollout:
        """`rollout` with what the teacher reads: of each of the `samples`, the last of the prompt that have room
        before its completion; None: nothing is compared. Nor are the first `skipped` tokens of each completion.

        Callbacks may implement ``on_teacher_context_built`` and ``on_self_distillation_batch_prepared``, which get the
        tensors of `shown_to_callbacks`, and ``on_generation_batch_built``, called once for each rollout to train on.
        """
        if (context := self.sampler.context) is not None:
            rooms = [max(context - len(one.ids), 1) for one in samples]
            prompts = [prompt and prompt[-room:] for prompt, room in zip(prompts, rooms, strict=True)]
        for event in ("on_teacher_context_built", "on_self_distillation_batch_prepared"):
            self._call(event, lambda: shown_to_callbacks(rollout, prompts))
        if samples and not samples[0].is_evaluated:
            parts, repeats = self.args.steps_per_generation, self.args.num_iterations
            facts = {"generate_every": parts * repeats, "steps_per_generation": parts}
            self._call("on_generation_batch_built", lambda: facts)
        rows, places = [], torch.full(rollout.completion_ids.shape, -1)
        for number, (sample, prompt) in enumerate(zip(samples, prompts, strict=True)):
            rows.append(torch.tensor([0] if prompt is None else [*prompt, *sample.ids]))
            if prompt is not None and skipped < len(sample.ids):
                places[number, skipped : len(sample.ids)] = len(prompt) + torch.arange(skipped, len(sample.ids))
        if self.teacher_server is not None:
            pairs = zip(samples, prompts, strict=True)
            asked = [replace(one, prompt_ids=prompt or [], ids=one.ids if prompt else []) for one, prompt in pairs]
            rollout = replace(self.teacher_server.complete(rollout, asked), ref_logps=rollout.ref_logps)
        return rollout.for_teacher(rows, teacher_places=places.masked_fill(~rollout.loss_mask, -1))

    def _call(self, event: str, facts: Callable[[], dict[str, Any]]) -> None:
        """Call the callbacks that implement `event`, all by name, as trl calls its events of self-distillation."""
        for callback in self.callback_handler.callbacks:
            if (listener := getattr(callback, event, None)) is not None:
                usual = {"args": self.args, "state": self.state, "control": self.control, "model": self.model}
                listener(**usual, processing_class=self.processing_class, **facts())

    def distillation(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """(the loss of each token of a micro-batch, which of them are compared): (N, C) each, 0 where not."""
        args, compared = self.args, inputs["teacher_places"] >= 0
        copy = host_copy(inputs["teacher_places"])
        at = places_of(know(compared, None if copy is None else copy >= 0))
        other: TopK | torch.Tensor
        if self.teacher_server is not None:
            other = TopK(*(inputs[name].flatten(0, 1)[at] for name in ("teacher_ids", "teacher_logps")))
        else:
            read = rows_to_read(inputs)
            with self._teacher(model) as teacher:
                labelled = read.pop("labels") >= 0
                other = teacher(**read).logits[:, -labelled.shape[1] :][labelled]
        logits = model(**inputs_of(inputs)).logits[:, -inputs["labels"].shape[1] :].flatten(0, 1)
        places = inputs["places"].flatten()[at]
        own, tokens = logits[places], inputs["labels"].flatten()[places]
        old = inputs["old_logps"].flatten()[at] if args.distillation_is_clip and "old_logps" in inputs else None

        def losses(start: int) -> torch.Tensor:
            part = slice(start, start + ROWS_AT_ONCE)
            before = None if old is None else old[part]
            theirs = TopK(*(each[part] for each in other)) if isinstance(other, TopK) else other[part]
            given = own[part], theirs, tokens[part], before, args, self.temperature
            return checkpoint(self_distillation, *given, use_reentrant=False)  # type: ignore[no-any-return]

        of_tokens = [losses(start) for start in range(0, len(at), ROWS_AT_ONCE)] or [0 * logits.sum(1)[:0].float()]
        found = torch.cat(of_tokens)
        whole = (0 * logits[:1].sum().float()).expand(compared.numel()).index_put((at,), found).view(compared.shape)
        self.metrics.add_sum("self_distillation/distillation_loss", found.detach().sum(), compared.sum())
        return whole, compared.float()


def shown_to_callbacks(rollout: Rollout, prompts: Sequence[list[int] | None]) -> dict[str, torch.Tensor | None]:
    """The tensors of a rollout under trl's names: prompts padded on the left, completions on the right.

    `teacher_input_ids` and `teacher_attention_mask` are (N, Q + C), of the teacher's `prompts` and the completions.
    Where nothing is compared, `self_distillation_mask`, (N,), is 0, and the prompt is the policy's.
    """
    places = torch.arange(rollout.completion_ids.shape[1])
    completion_mask = (places < rollout.completion_lengths.unsqueeze(1)).long()
    own = [row[:length] for row, length in zip(rollout.prompt_ids, rollout.prompt_lengths.tolist(), strict=True)]
    teachers = [row if ids is None else torch.tensor(ids) for row, ids in zip(own, prompts, strict=True)]
    kinds = own, map(torch.ones_like, own), teachers, map(torch.ones_like, teachers)
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    prompt_ids, prompt_mask, ids, mask = (pad([*rows]) for rows in kinds)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": rollout.completion_ids,
        "completion_mask": completion_mask,
        "old_per_token_logps": rollout.old_logps,
        "teacher_input_ids": torch.cat([ids, rollout.completion_ids], 1),
        "teacher_attention_mask": torch.cat([mask, completion_mask], 1),
        "self_distillation_mask": torch.tensor([float(ids is not None) for ids in prompts]),
    }


def self_distillation(
    student: torch.Tensor,
    teacher: torch.Tensor | TopK,
    tokens: torch.Tensor,
    old_logps: torch.Tensor | None,
    args: SelfDistillationConfig,
    temperature: float = 1.0,
) -> torch.Tensor:
    """The losses of M tokens, (M,), see the top of this file.

    Args:
        student, teacher: (M, V) logits. Of a teacher behind a server, its most probable tokens and the written one, at
            temperature 1; then the former are those that are compared.
        tokens: (M,), those that were written. old_logps: (M,) of the policy that sampled them; None: it is the student.
    """
    own, written = (student.float() / temperature).log_softmax(-1), tokens.unsqueeze(1)
    logps, most = own.gather(1, written).squeeze(1), args.distillation_topk or 1
    if isinstance(teacher, TopK):  # as whole distributions of which nothing else is read
        other = torch.full_like(own, -torch.inf).scatter_reduce(1, teacher.ids, teacher.logps.to(own.dtype), "amax")
    else:
        other = (teacher.float() / temperature).log_softmax(-1)
    if args.distillation_mode == "sampled_token":
        losses = (logps - other.gather(1, written).squeeze(1)).detach() * logps
    else:
        if args.distillation_mode == "topk_logits":
            ranked = other if isinstance(teacher, TopK) else own
            ids = ranked.topk(min(most, own.shape[1])).indices
            own, other = (completed(part.gather(1, ids), args.distillation_add_tail) for part in (own, other))
        losses = divergence_terms(own, other, args.distillation_alpha).sum(1)
    if old_logps is None or args.distillation_is_clip is None:
        return losses
    ratio = (logps.detach() - old_logps).clamp(*AS_MANY_TOKENS).exp()
    return losses * ratio.clamp(max=args.distillation_is_clip)


def rewritten(prompt: Any, make: Callable[[str], str]) -> Any:
    """`prompt` with ``make(text)`` in place of its text, or of that of its last message. Raise DataError if the last
    message is not the user's.
    """
    if isinstance(prompt, str):
        return make(prompt)
    *before, last = prompt
    if last["role"] != "user":
        raise DataError(
            f"The last message of a prompt is of the role {last['role']!r}, and the teacher's prompt is made of the "
            "user's last message. Give prompts that end with it."
        )
    return [*before, {"role": "user", "content": make(text_of(last["content"]))}]


def text_of(content: Any) -> str:
    """The text of a message's content, of messages one below the other, or of any other value."""
    if not isinstance(content, list):
        return str(content)
    if all(isinstance(part, Mapping) and "content" in part for part in content):
        return "\n".join(filter(None, (text_of(message["content"]) for message in content)))
    return " ".join(part["text"] for part in content if part.get("type") == "text")
