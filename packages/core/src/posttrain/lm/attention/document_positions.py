"""Positions of the documents of packed rows, also where those of images have several axes, and how long they may be."""

from __future__ import annotations

import torch
from torch import nn

from posttrain.core.models.wrapping import adapters_of, base_model, setting
from posttrain.lm.images.image_positions import ImagePositions, SeenPrompt


class DocumentPositions:
    """Numbers the tokens of one document, by itself.

    Where positions have several axes, the plain numbers come before them: transformers separates documents by them.
    `model`: whose rule it is; its weights are not kept, so that workers can be given this.
    """

    def __init__(self, model: nn.Module) -> None:
        self._axes = ImagePositions.of(model)
        #: 4 where positions are in time, height and width, else 1.
        self.dimensions = 1 if self._axes is None else 4

    def __call__(self, document: SeenPrompt) -> torch.Tensor:
        """(dimensions, T) positions of the T tokens of `document`, from 0 on."""
        plain = torch.arange(len(document.ids))[None]
        return plain if self._axes is None else torch.cat([plain, self._axes(document)[:, :-1]])


def invocation_tokens(model: nn.Module) -> list[int]:
    """The tokens at which an adapter of `model` begins (aLoRA); none where no adapter waits for tokens."""
    found = (vars(config).get("alora_invocation_tokens") for config in adapters_of(model).values())
    return list(next(filter(None, found), ()))


def invocation_problem(model: nn.Module) -> str | None:
    """Why no two texts can share a row of `model`, of which an aLoRA would change the last alone; None if they can."""
    if not invocation_tokens(model):
        return None
    return "The adapter has alora_invocation_tokens, which peft looks for once in each row."


def check_packing(model: nn.Module, max_length: int | None) -> None:
    """Raise ValueError if documents of up to `max_length` tokens (None: any number) cannot share a row of `model`.

    RoPE of the types longrope and dynamic takes its frequencies by the longest document of a batch, for all of them.
    """
    if max_length != 0 and (problem := invocation_problem(model)):
        raise ValueError(f"{problem} Set packing=False and padding_free=False, so that each text has its own.")
    base = base_model(model)
    config = base.config.get_text_config()
    found = setting(config, "rope_parameters") or {}
    rules = [found] if "rope_type" in found else [rule for rule in found.values() if isinstance(rule, dict)]
    limits = {
        "longrope": lambda rule: rule["original_max_position_embeddings"],
        "dynamic": lambda rule: config.max_position_embeddings,
    }
    for rule in rules:
        if (kind := rule.get("rope_type")) in limits and (max_length is None or max_length > limits[kind](rule)):
            raise ValueError(
                f"The RoPE of {type(base).__name__} is {kind}: one document of more than {limits[kind](rule)} tokens "
                "changes the frequencies, and so the logits, of all documents in its row. Set max_length="
                f"{limits[kind](rule)} in place of {max_length}, or packing=False and padding_free=False."
            )
