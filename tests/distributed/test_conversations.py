"""Two processes learn from rewards of turns, and choose prompts by their pass rates, as one does."""

import pytest
import torch

from tests.distributed import jobs

CASES = {
    "process": {"turn_credit": "process"},
    "returns": {"turn_credit": "returns", "turn_discount": 0.9},
    "gigpo": {"turn_credit": "gigpo", "dynamic_sampling": True, "dynamic_sampling_rounds": 2},
    "fsdp": {"turn_credit": "gigpo", "fsdp": "full_shard"},
}


@pytest.fixture(scope="module")
def runs(shared):
    """The folders of what one process has done, and of what two have."""

    def work(folder, leaves_out=()):
        return [
            [name, "conversations", {"out": str(folder / name)} | {k: v for k, v in c.items() if k not in leaves_out}]
            for name, c in CASES.items()
        ]

    one = jobs.once(shared, "conversations-1", lambda folder: jobs.do(1, work(folder, ("fsdp",)), folder))
    return one, jobs.once(shared, "conversations-2", lambda folder: jobs.do(2, work(folder), folder))


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_two_processes_reward_turns_and_choose_prompts_as_one_does(name, runs):
    one, two = (jobs.result(folder, name) for folder in runs)
    assert two["weights"].keys() == one["weights"].keys()
    for key, value in one["weights"].items():
        torch.testing.assert_close(two["weights"][key], value, rtol=0, atol=1e-6, msg=key)
    torch.testing.assert_close(two["rates"], one["rates"], equal_nan=True)
    known = one["rates"][~one["rates"].isnan()]
    assert 0 < known.mean() < 1 and len(known) > 4, "the pass rates tell prompts apart"
    for key in ("loss", "reward", "curriculum/known", "tools/call_frequency"):
        values = [[record[key] for record in run["log"] if key in record] for run in (two, one)]
        assert values[0] and values[0] == pytest.approx(values[1], rel=1e-5, abs=1e-6), key
