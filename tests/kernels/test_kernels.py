"""Kernels of a step as machine code of an H100, within the budget; `make kernels` compiles the others."""

import importlib.util
import json

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed: make kernels", allow_module_level=True)

import torch

if torch.version.cuda and not torch.cuda.is_available():
    pytest.skip("torch is built for CUDA and finds no driver: make kernels", allow_module_level=True)

from tests.kernels import report

pytestmark = pytest.mark.long


def test_kernels_of_a_step_compile_for_an_h100_within_the_budget():
    rows = report.compiled(90, ["flex-128", "layers-qwen3", "scores", "decoding-128"])
    assert not report.problems(rows, json.loads(report.BUDGET.read_text()))
    kernels = {row["kernel"]["name"]: row["kernel"] for row in rows}
    for name in ("triton_tem_fused_flex_attention_0", "triton_tem_fused_flex_attention_backward_1"):
        assert kernels[name]["matrices"] == "wgmma" and kernels[name]["architecture"] == "sm_90a"
    assert {row["case"] for row in rows} == {"flex-128", "layers-qwen3", "scores", "decoding-128"}


def test_a_kernel_that_does_not_fit_or_spills_is_a_problem():
    def row(case, **kernel):
        return {"number": 90, "case": case, "kernel": {"name": "wide", "spills": 0, "shared": 0} | kernel}

    rows = [row("one", shared=2**20), row("two", shared=2**20), row("two"), row("three", spills=8)]
    rows.append({"number": 80, "case": "four", "error": "no"})
    assert report.problems(rows, {}) == [
        "90 one wide: 816,128 bytes of shared memory more than a block can have",
        "90 three wide: 8 bytes of spilled registers, and the budget allows 0",
        "80 four: no",
    ]
    assert len(report.problems(rows, {"90 three wide": 8})) == 2
