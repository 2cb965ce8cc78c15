"""Writes the pages in ``docs/arguments`` from the fields of the configs: ``python docs/make_arguments.py``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from posttrain.cli.help import bounds_text, default_of, groups
from posttrain.core import TrainingArguments
from posttrain.core.config import field_types
from posttrain.core.registry import methods

FOLDER = Path(__file__).parent / "arguments"

INDEX = """# Arguments

Generated from the fields of the configs by `python docs/make_arguments.py`; a test keeps these pages up to date. On the
command line each argument is a flag (`--learning_rate 1e-5`), in a YAML file a line (`learning_rate: 1e-5`).
[migrating.md](../migrating.md) lists the names of earlier versions.

| config | arguments |
|---|---|
"""
SHARED = """
These arguments come on top of those of [TrainingArguments](TrainingArguments.md). An argument that stands on both
pages has another default here.
"""


def _cell(text: object) -> str:
    return " ".join(str(text).replace("|", "\\|").split())


def _page(config_class: type, known: set[str]) -> tuple[str, int]:
    """(the page of `config_class`, how many fields it lists): those not in `known` with the same default, by group."""
    lines, count = [f"# {config_class.__name__}"], 0
    if known:
        lines.append(SHARED.rstrip())
    for title, fields in groups(config_class).items():
        fields = [f for f in fields if (f.name, repr(default_of(f))) not in known]
        if fields:
            lines += [f"\n## {title}\n", "| name | type | default | meaning |", "|---|---|---|---|"]
        for field in fields:
            count += 1
            kinds = [k.__name__ for k in field_types(config_class).get(field.name, ()) if k is not type(None)]
            help, bounds = _cell(field.metadata.get("help", "")), _cell(bounds_text(field))
            default = _cell(f"`{default_of(field)!r}`")
            lines.append(
                f"| `{field.name}` | {' or '.join(kinds)} | {default} | {help}{f' ({bounds})' * bool(bounds)} |"
            )
    return "\n".join(lines) + "\n", count


def pages() -> dict[str, str]:
    """``{file name: text}``: `TrainingArguments`, what the config of each method adds, and an index of them."""
    known = {(field.name, repr(default_of(field))) for field in dataclasses.fields(TrainingArguments)}
    made, index = {}, INDEX
    for config_class in dict.fromkeys([TrainingArguments, *(method.config_class for method in methods().values())]):
        name = config_class.__name__
        made[f"{name}.md"], count = _page(config_class, known if made else set())
        index += f"| [{name}]({name}.md) | {count} |\n"
    return {"index.md": index} | made


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
