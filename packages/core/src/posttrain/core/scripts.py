"""What training scripts parse: which dataset, which model, and a run's arguments, from a command line and YAML files.

The names are those that scripts for trl import; the work is that of the command line's own parts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.cli import parse
from posttrain.core.cli.source import DataSource
from posttrain.core.errors import ConfigError
from posttrain.core.fields import opt
from posttrain.core.models import ModelConfig


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
    """The `transformers.BitsAndBytesConfig` that `model_args` describe, None without ``load_in_4bit`` or ``load_in_8bit``."""
    return model_args.quantization_config()


def get_kbit_device_map() -> dict[str, int] | None:
    """Where this process loads a quantised model: whole, onto its own GPU; None where there is no GPU."""
    import torch

    return {"": int(os.environ.get("LOCAL_RANK", "0"))} if torch.cuda.is_available() else None


class ScriptParser:
    """Makes configs of a command line: ``train.py run.yaml --learning_rate 1e-5``, also ``--config run.yaml``.

    A YAML file holds ``name: value`` lines; flags go before it. Under ``env`` it may hold environment variables to set.

    Args:
        dataclass_types: one dataclass or several. A value goes to each that has a field of its name.
    """

    def __init__(self, dataclass_types: type | Iterable[type]) -> None:
        self.dataclass_types = (dataclass_types,) if isinstance(dataclass_types, type) else tuple(dataclass_types)

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[Any, ...]:
        """One config of each class, in their order.

        Args:
            args: the words; None: those of this process.
            return_remaining_strings: return the words that no config knows as a last element, ``["--name", "value"]``.
            fail_with_unknown_args: False leaves such words out.

        Raises:
            ConfigError: listing everything that is wrong.
        """
        settings, problems = parse.read_words(list(sys.argv[1:] if args is None else args))
        env = settings.pop("env", None)
        if env is not None and not isinstance(env.value, dict):
            problems.append(f"{env.where}: env must hold `NAME: value` lines")
        elif env is not None:
            os.environ.update({name: str(value) for name, value in env.value.items()})
        remaining: list[str] = []
        if return_remaining_strings or not fail_with_unknown_args:
            for name in parse.unknown(self.dataclass_types, settings):
                value = settings.pop(name).value
                remaining += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        try:
            made = parse.configs(self.dataclass_types, settings, problems)
        except ConfigError as error:
            raise ConfigError(os.path.basename(sys.argv[0]) or "script", error.problems) from None
        return (*made, remaining) if return_remaining_strings else tuple(made)


TrlParser = ScriptParser
