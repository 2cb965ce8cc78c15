"""The log of a run: sums of its steps, the tokens and operations that it has read, and the values of a record."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from posttrain.core.data import accelerator
from posttrain.core.distributed.stragglers import Pace
from posttrain.core.logging.metrics import FLOPS, TOKENS, Clock, Metrics, means, speed_metrics
from posttrain.core.losses import normalization
from posttrain.core.state import TrainerState
from posttrain.core.training.plan import Progress, steps_left

logger = logging.getLogger(__name__)


class Record:
    """Adds up what the steps of a run measure, on the device, and makes a log record of it over all processes (`dist`).
    The sums since the last record are in `metrics`.

    The `clock` knows where the seconds of the run go; one is made where it is left out. `pad_token_id` marks padding
    where a batch has no attention mask; None: only the mask does.
    """

    def __init__(self, args: Any, dist: Any, clock: Clock | None = None, pad_token_id: int | None = None) -> None:
        self.args, self.dist = args, dist
        self.metrics, self.clock = Metrics(), clock or Clock()
        # Elsewhere only the mask is read, since a search for pad tokens costs one more kernel a micro-batch.
        needs_padding = args.include_num_input_tokens_seen == "non_padding"
        self._pad = pad_token_id if needs_padding else None
        self._needs_mask = needs_padding and pad_token_id is None
        self._needs_tokens = args.include_num_input_tokens_seen != "no"

    def read(self, inputs: Mapping[str, Any], main_input: str, operations: int) -> None:
        """Count the tokens of a micro-batch, in the column `main_input`, and the floating-point `operations` of its
        forward and backward, without waiting for the device.
        """
        if self._needs_mask and "attention_mask" not in inputs:
            self._needs_mask = False  # warn once
            logger.warning(
                "include_num_input_tokens_seen='non_padding', but the batches have no attention_mask and there is no "
                "tokenizer with a pad token: padding looks like any token, and all of them are counted."
            )
        if self._needs_tokens and main_input not in inputs:
            self._needs_tokens = False
            logger.warning(
                f"include_num_input_tokens_seen counts the numbers of the column {main_input!r}, which the batches do "
                "not hold: the count stays 0. Set main_input_name, of the model's class, to the column that it reads."
            )
        read: dict[str, tuple[Any, Any]] = {TOKENS: normalization.count_tokens(inputs, main_input, self._pad)}
        self.metrics.update(read | ({FLOPS: (operations, 0)} if operations else {}))

    def step(self, loss: torch.Tensor, num_items: torch.Tensor | None, terms: dict[str, torch.Tensor]) -> None:
        """Add the `loss` of an optimizer step and its `terms`, shape () each; a window without a label has none. It has
        `num_items` items, shape (); None: it has some.
        """
        loss = loss.detach()
        if num_items is None:
            self.metrics.add_sum("loss", loss, 1)
        else:
            there = num_items != 0
            self.metrics.add_sum("loss", torch.where(there, loss, 0.0), there.long())
        for name, value in terms.items():
            self.metrics.add(name, value)

    def count(self, state: TrainerState, pairs: dict[str, tuple[float, float]]) -> None:
        """Move the tokens and operations in drained `pairs` to `state`."""
        tokens, slots = pairs.pop(TOKENS, (0, 0))
        state.num_input_tokens_seen += int(slots if self.args.include_num_input_tokens_seen == "all" else tokens)
        flops = float(pairs.pop(FLOPS, (0, 0))[0])
        state.total_flos += flops
        self.clock.count(tokens, slots, flops)

    def store_counts(self, state: TrainerState) -> None:
        """Bring `num_input_tokens_seen` and `total_flos` of `state` up to now, over all processes."""
        self.count(state, self.metrics.drain(self.dist.gather_object, only=(TOKENS, FLOPS)))

    def of_steps(
        self, state: TrainerState, progress: Progress, first_step: int, beside: dict[str, float], pace: Pace | None
    ) -> dict[str, float]:
        """The values of a record of the steps since the last, with those `beside` it: the one place of a run that waits
        for the device. The run started from optimizer step `first_step`; `pace` is that of this process among
        several.
        """
        steps = max(state.global_step - max(progress.last_logged, first_step), 1)  # the clock began at `first_step`
        gather = self.dist.gather_object
        pairs = self.metrics.drain(gather if pace is None else pace.gathering(gather, self.clock.phases, steps))
        self.count(state, pairs)
        progress.add_losses(*pairs["loss"])
        with accelerator.waiting():
            progress.grad_norm = float(progress.grad_norm)
        logs = {"loss": 0.0} | means(pairs) | {"grad_norm": progress.grad_norm, "learning_rate": progress.learning_rate}
        logs |= beside | self.clock.performance(steps, steps_left(state, self.args.max_tokens))
        progress.last_logged = state.global_step
        return logs if pace is None else logs | pace.logged(logs["perf/step_seconds"])

    def of_epoch(self) -> dict[str, float]:
        """The means over an epoch of what was logged with ``per_epoch=True``; empty where nothing was."""
        return means(self.metrics.drain(self.dist.gather_object, epoch=True))

    def of_run(
        self, state: TrainerState, progress: Progress, first_step: int, rows: int, nonfinite_steps: int
    ) -> tuple[dict[str, float], dict[str, float]]:
        """(what the algorithm measured since the last record, the metrics of the whole run), in which so many `rows`
        were read over all processes.
        """
        rest = self.metrics.drain(self.dist.gather_object)
        rest |= self.metrics.drain(self.dist.gather_object, epoch=True)  # of a part of one
        self.count(state, rest)
        progress.add_losses(*rest.pop("loss", (0.0, 0)))
        metrics = speed_metrics("train", self.clock.total(), rows, state.global_step - first_step)
        metrics |= {"total_flos": float(state.total_flos), "train_loss": progress.mean_loss(nonfinite_steps > 0)}
        return means(rest), metrics | ({"nonfinite_steps": nonfinite_steps} if nonfinite_steps else {})
