"""The command ``posttrain check``, which checks the arguments of a run and writes them as one file."""

from __future__ import annotations

import sys

from posttrain.cli import parse
from posttrain.cli.method import OF_LAUNCHER, checked, of_words, settings_of
from posttrain.core.fields.redaction import masked

HELP = """usage: posttrain check [<method>] run.yaml ... [--name value ...]

Finds everything that is wrong with the arguments of a run, as training does before it loads anything, with exit status
2. Else prints the arguments of all files and flags together as YAML, of which one file can be made:

  posttrain check sft model.yaml data.toml --learning_rate 1e-5 > run.yaml"""


def run(words: list[str]) -> None:
    """Check a run, and print its settings."""
    method, words = of_words(words, "check")
    settings, problems = settings_of(method, words)
    checked(method, settings, problems)
    settings |= {name: each for name, each in parse.read_words(words)[0].items() if name in ("env", *OF_LAUNCHER)}
    values = {name: setting.value for name, setting in settings.items()}
    secrets = [name for name, value in values.items() if masked(value, name) != value]
    written = {"method": method.name} | {name: value for name, value in values.items() if name not in secrets}
    print(parse.as_yaml(written), end="")
    left_out = f" Not written, for they are secret: {', '.join(secrets)}." if secrets else ""
    print(f"posttrain {method.name}: nothing is wrong with the {len(settings)} arguments.{left_out}", file=sys.stderr)
