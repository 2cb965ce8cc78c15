"""A policy that teaches itself: what its teacher reads and is, and what is refused."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from posttrain.core.callbacks import TrainerCallback
from posttrain.core.errors import ConfigError, DataError
from posttrain.lm.loss.distillation import TopK
from posttrain.rl import SDFTConfig, SDFTTrainer, SDPOConfig, SDPOTrainer
from posttrain.rl.algorithms.self_distillation import rewritten, self_distillation, text_of
from posttrain.rl.generation.local import LocalGenerator
from tests import tiny
from tests.contract.trainers import arguments, digit_sum, text_rows, weights
from tests.rl.algorithms.test_distillation import serving

TALK = [{"role": "system", "content": "be short"}, {"role": "user", "content": [{"type": "text", "text": "why ?"}]}]


def rows(number=9):
    return [{"prompt": row["prompt"], "privileged_context": "the answer"} for row in text_rows(number)]


def trainer(path, model=None, data=None, kind=SDFTTrainer, peft_config=None, generator=None, **changes):
    usual = {"num_generations": 2, "max_completion_length": 6, "learning_rate": 1e-2}
    args = arguments(kind.config_class, path, **(usual | changes))
    model = tiny.causal_lm(initializer_range=0.1) if model is None else model
    data = rows() if data is None else data
    options = {"generator": LocalGenerator(tiny.tokenizer())} if generator else {}
    options |= {"reward_funcs": digit_sum} if kind is SDPOTrainer else {}
    return kind(
        model, args=args, train_dataset=data, processing_class=tiny.tokenizer(), peft_config=peft_config, **options
    )


def test_the_teachers_prompt_is_made_of_the_last_message():
    made = rewritten(TALK, lambda text: f"{text} because")
    assert made == [TALK[0], {"role": "user", "content": "why ? because"}]
    assert rewritten("why ?", str.upper) == "WHY ?"
    assert text_of([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]) == "a\nb"
    with pytest.raises(DataError, match="role 'assistant'"):
        rewritten([{"role": "assistant", "content": "x"}], str)


def test_losses_by_hand():
    """Two tokens: p_S = (3/4, 1/4), p_T = (1/2, 1/2)."""
    own, other = torch.tensor([[3.0, 1.0]]).log(), torch.zeros(1, 2)
    usual = {"distillation_mode": "full_logits", "distillation_alpha": 0.0, "distillation_is_clip": 2.0}
    usual |= {"distillation_topk": 1, "distillation_add_tail": True}
    written = torch.tensor([0])

    def loss(old=None, **changes):
        return self_distillation(own, other, written, old, SimpleNamespace(**(usual | changes))).item()

    forward = 0.5 * (torch.tensor(2 / 3).log() + torch.tensor(2.0).log()).item()
    assert loss() == pytest.approx(forward)
    assert loss(distillation_mode="topk_logits") == pytest.approx(forward)  # of two tokens the tail is the other one
    assert loss(distillation_mode="topk_logits", distillation_add_tail=False) == 0
    assert loss(torch.tensor([0.75]).log()) == pytest.approx(forward)
    assert loss(torch.tensor([0.5]).log()) == pytest.approx(1.5 * forward)
    assert loss(torch.tensor([0.01]).log()) == pytest.approx(2 * forward)
    assert loss(torch.tensor([0.01]).log(), distillation_is_clip=None) == pytest.approx(forward)


@pytest.mark.parametrize("lora", [False, True])
def test_the_average_follows_the_policy_and_goes_on_from_a_checkpoint(lora, tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0) if lora else None
    options = {"teacher_model_kind": "ema", "teacher_update_rate": 0.5, "peft_config": config, "max_steps": 4}
    options |= {"lr_scheduler_type": "constant"}
    whole = trainer(tmp_path / "whole", **options)
    before = {name: value.clone() for name, value in whole.reference.weights().items()}
    whole.train()
    gaps = [value - before[name] for name, value in whole.reference.weights().items()]
    assert max(float(gap.abs().max()) for gap in gaps) > 0
    after = {name: value.clone() for name, value in whole.reference.weights().items()}
    trainer(tmp_path / "part", save_strategy="steps", save_steps=2, **(options | {"max_steps": 2})).train()
    rest = trainer(tmp_path / "part", **options)
    rest.train(resume_from_checkpoint=True)
    torch.testing.assert_close(weights(rest), weights(whole), rtol=0, atol=0)
    assert all(torch.equal(value, after[name]) for name, value in rest.reference.weights().items())


@pytest.mark.parametrize("kind", [SDFTTrainer, SDPOTrainer])
def test_the_teacher_reads_no_more_than_the_model_has_positions_for(kind, tmp_path):
    data = [row | {"privileged_context": "because " * 40} for row in rows()]
    model = tiny.causal_lm("gpt2", n_positions=64)
    options = {"include_environment_feedback": True} if kind is SDPOTrainer else {}
    run = trainer(tmp_path, model, data, kind, max_steps=1, **options)
    read, complete = [], run.with_teacher_rows
    run.with_teacher_rows = lambda *given: read.append(complete(*given)) or read[-1]
    run.train()
    assert max(read[0].teacher_lengths) == 64


def test_an_evaluation_compares_too(tmp_path):
    made = trainer(tmp_path, teacher_model_kind="live")
    assert made.reference is None and made.teacher_model is made.model
    assert made.evaluate(rows(3))["eval_loss"] != 0


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(ConfigError, match="distillation_alpha=0.5; set distillation_alpha=1"):
        SDFTConfig(str(tmp_path), distillation_mode="sampled_token")
    with pytest.raises(ConfigError, match=r"has no \{privileged_context\}; add it"):
        SDFTConfig(str(tmp_path), teacher_prompt_template="{prompt}")
    some = [*rows(3), {"prompt": "a", "privileged_context": None}, *rows(4), *text_rows(1)]
    with pytest.raises(DataError, match=r"train_dataset: privileged_context is null or absent \(rows 3, 8\)"):
        trainer(tmp_path, data=some).train()
    good = trainer(tmp_path)
    good.eval_dataset = {"dev": some}
    with pytest.raises(DataError, match=r"dev: privileged_context is null or absent \(rows 3, 8\)"):
        good.train()


class Seen(TrainerCallback):
    """The values that the events of self-distillation, as trl has them, are called with."""

    def __init__(self):
        self.prompts, self.contexts, self.batches, self.built = [], [], [], []

    def on_generation_prompts_selected(self, args, state, control, generation_prompts=None, **others):
        self.prompts.append(generation_prompts)

    def on_teacher_context_built(self, args, state, control, **facts):
        self.contexts.append(facts)

    def on_self_distillation_batch_prepared(self, args, state, control, **facts):
        self.batches.append(facts)

    def on_generation_batch_built(self, args, state, control, generate_every=None, steps_per_generation=None, **others):
        self.built.append((generate_every, steps_per_generation))


@pytest.mark.parametrize("kind", [SDFTTrainer, SDPOTrainer])
def test_callbacks_see_what_the_teacher_reads(kind, tmp_path):
    special = {"generate_from_teacher": True} if kind is SDFTTrainer else {"include_environment_feedback": True}
    run, seen = trainer(tmp_path, kind=kind, steps_per_generation=2, max_steps=4, **special), Seen()
    run.add_callback(seen)
    run.train()
    assert seen.built == [(2, 2)] * 2 and len(seen.prompts) == len(seen.batches) == 2
    from_teacher = ["the answer" in prompt for prompts in seen.prompts for prompt in prompts]
    assert all(from_teacher) if kind is SDFTTrainer else not any(from_teacher)
    for facts in (*seen.contexts, *seen.batches):
        ids, mask, completion = facts["teacher_input_ids"], facts["teacher_attention_mask"], facts["completion_mask"]
        width = completion.shape[1]
        assert torch.equal(mask[:, -width:], completion) and torch.equal(ids[:, -width:], facts["completion_ids"])
        for row, real, own, shown in zip(ids, mask, facts["prompt_ids"], facts["prompt_mask"], strict=True):
            text = facts["processing_class"].decode(row[real.bool()])
            assert "the answer" in text and "the answer" not in facts["processing_class"].decode(own[shown.bool()])
        assert facts["self_distillation_mask"].tolist() == [1.0] * len(ids)
        # Two optimizer steps learn from one rollout; of completions of the teacher's prompt there is no ratio.
        assert (facts["old_per_token_logps"] is None) == (kind is SDFTTrainer)
    run.remove_callback(seen)
    run.evaluate(rows(2))
    assert len(seen.contexts) == 2


@pytest.mark.parametrize("removes", [False, True])
def test_the_teacher_reads_the_success_of_another_by_the_templates(removes, tmp_path):
    """Without its thoughts, where these are left out; and feedback where there is no other success."""
    said = ["<think>so</think>it is 7", "wrong"] * 4

    def rollout(prompts, trainer):
        encode = trainer.processing_class.encode
        return {"prompt_ids": [*map(encode, prompts)], "completion_ids": [*map(encode, said)], "logprobs": None}

    options = {"solution_template": "[{successful_previous_attempt}]", "feedback_template": "({feedback_raw})"}
    options |= {"reprompt_template": "{solution}{feedback}{prompt}", "max_completion_length": 32, "max_steps": 1}
    options |= {"environment_feedback_only_without_solution": True, "remove_thinking_from_demonstration": removes}
    args = arguments(SDPOConfig, tmp_path, num_generations=2, include_environment_feedback=True, **options)
    score = {"reward_funcs": lambda completions, **columns: [float("7" in text) for text in completions]}
    given = {"train_dataset": rows(), "processing_class": tiny.tokenizer(), "rollout_func": rollout}
    run, seen = SDPOTrainer(tiny.causal_lm(), args=args, **given, **score), Seen()
    run.add_callback(seen)
    run.train()
    [facts] = seen.contexts
    names = ("teacher_input_ids", "teacher_attention_mask"), ("prompt_ids", "prompt_mask")
    read, own = (
        [facts["processing_class"].decode(ids[mask.bool()]) for ids, mask in zip(facts[a], facts[b], strict=True)]
        for a, b in names
    )
    solution = "it is 7" if removes else said[0]
    shown = ["(the answer)", f"[{solution}]"] * 4
    assert read == [f"{part}{prompt}{text}" for part, prompt, text in zip(shown, own, said, strict=True)]


# ------------------------------------------------------------------------------------------------------------ a server


@contextlib.contextmanager
def asking(path, kind=SDFTTrainer, **changes):
    """A trainer whose teacher is asked of a server that has its policy; it samples here."""
    model = tiny.causal_lm(initializer_range=0.1)
    with serving(model) as (url, asked):
        options = {"use_teacher_server": True, "use_vllm": True, "vllm_server_base_url": url}
        yield trainer(path, kind=kind, model=model, generator=True, vllm_mode="server", **(options | changes)), asked


@pytest.mark.parametrize("changes", [
    {"distillation_topk": 384, "distillation_alpha": 0.5}, {"distillation_topk": 384, "distillation_alpha": 1.0},
    {"distillation_mode": "sampled_token", "distillation_alpha": 1.0, "num_loss_tokens_to_skip": 1},
], ids=str)  # fmt: skip
def test_a_server_tells_what_a_forward_of_the_teacher_gives(changes, tmp_path):
    changes = {"teacher_model_kind": "live", "max_steps": 1} | changes
    with asking(tmp_path / "there", **changes) as (there, asked):
        there.train()
        bodies = len(asked)
    here = trainer(tmp_path / "here", **changes)
    here.train()
    for name in ("loss", "grad_norm"):
        values = [run.state.log_history[0][name] for run in (there, here)]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-6), name
    assert bodies == 8 and {body["prompt_logprobs"] for body in asked} == {changes.get("distillation_topk", 1)}
    encoded = [tuple(here.codec.encode(f"{row['prompt']}\n\nthe answer")) for row in rows()]
    assert all(any(tuple(body["prompt"][: len(ids)]) == ids for ids in encoded) for body in asked)


def test_the_tokens_that_the_server_finds_most_probable_are_compared():
    own = torch.tensor([[0.5, 0.3, 0.2]]).log()
    told = TopK(torch.tensor([[2, 1, 0]]), torch.tensor([[math.log(0.6), math.log(0.1), -math.inf]]))
    usual = {"distillation_mode": "topk_logits", "distillation_alpha": 0.0, "distillation_is_clip": None}
    usual |= {"distillation_topk": 1, "distillation_add_tail": True}
    found = self_distillation(own, told, torch.tensor([1]), None, SimpleNamespace(**usual)).item()
    assert found == pytest.approx(0.6 * math.log(0.6 / 0.2) + 0.4 * math.log(0.4 / 0.8))
    usual |= {"distillation_mode": "sampled_token", "distillation_alpha": 1.0}
    found = self_distillation(own, told, torch.tensor([1]), None, SimpleNamespace(**usual)).item()
    assert found == pytest.approx(math.log(0.3 / 0.1) * math.log(0.3))


def test_completions_without_feedback_are_not_asked_of_the_server(tmp_path):
    options = {"distillation_mode": "sampled_token", "max_steps": 1, "teacher_model_kind": "live"}
    nothing = {"use_successful_as_teacher": True, "success_reward_threshold": 2.0}
    with asking(tmp_path, SDPOTrainer, **options, **nothing) as (run, asked):
        run.train()
    assert asked == [] and run.state.log_history[0]["loss"] == 0


def test_what_a_server_cannot_tell_is_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        SDPOConfig(str(tmp_path), use_teacher_server=True, distillation_mode="full_logits", temperature=0.5,
                   distillation_weight=0.5, use_cpu=True)  # fmt: skip
    for part in ("use_vllm=True", "teacher_model_kind='live'", "topk_logits", "temperature 1", "distillation alone"):
        assert part in str(caught.value), part


def test_one_completion_is_enough_where_feedback_is_shown(tmp_path):
    run = trainer(tmp_path, kind=SDPOTrainer, num_generations=1, include_environment_feedback=True, max_steps=1,
                  success_reward_threshold=2.0)  # fmt: skip
    run.train()
    assert run.state.log_history[0]["loss"] != 0 < run.state.log_history[0]["grad_norm"]
    for changes, said in (({}, "show the teacher nothing"), ({"distillation_weight": 0.5}, "no other completion")):
        feedback = {"include_environment_feedback": bool(changes)}
        with pytest.raises(ConfigError, match=said):
            SDPOConfig(str(tmp_path), num_generations=1, use_cpu=True, **feedback, **changes)


@pytest.mark.parametrize("feedback", [True, False])
def test_equal_rewards_are_warned_of_where_the_teacher_is_shown_nothing(feedback, tmp_path, caplog):
    """With feedback it learns from completions that all failed."""
    options = {"num_generations": 2, "max_completion_length": 6, "success_reward_threshold": 2.0}
    options |= {"max_steps": 1, "logging_steps": 1, "include_environment_feedback": feedback}
    args = arguments(SDPOConfig, tmp_path, **options)
    failed = {"reward_funcs": lambda completions, **columns: [0.0] * len(completions)}
    made = SDPOTrainer(tiny.causal_lm(), args=args, train_dataset=rows(), processing_class=tiny.tokenizer(), **failed)
    made.train()
    assert "nothing to learn. Make the prompts easier" not in caplog.text
    assert ("The teacher was shown nothing" in caplog.text) is not feedback
    assert (made.state.log_history[0]["loss"] == 0) is not feedback
