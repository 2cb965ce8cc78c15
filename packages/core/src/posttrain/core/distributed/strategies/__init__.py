"""The strategies that spread a model over the processes of a run: one class each, with one interface."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import torch
from torch import nn

from posttrain.core.distributed import division, environment, shard_settings
from posttrain.core.distributed.arguments import DistributedArguments
from posttrain.core.distributed.deepspeed import is_asked_for
from posttrain.core.distributed.strategies.base import Distributed
from posttrain.core.distributed.strategies.ddp import DDP
from posttrain.core.distributed.strategies.deepspeed import DeepSpeed
from posttrain.core.distributed.strategies.fsdp import FSDP, ModelParallel
from posttrain.core.distributed.world import start_processes
from posttrain.core.errors import ConfigError

logger = logging.getLogger(__name__)


def make_strategy(args: DistributedArguments, model: nn.Module | None = None) -> Distributed:
    """Start the processes of a run and choose its strategy; a `model` that is there already may have been loaded in
    parts. Raises a `ConfigError` where the arguments, the launcher and the number of processes contradict each
    other.
    """
    settings, accelerator = _started(args)
    processes = accelerator.num_processes
    sizes = division.sizes_of_run(args, model, processes)
    if settings is not None and processes == sizes["tp_size"]:
        logger.warning("fsdp is ignored: the world size is 1.")
    settings = division.sharding_of(settings, sizes, processes)
    is_divided = sizes["tp_size"] * sizes["ep_size"] > 1
    if is_asked_for(args.deepspeed):
        if settings is not None or is_divided:
            both = "the launcher starts DeepSpeed, and fsdp or parallelism_config divides the model too; leave one out"
            raise ConfigError("TrainingArguments", [both])
        return DeepSpeed(args, accelerator, sizes)
    if is_divided or settings is not None:
        return (ModelParallel if is_divided else FSDP)(args, accelerator, sizes, settings)
    return (DDP if processes > 1 else Distributed)(args, accelerator, sizes)


def _started(args: DistributedArguments) -> tuple[Any, Any]:
    settings = shard_settings.of_run(args)
    return settings, start_processes(args, settings is not None and settings.cpu_offload)


def meet_launched(args: DistributedArguments) -> None:
    """Start the process group, and take the GPU, of a launched process: scripts use both before there is a trainer, and
    accelerate's loggers in any.
    """
    accelerate = sys.modules.get("accelerate.state")
    if "LOCAL_RANK" in os.environ:
        if not torch.distributed.is_initialized() and (accelerate or environment.world_size() > 1):
            process_state(args)
    elif accelerate and environment.world_size() == 1:
        accelerate.PartialState(cpu=args.use_cpu)


def process_state(args: DistributedArguments) -> Any:
    """accelerate's `PartialState` of this process, which starts the process group if there is none."""
    from accelerate import PartialState

    if not PartialState._shared_state:
        _started(args)
    return PartialState()
