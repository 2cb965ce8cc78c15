"""Real chat templates: what is found by rendering alone is what trl's templates, patched by hand, mark as the
assistant's.

Run with a Python that has trl: ``python -m pytest tests/parity/test_chat_templates.py``.
"""

import copy
import re
from pathlib import Path

import pytest

from posttrain.core import get_training_chat_template
from posttrain.core.errors import DataError
from posttrain.lm.text import chat_template
from posttrain.lm.text.chat_template import require_calls
from tests import tiny

trl = pytest.importorskip("trl")

FOLDER = Path(trl.__file__).parent / "chat_templates"
PATCHED = sorted(path.stem.removesuffix("_training") for path in FOLDER.glob("*_training.jinja"))
TURNS = [
    {"role": "user", "content": "Q one"},
    {"role": "assistant", "content": "A one"},
    {"role": "user", "content": "Q two"},
    {"role": "assistant", "content": "A two"},
]
CONVERSATIONS = {
    "plain": TURNS,
    "system": [{"role": "system", "content": "Be kind."}, *TURNS],
    "thoughts": [m | {"reasoning_content": "hm " + m["content"]} if m["role"] == "assistant" else m for m in TURNS],
}


def template(name):
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    tok = copy.deepcopy(tiny.tokenizer(chat_template=source))
    tok.bos_token = "<s>"
    tok.add_special_tokens({"additional_special_tokens": sorted(set(re.findall(r"<\|\w+\|>", source)))})
    return chat_template.Template(tok)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", PATCHED)
def test_turns_are_found_where_they_are_marked(name, conversation):
    messages = copy.deepcopy(CONVERSATIONS[conversation])
    try:
        text, marks = template(f"{name}_training").trained_spans(copy.deepcopy(messages))
    except DataError as error:
        pytest.skip(f"the patched template refuses it: {error}")
    try:
        plain, spans = template(name).trained_spans(messages)
    except DataError as error:  # it must be a refusal of content that the template does not show
        assert "A one" not in text or "refused" in str(error)
        return
    assert len(spans) == 2
    marked = [[(a, b) for a, b in marks if start <= b and a < stop] for start, stop in turns(text)]
    for (a, b), group, answer in zip(spans, marked, ("A one", "A two"), strict=True):
        ours, theirs = plain[a:b].strip(), text[group[0][0] : group[-1][1]].strip()
        assert answer in ours
        if plain == text:  # they mark what the generation prompt says, too, which the model never writes
            assert theirs.endswith(ours) and "Q" not in theirs[: len(theirs) - len(ours)]
        else:  # the patch keeps thoughts that the template drops
            assert theirs[theirs.rindex(answer) :] == ours[ours.rindex(answer) :]


CALL = {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": {"word": "xylophone"}}}
ASKS = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
WITHOUT_CALLS = {
    "cohere",
    "cohere2",
    "deepseek_r1_distill",
    "gemma",
    "gemma3",
    "lfm2",
    "llama3",
    "phi3",
    "phi3_5",
    "qwen2_5_vl",
}


@pytest.mark.parametrize("name", [*PATCHED, "llama3_1", "llama3_2", "lfm2_2_5", "gemma4", "gemma4_v5"])
def test_no_turn_is_learned_without_its_calls(name):
    as_text = CALL | {"function": CALL["function"] | {"arguments": '{"word": "xylophone"}'}}
    for call in (CALL, as_text):
        messages = [ASKS[0], ASKS[1] | {"tool_calls": [call]}]
        try:
            require_calls(template(name), messages)
            text, spans = template(name).trained_spans(messages)
        except DataError as error:
            assert name in WITHOUT_CALLS or "refused" in str(error) or call is as_text, error
            continue
        assert (
            name not in WITHOUT_CALLS
            and "look_up" in text[slice(*spans[-1])]
            and "xylophone" in text[slice(*spans[-1])]
        )


@pytest.mark.parametrize("name", sorted({path.stem.removesuffix("_training") for path in FOLDER.glob("*.jinja")}))
def test_every_template_of_trl_can_be_marked(name):
    plain = template(name)
    made = get_training_chat_template(plain.tokenizer)
    if made is None:
        assert chat_template.GENERATION_TAG.search(plain.tokenizer.chat_template)
        return
    marked = chat_template.Template(plain.tokenizer, chat_template_kwargs={"chat_template": made})
    parts = name in ("idefics3", "llava_next", "smolvlm")  # contents are lists of parts
    turns = [m | {"content": [{"type": "text", "text": m["content"]}]} if parts else m for m in TURNS]
    for messages in (turns, turns[:3]):
        text, spans = marked.trained_spans(messages)
        before, found = plain.trained_spans(messages)
        said = [re.findall(r"[AQ] (?:one|two)", text[a:b]) for a, b in spans]
        assert said == [["A one"], ["A two"]][: len(spans)] and len(spans) == len(found)
        if text == before and "</think>" not in text:  # the trainer leaves an empty thought out
            assert spans == found
    assert marked.render(turns).startswith(marked.render(turns[:3]).removesuffix(plain.tokenizer.eos_token))


def turns(text):
    """Where the two turns lie: each from behind its question on."""
    first, second = text.index("Q one") + 5, text.index("Q two") + 5
    return [(first, second - 5), (second, len(text))]
