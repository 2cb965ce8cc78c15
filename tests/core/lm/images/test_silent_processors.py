"""What a processor that does not report it puts in the place of an image is found between the pieces of the text."""

from __future__ import annotations

import pytest

from posttrain.lm.images import vision
from tests import tiny_vision

pytest.importorskip("PIL.Image")


@pytest.mark.parametrize(
    "text", ["Q <image> now", "<image>Q", "look <image>at<image>\n", "<image><image> both", "none"]
)
def test_the_text_with_images_has_the_tokens_of_the_processor(text):
    model, processor = tiny_vision.idefics2()
    images = [tiny_vision.image(n, 16, 12 + 4 * n) for n in range(text.count("<image>"))]
    shown = vision.VisionProcessor(processor, model).show(text, images)
    given = {"images": [images]} if images else {}
    expected = processor(text=[text], add_special_tokens=False, **given)["input_ids"][0]
    assert processor.tokenizer(shown.text, add_special_tokens=False)["input_ids"] == expected
    assert expected.count(tiny_vision.number("<image>")) == 4 * len(images)
    ids = {tiny_vision.number(word) for word in ("<image>", "<fake_token_around_image>")}
    assert shown.ids >= ids if images else not ids & set(expected)
    at = text.rfind(">") + 1  # the words behind the last image
    if at < len(text):
        [(start, stop)] = shown.spans([(at, len(text))])
        assert shown.text[start:stop] == text[at:]


def test_what_cannot_be_told_from_the_tokens_is_refused(monkeypatch):
    model, processor = tiny_vision.idefics2()
    show = vision.VisionProcessor(processor, model).show
    monkeypatch.setattr(type(processor.tokenizer), "decode", lambda *_: "Q now")
    with pytest.raises(ValueError, match="Idefics2Processor does not report which text"):
        show("Q <image> now", [tiny_vision.image(0)])
    monkeypatch.undo()
    monkeypatch.setattr(vision, "OF_IMAGES", ("pixel_values",))  # as if the mask were one of the text's tokens
    with pytest.raises(ValueError, match="it cannot be found in the tokens"):
        show("Q <image> now", [tiny_vision.image(0)])
