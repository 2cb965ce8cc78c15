"""The ranges of ids that a model's embeddings accept."""

from __future__ import annotations

from typing import Any

from torch import nn

from posttrain.core.models import wrapping

POSITION_EMBEDDINGS = ("position_embeddings", "wpe", "embed_positions")


def id_limits(model: nn.Module) -> dict[str, int]:
    """The limits of `model` for `posttrain.core.data.batch_limits.check_limits`; empty if unknown.

    ``input_ids``: rows of its input embedding. ``labels``: columns of its output embedding, or its classes.
    ``positions``: rows of a position embedding, ``label_positions`` of a decoder's. ``context``: see `context_of`.
    ``labels_per_token``: 1 if each token of a row has its own label. Multimodal models are left out, because they use
    special token ids for images and audio.
    """
    base = wrapping.base_model(model)
    config = wrapping.config_of(base)
    if not hasattr(config, "get_text_config") or config.get_text_config() is not config:
        return {}
    head, classes, found = None, wrapping.setting(config, "num_labels") or 0, dict[str, Any]()
    found["context"] = context_of(config)
    if (inputs := wrapping.input_embedding(base)) is not None:
        found["input_ids"] = getattr(inputs, "num_embeddings", None)
        head = wrapping.output_embedding(base)
        found["labels"] = getattr(head, "out_features", None)
        found["labels_per_token"] = int(head is not None and not wrapping.is_encoder_decoder(base))
    if head is None and "Classification" in type(base).__name__ and classes > 1:
        found["labels"] = classes
    for name, module in base.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in POSITION_EMBEDDINGS:
            # The first position's row: OPT's and BART's modules name it, RoBERTa counts from behind the padding.
            first = vars(module).get("offset", 0 if module.padding_idx is None else module.padding_idx + 1)
            found["positions"] = module.num_embeddings - first
            found["label_positions"] = found["positions"] * wrapping.is_encoder_decoder(base)
    return {name: limit for name, limit in found.items() if limit}


def context_of(config: Any) -> int | None:
    """Tokens that a model of this `config` was made to read; None: it names no number.

    What a rule stretches rotary angles by counts as vLLM counts it; a config may hold that already.
    """
    config = wrapping.text_config(config)
    if (length := wrapping.setting(config, "max_position_embeddings") or 0) <= 0:
        return None
    rule = vars(config).get("rope_parameters") or {}
    if rule.get("rope_type") not in ("linear", "dynamic", "yarn"):
        return length
    trained = rule.get("original_max_position_embeddings") if rule["rope_type"] == "yarn" else None
    return max(length, int((trained or length) * (rule.get("factor") or 1)))
