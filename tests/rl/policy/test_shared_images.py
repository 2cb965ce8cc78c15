"""Prompts with images that stand in a row once for all their completions: numbers equal to a row for each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from posttrain.lm.attention.varlen_attention import enable_segments, segments_problem
from posttrain.lm.images.image_positions import ImagePositions
from posttrain.lm.images.vision import VisionProcessor
from posttrain.rl import DPOConfig, DPOTrainer
from posttrain.rl.generation.local import problem
from posttrain.rl.generation.transformers import TransformersGenerator
from posttrain.rl.policy.logprobs import completion_logps, score_completions
from posttrain.rl.preference.batches import PreferenceCollator
from posttrain.rl.preference.images import image_collator
from tests import tiny_vision
from tests.rl.online.test_rollout_images import make, prompts
from tests.rl.preference.test_preference_images import options, pairs

pytest.importorskip("PIL.Image")

#: Why completions of these families cannot share a prompt; those of all others can.
REASONS = {
    "gemma3": "does not keep segments apart",
    "gemma4": "does not keep segments apart",
    "qwen3_5": "has layers of linear_attention",
}
SHARING = [name for name in tiny_vision.FAMILIES if name not in REASONS]


def family(name):
    if name in ("pixtral", "mistral3"):
        pytest.importorskip("torchvision", reason="transformers' PixtralProcessor needs it")
    model, processor = tiny_vision.FAMILIES[name]()
    return model.eval(), processor, VisionProcessor(processor, model).example()


def gradients(model, loss):
    weights = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)


def assert_equal_gradients(found, expected):
    size = torch.stack([grad.norm() for grad in expected]).norm()
    assert size > 0
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 1e-5 * size


@pytest.mark.parametrize("name", SHARING)
def test_pairs_behind_one_prompt_have_the_scores_and_gradients_of_separate_rows(name):
    model, processor, example = family(name)
    enable_segments(model, example)
    args, pad = DPOConfig("out", use_cpu=True, report_to="none"), processor.tokenizer.pad_token_id
    found = []
    for shared in (True, False):
        batch = image_collator(processor, model, args, "preference", PreferenceCollator(pad, shared), True, shared)(
            pairs()
        )
        assert ("segments" in batch) == shared and len(batch["input_ids"]) == (1 if shared else 6)
        scores = score_completions(model, batch)
        sides = scores.logps.sum(1) * torch.linspace(1, 2, len(scores.logps))
        found.append((scores.logps[scores.mask].detach(), gradients(model, sides.sum())))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    assert_equal_gradients(found[0][1], found[1][1])


@pytest.mark.parametrize("name", SHARING)
def test_groups_behind_one_prompt_have_the_log_probabilities_and_gradients_of_separate_rows(name, tmp_path):
    if name in ("pixtral", "mistral3"):
        pytest.importorskip("torchvision", reason="transformers' PixtralProcessor needs it")
    trainer = make(tmp_path, name, per_device_train_batch_size=8)
    assert trainer.shares_prompts
    samples = trainer.new_samples([row for row in prompts() for _ in range(2)])
    generator = torch.Generator().manual_seed(0)
    lengths = [2 + len(sample.prompt_ids) % 3 for sample in samples]
    drawn = [torch.randint(3, 80, (length,), generator=generator).tolist() for length in lengths]
    samples = [replace(sample, ids=ids) for sample, ids in zip(samples, drawn, strict=True)]
    rollout, found = trainer.rollout_maker.of(samples), []
    for share in (True, False):
        [part] = rollout.micro_batches(8, share, 0, positions=trainer.image_prompts.positions)
        assert ("segments" in part) == share
        logps = completion_logps(trainer.model, part).logps
        weighed = logps * torch.linspace(1, 2, len(logps)).unsqueeze(1)
        found.append((logps.detach(), gradients(trainer.model, weighed.sum())))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    assert_equal_gradients(found[0][1], found[1][1])


@pytest.mark.parametrize("name", tiny_vision.FAMILIES)
def test_completions_behind_one_prompt_are_those_of_transformers_generate(name, tmp_path, monkeypatch):
    if name in ("pixtral", "mistral3"):
        pytest.importorskip("torchvision", reason="transformers' PixtralProcessor needs it")
    trainer, read, written = make(tmp_path, name), [], []
    problem(trainer.model, trainer.image_prompts.example)  # the model has been tried
    for engine in (trainer.generator, TransformersGenerator(trainer.codec.tokenizer)):
        samples = trainer.new_samples([row for row in prompts() for _ in range(2)])
        samples = [replace(sample, seed=seed) for seed, sample in enumerate(samples)]
        engine.sync_weights(trainer.model)
        monkeypatch.setattr(trainer, "generator", engine)
        tokens = []
        hook = trainer.model.get_decoder().register_forward_pre_hook(
            lambda module, args, kwargs, tokens=tokens: tokens.append(kwargs["inputs_embeds"].shape[:2].numel()),
            with_kwargs=True,
        )
        samples = trainer.generate(samples, trainer.sampling())
        hook.remove()
        read.append(sum(tokens))
        written.append([(sample.ids, sample.logps) for sample in samples])
    for (ids, logps), (expected_ids, expected_logps) in zip(*written, strict=True):
        assert ids == expected_ids and logps == pytest.approx(expected_logps, abs=1e-4)
    prompt_tokens = sum(len(sample.prompt_ids) for sample in samples[::2])
    steps = len(samples) * (trainer.args.max_completion_length - 1)
    assert (prompt_tokens < read[0] <= prompt_tokens + steps) == (name in SHARING)
    assert read[1] > 2 * prompt_tokens


@pytest.mark.parametrize("name", REASONS)
def test_families_that_cannot_share_a_prompt_say_why(name):
    model, _, example = family(name)
    assert REASONS[name] in (segments_problem(model, example) or "")


def test_equal_questions_about_other_images_are_other_prompts(tmp_path):
    trainer = make(tmp_path, per_device_train_batch_size=4)
    samples = trainer.new_samples([row for row in prompts()[:2] for _ in range(2)])
    assert samples[0].prompt_ids == samples[2].prompt_ids
    samples = [replace(sample, ids=[7, 9]) for sample in samples]
    [part] = trainer.rollout_maker.parts_of(trainer.rollout_maker.of(samples))
    assert part["segments"].parents == (-1, 0, 0, -1, 3, 3)
    logps = completion_logps(trainer.model, part).logps
    assert torch.equal(logps[0], logps[1]) and not torch.allclose(logps[0], logps[2])


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_go_on_behind_a_prompt_as_the_model_counts_them(name):
    model, processor = tiny_vision.FAMILIES[name]()
    prompt = VisionProcessor(processor, model).example().prompt
    positions = ImagePositions.of(model)(prompt)
    ids, numbers = torch.tensor([[*prompt.ids, 5]]), {n: torch.tensor([[*row, 0]]) for n, row in prompt.numbers.items()}
    grid = {"image_grid_thw": prompt.tensors["image_grid_thw"]}
    assert torch.equal(positions, model.model.get_rope_index(ids, **numbers, **grid)[0][-3:, 0])
    assert positions.max() < len(prompt.ids)  # an image of several tokens takes fewer positions than tokens


def test_sharing_can_be_turned_off_and_changes_no_run(tmp_path):
    def run(folder, shared):
        model, processor = tiny_vision.smolvlm()
        args = DPOConfig(**options(tmp_path / folder, shared_prefix=shared))
        trainer = DPOTrainer(model, args=args, train_dataset=pairs(), processing_class=processor)
        assert trainer._shared == (shared is not False)
        trainer.train()
        return [record["loss"] for record in trainer.state.log_history if "loss" in record]

    assert run("shared", None) == pytest.approx(run("plain", False), rel=1e-5)


def test_a_family_that_cannot_share_is_refused_if_it_is_asked_to(tmp_path):
    model, processor = tiny_vision.gemma3()
    with pytest.raises(ValueError, match="shared_prefix=True cannot be: .* does not keep segments apart"):
        DPOTrainer(
            model, args=DPOConfig(**options(tmp_path, shared_prefix=True)), train_dataset=pairs(),
            processing_class=processor,
        )  # fmt: skip
