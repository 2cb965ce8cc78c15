"""Trains parts of a vision-language model: its language model, or what sees images.

The language part is the decoder of text, which embeds tokens, and the output head. Everything else is the vision part:
the tower that encodes images and the projector that turns its outputs into embeddings of the text.
"""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

from torch import nn

from posttrain.core.models.wrapping import base_model, is_peft_model, sees

logger = logging.getLogger(__name__)

PARTS = ("language", "vision", "both")


def part_names(model: nn.Module) -> dict[str, list[str]]:
    """The names of the modules of a vision-language model that have weights of their own, by part. Raises a
    `ValueError` where the model has no vision part.
    """
    base = base_model(model)
    if not sees(base):
        raise ValueError(
            f"train_parts chooses between the language and the vision part of a model, and {type(base).__name__} is "
            "one of text alone. Leave train_parts out."
        )
    language = _language(base)
    found: dict[str, list[str]] = {"language": [], "vision": []}
    for name, module in base.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            found["language" if module in language else "vision"].append(name)
    return found


def _language(base: Any) -> set[nn.Module]:
    """The decoder of text, and what stands outside of the model that sees: a head."""
    return set(base.modules()) - (set(base.model.modules()) - set(base.get_decoder().modules())) - {base}


def freeze_others(model: nn.Module, parts: str) -> None:
    """Freeze every weight that is not of `parts`, one of `PARTS`. Tied weights are the language part's. Raises a
    `ValueError` where the model has no vision part.
    """
    names, base = part_names(model)["language"], base_model(model)
    language = {weight for name in names for weight in base.get_submodule(name).parameters(recurse=False)}
    for weight in base.parameters():
        if parts not in ("language" if weight in language else "vision", "both"):
            weight.requires_grad_(False)
    trained = sum(weight.numel() for weight in base.parameters() if weight.requires_grad)
    total = sum(weight.numel() for weight in base.parameters())
    logger.info("train_parts=%r: %s of %s weights of the model are trained.", parts, f"{trained:,}", f"{total:,}")


def adapter_config(model: nn.Module, peft_config: Any, parts: str | None) -> Any:
    """`peft_config` for an adapter on `parts` of `model`.

    With `parts` None the modules that the config names are taken, wherever they are; a config that names none gets the
    linear layers of the language part of a vision-language model, of which peft knows no default. Raises a `ValueError`
    where the model has no vision part, or this kind of adapter cannot leave modules out.
    """
    given = vars(peft_config)
    if parts is None:
        named = [given.get(name) for name in ("target_modules", "target_parameters", "exclude_modules")]
        if not sees(model) or "exclude_modules" not in given or any(named):
            return peft_config
        parts = "language"
    names = part_names(model)
    if "exclude_modules" not in given or given.get("target_parameters"):
        what = "target_parameters" if "exclude_modules" in given else type(peft_config).__name__
        raise ValueError(
            f"train_parts={parts!r} cannot be followed with {what}, whose weights are not chosen by their modules. "
            "Leave train_parts out."
        )
    changed = copy.copy(peft_config)
    if changed.target_modules is None:
        changed.target_modules = "all-linear"
    if parts != "both":
        others = names["vision" if parts == "language" else "language"]
        changed.exclude_modules = _joined(peft_config.exclude_modules, others)
    return changed


def _joined(given: Any, names: list[str]) -> str:
    """A pattern for the modules that the user left out and for those of `names`, in a few words."""
    patterns = [given] if isinstance(given, str) else [rf"(.*\.)?{re.escape(name)}" for name in sorted(given or ())]
    # A module may hold a weight of its own beside the decoder within it.
    tops = dict.fromkeys(".".join(name.split(".")[:2]) for name in names if name != "model")
    return "|".join(f"({pattern})" for pattern in [*patterns, *(rf"{re.escape(top)}(\..*)?" for top in tops)])


def tell_adapted(model: nn.Module) -> None:
    """Log on how many modules of which part of a vision-language model the adapter is."""
    base = base_model(model)
    if not is_peft_model(model) or not sees(base):
        return
    language = _language(base)
    adapted = [module for module in base.modules() if hasattr(module, "base_layer")]
    of_language = sum(module in language for module in adapted)
    logger.info(
        "The adapter is on %d modules of the language part and %d of the vision part; train_parts chooses.",
        of_language,
        len(adapted) - of_language,
    )
