"""A model takes the chat template of another tokenizer, with the tokens that it needs."""

from __future__ import annotations

import pytest
import torch

from posttrain.core import clone_chat_template, setup_chat_format
from tests import tiny


def test_the_template_its_tokens_and_its_end_are_taken_over(tmp_path):
    source = tiny.tokenizer()
    source.add_tokens(["<turn>", "<over>"], special_tokens=True)
    source.eos_token = "<over>"
    source.chat_template = "{% for m in messages %}<turn>{{ m['content'] }}<over>{% endfor %}"
    source.save_pretrained(tmp_path)
    model, target = tiny.causal_lm(), tiny.tokenizer()
    before = model.get_input_embeddings().weight.detach().clone()
    same, tokenizer, added = clone_chat_template(model, target, tmp_path)
    assert same is model and tokenizer is target and len(tokenizer.get_vocab()) == model.config.vocab_size == 448
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a b"}], tokenize=True, return_dict=False)
    assert ids[0] == tokenizer.convert_tokens_to_ids("<turn>") and ids[-1] == tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert {ids[0], ids[-1]} <= {*added} and min(added) >= 384 and len(added) == 448 - 384
    assert torch.equal(model.get_input_embeddings().weight[:384], before)
    assert model(torch.tensor([ids])).logits.shape[-1] == 448


def test_a_source_without_a_template_is_refused(tmp_path):
    tiny.tokenizer(chat_template=None).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no chat template to clone"):
        clone_chat_template(tiny.causal_lm(), tiny.tokenizer(), tmp_path)


def test_a_base_model_is_given_chatml():
    model, tokenizer = setup_chat_format(tiny.causal_lm(), tiny.tokenizer(chat_template=None))
    messages = [{"role": "user", "content": "a b"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 1 and tokenizer.eos_token == "<|im_end|>" == tokenizer.pad_token
    assert len(tokenizer) == model.config.vocab_size == model(torch.tensor([ids])).logits.shape[-1]
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    with pytest.raises(ValueError, match="has a chat template already"):
        setup_chat_format(model, tokenizer)
