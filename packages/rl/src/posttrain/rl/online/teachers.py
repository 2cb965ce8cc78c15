"""What a teacher's next-token distributions are read from: a local model, one with other tokens, or a vLLM server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from posttrain.core.data.collators import IGNORE_INDEX
from posttrain.core.data.host_copies import host_copy, know, on_host, places_of, send
from posttrain.core.errors import DataError, did_you_mean
from posttrain.core.models.wrapping import base_model
from posttrain.lm.images.image_features import ImageCopies, features_once
from posttrain.lm.images.vision import check_model, image_token_id
from posttrain.lm.loss import lm_head
from posttrain.lm.loss.distillation import HeadStates, TopK
from posttrain.rl.generation.server import RETRIES, Server
from posttrain.rl.policy.logprobs import inputs_of
from posttrain.rl.policy.reference import FrozenReference
from posttrain.rl.samples.prompts import PromptCodec
from posttrain.rl.samples.samples import Rollout, Sample

CONCURRENCY = 32
"""Concurrent requests to a server."""
WINDOW = 32
"""Tokens of a completion that are decoded again for each further one, at least, and up to twice as many."""


class LocalTeacher:
    """A model with the student's tokens, in this process. It reads each micro-batch as the student does."""

    def __init__(self, reference: FrozenReference) -> None:
        self.reference = reference

    def complete(self, rollout: Rollout, samples: Sequence[Sample]) -> Rollout:
        """`rollout` with what `known` needs of it."""
        return rollout

    def known(self, batch: Mapping[str, Any]) -> HeadStates | TopK:
        """What is known of the distributions at the labels of a micro-batch, in their order."""
        inputs = inputs_of(batch)
        return self.states(inputs, batch["labels"], batch.get("image_copies"))

    def logits(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """(M, V) whole logits at the labels, for models whose head cannot be reached."""
        inputs = inputs_of(batch)
        with self.reference.use() as model, features_once(model, batch.get("image_copies"), inputs) as shown:
            logits = model(**shown).logits
        return logits[:, -batch["labels"].shape[1] :][batch["labels"] != IGNORE_INDEX]

    def states(
        self, inputs: dict[str, Any], labels: torch.Tensor, image_copies: ImageCopies | None = None
    ) -> HeadStates:
        """Of a forward over `inputs`, at the positions of (B, T) `labels`."""
        with (
            self.reference.use() as model,
            lm_head.states_in_head(model, labels) as found,
            features_once(model, image_copies, inputs) as shown,
        ):
            model(**shown)
        return found[0]


class TranslatedTeacher(LocalTeacher):
    """A model with other tokens. It reads the same texts, and is asked where a token of both begins. `codec` is how it
    writes prompts, `tokenizer` the student's, of which the tokens `ends` end a completion.
    """

    def __init__(self, reference: FrozenReference, tokenizer: Any, codec: PromptCodec, ends: Iterable[int]) -> None:
        super().__init__(reference)
        self.tokenizer, self.codec, self.ends = tokenizer, codec, {*ends}

    def complete(self, rollout: Rollout, samples: Sequence[Sample]) -> Rollout:
        """Adds the texts in the teacher's tokens. A token has no loss where none of the teacher's begins."""
        rows, places = [], torch.full(rollout.completion_ids.shape, -1)
        for number, sample in enumerate(samples):
            prompt = self.codec.encode(sample.prompt)
            ids, common = translate(sample.ids, self.tokenizer, self.codec.tokenizer, self.ends)
            rows.append(torch.tensor([*prompt, *ids]))
            for own, other in common:
                places[number, own] = len(prompt) + other
        places = places.masked_fill(~rollout.loss_mask, -1)
        return replace(rollout.for_teacher(rows, teacher_places=places), loss_mask=places >= 0)

    def known(self, batch: Mapping[str, Any]) -> HeadStates:
        read = rows_to_read(batch)
        labels = read.pop("labels")
        return self.states(read, labels)


class AlignedTeacher(TranslatedTeacher):
    """A model with other tokens. It reads the same texts, and is asked of every token of a text that tokens of both
    cover, the ends of completions among them if it `compares_ends`.
    """

    def __init__(self, *args: Any, compares_ends: bool) -> None:
        super().__init__(*args)
        self.compares_ends = compares_ends

    def complete(self, rollout: Rollout, samples: Sequence[Sample]) -> Rollout:
        """Adds the texts in the teacher's tokens, and which tokens of both cover the same text."""
        rows, marks, groups = [], [], torch.where(rollout.loss_mask, -1, -2)
        for number, sample in enumerate(samples):
            prompt = self.codec.encode(sample.prompt)
            ids, texts = align(sample.ids, self.tokenizer, self.codec.tokenizer, self.ends, self.compares_ends)
            mark = torch.full((len(prompt) + len(ids),), -1)
            learned = [pair for pair in texts if rollout.loss_mask[number, pair[0]].all()]
            for text, (own, other) in enumerate(learned):
                groups[number, own] = mark[len(prompt) :][other] = text
            rows.append(torch.tensor([*prompt, *ids]))
            marks.append(mark)
        marked = torch.nn.utils.rnn.pad_sequence(marks, batch_first=True, padding_value=-1)
        return rollout.for_teacher(rows, groups=groups, teacher_groups=marked)


def rows_to_read(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The ``teacher_rows`` of a micro-batch as inputs of a model, with ``labels``: the tokens at ``teacher_places``, or
    those that ``teacher_groups`` counts, where they are predicted. (N, L) each.
    """
    ids, lengths = batch["teacher_rows"], batch["teacher_lengths"]
    mask = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
    marks = on_host(batch["teacher_groups"] if "teacher_groups" in batch else batch["teacher_places"])
    row, place = (marks >= 0).nonzero(as_tuple=True)
    if "teacher_groups" not in batch:
        place = marks[row, place]
    labels = torch.full(ids.shape, IGNORE_INDEX)
    labels[row, place - 1] = on_host(ids)[row, place]  # the position before a token predicts it
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": send(labels, ids.device)}


def align(
    ids: Sequence[int], student: Any, teacher: Any, ends: Iterable[int] = (), with_end: bool = False
) -> tuple[list[int], list[tuple[slice, slice]]]:
    """A completion in the tokens of `teacher`, and the shortest texts that tokens of both cover, the end among them if
    `with_end`: (the teacher's ids, ``[(where in ids, where in the teacher's ids), ...]`` in ascending order). A
    character of which `ids` hold a part alone is in none.
    """
    made, common = translate(ids, student, teacher, ends)
    is_ended = bool(ids) and ids[-1] in {*ends}
    own, other = len(ids) - is_ended, len(made) - (is_ended and teacher.eos_token_id is not None)
    edges = [(0, 0), *(pair for pair in common if min(pair) > 0 and pair[0] < own), (own, other)]
    texts = [(slice(a, c), slice(b, d)) for (a, b), (c, d) in pairwise(edges) if a < c and b < d]
    texts = [pair for pair in texts if "\ufffd" not in student.decode(ids[pair[0]], clean_up_tokenization_spaces=False)]
    return made, [*texts, (slice(own, own + 1), slice(other, other + 1))] if with_end and other < len(made) else texts


def translate(
    ids: Sequence[int], student: Any, teacher: Any, ends: Iterable[int] = ()
) -> tuple[list[int], list[tuple[int, int]]]:
    """A completion in the tokens of `teacher`, and the tokens that begin at the same character: (the teacher's ids,
    ``[(place in ids, place in the teacher's ids), ...]`` in ascending order). The teacher's end token stands for one of
    the student's `ends`.
    """
    ends = {*ends}
    is_ended = bool(ids) and ids[-1] in ends
    body = list(ids[:-1] if is_ended else ids)
    text = student.decode(body, clean_up_tokenization_spaces=False)
    made = teacher(text, add_special_tokens=False)["input_ids"]
    own, other = beginnings(body, student, text), beginnings(made, teacher, text)
    common = [(own[at], other[at]) for at in sorted(own.keys() & other.keys())]
    if is_ended and teacher.eos_token_id is not None:
        common.append((len(body), len(made)))
        made = [*made, teacher.eos_token_id]
    return made, common


def beginnings(ids: Sequence[int], tokenizer: Any, text: str) -> dict[int, int]:
    """``{character: token}``: where in `text` the tokens begin, of those that begin with a whole character."""
    found: dict[int, int] = {}
    first = start = known = place = 0  # token `start` begins at character `place`, and `known` are from `first` to it
    for number in range(len(ids)):
        piece = tokenizer.decode(ids[first:number], clean_up_tokenization_spaces=False)[known:]
        if text.startswith(piece, place):  # else it ends within a character
            found[place + len(piece)] = number  # of several that begin there the last, which adds to the text
            # After bytes that are none, whether the next are a character depends on those.
            if number - start >= WINDOW and not piece.endswith("\ufffd"):
                first, start, place = start, number, place + len(piece)
                known = len(tokenizer.decode(ids[first:start], clean_up_tokenization_spaces=False))
    return found


class ServerTeacher:
    """Models behind ``vllm serve``, which tell their most probable tokens.

    Args:
        urls: ``{name: address}``, such as ``http://host:8000``; of several, the column ``teacher_id`` of a row names
            one. top_k: tokens that are asked for, besides the one that was written; the server's ``--max-logprobs``
            bounds them.
        timeout: seconds within which a server must answer. limit: the argument of the user that sets it.
    """

    def __init__(
        self, urls: Mapping[str, str], top_k: int, timeout: float = 1800.0, limit: str = "teacher_request_timeout"
    ) -> None:
        self.servers, self.top_k = {name: Server(url, timeout, limit=limit) for name, url in urls.items()}, top_k
        self._models: dict[str, str] = {}

    def complete(self, rollout: Rollout, samples: Sequence[Sample]) -> Rollout:
        """Adds the teacher's most probable tokens, and in ``ref_logps`` what it finds of the written ones."""
        for name in {self._name(sample) for sample in samples} - {*self._models}:
            self._models[name] = self.servers[name].call("/v1/models", retries=RETRIES)["data"][0]["id"]
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            answered = list(pool.map(self._ask, samples))
        ids = torch.zeros(*rollout.completion_ids.shape, self.top_k + 1, dtype=torch.long)
        ids[~rollout.loss_mask] = -1  # which says so without a look at the mask
        logps = torch.full(ids.shape, -torch.inf)
        written = torch.zeros(rollout.completion_ids.shape)
        for number, (sample, tokens) in enumerate(zip(samples, answered, strict=True)):
            for place, (token, known) in enumerate(zip(sample.ids, tokens, strict=True)):
                if not rollout.loss_mask[number, place]:
                    continue
                ids[number, place, : len(known)] = torch.tensor(list(known))
                logps[number, place, : len(known)] = torch.tensor(list(known.values()))
                written[number, place] = known[token]
        return replace(rollout, teacher_ids=ids, teacher_logps=logps, ref_logps=written)

    def known(self, batch: Mapping[str, Any]) -> TopK:
        first, copy = batch["teacher_ids"][..., 0], host_copy(batch["teacher_ids"])
        at = places_of(know(first >= 0, None if copy is None else copy[..., 0] >= 0))
        return TopK(*(batch[name].flatten(0, 1)[at] for name in ("teacher_ids", "teacher_logps")))

    def _ask(self, sample: Sample) -> list[dict[int, float]]:
        """``{token: log-probability}`` at each token of a completion."""
        if not sample.ids:
            return []
        ids = [*sample.prompt_ids, *sample.ids]
        name = self._name(sample)
        server = self.servers[name]
        body = {"model": self._models[name], "prompt": ids, "max_tokens": 1, "prompt_logprobs": self.top_k}
        answer = server.call("/v1/completions", body, retries=RETRIES)
        known = answer["choices"][0].get("prompt_logprobs") or []
        if len(known) != len(ids):
            raise ConnectionError(
                f"The teacher's server at {server.url} returned log-probabilities of {len(known)} of "
                f"{len(ids)} tokens. It must be vLLM's own (`vllm serve`), whose --max-logprobs is at "
                f"least loss_top_k={self.top_k}."
            )
        return [
            {int(token): float(found["logprob"]) for token, found in position.items()}
            for position in known[len(sample.prompt_ids) :]
        ]

    def _name(self, sample: Sample) -> str:
        """Of the teacher of a row; a DataError where the row names none of several."""
        if len(self.servers) == 1:
            return next(iter(self.servers))
        name = sample.row.get("teacher_id")
        if name not in [*self.servers]:  # it may be of any type
            raise DataError(
                f"The row with the prompt {str(sample.prompt)[:80]!r} has teacher_id={name!r}, which is not "
                f"among the teachers ({', '.join(self.servers)})"
                f"{did_you_mean(str(name), self.servers) or '.'} With several teacher_server_urls, each row names its "
                "teacher in the column teacher_id."
            )
        return str(name)


def image_problem(student: nn.Module, teacher: nn.Module) -> str | None:
    """Why `teacher` cannot see the images that `student` is shown, as a sentence; None if it can.

    Both read the same tokens and the same tensors of one processor.
    """
    try:
        check_model(base_model(teacher))
    except TypeError as error:
        return f"The teacher cannot see: {error}"
    tokens = [image_token_id(base_model(model)) for model in (student, teacher)]
    if tokens[0] == tokens[1]:
        return None
    return (
        f"Token {tokens[0]} stands for images to the student, and token {tokens[1]} to the teacher. Use a teacher of "
        "the student's family, which reads images through the same processor."
    )


def vocabulary_problem(student: int, teacher: int) -> str | None:
    """Why heads with vocabularies of these sizes cannot be compared token by token, as a sentence; None if they can.

    Of one tokenizer, models differ in how far they pad the vocabulary: by less than 1,024 tokens.
    """
    if abs(student - teacher) < 1024 <= min(student, teacher) or student == teacher:
        return None
    return (
        f"The student has vocab_size {student} and the teacher {teacher}, so their tokens are not the same. Use a "
        "teacher with the student's tokenizer, or set teacher_tokenizer_name_or_path to compare them by rank."
    )
