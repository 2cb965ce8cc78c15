"""What a run counts and what its processes agree on, without a trainer."""

from types import SimpleNamespace

import pytest

from posttrain.core.callbacks import FLAGS
from posttrain.core.state import TrainerControl
from posttrain.core.training.run import Run


@pytest.mark.parametrize(("total", "read"), [(22, [8, 16, 22]), (None, [8, 16, 24])])
def test_the_last_micro_batch_of_an_epoch_may_hold_fewer_rows(total, read):
    run = Run(SimpleNamespace(), rows_per_batch=8, _total_rows=total)
    seen = []
    for _ in range(3):
        run.advance(1)
        seen.append(run.rows_read)
    assert seen == read and run.progress.batches == 3


@pytest.mark.parametrize("may_differ", [False, True])
def test_a_flag_that_one_process_sets_counts_for_all_where_callbacks_may_differ(may_differ):
    everywhere = [int(flag == "should_save") for flag in FLAGS]
    owner = SimpleNamespace(control=TrainerControl(), dist=SimpleNamespace(highest=lambda mine: everywhere))
    Run(owner, callbacks_may_differ=may_differ).agree()
    assert [flag for flag in FLAGS if getattr(owner.control, flag)] == ["should_save"] * may_differ
