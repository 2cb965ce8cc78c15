"""Attributes of a trainer that are fields of its arguments, as code written for trl reads them: ``self.beta``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


class FromArguments:
    """Reads a field of the trainer's ``args``, and sets it there, so that the two never disagree.

    Args:
        field: its name in the arguments.
    """

    def __init__(self, field: str) -> None:
        self.field = field

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else getattr(instance.args, self.field)

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance.args, self.field, value)


def reads_from_arguments(*names: str, **renamed: str) -> Callable[[C], C]:
    """Give a trainer class an attribute for each field in `names`, and those in `renamed`, ``{attribute: field}``."""

    def decorate(trainer_class: C) -> C:
        for attribute, field in {**dict(zip(names, names, strict=True)), **renamed}.items():
            setattr(trainer_class, attribute, FromArguments(field))
        return trainer_class

    return decorate
