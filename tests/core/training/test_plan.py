import sys

import pytest

from posttrain.core.fields.durations import as_steps
from posttrain.core.training.plan import make_plan


def test_a_short_last_window_is_an_update():
    plan = make_plan(10, accumulation=4, num_train_epochs=2, max_steps=-1)
    assert (plan.steps_per_epoch, plan.max_steps, plan.num_epochs) == (3, 6, 2)


def test_fewer_batches_than_accumulation_steps_still_give_one_update_an_epoch():
    assert make_plan(2, accumulation=8, num_train_epochs=3, max_steps=-1).max_steps == 3


def test_max_steps_beats_epochs_and_says_how_many_epochs_are_begun():
    plan = make_plan(10, accumulation=1, num_train_epochs=1, max_steps=25)
    assert (plan.max_steps, plan.num_epochs) == (25, 3)


def test_a_fraction_of_an_epoch():
    assert make_plan(8, accumulation=1, num_train_epochs=1.5, max_steps=-1).max_steps == 12
    assert make_plan(8, accumulation=1, num_train_epochs=0.5, max_steps=-1).num_epochs == 1


@pytest.mark.parametrize(("step", "position"), [(0, (0, 0)), (1, (0, 4)), (2, (0, 8)), (3, (1, 0)), (7, (2, 4))])
def test_a_step_has_a_place_in_the_data(step, position):
    assert make_plan(10, accumulation=4, num_train_epochs=3, max_steps=-1).position(step) == position


def test_the_epoch_is_a_fraction_and_whole_after_a_short_window():
    plan = make_plan(10, accumulation=4, num_train_epochs=3, max_steps=-1)
    assert plan.epoch_at(0, 4, 1) == 0.4
    assert plan.epoch_at(1, 12, 6) == 2.0


def test_unknown_length_needs_max_steps():
    with pytest.raises(ValueError, match="Set max_steps"):
        make_plan(None, 1, 3, -1)
    plan = make_plan(None, 1, 3, 40)
    assert plan.num_epochs == sys.maxsize and plan.epoch_at(5, 10, 10) == 0.25


def test_no_batch_at_all_is_an_error_that_says_why():
    with pytest.raises(ValueError, match="drop_last"):
        make_plan(0, 1, 3, -1)


@pytest.mark.parametrize(("interval", "steps"), [(10, 10), (1, 1), (0.1, 10), (0.001, 1), (0.25, 25)])
def test_an_interval_below_one_is_a_share_of_the_run(interval, steps):
    assert as_steps(interval, 100) == steps
