"""Setters for groups of arguments, as transformers has them: ``args.set_save(strategy="epoch")``."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

from posttrain.core.config import check_field, tidy
from posttrain.core.errors import ConfigError
from posttrain.core.fields.old_names import translate_old_names
from posttrain.core.logging.trackers import LoggingArguments


class ArgumentSetters:
    """Sets groups of arguments and returns `self`. All of a group are checked; where one is wrong, none is set."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def _set(self, given: dict[str, Any], prefix: str = "", **names: str) -> Self:
        """Set the local names of a setter: fields that `names` has for them, else `prefix` and name, else it."""
        fields = self.__dataclass_fields__
        names = {name: prefix + name if prefix + name in fields else name for name in given} | names
        asked = {names[name]: value for name, value in given.items() if name != "self"}
        values, problems = translate_old_names(type(self), asked)
        before = {name: vars(self)[name] for name in values}
        vars(self).update(values)
        problems += tidy(self)
        problems += [p for name in values for p in check_field(self, fields[name])]
        if problems:
            vars(self).update(before)
            raise ConfigError(type(self).__name__, problems)
        return self

    def set_training(
        self,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0,
        num_epochs: float = 3,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        activation_checkpointing: bool = False,
        gradient_checkpointing: bool | None = None,
    ) -> Self:
        """Set the basic arguments of training, and `do_train`."""
        do_train = True
        if gradient_checkpointing is None:
            gradient_checkpointing = activation_checkpointing
        activation_checkpointing = gradient_checkpointing
        return self._set(locals(), batch_size="per_device_train_batch_size", num_epochs="num_train_epochs")

    def set_evaluate(
        self,
        strategy: str = "no",
        steps: float | str = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
    ) -> Self:
        """Set when and how the model is evaluated, and `do_eval`."""
        do_eval, delay = strategy != "no", delay or 0
        return self._set(locals(), "eval_", batch_size="per_device_eval_batch_size", loss_only="prediction_loss_only")

    def set_testing(self, batch_size: int = 8, loss_only: bool = False) -> Self:
        """Set how `predict` runs, and `do_predict`."""
        do_predict = True
        return self._set(locals(), batch_size="per_device_eval_batch_size", loss_only="prediction_loss_only")

    def set_save(
        self,
        strategy: str = "steps",
        steps: float | str = 500,
        total_limit: int | None = None,
        on_each_node: bool = False,
    ) -> Self:
        """Set when checkpoints are written and how many are kept."""
        return self._set(locals(), "save_")

    def set_logging(
        self,
        strategy: str = "steps",
        steps: float | str = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        nan_inf_filter: bool = False,
        on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> Self:
        """Set what is logged, when and where to."""
        self._set(
            locals(),
            "logging_",
            level="log_level",
            nan_inf_filter="logging_nan_inf_filter",
            on_each_node="log_on_each_node",
            replica_level="log_level_replica",
        )
        LoggingArguments._normalize(self)  # type: ignore[arg-type]  # report_to is kept as a list
        return self

    def set_push_to_hub(
        self,
        model_id: str,
        strategy: str = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        revision: str | None = None,
    ) -> Self:
        """Set where and when checkpoints are uploaded, and `push_to_hub`."""
        push_to_hub = True
        return self._set(locals(), "hub_")

    def set_optimizer(
        self,
        name: str = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Self:
        """Set the optimizer and its constants."""
        return self._set(locals(), "adam_", name="optim", args="optim_args")

    def set_lr_scheduler(
        self, name: str = "linear", num_epochs: float = 3.0, max_steps: int = -1, warmup_steps: float = 0
    ) -> Self:
        """Set the schedule of the learning rate and the length of the run."""
        return self._set(locals(), name="lr_scheduler_type", num_epochs="num_train_epochs")

    def set_dataloader(
        self,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        in_order: bool = True,
        auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> Self:
        """Set how batches are made and read."""
        return self._set(
            locals(),
            "dataloader_",
            train_batch_size="per_device_train_batch_size",
            eval_batch_size="per_device_eval_batch_size",
            sampler_seed="data_seed",
        )
