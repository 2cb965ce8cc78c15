"""A2PO: values of the reference before training, and the regression onto what is above them."""

from __future__ import annotations

import json
import math

import pytest
import torch

from posttrain.core.errors import ConfigError, DataError
from posttrain.rl import A2POConfig, A2POTrainer
from posttrain.rl.algorithms.a2po import FILE
from tests import tiny
from tests.contract.trainers import arguments, text_rows, weights

PROMPTS = [row["prompt"] for row in text_rows(8)]


def is_even(completion_ids, **columns):
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]


def never_of_the_first(prompts, completion_ids, **columns):
    even = is_even(completion_ids)
    return [0.0 if prompt == PROMPTS[0] else value for prompt, value in zip(prompts, even, strict=True)]


def trainer(path, reward=is_even, **changes):
    usual = {"max_completion_length": 6, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_steps": 2}
    usual |= {"num_value_samples": 4, "beta2": 0.1, "filter_all_incorrect": False}
    args = arguments(A2POConfig, path, **(usual | changes))
    model, rows = tiny.causal_lm(initializer_range=0.1), [{"prompt": prompt} for prompt in PROMPTS]
    return A2POTrainer(model, reward, args, rows, processing_class=tiny.tokenizer())


def test_values_are_estimated_once_and_kept_in_a_file(tmp_path):
    made = trainer(tmp_path)
    made.train()
    header, *lines = map(json.loads, (tmp_path / FILE).read_text().splitlines())
    assert header["num_value_samples"] == 4 and {line["prompt"] for line in lines} == set(PROMPTS)
    rewards = lines[0]["rewards"]
    expected = 0.5 * math.log(sum(math.exp(reward / 0.5) for reward in rewards) / 4)
    assert made.value(lines[0]["prompt"]) == pytest.approx(expected, abs=1e-6)
    assert {"v_star", "advantage", "implicit_reward"} <= set(made.state.log_history[0])
    (tmp_path / FILE).write_text(
        "".join(json.dumps(line) + "\n" for line in [header, *lines[:-1], lines[-1] | {"rewards": [9.0]}])
    )
    again = trainer(tmp_path)
    again.estimate_values()
    assert again.reference_rewards[json.dumps(lines[-1]["prompt"])] == [9.0]
    other = trainer(tmp_path, temperature=0.5)  # another sampling: the file does not count
    other.estimate_values()
    assert other.reference_rewards[json.dumps(lines[-1]["prompt"])] != [9.0]


def test_completions_without_a_reward_are_not_learned_from_and_tell_nothing_of_the_value(tmp_path):
    """None is no reward of 0: 0 would move the policy towards what is below the value of its prompt."""

    def only_even(completion_ids, **columns):
        return [value or None for value in is_even(completion_ids)]

    made = trainer(tmp_path / "even", only_even)
    made.estimate_values()
    assert {one for rewards in made.reference_rewards.values() for one in rewards} == {1.0}
    assert min(map(len, made.reference_rewards.values())) < 4
    unknown = trainer(tmp_path / "none", lambda completion_ids, **_: [None] * len(completion_ids))
    before = weights(unknown)
    unknown.reference_rewards = {json.dumps(prompt): [1.0] for prompt in PROMPTS}
    unknown.train()
    assert unknown.state.log_history[0]["v_star"] == 1.0
    torch.testing.assert_close(weights(unknown), before, rtol=0, atol=0)


def test_an_evaluation_before_training_estimates_too(tmp_path):
    made = trainer(tmp_path)
    made.eval_dataset = [{"prompt": "another prompt"}]
    assert made.evaluate()["eval_loss"] > 0 and json.dumps("another prompt") in made.reference_rewards


def test_a_run_goes_on_from_a_checkpoint(tmp_path):
    whole = trainer(tmp_path / "whole", max_steps=4)
    whole.train()
    trainer(tmp_path / "part", save_strategy="steps", save_steps=2).train()
    rest = trainer(tmp_path / "part", max_steps=4)
    rest.train(resume_from_checkpoint=True)
    torch.testing.assert_close(weights(rest), weights(whole), rtol=0, atol=0)


def test_prompts_that_the_reference_never_solves_are_left_out(tmp_path):
    made = trainer(tmp_path, never_of_the_first, filter_all_incorrect=True)
    made.estimate_values()
    left = [row["prompt"] for row in made.train_dataset]
    assert PROMPTS[0] not in left
    assert left == [prompt for prompt in PROMPTS if any(made.reference_rewards[json.dumps(prompt)])]
    with pytest.raises(DataError, match="All completions of the reference scored 0"):
        trainer(tmp_path / "none", lambda completions, **_: [0.0] * len(completions), filter_all_incorrect=True).train()


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(ConfigError, match="beta2 weights the log-ratio"):
        A2POConfig(str(tmp_path), beta=0.1)
    with pytest.raises(DataError, match="No value was estimated"):
        trainer(tmp_path).value("another prompt")
