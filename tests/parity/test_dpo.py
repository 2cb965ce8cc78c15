"""DPO beside TRL: the same pairs in the same order give the same loss, rewards and gradient norms, step by step.

Run with a Python that has trl: ``python -m pytest tests/parity/test_dpo.py``.
"""

import copy
import dataclasses

import pytest
import torch
import transformers

from posttrain.rl import DPOConfig, DPOTrainer
from tests import tiny
from tests.contract.trainers import preference_rows

trl = pytest.importorskip("trl")

COMPARED = (
    "loss", "grad_norm", "learning_rate", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies",
    "logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected", "entropy", "mean_token_accuracy",
)  # fmt: skip
LOSSES = {
    "sigmoid": {"loss_type": ["sigmoid"]},
    "hinge": {"loss_type": ["hinge"]},
    "ipo": {"loss_type": ["ipo"], "learning_rate": 1e-3},
    "exo_pair": {"loss_type": ["exo_pair"], "label_smoothing": 1e-3},
    "nca_pair": {"loss_type": ["nca_pair"]},
    "robust": {"loss_type": ["robust"], "label_smoothing": 0.1},
    "bco_pair": {"loss_type": ["bco_pair"]},
    "sppo_hard": {"loss_type": ["sppo_hard"], "learning_rate": 1e-4},
    "aot": {"loss_type": ["aot"], "label_smoothing": 0.1},
    "aot_unpaired": {"loss_type": ["aot_unpaired"]},
    "apo_zero": {"loss_type": ["apo_zero"]},
    "apo_down": {"loss_type": ["apo_down"]},
    "discopop": {"loss_type": ["discopop"]},
    "sigmoid_norm": {"loss_type": ["sigmoid_norm"]},
    "mixture": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "js_divergence": {"f_divergence_type": "js_divergence"},
    "alpha_divergence": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
    "ld": {"ld_alpha": 0.3},
    "wpo": {"use_weighting": True},
    "sync": {"sync_ref_model": True, "ref_model_sync_steps": 2},
    "bf16": {"bf16": True},
}
# discopop divides by a temperature of 0.05, and float32 is known to fewer places after that: in float64 the two agree
# to 4e-5.
TOLERANCES = {"bf16": 5e-2, "discopop": 1e-3}


def log_of(trainer):
    trainer.train()
    return [record for record in trainer.state.log_history if "loss" in record]


def run(trainer_class, config_class, output_dir, lora=False, **changes):
    from datasets import Dataset

    usual = dict(
        output_dir=str(output_dir), per_device_train_batch_size=4, max_steps=5, learning_rate=0.05, optim="sgd",
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
        gradient_checkpointing=False, train_sampling_strategy="sequential", beta=0.3,
    )  # fmt: skip
    model = tiny.causal_lm(initializer_range=0.3)
    adapter = None
    if lora:
        from peft import LoraConfig

        adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    return log_of(
        trainer_class(
            model=model,
            ref_model=None if lora else copy.deepcopy(model),
            args=config_class(**(usual | changes)),
            train_dataset=Dataset.from_list(preference_rows(22)),
            processing_class=tiny.tokenizer(),
            peft_config=adapter,
        )
    )


def assert_equal_logs(ours, theirs, tolerance):
    assert len(ours) == len(theirs) == 5
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        for name in COMPARED:
            expected = pytest.approx(other[name], rel=tolerance, abs=tolerance)
            assert mine[name] == expected, f"{name} of step {step}"


@pytest.mark.rotated
@pytest.mark.parametrize("name", LOSSES)
def test_each_step_is_the_same(name, tmp_path):
    changes = LOSSES[name]
    theirs = run(trl.DPOTrainer, trl.DPOConfig, tmp_path / "theirs", **changes)
    assert abs(theirs[-1]["rewards/margins"]) > 1e-4, "nothing happened, so nothing is compared"
    ours = run(DPOTrainer, DPOConfig, tmp_path / "ours", **changes)
    assert_equal_logs(ours, theirs, TOLERANCES.get(name, 1e-4))


def test_without_the_shared_prefix_too(tmp_path):
    theirs = run(trl.DPOTrainer, trl.DPOConfig, tmp_path / "theirs")
    assert_equal_logs(run(DPOTrainer, DPOConfig, tmp_path / "ours", shared_prefix=False), theirs, 1e-4)


def test_with_an_adapter_too(tmp_path):
    torch.manual_seed(0)
    theirs = run(trl.DPOTrainer, trl.DPOConfig, tmp_path / "theirs", lora=True, learning_rate=1.0)
    assert_equal_logs(run(DPOTrainer, DPOConfig, tmp_path / "ours", lora=True, learning_rate=1.0), theirs, 1e-4)


def test_every_argument_of_trl_is_known_with_its_default():
    theirs, ours = trl.DPOConfig("out", use_cpu=True), DPOConfig("out", use_cpu=True)
    common = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    own = {field.name for field in dataclasses.fields(trl.DPOConfig)} - common
    assert len(own) >= 24
    assert {name: getattr(ours, name) for name in own} == {name: getattr(theirs, name) for name in own}
    for name in ("learning_rate", "logging_steps", "gradient_checkpointing"):
        assert getattr(ours, name) == getattr(theirs, name)
