"""The command ``posttrain bench``, which measures the speed and the memory of a run in a few optimizer steps."""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from posttrain.cli import parse
from posttrain.cli.method import of_words, read
from posttrain.core.fields import durations

HELP = """usage: posttrain bench [<method>] run.yaml ... [--bench_steps N] [--bench_warmup N] [--name value ...]

Makes some optimizer steps of a run, with its own model, rows and arguments, and prints seconds, tokens per second and
peak memory. Takes all arguments of the method (posttrain <method> --help). Nothing is evaluated or kept.

  --bench_steps N   optimizer steps that are measured [default: 10]
  --bench_warmup N  optimizer steps before them [default: 3]

posttrain plan estimates the memory without making a step."""
STEPS = "a number of optimizer steps"
OPTIONS = {"bench_steps": (10, parse.whole(), STEPS), "bench_warmup": (3, parse.whole(0), STEPS)}
#: What no bench needs. Its last step would evaluate and save.
CHANGES: dict[str, Any] = {
    "logging_steps": 1,
    "logging_strategy": "steps",
    "logging_first_step": True,
    "eval_strategy": "no",
    "eval_on_start": False,
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "save_top_k": None,
    "check_saved_model": False,
    "push_to_hub": False,
    "report_to": "none",
    "report": False,
    "resume_from_checkpoint": None,
    "overwrite_output_dir": True,
    "remote_dir": None,
    "include_num_input_tokens_seen": "all",
    "disable_tqdm": True,
}
TIME_LEFT = "perf/time_left_seconds"
NAMES = {
    "perf/step_seconds": "seconds of an optimizer step",
    "perf/tokens_per_second": "tokens per second",
    "perf/real_token_share": "share of tokens that is not padding",
    "perf/mfu": "share of the device's peak operations",
    "perf/peak_host_mib": "peak host memory, MiB",
    "perf/peak_device_mib": "peak device memory, MiB",
}


def run(words: list[str]) -> None:
    """Print what some optimizer steps of a run take."""
    words, options = parse.take_options("bench", words, OPTIONS)
    method, words = of_words(words, "bench")
    asked, warmup = read(method, words), options["bench_warmup"]
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as folder:
        changes = CHANGES | {"max_duration": durations.if_tokens(asked.config.max_duration)}
        asked.config = dataclasses.replace(
            asked.config, output_dir=folder, max_steps=warmup + options["bench_steps"], **changes
        )
        asked.keeps_model = False
        method.run(asked)
        if asked.config.process_index == 0:
            print("\n".join(lines(Path(folder) / "log.jsonl", warmup)))


def lines(log: Path, warmup: int) -> list[str]:
    """A line for each number of the records in `log` after the first `warmup` optimizer steps: median, least, most."""
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if "perf/step_seconds" in record and record["step"] > warmup]
    known = [name for name in NAMES if any(name in record for record in steps)]
    phases = sorted({name for record in steps for name in record if name.startswith("perf/")} - {*NAMES, TIME_LEFT})
    titles = {name: NAMES[name] for name in known}
    titles |= {name: f"seconds of {name[5:-8].replace('_', ' and ')}" for name in phases if name.endswith("_seconds")}
    width = max(map(len, titles.values()), default=0)
    head = f"{len(steps)} optimizer steps after {warmup}: median (least to most), of all processes; memory of this one"
    return [head, *(f"  {title:<{width}}  {_spread(steps, name)}" for name, title in titles.items())]


def _spread(records: list[dict[str, Any]], name: str) -> str:
    values = [record[name] for record in records if record.get(name) is not None]
    median, least, most = (f"{value:,.4g}" for value in (statistics.median(values), min(values), max(values)))
    return f"{median} ({least} to {most})"
