"""Attention of packed documents and shared prompts on an emulated GPU: the kernels it takes, and the bytes in use."""

import pytest
import torch

from posttrain.core.data.segments import Segments
from posttrain.core.models import document_kernels, varlen_attention
from tests import tiny
from tests.contract.trainers import TRAINERS
from tests.gpu_rehearsal import emulated_cuda
from tests.gpu_rehearsal.emulated_cuda import EmulatedCuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: tests/gpu")


def test_packed_documents_in_bfloat16_take_the_kernel_for_documents(tmp_path, monkeypatch):
    calls = []
    varlen = emulated_cuda._varlen

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
    with EmulatedCuda() as gpu:
        monkeypatch.setattr(varlen_attention, "_flex_attention", lambda: like_query)
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
