"""``posttrain env``: what a bug report needs to know about this machine."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "posttrain-core", "posttrain-sft", "posttrain-seq2seq", "posttrain-rl", "torch", "transformers", "accelerate",
    "datasets", "tokenizers", "safetensors", "peft", "bitsandbytes", "vllm", "numpy",
)  # fmt: skip


def report() -> str:
    """Versions and hardware, a line each."""
    facts = {"platform": platform.platform(), "python": f"{platform.python_version()} ({sys.executable})"}
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return "\n".join(f"{name:<18} {value}" for name, value in (facts | _hardware()).items())


def _hardware() -> dict[str, str]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {"cpu": f"{_cpu_name()}, {cores} cores usable"}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    facts["cuda of torch"] = str(torch.version.cuda)
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        facts[f"gpu {index}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB"
    if not torch.cuda.is_available():
        facts["accelerator"] = "mps" if torch.backends.mps.is_available() else "none"
    return facts


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
