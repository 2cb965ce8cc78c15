"""How a run is spread over processes, as its checkpoints hold it and as another number of processes takes it up."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from posttrain.core.checkpoint import codec, elastic, rng, sharded, weights
from posttrain.core.models import wrapping
from posttrain.core.optim import lr_scheduler
from posttrain.core.state import TrainerState, lossy
from posttrain.core.training.plan import Plan, Progress, resumed

if TYPE_CHECKING:
    from posttrain.core.arguments import TrainingArguments
    from posttrain.core.callbacks import CallbackHandler
    from posttrain.core.distributed import Distributed
    from posttrain.core.state import TrainerControl

logger = logging.getLogger(__name__)


def _name(part: str, value: Any) -> str:
    return f"the state_dict() of the {part} ({type(value).__name__})"


class Resuming:
    """The part of `Lifecycle` that writes and reads what is in pieces, from the attributes named here."""

    args: TrainingArguments
    dist: Distributed
    model: nn.Module
    state_dict: Callable[[], dict[str, Any]]
    optimizer: torch.optim.Optimizer
    lr_scheduler: Any
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    _saves_on_signal: bool
    save_model: Callable[..., None]
    _save_beside: Callable[[Path], None]
    _train_batch_size: int
    _adapters_checked: bool
    _boundary: dict[str, Any] | None
    progress: Progress
    _loader: Any

    def _plan_of_resume(self, plan: Plan, loader: Any, checkpoint: Path | None) -> Plan:
        """`plan` for a run that goes on from `checkpoint`, whose updates may have held another number of rows."""
        if checkpoint is None or not sharded.is_there(checkpoint, "rank-0"):
            return plan
        saved = elastic.load(checkpoint, self.dist.rank, self.dist.world_size)
        rows = self._rows_per_update()
        if saved.get("rows_per_update", rows) == rows:
            return plan
        step = TrainerState.load_from_json(checkpoint / "trainer_state.json").global_step
        progress, position = saved["trainer"]["progress"], saved["trainer"]["loader"]
        ended = progress["epoch_ended"] or position["epoch"] > progress["epoch"]
        batches = 0 if ended else sum(position["given"]) // loader.rows_per_batch
        changed = resumed(plan, step, progress["epoch"] + ended, batches, self.args.max_steps > 0)
        logger.warning(
            "An update holds %d rows (batch x accumulation x processes) and held %d in %s: the data goes on with the row at "
            "which that stands, %d updates are left, and the schedule ends at update %d.",
            rows, saved["rows_per_update"], checkpoint, changed.max_steps - step, changed.max_steps,
        )  # fmt: skip
        return changed

    def _go_on_from_weights(self, checkpoint: Path, plan: Plan) -> None:
        """Let schedule and data stand where they would be after the updates that `checkpoint`, which lacks both, has seen."""
        step, progress, data = self.state.global_step, self.progress, "starts afresh"
        if not lr_scheduler.follows_a_metric(self.lr_scheduler):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that the optimizer has made no step yet
                for _ in range(step):
                    self.lr_scheduler.step()
        if plan.steps_per_epoch is not None and not self.args.ignore_data_skip:
            progress.epoch, batches = plan.position(step)
            self._loader.set_epoch(progress.epoch)
            data = f"begins with epoch {progress.epoch}"
            if len(self._loader) == plan.batches_per_epoch:  # else each batch of it is several of the plan
                progress.batches, data = batches, f"goes on with batch {batches} of epoch {progress.epoch}"
                self._loader.skip(batches)
        progress.last_logged = step
        logger.warning(
            "%s holds no optimizer and no random numbers that can be read (save_only_model=True, or another trainer wrote it): "
            "those start afresh. The schedule goes on at update %d, and the data %s.", checkpoint, step, data,
        )  # fmt: skip

    def _write_model(self, directory: Path) -> None:
        """The weights of a checkpoint: as ``from_pretrained`` reads them, or of each process its part."""
        model = wrapping.unwrap(self.model)
        if not self.dist.saves_in_parts or wrapping.is_peft_model(model):
            self.save_model(str(directory), _internal_call=True)
            if wrapping.is_peft_model(model) and weights.has_encoder(model):
                whole = self.dist.whole_state_dict(self.model, weights.is_saved(self.model))
                if self.args.should_save:
                    weights.save_encoder(model, directory, whole)
            if not self._adapters_checked:
                self._check_adapters(directory)
            return
        stem = sharded.stem(weights.PARTS, self.dist.rank, self.dist.world_size)
        codec.save_tree(sharded.part(dict(model.state_dict())), directory / stem)
        if self.dist.is_main:
            weights.save_description(model, directory)
            self._save_beside(directory)

    def _check_adapters(self, directory: Path) -> None:
        """Read the first checkpoint of a PEFT model back: what was saved must be what is trained."""
        state = self.dist.whole_state_dict(self.model, weights.is_saved(self.model))
        if self.dist.is_main:
            weights.check_adapters(wrapping.unwrap(self.model), directory, state)
        self._adapters_checked = True

    def _position(self) -> dict[str, Any]:
        return {
            "rng": rng.rng_state(),
            "trainer": self.state_dict(),
            "rows_per_update": self._rows_per_update(),
            "scaler": None if self.dist.scaler is None else self.dist.scaler.state_dict(),
        }

    def _process_states(self) -> dict[int, dict[str, Any]]:
        """What processes must remember, by rank, of those whose states this process writes: its own. Where each machine
        saves for itself, the main one of it writes those of all: each disk then holds what any number of processes needs."""
        mine = self._boundary or self._position()
        if not self.args.save_on_each_node:
            return {self.dist.rank: mine}
        states = dict(enumerate(self.dist.gather_object(mine)))
        return states if self.args.should_save else {}

    def _check_state(self) -> None:
        """Say before anything is trained that the state of some part cannot be saved, rather than at the first checkpoint."""
        if not self._may_save:
            return
        if not self.args.save_only_model:
            self._check_optimizer_state()
            codec.check_tree(self.lr_scheduler.state_dict(), _name("lr_scheduler", self.lr_scheduler))
            try:
                mine = self.state_dict()
            except (AttributeError, KeyError):
                mine = None  # that of a subclass may hold what its first step makes
            codec.check_tree(mine, _name("trainer", self))
        self.state.collect([*self.callback_handler.callbacks, self.control])
        for where, value in lossy(self.state.stateful_callbacks):
            logger.warning(
                "The state of the callback %s is of type %s, which JSON cannot say: a checkpoint holds it as text, and a resumed "
                "run gets the text. Return plain numbers, strings, lists and dicts from state().", where, type(value).__name__,
            )  # fmt: skip

    def _check_optimizer_state(self) -> None:
        """As `_check_state`; once more after the first update, with which most optimizers begin their state."""
        if self._may_save and not self.args.save_only_model and self.dist.engine is None:
            state = self.optimizer.state_dict()
            codec.check_tree(sharded.part(state) if self.dist.shards else state, _name("optimizer", self.optimizer))

    @property
    def _may_save(self) -> bool:
        """Whether the arguments let this run save checkpoints."""
        args = self.args
        return (
            args.save_strategy != "no" or self._saves_on_signal or args.save_on_exception or args.max_time is not None
        )

    def _save_optimizer(self, directory: Path) -> None:
        rank, world_size = self.dist.rank, self.dist.world_size
        if self.dist.engine is not None:
            codec.save_tree(self.dist.engine.state_dict(), directory / sharded.stem("engine", rank, world_size))
        elif self.dist.shards:
            codec.save_tree(
                sharded.part(self.optimizer.state_dict()), directory / sharded.stem("optimizer", rank, world_size)
            )
        elif self.args.should_save:
            codec.save_tree(self.optimizer.state_dict(), directory / "optimizer")

    def _load_optimizer(self, checkpoint: Path) -> None:
        if self.dist.engine is not None:
            return self.dist.engine.load_state_dict(
                sharded.own(checkpoint, "engine", self.dist.rank, self.dist.world_size)
            )
        # Whole tensors that only a part is taken of are mapped rather than read.
        saved = sharded.load(checkpoint, "optimizer", mmap=self.dist.shards)
        self.optimizer.load_state_dict(sharded.optimizer_state(saved, self.optimizer))

    def _rows_per_update(self) -> int:
        return self._train_batch_size * self.args.gradient_accumulation_steps * self.dist.world_size
