"""What of a vision-language model is trained: weights and adapters, by part, for every family."""

from __future__ import annotations

import logging

import pytest
import torch

from posttrain.lm.loading import adapters, parts
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny, tiny_vision
from tests.contract.trainers import FAMILIES, image_rows, weights

pytest.importorskip("PIL.Image")
#: Words in the names of weights that are not the language part's, in any family.
SIGHT = ("visual", "vision", "multi_modal_projector", "connector", "image_newline")


def is_sight(name):
    return any(word in name for word in SIGHT)


def lora(**options):
    from peft import LoraConfig

    return LoraConfig(**({"r": 2, "target_modules": "all-linear", "init_lora_weights": False} | options))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_of_the_language_part_or_of_the_vision_part(family):
    for wanted in parts.PARTS:
        model, _ = tiny_vision.FAMILIES[family]()
        parts.freeze_others(model, wanted)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        names = [name for name, _ in model.named_parameters()]
        expected = {name for name in names if wanted == "both" or is_sight(name) == (wanted == "vision")}
        assert trained == expected


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_on_the_parts_that_are_asked_for(family, caplog):
    caplog.set_level(logging.INFO)
    found = {}
    for wanted in (*parts.PARTS, None):
        model, _ = tiny_vision.FAMILIES[family]()
        named = {"target_modules": None} if wanted is None else {}
        adapted = adapters.add_adapter(model, lora(**named), wanted)
        found[wanted] = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert found["language"] and not any(map(is_sight, found["language"]))
    assert found["vision"] and all(map(is_sight, found["vision"]))
    assert found["both"] == found["language"] | found["vision"]
    assert found[None] == found["language"]  # peft's own configs name none for most families
    numbers = [record.getMessage() for record in caplog.records if "The adapter is on" in record.getMessage()]
    assert len(numbers) == 4 and "and 0 of the vision part" in numbers[0] and "on 0 modules" in numbers[1]


def test_what_the_user_left_out_stays_out():
    model, _ = tiny_vision.qwen2_5_vl()
    adapted = adapters.add_adapter(model, lora(exclude_modules=["down_proj"]), "language")
    names = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert any("up_proj" in name for name in names)
    assert not any("down_proj" in name or is_sight(name) for name in names)


@pytest.mark.parametrize("wanted", ["language", "vision"])
@pytest.mark.parametrize("adapter", [False, True])
def test_a_run_moves_its_part_alone_and_goes_on_to_the_same_bits(wanted, adapter, tmp_path):
    def make():
        model, processor = tiny_vision.qwen2_5_vl()
        torch.manual_seed(0)
        args = SFTConfig(
            str(tmp_path), per_device_train_batch_size=3, max_steps=3, learning_rate=1e-2, save_steps=1,
            report_to="none", use_cpu=True, disable_tqdm=True, train_parts=wanted,
        )  # fmt: skip
        rows = [{name: row[name] for name in ("images", "prompt", "completion")} for row in image_rows(9)]
        return SFTTrainer(model, args, train_dataset=rows, processing_class=processor,
                          peft_config=lora() if adapter else None)  # fmt: skip

    straight, resumed = make(), make()
    before = weights(straight)
    straight.train()
    moved = [name for name, value in weights(straight).items() if not torch.equal(value, before[name])]
    assert moved and all(is_sight(name) == (wanted == "vision") for name in moved)
    assert all(("lora_" in name) == adapter for name in moved)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    expected = weights(straight)
    assert [name for name, value in weights(resumed).items() if not torch.equal(value, expected[name])] == []


def test_a_model_of_text_alone_has_no_parts(tmp_path):
    with pytest.raises(ValueError, match="train_parts chooses between .* is one of text alone"):
        adapters.set_trained(tiny.causal_lm(), None, "language")
    with pytest.raises(ValueError, match="train_parts='language' cannot be followed with target_parameters"):
        adapters.add_adapter(tiny_vision.llava()[0], lora(target_parameters=["q_proj.weight"]), "language")


def test_four_bits_below_an_adapter_on_each_part(tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

    model, processor = tiny_vision.qwen2_5_vl()
    model.save_pretrained(tmp_path / "base")
    model = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "base", quantization_config=BitsAndBytesConfig(load_in_4bit=True)
    )
    args = SFTConfig(
        str(tmp_path), per_device_train_batch_size=3, max_steps=2, report_to="none", use_cpu=True, disable_tqdm=True,
        train_parts="both", learning_rate=1e-2,
    )  # fmt: skip
    rows = [{name: row[name] for name in ("images", "prompt", "completion")} for row in image_rows(6)]
    trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=processor, peft_config=lora())
    quantized = [name for name, p in trainer.model.named_parameters() if p.dtype == torch.uint8]
    assert any(map(is_sight, quantized)) and any("language_model" in name for name in quantized)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = [name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])]
    assert all("lora_" in name for name in moved)
    assert {is_sight(name) for name in moved} == {True, False}
