"""The public names of the four packages as text, one line each: faces, signatures, config fields and their defaults.

``python -m tests.public_api`` prints them; ``python -m tests.public_api --write`` records them in
``tests/public_api.txt``.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.core.config import JSONObject

RECORD = Path(__file__).with_name("public_api.txt")
FACES = ("posttrain.core", "posttrain.seq2seq", "posttrain.sft", "posttrain.rl")


def lines() -> list[str]:
    """Every public name, in the order of the faces and then of the alphabet."""
    return [line for face in FACES for line in _face(face)]


def _face(name: str) -> Iterator[str]:
    face = importlib.import_module(name)
    for public in sorted(face.__all__):
        yield from _describe(f"{name}.{public}", getattr(face, public))


def _describe(name: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"{name}{_signature(value) if callable(value) else ''}"
        return
    parent = next((base for base in value.__mro__[1:] if _is_public(base)), object)
    yield f"{name}({parent.__name__})"
    if not value.__module__.startswith("posttrain."):
        return
    if issubclass(value, enum.Enum):
        yield from (f"{name}.{member.name} = {member.value!r}" for member in value)
        return
    if dataclasses.is_dataclass(value):
        known = {f.name: _default(f) for f in dataclasses.fields(parent)} if dataclasses.is_dataclass(parent) else {}
        for field in dataclasses.fields(value):
            if known.get(field.name) != _default(field):
                yield f"{name}.{field.name}: {_annotation(value, field.name)} = {_default(field)}"
    # A class between two public ones, such as a mixin, is no name of its own: what it brings counts as the lower one's.
    between = [base for base in value.__mro__ if base.__module__.startswith("posttrain.")]
    between = [base for base in between if base is value or not issubclass(parent, base)]
    members = {attribute: member for base in reversed(between) for attribute, member in vars(base).items()}
    if "__init__" in members and not dataclasses.is_dataclass(value):
        yield f"{name}.__init__{_signature(members['__init__'])}"
    for attribute, member in sorted(members.items()):
        if attribute.startswith("_"):
            continue
        if isinstance(member, property):
            yield f"{name}.{attribute}: property"
        elif isinstance(member, (staticmethod, classmethod)):
            yield f"{name}.{attribute}{_signature(member.__func__)}"
        elif inspect.isfunction(member):
            yield f"{name}.{attribute}{_signature(member)}"


def _is_public(value: type) -> bool:
    return any(value.__name__ in importlib.import_module(face).__all__ for face in FACES)


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _annotation(value: type, field: str) -> str:
    # As it is written. `field.type` is not: HfArgumentParser puts the evaluated type there.
    written = next(
        inspect.get_annotations(base)[field] for base in value.__mro__ if field in inspect.get_annotations(base)
    )
    if written == "JSONObject":
        return str(JSONObject).replace("typing.", "")
    parsed = ast.parse(written, mode="eval").body
    if isinstance(parsed, ast.Subscript) and ast.unparse(parsed.value) == "Resolved":
        given, _ = parsed.slice.elts
        return ast.unparse(given)
    return written


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return "required" if field.default_factory is dataclasses.MISSING else repr(field.default_factory())


if __name__ == "__main__":
    text = "\n".join(lines()) + "\n"
    if sys.argv[1:] == ["--write"]:
        RECORD.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
