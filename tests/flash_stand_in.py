"""A stand-in for flash-attn, which needs a GPU: its two functions computed by definition, below transformers' own code.

What is real: transformers' `flash_attention_forward`, its masks, and its choice between one document a row and
documents by ``cu_seqlens``, which reads positions as documents only in a batch of one row. What stands in: the two
kernels. Like them it sees nothing but q, k, v and what it is told of borders, and refuses float32 unless `any_dtype`.
"""

from __future__ import annotations

import torch


def _attend(q, k, v, scale, causal, window, softcap):
    """One document: (T, H, D) queries, (T, G, D) keys and values."""
    groups = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(groups, 1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))[None, :]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window[0] >= 0:
        seen &= distance <= window[0]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype)
    return torch.einsum("hqk,khd->qhd", weights, v)


def stand_in_for_flash_attention(monkeypatch, any_dtype: bool = False) -> list[tuple[int, ...]]:
    """Let transformers find the stand-in for ``attn_implementation="flash_attention_2"``.

    Returns:
        What grows by the lengths of the documents of each varlen call.
    """
    from transformers import PreTrainedModel, modeling_flash_attention_utils, modeling_utils

    calls: list[tuple[int, ...]] = []

    def check(q):
        if not any_dtype and q.dtype not in (torch.bfloat16, torch.float16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")

    def flash(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False
    ):
        check(q)
        return torch.stack(
            [_attend(*row, softmax_scale, causal, window_size, softcap) for row in zip(q, k, v, strict=True)]
        )

    def varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False,
    ):  # fmt: skip
        check(q)
        assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k) and q.ndim == 3
        lengths = cu_seqlens_q.diff().tolist()
        assert sum(lengths) == len(q) and max(lengths) <= max_seqlen_q and max_seqlen_q == max_seqlen_k
        calls.append(tuple(lengths))
        parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        return torch.cat([_attend(*part, softmax_scale, causal, window_size, softcap) for part in parts])

    found = modeling_flash_attention_utils
    functions = flash, varlen, None, found._pad_input, found._unpad_input
    process = found._lazy_define_process_function(varlen)

    is_new = hasattr(found, "_process_with_kvcache_kwargs_fn")  # transformers 5.17 has one function to process

    def lazy_import(*args, **kwargs):
        return functions, (process, dict) if is_new else process

    monkeypatch.setattr(modeling_flash_attention_utils, "lazy_import_flash_attention", lazy_import)
    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", lazy_import)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *args, **kwargs: True)
    return calls
