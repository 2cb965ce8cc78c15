"""Which teacher a row names, and where tokens begin in a text, decoded a few at a time as from the beginning."""

import math
import random
import socket

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from posttrain.core.errors import DataError
from posttrain.rl.online import teachers
from posttrain.rl.online.teachers import WINDOW, ServerTeacher, beginnings
from posttrain.rl.samples.samples import Sample
from tests import tiny

TEXT = "héllo wörld \N{HIRAGANA LETTER A}\N{CJK UNIFIED IDEOGRAPH-65E5} \N{GRINNING FACE} the quick\n\n\tfox  "


def sentence_pieces():
    """As Llama 2 has them: bytes for other characters, and a decoder that takes the first space away."""
    made = Tokenizer(models.BPE(byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=special, show_progress=False)
    made.train_from_iterator([TEXT] * 3, trainer)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<0x00>")


def word_pieces():
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]"], show_progress=False)
    made.train_from_iterator([TEXT] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", eos_token="[UNK]")


def all_before(ids, tokenizer, text):
    decoded = [tokenizer.decode(ids[:place], clean_up_tokenization_spaces=False) for place in range(len(ids))]
    return {len(before): place for place, before in enumerate(decoded) if text.startswith(before)}


@pytest.mark.parametrize("make", [tiny.tokenizer, sentence_pieces, word_pieces])
def test_a_window_finds_what_decoding_from_the_beginning_finds(make, monkeypatch):
    """Of written texts, and of tokens in any order: characters in parts, and bytes that are none."""
    tokenizer, draw, decode, decoded = make(), random.Random(0), PreTrainedTokenizerFast.decode, []

    def counted(self, ids, **options):
        decoded.append(len(ids))
        return decode(self, ids, **options)

    for number in (0, 1, WINDOW, 9 * WINDOW):
        written = tokenizer("".join(draw.choices(TEXT, k=number)), add_special_tokens=False)["input_ids"]
        for ids in (written, draw.choices(range(len(tokenizer)), k=number)):
            text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            with monkeypatch.context() as patch:
                patch.setattr(PreTrainedTokenizerFast, "decode", counted)
                found = beginnings(ids, tokenizer, text)
            assert found == all_before(ids, tokenizer, text)
    assert max(decoded) < 3 * WINDOW


def test_a_byte_that_is_no_character_makes_all_that_follow_in_its_run_none():
    tokenizer = sentence_pieces()
    ids = tokenizer.convert_tokens_to_ids(["<0xFF>", *["<0x61>"] * 3 * WINDOW])
    text = tokenizer.decode(ids)
    assert set(text) == {"\ufffd"} and beginnings(ids, tokenizer, text) == all_before(ids, tokenizer, text)


@pytest.mark.parametrize("name", [None, math.nan, 0, "", ["a"]])
def test_a_row_that_names_no_teacher_is_shown(name):
    two = ServerTeacher({"a": "http://host:1", "b": "http://host:2"}, 3)
    with pytest.raises(DataError, match=r"with the prompt 'Why \?' has teacher_id=.*not among the teachers \(a, b\)"):
        two.complete(None, [Sample({"teacher_id": name}, "Why ?", [5])])


def test_the_time_that_a_server_has_is_set_by_the_argument_that_its_message_names(monkeypatch):
    monkeypatch.setattr(teachers, "RETRIES", 0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        teacher = ServerTeacher({"": f"http://127.0.0.1:{silent.getsockname()[1]}"}, 3, timeout=0.2)
        with pytest.raises(ConnectionError, match=r"within 0\.2 seconds.* raise teacher_request_timeout"):
            teacher.complete(None, [Sample({}, "Why ?", [5])])
