"""What becomes of a checkpoint that is written, without a trainer."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.core import Trainer, TrainerCallback, TrainingArguments
from posttrain.core.checkpoint.transaction import Outcome
from posttrain.core.state import TrainerState
from posttrain.core.training.saving import Saving
from tests import tiny


class Owner:
    """What `Saving` reads of a trainer; `seen` lists what it does."""

    def __init__(self, outcome, **args):
        usual = dict(push_to_hub=False, save_top_k=None, metric_for_best_model=None, greater_is_better=False)
        self.args, self.seen = SimpleNamespace(**(usual | args)), []
        self.state = TrainerState(global_step=9, best_model_checkpoint="out/checkpoint-2", best_global_step=2)
        before = TrainerState(global_step=4)
        self.checkpoints = SimpleNamespace(
            saver=SimpleNamespace(settle=lambda wait: outcome),
            state_at_save=before,
            limit=2,
            on_savers=lambda work: work(),
        )
        self.store = SimpleNamespace(
            remote=None,
            path=lambda step: Path(f"out/checkpoint-{step}"),
            rotate=lambda limit, keep: self.seen.append(("rotate", keep)),
        )
        self.run = SimpleNamespace(meet=lambda what: self.seen.append("meet"))

    def _fire(self, event, state=None):
        self.seen.append((event, state.global_step))


def test_callbacks_hear_of_a_checkpoint_under_its_own_step_after_older_ones_are_removed():
    owner = Owner(Outcome(4, Path("out/checkpoint-4")))
    Saving(owner).settle()
    assert owner.seen == [("rotate", [Path("out/checkpoint-2")]), ("on_save", 4), "meet"]


@pytest.mark.parametrize(("step", "best"), [(2, None), (4, "out/checkpoint-2")])
def test_a_save_that_failed_is_no_longer_the_best_checkpoint(step, best):
    owner = Owner(Outcome(step, None))
    Saving(owner).settle()
    assert owner.seen == [] and owner.state.best_model_checkpoint == best


def test_each_checkpoint_holds_the_arguments_as_they_are_when_it_is_saved(tmp_path):
    class Sets(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                args.logging_steps = 7

    args = TrainingArguments(tmp_path, max_steps=6, save_steps=2, use_cpu=True)
    rows = [{"input_ids": [5, 6], "attention_mask": [1, 1], "labels": [5, 6]}] * 4
    trainer = Trainer(tiny.causal_lm(), args, train_dataset=rows, callbacks=[Sets])
    trainer.train()

    def saved(name):
        files = (tmp_path / f"checkpoint-{step}" / "training_args.json" for step in (2, 4, 6))
        return [json.loads(file.read_text())[name] for file in files]

    assert saved("logging_steps") == [500, 7, 7]
    args.include_for_metrics.append("loss")  # in place, for a run of its own
    trainer.train()
    assert saved("include_for_metrics") == [["loss"]] * 3
