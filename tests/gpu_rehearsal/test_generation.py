"""Generation on an emulated GPU: the tokens of the CPU, and a wait for at most one token in 16."""

import pytest
import torch

from posttrain.rl.generation import Sampling
from posttrain.rl.generation.local import LocalGenerator
from tests import tiny
from tests.gpu_rehearsal.emulated_cuda import EmulatedCuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: tests/gpu")

PROMPTS = [[50 + i for i in range(n)] for n in (9, 4, 7)]


def completions(device, tokens, waits=()):
    """Of each number of tokens, what is generated, and how often the host has waited for it."""
    made = LocalGenerator(tiny.tokenizer())
    made.sync_weights(tiny.causal_lm("qwen3", initializer_range=0.2).to(device))
    made.generate(PROMPTS[:1], 1, Sampling(2))  # tries the model
    found, counts = [], []
    for length in tokens:
        before = len(waits)
        found.append(made.generate(PROMPTS, 2, Sampling(length), seeds=range(6)))
        counts.append(len(waits) - before)
    return found, counts


def test_completions_are_those_of_the_cpu_and_few_tokens_are_waited_for():
    expected, _ = completions("cpu", (16, 64))
    with EmulatedCuda() as gpu:
        found, (short, long) = completions("cuda", (16, 64), gpu.waits)
    for one, other in zip(found, expected, strict=True):
        assert one.ids == other.ids and one.finished == other.finished
        for a, b in zip(one.logps, other.logps, strict=True):
            assert a == pytest.approx(b, abs=1e-4)
    assert long - short <= (64 - 16) / 16, "\n".join(f"{wait.kind} {wait.stack[:3]}" for wait in gpu.waits[-long:])
    assert short <= 20  # to begin and to end a rollout
