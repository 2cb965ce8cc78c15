import copy
import threading
from types import SimpleNamespace

import pytest

from posttrain.core.errors import DataError
from posttrain.lm.text import chat_template
from tests.tiny import CHATML, tokenizer

# Like Qwen3's: earlier turns lose their thoughts, the last one always has some.
THINKING = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}"
    "{{- m.content + '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
# Like Phi-3's: an eos after the last turn only.
EOS_AT_THE_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
# What is said first depends on how much follows: no rendering of a part is a part of the rendering.
COUNTING = (
    "{{ messages | length }} messages.{% for m in messages %}<|im_start|>{{ loop.revindex }} {{ m.role }}\n"
    "{{ m.content | length }}<|im_end|>{% endfor %}"
)

TURNS = [
    {"role": "user", "content": "Q one"},
    {"role": "assistant", "content": "A one"},
    {"role": "user", "content": "Q two"},
    {"role": "assistant", "content": "A two"},
]


def trained(template, messages=TURNS, tok=None, **kwargs):
    """The pieces of text that the mask covers, and the whole text."""
    tok = tok or tokenizer(chat_template=template)
    found = chat_template.Template(tok, kwargs.get("tools"), kwargs.get("chat_template_kwargs"))
    text, spans = found.trained_spans(messages)
    ids, mask, _ = chat_template.encode_texts(tok, [text], [spans])[0]
    assert len(ids) == len(mask) and ids == chat_template.encode_texts(tok, [found.render(messages)])[0].ids
    pieces, inside = [], False
    for token, taught in zip(ids, mask.tolist(), strict=True):
        if taught and not inside:
            pieces.append([])
        if taught:
            pieces[-1].append(token)
        inside = taught
    return [tok.decode(piece) for piece in pieces], tok.decode(ids)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (["text", "label"], "language_modeling"),
        (["messages"], "language_modeling"),
        (["conversations", "id"], "language_modeling"),
        (["prompt", "completion"], "prompt_completion"),
        (["prompt"], "prompt_only"),
        (["prompt", "chosen", "rejected"], "preference"),
        (["chosen", "rejected", "messages"], "preference"),
        (["prompt", "completion", "label"], "unpaired_preference"),
        (["prompt", "completions", "labels"], "stepwise_supervision"),
        (["input_ids", "labels", "text"], "tokenized"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
    ],
)
def test_the_columns_tell_the_format(columns, expected):
    assert chat_template.detect_format(columns) == expected


def test_columns_of_no_format_are_named_with_those_wanted():
    with pytest.raises(DataError, match=r"\['answer', 'question'\].*completion and prompt; .*messages; .*text"):
        chat_template.detect_format(["question", "answer"])


def test_conversations_are_told_from_texts():
    assert chat_template.is_conversational({"prompt": [{"role": "user", "content": "Hi"}]})
    assert chat_template.is_conversational({"conversations": [{"from": "human", "value": "Hi"}]})
    assert not chat_template.is_conversational({"prompt": "Hi"})
    assert not chat_template.is_conversational({"messages": []})


def test_sharegpt_becomes_messages():
    row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]}
    expected = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    assert chat_template.sharegpt_to_messages(row) == chat_template.to_messages(row["conversations"]) == expected
    with pytest.raises(DataError, match="unknown speaker 'alien'"):
        chat_template.sharegpt_to_messages([{"from": "alien", "value": "Hi"}])


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "null"),
        ([], "empty"),
        ("Hi", "not a list"),
        ([{"content": "Hi"}], "no role"),
        ([{"role": "user", "content": None}], "content .* null"),
        ([{"role": "user", "content": 3}], "neither text"),
        ([None], "not a list of messages"),
    ],
)
def test_a_conversation_that_is_none_is_refused_with_the_reason(messages, reason):
    with pytest.raises(DataError, match=reason):
        chat_template.to_messages(messages)


def test_keys_that_arrow_filled_with_none_are_dropped():
    call = {"function": {"name": "f", "arguments": {"x": 1, "y": None}}, "id": None}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "name": None}
    assert chat_template.to_messages([message]) == [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    ]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_every_assistant_turn_is_trained_on_with_its_end_and_nothing_else_is(template):
    pieces, whole = trained(template)
    assert [piece.rstrip("\n") for piece in pieces] == ["A one<|im_end|>", "A two<|im_end|>"]
    assert whole.count("<|im_start|>") == 4


def test_turns_are_found_where_earlier_ones_lose_their_thoughts():
    messages = copy.deepcopy(TURNS)
    messages[3]["reasoning_content"] = "hm"
    pieces, whole = trained(THINKING, messages)
    assert pieces == ["A one<|im_end|>\n", "<think>\nhm\n</think>\n\nA two<|im_end|>\n"]
    assert whole.count("<think>") == 1


def test_an_empty_thought_from_the_template_is_not_trained_on():
    pieces, whole = trained(THINKING, chat_template_kwargs={"enable_thinking": False})
    assert pieces == ["A one<|im_end|>\n", "A two<|im_end|>\n"]
    assert "<think>" in whole


def test_what_only_ends_the_last_turn_is_trained_on_only_there():
    assert trained(EOS_AT_THE_END)[0] == ["A one<|im_end|>\n", "A two<|im_end|>\n<|endoftext|>"]


def test_a_conversation_may_begin_with_the_assistant():
    assert trained(CHATML, TURNS[1:])[0] == ["A one<|im_end|>\n", "A two<|im_end|>\n"]


def test_white_space_that_the_tokenizer_hides_from_positions_is_not_trained_on():
    from tokenizers import processors

    tok = copy.deepcopy(tokenizer())
    tok.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # as GPT-2 and Llama-3 have it
    before = tok.backend_tokenizer.to_str()
    assert trained(CHATML, tok=tok)[0] == ["A one<|im_end|>\n", "A two<|im_end|>\n"]
    assert tok.backend_tokenizer.to_str() == before


@pytest.mark.parametrize("spans", [None, [[(0, 3)]]])
def test_threads_that_tokenize_at_the_same_time_leave_the_tokenizer_as_it_was(spans):
    """Such as those of rollouts that overlap: one that began while another had taken the post-processor out kept it."""
    tok, second_is_in = copy.deepcopy(tokenizer()), threading.Event()

    class Backend:
        post_processor = processor = object()

        def __init__(self):
            self.no_truncation = self.no_padding = lambda: None
            self.calls, self.first_has_ended = 0, threading.Event()

        def encode_batch(self, texts, **options):
            self.calls += 1
            if self.calls == 1:
                second_is_in.wait(0.3)  # which waits for its turn, where it must
            else:
                second_is_in.set()
                self.first_has_ended.wait(0.3)
            return tok.backend_tokenizer.encode_batch(texts, **options)

        encode_batch_fast = encode_batch

    backend = Backend()
    shared = SimpleNamespace(is_fast=True, backend_tokenizer=backend)
    threads = [threading.Thread(target=chat_template.encode_texts, args=(shared, ["a b c"], spans)) for _ in range(2)]
    for thread in threads:
        thread.start()
    threads[0].join()
    backend.first_has_ended.set()
    threads[1].join()
    assert backend.calls == 2 and backend.post_processor is Backend.processor


def test_letters_of_several_bytes_do_not_shift_the_mask():
    messages = [{"role": "user", "content": "Größe? 你好 🙂"}, {"role": "assistant", "content": "🙂 où 你"}]
    assert trained(CHATML, messages)[0] == ["🙂 où 你<|im_end|>\n"]


def test_a_template_that_hides_its_turns_is_refused():
    with pytest.raises(DataError, match="does not show where"):
        chat_template.Template(tokenizer(chat_template=COUNTING)).trained_spans(TURNS)


def test_what_the_template_refuses_is_said():
    with pytest.raises(DataError, match="roles must alternate"):
        chat_template.Template(tokenizer(chat_template=ALTERNATING)).render([TURNS[0], TURNS[0]])
    with pytest.raises(DataError, match="no chat template"):
        chat_template.Template(tokenizer(chat_template=None))


def test_a_token_across_the_border_is_cut_there():
    tok = tokenizer()
    word = next(word for word in map(tok.decode, range(260, 384)) if len(word) >= 2 and word.isalpha())  # one token
    encoding = chat_template.encode_texts(tok, [word], [[(1, len(word))]])[0]
    assert encoding.cut and tok.decode(encoding.ids) == word
    assert encoding.ids == tok(word[:1])["input_ids"] + tok(word[1:])["input_ids"]
    assert encoding.mask.tolist() == [False] + [True] * (len(encoding.ids) - 1)


def test_a_token_across_the_border_is_trained_on_where_cutting_would_change_the_text():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "b": 2, "ab": 3, "▁ab": 4}, merges=[("a", "b"), ("▁", "ab")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    tok = PreTrainedTokenizerFast(tokenizer_object=backend)
    encoding = chat_template.encode_texts(tok, ["ab"], [[(1, 2)]])[0]  # "a" and "b" alone would read "a b"
    assert encoding.ids == [4] and encoding.mask.tolist() == [True]


def test_a_slow_tokenizer_gives_the_same_mask():
    class Slow:
        """The fast tokenizer without its positions."""

        is_fast = False

        def __init__(self, tok):
            self.tok = tok

        def __getattr__(self, name):
            return getattr(self.tok, name)

        def __call__(self, *args, **kwargs):
            return self.tok(*args, **kwargs)

    assert trained(CHATML, tok=Slow(tokenizer())) == trained(CHATML)


def test_a_truncation_left_on_by_an_earlier_call_does_not_reach_into_the_next():
    tok = copy.deepcopy(tokenizer())
    tok("one two three four", truncation=True, max_length=2, padding="max_length")
    whole = "Natalia sold clips to 48 of her friends"
    assert tok.decode(chat_template.encode_texts(tok, [whole])[0].ids) == whole


def test_special_tokens_and_ends_are_asked_of_the_tokenizer():
    from tokenizers import processors

    tok = copy.deepcopy(tokenizer())
    assert chat_template.special_tokens_around(tok) == ([], [])
    assert {tok.decode([i]) for i in chat_template.end_tokens(tok)} == {"<|endoftext|>", "<|im_end|>"}
    tok.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|endoftext|>", special_tokens=[("<|im_start|>", 2), ("<|endoftext|>", 1)]
    )
    assert chat_template.special_tokens_around(tok) == ([2], [1])
    assert chat_template.end_tokens(tokenizer(chat_template=None)) == {1}


def test_doubled_bos_is_seen():
    tok = copy.deepcopy(tokenizer())
    tok.bos_token = "<|im_start|>"
    assert (
        chat_template.has_doubled_bos(tok, [2, 2, 9])
        and not chat_template.has_doubled_bos(tok, [2, 9])
        and not chat_template.has_doubled_bos(tok, [])
    )


def test_tools_come_as_lists_or_json():
    assert chat_template.to_tools('[{"name": "f", "x": null}]') == [{"name": "f"}]
    assert chat_template.to_tools(None) is None and chat_template.to_tools("[]") is None
    with pytest.raises(DataError, match="not valid JSON"):
        chat_template.to_tools("{f}")
