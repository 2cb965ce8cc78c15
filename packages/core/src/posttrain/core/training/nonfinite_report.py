"""Reports an optimizer step whose loss or gradient is not finite: its rows, the faulty module, the batch in a file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.core.checkpoint import codec
from posttrain.core.data import rng
from posttrain.core.errors import NonFiniteError
from posttrain.core.training import nonfinite
from posttrain.core.training.nonfinite import Update

ROWS_NAMED = 16


class Reporter:
    """Describes optimizer steps that are not finite; the first and the last of a run with all that can be found out.

    With several processes, each looks at its own micro-batches, and all report what the first faulty one found.

    Args:
        policy: ``on_nonfinite``.
        output_dir: where the micro-batches are written.
        rank, world_size: this process, of how many.
        gather: lists what every process passed, in rank order.
        rows_of: ``(epoch, number) -> indices`` of the rows of a micro-batch; None where they are not known.
        find: ``(update) -> text``: runs its micro-batches again and says where the numbers go bad.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: str,
        output_dir: str | Path,
        *,
        rank: int,
        world_size: int,
        gather: Callable[[Any], list[Any]],
        rows_of: Callable[[int, int], list[int] | None],
        find: Callable[[Update], str | None],
    ) -> None:
        self.model, self.policy, self.output_dir = model, policy, Path(output_dir)
        self.rank, self.world_size = rank, world_size
        self._gather, self._rows_of, self._find = gather, rows_of, find

    def __call__(self, update: Update, stops: bool, late: int, is_first: bool) -> str:
        """The text for the log or the error.

        Args:
            stops: the run ends with it. late: optimizer steps since. is_first: none of this run was reported before.

        Raises:
            NonFiniteError: buffers of the model hold NaN, so that skipping the step does not help.
        """
        text = nonfinite.describe(update, self.policy, late)
        text += f" It is {name_batches(update, functools.partial(self._rows_of, update.epoch))}"
        text += f" on rank {self.rank}." if self.world_size > 1 else "."
        # Skipping optimizer steps does not repair buffers with NaN, such as running statistics.
        buffers = {} if stops else dict(self.model.named_buffers())
        spoilt = [name for name, one in buffers.items() if one.is_floating_point() and bool(one.isnan().any())]
        if not update.lacks_labels and (is_first or stops):
            saved = self._save(update)
            where = self._find(update)
            found = (
                f"Found by running it once more: {where}."
                if where
                else (
                    "Run once more, everything stays finite: random numbers, or the sum over the window, made the "
                    "difference."
                )
            )
            text = f"{text} {found}{saved} {REMEDY}"
        if spoilt:
            text += f" The forward pass left NaN in {', '.join(spoilt[:8])}, which no skipping undoes: the run stops."
        everyone = self._gather((bool(torch.isfinite(update.loss)), text, bool(spoilt)))
        _, text, _ = min(everyone, key=lambda one: one[0])  # the first whose loss is not finite, or else the first
        if any(is_spoilt for _, _, is_spoilt in everyone):
            raise NonFiniteError(next((t for _, t, is_spoilt in everyone if is_spoilt), text))
        return text

    def named(self, update: Update) -> str:
        """All micro-batches of `update` on this process, with their rows."""
        every = range(len(update.window))
        text = name_batches(update, functools.partial(self._rows_of, update.epoch), every)
        return f"{text} on rank {self.rank}" if self.world_size > 1 else text

    def _save(self, update: Update) -> str:
        """Write the micro-batches of this process; returns a sentence on how to read them."""
        folder = self.output_dir / f"nonfinite-step-{update.step + 1}"
        stem = folder / f"rank-{self.rank}"
        read = f"posttrain.core.checkpoint.codec.load_tree({str(stem)!r})['micro_batches']"
        numbers = [update.first_batch + update.origin(number) for number in range(len(update.window))]
        tree = {
            "how_to_read": f"import posttrain.core.checkpoint.codec; batches = {read}",
            "update": update.step + 1,
            "epoch": update.epoch,
            "batches": numbers,
            "rows": [self._rows_of(update.epoch, number) for number in numbers],
            "losses": [float(loss) for loss in update.losses],
            "grad_norm": float(update.grad_norm),
            "micro_batches": [plain_batch(batch) for batch in update.window],
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            codec.save_tree(tree, stem)
        except (OSError, TypeError) as error:
            return f" The batch could not be saved ({error})."
        return f" The batch is saved; read it with {read}."


def find_fault(
    update: Update, model: nn.Module, parameters: list[nn.Parameter], run: Callable[[Any], Any]
) -> str | None:
    """Run the faulty micro-batches of `update` again, with hooks, and say where the numbers go bad; keep nothing of it.

    Args:
        run: forward of a micro-batch, and backward if it likes.
    """
    batches, random = [update.window[number] for number in update.bad_batches()], rng.rng_state()
    gradients = [parameter.grad for parameter in parameters]  # of the step that is under way
    try:
        for parameter in parameters:
            parameter.grad = None
        return nonfinite.first_nonfinite(model, batches, run)
    except NonFiniteError:
        raise
    except Exception as error:  # a batch that was changed since, memory that has run out: the first fault counts
        return f"nothing, for that failed with {type(error).__name__}: {error}"
    finally:
        rng.set_rng_state(random)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


REMEDY = (
    "Lower the learning rate, check the rows of this batch, or use bf16 if fp16 overflows; on_nonfinite='skip' skips "
    "such steps."
)


def name_batches(
    update: Update, rows_of: Callable[[int], list[int] | None], chosen: Iterable[int] | None = None
) -> str:
    """Micro-batches of `update`, with their rows: ``"batch 7 of epoch 0 (rows 3, 19)"``.

    Args:
        rows_of: the dataset's indices of the rows in a micro-batch of the epoch, by its number; None: unknown.
        chosen: which micro-batches of the window; None: those that are not finite.
    """
    named = []
    chosen = update.bad_batches() if chosen is None else chosen
    for number in dict.fromkeys(update.first_batch + update.origin(one) for one in chosen):
        rows = rows_of(number)
        shown = ", ".join(map(str, (rows or [])[:ROWS_NAMED])) + (", ..." if len(rows or []) > ROWS_NAMED else "")
        named.append(f"batch {number} of epoch {update.epoch}{f' (rows {shown})' if rows else ''}")
    return "; ".join(named)


def plain_batch(batch: Any) -> Any:
    """`batch` as dicts, lists, tensors and numbers alone, for a file; anything else as its text."""
    if isinstance(batch, torch.Tensor):
        return batch.detach()
    if isinstance(batch, Mapping):
        return {str(name): plain_batch(value) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [plain_batch(value) for value in batch]
    return batch if isinstance(batch, (str, bool, int, float, type(None))) else str(batch)
