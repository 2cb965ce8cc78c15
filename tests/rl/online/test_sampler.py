"""A sampler without a trainer: what it asks of the engine, and when it sends the weights."""

from types import SimpleNamespace

import pytest
from torch import nn

from posttrain.core.logging.metrics import Clock, Metrics
from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.rl.agents.environments import Environments
from posttrain.rl.generation import Completions, Sampling
from posttrain.rl.online.sampler import Sampler
from posttrain.rl.samples.prompts import PromptCodec
from posttrain.rl.samples.samples import Sample
from tests import tiny

ALONE = SimpleNamespace(cp_size=1, gather_object=lambda value: [value])


class Engine:
    """Repeats the first token of the prompt."""

    def __init__(self):
        self.asked, self.synced, self.fails = [], 0, 0

    def sync_weights(self, model):
        self.synced += 1

    def generate(self, prompts, n, sampling, seeds):
        self.asked.append((prompts, n, seeds))
        if self.fails:
            self.fails -= 1
            raise ConnectionError("it is gone")
        ids = [[prompt[0]] * 2 for prompt in prompts for _ in range(n)]
        return Completions(ids, [[-1.0, -1.0]] * len(ids), [True] * len(ids), is_exact=True)


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def sampler(engine):
    return Sampler(engine, PromptCodec(tiny.tokenizer()), Environments(None, None, None), None, ALONE, context=6)


def test_adjacent_completions_of_a_prompt_are_asked_for_together(sampler, engine):
    prompts = [[5], [5], [6], [6], [7]]
    samples = [Sample({}, "", ids, seed=seed) for seed, ids in enumerate(prompts)]
    done = sampler.converse(samples, Sampling(2), Metrics())
    assert sorted(engine.asked) == [([[5], [6]], 2, [0, 1, 2, 3]), ([[7]], 1, [4])]
    assert [sample.ids for sample in done] == [[ids[0]] * 2 for ids in prompts]
    assert all(sample.is_exact and sample.finished for sample in done) and samples[0].ids == []


def test_log_probabilities_at_another_temperature_are_not_exact(tmp_path, monkeypatch):
    args = GRPOConfig(output_dir=str(tmp_path), num_generations=2, per_device_train_batch_size=2, use_cpu=True)
    made = dict(args=args, train_dataset=[{"prompt": "the cat"}], processing_class=tiny.tokenizer())
    trainer = GRPOTrainer(tiny.causal_lm(), lambda completions: [0.0] * len(completions), **made)
    (done,) = trainer.rollout_maker.sample(trainer.new_samples([{"prompt": "the cat"}]))
    assert done.is_exact and done.logps
    monkeypatch.setattr(GRPOTrainer, "logps_temperature", 0.5)
    (done,) = trainer.rollout_maker.sample(trainer.new_samples([{"prompt": "the cat"}]))
    assert not done.is_exact and done.logps


def test_the_weights_of_a_step_are_sent_once(sampler, engine):
    for step in (0, 0, 1):
        sampler.sync_weights(nn.Linear(1, 1), step, Clock())
    assert engine.synced == 2 and sampler.version == 1
    sampler.synced_at = None  # they may have changed since
    sampler.sync_weights(nn.Linear(1, 1), 1, Clock())
    assert engine.synced == 3


def test_an_engine_with_its_own_weights_that_was_lost_is_sent_them_again(sampler, engine):
    engine.fails, synced, sampler.synced_at = 1, [], 7

    def sample():
        return sampler.generate_turn([Sample({}, "", [5])], Sampling(2))

    (done,) = sampler.with_attempts(sample, lambda: synced.append(sampler.synced_at))
    assert done.ids == [5, 5] and synced == [None]


def test_an_engine_that_does_not_come_back_ends_the_run(sampler, engine):
    engine.fails, synced = 10, []
    with pytest.raises(ConnectionError, match="it is gone"):
        sampler.with_attempts(
            lambda: sampler.generate_turn([Sample({}, "", [5])], Sampling(2)), lambda: synced.append(1)
        )
    assert engine.fails == 7 and len(synced) == 2  # three attempts
