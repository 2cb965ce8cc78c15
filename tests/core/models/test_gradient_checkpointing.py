"""Gradient checkpointing changes no gradient."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from PIL import Image
from torch import nn

from posttrain.core.models import gradient_checkpointing, wrapping
from posttrain.lm.loading import adapters
from tests import tiny, tiny_vision
from tests.core.models.gradients import LORA, assert_same_gradients, batch, gradients

peft = pytest.importorskip("peft")


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}, {"use_reentrant": False}, {"every_n_layers": 2}])
@pytest.mark.parametrize("adapter", [False, True])
def test_checkpointing_changes_no_gradient(adapter, kwargs):
    ids, labels = batch()
    model = tiny.causal_lm()
    model = adapters.add_adapter(model, peft.LoraConfig(**LORA)) if adapter else model
    model.train()
    model(input_ids=ids, labels=labels).loss.backward()
    expected = gradients(model)
    given = dict(kwargs or {})
    gradient_checkpointing.enable_gradient_checkpointing(model, kwargs)
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert not wrapping.base_model(model).config.use_cache
    assert (kwargs or {}) == given
    model(input_ids=ids, labels=labels).loss.backward()
    assert_same_gradients(gradients(model), expected)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_frozen_vision_tower_is_not_computed_backwards(family, adapter):
    """Nothing below the language model is trained; with checkpoints the same gradients come without the tower's."""
    model, processor = tiny_vision.FAMILIES[family]()
    is_in_tower = re.compile(r"(.*\.)?(vision_tower|visual)\b").match
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_in_tower(name))
    if adapter:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=r".*language_model.*(q_proj|v_proj)"))
    model.train()
    seen = []

    def watch(module, inputs, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: seen.append(module))

    tower = [part for name, part in model.named_modules() if is_in_tower(name) and isinstance(part, nn.Linear)]
    for part in tower:
        part.register_forward_hook(watch)
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    picture = Image.new("RGB", (32, 32), "red")
    inputs = processor(text=[processor.apply_chat_template([turn])], images=[[picture]], return_tensors="pt")
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    expected = gradients(model)
    gradient_checkpointing.enable_gradient_checkpointing(model)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert_same_gradients(gradients(model), expected)
    assert tower and not seen


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=384, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize("tile", [1, 5, 16, 1000])  # of batch()'s tokens: some tiles are short, or there is one
@pytest.mark.parametrize("make", [tiny.causal_lm, gpt2], ids=["qwen3", "gpt2"])
@pytest.mark.parametrize("kwargs", [{}, {"use_reentrant": True}])
def test_mlps_computed_in_tiles_change_no_gradient(make, tile, kwargs):
    ids, labels = batch()
    model = make().train()
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    expected, rows = gradients(model), []
    for _ in range(2):  # a trainer may prepare a model twice
        gradient_checkpointing.enable_gradient_checkpointing(model, kwargs | {"mlp_tile": tile})
    mlp = next(module for module in model.modules() if type(module).__name__.endswith("MLP"))
    next(iter(mlp.children())).register_forward_pre_hook(
        lambda module, args: rows.append(args[0].flatten(0, -2).shape[0])
    )
    found = model(input_ids=ids, labels=labels).loss
    found.backward()
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
    assert_same_gradients(gradients(model), expected)
    assert max(rows) == min(tile, ids.numel()) and len(rows) >= 2 * -(-ids.numel() // tile)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, loss, rtol=1e-6, atol=0)


def test_a_model_that_is_trained_again_has_the_tiles_of_its_last_run():
    """And each once, also in a copy of the model."""
    model, rows = tiny.causal_lm(), []
    gradient_checkpointing.enable_gradient_checkpointing(model, {"mlp_tile": 4})
    model = copy.deepcopy(model)
    gradient_checkpointing.enable_gradient_checkpointing(model, {"mlp_tile": 8})
    mlp = next(module for module in model.modules() if type(module).__name__.endswith("MLP"))
    next(iter(mlp.children())).register_forward_pre_hook(
        lambda module, args: rows.append(args[0].flatten(0, -2).shape[0])
    )
    with torch.no_grad():
        model(input_ids=torch.arange(4, 24).view(2, 10))
    assert rows == [8, 8, 4]


def test_what_cannot_be_computed_in_tiles_is_refused():
    from transformers import BloomConfig, BloomForCausalLM

    for tile in (0, "many", 2.5):
        with pytest.raises(ValueError, match=f"mlp_tile={tile!r} is no number of tokens; set 4096"):
            gradient_checkpointing.enable_gradient_checkpointing(tiny.causal_lm(), {"mlp_tile": tile})
    # The first has no MLP of this name; that of the second chooses experts, and those of the third read a residual.
    for arch, name in (("qwen3_moe", "Qwen3Moe"), ("gpt_oss", "GptOss")):
        with pytest.raises(ValueError, match=f"{name}ForCausalLM has no module named MLP that mlp_tile could cut"):
            gradient_checkpointing.enable_gradient_checkpointing(tiny.mixture_of_experts(arch=arch), {"mlp_tile": 8})
    bloom = BloomForCausalLM(BloomConfig(vocab_size=384, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="BloomForCausalLM has no module named MLP"):
        gradient_checkpointing.enable_gradient_checkpointing(bloom, {"mlp_tile": 8})


def test_an_adapter_on_a_checkpointed_model_trains_too():
    model = tiny.causal_lm()
    gradient_checkpointing.enable_gradient_checkpointing(model, {"use_reentrant": True})
    adapted = adapters.add_adapter(model, peft.LoraConfig(**LORA)).train()
    ids, labels = batch()
    adapted(input_ids=ids, labels=labels).loss.backward()
    assert len(gradients(adapted)) == sum(p.requires_grad for p in adapted.parameters())


def test_checkpointing_is_turned_on_on_models_with_only_the_older_method():
    class Older(nn.Module):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs):
            self.options = gradient_checkpointing_kwargs

    model = Older()
    gradient_checkpointing.enable_gradient_checkpointing(model)
    assert model.options == {"use_reentrant": False}
    with pytest.raises(ValueError, match="Linear has no gradient_checkpointing_enable"):
        gradient_checkpointing.enable_gradient_checkpointing(nn.Linear(1, 1))
