"""Names that arguments have or had in transformers and trl, and what replaces them here."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from posttrain.core.errors import ConfigError, warn
from posttrain.core.fields.redaction import shown


@dataclass(frozen=True)
class Renamed:
    """An old name that was replaced by another one.

    Args:
        new: the field's name today.
        convert: from the old value to the new one.
        ignore: values of the old name without a meaning; the new name then keeps its value.
        back: from the new value to the old one, for scripts that read the old name.
        most: the largest value that the old name can have, from 0 on; None: any.
    """

    new: str
    convert: Callable[[Any], Any] = lambda value: value
    ignore: tuple[Any, ...] = (None,)
    back: Callable[[Any], Any] = lambda value: value
    most: float | None = None


@dataclass(frozen=True)
class Removed:
    """An old name without a replacement.

    Args:
        why: why it is gone and what to do instead; a clause that follows "has no effect: ".
        harmless: values that match the behaviour; None: every value.
        says_nothing: values that are accepted without a warning.
    """

    why: str
    harmless: tuple[Any, ...] | None = (None,)
    says_nothing: tuple[Any, ...] = ()


@cache
def old_names(config_class: type) -> dict[str, Renamed | Removed]:
    """Old names that `config_class` answers to: the aliases of its fields and each base's ``OLD_NAMES``."""
    table: dict[str, Renamed | Removed] = {old: Renamed(new) for old, new in aliases(config_class).items()}
    for owner in reversed(config_class.__mro__):
        table |= vars(owner).get("OLD_NAMES", {})
    return table


class AnswersToOldNames:
    """Lets a config be read and set by the old names of its fields, as older scripts do."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    if not TYPE_CHECKING:  # a type checker would accept any name as an attribute

        def __getattr__(self, name: str) -> Any:
            """The value of an old name. Of one that was removed: what it was given, or what matches today."""
            old = None if name.startswith("__") else old_names(type(self)).get(name)
            if old is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            if isinstance(old, Renamed):
                return old.back(getattr(self, old.new))
            given: dict[str, Any] = vars(self).get("_removed", {})
            return given.get(name, (old.harmless or old.says_nothing or (None,))[-1])

    def __setattr__(self, name: str, value: Any) -> None:
        kind: type = type(self)
        if name not in self.__dataclass_fields__ and name in old_names(kind):
            today, problems = translate_old_names(kind, {name: value})
            if problems:
                raise ConfigError(kind.__name__, problems)
            for new, translated in today.items():
                object.__setattr__(self, new, translated)
            vars(self)["_removed"] = vars(self).get("_removed", {}) | ({} if today else {name: value})
            return
        # A script may keep values of its own here; one that is named almost like a field is meant for it.
        if name not in self.__dataclass_fields__ and not name.startswith("_") and not hasattr(kind, name):
            if near := difflib.get_close_matches(name, self.__dataclass_fields__, n=1, cutoff=0.9):
                warn(f"{kind.__name__} has no argument {name!r}, did you mean {near[0]!r}?")
        object.__setattr__(self, name, value)


def translate_old_names(
    config_class: type, kwargs: dict[str, Any], fields: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """Replace old names among `kwargs` by today's, with a `FutureWarning` each. `fields`: whether a name that
    `config_class` has a field of is that field, even where it is an old name too. Returns the arguments under today's
    names, and sentences on those that cannot be translated.
    """
    known, table = {field.name for field in dataclasses.fields(config_class)}, old_names(config_class)
    today = {name: value for name, value in kwargs.items() if (fields and name in known) or name not in table}
    problems: list[str] = []
    for name, value in kwargs.items():
        if name in today:
            continue
        old = table[name]
        if isinstance(old, Removed):
            if old.harmless is not None and value not in old.harmless:
                problems.append(f"{name}={shown(name, value)} has no effect: {old.why}")
            elif value not in old.says_nothing:
                warn(f"{config_class.__name__}: {name} has no effect: {old.why}", FutureWarning)
        elif value in old.ignore:
            warn(f"{config_class.__name__}: {name} is now {old.new}", FutureWarning)
        elif old.most is not None and isinstance(value, int | float) and not 0 <= value <= old.most:
            problems.append(f"{name}={shown(name, value)} must be from 0 to {old.most}; {old.new} takes larger numbers")
        else:
            new_value = old.convert(value)
            if old.new in today and today[old.new] != new_value:
                problems.append(
                    f"{name}={shown(name, value)} and {old.new}={shown(old.new, today[old.new])} are both given, and "
                    f"{name} is the old name of {old.new}; keep {old.new}"
                )
            elif old.new not in known:
                problems.append(f"{name} is the old name of {old.new}, which {config_class.__name__} does not have")
            else:
                now = f"{old.new}={shown(old.new, new_value)}"
                warn(f"{config_class.__name__}: {name}={shown(name, value)} is now {now}", FutureWarning)
                today[old.new] = new_value
    return today, problems


def aliases(config_class: type) -> dict[str, str]:
    """``{old name: field name}`` of every alias declared on the fields of `config_class` or of a class it inherits."""
    owners = [vars(owner).get("__dataclass_fields__", {}) for owner in reversed(config_class.__mro__)]
    found = {
        alias.lstrip("-").replace("-", "_"): field.name
        for fields in owners
        for field in fields.values()
        for alias in field.metadata.get("aliases", ())
    }
    return {
        alias: name for alias, name in found.items() if alias.removeprefix("no_") == alias or alias[3:] not in found
    }


def follow_old_fields(config: Any) -> Iterator[str]:
    """Give fields of a script's dataclass that have an old name, such as ``warmup_ratio``, the effect they had."""
    kind: type = type(config)
    table, defaults = old_names(kind), {field.name: field.default for field in dataclasses.fields(config)}
    for name in defaults.keys() & table.keys():
        old = table[name]
        if isinstance(old, Renamed) and getattr(config, old.new) == defaults.get(old.new):
            today, problems = translate_old_names(kind, {name: getattr(config, name)}, fields=False)
            yield from problems
            for new, value in today.items():
                object.__setattr__(config, new, value)


def moved_arguments(owner: str, config_class: type, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a config that trl's trainers took themselves, under today's names, with a warning each. Raises a
    `ConfigError` where one of them has no effect.

    Args:
        owner: the name of the trainer. given: what it was given; the moved arguments are taken out.
    """
    known = {field.name for field in dataclasses.fields(config_class) if field.init}
    answers: Any = getattr(config_class, "accept_old_names", dict)
    moved = {}
    for name in list(given):
        if name in known or name in old_names(config_class) or name not in answers({name: given[name]}):
            moved[name] = given.pop(name)
    today, problems = translate_old_names(config_class, answers(moved))
    if problems:
        raise ConfigError(owner, problems)
    for name in today.keys() & moved.keys():
        warn(f"{owner}: {name}= is now {config_class.__name__}({name}=...); both work.", FutureWarning)
    return today


def without_aliases(field: dataclasses.Field[Any], names: set[str]) -> dataclasses.Field[Any]:
    """`field` without its aliases among `names`, flags with underscores."""
    kept = [alias for alias in field.metadata["aliases"] if f"--{alias[2:].replace('-', '_')}" not in names]
    changed = copy.copy(field)
    changed.metadata = types.MappingProxyType({**field.metadata, "aliases": kept})
    return changed
