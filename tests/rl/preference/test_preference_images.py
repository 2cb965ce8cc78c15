"""Preferences over prompts with images: numbers equal to plain rows, each image encoded once, every algorithm."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.core.data.pipeline import is_filler
from posttrain.core.errors import ConfigError, DataError
from posttrain.lm.images.image_features import features_once
from posttrain.rl import (
    CPOConfig,
    CPOTrainer,
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    ORPOConfig,
    ORPOTrainer,
    RewardTrainer,
)
from posttrain.rl.policy.logprobs import score_completions
from posttrain.rl.preference.batches import PreferenceCollator
from posttrain.rl.preference.images import OTHER_ROW, WithOthers, image_collator, rows_with_images
from posttrain.rl.rewards.score_heads import with_score_head
from tests import tiny, tiny_vision
from tests.contract import trainers as contract

pytest.importorskip("PIL.Image")


def turn(role, text):
    return [{"role": role, "content": text}]


def pairs():
    image = tiny_vision.image
    asked = [{"type": "text", "text": "look"}, {"type": "image"}, {"type": "text", "text": "now"}]
    prompts = [("Which is red ?", [image(0), image(1, 24, 16)]), ("none", []), (asked, [image(3, 16, 24)])]
    return [
        {
            "images": images, "prompt": turn("user", prompt), "chosen": turn("assistant", "the first"),
            "rejected": turn("assistant", "neither of them"),
        }
        for prompt, images in prompts
    ]  # fmt: skip


def options(tmp_path, **changes):
    usual = dict(
        output_dir=str(tmp_path), per_device_train_batch_size=3, max_steps=2, learning_rate=1e-2, logging_steps=1,
        report_to="none", use_cpu=True, disable_tqdm=True, gradient_checkpointing=False, save_strategy="no",
        optim="sgd",
    )  # fmt: skip
    return usual | changes


@pytest.mark.parametrize("name", tiny_vision.FAMILIES)
def test_images_encoded_once_have_the_scores_and_gradients_of_a_row_for_each_completion(name):
    if name in ("pixtral", "mistral3"):
        pytest.importorskip("torchvision", reason="transformers' PixtralProcessor needs it")
    model, processor = tiny_vision.FAMILIES[name]()
    model.eval()
    args = DPOConfig("out", use_cpu=True, report_to="none")
    collate = PreferenceCollator(processor.tokenizer.pad_token_id)
    once, plain = (
        image_collator(processor, model, args, "preference", collate, kind)(pairs()) for kind in (True, False)
    )
    assert once["pixel_values"].numel() * 2 == plain["pixel_values"].numel() and "image_copies" not in plain
    weights, found = [p for p in model.parameters() if p.requires_grad], []
    for batch in (once, plain):
        logps = score_completions(model, batch).logps
        sides = logps.sum(1) * torch.linspace(1, 2, len(logps))  # copies weigh differently
        grads = torch.autograd.grad(sides.sum(), weights, allow_unused=True, materialize_grads=True)
        found.append((logps.detach(), grads))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    size = torch.stack([grad.norm() for grad in found[1][1]]).norm()
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert (one - other).norm() < 1e-5 * size
    torch.testing.assert_close(found[0][0].ne(0).sum(1), plain["completion_mask"].sum(1))


def test_features_of_another_number_than_tokens_are_refused():
    model, processor = tiny_vision.llava()
    args = DPOConfig("out", use_cpu=True, report_to="none")
    collate = PreferenceCollator(processor.tokenizer.pad_token_id)
    batch = image_collator(processor, model, args, "preference", collate, True)(pairs())
    copies = batch.pop("image_copies")
    del batch["completion_mask"]
    batch["pixel_values"] = batch["pixel_values"][:-1]
    said = "The images have 8 features, and the prompts 12 tokens"
    with pytest.raises(ValueError, match=said), features_once(model, copies, batch) as inputs:
        model(**inputs)
    assert "get_image_features" not in vars(model.model)  # the model is as before, after an error too


@pytest.mark.parametrize(
    ("kind", "config", "extra"),
    [(DPOTrainer, DPOConfig, {}), (KTOTrainer, KTOConfig, {}), (ORPOTrainer, ORPOConfig, {}),
     (CPOTrainer, CPOConfig, {"loss_type": "simpo", "cpo_alpha": 0.0})],
)  # fmt: skip
def test_every_algorithm_learns_from_images_and_goes_on_to_the_same_bits(kind, config, extra, tmp_path):
    def make():
        model, processor = tiny_vision.qwen2_5_vl()
        args = config(**options(tmp_path, save_strategy="steps", save_steps=1, **extra))
        return kind(model, args=args, train_dataset=pairs(), eval_dataset=pairs()[:2], processing_class=processor)

    trainer, resumed = make(), make()
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = [name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])]
    assert any("visual" in name for name in moved) and any("language_model" in name for name in moved)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    expected = trainer.model.state_dict()
    assert [k for k, value in resumed.model.state_dict().items() if not torch.equal(value, expected[k])] == []
    assert torch.isfinite(torch.tensor(trainer.evaluate()["eval_loss"]))
    assert trainer.data_reports["train"].rows_kept == trainer.data_reports["train"].rows_in > 0


@pytest.mark.parametrize(
    ("kind", "rows_at_once"), [(DPOTrainer, 1), (DPOTrainer, 2), (KTOTrainer, 1), (RewardTrainer, 1)]
)
def test_a_batch_without_a_row_of_use_counts_for_nothing_and_the_run_goes_on(kind, rows_at_once, tmp_path):
    def make(rows, folder):
        model, processor = tiny_vision.qwen2_5_vl()
        model = with_score_head(model) if kind is RewardTrainer else model
        changes = {"per_device_train_batch_size": rows_at_once, "per_device_eval_batch_size": 1}
        changes |= {"bad_images": "drop", "train_sampling_strategy": "sequential", "max_steps": -1}
        args = kind.config_class(**options(tmp_path / folder, num_train_epochs=1, **changes))
        return kind(model, args=args, train_dataset=rows, eval_dataset=rows, processing_class=processor)

    good, bad = pairs()[:2], [row | {"images": ["absent.png"]} for row in pairs()[:2]]
    trainer = make([*good, *bad], "with")
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert losses[-1] == 0 and all(map(math.isfinite, losses))
    assert trainer.data_reports["train"].rows_kept == trainer.data_reports["train"].rows_in // 2
    if kind is not KTOTrainer:  # whose rows are lent completions of others
        assert make(good, "alone").evaluate()["eval_loss"] == make([*good, *bad], "again").evaluate()["eval_loss"]
    with pytest.raises(DataError, match=r"no row can be trained on.\n.*absent.png"):
        make(bad, "none").train()


def test_the_vision_tower_sees_each_image_once_in_a_forward(tmp_path):
    model, processor = tiny_vision.llava()
    trainer = DPOTrainer(model, args=DPOConfig(**options(tmp_path)), train_dataset=pairs(), processing_class=processor)
    seen = []
    model.model.vision_tower.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs.get("pixel_values", args[0] if args else ()))),
        with_kwargs=True,
    )
    trainer.compute_loss(model, trainer.prepare_inputs(trainer.data_collator(pairs())))
    assert seen == [3]  # for 6 rows


def test_a_user_with_a_loss_of_their_own_gets_the_images_of_every_row(tmp_path):
    class Own(DPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs = {name: value for name, value in inputs.items() if name != "completion_mask"}
            return model(**inputs).logits.square().mean()

    model, processor = tiny_vision.llava()
    trainer = Own(model, args=DPOConfig(**options(tmp_path)), train_dataset=pairs(), processing_class=processor)
    trainer.train()
    assert len(trainer.data_collator(pairs())["pixel_values"]) == 6


def test_what_cannot_be_done_with_images_says_so(tmp_path):
    model, processor = tiny_vision.llava()
    for field in ({"precompute_ref_log_probs": True}, {"num_eval_samples": 2}):
        with pytest.raises(
            ConfigError, match=f"{min(field)}=.* is not supported for vision datasets \\(rows with images\\)"
        ):
            DPOTrainer(
                model, args=DPOConfig(**options(tmp_path, **field)), train_dataset=pairs(), processing_class=processor
            )
    with pytest.raises(TypeError, match="cannot read. Pass the model's processor"):
        DPOTrainer(tiny.causal_lm(), args=DPOConfig(**options(tmp_path)), train_dataset=pairs(),
                   processing_class=tiny.tokenizer())  # fmt: skip
    args = DPOConfig("out", use_cpu=True, report_to="none", bad_images="drop")
    collate = image_collator(processor, model, args, "preference", PreferenceCollator(0), True)
    wrong = [pairs()[0] | {"images": ["absent.png"]}, *pairs()]
    wrong[1] = wrong[1] | {"chosen": [{"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}]}
    batch = collate(wrong)
    assert len(batch["input_ids"]) == 4
    assert [bool(fault) for fault in batch.row_facts["facts"]["fault"]] == [True, True, False, False]
    empty = collate(wrong[:1])
    assert is_filler(empty) and "absent.png does not exist" in empty.row_facts["facts"]["fault"][0]
    tokens = {"truncation_mode": "keep_end", "max_length": 12, "bad_images": "drop"}
    args = DPOConfig("out", use_cpu=True, report_to="none", **tokens)
    batch = image_collator(processor, model, args, "preference", PreferenceCollator(0), True)(pairs()[:1])
    assert batch.row_facts["facts"]["fault"].tolist() == ["max_length=12 would cut off tokens of its images"]


@pytest.mark.parametrize("number", [2, 3, 4, 5, 12])
def test_every_row_lends_its_completion_once_and_to_another_prompt(number):
    rows = [{"prompt": i} for i in range(number) for _ in range(2)]
    taken = [row[OTHER_ROW]["prompt"] for row in map(WithOthers(rows, each=2).__getitem__, range(len(rows)))]
    assert sorted(taken) == [row["prompt"] for row in rows]
    assert all(row["prompt"] != other for row, other in zip(rows, taken, strict=True))
    twice = [{"prompt": i % number} for i in range(2 * number)]
    assert all(row["prompt"] != row[OTHER_ROW]["prompt"] for row in map(WithOthers(twice).__getitem__, range(number)))


def test_the_completion_of_another_row_is_the_same_in_every_batch(tmp_path):
    model, processor = tiny_vision.qwen2_5_vl()
    args = KTOConfig(**options(tmp_path, shared_prefix=False))  # a row for each
    trainer = KTOTrainer(model, args=args, train_dataset=pairs(), processing_class=processor)
    rows, collate = rows_with_images(pairs(), "unpaired_preference", "train"), trainer.data_collator
    alone = [collate([rows[i]])["kl"] for i in range(len(rows))]
    together = collate([rows[i] for i in range(len(rows))])["kl"]
    for place, one in enumerate(alone):
        wanted = together["input_ids"][place][together["attention_mask"][place] == 1]
        assert one["input_ids"][one["attention_mask"] == 1].tolist() == wanted.tolist()
    answers = [processor.tokenizer.decode(one["input_ids"][one["completion_mask"] == 1]) for one in alone]
    assert ["neither" in answer for answer in answers] == [False, True] * 3


def test_rows_of_kto_that_are_all_good_are_said_to_be(tmp_path, caplog):
    model, processor = tiny_vision.qwen2_5_vl()
    rows = [{"images": r["images"], "prompt": r["prompt"], "completion": r["chosen"], "label": True} for r in pairs()]
    KTOTrainer(model, args=KTOConfig(**options(tmp_path)), train_dataset=rows, processing_class=processor)
    assert "train: all 3 rows are good" in caplog.text


@pytest.mark.parametrize(("shared", "most"), [(False, 400), (True, 200)])
@pytest.mark.parametrize("kind", ["DPOTrainer", "ORPOTrainer", "CPOTrainer", "TPOTrainer"])
def test_rows_are_measured_with_the_tokens_of_their_images(kind, shared, most, tmp_path):
    import posttrain.rl

    trainer_class = getattr(posttrain.rl, kind)
    columns = "prompt chosen rejected" + (" reference" if kind == "TPOTrainer" else "")
    it = contract.images(trainer_class, columns, "qwen2_vl")(tmp_path, max_batch_tokens=most, shared_prefix=shared)
    alone = [it.data_collator([it.train_dataset[i]]) for i in range(len(it.train_dataset))]
    lengths = it.row_lengths(it.train_dataset)
    assert lengths == [batch["input_ids"].numel() for batch in alone]
    batches = list(it.get_train_dataloader())
    assert max(batch["input_ids"].numel() for batch in batches) <= most < sum(lengths)


@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_kto_are_measured_one_by_one_also_those_of_a_pair(shared, tmp_path):
    changes = {"train_sampling_strategy": "group_by_length", "shared_prefix": shared}
    it = contract.images(KTOTrainer, "prompt chosen rejected", "qwen2_vl")(tmp_path, **changes)
    alone = [it.data_collator([it.train_dataset[i]])["input_ids"].numel() for i in range(len(it.train_dataset))]
    assert it.row_lengths(it.train_dataset) == alone and alone[0] != alone[1]
