"""Resuming: plan, best model, data position and changed arguments of a run that starts from a checkpoint."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler

from posttrain.core.checkpoint import codec, elastic, sharded
from posttrain.core.checkpoint.foreign import Taken
from posttrain.core.checkpoint.manifest import is_foreign, rows_per_batch
from posttrain.core.data.samplers import EpochSampler
from posttrain.core.errors import CheckpointError
from posttrain.core.optim import lr_scheduler as schedules
from posttrain.core.state import TrainerState
from posttrain.core.training import ema
from posttrain.core.training.plan import Plan, resumed

if TYPE_CHECKING:
    from posttrain.core.trainer import Trainer
    from posttrain.core.training.run import Run

logger = logging.getLogger(__name__)

# Arguments of logging, saving and set-up, which change no numbers.
_BESIDE_THE_RUN = (
    "output_dir overwrite_output_dir run_name project report_to disable_tqdm push_to_hub resume_from_checkpoint "
    "local_rank include_num_input_tokens_seen include_for_metrics load_best_model_at_end metric_for_best_model "
    "greater_is_better per_device_eval_batch_size prediction_loss_only batch_eval_metrics skip_memory_metrics debug "
    "torch_empty_cache_steps restore_callback_states_from_checkpoint bf16_full_eval fp16_full_eval "
    "max_nonfinite_steps auto_find_batch_size use_cache ignore_data_skip allow_pickle"
).split()
_PREFIXES_BESIDE = ("do_", "log_", "logging_", "save_", "hub_", "eval_", "ddp_", "dataloader_", "trackio_")
# Options of an optimizer's groups that come from arguments, by the argument.
_OPTIONS = {
    "weight_decay": ("weight_decay",),
    "adam_beta1": ("betas", "beta1"),
    "adam_beta2": ("betas", "beta2"),
    "adam_epsilon": ("eps",),
}
_OF_MIXTURES = "dataset_weights", "dataset_weights_of", "dataset_max_tokens"
_REORDERS = ("seed", "data_seed", "train_sampling_strategy", "max_batch_tokens", *_OF_MIXTURES)
_NOTES = dict.fromkeys(_REORDERS, "rows continue in another order") | {
    "learning_rate": "the new one applies from the next optimizer step on",
    "weight_decay": "the new one applies from the next optimizer step on",
    "seed": "random numbers continue, and rows come in another order",
    "per_device_train_batch_size": "rows continue at the same position",
    "gradient_accumulation_steps": "rows continue at the same position",
    "num_train_epochs": "the schedule is the new run's",
    "max_steps": "the schedule is the new run's",
    "max_duration": "the schedule is the new run's",
}


def resume_plan(owner: Trainer, plan: Plan, loader: Any, checkpoint: Path) -> Plan:
    """`plan` for a run that resumes from `checkpoint`, whose optimizer steps may have held another number of rows."""
    by_steps = owner.args.max_steps > 0  # the run does not end with its epochs
    if not sharded.is_there(checkpoint, "rank-0"):
        return _plan_without_position(plan, loader, checkpoint, by_steps)
    saved = elastic.load(checkpoint, owner.dist.rank, owner.dist.world_size)
    trainer, rows, then = saved["trainer"], owner.checkpoints.rows_per_step, saved["rows_per_update"]
    *shape, resized_at = trainer["plan"]
    is_alike = rows == then and shape == [plan.accumulation, plan.batches_per_epoch]
    if plan.batches_per_epoch is None or is_alike:
        at: tuple[int, int, int] | None = resized_at
        return plan if at is None else resumed(plan, *at, by_steps)
    step = TrainerState.load_from_json(checkpoint / "trainer_state.json").global_step
    epoch, left = trainer["progress"]["epoch"], plan.batches_per_epoch
    if trainer["progress"]["epoch_ended"] or trainer["epoch_stops"]:
        epoch += 1
    else:
        left = owner.batches_left(loader, trainer)
    changed = resumed(plan, step, epoch, left, by_steps)
    if rows != then:
        logger.warning(
            f"A step holds {rows} rows (batch x accumulation x processes) and held {then} in {checkpoint}: the data "
            f"continues with the row at which the checkpoint stands, {changed.max_steps - step} steps are left, and "
            f"the schedule ends at step {changed.max_steps}. global_batch_size={then} would keep the step, with any "
            "number of processes."
        )
    return changed


def _plan_without_position(plan: Plan, loader: Any, checkpoint: Path, by_steps: bool) -> Plan:
    state = TrainerState.load_from_json(checkpoint / "trainer_state.json")
    if plan.steps_per_epoch is None or plan.batches_per_epoch != len(loader):
        return plan
    epoch, rows = _position(plan, loader, state, checkpoint)
    before, batches = plan.position(state.global_step)
    if (epoch, rows) == (before, batches * loader.rows_per_batch):
        return plan
    left = loader.batches_left({"epoch": epoch, "given": [rows], "to_drop": 0})
    changed = resumed(plan, state.global_step, epoch, left, by_steps)
    logger.warning(
        f"{checkpoint} stands at epoch {state.epoch:.4g} after {state.global_step} steps, so its steps held another "
        f"number of rows: the data continues there, {changed.max_steps - state.global_step} steps are left, and the "
        f"schedule ends at step {changed.max_steps}."
    )
    return changed


def _position(plan: Plan, loader: Any, state: TrainerState, checkpoint: Path) -> tuple[int, int]:
    """(epoch, rows of it read) of a checkpoint without a position; of steps of another size, by the epoch's share."""
    unit, length = loader.rows_per_batch, plan.batches_per_epoch or 1
    # That of `state` is the size of this run by now.
    theirs = rows_per_batch(checkpoint, TrainerState.load_from_json(checkpoint / "trainer_state.json").train_batch_size)
    if state.epoch and theirs and loader.total_rows:
        number = max(loader.total_rows // theirs, 1) if loader.drop_last else -(-loader.total_rows // theirs)
        epoch, batches = divmod(round(state.epoch * number), number)
        return epoch, batches * theirs
    epoch, batches = plan.position(state.global_step)
    if state.epoch and abs(plan.epoch_at(epoch, batches, state.global_step) - state.epoch) >= 0.5 / length:
        epoch, batches = int(state.epoch), int((state.epoch % 1) * length + 1e-6)
    return epoch, batches * unit


def _without_position(run: Run, checkpoint: Path, taken: Taken) -> None:
    """Move `run` to where `checkpoint` stands, which holds no position, and of which `taken` was loaded already."""
    state, lr_scheduler = run.owner.state, run.owner.lr_scheduler
    step, lacks = state.global_step, list(taken.lacks)
    if "schedule" not in taken.parts and not schedules.follows_a_metric(lr_scheduler):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the optimizer has made no step yet
            for _ in range(min(step, 1) if isinstance(lr_scheduler, schedules.TokenLR) else step):
                schedules.step(lr_scheduler, state.num_input_tokens_seen)
    run.progress.last_logged, run.rng = step, taken.rng
    control: Any = state.stateful_callbacks.get("TrainerControl", {})  # as theirs was when they saved
    run.epoch_stopped = control.get("args", {}).get("should_epoch_stop", False)
    data = "starts from the beginning"
    if run.plan.steps_per_epoch is not None and not run.owner.args.ignore_data_skip:
        data, args, progress = _seek(run, state, checkpoint), run.owner.args, run.progress
        saves = args.eval_strategy if args.save_strategy == "best" else args.save_strategy
        if progress.epoch and not progress.batches and saves != "epoch":  # saved before what ends an epoch was done
            progress.epoch, progress.batches = progress.epoch - 1, run.plan.batches_per_epoch or 0
    elif is_foreign(checkpoint) and (run.reads_as_given or run.plan.uses) and not run.owner.args.ignore_data_skip:
        data = _seek_in_stream(run, state, checkpoint)
    known = "holds no optimizer and no random state (save_only_model=True): both start anew."
    if is_foreign(checkpoint):
        if (checkpoint / "training_args.bin").is_file():
            lacks.append("the arguments (training_args.bin is a pickle; those of this run count)")
        parts, missed = ", ".join(["weights", "log", "step", *taken.parts]), "; ".join(lacks) or "nothing"
        known = "was written by another trainer, such as transformers' or trl's, and cannot be verified. "
        known += f"Taken from it: {parts}. Not taken: {missed}."
    logger.warning("%s %s The schedule continues at step %d, and the data %s.", checkpoint, known, step, data)


def _seek(run: Run, state: TrainerState, checkpoint: Path) -> str:
    """Let the data continue after `state`; what it does, in words."""
    run.progress.epoch, rows = _position(run.plan, run.loader, state, checkpoint)
    run.loader.set_epoch(run.progress.epoch)
    if len(run.loader) != (length := run.plan.batches_per_epoch or 0):  # each batch of it is several of the plan
        batches = rows // run.loader.rows_per_batch
        run.loader.skip(batches, batches * run.loader.rows_per_batch)
        run.progress.batches = batches * (length // len(run.loader))
        run.loader.number(batches)
        return f"continues with rollout {batches} of epoch {run.progress.epoch}"
    run.loader.skip(rows // run.loader.rows_per_batch, rows)
    batches = run.progress.batches = length - run.loader.batches_left(run.loader.state_dict())
    run.loader.number(batches)
    of_transformers = type(run.loader.sampler) in (EpochSampler, SequentialSampler)
    order = "in the order of transformers' Trainer" if of_transformers else "in an order of this run's own"
    return f"continues with batch {batches} of epoch {run.progress.epoch}, {order} for its seed"


def _seek_in_stream(run: Run, state: TrainerState, checkpoint: Path) -> str:
    """`_seek` in a stream that another trainer has read, whose epochs are whole passes and the share of `max_steps`
    that it has made since; its steps held as many micro-batches as those of this run.
    """
    saved = TrainerState.load_from_json(checkpoint / "trainer_state.json")
    epoch, share = divmod(state.epoch or 0.0, 1)
    steps = round(share * saved.max_steps)
    if not steps and epoch == 1 and saved.max_steps == state.global_step:  # its end, in the first pass
        epoch, steps = 0, state.global_step
    loader, uses, number = run.loader, run.plan.uses, steps * run.plan.accumulation
    rows = number * (rows_per_batch(checkpoint, saved.train_batch_size) or loader.rows_per_batch)
    batches, done = rows // loader.rows_per_batch, f"{rows} rows"
    if uses is not None:  # a rollout that is not used up is made again
        batches = number // uses
        rows, done = batches * loader.rows_per_batch, f"{batches} rollouts"
    run.progress.epoch, run.progress.batches = int(epoch), batches * (uses or 1)
    loader.set_epoch(run.progress.epoch)
    loader.skip(batches, rows)
    loader.number(batches)
    return f"continues after {done} of pass {run.progress.epoch} over the stream"


def resume(run: Run, checkpoint: Path) -> None:
    """Set state, optimizer, schedule, callbacks and data to where `checkpoint` stands."""
    owner, args, plan, fresh = run.owner, run.owner.args, run.plan, run.owner.state
    run.is_new = False
    ema.load(run.ema, checkpoint)
    owner.state = state = TrainerState.load_from_json(checkpoint / "trainer_state.json")
    for name in ("is_local_process_zero", "is_world_process_zero", "train_batch_size", "is_hyper_param_search"):
        setattr(state, name, vars(fresh)[name])
    if (best := state.best_model_checkpoint) is not None:
        remote = owner.store.remote
        is_there = owner.dist.on_main(
            lambda: Path(best).is_dir() or (remote is not None and Path(best).name in remote.whole())
        )
        if not is_there:  # say so at once, rather than when it is to be loaded
            logger.warning(
                f"The best checkpoint so far, {best} ({args.metric_for_best_model}={state.best_metric}), is no longer "
                "there. The best of those that follow is kept if it is better than that."
            )
            state.best_model_checkpoint = None
    if args.restore_callback_states_from_checkpoint:
        owner.callback_handler.restore(state.stateful_callbacks)
    options, path = group_options(owner.optimizer), checkpoint / "training_args.json"
    has_optimizer = any(sharded.is_there(checkpoint, name) for name in ("optimizer", "engine"))  # not the weights alone
    taken = None if has_optimizer else owner.checkpoints.read_foreign(checkpoint)
    if taken is None:
        changed = differences(codec.read_json(path) if path.is_file() else {}, json.loads(args.to_json_string()))
    else:
        changed = _changed_options(options, owner.optimizer)
    if changed:
        logger.warning("%s", explain(changed, str(checkpoint), inside_epoch=not float(state.epoch).is_integer()))
    position = owner.checkpoints.read(checkpoint) if taken is None else {}
    apply_changes(changed, owner.optimizer, options, owner.lr_scheduler)
    if taken is not None:
        return _without_position(run, checkpoint, taken)
    owner.load_state_dict(position["trainer"])
    if plan.resized_at is not None and plan.resized_at[:2] == (state.global_step, run.progress.epoch):
        if not args.ignore_data_skip:  # a micro-batch holds another number of rows now
            run.progress.batches = (plan.batches_per_epoch or 0) - plan.resized_at[2]
    run.loader.number(run.progress.batches)
    run.rng = position["rng"]


# ------------------------------------------------------------------------------------------ arguments that have changed


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """``{name: (old, new)}`` of the arguments that change a run, between two `TrainingArguments.to_dict`; one that
    either of them lacks is left out.
    """
    return {
        name: (before[name], now[name])
        for name in now
        if name in before
        and before[name] != now[name]
        and name not in _BESIDE_THE_RUN
        and not name.startswith(_PREFIXES_BESIDE)
    }


def _changed_options(fresh: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> dict[str, tuple[Any, Any]]:
    """`differences` by what the options of `optimizer` are and were before its state was loaded (`fresh`)."""
    new, old = fresh[0], group_options(optimizer)[0]
    options = [(name, key) for name, keys in ({"learning_rate": ("initial_lr",)} | _OPTIONS).items() for key in keys]
    return {name: (old[key], new.get(key)) for name, key in options if key in old and old[key] != new.get(key)}


def explain(changed: dict[str, tuple[Any, Any]], checkpoint: str, inside_epoch: bool) -> str:
    """One sentence for a log, listing what changed since `checkpoint`, which was saved `inside_epoch` or after one.
    Raises a `CheckpointError` where another optimizer was chosen, for which the saved state is of no use.
    """
    old, new = changed.get("optim", (None, None))
    if old != new and not {old, new} <= {"adamw_torch", "adamw_torch_fused"}:
        raise CheckpointError(
            f"{checkpoint} holds the state of optim={old!r}, and this run has optim={new!r}, which cannot resume "
            f"from it. Set optim={old!r}, or start from the checkpoint's weights alone: load the model from it, and "
            "pass no resume_from_checkpoint."
        )
    listed = []
    for name, (before, after) in changed.items():
        note = _NOTES.get(name)
        if name in _REORDERS and inside_epoch:
            note = f"{note}: in the current epoch some are read twice and some not at all"
        listed.append(f"{name}: {before!r} -> {after!r}{f' ({note})' if note else ''}")
    return f"Arguments have changed since {checkpoint} was saved: {'; '.join(listed)}."


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each group of parameters, to be compared after a state was loaded."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def apply_changes(
    changed: dict[str, tuple[Any, Any]], optimizer: torch.optim.Optimizer, fresh: list[dict[str, Any]], scheduler: Any
) -> None:
    """Apply `changed` constants of the optimizer (`differences`) after its loaded state and that of the schedule
    restored the old ones; `fresh` are its `group_options` from before.
    """
    names = {option for name in changed for option in _OPTIONS.get(name, ())}
    for group, options in zip(optimizer.param_groups, fresh, strict=True):
        group.update({name: options[name] for name in names if name in options and name in group})
    old, new = changed.get("learning_rate", (None, None))
    if old is None or new is None:
        return
    for group, options in zip(optimizer.param_groups, fresh, strict=True):
        for name in ("lr", "initial_lr"):
            if name in group:
                group[name] = group[name] * (new / old) if old else options[name]
    if getattr(scheduler, "base_lrs", None):
        starts = [options.get("initial_lr", options["lr"]) for options in fresh]
        scheduler.base_lrs = [b * (new / old) if old else s for b, s in zip(scheduler.base_lrs, starts, strict=True)]
    if isinstance(scheduler, LambdaLR):
        for group, base, curve in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = base * curve(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
