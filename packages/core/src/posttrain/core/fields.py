"""A config field is written once: its default, its help and its bounds. Flags, checks and docs come from it."""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from posttrain.core.errors import ConfigError, did_you_mean


class Help(str):
    """The help text of a field, which also carries its bounds.

    Argument parsers hand a field's whole metadata to `argparse`, which refuses keys it does not know: the bounds ride
    on the one key that every parser takes.
    """

    bounds: dict[str, Any]

    def __new__(cls, text: str, **bounds: Any) -> Help:
        self = super().__new__(cls, text)
        self.bounds = {key: value for key, value in bounds.items() if value is not None}
        return self


def opt(
    default: Any,
    help: str,
    *,
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Iterable[str] | None = None,
    aliases: Iterable[str] = (),
) -> Any:
    """One field of a config dataclass.

    Args:
        default: the default value; a list or dict is copied for each instance.
        help: what happens when the value grows or is switched on. Ends in a full stop.
        min, max: the value may equal these. above, below: it may not.
        choices: the only strings allowed.
        aliases: other names under which the field is accepted, on the command line too.
    """
    bounds = {"min": min, "max": max, "above": above, "below": below, "choices": tuple(choices) if choices else None}
    metadata: dict[str, Any] = {"help": Help(help, **bounds)}
    if aliases:
        metadata["aliases"] = [f"--{name}" for name in aliases]
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def aliases(config_class: type) -> dict[str, str]:
    """``{old name: field name}`` of every alias declared on the fields of `config_class`."""
    return {
        alias.lstrip("-"): field.name
        for field in dataclasses.fields(config_class)
        for alias in field.metadata.get("aliases", ())
    }


@cache
def field_types(config_class: type) -> dict[str, tuple[type, ...]]:
    """``{field name: the plain classes its annotation allows}``; empty where the annotation says too little to check."""
    return {name: tuple(_classes(hint)) for name, hint in typing.get_type_hints(config_class).items()}


def _classes(hint: Any) -> Iterator[type]:
    if hint is Any:
        yield object
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        for option in typing.get_args(hint):
            yield from _classes(option)
    elif typing.get_origin(hint) is typing.Literal:
        yield from {type(option) for option in typing.get_args(hint)}
    elif isinstance(hint, type) or typing.get_origin(hint) is not None:
        yield typing.get_origin(hint) or hint


def _has_type(value: Any, allowed: tuple[type, ...]) -> bool:
    if not allowed or object in allowed or isinstance(value, allowed):
        return not (isinstance(value, bool) and allowed and bool not in allowed and object not in allowed)
    if isinstance(value, numbers.Number) and not isinstance(value, bool):  # numpy's numbers, an int for a float
        return float in allowed or (int in allowed and isinstance(value, numbers.Integral))
    return False


def check_field(config: Any, field: dataclasses.Field) -> Iterator[str]:
    """What is wrong with one field's value, as sentences."""
    value, bounds = getattr(config, field.name), getattr(field.metadata.get("help"), "bounds", {})
    if value is None and (field.default is None or type(None) in field_types(type(config)).get(field.name, ())):
        return
    allowed = field_types(type(config)).get(field.name, ())
    if not _has_type(value, allowed):
        names = " or ".join(sorted({kind.__name__ for kind in allowed} - {"NoneType"}))
        yield f"{field.name}={value!r} must be of type {names}"
        return
    if "choices" in bounds and isinstance(value, str) and value not in bounds["choices"]:
        near = did_you_mean(value, bounds["choices"])
        yield f"{field.name}={value!r} is not one of {', '.join(bounds['choices'])}{near}"
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        if math.isnan(value):
            yield f"{field.name} is NaN; give a number"
        for key, word, holds in (
            ("min", ">=", lambda v, b: v >= b),
            ("max", "<=", lambda v, b: v <= b),
            ("above", ">", lambda v, b: v > b),
            ("below", "<", lambda v, b: v < b),
        ):
            if key in bounds and not math.isnan(value) and not holds(value, bounds[key]):
                yield f"{field.name}={value!r} must be {word} {bounds[key]}"


def check(config: Any) -> list[str]:
    """Everything wrong with the fields of `config`: types, bounds and choices, as sentences."""
    return [problem for field in dataclasses.fields(config) for problem in check_field(config, field)]


class ConfigMeta(type):
    """Makes calling a config class accept old names, and report an unknown one together with every bad value.

    A metaclass, because a dataclass that inherits a config gets an ``__init__`` of its own.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        kwargs = cls.accept_old_names(kwargs)
        known = {field.name for field in dataclasses.fields(cls) if field.init}
        problems = [
            f"unknown argument {name!r}{did_you_mean(name, known) or cls.unknown_argument_hint(name)}"
            for name in kwargs
            if name not in known
        ]
        try:
            config = super().__call__(*args, **{name: value for name, value in kwargs.items() if name in known})
        except ConfigError as error:
            if not problems:
                raise
            problems += error.problems
        if problems:
            raise ConfigError(cls.__name__, problems)
        return config

    def accept_old_names(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Translate names of earlier versions. A config class that has some overrides it as a classmethod."""
        return kwargs

    def unknown_argument_hint(cls, name: str) -> str:
        """What to add to "unknown argument"; a config class overrides it as a classmethod."""
        return ""
