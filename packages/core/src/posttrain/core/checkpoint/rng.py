"""The state of every global random number generator of this process."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

from posttrain.core.errors import CheckpointError

logger = logging.getLogger(__name__)


def rng_state() -> dict[str, Any]:
    """Where python's, numpy's and torch's global generators stand; about 10 KB, which `save_tree` can write.

    The CUDA generators are in it once this process uses CUDA, one per visible device.
    """
    version, words, gauss_next = random.getstate()
    return {
        "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss_next": gauss_next},
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_rng_state(tree: dict[str, Any]) -> None:
    """Put the generators back to where `rng_state` found them.

    A run moved to another number of CUDA devices restores those that both have, with a warning.

    Raises:
        CheckpointError: `tree` is not a state of the generators.
    """
    try:
        python = tree["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss_next"]))
        np.random.set_state(tree["numpy"])
        torch.set_rng_state(tree["torch"].clone())
        cuda = tree["cuda"]
        devices = torch.cuda.device_count() if cuda else 0
        for device, state in enumerate(cuda[:devices]):
            torch.cuda.set_rng_state(state.clone(), device)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"This is not a state of the random number generators: {error}") from error
    if len(cuda) != devices:
        logger.warning(
            "The checkpoint holds the random state of %d CUDA devices and this process sees %d: the numbers drawn on "
            "the GPU will differ from those of an uninterrupted run.",
            len(cuda),
            devices,
        )
