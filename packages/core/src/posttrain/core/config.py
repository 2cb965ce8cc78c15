"""Declares config fields with default, help and bounds, from which flags, checks and docs are generated."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import inspect
import json
import math
import numbers
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from posttrain.core.errors import ConfigError, did_you_mean, warn
from posttrain.core.fields import old_names
from posttrain.core.fields.choices import Choice
from posttrain.core.fields.redaction import described, shown


class Help(str):
    """The help text of a field, which also carries its bounds.

    Argument parsers hand a field's whole metadata to `argparse`, which rejects unknown keys, so the bounds are part of
    the help text.
    """

    bounds: dict[str, Any]

    def __new__(cls, text: str, **bounds: Any) -> Help:
        self = super().__new__(cls, text)
        self.bounds = {key: value for key, value in bounds.items() if value is not None}
        return self


Given = TypeVar("Given")
Read = TypeVar("Read")


class Resolved(Generic[Given, Read]):
    """The type of a field that may be given as one type and is read as another, once the config has been checked.

    ``steps: Resolved[int | None, int] = opt(None, ...)`` may be left None, because ``_normalize`` fills it in or
    ``_problems`` refuses it. Type checkers see a descriptor; at run time the annotation is the first type.
    """

    if TYPE_CHECKING:

        def __get__(self, config: Any, owner: Any) -> Read: ...
        def __set__(self, config: Any, value: Given) -> None: ...

    else:

        def __class_getitem__(cls, types: tuple[Any, Any]) -> Any:
            return types[0]


#: An object that may be written as JSON, as on a command line.
JSONObject = Resolved[dict[str, Any] | str | None, dict[str, Any] | None]


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
    flag: str | bool | None = None,
    old_flags: Iterable[str] = (),
    needs: str | None = None,
) -> Any:
    """One field of a config dataclass.

    Args:
        default: the default value; a list or dict is copied for each instance.
        help: the effect of larger values or of switching it on. Ends in a full stop.
        min, max: the value may equal these. above, below: it may not. Infinity is an error unless `max` is infinite.
        choices: the only strings allowed; of a dict its keys, those that are added later too.
        aliases: other names under which the field is accepted, on the command line too.
        flag: what ``--name`` alone means on the command line, where a value may follow and need not.
        old_flags: names in the ``OLD_NAMES`` of a config that the command line accepts for this field.
        needs: fields without which this one has no effect, such as ``"packing"`` or ``"use_vllm vllm_mode=server"``;
            several values with commas, alternatives with ``|``. A value other than the default is warned of where they
            are not so.
    """
    known = choices if isinstance(choices, dict) or not choices else tuple(choices)
    bounds = {"min": min, "max": max, "above": above, "below": below, "choices": known}
    metadata: dict[str, Any] = {"help": Help(help, needs=needs, **bounds)}
    if aliases:
        metadata["aliases"] = [f"--{name}" for name in aliases]
    if flag is not None:
        metadata |= {"nargs": "?", "const": flag}
    if old_flags:
        dashed = (name.replace("_", "-") for name in old_flags)
        flags = [f"--{name}" for name in dict.fromkeys((*old_flags, *dashed))]
        metadata |= {"aliases": [*metadata.get("aliases", ()), *flags], "action": OldFlags}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def other_default(config: type, name: str, default: Any, aliases: Iterable[str] = ()) -> Any:
    """The field `name` of the dataclass `config`, with its help, bounds and names, for one with another default, and
    with further `aliases`.
    """
    metadata = dict(vars(config)["__dataclass_fields__"][name].metadata)
    if aliases:
        metadata["aliases"] = [*metadata.get("aliases", ()), *(f"--{alias}" for alias in aliases)]
    return dataclasses.field(default=default, metadata=metadata)


class OldFlags(argparse.Action):
    """Stores a value given with the field's flag, or converts one given with an old name."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, **options | {"nargs": "?"})  # old switches take no value

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name = (option_string or self.dest).lstrip("-").replace("-", "_")
        if name.startswith("no_") and name[3:] in _old_flags:
            name, values = name[3:], "false"
        old = _old_flags.get(name) if name != self.dest else None
        if old is None:
            if values is None:
                parser.error(f"argument {option_string}: expected one argument")
            setattr(namespace, self.dest, values)
            return
        value = {"true": True, "false": False}.get(str(values).lower(), True if values is None else values)
        if isinstance(old, old_names.Renamed):
            warn(f"--{name} is now --{self.dest}", FutureWarning)
            if value not in old.ignore:
                setattr(namespace, self.dest, old.convert(value))
        elif old.harmless is not None and value not in old.harmless:
            parser.error(f"argument --{name}={value} has no effect: {old.why}")
        else:
            warn(f"--{name} has no effect: {old.why}", FutureWarning)


_old_flags: dict[str, old_names.Renamed | old_names.Removed] = {}


@cache
def field_types(config_class: type) -> dict[str, tuple[type, ...]]:
    """``{field name: the plain classes its annotation allows}``; empty if the annotation is too general to check. A
    script's class may annotate a field of ours anew: then both count, since a value may be normalized to ours.
    """
    ours = next((kind for kind in config_class.__mro__ if kind.__module__.startswith("posttrain.")), config_class)
    known = _hints(ours)
    hints = {name: [hint, known.get(name, hint)] for name, hint in _hints(config_class).items()}
    return {name: tuple({kind: 0 for hint in both for kind in _classes(hint)}) for name, both in hints.items()}


def element_type(config_class: type, name: str, unsaid: type = str) -> type:
    """The class of the elements where the field may hold a list: int for ``list[int] | None``; `unsaid` without one."""
    hint = _hints(config_class).get(name)
    for option in (hint, *typing.get_args(hint)):
        inner = typing.get_args(option)[0] if typing.get_origin(option) is list else Any
        if inner is not Any and isinstance(inner, type):
            return inner
    return unsaid


@cache
def _hints(config_class: type) -> dict[str, Any]:
    """The annotations of `config_class`, evaluated; those that name something out of reach are left out."""
    try:
        return typing.get_type_hints(config_class)
    except Exception:  # a class written inside a function, whose annotations name what only that function sees
        hints: dict[str, Any] = {}
        for owner in reversed(config_class.__mro__):
            scope = vars(sys.modules.get(owner.__module__, types))
            for name, annotation in vars(owner).get("__annotations__", {}).items():
                alone = types.SimpleNamespace(__annotations__={name: annotation})
                try:
                    hints |= typing.get_type_hints(alone, scope)
                except Exception:
                    hints.pop(name, None)
        return hints


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


def has_type(value: Any, allowed: tuple[type, ...]) -> bool:
    """Whether `value` is of one of the classes `allowed`; an int is a float, and a bool is neither."""
    if not allowed or object in allowed or isinstance(value, allowed):
        return not (isinstance(value, bool) and allowed and bool not in allowed and object not in allowed)
    if isinstance(value, numbers.Number) and not isinstance(value, bool):  # numpy's numbers, an int for a float
        return float in allowed or (int in allowed and isinstance(value, numbers.Integral))
    return False


@cache
def _is_ours(config_class: type, name: str) -> bool:
    """Whether a base declared the field `name` with `opt`: annotations of plain fields are often informal."""
    declared = (vars(owner).get("__dataclass_fields__", {}).get(name) for owner in config_class.__mro__)
    return any(isinstance(field.metadata.get("help"), Help) for field in declared if field is not None)


@cache
def _is_object(config_class: type, name: str) -> bool:
    """Whether a field was written as a `JSONObject`. HfArgumentParser of transformers changes its `type`."""
    return any(inspect.get_annotations(owner).get(name) == "JSONObject" for owner in config_class.__mro__)


#: torch cannot hold larger integers.
LARGEST = 2**63


def bounds_of(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """The bounds that `opt` gave a field; none of a plain field."""
    text = field.metadata.get("help")
    return text.bounds if isinstance(text, Help) else {}


def value_of(config: Any, name: str) -> Any:
    """The value of the field `name`; None where `config` is of a class that has no such field."""
    return getattr(config, name, None)


def values_of(config: Any) -> dict[str, Any]:
    """The values of the fields that its ``__init__`` takes, by name."""
    return {field.name: value_of(config, field.name) for field in dataclasses.fields(config) if field.init}


def set_among(config: Any, *names: str) -> dict[str, Any]:
    """The values of the fields in `names` that are on: neither None, False, 0 nor empty; by name."""
    return {name: value for name in names if (value := value_of(config, name))}


def check_field(config: Any, field: dataclasses.Field[Any]) -> Iterator[str]:
    """Problems with one field's value, as sentences."""
    value, bounds = value_of(config, field.name), bounds_of(field)
    config_class: type = type(config)
    allowed = field_types(config_class).get(field.name, ())
    if value is None and (field.default is None or type(None) in allowed):
        return
    if not has_type(value, allowed) and _is_ours(config_class, field.name):
        names = " or ".join(sorted({kind.__name__ for kind in allowed} - {"NoneType"}))
        hint = "; YAML reads 2.0e-5 as a number" if names == "float" and re.fullmatch(r"\d+e-?\d+", str(value)) else ""
        yield f"{field.name}={shown(field.name, value)} must be of type {names}{hint}"
        return
    if isinstance(value, str) and _is_object(config_class, field.name):  # what could be read as JSON is a dict by now
        yield f"{field.name}={shown(field.name, value)} is not a JSON object; give a dict, or one written as JSON"
    if "choices" in bounds and isinstance(value, str) and value not in bounds["choices"]:
        near = did_you_mean(value, bounds["choices"])
        yield f"{field.name}={shown(field.name, value)} is not one of {', '.join(bounds['choices'])}{near}"
    if isinstance(value, list) and _is_ours(config_class, field.name):
        element = element_type(config_class, field.name, unsaid=object)
        wrong = [one for one in value if not has_type(one, (element,))]
        if wrong:
            yield (
                f"{field.name}={shown(field.name, value)} must hold values of type {element.__name__}, not {wrong[0]!r}"
            )
        elif any(one != one or (abs(one) == math.inf != bounds.get("max")) for one in value if isinstance(one, float)):
            yield f"{field.name}={shown(field.name, value)} must hold finite numbers"
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        if math.isnan(value):
            yield f"{field.name} is NaN; give a number"
        elif math.isinf(value) and bounds.get("max") != math.inf:
            yield f"{field.name}={value!r} must be finite"
        elif isinstance(value, numbers.Integral) and abs(int(value)) >= LARGEST:
            yield f"{field.name}={value!r} must be below 2**63"
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


def tidy(config: Any) -> Iterator[str]:
    """Convert each value of `config` to its plain form, in place; yields errors.

    Enums of strings and paths become strings, tuples lists where a list is meant, numbers of numpy Python's, objects of
    JSON given as a string dicts where a dict is allowed, and None False where only a switch is meant.
    """
    config_class: type = type(config)
    for field in dataclasses.fields(config):
        given = value = value_of(config, field.name)
        allowed = field_types(config_class).get(field.name, ())
        if isinstance(value, enum.Enum) and type(value) not in allowed and str in allowed:
            value = str(value.value)
        elif isinstance(value, os.PathLike) and str in allowed and not isinstance(value, allowed):
            value = os.fspath(value)
        elif isinstance(value, tuple) and list in allowed and not isinstance(value, allowed):
            value = list(value)
        elif type(value).__module__ == "numpy" and issubclass(type(value), numbers.Number):
            value = value.item()
        elif value is None and bool in allowed and type(None) not in allowed and field.default is not None:
            value = False  # as scripts write a switch that is off, such as null in a file
        elif isinstance(value, str) and dict in allowed and value.lstrip().startswith("{"):
            try:
                value = json.loads(value, object_hook=_unquoted)
            except json.JSONDecodeError as error:
                yield f"{field.name}={shown(field.name, value)} looks like JSON but is not: {error}"
        elif type(value) is str and str in allowed:
            value = number(value, allowed)
        if type(value) is str and "choices" in bounds_of(field):
            value = Choice(value)
        if value is not given:
            setattr(config, field.name, value)


def plain_data(value: Any) -> Any:
    """`value` as JSON would hold it, where that is possible."""
    if isinstance(value, dict):
        return {str(key): plain_data(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain_data(inner) for inner in value]
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (str, os.PathLike)):
        return str(value)
    return value.to_dict() if hasattr(value, "to_dict") else value


def _unquoted(options: dict[str, Any]) -> dict[str, Any]:
    """A JSON object whose numbers, true and false may be quoted, as transformers reads those of a command line."""
    for name, value in options.items():
        if isinstance(value, str):
            plain = number(value, (int, float)) if value.replace(".", "", 1).isdecimal() else value
            options[name] = {"true": True, "false": False}.get(value.lower(), plain)
    return options


def number(value: Any, allowed: tuple[type, ...]) -> Any:
    """The number that the text `value`, of a command line, is where one is allowed; else `value`."""
    for kind in (int, float):
        if kind in allowed and isinstance(value, str):
            with contextlib.suppress(ValueError):
                return kind(value)
    return value


def validate(config: Any) -> None:
    """Tidy `config`, fill in what follows from other fields, and report everything that is wrong at once.

    Each class in the method resolution order may define ``_normalize(self)``, which fills derived values, and
    ``_problems(self)``, which yields sentences. All of them run, base classes first, without calling `super`. Raises a
    `ConfigError` that lists every problem.
    """
    problems = [*old_names.follow_old_fields(config), *tidy(config)]
    owners = [vars(owner) for owner in reversed(type(config).__mro__)]
    failures: list[Exception] = []

    def said(hook: str) -> Iterator[str]:
        for owner in owners:
            try:
                yield from (owner[hook](config) or ()) if hook in owner else ()
            except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
                failures.append(error)  # most likely because of a value that `check` reports

    problems += [*said("_normalize"), *check(config), *said("_problems")]
    if problems:
        raise ConfigError(type(config).__name__, dict.fromkeys(problems))
    if failures:
        raise failures[0]
    if without_effect := list(unused(config)):
        warn(f"{type(config).__name__}: {'; '.join(without_effect)}.")


def unused(config: Any) -> Iterator[str]:
    """The fields of `config` that are set and that others leave without effect, as sentences."""
    for field in dataclasses.fields(config):
        missing = [need for need in bounds_of(field).get("needs", "").split() if not _holds(config, need)]
        if missing and (value := value_of(config, field.name)) != field.default:
            without = " and ".join(missing).replace("|", " or ")
            yield f"{field.name}={shown(field.name, value)} has no effect without {without}"


def _holds(config: Any, need: str) -> bool:
    """Whether a field is on, or has one of the values that `need` names; a field that `config` lacks counts as on."""
    if "|" in need:
        return any(_holds(config, one) for one in need.split("|"))
    name, _, values = need.partition("=")
    value = vars(config).get(name, True)
    if name not in vars(config) or not values:
        return bool(value)
    return any(str(one) in values.split(",") for one in (value if isinstance(value, list) else [value]))


@cache  # reading the signatures takes longer than all checks of a config
def accepted_names(*written: Callable[..., None]) -> tuple[frozenset[str], bool]:
    """The names that the ``__init__`` of a class and its bases take, and whether one takes others by ``**kwargs``.

    A script may write the ``__init__`` of its config by hand, with arguments that are no fields.
    """
    parameters = [each for init in written for each in list(inspect.signature(init).parameters.values())[1:]]
    names = frozenset(each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))
    return names, any(each.kind is each.VAR_KEYWORD for each in parameters)


class ConfigMeta(type):
    """Makes calling a config class accept old names, and report an unknown one together with every bad value.

    A metaclass, because a dataclass that inherits a config gets its own ``__init__``.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # of every class of this type

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> None:
        super().__init__(name, bases, namespace, **options)
        _old_flags.update(namespace.get("OLD_NAMES", {}))

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "__dataclass_fields__":  # a dataclass of a script may have a field of a name that is an alias here
            for field in list(value.values()):
                own = {f"--{other}" for other in value if other != field.name}
                if field.metadata.get("aliases"):
                    value[field.name] = old_names.without_aliases(field, own)
        super().__setattr__(name, value)

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of ``__init__``: scripts take from it which arguments there are."""
        own = inspect.signature(cls.__init__)  # type: ignore[misc]
        return own.replace(parameters=list(own.parameters.values())[1:])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # Not the one that `dataclass` gives to each subclass, which would show secrets.
        written = (vars(owner)["__repr__"] for owner in cls.__mro__ if "__repr__" in vars(owner))
        own = next(shows for shows in written if not hasattr(shows, "__wrapped__"))
        cls.__repr__ = described if own is object.__repr__ else own  # type: ignore[assignment,method-assign]
        given = cls.accept_old_names(kwargs)
        gone = [name for name, old in old_names.old_names(cls).items() if type(old) is old_names.Removed]
        removed = {name: given[name] for name in gone if name in given}
        kwargs, problems = old_names.translate_old_names(cls, given)
        known, takes_more = accepted_names(*(vars(c)["__init__"] for c in cls.__mro__[:-1] if "__init__" in vars(c)))
        unknown = [
            f"unknown argument {name!r}{cls.unknown_argument_hint(name) or did_you_mean(name, known)}"
            for name in kwargs
            if name not in known
        ]
        problems += [] if takes_more else unknown
        taken = kwargs if takes_more else {name: value for name, value in kwargs.items() if name in known}
        try:
            config = super().__call__(*args, **taken)
        except ConfigError as error:
            if not problems:
                raise
            problems += error.problems
        except TypeError as error:
            if not takes_more or not unknown:
                raise
            raise ConfigError(cls.__name__, [*problems, *unknown]) from error
        if problems:
            raise ConfigError(cls.__name__, problems)
        if removed:
            vars(config)["_removed"] = removed
        if not takes_more and len(taken) < len(known):  # else it is a copy, by `dataclasses.replace`
            vars(config)["_given"] = frozenset(taken)
        return config

    def accept_old_names(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Translate what the table of `old_names` cannot. A config class overrides it as a classmethod."""
        return kwargs

    def unknown_argument_hint(cls, name: str) -> str:
        """What to add to "unknown argument"; a config class overrides it as a classmethod."""
        return ""
