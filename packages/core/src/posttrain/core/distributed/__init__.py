"""Processes, devices and precision: the only package that imports accelerate, DDP, FSDP and DeepSpeed."""
