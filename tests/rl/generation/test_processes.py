"""Several processes generate, each as much as it has to, with weights that are whole or in pieces."""

import pytest
import torch

from tests.distributed import jobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("generation")


@pytest.mark.rotated
@pytest.mark.long
@pytest.mark.parametrize("mode", [{}, {"fsdp": "full_shard"}], ids=["ddp", "fsdp"])
def test_two_processes_write_what_one_writes(folder, mode):
    jobs.do(1, [["one", "generate", {"out": str(folder)}]], folder)
    jobs.do(2, [["two", "generate", {"out": str(folder), **mode}]], folder)
    one, two = jobs.result(folder, "one"), jobs.result(folder, "two")
    assert two["engine"] == one["engine"] == "LocalGenerator" and not two["problems"]
    assert two["ids"] == one["ids"]
    assert two["forwards"][0] != two["forwards"][1]
    for mine, alone in zip(two["logps"], one["logps"], strict=True):
        torch.testing.assert_close(mine, alone, atol=1e-5, rtol=0)


@pytest.mark.long
def test_processes_that_split_vllm_write_together_and_keep_their_own(folder):
    jobs.do(2, [["split", "split_vllm", {"out": str(folder)}]], folder)
    found = jobs.result(folder, "split")
    assert found["tensor_parallel_size"] == 2
    for rank, (together, alone) in enumerate(found["ids"]):
        assert together == alone and len(together) == 4 - 2 * rank


@pytest.fixture(
    scope="module", params=[pytest.param({}, marks=pytest.mark.slow), {"fsdp": "full_shard"}], ids=["ddp", "fsdp"]
)
def done(folder, request):
    out = {"out": str(folder / f"together-{len(request.param)}"), **request.param}
    jobs.do(2, [["ahead", "asynchronous", out], ["uneven", "uneven_vllm", out]], folder)
    return folder


@pytest.mark.long
def test_processes_that_split_vllm_ask_together_however_often_each_asks(done):
    found = jobs.result(done, "uneven")
    assert found["steps"] == 2 and found["gap"] < 1e-4 and all(0 < reward < 1 for reward in found["rewards"])
    assert found["together"][0] == found["together"][1] and found["together"][0][0] > 10
    assert found["gathered_in_training"] == 0  # vLLM has weights of its own


def test_two_processes_sample_ahead_and_send_weights_again_together(done):
    found = jobs.result(done, "ahead")
    assert found["problems"] == [] and found["ages"] == [0, 1, 2]
    assert found["steps"] == [step for step in range(1, 7) for _ in range(8)]
    assert found["syncs"] == [6, 6]  # of steps 0 to 3, and two that were repeated


@pytest.mark.parametrize("hears", [0, 1])
def test_processes_leave_a_run_together_while_one_waits_for_its_rollout(hears, tmp_path):
    """A signal to one of them is not heard at the end of the step alone, and the run goes on to the same bits."""
    jobs.do(2, [["left", "left_in_wait", {"out": str(tmp_path), "hears": hears}]], tmp_path)
    found = jobs.result(tmp_path, "left")
    (code, step), other = found["codes"]
    assert code == 143 and other == (code, step) and 2 <= step < 6 and found["seconds"] < 30
    assert found["problems"] == [] and found["log"] == found["expected_log"]
    assert all(torch.equal(value, found["expected"][name]) for name, value in found["weights"].items())
