"""Saves a run: its checkpoints, with removals and uploads, the model for its users, and what is left after an error."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from posttrain.core import hub
from posttrain.core.checkpoint import reload, shares, weights
from posttrain.core.evaluation import eval_loop
from posttrain.core.models import wrapping
from posttrain.core.state import TrainerState

if TYPE_CHECKING:
    from posttrain.core.trainer import Trainer

logger = logging.getLogger(__name__)


class Saving:
    """Writes checkpoints and models of the trainer that owns it."""

    def __init__(self, owner: Trainer) -> None:
        self.owner = owner
        self._arguments: tuple[list[Any], str] = [], ""  # what `beside` has written them by, and their text

    # ---- checkpoints ----

    def now(self) -> None:
        """Save a checkpoint, and wait until it is there."""
        self.owner.store_flos()
        self.ask()
        self.settle()

    def ask(self) -> None:
        """Have the trainer save a checkpoint, by a `_save_checkpoint` of a script's own where there is one."""
        owner = self.owner
        owner._save_checkpoint(owner.model_wrapped, owner.run.trial)
        checkpoints = owner.checkpoints
        ours = checkpoints.saver.pending is not None or checkpoints.saved_step == owner.state.global_step
        if not ours and owner.run.unsaved is None:
            owner._fire("on_save")  # `settle` does for ours

    def checkpoint(self) -> None:
        """Save a checkpoint; with `save_async` it is written in the background."""
        owner = self.owner
        self.settle()
        with self.averages():  # resuming goes on from them, as this run does
            owner.checkpoints.save()
        if not owner.args.save_async:
            self.settle()

    def settle(self, wait: bool = True) -> None:
        """Take in that a checkpoint is there now: upload it, remove older ones, call the callbacks. Returns where it is
        not written yet, unless this is to `wait`.
        """
        owner = self.owner
        if (outcome := owner.checkpoints.saver.settle(wait)) is None:
            return
        best = owner.state.best_model_checkpoint
        owner.run.unsaved = outcome if outcome.path is None else None
        if outcome.path is None:
            if owner.state.best_global_step == outcome.step:
                owner.state.best_model_checkpoint = None
            return
        owner.checkpoints.saved_step = outcome.step
        state = owner.checkpoints.state_at_save  # one that was written in the background is of an earlier step
        if owner.args.push_to_hub:
            self.upload(outcome.path, state)
        self.rotate(state.log_history, best)
        self.copy_files()
        owner._fire("on_save", state)
        owner.run.meet("what callbacks do after a save")

    def rotate(self, log_history: list[dict[str, Any]], best: str | None) -> None:
        """Remove the oldest checkpoints over the limit, but for the best ones and those that are being uploaded."""
        args, store, checkpoints = self.owner.args, self.owner.store, self.owner.checkpoints
        keep = [Path(best)] if best else []
        if args.save_top_k is not None and (metric := args.metric_for_best_model) is not None:
            steps = eval_loop.best_steps(log_history, metric, bool(args.greater_is_better))
            keep += [path for step in steps if (path := store.path(step)).is_dir()][: args.save_top_k]
        keep += self.owner.uploader.in_use if args.push_to_hub else []
        limit = args.save_total_limit or 1 if args.save_top_k else checkpoints.limit  # the best ones are in `keep`
        checkpoints.on_savers(functools.partial(store.rotate, limit, keep))

    def upload(self, checkpoint: Path | None, state: TrainerState, at_end: bool = False) -> None:
        """Queue for the Hub what the strategy asks for; the thread that uploads never stops the run."""
        owner = self.owner
        message = "End of training" if at_end else f"Training in progress, step {state.global_step}"
        if jobs := hub.jobs(owner.args.hub_strategy, checkpoint, owner.args.output_dir, at_end):
            owner._fire("on_push_begin", state)
        for folder, path, ignore in jobs:
            if owner.dist.is_main:
                owner.uploader.push(folder, path, message, ignore)

    def copy_files(self) -> None:
        """Copy log and model to the remote folder, where there is one."""
        if self.owner.store.remote is not None:
            self.owner.dist.on_main(self.owner.store.push_files, "the copy of log and model")

    def at_end(self) -> None:
        """Upload and copy what a run leaves behind."""
        owner = self.owner
        if owner.args.push_to_hub:
            owner.save_model(_internal_call=True)
            owner.run.unsaved = None
            owner.create_model_card()
            self.upload(None, owner.state, at_end=True)
            owner.dist.on_main(owner.uploader.finish, "the last uploads")
            self.rotate(owner.state.log_history, owner.state.best_model_checkpoint)
        self.copy_files()

    def after_error(self, error: Exception) -> None:
        """Save the last whole optimizer step after `error`, as far as it can be had."""
        owner, why_not = self.owner, None
        checkpoints, dist, step = owner.checkpoints, owner.dist, owner.state.global_step
        if owner.run.is_stepping:
            why_not = "the weights were being updated"
        elif dist.num_processes > 1 and (dist.shards or dist.uses_deepspeed):
            why_not = "the weights are divided over the processes, which may be elsewhere"
        elif not dist.all_come(f"error after {step} {checkpoints.boundary is None}"):
            why_not = "the other processes have not ended in the same step"
        elif checkpoints.saved_step == step and checkpoints.boundary is not None:
            return  # it is there
        what = f"no checkpoint was saved, for {why_not}"
        if why_not is None:
            try:
                if checkpoints.boundary is None:
                    owner.store_flos()
                self.ask()
                self.settle()
                problem = owner.run.unsaved.why if owner.run.unsaved is not None else ""
            except Exception as another:
                problem = f"{type(another).__name__}: {another}"
            what = f"{owner.store.path(step)} holds the last whole step; resume from it"
            if problem and checkpoints.saved_step != step:  # a callback may fail after the save
                what = f"no checkpoint could be saved ({problem})"
        logger.warning("Training ended by %s: %s.", type(error).__name__, what)

    # ---- models ----

    def averages(self) -> contextlib.AbstractContextManager[None]:
        """Where a model is saved: with the averages of an optimizer that keeps them."""
        if not hasattr(self.owner.optimizer, "eval"):
            return contextlib.nullcontext()
        return eval_loop.averages_in(self.owner.optimizer, otherwise=self.owner.is_in_train)

    def model(self, directory: str, of_checkpoint: bool, writes_itself: bool) -> None:
        """Write the model and what belongs to it; large sharded weights by all processes, each its share, unless a
        subclass has its own `_save` (`writes_itself`).
        """
        owner, args, dist = self.owner, self.owner.args, self.owner.dist
        model = wrapping.unwrap(owner.model)
        check = bool(args.check_saved_model) and not of_checkpoint
        should_save = dist.is_local_main if args.save_on_each_node else dist.is_main
        alone = dist.num_processes == 1 or check or args.save_on_each_node or writes_itself
        if not alone and shares.save(model, directory, dist, args.max_shard_size):
            if should_save:
                self.beside(Path(directory))
            return
        whole = None
        if dist.shards or dist.uses_deepspeed:
            whole = dist.whole_state_dict(owner.model, weights.is_saved(model), lambda name: should_save)
        if should_save:
            owner._save(directory, **({} if whole is None else {"state_dict": whole}))
            if check:
                reload.check(model, directory, whole, logits=dist.cp_size == 1)
            elif args.check_saved_model is None and not writes_itself and whole is None:
                first = owner.checkpoints and owner.checkpoints.saved_step is None and not args.save_async
                if not of_checkpoint or (first and not wrapping.is_peft_model(model)):
                    reload.check_if_cheap(model, directory, logits=not of_checkpoint and dist.cp_size == 1)

    def write(self, directory: Path, state_dict: dict[str, torch.Tensor] | None) -> None:
        """Write the model, or the weights in `state_dict`, and what belongs to it on this process."""
        model: nn.Module = wrapping.unwrap(self.owner.model)
        weights.save_weights(model, directory, state_dict, self.owner.args.max_shard_size)
        self.beside(directory)

    def beside(self, directory: Path) -> None:
        """Write what belongs to the model besides its weights: the processing class and the arguments of the run."""
        owner = self.owner
        processor: Any = owner.processing_class or getattr(owner.data_collator, "tokenizer", None)
        if hasattr(processor, "save_pretrained"):
            processor.save_pretrained(str(directory))
        now, (known, text) = [owner.state, *vars(owner.args).values()], self._arguments
        if len(now) != len(known) or not all(map(operator.is_, now, known)):
            text = owner.args.to_json_string() + "\n"  # once in a run, where none is set between two saves
            self._arguments = now, text
        (directory / "training_args.json").write_text(text, encoding="utf-8")
