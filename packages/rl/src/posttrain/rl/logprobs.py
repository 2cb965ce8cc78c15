"""Log-probabilities of completions under a model, without storing its logits, and without reading a prompt twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from posttrain.core.losses import selective_log_softmax
from posttrain.core.models import logps_in_head, supports_loss_in_head
from posttrain.core.segments import Segments

IGNORE = -100
ROWS_AT_ONCE = 512
"""Positions whose logits are brought to float32 together, where the model has made them whole."""


class CompletionLogps(NamedTuple):
    """Of N completions of up to C tokens: (N, C) each, 0 where there is nothing to learn.

    logps: with the graph. entropies: of the predicted distributions, in nats; None where not asked for. aux_loss: of the
    routers of a mixture of experts, shape (); None where the model gives none.
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
) -> dict[str, Any]:
    """N prompts and completions as the input of a model.

    Args:
        prompts, completions: token ids, (P_i,) and (C_i,), at least one token each.
        mask: (N, C) bool, the tokens with a loss. C is the longest completion, or more.
        share: neighbours with the same prompt follow one copy of it, all in one row without padding. All of the prompt but
            its last token is shared: each completion needs that one in front of it, to have its first token predicted.
        multiple: pad rows to a multiple of this.

    Returns:
        ``input_ids`` and ``labels``, both (N, L), or (1, L) where shared; ``loss_mask``, (N, C) float; ``places``, (N, C): where,
        in the flattened predictions, each completion's tokens are predicted; ``attention_mask``, or ``segments`` where shared.
    """
    if share:
        return _shared_row(prompts, completions, mask)
    lengths = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    width = max(lengths) if multiple is None else -(-max(lengths) // multiple) * multiple
    ids = torch.full((len(prompts), width), pad_token_id)
    labels, starts = torch.full_like(ids, IGNORE), []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        begin, end = len(prompt), lengths[row]
        ids[row, :begin], ids[row, begin:end] = prompt, completion
        labels[row, begin:end] = completion.where(mask[row, : len(completion)], IGNORE)
        starts.append(row * width + begin - 1)
    real = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    return {"input_ids": ids, "attention_mask": real.long(), "labels": labels} | _places(starts, mask, ids.numel())


def _shared_row(
    prompts: Sequence[torch.Tensor], completions: Sequence[torch.Tensor], mask: torch.Tensor
) -> dict[str, Any]:
    pieces, labels, lengths, parents, starts = [], [], [], [], []
    shared, place, parent = None, 0, -1
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if shared is None or not torch.equal(prompt, shared):
            shared, parent = prompt, -1
            if len(prompt) > 1:
                parent = len(lengths)
                pieces.append(prompt[:-1])
                labels.append(torch.full_like(prompt[:-1], IGNORE))
                lengths.append(len(prompt) - 1)
                parents.append(-1)
                place += len(prompt) - 1
        pieces.append(torch.cat([prompt[-1:], completion]))
        nothing = prompt.new_full((1,), IGNORE)
        labels.append(torch.cat([nothing, completion.where(mask[row, : len(completion)], IGNORE)]))
        lengths.append(1 + len(completion))
        parents.append(parent)
        starts.append(place)
        place += 1 + len(completion)
    segments = Segments(tuple(lengths), tuple(parents))
    row_of_all = {"input_ids": torch.cat(pieces).unsqueeze(0), "labels": torch.cat(labels).unsqueeze(0)}
    return row_of_all | {"segments": segments} | _places(starts, mask, place)


def _places(starts: list[int], mask: torch.Tensor, size: int) -> dict[str, torch.Tensor]:
    places = torch.tensor(starts).unsqueeze(1) + torch.arange(mask.shape[1])
    # Beyond a completion's end the place is another's, or none; what is found there is masked.
    return {"places": places.clamp(max=size - 1), "loss_mask": mask.float()}


def completion_logps(
    model: nn.Module,
    batch: Mapping[str, Any],
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
    router_logits: bool = False,
) -> CompletionLogps:
    """Log-probabilities of the tokens with a loss, as softmax(logits / temperature) gives them.

    Args:
        batch: what `lay_out` gives.
        entropy_gradient: the entropies carry a gradient; then, as for models whose head is hidden, the logits are held.
    """
    ids, labels, mask = batch["input_ids"], batch["labels"], batch["loss_mask"]
    inputs: dict[str, Any] = {"input_ids": ids}
    if "segments" in batch:
        inputs |= batch["segments"].model_inputs(ids.shape, ids.device)
    else:
        inputs["attention_mask"] = batch["attention_mask"]
    if router_logits:
        inputs["output_router_logits"] = True
    if entropy_gradient or supports_loss_in_head(model):
        outputs = model(**inputs)
        found = _from_logits(outputs.logits, labels, temperature, with_entropy, entropy_gradient)
    else:
        with logps_in_head(model, labels, temperature=temperature, return_entropy=with_entropy):
            outputs = model(**inputs)
        found = outputs.logits if with_entropy else outputs.logits.unsqueeze(0)
    picked = [values.reshape(-1)[batch["places"]].float() * mask for values in found]
    aux_loss = getattr(outputs, "aux_loss", None) if router_logits else None
    entropies = (picked[1] if entropy_gradient else picked[1].detach()) if with_entropy else None
    return CompletionLogps(picked[0], entropies, aux_loss)


def _from_logits(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, with_entropy: bool, entropy_gradient: bool
) -> list[torch.Tensor]:
    """[(N, L) log-probabilities, (N, L) entropies if asked for] from whole logits, in float32 a few positions at a time."""
    logits = logits[:, -labels.shape[1] :]  # prompt tuning puts virtual tokens before them
    rows, columns = (labels[:, 1:] != IGNORE).nonzero(as_tuple=True)
    logps, entropies = [], []
    for row, column in zip(rows.split(ROWS_AT_ONCE), columns.split(ROWS_AT_ONCE), strict=True):
        scaled = logits[row, column].float() / temperature
        logps.append(selective_log_softmax(scaled, labels[row, column + 1]))
        if with_entropy:
            with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
                normal = scaled.log_softmax(-1)
                entropies.append(-(normal.exp() * normal.clamp(min=-1e30)).sum(-1))
    empty = torch.zeros(labels.shape, device=logits.device)
    if not len(rows):
        nothing = empty + 0 * logits.sum().float()
        return [nothing, empty] if with_entropy else [nothing]
    return [empty.index_put((rows, columns), torch.cat(values)) for values in (logps, entropies) if values]
