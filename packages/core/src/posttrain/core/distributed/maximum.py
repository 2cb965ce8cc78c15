"""The largest of small numbers over the processes, for decisions that all must take alike."""

from __future__ import annotations

import torch


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
