"""Accumulates metrics as (sum, count), exact over micro-batches and processes, without waiting for the device."""

from __future__ import annotations

import contextlib
import json
import math
import re
import resource
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from datetime import timedelta
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.core.data import accelerator
from posttrain.core.files import write_text
from posttrain.core.losses.normalization import IN_EVERY_RECORD, WIDE, name_taken, summable
from posttrain.core.state import strict

# Metrics of the trainer itself: input tokens (without padding, and all), and operations done with them.
TOKENS, FLOPS = "input/tokens", "input/flops"
#: Begins the names of metrics that are reduced over an epoch.
OF_EPOCH = "of epoch/"
REDUCTIONS = ("mean", "sum", "min", "max")
#: Reduces a tensor to one value.
_REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}


class Metrics:
    """Running (sum, count) pairs by name, plain sums, and extremes. Only `drain` waits for the device. `has_epochs`:
    whether what is logged of an epoch is kept until it ends.
    """

    def __init__(self, has_epochs: bool = True) -> None:
        self.has_epochs = has_epochs
        #: By name, a sum and the count of its items; or a value and how values are reduced: "min", "max" or "sum".
        self._values: dict[str, tuple[Any, Any]] = {}

    def add(self, name: str, value: float | torch.Tensor, weight: float | torch.Tensor = 1) -> None:
        """Add a mean `value` over `weight` items. A tensor of any shape is averaged; it stays on its device."""
        if isinstance(value, torch.Tensor):
            value = value.detach()
            if value.ndim or value.dtype not in WIDE:
                value = value.float().mean()
        # A product with the common weight 1 would be one more kernel launch.
        self.add_sum(name, value if isinstance(weight, int) and weight == 1 else value * weight, weight)

    def log(self, name: str, value: Any, weight: Any, reduce: str, per_epoch: bool) -> None:
        """Add a value with the arguments of `Trainer.log_metric`."""
        if name in IN_EVERY_RECORD:
            raise name_taken("log_metric got", name)
        if reduce not in REDUCTIONS:
            raise ValueError(f"log_metric({name!r}): reduce={reduce!r} is not one of {', '.join(REDUCTIONS)}.")
        if isinstance(value, (np.ndarray, np.bool_)):
            value = torch.as_tensor(value)
        is_number = isinstance(value, (torch.Tensor, Real))
        if not is_number:
            raise TypeError(f"log_metric({name!r}): the value is {value!r}; it must be a number or a tensor.")
        name = f"{OF_EPOCH}{name}" if per_epoch and self.has_epochs else name
        if reduce == "mean":
            return self.add(name, value, weight)
        if not (isinstance(weight, int) and weight == 1):
            raise ValueError(f"log_metric({name!r}): a {reduce} has no weight; leave weight out, or set reduce='mean'.")
        if isinstance(value, torch.Tensor) and value.ndim:
            value = _REDUCE[reduce](summable(value))
        self.add_extreme(name, value, reduce)

    def add_sum(self, name: str, total: float | torch.Tensor, count: float | torch.Tensor | str) -> None:
        """Add a sum over `count` items; or, with "min", "max" or "sum" as `count`, a value to what is reduced so."""
        if isinstance(total, torch.Tensor) and total.dtype not in WIDE:
            total = summable(total)
        if isinstance(count, torch.Tensor) and count.dtype not in WIDE:
            count = summable(count)
        if name not in self._values:
            self._values[name] = (total, count)
            return
        before, known = self._values[name]
        kind, others = (one if isinstance(one, str) else "mean" for one in (count, known))
        if kind != others:
            raise ValueError(f"The metric {name!r} is a {others} and cannot be a {kind} too.")
        if kind in ("min", "max"):
            self._values[name] = (_further(before, total, kind), kind)
        else:
            self._values[name] = (before + total, kind if kind == "sum" else known + count)

    def add_extreme(self, name: str, value: float | torch.Tensor, which: str) -> None:
        """Add a value to a minimum or maximum, where NaN is ignored, or to a plain sum.

        Args:
            value: shape (); a tensor stays on its device.
            which: "min", "max" or "sum", always the same for a name.
        """
        self.add_sum(name, value.detach() if isinstance(value, torch.Tensor) else value, which)

    def update(self, state: Mapping[str, tuple[Any, Any]]) -> None:
        """Add the sums and extremes in a `state_dict`."""
        for name, (value, count) in state.items():
            self.add_sum(name, value, count)

    def total(self, name: str) -> float:
        """The sum of `name` on this process since the last drain; waits for the device."""
        return plain({name: self._values.get(name, (0, 0))})[name][0]

    def copy(self) -> Metrics:
        """A snapshot of the metrics, independent of the original."""
        other = Metrics(self.has_epochs)
        other.restore(self)
        return other

    def restore(self, snapshot: Metrics) -> None:
        """Take the sums of a `copy`, which may be restored again."""
        self._values = dict(snapshot._values)

    @contextlib.contextmanager
    def apart(self) -> Iterator[Metrics]:
        """What is added in this context belongs to an evaluation, not to the training step around it."""
        training = self._values, self.has_epochs
        self._values, self.has_epochs = {}, False
        try:
            yield self
        finally:
            self._values, self.has_epochs = training

    def drain(
        self,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
        only: Container[str] | None = None,
        epoch: bool = False,
    ) -> dict[str, tuple[float, float]]:
        """The (sum, count) of each metric since the last drain, over all processes, then reset. An extreme or a plain
        sum is (itself, 1), and an extreme is left out if it was always NaN.

        Args:
            gather: lists what every process passed (`Distributed.gather_object`); called once.
            only: names to drain; the rest stay.
            epoch: the metrics of the epoch, which stay otherwise.
        """

        def is_asked(name: str) -> bool:
            return name.startswith(OF_EPOCH) == epoch and (only is None or name in only)

        taken = {name: pair for name, pair in self._values.items() if is_asked(name)}
        self._values = {name: pair for name, pair in self._values.items() if name not in taken}
        everyone = Metrics()
        for part in gather(plain(taken)):
            everyone.update(part)
        pairs = {name: pair for name, pair in everyone._values.items() if not isinstance(pair[1], str)}
        others = {name: pair for name, pair in everyone._values.items() if name not in pairs}
        pairs |= {name: (v, 1) for name, (v, kind) in others.items() if kind == "sum" or not math.isnan(v)}
        return {name.removeprefix(OF_EPOCH): pair for name, pair in pairs.items()}

    def sums(self) -> dict[str, tuple[Any, Any]]:
        """The pairs of numbers or tensors that `state_dict` makes numbers of; without a wait for a device."""
        return dict(self._values)

    def state_dict(self) -> dict[str, tuple[float, float | str]]:
        # Plain numbers of the same type, so that a resumed sum continues bit for bit.
        return plain(self._values)

    def load_state_dict(self, state: dict[str, tuple[float, float | str]]) -> None:
        self._values = {name: (value, count) for name, (value, count) in state.items()}


def _further(before: Any, value: Any, which: str) -> Any:
    """The lesser or the greater of two values; that which is no NaN."""
    if isinstance(before, torch.Tensor) or isinstance(value, torch.Tensor):
        choose = torch.fmin if which == "min" else torch.fmax
        return choose(torch.as_tensor(before), torch.as_tensor(value))
    known = [v for v in (before, value) if not math.isnan(v)] or [math.nan]
    return min(known) if which == "min" else max(known)


def plain(pairs: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """`pairs` with numbers in place of tensors; of those on a device, one wait for all of a type."""
    numbers: dict[int, Any] = {}  # by the `id` of what holds them
    groups: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = {}
    for value in (value for pair in pairs.values() for value in pair):
        if isinstance(value, torch.Tensor) and not value.is_cpu:
            groups.setdefault((value.device, value.dtype), {})[id(value)] = value.detach().reshape(())
        else:
            numbers[id(value)] = value.item() if hasattr(value, "item") else value
    with accelerator.waiting():
        for group in groups.values():
            numbers.update(zip(group, torch.stack(list(group.values())).tolist(), strict=True))
    return {name: (numbers[id(total)], numbers[id(count)]) for name, (total, count) in pairs.items()}


def means(pairs: dict[str, tuple[float, float]]) -> dict[str, float]:
    """``{name: sum / count}``, without those where nothing was counted, as where every completion is masked."""
    return {name: total / count for name, (total, count) in pairs.items() if count}


# Dense 16-bit matrix operations a second, as the makers' data sheets have them, by a part of the device's name.
PEAK_FLOPS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "A40": 150e12,
    "A6000": 155e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 5090": 210e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
    "MI250X": 191.5e12,  # a device is one of its two dies
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak operations per second of a `device` of `PEAK_FLOPS` with matrices of a 16-bit `dtype`; None of others."""
    return peak_of(accelerator.name(device)) if dtype in (torch.bfloat16, torch.float16) else None


def peak_of(name: str) -> float | None:
    """As `peak_flops`, of the device that its maker calls `name`."""
    return next((peak for part, peak in PEAK_FLOPS.items() if re.search(rf"{part}(?!\d)", name)), None)


class Clock:
    """Where the seconds of a run go, by phase, and how fast it moves.

    Args:
        device: an accelerator's phases between `begin` and `lap` are timed by the device itself, and read when a record
            is made; without one, they are the host's.
        peak_flops: operations a second that all devices together could do, for the ``perf/mfu`` of a record.
    """

    def __init__(self, device: torch.device | None = None, peak_flops: float | None = None) -> None:
        self._phases: dict[str, float] = {}
        self._tokens = self._slots = self._flops = 0.0
        self._device: Any = device if device is not None and accelerator.has_memory(device) else None
        self._peak_flops = peak_flops
        self._laps: list[tuple[str, Any, Any]] = []
        self._mark: Any = None  # outside of steps
        #: Whether a lap has ended since `begin`.
        self.has_laps = False
        self._started = self._last = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """A context whose seconds are those of `phase`; phases do not nest."""
        entered = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - entered)

    def add(self, phase: str, seconds: float) -> None:
        self._phases[phase] = self._phases.get(phase, 0.0) + seconds

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase since the last `performance`, without laps on a device."""
        return dict(self._phases)

    def begin(self) -> None:
        """The first lap begins."""
        self.has_laps = False
        self._mark = time.perf_counter() if self._device is None else self._event()

    def lap(self, phase: str, last: bool = False) -> None:
        """Add the time since `begin` or the last lap to `phase`. After the `last` lap, `begin` starts again."""
        if self._mark is None:
            return
        self.has_laps = True
        if self._device is None:
            now = time.perf_counter()
            self._phases[phase] = self._phases.get(phase, 0.0) + now - self._mark
        else:
            now = self._event()
            self._laps.append((phase, self._mark, now))
        self._mark = None if last else now

    def _event(self) -> Any:
        event = accelerator.module(self._device).Event(enable_timing=True)
        event.record()
        return event

    def count(self, tokens: float, slots: float, flops: float = 0) -> None:
        """Add, for the next `performance`, tokens without padding, all `slots`, and operations, over all processes."""
        self._tokens += tokens
        self._slots += slots
        self._flops += flops

    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._started

    def performance(self, steps: int, steps_left: float | None) -> dict[str, float]:
        """The ``perf/`` values of a log record since the last one, then reset.

        Times of phases are in seconds, peaks of memory in MiB and since the process began, ``perf/mfu`` is the share of
        the devices' peak (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

        Args:
            steps: optimizer steps since the last record. steps_left: to the end of the run; None: unknown.
        """
        if self._laps:
            with accelerator.waiting():
                self._laps[-1][2].synchronize()
            for phase, begun, ended in self._laps:
                self.add(phase, begun.elapsed_time(ended) / 1000)
            self._laps = []
        now = time.perf_counter()
        seconds, phases = now - self._last, self._phases
        tokens, slots, flops = self._tokens, self._slots, self._flops
        self._last, self._phases, self._tokens, self._slots, self._flops = now, {}, 0.0, 0.0, 0.0
        # Evaluations and saves are not part of a step's own speed, but they are part of the time that is left.
        training = max(seconds - phases.get("eval", 0.0) - phases.get("save", 0.0), 1e-9)
        values = {"perf/step_seconds": training / max(steps, 1)}
        if steps_left is not None:
            values["perf/time_left_seconds"] = seconds / max(steps, 1) * steps_left
        if slots:
            values |= {"perf/tokens_per_second": tokens / training, "perf/real_token_share": tokens / slots}
        if flops and self._peak_flops:
            values["perf/mfu"] = flops / training / self._peak_flops
        return values | {f"perf/{phase}_seconds": spent for phase, spent in phases.items()} | peak_memory(self._device)


def clock_of(model: torch.nn.Module, dist: Any) -> Clock:
    """A clock for training `model`. `dist`, a `posttrain.core.distributed.strategies.Distributed`, says device,
    precision and number of processes.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dist.precision)
    dtype = dtype or next((parameter.dtype for parameter in model.parameters()), torch.float32)
    peak = peak_flops(dist.device, dtype)
    return Clock(dist.device, peak and peak * dist.num_processes)


def peak_memory(device: torch.device | None = None) -> dict[str, float]:
    """The peak memory of this process in MiB: ``perf/peak_host_mib``, of a `device` with memory of its own also
    ``perf/peak_device_mib``.
    """
    unit = 2**20 if sys.platform == "darwin" else 2**10
    values = {"perf/peak_host_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}
    if device is not None and accelerator.has_memory(device):
        values["perf/peak_device_mib"] = torch.accelerator.max_memory_allocated(device) / 2**20
    return values


def speed_metrics(
    prefix: str, seconds: float, num_samples: float | None = None, num_steps: float | None = None
) -> dict[str, float]:
    """``{prefix}_runtime`` in seconds and, where given, ``_samples_per_second`` and ``_steps_per_second``."""
    metrics = {f"{prefix}_runtime": round(seconds, 4)}
    if num_samples is not None:
        metrics[f"{prefix}_samples_per_second"] = round(num_samples / seconds, 3) if seconds else math.inf
    if num_steps is not None:
        metrics[f"{prefix}_steps_per_second"] = round(num_steps / seconds, 3) if seconds else math.inf
    return metrics


def formatted(metrics: dict[str, Any]) -> dict[str, Any]:
    """`metrics` for people: run times as ``h:mm:ss.cc``, ``total_flos`` in GF (2**30), fractions to four places."""
    shown = {name: round(value, 4) if isinstance(value, float) else value for name, value in metrics.items()}
    for name, value in metrics.items():
        if "_mem_" in name:
            shown[name] = f"{value >> 20}MB"
        elif "_runtime" in name:
            shown[name] = f"{timedelta(seconds=int(value))}.{int(value % 1 * 100):02d}"
        elif name == "total_flos":
            shown[name] = f"{int(value) >> 30}GF"
    return shown


def table(title: str, metrics: dict[str, Any]) -> str:
    """`metrics`, which may be `formatted`, as the lines of a table in the order of their names."""
    shown = {name: str(value) for name, value in sorted(metrics.items())}
    names, values = max(map(len, shown), default=0), max(map(len, shown.values()), default=0)
    return "\n".join([f"***** {title} *****", *(f"  {n:<{names}} = {v:>{values}}" for n, v in shown.items())])


def save_metrics(directory: Path, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
    """Write `metrics` as ``<split>_results.json``, strict JSON, and add them to ``all_results.json`` if `combined`."""
    directory.mkdir(parents=True, exist_ok=True)
    together = directory / "all_results.json"
    before = json.loads(together.read_text(encoding="utf-8")) if combined and together.exists() else {}
    for path, values in [(directory / f"{split}_results.json", metrics), (together, before | metrics)][: 1 + combined]:
        write_text(path, json.dumps(strict(values), indent=4, sort_keys=True, allow_nan=False) + "\n")


def num_tokens_in(logs: Mapping[str, float]) -> str | None:
    """The name of the tokens trained on so far in a record of training or of an evaluation; None in others."""
    if "loss" in logs:
        return "num_tokens"
    return "eval_num_tokens" if any(name.startswith("eval_") and name.endswith("loss") for name in logs) else None


def is_performance(name: str) -> bool:
    """Whether a logged value measures speed: callbacks get it, the history of the run excludes it."""
    return name.startswith("perf/") or name == "step_time"


def is_timing(name: str) -> bool:
    """Whether a logged value depends on the clock or the machine, so that two equal runs may log it differently."""
    return is_performance(name) or "_mem_" in name or name.endswith(("_runtime", "_per_second", "_seconds", "_mib"))


class Appended:
    """trl's ``_metrics`` of a trainer: ``_metrics["train"]["kl"].append(value)`` logs the mean of such values.
    `log_metric` is that of the trainer, which knows whether it evaluates, so that "train" and "eval" are treated alike.
    """

    def __init__(self, log_metric: Callable[[str, Any], None], name: str | None = None) -> None:
        self._log, self._name = log_metric, name

    def __getitem__(self, name: str) -> Appended:
        """The metrics of a mode, "train" or "eval"; of these, the values of a name."""
        return Appended(self._log, name)

    def __setitem__(self, name: str, values: Iterable[Any]) -> None:
        self[name].extend(values)

    def __contains__(self, name: str) -> bool:
        return True  # a list to append to need not be made first

    def append(self, value: Any) -> None:
        self._log(str(self._name), value)

    def extend(self, values: Iterable[Any]) -> None:
        for value in values:
            self.append(value)
