"""What scripts ask of a trainer: sizes, rates, metrics on paper. Nothing here changes a run, so nothing here is a door."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from posttrain.core.data import pipeline
from posttrain.core.logging import terminal
from posttrain.core.logging.metrics import FLOPS, Metrics, formatted, save_metrics, table

if TYPE_CHECKING:
    from posttrain.core.arguments import TrainingArguments
    from posttrain.core.distributed import Distributed
    from posttrain.core.training.plan import Plan


class Questions:
    """The half of `Trainer` that only answers, from the attributes named here."""

    args: TrainingArguments
    dist: Distributed
    accelerator: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    make_plan: Callable[[Any], Plan]
    _prepare_inputs: Callable[[Any], Any]
    metrics: Metrics
    model_wrapped: nn.Module
    is_in_train: bool
    _train_batch_size: int
    #: Scripts ask for these. A search fills in the first two.
    hp_name, hp_search_backend = None, None
    is_fsdp_xla_enabled = False

    @property
    def current_flos(self) -> float:
        """Operations of this process that `state.total_flos` does not hold yet; `store_flos` moves them there."""
        return float(self.metrics.total(FLOPS))

    @current_flos.setter
    def current_flos(self, operations: float) -> None:
        self.metrics.add_sum(FLOPS, operations - self.current_flos, 0)

    @property
    def is_model_parallel(self) -> bool:
        """Whether whoever loaded the model has spread it over several devices."""
        return len({str(place) for place in (getattr(self.model, "hf_device_map", None) or {}).values()}) > 1

    @property
    def place_model_on_device(self) -> bool:
        """Whether the trainer moves the model to its device: unless the arguments say so, not where somebody has placed it."""
        asked = self.args.place_model_on_device
        placed = getattr(self.model, "hf_device_map", None) or getattr(self.model, "is_quantized", False)
        return not placed if asked is None else asked

    @property
    def neftune_noise_alpha(self) -> float | None:
        """The noise that embeddings get in training; see the argument of this name."""
        return self.args.neftune_noise_alpha

    @property
    def hub_model_id(self) -> str | None:
        """The repository on the Hub that the run is pushed to; None where it is not pushed."""
        return self.uploader.repo_id if self.args.push_to_hub else None

    def _prepare_input(self, data: Any) -> Any:
        """`data` on the device; earlier name of what `_prepare_inputs` does to each part of a batch."""
        return self._prepare_inputs(data)

    def num_examples(self, dataloader: Any) -> int:
        """Rows that `dataloader` reads in an epoch; estimated from its batches where it cannot say."""
        return pipeline.num_examples(dataloader)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Rows of one optimizer step, over all its micro-batches and all processes."""
        return self._train_batch_size * args.gradient_accumulation_steps * self.dist.world_size

    def get_tp_size(self) -> int:
        """Processes that share one layer (tensor parallelism), as those of sequence and context parallelism below: 1."""
        return 1

    get_sp_size = get_cp_size = get_tp_size

    @property
    def is_fsdp_enabled(self) -> bool:
        """Whether the weights are kept in pieces, by FSDP."""
        return self.dist.shards

    @property
    def deepspeed(self) -> Any:
        """DeepSpeed's engine while it trains, else None."""
        return self.model_wrapped if self.is_deepspeed_enabled and self.is_in_train else None

    @property
    def is_deepspeed_enabled(self) -> bool:
        return self.dist.engine is not None

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> tuple[int | float | None, ...]:
        """What `make_plan` makes of a loader: (epochs, updates of an epoch, rows of an epoch, rows of the run, rows of an
        update, micro-batches of an epoch, updates of the run)."""
        plan, rows_per_update = self.make_plan(dataloader), self.get_total_train_batch_size(args)
        total = rows = plan.max_steps * rows_per_update
        if plan.batches_per_epoch is not None:
            rows = self.num_examples(dataloader)
            total = total if args.max_steps > 0 else rows * args.num_train_epochs
        batches = plan.batches_per_epoch or plan.max_steps * plan.accumulation
        updates = plan.steps_per_epoch or plan.max_steps
        return plan.num_epochs, updates, rows, total, rows_per_update, batches, plan.max_steps

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each group of parameters."""
        return [group["lr"] for group in self._existing_optimizer().param_groups]

    def get_num_trainable_parameters(self) -> int:
        """Parameters that are trained, in numbers."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_optimizer_group(
        self, param: nn.Parameter | None = None
    ) -> dict[str, Any] | list[list[nn.Parameter]] | None:
        """The optimizer's group that `param` is in; without one, the parameters of each group."""
        groups = self._existing_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(param is member for member in group["params"])), None)

    def _existing_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ValueError("There is no optimizer yet: it is made by train, or by create_optimizer.")
        return self.optimizer

    @staticmethod
    def metrics_format(metrics: dict[str, Any]) -> dict[str, Any]:
        """Metrics as people read them: times as h:mm:ss, fractions to four places."""
        return formatted(metrics)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print the metrics of a split (``train``, ``eval``, ``test``) as a table."""
        if self.dist.is_main:
            terminal.write(table(f"{split} metrics", metrics))

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write ``<split>_results.json`` into the output directory and, if `combined`, add to ``all_results.json``."""
        if self.dist.is_main:
            save_metrics(Path(self.args.output_dir), split, metrics, combined)

    def is_world_process_zero(self) -> bool:
        return self.dist.is_main

    def is_local_process_zero(self) -> bool:
        return self.dist.is_local_main

    def end(self) -> None:
        """Take down the process group. The last call of a script: everything that needs other processes comes before."""
        self.accelerator.end_training()
