"""A subclass whose override would never be called is told so."""

import inspect
import logging

import pytest
import transformers

from posttrain.core import Trainer, TrainingArguments
from posttrain.core.training import override_checks
from posttrain.rl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer
from posttrain.seq2seq import Seq2SeqTrainer
from posttrain.sft import SFTTrainer
from tests import tiny


def test_an_override_that_nothing_calls_is_named_with_what_to_override_instead(tmp_path, caplog):
    class Clipped(Trainer):
        def _clip_grad_norm(self, model):
            return 0.0

        def log(self, logs, start_time=None):
            super().log(logs, start_time)

    class Older(Clipped):
        def _prepare_input(self, data):
            return data

    Older(tiny.causal_lm(), TrainingArguments(str(tmp_path), use_cpu=True))
    [said] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said.startswith("Older overrides methods that nothing calls here: _clip_grad_norm (override train_on_window")
    assert "_prepare_input (override _prepare_inputs)" in said and "log (" not in said
    assert override_checks.unheard(Trainer) is None


@pytest.mark.parametrize(
    "trainer", [Trainer, Seq2SeqTrainer, SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer, GRPOTrainer]
)
def test_no_trainer_of_ours_has_a_method_of_the_list(trainer):
    # but for one that scripts may call, though nothing here does
    assert [name for name in override_checks.INSTEAD if hasattr(trainer, name)] == ["_prepare_input"]


def test_every_method_of_the_list_is_one_of_transformers():
    theirs = dict(inspect.getmembers(transformers.Trainer))
    assert {name for name in override_checks.INSTEAD if name not in theirs} == set()
