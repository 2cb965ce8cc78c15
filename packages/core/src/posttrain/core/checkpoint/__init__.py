"""Transactional checkpoints with a manifest and without pickle."""

from posttrain.core.checkpoint.store import Store, get_last_checkpoint

__all__ = ["Store", "get_last_checkpoint"]
