"""Work on the emulated device that nothing orders is an error; what trainers do on their own streams is ordered."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState

from posttrain.core.data.accelerator import CaptureGraphs
from posttrain.core.distributed import division
from posttrain.core.distributed.world import Maximum
from posttrain.lm.attention.activation_offloading import OffloadActivations
from posttrain.rl.generation import transfer
from posttrain.rl.generation.weights import Weights
from tests import tiny
from tests.contract.trainers import TRAINERS
from tests.gpu_rehearsal import order
from tests.gpu_rehearsal.emulated_cuda import EmulatedCuda
from tests.gpu_rehearsal.order import OrderError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: tests/gpu")


@pytest.fixture
def gpu():
    torch.ones(1, requires_grad=True).sum().backward()  # autograd may have run before
    with EmulatedCuda() as device:
        yield device


def test_a_read_on_another_stream_waits_for_the_write(gpu):
    beside, x = torch.Stream("cuda"), torch.zeros(3, device="cuda")
    both = r"add at .*test_order.py:\d+ .* reads, on stream 1, what .*zeros.* writes"
    with pytest.raises(OrderError, match=both), beside:
        x + 1
    beside.wait_stream(torch.cuda.current_stream())
    with beside:
        y = x + 1
    with pytest.raises(OrderError, match="writes, on stream 0, what"):
        x.mul_(2)  # which `y` may still read
    torch.cuda.current_stream().wait_event(beside.record_event())
    x.add_(1)
    assert (x + y).sum().item() == 6


def test_the_host_reads_what_is_copied_once_it_has_waited(gpu):
    x, host = torch.ones(3, device="cuda"), torch.empty(3, pin_memory=True)
    host.copy_(x, non_blocking=True)
    for read in (lambda: host + 1, lambda: host.numpy(), lambda: host.tolist(), lambda: float(host[0])):
        with pytest.raises(OrderError, match="on the host, what aten::copy_"):
            read()
    copied = torch.cuda.current_stream().record_event()
    copied.synchronize()
    assert host.tolist() == [1, 1, 1]


def test_pinned_memory_is_not_changed_under_a_copy(gpu):
    pinned, other = torch.ones(3).pin_memory(), torch.ones(3)
    moved = [tensor.to("cuda", non_blocking=True) for tensor in (pinned, other)]
    other.zero_()  # it was copied at once
    with pytest.raises(OrderError, match="writes, on the host"):
        pinned.zero_()
    assert moved[0].sum().item() == 3  # the host has waited
    pinned.zero_()


def test_memory_of_another_stream_is_kept_for_it():
    def used_beside(keep):
        with EmulatedCuda():
            beside, x = torch.Stream("cuda"), torch.ones(3, device="cuda")
            beside.wait_stream(torch.cuda.current_stream())
            with beside:
                x + 1
            if keep:
                x.record_stream(beside)
            del x

    used_beside(keep=True)
    with pytest.raises(OrderError, match="Call record_stream"):
        used_beside(keep=False)


def test_activations_move_without_a_wait_and_one_that_is_fetched_for_nothing_lives_until_its_copy_has_ended():
    with EmulatedCuda() as gpu:
        x = torch.linspace(0, 1, 64, device="cuda").requires_grad_()
        with OffloadActivations(torch.nn.Linear(1, 1), x.device, min_bytes=0) as offload:
            unneeded, needed = x.exp(), (x * 2).exp()  # each keeps its result
        needed.sum().backward()  # the one before is fetched ahead
        del unneeded
        assert offload.moved == 2 * 64 * 4 and not gpu.waits
        torch.testing.assert_close(x.grad, 2 * needed)


def test_a_step_is_captured_after_what_it_reads_and_before_what_reads_it(gpu, monkeypatch):
    graph = SimpleNamespace(capture_begin=lambda *a, **k: None, capture_end=lambda: None, pool=lambda: 1, replay=None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    capture, x = CaptureGraphs(), torch.zeros(3, device="cuda")
    for number in range(2):
        x.add_(1)
        _, result = capture(lambda: x * 2)
        assert (result + 1).tolist() == [2 * number + 3] * 3


def test_the_maximum_over_the_processes_is_read_once_it_is_here(gpu, monkeypatch):
    """NCCL computes it on a stream of its own, and the host waits for nothing before it reads."""

    def all_reduce(tensor, op, async_op):
        own = torch.Stream("cuda")
        own.wait_stream(torch.cuda.current_stream())
        with own:
            done = tensor.add_(0) is not None and own.record_event()
        return SimpleNamespace(wait=lambda: torch.cuda.current_stream().wait_event(done))

    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cuda:nccl")
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    largest = Maximum([3, 1], torch.device("cuda", 0))
    assert not gpu.waits and largest.read() == [3, 1]


def test_weights_are_sent_over_nccl_after_the_step_that_wrote_them(gpu):
    """vLLM's sender reads them in a stream of its own, which waits for nothing."""
    model = tiny.causal_lm("qwen3").to("cuda")
    buffers, beside = [], torch.cuda.Stream()

    def send_weights():
        with torch.cuda.stream(beside):
            buffers.extend(weight.clone() for _, weight in sender._source.weights)

    sender = transfer.Nccl(0)
    sender._engine, sender._client, sender._source = (SimpleNamespace() for _ in range(3))
    sender._engine.send_weights = send_weights
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        sender.send(Weights(model), (), "")
        torch.cuda.synchronize()
    assert len(buffers) == 2 * len(Weights(model))


RUNS = {
    "activation offloading": ("sft", {"activation_offloading": True}),
    "checkpoints in the background": ("causal-lm", {"save_strategy": "steps", "save_steps": 1, "save_async": True}),
    "rollouts in the background": ("grpo-sync", {"max_staleness": 1}),
    "pinned batches": ("sft-packed", {"dataloader_pin_memory": True, "gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_ordered(run, tmp_path, gpu):
    name, options = RUNS[run]
    trainer = TRAINERS[name](tmp_path, use_cpu=False, max_steps=2, **options)
    trainer.train()
    assert run != "activation offloading" or trainer._offload.moved > 2**16


@pytest.fixture
def sharded_over_one(monkeypatch):
    """FSDP takes several processes; here it shards over this one, so that the device sees its copies."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    AcceleratorState._reset_state(reset_partial_state=True)  # arguments of an earlier test have started it
    place = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(division, "sharding_of", lambda settings, sizes, processes: settings)
    yield dict(fsdp="full_shard offload", ddp_backend="gloo", optim="adamw_torch", max_steps=2)
    torch.distributed.destroy_process_group()


def test_an_optimizer_on_the_host_steps_between_the_copies_to_it_and_from_it(tmp_path, sharded_over_one):
    """Gradients come to the host on a stream of FSDP's, and the weights that it has changed go back on another."""
    expected = TRAINERS["causal-lm"](tmp_path / "cpu", use_cpu=True, optim="adamw_torch", max_steps=2)
    expected.train()
    torch.distributed.destroy_process_group()
    with EmulatedCuda() as gpu:
        trainer = TRAINERS["causal-lm"](tmp_path / "gpu", use_cpu=False, **sharded_over_one)
        trainer.train()
        state = [value for one in trainer.optimizer.state.values() for value in one.values()]
        assert trainer.dist.shards and len(gpu.order._streams) > 3 and state
        assert {tensor.device.type for tensor in state} == {"cpu"}
        found = {name: value.full_tensor() for name, value in trainer.model.named_parameters()}
    for name, value in expected.model.named_parameters():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-4)  # Adam enlarges rounding


def test_an_optimizer_on_the_host_that_does_not_wait_for_its_gradients_is_found(
    tmp_path, monkeypatch, sharded_over_one
):
    with EmulatedCuda():
        trainer = TRAINERS["causal-lm"](tmp_path, use_cpu=False, **sharded_over_one)
        monkeypatch.setattr(order.Event, "synchronize", lambda event: None)
        with pytest.raises(OrderError, match="reads, on the host, what aten::_to_copy at .* backward writes"):
            trainer.train()
