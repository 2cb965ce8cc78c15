"""Replaces layers by Liger's Triton kernels."""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import Any

import torch
from torch import nn

from posttrain.core.models.wrapping import base_model, config_of

logger = logging.getLogger(__name__)


def apply_liger(model: nn.Module, config: dict[str, bool] | None = None) -> str | None:
    """Replace layers by Liger's Triton kernels (https://github.com/linkedin/Liger-Kernel).

    Returns:
        None, or the reason why the model was not changed.
    """
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as SUPPORTED
    except ImportError:
        return "use_liger_kernel=True has no effect: liger-kernel is not installed. Run: pip install liger-kernel"
    base = base_model(model)
    model_type = getattr(config_of(base), "model_type", type(base).__name__)
    if model_type not in SUPPORTED:
        return f"use_liger_kernel=True has no effect: Liger has no kernels for {model_type!r} models."
    if not torch.accelerator.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "use_liger_kernel=True has no effect: Triton kernels need a GPU and none is visible."
    before = {name: _forward_of(module) for name, module in base.named_modules()}
    _apply_liger_kernel_to_instance(model=base, **(config or {}))
    changed = Counter(type(m).__name__ for name, m in base.named_modules() if _forward_of(m) != before.get(name))
    listed = (
        ", ".join(f"{kind} x {count}" for kind, count in changed.items()) or "functions of the modelling code alone"
    )
    logger.info("Liger's kernels replace the forward of: %s.", listed)
    return None


def _forward_of(module: nn.Module) -> Any:
    return getattr(module.forward, "__func__", module.forward)
