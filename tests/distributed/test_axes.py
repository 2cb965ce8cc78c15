"""The table of trainers and axes in docs/compared.md says what is tested, and nothing else."""

from tests.contract.trainers import EXACT
from tests.distributed import axes, test_equal


def test_the_table_of_the_documentation_is_what_is_tested():
    assert axes.written()[1] == axes.table(), "run: python -m tests.distributed.axes --write"


def test_a_trainer_is_in_the_table_once_and_with_the_letters_of_its_tests():
    table = axes.table()
    assert all(table.count(f"`{name}`") == 1 for name in EXACT)
    assert axes.cell("dp_replicate", "grpo") == "E V G (R)" and axes.cell("dp_shard", "kto") == "E V"
    assert axes.cell("tp", "kto") == "(E V)" and axes.cell("ep", "sft") == "E V R"
    assert axes.cell("cp", "classifier") == "refused" and axes.cell("ep", "kto-images") == "–"


def test_both_columns_of_dealt_rows_are_modes_of_the_test_behind_them():
    assert list(test_equal.MODES) == ["ddp", "fsdp"]


def test_every_way_back_to_one_process_is_a_test():
    ways = [way for test in axes.RESUMED for way in axes.parameters(test)]
    assert set(axes.WAYS) < set(ways)
    for axis, name in [axes.WAYS.get(way, way) for way in ways if way in axes.WAYS or isinstance(way, tuple)]:
        assert axes.cell(axis, name).strip("(").startswith("E V") and "R" in axes.cell(axis, name)


def test_the_seven_kinds_of_trainers_are_resumed_on_every_axis():
    names = ["causal-lm", "sft", "sft-packed", "sft-lora", "dpo", "reward", "grpo"]
    assert all(axes.cell(axis, name).rstrip(")").endswith("R") for axis in axes.EQUAL for name in names)
