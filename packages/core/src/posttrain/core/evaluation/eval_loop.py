"""The evaluation and prediction loop: exact means, and stored predictions only if needed."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from posttrain.core.config import opt
from posttrain.core.data.batches import Repeating
from posttrain.core.errors import did_you_mean
from posttrain.core.evaluation.predictions import Kept, check_size, detach, map_tensors, nbytes, restore, to_numpy
from posttrain.core.logging.metrics import Metrics, means
from posttrain.core.losses.normalization import accepts, count_rows
from posttrain.core.models.wrapping import base_model, config_of, evaluating
from posttrain.core.state import EvalPrediction, merit, metric_key

logger = logging.getLogger(__name__)

NO_PREDICTIONS = ["cache", "past_key_values", "image_outputs", "video_outputs", "audio_outputs"]
"""Outputs of models that are no predictions, where no config names them: by transformers 5.24, and one of before."""


@dataclass
class EvaluationArguments:
    """When the model is evaluated, and which outputs are stored."""

    eval_strategy: str = opt(
        "no",
        "Evaluate never, every `eval_steps` optimizer steps, or after each epoch.",
        choices=("no", "steps", "epoch"),
        aliases=("evaluation_strategy",),
    )
    eval_steps: float | str | None = opt(
        None,
        "Optimizer steps between evaluations; below 1 a share of all steps; or such as 0.5ep (epochs), 10Mtok (tokens) "
        "or 30min; None follows `logging_steps`.",
        above=0,
        needs="eval_strategy=steps",
    )
    eval_delay: float = opt(
        0,
        "Optimizer steps (or epochs, by strategy) before the first evaluation.",
        min=0,
        needs="eval_strategy=steps,epoch",
    )
    eval_on_start: bool = opt(False, "Evaluate once before the first step, to find faults of the evaluation early.")
    per_device_eval_batch_size: int = opt(
        8,
        "Rows of one evaluation batch on each device; metrics do not depend on it.",
        min=1,
        aliases=("per_gpu_eval_batch_size",),
    )
    prediction_loss_only: bool = opt(
        False, "Compute the loss alone: no logits are kept and `compute_metrics` is not run."
    )
    eval_accumulation_steps: int | None = opt(
        None,
        "Batches whose predictions stay on the device before they move to host memory; None: each moves at once. "
        "More wait for the device less often, and need its memory.",
        min=1,
    )
    eval_do_concat_batches: bool = opt(
        True, "Join the batches' predictions into one array; off keeps a list of batches."
    )
    eval_use_gather_object: bool = opt(
        False, "Kept for old scripts without effect: all kinds of predictions are gathered."
    )
    batch_eval_metrics: bool = opt(
        False, "Call `compute_metrics(batch, compute_result)` after each batch, so that no prediction is stored."
    )
    include_for_metrics: list[str] = opt([], "Also hand `compute_metrics` `inputs`, or the mean `loss` of each batch.")

    def _problems(self) -> Iterator[str]:
        for name in self.include_for_metrics if isinstance(self.include_for_metrics, list) else ():
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
    """(loss, logits, labels) of one batch, without gradients; missing or unrequested values are None.

    Args:
        compute_loss: called with ``(model, inputs)``, and ``return_outputs=True`` if logits are needed.
        label_names: inputs that are labels; a loss is computed only if all of them are present.
        loss_only: return only the loss.
        ignore_keys: outputs that are no predictions; by default the model's ``keys_to_ignore_at_inference``.
        can_return_loss: the model computes a loss without labels, unless the batch sets ``return_loss``.
    """
    if ignore_keys is None:
        ignore_keys = getattr(config_of(model), "keys_to_ignore_at_inference", NO_PREDICTIONS)
    has_labels = labels_are_there(model, inputs, label_names)
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


def labels_are_there(model: nn.Module, inputs: Mapping[str, Any], label_names: list[str]) -> bool:
    """Whether a batch has all its labels. A name that neither the batch nor the model has is reported once."""
    absent = [name for name in label_names if inputs.get(name) is None]
    if absent:
        known = inspect.signature(base_model(model).forward).parameters
        if strange := tuple(name for name in absent if name not in known and name not in inputs):
            _warn_of_strange_labels(strange, tuple(inputs))
    return bool(label_names) and not absent


@functools.cache
def _warn_of_strange_labels(names: tuple[str, ...], columns: tuple[str, ...]) -> None:
    logger.warning(
        f"label_names holds {', '.join(map(repr, names))}, which is neither in the batches of the evaluation nor an "
        "argument of the model: no loss is computed, and compute_metrics gets no labels. The batches have "
        f"{', '.join(columns)}; name one of these, or leave label_names out{did_you_mean(names[0], columns) or '.'}"
    )


@runtime_checkable
class StreamingMetric(Protocol):
    """Metrics that are computed batch by batch: pass an object with these methods as ``compute_metrics``, and no
    prediction is stored.

    An evaluation calls ``reset()`` if it exists, or else starts with a copy of the original object. With several
    processes, each object gets every batch in the order of the dataset. An object with ``merge(others)`` gets only the
    batches of its own process and is merged before ``compute``. Either way every row counts once.
    """

    def update(self, predictions: Any, labels: Any) -> None:
        """Take in a batch: tensors of shape (rows, ...), detached, or what ``preprocess_logits_for_metrics`` made of
        them.
        """

    def compute(self) -> dict[str, float]:
        """The metrics of everything that was taken in, by name."""


class _Streamed:
    """A `StreamingMetric` in one evaluation."""

    def __init__(self, metric: Any) -> None:
        if hasattr(metric, "reset"):
            metric.reset()
        else:
            metric = copy.deepcopy(metric)
        self.metric, self.sees_own_batches = metric, hasattr(metric, "merge")

    def take(self, batch: EvalPrediction, is_last: bool) -> None:
        self.metric.update(batch.predictions, batch.label_ids)

    def compute(self, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        metric = self.metric
        if self.sees_own_batches:
            metric, *others = gather(metric)  # rank 0's takes in the rest, on every process: all get the same bits
            if others:
                metric.merge(others)
        metrics = metric.compute()
        if not isinstance(metrics, Mapping):
            raise TypeError(
                f"{type(metric).__name__}.compute() returned {metrics!r}; a streaming metric returns a dict of named "
                "values."
            )
        return dict(metrics)


class _Called:
    """A function ``(batch, compute_result=...)`` in one evaluation."""

    sees_own_batches = False

    def __init__(self, function: Callable[..., dict[str, float] | None]) -> None:
        self.function = function
        self.metrics: dict[str, float] | None = None

    def take(self, batch: EvalPrediction, is_last: bool) -> None:
        self.metrics = self.function(batch, compute_result=is_last)

    def compute(self, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        return self.metrics or {}


def is_streaming(compute_metrics: Any) -> bool:
    """Whether `compute_metrics` is a `StreamingMetric`."""
    return isinstance(compute_metrics, StreamingMetric) and not isinstance(compute_metrics, type)


def check_metrics(compute_metrics: Any, batch_eval_metrics: bool, include_for_metrics: list[str]) -> None:
    """Raise TypeError for an invalid `compute_metrics`, ValueError for arguments that it does not support."""
    if compute_metrics is None:
        return
    name = type(compute_metrics).__name__
    if is_streaming(compute_metrics):
        if include_for_metrics:
            raise ValueError(
                f"include_for_metrics={include_for_metrics!r} has no effect: update(predictions, labels) of the "
                f"{name} passed as compute_metrics gets neither. Leave it out, or pass a function."
            )
    elif not callable(compute_metrics):
        raise TypeError(
            f"compute_metrics is of type {name}; it must be callable with an EvalPrediction, or have "
            "update(predictions, labels) and compute()."
        )
    elif batch_eval_metrics and not accepts(compute_metrics, "compute_result"):
        raise ValueError(
            "batch_eval_metrics=True calls compute_metrics(batch, compute_result=...) after each batch, with True at "
            "the last; this compute_metrics has no argument compute_result."
        )


def by_batch(compute_metrics: Any, batch_eval_metrics: bool = False) -> _Streamed | _Called | None:
    """`compute_metrics` for `run` batch by batch; None if it is called once with all predictions."""
    if compute_metrics is None:
        return None
    if batch_eval_metrics and callable(compute_metrics) and accepts(compute_metrics, "compute_result"):
        return _Called(compute_metrics)
    return _Streamed(compute_metrics) if is_streaming(compute_metrics) else None


def run(
    batches: Iterable[Any],
    predict: Callable[[Any], tuple[torch.Tensor | None, Any, Any]],
    *,
    count_items: Callable[[Any], torch.Tensor | int],
    metrics: Metrics,
    keep: bool,
    weight: Callable[[torch.Tensor | int], torch.Tensor | int] = lambda items: items,
    is_filler: Callable[[Any], bool] = lambda inputs: False,
    preprocess_logits: Callable[[Any, Any], Any] | None = None,
    batch_metrics: _Streamed | _Called | None = None,
    include: Iterable[str] = (),
    main_input: str = "input_ids",
    on_batch: Callable[[], None] = lambda: None,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
    num_batches: int | None = None,
    accumulate: int | None = None,
    concatenate: bool = True,
    keep_with_batch_metrics: bool = False,
    order: np.ndarray | None = None,
    fill: int = -100,
) -> tuple[EvalPrediction, dict[str, float], int]:
    """One pass over `batches`: (stored outputs, named means, rows on all processes).

    The mean of the loss weighs each batch by its items, so it is the same for every batch size, padding and number of
    processes. Stored predictions move to host memory batch by batch and are joined once at the end: time is linear, and
    the peak is their size plus one batch, or `predictions.BLOCK` bytes for smaller batches. Raises a `MemoryError`
    where the outputs would exceed the free memory, estimated from the first batch.

    Args:
        predict: ``inputs -> (loss, logits, labels)``.
        metrics: collects the loss and all other metrics added during the pass.
        keep: store predictions and labels.
        weight: called after each `predict` with its items; the weight of its loss.
        is_filler: batches that only keep processes in step and have no weight.
        preprocess_logits: ``(logits, labels) -> what to store instead of the logits``.
        batch_metrics: gets each batch with predictions and labels, see `by_batch`; nothing is stored unless
            `keep_with_batch_metrics`.
        include: "inputs" and "loss": store these too, for `compute_metrics`.
        gather: lists what every process passed, in rank order. All processes see equally many batches.
        num_batches: of this process, if known.
        accumulate: batches that stay on the device before they move to host memory; None: one.
        order: the dataset's row of each row of `batches` over all processes, if reordered: outputs are restored to the
            dataset's order.
        fill: fills predictions of ragged width; labels are filled with -100.
    """
    keep = keep and (batch_metrics is None or keep_with_batch_metrics)
    kept, waiting, rows = Kept(concatenate, fill), [], 0
    expected = (num_batches or 0) * len(gather(None)) if keep else 0
    for inputs, is_last in _mark_last(batches):
        filler, entry = is_filler(inputs), None
        part = inputs.counted() if isinstance(inputs, Repeating) else inputs
        items, here = count_items(part), count_rows(part)
        shown = part.get(main_input) if "inputs" in include else None
        loss, logits, labels = predict(inputs)
        if isinstance(inputs, Repeating):
            logits, labels = map_tensors((logits, labels), inputs.cut)
        counted = weight(items)
        if not filler:
            rows += here
            if loss is not None:  # of a batch without one label the mean is NaN
                metrics.add("loss", loss if items or counted is not items else 0.0, counted)
            if preprocess_logits is not None and logits is not None:
                logits = preprocess_logits(logits, labels)
            losses = torch.as_tensor(loss).repeat(here) if "loss" in include and loss is not None else None
            entry = (logits, labels, shown, losses)
        if batch_metrics is not None:
            whole = entry is not None and logits is not None and labels is not None
            _feed(batch_metrics, entry if whole else None, is_last, gather)
        if keep:
            if entry is not None and expected:
                check_size(nbytes(entry) * expected, expected)
                expected = 0
            waiting.append(entry)
            if is_last or len(waiting) >= (accumulate or 1):
                # Batch i of rank 0, batch i of rank 1, ...: the order of the dataset.
                for same_place in zip(*gather([to_numpy(e) for e in waiting]), strict=True):
                    kept.add(e for e in same_place if e is not None)
                waiting.clear()
        del logits, labels, entry  # or two batches of them would be on the device during the next one
        on_batch()
    pairs = metrics.drain(gather)
    first = {"loss": pairs.pop("loss")} if "loss" in pairs else {}
    named = dict.fromkeys(first | pairs, math.nan) | means(first | pairs)
    if batch_metrics is not None and rows:
        named = with_returned(named, batch_metrics.compute(gather))
    joined = kept.joined()
    if order is not None and concatenate:
        joined = restore(joined, order)
    return EvalPrediction(*joined), named, sum(gather(rows))


def _mark_last(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """``(batch, whether it is the last)``."""
    batches = iter(batches)
    batch = next(batches, None)
    while batch is not None:
        upcoming = next(batches, None)
        yield batch, upcoming is None
        batch = upcoming


def _feed(to: _Streamed | _Called, entry: Any, is_last: bool, gather: Callable[[Any], list[Any]]) -> None:
    shares = [entry]
    if not to.sees_own_batches:
        shares = gather(map_tensors(entry, torch.Tensor.cpu)) if len(gather(None)) > 1 else [entry]
    shares = [share for share in shares if share is not None]
    for number, share in enumerate(shares, start=1):
        to.take(EvalPrediction(*share), is_last and number == len(shares))


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
    """The metric `name`, with or without its ``eval_`` prefix. Raises a `KeyError` where the evaluation gave no such
    metric; the message lists those it gave.
    """
    key = metric_key(name)
    if key not in metrics:
        raise KeyError(
            f"metric_for_best_model={name!r} is not among the metrics of the evaluation: {', '.join(sorted(metrics))}"
            f"{did_you_mean(key, metrics, '.')} Return it from compute_metrics, or name one of these."
        )
    return metrics[key]


def best_steps(log_history: list[dict[str, Any]], metric: str, greater_is_better: bool) -> list[int]:
    """The optimizer steps that were evaluated, the best first; of two alike, the later. `metric`: with or without
    ``eval_``.
    """
    name = metric_key(metric)
    scores = {record["step"]: record[name] for record in log_history if name in record}
    # NaN is no score; in a log that was read from a checkpoint it is None.
    known = {step: score for step, score in scores.items() if score is not None and score == score}
    scored = [(merit(score, greater_is_better), step) for step, score in known.items()]
    return [step for _, step in sorted(scored, reverse=True)]


def with_returned(measured: Mapping[str, Any], returned: Any, prefix: str = "eval") -> dict[str, Any]:
    """`measured` metrics of an evaluation and those that `compute_metrics` returned. Of one name, the returned one
    counts, or with the `prefix` in its name the measured one, as in transformers' Trainer; a warning says so. Raises a
    `TypeError` where it is no dict, or a name is no text.
    """
    if not isinstance(returned, Mapping):
        raise TypeError(
            f"compute_metrics returned {type(returned).__name__}; it must return a dict of metrics by name, for "
            "instance {'accuracy': 0.5}. Does it lack a return statement?"
        )
    if strange := [name for name in returned if not isinstance(name, str)]:
        raise TypeError(f"compute_metrics returned a metric under {strange[0]!r}, which is no name; name it by a text.")
    left_out = {name for name in returned if name.removeprefix(f"{prefix}_") in {*measured} - {name}}
    for name in returned:
        if name in measured or name in left_out:
            own, becomes = name.removeprefix(f"{prefix}_"), "is left out" if name in left_out else "takes its place"
            _tell_once(
                f"compute_metrics returned {name!r}, and the evaluation measures {own!r} itself: what was returned "
                f"{becomes}. Give it another name."
            )
    return {**measured, **{name: value for name, value in returned.items() if name not in left_out}}


@functools.cache
def _tell_once(text: str) -> None:
    logger.warning(text)


@contextlib.contextmanager
def eval_mode(model: nn.Module, optimizer: Any = None) -> Iterator[None]:
    """Set the model (and an optimizer that averages weights) to evaluation mode and each module back at the end."""
    with averages_in(optimizer, otherwise=model.training), evaluating(model):
        yield


def keeps_averages(optimizer: Any) -> bool:
    """Whether `optimizer` averages weights, which its ``eval()`` puts into the model and its ``train()`` takes out."""
    return hasattr(optimizer, "eval")


@contextlib.contextmanager
def averages_in(optimizer: Any, otherwise: bool) -> Iterator[None]:
    """The weights that `optimizer` averages in place of those that it trains, which come back at the end.

    Nothing happens for an optimizer that averages none, nor where the averages are in place, as they are after
    training, when the model itself may still be in training mode. `otherwise`: whether an optimizer that keeps no
    ``train_mode`` is training.
    """
    if not keeps_averages(optimizer) or not any(g.get("train_mode", otherwise) for g in optimizer.param_groups):
        yield
        return
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()


def train_mode(model: nn.Module, optimizer: Any) -> None:
    """Set `model`, and an `optimizer` that averages weights, to training mode."""
    model.train()
    if keeps_averages(optimizer):
        optimizer.train()


def keep_averages(optimizer: Any) -> None:
    """Leave the averages of an `optimizer` that keeps them in the model."""
    if keeps_averages(optimizer):
        optimizer.eval()


@contextlib.contextmanager
def weights_kept(model: torch.nn.Module) -> Iterator[None]:
    """Whatever precision `model` is converted to in here, its weights and buffers are back at the end, to the bit."""
    weights = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(module, name, value) for module in model.modules() for name, value in module._buffers.items()]
    try:
        yield
    finally:
        for parameter, data in weights:
            parameter.data = data
        for module, name, value in buffers:
            module._buffers[name] = value
