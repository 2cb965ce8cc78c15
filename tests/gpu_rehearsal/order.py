"""Which work of an emulated device comes after which: streams, events and what the host has waited for.

Work on one stream runs in the order in which it was given. Between streams, and between a stream and the host, only
waiting orders it: each stream, event and the host hold a clock, the number of pieces of work of each stream that are
done before (Mattern 1989, vector clocks). `OrderError` is raised where work reads what other work writes, or writes
what other work reads or writes, and neither comes after the other.

All threads share the host's clock: they are taken to tell each other what they have waited for.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

Clock = dict[int, int]


class OrderError(RuntimeError):
    """Two accesses to the same memory, one of them a write, run in no certain order."""


@dataclass(frozen=True)
class Access:
    """What a piece of work does to memory: the number of its stream, its number there, what it is, and where."""

    stream: int
    tick: int
    name: str
    place: str

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.tick


@dataclass
class Memory:
    """A storage: the stream on which it was made, the last write, the reads since, and streams it is kept for."""

    made_on: int
    written: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)
    kept_for: set[int] = field(default_factory=set)


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in list(other.items()):
        clock[stream] = max(clock.get(stream, 0), tick)


class Order:
    """Of one device.

    Args:
        waited: called where the host waits.
    """

    def __init__(self, waited: Callable[[str], None]) -> None:
        self.waited = waited
        self.host: Clock = {}
        self.late: list[str] = []
        self._numbers = itertools.count()
        self._memory: dict[int, Memory] = {}
        self._on_host: dict[int, Memory] = {}
        self._streams: dict[int, Stream] = {}
        self._entered = threading.local()
        #: What ``torch.Stream`` and ``torch.Event`` are here.
        self.Stream = type("Stream", (Stream,), {"__init__": lambda new, *a, **k: Stream.__init__(new, self)})
        self.Event = type("Event", (Event,), {"__init__": lambda new, *a, **k: Event.__init__(new, self)})
        self.default = Stream(self)

    @property
    def current(self) -> Stream:
        """The stream of this thread."""
        entered = getattr(self._entered, "streams", None)
        return entered[-1] if entered else self.default

    # ------------------------------------------------------------------------------------------------ work

    def work(self, name: str, reads: Iterable[int], writes: Iterable[int], host_reads=(), host_writes=()) -> None:
        """A piece of work on the current stream. The numbers are of storages of the device, and of the host.

        Raises:
            OrderError: it comes neither before nor after work on the same memory.
        """
        stream = self.current
        _join(stream.clock, self.host)
        stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        access = Access(stream.number, stream.clock[stream.number], name, _place())
        for table, read, written in ((self._memory, reads, writes), (self._on_host, host_reads, host_writes)):
            for key in read:
                self._read(table, key, access, stream.clock)
            for key in written:
                self._write(table, key, access, stream.clock)

    def _read(self, table: dict[int, Memory], key: int, access: Access, clock: Clock) -> None:
        memory = table.setdefault(key, Memory(access.stream))
        if memory.written is not None and not memory.written.is_before(clock):
            raise _unordered(access, "reads", memory.written, "writes")
        memory.reads[access.stream] = access

    def _write(self, table: dict[int, Memory], key: int, access: Access, clock: Clock) -> None:
        memory = table.setdefault(key, Memory(access.stream))
        for other, does in [(memory.written, "writes"), *((read, "reads") for read in memory.reads.values())]:
            if other is not None and other.stream != access.stream and not other.is_before(clock):
                raise _unordered(access, "writes", other, does)
        memory.written, memory.reads = access, {}

    def on_host(self, name: str, reads: Iterable[int], writes: Iterable[int]) -> None:
        """The host computes, now.

        Raises:
            OrderError: a copy to or from that memory may still run.
        """
        if not self._on_host:
            return
        writes = set(writes)
        for key in {*reads, *writes}:
            if (memory := self._on_host.get(key)) is None:
                continue
            pending = [memory.written] if memory.written is not None else []
            pending += memory.reads.values() if key in writes else []
            access = Access(-1, 0, name, _place())
            for other in pending:
                if not other.is_before(self.host):
                    does = "writes" if other is memory.written else "reads"
                    raise _unordered(access, "writes" if key in writes else "reads", other, does)

    def freed(self, key: int) -> None:
        """Memory of the device is given back to the stream on which it was made."""
        if (memory := self._memory.pop(key, None)) is None:
            return
        clock = dict(self._streams[memory.made_on].clock)
        _join(clock, self.host)
        for access in [*memory.reads.values(), *([memory.written] if memory.written else [])]:
            if access.stream not in memory.kept_for and not access.is_before(clock):
                self.late.append(
                    f"{access.name} at {access.place} may still use memory that is given back: it runs on another "
                    "stream than the one that the memory is of. Call record_stream, or let that stream wait."
                )

    def freed_on_host(self, key: int) -> None:
        self._on_host.pop(key, None)

    def keep(self, key: int, stream: Stream) -> None:
        """``record_stream``: the memory is not given back before the stream's work is done."""
        self._memory.setdefault(key, Memory(stream.number)).kept_for.add(stream.number)

    def synchronize(self) -> None:
        """The host waits for all streams."""
        self.waited("synchronize")
        for stream in self._streams.values():
            _join(self.host, stream.clock)

    def host_waits(self) -> None:
        """The host waits for the current stream."""
        _join(self.host, self.current.clock)


class Stream:
    """As ``torch.Stream`` and ``torch.cuda.Stream``."""

    cuda_stream = stream_id = device_index = device_type = 0

    def __init__(self, order: Order) -> None:
        self.order, self.clock, self.number = order, {}, next(order._numbers)
        _join(self.clock, order.host)
        order._streams[self.number] = self

    def __enter__(self) -> Stream:
        if not hasattr(self.order._entered, "streams"):
            self.order._entered.streams = []
        self.order._entered.streams.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        self.order._entered.streams.pop()

    def wait_stream(self, other: Stream) -> None:
        _join(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        _join(self.clock, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.order)
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.order.waited("synchronize")
        _join(self.order.host, self.clock)

    def query(self) -> bool:
        _join(self.order.host, self.clock)
        return True


class Event:
    """As ``torch.Event`` and ``torch.cuda.Event``."""

    def __init__(self, order: Order) -> None:
        self.order, self.clock = order, {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or self.order.current).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.order.current).wait_event(self)

    def synchronize(self) -> None:
        self.order.waited("synchronize")
        _join(self.order.host, self.clock)

    def query(self) -> bool:
        _join(self.order.host, self.clock)
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0


def _unordered(access: Access, does: str, other: Access, did: str) -> OrderError:
    on = "the host" if access.stream < 0 else f"stream {access.stream}"
    return OrderError(
        f"{access.name} at {access.place} {does}, on {on}, what {other.name} at {other.place} {did} on stream "
        f"{other.stream}, and nothing makes one wait for the other."
    )


def _place() -> str:
    """The innermost line outside torch and the emulation."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and "/gpu_rehearsal/order.py" not in path and "emulated_cuda.py" not in path:
            return f"{'/'.join(path.split('/')[-3:])}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"
