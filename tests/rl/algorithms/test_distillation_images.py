"""Distillation from prompts with images: the divergence by whole logits, each image encoded once by each model."""

from __future__ import annotations

import pytest
import torch

from posttrain.core.errors import ConfigError
from posttrain.lm.loss.distillation import divergence_terms
from posttrain.rl import DistillationConfig, DistillationTrainer
from tests import tiny, tiny_vision
from tests.rl.preference.test_preference_images import pairs

pytest.importorskip("PIL.Image")
TOWERS = ("vision_tower", "visual", "vision_model")


def rows():
    return [{name: row[name] for name in ("images", "prompt")} | {"completion": row["chosen"]} for row in pairs()]


def make(tmp_path, name="qwen2_5_vl", teacher=None, teacher_name=None, **changes):
    if name in ("pixtral", "mistral3"):
        pytest.importorskip("torchvision", reason="transformers' PixtralProcessor needs it")
    model, processor = tiny_vision.FAMILIES[name]()
    if teacher is None:
        teacher, _ = tiny_vision.FAMILIES[teacher_name or name](seed=1)
    usual = dict(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_completion_length=6, max_steps=3,
        learning_rate=1e-2, logging_steps=1, save_steps=1, report_to="none", use_cpu=True, optim="sgd",
        disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    return DistillationTrainer(
        model, teacher, DistillationConfig(**(usual | changes)), rows(), eval_dataset=rows()[:2],
        processing_class=processor,
    )  # fmt: skip


def whole_logits(model, tokens, shown):
    """Next-token log-probabilities (T, V) of one row, with its images as the processor gives them."""
    numbers = {name: torch.tensor([values]) for name, values in shown.numbers(tokens).items()}
    ids = torch.tensor([tokens])
    return (
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **numbers, **shown.tensors).logits[0].log_softmax(-1)
    )


@pytest.mark.parametrize("name", tiny_vision.FAMILIES)
def test_the_divergence_is_that_of_whole_logits_of_both_models(name, tmp_path):
    trainer = make(tmp_path, name, beta=0.5, lmbda=0.0, num_generations=2, per_device_train_batch_size=2)
    samples = trainer.new_samples([row for row in rows()[::2] for _ in range(2)])
    trainer.model.train()  # evaluations let the student write
    samples = trainer.generate(samples, trainer.sampling())
    trainer.model.eval()
    read: dict[str, list[int]] = {"student": [], "teacher": []}
    for role, model in (("student", trainer.model), ("teacher", trainer.teacher_model)):
        tower = next(getattr(model.model, part) for part in TOWERS if hasattr(model.model, part))
        tower.register_forward_pre_hook(
            lambda module, args, kwargs, role=role: read[role].append((args or [kwargs["pixel_values"]])[0].numel()),
            with_kwargs=True,
        )
    parts = trainer.rollout_maker.parts_of(trainer.rollout_maker.of(samples))
    found = [trainer.divergence(trainer.model, part)[0].item() for part in parts]
    shared = {role: numbers.copy() for role, numbers in read.items()}
    read.update(student=[], teacher=[])
    for number, first in enumerate(samples[::2]):
        tokens, start = [*first.prompt_ids, *first.ids], len(first.prompt_ids) - 1
        with torch.no_grad():
            own, other = (
                whole_logits(model, tokens, first.shown)[start:-1] for model in (trainer.model, trainer.teacher_model)
            )
        expected = 2 * divergence_terms(own, other, 0.5).sum().item()
        assert found[number] == pytest.approx(expected, rel=1e-4)
    if name != "idefics2":  # whose smaller images are padded to the size of the largest
        assert shared == read  # of two rows of a prompt as of one alone


@pytest.mark.parametrize(
    "changes", [{}, {"lmbda": 0.5}, {"lmbda": 0.0, "seq_kd": True}, {"loss_type": "policy_gradient"}]
)
def test_a_run_goes_on_to_the_same_bits(changes, tmp_path):
    whole, resumed = (make(tmp_path, **changes) for _ in range(2))
    before = {name: p.clone() for name, p in whole.model.named_parameters()}
    whole.train()
    assert any("visual" in name and not torch.equal(p, before[name]) for name, p in whole.model.named_parameters())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    expected = whole.model.state_dict()
    assert [key for key, value in resumed.model.state_dict().items() if not torch.equal(value, expected[key])] == []
    assert "eval_loss" in whole.evaluate()


@pytest.mark.long
def test_a_student_comes_near_its_teacher(tmp_path):
    trainer = make(tmp_path, "llava", max_steps=60, optim="adamw_torch", lmbda=0.0, save_strategy="no", beta=0.0)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.3 * before


def test_teachers_that_do_not_see_the_same_are_refused(tmp_path):
    with pytest.raises(ValueError, match="The teacher cannot see"):
        make(tmp_path, teacher=tiny.causal_lm(vocab_size=tiny_vision.VOCABULARY))
    with pytest.raises(ValueError, match="stands for images to the student"):
        make(tmp_path, teacher_name="llava")
    with pytest.raises((ConfigError, ValueError), match="teacher_tokenizer_name_or_path is not supported for prompts"):
        make(tmp_path, teacher_tokenizer_name_or_path=str(tmp_path))
