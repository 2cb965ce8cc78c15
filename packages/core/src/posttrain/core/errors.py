"""The exceptions of the package."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterable
from types import ModuleType
from typing import TypeVar

from posttrain.core.fields.redaction import redact

Config = TypeVar("Config")
#: An attribute of errors of any type that were found before a run began: each is a sentence on what the user set.
BEFORE_THE_RUN = "_found_before_the_run"


class ConfigError(ValueError, TypeError):
    """One or more arguments cannot work. The message lists every problem found, one a line.

    Both a `ValueError` (a value out of bounds) and a `TypeError` (an argument that does not exist), so that code
    written for plain dataclasses catches it.
    """

    def __init__(self, where: str, problems: Iterable[str]) -> None:
        self.where, self.problems = where, [redact(problem) for problem in problems]
        lines = self.problems if len(self.problems) == 1 else [""] + [f"  - {p}" for p in self.problems]
        super().__init__(f"{where}: " + "\n".join(lines).lstrip(" "))

    def __reduce__(self):
        return type(self), (self.where, self.problems)


class DataError(ValueError):
    """A dataset cannot be trained on. The message names the column, the row and the remedy."""


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged or does not fit this run."""


class UnsavedError(CheckpointError):
    """A run came to its end and its last save failed: the trained model is in memory, and in no file."""


class MissingModelError(FileNotFoundError, CheckpointError):
    """There is no such folder with a model or a tokenizer, and the Hub gave nothing under that name."""


class NonFiniteError(ArithmeticError):
    """A loss or a gradient was NaN or infinite; the weights are those from before that step."""


class LossSpikeError(ArithmeticError):
    """A loss was far above those before it, and the run was to stop there (``on_loss_spike='stop'``)."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the line outside of posttrain that led here; a dataclass' own constructor, in no file, is none."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__", "").startswith("posttrain.") or frame.f_code.co_filename == "<string>"
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def did_you_mean(name: str, known: Iterable[str], end: str = "") -> str:
    """``", did you mean 'learning_rate'?"`` for a near miss, else `end`: the full stop, where a sentence ends here."""
    known = list(known)
    ending_so = [one for one in known if one.endswith(f"_{name}")]  # of dataset, train_dataset before eval_dataset
    near = [one for one in known if one.startswith(f"{name}_name")]  # of model, model_name_or_path
    near = near or sorted(ending_so, key=lambda one: not one.startswith("train_"))
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f", did you mean {near[0]!r}?" if near else end


def wrong_args(args: object, config_class: type) -> TypeError:
    """The error for `args` that are no config of posttrain, such as transformers' class of the same name."""
    name, package = config_class.__name__, ".".join(config_class.__module__.split(".")[:2])
    root = type(args).__module__.partition(".")[0]
    found = type(args).__name__ if root == "builtins" else f"{root}.{type(args).__name__}"
    return TypeError(f"args is of type {found}; pass {name}(output_dir=...), from {package} import {name}.")


def checked_args(args: object, config_class: type[Config]) -> Config:
    """`args`, if it is a `config_class`; else raises `wrong_args`."""
    if not isinstance(args, config_class):
        raise wrong_args(args, config_class)
    return args


def require(module: str, extra: str, why: str = "") -> ModuleType:
    """Import an optional package, or raise an error with the command that installs it.

    Args:
        module: the module to import, e.g. ``"peft"``.
        extra: what pip installs, e.g. ``"posttrain-core[peft]"``.
        why: what needs it, e.g. ``"peft_config"``.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name and error.name.split(".")[0] != module.split(".")[0]:
            raise  # the package is there, but something that it imports is broken
        raise _not_installed(module, extra, why) from None


def missing(module: str, extra: str, why: str = "") -> ImportError | None:
    """What `require` would raise, without importing more than the packages around `module`; None where it is there."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ValueError:  # a module that was put into sys.modules by hand
        found = True
    except ImportError:  # there is no package around it
        found = False
    return None if found else _not_installed(module, extra, why)


def _not_installed(module: str, extra: str, why: str) -> ImportError:
    needed = f" (needed for {why})" if why else ""
    return ImportError(f"{module!r} is not installed{needed}. Run: pip install '{extra}'", name=module)
