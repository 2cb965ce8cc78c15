"""Pure sampling functions, shared by our engines so that equal seeds give equal tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from posttrain.core.errors import NonFiniteError
from posttrain.rl.generation.protocol import Sampling


def uniforms(seeds: Sequence[int], length: int) -> torch.Tensor:
    """Numbers in [0, 1), one for each token to come: (N, length), float64 on the CPU.

    Row i depends on ``seeds[i]`` alone.
    """
    rows = [torch.rand(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.stack(rows) if rows else torch.empty(0, length, dtype=torch.float64)


def penalize_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Keskar et al. 2019, https://arxiv.org/abs/1909.05858, section 4.1, with the sign taken into account.

    Args:
        logits: (N, V). seen: (N, V) bool, the tokens in the prompt or the completion so far.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_probable(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """(N, V) `logits`, already divided by the temperature, with -inf at the tokens that top-k, top-p or min-p leave
    out.

    The most probable token always stays. Top-p: Holtzman et al. 2019, https://arxiv.org/abs/1904.09751. Min-p: Nguyen
    et al. 2024, https://arxiv.org/abs/2407.01082.
    """
    if 0 < sampling.top_k < logits.shape[-1]:
        lowest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1).roll(1, dims=-1)
        before[:, 0] = 0  # what the more probable tokens reach together
        drop = torch.empty_like(order, dtype=torch.bool).scatter_(-1, order, before >= sampling.top_p)
        drop.scatter_(-1, order[:, :1], False)
        logits = logits.masked_fill(drop, -torch.inf)
    if sampling.min_p:
        highest = logits.amax(-1, keepdim=True)
        logits = logits.masked_fill(logits < highest + torch.tensor(sampling.min_p).log().item(), -torch.inf)
    return logits


BLOCK = 256


def draw(logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The token of each row at which the cumulated probability passes a number in [0, 1): (N, V), (N,) -> (N,).

    Inverts the distribution function: one number a row, where `torch.multinomial` draws V.
    """
    return _pick(*_weights(torch.clone(logits.float())), numbers).squeeze(1)


def _weights(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """((N, V) exp(logits - their highest), in place of the logits, and (N, V / BLOCK) sums over blocks, cumulated)."""
    weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    whole = weights.shape[1] // BLOCK * BLOCK
    sums = weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1)
    if whole < weights.shape[1]:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], 1)
    return weights, sums.cumsum(-1)


def _pick(weights: torch.Tensor, cumulated: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The block in which the sum passes a number's share of the whole, then the token within the block: (N, 1)."""
    total, size = cumulated[:, -1:], weights.shape[1]
    below = torch.minimum(numbers.unsqueeze(1).to(total) * total, torch.nextafter(total, torch.zeros_like(total)))
    block = torch.searchsorted(cumulated, below, right=True)
    block = block.clamp(max=cumulated.shape[1] - 1)  # weights are NaN; `check_logps` raises
    before = functional.pad(cumulated, (1, 0)).gather(1, block)
    places = torch.arange(BLOCK, device=weights.device)
    tokens = torch.add(places, block, alpha=BLOCK)
    if size % BLOCK:
        inside = weights.gather(1, tokens.clamp(max=size - 1)) * (tokens < size)
    else:
        inside = weights.gather(1, tokens)
    place = torch.searchsorted(inside.cumsum(-1), below - before, right=True)
    # Sums in a different order may fall short by a rounding error.
    last = ((inside > 0) * places).amax(-1, keepdim=True)
    return torch.add(torch.minimum(place, last), block, alpha=BLOCK)


def check_logps(completions: Sequence[Sequence[float]]) -> None:
    """Reject completions of a model that returned NaN.

    Args:
        completions: the log-probability of each token of each.

    Raises:
        NonFiniteError: one is NaN.
    """
    for number, logps in enumerate(completions):
        place = next((place for place, logp in enumerate(logps) if math.isnan(logp)), None)
        if place is not None:
            raise NonFiniteError(
                f"The policy returned NaN instead of probabilities, first for token {place} of completion {number} "
                "of this generation: its weights hold NaN or infinity, or it overflows in float16. Check loss and "
                "grad_norm in the last log records, resume from an earlier checkpoint with a lower learning_rate, "
                "or load the model in bfloat16 or float32."
            )


def vllm_options(sampling: Sampling) -> dict[str, Any]:
    """`sampling` in the words of vLLM, with the log-probability of each token that is drawn."""
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.eos_token_ids),
        "include_stop_str_in_output": True,
        "logprobs": 0,
        "logit_bias": dict.fromkeys(sampling.never, -100.0) or None,  # tokens that are never drawn
    }


def filters(sampling: Sampling) -> bool:
    """Whether some tokens are made less probable than the model finds them."""
    return prefers_probable(sampling) or bool(sampling.never)


def prefers_probable(sampling: Sampling) -> bool:
    """Whether improbable or repeated tokens are filtered; tokens that are never drawn are not looked at."""
    asked = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p or sampling.repetition_penalty != 1
    return bool(asked)


def sample(
    logits: torch.Tensor, numbers: torch.Tensor | None, sampling: Sampling, seen: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the next token of each row.

    Args:
        logits: (N, V) of the model; may be overwritten.
        numbers: (N,) in [0, 1), a column of `uniforms`; not read at temperature 0, where it may be None.
        seen: (N, V) bool, the tokens that the repetition penalty is for; None: no penalty.

    Returns:
        ``(tokens, logps)``, each (N,): log-probabilities in float32, as `Completions.logps` has them.
    """
    logits = logits.float()
    scaled = logits / sampling.temperature if sampling.temperature not in (0, 1) else logits
    if numbers is not None and sampling.temperature and not filters(sampling):
        weights, cumulated = _weights(scaled)
        tokens = _pick(weights, cumulated, numbers)
        return tokens.squeeze(1), (weights.gather(1, tokens) / cumulated[:, -1:]).log().squeeze(1)
    if seen is not None:
        logits = penalize_repetition(logits, seen, sampling.repetition_penalty)
        kept = logits / sampling.temperature if sampling.temperature else logits
    else:
        kept = scaled
    if sampling.never:
        kept = kept.index_fill(1, torch.tensor(sampling.never, device=kept.device), -torch.inf)
    if numbers is None or sampling.temperature == 0:
        tokens = kept.argmax(-1)
    else:
        tokens = draw(keep_probable(kept, sampling), numbers)
    chosen = scaled.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens, chosen - scaled.logsumexp(-1)
