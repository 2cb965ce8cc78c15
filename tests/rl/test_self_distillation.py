"""A policy that teaches itself: what its teacher reads and is, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from posttrain.core.errors import ConfigError, DataError
from posttrain.rl import SDFTConfig, SDFTTrainer
from posttrain.rl.algorithms.self_distillation import rewritten, self_distillation, text_of
from tests import tiny
from tests.contract.trainers import arguments, text_rows, weights

TALK = [{"role": "system", "content": "be short"}, {"role": "user", "content": [{"type": "text", "text": "why ?"}]}]


def rows(number=9):
    return [{"prompt": row["prompt"], "privileged_context": "the answer"} for row in text_rows(number)]


def trainer(path, model=None, data=None, kind=SDFTTrainer, peft_config=None, **changes):
    usual = {"num_generations": 2, "max_completion_length": 6, "learning_rate": 1e-2}
    args = arguments(kind.config_class, path, **(usual | changes))
    model = tiny.causal_lm(initializer_range=0.1) if model is None else model
    data = rows() if data is None else data
    return kind(model, args=args, train_dataset=data, processing_class=tiny.tokenizer(), peft_config=peft_config)


def test_the_teachers_prompt_is_made_of_the_last_message():
    made = rewritten(TALK, lambda text: f"{text} because")
    assert made == [TALK[0], {"role": "user", "content": "why ? because"}]
    assert rewritten("why ?", str.upper) == "WHY ?"
    assert text_of([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]) == "a\nb"
    with pytest.raises(DataError, match="role 'assistant'"):
        rewritten([{"role": "assistant", "content": "x"}], str)


def test_losses_by_hand():
    """Two tokens: p_S = (3/4, 1/4), p_T = (1/2, 1/2)."""
    own, other = torch.tensor([[3.0, 1.0]]).log(), torch.zeros(1, 2)
    usual = {"distillation_mode": "full_logits", "distillation_alpha": 0.0, "distillation_is_clip": 2.0}
    usual |= {"distillation_topk": 1, "distillation_add_tail": True}
    written = torch.tensor([0])

    def loss(old=None, **changes):
        return self_distillation(own, other, written, old, SimpleNamespace(**(usual | changes))).item()

    forward = 0.5 * (torch.tensor(2 / 3).log() + torch.tensor(2.0).log()).item()
    assert loss() == pytest.approx(forward)
    assert loss(distillation_mode="topk_logits") == pytest.approx(forward)  # of two tokens the tail is the other one
    assert loss(distillation_mode="topk_logits", distillation_add_tail=False) == 0
    assert loss(torch.tensor([0.75]).log()) == pytest.approx(forward)
    assert loss(torch.tensor([0.5]).log()) == pytest.approx(1.5 * forward)
    assert loss(torch.tensor([0.01]).log()) == pytest.approx(2 * forward)
    assert loss(torch.tensor([0.01]).log(), distillation_is_clip=None) == pytest.approx(forward)


@pytest.mark.parametrize("lora", [False, True])
def test_the_average_follows_the_policy_and_goes_on_from_a_checkpoint(lora, tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0) if lora else None
    options = {"teacher_model_kind": "ema", "teacher_update_rate": 0.5, "peft_config": config, "max_steps": 4}
    options |= {"lr_scheduler_type": "constant"}
    whole = trainer(tmp_path / "whole", **options)
    before = {name: value.clone() for name, value in whole.reference.weights().items()}
    whole.train()
    gaps = [value - before[name] for name, value in whole.reference.weights().items()]
    assert max(float(gap.abs().max()) for gap in gaps) > 0
    after = {name: value.clone() for name, value in whole.reference.weights().items()}
    trainer(tmp_path / "part", save_strategy="steps", save_steps=2, **(options | {"max_steps": 2})).train()
    rest = trainer(tmp_path / "part", **options)
    rest.train(resume_from_checkpoint=True)
    torch.testing.assert_close(weights(rest), weights(whole), rtol=0, atol=0)
    assert all(torch.equal(value, after[name]) for name, value in rest.reference.weights().items())


def test_an_evaluation_compares_too(tmp_path):
    made = trainer(tmp_path, teacher_model_kind="live")
    assert made.reference is None and made.teacher_model is made.model
    assert made.evaluate(rows(3))["eval_loss"] != 0


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(ConfigError, match="distillation_alpha=0.5; set distillation_alpha=1"):
        SDFTConfig(str(tmp_path), distillation_mode="sampled_token")
    with pytest.raises(ConfigError, match=r"has no \{privileged_context\}; add it"):
        SDFTConfig(str(tmp_path), teacher_prompt_template="{prompt}")
    with pytest.raises(DataError, match="row 0 has no privileged_context"):
        trainer(tmp_path, data=text_rows(9))
