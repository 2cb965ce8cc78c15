"""Attention of packed documents and shared prompts on an emulated GPU: the kernels it takes, and the bytes in use."""

import functools
from unittest import mock

import pytest
import torch

from posttrain.lm.attention import document_kernels, varlen_attention
from posttrain.lm.attention.document_kernels import block_mask
from posttrain.lm.attention.segments import Segments
from tests import tiny
from tests.contract.trainers import TRAINERS
from tests.gpu_rehearsal import emulated_cuda
from tests.gpu_rehearsal.emulated_cuda import EmulatedCuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: tests/gpu")


def test_packed_documents_in_bfloat16_take_the_kernel_for_documents(tmp_path, monkeypatch):
    calls = []
    varlen = emulated_cuda._varlen

    @functools.wraps(varlen)
    def counted(query, *args, **kwargs):
        calls.append(query.dtype)
        return varlen(query, *args, **kwargs)

    monkeypatch.setattr(emulated_cuda, "_varlen", counted)

    def losses(**changes):
        options = {"optim": "adamw_torch_fused", "max_steps": 2, "bf16": True, "report_to": "none"} | changes
        trainer = TRAINERS["sft-packed"](tmp_path / str(len(calls)), **options)
        if not trainer.args.use_cpu:
            gpu.phase = "training"
        trainer.train()
        return [record["loss"] for record in trainer.state.log_history if "loss" in record]

    expected = losses(use_cpu=True)
    with EmulatedCuda() as gpu:
        assert losses(use_cpu=False) == pytest.approx(expected, rel=2e-3)
    assert set(calls) == {torch.bfloat16} and len(calls) >= 2 * 3  # layers, times the trial and the steps
    places = {wait.place for wait in gpu.waits if wait.phase == "training"}
    assert not [place for place in places if "varlen" in place or "segments" in place]


def peak_of(segments, dtype, monkeypatch):
    """Bytes in use at most, and the largest tensors, in forward and backward over one row."""

    def like_query(query, key, value, *args, **kwargs):  # any kernel that makes no scores
        groups = (
            query.shape[-3 if kwargs.get("block_mask") else -2] // value.shape[-3 if kwargs.get("block_mask") else -2]
        )
        return query * 1 + (key + value).repeat_interleave(groups, -3 if kwargs.get("block_mask") else -2)

    monkeypatch.setattr(document_kernels, "_choose", lambda *args: like_query)
    with EmulatedCuda() as gpu, mock.patch.object(varlen_attention, "_flex_attention", lambda kind: like_query):
        torch.manual_seed(0)
        model = tiny.causal_lm(num_hidden_layers=1, vocab_size=64, tie_word_embeddings=True).to("cuda", dtype)
        varlen_attention._set_implementation(model, "segments_sdpa")
        row = torch.arange(segments.num_tokens, device="cuda").remainder(64)[None]
        before = gpu.live
        hidden = model.model(
            input_ids=row, use_cache=False, **segments.model_inputs(row.shape, "cuda")
        ).last_hidden_state
        hidden.float().square().mean().backward()
        return gpu.peak - before, gpu.largest, gpu.largest_on_host


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["documents", "shared prompt"])
def test_bytes_grow_with_the_tokens_and_not_with_their_square(layout, dtype, monkeypatch):
    def segments(tokens):
        if layout == "documents":
            return Segments.documents([1000] * (tokens // 1000) + [tokens % 1000])
        return Segments.groups([(tokens // 2, [tokens // 16] * 8)])

    tokens = 64 * 1024
    small, _, _ = peak_of(segments(tokens // 4), dtype, monkeypatch)
    large, largest, on_host = peak_of(segments(tokens), dtype, monkeypatch)
    assert large < 4.4 * small
    assert max(largest, on_host) < 1000 * tokens  # a mask of bytes has 65,536 a token


def test_a_kernel_of_documents_on_torch_2_11_which_knows_no_groups_of_heads():
    def varlen_attn(
        query, key, value, bounds, same, longest, also, *, return_aux=None, scale=None, window_size=(-1, -1)
    ):
        assert query.shape[1] == key.shape[1] == value.shape[1]
        return emulated_cuda._varlen(
            query, key, value, bounds, same, longest, also, scale=scale, window_size=window_size, enable_gqa=False
        )

    torch.manual_seed(0)
    shapes = (12, 4, 16), (12, 2, 16), (12, 2, 16)
    rows = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    with EmulatedCuda(), mock.patch.object(torch.nn.attention.varlen, "varlen_attn", varlen_attn):
        there = [row.to("cuda").transpose(0, 1)[None].requires_grad_() for row in rows]
        out = varlen_attention.segment_attention(*there, Segments.documents([5, 7]), scale=0.25, window=4)
        out.float().sum().backward()
        found = [out, *(tensor.grad for tensor in there)]
        found = [tensor.detach().cpu().float() for tensor in found]
    here = [row.float().transpose(0, 1)[None].requires_grad_() for row in rows]
    mask = Segments.documents([5, 7]).dense_mask(4)
    expected = torch.nn.functional.scaled_dot_product_attention(*here, mask, scale=0.25, enable_gqa=True)
    expected.sum().backward()
    for one, other in zip(found, [expected, *(tensor.grad for tensor in here)], strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=0.05, atol=0.05)


def test_flex_attention_is_compiled_for_a_kind_of_input_and_not_for_each_batch():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    varlen_attention._flex_attention.cache_clear()
    counters.clear()

    def attend(segments, **rule):
        torch.manual_seed(0)
        query, key, value = (torch.randn(1, n, segments.num_tokens, 16) for n in (4, 2, 2))
        window = rule.pop("window", None)
        mask = block_mask(segments, window, torch.device("cpu"))
        flex = varlen_attention._flex_attention((window is None, *rule), "aot_eager")
        found = flex(query, key, value, block_mask=mask, scale=0.25, enable_gqa=True)
        dense = segments.dense_mask(window)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, dense, scale=0.25, enable_gqa=True
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    try:
        batches = [[100, 30, 70], [5, 6, 7, 300, 411], [400], [64] * 20, [33, 200], [250, 290], [129], [300, 1, 1]]
        for lengths in batches:
            attend(Segments.documents(lengths))
        attend(Segments.groups([(100, [30, 40]), (50, [60])]))
        assert counters["stats"]["unique_graphs"] <= 2  # one for all sizes, if not for the very first as well
        attend(Segments.documents([100, 27]))  # one block
        assert counters["stats"]["unique_graphs"] <= 3
        with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
            for window in (20, 50, 400):
                attend(Segments.documents([100, 30, 70]), window=window)
        assert counters["stats"]["unique_graphs"] <= 4
    finally:
        torch._dynamo.reset()
        varlen_attention._flex_attention.cache_clear()


def test_a_block_mask_costs_the_device_copies_alone():
    segments = Segments.documents([100, 300, 7, 900])
    with EmulatedCuda() as gpu:
        varlen_attention.block_mask.cache_clear()
        mask = block_mask(segments, None, torch.device("cuda"))
        assert gpu.dispatched <= 16 and not gpu.waits
        queries, keys = mask.q_indices.cpu(), mask.kv_indices.cpu()
        varlen_attention.block_mask.cache_clear()  # it holds tensors of this device
    assert (queries.shape, keys.shape) == ((1, 1, 11, 11), (1, 1, 11, 11)) and mask.seq_lengths == (1307, 1307)


def test_flex_attention_takes_a_soft_cap_when_it_is_compiled(monkeypatch):
    torch._dynamo.reset()
    compiled = varlen_attention._flex_attention
    compiled.cache_clear()
    monkeypatch.setattr(compiled.__wrapped__, "__defaults__", ("aot_eager",))
    segments = Segments.groups([(100, [30, 40]), (50, [60])])
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, segments.num_tokens, 16) for heads in (4, 2, 2))
    try:
        found = varlen_attention._on_gpu(query, key, value, segments, 0.25, None, 3.0)
    finally:
        torch._dynamo.reset()
        compiled.cache_clear()
    expected = varlen_attention.segment_attention(query, key, value, segments, scale=0.25, softcap=3.0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
