"""One command that starts a run, and goes on with it when it is started again."""

import pytest
import torch

from posttrain.core.errors import CheckpointError
from posttrain.core.training.preflight import PreflightError
from tests.contract.trainers import causal_lm
from tests.core.optim.test_schedule import Rates


def start(folder, stop_at=None, **changes):
    trainer = causal_lm()(folder, [Rates(stop_at)], resume_from_checkpoint="auto", max_steps=4, **changes)
    trainer.train()
    return trainer


def test_auto_starts_a_run_and_goes_on_with_it(tmp_path):
    whole = start(tmp_path / "whole")
    start(tmp_path / "cut", stop_at=2)
    rest = start(tmp_path / "cut")
    assert rest.run.first_step == 2 and rest.state.global_step == 4
    for a, b in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(a, b)
    again = causal_lm()(tmp_path / "cut", max_steps=6)
    again.train("auto")  # as an argument too
    assert again.run.first_step == 2


@pytest.mark.parametrize(("asked", "first"), [(True, 2), ("True", 2), (False, 0), ("false", 0)])
def test_a_file_or_a_command_line_may_say_true_or_false(asked, first, tmp_path):
    start(tmp_path, stop_at=2)
    by_arguments = causal_lm()(tmp_path, max_steps=4, resume_from_checkpoint=asked)
    assert by_arguments.args.resume_from_checkpoint is bool(first)
    by_arguments.train()
    assert by_arguments.run.first_step == first
    start(tmp_path / "again", stop_at=2)
    by_call = causal_lm()(tmp_path / "again", max_steps=4)
    by_call.train(asked)  # as scripts hand on what they have parsed
    assert by_call.run.first_step == first


def test_auto_does_not_start_over_where_every_checkpoint_is_damaged(tmp_path):
    start(tmp_path, stop_at=2)
    (tmp_path / "checkpoint-2" / "manifest.json").unlink()
    with pytest.raises((CheckpointError, PreflightError), match="none of 1 is whole|another trainer"):
        start(tmp_path)


def test_rates_of_groups_are_logged_where_they_differ(tmp_path):
    trainer = causal_lm()(tmp_path, max_steps=2, lr_scheduler_type="constant")
    head = list(trainer.model.lm_head.parameters())
    body = [p for name, p in trainer.model.named_parameters() if not name.startswith("lm_head")]
    groups = [{"params": body, "lr": 0.1}, {"params": head, "lr": 0.5, "name": "head"}]
    trainer.optimizer = torch.optim.SGD(groups, lr=0.1)
    trainer.train()
    first = trainer.state.log_history[0]
    assert (first["learning_rate"], first["learning_rate/0"], first["learning_rate/head"]) == (0.1, 0.1, 0.5)
    alike = causal_lm()(tmp_path / "alike", max_steps=1)
    alike.train()
    assert not any(name.startswith("learning_rate/") for name in alike.state.log_history[0])
