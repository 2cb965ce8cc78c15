"""The command ``posttrain schema``, which describes a method's YAML file as a JSON schema for editors and checks."""

from __future__ import annotations

import dataclasses
import json
import types
from typing import Any

from posttrain.cli.help import default_of
from posttrain.cli.method import OF_LAUNCHER, configs_of
from posttrain.core.config import bounds_of, field_types
from posttrain.core.errors import ConfigError, did_you_mean
from posttrain.core.fields.old_names import Renamed, old_names
from posttrain.core.registry import methods

HELP = """posttrain schema METHOD

Print the JSON schema of a file of arguments of a method, such as sft or grpo: of its config, the model and the data.
"""
KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", tuple: "array", dict: "object"}
BOUNDS = {"min": "minimum", "max": "maximum", "above": "exclusiveMinimum", "below": "exclusiveMaximum"}


def run(words: list[str]) -> None:
    """Print the schema."""
    known = methods()
    if len(words) != 1 or words[0] not in known:
        near = did_you_mean(words[0], known) if len(words) == 1 else ""
        raise ConfigError("schema", [f"name one of the methods {', '.join(known)}{near}"])
    schema = schema_of(*configs_of(known[words[0]]))
    schema["properties"] |= {
        "method": {"const": words[0], "description": "The method, for posttrain train."},
        "sweep": {"type": "object", "description": "What posttrain sweep searches."},
        "env": {"type": "object", "description": "Environment variables that are set first."},
    } | {name: {"description": "As of posttrain launch, which then starts the run."} for name in OF_LAUNCHER}
    print(json.dumps(schema, indent=2))


def schema_of(*classes: type) -> dict[str, Any]:
    """The JSON schema (2020-12) of a file of arguments for `classes`, with the old names of fields as deprecated."""
    fields: dict[str, Any] = {}
    for config_class in reversed(classes):  # of a name that several have, the first describes it
        own = {field.name: _field(config_class, field) for field in dataclasses.fields(config_class) if field.init}
        for name, old in old_names(config_class).items():
            now = f"Now {old.new}." if isinstance(old, Renamed) else f"Has no effect: {old.why}."
            own.setdefault(name, {"description": now, "deprecated": True})
        fields |= own
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": classes[0].__name__,
        "type": "object",
        "properties": fields,
        "additionalProperties": False,
    }


def _field(config_class: type, field: dataclasses.Field[Any]) -> dict[str, Any]:
    kinds = field_types(config_class).get(field.name, ())
    names = {"null" if kind in (types.NoneType, None) else KINDS.get(kind, "string") for kind in kinds}
    default, help = default_of(field), field.metadata.get("help", "")
    found: dict[str, Any] = {"description": str(help)}
    if names:
        found["type"] = sorted(names)[0] if len(names) == 1 else sorted(names)
    bounds = bounds_of(field)
    found |= {BOUNDS[name]: value for name, value in bounds.items() if name in BOUNDS and abs(value) != float("inf")}
    if bounds.get("choices") and "array" not in names:
        found["enum"] = [*bounds["choices"], *([None] if "null" in names else [])]
    if default is None or isinstance(default, (bool, int, float, str, list, dict)):
        found["default"] = default
    return found
