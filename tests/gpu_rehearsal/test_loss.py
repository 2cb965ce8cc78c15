"""The loss in the output head on an emulated GPU."""

import pytest
import torch

from posttrain.lm.loss import tiles
from posttrain.lm.loss.language_modeling import linear_cross_entropy, token_logps
from tests.gpu_rehearsal.emulated_cuda import EmulatedCuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: tests/gpu")


def inputs():
    torch.manual_seed(0)
    labels = torch.randint(0, 8192, (1, 2048))
    labels[0, ::3] = -100
    return torch.randn(1, 2048, 8), torch.randn(8192, 8), labels


@pytest.mark.parametrize("loss", [linear_cross_entropy, token_logps])
def test_a_small_vocabulary_is_scored_in_few_large_tiles(loss, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ELEMENTS_ON_DEVICES", 2**23)

    def gradients(device):
        hidden, weight, labels = (tensor.to(device) for tensor in inputs())
        hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
        out = loss(hidden, weight, labels)
        out.sum().backward()
        return out.detach().cpu(), hidden.grad.cpu(), weight.grad.cpu()

    expected = gradients("cpu")
    with EmulatedCuda() as gpu:
        found = gradients("cuda")
        scored = gpu.operations["aten::softmax"] + gpu.operations["aten::_softmax"]
    assert 1 <= scored <= (2 if loss is linear_cross_entropy else 4)  # the second computes them again in its backward
    assert gpu.largest <= 4 * 2**23  # a whole tile in float32
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
