"""The processes of a run: starts them, and says which one this is, on which device and at what precision."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from posttrain.core.data import accelerator
from posttrain.core.distributed import attempts
from posttrain.core.distributed.arguments import DistributedArguments, note
from posttrain.core.distributed.environment import (
    accelerator_present,
    device,
    forget_another_device,
    lost_processes,
    precision,
    without_plugins,
)
from posttrain.core.distributed.waits import Waits
from posttrain.core.distributed.watchdog import FOLDER, Watchdog, report_failures
from posttrain.core.errors import ConfigError

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

# The watchdog ends a wait for another process, because it knows who waits for whom; torch's limit is longer.
GRACE = 20

# Entered several times in every step; one can be entered again and again.
NOTHING = contextlib.nullcontext()


_watchdog: Watchdog | None = None  # one for the process, as the process group is
_waits: Waits | None = None


def _leave_group(destroy: bool = True) -> None:
    """Leave the processes of the run at exit. `destroy`: the process group, for gloo's threads may abort the program
    afterwards."""
    global _watchdog, _waits
    if _watchdog is not None:
        _watchdog.stop()
        _watchdog = _waits = None
        accelerator.waiting = contextlib.nullcontext
    if destroy and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _waiting_for_device(watchdog: Watchdog) -> contextlib.AbstractContextManager[Any]:
    """The watchdog watches the main thread; others, of rollouts in the background, must not end its contexts."""
    is_main = threading.current_thread() is threading.main_thread()
    return watchdog("what the device computes with the others") if is_main else NOTHING


def _watch(args: DistributedArguments, rank: int, local_rank: int, world_size: int) -> Watchdog:
    """The watchdog of this process, started if necessary."""
    global _watchdog, _waits
    if _watchdog is None or _waits is None or not _watchdog.is_alive():
        from torch.distributed.distributed_c10d import _get_default_store

        folder = Path(getattr(args, "output_dir", None) or ".") / FOLDER
        first, here = rank - local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        beside = [other for other in range(first, first + here) if other != rank]
        _watchdog = Watchdog(_get_default_store(), rank, world_size, args.ddp_timeout, folder, beside=beside)
        _watchdog.start()
        accelerator.waiting = functools.partial(_waiting_for_device, _watchdog)
        _waits = Waits(_watchdog.store, rank, world_size, args.ddp_timeout)
    _watchdog.seconds = _waits.seconds = args.ddp_timeout
    return _watchdog


def start_processes(args: DistributedArguments, gathers_on_host: bool) -> Accelerator:
    """Start the process group, if the launcher started several processes, with one on the host where weights in host
    memory are gathered there (`gathers_on_host`), which nccl cannot do. Raises a `ConfigError` where the launcher sets
    a precision that this machine lacks."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, InitProcessGroupKwargs

    if precision(args) == "fp16" and (args.use_cpu or not accelerator_present()):
        raise ConfigError("TrainingArguments", ["the launcher sets fp16, but this run is on the CPU"])
    if (lost := lost_processes()) is not None:
        logger.warning(lost)
    backend = args.ddp_backend
    if backend is None and gathers_on_host and torch.cuda.is_available() and not args.use_cpu:
        backend = "cpu:gloo,cuda:nccl"
    group = InitProcessGroupKwargs(backend, attempts.init_method(), timedelta(seconds=args.ddp_timeout + GRACE))
    # `Distributed.autocast` handles autocast, because accelerate would patch the forward of the user's model. Its
    # precision is not set, because all accelerators of a process share it. Its accumulation is not set either: its
    # backward, which old training_steps call, would divide the loss again.
    forget_another_device(device(args.use_cpu))
    # For loaders that a subclass prepares itself. Their batch sizes are divided already (`split_batches`).
    own: Any = args
    names = ("dispatch_batches", "even_batches", "use_seedable_sampler")
    loaders = DataLoaderConfiguration(data_seed=own.data_seed, **{name: own.accelerator_config[name] for name in names})
    with without_plugins():
        return Accelerator(cpu=args.use_cpu or None, kwargs_handlers=[group], dataloader_config=loaders)


class World:
    """The processes of a run, and the place of this one among them.

    Args:
        args: the arguments of the run.
        accelerator: of `start_processes`.
        sizes: of the groups of processes, by name (`division.sizes_of_run`).

    Attributes:
        process_index, num_processes: of this process, among all.
        local_rank: of this process on its machine.
        is_main, is_local_main: whether it is the first of all, or of its machine.
        rank, world_size: of its rows, among as many parts. Processes that split a matrix (tensor parallelism) or a row
            (context parallelism) read the same rows and have the same rank: a run of two such processes has a world
            size of 1.
        peer_rank, peers: of this process among those that read the same rows.
        tp_size, cp_size: processes that split a matrix, or a row; one of them is 1.
        ep_size: processes that have all experts of a mixture between them. They read rows of their own, but those that
            also split a matrix.
        precision: ``"bf16"``, ``"fp16"`` or ``"no"``.
    """

    def __init__(self, args: DistributedArguments, accelerator: Accelerator, sizes: dict[str, int]) -> None:
        self.args, self.accelerator, self.precision = args, accelerator, precision(args)
        self.device: torch.device = accelerator.device
        self.process_index: int = accelerator.process_index
        self.num_processes: int = accelerator.num_processes
        self.local_rank: int = accelerator.local_process_index
        self.is_main, self.is_local_main = self.process_index == 0, self.local_rank == 0
        self.tp_size, self.cp_size, self.ep_size = (sizes.get(name, 1) for name in ("tp_size", "cp_size", "ep_size"))
        self.peers = self.tp_size * self.cp_size
        self.rank, self.peer_rank = divmod(self.process_index, self.peers)
        self.world_size = self.num_processes // self.peers
        if args.global_batch_size and (text := note(args.global_batch_size, self.world_size)):
            logger.warning(text)
        self._waiting: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self._waits: Waits | None = None
        if self.num_processes > 1:
            self._waiting, self._waits = _watch(args, self.process_index, self.local_rank, self.num_processes), _waits
            report_failures()
            atexit.unregister(_leave_group)
            atexit.register(_leave_group, destroy=self.device.type == "cpu")
        if args.tf32 is not None and torch.cuda.is_available():
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32

    def empty_cache(self) -> None:
        """Give cached device memory back; nothing to do on the CPU."""
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
