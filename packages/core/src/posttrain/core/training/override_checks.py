"""Warns about overridden methods of transformers' `Trainer` that are never called here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_LOOP = "the loop is train; override windows, train_on_window or training_step"
_STATE = "override state_dict and load_state_dict"
_FLAGS = "override log, evaluate or save_model; a TrainerCallback decides when"
_GRADIENTS = "override train_on_window, or change gradients in a callback's on_pre_optimizer_step"
_HUB = "override push_to_hub"
_SEARCH = "override hyperparameter_search or call_model_init"
_PROCESSES = "set accelerator_config, fsdp or deepspeed"
_REMOVAL = "set save_total_limit or save_top_k"

#: The inner methods of transformers 5 and its predecessors, and what to override instead.
INSTEAD = {
    "_inner_training_loop": _LOOP,
    "_run_epoch": _LOOP,
    "_prepare_for_training": _LOOP,
    "_finalize_training": _LOOP,
    "_init_training_state": _LOOP,
    "_maybe_log_save_evaluate": _FLAGS,
    "_load_best_model": "override _load_from_checkpoint",
    "_save_optimizer_and_scheduler": _STATE,
    "_load_optimizer_and_scheduler": _STATE,
    "_save_scaler": _STATE,
    "_load_scaler": _STATE,
    "_save_rng_state": _STATE,
    "_load_rng_state": _STATE,
    "_load_callback_state": _STATE,
    "_clip_grad_norm": _GRADIENTS,
    "_get_grad_norm": _GRADIENTS,
    "_get_num_items_in_batch": "override count_items",
    "_move_model_to_device": "override place_model_on_device",
    "_push_from_checkpoint": _HUB,
    "_finish_current_push": _HUB,
    "_hp_search_setup": _SEARCH,
    "_report_to_hp_search": _SEARCH,
    "create_accelerator_and_postprocess": _PROCESSES,
    "_build_accelerator_args": _PROCESSES,
    "get_tp_size": _PROCESSES,
    "get_cp_size": _PROCESSES,
    "get_sp_size": _PROCESSES,
    "is_local_process_zero": _PROCESSES,
    "is_world_process_zero": _PROCESSES,
    "_defer_fsdp_gradient_reduction": _GRADIENTS,
    "_has_mixed_mesh_grads": _GRADIENTS,
    "_mixed_mesh_grad_norm": _GRADIENTS,
    "_sync_replicated_trainable_parameters": _GRADIENTS,
    "_issue_warnings_after_load": "override load_checkpoint",
    "_validate_args": "override preflight",
    "_prepare_context_parallel_inputs": "override _prepare_inputs",
    "_tune_save_checkpoint": _SEARCH,
    "_track_num_input_tokens": "set include_num_input_tokens_seen",
    "_update_auto_batch_size": "auto_find_batch_size keeps the batch size, and splits micro-batches",
    "set_initial_training_values": "override make_plan",
    "num_examples": "override make_plan",
    "gather_function": "override evaluation_loop",
    "init_hf_repo": "set hub_model_id and hub_private_repo",
    # of transformers 4
    "_nested_gather": "override evaluation_loop",
    "_pad_across_processes": "override evaluation_loop",
    "prediction_loop": "override evaluation_loop",
    "_rotate_checkpoints": _REMOVAL,
    "_sorted_checkpoints": _REMOVAL,
    "_activate_neftune": "set neftune_noise_alpha",
    "_deactivate_neftune": "set neftune_noise_alpha",
}


def is_ours(owner: object, method: str) -> bool:
    """Whether `method` of `owner` is the framework's, and was replaced by no subclass and no script."""
    defined = next(kind for kind in owner.__class__.__mro__ if method in vars(kind))  # of a weak reference too
    return method not in vars(owner) and defined.__module__.startswith("posttrain.")


def is_stock(owner: object, method: str) -> bool:
    """Whether `method` of `owner` is that of `Trainer` itself, whichever class of ours or of the user it has."""
    return getattr(getattr(owner, method), "__qualname__", "") == f"Trainer.{method}"


def taken(function: Callable[..., Any], *given: Any) -> tuple[Any, ...]:
    """The first of the arguments `given` that `function` takes by position: an older override takes fewer."""
    signature, number = inspect.signature(function), len(given)
    while number:
        try:
            signature.bind(*given[:number])
            break
        except TypeError:
            number -= 1
    return given[:number]


def unheard(trainer_class: type) -> str | None:
    """A sentence on user-defined methods of `trainer_class` that are never called; None without any.

    They are those of `INSTEAD`, and of a trainer's own dict ``INSTEAD``.
    """
    instead = INSTEAD | getattr(trainer_class, "INSTEAD", {})
    theirs = [vars(owner) for owner in trainer_class.__mro__ if not owner.__module__.startswith("posttrain.")]
    found = [name for name in instead if any(name in names for names in theirs)]
    if not found:
        return None
    listed = "; ".join(f"{name} ({instead[name]})" for name in found)
    return f"{trainer_class.__name__} overrides methods that nothing calls here: {listed}."
