"""Generation on an emulated GPU: the tokens of the CPU, and a wait for at most one token in 16."""

import pytest
import torch

from posttrain.core.data.pipeline import to_device
from posttrain.core.models.padding_masks import announce_masks
from posttrain.rl.generation import Sampling
from posttrain.rl.generation.local import LocalGenerator
from posttrain.seq2seq.decoding import LeanGenerator
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


@pytest.mark.parametrize("num_beams", [1, 3])
def test_evaluations_of_encoder_decoders_look_every_16_tokens_and_find_the_tokens_of_the_cpu(num_beams):
    ids = torch.randint(4, 384, (6, 9), generator=torch.Generator().manual_seed(1))
    options = {"max_length": 40, "num_beams": num_beams, "do_sample": False, "repetition_penalty": 9.0}
    options |= {"early_stopping": True} if num_beams > 1 else {}

    def generated(device, looks=()):
        model = tiny.seq2seq_lm(initializer_factor=6.0).eval().to(device)
        model.generation_config.eos_token_id = [1, *range(100, 110 if num_beams == 1 else 160)]
        announce_masks(model)
        lean = LeanGenerator(model)
        inputs = to_device({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, device, non_blocking=True)
        found = []
        for _ in range(2):  # the first compares itself with generate
            before = len(looks)
            found.append(lean(inputs, model.get_encoder()(**inputs), options))
        assert lean.refused is None
        return found[1].cpu(), len(looks) - before

    expected, _ = generated("cpu")
    with EmulatedCuda() as gpu:
        found, looks = generated("cuda", gpu.waits)
    assert found.tolist() == expected.tolist()
    ends = {len("".join(chr(token) for token in row).rstrip("\0\1")) for row in expected.tolist()}
    assert len(ends) > 2 and min(ends) < 16 < max(ends)  # rows end early and late
    assert looks <= 40 // 16 + 3  # looks, the longest of the beams, and the copy here
