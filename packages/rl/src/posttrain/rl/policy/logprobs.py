"""Lays completions out behind their prompts, and computes their log-probabilities without storing logits.

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
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from posttrain.core.data.collators import IGNORE_INDEX, pad_rows
from posttrain.core.data.host_copies import host_copy, know
from posttrain.core.losses import selective_log_softmax, shift_labels
from posttrain.core.models import wrapping
from posttrain.core.models.special_tokens import tokenizer_of
from posttrain.lm.attention import varlen_attention
from posttrain.lm.attention.router_replay import ROUTES
from posttrain.lm.attention.segments import Segments
from posttrain.lm.images.image_features import ImageCopies, features_once
from posttrain.lm.images.image_positions import shared_positions
from posttrain.lm.loss import lm_head
from posttrain.lm.loss.language_modeling import labelled_places
from posttrain.lm.text import chat_template

Ids = Sequence[int]
ROWS_AT_ONCE = 512
"""Positions whose whole logits are converted to float32 at a time."""
FOR_THE_MODEL = ("attention_mask", "position_ids", "segments", ROUTES)
#: Entries of a batch that describe the scored tokens; all others are inputs of the model.
NOT_FOR_THE_MODEL = (
    *"completion_mask completion_places shift_labels ref_chosen_logps ref_rejected_logps ref_logps label".split(),
    *"more_completions image_copies".split(),
)


def sharing_problem(models: Sequence[nn.Module], example: Any, router_loss: float, compiles: bool) -> str | None:
    """Why completions cannot stand in one row, behind one copy of their prompt, as a sentence; None if they can.

    `router_loss` is the weight of a router's load-balancing loss, and `compiles` whether the `models` that read them
    are compiled. For `example` see `varlen_attention.segments_problem`.
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

    for prompt, completions in groups:
        prompt = list(prompt)
        shared, before = (prompt[:-1], prompt[-1:]) if share else ([], prompt)
        parent = len(lengths) if shared else -1
        if shared:
            lengths.append(len(shared))
            parents.append(-1)
        ids += shared
        labels += [IGNORE_INDEX] * len(shared)
        first = len(lengths)
        for completion in completions:
            scored = completion if before else completion[1:]
            # One token behind nothing: no one predicts it, and the model reads it in vain.
            tokens = [*before, *completion[:-1]] if scored else list(completion)
            ids += tokens
            labels += [*[IGNORE_INDEX] * (len(tokens) - len(scored)), *scored]
            lengths.append(len(tokens))
            parents.append(parent)
            places.append(range(len(ids) - len(scored), len(ids)))
        segments_of_groups.append((len(shared), lengths[first:]))
    row = torch.tensor([ids])
    inputs = Segments(tuple(lengths), tuple(parents)).model_inputs(row.shape)
    if positions is not None:
        inputs["position_ids"] = shared_positions(positions, segments_of_groups)
    starts, sizes = torch.tensor([[place.start, len(place)] for place in places]).view(-1, 2, 1).unbind(1)
    number = torch.arange(max(map(len, places)))
    mask = (number < sizes).long()
    return {
        "completion_mask": mask,
        "completion_places": (starts + number) * mask,
        "input_ids": row,
        "shift_labels": torch.tensor([labels]),
        **inputs,
    }


@dataclass(frozen=True)
class Encoder:
    """`start`, the first token of an encoder-decoder's decoder, and `end`, the tokens after a prompt in its encoder."""

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


def padded_rows(
    groups: Sequence[tuple[Ids, Sequence[Ids]]],
    pad_token_id: int,
    pad_to_multiple_of: int | None = None,
    encoder: Encoder | None = None,
) -> dict[str, torch.Tensor]:
    """A batch of a row for each of K completions, behind its prompt.

    Returns:
        ``input_ids``, ``attention_mask`` and ``completion_mask``, each (K, T). With an `encoder`, the first two are
        (K, P), of the prompts, and ``decoder_input_ids``, ``completion_mask`` and ``shift_labels`` (K, T).
    """
    rows = [(list(prompt), list(completion)) for prompt, completions in groups for completion in completions]
    pad = partial(pad_rows, pad_to_multiple_of=pad_to_multiple_of)
    read = [prompt + completion if encoder is None else [*prompt, *encoder.end] for prompt, completion in rows]
    batch = {"input_ids": pad(read, pad_token_id), "attention_mask": pad([[1] * len(ids) for ids in read], 0)}
    if encoder is None:
        return batch | {"completion_mask": pad([[0] * len(p) + [1] * len(c) for p, c in rows], 0)}
    return batch | {
        "decoder_input_ids": pad([[encoder.start, *c[:-1]] for _, c in rows], pad_token_id),
        "completion_mask": pad([[1] * len(c) for _, c in rows], 0),
        "shift_labels": pad([c for _, c in rows], IGNORE_INDEX),
    }


def reorder(batch: dict[str, Any], order: Sequence[int]) -> dict[str, Any]:
    """`batch` with its completions in another order; a flattened row stays, only the positions change."""
    names = ("completion_mask", "completion_places") if "completion_places" in batch else tuple(batch)
    index = torch.as_tensor(order)
    return batch | {name: batch[name][index] for name in names}


def lay_out(
    prompts: Sequence[torch.Tensor],
    completions: Sequence[torch.Tensor],
    mask: torch.Tensor,
    share: bool,
    pad_token_id: int = 0,
    multiple: int | None = None,
    keys: Sequence[int] | None = None,
    positions: Sequence[torch.Tensor] | None = None,
) -> dict[str, Any]:
    """N prompts and completions as the input of a model.

    Args:
        prompts, completions: token ids, (P_i,) and (C_i,), at least one token each.
        mask: (N, C) bool, the tokens with a loss. C is the longest completion, or more.
        share: adjacent completions of the same prompt follow one copy of it, all in one row, see `shared_rows`.
        multiple: pad rows to a multiple of this.
        keys: of each prompt, where equal tokens are not equal prompts, because they show other images.
        positions: of each prompt that is shared, see `shared_rows`.

    Returns:
        ``input_ids``, (N, L), or (1, L) where shared, with the model's other inputs; ``labels`` of the same shape, the
        token that each position predicts, -100 for none; ``loss_mask``, (N, C) float; ``places``, (N, C): where in the
        flattened predictions each completion's tokens are predicted.
    """
    if share:
        batch = shared_rows(groups(prompts, completions, keys), positions=positions)
        places = batch.pop("completion_places")
        del batch["shift_labels"]
    else:
        pairs = zip(prompts, completions, strict=True)
        batch = padded_rows([(p.tolist(), [c.tolist()]) for p, c in pairs], pad_token_id, multiple)
        # Those beyond a completion's end belong to others and are masked.
        row = torch.arange(batch["input_ids"].numel()).view_as(batch["input_ids"])
        starts = torch.tensor([len(prompt) for prompt in prompts]).unsqueeze(1) - 1
        longest = max(len(completion) for completion in completions)
        places = (row[:, :1] + starts + torch.arange(longest)).clamp(max=row.numel() - 1)
    del batch["completion_mask"]
    labels, width = torch.full_like(batch["input_ids"], IGNORE_INDEX), mask.shape[1]
    places = nn.functional.pad(places, (0, width - places.shape[1]))[:, :width]
    tokens = nn.utils.rnn.pad_sequence(list(completions), batch_first=True)[:, :width]
    tokens = nn.functional.pad(tokens, (0, width - tokens.shape[1]))
    labels.view(-1)[places[mask]] = tokens[mask]
    return batch | {"labels": labels, "places": places, "loss_mask": mask.float()}


def lay_out_values(
    values: torch.Tensor,
    prompts: Sequence[torch.Tensor],
    completions: Sequence[torch.Tensor],
    share: bool,
    like: torch.Tensor,
    fill: int,
) -> torch.Tensor:
    """What belongs to each token of prompt and completion, (N, at least P + C - 1, ...), as `lay_out` laid the tokens
    out for the same arguments: (B, L, ...), as the ``input_ids``, `like`. `fill` is the value of padding, and of last
    tokens of completions, of which nothing is known.
    """
    if not share:
        table = values.new_full((*like.shape, *values.shape[2:]), fill)
        width = min(like.shape[1], values.shape[1])
        table[:, :width] = values[:, :width]
        return table
    parts, rows = [], iter(values)
    for prompt, group in groups(prompts, completions):  # all but its last token, then each completion behind that
        behind, own = len(prompt) - 1, [next(rows) for _ in group]
        parts += [own[0][:behind], *(row[behind:][: len(ids)] for row, ids in zip(own, group, strict=True))]
    return torch.cat(parts).unsqueeze(0)


def groups(
    prompts: Sequence[torch.Tensor], completions: Sequence[torch.Tensor], keys: Sequence[Any] | None = None
) -> list[tuple[list[int], list[list[int]]]]:
    """Adjacent completions of the same prompt, as ``(prompt, completions)``: of the same key, or else tokens."""
    keys = [prompt.tolist() for prompt in prompts] if keys is None else keys
    runs = [list(run) for _, run in groupby(range(len(prompts)), key=keys.__getitem__)]
    return [(prompts[run[0]].tolist(), [completions[i].tolist() for i in run]) for run in runs]


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
    """Score the completions of a batch made by `shared_rows` or `padded_rows`, see `token_scores`. The logits are
    divided by `temperature`, and `options` are further arguments of the model's forward.
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
    """((1 + S, B, T) log-probabilities of (B, T) `labels` and their `stats`, names in
    `posttrain.lm.loss.language_modeling.TOKEN_STATS`, 0 without a label; the model's outputs).

    With a gradient of the `stats`, logits are held whole, as for models whose head cannot be reached.
    """
    once = nullcontext(inputs) if image_copies is None else features_once(model, image_copies, inputs)
    head = None if with_gradient else lm_head.find_head(model)[0]
    if head is None:
        with once as shown:
            outputs = model(**shown)
        logits = outputs.logits[:, -labels.shape[1] :]  # prompt tuning puts virtual tokens before them
        return _scores_of(logits, labels, temperature, stats, with_gradient), outputs
    in_head = lm_head.logps_in_head(model, labels, head, shifted=True, temperature=temperature, stats=stats)
    with in_head, once as shown:
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


class CompletionLogps(NamedTuple):
    """Of N completions of up to C tokens: (N, C) each, 0 where there is nothing to learn. logps: with the graph.
    entropies: of the predicted distributions, in nats; None unless requested. aux_loss: that of routers, (), or None.
    """

    logps: torch.Tensor
    entropies: torch.Tensor | None
    aux_loss: torch.Tensor | None


def completion_logps(
    model: nn.Module,
    batch: Mapping[str, Any],
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
    router_logits: bool = False,
) -> CompletionLogps:
    """Log-probabilities of the tokens with a loss under softmax(logits / temperature), of a `batch` of `lay_out`. For
    `entropy_gradient` see `token_scores`.
    """
    inputs = inputs_of(batch) | ({"output_router_logits": True} if router_logits else {})
    stats, images = ("entropy",) if with_entropy else (), batch.get("image_copies")
    found, outputs = token_scores(model, inputs, batch["labels"], temperature, stats, images, entropy_gradient)
    logps, *entropies = (values.reshape(-1)[batch["places"]].float() * batch["loss_mask"] for values in found)
    (entropy,) = (e if entropy_gradient else e.detach() for e in entropies) if entropies else (None,)
    return CompletionLogps(logps, entropy, outputs.aux_loss if router_logits else None)


def inputs_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a model reads of the output of `lay_out`."""
    given = {name: batch[name] for name in ("input_ids", *FOR_THE_MODEL) if name in batch}
    return given | batch.get("image_inputs", {})


def logp_gaps(found: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor, half: bool) -> tuple[torch.Tensor, float]:
    """The largest gap between the log-probabilities of an engine and of the policy of each completion, (N,), and how
    far rounding may bring them.

    Args:
        found, sampled: (N, C) of the policy and of the engine, NaN where that is unknown. mask: (N, C) bool.
        half: products are computed in fewer bits than those of float32.
    """
    gaps = (found - sampled).abs().masked_fill(~mask | sampled.isnan(), 0.0)
    largest = float(found.masked_fill(~mask, 0.0).abs().max())
    return gaps.amax(1), (5e-2 if half else 1e-4) * max(1.0, largest)
