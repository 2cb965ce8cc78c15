"""Activations that go to the host and back: the same gradients to the bit, and nothing moved that should stay."""

import gc

import pytest
import torch
from torch import nn

from posttrain.core.models import gradient_checkpointing
from posttrain.lm.attention.activation_offloading import OffloadActivations, offloading_problem
from posttrain.lm.attention.segments import Segments
from posttrain.lm.attention.varlen_attention import enable_segments
from posttrain.lm.loading import adapters
from posttrain.lm.loss import lm_head
from tests import tiny

CPU = torch.device("cpu")  # where tensors are copied to the host as anywhere, though it saves nothing


def gradients(model, offload=None, **inputs):
    model.zero_grad()
    if offload is None:
        loss = model(**inputs).loss
    else:
        with offload:
            loss = model(**inputs).loss
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def batch(rows=3, width=17):
    ids = torch.randint(4, 384, (rows, width), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def equal(found, expected):
    assert found.keys() == expected.keys() and found
    return [name for name, gradient in expected.items() if not torch.equal(found[name], gradient)] == []


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}], ids=str)
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("arch", ["qwen3", "llama", "mistral", "gemma", "gpt2"])
def test_gradients_are_the_same_to_the_bit(arch, lora, checkpointing):
    model = tiny.causal_lm(arch).train()
    if lora:
        from peft import LoraConfig

        targets = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
        model = adapters.add_adapter(model, LoraConfig(task_type="CAUSAL_LM", **targets)).train()
    if checkpointing:
        gradient_checkpointing.enable_gradient_checkpointing(model, checkpointing)
    expected = gradients(model, **batch())
    offload = OffloadActivations(model, CPU, min_bytes=0)
    for _ in range(2):  # it can be entered again
        assert equal(gradients(model, offload, **batch()), expected)
    # Recomputed layers keep their inputs alone: two of them, and what lies before and behind.
    assert offload.moved > 2 * 2 * 3 * 17 * 32 * 4


@pytest.mark.parametrize("attention", ["eager", "sdpa", "segments"])
def test_every_attention_gives_the_same_to_the_bit(attention):
    model = tiny.causal_lm(attn_implementation="sdpa" if attention == "segments" else attention).train()
    ids = torch.randint(4, 384, (1, 40), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids}
    if attention == "segments":
        enable_segments(model)
        inputs |= Segments.documents([12, 20, 8]).model_inputs(ids.shape)
    expected = gradients(model, **inputs)
    assert equal(gradients(model, OffloadActivations(model, CPU, min_bytes=0), **inputs), expected)


def test_autocast_and_the_loss_in_the_head_give_the_same_to_the_bit():
    model, inputs = tiny.causal_lm().train(), batch()
    labels = inputs.pop("labels")

    def step(offload=None):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16), lm_head.loss_in_head(model, labels):
            if offload is None:
                loss = model(**inputs).logits[0]
            else:
                with offload:
                    loss = model(**inputs).logits[0]
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    assert equal(step(OffloadActivations(model, CPU, min_bytes=0)), step())


def test_parameters_and_small_tensors_stay_and_what_is_saved_twice_is_moved_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    x = torch.randn(64, 32, requires_grad=True)
    offload = OffloadActivations(model, CPU)
    with offload:
        hidden = model[0](x)
        (model[1](hidden) * model[1](hidden)).sum()
    one = 64 * 32 * 4
    # x; what comes out of the first layer, which two calls save; and the two factors of the product.
    assert offload.moved == 4 * one
    offload = OffloadActivations(model, CPU, min_bytes=one + 1)
    with offload:
        model(x).square().sum()
    assert offload.moved == 0


def test_memory_that_was_given_to_another_tensor_is_not_mistaken_for_it():
    offload, losses, pointers = OffloadActivations(nn.Linear(1, 1), CPU, min_bytes=0), [], set()
    leaves = [torch.full((256,), float(i), requires_grad=True) for i in range(1, 129)]
    with offload:
        for leaf in leaves:
            temporary = leaf * 1.0
            pointers.add(temporary.data_ptr())
            losses.append((temporary * temporary).sum())  # saves the temporary alone, which is then freed
            del temporary
            gc.collect(1)  # the young objects alone: all of a long test run take a second
    assert len(pointers) < len(leaves), "the allocator reused nothing, so nothing is tested"
    torch.stack(losses).sum().backward()
    for leaf in leaves:
        assert torch.equal(leaf.grad, 2 * leaf.detach())


def test_a_tensor_that_has_changed_since_it_was_moved_is_moved_again():
    x, factor = torch.ones(256, requires_grad=True), torch.full((256,), 2.0)
    with OffloadActivations(nn.Linear(1, 1), CPU, min_bytes=0):
        loss = (x * factor).sum()
        loss = loss + (x * factor.mul_(3)).sum()
    loss.backward()
    assert torch.equal(x.grad, torch.full_like(x, 2 + 6))


@pytest.mark.parametrize(
    "view",
    [lambda x: x.t(), lambda x: x[:, 3:9], lambda x: x[::2], lambda x: x[0].expand(24, 16),
    lambda x: x.view(8, 4, 12).transpose(0, 2)],
    ids=["transposed", "columns", "every other row", "expanded", "of three dimensions"],
)  # fmt: skip
def test_views_come_back_as_they_were_laid_out(view):
    x, seen = torch.randn(24, 16, requires_grad=True), []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            ctx.save_for_backward(tensor)
            return tensor.sum()

        @staticmethod
        def backward(ctx, grad):
            seen.append(ctx.saved_tensors[0])
            return grad.expand(seen[0].shape)

    inner = view(x * 1.0)
    with OffloadActivations(nn.Linear(1, 1), CPU, min_bytes=0):
        out = Look.apply(inner)
    out.backward()
    assert torch.equal(seen[0], inner) and seen[0].stride() == inner.stride()


def test_what_a_module_that_stays_saves_is_not_moved():
    model = tiny.causal_lm().train()
    head = model.get_output_embeddings()
    everything, without = (OffloadActivations(model, CPU, stays, min_bytes=0) for stays in ([], [head]))
    expected = gradients(model, everything, **batch())
    assert equal(gradients(model, without, **batch()), expected)
    assert everything.moved - without.moved == 3 * 17 * 32 * 4  # the hidden states that the head reads
    assert not head._forward_hooks and not head._forward_pre_hooks

    def fail(*_):
        raise RuntimeError("broken")

    head.forward = fail
    with pytest.raises(RuntimeError, match="broken"), without:
        model(**batch())
    del head.forward
    assert equal(gradients(model, **batch()), expected)  # no hook was left behind


def test_it_says_where_there_is_nothing_to_gain():
    assert "on the CPU" in offloading_problem(CPU) and "shares" in offloading_problem(torch.device("mps"))
    assert offloading_problem(torch.device("cuda")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_on_a_gpu_gradients_are_the_same_and_memory_is_saved(checkpointing):
    device = torch.device("cuda")
    model = tiny.causal_lm(hidden_size=512, intermediate_size=2048, num_hidden_layers=8).to(device).train()
    if checkpointing:
        gradient_checkpointing.enable_gradient_checkpointing(model)
    inputs = {name: value.to(device) for name, value in batch(32, 512).items()}
    expected, peaks = gradients(model, **inputs), []
    for offload in (None, OffloadActivations(model, device, [model.get_output_embeddings()])):
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            assert equal(gradients(model, offload, **inputs), expected)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < peaks[0]
