"""What scripts for transformers ask arguments for, and setters for groups: ``args.set_save(strategy="epoch")``."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

from posttrain.core.config import check_field, tidy, value_of
from posttrain.core.distributed import deepspeed, environment
from posttrain.core.errors import ConfigError
from posttrain.core.fields.old_names import translate_old_names
from posttrain.core.logging.trackers import LoggingArguments


class ArgumentSetters:
    """Sets groups of arguments and returns `self`. All of a group are checked; where one is wrong, none is set."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    #: Scripts add the names of their fields that may be written as JSON. Here each field is read so that may be a dict.
    _VALID_DICT_FIELDS: ClassVar[list[str]] = []
    deepspeed: dict[str, Any] | str | None

    @property
    def mixed_precision(self) -> str:
        """``"bf16"``, ``"fp16"`` or ``"no"``."""
        return environment.precision(self)

    @property
    def deepspeed_plugin(self) -> Any:
        """accelerate's plugin of `deepspeed`, which scripts ask for its `zero_stage`; None without DeepSpeed."""
        return deepspeed.plugin(self.deepspeed)

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
        recompute = activation_checkpointing if gradient_checkpointing is None else gradient_checkpointing
        return self._set(
            do_train=True,
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size,
            weight_decay=weight_decay,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            seed=seed,
            activation_checkpointing=recompute,
            gradient_checkpointing=recompute,
        )

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
        return self._set(
            eval_strategy=strategy,
            do_eval=strategy != "no",
            eval_steps=steps,
            per_device_eval_batch_size=batch_size,
            eval_accumulation_steps=accumulation_steps,
            eval_delay=delay or 0,
            prediction_loss_only=loss_only,
        )

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
        return self._set(
            save_strategy=strategy, save_steps=steps, save_total_limit=total_limit, save_on_each_node=on_each_node
        )

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
            logging_strategy=strategy,
            logging_steps=steps,
            report_to=report_to,
            log_level=level,
            logging_first_step=first_step,
            logging_nan_inf_filter=nan_inf_filter,
            log_on_each_node=on_each_node,
            log_level_replica=replica_level,
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
        return self._set(
            push_to_hub=True,
            hub_model_id=model_id,
            hub_strategy=strategy,
            hub_token=token,
            hub_private_repo=private_repo,
            hub_always_push=always_push,
            hub_revision=revision,
        )

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
        return self._set(
            optim=name,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_epsilon=epsilon,
            optim_args=args,
        )

    def set_lr_scheduler(
        self, name: str = "linear", num_epochs: float = 3.0, max_steps: int = -1, warmup_steps: float = 0
    ) -> Self:
        """Set the schedule of the learning rate and the length of the run."""
        return self._set(
            lr_scheduler_type=name, num_train_epochs=num_epochs, max_steps=max_steps, warmup_steps=warmup_steps
        )

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
            per_device_train_batch_size=train_batch_size,
            per_device_eval_batch_size=eval_batch_size,
            dataloader_drop_last=drop_last,
            dataloader_num_workers=num_workers,
            dataloader_pin_memory=pin_memory,
            dataloader_persistent_workers=persistent_workers,
            dataloader_prefetch_factor=prefetch_factor,
            dataloader_multiprocessing_context=multiprocessing_context,
            dataloader_in_order=in_order,
            auto_find_batch_size=auto_find_batch_size,
            ignore_data_skip=ignore_data_skip,
            data_seed=sampler_seed,
        )
