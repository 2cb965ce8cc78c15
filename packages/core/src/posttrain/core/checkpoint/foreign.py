"""Reads and writes what transformers' Trainer, and trainers made of it, keep of a run beside the weights.

They write these files with ``torch.save``, that is with pickle. torch's restricted reader makes tensors, plain
containers, numbers and numpy arrays of them, and refuses everything else that a file names, so that reading runs no
code of the file.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.core.checkpoint import sharded
from posttrain.core.data import rng
from posttrain.core.data.accelerator import CUDA, KINDS
from posttrain.core.errors import CheckpointError

OPTIMIZER, SCHEDULE, SCALER = "optimizer.pt", "scheduler.pt", "scaler.pt"
# Options of an optimizer's groups that choose its kernel and no number: those of this run stay.
_KERNELS = {"fused", "foreach", "capturable", "differentiable", "decoupled_weight_decay"}
_OF_A_SCHEDULE = {"verbose", "_get_lr_called_within_step", "_is_initial"}  # differ among versions of torch


@dataclass
class Taken:
    """What a run takes over from a checkpoint without `rank-N.json`, beside weights, log and step."""

    parts: list[str] = field(default_factory=list)  # names of what was taken
    lacks: list[str] = field(default_factory=list)  # what was not, each with the reason
    rng: dict[str, Any] | None = None  # the random numbers, for `posttrain.core.data.rng.set_rng_state`


def take(
    checkpoint: Path,
    optimizer: torch.optim.Optimizer | None,
    lr_scheduler: Any,
    scaler: Any,
    *,
    rank: int = 0,
    world_size: int = 1,
    allow_pickle: bool = False,
) -> Taken:
    """Load optimizer, schedule and loss scaler from `checkpoint` as far as they fit this run, with the random numbers
    of process `rank`. The optimizer is None where it cannot be loaded from whole tensors, the scaler where the run is
    not in float16. Files that the restricted reader refuses are read with `allow_pickle`; they can run any code. Raises
    a `CheckpointError` for a damaged file.
    """
    taken = Taken()

    def part(name: str, file: str, load: Callable[[Any], Any]) -> None:
        path = checkpoint / file
        why_not = "there is none" if not path.is_file() else _attempt(path, load, allow_pickle)
        (taken.lacks if why_not else taken.parts).append(f"the {name} ({why_not})" if why_not else name)

    def keep(saved: Any) -> None:
        taken.rng = random_numbers(saved)

    if optimizer is None:
        taken.lacks.append("the optimizer (this run's holds its parameters in parts)")
    else:
        part("optimizer", OPTIMIZER, lambda saved: load_optimizer(saved, optimizer))
    if "optimizer" in taken.parts:  # which holds the learning rate of the next step
        part("schedule", SCHEDULE, lambda saved: load_schedule(saved, lr_scheduler))
    if scaler is not None:
        part("loss scale", SCALER, scaler.load_state_dict)
    saved_by = len(list(checkpoint.glob("rng_state*.pth")))
    if saved_by == world_size or not saved_by:
        part("random numbers", "rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth", keep)
    else:
        taken.lacks.append(f"the random numbers (saved by {saved_by} processes, and this run has {world_size})")
    return taken


class _Misfit(Exception):
    """Why a state is of no use to this run."""


def _attempt(path: Path, load: Callable[[Any], Any], allow_pickle: bool) -> str | None:
    """Why `path` cannot be taken; None if it was."""
    try:
        load(read(path, allow_pickle))
    except (_Misfit, pickle.UnpicklingError) as error:
        return str(error)
    except KeyError as error:
        return f"it holds no {error}"
    return None


def read(path: Path, allow_pickle: bool = False) -> Any:
    """What ``torch.save`` wrote to `path`, on the CPU. Raises a `pickle.UnpicklingError` where it names classes or
    functions that the restricted reader refuses, and a `CheckpointError` where it is damaged.
    """
    try:
        with torch.serialization.safe_globals(_of_numpy()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if allow_pickle:
            return torch.load(path, map_location="cpu", weights_only=False)
        raise pickle.UnpicklingError(
            f"{path.name} holds Python objects: {_named(path)}. If you trust who wrote it, set allow_pickle=True"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error).splitlines()[0]}") from error


def _named(path: Path) -> str:
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (ValueError, RuntimeError, pickle.UnpicklingError):  # of torch's old format
        return "classes of its own"
    numpys = {f"{one.__module__}.{one.__name__}" for one in _of_numpy()}
    return ", ".join(sorted(set(unsafe) - numpys)[:5]) or "classes of its own"


def _of_numpy() -> list[Any]:
    """What the state of numpy's generator consists of; none of it runs code."""
    core = getattr(np, "_core", None) or np.core  # numpy 2, numpy 1
    return [core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]


def load_optimizer(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Load the state and the options that another trainer saved, parameter by parameter in the order of the groups."""
    theirs, ours = saved["param_groups"], optimizer.param_groups
    sizes = [[len(group["params"]) for group in groups] for groups in (theirs, ours)]
    if sizes[0] != sizes[1]:
        raise _Misfit(f"it has groups of {sizes[0]} parameters, and that of this run of {sizes[1]}")
    groups = []
    for their, our in zip(theirs, ours, strict=True):
        if strange := (set(their) ^ set(our)) - _KERNELS - {"initial_lr"}:
            raise _Misfit(f"it is not a {type(optimizer).__name__}, going by {', '.join(sorted(strange))}")
        groups.append(our | {name: value for name, value in their.items() if name in our and name not in _KERNELS})
    numbers = [number for group in theirs for number in group["params"]]
    for number, parameter in zip(numbers, [p for group in ours for p in group["params"]], strict=True):
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"):
            value = saved["state"].get(number, {}).get(name)
            if value is not None and value.shape != parameter.shape:
                raise _Misfit(
                    f"its parameter {number} has the shape {tuple(value.shape)}, and here {tuple(parameter.shape)}"
                )
    sharded.load_optimizer({**saved, "param_groups": groups}, optimizer)


def load_schedule(saved: dict[str, Any], lr_scheduler: Any) -> None:
    """Load the position of a schedule; its curve is that of this run."""
    own = lr_scheduler.state_dict()
    if strange := (set(saved) ^ set(own)) - _OF_A_SCHEDULE:
        raise _Misfit(f"it is not a {type(lr_scheduler).__name__}, going by {', '.join(sorted(strange))}")
    lr_scheduler.load_state_dict({n: own[n] if n == "lr_lambdas" else saved.get(n, own[n]) for n in own})


def random_numbers(saved: dict[str, Any]) -> dict[str, Any]:
    """The state of the generators as `posttrain.core.data.rng.rng_state` gives it."""
    version, words, gauss_next = saved["python"]
    tree = {
        "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss_next": gauss_next},
        "numpy": saved["numpy"],
        "torch": saved["cpu"],
        CUDA: [],
    }
    devices = {kind: saved[kind] for kind in KINDS if saved.get(kind) is not None}
    return tree | {kind: list(s) if isinstance(s, (list, tuple)) else [s] for kind, s in devices.items()}


def write(checkpoint: Path, optimizer: torch.optim.Optimizer, lr_scheduler: Any, dist: Any) -> None:
    """Write optimizer and schedule for `take`, from the main process. Raises a `CheckpointError` where processes hold
    parts of them.
    """
    if dist.shards or dist.uses_deepspeed:
        raise CheckpointError(
            "_save_optimizer_and_scheduler: the optimizer is divided over the processes. Let your _save_checkpoint "
            "call super()._save_checkpoint(model, trial), and write your own files beside."
        )
    if dist.is_main:
        torch.save(optimizer.state_dict(), checkpoint / OPTIMIZER)
        own = lr_scheduler.state_dict()
        torch.save({n: [None] * len(own[n]) if n == "lr_lambdas" else own[n] for n in own}, checkpoint / SCHEDULE)


def write_random_numbers(checkpoint: Path, dist: Any) -> None:
    """Write the state of this process' generators for `take`."""
    state = rng.rng_state()
    own = state.pop("python")
    theirs = {"python": (own["version"], tuple(own["words"].tolist()), own["gauss_next"]), "cpu": state.pop("torch")}
    name = "rng_state.pth" if dist.num_processes == 1 else f"rng_state_{dist.process_index}.pth"
    torch.save(theirs | {kind: saved for kind, saved in state.items() if len(saved)}, checkpoint / name)
