"""Several processes generate, each as much as it has to, with weights that are whole or in pieces."""

import pytest
import torch

from tests.distributed import jobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("generation")


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


def test_processes_that_split_vllm_write_together_and_keep_their_own(folder):
    jobs.do(2, [["split", "split_vllm", {"out": str(folder)}]], folder)
    found = jobs.result(folder, "split")
    assert found["tensor_parallel_size"] == 2
    for rank, (together, alone) in enumerate(found["ids"]):
        assert together == alone and len(together) == 4 - 2 * rank


# finding_B2, finding_B5
@pytest.mark.parametrize(
    "mode", [pytest.param({}, marks=pytest.mark.slow), {"fsdp": "full_shard"}], ids=["ddp", "fsdp"]
)
def test_processes_that_split_vllm_ask_together_however_often_each_asks(folder, mode):
    jobs.do(2, [["uneven", "uneven_vllm", {"out": str(folder), **mode}]], folder)
    found = jobs.result(folder, "uneven")
    assert "error" not in found, found["error"]
    assert found["steps"] == 2 and found["gap"] < 1e-4 and all(0 < reward < 1 for reward in found["rewards"])
    assert found["together"][0] == found["together"][1] and found["together"][0][0] > 10
    assert found["gathered_in_training"] == 0  # vLLM has weights of its own
