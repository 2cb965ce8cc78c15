"""On the same fixed rollouts, losses, gradient norms and metrics are those of trl's GRPOTrainer and RLOOTrainer."""

from __future__ import annotations

import dataclasses
import json
import os
import types

import pytest
import torch

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
trl = pytest.importorskip("trl")
gmpo = pytest.importorskip("trl.experimental.gmpo")

from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import posttrain.rl  # noqa: E402
from tests import tiny  # noqa: E402

WORDS = " ".join(tiny.CORPUS).split()
PROMPTS = [" ".join(WORDS[i : i + 3 + i % 3]) for i in range(8)]
LENGTHS = [f"completions/{end}_{part}length" for end in ("mean", "min", "max") for part in ("", "terminated_")]
SHARED = ("loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std", "entropy", "rewards/digit_sum/mean",
          "rewards/digit_sum/std", "num_tokens", "completions/clipped_ratio", *LENGTHS)  # fmt: skip
CLIPPING = [f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")]
OWN = {"cispo": ["cispo_clip_ratio"], "vespo": ["vespo/phi_seq_mean"], "sapo": []}


def digit_sum(completion_ids, **kwargs):
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def short(completion_ids, **kwargs):
    """A reward that does not apply to every completion."""
    return [None if len(ids) == 3 else -len(ids) / 4 for ids in completion_ids]


def rollout(prompts, trainer):
    """Completions that depend on the prompt and its place in its group alone; every third ends by itself."""
    tokenizer, counts = trainer.processing_class, {}
    ids = {"prompt_ids": [tokenizer(p)["input_ids"] for p in prompts], "completion_ids": [], "logprobs": None}
    for prompt in prompts:
        number = counts[prompt] = counts.get(prompt, -1) + 1
        length = 1 + (7 * number + len(prompt)) % 5
        words = [4 + (31 * number + 17 * place + 5 * len(prompt)) % 300 for place in range(length)]
        ids["completion_ids"].append([*words, 1] if number % 3 == 0 else words)
    return ids


def rollout_of_an_engine(prompts, trainer):
    """The same with log-probabilities that are near those of the policy in the beginning; some are unknown."""
    made = rollout(prompts, trainer)
    near = [
        [-5.85 + 0.3 * ((3 * token + place) % 7 - 3) for place, token in enumerate(ids)]
        for ids in made["completion_ids"]
    ]
    near[3][0] = None
    return made | {"logprobs": near}


def samples_elsewhere(trainer, package):
    """Let the trainer take what it is given for completions of vLLM."""
    if package is trl:
        trainer.use_vllm, trainer.vllm_generation = True, types.SimpleNamespace(sync_weights=lambda: None)
        trainer._last_loaded_step = -1
    else:
        trainer.args.use_vllm, trainer.generator = True, types.SimpleNamespace(sync_weights=lambda model: None)


def with_adapter(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    names = ["q_proj", "v_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=names, lora_dropout=0.0, init_lora_weights=False))


def peer(package, name):
    """`name` of the package; of trl, from where it keeps what is new."""
    return getattr(package, name) if hasattr(package, name) else getattr(gmpo, name)


def run(package, name, path, model="model", engine=False, lora=False, rewards=digit_sum, **changes):
    usual = dict(
        output_dir=str(path / package.__name__), per_device_train_batch_size=8, num_generations=4,
        max_completion_length=8, max_steps=4, learning_rate=0.1, optim="sgd", lr_scheduler_type="constant",
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
        gradient_checkpointing=False, shuffle_dataset=False, max_grad_norm=1.0,
    )  # fmt: skip
    args = peer(package, f"{name}Config")(**(usual | changes))
    rows = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    options = {"processing_class": tiny.tokenizer()}
    if name != "RLOO":
        options["rollout_func"] = rollout_of_an_engine if engine else rollout
    model = AutoModelForCausalLM.from_pretrained(path / model)
    model = with_adapter(model) if lora else model
    trainer = peer(package, f"{name}Trainer")(model, rewards, args=args, train_dataset=rows, **options)
    if name == "RLOO":
        engine_of(trainer, package)
    if engine:
        samples_elsewhere(trainer, package)
    trainer.train()
    return [record for record in trainer.state.log_history if "loss" in record]


def engine_of(trainer, package):
    """RLOO of trl takes no rollout function: what generates is replaced."""
    if package is trl:

        def generate(prompts):
            made = rollout(prompts, trainer)
            texts = trainer.processing_class.batch_decode(made["completion_ids"], skip_special_tokens=True)
            return made["prompt_ids"], made["completion_ids"], texts

        trainer._generate = generate
    else:
        trainer.rollout_func = rollout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("parity")
    tiny.causal_lm(initializer_range=0.1).save_pretrained(path / "model")
    tiny.mixture_of_experts(initializer_range=0.1).save_pretrained(path / "experts")
    return path


def compare(folder, name, keys, **changes):
    theirs, ours = run(trl, name, folder, **changes), run(posttrain.rl, name, folder, **changes)
    assert len(theirs) == len(ours) == 4
    assert not {key for record in theirs for key in record} - {key for record in ours for key in record} - {"step_time"}
    for key in keys:
        expected = [record[key] for record in theirs if record.get(key) is not None]
        assert expected, key
        assert [record[key] for record in ours if key in record] == pytest.approx(expected, rel=1e-4, abs=2e-6), key


@pytest.mark.rotated
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"])
@pytest.mark.parametrize("changes", [
    {}, {"num_iterations": 2, "beta": 0.1, "epsilon_high": 0.3},
    {"importance_sampling_level": "sequence", "num_iterations": 2},
], ids=str)  # fmt: skip
def test_grpo(loss_type, changes, folder):
    keys = [*SHARED, "kl"] if "beta" in changes else SHARED
    compare(folder, "GRPO", [*keys, *OWN.get(loss_type, CLIPPING)], loss_type=loss_type, **changes)


def test_gspo_token_is_gspo_where_the_tokens_of_a_completion_have_one_advantage(folder):
    """trl 1.16 has no ``sequence_token``; the paper's equations 11 and 16 say when the two are the same."""
    changes = {"loss_type": "grpo", "num_iterations": 2, "epsilon_high": 0.3}
    theirs = run(trl, "GRPO", folder, importance_sampling_level="sequence", **changes)
    ours = run(posttrain.rl, "GRPO", folder, importance_sampling_level="sequence_token", **changes)
    for key in ("loss", "grad_norm"):
        assert [one[key] for one in ours] == pytest.approx([one[key] for one in theirs], rel=1e-4, abs=2e-6)


@pytest.mark.parametrize("changes", [
    {}, {"num_iterations": 2, "epsilon": 0.05, "epsilon_high": 0.1}, {"num_iterations": 3, "beta": 0.1},
    {"top_entropy_quantile": 0.6},
], ids=str)  # fmt: skip
def test_gmpo(changes, folder):
    compare(folder, "GMPO", [*SHARED, *CLIPPING, *(["kl"] if "beta" in changes else [])], **changes)


@pytest.mark.rotated
@pytest.mark.parametrize("changes", [
    {"scale_rewards": "batch"}, {"scale_rewards": "none"}, {"multi_objective_aggregation": "normalize_then_sum"},
    {"delta": 1.5, "num_iterations": 2}, {"top_entropy_quantile": 0.5}, {"mask_truncated_completions": True},
    {"entropy_coef": 0.1}, {"entropy_coef": 0.1, "loss_type": "grpo", "steps_per_generation": 2,
    "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    {"off_policy_mask_threshold": 0.001, "num_iterations": 2}, {"temperature": 0.7},
    {"use_bias_correction_kl": False, "beta": 0.1, "num_iterations": 2},
    {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 100.0},
], ids=str)  # fmt: skip
def test_options_of_grpo(changes, folder):
    bonus = ["policy_loss", "entropy_coef"] if "entropy_coef" in changes else []
    compare(folder, "GRPO", [*SHARED, *bonus], **changes)


@pytest.mark.rotated
@pytest.mark.parametrize("changes", [
    {}, {"beta": 0.0}, {"num_iterations": 2}, {"normalize_advantages": True}, {"reward_clip_range": (0.2, 0.6)},
    {"num_iterations": 2, "epsilon": 0.05, "epsilon_high": 0.3}, {"temperature": 0.7},
    {"mask_truncated_completions": True},
    {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4,
    "num_iterations": 2}, {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5,
    "beta": 0.2},
], ids=str)  # fmt: skip
def test_rloo(changes, folder):
    keys = [*SHARED, *CLIPPING] + ["kl"] * (changes.get("beta") != 0.0)
    # What is replaced of trl's RLOO is also what counts tokens and lengths there.
    keys = [key for key in keys if not key.startswith("completions/") and key != "num_tokens"]
    if "mask_truncated_completions" in changes:
        keys.remove("loss")  # there, what is left out adds a constant to it, and nothing to its gradient
    compare(folder, "RLOO", keys, **changes)


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
@pytest.mark.parametrize("changes", [{}, {"router_aux_loss_coef": 0.5}, {"router_aux_loss_coef": 0.0}], ids=str)
def test_a_mixture_of_experts(name, changes, folder):
    aux = [] if changes.get("router_aux_loss_coef") == 0 else ["aux_loss"]
    compare(folder, name, ["loss", "grad_norm", "reward", *aux], model="experts", **changes)


@pytest.mark.parametrize(("name", "changes"), [
    ("GRPO", {"beta": 0.5, "num_iterations": 2}), ("RLOO", {"beta": 0.5}), ("GRPO", {"beta": 0.0}),
], ids=str)  # fmt: skip
def test_an_adapter_against_what_it_was(name, changes, folder):
    keys = ["loss", "grad_norm", "reward", "entropy", *(["kl"] if changes["beta"] else [])]
    compare(folder, name, keys, lora=True, **changes)


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
@pytest.mark.parametrize("weights", [None, [1.0, 0.25]])
def test_several_rewards(name, weights, folder):
    keys = ["loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std"]
    keys += [f"rewards/{reward}/{what}" for reward in ("digit_sum", "short") for what in ("mean", "std")]
    compare(folder, name, keys, rewards=[digit_sum, short], reward_weights=weights)


@pytest.mark.rotated
@pytest.mark.parametrize("changes", [
    {}, {"vllm_importance_sampling_mode": "token_truncate"},
    {"vllm_importance_sampling_mode": "token_mask", "num_iterations": 2},
    {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_min": 0.3, "beta": 0.1},
    {"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 1.5, "loss_type": "grpo"},
    {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask"},
    {"loss_type": "vespo", "num_iterations": 2, "vllm_importance_sampling_mode": "token_truncate"},
    {"loss_type": "cispo"}, {"off_policy_mask_threshold": 0.01}, {"vllm_importance_sampling_correction": False},
], ids=str)  # fmt: skip
def test_completions_of_vllm(changes, folder):
    keys = [*SHARED, *OWN.get(changes.get("loss_type"), CLIPPING)]
    if changes.get("vllm_importance_sampling_correction", True):
        ends = [f"importance_sampling_ratio/{end}" for end in ("min", "mean", "max")]
        keys += [
            f"sampling/{name}" for name in [*ends, "sampling_logp_difference/mean", "sampling_logp_difference/max"]
        ]
    compare(folder, "GRPO", keys, engine=True, **changes)


#: Two names of one argument, of which each package has its default under another.
TWO_NAMES = {"activation_checkpointing", "gradient_checkpointing"}
#: Meant differences, see docs/migrating.md.
DIFFERENT = {"restore_callback_states_from_checkpoint"}


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_every_argument_of_trl_is_known_with_its_default(name, tmp_path):
    theirs, kind = getattr(trl, f"{name}Config"), getattr(posttrain.rl, f"{name}Config")
    ours = {field.name: field.default for field in dataclasses.fields(kind)}
    for field in dataclasses.fields(theirs):
        if field.name in ours and field.name not in TWO_NAMES | DIFFERENT and field.default is not dataclasses.MISSING:
            assert ours[field.name] == field.default, field.name
        elif field.name not in ours:  # an earlier name, or one whose value then was that of today
            kind(output_dir=str(tmp_path), **{field.name: field.default})
    made = [package(output_dir=str(tmp_path), use_cpu=True, bf16=False) for package in (theirs, kind)]
    for argument in ("generation_batch_size", "steps_per_generation", "gradient_accumulation_steps", "num_generations"):
        assert getattr(made[0], argument) == getattr(made[1], argument), argument


def test_the_masks_of_tokens_and_completions_are_those_of_trl(tmp_path):
    torch.manual_seed(0)
    entropies, mask = torch.rand(6, 9), (torch.rand(6, 9) > 0.3).long()
    args = dict(
        max_completion_length=4, num_generations=2, per_device_train_batch_size=2, report_to="none", use_cpu=True
    )
    config = posttrain.rl.GRPOConfig(str(tmp_path), **args)
    parts = {"reward_funcs": digit_sum, "processing_class": tiny.tokenizer()}
    parts["train_dataset"] = Dataset.from_dict({"prompt": PROMPTS})
    ours = posttrain.rl.GRPOTrainer(tiny.causal_lm(), args=config, **parts)
    for threshold in (0.0, 0.3, 0.8, 1.0):
        theirs = trl.GRPOTrainer.get_high_entropy_mask(ours, entropies, mask, threshold)
        assert torch.equal(ours.get_high_entropy_mask(entropies, mask, threshold), theirs)
        assert 0 < theirs.sum() <= mask.sum()
    logps, sampled, advantages = torch.randn(6, 9), torch.randn(6, 9), torch.randn(6, 1)
    found = [
        kind.get_off_policy_mask(advantages, logps, sampled, mask.float(), 0.1)
        for kind in (posttrain.rl.GRPOTrainer, trl.GRPOTrainer)
    ]
    assert torch.equal(*found) and 0 < found[0].sum() < 6


@pytest.mark.parametrize("beta2", [1e-3, 0.5])
def test_a2po_on_given_completions_and_values(beta2, folder, tmp_path):
    a2po = pytest.importorskip("trl.experimental.a2po")
    values, records = {prompt: 0.1 * number for number, prompt in enumerate(PROMPTS)}, {}
    for package in (a2po, posttrain.rl):
        args = package.A2POConfig(
            output_dir=str(tmp_path / package.__name__), per_device_train_batch_size=8, max_steps=4, learning_rate=0.1,
            optim="sgd", lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none",
            use_cpu=True, bf16=False, disable_tqdm=True, gradient_checkpointing=False, beta2=beta2, beta1=0.5,
            max_completion_length=8, filter_all_incorrect=False,
        )  # fmt: skip
        rows = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        given, tokenizer = {} if package is a2po else {"rollout_func": rollout}, tiny.tokenizer()
        tokenizer.padding_side = "left"  # which trl needs to generate
        trainer = package.A2POTrainer(
            model, lengths, args=args, train_dataset=rows, processing_class=tokenizer, **given
        )
        if package is a2po:
            trainer._optimal_values = values
            model.generate = lambda trainer=trainer, **inputs: written(trainer, **inputs)
        else:
            # of one reward, the value is that reward
            trainer.reference_rewards = {json.dumps(prompt): [value] for prompt, value in values.items()}
        trainer.train()
        records[package] = [record for record in trainer.state.log_history if "loss" in record]
    for key in ("loss", "grad_norm", "reward", "v_star", "advantage", "implicit_reward"):
        expected = [record[key] for record in records[a2po]]
        assert [record[key] for record in records[posttrain.rl]] == pytest.approx(expected, rel=1e-4, abs=2e-6), key


def lengths(completions, **kwargs):
    return [len(completion) % 3 / 2 for completion in completions]


def written(trainer, input_ids, attention_mask, **others):
    """What `rollout` gives behind these prompts, as `generate` does."""
    tokenizer = trainer.processing_class
    asked = [tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(input_ids, attention_mask, strict=True)]
    made = [torch.tensor(ids) for ids in rollout(asked, trainer)["completion_ids"]]
    pad = tokenizer.pad_token_id
    return torch.cat([input_ids, torch.nn.utils.rnn.pad_sequence(made, batch_first=True, padding_value=pad)], 1)
