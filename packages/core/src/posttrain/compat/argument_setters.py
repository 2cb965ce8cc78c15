"""Setters for groups of arguments, as transformers has them: ``args.set_save(strategy="epoch")``."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

from posttrain.core.config import check_field, tidy, value_of
from posttrain.core.errors import ConfigError
from posttrain.core.fields.old_names import translate_old_names
from posttrain.core.logging.trackers import LoggingArguments


class ArgumentSetters:
    """Sets groups of arguments and returns `self`. All of a group are checked; where one is wrong, none is set."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    #: Scripts add the names of their fields that may be written as JSON. Here each field is read so that may be a dict.
    _VALID_DICT_FIELDS: ClassVar[list[str]] = []

    def _set(self, **values: Any) -> Self:
        values, problems = translate_old_names(type(self), values)
        before = {name: value_of(self, name) for name in values}
        vars(self).update(values)
        problems += tidy(self)
        problems += [p for field in dataclasses.fields(self) if field.name in values for p in check_field(self, field)]
        if problems:
            vars(self).update(before)
            raise ConfigError(type(self).__name__, problems)
        return self

    def _renamed(self, given: dict[str, Any], names: str, prefix: str = "", **more: Any) -> Self:
        """Set what a setter was `given`: under the field of its name in `names`, or else its own behind `prefix`."""
        fields = dict(name.split("=") for name in names.split())
        return self._set(**{fields.get(k, prefix + k): v for k, v in given.items() if k != "self"} | more)

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
        given = locals()
        recompute = activation_checkpointing if gradient_checkpointing is None else gradient_checkpointing
        names = "batch_size=per_device_train_batch_size num_epochs=num_train_epochs"
        given |= {"activation_checkpointing": recompute, "gradient_checkpointing": recompute}
        return self._renamed(given, names, do_train=True)

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
        given, names = locals(), "batch_size=per_device_eval_batch_size loss_only=prediction_loss_only"
        return self._renamed(given, names, "eval_", do_eval=strategy != "no", eval_delay=delay or 0)

    def set_testing(self, batch_size: int = 8, loss_only: bool = False) -> Self:
        """Set how `predict` runs, and `do_predict`."""
        return self._set(do_predict=True, per_device_eval_batch_size=batch_size, prediction_loss_only=loss_only)

    def set_save(
        self,
        strategy: str = "steps",
        steps: float | str = 500,
        total_limit: int | None = None,
        on_each_node: bool = False,
    ) -> Self:
        """Set when checkpoints are written and how many are kept."""
        return self._renamed(locals(), "", "save_")

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
        given = locals()
        names = "report_to=report_to level=log_level on_each_node=log_on_each_node replica_level=log_level_replica"
        self._renamed(given, names, "logging_")
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
        return self._renamed(locals(), "", "hub_", push_to_hub=True)

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
        given, names = locals(), "name=optim beta1=adam_beta1 beta2=adam_beta2 epsilon=adam_epsilon args=optim_args"
        return self._renamed(given, names)

    def set_lr_scheduler(
        self, name: str = "linear", num_epochs: float = 3.0, max_steps: int = -1, warmup_steps: float = 0
    ) -> Self:
        """Set the schedule of the learning rate and the length of the run."""
        return self._renamed(locals(), "name=lr_scheduler_type num_epochs=num_train_epochs")

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
        given = locals()
        names = "train_batch_size=per_device_train_batch_size eval_batch_size=per_device_eval_batch_size "
        names += "auto_find_batch_size=auto_find_batch_size ignore_data_skip=ignore_data_skip sampler_seed=data_seed"
        return self._renamed(given, names, "dataloader_")
