"""Rows with pictures: what is trained on, that a model learns to see, and that its runs go on exactly."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from posttrain.core.errors import ConfigError, DataError
from posttrain.lm.images.images import has_images
from posttrain.sft import SFTConfig, SFTTrainer
from posttrain.sft.vision import vision_collator
from tests import tiny

Image = pytest.importorskip("PIL.Image")

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def processor():
    """Of LLaVA, for pictures of 28 x 28 in patches of 14: five tokens a picture."""
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    pixels = CLIPImageProcessorPil(size={"height": 28, "width": 28}, crop_size={"height": 28, "width": 28})
    options = {"patch_size": 14, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 1}
    return LlavaProcessor(pixels, tokenizer, chat_template=TEMPLATE, image_token="<image>", **options)


def model():
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen3Config

    size = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    sees = CLIPVisionConfig(**size, image_size=28, patch_size=14, projection_dim=32)
    reads = Qwen3Config(**size, vocab_size=385, num_key_value_heads=2, head_dim=8, pad_token_id=0, eos_token_id=1)
    torch.manual_seed(0)
    options = {"image_token_index": 384, "vision_feature_select_strategy": "full", "vision_feature_layer": -1}
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=sees, text_config=reads, **options))


def picture(colour, seed=0):
    noise = np.random.default_rng(seed).integers(0, 60, (28, 28, 3))
    return Image.fromarray(np.clip(np.array(COLOURS[colour]) * 0.7 + noise, 0, 255).astype("uint8"))


def rows(kind, number=12):
    found = []
    for i in range(number):
        colour = list(COLOURS)[i % 3]
        asked = "Which colour?" if i % 2 else "Which colour is this?"
        talk = [{"role": "user", "content": asked}, {"role": "assistant", "content": colour}]
        found.append({"images": [picture(colour, i)]} | {
            "messages": {"messages": talk},
            "conversation": {"prompt": talk[:1], "completion": talk[1:]},
            "completion": {"prompt": f"<image>{asked}", "completion": f" {colour}"},
            "text": {"text": f"<image>{asked} {colour}"},
        }[kind])  # fmt: skip
    return found


KINDS = ["messages", "conversation", "completion", "text"]


def make(out, data, peft_config=None, given=None, **changes):
    usual = dict(
        output_dir=str(out), per_device_train_batch_size=6, max_steps=4, learning_rate=1e-2, logging_steps=1,
        save_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    return SFTTrainer(
        model=model() if given is None else given,
        args=SFTConfig(**(usual | changes)),
        train_dataset=data,
        processing_class=processor(),
        peft_config=peft_config,
    )


def losses(trainer):
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def collator(**options):
    multiple = options.pop("pad_to_multiple_of", None)
    args = SFTConfig("out", use_cpu=True, report_to="none", **({"max_length": None} | options))
    return vision_collator(processor(), model(), args, None, multiple)


@pytest.mark.parametrize(
    ("kind", "learned"),
    [
        ("messages", "<|im_start|>user\nWhich colour is this?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"),
        ("conversation", "red<|im_end|>\n"),
        ("completion", " red<|endoftext|>"),
        ("text", "Which colour is this? red<|endoftext|>"),
    ],
)
def test_pictures_prompts_and_padding_are_not_trained_on(kind, learned):
    batch = collator()(rows(kind, 2))
    assert batch["pixel_values"].shape == (2, 3, 28, 28)
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    assert (batch["input_ids"] == 384).sum(1).tolist() == [5, 5] and not (batch["labels"] == 384).any()
    labels = batch["labels"][0]
    assert processor().tokenizer.decode(labels[labels != -100]) == learned
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all() and batch["attention_mask"].sum(
        1
    ).unique().numel() == 2
    if kind in ("conversation", "completion"):
        whole = collator(completion_only_loss=False)(rows(kind, 2))["labels"][0]
        assert (whole != -100).sum() > (labels != -100).sum()


def test_one_picture_a_path_and_what_the_hub_stores_are_the_same(tmp_path):
    import io

    shown, stored = picture("red"), io.BytesIO()
    shown.save(tmp_path / "red.png"), shown.save(stored, "PNG")
    text = {"text": "<image>red"}
    given = [
        {"images": [shown]},
        {"image": shown},
        {"images": [str(tmp_path / "red.png")]},
        {"image": {"bytes": stored.getvalue(), "path": None}},
    ]
    batches = [collator()([each | text]) for each in given]
    assert all(torch.equal(batch["pixel_values"], batches[0]["pixel_values"]) for batch in batches)
    assert (
        has_images(given[:1])
        and has_images({"a": Dataset.from_list([{"image": 1}])})
        and not has_images([{"text": "a"}])
    )


def test_rows_are_cut_behind_their_pictures_alone():
    batch = collator(max_length=8)(rows("text", 2))
    assert batch["input_ids"].shape == (2, 8) and (batch["input_ids"] == 384).sum(1).tolist() == [5, 5]
    with pytest.raises(DataError, match="max_length=4 would cut off tokens of its images"):
        collator(max_length=4)(rows("text", 2))
    assert collator(pad_to_multiple_of=16)(rows("text", 2))["labels"].shape[1] % 16 == 0


def broken_rows(folder):
    whole = rows("messages", 4)
    (folder / "broken.png").write_bytes(b"no image")
    return [
        whole[0],
        whole[1] | {"images": [str(folder / "broken.png")]},
        whole[2] | {"images": ["absent.png"]},
        whole[3],
    ]


def test_a_row_whose_image_cannot_be_read_is_named_or_dropped_and_counted(tmp_path):
    data = broken_rows(tmp_path)
    with pytest.raises(DataError, match="Row [12]: image 1: the image (.*broken|absent).png .*bad_images=drop"):
        make(tmp_path, data, max_steps=1, per_device_train_batch_size=4).train()
    usual = {"max_steps": 1, "per_device_train_batch_size": 4, "save_strategy": "no", "optim": "sgd"}
    dropping, without = (make(tmp_path, given, bad_images="drop", **usual) for given in (data, [data[0], data[3]]))
    dropping.train(), without.train()
    assert losses(dropping) == pytest.approx(losses(without), rel=1e-6)
    report = dropping.data_reports["train"]
    assert (report.rows_in, report.rows_kept) == (4, 2)
    assert sorted(row for _, found in report.dropped.values() for row in found) == [1, 2]


def test_a_row_that_is_too_long_is_dropped_and_a_batch_of_none_has_no_loss():
    kept = collator(max_length=25, too_long="drop")([rows("text", 2)[0], *rows("messages", 2)])
    assert kept["input_ids"].shape[0] == 1 == len(kept["pixel_values"])
    assert kept.row_facts["facts"]["fault"].tolist() == ["", *["longer than max_length=25"] * 2]
    none = collator(max_length=2, too_long="drop")(rows("text", 2))
    assert none["labels"].tolist() == [[-100]] and "pixel_values" not in none


def test_a_dataset_of_the_hub_names_the_row_of_a_broken_image_and_decodes_in_the_collator(tmp_path):
    import datasets

    good, data = picture("red"), broken_rows(tmp_path)
    good.save(tmp_path / "good.png")
    paths = [[str(tmp_path / name)] for name in ("good.png", "broken.png", "good.png")]
    table = Dataset.from_dict({"images": paths, "messages": [row["messages"] for row in data[:3]]})
    table = table.cast_column("images", datasets.List(datasets.Image()))
    with pytest.raises(DataError, match="Row 1: image 1: the image .*broken.png is not an image"):
        make(tmp_path, table, max_steps=1).train()
    trainer = make(tmp_path, table.select([0, 2]), max_steps=1, dataloader_num_workers=2)
    trainer.train()
    assert losses(trainer)


def test_images_in_the_parts_of_messages_are_those_of_the_column():
    from posttrain.lm.images.vision import place_images

    shown = [picture("red"), picture("blue")]
    parts = [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image", "image": shown[1], "text": None}]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": "red"}]
    inline = collator()([{"messages": talk, "images": shown[:1]}])
    column = collator()([{"messages": [{"role": "user", "content": [*parts[:2], {"type": "image"}]}, talk[1]],
                          "images": shown}])  # fmt: skip
    assert torch.equal(inline["pixel_values"], column["pixel_values"])
    assert torch.equal(inline["input_ids"], column["input_ids"]) and len(inline["pixel_values"]) == 2
    assert parts[2]["image"] is shown[1]  # the row itself stays as it was
    with pytest.raises(DataError, match="has 2 images, and its messages have places for 1"):
        place_images({"messages": talk, "images": shown}, ("messages",))
    with pytest.raises(DataError, match="no user message to put them in"):
        place_images({"messages": [{"role": "assistant", "content": "a"}], "images": shown}, ("messages",))
    with pytest.raises(DataError, match="the row has 0 videos, and its messages have places for 1"):
        place_images({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, ("messages",))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_row_is_trained_on_and_a_run_goes_on_to_the_same_bits(kind, tmp_path):
    data = Dataset.from_list(rows(kind)) if kind == "text" else rows(kind)  # the first: as datasets stores pictures
    straight = make(tmp_path, data)
    before = {name: p.clone() for name, p in straight.model.named_parameters()}
    straight.train()
    assert losses(straight)[-1] < losses(straight)[0]
    still = [name for name, p in straight.model.named_parameters() if torch.equal(p, before[name])]
    assert all("vision_tower" in name for name in still)  # its last layer norm reads the first token alone
    assert any("vision_tower" in name for name in before.keys() - set(still))
    resumed = make(tmp_path, data)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected = straight.model.state_dict()
    assert [name for name, value in resumed.model.state_dict().items() if not torch.equal(value, expected[name])] == []
    assert losses(resumed) == losses(straight)


def test_the_loss_is_that_of_the_models_own_logits(tmp_path):
    trainer = make(tmp_path, rows("conversation"))
    batch = next(iter(trainer.get_train_dataloader()))
    expected = trainer.model(**batch).loss
    torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(trainer.compute_loss(trainer.model, batch, True)[0], expected, rtol=1e-5, atol=0)


@pytest.mark.long
def test_a_model_learns_to_see(tmp_path):
    trainer = make(tmp_path, rows("conversation", 24), max_steps=60, per_device_train_batch_size=12, save_strategy="no",
                   learning_rate=3e-3)  # fmt: skip
    trainer.train()
    answers = trainer.processing_class.tokenizer(list(COLOURS), add_special_tokens=False)["input_ids"]
    unseen = []
    for number, colour in enumerate(COLOURS):
        batch = trainer.data_collator([rows("conversation", 3)[number] | {"images": [picture(colour, 99)]}])
        first = int((batch["labels"][0] != -100).nonzero()[0])
        with torch.no_grad():
            logits = trainer.model.eval()(**{k: v for k, v in batch.items() if k != "labels"}).logits[0, first - 1]
        unseen.append(int(logits.argmax()) == answers[number][0])
    assert unseen == [True, True, True]


def test_adapters_are_trained_on_a_model_that_sees_and_saved_with_the_processor(tmp_path):
    from transformers import AutoProcessor

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = make(tmp_path, rows("messages"), peft_config=lora, gradient_checkpointing=True)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]
    trainer.save_model()
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert AutoProcessor.from_pretrained(tmp_path).image_token_id == 384


def test_a_model_and_its_processor_are_loaded_by_name_and_evaluated(tmp_path):
    model().save_pretrained(tmp_path / "base")
    processor().save_pretrained(tmp_path / "base")
    args = SFTConfig(str(tmp_path / "out"), max_steps=1, use_cpu=True, report_to="none", per_device_train_batch_size=4)
    trainer = SFTTrainer(str(tmp_path / "base"), args, train_dataset=rows("messages"), eval_dataset=rows("messages", 4))
    assert type(trainer.model).__name__ == "LlavaForConditionalGeneration"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(np.log(385), rel=0.05)


def test_what_cannot_be_done_with_pictures_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="packing_strategy='bfd_split' splits rows, and images cannot be split"):
        make(tmp_path, rows("messages"), packing=True, packing_strategy="bfd_split")
    with pytest.raises(ConfigError, match="use_cache=True keeps keys of all documents of a packed row"):
        make(tmp_path, rows("messages"), packing=True, use_cache=True)
    with pytest.raises(ConfigError, match="too_long='split' is not supported for rows with images"):
        make(tmp_path, rows("messages"), too_long="split")
    with pytest.raises(TypeError, match="Qwen3ForCausalLM reads text alone"):
        make(tmp_path, rows("messages"), given=tiny.causal_lm())
    args = SFTConfig(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(TypeError, match="cannot read. Pass the model's processor"):
        SFTTrainer(model(), args, train_dataset=rows("messages"), processing_class=tiny.tokenizer())


def test_a_processor_reads_rows_without_pictures_too(tmp_path):
    trainer = make(tmp_path, [{"text": text} for text in tiny.CORPUS], max_steps=3, save_strategy="no")
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]
