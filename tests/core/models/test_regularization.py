"""Noise and dropout act in training only, where they are asked for."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from posttrain.core.models import regularization
from posttrain.lm.loading import adapters
from tests import tiny
from tests.core.models.gradients import LORA, batch

peft = pytest.importorskip("peft")


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


@pytest.mark.parametrize("adapter", [False, True])
def test_neftune_noise_is_bounded_in_training_only_and_gone_afterwards(adapter):
    model = tiny.causal_lm()
    embedding = model.get_input_embeddings()
    model = adapters.add_adapter(model, peft.LoraConfig(**LORA)) if adapter else model
    ids, _ = batch()
    clean, clean_logits = embedding(ids), model.eval()(input_ids=ids).logits
    with regularization.neftune(model, alpha=5.0):
        model.train()
        noise = embedding(ids) - clean
        model.eval()
        assert torch.equal(model(input_ids=ids).logits, clean_logits)
    bound = 5.0 / math.sqrt(9 * 32)
    assert noise.abs().max() <= bound * 1.0001 and noise.abs().max() > 0.9 * bound
    assert noise.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)  # of a uniform distribution
    model.train()
    assert torch.equal(embedding(ids), clean)


def test_neftune_leaves_with_its_context_even_after_an_error():
    model = tiny.causal_lm().train()
    with contextlib.suppress(KeyError), regularization.neftune(model, alpha=5.0):
        raise KeyError
    assert not model.get_input_embeddings()._forward_hooks
    with regularization.neftune(model, None):
        assert not model.get_input_embeddings()._forward_hooks


def test_dropout_is_off_everywhere():
    ids, _ = batch()
    dropped = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    for model in (tiny.causal_lm("gpt2", **dropped), tiny.causal_lm("llama", attention_dropout=0.5)):
        model.train()
        assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
        regularization.disable_dropout(model)
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
