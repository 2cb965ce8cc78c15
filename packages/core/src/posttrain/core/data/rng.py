"""Saves and restores the global random number generators of this process."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

from posttrain.core.data.accelerator import CUDA, KINDS
from posttrain.core.errors import CheckpointError

logger = logging.getLogger(__name__)

#: Kinds of devices with generators of their own, by their module in torch.
DEVICES = {kind: kind.upper() for kind in KINDS}


def rng_state() -> dict[str, Any]:
    """The states of python's, numpy's and torch's global generators; about 10 KB, for `save_tree`.

    The generators of CUDA and XPU are in it once this process uses such devices, one per visible device, and that of
    MPS where there is MPS.
    """
    version, words, gauss_next = random.getstate()
    tree = {
        "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss_next": gauss_next},
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        CUDA: _states_of(CUDA),
    }
    return tree | {kind: states for kind in KINDS if kind != CUDA and (states := _states_of(kind))}


def _states_of(kind: str) -> list[torch.Tensor]:
    if kind == "mps":
        return [torch.mps.get_rng_state()] if torch.backends.mps.is_available() else []
    module = getattr(torch, kind)
    return module.get_rng_state_all() if module.is_initialized() else []


def _set_states_of(kind: str, states: list[torch.Tensor]) -> int:
    """How many of `states` were set: one for each device that there is."""
    if kind == "mps":
        here = int(torch.backends.mps.is_available())
        for state in states[:here]:
            torch.mps.set_rng_state(state.clone())
        return min(here, len(states))
    module = getattr(torch, kind)
    here = module.device_count() if states else 0
    for device, state in enumerate(states[:here]):
        module.set_rng_state(state.clone(), device)
    return here


def set_rng_state(tree: dict[str, Any]) -> None:
    """Put the generators back to where `rng_state` found them. A run moved to another number or kind of devices
    restores those that both have, with a warning. Raises a `CheckpointError` where `tree` is not a state of the
    generators.
    """
    try:
        python = tree["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss_next"]))
        np.random.set_state(tree["numpy"])
        torch.set_rng_state(tree["torch"].clone())
        saved = {kind: tree[CUDA] if kind == CUDA else tree.get(kind, []) for kind in DEVICES}
        here = {kind: _set_states_of(kind, states) for kind, states in saved.items()}
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"This is not a state of the random number generators: {error}") from error
    for kind, states in saved.items():
        if len(states) != here[kind]:
            logger.warning(
                f"The checkpoint holds the random state of {len(states)} {DEVICES[kind]} devices and this process sees "
                f"{here[kind]}: the numbers drawn on the GPU will differ from those of an uninterrupted run."
            )
