"""Liger's kernels: what they replace is logged, and why they are left out."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from posttrain.core import TrainingArguments
from posttrain.core.errors import ConfigError
from posttrain.core.models import liger, wrapping
from posttrain.lm.loading import adapters
from tests import tiny
from tests.core.models.gradients import LORA

peft = pytest.importorskip("peft")


def install(monkeypatch, apply):
    """A package of Liger's that has kernels for Qwen3 alone, which `apply` puts into a model."""
    kernels = types.ModuleType("liger_kernel.transformers")
    kernels._apply_liger_kernel_to_instance = apply
    patches = types.ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": apply}
    for module in (types.ModuleType("liger_kernel"), kernels, patches):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_liger_says_why_it_is_not_applied(monkeypatch):
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "liger-kernel is not installed" in liger.apply_liger(tiny.causal_lm())

    applied = []
    install(monkeypatch, lambda model, **config: applied.append((model, config)))
    assert "no kernels for 'gpt2'" in liger.apply_liger(tiny.causal_lm("gpt2"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert "need a GPU" in liger.apply_liger(tiny.causal_lm())
    assert applied == []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    model = adapters.add_adapter(tiny.causal_lm(), peft.LoraConfig(**LORA))
    assert liger.apply_liger(model, {"rope": True}) is None
    assert applied == [(wrapping.base_model(model), {"rope": True})]


def test_a_kernel_that_liger_does_not_have_is_named_with_those_that_it_has(monkeypatch):
    install(monkeypatch, lambda model, rope=True, rms_norm=True, **config: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="config: 'rop' is none of .* rope, rms_norm, did you mean 'rope'"):
        liger.apply_liger(tiny.causal_lm(), {"rop": False})
    assert liger.apply_liger(tiny.causal_lm(), {"rope": False}) is None
    with pytest.raises(ConfigError, match="liger_kernel_config: rope='no' is neither true nor false"):
        TrainingArguments(use_liger_kernel=True, liger_kernel_config={"rope": "no"})


@pytest.mark.mission("S048")
def test_what_liger_replaces_is_said(monkeypatch, caplog):
    def replace_norms(model, **config):
        for module in model.modules():
            if type(module).__name__ == "Qwen3RMSNorm":
                module.forward = types.MethodType(lambda self, x: x, module)

    install(monkeypatch, replace_norms)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    model = tiny.causal_lm()
    norms = sum(type(module).__name__ == "Qwen3RMSNorm" for module in model.modules())
    with caplog.at_level("INFO", "posttrain"):
        assert liger.apply_liger(model) is None
    assert f"the forward of: Qwen3RMSNorm x {norms}." in caplog.text


def test_what_liger_changes_in_a_file_of_models_stays_in_one_model(monkeypatch):
    """Its functions replace classes and functions there, for every model that is made or called later."""
    from transformers.models.qwen3 import modeling_qwen3

    turned = []

    def patch(model, fused_linear_cross_entropy=True, **config):
        assert fused_linear_cross_entropy is hasattr(model, "lm_head")  # its forward is that of a language model
        original = modeling_qwen3.apply_rotary_pos_emb

        def rotary(*args, **kwargs):
            turned.append(model)
            return original(*args, **kwargs)

        modeling_qwen3.apply_rotary_pos_emb = rotary
        modeling_qwen3.Qwen3RMSNorm = None

    install(monkeypatch, patch)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    before = dict(vars(modeling_qwen3))
    models = [tiny.causal_lm(), tiny.reward_model()]
    ids = torch.arange(4, 20)[None]
    with torch.no_grad():
        expected = [model(input_ids=ids).logits for model in models]
        assert [liger.apply_liger(model) for model in models] == [None, None]
        assert vars(modeling_qwen3) == before
        for model, logits in zip(models, expected, strict=True):
            turned.clear()
            assert torch.equal(model(input_ids=ids).logits, logits)
            assert turned == [model] * model.config.num_hidden_layers
        turned.clear()
        tiny.causal_lm()(input_ids=ids)
    assert turned == []
