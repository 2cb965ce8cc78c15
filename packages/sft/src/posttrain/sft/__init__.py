"""Supervised fine-tuning of language models: formats, loss masks, packing, LoRA."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

_HOME_OF = {"SFTConfig": "posttrain.sft.config", "SFTTrainer": "posttrain.sft.trainer"}
# Scripts import these together with the trainer.
_HOME_OF |= {"ModelConfig": "posttrain.lm.loading.arguments"} | dict.fromkeys(
    "ScriptArguments ScriptParser TrlParser get_kbit_device_map get_peft_config get_quantization_config".split(),
    "posttrain.cli.scripts",
)
_HOME_OF |= dict.fromkeys(("DatasetConfig", "DatasetMixtureConfig", "get_dataset"), "posttrain.cli.mixture")
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        if name.startswith("__"):
            raise AttributeError(f"module 'posttrain.sft' has no attribute {name!r}")
        from posttrain.compat.absent_names import missing_name

        raise missing_name("posttrain.sft", name, __all__)
    return getattr(importlib.import_module(_HOME_OF[name]), name)
