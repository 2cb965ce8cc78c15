"""Figures of a run, drawn by matplotlib: a notebook shows them, and a file ends in .svg, .png or .pdf."""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EVAL_LOSS = re.compile(r"eval_(?:(.+)_)?loss")


def loss_curve(log_history: Sequence[dict[str, Any]], path: str | Path | None = None, title: str = "Loss") -> Figure:
    """Draw training loss, evaluation losses and learning rate over the optimizer steps of a run. Returns the figure. A
    value that is NaN, infinite or null breaks its line and is marked by a cross on the axis. Raises a `ValueError`
    where no record holds a loss and the step that it belongs to, and an `ImportError` where matplotlib is not
    installed.

    Args:
        log_history: the records of ``trainer.state.log_history``. Read are ``step``, ``loss``, ``learning_rate``,
            ``eval_loss`` and, for several evaluation sets, ``eval_<name>_loss``.
        path: the file to write, if any; its folder is made.
    """
    found = {match[0]: match[1] for record in log_history for key in record if (match := EVAL_LOSS.fullmatch(key))}
    held_out = {key: f"held-out loss: {name}" if name else "held-out loss" for key, name in found.items()}
    losses = {key: name for key, name in ({"loss": "training loss"} | held_out).items() if _points(log_history, key)}
    if not losses:
        raise ValueError(
            f"None of the {len(log_history)} records holds 'step' together with 'loss' or 'eval_loss', so there is "
            "nothing to draw. Pass trainer.state.log_history, and set logging_steps to no more than the steps of "
            "the run."
        )
    rates = {"learning_rate": "learning rate"} if _points(log_history, "learning_rate") else {}
    figure, axes = _figure(title, heights=(3, 1) if rates else (1,))
    _draw(axes[0], log_history, losses, "loss")
    if rates:
        _draw(axes[1], log_history, rates, "learning rate")
    return _saved(figure, path)


def metric_curves(
    log_history: Sequence[dict[str, Any]], metrics: dict[str, str], path: str | Path | None, title: str, label: str
) -> Figure:
    """Draw metrics over the optimizer steps of a run, one line each, on one axis. Returns the figure. A value that is
    not finite breaks its line, as in `loss_curve`. Raises a `ValueError` where a metric is in no record, which names
    those that are, and an `ImportError` where there is no matplotlib.

    Args:
        log_history: the records of ``trainer.state.log_history``.
        metrics: of each metric to draw, its name in the records and the name of its line, as in
            ``{"reward": "training", "eval_reward": "held out"}``. Those that begin with ``eval_`` are drawn with dots.
        path: the file to write, if any; its folder is made.
        label: what the axis is called.
    """
    for metric in metrics:
        if not _points(log_history, metric):
            known = ", ".join(sorted({key for record in log_history for key in record}))
            raise ValueError(f"No record holds 'step' together with {metric!r}; in the records are: {known}.")
    figure, axes = _figure(title, heights=(1,))
    _draw(axes[0], log_history, metrics, label)
    return _saved(figure, path)


def _points(records: Iterable[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    """(step, value), with NaN for a value that is not finite, or null as in the state that a checkpoint holds."""
    found = [(record["step"], record[key]) for record in records if key in record and "step" in record]
    return [(x, float(y) if y is not None and math.isfinite(y) else math.nan) for x, y in found]


def _figure(title: str, heights: Sequence[int]) -> tuple[Figure, Sequence[Axes]]:
    figures = require("matplotlib.figure", "posttrain-core[plots]", why="figures of a run")
    # Without pyplot, which would keep the figure in memory, and may open a window.
    figure = figures.Figure(figsize=(8, 5), layout="constrained")
    figure._repr_png_ = functools.partial(_png, figure)  # by which a notebook shows it, also without pyplot
    rows = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    rows[0].set_title(title, parse_math=False)
    rows[-1].set_xlabel("optimizer step")
    rows[-1].xaxis.get_major_locator().set_params(integer=True)
    return figure, rows


def _png(figure: Figure) -> bytes:
    written = io.BytesIO()
    figure.savefig(written, format="png")
    return written.getvalue()


def _draw(axes: Axes, records: Sequence[dict[str, Any]], lines: dict[str, str], label: str) -> None:
    for key, name in lines.items():
        steps, values = zip(*_points(records, key), strict=True)
        finite = [value for value in values if math.isfinite(value)]
        ends = f"{finite[0]:.4g} → {finite[-1]:.4g}" if finite else "never finite"
        alone = len(finite) == 1 or key.startswith("eval_")  # a lone point has no line to show it
        (line,) = axes.plot(steps, values, marker="." if alone else "", label=f"{name}  {ends}")
        gaps = [step for step, value in zip(steps, values, strict=True) if math.isnan(value)]
        if gaps:
            at_the_bottom = axes.get_xaxis_transform()
            label_of_gaps, color = f"{name}: {len(gaps)} not finite", line.get_color()
            axes.plot(gaps, [0.02] * len(gaps), "x", color=color, label=label_of_gaps, transform=at_the_bottom)
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend()


def _saved(figure: Figure, path: str | Path | None) -> Figure:
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure
