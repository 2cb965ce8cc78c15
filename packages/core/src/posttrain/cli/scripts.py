"""Parsers for training scripts: dataset, model and arguments from a command line and YAML files.

The names are those that scripts for trl import.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.cli import help, parse
from posttrain.cli.source import DataSource
from posttrain.core.config import opt
from posttrain.core.errors import ConfigError
from posttrain.lm.loading.arguments import ModelConfig


@dataclass
class ScriptArguments(DataSource):
    """Arguments of a training script: which dataset is trained on and evaluated on."""

    ignore_bias_buffers: bool = opt(
        False, "For the script to read: whether buffers of booleans are left out of distributed synchronisation."
    )


def get_peft_config(model_args: ModelConfig) -> Any | None:
    """The `peft.LoraConfig` that `model_args` describe, None without ``use_peft``."""
    return model_args.peft_config()


def get_quantization_config(model_args: ModelConfig) -> Any | None:
    """The `transformers.BitsAndBytesConfig` of `model_args`, None without ``load_in_4bit`` or ``load_in_8bit``."""
    return model_args.quantization_config()


def get_kbit_device_map() -> dict[str, int] | None:
    """The device map of a quantized model: this process's GPU; None without a GPU."""
    from posttrain.core.data import accelerator

    return {"": int(os.environ.get("LOCAL_RANK", "0"))} if accelerator.gpu() else None


class ScriptParser:
    """Makes configs of a command line: ``train.py run.yaml --learning_rate 1e-5``, also ``--config run.yaml``.

    A YAML file holds ``name: value`` lines; flags override it. Under ``env`` it may hold environment variables to set.

    Args:
        dataclass_types: one dataclass or several. A value goes to each that has a field of its name.
        prog: the name of the program, in errors and in ``--help``; None: that of the script.
        description: what it does, for ``--help``.
        options: others of `argparse.ArgumentParser`, which only affect its help.
    """

    def __init__(
        self,
        dataclass_types: type | Iterable[type] | None = None,
        prog: str | None = None,
        description: str | None = None,
        **options: Any,
    ) -> None:
        if unknown := set(options) - set(inspect.signature(argparse.ArgumentParser).parameters):
            raise TypeError(f"{type(self).__name__} has no argument {', '.join(sorted(unknown))}.")
        types = (dataclass_types,) if isinstance(dataclass_types, type) else tuple(dataclass_types or ())
        for config in types:
            if "config" in getattr(config, "__dataclass_fields__", {}):
                raise ValueError(
                    f"{config.__name__} has a field named 'config', which is the flag that names a YAML file; rename "
                    "it."
                )
        self.dataclass_types, self.description = types, description
        self.prog = os.path.basename(sys.argv[0]) or "script" if prog is None else prog
        self._commands: Commands | None = None
        self._defaults: dict[str, parse.Setting] = {}

    def add_subparsers(self, dest: str = "command", parser_class: type | None = None, **options: Any) -> Commands:
        """Let the first word choose among commands, each with dataclasses of its own: ``train.py sft --seed 3``.

        The parser then returns one more element, a namespace: the name under `dest`, and every field of the command's
        dataclasses.

        Args:
            parser_class: the class of the commands' parsers; None: this one.
            options: others of argparse, which only affect its help.
        """
        self._commands = Commands(self.prog, dest, parser_class or type(self))
        return self._commands

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Let fields have these values, where neither a file nor a flag sets them; those of commands too.

        Returns:
            the names that no class has, with their values: ``["--name", "value"]``.
        """
        parsers: list[ScriptParser] = [self, *(self._commands.parsers.values() if self._commands else ())]
        unknown = {name: parse.Setting(f"default of {name}", _as_text(value)) for name, value in values.items()}
        for parser in parsers:
            left = set(parse.unknown(parser.dataclass_types, unknown))
            parser._defaults |= {name: setting for name, setting in unknown.items() if name not in left}
        known = {name for parser in parsers for name in parser._defaults}
        return [word for name, value in values.items() if name not in known for word in (f"--{name}", str(value))]

    def format_help(self) -> str:
        """What ``--help`` prints: every argument, with its default."""
        names = f"{{{','.join(self._commands.parsers)}}} " if self._commands else ""
        head = f"usage: {self.prog} {names}[--config run.yaml] [--name value ...]"
        parts = [head, *([self.description] if self.description else [])]
        return "\n\n".join(parts) + "\n" + "\n".join(help.of_configs(self.dataclass_types)) + "\n"

    def parse_args_into_dataclasses(
        self, args: Sequence[str] | None = None, return_remaining_strings: bool = False, **file: Any
    ) -> tuple[Any, ...]:
        """As transformers' parser calls it; see `parse_args_and_config`."""
        return self.parse_args_and_config(args, return_remaining_strings)

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """One config of each class, in their order. Of a flag that is given twice, the last counts.

        Args:
            args: the words; None: those of this process.
            return_remaining_strings: also return unknown words as a last element, ``["--name", "value"]``, and those
                that follow the one value of a flag.
            fail_with_unknown_args: False leaves such words out.
            separate_remaining_strings: return those of the files and those of the flags as two elements.

        Raises:
            ConfigError: listing everything that is wrong.
        """
        words = list(sys.argv[1:] if args is None else args)
        if self._commands is not None and words and words[0] in self._commands.parsers:
            return self._parse_command(words, return_remaining_strings, fail_with_unknown_args)
        if {"-h", "--help"} & set(words):
            print(self.format_help(), end="")
            raise SystemExit(0)
        if self._commands is not None:
            names = ", ".join(self._commands.parsers)
            raise ConfigError(self.prog, [f"the first word must be one of {names}, before any flag"])
        settings, problems = parse.read_words(words)
        settings = self._defaults | settings
        parse.take_environment(settings, problems)
        remaining: tuple[list[str], list[str]] = [], []  # of files, of flags
        if return_remaining_strings or not fail_with_unknown_args:
            for name in parse.unknown(self.dataclass_types, settings):
                setting = settings.pop(name)
                values = setting.value if isinstance(setting.value, list) else [setting.value]
                remaining[setting.where.startswith("--")].extend([f"--{name}", *map(str, values)])
        if return_remaining_strings:
            remaining[1].extend(parse.take_surplus(self.dataclass_types, settings))
        try:
            made = parse.configs(self.dataclass_types, settings, problems)
        except ConfigError as error:
            raise ConfigError(self.prog, error.problems) from None
        if not return_remaining_strings:
            return tuple(made)
        return (*made, *remaining) if separate_remaining_strings else (*made, remaining[0] + remaining[1])

    def _parse_command(self, words: list[str], return_remaining: bool, fail_with_unknown: bool) -> tuple[Any, ...]:
        """The configs of this parser, the namespace of the command and, if asked, the words that neither knows."""
        commands: Any = self._commands
        chosen = commands.parsers[words[0]]
        both = type(chosen)((*self.dataclass_types, *chosen.dataclass_types), prog=chosen.prog)
        both._defaults = self._defaults | chosen._defaults
        made = both.parse_args_and_config(words[1:], return_remaining, fail_with_unknown)
        own, count = len(self.dataclass_types), len(both.dataclass_types)
        values = {name: value for config in made[own:count] for name, value in vars(config).items()}
        return *made[:own], argparse.Namespace(**{commands.dest: words[0]} | values), *made[count:]


def _as_text(value: Any) -> Any:
    """`value` as a file would hold it: lists of texts, mappings and None as they are, and the rest as text."""
    if value is None or isinstance(value, dict):
        return value
    return [_as_text(item) for item in value] if isinstance(value, (list, tuple)) else str(value)


class Commands:
    """The commands of a `ScriptParser`, by name, as ``add_subparsers`` of argparse returns them."""

    def __init__(self, prog: str, dest: str, parser_class: type) -> None:
        self.prog, self.dest, self.parser_class = prog, dest, parser_class
        self.parsers: dict[str, ScriptParser] = {}

    def add_parser(self, name: str, **options: Any) -> ScriptParser:
        """A parser for the command `name`; `options` are those of `ScriptParser`, and argparse's ``help``."""
        options.setdefault("description", options.pop("help", None))
        self.parsers[name] = self.parser_class(prog=f"{self.prog} {name}", **options)
        return self.parsers[name]


TrlParser = ScriptParser
