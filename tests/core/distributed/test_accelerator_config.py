"""`accelerator_config`: what has a meaning here is done, the rest refused with the reason."""

import json

import pytest
import torch

from posttrain.core import TrainingArguments
from posttrain.core.errors import ConfigError
from tests.contract.trainers import TRAINERS


def problems(**options):
    with pytest.raises(ConfigError) as caught:
        TrainingArguments(accelerator_config=options)
    return str(caught.value)


def test_it_is_read_from_a_dict_a_string_a_file_or_transformers_own_class(tmp_path):
    from transformers.trainer_pt_utils import AcceleratorConfig as Theirs

    path = tmp_path / "accelerator.json"
    path.write_text(json.dumps({"non_blocking": True}))
    for given in ({"non_blocking": True}, '{"non_blocking": true}', str(path), Theirs(non_blocking=True)):
        args = TrainingArguments(accelerator_config=given)
        assert args.accelerator_config.non_blocking is True and args.accelerator_config.even_batches is True
        assert TrainingArguments(**args.to_dict()).accelerator_config == args.accelerator_config
    args.validate()  # twice is once
    assert TrainingArguments().accelerator_config.split_batches is False
    with pytest.raises(ConfigError, match="no dict, JSON object or JSON file"):
        TrainingArguments(accelerator_config=str(tmp_path / "missing.json"))
    with pytest.raises(NotImplementedError, match="Pass an instance"):
        TrainingArguments(accelerator_config=Theirs)


def test_what_has_no_effect_is_refused_with_the_reason():
    assert "every process reads its own rows" in problems(dispatch_batches=True)
    assert "can be resumed" in problems(use_seedable_sampler=False)
    assert "never spans two epochs" in problems(gradient_accumulation_kwargs={"sync_with_dataloader": False})
    assert "counts optimizer steps" in problems(gradient_accumulation_kwargs={"adjust_scheduler": False})
    assert "did you mean 'split_batches'" in problems(split_batch=True)
    assert "did you mean 'num_steps'" in problems(gradient_accumulation_kwargs={"num_step": 2})


def test_num_steps_is_accumulation_unless_both_are_given():
    options = {"gradient_accumulation_kwargs": {"num_steps": 4}}
    assert TrainingArguments(accelerator_config=options).gradient_accumulation_steps == 4
    assert TrainingArguments(accelerator_config=options, gradient_accumulation_steps=4)
    with pytest.raises(ConfigError, match="num_steps=4 and gradient_accumulation_steps=2 are both given"):
        TrainingArguments(accelerator_config=options, gradient_accumulation_steps=2)


def test_split_batches_divides_the_batch_between_processes(monkeypatch):
    options = {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 6}
    args = TrainingArguments(**options)
    assert args.train_batch_size == 6
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (args.train_batch_size, args.eval_batch_size) == (3, 4)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="set per_device_train_batch_size to a multiple of 4"):
        args.validate()


def test_non_blocking_follows_pinned_memory_unless_it_is_said(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "posttrain.core.data.pipeline.to_device",
        lambda inputs, device, non_blocking: seen.append(non_blocking) or inputs,
    )
    for config in (None, {"non_blocking": True}):
        TRAINERS["causal-lm"](tmp_path, accelerator_config=config)._prepare_inputs({"x": torch.ones(1)})
    assert seen == [False, True]  # use_cpu pins nothing
    assert TrainingArguments(dataloader_pin_memory=True).non_blocking


def test_gradients_may_be_averaged_after_each_micro_batch(tmp_path, monkeypatch):
    import contextlib

    for options, expected in [({}, [False, True]), ({"sync_each_batch": True}, [True, True])]:
        config, seen = {"gradient_accumulation_kwargs": options or None}, []
        trainer = TRAINERS["causal-lm"](
            tmp_path / str(len(options)), max_steps=1, gradient_accumulation_steps=2, accelerator_config=config
        )

        def sync(model, when, seen=seen):
            seen.append(when)
            return contextlib.nullcontext()

        monkeypatch.setattr(trainer.dist, "sync_gradients", sync)
        trainer.train()
        assert seen == expected
