"""Arguments about the model: two names of one thing, and what cannot work is refused together."""

from __future__ import annotations

import pytest
import torch

from posttrain.core.config import validate
from posttrain.core.errors import ConfigError
from posttrain.core.models.arguments import ModelSideArguments
from posttrain.lm.loading.arguments import ModelConfig
from tests import tiny

peft = pytest.importorskip("peft")


class Arguments(ModelSideArguments):
    def __init__(self, **values):
        super().__init__(**values)
        validate(self)


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_both_names_of_checkpointing_mean_the_same(name, recwarn):
    arguments = Arguments(**{name: True, f"{name}_kwargs": '{"use_reentrant": true}'})
    assert arguments.activation_checkpointing is True and arguments.gradient_checkpointing is True
    assert arguments.activation_checkpointing_kwargs == arguments.gradient_checkpointing_kwargs
    assert arguments.gradient_checkpointing_kwargs == {"use_reentrant": True}
    assert not recwarn.list


def test_checkpointing_is_off_by_default_and_no_longer_undecided():
    assert Arguments().activation_checkpointing is False and Arguments().gradient_checkpointing is False


def test_the_older_name_turns_off_what_a_config_turns_on_by_default():
    from dataclasses import dataclass

    @dataclass
    class OnByDefault(ModelSideArguments):
        activation_checkpointing: bool | None = True

    arguments = OnByDefault(gradient_checkpointing=False)
    validate(arguments)
    assert arguments.activation_checkpointing is False


def test_naming_a_compile_backend_or_mode_compiles():
    assert Arguments(torch_compile_backend="eager").torch_compile
    assert Arguments(torch_compile_mode="reduce-overhead").torch_compile
    assert not Arguments().torch_compile


def test_text_for_an_object_is_refused_also_where_a_parser_of_transformers_has_read_the_class():
    from transformers import HfArgumentParser

    from posttrain.core import TrainingArguments

    HfArgumentParser(TrainingArguments)
    with pytest.raises(ConfigError, match="activation_checkpointing_kwargs='reentrant' is not a JSON object"):
        TrainingArguments("out", activation_checkpointing_kwargs="reentrant")


def test_bad_model_arguments_are_reported_together():
    with pytest.raises(ConfigError, match=r"(?s)activation_checkpointing_kwargs='reentrant'.*neftune_noise_alpha=-1"):
        Arguments(neftune_noise_alpha=-1, activation_checkpointing_kwargs="reentrant")


def test_model_config_describes_an_adapter_only_when_asked():
    assert ModelConfig().peft_config() is None
    config = ModelConfig(use_peft=True, lora_r=4, lora_target_modules=["all-linear"], use_rslora=True)
    adapter = config.peft_config()
    assert (adapter.r, adapter.lora_alpha, adapter.lora_dropout) == (4, 32, 0.05)
    assert adapter.target_modules == "all-linear" and adapter.use_rslora and adapter.task_type == "CAUSAL_LM"
    assert adapter.init_lora_weights is True
    assert ModelConfig(use_peft=True, init_lora_weights="pissa").peft_config().init_lora_weights == "pissa"


def test_model_config_describes_quantization_only_when_asked():
    assert ModelConfig().quantization_config() is None
    four = ModelConfig(use_peft=True, load_in_4bit=True, dtype="bfloat16", use_bnb_nested_quant=True)
    four = four.quantization_config()
    assert four.load_in_4bit and four.bnb_4bit_quant_type == "nf4" and four.bnb_4bit_use_double_quant
    assert four.bnb_4bit_compute_dtype == torch.bfloat16
    assert ModelConfig(use_peft=True, load_in_8bit=True).quantization_config().load_in_8bit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"load_in_4bit": True, "load_in_8bit": True, "use_peft": True}, "cannot both hold"),
        ({"load_in_4bit": True}, "set use_peft=True"),
        ({"dtype": "bf16"}, "dtype='bf16' is not one of auto, float32"),
        ({"lora_task_type": "LM"}, "lora_task_type='LM' is not one of CAUSAL_LM"),
        ({"use_peft": True, "lora_target_parameters": ["experts.up"]}, "lora_dropout=0.05: .*set it to 0"),
        ({"use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_storage": "fp4"}, "'fp4' is not one of uint8, int8"),
        ({"use_peft": True, "lora_target_modules": []}, "lora_target_modules=.. adapts nothing; leave it out"),
        ({"lora_rank": 8}, "unknown argument 'lora_rank', did you mean 'lora_r"),
    ],
)
def test_model_config_refuses_what_cannot_work(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**arguments)


def test_a_second_adapter_is_refused_before_the_model_is_loaded(tmp_path):
    from peft import LoraConfig, get_peft_model

    get_peft_model(tiny.causal_lm("llama"), LoraConfig(r=4, task_type="CAUSAL_LM")).save_pretrained(tmp_path)
    asked = {"model_name_or_path": str(tmp_path), "use_peft": True}
    (problem,) = ModelConfig(**asked)._preflight()
    assert "holds an adapter" in problem and f"posttrain merge {tmp_path}" in problem
    assert [*ModelConfig(**asked, lora_r=4, lora_alpha=8, lora_dropout=0.0)._preflight()] == []  # it describes that one
