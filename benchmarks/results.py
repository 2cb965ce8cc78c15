"""Where benchmarks leave their figures: ``results/<name>.json``, with the machine and the versions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import date
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "trl", "accelerate", "lightning", "datasets", "posttrain-core", "vllm")


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def vectors() -> list[str]:
    """Those instructions of the processor on which float32 and bfloat16 figures hang most."""
    try:
        flags = next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")
        ).split()
    except (OSError, StopIteration):
        return []
    return [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit that is measured, with a + where files differ from it."""
    command = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def write(name: str, figures: dict) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    machine = {"processor": processor(), "instructions": vectors(), "cores": os.cpu_count()}
    machine["python"] = platform.python_version()
    record = {
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": machine,
        "versions": versions(),
        **figures,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path
