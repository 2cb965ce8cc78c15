"""Checks the policy, and prepares its head and its routers."""

from __future__ import annotations

from typing import Any

from torch import nn

from posttrain.core.models import wrapping
from posttrain.lm.loading import loading


def refuse_other_models(model: Any, needs_config: bool = False, decodes_alone: bool = False) -> None:
    """Raise TypeError if `model` does not predict next tokens, or lacks a config that is needed, or has an encoder and
    must decode alone.
    """
    is_model = isinstance(model, nn.Module)
    base = wrapping.base_model(model) if is_model else model
    if not is_model or (needs_config and wrapping.config_of(base) is None) or loading.has_other_head(base):
        raise TypeError(f"model is of type {type(base).__name__}; pass a causal language model, or the name of one.")
    if decodes_alone and wrapping.is_encoder_decoder(base):
        raise TypeError(
            f"model is a {type(base).__name__}, whose encoder reads the prompt; online training requires a causal "
            "language model, which reads prompt and completion as one text. Pass such a model, or train this one with "
            "Seq2SeqTrainer, DPOTrainer or another trainer of preferences."
        )


def cast_head(model: nn.Module) -> None:
    """Keep the output head and its inputs in float32.

    A weight tied to the input embedding is float32 there too; the embeddings keep their original type.
    """
    base = wrapping.base_model(model)
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    if head.weight is embedding.weight:
        dtype = head.weight.dtype
        embedding.register_forward_hook(lambda module, inputs, output: output.to(dtype))
    head.float()
    head.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(), *inputs[1:]))
