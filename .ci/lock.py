"""Writes requirements.lock: every package that the four distributions need, in the versions of this environment.

``make lock``. Extras of which a package is not installed here (vllm, liger, kernels) are left out.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as canonical

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "requirements.lock"
EXTRAS = {
    "posttrain-core": "datasets peft quantization plots search",
    "posttrain-seq2seq": "metrics",
    "posttrain-sft": "images",
    "posttrain-rl": "agents",
}
HEAD = """\
# What posttrain needs, in the versions that its tests run with. `make lock` writes it from the installed environment.
# pip install -r requirements.lock, then posttrain. For PyTorch without CUDA add
# --extra-index-url https://download.pytorch.org/whl/cpu; with CUDA its own packages (nvidia-*, triton) come with it.
"""


def closure(more: Iterable[str] = ()) -> dict[str, str]:
    """{package: version} of all that the distributions and the requirements `more` need, the distributions left out."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(name, extra) for name, extras in EXTRAS.items() for extra in ("", *extras.split())]
    todo += [(canonical(one.name), extra) for one in map(Requirement, more) for extra in ("", *one.extras)]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        if name not in EXTRAS:
            found[name] = re.sub(r"\+.*", "", metadata.version(name))  # +cpu: the build
        for text in _needs(name, extra):
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                todo += [(canonical(needed.name), one) for one in ("", *needed.extras)]
    return found


def _needs(name: str, extra: str) -> list[str]:
    """What a package needs; of posttrain's, what its pyproject.toml says now."""
    if name not in EXTRAS:
        return metadata.requires(name) or []
    file = ROOT / "packages" / name.removeprefix("posttrain-") / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    return project["optional-dependencies"][extra] if extra else project["dependencies"]


def text() -> str:
    """The file."""
    return HEAD + "".join(f"{name}=={version}\n" for name, version in sorted(closure().items()))


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    print(f"{FILE.name}: {len(closure())} packages")
