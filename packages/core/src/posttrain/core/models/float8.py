"""Matrix products in float8 (8 bits, with a scale for each matrix), through torchao.

Micikevicius et al. 2022, FP8 formats for deep learning, https://arxiv.org/abs/2209.05433. Weights, gradients and
optimizer state keep their type: inputs, weights and gradients are rounded for each product, by the largest number in
them.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from posttrain.core.data import accelerator
from posttrain.core.errors import require
from posttrain.core.models.wrapping import output_embedding

logger = logging.getLogger(__name__)

PACKAGE = "torchao>=0.11"
#: The kernels take matrices whose sides are multiples of this.
MULTIPLE = 16


def problem(use_cpu: bool) -> str | None:
    """Why this machine cannot multiply in float8, as a sentence; None if it can."""
    needs = "fp8=True needs a GPU that multiplies float8 (compute capability 8.9 or newer, such as L4, RTX 40 or H100)"
    if use_cpu or (found := accelerator.capability()) is None:
        where = "the CPU" if use_cpu or (kind := accelerator.gpu()) is None else kind
        return f"{needs}, and this run is on {where}; set bf16=True instead"
    if found < (8, 9):
        name = accelerator.name(torch.device(accelerator.CUDA))
        return f"{needs}, and {name} has {found[0]}.{found[1]}; set bf16=True instead"
    return None


def use_float8(model: nn.Module, emulate: bool = False, compiled: bool = True) -> int:
    """Let the linear layers of `model` multiply in float8, but for its head and for adapters; how many do.

    May be called again. Parameters stay the same objects under the same names.

    Args:
        emulate: compute the same numbers in float32, on any device: for tests.
        compiled: whether the layers will be compiled; without it, a warning.
    """
    if not compiled:
        logger.warning(
            "fp8=True without torch_compile=True rounds in kernels of their own, which usually costs more time than "
            "float8 saves. Set torch_compile=True too."
        )
    torchao = require("torchao.float8", PACKAGE, why="fp8=True")
    head = output_embedding(model)

    def fits(module: nn.Module, name: str) -> bool:
        if type(module) is not nn.Linear or module is head or ".lora_" in f".{name}":
            return False
        return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0

    before = sum(type(module) is nn.Linear for module in model.modules())
    torchao.convert_to_float8_training(model, module_filter_fn=fits, config=torchao.Float8LinearConfig(emulate=emulate))
    left = sum(type(module) is nn.Linear for module in model.modules())
    changed = before - left
    logger.info("%d linear layers multiply in float8; %d do not (the head, adapters and odd shapes).", changed, left)
    return changed
