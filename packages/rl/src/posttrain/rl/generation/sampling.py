"""What our engines share: how tokens are drawn, so that equal seeds give equal tokens, where completions end, and how
the model that generates is set up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from posttrain.core.errors import NonFiniteError
from posttrain.core.models.wrapping import base_model, text_part
from posttrain.rl.generation.protocol import Sampling

STOP_WINDOW = 32
"""Tokens at the end of a completion that are searched for a stop string, unless one may be longer."""
FIXED_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
"""Kinds of rotary embeddings whose angles hang on the position alone, and not on the length of the text."""


def uniforms(seeds: Sequence[int], length: int) -> torch.Tensor:
    """Numbers in [0, 1), one for each token to come: (N, length), float64 on the CPU; row i of ``seeds[i]`` alone."""
    rows = [torch.rand(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.stack(rows) if rows else torch.empty(0, length, dtype=torch.float64)


def keep_probable(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """(N, V) `logits`, already divided by the temperature, with -inf at the tokens that top-k, top-p (Holtzman et al.
    2019, https://arxiv.org/abs/1904.09751) or min-p (Nguyen et al. 2024, https://arxiv.org/abs/2407.01082) leave out.
    The most probable one stays.
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
    """The token of each row at which the cumulated probability passes a number in [0, 1): (N, V), (N,) -> (N,). One
    number a row, where `torch.multinomial` draws V.
    """
    return _drawn(logits.float().clone(), numbers)[0]


def _drawn(logits: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """((N,) the tokens of `draw`, (N,) their log-probabilities); the logits are overwritten.

    The block of BLOCK tokens in which the sum passes a number's share of the whole, then the token within the block.
    """
    weights, size = logits.sub_(logits.amax(-1, keepdim=True)).exp_(), logits.shape[1]
    whole = size // BLOCK * BLOCK
    sums = weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1)
    if whole < size:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], 1)
    cumulated = sums.cumsum(-1)
    total = cumulated[:, -1:]
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
    tokens = torch.add(torch.minimum(place, last), block, alpha=BLOCK)
    return tokens.squeeze(1), (weights.gather(1, tokens) / total).log().squeeze(1)


def check_logps(completions: Sequence[Sequence[float]]) -> None:
    """Raise NonFiniteError where the log-probability of a token of one of these completions is NaN."""
    nan = ((i, place) for i, logps in enumerate(completions) for place, logp in enumerate(logps) if math.isnan(logp))
    for number, place in nan:
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


def prefers_probable(sampling: Sampling) -> bool:
    """Whether improbable or repeated tokens are filtered; tokens that are never drawn are not looked at."""
    asked = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p or sampling.repetition_penalty != 1
    return bool(asked)


def sample(
    logits: torch.Tensor, numbers: torch.Tensor | None, sampling: Sampling, seen: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(tokens, logps)``, each (N,): the next token of each row, and log-probabilities as in `Completions.logps`.

    Args:
        logits: (N, V) of the model; may be overwritten.
        numbers: (N,) in [0, 1), a column of `uniforms`; not read at temperature 0, where it may be None.
        seen: (N, V) bool, the tokens in the prompt or the completion so far, for the penalty; None: no penalty.
    """
    logits, heat = logits.float(), sampling.temperature or 1
    scaled = logits / heat if heat != 1 else logits
    numbers = numbers if sampling.temperature else None
    if numbers is not None and not (sampling.never or prefers_probable(sampling)):
        return _drawn(scaled, numbers)
    kept, penalty = scaled, sampling.repetition_penalty
    if seen is not None:  # Keskar et al. 2019, https://arxiv.org/abs/1909.05858, section 4.1, with the sign
        kept = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits) / heat
    if sampling.never:
        kept = kept.index_fill(1, torch.tensor(sampling.never, device=kept.device), -torch.inf)
    tokens = kept.argmax(-1) if numbers is None else draw(keep_probable(kept, sampling), numbers)
    chosen = scaled.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens, chosen - scaled.logsumexp(-1)


def cut(rows: list[list[int]], sampling: Sampling, tokenizer: Any) -> tuple[list[list[int]], list[bool]]:
    """Each row up to and including its end token, and whether it has one."""
    stop, last, ends = sampling.stop, sampling.eos_token_ids, []
    for row in rows:
        places = (
            n for n, token in enumerate(row, 1) if token in last or (stop and ends_with_stop(tokenizer, row[:n], stop))
        )
        ends.append(next(places, None))
    return [row[:end] for row, end in zip(rows, ends, strict=True)], [end is not None for end in ends]


def stop_window(stop: tuple[str, ...]) -> int:
    """An upper bound on the tokens that hold any of these strings: each token has at least one byte."""
    return max([STOP_WINDOW, *(len(string.encode()) + 2 for string in stop)])


def ends_with_stop(tokenizer: Any, ids: list[int], stop: tuple[str, ...]) -> bool:
    """Whether a completion's end holds a stop string."""
    text = tokenizer.decode(ids[-stop_window(stop) :])
    return any(string in text for string in stop)


def is_float32(model: nn.Module) -> bool:
    """Whether `model` computes in float32 at least."""
    return all(p.dtype in (torch.float32, torch.float64) for p in model.parameters() if p.is_floating_point())


def rope_limit(model: nn.Module) -> float:
    """Tokens of a text up to which the rotary embeddings of `model` turn each by its position alone: infinity, unless
    they are of a kind, such as dynamic or longrope, whose angles all change in a longer text.
    """
    limit = math.inf
    for module in text_part(base_model(model)).modules():  # a vision tower turns its patches by their place alone
        kind = getattr(module, "rope_type", "default")
        if not {*(kind.values() if isinstance(kind, dict) else [kind])} <= {*FIXED_ROPE}:
            config: Any = module.config
            parts = [
                part for part in (config.rope_parameters, *config.rope_parameters.values()) if isinstance(part, dict)
            ]
            lengths = [part.get("original_max_position_embeddings") for part in parts]
            limit = min(limit, config.max_position_embeddings, *(length for length in lengths if length is not None))
    return limit
