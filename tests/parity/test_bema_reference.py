"""The reference that BEMA moves is that of trl, after the same steps of DPO."""

from __future__ import annotations

import os

import pytest
import torch

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
theirs = pytest.importorskip("trl.experimental.bema_for_ref_model")

from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import posttrain.rl  # noqa: E402
from tests import tiny  # noqa: E402
from tests.contract.trainers import arguments, preference_rows, text_rows  # noqa: E402


def dpo(package, path, callback, **changes):
    import trl

    usual = dict(
        output_dir=str(path / package.__name__), per_device_train_batch_size=4, max_steps=6, learning_rate=0.05,
        optim="sgd", lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        bf16=False, disable_tqdm=True, gradient_checkpointing=False, beta=0.5,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(path / "model")
    config = trl.DPOConfig if package is theirs else posttrain.rl.DPOConfig
    rows = Dataset.from_list(preference_rows(4))
    return package.DPOTrainer(
        model,
        args=config(**(usual | changes)),
        train_dataset=rows,
        processing_class=tiny.tokenizer(),
        callbacks=[callback],
    )


@pytest.mark.parametrize("changes", [{}, {"ref_model_update_after": 2, "update_after": 1, "bias_power": 0.5}], ids=str)
def test_the_reference_of_dpo(changes, tmp_path):
    tiny.causal_lm(initializer_range=0.1).save_pretrained(tmp_path / "model")
    options = {"update_freq": 1, "update_ref_model": True, "ref_model_update_freq": 2, "lag": 2} | changes
    losses, references = [], []
    for package in (theirs, posttrain.rl):
        trainer = dpo(package, tmp_path, package.BEMACallback(**options))
        before = {name: value.clone() for name, value in trainer.ref_model.named_parameters()}
        trainer.train()
        losses.append([record["loss"] for record in trainer.state.log_history if "loss" in record])
        references.append({name: value.detach() for name, value in trainer.ref_model.named_parameters()})
        assert any(not torch.equal(value, before[name]) for name, value in references[-1].items())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=2e-6)
    torch.testing.assert_close(references[1], references[0], rtol=1e-4, atol=1e-6)


def test_a_moved_reference_goes_on_from_a_checkpoint(tmp_path):
    def made(folder, steps, **changes):
        callback = posttrain.rl.BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=1)
        changes = {"output_dir": str(tmp_path / folder), "max_steps": steps} | changes
        return dpo(posttrain.rl, tmp_path, callback, **changes)

    tiny.causal_lm(initializer_range=0.1).save_pretrained(tmp_path / "model")
    whole = made("whole", 4)
    whole.train()
    made("part", 2, save_strategy="steps", save_steps=2).train()
    rest = made("part", 4)
    rest.train(resume_from_checkpoint=True)
    for name in ("model", "ref_model"):
        ours, expected = (dict(getattr(one, name).named_parameters()) for one in (rest, whole))
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_what_cannot_be_moved_is_said(tmp_path):
    tiny.causal_lm().save_pretrained(tmp_path / "model")
    callback = posttrain.rl.BEMACallback(update_ref_model=True)
    with pytest.raises(ValueError, match="precompute_ref_log_probs=True fixes"):
        dpo(posttrain.rl, tmp_path, callback, precompute_ref_log_probs=True)
    args = arguments(posttrain.rl.GRPOConfig, tmp_path, num_generations=2, beta=0.0)
    rows = [{"prompt": row["prompt"]} for row in text_rows(9)]
    trainer = posttrain.rl.GRPOTrainer(
        tiny.causal_lm(), lambda completions, **_: [0.0] * len(completions), args, rows,
        processing_class=tiny.tokenizer(), callbacks=[callback],
    )  # fmt: skip
    with pytest.raises(ValueError, match="this trainer holds none"):
        trainer.train()
