"""The command ``posttrain env``, which prints versions and hardware for a bug report."""

from __future__ import annotations

import sys

from posttrain.cli.report import run_record


def run(words: list[str]) -> None:
    """Print versions and hardware, a line each."""
    facts = run_record.packages() | {"executable": sys.executable} | run_record.hardware()
    print("\n".join(f"{name:<18} {value}" for name, value in facts.items()))
