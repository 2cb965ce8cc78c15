"""Transformers' continuous batching behind the protocol: what is greedy, what is told, and what is left alone."""

import resource

import pytest
import torch

from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.rl.generation import Sampling
from posttrain.rl.generation.continuous import ContinuousGenerator, cache_limits
from posttrain.rl.generation.local import LocalGenerator
from tests import tiny

pytest.importorskip("transformers", "5.0")
SETTINGS = {"num_blocks": 64, "max_batch_tokens": 64}
PROMPTS = [[5, 9, 14], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49], [7]]


@pytest.fixture(scope="module")
def model():
    return tiny.causal_lm(initializer_range=0.3).train()


def make(kind, model, *args):
    made = kind(tiny.tokenizer(), *args)
    made.sync_weights(model)
    return made


def test_greedy_completions_are_those_of_the_local_engine(model):
    sampling = Sampling(12, temperature=0, eos_token_ids=tuple(range(30)))
    found = make(ContinuousGenerator, model, SETTINGS).generate(PROMPTS, 2, sampling)
    expected = make(LocalGenerator, model).generate(PROMPTS, 2, sampling)
    assert found.ids == expected.ids and found.finished == expected.finished
    assert model.training and model.config._attn_implementation == "sdpa"


def peak_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_the_cache_on_the_cpu_is_as_large_as_the_completions_need_and_not_as_the_memory(model):
    assert cache_limits([[1] * 300, [1] * 10], 3, 20, {}) == {"num_blocks": (2 + 1) * 3 + 2, "max_batch_tokens": 310}
    assert cache_limits([[1]], 1, 20, {"max_memory_percent": 0.1}) == {}
    sampling = Sampling(12, temperature=0, eos_token_ids=tuple(range(30)))
    expected, before = make(LocalGenerator, model).generate(PROMPTS, 2, sampling), peak_kib()
    found = make(ContinuousGenerator, model).generate(PROMPTS, 2, sampling)
    assert found.ids == expected.ids and peak_kib() - before < 2**20  # it would take most of what is free


def test_log_probabilities_are_the_models_and_its_random_numbers_stay(model):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    done = make(ContinuousGenerator, model, SETTINGS).generate(PROMPTS, 2, Sampling(9, temperature=0.7), range(6))
    assert torch.equal(torch.get_rng_state(), before)
    assert done.is_exact and len({tuple(ids) for ids in done.ids}) == 6
    model.eval()
    for i, (ids, logps) in enumerate(zip(done.ids, done.logps, strict=True)):
        prompt = PROMPTS[i // 2]
        expected = (model(torch.tensor([prompt + ids])).logits[0] / 0.7).log_softmax(-1)
        picked = [expected[len(prompt) - 1 + t, token].item() for t, token in enumerate(ids)]
        assert logps == pytest.approx(picked, abs=1e-4)
    model.train()


def test_stop_strings_end_completions_here_too(model):
    sampling = Sampling(12, temperature=0, stop=("e", "a", "o"))
    found = make(ContinuousGenerator, model, SETTINGS).generate(PROMPTS, 1, sampling)
    expected = make(LocalGenerator, model).generate(PROMPTS, 1, sampling)
    assert found.ids == expected.ids and any(found.finished) and found.finished == expected.finished


def test_what_it_would_leave_out_is_refused(model):
    with pytest.raises(ValueError, match="repetition_penalty=1.5"):
        make(ContinuousGenerator, model).generate(PROMPTS, 1, Sampling(3, repetition_penalty=1.5))
    with pytest.raises(ValueError, match="transformers_continuous_batching_config.*num_block"):
        ContinuousGenerator(tiny.tokenizer(), {"num_block": 3})


@pytest.mark.long
@pytest.mark.parametrize("name", ["use_transformers_continuous_batching", "use_transformers_paged"])
def test_a_trainer_generates_with_it(name, tmp_path):
    args = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, max_completion_length=5,
        max_steps=2, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        num_iterations=2, transformers_continuous_batching_config=SETTINGS, **{name: True},
    )  # fmt: skip
    rows = [{"prompt": text} for text in tiny.CORPUS[:4]]

    def spread(completion_ids):
        return [sum(ids) % 11 / 11 for ids in completion_ids]

    trainer = GRPOTrainer(tiny.causal_lm(initializer_range=0.2), spread, args, rows, None, tiny.tokenizer())
    assert isinstance(trainer.generator, ContinuousGenerator)
    trainer.train()
    assert trainer.state.log_history[0]["completions/mean_length"] > 0
    assert "sampling/sampling_logp_difference/mean" not in trainer.state.log_history[0]  # they are the trainer's own
