"""The checkpoints of a run: what they hold, when they are there, which are kept, and what a resume reads of them."""

from __future__ import annotations

import copy
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from posttrain.core.checkpoint import codec, elastic, foreign, sharded, weights
from posttrain.core.checkpoint.arguments import asked_for
from posttrain.core.checkpoint.manifest import RECORD, is_foreign, read_manifest, run_of
from posttrain.core.checkpoint.store import number_of
from posttrain.core.checkpoint.transaction import Saver
from posttrain.core.data import rng
from posttrain.core.errors import CheckpointError
from posttrain.core.files import check_space
from posttrain.core.logging.metrics import plain
from posttrain.core.models import wrapping
from posttrain.core.optim import builder
from posttrain.core.state import TrainerState, lossy

if TYPE_CHECKING:
    from posttrain.core.trainer import Trainer

logger = logging.getLogger(__name__)

#: The name of the averaged weights in a checkpoint: ``ema.safetensors`` and ``ema.json``.
AVERAGED_WEIGHTS = "ema"
#: Beside the state of an optimizer, the names of its parameters.
NAMES = "names"


class CheckpointManager:
    """Finds, writes, reads and rotates the checkpoints of one run of the trainer that owns it."""

    def __init__(self, owner: Trainer) -> None:
        self.owner = owner
        self.args, self.dist, self.store = args, dist, store = owner.args, owner.dist, owner.store
        place: dict[str, Any] = {"rank": dist.process_index, "world_size": dist.num_processes}
        place |= {"gather": dist.gather_patiently, "patience": max(args.ddp_timeout, 3600)}
        place["leader"] = dist.process_index - dist.local_rank if args.save_on_each_node else 0
        self.should_save, self.limit = args.should_save, args.most_checkpoints  # by this process; None: all are kept
        self.saver = Saver(store, **place)
        self.rows_per_step = owner.get_total_train_batch_size(args)  # over all processes
        self.saved_step: int | None = None  # of the newest checkpoint that this run wrote or started from
        self.run = ""  # its id, in the manifest of each of its checkpoints
        #: What this process must remember of the last whole optimizer step, where an error is to save it.
        self.boundary: dict[str, Any] | None = None
        self.state_at_save = TrainerState()  # that the last save wrote
        self._is_saving = False
        self._positions: dict[int, dict[str, Any]] = {}
        self._parts: dict[str, Any] = {}
        self._adapters_checked = False

    # ---- before a run ----

    def find(self, wanted: str | bool | Path | None) -> Path | None:
        """The checkpoint that `train` was asked to resume from, verified; None: start from the beginning."""
        wanted = asked_for(self.args.resume_from_checkpoint if wanted is None else wanted)
        self.on_savers(self.store.clean)
        start, self.run, notice = self.dist.on_main(lambda: self._begin(wanted), "the check of the checkpoint")
        if notice and not self.args.overwrite_output_dir:
            logger.warning("%s %s", self.args.output_dir, notice)
        return start

    def _begin(self, wanted: Any) -> tuple[Path | None, str, str]:
        """(the checkpoint to start from, the id of the run, what there is to say about the output directory)."""
        start = elastic.starting_point(self.store, wanted)
        manifest = {"step": -1} if start is None or is_foreign(start) else read_manifest(start)
        run, there, found = run_of(manifest), self.store.by_run(), self.store.found
        later = [path for one in there for path in there[one] if number_of(path) > manifest["step"]]
        damaged = [path for path in there.get(run, ()) if path in later and self.store.verify(path)]
        later = [path for path in later if path not in damaged]  # those were passed over
        if run is None or any(path in later for path in there.get(run, ())):
            run = secrets.token_hex(8)  # the run of the checkpoint has gone on without this one
        notice, named = "", ", ".join(path.name for path in later)
        if start is None and self.store.checkpoints():
            notice = (
                "holds checkpoints of an earlier run, and this run starts from the beginning and adds to them. To "
                "resume, pass resume_from_checkpoint=True; else set another output_dir, or overwrite_output_dir=True."
            )
        elif start is not None and later:
            notice = (
                f"holds {named} of another run, and this run goes on from {start}. resume_from_checkpoint=True follows "
                "the run that saved last; set another output_dir to keep them apart."
            )
        elif start is None and found and RECORD not in found:
            notice = (
                f"is not empty and holds no earlier run ({', '.join(found[:5])}{', ...' if len(found) > 5 else ''}). "
                "Files of the same names are replaced. Set another output_dir, or overwrite_output_dir=True."
            )
        return start, run, notice

    def check_space(self, saves: int) -> None:
        """Warn before training that the disk is too small for the `saves` checkpoints of this run."""
        if self.args.save_strategy == "no" or not self.dist.is_main:
            return
        count = saves if self.limit is None else min(saves, self.limit + 1)  # the oldest goes after the newest is there
        model = wrapping.unwrap(self.owner.model)
        is_saved = weights.is_saved(model)
        least = sum(p.nbytes for name, p in model.named_parameters() if is_saved(name))
        each = least if self.args.save_only_model else least + builder.state_bytes(self.owner.optimizer)
        if (problem := check_space(self.store.output_dir, each * count, count, least)) is not None:
            logger.warning("%s", problem)

    def check_state(self) -> None:
        """Raise before training, rather than at the first save, where a state cannot be saved."""
        owner, state = self.owner, self.owner.state
        if not self.args.save_only_model:
            self.check_optimizer_state()
            codec.check_tree(owner.lr_scheduler.state_dict(), _name("lr_scheduler", owner.lr_scheduler))
            try:
                mine = owner.state_dict()
            except (AttributeError, KeyError):
                mine = None  # that of a subclass may hold what its first step makes
            codec.check_tree(mine, _name("trainer", owner))
        state.collect([*owner.callback_handler.callbacks, owner.control])
        for where, value in lossy(state.stateful_callbacks):
            logger.warning(
                f"The state of the callback {where} is of type {type(value).__name__}, which JSON cannot hold: a "
                "checkpoint holds it as text, and a resumed run gets the text. Return plain numbers, strings, lists "
                "and dicts from state()."
            )

    def check_optimizer_state(self) -> None:
        """As `check_state`; once more after the first step, with which most optimizers begin their state."""
        if not self.args.save_only_model and not self.dist.uses_deepspeed:
            state = self.owner.optimizer.state_dict()
            where = _name("optimizer", self.owner.optimizer)
            codec.check_tree(sharded.part(state) if self.dist.shards else state, where)

    # ---- writing ----

    def save(self) -> None:
        """Save at this optimizer step; `saver.settle` returns the outcome. `save_async` writes the bytes later."""
        owner, later = self.owner, self.args.save_async
        self.state_at_save = copy.copy(owner.state) if later else owner.state
        if not self.args.save_only_model:
            self._positions = self._of_processes()
            self._parts = {name: part.state_dict() for name, part in owner.checkpoint_parts().items()}
        self._is_saving = True
        try:
            about = {"run": self.run, "rows_per_batch": self.rows_per_step // self.args.gradient_accumulation_steps}
            self.saver.save(owner.state.global_step, owner.write_checkpoint, later, about)
        finally:  # written, or copied
            self._is_saving, self._positions, self._parts = False, {}, {}

    def write(self, directory: Path) -> None:
        """Write this process' files of the checkpoint that `save` saves into `directory`. Raises a `RuntimeError` where
        none is being saved.
        """
        owner, keeps = self.owner, not self.args.save_only_model
        if not self._is_saving:
            raise RuntimeError(
                "write_checkpoint was called outside of a save. Set control.should_save in a callback to save a "
                "checkpoint."
            )
        self._write_model(directory, wrapping.unwrap(owner.model))
        if keeps:
            for rank, position in self._positions.items():
                codec.save_tree(position, directory / f"rank-{rank}")
            self._write_optimizer(directory)
        if self.should_save:
            if keeps:
                codec.save_tree(owner.lr_scheduler.state_dict(), directory / "scheduler")
            if owner.run.ema is not None:
                codec.save_tree(owner.run.ema.state_dict(), directory / AVERAGED_WEIGHTS)
            owner.state.collect([*owner.callback_handler.callbacks, owner.control])
            owner.state.save_to_json(directory / "trainer_state.json")
        if self.dist.is_main:
            for name, part in self._parts.items():
                codec.save_tree(part, directory / name)

    def close(self) -> None:
        """Let the save under way and the removals end, also after an error."""
        self.saver.leave()
        self.store.settle()

    # ---- reading ----

    def read(self, checkpoint: Path) -> dict[str, Any]:
        """Load optimizer, schedule and loss scaler from `checkpoint`; returns the position of this process. With
        another number of processes than saved it, the random numbers are drawn anew.
        """
        dist, step = self.dist, self.owner.state.global_step
        self._read_optimizer(checkpoint)
        self.owner.lr_scheduler.load_state_dict(codec.load_tree(checkpoint / "scheduler"))
        self.saved_step = step
        position = elastic.load(checkpoint, dist.rank, dist.world_size)
        if position["rng"] is None:
            position["rng"] = elastic.fresh_random_numbers(self.args.seed, step, dist.rank)
        if dist.scaler is not None and position.get("scaler"):
            dist.scaler.load_state_dict(position["scaler"])
        return position

    def position(self) -> dict[str, Any]:
        """What this process alone must remember."""
        return {
            "rng": rng.rng_state(),
            "trainer": self.owner.state_dict(),
            "rows_per_update": self.rows_per_step,
            "scaler": None if self.dist.scaler is None else self.dist.scaler.state_dict(),
        }

    def remember(self) -> None:
        """Keep where the run stands between two steps, for a save after an error within the next one. It waits for no
        device: sums that are there become numbers once they are written.
        """
        position = self.position()
        self.boundary = position | {"trainer": copy.deepcopy(position["trainer"])}

    def read_foreign(self, checkpoint: Path) -> foreign.Taken:
        """As `read`, as far as `checkpoint` holds such files of transformers' trainer."""
        optimizer = None if self.dist.uses_deepspeed else self.owner.optimizer
        objects = (optimizer, self.owner.lr_scheduler, self.dist.scaler)
        place = {"rank": self.dist.rank, "world_size": self.dist.world_size}
        return foreign.take(checkpoint, *objects, **place, allow_pickle=self.args.allow_pickle)

    # ---- files ----

    def _write_model(self, directory: Path, model: nn.Module) -> None:
        """The weights: as ``from_pretrained`` reads them, or of each process its part."""
        is_peft = wrapping.is_peft_model(model)
        sharding = self.dist.sharding
        if sharding is not None and sharding.state_dict_type == "sharded" and not is_peft:
            stem = sharded.stem(weights.PARTS, self.dist.process_index, self.dist.num_processes)
            codec.save_tree(sharded.part(dict(model.state_dict())), directory / stem)
            if self.dist.is_main:
                weights.save_description(model, directory)
                self.owner.saving.beside(directory)
            return
        self.owner.save_model(str(directory), _internal_call=True)
        if is_peft and weights.has_encoder(model):
            whole = self.dist.whole_state_dict(model, weights.is_saved(model), lambda name: self.should_save)
            if self.should_save:
                weights.save_encoder(model, directory, whole)
        if is_peft and not self._adapters_checked:  # of the first checkpoint: what was saved must be what is trained
            whole = self.dist.whole_state_dict(model, weights.is_saved(model))
            if self.dist.is_main:
                weights.check_adapters(model, directory, whole)
            self._adapters_checked = True

    def _write_optimizer(self, directory: Path) -> None:
        rank, world_size, optimizer = self.dist.process_index, self.dist.num_processes, self.owner.optimizer
        if self.dist.uses_deepspeed:
            codec.save_tree(self.dist.engine_state(), directory / sharded.stem("engine", rank, world_size))
            return
        names = _parameter_names(optimizer, wrapping.unwrap(self.owner.model))
        if self.dist.shards:
            stem = sharded.stem("optimizer", rank, world_size)
            codec.save_tree(sharded.part(optimizer.state_dict() | {NAMES: names}), directory / stem)
        elif self.should_save:
            codec.save_tree(optimizer.state_dict() | {NAMES: names}, directory / "optimizer")

    def _read_optimizer(self, checkpoint: Path) -> None:
        if self.dist.uses_deepspeed:
            state = sharded.own(checkpoint, "engine", self.dist.process_index, self.dist.num_processes)
            return self.dist.load_engine_state(state)
        # Whole tensors of which this process needs a part are mapped rather than read.
        saved, optimizer = sharded.load(checkpoint, "optimizer", mmap=self.dist.shards), self.owner.optimizer
        now = _parameter_names(optimizer, wrapping.unwrap(self.owner.model))
        if (before := saved.pop(NAMES, now)) != now:  # the state goes by the order of the parameters
            raise CheckpointError(
                f"{checkpoint} holds the optimizer's state of other parameters than this run trains: "
                f"{_difference(before, now)}. Train the same parameters, in the same groups, as the run that "
                "saved it; or start from the checkpoint's weights alone: load the model from it, and pass no "
                "resume_from_checkpoint."
            )
        sharded.load_optimizer(saved, optimizer)

    def _of_processes(self) -> dict[int, dict[str, Any]]:
        """The positions that this process writes, by rank: its own, or none where another one has the same. Where each
        machine saves for itself, its main process writes those of all: each disk then holds what any number of
        processes needs.
        """
        mine = self.boundary or self.position()
        trainer = mine["trainer"]
        progress = trainer["progress"] | {"grad_norm": float(trainer["progress"]["grad_norm"])}
        mine = mine | {"trainer": trainer | {"progress": progress, "metrics": plain(trainer["metrics"])}}
        if not self.args.save_on_each_node:
            return {} if self.dist.peer_rank else {self.dist.rank: mine}
        positions = dict(enumerate(self.dist.gather_object(mine)))
        return positions if self.should_save else {}

    def on_savers(self, work: Callable[[], Any]) -> None:
        """Run `work` on the process that writes checkpoints: the main one, or the main one of each machine."""
        if not self.args.save_on_each_node:
            self.dist.on_main(work)
            return
        if self.should_save:
            work()
        self.dist.meet("the process of each machine that writes")


def _name(part: str, value: Any) -> str:
    return f"the state_dict() of the {part} ({value.__class__.__name__})"  # of a weak reference too


def _parameter_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """The names in `model` of the parameters of `optimizer`, group by group; empty where one is not in it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]


def _difference(before: list[list[str]], now: list[list[str]]) -> str:
    """How two different `_parameter_names` differ, as a part of a sentence."""
    old, new = ([name for group in groups for name in group] for groups in (before, now))
    gone, added = [n for n in old if n not in {*new}], [n for n in new if n not in {*old}]
    parts = [
        f"{when} alone {', '.join(names[:3])}{f' ({len(names)} in all)' if len(names) > 3 else ''}"
        for when, names in (("then", gone), ("now", added))
        if names
    ]
    return ", and ".join(parts) or "the same ones in another order or in other groups"
