"""The processes of a run: starts them, says which one this is, on which device and at what precision, and has their
sums, gatherings and meetings. In a run of one process these return what they are given.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from posttrain.core.data import accelerator, batches
from posttrain.core.distributed import environment
from posttrain.core.distributed.arguments import DistributedArguments, note
from posttrain.core.distributed.waits import LostProcessError, Waits, init_method, portable
from posttrain.core.distributed.watchdog import FOLDER, Watchdog, report_failures
from posttrain.core.errors import ConfigError
from posttrain.core.losses.normalization import scalar

if TYPE_CHECKING:
    from posttrain.core.distributed.uneven import UnevenAccelerator
    from posttrain.core.logging.metrics import Metrics

logger = logging.getLogger(__name__)

# The watchdog ends a wait for another process, because it knows who waits for whom; torch's limit is longer.
GRACE = 20

# Entered several times in every step; one can be entered again and again.
NOTHING = contextlib.nullcontext()


_watchdog: Watchdog | None = None  # one for the process, as the process group is
_waits: Waits | None = None


def _leave_group(destroy: bool = True) -> None:
    """Leave the processes at exit; `destroy` the group, for gloo's threads may abort the program afterwards."""
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

        folder = Path(vars(args).get("output_dir") or ".") / FOLDER
        first, here = rank - local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        beside = [other for other in range(first, first + here) if other != rank]
        _watchdog = Watchdog(_get_default_store(), rank, world_size, args.ddp_timeout, folder, beside=beside)
        _watchdog.start()
        accelerator.waiting = functools.partial(_waiting_for_device, _watchdog)
        _waits = Waits(_watchdog.store, rank, world_size, args.ddp_timeout)
    _watchdog.seconds = _waits.seconds = args.ddp_timeout
    return _watchdog


def start_processes(args: DistributedArguments, gathers_on_host: bool) -> UnevenAccelerator:
    """Start the process group, if the launcher started several processes, with one on the host where weights in host
    memory are gathered there (`gathers_on_host`), which nccl cannot do. Raises a `ConfigError` where the launcher sets
    a precision that this machine lacks, or ``use_configured_state`` finds another one than the arguments'.
    """
    from accelerate.state import AcceleratorState
    from accelerate.utils import DataLoaderConfiguration, InitProcessGroupKwargs

    from posttrain.core.distributed.uneven import UnevenAccelerator

    own: Any = args
    configured = AcceleratorState._shared_state.get("_mixed_precision", "no")
    if own.accelerator_config["use_configured_state"] and configured not in ("no", environment.precision(args)):
        problem = (
            f"use_configured_state=True: accelerate's state has mixed_precision={configured!r}; set {configured}=True"
        )
        raise ConfigError("TrainingArguments", [f"accelerator_config: {problem}"])
    if environment.precision(args) == "fp16" and (args.use_cpu or not environment.accelerator_present()):
        raise ConfigError("TrainingArguments", ["the launcher sets fp16, but this run is on the CPU"])
    if (lost := environment.lost_processes()) is not None:
        logger.warning(lost)
    backend = args.ddp_backend
    if backend is None and gathers_on_host and torch.cuda.is_available() and not args.use_cpu:
        backend = "cpu:gloo,cuda:nccl"
    group = InitProcessGroupKwargs(backend, init_method(), timedelta(seconds=args.ddp_timeout + GRACE))
    # `Distributed.autocast` handles autocast, because accelerate would patch the forward of the user's model. Its
    # precision is not set, because all accelerators of a process share it. Its accumulation is not set either: its
    # backward, which old training_steps call, would divide the loss again.
    place = environment.device(args.use_cpu)
    environment.forget_another_device(place)
    # For loaders that a subclass prepares itself. Their batch sizes are divided already (`split_batches`).
    names = ("dispatch_batches", "even_batches", "use_seedable_sampler")
    loaders = DataLoaderConfiguration(data_seed=own.data_seed, **{name: own.accelerator_config[name] for name in names})
    on_cpu = place.type == "cpu" or None  # without it, accelerate joins no processes on the CPU
    with environment.without_plugins():
        return UnevenAccelerator(cpu=on_cpu, kwargs_handlers=[group], dataloader_config=loaders)


#: Whether forwards compute whole rows, where processes could split them.
WHOLE_ROWS: ContextVar[bool] = ContextVar("whether forwards compute whole rows", default=False)


@contextlib.contextmanager
def whole_rows() -> Iterator[None]:
    """Within this context each process computes whole rows, and need not keep in step with the others."""
    token = WHOLE_ROWS.set(True)
    try:
        yield
    finally:
        WHOLE_ROWS.reset(token)


class Maximum:
    """The maximum of each of `numbers` over the processes, computed asynchronously.

    It uses the default process group: over the host's network if that supports CPU tensors, else on the device.
    """

    def __init__(self, numbers: list[int], device: torch.device) -> None:
        self._numbers, self._event = torch.tensor(numbers), None
        maximum, on_host = torch.distributed.ReduceOp.MAX, "cpu:gloo" in torch.distributed.get_backend_config()
        if on_host or device.type == "cpu":
            self._work = torch.distributed.all_reduce(self._numbers, maximum, async_op=True)
            return
        self._on_device = self._numbers.pin_memory().to(device, non_blocking=True)
        work = torch.distributed.all_reduce(self._on_device, maximum, async_op=True)
        self._numbers = self._numbers.pin_memory()
        beside = torch.Stream(device=device)
        with beside:
            work.wait()  # this stream does, not the host
            self._numbers.copy_(self._on_device, non_blocking=True)
            self._event = beside.record_event()

    def read(self) -> list[int]:
        """The largest, once they are here: as a rule they are, since one is read when the next is begun."""
        self._work.wait() if self._event is None else self._event.synchronize()
        return self._numbers.tolist()


class World:
    """The processes of a run, the place of this one among them, what they tell each other, and where they wait.

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
        sp_size: of those that split a matrix, those with the tokens of a row between matrices: all, or 1.
        ep_size: processes that have all experts of a mixture between them. They read rows of their own, but those that
            also split a matrix.
        precision: ``"bf16"``, ``"fp16"`` or ``"no"``.
    """

    _rows_group: Any = None
    """The processes that read other rows than this one, with itself; None: all."""
    _peers_group: Any = None
    """The processes that read the same rows; None: all."""

    def __init__(self, args: DistributedArguments, accelerator: UnevenAccelerator, sizes: dict[str, int]) -> None:
        self.args, self.accelerator, self.precision = args, accelerator, environment.precision(args)
        self.device: torch.device = accelerator.device
        self.process_index: int = accelerator.process_index
        self.num_processes: int = accelerator.num_processes
        self.local_rank: int = accelerator.local_process_index
        self.is_main, self.is_local_main = self.process_index == 0, self.local_rank == 0
        self.tp_size, self.cp_size, self.ep_size = (sizes.get(name, 1) for name in ("tp_size", "cp_size", "ep_size"))
        self.sp_size = sizes.get("sp_size", 1)
        self.peers = self.tp_size * self.cp_size
        self.rank, self.peer_rank = divmod(self.process_index, self.peers)
        self.world_size = self.num_processes // self.peers
        if args.global_batch_size and (text := note(args.global_batch_size, self.world_size)):
            logger.warning(text)
        self._waiting: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.waits: Waits | None = None
        if self.num_processes > 1:
            self._waiting, self.waits = _watch(args, self.process_index, self.local_rank, self.num_processes), _waits
            report_failures()
            atexit.unregister(_leave_group)
            atexit.register(_leave_group, destroy=self.device.type == "cpu")
        if args.tf32 is not None and torch.cuda.is_available():
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32

    def empty_cache(self) -> None:
        """Give cached device memory back; nothing to do on the CPU."""
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def enter_step(self, step: int, batches: int) -> None:
        """Optimizer step `step` begins, from 1, `batches` into the epoch: where the processes hang, each says so."""
        if isinstance(self._waiting, Watchdog):
            self._waiting.step, self._waiting.batches = step, batches

    def seconds_waited(self) -> float:
        """How long this process has waited for the others so far, within steps and evaluations."""
        return self._waiting.waited if isinstance(self._waiting, Watchdog) else 0.0

    def sum(self, value: Any) -> Any:
        """The sum of a number or tensor over all parts of the rows; the value itself where there is one part."""
        if self.world_size == 1:
            return value
        total = scalar(value, self.device) if isinstance(value, (int, float)) else value.to(self.device)
        total = total.clone()
        with self._waiting("a sum"):
            torch.distributed.all_reduce(total, group=self._rows_group)
        return total

    def highest(self, numbers: list[int]) -> list[int]:
        """The largest of each of `numbers` over all processes. Waits for them, but not for a device that has a network
        on the host's side beside its own.
        """
        if self.num_processes == 1:
            return numbers
        with self._waiting("the largest of some numbers"):
            return Maximum(numbers, self.device).read()

    def gather_object(self, value: Any) -> list[Any]:
        """What every process passed, in rank order, on every process; of those that read the same rows, one."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self._waiting("a gathering of values"):
            torch.distributed.all_gather_object(values, value, group=self._rows_group)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """What the main process passed, on every process."""
        if self.num_processes == 1:
            return value
        values = [value]
        with self._waiting("what rank 0 says"):
            torch.distributed.broadcast_object_list(values, src=0)
        return values[0]

    @contextlib.contextmanager
    def computing(self, batch: Any, metrics: Metrics) -> Iterator[None]:
        """Within this context the process computes `batch`. Of one that only keeps it in step, metrics, and rows that
        scripts gather for metrics, count for nothing; nor do rows that are repeated.
        """
        batches.PRESENT.set(batch)
        try:
            with metrics.apart() if batches.is_filler(batch) else NOTHING:
                yield
        finally:
            batches.PRESENT.kept = None

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the first of the processes that read the same rows; its result, or its error, on all of them.
        For what need not come out alike twice, such as a reward that a model gives.
        """
        if self.peers == 1:
            return work()
        values: list[Any] = [None, None]
        if self.peer_rank == 0:
            try:
                with whole_rows():
                    values[0] = work()
            except Exception as error:
                values[1] = portable(error)
        with self._waiting("work of the first of the processes that read the same rows"):
            torch.distributed.broadcast_object_list(values, group=self._peers_group, group_src=0)
        if values[1] is not None:
            raise values[1]
        return values[0]

    # ---- waits without a limit: for work that only some do, as long as it takes ----

    def gather_patiently(self, value: Any, what: str = "that all come here") -> list[Any]:
        """What every process passed, in the order of `process_index`: a small `value`, because it goes through the
        store. They may come hours apart: `ddp_timeout` does not count here. The log describes the wait by `what`.
        """
        if self.waits is None:
            return [value]
        began = time.monotonic()
        values = self.waits.gather(value, what)
        if isinstance(self._waiting, Watchdog):
            self._waiting.waited += time.monotonic() - began
        return values

    def meet(self, what: str = "that all come here") -> None:
        """Wait until every process is here, however long that takes."""
        self.gather_patiently(None, what)

    def all_come(self, name: str, seconds: float = 30) -> bool:
        """Whether every process comes here with the same `name` within `seconds`, as after an error on all of them."""
        return self.waits is None or self.waits.all_come(name, seconds)

    @contextlib.contextmanager
    def main_first(self, local: bool = False) -> Iterator[None]:
        """Rank 0 runs the block before all others, or the first of each machine if `local`, so that they read what it
        writes. All continue when all have run it; an error of one is raised on all.
        """
        if self.waits is None:
            yield
            return
        leader, waits, error = self.process_index - self.local_rank if local else 0, self.waits, None
        name, what = waits.next(), "work that is done once for all"
        if self.process_index != leader:
            error = waits.hear(name, leader, what)
        if error is None:
            try:
                yield
            except BaseException as caught:
                error = caught
                raise
            finally:
                if self.process_index == leader:
                    waits.tell(name, portable(error))
                if error is None or isinstance(error, Exception):
                    errors = waits.gather(portable(error), what)
        else:
            errors = [error] if isinstance(error, LostProcessError) else waits.gather(error, what)
        for error in filter(None, errors):
            raise error

    def on_main(self, work: Callable[[], Any], what: str = "work of the main process") -> Any:
        """Run `work` on rank 0 and return its result everywhere; an error there is raised on every rank."""
        if self.waits is None:
            return work()
        name = self.waits.next()
        if not self.is_main:
            result, error = self.waits.hear(name, 0, what)
        else:
            result, error = None, None
            try:
                result = work()
            except Exception as caught:
                error = caught
            self.waits.tell(name, (result, portable(error)))
        if error is not None:
            raise error
        return result
