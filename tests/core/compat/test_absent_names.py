"""Names that trl or transformers have, or had, and a package of ours does not, are answered with what to use
instead.
"""

from __future__ import annotations

import importlib

import pytest

from posttrain.compat import absent_names

FACES = ("core", "sft", "rl", "seq2seq")
#: What trl 1.16 exports, and what earlier versions did.
OF_TRL = """
    AlignPropConfig AlignPropTrainer AutoModelForCausalLMWithValueHead AutoModelForSeq2SeqLMWithValueHead BCOConfig
    BCOTrainer BEMACallback BaseBinaryJudge BaseJudge BasePairwiseJudge BaseRankJudge BestOfNSampler CPOConfig
    CPOTrainer ConstantLengthDataset DDPOConfig DDPOTrainer DPOConfig DPOTrainer DataCollatorForCompletionOnlyLM
    DatasetMixtureConfig DefaultDDPOStableDiffusionPipeline DistillationConfig DistillationTrainer GKDConfig GKDTrainer
    GRPOConfig GRPOTrainer HfPairwiseJudge IterativeSFTConfig IterativeSFTTrainer KTOConfig KTOTrainer
    LogCompletionsCallback MergeModelCallback ModelConfig NashMDConfig NashMDTrainer ORPOConfig ORPOTrainer
    OnlineDPOConfig OnlineDPOTrainer OpenAIPairwiseJudge PPOConfig PPOTrainer PPOv2Config PPOv2Trainer PRMConfig
    PRMTrainer PairRMJudge PreTrainedModelWrapper RLOOConfig RLOOTrainer RewardConfig RewardTrainer RichProgressCallback
    SFTConfig SFTTrainer ScriptArguments SyncRefModelCallback TextEnvironment TextHistory TrlParser WeaveCallback
    WinRateCallback XPOConfig XPOTrainer add_response_schema apply_chat_template chat_template_utils clone_chat_template
    create_reference_model data_utils extract_prompt get_dataset get_peft_config get_quantization_config
    get_training_chat_template init_zero_verbose is_conversational is_conversational_from_value
    maybe_apply_chat_template maybe_convert_to_chatml maybe_extract_prompt maybe_reformat_dpo_to_kto
    maybe_unpair_preference_dataset models pack_dataset pack_examples prepare_multimodal_messages scripts
    setup_chat_format supports_tool_calling trainer truncate_dataset unpair_preference_dataset
""".split()


def asked(package: str, name: str) -> tuple[str, str]:
    """What an import of `name` and what its attribute are answered with; empty where it is there."""
    module, answers = importlib.import_module(package), []
    for statement in (f"from {package} import {name}", f"module.{name}"):
        try:
            exec(statement, {"module": module})
            answers.append("")
        except (ImportError, AttributeError) as error:
            answers.append(str(error))
    return answers[0], answers[1]


@pytest.mark.parametrize("face", FACES)
def test_every_name_of_trl_is_there_or_answered(face):
    package = f"posttrain.{face}"
    for name in OF_TRL:
        imported, read = asked(package, name)
        assert imported == read, name
        if imported and name != "models" and name != "trainer":
            assert imported.startswith(f"{package} has no {name!r}: "), imported
            there = imported.split("from ")[-1].split(" import")[0] if "it is in posttrain" in imported else None
            assert there is None or hasattr(importlib.import_module(there), name)


def test_the_list_is_that_of_the_installed_trl():
    trl = pytest.importorskip("trl")
    names = [name for name in trl.__all__ if not importlib.util.find_spec("trl") or not name.startswith("_")]
    unanswered = [name for name in names if not any(name in vars_of(face) for face in FACES)]
    assert [name for name in unanswered if name not in absent_names.INSTEAD] == []


def vars_of(face: str) -> list[str]:
    return importlib.import_module(f"posttrain.{face}").__all__


def test_the_one_import_of_a_script_for_preferences_changes_its_package_alone():
    """As the scripts of trl for DPO, KTO, GRPO and reward models import."""
    from posttrain.rl import (  # noqa: F401
        DatasetMixtureConfig,
        DPOTrainer,
        ModelConfig,
        ScriptArguments,
        TrlParser,
        get_dataset,
        get_kbit_device_map,
        get_peft_config,
        get_quantization_config,
    )


def test_an_import_raises_import_error_and_an_attribute_attribute_error():
    from posttrain import rl

    with pytest.raises(ImportError, match="GRPOTrainer, RLOOTrainer"):
        from posttrain.rl import PPOTrainer  # noqa: F401
    with pytest.raises(AttributeError, match="GRPOTrainer, RLOOTrainer"):
        rl.PPOTrainer  # noqa: B018
    assert not hasattr(rl, "PPOTrainer") and getattr(rl, "PPOTrainer", None) is None
    with pytest.raises(ImportError, match="did you mean 'GRPOTrainer'"):
        from posttrain.rl import GRPOTrianer  # noqa: F401
    with pytest.raises(ImportError, match="from transformers import AutoModelForCausalLM"):
        from posttrain.sft import AutoModelForCausalLM  # noqa: F401
    with pytest.raises(ImportError, match="from posttrain.sft import SFTTrainer"):
        from posttrain.rl import SFTTrainer  # noqa: F401
    with pytest.raises(ImportError, match="accuracy_reward"):
        from posttrain.core import accuracy_reward  # noqa: F401


def test_what_is_named_instead_exists():
    import re

    for why in absent_names.INSTEAD.values():
        for package, name in re.findall(r"posttrain\.(\w+)\.(\w+)", why):
            assert hasattr(importlib.import_module(f"posttrain.{package}"), name), why
