"""The emulated device has the rules of a real one."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from posttrain.rl.rewards.background import keep_device
from tests.gpu_rehearsal.emulated_cuda import CudaTensor, EmulatedCuda, PlacementError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: tests/gpu")


@pytest.fixture
def gpu():
    torch.ones(1, requires_grad=True).sum().backward()  # autograd may have run before
    with EmulatedCuda() as device:
        yield device


def kinds(gpu):
    found = [wait.kind for wait in gpu.waits]
    gpu.waits.clear()
    return found


def test_a_layer_trains_with_the_values_of_the_cpu(gpu):
    def steps(device):
        torch.manual_seed(0)
        layer = nn.Linear(4, 3)
        layer = layer.to(device)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
        x = torch.arange(8.0).view(2, 4).to(device, non_blocking=True)
        for _ in range(3):
            nn.functional.cross_entropy(layer(x), torch.tensor([0, 2]).to(device, non_blocking=True)).backward()
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return layer.weight

    found = steps("cuda")
    assert isinstance(found, CudaTensor) and isinstance(found, nn.Parameter) and found.device == torch.device("cuda:0")
    assert found.is_cuda and not found.is_cpu
    copied = [kind for kind in kinds(gpu) if kind != "copy to the device"]  # of the weights
    assert not copied
    torch.testing.assert_close(found.detach().cpu(), steps("cpu").detach())


def test_what_mixes_devices_fails(gpu):
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    for wrong in (
        lambda: here + there,
        lambda: torch.cat([here, there]),
        lambda: here[torch.tensor([0], device="cuda")],
        lambda: nn.functional.linear(there, torch.ones(2, 3)),
        lambda: torch.stack([torch.tensor(1.0), there[0]]),
        lambda: torch.rand(3, device="cuda", generator=torch.Generator()),
    ):
        with pytest.raises(PlacementError):
            wrong()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    assert (there * torch.tensor(2.0)).sum().item() == 6  # a number of the host goes along


def test_a_thread_sets_its_device_before_it_computes(gpu):
    x = torch.ones(3, device="cuda")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(x.cpu).result().tolist() == [1, 1, 1]  # a copy is made where the tensor is
        with pytest.raises(PlacementError, match="mul: thread .* has not set its device"):
            pool.submit(lambda: x * 2).result()
    with ThreadPoolExecutor(1, initializer=keep_device()) as pool:
        assert pool.submit(lambda: (x * 2).sum().item()).result() == 6


def test_each_wait_is_recorded_and_nothing_else_is(gpu):
    x = torch.arange(6, device="cuda")
    assert kinds(gpu) == []
    y = (x.float() * 2).softmax(0).masked_fill(x > 3, 0.0)[x]
    y[x > 2] = 0.0
    torch.ones(3).to("cuda", non_blocking=True)
    torch.empty(6, dtype=torch.long, pin_memory=True).copy_(x, non_blocking=True)
    assert torch.where(x > 2, x, 0).shape == (6,)
    assert kinds(gpu) == []
    for wait, kind in (
        (lambda: x.sum().item(), "read a scalar"),
        (lambda: bool((x > 2).any()), "read a scalar"),
        (lambda: x.tolist(), "copy to the host"),
        (lambda: x.cpu(), "copy to the host"),
        (lambda: torch.empty(6, dtype=torch.long).copy_(x, non_blocking=True), "copy to the host"),
        (lambda: x[x > 2], "count what is not zero"),
        (lambda: (x > 2).nonzero(), "count what is not zero"),
        (lambda: x.unique(), "count distinct values"),
        (lambda: torch.ones(2, dtype=torch.long, device="cuda").repeat_interleave(x[:2]), "sum up sizes"),
        (lambda: torch.equal(x, x), "compare whole tensors"),
        (lambda: torch.tensor([1, 2], device="cuda"), "copy to the device"),
        (lambda: torch.ones(3).to("cuda"), "copy to the device"),
        (lambda: x[torch.tensor([1, 2])], "copy to the device"),
        (lambda: torch.cuda.synchronize(), "synchronize"),
    ):
        wait()
        assert kinds(gpu) == [kind]


def test_the_place_of_a_wait_is_the_line_that_waited(gpu):
    gpu.phase = "here"
    torch.ones(2, device="cuda").sum().item()
    [wait] = gpu.waits
    assert wait.place.startswith("tests/gpu_rehearsal/test_emulated_cuda.py:") and wait.phase == "here"


def test_bytes_in_use_are_counted_by_storage(gpu):
    x = torch.zeros(1000, device="cuda")
    y = x.view(10, 100)[2:]
    assert (gpu.live, gpu.peak) == (4000, 4000)
    z = x + 1
    assert (gpu.live, gpu.peak, gpu.largest) == (8000, 8000, 4000)
    del x
    assert gpu.live == 8000
    del y
    assert (gpu.live, gpu.peak) == (4000, 8000)
    del z
    assert gpu.live == 0


def test_autocast_for_cuda_lowers_products(gpu):
    weight = torch.ones(2, 2, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert nn.functional.linear(weight, weight).dtype == torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            assert nn.functional.linear(weight, weight).dtype == torch.float32
    assert nn.functional.linear(weight, weight).dtype == torch.float32


def test_afterwards_torch_is_as_it_was():
    with EmulatedCuda():
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        kept = torch.ones(1, device="cuda")
    assert torch.cuda.is_available() == bool(torch.cuda.device_count())
    with pytest.raises(RuntimeError, match="outside EmulatedCuda"):
        kept + 1
