"""Processes, devices and precision: the only package that imports accelerate, DDP, FSDP and DeepSpeed."""

from posttrain.core.distributed.arguments import DistributedArguments
from posttrain.core.distributed.environment import barrier, device, local_rank, precision, rank, world_size
from posttrain.core.distributed.processes import Distributed
from posttrain.core.distributed.sharding import fill, is_in_pieces, whole, whole_shape

__all__ = [
    "Distributed",
    "DistributedArguments",
    "barrier",
    "device",
    "fill",
    "is_in_pieces",
    "local_rank",
    "precision",
    "rank",
    "whole",
    "whole_shape",
    "world_size",
]
