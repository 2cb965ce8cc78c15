"""DeepSpeed's configuration, filled in from the arguments of a run, and the weights that ZeRO-3 shards.

Optimizer and schedule follow from the other arguments.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.core.distributed.environment import is_true, world_size
from posttrain.core.errors import ConfigError
from posttrain.core.models.wrapping import config_of, setting, text_config

# The allowed optimizers of a configuration, and the argument that matches each of their values.
OPTIMIZERS = ("adam", "adamw")
MEANT = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay", "betas": None}
# What follows from the width of the model, as a number of it.
OF_THE_MODEL: dict[str, Callable[[int], int]] = {
    "zero_optimization.reduce_bucket_size": lambda width: width * width,
    "zero_optimization.stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "zero_optimization.stage3_param_persistence_threshold": lambda width: 10 * width,
}
ENVIRONMENT: dict[str, tuple[str, Callable[[str], Any]]] = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("stage", int),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("offload_optimizer", lambda device: {"device": device}),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("offload_param", lambda device: {"device": device}),
}


def is_asked_for(config: Any) -> bool:
    """Whether the run is to use DeepSpeed: by its arguments, or by the launcher's."""
    return config is not None or is_true(os.environ.get("ACCELERATE_USE_DEEPSPEED", "false"))


def read(config: dict[str, Any] | str | None) -> dict[str, Any]:
    """A copy of the configuration; from the launcher's environment if `config` is None. Raises a `ValueError` where it
    is not a JSON file with an object.
    """
    if config is None:
        path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        if path.lower() != "none":
            return read(path)
        found = {name: os.environ.get(name, "none") for name in ENVIRONMENT}
        zero = {ENVIRONMENT[n][0]: ENVIRONMENT[n][1](v) for n, v in found.items() if v.lower() != "none"}
        return {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto"},
            "zero_optimization": {"stage": 2} | zero,
        }
    if isinstance(config, (str, os.PathLike)):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"deepspeed={str(config)!r} is not a JSON file that can be read ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"deepspeed must be a JSON object or a file of one, not {type(config).__name__}")
    return json.loads(json.dumps(config))


def plugin(config: dict[str, Any] | str | None) -> Any:
    """accelerate's plugin of the configuration; None where DeepSpeed is not asked for."""
    if not is_asked_for(config):
        return None
    from accelerate.utils import DeepSpeedPlugin

    return DeepSpeedPlugin(hf_ds_config=read(config))


def fill(config: dict[str, Any], args: Any, precision: str, model: nn.Module | None = None) -> dict[str, Any]:
    """`config` with ``"auto"`` values filled in from the arguments of the run. Raises a `ConfigError` where it
    contradicts the arguments, or where they do not determine a missing value.
    """
    wrong: list[str] = []
    _drop_optimizer(config, args, wrong)
    batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    known = {
        "train_micro_batch_size_per_gpu": (batch, "per_device_train_batch_size"),
        "gradient_accumulation_steps": (accumulation, "gradient_accumulation_steps"),
        "train_batch_size": (batch * accumulation * world_size(), "the batch of all processes"),
        "gradient_clipping": (float(args.max_grad_norm or 0), "max_grad_norm"),
        "bf16.enabled": (precision == "bf16", "bf16"),
        "fp16.enabled": (precision == "fp16", "fp16"),
    }
    for path, (value, argument) in known.items():
        section, _, key = path.rpartition(".")
        table = config.get(section, {}) if section else config
        if table.get(key) == "auto":
            table[key] = value
        elif key in table and table[key] != value:
            wrong.append(f"deepspeed: {path} is {table[key]!r}, and {argument} is {value!r}; set it to 'auto'")
    config.setdefault("train_micro_batch_size_per_gpu", batch)
    config.setdefault("gradient_accumulation_steps", accumulation)
    zero = config.get("zero_optimization", {})
    width = None if model is None else setting(text_config(config_of(model)), "hidden_size")
    for path, size in OF_THE_MODEL.items():
        name = path.rpartition(".")[2]
        if width is not None and zero.get(name) == "auto":
            zero[name] = size(width)
    # Ours is a torch optimizer, which DeepSpeed has not tested itself.
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    left = [
        path for path, value in _leaves(config) if value == "auto" and (model is not None or path not in OF_THE_MODEL)
    ]
    wrong += [f"deepspeed: {path} is 'auto', which does not follow from the arguments; give a value" for path in left]
    if wrong:
        raise ConfigError("TrainingArguments", wrong)
    return config


def _drop_optimizer(config: dict[str, Any], args: Any, wrong: list[str]) -> None:
    """The arguments set optimizer and schedule, so their sections must not contradict them."""
    section = config.pop("optimizer", None)
    if section is not None:
        kind, values = str(section.get("type", "AdamW")), section.get("params", {})
        if kind.lower() not in OPTIMIZERS:
            wrong.append(f"deepspeed: optimizer.type is {kind!r}; leave the section out and name an optimizer in optim")
        own = {"betas": [args.adam_beta1, args.adam_beta2]} | {k: vars(args)[n] for k, n in MEANT.items() if n}
        for name, value in values.items():
            if value != "auto" and name in own and value != own[name]:
                argument = MEANT[name] or "adam_beta1 and adam_beta2"
                wrong.append(
                    f"deepspeed: optimizer.params.{name} is {value!r}, and {argument} is {own[name]!r}; set 'auto'"
                )
    section = config.pop("scheduler", None)
    if section is not None and any(value != "auto" for value in section.get("params", {}).values()):
        kind = section.get("type")
        wrong.append(
            f"deepspeed: the scheduler {kind!r} is left to the arguments; set lr_scheduler_type and warmup_steps"
        )


def _leaves(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def is_piece(tensor: torch.Tensor) -> bool:
    """Whether ZeRO-3 shards the parameter `tensor`."""
    return hasattr(tensor, "ds_id")


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A whole copy of `parameter`; every process must call this, but where it is gathered already."""
    with gathered(parameter):
        return parameter.detach().clone()


def gathered(tensor: Any) -> contextlib.AbstractContextManager[Any]:
    """Within this context `tensor` is whole. DeepSpeed refuses to gather what is gathered."""
    import deepspeed

    if not is_piece(tensor) or tensor.ds_status is deepspeed.zero.ZeroParamStatus.AVAILABLE:
        return contextlib.nullcontext()
    return deepspeed.zero.GatheredParameters([tensor])
