"""What each of two processes takes while it saves a checkpoint, beside what it holds anyway."""

import pytest

from posttrain.core.checkpoint import blocks
from tests.distributed import jobs

USUAL = {"fsdp": "full_shard", "save_strategy": "steps", "optim": "adamw_torch"}
CASES = {kind: USUAL | {"fsdp_config": {"state_dict_type": f"{kind}_STATE_DICT"}} for kind in ("SHARDED", "FULL")}
MATRIX = 8192 * 128 * 4  # the embedding, and the head


@pytest.fixture(scope="session")
def taken(shared):
    def make(folder):
        jobs.do(2, [[kind, "saving", {"out": str(folder / kind)} | CASES[kind]] for kind in CASES], folder)

    return jobs.once(shared, "saving", make)


def test_shards_are_written_from_where_they_are(taken):
    for one in jobs.result(taken, "SHARDED"):
        assert MATRIX <= one["share"] <= 1.5 * MATRIX
        assert one["taken"] < blocks.SMALL  # files below that size are put together in memory
        assert 0 < one["blocks"] <= 4 * blocks.BLOCK


def test_a_whole_file_is_gathered_on_the_main_process_and_a_matrix_at_a_time_on_others(taken):
    main, other = jobs.result(taken, "FULL")
    assert 2 * MATRIX <= main["taken"] <= 5 * MATRIX
    assert MATRIX <= other["taken"] <= 2.1 * MATRIX  # gloo puts the parts together in memory of its own
