"""What becomes of a checkpoint that is written, without a trainer."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.core.checkpoint.transaction import Outcome
from posttrain.core.state import TrainerState
from posttrain.core.training.saving import Saving


class Owner:
    """What `Saving` reads of a trainer; `seen` lists what it does."""

    def __init__(self, outcome, **args):
        usual = dict(push_to_hub=False, save_top_k=None, metric_for_best_model=None, greater_is_better=False)
        self.args, self.seen = SimpleNamespace(**(usual | args)), []
        self.state = TrainerState(global_step=9, best_model_checkpoint="out/checkpoint-2", best_global_step=2)
        before = TrainerState(global_step=4)
        self.checkpoints = SimpleNamespace(
            settle=lambda wait: outcome, state_at_save=before, rotate=lambda keep: self.seen.append(("rotate", keep))
        )
        self.store = SimpleNamespace(remote=None, path=lambda step: Path(f"out/checkpoint-{step}"))
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
