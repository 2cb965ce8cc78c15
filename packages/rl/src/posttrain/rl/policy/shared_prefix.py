"""Lays completions out behind one shared copy of their prompt and computes their log-probabilities.

A prompt of P tokens and its completions of L1, L2, ... become the segments

    prompt[:-1]   prompt[-1] + completion1[:-1]   prompt[-1] + completion2[:-1]   ...

each completion's segment continuing the prompt's. The model reads the prompt once, and position j of a completion's
segment predicts token j of that completion: nothing is gathered before the output head, which sees completion tokens
only. The numbers equal those of separate rows.

The other layout is one right-padded row for each completion. An encoder-decoder gets the prompt in its encoder and a
decoder row for each completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from posttrain.core.data.collators import IGNORE_INDEX, pad_rows
from posttrain.core.data.host_copies import host_copy, know
from posttrain.core.losses import shift_labels
from posttrain.core.models import wrapping
from posttrain.core.models.special_tokens import tokenizer_of
from posttrain.lm.attention import varlen_attention
from posttrain.lm.attention.segments import Segments
from posttrain.lm.images.image_features import features_once
from posttrain.lm.images.image_positions import shared_positions
from posttrain.lm.loss import lm_head
from posttrain.lm.text import chat_template

Ids = Sequence[int]
#: Entries of a batch that describe the scored tokens; all others are inputs of the model.
NOT_FOR_THE_MODEL = (
    "completion_mask",
    "completion_places",
    "shift_labels",
    "ref_chosen_logps",
    "ref_rejected_logps",
    "ref_logps",
    "label",
    "more_completions",
    "image_copies",
)


def sharing_problem(models: Sequence[nn.Module], example: Any, router_loss: float, compiles: bool) -> str | None:
    """Why completions cannot stand in one row, behind one copy of their prompt, as a sentence; None if they can.

    Args:
        models: that read them. example: of images that they see, see `varlen_attention.segments_problem`.
        router_loss: the weight of a router's load-balancing loss. compiles: whether the models are compiled.
    """
    if compiles:
        return "the model is compiled, and would be compiled anew for each batch."
    if router_loss:
        return "the load-balancing loss of its experts counts the tokens of a prompt for each completion."
    return next(filter(None, (varlen_attention.segments_problem(one, example) for one in models)), None)


def shared_rows(
    groups: Sequence[tuple[Ids, Sequence[Ids]]],
    share: bool = True,
    positions: Sequence[torch.Tensor] | None = None,
) -> dict[str, Any]:
    """A batch of one flattened row, without padding.

    Args:
        groups: each a prompt and its completions; K completions in all.
        share: False repeats the prompt before each completion.
        positions: of each prompt that is shared, as `posttrain.lm.images.image_positions.ImagePositions` numbers
            them; None where a token's position is how many are before it.

    Returns:
        ``input_ids`` (1, N), ``shift_labels`` (1, N), the token predicted at each position, -100 for none;
        ``completion_mask`` (K, T) and ``completion_places`` (K, T), where in the row each of a completion's up to T
        tokens is predicted; and what `Segments.model_inputs` gives. An empty prompt leaves a completion's first token
        unscored.
    """
    ids: list[int] = []
    labels: list[int] = []
    lengths: list[int] = []
    parents: list[int] = []
    places: list[range] = []
    segments_of_groups: list[tuple[int, list[int]]] = []

    def add(tokens: Ids, predicted: Ids, parent: int) -> None:
        ids.extend(tokens)
        labels.extend(predicted)
        lengths.append(len(tokens))
        parents.append(parent)

    for prompt, completions in groups:
        prompt, parent = list(prompt), -1
        if share and len(prompt) > 1:
            parent = len(lengths)
            add(prompt[:-1], [IGNORE_INDEX] * (len(prompt) - 1), -1)
        before = prompt[-1:] if share else prompt
        behind: list[int] = []
        segments_of_groups.append((lengths[-1] if parent >= 0 else 0, behind))
        for completion in completions:
            tokens = [*before, *completion[:-1]]
            scored = completion if before else completion[1:]
            if not scored:  # one token behind nothing: no one predicts it, and the model reads it in vain
                tokens = list(completion)
            start = len(ids) + len(tokens) - len(scored)
            places.append(range(start, start + len(scored)))
            add(tokens, [*[IGNORE_INDEX] * (len(tokens) - len(scored)), *scored], parent)
            behind.append(len(tokens))
    row = torch.tensor([ids])
    inputs = Segments(tuple(lengths), tuple(parents)).model_inputs(row.shape)
    if positions is not None:
        inputs["position_ids"] = shared_positions(positions, segments_of_groups)
    return {
        "completion_mask": pad_rows([[1] * len(place) for place in places], 0),
        "completion_places": pad_rows(places, 0),
        "input_ids": row,
        "shift_labels": torch.tensor([labels]),
        **inputs,
    }


@dataclass(frozen=True)
class Encoder:
    """The special tokens of an encoder-decoder's prompt and completion.

    start: the first token of the decoder. end: the tokens after a prompt in the encoder.
    """

    start: int
    end: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Any) -> Encoder | None:
        """That of `model`; None where it has no encoder."""
        if not wrapping.is_encoder_decoder(model):
            return None
        config: Any = wrapping.config_of(model)
        start = config.decoder_start_token_id
        if start is None:
            raise ValueError(
                f"{type(wrapping.base_model(model)).__name__} is an encoder-decoder without decoder_start_token_id. "
                "Set model.config.decoder_start_token_id."
            )
        return cls(start, tuple(chat_template.special_tokens_around(tokenizer_of(tokenizer))[1]))


def encoded_rows(
    groups: Sequence[tuple[Ids, Sequence[Ids]]], pad_token_id: int, encoder: Encoder, multiple: int | None = None
) -> dict[str, torch.Tensor]:
    """A batch of a row for each of K completions, whose prompt the encoder reads.

    Returns:
        ``input_ids`` and ``attention_mask`` (K, P) for the encoder; ``decoder_input_ids``, ``completion_mask`` and
        ``shift_labels`` (K, T) for the decoder.
    """
    rows = [(list(prompt), list(completion)) for prompt, completions in groups for completion in completions]
    prompts = [[*prompt, *encoder.end] for prompt, _ in rows]
    completions = [completion for _, completion in rows]
    return {
        "input_ids": pad_rows(prompts, pad_token_id, pad_to_multiple_of=multiple),
        "attention_mask": pad_rows([[1] * len(p) for p in prompts], 0, pad_to_multiple_of=multiple),
        "decoder_input_ids": pad_rows(
            [[encoder.start, *c[:-1]] for c in completions], pad_token_id, pad_to_multiple_of=multiple
        ),
        "completion_mask": pad_rows([[1] * len(c) for c in completions], 0, pad_to_multiple_of=multiple),
        "shift_labels": pad_rows(completions, IGNORE_INDEX, pad_to_multiple_of=multiple),
    }


def padded_rows(
    groups: Sequence[tuple[Ids, Sequence[Ids]]],
    pad_token_id: int,
    pad_to_multiple_of: int | None = None,
    encoder: Encoder | None = None,
) -> dict[str, torch.Tensor]:
    """A batch of a row for each of K completions, behind its prompt; see `encoded_rows` for a model with an `encoder`.

    Returns:
        ``input_ids``, ``attention_mask`` and ``completion_mask``, each (K, T).
    """
    if encoder is not None:
        return encoded_rows(groups, pad_token_id, encoder, pad_to_multiple_of)
    rows = [(list(prompt), list(completion)) for prompt, completions in groups for completion in completions]
    return {
        "input_ids": pad_rows([p + c for p, c in rows], pad_token_id, pad_to_multiple_of=pad_to_multiple_of),
        "attention_mask": pad_rows(
            [[1] * (len(p) + len(c)) for p, c in rows], 0, pad_to_multiple_of=pad_to_multiple_of
        ),
        "completion_mask": pad_rows(
            [[0] * len(p) + [1] * len(c) for p, c in rows], 0, pad_to_multiple_of=pad_to_multiple_of
        ),
    }


def reorder(batch: dict[str, Any], order: Sequence[int]) -> dict[str, Any]:
    """`batch` with its completions in another order; a flattened row stays, only the positions change."""
    names = ("completion_mask", "completion_places") if "completion_places" in batch else tuple(batch)
    index = torch.as_tensor(order)
    return batch | {name: batch[name][index] for name in names}


@dataclass(frozen=True)
class CompletionScores:
    """A model's scores for each token of K completions; all (K, T).

    logps: log-probabilities, 0 outside the mask. mask: bool, which tokens are scored. stats: the requested ones of
    `posttrain.lm.loss.language_modeling.TOKEN_STATS`, detached. aux_loss: the router's load-balancing loss, (), of
    a mixture of experts, if requested.
    """

    logps: torch.Tensor
    mask: torch.Tensor
    stats: dict[str, torch.Tensor] = field(default_factory=dict)
    aux_loss: torch.Tensor | None = None

    @property
    def lengths(self) -> torch.Tensor:
        """(K,) how many tokens of each completion are scored."""
        return self.mask.sum(1)


def score_completions(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    temperature: float = 1.0,
    stats: tuple[str, ...] = (),
    **options: Any,
) -> CompletionScores:
    """Score the completions of a batch made by `shared_rows` or `padded_rows`, in the model's head.

    Args:
        temperature: divides the logits.
        stats: names in `posttrain.lm.loss.language_modeling.TOKEN_STATS`.
        options: further arguments of the model's forward.

    Where the model's head cannot do this itself (`posttrain.lm.loss.lm_head.supports_loss_in_head`), its logits
    are held whole.
    """
    plain = {name: value for name, value in batch.items() if name not in NOT_FOR_THE_MODEL} | options
    if "shift_labels" in batch:
        labels, mask = batch["shift_labels"], batch["completion_mask"].bool()
    else:
        labels = shift_labels(_completion_labels(batch["input_ids"], batch["completion_mask"]))
        mask = labels != IGNORE_INDEX
    if lm_head.supports_loss_in_head(model) is None:
        in_head = lm_head.logps_in_head(model, labels, shifted=True, temperature=temperature, stats=stats)
        with in_head, features_once(model, batch.get("image_copies"), plain) as inputs:
            outputs = model(**inputs)
        scores = outputs.logits if stats else outputs.logits.unsqueeze(0)
    else:
        with features_once(model, batch.get("image_copies"), plain) as inputs:
            outputs = model(**inputs)
        scores = _scores_of(outputs.logits[:, -labels.shape[1] :] / temperature, labels, stats)
    if "completion_places" in batch:
        scores = scores.flatten(1)[:, batch["completion_places"]] * mask
    logps, *found = scores.unbind()
    found = {name: stat.detach() for name, stat in zip(stats, found, strict=True)}
    return CompletionScores(logps, mask, found, getattr(outputs, "aux_loss", None))


def _completion_labels(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    labels, known, known_mask = ids.masked_fill(mask == 0, IGNORE_INDEX), host_copy(ids), host_copy(mask)
    if known is None or known_mask is None:
        return labels
    return know(labels, known.masked_fill(known_mask == 0, IGNORE_INDEX))


def _scores_of(logits: torch.Tensor, labels: torch.Tensor, stats: tuple[str, ...]) -> torch.Tensor:
    """(1 + S, B, T) log-probabilities of the labels and their `stats` from (B, T, V) logits; 0 without a label."""
    at = labels != IGNORE_INDEX
    targets, logits = labels[at], logits[at].float()
    all_logps = logits.log_softmax(-1)
    known = {
        "correct": lambda: (logits.argmax(-1) == targets).float(),
        "entropy": lambda: -(all_logps.exp() * all_logps).sum(-1),
        "mean_logit": lambda: logits.mean(-1),
        "log_collision": lambda: (2 * all_logps).logsumexp(-1),
    }
    found = [all_logps.gather(1, targets.unsqueeze(1)).squeeze(1), *(known[name]().detach() for name in stats)]
    return all_logps.new_zeros(len(found), *labels.shape).masked_scatter(
        at.expand(len(found), -1, -1), torch.stack(found)
    )
