"""Removes tokens, keys and passwords from logs, files, warnings and errors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from typing import Any

_WORDS = (
    r"(?:token|password|passwd|passphrase|secret|credentials?|authorization|bearer|cookie"
    r"|(?:api|access|account|secret|private|signing|auth)[_-]?key(?:_id)?)"
)
_NAME = re.compile(rf"(?:.*[_-])?{_WORDS}", re.IGNORECASE)
# The special tokens of tokenizers and processors, which are named like what opens an account.
_TEXT_TOKENS = re.compile(
    r"(bos|eos|pad|unk|sep|cls|mask|image|video|audio|fake_image|boi|eoi|boa|eoa|eot|eom|eod|stop|begin|end|start"
    r"|decoder_start|response|thinking|special|new|next|first|last|per|vision_(start|end))_token",
    re.IGNORECASE,
)
_HIDDEN = "***"
# Patterns of secrets: tokens by their vendors' prefixes, and credentials in an address.
_TELLING = re.compile(
    r"\b(hf_\w{6,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|sk-[\w-]{16,}|xox[abpr]-[\w-]{10,}|AKIA[0-9A-Z]{12,}"
    r"|glpat-[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
)
_USER_OF_ADDRESS = re.compile(r"(\b[A-Za-z][\w+.-]*:/{1,3})[^/\s@'\"]+@")
_IN_QUERY = re.compile(r"([?&;](?:[\w-]*(?:token|key|password|secret|signature|sig))=)[^&;\s'\"]+", re.IGNORECASE)
_BEARER = re.compile(r"(\b(?:Bearer|Basic|Token)\s+)[\w.+/=~-]{8,}")
# A name and its quoted value, as in JSON, in Python and in messages: "token": "abc", token='abc'.
_NAMED = re.compile(rf"\b((?:\w[\w-]*[_-])?{_WORDS})(\\*['\"]?\s*[:=]\s*)(\\*['\"])(.+?)(?=\3)", re.IGNORECASE)


@functools.lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether the value of an argument, a key or a flag of this name must not be written down."""
    return _NAME.fullmatch(name) is not None and _TEXT_TOKENS.fullmatch(name) is None


def redact(text: str, *known: str | None) -> str:
    """`text` without tokens, named secrets, passwords in addresses and the secrets `known`."""
    for secret in known:
        if secret:
            text = text.replace(secret, _HIDDEN)
    text = _NAMED.sub(lambda found: found[1] + found[2] + found[3] + _HIDDEN if is_secret(found[1]) else found[0], text)
    text = _USER_OF_ADDRESS.sub(rf"\1{_HIDDEN}@", _TELLING.sub(_HIDDEN, text))
    return _BEARER.sub(rf"\1{_HIDDEN}", _IN_QUERY.sub(rf"\1{_HIDDEN}", text))


def masked(value: Any, name: str = "") -> Any:
    """`value` with every secret replaced, at any depth: values with a secret's name and texts that look like one.

    A value without secrets is returned unchanged.
    """
    if isinstance(value, Mapping):
        within = is_secret(name)
        found = {key: masked(inner, name if within else str(key)) for key, inner in value.items()}
        return value if all(found[key] is inner for key, inner in value.items()) else found
    if type(value) in (list, tuple):
        items = [masked(inner, name) for inner in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    if isinstance(value, (str, bytes)) and value:
        if is_secret(name):
            return f"<{name.upper()}>"
        if isinstance(value, str):
            hidden = redact(_masked_json(value))
            return value if hidden == value else hidden
    return value


def _masked_json(text: str) -> str:
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        held = json.loads(text)
    except ValueError:
        return text
    hidden = masked(held)
    return text if hidden is held else json.dumps(hidden)


def shown(name: str, value: Any) -> str:
    """``repr(value)`` for a message about the argument `name`."""
    return repr(masked(value, name))


def described(config: Any) -> str:
    """The ``repr`` of a dataclass, without its secrets."""
    fields = [field for field in dataclasses.fields(config) if field.repr]
    values = {field.name: vars(config).get(field.name, field.default) for field in fields}
    return f"{type(config).__name__}({', '.join(f'{name}={shown(name, value)}' for name, value in values.items())})"


def without_secrets(value: Any) -> Any:
    """`value` without the entries of its mappings that are named like secrets; for files that are read again."""
    if isinstance(value, Mapping):
        return {key: without_secrets(inner) for key, inner in value.items() if not is_secret(str(key))}
    if type(value) is list:
        return [without_secrets(inner) for inner in value]
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            return json.dumps(without_secrets(json.loads(value)))
    return masked(value)


def masked_words(words: list[str]) -> list[str]:
    """The words of a command line without secrets: the values of flags such as --hub_token, and texts that look so."""
    found, hide = [], False
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        flag = word.startswith("--") and re.fullmatch(r"\w+", name) is not None
        if flag and is_secret(name):
            found.append(f"{word.partition('=')[0]}={_HIDDEN}" if equals else word)
            hide = not equals
        elif hide:
            found.append(_HIDDEN)
            hide = False
        else:
            found.append(f"--{word[2:].partition('=')[0]}={masked(value)}" if flag and equals else masked(word))
    return found
