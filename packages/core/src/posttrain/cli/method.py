"""Reads the run that words describe: its method, its settings, and the configs that they make.

The method is the first word, `method:` in its file, or what its arguments and rows say.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import warnings
from typing import Any

from posttrain.cli import parse
from posttrain.core import registry
from posttrain.core.errors import ConfigError
from posttrain.core.registry import Method, Run

FILES = (".yaml", ".yml", ".toml")
#: The word in place of a method whose file names it.
TRAIN = "train"
#: What files and flags of a run may say about its processes. The launcher reads it, and they leave it out.
OF_LAUNCHER = "accelerate_config num_processes num_machines machine_rank main_process_ip main_process_port".split()
#: Set where a command runs a method in one process, whatever its file says.
ALONE = "POSTTRAIN_ONE_PROCESS"
#: {argument that one method alone needs: the method}.
BY_ARGUMENT = {"teacher_model_name_or_path": "distillation", "reward_funcs": "grpo", "source_column": "seq2seq"}
#: (columns, method): the first whose columns are all there.
BY_COLUMNS = (({"chosen", "rejected"}, "dpo"), ({"prompt", "completion", "label"}, "kto"))


def of_words(words: list[str], command: str) -> tuple[Method, list[str]]:
    """The method of the run that `words` describe, and the words after its name. Raises a `ConfigError` where there is
    no such method, or none is named and none fits.

    Args:
        words: perhaps a method, then files and flags. command: that they follow, for messages.
    """
    first = words[0] if words else "--"
    if not first.startswith("-") and not first.endswith(FILES):
        if first != TRAIN:
            return registry.method(first), words[1:]
        words = words[1:]
    settings, problems = parse.read_words(words)
    parse.take_environment(settings, problems)  # before anything that reads it is imported
    if not any(word.endswith(FILES) for word in words):
        how = f"name the method first, or a file that describes the run, as in posttrain {command} run.yaml"
        raise ConfigError(f"posttrain {command}", [how])
    if "method" in settings:
        return registry.method(str(settings["method"].value)), words
    if problems:  # of a file that cannot be read, nothing can be inferred
        raise ConfigError(f"posttrain {command}", problems)
    return registry.method(_inferred(settings)), words


def launcher_words(words: list[str]) -> list[str]:
    """The flags of `posttrain launch` among `words` and in their files; none in a process that it has started, or that
    is to be `ALONE`. Raises a `ConfigError` where one has no value.
    """
    if {"RANK", ALONE} & os.environ.keys():
        return []
    given = {name: each for name, each in parse.read_words(words)[0].items() if name in OF_LAUNCHER}
    if problems := [parse.NO_VALUE.format(flag=each.where) for each in given.values() if each.is_bare]:
        raise ConfigError("posttrain", problems)
    return [f"--{name}={each.value}" for name, each in given.items() if each.value is not None]


def configs_of(method: Method) -> tuple[type, type, type]:
    """The classes of configs that the words of a method are read into."""
    from posttrain.cli.mixture import CommandSource
    from posttrain.lm.loading.arguments import ModelConfig

    return method.config_class, ModelConfig, CommandSource


def settings_of(method: Method, words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The settings of a method from `words`, its files and flags, and the problems that were found in them."""
    settings, problems = parse.read_words(words)
    parse.take_environment(settings, problems)
    named = settings.get("method")
    if named is not None and named.value != method.name:
        problems.append(f"{named.where}: method={named.value!r} and the command is {method.name}; keep one")
    others = ("method", "sweep", *OF_LAUNCHER)
    return {name: setting for name, setting in settings.items() if name not in others}, problems


def made(method: Method, settings: dict[str, Any], problems: list[str]) -> Run:
    """The run that `settings` make; `ConfigError` with their problems and those found before."""
    found: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", FutureWarning)
            return Run(*parse.configs(configs_of(method), settings, problems, method.needs))
    finally:
        for message in dict.fromkeys(str(each.message) for each in found):  # a config is checked more than once
            print(message, file=sys.stderr)
            warnings.filterwarnings("ignore", message=re.escape(message))


def checked(method: Method, settings: dict[str, Any], problems: list[str]) -> Run:
    """`made`, once nothing is found that is wrong with it or that this machine lacks."""
    run = made(method, settings, problems)
    from posttrain.core.optim import builder
    from posttrain.core.training import preflight  # after the checks: this imports torch

    wrong = [*preflight.of_arguments(run.config, run.model, run.data), *builder.package_problems(run.config)]
    if found := [str(problem) for problem in wrong]:
        raise ConfigError(f"posttrain {method.name}", found)
    return run


def read(method: Method, words: list[str], needs: tuple[str, ...] = ("",)) -> Run:
    """The run of a method from `words`, its files and flags, of whose needs those must be given that begin so."""
    needed = tuple(need for need in method.needs if need.startswith(needs))
    return made(dataclasses.replace(method, needs=needed), *settings_of(method, words))


def data_of(settings: dict[str, Any], problems: list[str]) -> Any:
    """The `CommandSource` that the settings of a run make, of those that are about its rows."""
    from posttrain.cli.mixture import CommandSource

    others = parse.unknown([CommandSource], settings)
    own = {name: setting for name, setting in settings.items() if name not in others}
    return parse.configs([CommandSource], own, problems)[0]


def _inferred(settings: dict[str, parse.Setting]) -> str:
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


def _columns(settings: dict[str, parse.Setting]) -> list[str]:
    """The columns of the training rows; none where they cannot be read yet, which the run itself reports."""
    source = data_of(settings | {"eval_share": parse.Setting("", "0")}, [])
    return [] if source.dataset_name is None else list(source.load()[0].column_names or ())
