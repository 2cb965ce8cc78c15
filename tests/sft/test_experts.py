"""What the page on adapters shows for mixtures: routers balanced by their bias, and a learning rate of the experts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adapters.md"
ROWS = [{"prompt": text[:30], "completion": text[30:60]} for text in tiny.CORPUS] * 8


def callback(rate):
    """The callback that the page defines."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    namespace: dict = {}
    exec(next(code for code in blocks if "class BalancesExperts" in code), namespace)
    return namespace["BalancesExperts"](rate)


def mixture():
    """Routers that send most tokens to the first two experts."""
    model = tiny.mixture_of_experts(arch="glm4_moe")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.e_score_correction_bias += torch.tensor([0.03, 0.02, 0.0, 0.0])
    return model


def make(folder, rate, **changes):
    usual = dict(packing=True, max_length=64, max_steps=12, logging_steps=1, learning_rate=1e-3, save_strategy="no")
    args = SFTConfig(str(folder), **(usual | changes), use_cpu=True, report_to="none", disable_tqdm=True)
    options = {"processing_class": tiny.tokenizer(), "callbacks": [callback(rate)]}
    return SFTTrainer(mixture(), args, train_dataset=ROWS, **options)


def violations(trainer):
    key = "experts/max_violation"
    return [record[key] for record in trainer.state.log_history if key in record]


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_bias_moves_tokens_to_experts_with_few_and_is_saved(recomputed, tmp_path):
    left, balanced = (make(tmp_path / str(rate), rate, gradient_checkpointing=recomputed) for rate in (0.0, 5e-3))
    start = balanced.model.model.layers[0].mlp.gate.e_score_correction_bias.clone()
    left.train()
    balanced.train()
    assert len(violations(left)) == 12 and violations(left)[0] == violations(balanced)[0]
    assert sum(violations(balanced)[-3:]) < 0.6 * sum(violations(left)[-3:])
    moved = balanced.model.model.layers[0].mlp.gate.e_score_correction_bias
    assert moved[:2].lt(start[:2]).all()
    balanced.save_model(str(tmp_path / "saved"))
    again = type(balanced.model).from_pretrained(tmp_path / "saved")
    assert torch.equal(again.model.layers[0].mlp.gate.e_score_correction_bias, moved)


def test_a_run_with_a_moving_bias_resumes_to_the_bit(tmp_path):
    straight = make(tmp_path, 5e-3, save_strategy="steps", save_steps=6)
    resumed = make(tmp_path, 5e-3)
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    expected = straight.model.state_dict()
    assert [name for name, value in resumed.model.state_dict().items() if not torch.equal(value, expected[name])] == []
    assert violations(resumed)[-6:] == violations(straight)[-6:]


def test_experts_follow_the_schedule_from_a_rate_of_their_own(tmp_path):
    model = mixture()
    of_experts = {name for name, _ in model.named_parameters() if ".experts." in name}
    groups = [
        {"params": [p for n, p in model.named_parameters() if (n in of_experts) == is_expert], "lr": lr, "name": name}
        for name, lr, is_expert in (("others", 0.0, False), ("experts", 1e-3, True))
    ]
    args = SFTConfig(
        str(tmp_path), max_steps=4, logging_steps=1, use_cpu=True, report_to="none", save_strategy="no", max_length=64
    )
    before = {name: value.clone() for name, value in model.named_parameters()}
    trainer = SFTTrainer(
        model, args, train_dataset=ROWS, processing_class=tiny.tokenizer(),
        optimizer_cls_and_kwargs=(torch.optim.AdamW, {"params": groups}),
    )  # fmt: skip
    trainer.train()
    changed = {name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == of_experts
    rates = [r["learning_rate/experts"] for r in trainer.state.log_history if "learning_rate/experts" in r]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
