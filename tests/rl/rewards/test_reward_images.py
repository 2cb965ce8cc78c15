"""Reward models that see images: heads of every family, scores equal with and without sharing, and inside GRPO."""

from __future__ import annotations

import pytest
import torch

from posttrain.rl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer
from posttrain.rl.preference.images import image_collator
from posttrain.rl.rewards.score_heads import load_reward_model, score_class, with_score_head
from posttrain.rl.rewards.scorers import ImageRewardModel, scorer
from tests import tiny_vision
from tests.contract import trainers as contract
from tests.rl.preference.test_preference_images import options, pairs, turn

pytest.importorskip("PIL.Image")


def made(name="qwen2_5_vl"):
    if name in ("pixtral", "mistral3"):
        pytest.importorskip("torchvision", reason="transformers' PixtralProcessor needs it")
    model, processor = tiny_vision.FAMILIES[name]()
    torch.manual_seed(0)
    return with_score_head(model), processor


def trainer(tmp_path, name="qwen2_5_vl", rows=None, **changes):
    model, processor = made(name)
    kept = {key: changes.pop(key) for key in ("peft_config",) if key in changes}
    args = RewardConfig(**options(tmp_path, **changes))
    rows = pairs() if rows is None else rows
    return RewardTrainer(model, args, train_dataset=rows, eval_dataset=rows, processing_class=processor, **kept)


@pytest.mark.parametrize("name", tiny_vision.FAMILIES)
def test_rewards_see_the_images_each_encoded_once(name, tmp_path):
    found = trainer(tmp_path, name)
    found.model.eval()
    collate = found.make_collator(found.processing_class, found.args)
    plain = image_collator(found.processing_class, found.model, found.args, "preference", collate, once=False)
    batches = [collator([*pairs()]) for collator in (found.data_collator, plain)]
    assert batches[0]["pixel_values"].numel() * 2 == batches[1]["pixel_values"].numel()
    rewards = [found.compute_loss(found.model, batch, return_outputs=True)[1]["rewards"] for batch in batches]
    torch.testing.assert_close(rewards[0], rewards[1], rtol=1e-5, atol=1e-5)
    other = [pairs()[0] | {"images": [tiny_vision.image(7), tiny_vision.image(8, 24, 16)]}]
    seen = found.compute_loss(found.model, found.data_collator(other), return_outputs=True)[1]["rewards"]
    assert (seen[0] - rewards[0][0]).abs().max() > 1e-5


@pytest.mark.parametrize("lora", [False, True])
def test_pairs_that_only_their_images_tell_apart_are_learned(lora, tmp_path):
    from PIL import Image

    colours = {"red": (255, 0, 0), "blue": (0, 0, 255)}
    rows = [
        {
            "images": [Image.new("RGB", (16, 16), colours[name])], "prompt": turn("user", "which ?"),
            "chosen": turn("assistant", name), "rejected": turn("assistant", other),
        }
        for name, other in (("red", "blue"), ("blue", "red"))
    ]  # fmt: skip
    more = {}
    if lora:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=8, target_modules="all-linear", task_type="SEQ_CLS")
    changes = dict(max_steps=60, per_device_train_batch_size=2, learning_rate=1e-2, optim="adamw_torch", seed=1)
    found = trainer(tmp_path, "llava", rows, **changes, **more)
    before = found.evaluate()["eval_loss"]
    found.train()
    after = found.evaluate()
    assert after["eval_accuracy"] == 1 and after["eval_loss"] < 0.1 < before


@pytest.mark.parametrize("name", ["llava", "gemma3", "smolvlm"])
def test_a_folder_gives_the_same_model_again_and_a_base_model_gets_a_head(name, tmp_path):
    model, processor = made(name)
    model.save_pretrained(tmp_path / "reward")
    again = load_reward_model(tmp_path / "reward")
    assert type(again) is type(model) is score_class(model.config)
    expected = model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in again.state_dict().items())
    base, _ = tiny_vision.FAMILIES[name]()
    base.save_pretrained(tmp_path / "base")
    processor.save_pretrained(tmp_path / "base")
    args = RewardConfig(**options(tmp_path))
    found = RewardTrainer(str(tmp_path / "base"), args, train_dataset=pairs()).model
    assert found.config.num_labels == 1 and found.score.weight.shape[0] == 1
    tower = {key: value for key, value in base.state_dict().items() if "vision_tower" in key or "vision_model" in key}
    assert tower and all(torch.equal(found.state_dict()[key], value) for key, value in tower.items())


def test_a_run_goes_on_to_the_same_bits(tmp_path):
    changes = dict(save_strategy="steps", save_steps=1, max_steps=3, per_device_train_batch_size=2)
    whole, resumed = (trainer(tmp_path, **changes) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    expected = whole.model.state_dict()
    assert [key for key, value in resumed.model.state_dict().items() if not torch.equal(value, expected[key])] == []


def test_a_model_without_a_score_head_is_refused(tmp_path):
    model, processor = tiny_vision.llava()
    with pytest.raises(ValueError, match="with_score_head"):
        RewardTrainer(model, RewardConfig(**options(tmp_path)), train_dataset=pairs(), processing_class=processor)


def test_as_a_reward_function_it_gives_what_its_trainer_sees_and_encodes_each_prompt_once(tmp_path):
    found = trainer(tmp_path)
    rows = pairs()
    rewards = scorer(found.model, found.processing_class)
    assert isinstance(rewards, ImageRewardModel)
    prompts = [row["prompt"] for row in rows for _ in range(2)]
    completions = [row[side] for row in rows for side in ("chosen", "rejected")]
    images = [row["images"] for row in rows for _ in range(2)]
    read: list[int] = []
    tower = found.model.model.visual.register_forward_pre_hook(lambda module, given: read.append(len(given[0])))
    scores = rewards(prompts=prompts, completions=completions, images=images)
    tower.remove()
    found.model.eval()
    batch = found.data_collator(rows)
    assert read == [len(batch["pixel_values"])]
    _, outputs = found.compute_loss(found.model, batch, return_outputs=True)
    torch.testing.assert_close(torch.tensor(scores).view(-1, 2), outputs["rewards"], rtol=1e-5, atol=1e-5)


def test_grpo_learns_from_a_reward_model_that_sees(tmp_path):
    model, processor = made()
    policy, _ = tiny_vision.FAMILIES["qwen2_5_vl"](seed=1)
    args = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=2, max_completion_length=4,
        max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, gradient_checkpointing=False,
        save_strategy="no", logging_steps=1,
    )  # fmt: skip
    rows = [{name: row[name] for name in ("images", "prompt")} for row in pairs()]
    found = GRPOTrainer(
        policy, [model], args, rows, eval_dataset=rows[:1], processing_class=processor,
        reward_processing_classes=[processor],
    )  # fmt: skip
    found.train()
    [name] = found.reward_func_names
    [reward] = [
        record[f"rewards/{name}/mean"] for record in found.state.log_history if f"rewards/{name}/mean" in record
    ]
    assert reward != 0 and "eval_reward" in found.evaluate()


def test_batches_by_tokens_count_those_of_images(tmp_path):
    make = contract.images(RewardTrainer, "prompt chosen rejected", "qwen2_vl")
    found = make(tmp_path, max_batch_tokens=400, num_train_epochs=1)
    alone = [found.data_collator([found.train_dataset[i]])["input_ids"].numel() for i in range(contract.ROWS)]
    assert found.row_lengths(found.train_dataset) == alone and max(alone) > 1.4 * min(alone)
    sizes = [batch["input_ids"].numel() for batch in found.get_train_dataloader()]
    assert max(sizes) <= 400 < sum(sizes)
