"""A stand-in for the kernels of flash attention, which need a GPU: computed by definition, below transformers' code.

What is real: how transformers finds a kernel by its name, its `flash_attention_forward`, its masks, and its choice
between one document a row and documents by ``cu_seqlens``, which reads positions as documents only in a batch of one
row. What stands in: the kernels, in the place of those that the package `kernels` would load. Like them they see
nothing but q, k, v and what they are told of borders, take the arguments of their release, and refuse float32 unless
`any_dtype`.
"""

from __future__ import annotations

import inspect
import types

import torch

#: What `flash_attn_varlen_func` takes in FlashAttention 2.8.3, 3 (hopper/ of the same) and 4.0.0b36:
#: tests/signatures compares them with these releases.
PARAMETERS = {
    2: """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None""",
    3: """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0""",
    4: """q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None,
    causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
    deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None,
    aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None,
    disable_scheduler_metadata=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None""",
}


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
    if window[0] is not None and window[0] >= 0:
        seen &= distance <= window[0]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype)
    return torch.einsum("hqk,khd->qhd", weights, v)


def signature_of(version: int) -> inspect.Signature:
    """That of `flash_attn_varlen_func` in FlashAttention `version`."""
    return inspect.signature(eval(f"(lambda {PARAMETERS[version]}: None)"))


def kernels_of(version: int, any_dtype: bool = False) -> tuple[types.ModuleType, list[tuple[int, ...]]]:
    """A module with the two functions of that FlashAttention, and what grows by the lengths of the documents of each
    varlen call.
    """
    calls: list[tuple[int, ...]] = []
    signature = signature_of(version)

    def attend(q, k, v, given):
        if not any_dtype and q.dtype not in (torch.bfloat16, torch.float16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        return _attend(q, k, v, given["softmax_scale"], given["causal"], given["window_size"], given["softcap"])

    def flash(q, k, v, **options):
        given = signature.bind(q, k, v, *[None] * 4, **options) if version < 4 else signature.bind(q, k, v, **options)
        given.apply_defaults()
        out = torch.stack([attend(*row, given.arguments) for row in zip(q, k, v, strict=True)])
        return (out, None) if version > 2 else out  # with the logarithms of the normalisers

    def varlen(*args, **options):
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        given = bound.arguments
        q, k, v, borders = given["q"], given["k"], given["v"], given["cu_seqlens_q"]
        assert borders.dtype == torch.int32 and torch.equal(borders, given["cu_seqlens_k"]) and q.ndim == 3
        lengths = borders.diff().tolist()
        assert sum(lengths) == len(q) and max(lengths) <= given["max_seqlen_q"] == given["max_seqlen_k"]
        calls.append(tuple(lengths))
        parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        out = torch.cat([attend(*part, given) for part in parts])
        return (out, None) if version > 2 else out

    varlen.__signature__ = signature  # which transformers looks at
    module = types.ModuleType(f"flash_attention_{version}")
    module.flash_attn_func, module.flash_attn_varlen_func = flash, varlen
    return module, calls


def stand_in_for_flash_attention(monkeypatch, any_dtype: bool = False, version: int = 2) -> list[tuple[int, ...]]:
    """Let transformers find the stand-in for any `attn_implementation` that the package `kernels` would load.

    Returns:
        What grows by the lengths of the documents of each varlen call.
    """
    from transformers import modeling_flash_attention_utils, modeling_utils
    from transformers.integrations import hub_kernels

    module, calls = kernels_of(version, any_dtype)
    for place in (modeling_utils, hub_kernels):
        monkeypatch.setattr(place, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *args, **options: module)
    for name in ("_loaded_implementation", "_flash_varlen_fn"):
        monkeypatch.setattr(modeling_flash_attention_utils, name, None)
    return calls
