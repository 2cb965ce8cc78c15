"""Scripts written for trl parse their arguments as before."""

import dataclasses
import os

import pytest
from transformers import HfArgumentParser

from posttrain.core import ModelConfig, ScriptArguments, ScriptParser, TrainingArguments
from posttrain.core.errors import ConfigError
from posttrain.core.scripts import get_kbit_device_map, get_peft_config, get_quantization_config

WORDS = [
    "--dataset_name", "imdb", "--dataset_config", "plain", "--dataset_streaming", "--output_dir", "out", "--learning_rate", "1e-3",
    "--model_name_or_path", "some/model", "--torch_dtype", "bfloat16", "--use_peft", "--lora_r", "4",
    "--lora_target_modules", "q_proj", "v_proj", "--ignore_bias_buffers",
]  # fmt: skip


def check(script, args, model):
    assert (script.dataset_name, script.dataset_config, script.dataset_streaming) == ("imdb", "plain", True)
    assert script.ignore_bias_buffers and script.dataset_train_split == "train" and script.dataset_test_split == "test"
    assert args.learning_rate == 1e-3 and model.dtype == model.torch_dtype == "bfloat16"
    lora = get_peft_config(model)
    assert (lora.r, lora.lora_alpha, set(lora.target_modules)) == (4, 32, {"q_proj", "v_proj"})


def test_hf_argument_parser_reads_the_classes_together():
    check(*HfArgumentParser((ScriptArguments, TrainingArguments, ModelConfig)).parse_args_into_dataclasses(WORDS))


def test_the_script_parser_reads_flags():
    check(*ScriptParser((ScriptArguments, TrainingArguments, ModelConfig)).parse_args_and_config(WORDS))


def test_flags_go_before_a_file_and_a_file_may_set_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("A_SETTING", "old")
    file = tmp_path / "run.yaml"
    file.write_text("output_dir: out\nlearning_rate: 1e-4\nseed: 7\nenv:\n  A_SETTING: 12\n")
    monkeypatch.setattr("sys.argv", ["train.py", "--config", str(file), "--learning_rate", "2e-4"])
    (args,) = ScriptParser(TrainingArguments).parse_args_and_config()
    assert (args.learning_rate, args.seed, os.environ["A_SETTING"]) == (2e-4, 7, "12")


def test_a_scripts_own_dataclass_and_unknown_words():
    @dataclasses.dataclass
    class Own:
        depth: int = 2
        shout: bool = False

    words = ["--depth", "3", "--shout", "--colour", "red", "blue"]
    own, rest = ScriptParser((Own,)).parse_args_and_config(words, return_remaining_strings=True)
    assert own == Own(3, True) and rest == ["--colour", "red", "blue"]
    assert ScriptParser(Own).parse_args_and_config(words, fail_with_unknown_args=False) == (Own(3, True),)
    with pytest.raises(ConfigError, match="unknown argument 'dept', did you mean 'depth'"):
        ScriptParser(Own).parse_args_and_config(["--dept", "3"])


def test_no_quantization_and_no_adapter_unless_asked_for():
    assert get_peft_config(ModelConfig()) is None and get_quantization_config(ModelConfig()) is None
    with pytest.raises(ConfigError, match="set use_peft=True"):
        ModelConfig(load_in_4bit=True)


def test_a_quantised_model_goes_whole_to_the_gpu_of_its_process(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert get_kbit_device_map() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert get_kbit_device_map() == {"": 3}


def test_the_names_are_where_scripts_look_for_them():
    import posttrain.sft as sft

    for name in ("ModelConfig", "ScriptArguments", "TrlParser", "get_peft_config", "get_quantization_config"):
        assert getattr(sft, name).__module__.startswith("posttrain.core")
    with pytest.raises(AttributeError, match=r"SFTConfig\(packing=True\)"):
        sft.ConstantLengthDataset  # noqa: B018
