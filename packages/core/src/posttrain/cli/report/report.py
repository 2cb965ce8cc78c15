"""Writes ``report.html``: one page about a run, or about several side by side, that needs no network to be read.

The page is made of files in the output directory alone (``run.json``, ``log.jsonl``, samples), so that ``posttrain
report`` makes it of any run. Its curves are drawn in the browser by uPlot (MIT licence), which is part of the page.
"""

from __future__ import annotations

import contextlib
import html
import json
import logging
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from posttrain.cli.report import run_record, trajectories
from posttrain.core.callbacks import ClosingCallback
from posttrain.core.errors import CheckpointError
from posttrain.core.fields.redaction import redact
from posttrain.core.files import write_text
from posttrain.core.logging import terminal
from posttrain.core.state import merit, metric_key
from posttrain.lm.generate import samples

logger = logging.getLogger(__name__)

REPORT, LOG = "report.html", "log.jsonl"
MARK = "Written by posttrain"
#: Messages of a run that its record keeps.
MOST_MESSAGES = 50
#: Points of a line; of longer logs, this many are drawn.
MOST_POINTS = 2000
#: Characters of a sample that are shown.
MOST_TEXT = 600
#: Characters of a table's cell that stay on one line.
MOST_WHOLE = 24
#: The phases of training, in the order in which they follow each other; a trainer may have more.
PHASES = tuple("data sync generate score wait forward backward forward_backward optimizer eval save".split())
_COLORS = ("#3b6fe0", "#e07b39", "#2f9e6e", "#b4459b", "#c23b3b", "#6d5bd0", "#0e93a8", "#8a6d1d")
_PHASE_NAMES = {"forward_backward": "forward and backward"}
# Those of single reward functions are parts of "score".
_PHASE = re.compile(r"perf/(?!step_|time_left_|reward_)(\w+)_seconds")
_FIRST = ["reward", "loss", "rewards/accuracies", "rewards/margins", "accuracy", "pass@1", "mean_token_accuracy"]
_FIRST += ["learning_rate", "grad_norm"]
# Of the last record, about the whole run: no curves.
_TOTALS = re.compile(
    r"train_|(.*_)?(runtime|samples_per_second|steps_per_second|stderr)$|total_flos$|epoch$|step$|perf/.*_seconds$"
)


@dataclass
class Run:
    """What is known of a run.

    Attributes:
        name: of its folder.
        record: the last start in its ``run.json``; empty if there is none.
        log: its records, in order.
        samples: what the model wrote, see `posttrain.lm.generate.samples.read`.
    """

    name: str
    record: dict[str, Any]
    log: list[dict[str, Any]]
    samples: dict[str, list[dict[str, Any]]]


class RunReportCallback(ClosingCallback):
    """Writes ``report.html`` into the output directory when training ends, also by an error (``report=True``).

    The warnings and errors of the run, and how it ended, are added to its ``run.json``.
    """

    def __init__(self) -> None:
        self._messages: _Messages | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._take_messages()  # of a run whose end failed
        if args.report and state.is_world_process_zero:
            self._folder, self._state = Path(args.output_dir), state
            self._messages = _Messages()
            logging.getLogger("posttrain").addHandler(self._messages)

    def on_train_end(self, args, state, control, **kwargs):
        known, at_its_end = state.known_steps, state.num_input_tokens_seen >= args.max_tokens
        at_its_end |= state.global_step >= state.max_steps or (known is None and state.epoch >= state.num_train_epochs)
        of_all = "" if known is None or state.num_input_tokens_seen >= args.max_tokens else f" of {known:,}"
        self._write(f"{'finished' if at_its_end else 'stopped'} after {state.global_step:,}{of_all} steps")

    def close(self) -> None:
        """Write the page if training ends by an error: else `on_train_end` does."""
        if self._messages is not None and (error := sys.exc_info()[1]) is not None:
            from posttrain.core.training.preemption import what_ended  # imports torch

            if isinstance(error, Exception):
                self._messages.emit(
                    logging.makeLogRecord({"levelname": "ERROR", "msg": f"{type(error).__name__}: {error}"})
                )
            self._write(f"ended by {what_ended(error)} after {self._state.global_step:,} steps")

    def _write(self, how: str) -> None:
        if (messages := self._take_messages()) is None:
            return
        try:
            ended = {
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "how": how,
                "messages": messages.texts,
                "left_out": messages.left_out,
            }
            run_record.add_end(self._folder, ended)
            if (self._folder / LOG).is_file() and _is_ours(self._folder / REPORT):
                write([self._folder], self._folder / REPORT)
                if not run_record.by_command():  # which says it with the commands that can follow
                    logger.info("Report of the run: %s", self._folder / REPORT)
        except (OSError, CheckpointError) as error:  # a full disk, most often: the run is not worth less
            logger.warning("%s was not written (%s).", self._folder / REPORT, error)

    def _take_messages(self) -> _Messages | None:
        messages, self._messages = self._messages, None
        if messages is not None:
            logging.getLogger("posttrain").removeHandler(messages)
        return messages


def _is_ours(path: Path) -> bool:
    """Whether `path` is free, or holds a page that was written here."""
    return not path.is_file() or MARK in path.read_text(encoding="utf-8", errors="replace")[:200]


class _Messages(logging.Handler):
    """Keeps the first warnings and errors, each once with how many times it came."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._repeats = terminal.Repeats()
        self._kept: list[tuple[str, str]] = []  # no record: its arguments may hold an error, and that a whole cache
        self.left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        if self._repeats.count(record) > 1:
            return
        if len(self._kept) < MOST_MESSAGES:
            self._kept.append((f"{record.levelname}: {redact(record.getMessage())}", record.getMessage()))
        else:
            self.left_out += 1

    @property
    def texts(self) -> list[str]:
        times = ((text, self._repeats.times(message)) for text, message in self._kept)
        return [text if number == 1 else f"{text} ({number:,} times)" for text, number in times]


def write(folders: Sequence[str | Path], path: str | Path, first: str = "", title: str = "") -> Path:
    """Write the page about the runs with these output folders; `first` is HTML that stands before all else, below the
    `title`, which the names of the runs make otherwise.

    Raises `CheckpointError` where a folder has no log, or a damaged record.
    """
    path, runs = Path(path), [read(folder) for folder in folders]
    for run, name in zip(runs, _names(folders), strict=True):
        run.name = name
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(runs) == 1:
        first += trajectories.beside(path, folders[0], runs[0].name)
    write_text(path, page(runs, first, title))
    return path


def _names(folders: Sequence[str | Path]) -> list[str]:
    """The last parts of the paths, as many as tell the folders apart."""
    parts = [Path(folder).resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts), default=1)):
        names = ["/".join(path[-count:]) for path in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(Path(folder)) for folder in folders]


def read(folder: str | Path) -> Run:
    """What the output folder of a run holds; `CheckpointError` where that is no log, or a damaged record."""
    folder = Path(folder)
    if not (folder / LOG).is_file():
        raise CheckpointError(f"{folder} has no {LOG}, so it is not the output folder of a run that logged anything.")
    starts = run_record.read(folder)["starts"] if (folder / run_record.RECORD).is_file() else [{}]
    log = [record for record in samples.lines_of(folder / LOG) if isinstance(record.get("step"), int)]
    began = datetime.fromisoformat(starts[0]["at"]).timestamp() if "at" in starts[0] else 0.0
    written = samples.read(folder, max((record["step"] for record in log), default=0), began)
    return Run(folder.resolve().name, starts[-1], log, written)


def page(runs: Sequence[Run], first: str = "", title: str = "") -> str:
    """The whole page, as HTML."""
    drawn = [*_charts(runs)]
    charts = [chart for chart in drawn if len(_values(chart)) != 1 or len(chart["steps"]) == 1]
    flat = [f"{chart['title']} {_number(_values(chart).pop())}" for chart in drawn if chart not in charts]
    title = title or " · ".join(run.name for run in runs)
    body = [f"<h1>{_text(title)}</h1>", f'<p class="soft">{_subtitle(runs)}</p>', first]
    if len(runs) == 1:
        body += [_tiles(runs[0]), _messages(runs[0])]
    else:
        body.append(_section("Results", table(_results(runs), ["", *(run.name for run in runs)])))
    places = "".join(
        f'<div class="chart"><h3>{_text(chart["title"])}</h3><div id="{chart["id"]}"></div></div>' for chart in charts
    )
    constant = f'<p class="soft">Always the same: {_text(", ".join(flat))}</p>' if flat else ""
    body.append(_section("Curves", f'<div class="charts">{places}</div>{constant}', boxed=False))
    body += [_times(run, run.name if len(runs) > 1 else "") for run in runs]
    body += [_samples(run, run.name if len(runs) > 1 else "") for run in runs]
    body.append(_arguments(runs))
    if len(runs) == 1:
        body += [_data(runs[0]), _facts(runs[0]), _all_arguments(runs[0])]
    values = {
        "mark": MARK,
        "title": _text(title),
        "body": "\n".join(part for part in body if part),
        "uplot_css": trajectories.asset("uplot.css"),
        "uplot_js": trajectories.asset("uplot.js").replace("</script", "<\\/script"),
        "charts": json.dumps(charts, allow_nan=False).replace("</", "<\\/"),
    }
    return trajectories.filled("template.html", values)


# ---- curves ----


def _charts(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """A chart for each metric: in training as a line, in evaluations dashed with dots, for each run."""
    names = dict.fromkeys(key.removeprefix("eval_") for run in runs for record in run.log for key in record)
    ranked = sorted((name for name in names if not _TOTALS.match(name)), key=_rank)
    for number, name in enumerate(ranked):
        lines: list[dict[str, Any]] = []
        for color, run in enumerate(runs):
            for key, part in ((name, "training"), (f"eval_{name}", "evaluation")):
                if points := _points(run.log, key):
                    of_run = f"{run.name}: {part}" if len(runs) > 1 else part
                    shade = color if len(runs) > 1 else int(part == "evaluation")
                    lines.append({"name": of_run, "color": shade, "dashed": part == "evaluation", "points": points})
            if best := _best(run, f"eval_{name}"):
                name_of_best = f"{run.name}: best" if len(runs) > 1 else "best"
                lines.append({"name": name_of_best, "color": 4, "mark": True, "points": {best[0]: best[1]}})
        if lines and any(value is not None for line in lines for value in line["points"].values()):
            axis = sorted({step for line in lines for step in line["points"]})
            for line in lines:
                points = line.pop("points")
                line["values"] = [points.get(step) for step in axis]
            yield {"id": f"chart-{number}", "title": name, "steps": axis, "lines": lines}


def _values(chart: dict[str, Any]) -> set[float]:
    return {value for line in chart["lines"] for value in line["values"] if value is not None}


def _rank(name: str) -> tuple[int, str]:
    """The order of the charts: what is trained on first, what the machine does last."""
    place = _FIRST.index(name) if name in _FIRST else len(_FIRST) + name.startswith("perf/")
    return place, name


def _points(log: Sequence[dict[str, Any]], key: str) -> dict[int, float | None]:
    """{step: value}; None where it is not finite."""
    logged = {record["step"]: record[key] for record in log if type(record.get(key, "")) in (int, float, type(None))}
    found = {step: value if value is not None and math.isfinite(value) else None for step, value in logged.items()}
    if len(found) <= MOST_POINTS:
        return found
    every = math.ceil(len(found) / MOST_POINTS)
    return {step: value for i, (step, value) in enumerate(found.items()) if i % every == 0 or i == len(found) - 1}


def _best(run: Run, key: str) -> tuple[int, float] | None:
    """(step, value) of the best evaluation by the run's own metric, if `key` is it."""
    arguments = run.record.get("arguments", {})
    metric = arguments.get("metric_for_best_model")
    if not metric or key != metric_key(metric):
        return None
    known = [(step, value) for step, value in _points(run.log, key).items() if value is not None]
    return max(known, key=lambda point: merit(point[1], arguments.get("greater_is_better")), default=None)


# ---- text ----


def _subtitle(runs: Sequence[Run]) -> str:
    (record, *others) = [run.record for run in runs]
    if others or not record:
        return f"{len(runs)} runs"
    model, data = record.get("model") or {}, record.get("data") or {}
    sizes = f"{model['trained']:,} of {model['parameters']:,} parameters trained" if model else ""
    parts = [
        record.get("ended", {}).get("how") or "not ended, or killed",
        f"started {record['at'][:16].replace('T', ' ')} UTC",
        f"{model.get('name') or model['class']}: {sizes}" if model else "",
        f"{data['rows']:,} rows" if "rows" in data else "",
        f"{record['processes']} process{'es' * (record['processes'] > 1)}",
    ]
    return _text(" · ".join(part for part in parts if part))


def _results(runs: Sequence[Run]) -> list[list[str]]:
    """A line for each metric: its last value in each run."""
    lasts = [_lasts(run) for run in runs]
    names = sorted({name for last in lasts for name in last}, key=lambda name: _rank(name.removeprefix("eval_")))
    return [[name, *(_number(last.get(name)) for last in lasts)] for name in names]


def _lasts(run: Run) -> dict[str, Any]:
    """The last value of each metric that tells how a run went."""
    wanted = (
        "loss reward train_runtime train_loss perf/tokens_per_second perf/peak_host_mib perf/peak_device_mib".split()
    )
    found: dict[str, Any] = {}
    for record in run.log:
        found |= {name: value for name, value in record.items() if name in wanted or _is_result(name)}
    return found


def _is_result(name: str) -> bool:
    return name.startswith("eval_") and not _TOTALS.match(name.removeprefix("eval_"))


def _tiles(run: Run) -> str:
    lasts, steps = _lasts(run), run.log[-1]["step"] if run.log else 0
    seconds = lasts.get("train_runtime")
    tiles = {"optimizer steps": f"{steps:,}"}
    tiles |= {"training time": _duration(seconds)} if seconds else {}
    tiles |= {name: _number(lasts[name]) for name in [n for n in ("reward", "loss") if n in lasts][:1]}
    evaluated = sorted((name for name in lasts if _is_result(name)), key=lambda name: _rank(name.removeprefix("eval_")))
    if "eval_reward" in lasts:  # beside which a loss near 0 says nothing
        evaluated = [name for name in evaluated if name != "eval_loss"]
    tiles |= {name: _number(lasts[name]) for name in evaluated[:3]}
    for name in evaluated:
        if best := _best(run, name):
            tiles[f"best {name}"] = f"{_number(best[1])} at step {best[0]:,}"
    speed = [v for v in _points(run.log, "perf/tokens_per_second").values() if v]
    tiles |= {"tokens a second": f"{sorted(speed)[len(speed) // 2]:,.0f}"} if speed else {}
    memory = lasts.get("perf/peak_device_mib") or lasts.get("perf/peak_host_mib")
    tiles |= {"peak memory": f"{memory / 1024:.1f} GiB"} if memory else {}
    named = ((_text(name).replace("_", "_<wbr>"), _text(value)) for name, value in tiles.items())
    cells = "".join(f'<div class="tile"><span>{name}</span><b>{value}</b></div>' for name, value in named)
    return f'<div class="tiles">{cells}</div>'


def _messages(run: Run) -> str:
    ended = run.record.get("ended", {})
    if not ended.get("messages"):
        return ""
    more = f'<p class="soft">{ended["left_out"]} more are not shown.</p>' if ended.get("left_out") else ""
    lines = "".join(f'<p class="warning">{_text(message)}</p>' for message in ended["messages"])
    return _section("Warnings and errors", lines + more)


def _times(run: Run, name: str) -> str:
    """Where the seconds of training went."""
    spent = dict.fromkeys(PHASES, 0.0)
    for record in run.log:
        for key, seconds in record.items():
            if (found := _PHASE.fullmatch(key)) and isinstance(seconds, (int, float)):
                spent[found[1]] = spent.get(found[1], 0.0) + seconds
    spent = {phase: seconds for phase, seconds in spent.items() if seconds > 0}
    total = sum(spent.values())
    if not total:
        return ""
    shade = {phase: _COLORS[number % len(_COLORS)] for number, phase in enumerate(spent)}
    bar = "".join(f'<div style="flex:{s / total:.4f};background:{shade[p]}"></div>' for p, s in spent.items())
    keys = "".join(
        f'<span><span class="key" style="background:{shade[p]}"></span>{_text(_PHASE_NAMES.get(p, p))} '
        f"{_duration(s)} ({s / total:.0%})</span>"
        for p, s in spent.items()
    )
    return _section(f"Time {name}".strip(), f'<div class="bar">{bar}</div><p class="soft keys">{keys}</p>')


def _samples(run: Run, name: str) -> str:
    """What the model wrote over time: the answers to a prompt below each other, where prompts come again."""
    parts = []
    for source, rows in run.samples.items():
        columns = list(dict.fromkeys(column for row in rows for column in row if column != "step"))
        first = [json.dumps(row.get(columns[0])) for row in rows]
        recurs = len(set(first)) < len(rows)
        places = {prompt: place for place, prompt in enumerate(dict.fromkeys(first))} if recurs else {}
        ordered = sorted(zip(rows, first, strict=True), key=lambda pair: (places.get(pair[1], 0), pair[0]["step"]))
        lines: list[list[str]] = []
        last: str | None = None
        for row, prompt in ordered:
            shown = [f"{row['step']:,}", *(_sample(row.get(column)) for column in columns)]
            if recurs and prompt == last:
                shown[1] = ""
            lines.append(shown)
            last = prompt
        title = "" if source == "samples" else f"<h3>{_text(source.replace('_', ' '))}</h3>"
        parts.append(f'{title}<div class="texts">{table(lines, ["step", *columns])}</div>')
    return _section(f"Samples {name}".strip(), "".join(parts)) if parts else ""


def _sample(value: Any) -> str:
    """A text, cut to `MOST_TEXT` characters; messages with their roles; a number to four digits."""
    if isinstance(value, str) and value.startswith('[{"'):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, list) and all(isinstance(message, dict) and "role" in message for message in value):
        value = "\n".join(f"{message['role']}: {_value(message.get('content') or '')}" for message in value)
    text = _number(value) if isinstance(value, float) else "" if value is None else _value(value)
    text = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} ..."


def _data(run: Run) -> str:
    """What became of the rows, as the log said before training."""
    lines = [line for lines in (run.record.get("data_reports") or {}).values() for line in lines]
    return _section("Data", f'<p class="lines">{_text(chr(10).join(lines))}</p>') if lines else ""


def _arguments(runs: Sequence[Run]) -> str:
    """The arguments of one run that differ from their defaults; of several, those that differ between them."""
    all_values = [run.record.get("arguments") or {} for run in runs]
    if len(runs) > 1:
        names = sorted({name for values in all_values for name in values})
        changed = [n for n in names if len({json.dumps(values.get(n)) for values in all_values}) > 1]
        rows = [[name, *(_value(values.get(name)) for values in all_values)] for name in changed]
        return _section("Arguments that differ", table(rows, ["", *(run.name for run in runs)])) if rows else ""
    values = {name: all_values[0].get(name) for name in runs[0].record.get("changed") or ()}
    return _named("Non-default arguments", values | (runs[0].record.get("adapter") or {}))


def _facts(run: Run) -> str:
    groups = {group: run.record.get(group) or {} for group in ("model", "data", "hardware", "code", "packages")}
    found: dict[str, Any] = {}
    for group, facts in groups.items():
        kept = {name: value for name, value in facts.items() if value != "not installed"}
        found |= {f"{group} {n}": v for n, v in kept.items()} if group in ("model", "data") else kept  # have a class
    return _named("Model, data, machine", found)


def _all_arguments(run: Run) -> str:
    values = dict(sorted((run.record.get("arguments") or {}).items()))
    return _named("All arguments", values, f"<details><summary>{len(values)} arguments</summary>{{}}</details>")


def _named(title: str, values: dict[str, Any], around: str = "{}") -> str:
    rows = [[name, _value(value)] for name, value in values.items()]
    return _section(title, around.format(table(rows))) if rows else ""


def _section(title: str, content: str, boxed: bool = True) -> str:
    return f"<h2>{_text(title)}</h2>" + (f'<div class="box">{content}</div>' if boxed else content)


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """A table of texts as HTML."""
    top = "<tr>" + "".join(f"<th>{_text(cell)}</th>" for cell in head) + "</tr>" if head else ""
    lines = ("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f"<table>{top}{''.join(lines)}</table>"


def _cell(text: str) -> str:
    kind = ' class="short"' if len(text) <= MOST_WHOLE else ""
    return f"<td{kind}>{_text(text)}</td>"


_text = html.escape


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _number(value: Any) -> str:
    if not isinstance(value, (int, float)):
        return "" if value is None else f"{value}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min" if minutes else f"{seconds:.1f} s"
    )
