"""Online training from prompts with images: what is sampled, learned from, and kept in a checkpoint."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from posttrain.core.errors import ConfigError, DataError
from posttrain.rl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from tests import tiny_vision

pytest.importorskip("PIL.Image")


def prompts():
    image = tiny_vision.image
    asked = [{"type": "text", "text": "look"}, {"type": "image"}, {"type": "text", "text": "now"}]
    found = [("Is it red ?", [image(0)]), ("Is it red ?", [image(5)]), ("none", []), (asked, [image(3, 16, 24)])]
    return [{"images": images, "prompt": [{"role": "user", "content": prompt}]} for prompt, images in found]


def digit_sum(completion_ids, **columns):
    assert len(columns.get("images", completion_ids)) == len(completion_ids)
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def make(tmp_path, name="qwen2_5_vl", kind=GRPOTrainer, config=GRPOConfig, rows=None, read=None, **changes):
    model, processor = tiny_vision.FAMILIES[name]()
    parts = {"environment_factory": changes.pop("environment_factory", None)}
    usual = dict(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=2, max_completion_length=5,
        max_steps=3, learning_rate=1e-2, logging_steps=1, save_steps=1, report_to="none", use_cpu=True, optim="sgd",
        disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    return kind(
        model=model, reward_funcs=digit_sum, args=config(**(usual | changes)), train_dataset=rows or prompts(),
        eval_dataset=rows or prompts()[:2], processing_class=read(processor) if read else processor, **parts,
    )  # fmt: skip


@pytest.mark.parametrize("name", tiny_vision.FAMILIES)
def test_tokens_are_sampled_with_the_log_probabilities_that_training_computes(name, tmp_path):
    if name in ("pixtral", "mistral3"):
        pytest.importorskip("torchvision", reason="transformers' PixtralProcessor needs it")
    trainer = make(tmp_path, name)
    samples = trainer.new_samples([row for row in prompts() for _ in range(2)])
    samples = [replace(sample, seed=seed) for seed, sample in enumerate(samples)]
    trainer.generator.sync_weights(trainer.model)
    samples = trainer.generate(samples, trainer.sampling())
    rollout = trainer.rollout_maker.of(samples)
    [found] = trainer.rollout_maker.logps_of(trainer.model, rollout)[:1]
    mask = rollout.loss_mask
    torch.testing.assert_close(found[mask], rollout.sampling_logps[mask], rtol=1e-4, atol=1e-4)
    assert samples[0].prompt_ids == samples[2].prompt_ids  # of two images, one question
    first, second = found[:2][mask[:2]], found[2:4][mask[2:4]]
    assert first.shape != second.shape or not torch.allclose(first, second)


@pytest.mark.parametrize(("kind", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_a_run_goes_on_to_the_same_bits(kind, config, tmp_path):
    options = {"num_iterations": 2, "beta": 0.1, "steps_per_generation": 1}
    trainer, resumed = (make(tmp_path, kind=kind, config=config, **options) for _ in range(2))
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = [name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])]
    assert any("visual" in name for name in moved)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))  # in the middle of a rollout
    expected = trainer.model.state_dict()
    assert [k for k, value in resumed.model.state_dict().items() if not torch.equal(value, expected[k])] == []
    assert "eval_reward" in trainer.evaluate()


class Painter:
    """An environment whose questions show an image."""

    def reset(self, **row):
        return [{"type": "text", "text": "look"}, {"type": "image", "image": tiny_vision.image(3)}]


TEXTS = [{"prompt": [{"role": "user", "content": question}]} for question in ("Is it ?", "none")]


def test_a_processor_reads_prompts_of_text_alone_and_the_images_of_environments(tmp_path):
    blank = [row | {"images": []} for row in TEXTS]
    read = [[sample.prompt_ids for sample in make(tmp_path, rows=rows).new_samples(rows)] for rows in (TEXTS, blank)]
    assert read[0] == read[1]
    painted = make(tmp_path / "painted", rows=TEXTS, environment_factory=Painter)
    painted.train()
    assert painted.rollout_maker.rollout.images.tensors["pixel_values"].shape[0] > 0
    bare = make(tmp_path / "bare", rows=TEXTS, environment_factory=Painter, read=with_template)
    with pytest.raises(DataError, match="the prompt shows an image, and .*Pass AutoProcessor"):
        bare.train()


def with_template(processor):
    processor.tokenizer.chat_template = processor.chat_template
    return processor.tokenizer


def test_engines_without_images_are_refused(tmp_path):
    with pytest.raises((ConfigError, ValueError), match="max_staleness=1 is not supported for prompts with images"):
        make(tmp_path, max_staleness=1)
    with pytest.raises((ConfigError, ValueError), match="bad_images='drop' is not supported online"):
        make(tmp_path, bad_images="drop")


@pytest.mark.parametrize("with_arrow", [True, False], ids=["parquet", "jsonl"])
def test_images_of_prompts_are_written_as_files_and_shown_to_trackers(with_arrow, tmp_path, monkeypatch):
    import PIL.Image
    import pyarrow.parquet
    from datasets import Dataset, Image, List

    from posttrain.lm.generate import samples
    from posttrain.rl.online import reporting as completions

    tables, image = [], tiny_vision.image(3, 16, 24)
    monkeypatch.setattr(completions, "show_table", lambda rows, name, report_to: tables.append(rows))
    if not with_arrow:  # as where a column holds values of several kinds
        monkeypatch.setattr("pyarrow.parquet.write_table", Mock(side_effect=pyarrow.ArrowInvalid))
    in_parts = [{"type": "image", "image": image}, {"type": "text", "text": "now"}]
    rows = [*prompts()[:3], {"prompt": [{"role": "user", "content": in_parts}], "images": []}]
    make(tmp_path, log_completions=True, per_device_eval_batch_size=4).evaluate(rows)
    (file,) = (tmp_path / "completions").iterdir()
    assert b"PIL" not in file.read_bytes()
    if with_arrow:
        written = Dataset.from_parquet(str(file)).cast_column("images", List(Image()))["images"]
    else:
        lines = [json.loads(line)["images"] for line in file.read_text().splitlines()]
        written = [[PIL.Image.open(io.BytesIO(base64.b64decode(one["bytes"]))) for one in row] for row in lines]
    assert [len(row) for row in written] == [1, 1, 1, 1, 0, 0, 1, 1]
    assert written[-1][0].size == image.size and written[-1][0].tobytes() == image.tobytes()
    (shown,) = tables
    assert shown[-1]["images"][0].tobytes() == image.tobytes() and shown[-1]["prompt"] == "[user] <image>now"
    assert "images" not in samples._table(file)[0]  # the page about a run shows text


def test_images_are_left_out_where_log_multimodal_is_off(tmp_path):
    make(tmp_path, log_completions=True, log_multimodal=False, per_device_eval_batch_size=4).evaluate()
    (file,) = (tmp_path / "completions").iterdir()
    assert b"images" not in file.read_bytes() and b"PNG" not in file.read_bytes()
