"""Counts what one process computes and exchanges with the others in an optimizer step, without these others.

A memory plan runs a step over processes that are not there (`posttrain.cli.tools.memory_mesh`). Every collective that
FSDP, tensor, context and expert parallelism begin in it is counted here, with the size of its message and the processes
that take part. Seconds are those of a ring, whose slowest link bounds it: in an all-gather, a reduce-scatter and an
all-to-all of n processes each sends (n - 1) / n of the message, in an all-reduce twice that (Patarasuk and Yuan 2009,
Bandwidth optimal all-reduce algorithms, section 3).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from posttrain.core.models.wrapping import setting

#: The kinds of collectives, as the names of their operations hold them, without the dashes.
KINDS = ("reduce-scatter", "all-reduce", "all-gather", "all-to-all", "broadcast")


def _of_attention(query: Any, key: Any, value: Any, dropout: float = 0.0, causal: bool = False, **_: Any) -> float:
    """Of two products of (B, H, T, D) queries with (B, H, S, D) keys and values; causal, of half of them."""
    return float(query.numel() * key.shape[2] * (2 if causal else 4))


def _of_its_gradients(grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, *rule: Any, **_: Any) -> float:
    return 2.5 * _of_attention(query, key, value, *rule)  # five products, of which one is computed again


def head_size(text: Any) -> int:
    """Of attention; `text` is a config of transformers."""
    return int(setting(text, "head_dim") or text.hidden_size // text.num_attention_heads)


def of_pairs(text: Any, pairs: float, forwards: int) -> int:
    """Operations of attention for `pairs` of tokens, in so many forward passes and one backward pass."""
    return int(4 * (forwards + 2.5) * text.num_hidden_layers * text.num_attention_heads * head_size(text) * pairs)


#: Floating-point operations of an operation on tensors; torch's table leaves out the product that is added in place,
#: and attention on the CPU.
FLOPS: dict[Any, Callable[..., float]] = {
    **flop_registry,
    torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _of_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _of_its_gradients,
}


@dataclass(frozen=True)
class Exchange:
    """The collectives of one kind among the same processes.

    Attributes:
        kind: such as ``"all-gather"``. ranks: of the processes.
        calls: number of them. size: bytes of their messages: the whole that is gathered, reduced or exchanged.
    """

    kind: str
    ranks: tuple[int, ...]
    calls: float
    size: float

    @property
    def sent(self) -> float:
        """Bytes that each process sends in a ring."""
        times = 2 if self.kind == "all-reduce" else 1
        return times * self.size * (len(self.ranks) - 1) / len(self.ranks)

    def is_inside(self, per_machine: int) -> bool:
        """Whether all of its processes are on one machine, each of which has `per_machine`."""
        return len({rank // per_machine for rank in self.ranks}) == 1


class Traffic(TorchDispatchMode):
    """Counts collectives and floating-point operations while it is entered.

    Attributes:
        exchanges: by kind and processes. operations: of matrix products and attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: dict[tuple[str, tuple[int, ...]], Exchange] = {}
        self.operations = 0.0
        self._times = 1.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = str(func).replace("_", "")
            kind = next((kind for kind in KINDS if kind.replace("-", "") in name), None)
            if kind is not None:
                tensors = [one for one in tree_leaves([args, found]) if isinstance(one, torch.Tensor)]
                self.add(kind, _ranks(args), max((one.nbytes for one in tensors), default=0))
        elif (count := FLOPS.get(func._overloadpacket)) is not None:
            self.operations += self._times * count(*args, **(kwargs or {}), out_val=found)
        return found

    def add(self, kind: str, ranks: tuple[int, ...], size: float, calls: float = 1) -> None:
        """Count `calls` collectives with messages of `size` bytes in all. A process alone exchanges nothing."""
        if len(ranks) > 1:
            before = self.exchanges.get((kind, ranks), Exchange(kind, ranks, 0, 0))
            more, bytes_more = calls * self._times, size * self._times
            self.exchanges[kind, ranks] = replace(before, calls=before.calls + more, size=before.size + bytes_more)

    @staticmethod
    @contextlib.contextmanager
    def times(number: float) -> Iterator[None]:
        """What happens in here counts so many times, wherever it is counted."""
        counting = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Traffic)]
        for one in counting:
            one._times *= number
        try:
            yield
        finally:
            for one in counting:
                one._times /= number


def _ranks(args: tuple[Any, ...]) -> tuple[int, ...]:
    """The processes of the group among the arguments of a collective, which is there as an object or by its name."""
    from torch.distributed import ProcessGroup, get_process_group_ranks
    from torch.distributed.distributed_c10d import _resolve_process_group

    for one in args:
        if isinstance(one, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):  # the reduction is such an object too
                return tuple(get_process_group_ranks(ProcessGroup.unbox(one)))
    return tuple(get_process_group_ranks(_resolve_process_group(args[-1])))


@dataclass(frozen=True)
class Links:
    """What a cluster can do.

    Args:
        per_machine: devices of a machine.
        inside, between: bytes a second that a device sends to others of its machine, and to other machines.
        operations: floating-point operations a second of a device, as they are reached.
    """

    per_machine: int = 8
    inside: float = 450e9
    between: float = 50e9
    operations: float = 400e12

    def seconds(self, exchange: Exchange) -> float:
        """How long the collectives of `exchange` take if nothing else uses the links."""
        return exchange.sent / (self.inside if exchange.is_inside(self.per_machine) else self.between)


def table(exchanges: tuple[Exchange, ...], operations: float, links: Links, timed: bool = True) -> str:
    """What a step computes and exchanges, and which bounds it, as lines. `timed`: whether `links` know the device."""
    computing, sending = operations / links.operations, sum(map(links.seconds, exchanges))
    seconds = f", which takes {_seconds(computing)} at {_number(links.operations, 1e12)} TFLOP/s (--tflops)"
    computes = f"In an optimizer step each process computes {_number(operations, 1e12)} TFLOP{seconds * timed}."
    if not exchanges:
        return f"{computes}\n"
    lines = [computes, "It exchanges:", ""]
    for one in sorted(exchanges, key=links.seconds, reverse=True):
        place = "in one machine" if one.is_inside(links.per_machine) else "between machines"
        among = f"{len(one.ranks):,} processes, {place}"
        lines.append(
            f"  {one.kind:<15}{among:<34}{one.calls:>7,.0f} calls{_number(one.size, 1e9):>11} GB"
            f"{_seconds(links.seconds(one)):>11}"
        )
    bound = "computing" if computing >= sending else "communication"
    lines += [
        "",
        f"All of it takes {_seconds(sending)} at {_number(links.inside, 1e9)} GB/s in a machine and "
        f"{_number(links.between, 1e9)} GB/s between machines. If both overlap, {bound} bounds the step.",
        "",
    ]
    return "\n".join(lines)


def _number(value: float, unit: float) -> str:
    return f"{value / unit:,.3g}" if value < 1000 * unit else f"{value / unit:,.0f}"


def _seconds(value: float) -> str:
    return f"{value:,.2f} s" if value >= 1 else f"{1000 * value:,.3g} ms"
