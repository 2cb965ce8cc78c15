"""Evaluation and prediction: one pass over a loader, exact means, and predictions kept only when someone asks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from posttrain.core.errors import did_you_mean
from posttrain.core.fields import opt
from posttrain.core.metrics import Metrics, means
from posttrain.core.objective import count_rows
from posttrain.core.state import EvalPrediction


@dataclass
class EvaluationArguments:
    """When the model is evaluated, and what is kept of its outputs."""

    eval_strategy: str = opt(
        "no", "Evaluate never, every `eval_steps` updates, or after each epoch.", choices=("no", "steps", "epoch"),
        aliases=("evaluation_strategy",),
    )  # fmt: skip
    eval_steps: float | None = opt(
        None, "Updates between evaluations; below 1 a share of all updates; None follows `logging_steps`.", above=0
    )
    eval_delay: float = opt(0, "Updates (or epochs, by strategy) before the first evaluation.", min=0)
    eval_on_start: bool = opt(False, "Evaluate once before the first step, to find faults of the evaluation early.")
    per_device_eval_batch_size: int = opt(8, "Rows of one evaluation batch on each device; metrics do not depend on it.",
                                          min=1, aliases=("per_gpu_eval_batch_size",))  # fmt: skip
    prediction_loss_only: bool = opt(
        False, "Compute the loss alone: no logits are kept and `compute_metrics` is not run."
    )
    eval_accumulation_steps: int | None = opt(
        None, "Move kept predictions to host memory every so many batches; None: after every batch.", min=1
    )
    eval_do_concat_batches: bool = opt(
        True, "Join the batches' predictions into one array; off keeps a list of batches."
    )
    eval_use_gather_object: bool = opt(False, "Kept for old scripts: predictions of any kind are gathered as they are.")
    batch_eval_metrics: bool = opt(
        False, "Call `compute_metrics(batch, compute_result)` after each batch, so that no prediction is stored."
    )
    include_for_metrics: list[str] = opt([], "Also hand `compute_metrics` the `inputs` and/or the `loss` of each row.")

    def _problems(self) -> Iterator[str]:
        for name in self.include_for_metrics:
            if name not in ("inputs", "loss"):
                yield f"include_for_metrics holds {name!r}; it may hold 'inputs' and 'loss'"


def predict_batch(
    model: nn.Module,
    inputs: Any,
    compute_loss: Callable[..., Any],
    *,
    label_names: list[str],
    loss_only: bool,
    ignore_keys: Iterable[str] | None = None,
    can_return_loss: bool = False,
) -> tuple[torch.Tensor | None, Any, Any]:
    """(loss, logits, labels) of one batch, without gradients; what is not there, or not asked for, is None.

    Args:
        compute_loss: called with ``(model, inputs)``, and ``return_outputs=True`` when the logits are wanted.
        label_names: inputs that are labels; a loss is computed only where all of them are present.
        loss_only: give the loss alone.
        ignore_keys: outputs that are no predictions; by default the model's ``keys_to_ignore_at_inference``.
        can_return_loss: the model computes a loss without labels, unless the batch says otherwise by ``return_loss``.
    """
    if ignore_keys is None:
        ignore_keys = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", ["past_key_values"])
    has_labels = bool(label_names) and all(inputs.get(name) is not None for name in label_names)
    asked = inputs.get("return_loss")
    with_loss = has_labels or (not label_names and bool(can_return_loss if asked is None else asked))
    labels = None
    if with_loss:
        labels = tuple(detach(inputs.get(name)) for name in label_names)
        labels = labels[0] if len(labels) == 1 else labels
    with torch.no_grad():
        if with_loss and loss_only:
            loss = compute_loss(model, inputs)
            return (loss[0] if isinstance(loss, tuple) else loss).mean().detach(), None, None
        if with_loss:
            loss, outputs = compute_loss(model, inputs, return_outputs=True)
            loss, skipped = loss.mean().detach(), 1
        else:
            loss, outputs, skipped = None, model(**inputs), 0
    if loss_only:
        return loss, None, None
    if isinstance(outputs, dict):
        left_out = {"loss", *ignore_keys} if with_loss else set(ignore_keys)
        logits = tuple(value for key, value in outputs.items() if key not in left_out)
    else:
        logits = tuple(outputs[skipped:]) if isinstance(outputs, (tuple, list)) else (outputs,)
    logits = detach(logits)
    return loss, logits[0] if len(logits) == 1 else logits, labels


def run(
    batches: Iterable[Any],
    predict: Callable[[Any], tuple[torch.Tensor | None, Any, Any]],
    *,
    count_items: Callable[[Any], torch.Tensor | int],
    metrics: Metrics,
    keep: bool,
    is_filler: Callable[[Any], bool] = lambda inputs: False,
    preprocess_logits: Callable[[Any, Any], Any] | None = None,
    batch_metrics: Callable[[EvalPrediction, bool], dict[str, float]] | None = None,
    include: Iterable[str] = (),
    main_input: str = "input_ids",
    on_batch: Callable[[], None] = lambda: None,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
    num_batches: int | None = None,
    concatenate: bool = True,
    keep_with_batch_metrics: bool = False,
    order: np.ndarray | None = None,
    fill: int = -100,
) -> tuple[EvalPrediction, dict[str, float], int]:
    """One pass over `batches`: (everything kept, named means, rows seen on all processes).

    The mean of the loss weighs each batch by its items, so it is the same for every batch size, padding and number of
    processes. Kept predictions are moved to host memory batch by batch and joined once at the end: time is linear, memory
    is once their size.

    Args:
        predict: ``inputs -> (loss, logits, labels)``.
        metrics: takes the loss; whatever else was added to it during the pass is reported too.
        keep: store predictions and labels.
        is_filler: batches that only keep processes in step, and count for nothing.
        preprocess_logits: ``(logits, labels) -> what is kept instead of the logits``.
        batch_metrics: a `compute_metrics` that is called on each batch that has predictions and labels; nothing is stored then,
            unless `keep_with_batch_metrics`.
        include: "inputs" and "loss": keep these too, for `compute_metrics`.
        gather: lists what every process passed, in rank order.
        order: the dataset's row of each row of `batches`, over all processes, where they come in another order: what is
            kept is put back into the dataset's.
        fill: fills predictions of ragged width; labels are filled with -100.

    Raises:
        MemoryError: what would be kept is larger than the free memory; the message says how large, and what to set.
    """
    kept: list[tuple[Any, Any, Any, Any]] = []
    rows, computed = 0, None
    batches = iter(batches)
    inputs = next(batches, None)
    while inputs is not None:
        filler, items, here = is_filler(inputs), count_items(inputs), count_rows(inputs)
        shown = to_numpy(inputs.get(main_input)) if "inputs" in include else None
        loss, logits, labels = predict(inputs)
        upcoming = next(batches, None)
        entry = None
        if not filler:
            rows += here
            if loss is not None:
                metrics.add("loss", loss if items else 0.0, items)  # of a batch without one label the mean is NaN
            if preprocess_logits is not None and logits is not None:
                logits = preprocess_logits(logits, labels)
            losses = np.full(here, float(loss)) if "loss" in include and loss is not None else None
            entry = (logits, labels, shown, losses)
        if batch_metrics is not None:
            whole = entry is not None and logits is not None and labels is not None
            shares = [s for s in gather(_map(entry, torch.Tensor.cpu) if whole else None) if s is not None]
            for number, share in enumerate(shares, start=1):
                computed = batch_metrics(EvalPrediction(*share), upcoming is None and number == len(shares))
        if keep and entry is not None and (batch_metrics is None or keep_with_batch_metrics):
            entry = to_numpy(entry)
            if not kept:
                _check_size(entry, num_batches)
            kept.append(entry)
        on_batch()
        inputs = upcoming
    pairs = metrics.drain(gather)
    first = {"loss": pairs.pop("loss")} if "loss" in pairs else {}
    named = means(first | pairs) | (computed or {})
    everyone = gather((rows, kept))
    # Batch i of rank 0, batch i of rank 1, ...: the order of the dataset.
    longest = max(len(part) for _, part in everyone)
    ordered = [part[i] for i in range(longest) for _, part in everyone if i < len(part)]
    columns = list(zip(*ordered, strict=True)) if ordered else [()] * 4
    fills = (fill, -100, -100, -100)
    joined = [join(c, f) if concatenate else list(c) for c, f in zip(columns, fills, strict=True)]
    if order is not None and concatenate:
        joined = [restore(column, order) for column in joined]
    return EvalPrediction(*joined), named, sum(count for count, _ in everyone)


def plain(metrics: Any) -> Any:
    """`metrics` with numbers of numpy and torch as Python's, so that they can be logged, compared and saved."""
    if isinstance(metrics, dict):
        return {name: plain(value) for name, value in metrics.items()}
    if isinstance(metrics, (list, tuple)):
        return type(metrics)(map(plain, metrics))
    if isinstance(metrics, np.generic) or (isinstance(metrics, torch.Tensor) and metrics.numel() == 1):
        return metrics.item()
    return metrics


def named_metric(metrics: dict[str, float], name: str) -> float:
    """The metric `name`, with or without its ``eval_`` prefix.

    Raises:
        KeyError: the evaluation gave no such metric; the message lists those it gave.
    """
    key = name if name.startswith("eval_") else f"eval_{name}"
    if key not in metrics:
        raise KeyError(
            f"metric_for_best_model={name!r} is not among the metrics of the evaluation: {', '.join(sorted(metrics))}"
            f"{did_you_mean(key, metrics)}. Return it from compute_metrics, or name one of these."
        )
    return metrics[key]


@contextlib.contextmanager
def eval_mode(model: nn.Module, optimizer: Any = None) -> Iterator[None]:
    """The model (and an optimizer that averages weights) in evaluation mode, and back to what it was at the end."""
    was_training = model.training
    model.eval()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    try:
        yield
    finally:
        model.train(was_training)
        if was_training and hasattr(optimizer, "train"):
            optimizer.train()


def join(parts: Iterable[Any], padding: int = -100) -> Any:
    """Concatenate arrays along rows, or tuples and dicts of arrays; ragged later dimensions are filled with `padding`."""
    parts = [part for part in parts if part is not None]
    if not parts:
        return None
    first = parts[0]
    if isinstance(first, (tuple, list)):
        return type(first)(join(column, padding) for column in zip(*parts, strict=True))
    if isinstance(first, dict):
        return {key: join([part[key] for part in parts], padding) for key in first}
    parts = [np.atleast_1d(part) for part in parts]
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) == 1:
        return np.concatenate(parts)
    widest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    whole = np.full((sum(len(part) for part in parts), *widest), padding, dtype=np.result_type(*parts))
    row = 0
    for part in parts:
        whole[(slice(row, row + len(part)), *(slice(0, size) for size in part.shape[1:]))] = part
        row += len(part)
    return whole


def reading_order(loader: Any) -> np.ndarray | None:
    """The dataset's row of each row that `loader` reads, where its sampler says that results are to be put back."""
    return getattr(getattr(loader, "sampler", None), "rows_to_restore", None)


def restore(value: Any, order: np.ndarray) -> Any:
    """Arrays whose row i belongs to row ``order[i]`` of the dataset, in the order of the dataset.

    Where there are several rows for each one of the dataset (sequences generated from it), they stay together.
    """
    if isinstance(value, (tuple, list)):
        return type(value)(restore(item, order) for item in value)
    if isinstance(value, dict):
        return {key: restore(item, order) for key, item in value.items()}
    if not isinstance(value, np.ndarray) or not len(order) or len(value) % len(order):
        return value
    grouped = value.reshape(len(order), -1, *value.shape[1:])
    return grouped[np.argsort(order)].reshape(value.shape)


def detach(value: Any) -> Any:
    """`value` with every tensor in it detached."""
    return _map(value, lambda tensor: tensor.detach())


def to_numpy(value: Any) -> Any:
    """`value` with every tensor in it as a numpy array (bfloat16, which numpy lacks, as float32)."""
    return _map(value, lambda t: (t.detach().float() if t.dtype == torch.bfloat16 else t.detach()).cpu().numpy())


def _map(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return tuple(_map(item, function) for item in value)
    if hasattr(value, "items"):
        return {key: _map(item, function) for key, item in value.items()}
    return value


def _nbytes(value: Any) -> int:
    if isinstance(value, (tuple, list)):
        return sum(_nbytes(item) for item in value)
    if isinstance(value, dict):
        return sum(_nbytes(item) for item in value.values())
    return getattr(value, "nbytes", 0)


def _check_size(first: Any, num_batches: int | None) -> None:
    free = _free_memory()
    need = _nbytes(first) * (num_batches or 0)
    if free is not None and need > free:
        raise MemoryError(
            f"Keeping the predictions of {num_batches} evaluation batches takes about {need / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB are free. Pass preprocess_logits_for_metrics (an argmax, say) so that less is kept, "
            "set batch_eval_metrics=True so that nothing is, or prediction_loss_only=True."
        )


def _free_memory() -> int | None:
    """Bytes that can be taken without swapping; None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
