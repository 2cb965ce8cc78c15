"""Every family of vision-language models: what is trained on, and that a mixed batch is its rows one by one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from posttrain.lm.loading.parts import part_names
from posttrain.sft import SFTConfig, SFTTrainer
from posttrain.sft.vision import vision_collator
from tests import tiny, tiny_vision
from tests.contract.trainers import images, weights

pytest.importorskip("PIL.Image")


def say(asked, answer):
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def rows():
    """Two images of two sizes, none, and one between texts."""
    image = tiny_vision.image
    parts = [{"type": "text", "text": "look"}, {"type": "image"}, {"type": "text", "text": "now"}]
    return [
        {"images": [image(0), image(1, 24, 16)], "messages": say("Which is red ?", "the first")},
        {"images": [], "messages": say("Is there one ?", "none of them")},
        {"images": [image(3, 16, 24)], "messages": say(parts, "yes")},
    ]


@pytest.fixture(scope="module", params=tiny_vision.FAMILIES)
def family(request):
    if request.param in ("pixtral", "mistral3"):
        pytest.importorskip("torchvision", reason="transformers' PixtralProcessor needs it")
    model, processor = tiny_vision.FAMILIES[request.param]()
    return request.param, model.eval(), processor


def collator(family, **options):
    args = SFTConfig("out", use_cpu=True, report_to="none", **({"assistant_only_loss": True} | options))
    return vision_collator(family[2], family[1], args, None, None)


def loss_of(model, batch):
    """(summed loss, gradients)."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits.float()
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1),
                           reduction="sum")  # fmt: skip
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
    return loss.detach(), dict(zip(named, found, strict=True))


def test_a_mixed_batch_has_the_loss_and_the_gradients_of_its_rows_alone(family):
    _, model, _ = family
    collate = collator(family)
    batch = collate(rows())
    loss, gradients = loss_of(model, batch)
    alone = [loss_of(model, collate([row])) for row in rows()]
    torch.testing.assert_close(loss, sum(part for part, _ in alone), rtol=1e-5, atol=0)
    size = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for name, gradient in gradients.items():
        assert (gradient - sum(part[name] for _, part in alone)).norm() < 1e-5 * size, name
    assert any(gradient.abs().max() > 0 for name, gradient in gradients.items() if "vision" in name or "visual" in name)
    other = rows()
    other[0]["images"] = [tiny_vision.image(7), other[0]["images"][1]]
    with torch.no_grad():
        assert (F.mse_loss(*(model(**{k: v for k, v in found.items() if k != "labels"}).logits[0]
                             for found in (batch, collate(other)))) > 1e-6)  # fmt: skip


def test_answers_alone_are_trained_on_and_never_a_token_of_an_image(family):
    _, model, processor = family
    batch = collator(family)(rows())
    words = [processor.tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]
    assert words == ["the first<|im_end|>\n", "none of them<|im_end|>\n", "yes<|im_end|>\n"]
    whole = collator(family, assistant_only_loss=False)(rows())
    shown = whole["input_ids"] == (getattr(model.config, "image_token_id", None) or model.config.image_token_index)
    assert shown.sum(1).tolist()[1] == 0 < shown.sum(1).min(dim=0).values + shown[0].sum()
    assert (whole["labels"][shown] == -100).all()
    text = processor.tokenizer.decode(whole["labels"][2][whole["labels"][2] != -100])
    assert "look" in text and "now" in text and "yes" in text
    assert not any(word in text for word in tiny_vision.WORDS)
    talks = [
        {"images": row["images"], "prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in rows()
    ]
    pairs = collator(family, assistant_only_loss=False)(talks)
    assert torch.equal(pairs["labels"], batch["labels"]) and torch.equal(pairs["input_ids"], batch["input_ids"])


def test_no_image_loses_a_token_when_a_row_is_cut(family):
    long = rows()[:1]
    length = int(collator(family)(long)["attention_mask"].sum())
    kept = collator(family, max_length=length - 2)(long)
    assert kept["input_ids"].shape == (1, length - 2) and kept.row_facts["facts"]["truncated"].tolist() == [True]
    with pytest.raises(ValueError, match="would cut off tokens of its images"):
        collator(family, max_length=10)(long)
    dropped = collator(family, max_length=10, too_long="drop")(long)
    assert dropped.row_facts["facts"]["fault"].tolist() == ["longer than max_length=10"]


def run(family, folder, callbacks=None, **changes):
    """A trainer over mixed rows, by the line of the contract tests."""
    usual = {"num_train_epochs": 1, "save_strategy": "steps", "save_steps": 1, "gradient_checkpointing": True}
    return images(SFTTrainer, "prompt completion", family)(folder, callbacks, **(usual | changes))


@pytest.mark.rotated
@pytest.mark.long
def test_a_run_goes_on_to_the_same_bits_and_does_not_depend_on_how_its_batches_are_cut(family, tmp_path):
    straight, resumed = (run(family[0], tmp_path) for _ in range(2))
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    expected = weights(straight)
    assert [k for k, value in weights(resumed).items() if not torch.equal(value, expected[k])] == []
    losses = [record["loss"] for record in straight.state.log_history if "loss" in record]
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "gradient_checkpointing": False}
    other = run(family[0], tmp_path / "cut", save_strategy="no", **cut)
    before = weights(other)
    other.train()
    assert [record["loss"] for record in other.state.log_history if "loss" in record] == pytest.approx(losses, rel=1e-5)
    size = torch.stack([(expected[k] - value).norm() for k, value in before.items()]).norm()
    for name, value in weights(other).items():
        assert (value - expected[name]).norm() < 1e-5 * size, name


def test_rows_of_text_train_a_model_that_sees_by_its_name(family, tmp_path):
    _, model, processor = family
    model.save_pretrained(tmp_path / "model")
    texts = [{"text": "which of them is red ?"}, {"text": "the first , and then the second of the others"}]
    options = dict(max_steps=1, per_device_train_batch_size=2, logging_steps=1, use_cpu=True, report_to="none")
    args = SFTConfig(str(tmp_path / "out"), save_strategy="no", disable_tqdm=True, eos_token="<|endoftext|>", **options)
    trainer = SFTTrainer(str(tmp_path / "model"), args, train_dataset=texts, processing_class=tiny_vision.tokenizer())
    [_batch] = trainer.get_train_dataloader()
    trainer.train()
    assert type(trainer.model) is type(model)  # also where transformers has a class without the vision part
    trainer.save_model(str(tmp_path / "saved"))
    found, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert type(found) is type(model) and not info["missing_keys"] and not info["unexpected_keys"]
    sight = part_names(model)["vision"]
    before = {name: value for name, value in model.state_dict().items() if name.rpartition(".")[0] in sight}
    assert before and all(torch.equal(found.state_dict()[name], value) for name, value in before.items())
    losses = []
    for row in texts:
        ids = torch.tensor([[*processor.tokenizer(row["text"])["input_ids"], 1]])
        losses.append((*loss_of(model, {"input_ids": ids, "labels": ids})[:1], ids.numel() - 1))
    expected = sum(loss for loss, _ in losses) / sum(count for _, count in losses)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_a_text_model_by_name_says_that_it_cannot_see(tmp_path):
    tiny.causal_lm("qwen3").save_pretrained(tmp_path)
    args = SFTConfig(str(tmp_path / "out"), use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match=r"they have images.*Qwen3Config.*reads text alone"):
        SFTTrainer(str(tmp_path), args, train_dataset=rows(), processing_class=tiny_vision.FAMILIES["llava"]()[1])
