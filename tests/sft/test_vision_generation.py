"""Evaluations and callbacks that generate from prompts with images, beside the model's own ``generate``."""

from __future__ import annotations

import json

import pytest
import torch

from posttrain.core import LogCompletionsCallback
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny_vision
from tests.contract.trainers import arguments, image_rows

pytest.importorskip("PIL.Image")


def trainer(family, out, seen=None, **changes):
    if family in ("pixtral", "mistral3"):
        pytest.importorskip("torchvision", reason="transformers' PixtralProcessor needs it")
    model, processor = tiny_vision.FAMILIES[family]()
    rows = [{name: row[name] for name in ("images", "prompt", "completion")} for row in image_rows(4)]
    options = {"per_device_eval_batch_size": 3, "gradient_checkpointing": False}
    return SFTTrainer(
        model,
        arguments(SFTConfig, out, **(options | changes)),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=processor,
        compute_metrics=None if seen is None else lambda evaluated: seen.append(evaluated) or {"rows": 4.0},
    )


def written(trainer, row, **options):
    """The text of the prompt of `row`, and what the model writes after it, by transformers alone."""
    processor, talk = trainer.processing_class, row["prompt"]
    parts = talk[0]["content"]
    if isinstance(parts, str):
        parts = [*({"type": "image"} for _ in row["images"]), {"type": "text", "text": parts}]
    template = {"chat_template": processor.chat_template, "add_generation_prompt": True, "tokenize": False}
    text = processor.tokenizer.apply_chat_template([{"role": "user", "content": parts}], **template)
    given = {"images": [row["images"]]} if row["images"] else {}
    inputs = processor(text=[text], add_special_tokens=False, return_tensors="pt", **given)
    inputs.pop("text_replacement_offsets", None)
    with torch.no_grad():
        found = trainer.model.eval().generate(**inputs, **options)
    return text, found[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("family", tiny_vision.FAMILIES)
def test_answers_are_generated_from_prompts_with_images(family, tmp_path):
    seen = []
    it = trainer(family, tmp_path, seen, predict_with_generate=True, generation_max_length=6)
    metrics = it.evaluate()
    plain = trainer(family, tmp_path).evaluate()
    assert metrics["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-5) and metrics["eval_rows"] == 4
    tokenizer = it.processing_class.tokenizer
    for row, found, target in zip(image_rows(4), seen[0].predictions, seen[0].label_ids, strict=True):
        _, alone = written(it, row, max_new_tokens=6, pad_token_id=tokenizer.pad_token_id)
        assert found.tolist()[: len(alone)] == alone
        assert tokenizer.decode(target[target >= 0]).startswith(row["completion"][0]["content"])


def test_answers_to_prompts_with_images_are_a_table(tmp_path):
    from transformers import GenerationConfig

    it = trainer("qwen2_5_vl", tmp_path, max_steps=1)
    greedy = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    logging = LogCompletionsCallback(it, greedy, num_prompts=3, freq=1)
    it.add_callback(logging)
    it.train()
    assert len(logging.table) == 3
    for row, shown in zip(image_rows(3), logging.table, strict=True):
        text, ids = written(it, row, generation_config=greedy)
        answer = it.processing_class.tokenizer.decode(ids, skip_special_tokens=True)
        assert (shown["prompt"], shown["completion"]) == (text, answer)
    notes = ["PIL image, 16 x 16; PIL image, 24 x 16", "", "PIL image, 16 x 24"]
    assert [row["images"] for row in logging.table] == notes
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["images"] for line in lines] == notes
