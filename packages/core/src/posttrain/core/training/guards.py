"""The guards of a run: what looks at each optimizer step before it is applied, and may leave it out; and what runs it
in smaller micro-batches where memory is short.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from posttrain.core.logging import memory
from posttrain.core.training import nonfinite
from posttrain.core.training.loss_spikes import SpikeWatch
from posttrain.core.training.nonfinite_report import Reporter

if TYPE_CHECKING:
    from posttrain.core.trainer import Trainer

logger = logging.getLogger(__name__)


#: What looks at each optimizer step before it is applied.
Guard = nonfinite.FiniteGuard | SpikeWatch


def make(owner: Trainer) -> tuple[nonfinite.FiniteGuard, SpikeWatch | None]:
    """(the guard against steps that are not finite, that against spikes of the loss where `on_loss_spike` asks)."""
    args, dist, policy, report = owner.args, owner.dist, owner.args.on_nonfinite, Reporter(owner)
    if policy == "stop" and dist.scaler is None and nonfinite.has_float16(owner.model):
        policy = "skip"  # as a loss scaler would: that one batch overflows in 16 bits is no fault of the run
    total = dist.sum if dist.world_size > 1 else None
    finite = nonfinite.FiniteGuard(policy, args.max_nonfinite_steps, report, total)
    if args.on_loss_spike == "ignore":
        return finite, None
    mean = None if total is None else lambda loss: total(loss) / dist.world_size
    return finite, SpikeWatch(args.on_loss_spike, args.loss_spike_threshold, mean, report.named)


class BatchSplitter:
    """Runs accumulation windows, and splits their micro-batches from the first one on that does not fit into memory.

    The optimizer step stays the same, since a loss is a mean over its accumulation window however that is split.

    Args:
        batch_size: rows of a micro-batch of the loader, on each process.
        accumulation: micro-batches of a window, as configured.

    Attributes:
        cuts: how many times each micro-batch is halved; saved in checkpoints.
        origins: for each micro-batch of the last window, which one of the loader's it is a part of; None: itself.
    """

    def __init__(self, batch_size: int, accumulation: int) -> None:
        self.batch_size, self.accumulation = batch_size, accumulation
        self.cuts = 0
        self.origins: list[int] | None = None

    @property
    def rows(self) -> int:
        """Rows of a micro-batch as it is now."""
        return -(-self.batch_size // 2**self.cuts)

    def run(
        self,
        window: list[Any],
        step: int,
        attempt: Callable[[list[Any]], list[torch.Tensor]],
        checkpoint: Callable[[], Callable[[], None]],
    ) -> tuple[list[Any], list[torch.Tensor]]:
        """(micro-batches, their shares of the loss) of `window`, number `step`, in as many micro-batches as it takes:
        `attempt` runs forward and backward of some, and what `checkpoint` returns, called once before, undoes an
        attempt that failed. Raises a `torch.OutOfMemoryError` where a micro-batch that does not fit cannot be split."""
        self.origins = None
        for _ in range(self.cuts):
            window = self._halved(window, step, None)
        undo = checkpoint()
        while True:
            try:
                return window, attempt(window)
            except Exception as error:
                if not memory.is_out_of_memory(error):
                    raise
                failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no memory'}"
            # Outside of the handler: the error's traceback would keep alive the tensors that are to be freed.
            undo()
            window = self._halved(window, step, failure)
            self.cuts += 1
            logger.warning(
                f"auto_find_batch_size: step {step} did not fit into memory ({failure}). From here on each micro-batch "
                f"is split into {2**self.cuts}: at most {self.rows} rows, and {len(window)} micro-batches in this "
                f"optimizer step, whose result stays the same. Set per_device_train_batch_size={self.rows} and "
                f"gradient_accumulation_steps={self.accumulation * 2**self.cuts} to start like this."
            )

    def _halved(self, window: list[Any], step: int, failure: str | None) -> list[Any]:
        """Each micro-batch of `window` in two halves. Without a `failure`, one that cannot be split stays whole."""
        parts: list[Any] = []
        origins: list[int] = []
        for batch, origin in zip(window, self.origins or range(len(window)), strict=True):
            try:
                parts += memory.halves(batch)
                origins += [origin, origin]
            except ValueError as reason:
                if failure is None:
                    parts.append(batch)
                    origins.append(origin)
                    continue
                raise torch.OutOfMemoryError(
                    f"auto_find_batch_size: step {step} did not fit into memory ({failure}), and {reason}. Set "
                    "gradient_checkpointing=True, shorter rows, or a smaller model."
                ) from None
        self.origins = origins
        return parts
