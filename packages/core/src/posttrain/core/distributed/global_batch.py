"""Deals an optimizer step of a fixed number of rows to any number of processes."""

from __future__ import annotations


def dealt(rows: int, processes: int, most: int) -> tuple[int, int]:
    """(rows of a micro-batch, micro-batches) of each process in an optimizer step of `rows` rows over all processes.

    Where `rows` cannot be dealt equally, the step holds the nearest number that can be.

    Args:
        processes: that read rows of their own. most: rows that a micro-batch may have.
    """
    each = max((2 * rows + processes) // (2 * processes), 1)
    size = max(size for size in range(1, min(most, each) + 1) if each % size == 0)
    return size, each // size


def note(rows: int, processes: int) -> str | None:
    """A warning where `rows` cannot be dealt equally to `processes`."""
    if rows % processes == 0:
        return None
    size, steps = dealt(rows, processes, rows)
    return (
        f"global_batch_size={rows} cannot be dealt equally to {processes} processes, so an optimizer step holds "
        f"{size * steps * processes} rows. A multiple of each number of processes that the job may have stays the same."
    )
