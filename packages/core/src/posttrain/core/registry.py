"""Finds the training methods of installed packages by entry points, and the names of the four packages on first use.

A package adds a method with two lines in its ``pyproject.toml`` and nothing in this one::

    [project.entry-points."posttrain.methods"]
    sft = "posttrain.sft.cli:METHOD"
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from posttrain.core.errors import ConfigError, did_you_mean

GROUP = "posttrain.methods"
#: Callbacks that every trainer has besides those of the core, as ``"module:Class"``. The face, `posttrain.core`, adds
#: them, so that the core imports nothing of what stands on it.
CALLBACKS: list[str] = []
#: The base class of `Trainer`, ``"module:Class"``, with names that scripts of others read; added by the face too.
TRAINER_NAMES = ""
#: ``trainer -> None``: lets its methods go through the old names that a class or a script has replaced; likewise.
FOLLOW_OLD_NAMES = ""
#: A base class of `TrainingArguments`, likewise.
ARGUMENT_SETTERS = ""
#: Arguments of `from_pretrained`, and of a trainer's constructor, that scripts give to a config.
OF_LOADING = """attn_implementation cache_dir config device_map dtype force_download load_in_4bit load_in_8bit
local_files_only low_cpu_mem_usage max_memory offload_folder revision rope_parameters rope_scaling subfolder token
torch_dtype use_safetensors variant weights_only""".split()
OF_TRAINERS = """callbacks compute_metrics data_collator eval_dataset formatting_func model model_init optimizers
peft_config processing_class quantization_config ref_model tokenizer train_dataset""".split()

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """A parsed and checked command line: everything that a method needs to train.

    Args:
        config: the method's own config, such as an `SFTConfig`.
        model: a `posttrain.lm.loading.arguments.ModelConfig`: the model, its loading options and its adapter.
        data: a `posttrain.cli.mixture.CommandSource`: which dataset.
        keeps_model: whether the final model is saved in ``output_dir``.
    """

    config: Any
    model: Any
    data: Any
    keeps_model: bool = True


@dataclass(frozen=True)
class Method:
    """One training method.

    Args:
        name: the word on the command line.
        help: one sentence for ``posttrain --help``.
        config: the import path of its config class, ``"module:Class"``; imported when needed.
        run: trains.
        needs: fields of the three configs that must be given; ``"a|b"``: one of the two.
        preview: ``(run, count)`` -> the first `count` prepared rows (`posttrain.cli.tools.preview.Row`) and the lines
            of a data report; None if not supported.
        workload: ``(run, length)`` -> the shape of a micro-batch (`posttrain.cli.tools.workload.Workload`) with
            rows of `length` tokens; None: the config's maximum. None if not supported.
        replay: ``(run, trajectory)`` -> what its loss makes of a stored trajectory, as text. None if not supported.
    """

    name: str
    help: str
    config: str
    run: Callable[[Run], None]
    needs: tuple[str, ...] = ("model_name_or_path", "dataset_name|datasets")
    preview: Callable[[Run, int], tuple[list[Any], list[str]]] | None = None
    workload: Callable[[Run, int | None], Any] | None = None
    replay: Callable[[Run, dict[str, Any]], str] | None = None

    @property
    def config_class(self) -> type:
        return load(self.config)


#: ``"module:name"`` -> what this import path names.
load: Callable[[str], Any] = pkgutil.resolve_name


def face(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """(``__all__``, ``__getattr__``, ``__dir__``) of `package`: the names that its file imports under TYPE_CHECKING.

    Each is imported when it is first asked for, so that ``--help`` on the command line does not import torch.
    """
    module = sys.modules[package]
    [block] = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.If)]
    homes = {one.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for one in node.names}
    names = sorted(homes)

    def first_use(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name not in homes:
            raise load("posttrain.compat.absent_names:missing_name")(package, name, names)
        setattr(module, name, load(f"{homes[name]}:{name}"))
        return vars(module)[name]

    return names, first_use, lambda: names


@cache
def methods() -> dict[str, Method]:
    """``{name: method}`` of every installed package, sorted; one that cannot be imported is left out with a warning."""
    found = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            found[entry.name] = entry.load()
        except Exception as error:
            logger.warning("The method %r (%s) cannot be loaded: %s", entry.name, entry.value, error)
    return found


def method(name: str, others: Iterable[str] = ()) -> Method:
    """The method called `name`; `ConfigError` with the nearest name if there is none. `others`: what else could have
    been meant, the commands of the command line.
    """
    if name not in methods():
        known, what = ", ".join(methods()) or "none is installed; pip install posttrain-sft adds one", "unknown method"
        near = did_you_mean(name, [*methods(), *others])
        if others:
            known, what = f"{known}; commands: {', '.join(others)}", "unknown method or command"
        raise ConfigError("posttrain", [f"{what} {name!r}{near} (methods: {known})"])
    return methods()[name]


def configs_with(field: str) -> list[str]:
    """Names of the config classes of all methods that have a field called `field`."""
    owners = []
    for found in methods().values():
        try:
            if field in {known.name for known in dataclasses.fields(found.config_class)}:
                owners.append(found.config_class.__name__)
        except (ImportError, AttributeError):  # a method whose optional packages are missing is skipped here
            continue
    return owners
