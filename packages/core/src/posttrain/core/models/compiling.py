"""Implements `torch_compile`: compiles a model's layers with one shared graph, or else the whole model.

Layers do most of the work and compile once, whatever their number. Embeddings, masks and the output head stay
uncompiled, so the head still computes its loss in tiles (`posttrain.lm.loss.lm_head`). Modules are compiled in
place, without a wrapper that renames weights or hides the model; leaving the context restores them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from posttrain.core.models.wrapping import base_model, body_of, is_compiled

logger = logging.getLogger(__name__)

# Variants of a graph that one model may need: with and without gradients, dropout, masks, adapters; rows of one token.
RECOMPILES = 64
LAYER = "GradientCheckpointingLayer"  # what layers of transformers derive from
PLAIN = (torch.Tensor, type(None), bool, int, float, str, torch.dtype, torch.device)


@contextlib.contextmanager
def compiled(model: nn.Module, backend: str | None = None, mode: str | None = None) -> Iterator[list[nn.Module]]:
    """Compile the parts of `model` within this context; yields a list of them.

    Shapes are dynamic from the start, so kernels do not depend on earlier batches, and a resumed run computes the same
    numbers. Random numbers equal those of the uncompiled model.
    """
    if is_compiled(model):
        logger.info("The model was already compiled and is not changed.")
        yield []
        return
    import torch._dynamo
    import torch._inductor.config

    parts = [part for part in compiled_parts(model) if "forward" not in vars(part)]  # hooks there move weights
    options: dict[str, Any] = {"backend": backend or "inductor", "mode": mode, "dynamic": True}
    kinds: set[type] = {type(part) for part in parts}
    forwards = {kind: torch.compile(_forward_of(kind), **options) for kind in kinds}
    for part in parts:
        part._compiled_call_impl = _call_of(part, forwards[type(part)])
    logger.info("torch.compile: %d x %s.", len(parts), ", ".join(sorted(kind.__name__ for kind in forwards)))
    limit = max(RECOMPILES, torch._dynamo.config.recompile_limit)
    try:
        with torch._dynamo.config.patch(recompile_limit=limit), torch._inductor.config.patch(fallback_random=True):
            yield parts
    finally:
        for part in parts:
            part._compiled_call_impl = None


def compiled_parts(model: nn.Module) -> list[nn.Module]:
    """The modules of `model` that are compiled separately: its layers, or else the model."""
    base = base_model(model)
    names = {*(getattr(base, "_no_split_modules", None) or ())}

    def layers(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if LAYER in {kind.__name__ for kind in type(child).__mro__} or type(child).__name__ in names:
                yield child
            else:
                yield from layers(child)

    # Of a language model with unknown layers: everything below its head.
    body = body_of(base) if hasattr(base, "get_output_embeddings") else base
    return list(layers(base)) or [body if isinstance(body, nn.Module) else base]


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Within this context nothing that is compiled runs, and nothing is compiled."""
    if "torch._dynamo" not in sys.modules:  # its import takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


@functools.cache
def _forward_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """`_forward` with its own code object, because torch caches compilations by code object."""
    code = _forward.__code__.replace(co_name=f"forward_of_{kind.__name__}")
    return types.FunctionType(code, _forward.__globals__, code.co_name)


def _call_of(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of ``module(...)``: `forward` between the module's hooks; the module itself if an input changes
    with each call, as caches of generation and segments do, because each would need its own graph.
    """
    run = functools.partial(forward, module)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not (all(map(_is_plain, args)) and all(map(_is_plain, kwargs.values()))):
            return module._call_impl(*args, **kwargs)
        vars(module)["forward"] = run
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            del vars(module)["forward"]

    return call


def _is_plain(value: Any) -> bool:
    if isinstance(value, PLAIN):
        return True
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return type(value).__name__ == "BlockMask"
