"""The command ``posttrain vllm-serve``, which starts a vLLM server as online trainers need it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from posttrain.cli.parse import read_file
from posttrain.core.errors import ConfigError, missing

HELP = """posttrain vllm-serve MODEL [OPTION ...]

Start `vllm serve MODEL` so that a trainer with use_vllm=True and vllm_mode=server can send it weights. The options are
those of vllm serve; the names that `trl vllm-serve` has for them, such as --tensor_parallel_size 2, mean the same.
--config FILE reads them from a YAML file, with the model under `model`; options beside it win. --dry-run
prints the command instead.
"""

#: Options of ``trl vllm-serve`` whose names differ by more than dashes.
RENAMED = {"vllm-model-impl": "model-impl", "log-level": "uvicorn-log-level"}
#: What a trainer needs, unless it is set otherwise: log-probabilities with the temperature.
USUAL = {"logprobs-mode": "processed_logprobs"}


def run(words: list[str]) -> None:
    """Start vLLM. It does not return: the server takes the place of this process."""
    from posttrain.core.data import accelerator

    dry = "--dry-run" in words
    command = server_command([word for word in words if word != "--dry-run"], accelerator.gpu() is not None)
    if dry:
        print(" ".join(["VLLM_SERVER_DEV_MODE=1", *(json.dumps(w) if '"' in w else w for w in command)]))
        return
    if error := missing("vllm", "vllm", "posttrain vllm-serve"):
        raise ConfigError("vllm-serve", [str(error)])
    own = [sys.executable, "-m", "vllm.entrypoints.cli.main"]  # a `vllm` on the PATH may be of another environment
    os.execve(own[0], [*own, *command[1:]], os.environ | {"VLLM_SERVER_DEV_MODE": "1"})


def server_command(words: Sequence[str], has_gpu: bool) -> list[str]:
    """The command line of vLLM. Raises a `ConfigError` where no model is named, or a file of options cannot be read.

    Args:
        words: a model, or ``--model`` with one, and options with values, in the names of vLLM or of trl.
        has_gpu: weights are sent over NCCL, and otherwise over Gloo.
    """
    given: dict[str, Any] = dict(_options(words))
    if "config" in given:
        given = _of_file(given.pop("config")) | given
    model = given.pop("model", None)
    if not isinstance(model, str):
        raise ConfigError("vllm-serve", ["name a model: posttrain vllm-serve MODEL"])
    transfer = {"weight-transfer-config": json.dumps({"backend": "nccl" if has_gpu else "gloo"})}
    command = ["vllm", "serve", model]
    for name, value in (transfer | USUAL | given).items():
        if isinstance(value, str) and value.lower() in ("true", "false"):
            command.append(f"--{'' if value.lower() == 'true' else 'no-'}{name}")
        else:
            values = value if isinstance(value, list) else [] if value is None else [value]
            command += [f"--{name}", *(json.dumps(v) if isinstance(v, dict) else str(v) for v in values)]
    return command


def _of_file(path: str | None) -> dict[str, Any]:
    """{name in vLLM: value} of the options in a YAML file; those without a value keep vLLM's own."""
    problems = [] if path else ["--config has no value; write --config FILE"]
    settings = read_file(path, problems) if path else {}
    if problems:
        raise ConfigError("vllm-serve", problems)
    names = {name: name.replace("_", "-") for name in settings}
    return {
        RENAMED.get(names[name], names[name]): setting.value
        for name, setting in settings.items()
        if setting.value is not None
    }


def _options(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(name in vLLM, value or None) of each option; the first word that belongs to none is the model."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            yield "model", word
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("_", "-")
        if not equals and rest and not rest[0].startswith("--"):
            value, equals = rest.pop(0), "="
        yield RENAMED.get(name, name), value if equals else None
