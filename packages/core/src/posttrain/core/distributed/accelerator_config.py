"""Reads `accelerator_config`, transformers' options for accelerate."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from posttrain.core.config import Resolved, opt
from posttrain.core.errors import did_you_mean

DEFAULTS: dict[str, Any] = {
    "split_batches": False,
    "dispatch_batches": None,
    "even_batches": True,
    "use_seedable_sampler": True,
    "non_blocking": None,
    "gradient_accumulation_kwargs": None,
    "use_configured_state": False,
}
ACCUMULATION = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")

#: Options that change nothing here, and why.
WITHOUT_EFFECT = {
    "dispatch_batches": "every process reads its own rows, and of a stream its part",
    "use_seedable_sampler": "the order of the rows is a function of the seed and the epoch, so that a run can be "
    "resumed",
    "sync_with_dataloader": "an optimizer step never spans two epochs",
    "adjust_scheduler": "the schedule counts optimizer steps",
}


class AcceleratorConfig(dict[str, Any]):
    """The options by name; also as attributes, as scripts read them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"accelerator_config has no {name!r}{did_you_mean(name, self)}") from None

    def to_dict(self) -> dict[str, Any]:
        """The options as a plain dict; the callbacks of W&B and DVCLive ask for it where they save the model."""
        return dict(self)

    @property
    def accumulation(self) -> dict[str, Any]:
        """`gradient_accumulation_kwargs`, empty where there are none."""
        return self["gradient_accumulation_kwargs"] or {}


@dataclass
class AcceleratorArguments:
    """How batches are divided between processes and moved to the device, in accelerate's terms."""

    accelerator_config: Resolved[dict | str | None, AcceleratorConfig] = opt(
        None, "Options of accelerate's loaders, as a dict, a JSON object or a JSON file; see docs/failures.md."
    )

    def _normalize(self) -> None:
        given: Any = self.accelerator_config
        if isinstance(given, type):
            raise NotImplementedError(
                f"Tried passing in a callable to `accelerator_config`: {given.__name__}. Pass an instance, or a dict."
            )
        if dataclasses.is_dataclass(given) and not isinstance(given, type):  # transformers' class of this name
            given = dataclasses.asdict(given)
        if isinstance(given, str):
            given = _read(given)
        if given is None or isinstance(given, dict):
            self.accelerator_config = AcceleratorConfig(DEFAULTS | (given or {}))
            num_steps = self.accelerator_config.accumulation.get("num_steps")
            own: Any = self  # a part of `TrainingArguments`
            if isinstance(num_steps, int) and own.gradient_accumulation_steps == 1:
                own.gradient_accumulation_steps = num_steps

    def _problems(self) -> Iterator[str]:
        config = self.accelerator_config
        if not isinstance(config, AcceleratorConfig):
            yield f"accelerator_config={config!r} is no dict, JSON object or JSON file that can be read"
            return
        for name, value in config.items():
            if name not in DEFAULTS:
                yield f"accelerator_config: {name!r} is not one of {', '.join(DEFAULTS)}{did_you_mean(name, DEFAULTS)}"
            elif name != "gradient_accumulation_kwargs" and value not in (None, True, False):
                yield f"accelerator_config: {name}={value!r} is neither true nor false"
        yield from _without_effect("accelerator_config", config)
        own: Any = self
        yield from _accumulation_problems(config.accumulation, own.gradient_accumulation_steps)
        processes = own.world_size
        if config["split_batches"] and processes > 1:
            for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
                if (size := vars(self)[name]) % processes:
                    yield (
                        f"accelerator_config: split_batches=True divides {name}={size} between {processes} "
                        f"processes, and it does not come out even; set {name} to a multiple of {processes}"
                    )


def _accumulation_problems(options: dict[str, Any], accumulation_steps: int) -> Iterator[str]:
    where = "accelerator_config: gradient_accumulation_kwargs"
    for name in options:
        if name not in ACCUMULATION:
            yield f"{where}: {name!r} is not one of {', '.join(ACCUMULATION)}{did_you_mean(name, ACCUMULATION)}"
    yield from _without_effect(where, options)
    num_steps = options.get("num_steps")
    if num_steps is not None and num_steps != accumulation_steps:
        yield (
            f"{where}: num_steps={num_steps} and gradient_accumulation_steps={accumulation_steps} "
            "are both given; keep gradient_accumulation_steps"
        )


def _without_effect(where: str, options: dict[str, Any]) -> Iterator[str]:
    for name, why in WITHOUT_EFFECT.items():
        usual = DEFAULTS.get(name, True)
        if bool(options.get(name, usual)) != bool(usual):
            yield f"{where}: {name}={not usual} has no effect: {why}; leave it {usual}"


def _read(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return path  # `_problems` reports it
