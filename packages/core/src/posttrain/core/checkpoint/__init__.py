"""Transactional checkpoints with a manifest and without pickle."""

from posttrain.core.checkpoint.arguments import CheckpointArguments, asked_for
from posttrain.core.checkpoint.codec import load_tree, save_tree
from posttrain.core.checkpoint.disk import DiskFullError, check_space, directory_bytes
from posttrain.core.checkpoint.store import MissingCheckpointError, Store, get_last_checkpoint
from posttrain.core.checkpoint.transaction import Outcome, Saver
from posttrain.core.data.rng import rng_state, set_rng_state

__all__ = [
    "CheckpointArguments",
    "DiskFullError",
    "MissingCheckpointError",
    "Outcome",
    "Saver",
    "Store",
    "asked_for",
    "check_space",
    "directory_bytes",
    "get_last_checkpoint",
    "load_tree",
    "rng_state",
    "save_tree",
    "set_rng_state",
]
