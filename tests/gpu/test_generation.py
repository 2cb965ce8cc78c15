"""Generation on a CUDA device: the tokens of `generate`, the log-probabilities of the model, few waits."""

import warnings

import pytest
import torch

from posttrain.rl.generation import Sampling
from posttrain.rl.generation.local import LocalGenerator
from tests import tiny

PROMPTS = [[50 + i for i in range(n)] for n in (9, 4, 7)]


def generator(dtype=torch.float32, device="cuda"):
    model = tiny.causal_lm("qwen3", initializer_range=0.2, eos_token_id=None).to(device, dtype).eval()
    made = LocalGenerator(tiny.tokenizer())
    made.sync_weights(model)
    return model, made


def test_greedy_tokens_are_those_of_transformers(device):
    model, made = generator(device=device)
    found = made.generate(PROMPTS, 1, Sampling(24, temperature=0))
    assert not made._told  # that it falls back
    for prompt, ids in zip(PROMPTS, found.ids, strict=True):
        row = torch.tensor([prompt], device=device)
        expected = model.generate(row, max_new_tokens=24, do_sample=False, pad_token_id=0)
        assert ids == expected[0, len(prompt) :].tolist() and len(ids) == 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_log_probabilities_are_those_of_the_model(dtype, cuda):
    model, made = generator(dtype)
    found = made.generate(PROMPTS, 2, Sampling(12), seeds=range(6))
    for number, (ids, logps) in enumerate(zip(found.ids, found.logps, strict=True)):
        prompt = PROMPTS[number // 2]
        row = torch.tensor([prompt + ids], device="cuda")
        with torch.no_grad():
            logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        wanted = logits.log_softmax(-1).cpu()[torch.arange(len(ids)), torch.tensor(ids)]
        gap = (wanted - torch.tensor(logps)).abs().max()
        assert gap < (1e-3 if dtype == torch.float32 else 0.15)


@pytest.mark.gpu
def test_the_host_waits_once_in_16_tokens():
    _, made = generator()
    made.generate(PROMPTS, 2, Sampling(8), seeds=range(6))  # compiles and tries
    counts = []
    for length in (16, 64):
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                made.generate(PROMPTS, 2, Sampling(length), seeds=range(6))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchroniz" in str(warning.message) for warning in caught))
    assert counts[1] - counts[0] <= (64 - 16) / 16
