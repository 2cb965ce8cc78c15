"""Dynamic Fine-Tuning beside TRL: the same rows in the same order give the same losses and gradient norms.

Run with a Python that has trl: ``python -m pytest tests/parity/test_dft.py``.
"""

import pytest
from datasets import Dataset

from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny

trl = pytest.importorskip("trl")


def run(trainer_class, config_class, output_dir, loss_type, rows, **changes):
    args = config_class(
        output_dir=str(output_dir), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4,
        learning_rate=0.1, optim="sgd", logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=False,
        disable_tqdm=True, gradient_checkpointing=False, train_sampling_strategy="sequential", max_length=64,
        loss_type=loss_type, **changes,
    )  # fmt: skip
    trainer = trainer_class(
        model=tiny.causal_lm("llama"),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    return [record for record in trainer.state.log_history if "loss" in record]


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
@pytest.mark.parametrize("kind", ["tokens", "completions"])
def test_losses_and_gradient_norms_are_those_of_trl(tmp_path, loss_type, kind):
    rows = tiny.token_rows(16)
    if kind == "completions":
        rows = [{"prompt": f"{n} pages and {n}?", "completion": f" {2 * n} pages."} for n in range(16)]
    ours = run(SFTTrainer, SFTConfig, tmp_path / "ours", loss_type, rows)
    theirs = run(trl.SFTTrainer, trl.SFTConfig, tmp_path / "theirs", loss_type, rows)
    assert len(ours) == len(theirs) == 4
    for a, b in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert a[name] == pytest.approx(b[name], rel=2e-4), name
