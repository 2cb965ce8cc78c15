"""Gradient checkpointing changes no gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from posttrain.core.models import adapters, gradient_checkpointing, wrapping
from tests import tiny
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
    assert wrapping.base_model(model).is_activation_checkpointing and not wrapping.base_model(model).config.use_cache
    assert (kwargs or {}) == given
    model(input_ids=ids, labels=labels).loss.backward()
    assert_same_gradients(gradients(model), expected)


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
