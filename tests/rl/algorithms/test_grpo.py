"""Online training from outside: what is sampled, what is learned from, and what is told."""

import json
import logging
import math
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from posttrain.core import TrainerCallback
from posttrain.core.errors import ConfigError, DataError
from posttrain.lm.generate import trajectories
from posttrain.rl import (
    GKDTrainer,
    GRPOConfig,
    GRPOTrainer,
    OnlineDPOTrainer,
    ReinforcePlusPlusConfig,
    ReinforcePlusPlusTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from posttrain.rl.generation import Completions
from posttrain.rl.online.reporting import learning_problem, pass_at_k, table
from posttrain.rl.rewards.scoring import RewardError
from posttrain.rl.samples.prompts import GroupedStream, GroupSampler, Layout
from tests import tiny
from tests.contract.trainers import arguments
from tests.core.hub.test_hub import TOKEN, hub  # noqa: F401

WORDS = " ".join(tiny.CORPUS).split()
ROWS = [{"prompt": " ".join(WORDS[i : i + 3]), "answer": WORDS[i]} for i in range(8)]


def config(kind=GRPOConfig, **changes):
    usual = dict(
        output_dir="unused", per_device_train_batch_size=4, num_generations=4, max_completion_length=5, max_steps=2,
        learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    return kind(**(usual | changes))


def spread(completion_ids):
    return [sum(ids) % 11 / 11 for ids in completion_ids]


def trainer(tmp_path, kind=GRPOTrainer, reward=spread, rows=ROWS, model=None, eval_rows=None, options=None, **changes):
    args = config(kind.config_class, output_dir=str(tmp_path), **changes)
    model = model or tiny.causal_lm(initializer_range=0.2)
    with_tools = {"tools", "environment_factory"} & {*(options or {})}
    tokenizer = tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS if with_tools else tiny.CHATML)
    return kind(model, reward, args, rows, eval_rows, **({"processing_class": tokenizer} | (options or {})))


def logged(run, name):
    return [record[name] for record in run.state.log_history if name in record]


class Scripted:
    """An engine that writes what it is told, and counts."""

    def __init__(self, *texts, finished=True):
        self.texts, self.finished, self.calls, self.synced = texts, finished, [], 0

    def sync_weights(self, model):
        self.synced += 1

    def generate(self, prompts, n, sampling, seeds):
        self.calls.append((len(prompts), n))
        ids = [tiny.tokenizer()(text)["input_ids"] for _ in prompts for text in self.texts[:n]]
        return Completions(ids, None, [self.finished] * len(ids))


# ------------------------------------------------------------------------------------------------------- prompts


def test_the_loader_gives_the_prompts_of_several_steps_at_once(tmp_path):
    run = trainer(
        tmp_path, rows=ROWS * 2, per_device_train_batch_size=4, steps_per_generation=8, gradient_accumulation_steps=1
    )
    batch = next(iter(run.get_train_dataloader()))
    assert len(batch) == 32
    prompts = [row["prompt"] for row in batch]
    assert all(prompts[i] == prompts[i - i % 4] for i in range(32)) and len(set(prompts)) > 4


def test_a_prompt_is_tokenised_once_for_all_its_completions(tmp_path):
    run = trainer(tmp_path)
    read, encode = [], run.codec.encode
    run.codec.encode = lambda prompt, tools=None: read.append(prompt) or encode(prompt, tools)
    samples = run.new_samples([row for row in ROWS[:3] for _ in range(4)])
    assert read == [row["prompt"] for row in ROWS[:3]]
    assert [sample.prompt_ids for sample in samples] == [encode(row["prompt"]) for row in ROWS[:3] for _ in range(4)]


def test_one_generation_serves_all_steps_made_of_it(tmp_path):
    engine = Scripted("a", "b", "c", "d")
    run = trainer(tmp_path, rows=ROWS * 2, steps_per_generation=8, max_steps=16, options={"generator": engine})
    run.train()
    assert engine.calls == [(8, 4)] * 2 and engine.synced == 2


def test_a_rollout_is_gone_through_several_times(tmp_path):
    engine = Scripted("a", "b", "c", "d")
    run = trainer(tmp_path, steps_per_generation=2, num_iterations=3, max_steps=12, options={"generator": engine})
    run.train()
    assert len(engine.calls) == 2


def test_an_epoch_has_all_its_rollouts(tmp_path):
    run = trainer(tmp_path, max_steps=-1, num_train_epochs=2, steps_per_generation=2, num_iterations=2)
    run.train()
    assert run.state.global_step == 2 * (8 // 2) * 2 * 2 and run.state.epoch == 2


def test_prompts_are_dealt_so_that_an_update_is_the_same_on_any_number_of_processes():
    alone = Layout(group_size=2, per_process=8, chunk=4)
    pair = Layout(group_size=2, per_process=4, chunk=2, world_size=2)
    assert alone.numbers(0).tolist() == list(range(8)) and alone.prompts == pair.prompts == 4
    assert [pair.numbers(rank).tolist() for rank in (0, 1)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert GroupSampler(5, pair, seed=0, shuffle=False).order().tolist() == [0, 0, 2, 2, 1, 1, 3, 3]
    assert list(GroupedStream(range(5), pair)) == [0, 0, 2, 2, 1, 1, 3, 3]


def test_a_stream_of_prompts_is_trained_on(tmp_path):
    from datasets import Dataset

    run = trainer(tmp_path, rows=Dataset.from_list(ROWS).to_iterable_dataset(), max_steps=3)
    run.train()
    assert run.state.global_step == 3 and len(logged(run, "reward")) == 3


@pytest.mark.parametrize(("rows", "says"), [
    ([{"question": "a"}] * 2, "no column 'prompt'.*question"), ([], "no rows"),
])  # fmt: skip
def test_rows_that_cannot_be_trained_on_are_refused_at_once(tmp_path, rows, says):
    with pytest.raises(DataError, match=f"(?s){says}"):
        trainer(tmp_path, rows=rows, gradient_accumulation_steps=2)


def test_too_few_prompts_for_a_rollout_are_evaluated_and_not_trained_on(tmp_path):
    run = trainer(tmp_path, rows=ROWS[:1], eval_rows=ROWS[:1], gradient_accumulation_steps=2)
    assert "eval_reward" in run.evaluate()
    with pytest.raises(DataError, match="has 1 prompts and one rollout needs 2"):
        run.train()


def test_images_need_a_processor(tmp_path):
    with pytest.raises(TypeError, match="The rows have images, which a .* cannot read. Pass the model's processor"):
        trainer(tmp_path, rows=[{"prompt": "a", "image": 1}] * 4, gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "prompt is empty"),
        ("a \ud83d b", "half of a surrogate pair"),
        ([{"role": "user", "content": "a \ud83d b"}], "half of a surrogate pair"),
    ],
)
@pytest.mark.parametrize("context", [512, None])
def test_a_prompt_without_tokens_is_named_with_its_row_before_training(context, prompt, says, tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.rl.online.trainer.context_length", lambda *_: context)
    rows = [{"prompt": "a", "answer": "42"} for _ in range(8)]
    for number in (3, 5):
        rows[number]["prompt"] = prompt
    if not isinstance(prompt, str):
        rows = [row | {"prompt": prompt if number in (3, 5) else [{"role": "user", "content": "a"}]}
                for number, row in enumerate(rows)]  # fmt: skip
    with pytest.raises(DataError, match=f"{says}.*rows 3, 5"):
        trainer(tmp_path, rows=rows)


def test_conversations_are_continued_by_the_assistant(tmp_path):
    seen = {}

    def judge(prompts, completions):
        seen.update(prompts=prompts, completions=completions)
        return [float(i) for i in range(len(completions))]

    rows = [{"prompt": [{"role": "user", "content": "hi"}]}] * 4
    run = trainer(tmp_path, reward=judge, rows=rows, max_steps=1, options={"generator": Scripted("a", "b", "c", "d")})
    run.train()
    assert seen["prompts"] == [rows[0]["prompt"]] * 4
    assert seen["completions"] == [[{"role": "assistant", "content": text}] for text in "abcd"]


# ------------------------------------------------------------------------------------------------------ learning


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer, ReinforcePlusPlusTrainer])
def test_what_is_rewarded_becomes_likelier(kind, tmp_path):
    engine = Scripted(" clips", " Weng", " money", " April")

    def wants_clips(completions):
        return [float("clips" in text) for text in completions]

    run = trainer(tmp_path, kind, wants_clips, max_steps=20, options={"generator": engine}, beta=0.0)
    tokenizer, prompt = tiny.tokenizer(), tiny.tokenizer()(ROWS[0]["prompt"])["input_ids"]

    def likelihood():
        word = tokenizer(" clips")["input_ids"]
        logps = run.model(torch.tensor([prompt + word])).logits.log_softmax(-1)[0]
        return sum(logps[len(prompt) - 1 + i, token].item() for i, token in enumerate(word))

    before = likelihood()
    run.train()
    assert likelihood() > before + 1


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_every_loss_trains(loss_type, level, tmp_path):
    changes = dict(loss_type=loss_type, importance_sampling_level=level, beta=0.1, epsilon_high=0.3, num_iterations=2)
    run = trainer(tmp_path, **changes, off_policy_mask_threshold=0.5, top_entropy_quantile=0.5, max_steps=4)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.train()
    assert all(math.isfinite(norm) and norm > 0 for norm in logged(run, "grad_norm"))
    assert any(not torch.equal(before[name], value) for name, value in run.model.state_dict().items())


@pytest.mark.parametrize("hook", ["get_off_policy_mask", "get_high_entropy_mask"])
def test_masks_of_a_subclass_decide_what_is_trained_on(hook, tmp_path):
    class NothingTrains(GRPOTrainer):
        pass

    def nothing(*args):
        mask = next(value for value in reversed(args) if isinstance(value, torch.Tensor))
        return torch.zeros_like(mask[:, :1] if hook == "get_off_policy_mask" else mask)

    setattr(
        NothingTrains, hook, staticmethod(nothing) if hook == "get_off_policy_mask" else lambda self, *a: nothing(*a)
    )
    changes = dict(off_policy_mask_threshold=0.5, top_entropy_quantile=0.5, max_steps=2)
    run = trainer(tmp_path, kind=NothingTrains, **changes)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.train()
    assert logged(run, "grad_norm") == [0, 0]
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())


def test_equal_rewards_teach_nothing_and_that_is_said(tmp_path, caplog):
    run = trainer(tmp_path, reward=lambda completions: [1.0] * len(completions))
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    with caplog.at_level(logging.WARNING, "posttrain"):
        run.train()
    assert logged(run, "frac_reward_zero_std") == [1, 1] and logged(run, "grad_norm") == [0, 0]
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())
    assert any("all rewards were equal (mean reward 1)" in record.message for record in caplog.records)


def test_truncated_completions_can_be_left_out_and_then_nothing_moves(tmp_path):
    engine = Scripted("a b", "b", "c", "d", finished=False)
    run = trainer(tmp_path, options={"generator": engine}, mask_truncated_completions=True, beta=0.1)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    result = run.train()
    assert result.training_loss == 0 and logged(run, "completions/clipped_ratio") == [1, 1]
    assert logged(run, "loss") == [0, 0]
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())
    assert all(math.isfinite(v) for record in run.state.log_history for v in record.values() if isinstance(v, float))


def test_dynamic_sampling_fills_a_rollout_with_groups_that_teach(tmp_path):
    # of every two prompts one group has equal rewards
    def judge(prompts, completion_ids):
        good = {row["prompt"] for row in ROWS[::2]}
        return [float(i % 2) if prompt in good else 0.0 for i, prompt in enumerate(prompts)]

    changes = dict(gradient_accumulation_steps=2, max_steps=2, shuffle_dataset=False)
    plain = trainer(tmp_path / "plain", reward=judge, **changes)
    plain.train()
    assert logged(plain, "frac_reward_zero_std") == [0.5, 0.5]
    dynamic = trainer(tmp_path / "dynamic", reward=judge, dynamic_sampling=True, **changes)
    dynamic.train()
    assert logged(dynamic, "frac_reward_zero_std") == [0, 0]


def test_the_reference_is_the_weights_that_were_passed(tmp_path):
    model = tiny.causal_lm(initializer_range=0.2)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)  # what no loading by name would give
    run = trainer(tmp_path, model=model, beta=0.1, max_steps=3)
    run.train()
    kl = logged(run, "kl")
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 0


def test_log_probabilities_of_the_engine_are_those_that_a_pass_would_give(tmp_path):
    kept = trainer(tmp_path / "kept", num_iterations=2, max_steps=4)

    class Silent(type(kept.generator)):
        def generate(self, *args, **kwargs):
            done = super().generate(*args, **kwargs)
            return Completions(done.ids, None, done.finished)

    computed = trainer(
        tmp_path / "computed", num_iterations=2, max_steps=4, options={"generator": Silent(tiny.tokenizer())}
    )
    for run in (kept, computed):
        run.train()
    assert logged(kept, "loss") == pytest.approx(logged(computed, "loss"), abs=1e-5)
    assert logged(kept, "grad_norm") == pytest.approx(logged(computed, "grad_norm"), rel=1e-4)


def test_an_engine_of_other_weights_is_corrected_and_its_gap_is_told(tmp_path, caplog):
    class Stale(Scripted):
        def generate(self, *args):
            done = super().generate(*args)
            return Completions(done.ids, [[-1.0] * len(ids) for ids in done.ids], done.finished)

    engine = Stale("a", "b", "c", "d")
    changes = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.0}
    run = trainer(tmp_path, options={"generator": engine}, max_steps=1, **changes)
    with caplog.at_level(logging.WARNING, "posttrain"):
        run.train()
    assert logged(run, "sampling/sampling_logp_difference/mean")[0] > 1
    assert 0 < logged(run, "sampling/importance_sampling_ratio/mean")[0] < 1
    assert any("its weights may be stale" in record.message for record in caplog.records)


def test_sharing_prompts_changes_no_number(tmp_path):
    runs = [trainer(tmp_path / str(share), share_prompts=share, max_steps=4, beta=0.1) for share in (True, False)]
    for run in runs:
        run.train()
    assert logged(runs[0], "grad_norm") == pytest.approx(logged(runs[1], "grad_norm"), rel=1e-4)
    assert [
        b["input_ids"].shape[0]
        for run in runs
        for b in run.rollout_maker.parts_of(run.make_rollout(iter(run.get_train_dataloader())))
    ] == [1, 4]


def test_the_entropy_bonus_raises_the_entropy(tmp_path):
    def final(**changes):
        run = trainer(
            tmp_path / str(len(changes)), reward=lambda completions: [0.0] * len(completions), max_steps=15, **changes
        )
        run.train()
        return run

    plain, with_bonus = final(), final(entropy_coef=1.0)
    assert logged(with_bonus, "entropy")[-1] > logged(plain, "entropy")[-1] + 0.01
    assert logged(with_bonus, "loss")[0] == pytest.approx(-logged(with_bonus, "entropy")[0], rel=1e-4)


def test_the_entropy_coefficient_follows_the_entropy(tmp_path):
    changes = dict(use_adaptive_entropy=True, entropy_coef=0.1, entropy_coef_delta=0.01, max_steps=3)
    falls = trainer(tmp_path / "falls", entropy_target=0.0, **changes)
    grows = trainer(tmp_path / "grows", entropy_target=100.0, **changes)
    for run in (falls, grows):
        run.train()
    assert logged(falls, "entropy_coef") == pytest.approx([0.09, 0.08, 0.07])
    assert logged(grows, "entropy_coef") == pytest.approx([0.11, 0.12, 0.13])


def test_the_same_seed_gives_the_same_completions(tmp_path):
    seen = []

    def judge(completion_ids):
        seen.append(completion_ids)
        return spread(completion_ids)

    for number, seed in enumerate((1, 1, 2)):
        trainer(tmp_path / str(number), reward=judge, seed=seed, max_steps=2).train()
    assert seen[0:2] == seen[2:4] != seen[4:6] and seen[0] != seen[1]


# ------------------------------------------------------------------------------------------------- rewards and tools


def test_a_failing_reward_function_is_named(tmp_path):
    def judge(completions):
        raise KeyError("answer")

    with pytest.raises(RewardError, match="'judge' failed"):
        trainer(tmp_path, reward=judge).train()


def test_weights_and_several_functions(tmp_path):
    def ones(completions):
        return [1.0] * len(completions)

    def answers(answer, completions):
        return [None if word == "Natalia" else 3.0 for word in answer]

    run = trainer(tmp_path, reward=[ones, answers], reward_weights=[1.0, 2.0], shuffle_dataset=False, max_steps=2)
    run.train()
    assert logged(run, "rewards/ones/mean") == [1, 1]
    assert logged(run, "reward") == [1, 7] and logged(run, "rewards/answers/mean") == [3]


def test_weights_and_coefficients_are_attributes_of_the_trainer(tmp_path):
    run = trainer(tmp_path, reward=[spread, spread], reward_weights=[0.7, 0.3], entropy_coef=0.25)
    assert run.reward_weights.tolist() == pytest.approx([0.7, 0.3]) and run.entropy_coef == 0.25
    assert trainer(tmp_path).entropy_coef == 0


def test_weights_and_bounds_may_be_set_in_a_run(tmp_path):
    run = trainer(tmp_path, reward=[spread, spread], max_steps=2, top_entropy_quantile=0.5)

    class Changes(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            run.reward_weights, run.epsilon_high, run.top_entropy_quantile = [2.0, 0.0], 0.4, 1.0

    run.add_callback(Changes())
    run.train()
    (first, second), means = logged(run, "reward"), logged(run, "rewards/spread_0/mean")
    assert (first, second) == pytest.approx((2 * means[0], 2 * means[1]))
    assert run.reward_weights.tolist() == [2, 0] and run.args.epsilon_high == 0.4 == run.epsilon_high
    assert run.args.top_entropy_quantile == 1.0
    with pytest.raises(
        ValueError, match=r"reward_weights=\[1.0\]: give a number for each reward function \(spread_0, sp"
    ):
        run.reward_weights = [1.0]


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"])
def test_ratios_of_sequences_in_a_sum_over_tokens_are_spoken_of(loss_type, tmp_path, caplog):
    trainer(tmp_path, loss_type=loss_type, importance_sampling_level="sequence")
    assert ("weights each sequence by its completion length" in caplog.text) == (loss_type != "grpo")
    page = (Path(__file__).parents[3] / "docs" / "online-rl.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"this is\s+GSPO\. (.*?) would then weight", page, re.DOTALL)
    assert (f"`{loss_type}`" in said) == (loss_type != "grpo")  # the page and the warning agree


def test_rollouts_without_any_reward_leave_the_weights_alone(tmp_path, caplog):
    run = trainer(tmp_path, reward=lambda completion_ids: [None] * len(completion_ids), optim="adamw_torch")
    before = [parameter.clone() for parameter in run.model.parameters()]
    run.train()
    assert run.state.global_step > 1 and "All reward functions returned None" in caplog.text
    assert all(map(torch.equal, before, run.model.parameters()))


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_without_any_dataset_it_is_said_what_is_needed(kind, tmp_path):
    with pytest.raises(ValueError, match="`train_dataset` is required"):
        trainer(tmp_path, kind, rows=None)


def test_a_column_that_a_reward_function_lacks_is_told_before_the_run_of_a_trainer_that_adds_none(tmp_path):
    def reward(completions, solution):
        return [0.0] * len(completions)

    class Adds(GRPOTrainer):
        pass

    rows = Dataset.from_list([{"prompt": "the cat", "answer": "sat"}] * 4)
    with pytest.raises(DataError, match="the parameter 'solution', which is no column of the dataset.*rename_columns"):
        trainer(tmp_path, reward=reward, rows=rows)
    trainer(tmp_path, Adds, reward=reward, rows=rows)
    trainer(tmp_path, reward=reward, rows=rows.rename_column("answer", "solution"))


def test_no_source_of_rewards_is_refused(tmp_path):
    with pytest.raises(ValueError, match="No reward source"):
        trainer(tmp_path, reward=None)


@pytest.mark.parametrize("kind", [list, Dataset.from_list])
@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_that_leaves_no_room_is_told_or_dropped_before_the_first_step(kind, chat, tmp_path, caplog):
    texts = [row["prompt"] for row in ROWS] + ["ab " * 300, "the " * 140]  # the second has fewer tokens than bytes
    rows = kind([{"prompt": [{"role": "user", "content": text}] if chat else text} for text in texts])
    with pytest.raises(
        DataError, match=r"train_dataset: 1 of 10 prompts leave no room .*\(rows 8\).*long_prompts=drop"
    ):
        trainer(tmp_path, rows=rows)
    kept = trainer(tmp_path, rows=rows, eval_rows={"dev": rows}, long_prompts="drop")
    assert len(kept.train_dataset) == len(kept.eval_dataset["dev"]) == 9
    assert "train_dataset: 1 of 10 prompts" in caplog.text and "dev: 1 of 10 prompts" in caplog.text
    with pytest.raises(DataError, match="has 9 prompts and one rollout needs 10"):
        trainer(tmp_path, rows=rows, long_prompts="drop", per_device_train_batch_size=40).train()


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer, ReinforcePlusPlusTrainer, OnlineDPOTrainer, GKDTrainer])
def test_a_model_with_an_encoder_is_refused_when_the_trainer_is_made(kind, tmp_path):
    args = arguments(kind.config_class, tmp_path, per_device_train_batch_size=2, num_generations=2)
    options = {"teacher_model": tiny.causal_lm()} if kind is GKDTrainer else {"reward_funcs": spread}
    with pytest.raises(TypeError, match="model is a T5For.*whose encoder reads the prompt; online training requires"):
        rows = [row | {"completion": row["answer"]} for row in ROWS]
        kind(tiny.seq2seq_lm(), args=args, train_dataset=rows, processing_class=tiny.tokenizer(), **options)


def test_tools_are_called_in_training(tmp_path):
    def double(x: int):
        """Double a number.

        Args:
            x: The number.
        """
        return 2 * x

    class Calls(Scripted):
        def generate(self, prompts, n, sampling, seeds):
            self.calls.append((len(prompts), n))
            texts = (
                ['<tool_call>{"name": "double", "arguments": {"x": 4}}</tool_call><|im_end|>']
                if len(self.calls) == 1
                else ["8<|im_end|>"]
            )
            ids = [tiny.tokenizer()(texts[0])["input_ids"]] * len(prompts) * n
            return Completions(ids, None, [True] * len(ids))

    engine, seen = Calls(), {}

    def judge(completions):
        seen["last"] = [completion[-1]["content"] for completion in completions]
        seen["calls"] = [completion[0]["tool_calls"] for completion in completions]
        return [float(i) for i in range(len(completions))]

    rows = [{"prompt": [{"role": "user", "content": "double 4"}]}] * 4
    options = {"generator": engine, "tools": [double]}
    run = trainer(tmp_path, reward=judge, rows=rows, max_steps=1, max_completion_length=200, options=options)
    run.train()
    assert seen["last"] == ["8"] * 4 and engine.calls == [(1, 4), (1, 4)]
    call = {"type": "function", "function": {"name": "double", "arguments": {"x": 4}}}
    assert seen["calls"] == [[call]] * 4
    assert tiny.tokenizer().convert_tokens_to_ids("<|im_end|>") in run.sampling().eos_token_ids
    assert logged(run, "tools/call_frequency") == [1] and math.isfinite(logged(run, "grad_norm")[0])


class Door:
    def reset(self, **row):
        return "A door."

    def knock(self):
        """Knock."""

    def get_reward(self):
        return 1.0


def test_the_tools_of_the_trainer_are_those_that_were_passed_and_those_of_the_environments(tmp_path):
    options = {"tools": [double], "environment_factory": Door}
    run = trainer(tmp_path, reward=None, rows=None, max_steps=1, options=options)
    assert [tool.__name__ for tool in run.tools] == ["double", "knock"]
    assert trainer(tmp_path).tools == []


def test_several_environments_without_rows_that_choose_are_refused_when_the_trainer_is_made(tmp_path):
    with pytest.raises(ValueError, match="requires a `train_dataset` with a column 'environment'"):
        trainer(tmp_path, rows=None, max_steps=1, options={"environment_factory": {"a": Door, "b": Door}})


def test_tools_are_called_no_longer_than_the_positions_of_the_model_last(tmp_path):
    class Caller(Scripted):
        def generate(self, prompts, n, sampling, seeds):
            self.calls.append(max(map(len, prompts)))
            text = '<tool_call>{"name": "double", "arguments": {"x": 4}}</tool_call><|im_end|>'
            ids = tiny.tokenizer()(text)["input_ids"][: sampling.max_new_tokens]
            return Completions([ids] * len(prompts) * n, None, [True] * len(prompts) * n)

    engine, lengths = Caller(), []

    def judge(prompts, completion_ids):
        lengths.extend(map(len, completion_ids))
        return [float(i) for i in range(len(completion_ids))]

    rows = [{"prompt": [{"role": "user", "content": "double 4"}]}] * 4
    options = {"generator": engine, "tools": [double]}
    model = tiny.causal_lm(arch="gpt2", n_positions=400)  # a position above these does not exist
    run = trainer(
        tmp_path, reward=judge, rows=rows, model=model, max_steps=1, max_completion_length=2000, options=options
    )
    run.train()
    assert len(engine.calls) > 1 and max(engine.calls) < 400  # it was not asked to read more
    assert 200 < engine.calls[0] + max(lengths) <= 400
    assert math.isfinite(logged(run, "grad_norm")[0])


def double(x: int):
    """Double a number.

    Args:
        x: The number.
    """
    return 2 * x


def test_a_template_that_shows_no_tools_is_refused_when_the_trainer_is_made(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "double 4"}]}] * 4
    options = {"tools": [double], "processing_class": tiny.tokenizer()}
    with pytest.raises(ValueError, match="Tools cannot be used with this chat template.*shows no tools"):
        trainer(tmp_path, rows=rows, options=options)


def test_tools_need_conversations(tmp_path):
    with pytest.raises(ValueError, match="Tools are called in conversations, and the prompt is a text"):
        trainer(tmp_path, options={"tools": [double]})


class Die:
    """An environment that says nothing when it begins."""

    def reset(self, **row):
        self.rolls = 0

    def roll(self):
        """Roll the die."""
        self.rolls += 1
        return 3

    def get_reward(self):
        return float(self.rolls)


@pytest.mark.parametrize("rows", [[{"level": 1}] * 4, [{"prompt": None}] * 4, None])
def test_an_environment_without_prompts_is_asked_with_an_empty_question(rows, tmp_path, caplog):
    texts = ('<tool_call>\n{"name": "roll", "arguments": {}}\n</tool_call><|im_end|>', "3<|im_end|>")

    class Rolls(Scripted):
        def generate(self, prompts, n, sampling, seeds):
            self.calls.append([tiny.tokenizer().decode(prompt) for prompt in prompts])
            ids = [tiny.tokenizer()(texts[len(self.calls) > 1])["input_ids"]] * len(prompts) * n
            return Completions(ids, None, [True] * len(ids))

    engine = Rolls()
    options = {"generator": engine, "environment_factory": Die}
    run = trainer(tmp_path, reward=None, rows=rows, max_steps=1, max_completion_length=200, options=options)
    run.train()
    assert logged(run, "rewards/Die/mean") == [1.0]
    assert engine.calls[0][0].endswith("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")
    assert '"name": "roll"' in engine.calls[0][0]


def test_a_rollout_function_takes_the_place_of_generation(tmp_path):
    def rollout(prompts, trainer):
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        words = [[50 + i] for i in range(len(prompts))]
        return {
            "prompt_ids": ids,
            "completion_ids": words,
            "logprobs": None,
            "score": [float(i) for i in range(len(prompts))],
        }

    def judge(score):
        return score

    run = trainer(tmp_path, reward=judge, max_steps=2, options={"rollout_func": rollout})
    run.train()
    assert logged(run, "reward") == [1.5, 1.5] and logged(run, "completions/mean_length") == [1, 1]


def test_the_extreme_lengths_of_a_record_are_those_of_all_its_rollouts(tmp_path):
    rollouts = [("a", "b", "she", "fg"), ("efghi", "jk", "a lion", "zx")]

    class Changing(Scripted):
        def generate(self, prompts, n, sampling, seeds):
            self.texts = rollouts[len(self.calls)]
            return super().generate(prompts, n, sampling, seeds)

    run = trainer(tmp_path, max_steps=2, logging_steps=2, options={"generator": Changing()})
    run.train()
    first, second = ([len(run.processing_class(text)["input_ids"]) for text in texts] for texts in rollouts)
    assert min(first) < min(second) and max(first) < max(second), "means of extremes would show"
    assert logged(run, "completions/min_length") == [min(first)] == logged(run, "completions/min_terminated_length")
    assert logged(run, "completions/max_length") == [max(second)] == logged(run, "completions/max_terminated_length")


def test_weights_that_changed_since_an_evaluation_are_sent_before_the_next(tmp_path):
    class Evaluations(TrainerCallback):
        def on_evaluate(self, *args, **kwargs):
            events.append("evaluated")

    events = []
    run = trainer(tmp_path, eval_rows=ROWS, eval_on_start=True, eval_strategy="epoch", max_steps=1)
    run.add_callback(Evaluations())
    first, send = next(run.model.parameters()), run.generator.sync_weights
    run.generator.sync_weights = lambda model: (events.append(first.sum().item()), send(model))
    run.evaluate()
    before = first.sum().item()
    with torch.no_grad():
        first.add_(1)
    now = first.sum().item()
    run.train()
    assert events[:4] == [before, "evaluated", now, "evaluated"]


def test_counts_go_on_where_a_resumed_run_begins_its_epoch_anew(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "ignore_data_skip": True, "lr_scheduler_type": "constant"}
    trainer(tmp_path, max_steps=2, **settings).train()
    run = trainer(tmp_path, max_steps=4, **settings)
    run.train(resume_from_checkpoint=True)
    tokens = logged(run, "num_tokens")
    assert len(tokens) == 4 and tokens == sorted(set(tokens)), "they only grow"
    assert run.rollout_maker.num_rollouts == 4, "a rollout is numbered, and seeded, once"


# ------------------------------------------------------------------------------------------------ telling and judging


def test_completions_are_shown_and_written(tmp_path, capsys):
    from datasets import Dataset

    run = trainer(tmp_path, log_completions=True, num_completions_to_print=2, max_steps=2)
    run.train()
    written = [Dataset.from_parquet(str(path)) for path in sorted((tmp_path / "completions").glob("*.parquet"))]
    assert len(written) == 2 and set(written[0].column_names) == {"step", "prompt", "completion", "spread", "advantage"}
    assert len(written[0]) == 4 and sum(written[0]["advantage"]) == pytest.approx(0, abs=1e-5)
    assert "advantage" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
def test_a_disk_too_full_for_completions_does_not_end_the_run(tmp_path, caplog):
    run = trainer(tmp_path, log_completions=True, log_trajectories=2, num_completions_to_print=0, max_steps=1)
    records = [tmp_path / "completions" / "completions_00000.parquet", trajectories.path_of(str(tmp_path), 0)]
    for record in records:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.symlink_to("/dev/full")
    run.train()
    said = [text for text in caplog.messages if "No space left on device" in text and "Training goes on" in text]
    assert len(said) == 2 and run.state.global_step == 1


def test_written_completions_go_to_the_hub_and_its_failures_stop_nothing(tmp_path, monkeypatch, caplog):
    import huggingface_hub

    class Hub:
        uploaded = []

        def __init__(self, token=None):
            pass

        def create_repo(self, repo, **options):
            assert options["repo_type"] == "dataset" and options["private"]

        def upload_file(self, path_in_repo, **options):
            if self.uploaded:
                raise ConnectionError("the Hub is down")
            self.uploaded.append(path_in_repo)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    with caplog.at_level(logging.WARNING, "posttrain"):
        trainer(
            tmp_path, log_completions=True, num_completions_to_print=0, log_completions_hub_repo="me/rollouts"
        ).train()
    assert Hub.uploaded == ["completions_00000.parquet"]
    assert any("completions_00001.parquet was not uploaded" in record.message for record in caplog.records)


def test_written_completions_arrive_in_a_private_dataset_of_the_hub(hub, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    shown = {"log_completions": True, "num_completions_to_print": 0, "log_completions_hub_repo": "me/rollouts"}
    trainer(tmp_path, hub_token=TOKEN, max_steps=1, **shown).train()
    (made,) = hub.created
    assert (made["type"], made["name"]) == ("dataset", "rollouts")
    assert made.get("visibility", made.get("private")) in ("private", True)
    written = tmp_path / "completions" / "completions_00000.parquet"
    assert hub.files["me/rollouts", "main"][written.name] == written.read_bytes()


def test_evaluation_gives_pass_at_k_on_held_out_prompts(tmp_path):
    def judge(completions, answer):
        return [float(text == word) for text, word in zip(completions, answer, strict=True)]

    rows = [{"prompt": "a b", "answer": "x"}, {"prompt": "c d", "answer": "none"}, {"prompt": "e f", "answer": "x"}]
    engine = Scripted("x", "y", "z", "w")
    run = trainer(tmp_path, reward=judge, eval_rows=rows, options={"generator": engine}, num_generations_eval=4)
    metrics = run.evaluate()
    assert metrics["eval_pass@1"] == pytest.approx(2 / 3 / 4) and metrics["eval_pass@4"] == pytest.approx(2 / 3)
    assert metrics["eval_reward"] == pytest.approx(1 / 6) == metrics["eval_avg@4"]
    # of three prompts two have 1 of 4 right: pass@1 is 1/4, 0, 1/4, and pass@4 1, 0, 1
    assert metrics["eval_pass@4_stderr"] == pytest.approx((1 / 3) ** 0.5 / 3**0.5)
    assert metrics["eval_pass@1_stderr"] == metrics["eval_avg@4_stderr"] == pytest.approx(1 / 4 / 3)
    greedy = trainer(tmp_path, reward=judge, eval_rows=rows, num_generations_eval=1, eval_temperature=0.0)
    assert "eval_pass@1" in greedy.evaluate()


def test_evaluation_sees_every_prompt_once(tmp_path):
    run = trainer(tmp_path, eval_rows=ROWS[:5], per_device_eval_batch_size=8)
    output = run.evaluation_loop(run.get_eval_dataloader(), "Evaluation")
    assert output.num_samples == 5


def test_an_evaluation_brings_the_weights_to_the_engine_once(tmp_path):
    engine = Scripted("a", "b", "c", "d")
    run = trainer(
        tmp_path, eval_rows=ROWS[:5], per_device_eval_batch_size=4, options={"generator": engine}, max_steps=1
    )
    run.evaluate()
    assert len(engine.calls) == 5 and engine.synced == 1
    run.evaluate()
    run.train()
    assert engine.synced == 3


@pytest.mark.parametrize(
    ("num", "passed", "k", "expected"), [(4, 1, 1, 0.25), (4, 1, 4, 1.0), (4, 0, 4, 0.0), (4, 2, 2, 5 / 6)]
)
def test_pass_at_k(num, passed, k, expected):
    assert pass_at_k(num, passed, k) == pytest.approx(expected)


def test_a_table_is_cut_to_what_fits():
    text = table([{"prompt": "p" * 200, "reward": 0.5, "other": float("nan")}], "Step 3", width=20)
    assert (
        text.splitlines()[0] == "Step 3" and "0.50" in text and "none" in text and max(map(len, text.splitlines())) < 60
    )
    assert table([], "nothing") == ""
    assert table([{"completion": "a\r\n\x1b[2Jé"}], "Step 3").splitlines()[-1] == r"a\r\n\x1b[2Jé"


@pytest.mark.parametrize(("logs", "says"), [
    ({"frac_reward_zero_std": 1.0, "reward": 0.0}, "nothing to learn"),
    ({"frac_reward_zero_std": 1.0, "self_distillation/reprompt_sample_fraction": 0.0}, "teacher was shown nothing"),
    ({"completions/clipped_ratio": 1.0}, "max_completion_length"),
    ({"sampling/sampling_logp_difference/mean": 0.5}, "factor of 1.65"), ({"entropy": 1e-5}, "entropy"),
    ({"sampling/sampling_logp_difference/mean": 0.7, "staleness/max": 4.0}, "factor of 2.01 .* 4 optimizer steps"),
])  # fmt: skip
def test_a_record_that_shows_no_learning_is_put_into_words(logs, says):
    assert re.search(says, learning_problem(logs)) and learning_problem({"reward": 0.5, "entropy": 2.0}) is None
    assert learning_problem({"sampling/sampling_logp_difference/mean": 0.2, "staleness/max": 2.0}) is None
    assert learning_problem({"completions/clipped_ratio": 1.0, "agent/cut/tokens": 0.0}) is None  # it asked for less
    assert learning_problem({"frac_reward_zero_std": 1.0, "rewards/none": 1.0}) is None  # which is told by itself
    assert learning_problem({"frac_reward_zero_std": 1.0, "self_distillation/reprompt_sample_fraction": 0.5}) is None


# ------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(("changes", "says"), [
    ({"num_generations": 3}, "a group would be cut in two.*multiple of 3"),
    ({"num_generations": 1}, "no other completion to compare"),
    ({"generation_batch_size": 8, "steps_per_generation": 3}, "generation_batch_size=8 must be"),
    ({"loss_type": "gpro"}, "did you mean 'grpo'"), ({"delta": 1.1}, "undoes the clip"),
    ({"epsilon": -0.1}, "epsilon=-0.1 must be >= 0"), ({"top_p": 2.0}, "top_p"), ({"temperature": 0.0}, "temperature"),
    ({"sync_ref_model": True}, "set beta above 0"), ({"scale_rewards": "grop"}, "did you mean 'group'"),
    ({"importance_sampling_level": "tokens"}, "did you mean 'token'"), ({"reward_timeout": 0.0}, "reward_timeout"),
    ({"vllm_device": "cuda:1"}, "vllm_device='cuda:1' has no effect: set vllm_mode"),
    ({"use_vllm": True, "use_transformers_continuous_batching": True}, "two engines"),
    ({"use_transformers_continuous_batching": True, "repetition_penalty": 1.2}, "=1.2 is not supported"),
    ({"vllm_structured_outputs_regex": "a+"}, "set use_vllm=True"), ({"label_smoothing_factor": 0.1}, "have no labels"),
    ({"ds3_gather_for_generation": False, "deepspeed": {"zero_optimization": {"stage": 3}}},
    "ds3_gather_for_generation=False"),
    ({"ds3_gather_for_generation": False, "fsdp": "full_shard"}, "ds3_gather_for_generation=False"),
    ({"cache_implementation": "static", "use_vllm": True}, "cache_implementation"),
    ({"train_sampling_strategy": "sequential"}, "shuffle_dataset=False"),
    ({"delta": 2.0, "loss_type": "cispo"}, "which does not clip"),
    ({"transformers_continuous_batching_config": "big"}, "not a JSON object"),
])  # fmt: skip
def test_arguments_that_cannot_work_are_refused_when_they_are_given(changes, says):
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        config(**changes)


def test_reinforce_plus_plus_refuses_what_scales_rewards_in_groups():
    with pytest.raises(ConfigError, match="scale_rewards='none' is of GRPO"):
        config(ReinforcePlusPlusConfig, scale_rewards="none")


def test_sizes_follow_from_each_other():
    args = config(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert (args.steps_per_generation, args.generation_batch_size) == (2, 8)
    args = config(per_device_train_batch_size=4, generation_batch_size=32)
    assert args.steps_per_generation == 8
    args.validate()
    assert config(scale_rewards=False).scale_rewards == "none" and config(scale_rewards=True).scale_rewards == "group"


def test_the_methods_have_their_own_defaults():
    assert (GRPOConfig("x").beta, GRPOConfig("x").loss_type, GRPOConfig("x").num_generations) == (0.0, "dapo", 8)
    assert (RLOOConfig("x").beta, RLOOConfig("x").num_generations) == (0.05, 2)
    assert ReinforcePlusPlusConfig("x").group_baseline


def test_the_wrong_config_is_named(tmp_path):
    with pytest.raises(TypeError, match="pass GRPOConfig"):
        GRPOTrainer(tiny.causal_lm(), spread, RLOOConfig(str(tmp_path)), ROWS, processing_class=tiny.tokenizer())


def test_methods_run_from_the_command_line(tmp_path, monkeypatch):
    from posttrain.cli import main
    from posttrain.core import registry
    from posttrain.rl import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "methods", lambda: {"grpo": cli.GRPO, "rloo": cli.RLOO})
    tiny.causal_lm().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": row["prompt"], "solution": "7"} for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        "--model_name_or_path model --dataset_name rows.jsonl --reward_funcs accuracy_reward --output_dir out "
        "--max_steps 1"
    )
    words += (
        " --per_device_train_batch_size 4 --num_generations 4 --max_completion_length 4 --use_cpu true --report_to none"
    )
    for method in ("grpo", "rloo"):
        assert main([method, *words.split()]) == 0
        assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("bound", [0, 1])
def test_activations_in_host_memory_change_nothing(bound, tmp_path, monkeypatch):
    plain = trainer(tmp_path / "plain", beta=0.1, max_staleness=bound)
    plain.train()
    monkeypatch.setattr(
        "posttrain.lm.attention.activation_offloading.offloading_problem", lambda device: None
    )  # they are copied all the same
    moved = trainer(tmp_path / "moved", beta=0.1, max_staleness=bound, activation_offloading=True)
    moved.train()
    assert moved._offload.moved > 0 and logged(moved, "loss") == logged(plain, "loss")
    for mine, other in zip(moved.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_prompts_of_a_later_evaluation_are_looked_at_as_those_of_the_constructor(tmp_path):
    run = trainer(tmp_path, model=tiny.causal_lm(max_position_embeddings=24), max_completion_length=2)
    long = [{"prompt": " ".join(WORDS[:40]), "answer": ""}]
    with pytest.raises(DataError, match="eval_dataset: 1 of 1 prompts leave no room for a completion"):
        run.evaluate(long)
