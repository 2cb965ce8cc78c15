"""Videos as lists of frames: in SFT, DPO and GRPO, for each family whose processor reads them."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from posttrain.core.errors import DataError
from posttrain.lm.attention.varlen_attention import enable_segments
from posttrain.lm.images.images import ImageError, ImageReader, Video, has_images, videos_of
from posttrain.lm.images.vision import VisionProcessor, place_images
from posttrain.rl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from posttrain.rl.policy.logprobs import score_completions
from posttrain.rl.preference.batches import PreferenceCollator
from posttrain.rl.preference.images import image_collator
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny_vision

pytest.importorskip("PIL.Image")
needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="transformers' video processors need torchvision"
)


def frames(number=4, seed=0):
    return [tiny_vision.image(10 * seed + place) for place in range(number)]


def turn(role, content):
    return [{"role": role, "content": content}]


def rows():
    between = [{"type": "text", "text": "look"}, {"type": "video"}, {"type": "text", "text": "now"}]
    asked = [("What happens ?", [frames()]), (between, [frames(seed=1)]), ("none", [])]
    return [
        {
            "videos": videos, "prompt": turn("user", content), "chosen": turn("assistant", "the first"),
            "rejected": turn("assistant", "neither of them"), "completion": turn("assistant", "it moves"),
        }
        for content, videos in asked
    ]  # fmt: skip


def columns(*names):
    return [{name: row[name] for name in ("videos", "prompt", *names)} for row in rows()]


def options(tmp_path, **changes):
    usual = dict(
        output_dir=str(tmp_path), per_device_train_batch_size=3, max_steps=2, learning_rate=1e-2, logging_steps=1,
        report_to="none", use_cpu=True, disable_tqdm=True, gradient_checkpointing=False, save_strategy="no",
        optim="sgd",
    )  # fmt: skip
    return usual | changes


def test_videos_are_read_from_columns_and_parts_of_messages():
    import numpy as np

    first, second = frames(2), frames(3, 1)
    own = {"type": "video", "video": second, "fps": 4}
    row = {"videos": [first], "prompt": turn("user", [{"type": "video"}, {"type": "text", "text": "and"}, own])}
    placed, found = place_images(row, ("prompt",))
    assert found == [Video(first), Video(second, 4.0)] and Video(first).fps == 2
    assert [part["type"] for part in placed["prompt"][0]["content"]] == ["video", "text", "video"]
    array = np.stack([np.asarray(frame) for frame in first])
    for given in ({"video": first}, {"videos": [{"frames": first, "fps": 8}]}, {"video": array}):
        [video] = videos_of(given)
        read = ImageReader()(video)
        assert [frame.tobytes() for frame in read.frames] == [frame.tobytes() for frame in first]
        assert has_images([given])
    with pytest.raises(DataError, match="the row has 1 videos, and its messages have places for 2"):
        place_images(row | {"prompt": turn("user", [{"type": "video"}] * 2)}, ("prompt",))


@pytest.mark.parametrize("given", ["clip.mp4", b"...", {"path": "clip.mp4"}, 7, []])
def test_files_and_videos_without_frames_are_refused(given):
    with pytest.raises(ImageError, match="files are not decoded here: give the frames, as a list|has no frames"):
        Video.of(given)


def test_a_broken_frame_is_named():
    with pytest.raises(ImageError, match="frame 2 of a video: the image .*missing.png does not exist"):
        ImageReader()(Video([tiny_vision.image(), "missing.png"]))


def test_a_processor_that_reads_no_videos_says_so():
    model, processor = tiny_vision.llava()
    with pytest.raises(DataError, match="LlavaProcessor reads none; give its frames as images"):
        VisionProcessor(processor, model).show("look", [Video(frames())])


@needs_torchvision
@pytest.mark.parametrize("name", tiny_vision.VIDEO_FAMILIES)
def test_each_frame_changes_what_is_predicted_and_shared_prompts_change_nothing(name):
    model, processor = tiny_vision.VIDEO_FAMILIES[name]()
    model.eval()
    args, pad, pairs = DPOConfig("out", use_cpu=True, report_to="none"), processor.tokenizer.pad_token_id, rows()
    enable_segments(model, VisionProcessor(processor, model).example())
    found = []
    for shared, once in ((True, True), (False, True), (False, False)):
        collate = PreferenceCollator(pad, shared)
        batch = image_collator(processor, model, args, "preference", collate, once, shared)(pairs)
        scores = score_completions(model, batch)
        found.append(scores.logps.detach()[scores.mask])
    torch.testing.assert_close(found[0], found[2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], found[2], rtol=1e-5, atol=1e-5)
    for place in range(4):
        pairs[0]["videos"] = [[tiny_vision.image(99) if i == place else f for i, f in enumerate(frames())]]
        collate = image_collator(processor, model, args, "preference", PreferenceCollator(pad), True)
        other = score_completions(model, collate(pairs))
        assert (other.logps[other.mask] - found[1]).abs().max() > 1e-5, place


@needs_torchvision
@pytest.mark.parametrize("name", tiny_vision.VIDEO_FAMILIES)
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_trainers_learn_from_videos(name, kind, tmp_path):
    model, processor = tiny_vision.VIDEO_FAMILIES[name]()
    before = {name: p.clone() for name, p in model.named_parameters()}
    parts = {"model": model, "processing_class": processor}
    if kind == "sft":
        made = columns("completion")
        trainer = SFTTrainer(args=SFTConfig(**options(tmp_path)), train_dataset=made, **parts)
    elif kind == "dpo":
        made = columns("chosen", "rejected")
        trainer = DPOTrainer(args=DPOConfig(**options(tmp_path)), train_dataset=made, **parts)
    else:
        more = {"per_device_train_batch_size": 6, "num_generations": 2, "max_completion_length": 4}
        args = GRPOConfig(**options(tmp_path, **more))
        reward = lambda completion_ids, **columns: [sum(ids) % 7 / 7 for ids in completion_ids]  # noqa: E731
        trainer = GRPOTrainer(reward_funcs=reward, args=args, train_dataset=columns(), **parts)
    trainer.train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert any("visual" in name or "vision_tower" in name for name in moved)
    assert any("language_model" in name for name in moved)
