"""Reads rank, device and precision from the launcher's environment, and fits accelerate's state to them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from posttrain.core.errors import ConfigError

TRUE, FALSE = ("1", "true", "yes", "y", "on", "t"), ("0", "false", "no", "n", "off", "f", "")


def is_true(value: Any) -> bool:
    """Whether a setting, perhaps written as a text such as ``"True"`` or ``"no"``, is on. Raises a `ValueError` where
    it is neither.
    """
    text = str(value).strip().lower()
    if text not in (*TRUE, *FALSE):
        raise ValueError(f"{value!r} is neither true nor false")
    return text in TRUE


def world_size() -> int:
    """Number of processes in this run; 1 where nothing was launched."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """Number of this process among all, from 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """Number of this process on its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", 0))


def accelerator_present() -> bool:
    return torch.cuda.is_available() or torch.backends.mps.is_available() or torch.accelerator.is_available()


def device(use_cpu: bool = False) -> torch.device:
    """The device of this process; a launcher's choice of the CPU (ACCELERATE_USE_CPU) holds too."""
    if use_cpu or is_true(os.environ.get("ACCELERATE_USE_CPU", "false")) or not accelerator_present():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    kind = "cuda" if torch.cuda.is_available() else "mps" if accelerator is None else accelerator.type
    return torch.device(kind, local_rank()) if kind != "mps" else torch.device("mps")


def precision(args: Any) -> str:
    """``"bf16"``, ``"fp16"`` or ``"no"``; the launcher's choice (ACCELERATE_MIXED_PRECISION) applies if args set none.
    Raises a `ConfigError` where the launcher sets another.
    """
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    chosen = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if chosen not in ("no", "bf16", "fp16"):
        here = "; set bf16=True and fp8=True in the arguments of the run instead" if chosen == "fp8" else ""
        raise ConfigError(
            "mixed_precision",
            [f"the launcher sets {chosen!r} (ACCELERATE_MIXED_PRECISION); supported are bf16, fp16 and no{here}"],
        )
    return chosen


def has_bfloat16_instructions() -> bool:
    """Whether this processor has bfloat16 instructions; True if oneDNN, which knows, is missing."""
    return not torch.backends.mkldnn.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def lost_processes(environ: Mapping[str, str] = os.environ, command: list[str] | None = None) -> str | None:
    """A warning if the launcher silently started one process instead of several, as ``accelerate launch --cpu
    --num_processes 2`` does (accelerate 1.15). Only its command line, the words that started the parent of this
    process, shows the number: `command`, looked up where it is None.
    """
    if "ACCELERATE_MIXED_PRECISION" not in environ or "RANK" in environ:
        return None
    words = _parent_command() if command is None else command
    if not any(Path(word).name == "accelerate" or word.startswith("accelerate.commands") for word in words[:4]):
        return None
    asked = 1
    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in ("-n", "--num_processes", "--num-processes"):
            value = value or (words[number + 1] if number + 1 < len(words) else "")
            asked = int(value) if value.isdigit() else asked
    if asked <= 1:
        return None
    return (
        f"accelerate launch started one process instead of {asked}, as it does on the CPU. Start with `torchrun "
        f"--nproc_per_node {asked}` or `posttrain launch --num_processes {asked}` instead."
    )


def _parent_command() -> list[str]:
    if not sys.platform.startswith("linux"):
        return []
    try:
        return Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
        return []


@contextlib.contextmanager
def without_plugins() -> Iterator[None]:
    """accelerate starts the processes but does not shard, because it rejects sharding on the CPU."""
    names = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_PARALLELISM_CONFIG")
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def forget_another_device(wanted: torch.device) -> None:
    """Let this process, if it is the only one, use another kind of device than before: accelerate keeps the first that
    it chose. It refuses the CPU after a GPU, and trains on the CPU when a GPU is asked for after that.
    """
    from accelerate.state import AcceleratorState, PartialState

    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    before = getattr(PartialState._shared_state.get("device"), "type", None)
    if before not in (None, wanted.type) and not grouped:
        AcceleratorState._reset_state(reset_partial_state=True)
