"""Warns about overridden methods of transformers' `Trainer` that are never called here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

#: The inner methods of transformers 5 and its predecessors, by what to override or set instead.
_BY_REMEDY = {
    "the loop is train; override windows, train_on_window or training_step": "_inner_training_loop _run_epoch "
    "_prepare_for_training _finalize_training _init_training_state",
    "override log, evaluate or save_model; a TrainerCallback decides when": "_maybe_log_save_evaluate",
    "override _load_from_checkpoint": "_load_best_model",
    "override state_dict and load_state_dict": "_save_optimizer_and_scheduler _load_optimizer_and_scheduler "
    "_save_scaler _load_scaler _save_rng_state _load_rng_state _load_callback_state",
    "override train_on_window, or change gradients in a callback's on_pre_optimizer_step": "_clip_grad_norm "
    "_get_grad_norm _defer_fsdp_gradient_reduction _has_mixed_mesh_grads _mixed_mesh_grad_norm "
    "_sync_replicated_trainable_parameters",
    "override count_items": "_get_num_items_in_batch",
    "override place_model_on_device": "_move_model_to_device",
    "override push_to_hub": "_push_from_checkpoint _finish_current_push",
    "override hyperparameter_search or call_model_init": "_hp_search_setup _report_to_hp_search _tune_save_checkpoint",
    "set accelerator_config, fsdp or deepspeed": "create_accelerator_and_postprocess _build_accelerator_args "
    "get_tp_size get_cp_size get_sp_size is_local_process_zero is_world_process_zero",
    "override load_checkpoint": "_issue_warnings_after_load",
    "override preflight": "_validate_args",
    "override _prepare_inputs": "_prepare_context_parallel_inputs",
    "set include_num_input_tokens_seen": "_track_num_input_tokens",
    "auto_find_batch_size keeps the batch size, and splits micro-batches": "_update_auto_batch_size",
    "override make_plan": "set_initial_training_values num_examples",
    "override evaluation_loop": "gather_function _nested_gather _pad_across_processes prediction_loop",
    "set hub_model_id and hub_private_repo": "init_hf_repo",
    "set save_total_limit or save_top_k": "_rotate_checkpoints _sorted_checkpoints",  # of transformers 4, as the last
    "set neftune_noise_alpha": "_activate_neftune _deactivate_neftune",
}
INSTEAD = {name: remedy for remedy, names in _BY_REMEDY.items() for name in names.split()}


#: What a trainer is made of, by the names of its attributes.
PARTS = "checkpoints clock dist loaders metrics record run saving scaling store uploader".split()


def check_parts(owner: object) -> None:
    """Raise AttributeError where a subclass or a script keeps something of its own under the name of a part."""
    for name in PARTS:
        value = vars(owner).get(name)
        if value is not None and not type(value).__module__.startswith("posttrain."):
            raise AttributeError(
                f"{owner.__class__.__name__} has set self.{name} to {type(value).__name__} of its own, and the trainer "
                f"has a part of this name. Name yours otherwise, such as self.my_{name}."
            )


def is_ours(owner: object, method: str) -> bool:
    """Whether `method` of `owner` is the framework's, and was replaced by no subclass and no script."""
    defined = next(kind for kind in owner.__class__.__mro__ if method in vars(kind))  # of a weak reference too
    return method not in vars(owner) and defined.__module__.startswith("posttrain.")


#: Packages whose functions are not looked through.
_FRAMEWORKS = {"accelerate", "builtins", "numpy", "peft", "posttrain", "torch", "transformers"}


def read_by_loss(owner: Any) -> set[str]:
    """The names that the user's loss or model reads, or what it calls by a name that can be found without running it:
    methods, functions of other modules, and the modules and objects that the trainer holds.
    """
    own, seen, found = [vars(owner), *map(vars, owner.__class__.__mro__)], set(), set()
    left: list[Any] = [owner.compute_loss, owner.compute_loss_func, owner.training_step, owner.prediction_step]
    left += {type(part) for part in owner.model.modules()}
    while left:
        value = left.pop()
        value = value.__func__ if isinstance(value, (MethodType, classmethod, staticmethod)) else value
        if isinstance(value, FunctionType):
            value = inspect.unwrap(value)  # what it wraps may be written in C
        if not isinstance(value, (FunctionType, type)):
            value = type(value)  # of an object that is called, such as a module
        found.add(value.__name__)  # which may have been imported under another
        if value in seen or str(value.__module__).partition(".")[0] in _FRAMEWORKS:
            continue
        seen.add(value)
        if isinstance(value, type):
            parts = vars(value).values()
            left += [part for part in parts if isinstance(part, (FunctionType, classmethod, staticmethod))]
            left += value.__bases__
            continue
        read = _names_in(value.__code__)
        found |= read
        known = [value.__globals__, *own]
        known += [vars(one) for name in read if isinstance(one := value.__globals__.get(name), ModuleType)]
        left += [scope[name] for scope in known for name in read if name in scope]
    return found


def _names_in(code: CodeType) -> set[str]:
    """The attributes and globals that `code` reads, and the functions within it."""
    return {*code.co_names}.union(*(_names_in(part) for part in code.co_consts if isinstance(part, CodeType)))


def is_stock(owner: object, method: str, of: str = "Trainer") -> bool:
    """Whether `method` of `owner` is that of the class `of` itself, whichever class of ours or of the user it has."""
    return getattr(getattr(owner, method), "__qualname__", "") == f"{of}.{method}"


def drawing(owner: Any, ours: Callable[..., Any]) -> Callable[..., Any]:
    """What draws micro-batches: `get_batch_samples` of `owner`, or `ours` where that takes ``(model, batch)``: in trl's
    older trainers of preferences, and in what was derived from them, it generates.
    """
    given = owner.get_batch_samples
    return partial(ours, owner) if next(iter(inspect.signature(given).parameters), "") == "model" else given


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
    """A sentence on user-defined methods of `trainer_class` that are never called, and on methods of transformers that
    they call and that are not here; None without any.

    They are those of `INSTEAD`, and of a trainer's own dict ``INSTEAD``.
    """
    instead = INSTEAD | getattr(trainer_class, "INSTEAD", {})
    theirs = [vars(kind) for kind in trainer_class.__mro__ if not kind.__module__.startswith("posttrain.")]
    overridden = [name for name in instead if any(name in names for names in theirs)]
    methods = [inspect.unwrap(value) for names in theirs for value in names.values() if callable(value)]
    read = {name for method in methods if inspect.isfunction(method) for name in method.__code__.co_names}
    called = [name for name in instead if name in read and not hasattr(trainer_class, name)]
    kinds = {"overrides methods that nothing calls here": overridden, "calls methods that are not here": called}
    said = [
        f"{trainer_class.__name__} {what}: {'; '.join(f'{name} ({instead[name]})' for name in names)}."
        for what, names in kinds.items()
        if names
    ]
    return " ".join(said) or None
