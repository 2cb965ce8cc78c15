"""KTO, reward models and CPO beside TRL: the same rows in the same order give the same numbers, step by step.

Run with a Python that has trl: ``python -m pytest tests/parity/test_preference_family.py``.
"""

import copy

import pytest
import torch
from datasets import Dataset

from posttrain.rl import CPOConfig, CPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from tests import tiny
from tests.contract.trainers import preference_rows

trl = pytest.importorskip("trl")

ROWS = 8


def log_of(trainer_class, config_class, model, rows, output_dir, sequential=True, **changes):
    usual = dict(
        output_dir=str(output_dir), per_device_train_batch_size=ROWS, max_steps=5, learning_rate=0.05, optim="sgd",
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
        gradient_checkpointing=False, train_sampling_strategy="sequential",
    )  # fmt: skip
    extra = {"ref_model": copy.deepcopy(model)} if changes.pop("with_reference", False) else {}
    trainer = trainer_class(
        model=model, args=config_class(**(usual | changes)), train_dataset=Dataset.from_list(rows),
        processing_class=tiny.tokenizer(), **extra,
    )  # fmt: skip
    trainer.train()
    return [record for record in trainer.state.log_history if "loss" in record]


def assert_equal(ours, theirs, names):
    assert len(ours) == len(theirs) == 5
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        for name in names:
            assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=1e-4), f"{name} of step {step}"


def unpaired(count):
    rows = preference_rows(count)
    sides = [("chosen", True), ("rejected", False)]
    return [
        {"prompt": row["prompt"], "completion": row[sides[i % 2][0]], "label": sides[i % 2][1]}
        for i, row in enumerate(rows)
    ]


@pytest.mark.parametrize(
    "changes",
    [{}, {"desirable_weight": 1.5, "undesirable_weight": 0.5}, {"loss_type": "apo_zero_unpaired"}],
    ids=["kto", "weighted", "apo_zero_unpaired"],
)
def test_kto(changes, tmp_path):
    changes = {"beta": 0.3, "with_reference": True} | changes
    runs = [
        log_of(
            trainer,
            config,
            tiny.causal_lm(initializer_range=0.3),
            unpaired(ROWS),
            tmp_path / config.__module__,
            **changes,
        )
        for trainer, config in ((KTOTrainer, KTOConfig), (trl.KTOTrainer, trl.KTOConfig))
    ]
    names = [
        "loss",
        "grad_norm",
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
    ]
    assert_equal(*runs, [*names, "kl", "entropy"] if changes.get("loss_type") is None else names)
    assert len({record["loss"] for record in runs[0]}) == 5


@pytest.mark.parametrize("changes", [{}, {"center_rewards_coefficient": 0.05}], ids=["plain", "centred"])
@pytest.mark.parametrize("margin", [False, True])
def test_reward_models(changes, margin, tmp_path):
    rows = [row | ({"margin": 0.1 * i} if margin else {}) for i, row in enumerate(preference_rows(ROWS))]
    runs = [
        log_of(trainer, config, tiny.reward_model(pad_token_id=0), rows, tmp_path / config.__module__, **changes)
        for trainer, config in ((RewardTrainer, RewardConfig), (trl.RewardTrainer, trl.RewardConfig))
    ]
    assert_equal(*runs, ["loss", "grad_norm", "accuracy", "margin", "mean_reward", "min_reward", "max_reward"])


@pytest.mark.parametrize(
    "changes",
    [{}, {"label_smoothing": 0.1}, {"loss_type": "hinge"}, {"loss_type": "ipo"}, {"loss_type": "simpo", "beta": 2.0},
     {"loss_type": "simpo", "beta": 2.0, "alpha": 0.25}],
    ids=["sigmoid", "smoothed", "hinge", "ipo", "simpo", "alpha"],
)  # fmt: skip
def test_cpo(changes, tmp_path):
    cpo = pytest.importorskip("trl.experimental.cpo")
    # The likelihood term differs on purpose: TRL's is a mean over the batch's tokens, prompts included.
    changes = {"cpo_alpha": 0.0} | changes
    runs = []
    for trainer, config in ((CPOTrainer, CPOConfig), (cpo.CPOTrainer, cpo.CPOConfig)):
        torch.manual_seed(0)
        model = tiny.causal_lm(initializer_range=0.3)
        runs.append(log_of(trainer, config, model, preference_rows(ROWS), tmp_path / config.__module__, **changes))
    assert_equal(*runs, ["loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins"])
