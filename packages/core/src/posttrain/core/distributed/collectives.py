"""Sums, gatherings and meetings of the processes of a run. In a run of one process they return what they are given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from posttrain.core.distributed.waits import LostProcessError, portable
from posttrain.core.distributed.watchdog import Watchdog
from posttrain.core.distributed.world import World
from posttrain.core.losses.normalization import scalar

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


class Collectives(World):
    """What the processes of a run tell each other, and where they wait for each other."""

    _rows_group: Any = None
    """The processes that read other rows than this one, with itself; None: all."""
    _peers_group: Any = None
    """The processes that read the same rows; None: all."""

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
        on the host's side beside its own."""
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

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the first of the processes that read the same rows; its result, or its error, on all of them.
        For what need not come out alike twice, such as a reward that a model gives."""
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
        store. They may come hours apart: `ddp_timeout` does not count here. The log describes the wait by `what`."""
        return [value] if self._waits is None else self._waits.gather(value, what)

    def meet(self, what: str = "that all come here") -> None:
        """Wait until every process is here, however long that takes."""
        self.gather_patiently(None, what)

    def all_come(self, name: str, seconds: float = 30) -> bool:
        """Whether every process comes here with the same `name` within `seconds`, as after an error on all of them."""
        return self._waits is None or self._waits.all_come(name, seconds)

    @contextlib.contextmanager
    def main_first(self, local: bool = False) -> Iterator[None]:
        """Rank 0 runs the block before all others, or the first of each machine if `local`, so that they read what it
        writes. All continue when all have run it; an error of one is raised on all."""
        if self._waits is None:
            yield
            return
        leader, waits, error = self.process_index - self.local_rank if local else 0, self._waits, None
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
        if self._waits is None:
            return work()
        name = self._waits.next()
        if not self.is_main:
            result, error = self._waits.hear(name, 0, what)
        else:
            result, error = None, None
            try:
                result = work()
            except Exception as caught:
                error = caught
            self._waits.tell(name, (result, portable(error)))
        if error is not None:
            raise error
        return result
