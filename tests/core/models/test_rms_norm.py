import copy
import pickle

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm

from posttrain.core.models import rms_norm
from tests import tiny

KINDS = [LlamaRMSNorm, Gemma2RMSNorm, Olmo2RMSNorm, T5LayerNorm]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


class Squared(nn.Module):
    """A norm by another equation."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


class OddRMSNorm(Squared):
    pass


def pair(kind, dtype=torch.float32, width=32):
    """(a norm, the same as one kernel)."""
    torch.manual_seed(0)
    norm = kind(width)
    nn.init.normal_(norm.weight, 0.5)
    norm.to(dtype)
    other = copy.deepcopy(norm)
    rms_norm.use_kernels(nn.Sequential(other))
    assert isinstance(other.forward, rms_norm.OneKernel)
    return norm, other


def passed(norm, x):
    """(the output, the gradients of the input and of the weight)."""
    x = x.clone().requires_grad_()
    y = norm(x)
    given = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
    return y, *torch.autograd.grad(y, (x, norm.weight), given)


@pytest.mark.parametrize("kind", KINDS)
def test_it_equals_the_operations_of_transformers(kind):
    norm, other = pair(kind)
    for scale in (1e-3, 1.0, 1e3):
        x = scale * torch.randn(4, 7, 32)
        torch.testing.assert_close(passed(other, x), passed(norm, x), rtol=1e-5, atol=1e-6 / min(scale, 1))


@pytest.mark.parametrize("of_x", TYPES)
@pytest.mark.parametrize("of_weight", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_types_are_those_of_transformers_and_rounding_is_no_coarser(kind, of_weight, of_x):
    norm, other = pair(kind, of_weight)
    x = torch.randn(64, 32).to(of_x)
    exact = passed(copy.deepcopy(norm).double(), x.double())
    before, after = passed(norm, x), passed(other, x)
    for truth, old, new in zip(exact, before, after, strict=True):
        assert new.dtype == old.dtype
        error = [(part.double() - truth).square().mean() for part in (old, new)]
        assert error[1] <= 1.1 * error[0] + 1e-12


@pytest.mark.parametrize(
    "norm", [OddRMSNorm(8), Squared(8), Qwen3NextRMSNormGated(8), nn.RMSNorm(8), nn.LayerNorm(8, bias=False)]
)
def test_what_computes_something_else_is_left_alone(norm):
    rms_norm.use_kernels(nn.Sequential(norm))
    assert "forward" not in vars(norm)


def test_a_forward_that_was_replaced_is_left_alone():
    norm = LlamaRMSNorm(8)
    norm.forward = own = lambda x: x
    rms_norm.use_kernels(nn.Sequential(norm))
    assert norm.forward is own


def test_a_copy_reads_its_own_weights():
    _, norm = pair(LlamaRMSNorm)
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        with torch.no_grad():
            other.weight.zero_()
        assert not other(torch.randn(2, 32)).any() and norm(torch.randn(2, 32)).all()


def test_a_model_keeps_its_numbers_and_its_names():
    model, ids = tiny.causal_lm(), torch.arange(3, 15)[None]
    before, names = model(ids).logits, list(model.state_dict())
    rms_norm.use_kernels(model)
    rms_norm.use_kernels(model)  # a second time changes nothing
    norms = [module for module in model.modules() if isinstance(vars(module).get("forward"), rms_norm.OneKernel)]
    assert len(norms) == 4 * model.config.num_hidden_layers + 1
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-5, atol=1e-6)
    assert list(model.state_dict()) == names
