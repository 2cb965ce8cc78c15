"""A subclass whose override would never be called is told so."""

import functools
import inspect
import logging

import pytest
import torch
import transformers
from torch.distributed import all_gather as gathered_under_another_name

from posttrain.core import Trainer, TrainingArguments
from posttrain.core.training import override_checks
from posttrain.rl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer
from posttrain.seq2seq import Seq2SeqTrainer
from posttrain.sft import SFTTrainer
from tests import tiny, versions
from tests.contract.trainers import arguments

OF_TRANSFORMERS_4 = set(
    """
    _nested_gather _pad_across_processes prediction_loop _rotate_checkpoints _sorted_checkpoints _activate_neftune
    _deactivate_neftune
""".split()
)
CALLED_BY_SCRIPTS = set(
    """
    _nested_gather _pad_across_processes prediction_loop gather_function get_cp_size get_sp_size get_tp_size
    init_hf_repo _issue_warnings_after_load is_local_process_zero is_world_process_zero num_examples
    set_initial_training_values _push_from_checkpoint _save_optimizer_and_scheduler _save_rng_state _save_scaler
""".split()
)


def test_an_override_that_nothing_calls_is_named_with_what_to_override_instead(tmp_path, caplog):
    class Clipped(Trainer):
        def _clip_grad_norm(self, model):
            return 0.0

        def log(self, logs, start_time=None):
            super().log(logs, start_time)

    class Older(Clipped):
        def num_examples(self, dataloader):
            return 1

    Older(tiny.causal_lm(), TrainingArguments(str(tmp_path), use_cpu=True))
    [said] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said.startswith("Older overrides methods that nothing calls here: _clip_grad_norm (override train_on_window")
    assert "num_examples (override make_plan)" in said and "log (" not in said
    assert override_checks.unheard(Trainer) is None


def test_a_call_of_a_method_that_is_not_here_is_named_before_the_run(tmp_path, caplog):
    class Copied(Trainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            self._rotate_checkpoints(use_mtime=True, output_dir=self.args.output_dir)

    Copied(tiny.causal_lm(), TrainingArguments(str(tmp_path), use_cpu=True))
    [said] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said == ("Copied calls methods that are not here: _rotate_checkpoints (set save_total_limit or save_top_k).")


@pytest.mark.parametrize(
    "trainer", [Trainer, Seq2SeqTrainer, SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer, GRPOTrainer]
)
def test_no_trainer_of_ours_has_a_method_of_the_list(trainer):
    # but for those that scripts may call, though nothing here does
    assert {name for name in override_checks.INSTEAD if hasattr(trainer, name)} == CALLED_BY_SCRIPTS


@versions.compared
def test_every_method_of_the_list_is_one_of_transformers():
    theirs = dict(inspect.getmembers(transformers.Trainer))
    assert {name for name in override_checks.INSTEAD if name not in theirs} == OF_TRANSFORMERS_4 | {"gather_function"}


def of_all(rows):
    return [gathered_under_another_name(part) for part in rows]


class Gathering(torch.nn.Module):
    def forward(self, rows):
        return of_all(rows)


class Losses(Trainer):
    """Each way in which a loss may come to gather, by its name."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return self.inner(inputs)

    def evaluate(self, *args, **kwargs):  # no loss is computed in it
        return torch.distributed.all_gather(*args)


@pytest.mark.parametrize(
    ("inner", "gathers"),
    [
        (lambda rows: torch.distributed.all_gather(rows, rows), True),
        (lambda rows: [torch.distributed.nn.all_gather(row) for row in rows], True),
        (Gathering(), True),
        (of_all, True),
        (torch.nn.Linear(2, 2), False),
        (lambda rows: rows.mean(), False),
        (functools.wraps(str.join)(lambda rows: rows.mean()), False),
    ],
    ids=["function", "inner function", "module", "renamed", "of torch", "none", "wraps what is written in C"],
)
def test_whether_a_loss_gathers_is_found_without_running_it(inner, gathers, tmp_path):
    trainer = Losses(tiny.causal_lm(), arguments(TrainingArguments, tmp_path))
    trainer.inner = inner
    assert ("all_gather" in override_checks.read_by_loss(trainer)) == gathers
    assert "all_gather" not in override_checks.read_by_loss(Trainer(tiny.causal_lm(), trainer.args))


def test_a_model_of_the_users_that_gathers_is_found(tmp_path):
    class Model(torch.nn.Linear):
        def forward(self, **inputs):
            return of_all(inputs["rows"])

    class Derived(Model):
        pass

    for kind in (Model, Derived):
        trainer = Trainer(kind(2, 2), arguments(TrainingArguments, tmp_path))
        assert "all_gather" in override_checks.read_by_loss(trainer)
