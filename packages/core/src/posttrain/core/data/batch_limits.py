"""What a model can read: the limits of ids and lengths, and why a batch that it could not read was none for it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from posttrain.core.data.collators import IGNORE_INDEX
from posttrain.core.errors import DataError


def check_limits(batch: Any, limits: Mapping[str, int], indices: list[int] | None = None) -> None:
    """Reject a batch that would cause an index error in the model, which on a GPU ends the process. Raises a
    `DataError` that names the column, the number, the row and the limit.

    Args:
        batch: a dict of tensors; those on the CPU are checked.
        limits: how many numbers a column may hold, from 0 on: ``{"input_ids": vocabulary size, "labels": classes}`` (a
            label may also be -100); ``"positions"``, ``"label_positions"``: tokens that a row, or its label, may have.
        indices: the dataset's index of each row of the batch, for the message.
    """
    if not isinstance(batch, Mapping):
        return
    for name in ("input_ids", "labels"):
        values, limit = batch.get(name), limits.get(name)
        if limit is None or not isinstance(values, torch.Tensor) or values.device.type != "cpu":
            continue
        if values.is_floating_point():
            if name == "input_ids":
                raise DataError("input_ids came out as fractions, not whole numbers, as a batch of empty rows does.")
            continue
        if not values.numel():
            continue
        low, high = values.aminmax()
        if high < limit and low >= 0:
            continue
        wrong = (values >= limit) | (values < 0)
        if name == "labels":
            wrong &= values != IGNORE_INDEX
        if wrong.any():
            place = wrong.nonzero()[0]
            row = ""
            if indices is not None and values.ndim and len(values) == len(indices):
                row = f" in row {indices[place[0]]}"
            raise DataError(out_of_range(name, int(values[tuple(place)]), limit, row))
    for name, table in (("input_ids", "positions"), ("labels", "label_positions")):
        values, longest = batch.get(name), limits.get(table)
        if longest is None or not isinstance(values, torch.Tensor) or values.ndim != 2 or "position_ids" in batch:
            continue
        if values.shape[1] > longest:
            what = "The longest of these rows" if name == "input_ids" else "The longest label of these rows"
            raise DataError(
                f"{what} has {values.shape[1]} tokens, and the model has positions for {longest}. Truncate the rows "
                "when tokenizing, or set max_length where the trainer has it."
            )


def explain_lookup(error: Exception, batch: Any, limits: Mapping[str, int]) -> None:
    """Raise `check_limits`' DataError in place of an IndexError or KeyError of a step, or note what `batch` holds."""
    check_limits(batch, limits)
    if isinstance(batch, Mapping):
        error.add_note(f"The batch holds {', '.join(map(str, batch))}.")


def out_of_range(column: str, value: int, limit: int, where: str = "") -> str:
    """The message about an id out of range; `where` begins with a space."""
    remedy = (
        "Tokenize with the tokenizer that belongs to the model, or call model.resize_token_embeddings(len(tokenizer))."
        if column == "input_ids"
        else "Use -100 for no loss, and load the model with as many labels or tokens as the data has."
    )
    return f"{column} holds {value}{where}, and the model's range is 0 to {limit - 1}. {remedy}"


def explain_failure(batch: Any, model: Any, limits: Mapping[str, int]) -> None:
    """Say what is wrong with `batch`, after the forward pass of `model` failed on it; return if nothing is found.
    Raises a `DataError` where one of `limits` (`check_limits`) is exceeded, the main input is missing, or labels are of
    another length or kind than the loss needs.
    """
    if not isinstance(batch, Mapping):
        return
    check_limits(batch, limits)
    # transformers gives a model this name even where its forward reads something else.
    main_input: Any = getattr(model, "main_input_name", None)
    missing = main_input in inspect.signature(model.forward).parameters and main_input not in batch
    if missing and not {"inputs_embeds", "encoder_outputs"} & set(batch):
        raise DataError(
            f"The model reads {main_input}, and the batch holds only {', '.join(map(str, batch)) or 'nothing'}. The "
            "rows have no such column, or it is null in the first of them. Texts become tokens by, for instance, "
            "dataset.map(lambda row: tokenizer(row['text']))."
        )
    labels, config = batch.get("labels"), getattr(model, "config", None)
    ids, labels_of_tokens = batch.get("input_ids"), ("ForCausalLM", "ForMaskedLM", "ForTokenClassification")
    if isinstance(ids, torch.Tensor) and isinstance(labels, torch.Tensor) and ids.shape != labels.shape:
        if type(model).__name__.endswith(labels_of_tokens):
            raise DataError(
                f"input_ids has the shape {tuple(ids.shape)} and labels {tuple(labels.shape)}; each token needs one "
                "label. Give a row as many labels as tokens, -100 where there is no loss, and pad both to one length."
            )
    kind, classes = getattr(config, "problem_type", None), getattr(config, "num_labels", 0)
    if not isinstance(labels, torch.Tensor) or "Classification" not in type(model).__name__:
        return
    if labels.is_floating_point() and labels.ndim == 1 and classes > 1:
        raise DataError(
            f"The labels are fractions, one a row, and the model has {classes} classes. Make them whole numbers from 0 "
            f"to {classes - 1}, or load the model with num_labels=1 to predict a number."
        )
    if kind == "multi_label_classification" and not labels.is_floating_point():
        raise DataError(
            "problem_type='multi_label_classification' needs labels of 0.0 and 1.0, one for each class of a row, and "
            "they are whole numbers. Make them floats."
        )
