"""Values of fields for which code that was written for transformers expects enums."""

from __future__ import annotations

import enum


class Choice(str):
    """A plain string that also answers ``.value`` and ``.name``, for code written for enums of strings."""

    @property
    def value(self) -> str:
        return str(self)

    @property
    def name(self) -> str:
        return self.upper()


class ChoiceOfEnum(Choice):
    """One that also equals the member of an enum that has its value, for code written for enums of other types."""

    __hash__ = str.__hash__
    __ne__ = object.__ne__  # by the method below

    def __eq__(self, other: object) -> bool:
        return str(self) == (other.value if isinstance(other, enum.Enum) else other)
