"""Processes, devices and precision: the only package that imports accelerate, DDP, FSDP and DeepSpeed."""

from posttrain.core.distributed.strategies import Distributed, make_strategy

__all__ = ["Distributed", "make_strategy"]
