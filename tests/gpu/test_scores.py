"""The kernel that scores a tile of logits: the losses, statistics and gradients of torch's operations.

Without a GPU, Triton's interpreter runs it: TRITON_INTERPRET=1, as `make kernels` has it.
"""

import os

import pytest
import torch

pytest.importorskip("triton")

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from posttrain.lm.loss import fused_scores
from posttrain.lm.loss.language_modeling import TOKEN_STATS, linear_cross_entropy, token_logps
from posttrain.lm.loss.lm_head import loss_in_head
from tests import tiny

RULES = {
    "plain": {},
    "softcap": {"softcap": 30.0},
    "scale": {"scale": 0.5},
    "smoothing": {"label_smoothing": 0.1},
}


@pytest.mark.parametrize("vocabulary", [300, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_the_kernel_gives_what_torchs_operations_give(rule, dtype, vocabulary, device, monkeypatch):
    generator, options = torch.Generator().manual_seed(0), RULES[rule]
    hidden = torch.randn(2, 19, 64, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(vocabulary, 64, generator=generator) / 4).to(device, dtype).requires_grad_()
    labels = torch.randint(vocabulary, (2, 19), generator=generator).to(device)
    labels[0, :5] = -100
    upstream = torch.linspace(0, 1, 19, device=device)
    runs = []
    for fuses in (False, True):
        monkeypatch.setattr(fused_scores, "can_score", lambda tile, answer=fuses: answer)
        loss, stats = linear_cross_entropy(hidden, weight, labels, return_stats=True, **options)[:2]
        found = [loss, *stats, *torch.autograd.grad(loss, (hidden, weight))]
        by_token = {name: value for name, value in options.items() if name != "label_smoothing"}
        logps, *others = token_logps(hidden, weight, labels, stats=TOKEN_STATS, temperature=0.7, **by_token)
        runs.append([*found, logps, *others, *torch.autograd.grad((logps * upstream).sum(), (hidden, weight))])
    for expected, one in zip(*(map(torch.as_tensor, run) for run in runs), strict=True):
        one, expected = one.detach().double().cpu(), expected.detach().double().cpu()
        assert one.shape == expected.shape
        # A gradient is rounded to 16 bits in the tile, which the interpreter does towards zero.
        assert (one - expected).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * expected.norm() + 1e-9


def test_a_masked_logit_adds_nothing(device):
    tile = torch.randn(4, 700, generator=torch.Generator().manual_seed(0)).to(device)
    tile[:, 100:600] = -torch.inf
    labels, scores = torch.tensor([3, 99, 600, 699], device=device), torch.empty(3, 4, device=device)
    logps = tile.log_softmax(1)
    wanted = torch.stack([-logps.gather(1, labels[:, None])[:, 0], -(logps.exp() * logps.clamp(min=-1e30)).sum(1)])
    gradient = logps.exp()
    gradient[torch.arange(4), labels] -= 1
    rule = {"softcap": None, "scale": 1.0, "temperature": 1.0, "smoothing": 0.0}
    fused_scores.score(tile, labels, scores, ("entropy", "correct"), **rule, with_gradient=True)
    torch.testing.assert_close(scores[:2], wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tile, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_a_model_on_a_gpu_is_scored_by_the_kernel(monkeypatch):
    seen, score = [], fused_scores.score

    def watched(tile, *args, **rule):
        seen.append(tuple(tile.shape))
        score(tile, *args, **rule)

    monkeypatch.setattr(fused_scores, "score", watched)
    model, ids = tiny.causal_lm().to("cuda"), torch.arange(4, 40, device="cuda").view(2, 18)
    with loss_in_head(model, ids):
        model(input_ids=ids).logits[0].backward()
    assert seen == [(34, 384)]
