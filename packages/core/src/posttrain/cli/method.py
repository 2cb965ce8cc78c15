"""Finds the method of a run: the first word, `method:` in its file, or what its arguments and rows say."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from posttrain.cli import parse
from posttrain.core import registry
from posttrain.core.errors import ConfigError
from posttrain.core.registry import Method

FILES = (".yaml", ".yml", ".toml")
#: The word in place of a method whose file names it.
TRAIN = "train"
#: {argument that one method alone needs: the method}.
BY_ARGUMENT = {"teacher_model_name_or_path": "distillation", "reward_funcs": "grpo", "source_column": "seq2seq"}
#: (columns, method): the first whose columns are all there.
BY_COLUMNS = (({"chosen", "rejected"}, "dpo"), ({"prompt", "completion", "label"}, "kto"))


def of_words(words: list[str], command: str) -> tuple[Method, list[str]]:
    """The method of the run that `words` describe, and the words after its name.

    Args:
        words: perhaps a method, then files and flags. command: that they follow, for messages.

    Raises:
        ConfigError: there is no such method, or none is named and none fits.
    """
    first = words[0] if words else "--"
    if not first.startswith("-") and not first.endswith(FILES):
        if first != TRAIN:
            return registry.method(first), words[1:]
        words = words[1:]
    settings, _ = parse.read_words(words)
    if not any(word.endswith(FILES) for word in words):
        how = f"name the method first, or a file that describes the run, as in posttrain {command} run.yaml"
        raise ConfigError(f"posttrain {command}", [how])
    if "method" in settings:
        return registry.method(str(settings["method"].value)), words
    return registry.method(_inferred(settings)), words


def without_method(method: Method, settings: Mapping[str, parse.Setting], problems: list[str]) -> dict[str, Any]:
    """`settings` without ``sweep`` and ``method``, with a problem where that is another one than `method`."""
    named = settings.get("method")
    if named is not None and named.value != method.name:
        problems.append(f"{named.where}: method={named.value!r} and the command is {method.name}; keep one")
    return {name: setting for name, setting in settings.items() if name not in ("method", "sweep")}


def _inferred(settings: Mapping[str, parse.Setting]) -> str:
    """The method that the arguments or the columns of the rows stand for, which is printed."""
    why = next((name for name in BY_ARGUMENT if name in settings), None)
    name = BY_ARGUMENT[why] if why else "sft"
    if why is None:
        columns = _columns(settings)
        name = next((method for needed, method in BY_COLUMNS if needed <= set(columns)), "sft")
        why = f"the columns {', '.join(columns)}" if columns else "nothing that asks for another"
    from posttrain.core.distributed import environment  # here, because it imports torch

    if environment.rank() == 0:
        other = "To choose another, write `method: NAME` in the file."
        print(f"method: {name}, inferred from {why}. {other}", file=sys.stderr)
    return name


def _columns(settings: Mapping[str, parse.Setting]) -> list[str]:
    """The columns of the training rows; none where they cannot be read yet, which the run itself reports."""
    from posttrain.cli.mixture import CommandSource

    known = parse.unknown([CommandSource], dict(settings))
    given = {name: setting for name, setting in settings.items() if name not in known}
    [source] = parse.configs([CommandSource], given | {"eval_share": parse.Setting("", "0")}, [])
    if source.dataset_name is None:
        return []
    return list(source.load()[0].column_names or ())
