"""Parses YAML and TOML files and flags into checked configs.

A value has the same meaning in a file and in a flag: the field's type decides how its text is parsed, so ``1e-5`` is a
number and ``no`` may be a word.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from posttrain.core import config
from posttrain.core.config import field_types
from posttrain.core.errors import CheckpointError, ConfigError, DataError, did_you_mean
from posttrain.core.fields.old_names import Renamed, old_names
from posttrain.core.fields.redaction import shown

WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
NO_VALUE = "{flag} has no value; write {flag} VALUE"
#: The least values of flags that are numbers, in all commands that have them.
LEAST = {"temperature": 0, "tolerance": 0, "num_fewshot": 0}
LEAST |= dict.fromkeys(("max_new_tokens", "batch_size", "batch_tokens", "num_return", "limit", "k"), 1)


class _Loader(yaml.SafeLoader):
    """Parses nested values with YAML 1.2's rules: booleans are only true and false, and 1e-5 is a number."""

    yaml_implicit_resolvers: dict = {}


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
_Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(re.sub(r"\.(?=[iInN])", "", node.value)))


@dataclass
class Setting:
    """One value as it was written: where, and its text, texts, mapping, or None. A bare flag has no value: "true"."""

    where: str
    value: Any
    is_bare: bool = False

    def lacks_value(self, allowed: tuple[type, ...]) -> bool:
        """Whether it is a bare flag, of a field whose types, `allowed`, are not those of a switch."""
        return self.is_bare and bool(allowed) and not {bool, object} & set(allowed)


def read_file(path: str | Path, problems: list[str]) -> dict[str, Setting]:
    """The settings of one YAML or TOML file, values left as text; problems of the file are added to `problems`."""
    path = Path(path).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            return _read_toml(text, path.name)
        root = yaml.compose(text, Loader=_Loader)
    except OSError as error:
        problems.append(f"{path}: {error.strerror or error}")
        return {}
    except (yaml.YAMLError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        kind = "TOML" if path.suffix == ".toml" else "YAML"
        # Alone: what else is wrong, such as a name that is missing, may be in the rest of the file.
        raise ConfigError("posttrain", [f"{path} is not valid {kind}: {_yaml_problem(error)}"]) from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        problems.append(f"{path} must hold `name: value` lines")
        return {}
    settings: dict[str, Setting] = {}
    for key, node in root.value:
        name, where = str(key.value), f"{path.name}:{key.start_mark.line + 1}"
        if name in settings:
            problems.append(f"{where}: {name} is already set at {settings[name].where}; keep one")
        settings[name] = Setting(where, _text(node))
    return settings


def _read_toml(text: str, file: str) -> dict[str, Setting]:
    """The settings of a TOML file; tables are mappings."""

    def as_text(value: Any) -> Any:
        if isinstance(value, list) and not any(isinstance(item, (dict, list)) for item in value):
            return [as_text(item) for item in value]
        return value if isinstance(value, (dict, list)) else str(value).lower() if type(value) is bool else str(value)

    settings = {}
    for name, value in tomllib.loads(text).items():
        line = re.search(rf"^\s*\[?\[?[\"']?{re.escape(name)}\b", text, re.M)
        place = file if line is None else f"{file}:{text.count(chr(10), 0, line.end()) + 1}"
        settings[name] = Setting(place, as_text(value))
    return settings


def as_yaml(settings: Mapping[str, Any]) -> str:
    """A YAML file of names and values as `Setting` has them, which reads as the same."""
    lines = []
    for name, value in settings.items():
        line = f"{name}: {value}\n"
        try:
            plain = isinstance(value, str) and _text(yaml.compose(line, Loader=_Loader).value[0][1]) == value
        except yaml.YAMLError:
            plain = False
        lines.append(line if plain else yaml.safe_dump({name: value}, allow_unicode=True, sort_keys=False))
    return "".join(lines)


def _yaml_problem(error: Exception) -> str:
    """The error and its position, without the text around it, which may hold a secret."""
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
        return f"{error.problem}, at line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())


def _text(node: yaml.Node) -> Any:
    """The text of a scalar, a list of texts, or the value of a mapping."""
    if isinstance(node, yaml.ScalarNode):
        return None if node.style is None and node.value in ("", "~", "null", "Null", "NULL") else node.value
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return [_text(item) for item in node.value]
    return _Loader("").construct_document(node)


def read_flags(arguments: list[str]) -> tuple[list[str], dict[str, Setting]]:
    """Split `arguments` into words and ``--name value ...`` settings; a flag without a value is true.

    ``--name=value``, ``--no_name`` for false, and ``-`` for ``_`` in names are understood. The last of repeated flags
    counts, so that flags passed to a script override its own.
    """
    words: list[str] = []
    values: dict[str, list[str]] = {}
    open_flag: list[str] | None = None  # the values of the flag that the next words belong to
    for argument in arguments:
        if not argument.startswith("--"):
            (words if open_flag is None else open_flag).append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        values.pop(name.removeprefix("no_") if name.startswith("no_") else f"no_{name}", None)
        values[name] = [value] if equals else []
        open_flag = None if equals else values[name]
    one_or_many = {0: lambda _: "true", 1: lambda texts: texts[0]}
    return words, {
        name: Setting(f"--{name}", one_or_many.get(len(texts), list)(texts), is_bare=not texts)
        for name, texts in values.items()
    }


def typed_flags(
    command: str,
    words: list[str],
    kinds: Mapping[str, type],
    names: int,
    what: str,
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16"),
) -> tuple[list[str], dict[str, Any]]:
    """The words and flags of a command: ``(its names, {flag: value})``. Raises a `ConfigError` that lists every problem
    together.

    Args:
        kinds: of each flag, the type of its value; list: of texts.
        names: how many words come before the flags. what: these words, for the message where there are others.
        dtypes: the values of the flag ``dtype``.
    """
    problems: list[str] = []
    given_names, flags = read_flags(words)
    given: dict[str, Any] = {}
    for name, setting in flags.items():
        if name not in kinds:
            problems.append(f"unknown flag --{name}{did_you_mean(name, kinds)}")
            continue
        if setting.lacks_value((kinds[name],)):
            problems.append(NO_VALUE.format(flag=setting.where))
            continue
        try:
            given[name] = convert(setting.value, (kinds[name],))
        except ValueError as error:
            problems.append(f"--{name} {error}")
            continue
        if name in LEAST and not given[name] >= LEAST[name]:
            problems.append(f"--{name}={setting.value} must be >= {LEAST[name]}")
    if len(given_names) != names:
        were = "1 word was" if len(given_names) == 1 else f"{len(given_names)} words were"
        problems.append(f"it takes {what}, before any flag; {were} given, not {names}")
    if given.get("dtype", "float32") not in dtypes:
        problems.append(f"--dtype={given['dtype']} is not one of {', '.join(dtypes)}")
    if problems:
        raise ConfigError(command, problems)
    return given_names, given


@contextlib.contextmanager
def reported(command: str) -> Iterator[None]:
    """Within, a `ValueError` is about the words of `command`, and a missing file or package a `CheckpointError`."""
    try:
        yield
    except (ConfigError, DataError):  # values too, which say themselves what they are about
        raise
    except (OSError, ImportError) as error:
        raise CheckpointError(str(error)) from error
    except ValueError as error:
        raise ConfigError(command, [str(error)]) from error


def take_flags(words: Iterable[str], names: Iterable[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Take the flags `names`, with a text each, out of `words`: ``(other words, [(name, text), ...])``; "": no text."""
    known, rest, taken, at = set(names), [], [], iter(words)
    for word in at:
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in known:
            taken.append((name, value if equals else next(at, "")))
        else:
            rest.append(word)
    return rest, taken


def take_options(
    command: str, words: list[str], known: Mapping[str, tuple[Any, Callable[[str], Any], str]]
) -> tuple[list[str], dict[str, Any]]:
    """Take a command's own flags out of the words of a run: ``(the other words, {flag: value})``. `known`: of each its
    default, what makes its value of a text (None: it does not fit), and what fits. A `ConfigError` has all problems.
    """
    rest, taken = take_flags(words, known)
    options: dict[str, Any] = {name: default for name, (default, *_) in known.items()}
    options |= {name: known[name][1](text) for name, text in taken}
    if problems := [f"--{name} {text} must be {known[name][2]}" for name, text in taken if options[name] is None]:
        raise ConfigError(f"posttrain {command}", problems)
    return rest, options


def whole(least: int = 1) -> Callable[[str], int | None]:
    """Reads whole numbers from `least` on, for `take_options`."""
    return lambda text: int(text) if text.isdecimal() and int(text) >= least else None


def read_words(words: list[str]) -> tuple[dict[str, Setting], list[str]]:
    """(settings of YAML or TOML files and flags by name, syntax problems)."""
    problems: list[str] = []
    files, flags = read_flags(words)
    if "config" in flags:
        named = flags.pop("config")
        if named.is_bare:
            problems.append(NO_VALUE.format(flag=named.where))
        else:
            files += named.value if isinstance(named.value, list) else [named.value]
    settings: dict[str, Setting] = {}
    for file in files:
        settings |= read_file(file, problems)
    return settings | flags, problems


def take_environment(settings: dict[str, Setting], problems: list[str]) -> None:
    """Take ``env``, the environment variables of a file, out of `settings`, and set them."""
    env = settings.pop("env", None)
    if env is not None and not isinstance(env.value, dict):
        problems.append(f"{env.where}: env must hold `NAME: value` lines")
    elif env is not None:
        os.environ.update({name: str(value) for name, value in env.value.items()})


def unknown(classes: Iterable[type], settings: dict[str, Setting]) -> list[str]:
    """The names among `settings` that no class has a field for."""
    known = {name for config_class in classes for name in _names(config_class)}
    return [name for name in settings if name not in known and name.removeprefix("no_") not in known]


def convert(value: Any, allowed: tuple[type, ...], element: type = str) -> Any:
    """Read the text `value` as the first of bool, int, float, None, dict, str and list that is `allowed` and fits.
    Raises a `ValueError` that says what was expected.

    Args:
        value: a text, a list of texts, a mapping (kept as it is) or None.
        allowed: the classes that the field's annotation names; empty: anything.
        element: the class of a list's elements.
    """
    if value is None or isinstance(value, dict):
        return value
    if isinstance(value, list):
        if allowed and list not in allowed:
            raise ValueError(f"holds {len(value)} values and takes one")
        return [convert(item, (element,)) if isinstance(item, str) else item for item in value]
    text = value.strip()
    if bool in allowed and text.lower() in WORDS and not (text in ("0", "1") and int in allowed):
        return WORDS[text.lower()]
    if int in allowed or float in allowed:
        with contextlib.suppress(ValueError):
            number = float(text)
            return int(number) if int in allowed and number.is_integer() else number
    if type(None) in allowed and text.lower() in ("null", "none" if str not in allowed else "null"):
        return None
    if {dict, list} & set(allowed) and text[:1] in ("{", "["):
        try:
            return yaml.load(text, Loader=_Loader)
        except yaml.YAMLError as error:
            raise ValueError(f"cannot be read as a mapping or a list: {_yaml_problem(error)}") from None
    if str in allowed or not allowed or object in allowed:
        return value
    if list in allowed:
        return [convert(text, (element,))]
    raise ValueError(f"must be of type {' or '.join(sorted(t.__name__ for t in allowed if t is not type(None)))}")


def configs(
    classes: Iterable[type], settings: dict[str, Setting], problems: list[str], needs: Iterable[str] = ()
) -> list[Any]:
    """Make one config of each class, each value going to every class that has the field. Raises a `ConfigError` that
    lists every problem of every config together.

    Args:
        classes: dataclasses.
        settings: names, which may be old ones, and their values as text.
        problems: earlier ones, to which more are added.
        needs: names of fields that must have a value; ``"a|b"``: one of the two.
    """
    classes = list(classes)
    owners = {name: [c for c in classes if name in _names(c)] for name in settings}
    everything = {name for config_class in classes for name in _names(config_class)}
    kwargs: dict[type, dict[str, Any]] = {config_class: {} for config_class in classes}
    for name, setting in settings.items():
        if not owners[name] and name.startswith("no_") and name[3:] in everything and setting.value == "true":
            name, setting = name[3:], Setting(setting.where, "false")
            owners[name] = [c for c in classes if name in _names(c)]
        if not owners[name]:
            hints = [getattr(c, "unknown_argument_hint", lambda _: "")(name) for c in classes]
            hint = next(filter(None, hints), did_you_mean(name, everything))
            problems.append(f"{setting.where}: unknown argument {name!r}{hint}")
        for config_class in owners[name]:
            allowed, element = _types(config_class, name)
            alone = _alone(config_class, name) if setting.is_bare else None
            if alone is None and setting.lacks_value(allowed):
                problems.append(NO_VALUE.format(flag=setting.where))
                continue
            try:
                kwargs[config_class][name] = convert(alone or setting.value, allowed, element)
            except ValueError as error:
                problems.append(f"{setting.where}: {name}={shown(name, setting.value)} {error}")
    made = []
    for config_class in classes:
        if missing := [name for name in _required(config_class) if name not in kwargs[config_class]]:
            problems += (_needed(name) for name in missing if name not in settings)
            continue
        try:
            made.append(config_class(**kwargs[config_class]))
            config.validate(made[-1])
        except ConfigError as error:
            problems += (_located(problem, settings) for problem in error.problems)
    for need in needs:
        names = need.split("|")
        if all(name not in settings or settings[name].value in (None, "") for name in names):
            problems.append(_needed(*names))
    if problems:
        raise ConfigError("posttrain", dict.fromkeys(problems))
    return made


def _needed(name: str, *others: str) -> str:
    or_others = f" (or {', '.join(others)})" if others else ""
    return f"{name} is needed{or_others}; write `{name}: ...` in the YAML file or --{name} on the command line"


def _required(config_class: type) -> list[str]:
    """The fields that ``__init__`` takes and that have no default in it."""
    parameters = inspect.signature(config_class.__init__).parameters  # type: ignore[misc]
    names = [field.name for field in dataclasses.fields(config_class) if field.name in parameters]
    return [name for name in names if parameters[name].default is inspect.Parameter.empty]


def take_surplus(classes: Iterable[type], settings: dict[str, Setting]) -> list[str]:
    """Take out of the flags among `settings` the words after the first where no class takes a list, in their order."""
    surplus: list[str] = []
    for name, setting in settings.items():
        types = [_types(config_class, name)[0] for config_class in classes if name in _names(config_class)]
        if types and setting.where.startswith("--") and isinstance(setting.value, list):
            if not any(list in allowed or not allowed for allowed in types):
                first, *rest = setting.value
                settings[name] = dataclasses.replace(setting, value=first)
                surplus += rest
    return surplus


def _located(problem: str, settings: dict[str, Setting]) -> str:
    """`problem` with the place in front where the field that it starts with was written."""
    name = re.match(r"\w+", problem)
    return f"{settings[name[0]].where}: {problem}" if name and name[0] in settings else problem


def _names(config_class: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class) if field.init} | set(old_names(config_class))


def _alone(config_class: type, name: str) -> str | None:
    """The text that ``--name`` alone stands for if the field says so; None otherwise."""
    field = next((field for field in dataclasses.fields(config_class) if field.name == name), None)
    alone = None if field is None else field.metadata.get("const")
    return None if alone is None else str(alone)


def _types(config_class: type, name: str) -> tuple[tuple[type, ...], type]:
    """The types of the field that `name`, perhaps an old name, stands for, and that of its elements if it is a list."""
    types = field_types(config_class)
    if name not in types:
        old = old_names(config_class)[name]
        if not isinstance(old, Renamed) or old != Renamed(old.new):
            return (bool, int, float, str), str  # the old name's own type is unknown
        name = old.new
    return types.get(name, ()), config.element_type(config_class, name)
