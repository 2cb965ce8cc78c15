"""The guards of a run: what looks at each optimizer step before it is applied, and may leave it out, with its report;
and what runs it in smaller micro-batches where memory is short.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from posttrain.core.checkpoint import codec
from posttrain.core.data import rng
from posttrain.core.errors import NonFiniteError
from posttrain.core.logging import memory
from posttrain.core.models import compiling
from posttrain.core.training import nonfinite, override_checks
from posttrain.core.training.loss_spikes import SpikeWatch
from posttrain.core.training.nonfinite import Update

if TYPE_CHECKING:
    from posttrain.core.trainer import Trainer

logger = logging.getLogger(__name__)

#: What looks at each optimizer step before it is applied.
Guard = nonfinite.FiniteGuard | SpikeWatch
ROWS_NAMED = 16
REMEDY = (
    "Lower the learning rate, check the rows of this batch, or use bf16 if fp16 overflows; on_nonfinite='skip' skips "
    "such steps."
)


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


class Reporter:
    """Describes optimizer steps that are not finite; the first and the last of a run with all that can be found out.

    With several processes, each looks at its own micro-batches, and all report what the first faulty one found.
    """

    def __init__(self, owner: Trainer) -> None:
        self.owner = owner

    def __call__(self, update: Update, stops: bool, late: int, is_first: bool) -> str:
        """The text for the log or the error about a step, `late` optimizer steps after it; the run `stops` with it, or
        none was reported before it (`is_first`). Raises a `NonFiniteError` where buffers of the model hold NaN, so that
        skipping the step does not help.
        """
        text = nonfinite.describe(update, self.owner.args.on_nonfinite, late)
        text += f" It is {self.named(update, update.bad_batches())}."
        # Skipping optimizer steps does not repair buffers with NaN, such as running statistics.
        buffers = {} if stops else dict(self.owner.model.named_buffers())
        spoilt = [name for name, one in buffers.items() if one.is_floating_point() and bool(one.isnan().any())]
        if not update.lacks_labels and (is_first or stops):
            saved, where = self._save(update), self._find(update)
            found = f"Found by running it once more: {where}."
            if not where:
                found = "Run once more, all stays finite: random numbers, or the window's sum, made the difference."
            text = f"{text} {found}{saved} {REMEDY}"
        if spoilt:
            text += f" The forward pass left NaN in {', '.join(spoilt[:8])}, which no skipping undoes: the run stops."
        everyone = self.owner.dist.gather_object((bool(torch.isfinite(update.loss)), text, bool(spoilt)))
        _, text, _ = min(everyone, key=lambda one: one[0])  # the first whose loss is not finite, or else the first
        if any(is_spoilt for _, _, is_spoilt in everyone):
            raise NonFiniteError(next((t for _, t, is_spoilt in everyone if is_spoilt), text))
        return text

    def named(self, update: Update, chosen: Iterable[int] | None = None) -> str:
        """Micro-batches of `update` with their rows: ``"batch 7 of epoch 0 (rows 3, 19) on rank 1"``; those `chosen` of
        the window, or all.
        """
        named, dist = [], self.owner.dist
        chosen = range(len(update.window)) if chosen is None else chosen
        for number in dict.fromkeys(update.first_batch + update.origin(one) for one in chosen):
            rows = self._rows_of(update, number) or []
            shown = ", ".join(map(str, rows[:ROWS_NAMED])) + (", ..." if len(rows) > ROWS_NAMED else "")
            named.append(f"batch {number} of epoch {update.epoch}{f' (rows {shown})' if rows else ''}")
        return "; ".join(named) + (f" on rank {dist.rank}" if dist.world_size > 1 else "")

    def _rows_of(self, update: Update, number: int) -> list[int] | None:
        """The dataset's indices of the rows in a micro-batch of the epoch; None where batches are made otherwise."""
        if all(override_checks.is_stock(self.owner, method) for method in ("windows", "get_batch_samples")):
            return self.owner.run.loader.rows_of(update.epoch, number)
        return None

    def _save(self, update: Update) -> str:
        """Write the micro-batches of this process; returns a sentence on how to read them."""
        folder = Path(self.owner.args.output_dir) / f"nonfinite-step-{update.step + 1}"
        stem = folder / f"rank-{self.owner.dist.rank}"
        read = f"posttrain.core.checkpoint.codec.load_tree({str(stem)!r})['micro_batches']"
        numbers = [update.first_batch + update.origin(number) for number in range(len(update.window))]
        tree = {
            "how_to_read": f"import posttrain.core.checkpoint.codec; batches = {read}",
            "update": update.step + 1,
            "epoch": update.epoch,
            "batches": numbers,
            "rows": [self._rows_of(update, number) for number in numbers],
            "losses": [float(loss) for loss in update.losses],
            "grad_norm": float(update.grad_norm),
            "micro_batches": [_plain(batch) for batch in update.window],
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            codec.save_tree(tree, stem)
        except (OSError, TypeError) as error:
            return f" The batch could not be saved ({error})."
        return f" The batch is saved; read it with {read}."

    def _find(self, update: Update) -> str | None:
        """Run the faulty micro-batches again, with hooks, and say where the numbers go bad; keep nothing of it."""
        owner, run, objective = self.owner, self.owner.run, self.owner.scaling.objective

        def again(batch: Any) -> torch.Tensor:
            if not owner.scaling.steps_in_backward:
                given: Any = owner.model, batch, update.num_items
                return owner.training_step(*given[: run.step_takes])
            with torch.no_grad(), owner.compute_loss_context_manager():
                return objective(owner.compute_loss, owner.model, owner.prepare_inputs(batch), update.num_items)[0]

        batches, random, num_items = [update.window[n] for n in update.bad_batches()], rng.rng_state(), run.num_items
        gradients = [parameter.grad for parameter in run.parameters]  # of the step that is under way
        try:
            run.num_items = update.num_items
            for parameter in run.parameters:
                parameter.grad = None
            with owner.metrics.apart(), objective.frozen(), compiling.uncompiled():
                return nonfinite.first_nonfinite(owner.model, batches, again)
        except NonFiniteError:
            raise
        except Exception as error:  # a batch that was changed since, memory that has run out: the first fault counts
            return f"nothing, for that failed with {type(error).__name__}: {error}"
        finally:
            run.num_items = num_items
            objective.take_terms()
            rng.set_rng_state(random)
            for parameter, gradient in zip(run.parameters, gradients, strict=True):
                parameter.grad = gradient


def _plain(batch: Any) -> Any:
    """`batch` as dicts, lists, tensors and numbers alone, for a file; anything else as its text."""
    if isinstance(batch, torch.Tensor):
        return batch.detach()
    if isinstance(batch, Mapping):
        return {str(name): _plain(value) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [_plain(value) for value in batch]
    return batch if isinstance(batch, (str, bool, int, float, type(None))) else str(batch)


class BatchSplitter:
    """Runs accumulation windows, of so many micro-batches as configured (`accumulation`) of `batch_size` rows on each
    process, and splits their micro-batches from the first one on that does not fit into memory. The optimizer step
    stays the same, since a loss is a mean over its accumulation window however that is split.

    Attributes: `cuts`, how many times each micro-batch is halved, saved in checkpoints; `origins`, for each micro-batch
    of the last window, which one of the loader's it is a part of; None: itself.
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
        attempt that failed. Raises a `torch.OutOfMemoryError` where a micro-batch that does not fit cannot be split.
        """
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
