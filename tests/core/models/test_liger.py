"""Liger's kernels: what they replace is logged, and why they are left out."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from posttrain.core.models import liger, wrapping
from posttrain.lm.loading import adapters
from tests import tiny
from tests.core.models.gradients import LORA

peft = pytest.importorskip("peft")


def test_liger_says_why_it_is_not_applied(monkeypatch):
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "liger-kernel is not installed" in liger.apply_liger(tiny.causal_lm())

    applied = []
    kernels = types.ModuleType("liger_kernel.transformers")
    kernels._apply_liger_kernel_to_instance = lambda model, **config: applied.append((model, config))
    patches = types.ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": None}
    for module in (types.ModuleType("liger_kernel"), kernels, patches):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert "no kernels for 'gpt2'" in liger.apply_liger(tiny.causal_lm("gpt2"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert "need a GPU" in liger.apply_liger(tiny.causal_lm())
    assert applied == []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    model = adapters.add_adapter(tiny.causal_lm(), peft.LoraConfig(**LORA))
    assert liger.apply_liger(model, {"rope": True}) is None
    assert applied == [(wrapping.base_model(model), {"rope": True})]


@pytest.mark.mission("S048")
def test_what_liger_replaces_is_said(monkeypatch, caplog):
    def replace_norms(model, **config):
        for module in model.modules():
            if type(module).__name__ == "Qwen3RMSNorm":
                module.forward = types.MethodType(lambda self, x: x, module)

    kernels = types.ModuleType("liger_kernel.transformers")
    kernels._apply_liger_kernel_to_instance = replace_norms
    patches = types.ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": None}
    for module in (types.ModuleType("liger_kernel"), kernels, patches):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    model = tiny.causal_lm()
    norms = sum(type(module).__name__ == "Qwen3RMSNorm" for module in model.modules())
    with caplog.at_level("INFO", "posttrain"):
        assert liger.apply_liger(model) is None
    assert f"the forward of: Qwen3RMSNorm x {norms}." in caplog.text
