"""Names the process that the others wait for, from the seconds that each spends on its own."""

from __future__ import annotations

import logging
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

#: A process is a straggler from this ratio of its own seconds to the median on,
RATIO = 1.5
#: if the others lose this share of a step by it.
SHARE = 0.2


class Pace:
    """The seconds that this process spends in optimizer steps outside waits for the others: data, rollouts, callbacks,
    forward passes. The backward pass, in which gradients are averaged, counts as a wait; ``waited()`` gives the seconds
    that this process has waited so far.

    Times are the host's. Where it waits for its GPU, that may wait for the others, so a slow GPU does not show.
    """

    def __init__(self, waited: Callable[[], float] = lambda: 0.0, rank: int = 0) -> None:
        self._waited, self._name = waited, f"rank {rank} ({socket.gethostname()})"
        self._own = 0.0
        self._mark: float | None = None
        self._all: list[tuple[str, float, dict[str, float]]] = []
        self._named: set[str] = set()

    def resume(self) -> None:
        """What follows is part of an optimizer step."""
        self._mark = time.monotonic() - self._waited()

    def pause(self) -> None:
        """What follows (records, evaluations, saves) is no part of a step, and may take one process longer."""
        if self._mark is not None:
            self._own += time.monotonic() - self._waited() - self._mark
        self._mark = None

    def gathering(
        self, gather: Callable[[Any], list[Any]], phases: Mapping[str, float], steps: int
    ) -> Callable[[Any], list[Any]]:
        """`gather`, which takes what `logged` needs of each process along: the seconds of this one in each of `phases`
        since the last record, `steps` optimizer steps ago.
        """

        def together(value: Any) -> list[Any]:
            mine = (self._name, self._own / steps, {name: spent / steps for name, spent in phases.items()})
            self._own = 0.0
            parts = gather((value, mine))
            self._all = [of_one for _, of_one in parts]
            return [values for values, _ in parts]

        return together

    def logged(self, step_seconds: float) -> dict[str, float]:
        """``{"perf/straggler": ratio}`` of the slowest process' own seconds of a step to the median, where it holds the
        others up; a warning names it, once. A step took `step_seconds` since the last record.
        """
        if len(self._all) < 2:
            return {}
        name, slowest, phases = max(self._all, key=lambda one: one[1])
        median = statistics.median_low([own for _, own, _ in self._all])
        if slowest < RATIO * median or slowest - median < SHARE * step_seconds:
            return {}
        if name not in self._named:
            self._named.add(name)
            logger.warning(
                f"The other processes wait for {name}: it spends {slowest:.3g} s of a step ({step_seconds:.3g} s) on "
                f"its own, and the median is {median:.3g} s. {self._why(phases, slowest - median)}"
            )
        return {"perf/straggler": slowest / max(median, 1e-9)}

    def _why(self, phases: Mapping[str, float], lost: float) -> str:
        """The phase in which most of the `lost` seconds go, as far as it is known."""
        usual = {name: statistics.median_low([one.get(name, 0.0) for *_, one in self._all]) for name in phases}
        over = {name: spent - usual[name] for name, spent in phases.items()}
        phase = max(over, key=lambda name: over[name], default=None)
        if phase is None or over[phase] < lost / 2:
            return "It is not the data: look at callbacks, the forward pass and the machine."
        return f"Most of it goes into {phase}: {phases[phase]:.3g} s, and the median is {usual[phase]:.3g} s."
