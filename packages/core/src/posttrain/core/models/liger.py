"""Replaces layers by Liger's Triton kernels."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from posttrain.core.errors import ConfigError, did_you_mean
from posttrain.core.models.wrapping import base_model, config_of, setting

logger = logging.getLogger(__name__)


def apply_liger(model: nn.Module, config: dict[str, bool] | None = None) -> str | None:
    """Replace layers of `model`, and of no other, by Liger's Triton kernels (https://github.com/linkedin/Liger-Kernel).
    Returns None, or the reason why the model was not changed. Raises a `ConfigError` for an unknown kernel in `config`.
    """
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as SUPPORTED
    except ImportError:
        return "use_liger_kernel=True has no effect: liger-kernel is not installed. Run: pip install liger-kernel"
    base = base_model(model)
    model_type = setting(config_of(base), "model_type") or type(base).__name__
    if model_type not in SUPPORTED:
        return f"use_liger_kernel=True has no effect: Liger has no kernels for {model_type!r} models."
    if not torch.accelerator.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "use_liger_kernel=True has no effect: Triton kernels need a GPU and none is visible."
    before = {name: _forward_of(module) for name, module in base.named_modules()}
    options, head = dict(config or {}), "fused_linear_cross_entropy"
    takes = inspect.signature(SUPPORTED[model_type]).parameters
    kernels = [name for name, one in takes.items() if isinstance(one.default, bool)]
    if kernels and (unknown := [name for name in options if name not in kernels]):  # which Liger leaves out silently
        of, near = f"Liger for {model_type!r} models: {', '.join(kernels)}", did_you_mean(unknown[0], kernels)
        raise ConfigError("liger_kernel_config", [f"{unknown[0]!r} is none of the kernels of {of}{near}"])
    if not hasattr(base, "lm_head") and head in takes:
        options.setdefault(head, False)  # it has the forward of a language model
    with _in_this_model_alone(base):
        _apply_liger_kernel_to_instance(model=base, **options)
    changed = Counter(type(m).__name__ for name, m in base.named_modules() if _forward_of(m) != before.get(name))
    listed = (
        ", ".join(f"{kind} x {count}" for kind, count in changed.items()) or "functions of the modelling code alone"
    )
    logger.info("Liger's kernels replace the forward of: %s.", listed)
    return None


@contextlib.contextmanager
def _in_this_model_alone(model: nn.Module) -> Iterator[None]:
    """Take back what Liger changes in the files of the model's classes within this context: it replaces classes and
    functions there, for every model that is made or called later, those on the CPU too. Forwards of `model` that call
    such a function are bound to the new one.
    """
    files = {name: sys.modules[name] for name in {type(module).__module__ for module in model.modules()}}
    before = {name: dict(vars(file)) for name, file in files.items()}
    yield
    for name, file in files.items():
        changed = {key: value for key, value in vars(file).items() if before[name].get(key) is not value}
        if not changed:
            continue
        names = {**vars(file)}
        vars(file).update({key: before[name][key] for key in changed})
        for module in model.modules():
            function: Any = getattr(module.forward, "__func__", None)
            if getattr(function, "__globals__", {}).get("__name__") == "transformers.utils.deprecation":
                function = function.__wrapped__  # what only renames an argument
            code = getattr(function, "__code__", None)
            if code is not None and function.__globals__ is vars(file) and set(changed) & set(code.co_names):
                own = types.FunctionType(code, names, code.co_name, function.__defaults__, function.__closure__)
                own.__kwdefaults__, own.__module__ = function.__kwdefaults__, function.__module__
                module.forward = types.MethodType(own, module)


def _forward_of(module: nn.Module) -> Any:
    return getattr(module.forward, "__func__", module.forward)
