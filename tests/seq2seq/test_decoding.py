"""The lean decoder writes what ``generate`` writes, token for token, or says no."""

from __future__ import annotations

import pytest
import torch
import transformers

from posttrain.seq2seq.decoder import Unsupported, read_decoder
from posttrain.seq2seq.decoding import LeanGenerator, best_of_each_row, top_of_each_row
from tests import tiny

VOCABULARY = 512
#: With so many tokens that end a row, rows of a random model end at many lengths.
ENDS = list(range(2, 60))

T5 = dict(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
BART = dict(
    vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, init_std=0.3,
    decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
)  # fmt: skip
MODELS = {
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "t5-gated": ("T5ForConditionalGeneration", "T5Config",
    T5 | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", T5), "bart": ("BartForConditionalGeneration", "BartConfig",
    BART | dict(pad_token_id=1, eos_token_id=2, decoder_start_token_id=2)), "marian": ("MarianMTModel", "MarianConfig",
    BART | dict(pad_token_id=3, eos_token_id=2, decoder_start_token_id=3, scale_embedding=True)),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", BART | dict(decoder_start_token_id=2)),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", BART),
}  # fmt: skip
OPTIONS = {
    "greedy": dict(max_length=18, eos_token_id=ENDS),
    "greedy-forced": dict(max_new_tokens=9, repetition_penalty=1.3, forced_eos_token_id=1),
    "beams": dict(max_length=18, num_beams=4, eos_token_id=ENDS),
    "beams-early": dict(
        max_length=18, num_beams=4, eos_token_id=ENDS, early_stopping=True, length_penalty=-0.5, num_return_sequences=3
    ),
    "beams-never": dict(
        max_length=18, num_beams=3, eos_token_id=ENDS, early_stopping="never", length_penalty=1.5,
        no_repeat_ngram_size=2, min_length=6,
    ),
}  # fmt: skip


def make(name):
    model, config, size = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**size)).eval()


def sources(model, rows=7, width=14):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(60, VOCABULARY, (rows, width), generator=generator)
    mask = torch.arange(width) < torch.randint(3, width + 1, (rows, 1), generator=generator)
    return {"input_ids": ids.where(mask, model.config.pad_token_id), "attention_mask": mask.long()}


def both(model, lean, inputs, **options):
    """(what ``generate`` gives, what the lean one gives)."""
    with torch.no_grad():
        encoded = model.get_encoder()(**inputs)
    return model.generate(**inputs, **options), lean(inputs, encoded, options)


@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_are_those_of_generate(name):
    model = make(name)
    lean, inputs = LeanGenerator(model), sources(model)
    for options in OPTIONS.values():
        expected, found = both(model, lean, inputs, **options)
        assert found is not None, lean.refused
        assert found.tolist() == expected.tolist()


def test_the_rows_of_these_tests_end_at_several_lengths():
    model = make("t5")
    tokens = model.generate(**sources(model), **OPTIONS["beams"])
    lengths = (tokens != tokens[:, -1:]).sum(1)
    assert len(set(lengths.tolist())) >= 3


def test_a_row_does_not_depend_on_the_others():
    model = make("marian")
    inputs = sources(model)
    alone = {name: value[2:3, : int(inputs["attention_mask"][2].sum())] for name, value in inputs.items()}
    whole = both(model, LeanGenerator(model), inputs, **OPTIONS["beams"])[1][2]
    single = both(model, LeanGenerator(model), alone, **OPTIONS["beams"])[1][0]
    assert whole[: len(single)].tolist() == single.tolist()


def test_a_vocabulary_that_is_no_multiple_of_the_blocks():
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5 | {"vocab_size": 531})).eval()
    for name in ("greedy", "beams"):
        expected, found = both(model, LeanGenerator(model), sources(model), **OPTIONS[name])
        assert found.tolist() == expected.tolist()


def test_bfloat16_weights():
    model = make("t5").to(torch.bfloat16)
    expected, found = both(model, LeanGenerator(model), sources(model), max_length=12, eos_token_id=ENDS)
    assert found is None or found.tolist() == expected.tolist()


def test_new_weights_are_read_after_refresh():
    model = make("t5")
    lean, inputs = LeanGenerator(model), sources(model)
    both(model, lean, inputs, **OPTIONS["greedy"])
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    lean.refresh()
    expected, found = both(model, lean, inputs, **OPTIONS["greedy"])
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(("options", "reason"), [
    ({"do_sample": True}, "mode is sample"),
    ({"num_beams": 2, "do_sample": True}, "mode is beam_sample"),
    ({"return_dict_in_generate": True}, "return_dict_in_generate"),
    ({"encoder_no_repeat_ngram_size": 2}, "encoder_no_repeat_ngram_size"),
    ({"max_time": 5.0}, "max_time"),
    ({"logits_processor": []}, "logits_processor"),
])  # fmt: skip
def test_what_it_does_not_know_is_left_to_generate(options, reason):
    model = make("t5")
    lean, inputs = LeanGenerator(model), sources(model, rows=2)
    assert lean(inputs, model.get_encoder()(**inputs), {"max_length": 8} | options) is None
    assert reason in lean.refused


def test_a_model_with_a_generate_of_its_own_is_asked_for_it():
    model = make("t5")
    inputs = sources(model, rows=2)
    model.generate = lambda **kwargs: None
    lean = LeanGenerator(model)
    assert lean(inputs, model.get_encoder()(**inputs), {}) is None and "overrides generate" in lean.refused


def test_a_decoder_that_differs_in_a_detail_is_found_out_by_the_trial(caplog):
    model = make("marian")
    layer = model.model.decoder.layers[1]
    stock = layer.fc1.forward
    layer.fc1.forward = lambda x: stock(x) * -2  # no attribute tells of it
    lean, inputs = LeanGenerator(model), sources(model)
    with caplog.at_level("INFO", logger="posttrain"):
        for _ in range(2):
            _expected, found = both(model, lean, inputs, **OPTIONS["greedy"])
            assert found is None
    assert caplog.text.count("short try") == 1, "said once"


@pytest.mark.parametrize(("change", "reason"), [
    (lambda m: setattr(m.decoder.block[0].layer[0].SelfAttention, "q", torch.nn.Sequential()), "Sequential"),
    (lambda m: setattr(m.decoder.block[1].layer[0].SelfAttention, "has_relative_attention_bias", True), "separate"),
    (lambda m: delattr(m.decoder.block[0].layer[1], "EncDecAttention"), "unknown architecture"),
])  # fmt: skip
def test_a_decoder_that_is_built_in_another_way_is_refused(change, reason):
    model = make("t5")
    change(model)
    with pytest.raises(Unsupported, match=reason):
        read_decoder(model)


def test_models_without_a_decoder_are_refused():
    with pytest.raises(Unsupported):
        read_decoder(tiny.causal_lm())


@pytest.mark.parametrize("size", [64, 100, 128, 640, 700])
def test_the_best_by_blocks_are_the_best(size):
    scores = torch.randn(7, size, generator=torch.Generator().manual_seed(size))
    scores[0, -1] = 99  # in the rest behind the last whole block
    assert best_of_each_row(scores).tolist() == scores.argmax(-1).tolist()
    for number in (1, 2, 8):
        values, places = top_of_each_row(scores, number)
        assert values.tolist() == scores.topk(number)[0].tolist()
        assert places.tolist() == scores.topk(number)[1].tolist()
