"""Supervised fine-tuning of language models: formats, loss masks, packing, LoRA."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.sft.config import SFTConfig
    from posttrain.sft.trainer import SFTTrainer

__all__ = ["SFTConfig", "SFTTrainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"posttrain.sft has no {name!r}; it has {' and '.join(__all__)}")
    return getattr(importlib.import_module("posttrain.sft." + {"SFTConfig": "config"}.get(name, "trainer")), name)
