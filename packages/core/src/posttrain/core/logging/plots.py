"""Plots a run into one self-contained HTML file with inline SVG."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT = 760, 64, 16
MOST_POINTS = 1500  # maximum points of a line; a screen shows no more
EVAL_LOSS = re.compile(r"eval_(?:(.+)_)?loss")


@dataclass(frozen=True)
class Series:
    """One line of a chart: `points` are (step, value), with None for a value that was logged but is not finite."""

    name: str
    points: list[tuple[float, float | None]]
    color: str
    dots: bool = False

    @property
    def finite(self) -> list[float]:
        return [y for _, y in self.points if y is not None]

    @property
    def gaps(self) -> list[float]:
        return [x for x, y in self.points if y is None]

    def segments(self) -> list[list[tuple[float, float]]]:
        """The runs of neighbouring finite points: a line never bridges a NaN."""
        runs: list[list[tuple[float, float]]] = [[]]
        for x, y in self.points:
            if y is not None:
                runs[-1].append((x, y))
            elif runs[-1]:
                runs.append([])
        return [run for run in runs if run]


def loss_curve(log_history: Sequence[dict[str, Any]], path: str | Path, title: str = "Loss") -> Path:
    """Draw training loss, evaluation losses and learning rate over the optimizer steps of a run.

    Args:
        log_history: the records of ``trainer.state.log_history``. Read are ``step``, ``loss``, ``learning_rate``,
            ``eval_loss`` and, for several evaluation sets, ``eval_<name>_loss``.
        path: the HTML file to write; its folder is made.
        title: the headline of the page.

    Returns:
        `path`. A value that is NaN, infinite or null breaks its line and is marked by a cross on the axis.

    Raises:
        ValueError: no record holds a loss and the step that it belongs to.
    """
    losses = read_losses(log_history)
    if not losses:
        raise ValueError(
            f"None of the {len(log_history)} records holds 'step' together with 'loss' or 'eval_loss', so there is "
            "nothing to plot. Pass trainer.state.log_history, and set logging_steps to no more than the steps of "
            "the run."
        )
    rates = read_series(log_history, "learning_rate", "learning rate", "var(--rate)")
    steps = [x for series in [*losses, rates] for x, _ in series.points]
    span = min(steps), max(steps)

    body = [f"<h1>{escape(title)}</h1>", legend([*losses, rates] if rates.points else losses)]
    body.append(chart(losses, span, height=320, label="loss", last=not rates.points))
    if rates.points:
        body.append(chart([rates], span, height=150, label="learning rate", last=True))
    broken = sorted({(x, s.name) for s in losses for x in s.gaps})
    if broken:
        where = ", ".join(f"{name} at step {number(x)}" for x, name in broken[:20])
        more = f" and {len(broken) - 20} more" if len(broken) > 20 else ""
        body.append(f'<p class="broken">{len(broken)} not finite (&#x2715;): {escape(where)}{more}</p>')

    return write_page(path, title, body)


def metric_curves(
    log_history: Sequence[dict[str, Any]], metrics: dict[str, str], path: str | Path, title: str, label: str
) -> Path:
    """Draw metrics over the optimizer steps of a run, one line each, on one axis.

    Args:
        log_history: the records of ``trainer.state.log_history``.
        metrics: of each metric to draw, its name in the records and the name of its line, as in
            ``{"reward": "training", "eval_reward": "held out"}``. Those that begin with ``eval_`` are drawn with dots.
        path: the HTML file to write; its folder is made.
        title: the headline of the page.
        label: what the axis is called.

    Returns:
        `path`. A value that is not finite breaks its line, as in `loss_curve`.

    Raises:
        ValueError: a metric is in no record, with the names of those that are.
    """
    drawn = []
    for i, (metric, name) in enumerate(metrics.items()):
        series = read_series(log_history, metric, name, f"var(--line-{i % 5})", dots=metric.startswith("eval_"))
        if not series.points:
            known = sorted({key for record in log_history for key in record})
            raise ValueError(
                f"No record holds 'step' together with {metric!r}; in the records are: {', '.join(known)}."
            )
        drawn.append(series)
    steps = [x for series in drawn for x, _ in series.points]
    body = [f"<h1>{escape(title)}</h1>", legend(drawn)]
    body.append(chart(drawn, (min(steps), max(steps)), height=320, label=label, last=True))
    return write_page(path, title, body)


def write_page(path: str | Path, title: str, body: Iterable[str]) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(PAGE.format(title=escape(title), style=STYLE, body="\n".join(body)), encoding="utf-8")
    return target


def read_losses(records: Iterable[dict[str, Any]]) -> list[Series]:
    """The training loss, then every evaluation loss in order of appearance."""
    records = list(records)
    names = {key: None for record in records for key in record if EVAL_LOSS.fullmatch(key)}
    found = [read_series(records, "loss", "training loss", "var(--line-0)")]
    for i, key in enumerate(names, start=1):
        which = EVAL_LOSS.fullmatch(key).group(1)
        name = f"held-out loss: {which}" if which else "held-out loss"
        found.append(read_series(records, key, name, f"var(--line-{(i - 1) % 4 + 1})", dots=True))
    return [series for series in found if series.points]


def read_series(records: Iterable[dict[str, Any]], key: str, name: str, color: str, dots: bool = False) -> Series:
    points = [
        (float(record["step"]), finite_or_none(record[key])) for record in records if key in record and "step" in record
    ]
    return Series(name, thin(points), color, dots)


def finite_or_none(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def thin(points: list[tuple[float, float | None]], most: int = MOST_POINTS) -> list[tuple[float, float | None]]:
    """Keep the lowest and the highest value and every gap of each of `most` / 2 stretches: a spike is never lost."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / (most // 2))
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        finite = [i for i in stretch if points[i][1] is not None]
        kept.update(i for i in stretch if points[i][1] is None)
        if finite:
            kept |= {min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]


def ticks(low: float, high: float, about: int = 5, whole: bool = False) -> list[float]:
    """Round values a reader likes (1, 2, 2.5 or 5 times a power of ten) which enclose `low` and `high`."""
    if low == high:
        low, high = (low - 0.5, high + 0.5) if whole or low == 0 else (low - abs(low) / 2, high + abs(high) / 2)
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = next(f * power for f in factors if f * power >= rough * (1 - 1e-9))
    if whole:
        step = max(1, step)
    return [i * step for i in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def number(value: float) -> str:
    """A short label: ``1,200``, ``0.25``, ``2e-05``."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.4f}".rstrip("0").rstrip(".")


def chart(series: Sequence[Series], span: tuple[float, float], height: int, label: str, last: bool) -> str:
    """One SVG of `series` over the steps of `span`; the `last` of several names the x axis."""
    values = [y for s in series for y in s.finite] or [0.0, 1.0]
    rows = ticks(min(values), max(values), about=max(2, height // 60))
    columns = [x for x in ticks(*span, about=8, whole=True) if span[0] <= x <= span[1]] or [span[0]]
    top, bottom = 12, height - (44 if last else 26)

    def across(x: float) -> float:
        share = (x - span[0]) / (span[1] - span[0]) if span[1] > span[0] else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        return bottom - (y - rows[0]) / (rows[-1] - rows[0]) * (bottom - top)

    def at(x: float, y: float) -> str:
        return f"{across(x):.1f},{up(y):.1f}"

    out = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)} over optimizer steps">']
    for y in rows:
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{up(y) + 4:.1f}" text-anchor="end">{number(y)}</text>')
    for x in columns:
        out.append(f'<line class="tick" x1="{across(x):.1f}" x2="{across(x):.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        out.append(f'<text x="{across(x):.1f}" y="{bottom + 18}" text-anchor="middle">{number(x)}</text>')
    middle = (top + bottom) / 2
    out.append(f'<text class="axis" transform="translate(14 {middle:.0f}) rotate(-90)">{escape(label)}</text>')
    if last:
        out.append(f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{height - 6}">optimizer step</text>')
    for s in series:
        for run in s.segments():
            points = " ".join(at(x, y) for x, y in run)
            out.append(f'<polyline points="{points}" style="stroke:{s.color}"/>')
            # A lone point has no line to show it.
            for x, y in run if s.dots or len(run) == 1 else ():
                hint = f"<title>{escape(s.name)} {number(y)} at step {number(x)}</title>"
                out.append(
                    f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3.5" style="fill:{s.color}">{hint}</circle>'
                )
        for x in s.gaps:
            hint = f"<title>{escape(s.name)} is not finite at step {number(x)}</title>"
            out.append(f'<text class="gap" x="{across(x):.1f}" y="{bottom - 3}">&#x2715;{hint}</text>')
    return "\n".join([*out, "</svg>"])


def legend(series: Iterable[Series]) -> str:
    """Each line's colour, name, and first and last value."""
    entries = []
    for s in series:
        ends = f"{number(s.finite[0])} &#x2192; {number(s.finite[-1])}" if s.finite else "never finite"
        entries.append(f'<li><i style="background:{s.color}"></i>{escape(s.name)} <b>{ends}</b></li>')
    return f'<ul class="legend">{"".join(entries)}</ul>'


STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2933; --soft: #6b7785; --grid: #e4e8ec;
  --line-0: #2563eb; --line-1: #d9480f; --line-2: #0f8a5f; --line-3: #9333ea; --line-4: #b7791f; --rate: #6b7785; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --ink: #e6eaee; --soft: #97a3b0; --grid: #2a323b;
  --line-0: #6ea8fe; --line-1: #ff9f68; --line-2: #4fd1a1; --line-3: #c99bff; --line-4: #e9c46a; --rate: #97a3b0; } }
body { margin: 2rem auto; max-width: 760px; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.25rem; margin: 0 0 .5rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
svg .axis { text-anchor: middle; }
svg .gap { fill: var(--line-1); text-anchor: middle; font-weight: bold; }
svg .grid, svg .tick { stroke: var(--grid); }
svg polyline { fill: none; stroke-width: 1.75; stroke-linejoin: round; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; margin: 0 0 .5rem; padding: 0; }
.legend i { display: inline-block; width: 1.2em; height: 3px; margin-right: .5em; vertical-align: middle; }
.broken { color: var(--line-1); }
"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
