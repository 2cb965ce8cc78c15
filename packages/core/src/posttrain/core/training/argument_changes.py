"""Compares the arguments of a checkpoint and the resumed run, and applies changes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from posttrain.core.checkpoint import codec
from posttrain.core.errors import CheckpointError

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
_ONE_STATE = ({"adamw_torch", "adamw_torch_fused"},)
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


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """``{name: (old, new)}`` of the arguments that change a run, between two `TrainingArguments.to_dict`; one that
    either of them lacks is left out."""
    return {
        name: (before[name], now[name])
        for name in now
        if name in before
        and before[name] != now[name]
        and name not in _BESIDE_THE_RUN
        and not name.startswith(_PREFIXES_BESIDE)
    }


def found(checkpoint: Path, args: Any, epoch: float) -> dict[str, tuple[Any, Any]]:
    """`differences` between the arguments that `checkpoint` was saved with, after so many passes over the data
    (`epoch`, a fraction), and `args`; a warning lists them."""
    path = checkpoint / "training_args.json"
    before = codec.read_json(path) if path.is_file() else {}
    return _warned_of(differences(before, json.loads(args.to_json_string())), checkpoint, epoch)


def of_groups(
    fresh: list[dict[str, Any]], optimizer: torch.optim.Optimizer, checkpoint: Path, epoch: float
) -> dict[str, tuple[Any, Any]]:
    """`found` for a `checkpoint` whose arguments cannot be read: what the loaded options of `optimizer` tell of them,
    beside its `fresh` `group_options` from before its state was loaded."""
    new, old = fresh[0], group_options(optimizer)[0]
    options = [(name, key) for name, keys in ({"learning_rate": ("initial_lr",)} | _OPTIONS).items() for key in keys]
    changed = {name: (old[key], new.get(key)) for name, key in options if key in old and old[key] != new.get(key)}
    return _warned_of(changed, checkpoint, epoch)


def _warned_of(changed: dict[str, tuple[Any, Any]], checkpoint: Path, epoch: float) -> dict[str, tuple[Any, Any]]:
    if changed:
        logger.warning("%s", explain(changed, str(checkpoint), inside_epoch=not float(epoch).is_integer()))
    return changed


def explain(changed: dict[str, tuple[Any, Any]], checkpoint: str, inside_epoch: bool) -> str:
    """One sentence for a log, listing what changed since `checkpoint`, which was saved `inside_epoch` or after one.
    Raises a `CheckpointError` where another optimizer was chosen, for which the saved state is of no use."""
    old, new = changed.get("optim", (None, None))
    if old != new and not any({old, new} <= names for names in _ONE_STATE):
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


def apply(
    changed: dict[str, tuple[Any, Any]], optimizer: torch.optim.Optimizer, fresh: list[dict[str, Any]], scheduler: Any
) -> None:
    """Apply `changed` constants of the optimizer (`differences`) after its loaded state and that of the schedule
    restored the old ones; `fresh` are its `group_options` from before."""
    names = {option for name in changed for option in _OPTIONS.get(name, ())}
    for group, options in zip(optimizer.param_groups, fresh, strict=True):
        group.update({name: options[name] for name in names if name in options and name in group})
    old, new = changed.get("learning_rate", (None, None))
    if not old or new is None:
        return
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * (new / old)
        if "initial_lr" in group:
            group["initial_lr"] = group["initial_lr"] * (new / old)
    if getattr(scheduler, "base_lrs", None):
        scheduler.base_lrs = [rate * (new / old) for rate in scheduler.base_lrs]
    if isinstance(scheduler, LambdaLR):
        rates = zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        for group, base, curve in rates:
            group["lr"] = base * curve(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
