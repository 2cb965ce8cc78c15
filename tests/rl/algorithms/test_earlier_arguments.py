"""Arguments of trl's earlier versions, given to a trainer or to its config."""

from __future__ import annotations

import warnings

import pytest

from posttrain.core.errors import ConfigError
from posttrain.rl import DPOConfig, DPOTrainer, GRPOConfig, KTOConfig, ORPOConfig, RewardConfig, RLOOConfig, RLOOTrainer
from tests import tiny

ROWS = [{"prompt": "Betty is saving", "chosen": " money for a new wallet.", "rejected": " half."}] * 4


@pytest.mark.parametrize("config_class", [DPOConfig, KTOConfig, ORPOConfig, RewardConfig, GRPOConfig, RLOOConfig])
def test_a_limit_of_prompts_is_taken_with_a_word_and_can_be_read(config_class):
    with pytest.warns(FutureWarning, match="max_prompt_length has no effect"):
        config = config_class("out", max_prompt_length=128)
    assert config.max_prompt_length == 128


def test_a_trainer_takes_what_was_its_own_in_earlier_versions(tmp_path):
    args = DPOConfig(str(tmp_path), max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = DPOTrainer(
            tiny.causal_lm(), None, args=args, train_dataset=ROWS, tokenizer=tiny.tokenizer(), beta=0.2, max_length=64,
            max_prompt_length=32, max_target_length=32, label_pad_token_id=-100, padding_value=0, loss_type="ipo",
            generate_during_eval=False, is_encoder_decoder=False, truncation_mode="keep_end", model_adapter_name=None,
        )  # fmt: skip
    assert (trainer.beta, trainer.args.max_length, trainer.args.truncation_mode) == (0.2, 64, "keep_end")
    assert trainer.args.loss_type == ["ipo"]
    assert any("max_prompt_length has no effect" in str(each.message) for each in said)
    written = DPOConfig(str(tmp_path), beta=0.1, report_to="none", use_cpu=True)  # 0.1 is the default
    with pytest.raises(ConfigError, match="beta=0.2 was passed to DPOTrainer, and beta=0.1 in its args"):
        DPOTrainer(tiny.causal_lm(), None, args=written, train_dataset=ROWS, beta=0.2)
    with pytest.raises(ConfigError, match="DPOTrainer: reference_free=True has no effect: .*CPOTrainer"):
        DPOTrainer(tiny.causal_lm(), None, args=args, train_dataset=ROWS, reference_free=True)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_arguments_of_the_first_rloo_trainer_have_their_effect():
    args = RLOOConfig(
        "out", rloo_k=4, response_length=53, kl_coef=0.3, cliprange=0.1, num_ppo_epochs=2, normalize_advantage=True,
        per_device_train_batch_size=4, reward_model_path="a/b", stop_token="eos", num_mini_batches=1,
    )  # fmt: skip
    assert (args.num_generations, args.max_completion_length, args.beta, args.epsilon) == (4, 53, 0.3, 0.1)
    assert (args.num_iterations, args.normalize_advantages, args.reward_funcs) == (2, True, ["a/b"])
    with pytest.raises(ConfigError, match="missing_eos_penalty=1.0 has no effect: write a reward function"):
        RLOOConfig("out", missing_eos_penalty=1.0)


def test_the_first_rloo_trainers_arguments_have_their_effect(tmp_path):
    config = RLOOConfig(
        str(tmp_path), rloo_k=2, kl_coef=0.1, max_completion_length=4, per_device_train_batch_size=2, max_steps=1,
        report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    policy, reference = tiny.causal_lm(), tiny.causal_lm(seed=1)
    rows = [{"prompt": "Betty is saving"}] * 4
    given = {"processing_class": tiny.tokenizer(), "train_dataset": rows}

    def lengths(completions, **_):
        return [float(len(each)) for each in completions]

    with pytest.warns(FutureWarning) as said:
        run = RLOOTrainer(
            config=config, policy=policy, ref_policy=reference, reward_model=lengths, data_collator=dict, **given
        )
    messages = " ".join(str(each.message) for each in said)
    for old, new in {"config": "args", "policy": "model", "reward_model": "reward_funcs"}.items():
        assert f"RLOOTrainer: {old}= is now {new}=; both work." in messages
    assert "data_collator= has no effect" in messages
    assert run.args is config and run.model is policy and run.ref_model is reference and run.reward_funcs == [lengths]
    run.train()
    assert run.state.global_step == 1 and run.state.log_history[0]["kl"] > 0
    with pytest.raises(ValueError, match="got both model= and its earlier name policy="):
        RLOOTrainer(policy, lengths, config, policy=policy, **given)
    with pytest.raises(TypeError, match="ref_policy is of type str; pass a loaded model"):
        RLOOTrainer(policy, lengths, config, ref_policy="somewhere", **given)
