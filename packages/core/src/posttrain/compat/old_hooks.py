"""Old names of overridable methods: which method of `Trainer` goes through which, where a script has replaced one.

transformers calls these methods by private names. Their counterparts here do the work themselves, until `follow` finds
that a subclass or a script has replaced an old name. It then puts the method of `HOOKS` in the place of that of
`Trainer`, for every trainer of the process: it calls the old name, whose method in `TrainerNames` does the same work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from posttrain.core.data import pipeline
from posttrain.core.training import override_checks


def prepare_inputs(self: Any, inputs: Any) -> Any:
    return self._prepare_inputs(inputs)


def compute_loss_context_manager(self: Any) -> Any:
    return self.autocast_smart_context_manager()


def make_dataloader(
    self, dataset, description, batch_size, sampler_fn=None, is_training=False, dataloader_key=None
) -> Any:
    def train_sampler(rows: Any) -> Any:
        return self._get_train_sampler(*override_checks.taken(self._get_train_sampler, rows))

    given = {"dataset": dataset, "description": description, "batch_size": batch_size, "dataloader_key": dataloader_key}
    sampler_fn = sampler_fn or (train_sampler if is_training else self._get_eval_sampler)
    return self._get_dataloader(**given, sampler_fn=sampler_fn, is_training=is_training)


def without_unused_columns(self: Any, dataset: Any, collator: Any, description: str | None) -> tuple[Any, Any]:
    if pipeline.can_drop_columns(dataset):
        return self._remove_unused_columns(dataset, description=description), collator
    return dataset, self._get_collator_with_removed_columns(collator, description=description)


#: By the old name: the method, of the name in `Trainer`, that calls it.
HOOKS: dict[str, Callable[..., Any]] = {
    "_prepare_inputs": prepare_inputs,
    "autocast_smart_context_manager": compute_loss_context_manager,
    "_get_dataloader": make_dataloader,
    "_get_train_sampler": make_dataloader,
    "_get_eval_sampler": make_dataloader,
    "_remove_unused_columns": without_unused_columns,
    "_get_collator_with_removed_columns": without_unused_columns,
}


def follow(trainer: Any) -> None:
    """Let methods of `Trainer` go through the old names that the class of `trainer`, or a script, has replaced."""
    kinds = type(trainer).__mro__
    base, ours = (
        next(kind for kind in kinds if kind.__module__ == module)
        for module in ("posttrain.core.trainer", "posttrain.compat.trainer_names")
    )
    replaced = set(vars(trainer)).union(*map(vars, kinds[: kinds.index(ours)]))
    for method in [method for name, method in HOOKS.items() if name in replaced]:
        hook = vars(base)[method.__name__]
        if "__wrapped__" not in vars(hook):  # else it goes through old names already
            setattr(base, method.__name__, functools.wraps(hook)(method))
