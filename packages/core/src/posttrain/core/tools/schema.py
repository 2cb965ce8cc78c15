"""The command ``posttrain schema``, which describes a method's YAML file as a JSON schema for editors and checks."""

from __future__ import annotations

import dataclasses
import json
import types
from typing import Any

from posttrain.core.cli.help import default_of
from posttrain.core.cli.registry import methods
from posttrain.core.config import field_types
from posttrain.core.errors import ConfigError, did_you_mean

HELP = """posttrain schema METHOD

Print the JSON schema of the arguments of a method, such as sft or grpo.
"""
KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", tuple: "array", dict: "object"}
BOUNDS = {"min": "minimum", "max": "maximum", "above": "exclusiveMinimum", "below": "exclusiveMaximum"}


def run(words: list[str]) -> None:
    """The command.

    Raises:
        ConfigError: there is no such method.
    """
    if {"-h", "--help"} & set(words):
        print(HELP.rstrip())
        return
    known = methods()
    if len(words) != 1 or words[0] not in known:
        near = did_you_mean(words[0], known) if len(words) == 1 else ""
        raise ConfigError("schema", [f"name one of the methods {', '.join(known)}{near}"])
    print(json.dumps(schema_of(known[words[0]].config_class), indent=2))


def schema_of(config_class: type) -> dict[str, Any]:
    """The JSON schema (2020-12) of a file of arguments for `config_class`. Other keys are those of model and data."""
    fields = {f.name: _field(config_class, f) for f in dataclasses.fields(config_class) if f.init}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": config_class.__name__,
        "type": "object",
        "properties": fields,
    }


def _field(config_class: type, field: dataclasses.Field[Any]) -> dict[str, Any]:
    kinds = field_types(config_class).get(field.name, ())
    names = {"null" if kind in (types.NoneType, None) else KINDS.get(kind, "string") for kind in kinds}
    default, help = default_of(field), field.metadata.get("help", "")
    found: dict[str, Any] = {"description": str(help)}
    if names:
        found["type"] = sorted(names)[0] if len(names) == 1 else sorted(names)
    bounds = getattr(help, "bounds", {})
    found |= {BOUNDS[name]: value for name, value in bounds.items() if name in BOUNDS and abs(value) != float("inf")}
    if bounds.get("choices") and "array" not in names:
        found["enum"] = [*bounds["choices"], *([None] if "null" in names else [])]
    if default is None or isinstance(default, (bool, int, float, str, list, dict)):
        found["default"] = default
    return found
