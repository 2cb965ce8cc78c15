"""On the same completions, online DPO and TPO have the losses and gradients of trl."""

from __future__ import annotations

import os

import pytest
import torch

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
trl = pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from trl.experimental import online_dpo  # noqa: E402

import posttrain.rl  # noqa: E402
from tests import tiny  # noqa: E402
from tests.parity.test_online import PROMPTS, digit_sum, rollout, with_adapter  # noqa: E402

KEYS = ["loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies",
        "logps/chosen", "logps/rejected", "val/contain_eos_token", "beta"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("online")
    tiny.causal_lm(initializer_range=0.1).save_pretrained(path / "model")
    tiny.causal_lm(seed=5, initializer_range=0.1).save_pretrained(path / "reference")
    return path


def run(package, path, lora=False, reference=False, rewards=digit_sum, **changes):
    args = package.OnlineDPOConfig(
        output_dir=str(path / package.__name__),
        **(dict(
            per_device_train_batch_size=4, max_new_tokens=8, max_steps=4, learning_rate=0.1, optim="sgd",
            lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
            bf16=False, disable_tqdm=True, gradient_checkpointing=False, max_grad_norm=1.0, beta=0.3,
            **({"train_sampling_strategy": "sequential"} if package is online_dpo else {"shuffle_dataset": False}),
        ) | changes),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(path / "model")
    model = with_adapter(model) if lora else model
    other = AutoModelForCausalLM.from_pretrained(path / "reference") if reference else None
    rows = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    trainer = package.OnlineDPOTrainer(
        model, other, rewards, args, train_dataset=rows, processing_class=tiny.tokenizer(),
        **({"rollout_func": rollout} if package is posttrain.rl else {}),
    )  # fmt: skip
    if package is online_dpo:
        trainer._generate = lambda model, prompts, images: generated(trainer, prompts)
    trainer.train()
    return [record for record in trainer.state.log_history if "loss" in record]


def generated(trainer, prompts):
    """What trl's `_generate` gives: the first completions of all prompts, then the second, padded."""
    made = rollout([prompt for prompt in prompts for _ in range(2)], trainer)
    order = [*range(0, 2 * len(prompts), 2), *range(1, 2 * len(prompts), 2)]
    pad = torch.nn.utils.rnn.pad_sequence
    found = []
    for name, side in (("prompt_ids", "left"), ("completion_ids", "right")):
        rows = [torch.tensor(made[name][i]) for i in order]
        found += [pad(rows, True, 0, side), pad([torch.ones_like(row) for row in rows], True, 0, side)]
    return *found, None


@pytest.mark.parametrize("changes", [
    {}, {"loss_type": "ipo"}, {"reference": True}, {"missing_eos_penalty": 0.5},
], ids=str)  # fmt: skip
def test_online_dpo(changes, folder):
    theirs, ours = run(online_dpo, folder, **changes), run(posttrain.rl, folder, **changes)
    assert len(theirs) == len(ours) == 4
    for key in KEYS:
        # trl rounds the losses that it logs to four places
        near = {"abs": 6e-5} if key == "loss" else {"rel": 1e-4, "abs": 2e-6}
        expected = [record[key] for record in theirs]
        assert [record[key] for record in ours] == pytest.approx(expected, **near), key


@pytest.mark.parametrize("changes", [
    {}, {"loss_type": "tpo-l", "beta": 2.0}, {"loss_type": "ipo", "beta": 0.5}, {"loss_type": "hinge", "beta": 0.5},
    {"tpo_alpha": 0.0, "beta": 0.3}, {"tpo_alpha": 0.3, "label_smoothing": 0.1, "beta": 0.3},
], ids=str)  # fmt: skip
def test_tpo(changes, folder, tmp_path):
    from trl.experimental import tpo

    words = " ".join(tiny.CORPUS).split()
    rows = [
        {"prompt": " ".join(words[i : i + 3 + i % 3])}
        | {name: " " + " ".join(words[i + 5 + at : i + 7 + at + i % (at + 2)])
           for at, name in enumerate(("chosen", "rejected", "reference"))}
        for i in range(8)
    ]  # fmt: skip
    records = {}
    for package in (tpo, posttrain.rl):
        args = package.TPOConfig(
            output_dir=str(tmp_path / package.__name__),
            **(dict(
                per_device_train_batch_size=4, max_steps=4, learning_rate=0.1, optim="sgd",
                lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
                bf16=False, disable_tqdm=True, gradient_checkpointing=False, train_sampling_strategy="sequential",
            ) | changes),
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        trainer = package.TPOTrainer(
            model, args, train_dataset=Dataset.from_list(rows), processing_class=tiny.tokenizer()
        )
        trainer.train()
        records[package] = [record for record in trainer.state.log_history if "loss" in record]
    keys = ["loss", "grad_norm", "rewards/margins", "rewards/chosen", "rewards/accuracies"]
    if changes.get("loss_type") not in ("ipo", "tpo-l"):  # where trl logs those of a token
        keys += ["logps/chosen", "logps/rejected"]
    for key in keys:
        expected = [record[key] for record in records[tpo]]
        assert [record[key] for record in records[posttrain.rl]] == pytest.approx(expected, rel=1e-4, abs=2e-6), key
