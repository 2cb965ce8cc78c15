"""Computes log-probabilities of completions without storing logits or reading a prompt twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from posttrain.core.data.collators import IGNORE_INDEX
from posttrain.lm.attention.router_replay import ROUTES
from posttrain.rl.policy.shared_prefix import shared_rows, token_scores

FOR_THE_MODEL = ("attention_mask", "position_ids", "segments", ROUTES)


class CompletionLogps(NamedTuple):
    """Of N completions of up to C tokens: (N, C) each, 0 where there is nothing to learn.

    logps: with the graph. entropies: of the predicted distributions, in nats; None unless requested. aux_loss: of the
    routers of a mixture of experts, shape (), or None.
    """

    logps: torch.Tensor
    entropies: torch.Tensor | None
    aux_loss: torch.Tensor | None


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
        share: adjacent completions of the same prompt follow one copy of it, all in one row, see
            `posttrain.rl.policy.shared_prefix`.
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
        places, labels = batch.pop("completion_places"), batch.pop("shift_labels")
        del batch["completion_mask"]
    else:
        batch = _padded(prompts, completions, pad_token_id, multiple)
        places, labels = batch.pop("places"), torch.full_like(batch["input_ids"], IGNORE_INDEX)
    width = mask.shape[1]
    places = nn.functional.pad(places, (0, width - places.shape[1]))[:, :width]
    tokens = nn.utils.rnn.pad_sequence(list(completions), batch_first=True)[:, :width]
    tokens = nn.functional.pad(tokens, (0, width - tokens.shape[1]))
    labels.fill_(IGNORE_INDEX).view(-1)[places[mask]] = tokens[mask]
    return batch | {"labels": labels, "places": places, "loss_mask": mask.float()}


def lay_out_values(
    values: torch.Tensor,
    prompts: Sequence[torch.Tensor],
    completions: Sequence[torch.Tensor],
    share: bool,
    like: torch.Tensor,
    fill: int,
) -> torch.Tensor:
    """What belongs to each token of prompt and completion, (N, at least P + C - 1, ...), as `lay_out` laid the tokens.

    Args:
        like: (B, L) the ``input_ids`` of `lay_out`, for the same arguments.
        fill: the value of padding, and of last tokens of completions, of which nothing is known.

    Returns:
        (B, L, ...).
    """
    rest = values.shape[2:]
    table = values.new_full((*like.shape, *rest), fill)
    lengths = [(len(prompt), len(completion)) for prompt, completion in zip(prompts, completions, strict=True)]
    if not share:
        width = min(like.shape[1], values.shape[1])
        table[:, :width] = values[:, :width]
        return table
    parts, first = [], 0
    for _, group in groups(prompts, completions):  # the prompt but its last token, then each completion behind that
        parts.append(values[first, : lengths[first][0] - 1])
        for row in range(first, first + len(group)):
            start, size = lengths[row]
            parts.append(values[row, start - 1 : start - 1 + size])
        first += len(group)
    table[0] = torch.cat(parts)
    return table


def groups(
    prompts: Sequence[torch.Tensor], completions: Sequence[torch.Tensor], keys: Sequence[Any] | None = None
) -> list[tuple[list[int], list[list[int]]]]:
    """Adjacent completions of the same prompt, as ``(prompt, completions)``: of the same key, or else tokens."""
    keys = [prompt.tolist() for prompt in prompts] if keys is None else keys
    runs = [list(run) for _, run in groupby(range(len(prompts)), key=keys.__getitem__)]
    return [(prompts[run[0]].tolist(), [completions[i].tolist() for i in run]) for run in runs]


def _padded(
    prompts: Sequence[torch.Tensor], completions: Sequence[torch.Tensor], pad_token_id: int, multiple: int | None
) -> dict[str, torch.Tensor]:
    rows = [torch.cat(pair) for pair in zip(prompts, completions, strict=True)]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token_id)
    if multiple is not None:
        ids = nn.functional.pad(ids, (0, -ids.shape[1] % multiple), value=pad_token_id)
    width, lengths = ids.shape[1], torch.tensor([len(row) for row in rows])
    first = torch.arange(len(rows)) * width + torch.tensor([len(prompt) for prompt in prompts]) - 1
    longest = max(len(completion) for completion in completions)
    # Positions beyond a completion's end belong to others and are masked.
    places = (first.unsqueeze(1) + torch.arange(longest)).clamp(max=ids.numel() - 1)
    return {"input_ids": ids, "attention_mask": (torch.arange(width) < lengths.unsqueeze(1)).long(), "places": places}


def completion_logps(
    model: nn.Module,
    batch: Mapping[str, Any],
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
    router_logits: bool = False,
) -> CompletionLogps:
    """Log-probabilities of the tokens with a loss under softmax(logits / temperature).

    Args:
        batch: the output of `lay_out`.
        entropy_gradient: entropies have a gradient; this needs whole logits, as do models without an accessible head.
    """
    ids, labels, mask = batch["input_ids"], batch["labels"], batch["loss_mask"]
    inputs: dict[str, Any] = {"input_ids": ids} | {name: batch[name] for name in FOR_THE_MODEL if name in batch}
    inputs |= batch.get("image_inputs", {})
    if router_logits:
        inputs["output_router_logits"] = True
    stats, images = ("entropy",) if with_entropy else (), batch.get("image_copies")
    found, outputs = token_scores(model, inputs, labels, temperature, stats, images, entropy_gradient)
    picked = [values.reshape(-1)[batch["places"]].float() * mask for values in found]
    aux_loss = getattr(outputs, "aux_loss", None) if router_logits else None
    entropies = (picked[1] if entropy_gradient else picked[1].detach()) if with_entropy else None
    return CompletionLogps(picked[0], entropies, aux_loss)


def logp_gaps(found: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor, half: bool) -> tuple[torch.Tensor, float]:
    """How far log-probabilities of an engine are from those of the policy, and how far rounding may bring them.

    Args:
        found, sampled: (N, C) of the policy and of the engine, NaN where that is unknown. mask: (N, C) bool.
        half: products are computed in fewer bits than those of float32.

    Returns:
        the largest gap of a token of each completion, (N,), and its limit.
    """
    gaps = (found - sampled).abs().masked_fill(~mask | sampled.isnan(), 0.0)
    largest = float(found.masked_fill(~mask, 0.0).abs().max())
    return gaps.amax(1), (5e-2 if half else 1e-4) * max(1.0, largest)
