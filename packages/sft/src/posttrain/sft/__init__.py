"""Supervised fine-tuning of language models: formats, loss masks, packing, LoRA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.core import registry

if TYPE_CHECKING:
    from posttrain.cli.mixture import DatasetConfig, DatasetMixtureConfig, get_dataset
    from posttrain.cli.scripts import (
        ScriptArguments,
        ScriptParser,
        TrlParser,
        get_kbit_device_map,
        get_peft_config,
        get_quantization_config,
    )
    from posttrain.lm.loading.arguments import ModelConfig
    from posttrain.sft.config import SFTConfig
    from posttrain.sft.trainer import SFTTrainer

__all__, __getattr__, __dir__ = registry.face(__name__)
