"""Drawing tokens, and generation through the model's own ``generate``."""

import pytest
import torch

from posttrain.core.errors import NonFiniteError
from posttrain.rl.generation import Sampling
from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.generation.sampling import draw, keep_probable, sample, uniforms
from posttrain.rl.generation.transformers import TransformersGenerator
from tests import tiny

PROMPTS = [[5, 9, 14], [40, 41, 42, 43, 44, 45], [7]]


def generator(arch="qwen3", **overrides):
    made = TransformersGenerator(tiny.tokenizer())
    model = tiny.causal_lm(arch, initializer_range=0.3, **overrides)
    made.sync_weights(model)
    return made, model


def test_a_number_picks_the_token_at_which_the_probabilities_pass_it():
    logits = torch.tensor([[0.5, 0.0, 0.3, 0.2]]).log().expand(6, 4)
    numbers = torch.tensor([0.0, 0.49, 0.51, 0.79, 0.81, 1 - 1e-9])
    assert draw(logits, numbers).tolist() == [0, 0, 2, 2, 3, 3]


def test_draws_follow_the_probabilities():
    logits = torch.tensor([[0.1, 0.6, 0.3]]).log().expand(20_000, 3)
    counts = torch.bincount(draw(logits, torch.rand(20_000, generator=torch.Generator().manual_seed(0))))
    torch.testing.assert_close(counts / 20_000, torch.tensor([0.1, 0.6, 0.3]), atol=0.01, rtol=0)


@pytest.mark.parametrize(("settings", "kept"), [
    ({"top_k": 2}, [0, 2]), ({"top_p": 0.5}, [0]), ({"top_p": 0.51}, [0, 2]), ({"top_p": 0.81}, [0, 2, 3]),
    ({"min_p": 0.5}, [0, 2]), ({"top_p": 1e-9}, [0]), ({"top_k": 3, "min_p": 0.5}, [0, 2]), ({}, [0, 1, 2, 3]),
], ids=str)  # fmt: skip
def test_filters_keep_the_probable(settings, kept):
    logits = torch.tensor([[0.5, 0.05, 0.3, 0.15]]).log()
    left = keep_probable(logits, Sampling(1, **settings))
    assert left.isfinite().nonzero()[:, 1].tolist() == kept


def test_the_log_probability_is_of_the_temperature_alone():
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    token, logp = sample(logits, torch.tensor([0.0]), Sampling(1, temperature=2.0, top_k=1))
    assert token.item() == 2 and logp.item() == pytest.approx((logits / 2).log_softmax(-1)[0, 2].item())


def test_repetition_penalty_makes_seen_tokens_less_likely():
    logits, seen = torch.tensor([[2.0, 1.5, -1.0]]), torch.tensor([[True, False, True]])
    token, _ = sample(logits, None, Sampling(1, temperature=0, repetition_penalty=2.0), seen)
    assert token.item() == 1


def test_a_seed_is_a_row_of_numbers_whatever_stands_beside_it():
    assert torch.equal(uniforms([3, 8], 5)[1], uniforms([8], 5)[0])
    assert not torch.equal(uniforms([3], 5), uniforms([8], 5))


@pytest.mark.parametrize("arch", ["qwen3", "llama", "gpt2"])
def test_greedy_is_what_generate_gives(arch):
    made, model = generator(arch) if arch != "gpt2" else generator("gpt2")
    done = made.generate(PROMPTS, 1, Sampling(12, temperature=0, eos_token_ids=(1,)))
    for prompt, ids in zip(PROMPTS, done.ids, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0
        )
        assert expected[0, len(prompt) :].tolist() == ids


def test_log_probabilities_are_the_models():
    made, model = generator()
    done = made.generate(PROMPTS, 2, Sampling(9, temperature=0.7, eos_token_ids=(1,)), seeds=range(6))
    assert done.is_exact
    for i, (ids, logps) in enumerate(zip(done.ids, done.logps, strict=True)):
        row = PROMPTS[i // 2] + ids
        expected = (model(torch.tensor([row])).logits[0] / 0.7).log_softmax(-1)
        picked = [expected[len(PROMPTS[i // 2]) - 1 + t, token].item() for t, token in enumerate(ids)]
        assert logps == pytest.approx(picked, abs=1e-5)


def test_a_completion_depends_on_its_seed_alone():
    made, _ = generator()
    sampling = Sampling(8, eos_token_ids=(1,))
    together = made.generate(PROMPTS, 2, sampling, seeds=[1, 2, 3, 4, 5, 6])
    alone = made.generate([PROMPTS[1]], 1, sampling, seeds=[4])
    assert alone.ids[0] == together.ids[3]
    assert together.ids[0] != together.ids[1]


def test_a_completion_ends_with_what_ended_it():
    made, _model = generator()
    free = made.generate([PROMPTS[0]], 1, Sampling(10, temperature=0)).ids[0]
    stopped = made.generate([PROMPTS[0]], 1, Sampling(10, temperature=0, eos_token_ids=(free[3],)))
    assert stopped.ids[0] == free[: free.index(free[3]) + 1] and stopped.finished == [True]
    text = tiny.tokenizer().decode(free[:2])
    by_string = made.generate([PROMPTS[0]], 1, Sampling(10, temperature=0, stop=(text,)))
    assert by_string.ids[0] == free[:2] and by_string.finished == [True]
    assert made.generate([PROMPTS[0]], 1, Sampling(10, temperature=0)).finished == [False]


@pytest.mark.parametrize("sampling", [Sampling(4), Sampling(4, temperature=0), Sampling(4, top_k=5)])
@pytest.mark.parametrize("kind", [TransformersGenerator, LocalGenerator])
def test_a_model_that_gives_nan_is_named_as_the_cause(kind, sampling):
    model = tiny.causal_lm().eval()
    engine = kind(tiny.tokenizer())
    engine.sync_weights(model)
    engine.generate([[5, 6, 7]], 2, sampling, [1, 2])  # whether it can be done is found out while all is well
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    with pytest.raises(NonFiniteError, match="The policy returned NaN instead of probabilities, first for token 0"):
        engine.generate([[5, 6, 7]], 2, sampling, [1, 2])


@pytest.mark.parametrize("kind", [TransformersGenerator, LocalGenerator])
def test_a_stop_string_longer_than_32_tokens_ends_a_completion(kind):
    model, tokenizer = tiny.causal_lm(initializer_range=0.3).eval(), tiny.tokenizer()
    engine = kind(tokenizer)
    engine.sync_weights(model)
    whole = engine.generate([[5, 6, 7]], 1, Sampling(60), [3]).ids[0]
    stop = tokenizer.decode(whole[3:48])
    done = engine.generate([[5, 6, 7]], 1, Sampling(60, stop=(stop,)), [3])
    assert done.finished == [True] and done.ids[0] == whole[: len(done.ids[0])] and len(done.ids[0]) <= 48
    assert stop in tokenizer.decode(done.ids[0])


def test_generation_leaves_the_model_as_it_was():
    made, model = generator("gpt2", attn_pdrop=0.0)
    model.train()
    model.generation_config.temperature = 0.3
    made.generate(PROMPTS, 1, Sampling(3))
    assert model.training and model.generation_config.temperature == 0.3


def test_a_generate_of_the_users_own_is_called():
    made, model = generator()
    model.generate = lambda input_ids, **kwargs: torch.cat([input_ids, torch.tensor([[8, 1, 0]] * len(input_ids))], 1)
    done = made.generate(PROMPTS, 1, Sampling(3, eos_token_ids=(1,)))
    assert done.ids == [[8, 1]] * 3 and done.logps is None and not done.is_exact


def test_beams_are_drawn_by_generate_itself():
    made = TransformersGenerator(tiny.tokenizer(), {"num_beams": 2, "length_penalty": -0.1})
    made.sync_weights(tiny.causal_lm(initializer_range=0.3))
    greedy = made.generate(PROMPTS, 1, Sampling(6, temperature=0))
    assert [len(ids) for ids in greedy.ids] == [6, 6, 6] and greedy.logps is None and not greedy.is_exact
    best = made.model.generate(
        torch.tensor([PROMPTS[0]]), num_beams=2, length_penalty=-0.1, max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    assert best[0, 3:].tolist() == greedy.ids[0]
    assert len(made.generate(PROMPTS, 3, Sampling(6, top_k=10)).ids) == 9
