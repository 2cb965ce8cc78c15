"""Products of bfloat16 that go through float32 are those of bfloat16: on any processor, for here it is said which this
is.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from posttrain.core import Trainer, TrainingArguments
from posttrain.core.models import bf16_emulation
from posttrain.core.models.bf16_emulation import float32_products, makes_emulated_products
from tests import tiny
from tests.contract.trainers import pad

PRODUCTS = {
    "linear": (lambda a, b: F.linear(a, b[0].t()), (3, 5, 8), (2, 8, 6)),
    "linear with a bias": (lambda a, b: F.linear(a, b[:, :8], b[:, 8]), (5, 8), (6, 9)),
    "matmul": (torch.matmul, (2, 3, 5, 8), (2, 3, 8, 6)),
    "broadcast": (lambda a, b: a @ b, (2, 3, 5, 8), (8, 6)),
    "bmm": (torch.bmm, (2, 5, 8), (2, 8, 6)),
    "addmm": (lambda a, b: torch.addmm(b[0], a, b[1:]), (5, 8), (9, 6)),
    "attention": (lambda a, b: F.scaled_dot_product_attention(a, b, b, is_causal=True), (2, 3, 8, 16), (2, 3, 8, 16)),
    "masked attention": (
        lambda a, b: F.scaled_dot_product_attention(a, b, b, attn_mask=torch.ones(8, 8).tril().log().to(b.dtype)),
        (2, 3, 8, 16), (2, 3, 8, 16),
    ),
}  # fmt: skip


def gradients(product, shapes, within, autocast, dtype):
    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), float32_products(within):
        out = product(*factors)
        out.float().square().sum().backward()
    return out, *(factor.grad for factor in factors)


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bfloat16 weights"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_their_gradients_are_those_of_bfloat16(name, autocast):
    product, *shapes = PRODUCTS[name]
    dtype = torch.float32 if autocast else torch.bfloat16
    expected, found = (gradients(product, shapes, within, autocast, dtype) for within in (False, True))
    assert [t.dtype for t in found] == [t.dtype for t in expected] and found[0].dtype == torch.bfloat16
    for ours, theirs in zip(found, expected, strict=True):  # to the rounding of a last place, of the largest
        assert_close(ours.float(), theirs.float(), rtol=2e-2, atol=1e-2 * float(theirs.abs().max()))


def test_other_products_are_left_alone():
    a, b = torch.randn(5, 8), torch.randn(8, 6)
    with float32_products():
        assert torch.equal(a @ b, torch.mm(a, b)) and (a @ b).dtype == torch.float32
        assert (a.double() @ b.double()).dtype == torch.float64
        with torch.autocast("cpu", torch.float16):
            assert F.linear(a, b.t()).dtype == torch.float16
    assert torch.equal(a @ b, torch.mm(a, b))


def test_checkpointed_activations_are_computed_again_in_the_same_way():
    layer, x = nn.Linear(8, 8), torch.randn(3, 8, requires_grad=True)

    def gradient(function):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16), float32_products():
            function(x).float().square().sum().backward()
        return layer.weight.grad.clone()

    plain = gradient(lambda x: layer(layer(x)))
    assert torch.equal(gradient(lambda x: checkpoint(lambda x: layer(layer(x)), x, use_reentrant=False)), plain)


def test_backwards_that_ask_for_more_are_torchs_own():
    x = torch.ones(3, requires_grad=True)
    with float32_products():
        (2 * x).backward(torch.ones(3))
        loss = (x * x).sum()
        loss.backward(retain_graph=True, inputs=x)
        loss.backward()
        torch.autograd.backward([x.sum(), x.sum()])
    assert x.grad.tolist() == [8.0] * 3


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bfloat16 weights"])
def test_a_run_learns_alike_with_and_without_instructions(autocast, recompute, tmp_path, monkeypatch, caplog):
    losses = {}
    for emulates in (False, True):
        monkeypatch.setattr(bf16_emulation, "emulates_bfloat16", lambda device_type, e=emulates: e)
        model = tiny.causal_lm()
        args = TrainingArguments(
            str(tmp_path / str(emulates)), use_cpu=True, bf16=autocast, max_steps=6, logging_steps=1,
            learning_rate=1e-2, gradient_checkpointing=recompute, eval_strategy="steps", eval_steps=3,
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model if autocast else model.bfloat16(), args, pad, tiny.token_rows(24), tiny.token_rows(8))
        with caplog.at_level("INFO"):
            trainer.train()
        assert makes_emulated_products(model, autocast) == emulates
        losses[emulates] = [
            record[name] for record in trainer.state.log_history for name in ("loss", "eval_loss") if name in record
        ]
    assert caplog.text.count("no bfloat16 instructions") == 1
    assert losses[False][0] > losses[False][-1] + 0.3
    assert losses[True] == pytest.approx(losses[False], rel=2e-2)
