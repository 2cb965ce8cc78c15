"""On the same completions, losses and gradients of distillation are those of trl."""

from __future__ import annotations

import os

import pytest

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
trl = pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import posttrain.rl  # noqa: E402
from tests import tiny  # noqa: E402
from tests.parity.test_online import PROMPTS, digit_sum, rollout, with_adapter  # noqa: E402

KEYS = ["loss", "grad_norm", "entropy", "num_tokens", "completions/mean_length", "completions/clipped_ratio"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("distillation")
    tiny.causal_lm(initializer_range=0.1).save_pretrained(path / "student")
    tiny.causal_lm(seed=5, initializer_range=0.3, hidden_size=48).save_pretrained(path / "teacher")
    tiny.mixture_of_experts(initializer_range=0.1).save_pretrained(path / "experts")
    return path


def run(package, path, student="student", teacher="teacher", lora=False, **changes):
    usual = dict(
        output_dir=str(path / package.__name__), per_device_train_batch_size=4, max_completion_length=8, max_steps=4,
        learning_rate=0.1, optim="sgd", lr_scheduler_type="constant", logging_steps=1, save_strategy="no",
        report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, gradient_checkpointing=False,
        shuffle_dataset=False, max_grad_norm=1.0,
    )  # fmt: skip
    model, other = (AutoModelForCausalLM.from_pretrained(path / name) for name in (student, teacher))
    model = with_adapter(model) if lora else model
    args = package.DistillationConfig(**(usual | changes))
    rows = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    given = {"rollout_func": rollout} if package is posttrain.rl else {}
    trainer = package.DistillationTrainer(model, other, args, rows, processing_class=tiny.tokenizer(), **given)
    if package is trl:
        asked = []
        tokenize = trainer._tokenize_prompts
        trainer._tokenize_prompts = lambda prompts: asked.append(prompts) or tokenize(prompts)
        trainer._generate_single_turn = lambda *_: rollout(asked[-1], trainer)["completion_ids"]
    trainer.train()
    return [record for record in trainer.state.log_history if "loss" in record]


@pytest.mark.rotated
@pytest.mark.parametrize("changes", [
    {}, {"beta": 0.0}, {"beta": 0.5}, {"beta": 0.1, "temperature": 0.7}, {"beta": 1.0, "temperature": 1.5},
    {"beta": 0.5, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}, {"beta": 0.5, "lora": True},
    {"student": "experts", "beta": 0.5}, {"teacher": "experts", "beta": 0.0},
], ids=str)  # fmt: skip
def test_distillation(changes, folder):
    theirs, ours = run(trl, folder, **changes), run(posttrain.rl, folder, **changes)
    assert len(theirs) == len(ours) == 4
    keys = [key for key in KEYS if key != "entropy" or "gradient_accumulation_steps" not in changes]
    for key in keys:  # trl takes the mean of the micro-batches' mean entropies, which have other numbers of tokens
        expected = [record[key] for record in theirs]
        assert [record[key] for record in ours] == pytest.approx(expected, rel=1e-4, abs=2e-6), key
    assert theirs[0]["loss"] > 0.01


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_gkd_on_given_completions(beta, folder, tmp_path):
    """The dataset's completions alone: nothing is sampled. trl's collator writes the chat and masks the prompt."""
    from trl.experimental import gkd

    words = " ".join(tiny.CORPUS).split()
    rows = [
        {"messages": [{"role": "user", "content": " ".join(words[i : i + 3])},
                      {"role": "assistant", "content": " ".join(words[i + 4 : i + 6 + i % 4])}]}
        for i in range(8)
    ]  # fmt: skip
    records = {}
    for package in (gkd, posttrain.rl):
        args = package.GKDConfig(
            output_dir=str(tmp_path / package.__name__), per_device_train_batch_size=4, max_steps=4, learning_rate=0.1,
            optim="sgd", lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none",
            use_cpu=True, bf16=False, disable_tqdm=True, gradient_checkpointing=False, lmbda=0.0, beta=beta,
            **({"train_sampling_strategy": "sequential"} if package is gkd else {"shuffle_dataset": False}),
        )  # fmt: skip
        model, other = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("student", "teacher"))
        trainer = package.GKDTrainer(
            model, other, args, train_dataset=Dataset.from_list(rows), processing_class=tiny.tokenizer()
        )
        trainer.train()
        records[package] = [record for record in trainer.state.log_history if "loss" in record]
    for key in ("loss", "grad_norm"):
        expected = [record[key] for record in records[gkd]]
        assert [record[key] for record in records[posttrain.rl]] == pytest.approx(expected, rel=1e-4), key


@pytest.mark.parametrize("changes", [{}, {"iw_opd_gamma": 2.0, "temperature": 0.7}, {"lora": True}], ids=str)
def test_importance_weighted_distillation_on_given_completions(changes, folder, tmp_path):
    from trl.experimental import iw_opd

    words = " ".join(tiny.CORPUS).split()
    rows = [
        {
            "messages": [
                {"role": "user", "content": " ".join(words[i : i + 3])},
                {"role": "assistant", "content": " ".join(words[i + 4 : i + 6 + i % 4])},
            ]
        }
        for i in range(8)
    ]
    usual = dict(  # one batch of all rows, as trl shuffles them always
        per_device_train_batch_size=8, max_steps=4, learning_rate=0.1, optim="sgd", lr_scheduler_type="constant",
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    lora, records = changes.get("lora", False), {}
    usual |= {name: value for name, value in changes.items() if name != "lora"}
    for package in (iw_opd, posttrain.rl):
        args = package.IWOPDConfig(output_dir=str(tmp_path / package.__name__), **usual)
        model, other = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("student", "teacher"))
        model = with_adapter(model) if lora else model
        data = Dataset.from_list(rows)
        trainer = package.IWOPDTrainer(model, other, args, train_dataset=data, processing_class=tiny.tokenizer())
        trainer._local_teacher_tokenizer_matches_student = True  # which trl reads from the teacher's folder
        trainer.lmbda = 0.0  # learn from the dataset's completions, as if they had been sampled
        trainer.train()
        records[package] = [record for record in trainer.state.log_history if "loss" in record]
    for key in ("loss", "grad_norm", "iw_opd/mean_advantage", "iw_opd/mean_abs_advantage", "iw_opd/mean_weight"):
        expected = [record[key] for record in records[iw_opd]]
        assert [record[key] for record in records[posttrain.rl]] == pytest.approx(expected, rel=1e-4, abs=2e-6), key


def self_distilled(package, folder, path, name, rewards=(), lora=False, **changes):
    """The records of four steps on the completions of `rollout`."""
    usual = dict(
        output_dir=str(path / package.__name__), per_device_train_batch_size=8, num_generations=4, max_steps=4,
        max_completion_length=8, learning_rate=0.1, optim="sgd", lr_scheduler_type="constant", logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, shuffle_dataset=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    args = getattr(package, f"{name}Config")(**(usual | changes))
    contexts = [None if "include_environment_feedback" in changes and i % 3 else p for i, p in enumerate(PROMPTS)]
    rows = [{"prompt": p, "privileged_context": c} for p, c in zip(PROMPTS, contexts[3:] + contexts[:3], strict=True)]
    model = AutoModelForCausalLM.from_pretrained(folder / "student")
    given = {"rollout_func": rollout} if package is posttrain.rl else {}
    if lora:
        given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    trainer = getattr(package, f"{name}Trainer")(
        model, *rewards, args=args, train_dataset=Dataset.from_list(rows), processing_class=tiny.tokenizer(), **given
    )
    if package is not posttrain.rl:

        def complete(prompt_ids):
            asked = [trainer.processing_class.decode(ids, skip_special_tokens=True) for ids in prompt_ids]
            return prompt_ids, rollout(asked, trainer)["completion_ids"]

        trainer._generate_transformers = complete
    trainer.train()
    return [record for record in trainer.state.log_history if "loss" in record]


@pytest.mark.parametrize("changes", [
    {}, {"teacher_model_kind": "live", "distillation_add_tail": True, "distillation_topk": 7},
    {"teacher_model_kind": "ema", "teacher_update_rate": 0.3, "teacher_sync_steps": 2, "num_iterations": 2},
    {"distillation_mode": "full_logits", "distillation_alpha": 0.0, "temperature": 0.7, "num_loss_tokens_to_skip": 2},
    {"distillation_mode": "sampled_token", "distillation_alpha": 1.0, "num_iterations": 3,
     "distillation_is_clip": 1.01},
    {"generate_from_teacher": True, "steps_per_generation": 2, "gradient_accumulation_steps": 2,
     "per_device_train_batch_size": 4}, {"lora": True},
], ids=str)  # fmt: skip
def test_sdft(changes, folder, tmp_path):
    from trl.experimental import sdft

    theirs, ours = (self_distilled(package, folder, tmp_path, "SDFT", **changes) for package in (sdft, posttrain.rl))
    assert len(theirs) == len(ours) == 4 and max(abs(record["loss"]) for record in theirs) > 1e-3
    for key in ("loss", "grad_norm", "completions/mean_length", "completions/clipped_ratio"):
        expected = [record[key] for record in theirs if key in record]
        assert [record[key] for record in ours if key in record] == pytest.approx(expected, rel=1e-4, abs=2e-6), key


FEEDBACK = {"include_environment_feedback": True}


@pytest.mark.parametrize("changes", [
    {}, {"distillation_weight": 0.3, "loss_type": "dapo", "num_iterations": 2}, {"distillation_weight": 0.0},
    {"success_reward_threshold": 0.9, **FEEDBACK, "environment_feedback_only_without_solution": True},
    {"distillation_mode": "topk_logits", "distillation_topk": 9, "distillation_alpha": 0.5,
     "dont_reprompt_on_self_success": False, "teacher_model_kind": "base"},
    {"use_successful_as_teacher": False, **FEEDBACK, "teacher_model_kind": "live", "max_reprompt_len": 9},
    {"distillation_weight": 0.6, "loss_type": "grpo", "gradient_accumulation_steps": 2, "num_generations": 2,
     "per_device_train_batch_size": 4},
], ids=str)  # fmt: skip
def test_sdpo(changes, folder, tmp_path):
    from trl.experimental import sdpo

    changes = {"success_reward_threshold": 0.5} | changes
    theirs, ours = (
        self_distilled(package, folder, tmp_path, "SDPO", [digit_sum], **changes) for package in (sdpo, posttrain.rl)
    )
    assert len(theirs) == len(ours) == 4 and max(abs(record["loss"]) for record in theirs) > 1e-3
    keys = ["loss", "grad_norm", "completions/mean_length"]
    keys += [f"self_distillation/{part}_sample_fraction" for part in ("success", "reprompt")]
    for key in keys:
        expected = [record[key] for record in theirs if key in record]
        assert [record[key] for record in ours if key in record] == pytest.approx(expected, rel=1e-4, abs=2e-6), key
