"""``posttrain env``: what a bug report needs to know about this machine."""

from __future__ import annotations

import sys

from posttrain.core import record


def run(words: list[str]) -> None:
    """Print versions and hardware, a line each."""
    facts = record.packages() | {"executable": sys.executable} | record.hardware()
    print("\n".join(f"{name:<18} {value}" for name, value in facts.items()))
