"""The table of trainers and axes in docs/distributed.md says what is tested, and nothing else."""

from tests.contract.trainers import EXACT
from tests.distributed import axes, test_equal, test_resume_axes


def test_the_table_of_the_documentation_is_what_is_tested():
    assert axes.written()[1] == axes.table(), "run: python -m tests.distributed.axes --write"


def test_a_trainer_is_in_the_table_once_and_with_the_letters_of_its_tests():
    table = axes.table()
    assert all(table.count(f"`{name}`") == 1 for name in EXACT)
    assert axes.cell("dp_replicate", "grpo") == "E V G R" and axes.cell("dp_shard", "kto") == "E V"
    assert axes.cell("cp", "classifier") == "refused" and axes.cell("ep", "kto-images") == "–"


def test_both_columns_of_dealt_rows_are_modes_of_the_test_behind_them():
    assert list(test_equal.MODES) == ["ddp", "fsdp"]


def test_what_is_resumed_on_an_axis_is_compared_on_it_without_a_break_too():
    for axis, name in axes.parameters(test_resume_axes.test_a_run_goes_there_and_back):
        assert axes.cell(axis, name).startswith("E V") and axes.cell(axis, name).endswith("R"), (axis, name)
