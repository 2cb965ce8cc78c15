"""accelerate's gathering, of other numbers of rows in other processes.

The last batch of an epoch is divided over the processes as it is, where accelerate fills it up with repeated rows, and
its functions gather equal numbers. Scripts gather what they have of each row: so the numbers are asked for first.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import operations

from posttrain.core.data.batches import PRESENT


class UnevenAccelerator(Accelerator):  # type: ignore[misc]  # accelerate is not typed
    """Gathers tensors whose first dimensions differ."""

    def gather(self, tensor: Any) -> Any:
        """See `Accelerator.gather`; (N, ...) of all processes, N the sum of their rows."""
        if self.num_processes == 1:
            return super().gather(tensor)
        return operations.recursively_apply(_of_all, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """See `Accelerator.gather_for_metrics`; without rows that only keep this process in step."""
        if (kept := PRESENT.kept) is not None:
            input_data = operations.recursively_apply(lambda rows: rows[:kept] if rows.ndim else rows, input_data)
        return super().gather_for_metrics(input_data, use_gather_object)


def _of_all(tensor: torch.Tensor) -> Any:
    if not tensor.ndim:
        return operations.gather(tensor)
    counts = operations.gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
    most = max(counts)
    if min(counts) == most:
        return operations.gather(tensor)
    filled = torch.cat([tensor, tensor.new_zeros(most - len(tensor), *tensor.shape[1:])])
    return torch.cat([part[:count] for part, count in zip(operations.gather(filled).split(most), counts, strict=True)])
