"""What a process does with a model, and what it says of the machine."""

import pytest
import torch

from posttrain.core import Trainer, TrainingArguments
from posttrain.core.distributed.strategies import base
from tests import tiny
from tests.contract.trainers import pad


@pytest.mark.parametrize(("bf16", "dtype", "warns"), [
    (True, torch.float32, True), (False, torch.bfloat16, True), (False, torch.float32, False),
])  # fmt: skip
def test_bfloat16_on_a_processor_without_its_instructions_is_warned_of(
    bf16, dtype, warns, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(base, "has_bfloat16_instructions", lambda: False)
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, bf16=bf16, max_steps=1, save_strategy="no", report_to="none", disable_tqdm=True
    )
    with caplog.at_level("WARNING", "posttrain"):
        Trainer(tiny.causal_lm().to(dtype), args, pad, tiny.token_rows(8)).train()
    assert caplog.text.count("Set bf16=False") == warns
