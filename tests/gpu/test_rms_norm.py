"""PyTorch's kernel of an RMS norm: the numbers and gradients of the operations of transformers."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from posttrain.core.models import rms_norm

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.mark.parametrize("width", [128, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm])
def test_the_kernel_gives_what_the_operations_of_transformers_give(kind, dtype, width, device):
    torch.manual_seed(0)
    norm = kind(width)
    nn.init.normal_(norm.weight, 0.5)
    norm.to(device, dtype)
    one = copy.deepcopy(norm)
    rms_norm.use_kernels(nn.Sequential(one))
    given, x = (torch.randn(4096, 16, width, device=device, dtype=dtype) for _ in range(2))
    exact = copy.deepcopy(norm).double()
    runs = []
    for layer, kind_of in ((exact, torch.float64), (norm, dtype), (one, dtype)):
        leaf = x.to(kind_of).requires_grad_()
        y = layer(leaf)
        runs.append([y, *torch.autograd.grad(y, (leaf, layer.weight), given.to(y.dtype))])
    for truth, before, after in zip(*runs, strict=True):
        assert after.dtype == before.dtype
        error = [(part.double() - truth).square().mean().sqrt() for part in (before, after)]
        assert error[1] <= 1.1 * error[0] + 1e-6


def test_it_keeps_less_for_the_gradient(device):
    norm = LlamaRMSNorm(1024).to(device, torch.bfloat16)
    x = torch.randn(4096, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
    kept = []
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        y = norm(x)
        kept.append(torch.cuda.memory_allocated() - before)
        del y
        rms_norm.use_kernels(nn.Sequential(norm))
    assert kept[1] < kept[0] / 3
