"""Online DPO from outside: which completion is the better, and what is learned from pairs."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.core.errors import ConfigError
from posttrain.rl import OnlineDPOConfig, OnlineDPOTrainer, TPOConfig, TPOTrainer
from posttrain.rl.policy.logprobs import CompletionLogps
from posttrain.rl.rewards.scorers import JudgeReward
from tests import tiny

WORDS = " ".join(tiny.CORPUS).split()
ROWS = [{"prompt": " ".join(WORDS[i : i + 3])} for i in range(8)]


class Longest:
    """Prefers the longer completion; cannot tell between equal ones."""

    def __init__(self):
        self.asked = []

    def judge(self, prompts, completions):
        self.asked.append((prompts, completions))
        return [-1 if len(a) == len(b) else int(len(b) > len(a)) for a, b in completions]


def letters(completions):
    return [text.count("e") / 10 for text in completions]


def make(folder, options=None, **changes):
    usual = dict(
        output_dir=str(folder), per_device_train_batch_size=4, max_completion_length=8, max_steps=2, learning_rate=1e-2,
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    given = {"reward_funcs": letters, "train_dataset": ROWS, "eval_dataset": ROWS[:3]}
    given |= {"processing_class": tiny.tokenizer()} | (options or {})
    return OnlineDPOTrainer(tiny.causal_lm(initializer_range=0.2), args=OnlineDPOConfig(**(usual | changes)), **given)


def logged(run, name):
    return [record[name] for record in run.state.log_history if name in record]


def test_the_batch_size_counts_prompts_of_two_completions_each(tmp_path):
    run = make(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert len(next(iter(run.get_train_dataloader()))) == 8 and run.args.generation_batch_size == 8
    run.train()
    assert run.state.global_step == 2 and run.state.epoch == 1.0


def test_the_better_of_two_is_the_one_with_the_higher_reward_and_the_first_of_equal_ones(tmp_path):
    run = make(tmp_path)
    rewards = torch.tensor([[0.1], [0.7], [0.5], [0.5], [math.nan], [math.nan], [2.0], [1.0]])
    assert run.compute_advantages(rewards, 2, None).tolist() == [-1, 1, 1, -1, 0, 0, 1, -1]


@pytest.mark.parametrize(("loss_type", "expected"), [
    ("sigmoid", -math.log(1 / (1 + math.exp(-0.2 * (1.5 - -0.5))))), ("ipo", (2.0 - 2.5) ** 2),
])  # fmt: skip
def test_the_loss_of_a_pair_is_that_of_the_paper(loss_type, expected, tmp_path):
    """The better completion is 1.5 nats more likely than under the reference, the worse 0.5 less."""
    run = make(tmp_path, loss_type=loss_type, beta=0.2)
    policy = CompletionLogps(torch.tensor([[-1.0, -1.0], [-1.0, -0.5]]), None, None)
    inputs = {"loss_mask": torch.tensor([[1.0, 0.0], [1.0, 1.0]]), "advantages": torch.tensor([-1.0, 1.0])}
    inputs["ref_logps"] = torch.tensor([[-0.5, 9.0], [-2.0, -1.0]])
    assert run.policy_loss(policy, inputs)[:, 0].tolist() == pytest.approx([expected, expected], rel=1e-6)
    inputs["advantages"] = torch.zeros(2)
    assert run.policy_loss(policy, inputs)[:, 0].tolist() == [0.0, 0.0]


def test_a_judge_says_which_is_better(tmp_path):
    judge = Longest()
    run = make(tmp_path, options={"judge": judge, "reward_funcs": None})
    run.train()
    (prompts, pairs), *_ = judge.asked
    assert len(prompts) == len(pairs) == 4 and all(len(pair) == 2 for pair in pairs) and len({*prompts}) == 4
    assert JudgeReward(judge)(["a"] * 4, ["x", "xy", "b", "c"]) == [0.0, 1.0, None, None]
    for verdict in (0.7, 2, "first"):
        judge.judge = lambda prompts, pairs, verdict=verdict: [verdict] * len(pairs)
        with pytest.raises(ValueError, match=f"gave the verdict {verdict!r} on a pair.*0 or 1, or -1"):
            JudgeReward(judge)(["a"] * 2, ["x", "y"])
    assert run.reward_func_names == ["Longest"]


def test_what_is_rewarded_becomes_more_frequent(tmp_path):
    def low(completion_ids):
        return [sum(token < 192 for token in ids) / len(ids) for ids in completion_ids]

    run = make(tmp_path, options={"reward_funcs": low}, max_steps=40, learning_rate=2e-2, beta=0.1)
    before = run.evaluate()["eval_reward"]
    run.train()
    assert run.evaluate()["eval_reward"] > before + 0.1


def test_beta_may_be_another_in_each_epoch(tmp_path):
    run = make(tmp_path, beta=[0.5, 0.25], max_steps=6)
    run.train()
    assert logged(run, "beta") == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.25, 0.25])


def test_the_reference_may_be_another_model(tmp_path):
    run = make(tmp_path, options={"ref_model": tiny.causal_lm(seed=4, initializer_range=0.2)})
    run.train()
    assert abs(logged(run, "rewards/margins")[0]) > 1e-3
    alone = make(tmp_path)
    alone.train()
    assert abs(logged(alone, "rewards/margins")[0]) < 1e-5 and logged(alone, "loss")[0] == pytest.approx(math.log(2))


@pytest.mark.parametrize(("changes", "said"), [
    ({"num_generations": 3}, "num_generations=3 must be <= 2"), ({"beta": 0.0}, "must hold numbers above 0"),
    ({"epsilon": 0.3}, "do not|does not have"),
])  # fmt: skip
def test_arguments_that_cannot_be_are_refused(changes, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        OnlineDPOConfig(str(tmp_path), **changes)


def test_two_judgements_are_one_too_many(tmp_path):
    with pytest.raises(ValueError, match="Pass one of them"):
        make(tmp_path, options={"judge": Longest()})
    with pytest.raises(ValueError, match="Pass one of them"):
        make(tmp_path, reward_funcs=["accuracy_reward"], options={"judge": Longest(), "reward_funcs": None})


# ------------------------------------------------------------------------------------------------------------------ TPO

TRIPLES = [
    {"prompt": " ".join(WORDS[i : i + 3])}
    | {name: " " + " ".join(WORDS[i + 4 + k : i + 6 + 2 * k])
       for k, name in enumerate(("chosen", "rejected", "reference"))}
    for i in range(8)
]  # fmt: skip


def tpo(folder, rows=TRIPLES, **changes):
    usual = dict(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=2, learning_rate=0.1, optim="sgd",
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    model, args = tiny.causal_lm(initializer_range=0.2), TPOConfig(**(usual | changes))
    return TPOTrainer(model, args, train_dataset=rows, eval_dataset=rows[:4], processing_class=tiny.tokenizer())


def test_with_equal_sides_the_loss_of_tpo_is_the_likelihood_of_the_reference_completion(tmp_path):
    same = [TRIPLES[0] | {"rejected": TRIPLES[0]["chosen"]}] * 4
    metrics = tpo(tmp_path, rows=same, faulty_rows="keep", tpo_alpha=0.5).evaluate()
    assert metrics["eval_loss"] == pytest.approx(math.log(2) + 0.5 * metrics["eval_nll_loss"], rel=1e-5)
    assert metrics["eval_nll_loss"] > 1


def test_a_prompt_may_be_what_all_three_texts_begin_with(tmp_path):
    whole = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected", "reference")} for row in TRIPLES]
    given, found = (tpo(tmp_path, rows=rows).train_dataset for rows in (TRIPLES, whole))
    texts = [
        [tiny.tokenizer().decode(row["prompt_ids"] + row["reference_ids"]) for row in dataset]
        for dataset in (given, found)
    ]
    assert texts[0] == texts[1]


def test_rows_without_a_reference_completion_are_refused(tmp_path):
    pairs = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in TRIPLES]
    with pytest.raises(ValueError, match="no column 'reference'"):
        tpo(tmp_path, rows=pairs)
