"""Wrappers come off, and adapters stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from posttrain.core.models import wrapping
from posttrain.lm.loading import adapters
from tests import tiny
from tests.core.models.gradients import LORA

peft = pytest.importorskip("peft")


def test_wrappers_come_off_and_adapters_stay():
    model = tiny.causal_lm()
    assert wrapping.unwrap(model) is model and wrapping.base_model(model) is model and not wrapping.is_peft_model(model)
    adapted = adapters.add_adapter(model, peft.LoraConfig(**LORA))
    for wrapped in (adapted, nn.DataParallel(adapted), torch.compile(adapted), torch.compile(nn.DataParallel(adapted))):
        assert wrapping.unwrap(wrapped) is adapted and wrapping.is_peft_model(wrapped)
        assert wrapping.base_model(wrapped) is model


def test_a_users_own_attribute_named_module_is_no_wrapper():
    model = nn.Module()
    model.module = nn.Linear(1, 1)
    assert wrapping.unwrap(model) is model
