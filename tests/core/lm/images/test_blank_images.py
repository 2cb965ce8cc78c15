"""A model that is called without images computes the same, with gradients of 0 in its vision part."""

from __future__ import annotations

import copy

import pytest
import torch

from posttrain.lm.images.blank_images import always_see
from posttrain.lm.images.vision import VisionProcessor
from tests import tiny_vision
from tests.contract.trainers import FAMILIES

pytest.importorskip("PIL.Image")
#: Weights of transformers' towers whose output LLaVA takes from a layer before them, with images too.
NEVER = ["model.vision_tower.post_layernorm.weight", "model.vision_tower.post_layernorm.bias"]
IDS = torch.arange(20, 32).reshape(2, 6)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_alone_has_the_same_outputs_and_every_weight_a_gradient(family):
    model, processor = tiny_vision.FAMILIES[family]()
    vision = VisionProcessor(processor, model)
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    inputs |= {name: torch.zeros_like(IDS) for name in vision.token_inputs}
    expected = model(**inputs).logits
    expected.square().mean().backward()
    before = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    always_see(model, vision.blank())
    always_see(model, vision.blank())
    shown = copy.deepcopy(model)
    for seeing in (model, shown):
        found = seeing(**inputs).logits
        assert torch.equal(found, expected)
        found.square().mean().backward()
        for name, p in seeing.named_parameters():
            if before[name] is not None:
                assert torch.equal(p.grad, before[name]), name
            else:
                assert (p.grad is not None and not p.grad.any()) or name in NEVER, name
    assert any(grad is None for grad in before.values())


def test_images_and_generation_are_left_alone():
    model, processor = tiny_vision.qwen2_5_vl()
    vision, seen = VisionProcessor(processor, model), []
    always_see(model, vision.blank())
    model.model.visual.register_forward_hook(lambda *_: seen.append(1))
    shown = vision.show(processor.image_token, [tiny_vision.image()])
    ids = torch.tensor([processor.tokenizer(shown.text, add_special_tokens=False)["input_ids"]])
    kinds = {name: torch.tensor(rows) for name, rows in ((n, [v]) for n, v in shown.numbers(ids[0].tolist()).items())}
    model(input_ids=ids, **shown.tensors, **kinds)
    assert len(seen) == 1
    model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert len(seen) == 1
