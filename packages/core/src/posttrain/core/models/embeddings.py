"""The ranges of ids that a model's embeddings accept."""

from __future__ import annotations

import contextlib

from torch import nn

from posttrain.core.models.wrapping import base_model, config_of, is_encoder_decoder

POSITION_EMBEDDINGS = ("position_embeddings", "wpe")


def id_limits(model: nn.Module) -> dict[str, int]:
    """The limits of `model` for `posttrain.core.data.batch_limits.check_limits`; empty if unknown.

    ``input_ids``: rows of its input embedding. ``labels``: columns of its output embedding, or its classes.
    ``positions``: rows of a learned position embedding. ``labels_per_token``: 1 if each token of a row has its own
    label. Multimodal models are left out, because they use special token ids for images and audio.
    """
    base = base_model(model)
    config = config_of(base)
    if not hasattr(config, "get_text_config") or config.get_text_config() is not config:
        return {}
    head, classes, found = None, getattr(config, "num_labels", 0), {}
    with contextlib.suppress(AttributeError, NotImplementedError):
        found["input_ids"] = getattr(base.get_input_embeddings(), "num_embeddings", None)
        head = base.get_output_embeddings()
        found["labels"] = getattr(head, "out_features", None)
        found["labels_per_token"] = int(head is not None and not is_encoder_decoder(base))
    if head is None and "Classification" in type(base).__name__ and classes > 1:
        found["labels"] = classes
    for name, module in base.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in POSITION_EMBEDDINGS:
            before_first = 0 if module.padding_idx is None else module.padding_idx + 1  # as RoBERTa counts them
            found["positions"] = module.num_embeddings - before_first
    return {name: limit for name, limit in found.items() if limit}
