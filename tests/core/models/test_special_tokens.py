"""Special tokens come from the vocabulary, and the model's configs follow the tokenizer."""

from __future__ import annotations

import pytest
from torch import nn

from posttrain.core.models import special_tokens
from tests import tiny


def test_a_pad_token_is_found_in_the_vocabulary():
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    size = len(tokenizer)
    assert "'<|pad|>'" in special_tokens.ensure_pad_token(tokenizer)
    assert tokenizer.pad_token == "<|pad|>" and tokenizer.pad_token != tokenizer.eos_token and len(tokenizer) == size
    assert special_tokens.ensure_pad_token(tokenizer) is None


def test_eos_pads_where_nothing_else_can(monkeypatch):
    monkeypatch.setattr(special_tokens, "PAD_CANDIDATES", ("<|endoftext|>",))
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    assert "eos token '<|endoftext|>'" in special_tokens.ensure_pad_token(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token = None
    monkeypatch.setattr(special_tokens, "PAD_CANDIDATES", ())
    with pytest.raises(ValueError, match="Set tokenizer.pad_token"):
        special_tokens.ensure_pad_token(tokenizer)


def test_the_tokenizers_ids_reach_the_configs():
    model, tokenizer = tiny.causal_lm(pad_token_id=7, bos_token_id=5), tiny.tokenizer()
    model.generation_config.eos_token_id = [8, 9]
    assert special_tokens.align_special_tokens(model, tokenizer) == {"pad_token_id": 0, "eos_token_id": 1}
    assert (model.config.pad_token_id, model.generation_config.pad_token_id) == (0, 0)
    assert model.generation_config.eos_token_id == [1, 8, 9]
    assert model.config.bos_token_id == 5  # the tokenizer has none, which says nothing about the model
    assert special_tokens.align_special_tokens(model, tokenizer) == {}


def test_a_module_without_a_config_has_nothing_to_align():
    assert special_tokens.align_special_tokens(nn.Linear(1, 1), tiny.tokenizer()) == {}
    assert special_tokens.align_special_tokens(tiny.causal_lm(), None) == {}
