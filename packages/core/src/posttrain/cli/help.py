"""Generates the text of ``--help`` from the fields of the configs."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Iterable
from typing import Any

from posttrain.core.config import bounds_of, field_types
from posttrain.core.registry import Method, methods

TRAIN = """usage: posttrain train run.yaml [--name value ...]

Trains as the file describes. `method:` in it names the method, such as sft, dpo or grpo; without it the method is
inferred from the arguments and the columns of the rows, and printed. posttrain <method> --help lists the arguments."""


def overview(commands: dict[str, str]) -> str:
    """The text of ``posttrain --help``. `commands`: ``{name: help}`` of the commands that are no training methods."""
    lines = [
        "usage: posttrain train run.yaml [--name value ...]",
        "       posttrain <method> [run.yaml ...] [--name value ...]",
        "       posttrain <command>",
        "",
        "methods:",
    ]
    lines += [f"  {method.name:<14} {method.help}" for method in methods().values()]
    if not methods():
        lines.append("  none is installed; pip install posttrain-sft adds one")
    lines += ["", "commands:", *(f"  {name:<14} {help}" for name, help in commands.items())]
    lines += ["", "posttrain <method> --help lists every argument of a method, with its default."]
    return "\n".join(lines)


def of_method(method: Method, configs: Iterable[type]) -> str:
    """The text of ``posttrain <method> --help``: every argument of `configs`, by group."""
    lines = [
        f"usage: posttrain {method.name} [run.yaml ...] [--name value ...]",
        "",
        method.help,
        "",
        "A YAML file holds `name: value` lines with the names below, a TOML file `name = value`; flags win over files, "
        "later files over earlier ones.",
        "--smoke trains three optimizer steps, evaluates, saves, reads the model back and resumes; it keeps nothing.",
    ]
    return "\n".join([*lines, *of_configs(configs)])


def of_configs(configs: Iterable[type]) -> list[str]:
    """The lines that list every argument of `configs`, by group."""
    lines = []
    for config_class in configs:
        for title, members in groups(config_class).items():
            lines += ["", f"{title}"]
            for field in members:
                lines += _lines(config_class, field)
    return lines


def groups(config_class: type) -> dict[str, list[dataclasses.Field]]:
    """The fields of `config_class` by the class that defines them first, titled with its first sentence."""
    found: dict[str, list[dataclasses.Field]] = {}
    for field in dataclasses.fields(config_class):
        owner = next(c for c in reversed(config_class.__mro__) if field.name in vars(c).get("__annotations__", {}))
        title = f"{(owner.__doc__ or '').strip().splitlines()[0].rstrip('.')} ({owner.__name__})"
        found.setdefault(title, []).append(field)
    return found


def default_of(field: dataclasses.Field) -> Any:
    """The value that `field` has when nothing is given."""
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def bounds_text(field: dataclasses.Field) -> str:
    """``">= 0, < 1"`` or the choices of `field`; empty where there are none."""
    bounds = bounds_of(field)
    words = {"min": ">=", "max": "<=", "above": ">", "below": "<"}
    parts = [f"{word} {bounds[key]}" for key, word in words.items() if key in bounds]
    return ", ".join(parts + ([" | ".join(bounds["choices"])] if "choices" in bounds else []))


def _lines(config_class: type, field: dataclasses.Field) -> list[str]:
    kinds = [kind.__name__ for kind in field_types(config_class).get(field.name, ()) if kind is not type(None)]
    facts = "; ".join(part for part in (bounds_text(field), f"default {default_of(field)!r}") if part)
    width = shutil.get_terminal_size((100, 24)).columns
    text = f"{field.metadata.get('help', '')} [{facts}]".strip()
    head = f"  --{field.name} {'|'.join(dict.fromkeys(kinds)).upper()}"
    return [head, *textwrap.wrap(text, max(40, min(width, 120)), initial_indent=" " * 8, subsequent_indent=" " * 8)]
