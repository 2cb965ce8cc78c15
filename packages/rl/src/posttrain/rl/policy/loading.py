"""Loads and prepares the policy."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from torch import nn

from posttrain.core.models import regularization, special_tokens, wrapping
from posttrain.lm.images.vision import check_model, check_processor
from posttrain.lm.loading import adapters, loading

if TYPE_CHECKING:
    from posttrain.rl.online.arguments import RolloutConfig

logger = logging.getLogger(__name__)


def load_policy(
    model: nn.Module | str,
    tokenizer: Any,
    args: RolloutConfig,
    quantization_config: Any,
    peft_config: Any,
    sees: bool = False,
) -> tuple[nn.Module, Any]:
    """(the model that is trained, its tokenizer, or its processor where it `sees` images)."""
    model_class, tokenizer_class = loading.SEEING if sees else loading.READING
    if isinstance(model, (str, os.PathLike)):
        options = {"quantization_config": quantization_config, "trust_remote_code": args.trust_remote_code}
        model = loading.load_causal_lm(model, args.model_init_kwargs, auto_class=model_class, **options)
    refuse_other_models(model)
    if getattr(getattr(wrapping.base_model(model), "config", None), "is_encoder_decoder", False):
        raise TypeError(
            f"model is a {type(wrapping.base_model(model)).__name__}, whose encoder reads the prompt; online training "
            "requires a causal language model, which reads prompt and completion as one text. Pass such a model, or "
            "train this one with Seq2SeqTrainer, DPOTrainer or another trainer of preferences."
        )
    if tokenizer is None:
        tokenizer = loading.load_tokenizer(model, args.trust_remote_code, tokenizer_class)
    if sees:
        check_processor(tokenizer)
        check_model(wrapping.base_model(model))
    if done := special_tokens.ensure_pad_token(tokenizer):
        logger.info(done)
    model = adapters.set_trained(model, peft_config, args.train_parts)
    if args.disable_dropout:
        regularization.disable_dropout(model)
    if args.cast_lm_head_to_fp32:
        cast_head(model)
    return model, tokenizer


def refuse_other_models(model: Any, needs_config: bool = False) -> None:
    """Raise TypeError if `model` does not predict next tokens, or lacks a config that is needed."""
    base = wrapping.base_model(model) if isinstance(model, nn.Module) else model
    lacks_config = needs_config and getattr(base, "config", None) is None
    if not isinstance(model, nn.Module) or lacks_config or loading.has_other_head(base):
        raise TypeError(f"model is of type {type(base).__name__}; pass a causal language model, or the name of one.")


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


def router_coefficient(model: nn.Module, given: float | None) -> float:
    """The weight of the load-balancing loss: `given`, or that of a mixture of experts' config, or 0.

    Raises:
        ValueError: `model` is no mixture of experts, and a weight is given.
    """
    config: Any = getattr(wrapping.base_model(model), "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if hasattr(config, "output_router_logits"):
        return getattr(config, "router_aux_loss_coef", 0.0) if given is None else given
    if given:
        raise ValueError(
            f"router_aux_loss_coef={given}: {type(model).__name__} is no mixture of experts. Leave it out."
        )
    return 0.0
