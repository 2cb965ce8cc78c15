"""Every field of every config, given what it cannot take: refused by name when the config is made, or it works."""

from __future__ import annotations

import dataclasses
import math
import warnings

import pytest

from posttrain.core import Trainer, TrainingArguments
from posttrain.core.config import field_types
from posttrain.core.errors import ConfigError
from posttrain.rl import (
    CPOConfig,
    DistillationConfig,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    ORPOConfig,
    ReinforcePlusPlusConfig,
    RewardTrainer,
    RLOOConfig,
)
from posttrain.seq2seq import Seq2SeqTrainer
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny
from tests.contract.test_every_field import CONFIGS
from tests.contract.trainers import TRAINERS

HUGE, NAN, INF = 10**30, float("nan"), float("inf")
#: What a config cannot be made without.
NEEDED = {"ServerDistillationConfig": {"teacher_model_server_url": "http://localhost:1"}}
WRONG = [-1, 0, None, HUGE, NAN, INF, "x", [None], (1, 2), {"a": 1}, object()]


def own_fields(config_class: type) -> list[dataclasses.Field]:
    """The fields that no config before it in the list has in the same form."""
    earlier = CONFIGS[: CONFIGS.index(config_class)]
    known = {(f.name, str(f.default), f.metadata.get("help")) for c in earlier for f in dataclasses.fields(c)}
    return [
        f
        for f in dataclasses.fields(config_class)
        if f.init and (f.name, str(f.default), f.metadata.get("help")) not in known
    ]


@pytest.mark.parametrize("config_class", CONFIGS, ids=lambda c: c.__name__)
def test_what_a_field_cannot_take_is_refused_by_name_or_works(config_class):
    unclear = []
    for field in own_fields(config_class):
        for value in WRONG:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    config_class(**NEEDED.get(config_class.__name__, {}) | {field.name: value})
            except ConfigError as error:
                if field.name not in str(error):
                    unclear.append(f"{field.name}={value!r}: {error}")
            except Exception as error:
                unclear.append(f"{field.name}={value!r}: {type(error).__name__}: {error}")
    assert unclear == []


@pytest.mark.parametrize("config_class", CONFIGS, ids=lambda c: c.__name__)
def test_no_number_may_be_nan_infinite_or_beyond_64_bits(config_class):
    accepted = []
    for field in own_fields(config_class):
        if not {int, float} & set(field_types(config_class).get(field.name, ())):
            continue
        may_be_infinite = field.metadata["help"].bounds.get("max") == math.inf
        for value in (NAN, HUGE, *(() if may_be_infinite else (INF,))):
            try:
                config_class(**{field.name: value})
                accepted.append(f"{field.name}={value!r}")
            except ConfigError:
                pass
    assert accepted == []


@pytest.mark.parametrize(
    ("config_class", "arguments", "parts"),
    [
        (GRPOConfig, {"num_generations": 0}, ["num_generations=0 must be >= 1"]),
        (GRPOConfig, {"num_generations": None}, ["num_generations=None"]),
        (GRPOConfig, {"num_generations": 1}, ["num_generations=1 leaves no other completion"]),
        (RLOOConfig, {"num_generations": 1}, ["num_generations=1 must be >= 2"]),
        (GRPOConfig, {"max_completion_length": None}, ["max_completion_length=None bounds nothing", "512"]),
        (RLOOConfig, {"include_for_metrics": ["inputs"]}, ["include_for_metrics=['inputs'] has no effect"]),
        (GRPOConfig, {"batch_eval_metrics": True}, ["batch_eval_metrics=True has no effect"]),
        (GRPOConfig, {"pad_to_multiple_of": 0}, ["pad_to_multiple_of=0 must be >= 1"]),
        (ReinforcePlusPlusConfig, {"loss_type": "bnp"}, ["loss_type='bnp'", "did you mean 'bnpo'"]),
        (DistillationConfig, {"teacher_server_urls": "here"}, ["teacher_server_urls='here' is not a JSON object"]),
        (DPOConfig, {"model_init_kwargs": "bf16"}, ["model_init_kwargs='bf16' is not a JSON object; give a dict"]),
        (GRPOConfig, {"reward_weights": ["a"]}, ["reward_weights=['a'] must hold values of type float"]),
        (DPOConfig, {"loss_type": [5]}, ["loss_type=[5] must hold values of type str"]),
        (GRPOConfig, {"reward_weights": [1, NAN]}, ["reward_weights=[1, nan] must hold finite numbers"]),
        (DPOConfig, {"loss_weights": [INF]}, ["loss_weights=[inf] must hold finite numbers"]),
        (DPOConfig, {"loss_weights": ["x"]}, ["loss_weights=['x'] must hold values of type float"]),
        (DPOConfig, {"beta": -1}, ["beta=-1 must be > 0"]),
        (KTOConfig, {"desirable_weight": NAN}, ["desirable_weight is NaN"]),
        (CPOConfig, {"label_smoothing": 0.5}, ["label_smoothing=0.5 must be < 0.5"]),
        (ORPOConfig, {"beta": INF}, ["beta=inf must be finite"]),
        (SFTConfig, {"max_length": 10**30}, ["max_length"]),
        (SFTConfig, {"train_on": [7, "user"]}, ["train_on=[7, 'user'] must hold values of type str"]),
        (TrainingArguments, {"label_names": [1]}, ["label_names=[1] must hold values of type str"]),
        (TrainingArguments, {"learning_rate": INF}, ["learning_rate=inf must be finite"]),
        (TrainingArguments, {"logging_steps": INF}, ["logging_steps=inf must be finite"]),
        (TrainingArguments, {"optim_target_modules": [None]}, ["optim_target_modules=[None] must hold"]),
        (TrainingArguments, {"num_train_epochs": INF}, ["num_train_epochs=inf must be finite"]),
        (TrainingArguments, {"parallelism_config": 5}, ["parallelism_config=5 is no dict"]),
        (TrainingArguments, {"warmup_steps": 1.5}, ["warmup_steps=1.5 must be whole above 1"]),
        (
            TrainingArguments,
            {"gradient_checkpointing_kwargs": {"use_reentrnt": True}},
            ["gradient_checkpointing_kwargs", "'use_reentrnt' is not one of", "did you mean 'use_reentrant'"],
        ),
        (RLOOConfig, {"reward_clip_range": ("a", "b")}, ["reward_clip_range=['a', 'b'] must be two numbers"]),
        (RLOOConfig, {"reward_clip_range": (NAN, 1.0)}, ["must be two numbers, the lower one first"]),
        (RLOOConfig, {"reward_clip_range": (1.0, INF, 2.0)}, ["must be two numbers, the lower one first"]),
        (TrainingArguments, {"liger_kernel_config": {"rope": True}}, ["liger_kernel_config", "use_liger_kernel=True"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_these_are_refused_with_what_is_allowed(config_class, arguments, parts):
    with pytest.raises(ConfigError) as caught:
        config_class("out", **arguments)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce++"])
def test_metrics_that_nobody_would_call_are_refused(name, tmp_path):
    from posttrain.rl import GRPOTrainer
    from tests import tiny

    with pytest.raises(ConfigError, match="compute_metrics is never called"):
        GRPOTrainer(
            tiny.causal_lm(), lambda completion_ids: [0.0] * len(completion_ids),
            GRPOConfig(str(tmp_path), use_cpu=True), [{"prompt": "a"}], None, tiny.tokenizer(),
            compute_metrics=lambda predictions: {},
        )  # fmt: skip
    with pytest.raises(ConfigError, match="include_for_metrics"):
        TRAINERS[name](tmp_path, include_for_metrics=["inputs"])


@pytest.mark.parametrize("arguments", [
    {"max_grad_norm": INF}, {"max_grad_norm": 0}, {"adam_epsilon": 1e-30}, {"warmup_steps": 10**6},
    {"eval_delay": 10**9}, {"save_total_limit": 0}, {"gradient_accumulation_steps": 10**6},
    {"per_device_train_batch_size": 10**6}, {"seed": 0}, {"learning_rate": 0}, {"logging_steps": 10**9},
    {"num_train_epochs": 1e-9}, {"weight_decay": 0.9}, {"data_seed": 0},
], ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()))  # fmt: skip
def test_extremes_that_are_accepted_train(arguments, tmp_path):
    trainer = TRAINERS["causal-lm"](tmp_path, **({"num_train_epochs": 1} | arguments))
    trainer.train()
    assert trainer.state.global_step >= 1
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())


@pytest.mark.parametrize("trainer", [Trainer, SFTTrainer, DPOTrainer, RewardTrainer, GRPOTrainer, Seq2SeqTrainer])
def test_a_config_of_another_package_is_named_with_its_home_and_with_ours(trainer):
    foreign = type("TrainingArguments", (), {"__module__": "transformers.training_args"})()
    wanted = TrainingArguments if trainer is Trainer else trainer.config_class
    home = ".".join(wanted.__module__.split(".")[:2])
    said = rf"args is of type transformers\.TrainingArguments; pass .*from {home} import {wanted.__name__}\."
    rewards = {"reward_funcs": len} if trainer is GRPOTrainer else {}
    with pytest.raises(TypeError, match=said):
        trainer(model=tiny.causal_lm(), args=foreign, train_dataset=[{"prompt": "a"}], **rewards)
    with pytest.raises(TypeError, match="args is of type dict; pass"):
        trainer(model=tiny.causal_lm(), args={}, train_dataset=[{"prompt": "a"}], **rewards)


def test_a_config_in_the_place_of_the_reference_is_named(tmp_path):
    with pytest.raises(TypeError, match="DPOTrainer takes ref_model before args, as trl's does; pass args="):
        DPOTrainer(tiny.causal_lm(), DPOTrainer.config_class(str(tmp_path), use_cpu=True))
