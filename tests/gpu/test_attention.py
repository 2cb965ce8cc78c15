"""Attention over segments on a CUDA device, beside attention under a mask: outputs, gradients, memory."""

import importlib.util

import pytest
import torch

from posttrain.lm.attention import document_kernels
from posttrain.lm.attention.segments import Segments
from posttrain.lm.attention.varlen_attention import segment_attention

DOCUMENTS = Segments.documents([70, 1, 200, 33])
SHARED = Segments.groups([(150, [40, 7, 90]), (5, [60, 61])])
RULES = {"plain": {}, "window": {"window": 32}, "softcap": {"softcap": 3.0}}


def inputs(segments, dtype, heads=4, groups=2, size=16):
    torch.manual_seed(0)
    shapes = [(1, segments.num_tokens, count, size) for count in (heads, groups, groups)]
    return [torch.randn(shape, dtype=dtype).transpose(1, 2) for shape in shapes]


def expected_of(tensors, segments, window=None, softcap=None):
    """By definition, in float64."""
    query, key, value = (tensor.double().requires_grad_() for tensor in tensors)
    wide = [tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value)]
    scores = query @ wide[0].transpose(2, 3) * 0.25
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    out = scores.masked_fill(~segments.dense_mask(window), -torch.inf).softmax(-1) @ wide[1]
    out.square().sum().backward()
    return [out.detach(), query.grad, key.grad, value.grad]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("segments", [DOCUMENTS, SHARED], ids=["documents", "shared prompts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_segments_see_what_the_mask_lets_them_see(dtype, segments, rule, cuda):
    tensors = inputs(segments, dtype)
    there = [tensor.to("cuda").requires_grad_() for tensor in tensors]
    out = segment_attention(*there, segments, scale=0.25, **RULES[rule])
    out.float().square().sum().backward()
    found = [out.detach(), *(tensor.grad for tensor in there)]
    limit = 1e-4 if dtype == torch.float32 else 0.03
    for one, wanted in zip(found, expected_of(tensors, segments, **RULES[rule]), strict=True):
        gap = (one.cpu().double() - wanted).norm() / wanted.norm()
        assert gap < limit


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["_by_torch", "_by_flash_attn"])
def test_each_kernel_of_documents(kernel, monkeypatch):
    if kernel == "_by_flash_attn" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed")
    called = []

    def counted(*args):
        called.append(kernel)
        return getattr(document_kernels, kernel)(*args)

    monkeypatch.setattr(document_kernels, "_choose", lambda *args: counted)
    for window in (None, 32):
        tensors = inputs(DOCUMENTS, torch.bfloat16)
        there = [tensor.to("cuda").requires_grad_() for tensor in tensors]
        out = segment_attention(*there, DOCUMENTS, scale=0.25, window=window)
        out.float().square().sum().backward()
        found = [out.detach(), *(tensor.grad for tensor in there)]
        for one, wanted in zip(found, expected_of(tensors, DOCUMENTS, window=window), strict=True):
            assert (one.cpu().double() - wanted).norm() / wanted.norm() < 0.03
    assert len(called) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["documents", "shared prompt"])
def test_no_mask_of_all_pairs_is_built_for_65536_tokens(layout):
    tokens = 2**16
    if layout == "documents":
        segments = Segments.documents([1024] * 64)
    else:
        segments = Segments.groups([(tokens // 2, [tokens // 16] * 8)])
    there = [tensor.to("cuda").requires_grad_() for tensor in inputs(segments, torch.bfloat16, 4, 2, 64)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    segment_attention(*there, segments, scale=0.125).float().sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**30  # one byte for each pair of tokens takes 2**32


@pytest.mark.gpu
def test_flex_attention_is_compiled_three_times_at_most_for_batches_of_all_sizes():
    from torch._dynamo.utils import counters

    counters.clear()
    for lengths in ([150, 30, 70], [5, 6, 7, 300, 411], [400], [64] * 20, [33, 200], [129], [300, 1, 1], [90]):
        there = [tensor.to("cuda").requires_grad_() for tensor in inputs(Segments.documents(lengths), torch.float32)]
        segment_attention(*there, Segments.documents(lengths), scale=0.5).sum().backward()
    assert counters["stats"]["unique_graphs"] <= 3
