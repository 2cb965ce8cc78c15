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

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from posttrain.core.data.collators import IGNORE_INDEX, pad_rows
from posttrain.core.data.host_copies import host_copy, know
from posttrain.core.losses import selective_log_softmax, shift_labels
from posttrain.core.models import wrapping
from posttrain.core.models.special_tokens import tokenizer_of
from posttrain.lm.attention import varlen_attention
from posttrain.lm.attention.segments import Segments
from posttrain.lm.images.image_features import ImageCopies, features_once
from posttrain.lm.images.image_positions import shared_positions
from posttrain.lm.loss import lm_head
from posttrain.lm.loss.language_modeling import labelled_places
from posttrain.lm.text import chat_template

Ids = Sequence[int]
ROWS_AT_ONCE = 512
"""Positions whose whole logits are converted to float32 at a time."""
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
    pad = partial(pad_rows, pad_to_multiple_of=multiple)
    return {
        "input_ids": pad(prompts, pad_token_id),
        "attention_mask": pad([[1] * len(p) for p in prompts], 0),
        "decoder_input_ids": pad([[encoder.start, *c[:-1]] for c in completions], pad_token_id),
        "completion_mask": pad([[1] * len(c) for c in completions], 0),
        "shift_labels": pad(completions, IGNORE_INDEX),
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
    pad = partial(pad_rows, pad_to_multiple_of=pad_to_multiple_of)
    return {
        "input_ids": pad([p + c for p, c in rows], pad_token_id),
        "attention_mask": pad([[1] * (len(p) + len(c)) for p, c in rows], 0),
        "completion_mask": pad([[0] * len(p) + [1] * len(c) for p, c in rows], 0),
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

    Where the model's head cannot do this itself, its logits are held whole, see `token_scores`.
    """
    plain = {name: value for name, value in batch.items() if name not in NOT_FOR_THE_MODEL} | options
    if "shift_labels" in batch:
        labels, mask = batch["shift_labels"], batch["completion_mask"].bool()
    else:
        labels = shift_labels(_completion_labels(batch["input_ids"], batch["completion_mask"]))
        mask = labels != IGNORE_INDEX
    scores, outputs = token_scores(model, plain, labels, temperature, stats, batch.get("image_copies"))
    if "completion_places" in batch:
        scores = scores.flatten(1)[:, batch["completion_places"]] * mask
    logps, *values = scores.unbind()
    found = {name: stat.detach() for name, stat in zip(stats, values, strict=True)}
    return CompletionScores(logps, mask, found, getattr(outputs, "aux_loss", None))


def token_scores(
    model: nn.Module,
    inputs: dict[str, Any],
    labels: torch.Tensor,
    temperature: float,
    stats: tuple[str, ...],
    image_copies: ImageCopies | None = None,
    with_gradient: bool = False,
) -> tuple[torch.Tensor, Any]:
    """((1 + S, B, T) log-probabilities of (B, T) `labels` and their `stats`, 0 without a label; the model's outputs).

    Args:
        with_gradient: of the `stats`. This needs whole logits, as do models whose head cannot be reached.
    """
    once = nullcontext(inputs) if image_copies is None else features_once(model, image_copies, inputs)
    if with_gradient or lm_head.supports_loss_in_head(model):
        with once as shown:
            outputs = model(**shown)
        logits = outputs.logits[:, -labels.shape[1] :]  # prompt tuning puts virtual tokens before them
        return _scores_of(logits, labels, temperature, stats, with_gradient), outputs
    with lm_head.logps_in_head(model, labels, shifted=True, temperature=temperature, stats=stats), once as shown:
        outputs = model(**shown)
    return outputs.logits if stats else outputs.logits.unsqueeze(0), outputs


def _completion_labels(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    labels, known, known_mask = ids.masked_fill(mask == 0, IGNORE_INDEX), host_copy(ids), host_copy(mask)
    if known is None or known_mask is None:
        return labels
    return know(labels, known.masked_fill(known_mask == 0, IGNORE_INDEX))


#: ``(logits (M, V), their log-softmax, targets (M,)) -> (M,)``
_STATS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "correct": lambda logits, logps, targets: (logits.argmax(-1) == targets).float(),
    "entropy": lambda logits, logps, targets: -(logps.exp() * logps.clamp(min=-1e30)).sum(-1),
    "mean_logit": lambda logits, logps, targets: logits.mean(-1),
    "log_collision": lambda logits, logps, targets: (2 * logps).logsumexp(-1),
}


def _scores_of(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, stats: tuple[str, ...], with_gradient: bool
) -> torch.Tensor:
    """`token_scores` of (B, T, V) logits, of which some rows at a time are in float32."""
    places, parts = labelled_places(labels), []
    for some in torch.split(places, ROWS_AT_ONCE):
        at = some // labels.shape[1], some % labels.shape[1]
        scaled, targets = logits[at].float() / temperature, labels[at]
        with torch.set_grad_enabled(with_gradient and torch.is_grad_enabled()):
            logps = scaled.log_softmax(-1) if stats else scaled
            found = [_STATS[name](scaled, logps, targets) for name in stats]
        parts.append(torch.stack([selective_log_softmax(scaled, targets), *found]))
    scores = torch.zeros(1 + len(stats), labels.numel(), device=logits.device)
    scores = scores.index_copy(1, places, torch.cat(parts, 1)) if len(places) else scores + 0 * logits.sum().float()
    return scores.view(-1, *labels.shape)
