"""Generation on an emulated GPU: the tokens of the CPU, and a wait for at most one token in 16."""

import pytest
import torch

from posttrain.core.data.pipeline import to_device
from posttrain.lm.attention.padding_masks import announce_masks
from posttrain.rl.generation import Sampling, local_steps
from posttrain.rl.generation.local import LocalGenerator
from posttrain.seq2seq.decoding import LeanGenerator
from tests import tiny
from tests.gpu_rehearsal.emulated_cuda import EmulatedCuda
from tests.gpu_rehearsal.recorded import Recorded
from tests.rl.generation.test_local import watch

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


def test_completions_that_end_together_are_read_together_where_each_is_taken_as_it_ends():
    counts = []
    with EmulatedCuda() as gpu:
        made = LocalGenerator(tiny.tokenizer())
        made.sync_weights(tiny.causal_lm().to("cuda"))
        made.generate(PROMPTS[:1], 1, Sampling(2))  # tries the model
        for copies in (1, 6):
            before = len(gpu.waits)
            with made.steps() as steps:
                call, taken = steps.add(PROMPTS, copies, Sampling(5), range(3 * copies)), []
                while steps:
                    taken += [call.completion(row) for _, rows in steps.step() for row in rows]
            assert len(taken) == 3 * copies and all(len(one.ids[0]) == 5 for one in taken)
            counts.append(len(gpu.waits) - before)
    assert counts[0] == counts[1], counts


@pytest.mark.parametrize("stop", [(), ("no such text",)], ids=["tokens", "stop strings"])
def test_a_look_waits_as_often_for_many_turns_of_agents_as_for_one(stop):
    """Turns that were begun apart, each a call of its own."""
    counts = []
    with EmulatedCuda() as gpu:
        made = LocalGenerator(tiny.tokenizer())
        made.sync_weights(tiny.causal_lm().to("cuda"))
        made.generate(PROMPTS[:1], 1, Sampling(2))  # tries the model
        for number in (1, 6):
            with made.steps() as steps:
                for seed in range(number):
                    steps.add(PROMPTS[:1], 1, Sampling(20, stop=stop), [seed])
                steps.step()  # reads the prompts
                before, taken = len(gpu.waits), []
                while steps:
                    taken += [call.completion(row) for call, rows in steps.step() for row in rows]
                counts.append(len(gpu.waits) - before)
            assert [len(one.ids[0]) for one in taken] == [20] * number
    assert counts[0] == counts[1] <= 3, counts  # two looks, and the log-probabilities of those that ended


def test_a_bounded_cache_is_within_its_bytes_and_writes_what_the_cpu_writes(monkeypatch):
    """Rows leave and others come, and the cache grows beyond 64 tokens."""
    prompts, sampling = [PROMPTS[i % 3] for i in range(6)], Sampling(70, eos_token_ids=tuple(range(60, 63)))
    bound = 2 * (9 + 3 * 70)

    def generated(device):
        made = LocalGenerator(tiny.tokenizer(), max_tokens=bound if device == "cuda" else None)
        made.sync_weights(tiny.causal_lm("qwen3", initializer_range=0.2).to(device))
        made.generate(PROMPTS[:1], 1, Sampling(2))  # tries the model
        return made.generate(prompts, 3, sampling, seeds=range(18))

    expected, watched = generated("cpu"), watch(monkeypatch, is_fixed=None)
    with EmulatedCuda():
        monkeypatch.setattr(local_steps, "LOOK_EVERY", 4)
        done = generated("cuda")
    assert done.ids == expected.ids and len({len(ids) for ids in done.ids}) > 3
    config = tiny.causal_lm("qwen3").config
    token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert 0.5 * bound * token < max(size for size, _ in watched) <= bound * token


@pytest.mark.parametrize(
    ("arch", "sampling"),
    [("qwen3", {}), ("qwen3", {"temperature": 0.7, "repetition_penalty": 1.5}), ("gemma2", {"temperature": 0})],
    ids=str,
)
def test_all_tokens_between_two_looks_are_the_same_operations_on_the_same_addresses(arch, sampling, monkeypatch):
    """So a CUDA graph of one token would be that of the next: no number of the host goes into it."""
    tapes, go_on = [], local_steps.LocalSteps._go_on

    def recorded(steps, calls):
        gpu.begin()
        waits = len(gpu.waits)
        go_on(steps, calls)
        tapes.append((gpu.tape, gpu.waits[waits:]))
        gpu.tape = None

    with Recorded() as gpu:
        made = LocalGenerator(tiny.tokenizer())
        made.sync_weights(tiny.causal_lm(arch, initializer_range=0.2, sliding_window=6).to("cuda"))
        made.generate(PROMPTS[:1], 1, Sampling(2))  # tries the model
        monkeypatch.setattr(local_steps.LocalSteps, "_go_on", recorded)
        monkeypatch.setattr(local_steps, "StepGraph", lambda step, decoding: step)  # whose replays are one operation
        made.generate(PROMPTS, 2, Sampling(9, **sampling), seeds=range(6))
    first, *others = tapes[1:-1]  # the first makes the table of positions; behind the last all rows leave
    assert len(others) == 5 and len(first[0]) > 100 and first[1] == []
    for number, (tape, waits) in enumerate(others, start=3):
        assert waits == []
        for place, (one, other) in enumerate(zip(first[0], tape, strict=True)):
            assert one == other, f"operation {place} of token {number}"


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
