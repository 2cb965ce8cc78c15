"""Writes completions of policy and reference for the same prompts to a file for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from posttrain.core.data.collators import pad_rows
from posttrain.core.evaluation.eval_loop import eval_mode
from posttrain.core.models import wrapping
from posttrain.core.models.special_tokens import tokenizer_of
from posttrain.rl.policy.reference import Reference


@torch.no_grad()
def continuations(model: nn.Module, tokenizer: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[str]:
    """What `model` writes to each prompt, most probable token by token.

    Args:
        prompts: token ids.
    """
    ids = pad_rows(prompts, tokenizer.pad_token_id, side="left").to(next(model.parameters()).device)
    mask = pad_rows([[1] * len(prompt) for prompt in prompts], 0, side="left").to(ids.device)
    options = {"do_sample": False, "use_cache": True, "pad_token_id": tokenizer.pad_token_id}
    written = wrapping.unwrap(model).generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, **options
    )
    has_encoder = getattr(wrapping.base_model(model).config, "is_encoder_decoder", False)
    return tokenizer.batch_decode(written[:, 1 if has_encoder else ids.shape[1] :], skip_special_tokens=True)


def compare(
    policy: nn.Module, reference: Reference | None, tokenizer: Any, prompts: list[list[int]], max_new_tokens: int
) -> list[dict[str, str]]:
    """``{"prompt", "policy", "reference"}`` for each prompt; without "reference" if it no longer exists."""
    tokenizer = tokenizer_of(tokenizer)
    columns = {"prompt": tokenizer.batch_decode(prompts)}
    with eval_mode(policy):
        columns["policy"] = continuations(policy, tokenizer, prompts, max_new_tokens)
    if reference is not None and not reference.is_gone:
        with reference.use() as model:
            columns["reference"] = continuations(model, tokenizer, prompts, max_new_tokens)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
