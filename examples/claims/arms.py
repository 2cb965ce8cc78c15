"""Runs a claim over seeds: the figures of each arm with their interval, and one JSON file in ``results``.

An arm is one of the things that are compared, such as a loss. Every arm is run with every seed. Intervals are Student's
t at 95%, over the seeds; differences between two arms are taken seed by seed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # the examples themselves
RESULTS = HERE / "results"
KEPT = Path("out/claims")  # what a run that is cut short need not do again
DATA = Path(os.environ.get("POSTTRAIN_DATA") or HERE.parent / "data")
PACKAGES = ("posttrain-core", "torch", "transformers", "peft")

#: Student's t for an interval of 95% over 2, 3, ... 10 values; of 10 for more, which errs on the wide side.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

Figures = dict[str, float]


def run(
    claim: str,
    source: str,
    arms: Sequence[str],
    measure: Callable[..., Figures],
    verdict: Callable[[dict[str, list[Figures]]], str],
    settings: Mapping[str, Any],
    smoke: Mapping[str, Any],
) -> None:
    """Measure each arm with each seed, print the table and the verdict, and write ``results/<script>.json``.

    A run that was cut short goes on with the next arm, if settings and versions are the same.

    Args:
        claim: what is said. source: by whom.
        measure: ``(arm, seed, **settings) -> {name: figure}``.
        verdict: the figures of each arm, in the order of the seeds -> what they say of the claim.
        settings: of `measure`; every number of them is a flag of the command.
        smoke: settings in their place with ``--smoke``, which shows that the script runs and writes nothing.
    """
    parser = argparse.ArgumentParser(description=f"{claim} ({source})")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file")
    parser.add_argument("--smoke", action="store_true", help="one seed and tiny settings, to see that it runs")
    for name, value in settings.items():
        if isinstance(value, (int, float)):
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    given = vars(parser.parse_args())
    seeds, out, is_smoke = given.pop("seeds"), given.pop("out"), given.pop("smoke")
    chosen = dict(settings) | given | (dict(smoke) if is_smoke else {})
    seeds = seeds[:2] if is_smoke else seeds
    quiet()
    figures: dict[str, list[Figures]] = {arm: [] for arm in arms}
    spent: dict[str, list[float]] = {arm: [] for arm in arms}
    name = f"{Path(sys.argv[0]).stem}.json"
    part = KEPT / f"part-{name}"
    done = {} if is_smoke else measured_before(part, chosen)
    for seed in seeds:
        for arm in arms:
            began = time.process_time()
            if f"{arm} {seed}" not in done:
                found = measure(arm, seed, **chosen)
                done[f"{arm} {seed}"] = [found, round(time.process_time() - began, 1)]
                if not is_smoke:
                    part.parent.mkdir(parents=True, exist_ok=True)
                    part.write_text(json.dumps({"of": made_with(chosen), "figures": done}), encoding="utf-8")
            for column, value in zip((figures, spent), done[f"{arm} {seed}"], strict=True):
                column[arm].append(value)
            shown = ", ".join(f"{name} {value:.4g}" for name, value in figures[arm][-1].items())
            print(f"{arm}, seed {seed}: {shown} ({spent[arm][-1]:.0f} CPU s)", flush=True)
    print(f"\n{claim}\n")
    for arm in arms:
        told = ", ".join(f"{name} {interval([f[name] for f in figures[arm]])}" for name in figures[arm][0])
        print(f"  {arm}: {told}")
    told = verdict(figures)
    print(f"\n{told}")
    if is_smoke:
        return
    record = {
        "claim": claim, "source": source, "date": datetime.now(UTC).date().isoformat(), "seeds": seeds,
        "settings": chosen, "figures": figures, "cpu_seconds": spent, "verdict": told, "versions": versions(),
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / name).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    part.unlink()


def measured_before(part: Path, settings: Mapping[str, Any]) -> dict[str, list[Any]]:
    """``{"arm seed": [figures, CPU seconds]}`` of a run with these settings that was cut short."""
    if not part.is_file():
        return {}
    found = json.loads(part.read_text(encoding="utf-8"))
    return found["figures"] if found["of"] == made_with(settings) else {}


def made_with(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"settings": dict(settings), "versions": versions()}


def column(figures: dict[str, list[Figures]], arm: str, name: str) -> list[float]:
    return [found[name] for found in figures[arm]]


def differences(
    figures: dict[str, list[Figures]], arm: str, other: str, name: str, other_name: str | None = None
) -> list[float]:
    """`arm` minus `other`, seed by seed: their figure `name`, or that of `other` with another name."""
    pairs = zip(column(figures, arm, name), column(figures, other, other_name or name), strict=True)
    return [a - b for a, b in pairs]


def bounds(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, lower and upper bound of its 95% interval)."""
    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return mean, mean, mean
    error = (sum((value - mean) ** 2 for value in values) / (n - 1) / n) ** 0.5
    half = T_95[min(n, len(T_95) + 1) - 2] * error
    return mean, mean - half, mean + half


def shown(low: float, high: float) -> str:
    """What an interval says of a claim that its value is above 0."""
    return "Holds" if low > 0 else "Does not hold" if high < 0 else "Not shown"


def interval(values: Sequence[float]) -> str:
    """The mean with its 95% interval."""
    mean, low, high = bounds(values)
    return f"{mean:.4g} [{low:.4g}, {high:.4g}]"


def quiet() -> None:
    """Leave the lines of single runs out: there are many."""
    import warnings

    from datasets import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bars()
    disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # of one library to another
    logging.getLogger("posttrain").setLevel(logging.WARNING)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def versions() -> dict[str, str]:
    from posttrain.cli.report import run_record

    installed = run_record.packages()
    return {package: installed[package] for package in PACKAGES}
