"""Texts as tensors for scripts, under trl's names: the bytes of each token, and what is padded where."""

import pytest
import torch

from posttrain.core.errors import DataError
from posttrain.rl import (
    DataCollatorForChatML,
    build_teacher_inputs_from_texts,
    build_teacher_request_inputs,
    encode_with_byte_offsets,
    pad_byte_offsets,
)
from tests import tiny

TOKENIZER = tiny.tokenizer()
EMOJI = "\N{GRINNING FACE}"
END = TOKENIZER.eos_token_id


def chat(asked, answered):
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}


@pytest.mark.parametrize("text", ["Natalia sold 48 clips.", f"a {EMOJI}{EMOJI} b", "é\u0301 \N{HIRAGANA LETTER A}", ""])
def test_tokens_stand_for_their_own_bytes_and_leave_none_out(text):
    [(ids, spans)] = encode_with_byte_offsets(TOKENIZER.backend_tokenizer, [text])
    assert ids == TOKENIZER(text)["input_ids"]
    edges = [0, *(end for _, end in spans)]
    assert [start for start, _ in spans] == edges[:-1] and edges[-1] == len(text.encode())
    backend = TOKENIZER.backend_tokenizer
    for place, (start, end) in enumerate(spans):  # what is decoded of bytes that are no character is U+FFFD
        assert backend.decode(ids[: place + 1]) == text.encode()[:end].decode(errors="replace") and start < end


def test_pieces_of_one_character_share_its_bytes_where_the_vocabulary_is_of_characters():
    from tokenizers import Tokenizer, models, pre_tokenizers

    pieces = ["<unk>", "\u2581a", *(f"<0x{byte:02X}>" for byte in EMOJI.encode()), "\u2581b"]
    backend = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    [(ids, spans)] = encode_with_byte_offsets(backend, [f"a{EMOJI} b"])
    assert ids == [1, 2, 3, 4, 5, 6]
    assert spans == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 7)]


def test_offsets_are_padded_on_the_side_of_the_tokens():
    assert pad_byte_offsets([(0, 2), (2, 3)], 4, "left").tolist() == [[0, 0], [0, 0], [0, 2], [2, 3]]
    assert pad_byte_offsets([(0, 2)], 2).tolist() == [[0, 2], [0, 0]]


def test_a_teacher_reads_the_texts_and_an_end_behind_each():
    prompts, written = ["Hi?", "Explain the word clip, please"], ["Hello there!", "OK"]
    ids, labels, mask, spans = build_teacher_inputs_from_texts(TOKENIZER, prompts, written)
    for row in range(2):
        own = ids[row][mask[row]].tolist()
        asked = TOKENIZER(prompts[row])["input_ids"]
        assert own == [*asked, *TOKENIZER(written[row])["input_ids"], END]
        learned = labels[row] != -100
        assert labels[row][learned].tolist() == own[len(asked) :] and not learned[: len(asked)].any()
        assert spans[row][learned][-1].tolist() == [len(written[row])] * 2 and not spans[row][~learned].any()
        assert spans[row][learned][:-1, 1].max() == len(written[row])
    by_place = build_teacher_inputs_from_texts(TOKENIZER, prompts, written, use_extended_uld=False)
    assert all(map(torch.equal, by_place[:3], (ids, labels, mask))) and not by_place[3].any()
    again = build_teacher_inputs_from_texts(TOKENIZER, [TOKENIZER.decode([5, END])], ["a"])[0]
    assert again[0, :2].tolist() == [5, *TOKENIZER("a")["input_ids"]]  # a prompt that ends goes on


def test_a_server_is_asked_for_rows_without_padding():
    ids = torch.tensor([[0, 0, 5, 6, 7, 0], [1, 2, 3, 4, 8, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    expected = [[5, 6, 7], [1, 2, 3, 4, 8, 9]], [2, 4], [1, 2]
    prompts = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert build_teacher_request_inputs(ids, mask, prompts) == expected
    labels = torch.tensor([[-100, -100, -100, -100, 7, -100], [-100, -100, -100, -100, 8, 9]])
    assert build_teacher_request_inputs(ids, mask, labels=labels) == expected
    with pytest.raises(ValueError, match="Pass prompt_attention_mask or labels"):
        build_teacher_request_inputs(ids, mask)
    with pytest.raises(ValueError, match=r"\(2, 6\), and another tensor \(2, 5\)"):
        build_teacher_request_inputs(ids, mask, labels=labels[:, 1:])
    with pytest.raises(ValueError, match="Row 0 has 3 tokens, and a prompt of 4"):
        build_teacher_request_inputs(ids, mask, torch.ones(2, 4))


def test_conversations_are_cut_at_their_beginning_and_the_last_turn_is_labelled():
    rows = [chat("Hi", f"Yes {EMOJI}"), chat("How many clips did she sell? " * 4, "48")]
    batch = DataCollatorForChatML(TOKENIZER, max_length=30)(rows)
    for row, kept in zip(rows, range(2), strict=True):
        asked = TOKENIZER.apply_chat_template(row["messages"][:1], add_generation_prompt=True, tokenize=False)
        whole = TOKENIZER.apply_chat_template(row["messages"], tokenize=False)
        ids = TOKENIZER(whole)["input_ids"][-30:]
        mask, labels, spans = (batch[name][kept] for name in ("attention_mask", "labels", "byte_offsets"))
        assert batch["input_ids"][kept][mask.bool()].tolist() == ids and mask.sum() == len(ids)
        learned = labels != -100
        completion = whole[len(asked) :]
        assert TOKENIZER.decode(labels[learned]) == completion and learned[-1]
        assert spans[learned][-1, 1] == len(completion.encode()) and spans[learned][0, 0] == 0
        assert not spans[~learned].any()
        prompt = batch["prompts"][kept][batch["prompt_attention_mask"][kept].bool()].tolist()
        assert prompt == ids[: len(ids) - int(learned.sum())]
        assert TOKENIZER.decode(prompt) == asked or len(ids) == 30
    with pytest.raises(DataError, match="Row 1 of the batch has .* max_length=9: no prompt tokens left"):
        DataCollatorForChatML(TOKENIZER, max_length=9)([chat("Hi", ""), chat("Hi", "How many clips did she sell?")])
    rendered = {"prompt": "asked", **chat("Hi", "Yes")}  # a prompt that is rendered already
    assert DataCollatorForChatML(TOKENIZER)([rendered])["labels"].ne(-100).sum() > batch["labels"][0].ne(-100).sum()


def test_a_collator_needs_a_pad_token():
    bare = tiny.tokenizer()
    bare.pad_token = None
    with pytest.raises(ValueError, match="no pad token"):
        DataCollatorForChatML(bare)
