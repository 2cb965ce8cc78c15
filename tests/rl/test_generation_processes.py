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
