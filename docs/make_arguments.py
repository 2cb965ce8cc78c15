"""Writes arguments.md from the fields of the configs: ``python docs/make_arguments.py``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from posttrain.core import TrainingArguments
from posttrain.core.cli.help import bounds_of, default_of, groups
from posttrain.core.fields import field_types
from posttrain.core.registry import methods

PAGE = Path(__file__).parent / "arguments.md"

HEADER = """# Arguments

Generated from the fields of the configs by `python docs/make_arguments.py`; a test keeps it up to date. On the command line
each is a flag (`--learning_rate 1e-5`), in a YAML file a line (`learning_rate: 1e-5`). Earlier names are in
[migrating.md](migrating.md).
"""


def _cell(text: object) -> str:
    return " ".join(str(text).replace("|", "\\|").split())


def _table(config_class: type, known: set[str]) -> list[str]:
    """The fields of `config_class` that are not in `known` with the same default, a table for each group."""
    lines = [f"\n## {config_class.__name__}\n"]
    if known:
        lines += ["Beside those of `TrainingArguments`; fields named again have another default here."]
    for title, fields in groups(config_class).items():
        fields = [f for f in fields if (f.name, repr(default_of(f))) not in known]
        if fields:
            lines += [f"\n### {title}\n", "| name | type | default | |", "|---|---|---|---|"]
        for field in fields:
            kinds = [k.__name__ for k in field_types(config_class).get(field.name, ()) if k is not type(None)]
            help, bounds = _cell(field.metadata.get("help", "")), _cell(bounds_of(field))
            default = _cell(f"`{default_of(field)!r}`")
            lines.append(
                f"| `{field.name}` | {' or '.join(kinds)} | {default} | {help}{f' ({bounds})' * bool(bounds)} |"
            )
    return lines


def page() -> str:
    """The whole page: `TrainingArguments`, then what the config of each method adds."""
    lines = [HEADER, *_table(TrainingArguments, set())]
    known = {(field.name, repr(default_of(field))) for field in dataclasses.fields(TrainingArguments)}
    for config_class in dict.fromkeys(method.config_class for method in methods().values()):
        lines += _table(config_class, known)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
