"""Two processes learn from what a rollout worker gives as one does, and end with its error."""

import pytest
import torch

from tests.distributed import jobs

STOPPED = "PowerCut: "
CASES = {
    "ddp": {},
    "fsdp": {"fsdp": "full_shard"},
    "slow": {"waits": 6.0, "ddp_timeout": 3},
    "health": {"fails": "health"},
    "health-fsdp": {"fails": "health", "fsdp": "full_shard"},
    "send": {"fails": "send"},
    "send-fsdp": {"fails": "send", "fsdp": "full_shard"},
    "cut": {"cut": 2},
    "resumed": {"resume": "cut"},
    "cut-fsdp": {"cut": 2, "fsdp": "full_shard"},
    "resumed-fsdp": {"resume": "cut-fsdp", "fsdp": "full_shard"},
}


@pytest.fixture(scope="module")
def runs(shared):
    """(what one process has done, the folder of what two have)."""

    def work(folder, cases):
        for name, case in cases.items():
            found = {"out": str(folder / name)} | case
            if "resume" in case:
                found["resume"] = str(folder / case["resume"])
            yield [name, "rollout_worker", found]

    one = jobs.once(shared, "worker-1", lambda folder: jobs.do(1, [*work(folder, {"one": {}})], folder))
    two = jobs.once(shared, "worker-2", lambda folder: jobs.do(2, [*work(folder, CASES)], folder))
    return jobs.result(one, "one"), two


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "fsdp", "slow", "resumed", "resumed-fsdp"])
def test_two_processes_learn_from_a_worker_as_one_does(name, runs):
    one, two = runs[0], jobs.result(runs[1], name)
    assert two["errors"] == [None, None] and one["errors"] == [None]
    first = 2 if name.startswith("resumed") else 0
    assert two["calls"] == [[first, "start", *range(first + 1, 4), "stop"], []]
    for found, expected in ((two["weights"], one["weights"]), (two["sent"][-1], one["sent"][-1])):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6, msg=key)
    assert not one["weights"]["model.embed_tokens.weight"].equal(one["sent"][-1]["model.embed_tokens.weight"])
    for key in ("loss", "grad_norm", "reward", "staleness/max", "staleness/dropped"):
        values = [[record[key] for record in run["log"] if key in record] for run in (two, one)]
        assert values[0] and values[0] == pytest.approx(values[1], rel=1e-5, abs=1e-6), key
    assert [record["staleness/dropped"] for record in one["log"] if "loss" in record] == [0, 0, 3, 0]


@pytest.mark.long
@pytest.mark.parametrize("name", ["health", "send", "health-fsdp", "send-fsdp"])
def test_the_error_of_a_worker_ends_all_processes(name, runs):
    found = jobs.result(runs[1], name)
    why = "no sign of life for 300.0 s" if name.startswith("health") else "the worker took no weights"
    assert found["errors"] == [f"RuntimeError: {why}"] * 2 and found["calls"][0][-1] == "stop"
