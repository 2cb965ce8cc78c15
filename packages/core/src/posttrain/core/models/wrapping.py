"""Unwraps models: torch.compile, DDP, FSDP, DeepSpeed and peft."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

if TYPE_CHECKING:

    class PretrainedModel(nn.Module):
        """A model of transformers or peft, or a part of one. Their attributes have no common typed base."""

        config: Any

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

else:
    PretrainedModel = nn.Module


def unwrap(model: nn.Module) -> PretrainedModel:
    """`model` without the wrappers of torch.compile, DDP, FSDP and DeepSpeed; adapters stay."""
    wrappers = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"}
    inner = cast("PretrainedModel", model)
    while True:
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif wrappers & {kind.__name__ for kind in type(inner).__mro__}:
            inner = inner.module
        else:
            return inner


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile has `model`, in a wrapper around it or in its place."""
    return hasattr(model, "_orig_mod") or unwrap(model)._compiled_call_impl is not None


def plain_class(model: nn.Module) -> type[nn.Module]:
    """The class of `model` before FSDP changed it."""
    return next(kind for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP"))


@contextlib.contextmanager
def plain_classes(model: nn.Module) -> Iterator[None]:
    """Within this context the modules of `model` have the classes from before FSDP, by whose names transformers knows
    how a checkpoint holds their weights.
    """
    changed = [(module, type(module)) for module in model.modules() if plain_class(module) is not type(module)]
    try:
        for module, _ in changed:
            module.__class__ = plain_class(module)
        yield
    finally:
        for module, kind in changed:
            module.__class__ = kind


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within this context the attribute `name` of `owner`, a class, a module or any other object, is `value`."""
    own = {name: vars(owner)[name]} if name in vars(owner) else {}  # as it is written there, unbound
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own[name]) if own else delattr(owner, name)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within this context `model` has no dropout and no gradient checkpointing, with which it would keep no cache. Each
    module has its own mode again at the end.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def is_peft_model(model: nn.Module) -> bool:
    """Whether `model`, unwrapped, is a `peft.PeftModel`. Does not import peft."""
    return any(kind.__name__ in ("PeftModel", "PeftMixedModel") for kind in type(unwrap(model)).__mro__)


def has_virtual_tokens(model: nn.Module) -> bool:
    """Whether an adapter adds virtual tokens before each row: prompt tuning, prefix tuning and variants."""
    return is_peft_model(model) and bool(unwrap(model).active_peft_config.is_prompt_learning)


def base_model(model: nn.Module) -> PretrainedModel:
    """The model of transformers below all wrappers and adapters."""
    inner = unwrap(model)
    return unwrap(inner.get_base_model()) if is_peft_model(inner) else inner


def config_of(model: nn.Module) -> Any:
    """The config of the model of transformers below all wrappers and adapters; None of any other module."""
    return getattr(base_model(model), "config", None)


def setting(config: Any, *names: str) -> Any | None:
    """What `config`, of a model, says under the first of `names` that it has a value for; None: it says nothing."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def text_config(config: Any) -> Any:
    """What `config` says of the part that reads text; `config` itself where a model has no other."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def generation_config(model: nn.Module) -> Any:
    """How the model of transformers below all wrappers and adapters generates; None of a model that says nothing."""
    return getattr(base_model(model), "generation_config", None)


def is_of_transformers(model: nn.Module) -> bool:
    """Whether `model` is one of transformers, whose attention can be replaced."""
    return config_of(model) is not None and hasattr(base_model(model), "set_attn_implementation")


def base_name(model: nn.Module) -> str:
    """The name under which `model` was loaded; empty where it was made."""
    return setting(config_of(model), "_name_or_path") or ""


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether `model` reads with an encoder and writes with a decoder."""
    return bool(setting(config_of(model), "is_encoder_decoder"))


def is_pretrained(model: nn.Module) -> bool:
    """Whether `model` is one of transformers or peft, which write and read their own files."""
    return hasattr(model, "save_pretrained")


def adapters_of(model: nn.Module) -> dict[str, Any]:
    """The configs of the adapters of `model` by name; empty where it has none."""
    return getattr(model, "peft_config", None) or {}


def local_part(tensor: Any) -> Any:
    """What this process holds of `tensor`: its shard of a `DTensor`, all of any other."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full_tensor(tensor: Any) -> torch.Tensor:
    """`tensor` whole, gathered where processes have split it; its gradient is cut again."""
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def body_of(model: nn.Module) -> Any:
    """The part of a model of transformers that has its layers, without the head."""
    base = base_model(model)
    return getattr(base, "base_model", base)


def text_part(base: PretrainedModel) -> PretrainedModel:
    """The part of `base`, a model of transformers, that reads text: all of it, or the decoder of a model that sees."""
    return base if base.config.get_text_config() is base.config else base.get_decoder()


def sees_images(config: Any) -> bool:
    """Whether a model with this config has a vision part."""
    return setting(config, "vision_config") is not None


def sees(model: nn.Module) -> bool:
    """Whether `model` has a vision part."""
    return sees_images(config_of(model))


def configs(model: nn.Module) -> list[Any]:
    """The configs that forwards of `model` read: its own, that of its decoder of text where it has other parts too, and
    the copy that the decoder of some models has.
    """
    base, own = base_model(model), getattr(model, "config", None)
    found = [own]
    if own is not None and sees_images(own):
        found.append(own.get_text_config())
    if is_encoder_decoder(base) and hasattr(base, "get_decoder"):
        found.append(getattr(base.get_decoder(), "config", None))
    return [config for config in found if config is not None]


def input_embedding(model: nn.Module) -> nn.Module | None:
    """The input embedding of a model of transformers; None of one that names none, such as one of time series."""
    with contextlib.suppress(AttributeError, NotImplementedError):
        embedding: nn.Module | None = base_model(model).get_input_embeddings()
        return embedding
    return None


def output_embedding(model: nn.Module) -> nn.Module | None:
    """The output embedding of a model of transformers; of one that peft trains a copy of, the one in use."""
    embedding: Any = getattr(base_model(model), "get_output_embeddings", lambda: None)()
    if any(kind.__name__ == "ModulesToSaveWrapper" for kind in type(embedding).__mro__):
        if embedding.disable_adapters:
            return embedding.original_module
        return embedding.modules_to_save[embedding.active_adapter]
    return embedding
