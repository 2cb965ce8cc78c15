"""Processes, devices and precision: the only package that imports accelerate, DDP, FSDP and DeepSpeed."""

from posttrain.core.distributed.arguments import DistributedArguments
from posttrain.core.distributed.environment import device, local_rank, precision, rank, world_size
from posttrain.core.distributed.sharding import fill, is_in_pieces, whole, whole_shape
from posttrain.core.distributed.strategies import Distributed, make_strategy

__all__ = [
    "Distributed",
    "DistributedArguments",
    "device",
    "fill",
    "is_in_pieces",
    "local_rank",
    "make_strategy",
    "precision",
    "rank",
    "whole",
    "whole_shape",
    "world_size",
]
