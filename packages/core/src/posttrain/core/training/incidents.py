"""What a run does when a step goes wrong: numbers that are not finite, unknown ids, and memory that runs out.

The private half of `Trainer` for bad days; `posttrain.core.training.nonfinite` and `posttrain.core.training.memory` are the rooms behind it.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from posttrain.core.checkpoint import codec, rng
from posttrain.core.data.stateful_dataloader import check_limits
from posttrain.core.errors import NonFiniteError
from posttrain.core.models import compiling, embeddings
from posttrain.core.training import memory, nonfinite, override_checks

if TYPE_CHECKING:
    from posttrain.core.arguments import TrainingArguments
    from posttrain.core.distributed import Distributed
    from posttrain.core.logging.metrics import Metrics
    from posttrain.core.state import TrainerState
    from posttrain.core.training.plan import Progress

logger = logging.getLogger(__name__)


class Incidents:
    """Reads the attributes named here, which `Trainer` and `Lifecycle` make."""

    args: TrainingArguments
    dist: Distributed
    model: nn.Module
    optimizer: torch.optim.Optimizer
    state: TrainerState
    metrics: Metrics
    progress: Progress
    compute_loss: Callable[..., Any]
    log_metric: Callable[..., None]
    compute_loss_func: Callable[..., Any] | None
    accumulate: Callable[..., list[torch.Tensor]]

    # ---- numbers that are not finite ----

    def _make_guard(self) -> nonfinite.FiniteGuard:
        total = self.dist.sum if self.dist.world_size > 1 else None
        policy = self.args.on_nonfinite
        if policy == "stop" and self.dist.scaler is None and nonfinite.has_float16(self.model):
            policy = "skip"  # as a loss scaler would: that one batch overflows in 16 bits is no fault of the run
        report = weakref.WeakMethod(self._report_nonfinite)  # a trainer that is let go of must not hold itself
        return nonfinite.FiniteGuard(policy, self.args.max_nonfinite_steps, lambda *seen: report()(*seen), total)

    def _may_step(
        self, window: list[Any], losses: list[torch.Tensor], loss: torch.Tensor, grad_norm: torch.Tensor, num_items: Any
    ) -> bool:
        """Whether the update of `window` may be made; see `posttrain.core.training.nonfinite.FiniteGuard.before_step`."""
        progress = self.progress
        update = nonfinite.Update(
            self.state.global_step,
            progress.epoch,
            progress.batches,
            window,
            losses,
            loss,
            grad_norm,
            num_items,
            self._origins,
        )
        scaler = self.dist.scaler
        return self._guard.before_step(self.optimizer, update, None if scaler is None else scaler.get_scale)

    def _report_nonfinite(self, update: nonfinite.Update, stops: bool, late: int) -> str:
        """What to say of an update that is not finite; of the first and the last of a run with all that can be found out.

        Of several processes, each looks at its own micro-batches, and all say what the first one at fault has found.
        """
        text = nonfinite.describe(update, self.args.on_nonfinite, late)
        text += f" It is {nonfinite.name_batches(update, functools.partial(self._rows_of, update.epoch))}"
        text += f" on rank {self.dist.rank}." if self.dist.world_size > 1 else "."
        spoilt = [] if stops else nonfinite.spoilt_buffers(self.model)
        if not update.lacks_labels and (self._guard.count == 1 or stops):
            saved = self._save_window(update)
            where = self._find_fault(update)
            found = f"Found by running it once more: {where}." if where else (
                "Run once more, everything stays finite: random numbers, or the sum over the window, made the difference."
            )  # fmt: skip
            text = f"{text} {found}{saved} {nonfinite.REMEDY}"
        if spoilt:
            text += f" The forward pass left NaN in {', '.join(spoilt[:8])}, which no skipping undoes: the run stops."
        everyone = self.dist.gather_object((bool(torch.isfinite(update.loss)), text, bool(spoilt)))
        _, text, _ = min(everyone, key=lambda one: one[0])  # the first whose loss is not finite, or else the first
        if any(is_spoilt for _, _, is_spoilt in everyone):
            raise NonFiniteError(next((t for _, t, is_spoilt in everyone if is_spoilt), text))
        return text

    def _rows_of(self, epoch: int, number: int) -> list[int] | None:
        """Indices of the dataset in micro-batch `number` of `epoch`; None where batches are made in some other way."""
        if not all(override_checks.is_from(self, method, "Trainer") for method in ("windows", "get_batch_samples")):
            return None
        return self._loader.rows_of(epoch, number)

    def _find_fault(self, update: nonfinite.Update) -> str | None:
        """Run the micro-batches at fault again, with hooks; nothing of it is kept."""
        batches, random = [update.window[number] for number in update.bad_batches()], rng.rng_state()
        gradients = [parameter.grad for parameter in self._parameters]  # of the step that is under way
        steps_in_backward = getattr(self.optimizer, "steps_in_backward", False)

        def run(batch: Any) -> torch.Tensor:
            if steps_in_backward:
                with torch.no_grad(), self.compute_loss_context_manager():
                    return self._objective(
                        self.compute_loss, self.model, self._prepare_inputs(batch), update.num_items
                    )[0]
            return self._call_training_step(self.model, batch, update.num_items)

        try:
            for parameter in self._parameters:
                parameter.grad = None
            with self._metrics_apart(), self._objective.frozen(), compiling.uncompiled():
                return nonfinite.first_nonfinite(self.model, batches, run)
        except NonFiniteError:
            raise
        except (
            Exception
        ) as error:  # a batch that was changed since, memory that has run out: the first fault is what counts
            return f"nothing, for that failed with {type(error).__name__}: {error}"
        finally:
            rng.set_rng_state(random)
            self._loss_terms.clear()
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient

    def _save_window(self, update: nonfinite.Update) -> str:
        """Write the micro-batches of this process; returns a sentence on how to read them."""
        folder = Path(self.args.output_dir) / f"nonfinite-step-{update.step + 1}"
        stem = folder / f"rank-{self.dist.rank}"
        read = f"posttrain.core.checkpoint.codec.load_tree({str(stem)!r})['micro_batches']"
        numbers = [update.first_batch + update.origin(number) for number in range(len(update.window))]
        tree = {
            "how_to_read": f"import posttrain.core.checkpoint.codec; batches = {read}",
            "update": update.step + 1, "epoch": update.epoch, "batches": numbers,
            "rows": [self._rows_of(update.epoch, number) for number in numbers],
            "losses": [float(loss) for loss in update.losses], "grad_norm": float(update.grad_norm),
            "micro_batches": [nonfinite.plain_batch(batch) for batch in update.window],
        }  # fmt: skip
        try:
            folder.mkdir(parents=True, exist_ok=True)
            codec.save_tree(tree, stem)
        except (OSError, TypeError) as error:
            return f" The batch could not be saved ({error})."
        return f" The batch is saved; read it with {read}."

    def _may_go_backward(self, loss: torch.Tensor, items: torch.Tensor | int | None) -> bool:
        """False where the backward pass itself would put a loss that is not finite into the weights, and of a mean over nothing,
        whose gradient may be 0 / 0, where it is known without a wait and no other process waits for it."""
        known = items is not None and (not isinstance(items, torch.Tensor) or items.is_cpu)
        if known and not items and self.dist.world_size == 1 and self.dist.engine is None:
            return False
        if not getattr(self.optimizer, "steps_in_backward", False) or self.args.on_nonfinite == "warn":
            return True
        return bool(torch.isfinite(loss))

    # ---- ids that the model does not know ----

    def _step_of(self, model: nn.Module, inputs: Any, num_items: torch.Tensor | None) -> torch.Tensor:
        try:
            with self.dist.in_step():
                return self._call_training_step(model, inputs, num_items)
        except IndexError:  # an id that the model does not know, most often: say which
            check_limits(inputs, self._limits())
            raise

    def _call_training_step(self, model: nn.Module, inputs: Any, num_items: torch.Tensor | None) -> torch.Tensor:
        # An older override takes two arguments.
        return self.training_step(model, inputs, *((num_items,) if self._step_takes_count else ()))

    def _limits(self) -> dict[str, int]:
        """How many ids the model knows, by column; labels only where its own loss reads them."""
        stock = (
            getattr(self.compute_loss, "__qualname__", "") == "Trainer.compute_loss" and self.compute_loss_func is None
        )
        return {name: n for name, n in embeddings.id_limits(self.model).items() if stock or "labels" not in name}

    # ---- memory that runs out ----

    def _accumulate_or_cut(
        self, model: nn.Module, window: list[Any], num_items: torch.Tensor | None
    ) -> tuple[list[Any], list[torch.Tensor]]:
        """(micro-batches, their shares of the loss) of `window`, in smaller micro-batches where it does not fit otherwise.

        The update is the same, for a loss is a mean over its window however that is cut.
        """
        self._origins: list[int] | None = None  # each micro-batch is one that the loader gave
        if not self.args.auto_find_batch_size:
            try:
                return window, self.accumulate(model, window, num_items)
            except Exception as error:
                if memory.is_out_of_memory(error):
                    error.add_note(memory.advice(self._train_batch_size, len(window)))
                raise
        for _ in range(self._cuts):
            window = self._cut(window, None)
        random, metrics = rng.rng_state(), self.metrics.copy()
        while True:
            try:
                return window, self.accumulate(model, window, num_items)
            except Exception as error:
                if not memory.is_out_of_memory(error):
                    raise
                failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no memory'}"
            # Out of the handler: the error's traceback would keep the tensors that are to go.
            for parameter in self._parameters:
                parameter.grad = None
            self._loss_terms.clear()
            self.dist.empty_cache()
            self.metrics = metrics.copy()
            rng.set_rng_state(random)
            window = self._cut(window, failure)
            self._cuts += 1
            self.state.train_batch_size = -(-self._train_batch_size // 2**self._cuts)
            logger.warning(
                "auto_find_batch_size: update %d did not fit into memory (%s). From here on each micro-batch is cut into %d: "
                "at most %d rows, and %d to an update, which stays the same. Set per_device_train_batch_size=%d and "
                "gradient_accumulation_steps=%d to start so.",
                self.state.global_step + 1, failure, 2**self._cuts, self.state.train_batch_size, len(window),
                self.state.train_batch_size, self.args.gradient_accumulation_steps * 2**self._cuts,
            )  # fmt: skip

    def _cut(self, window: list[Any], failure: str | None) -> list[Any]:
        """The micro-batches of `window`, each in two. Where `failure` names none, what cannot be cut stays whole."""
        parts: list[Any] = []
        origins: list[int] = []
        for batch, origin in zip(window, self._origins or range(len(window)), strict=True):
            try:
                parts += memory.halves(batch)
                origins += [origin, origin]
            except ValueError as reason:
                if failure is None:
                    parts.append(batch)
                    origins.append(origin)
                    continue
                raise torch.OutOfMemoryError(
                    f"auto_find_batch_size: update {self.state.global_step + 1} did not fit into memory ({failure}), and {reason}. "
                    "Set gradient_checkpointing=True, shorter rows, or a smaller model."
                ) from None
        self._origins = origins
        return parts

    # ---- terms of the loss ----

    def _keep_terms(self, weight: torch.Tensor | None, is_filler: bool) -> None:
        """Add the terms of this micro-batch, in the scale of its share of the loss, to those of the window."""
        terms, self._objective.terms = self._objective.terms, None
        for name, value in terms.items():
            value = value if weight is None else value * weight
            value = value * (0 if is_filler else self._loss_scale)
            self._loss_terms[name] = self._loss_terms[name] + value if name in self._loss_terms else value

    def _log_window_loss(self, loss: torch.Tensor, num_items: torch.Tensor | None) -> None:
        """Log the loss of an update; a window without a label has none."""
        if num_items is None:
            self.log_metric("loss", loss)
        else:
            there = num_items != 0
            self.log_metric("loss", torch.where(there, loss, 0.0), there.long())

    def _log_terms(self) -> None:
        for name, value in self._loss_terms.items():
            self.metrics.add(name, value)
        self._loss_terms.clear()
