"""What scripts for transformers' `Trainer` call on a trainer besides training: accessors, old names, the Hub."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import nn

from posttrain.core.checkpoint import foreign
from posttrain.core.data import pipeline
from posttrain.core.data.loaders import keep_columns
from posttrain.core.distributed import sharding
from posttrain.core.hub import uploads
from posttrain.core.hub.card import names, of_run, write_model_card
from posttrain.core.logging import terminal
from posttrain.core.logging.metrics import FLOPS, Appended, Metrics, formatted, save_metrics, table
from posttrain.core.training import override_checks

if TYPE_CHECKING:
    from posttrain.core.arguments import TrainingArguments
    from posttrain.core.callbacks import CallbackHandler
    from posttrain.core.data.loaders import Loaders
    from posttrain.core.distributed import Distributed
    from posttrain.core.state import EvalLoopOutput, TrainerState
    from posttrain.core.training.plan import Plan
    from posttrain.core.training.run import Run
    from posttrain.core.training.saving import Saving

logger = logging.getLogger(__name__)


class Settable(property):
    """A property that a script or a subclass may set on its own trainer, as transformers' is an attribute."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        own = {} if instance is None else vars(instance)
        return own[self.name] if self.name in own else super().__get__(instance, owner)

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.name] = value


def _reads(path: str, doc: str) -> Any:
    return Settable(operator.attrgetter(path), doc=doc)


def _renames(path: str, doc: str) -> Any:
    owner, _, name = path.rpartition(".")

    def write(self: Any, value: Any) -> None:
        setattr(operator.attrgetter(owner)(self) if owner else self, name, value)

    return property(operator.attrgetter(path), write, doc=doc)


def _returns(path: str, doc: str) -> Any:
    """A method without arguments that returns what lies at `path` below the trainer."""
    get = operator.attrgetter(path)

    def method(self: Any) -> Any:
        return get(self)

    method.__doc__ = doc
    return method


class TrainerNames:
    """The part of `Trainer` that no training step goes through. It reads the attributes named here."""

    args: TrainingArguments
    dist: Distributed
    accelerator: Any
    processing_class: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: Any
    make_plan: Callable[[Any], Plan]
    train_dataset: Any
    loaders: Loaders
    train_sampler: Callable[[Any], torch.utils.data.Sampler[Any] | None]
    complete_inputs: Callable[[Any], Any]
    load_checkpoint: Callable[..., None]
    _prepare_input: Callable[[Any], Any]
    metrics: Metrics
    model_wrapped: nn.Module
    uploader: uploads.Uploader
    state: TrainerState
    callback_handler: CallbackHandler
    evaluation_loop: Callable[..., EvalLoopOutput]
    _fire: Callable[..., None]
    log_metric: Callable[..., None]
    run: Run
    saving: Saving
    save_model: Callable[..., None]
    is_in_train: bool
    get_total_train_batch_size: Callable[[TrainingArguments], int]
    OLD_ARGUMENTS: ClassVar[dict[str, str]]
    #: Scripts read these; a hyperparameter search sets the first two.
    hp_name, hp_search_backend = None, None
    is_fsdp_xla_enabled = is_fsdp_xla_v1_enabled = is_fsdp_xla_v2_enabled = False
    #: Copies of old `training_step` and `prediction_step` ask these before they scale or gather anything.
    scaler = sharded_ddp = fsdp = None
    do_grad_scaling = use_apex = use_amp = use_cuda_amp = use_cpu_amp = False

    tokenizer = _renames("processing_class", "Earlier name of `processing_class`.")
    prediction_loop = _reads("evaluation_loop", "Earlier name of `evaluation_loop`.")
    neftune_noise_alpha = _renames("args.neftune_noise_alpha", "The noise that embeddings get; see that argument.")
    gather_function = _reads("accelerator.gather_for_metrics", "Gathers an evaluation batch of all processes.")
    is_deepspeed_enabled = _reads("dist.uses_deepspeed", "Whether DeepSpeed trains.")
    _globalstep_last_logged = _reads("run.progress.last_logged", "The optimizer step of the last record.")
    is_world_process_zero = _returns("dist.is_main", "Whether this process is the first of all.")
    is_local_process_zero = _returns("dist.is_local_main", "Whether this process is the first of its machine.")
    get_tp_size = _returns("dist.tp_size", "Processes that split the matrices of one layer (tensor parallelism).")
    get_cp_size = _returns("dist.cp_size", "Processes that split one row (context parallelism).")
    get_ep_size = _returns("dist.ep_size", "Processes that have all experts between them (expert parallelism).")

    @property
    def current_flos(self) -> float:
        """Operations of this process that `state.total_flos` does not hold yet; `store_flos` moves them there."""
        return float(self.metrics.total(FLOPS))

    @current_flos.setter
    def current_flos(self, operations: float) -> None:
        self.metrics.add_sum(FLOPS, operations - self.current_flos, 0)

    @Settable
    def is_model_parallel(self) -> bool:
        """Whether whoever loaded the model has spread it over several devices."""
        return len({str(place) for place in (getattr(self.model, "hf_device_map", None) or {}).values()}) > 1

    @Settable
    def place_model_on_device(self) -> bool:
        """Whether the trainer moves the model to its device; by default not one that was placed or quantized."""
        return self.dist.moves(self.model)

    @property
    def hub_model_id(self) -> str | None:
        """The repository on the Hub that the run is pushed to; None where it is not pushed."""
        return self.uploader.repo_id if self.args.push_to_hub else None

    @Settable
    def _metrics(self) -> Appended:
        """Where subclasses of trl's trainers append values to log."""
        return Appended(self.log_metric)

    def store_metrics(self, metrics: dict[str, Any], train_eval: str = "train") -> None:
        """trl's name of `log_metric`, for several values."""
        for name, value in metrics.items():
            self.log_metric(name, value)

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """`tensors`, in any nesting, of all processes, padded to one width."""
        if tensors is None:
            return None
        return self.accelerator.gather(self._pad_across_processes(tensors))

    def _pad_across_processes(self, tensor: Any, pad_index: int = -100) -> Any:
        return self.accelerator.pad_across_processes(tensor, dim=1, pad_index=pad_index)

    # --------------------------------------------------------------------------------- old names of overridable methods

    def _prepare_inputs(self, inputs: Any) -> Any:
        return self.complete_inputs(self._prepare_input(inputs))

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[None]:
        """Earlier name of `compute_loss_context_manager`."""
        return self.dist.autocast()

    def _get_dataloader(
        self, dataset, description, batch_size, sampler_fn=None, is_training=False, dataloader_key=None
    ) -> torch.utils.data.DataLoader[Any]:
        return self.loaders.make(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler[Any] | None:
        return self.train_sampler(self.train_dataset if train_dataset is None else train_dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> torch.utils.data.Sampler[Any] | None:
        return None

    def _load_from_checkpoint(self, resume_from_checkpoint: str | Path, model: nn.Module | None = None) -> None:
        self.load_checkpoint(resume_from_checkpoint, model)

    def _save_optimizer_and_scheduler(self, output_dir: str | Path) -> None:
        """Write them as transformers does, for a `_save_checkpoint` of a script's own: `resume_from_checkpoint` reads
        that too. Raises a `CheckpointError` where they are divided over the processes.
        """
        foreign.write(Path(output_dir), self.optimizer, self.lr_scheduler, self.dist)

    def _save_rng_state(self, output_dir: str | Path) -> None:
        foreign.write_random_numbers(Path(output_dir), self.dist)

    def _save_scaler(self, output_dir: str | Path) -> None:
        if self.dist.scaler is not None and self.args.should_save:
            torch.save(self.dist.scaler.state_dict(), Path(output_dir, foreign.SCALER))

    def _push_from_checkpoint(self, checkpoint_folder: str | Path) -> None:
        """Queue for the Hub what `hub_strategy` asks for, after a `_save_checkpoint` of a script's own."""
        if self.args.push_to_hub:
            self.saving.upload(Path(checkpoint_folder), self.state)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """For subclasses that load weights themselves; `load_result` is what ``load_state_dict`` has returned."""
        for what, keys in zip(("lacks weights", "has weights that the model does not"), load_result, strict=True):
            if keys:
                logger.warning("The checkpoint %s: %s", what, ", ".join(keys))

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        return keep_columns(self, dataset, None, description)[0]

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        return keep_columns(self, None, data_collator, description)[1]

    # ------------------------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any = None) -> str:
        return self.args.output_dir

    def num_examples(self, dataloader: Any) -> int:
        """Rows that `dataloader` reads in an epoch; estimated from its batches where it cannot say."""
        return pipeline.num_examples(dataloader)

    def get_sp_size(self) -> int:
        """Processes that share one row by sequence parallelism, beside those of `get_tp_size`: 1."""
        return 1

    @Settable
    def is_fsdp_enabled(self) -> bool:
        """Whether the weights are kept in pieces, by FSDP."""
        return self.dist.sharding is not None

    @Settable
    def deepspeed(self) -> Any:
        """DeepSpeed's engine while it trains, else None."""
        return self.model_wrapped if self.is_deepspeed_enabled and self.is_in_train else None

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> tuple[int | float | None, ...]:
        """What `make_plan` makes of a loader: (epochs, steps of an epoch, rows of an epoch, rows of the run, rows of a
        step, micro-batches of an epoch, steps of the run).
        """
        plan, rows_per_update = self.make_plan(dataloader), self.get_total_train_batch_size(args)
        rows: int = plan.max_steps * rows_per_update
        total: float = rows
        if plan.batches_per_epoch is not None:
            rows = self.num_examples(dataloader)
            total = total if args.max_steps > 0 else rows * args.num_train_epochs
        batches = plan.batches_per_epoch or plan.max_steps * plan.accumulation
        updates = plan.steps_per_epoch or plan.max_steps
        return plan.num_epochs, updates, rows, total, rows_per_update, batches, plan.max_steps

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each group of parameters."""
        return [group["lr"] for group in _groups_of(self.optimizer)]

    def get_num_trainable_parameters(self) -> int:
        """Parameters that are trained, in numbers."""
        return sharding.count(parameter for parameter in self.model.parameters() if parameter.requires_grad)

    def get_optimizer_group(
        self, param: nn.Parameter | None = None
    ) -> dict[str, Any] | list[list[nn.Parameter]] | None:
        """The optimizer's group that `param` is in; without one, the parameters of each group."""
        groups = _groups_of(self.optimizer)
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(param is member for member in group["params"])), None)

    @staticmethod
    def metrics_format(metrics: dict[str, Any]) -> dict[str, Any]:
        """Metrics as people read them: times as h:mm:ss, fractions to four places."""
        return formatted(metrics)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print the metrics of a split (``train``, ``eval``, ``test``) as a table."""
        if self.dist.is_main:
            terminal.write(table(f"{split} metrics", self.metrics_format(metrics)))

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write ``<split>_results.json`` into the output directory and, if `combined`, add to ``all_results.json``."""
        if self.dist.is_main:
            save_metrics(Path(self.args.output_dir), split, metrics, combined)

    def end(self) -> None:
        """Take down the process group. The last call of a script: nothing after it can reach other processes."""
        self.accelerator.end_training()

    # -------------------------------------------------------------------------------------------- searching and sharing

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: str | None = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Train repeatedly to find the best arguments; see `posttrain.compat.hyperparameter_search.search`."""
        from posttrain.compat.hyperparameter_search import search

        self.hp_name, self.hp_search_backend = hp_name, backend or "optuna"
        trainer: Any = self
        return search(trainer, hp_space, compute_objective, n_trials, direction, backend, hp_name, **kwargs)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> Any:
        """Upload the model with its card; returns the address, or the upload under way where not `blocking`."""
        self._fire("on_push_begin")
        self.save_model(_internal_call=True)
        self.create_model_card(**card)
        if not self.dist.is_main:
            return None
        [(folder, path, ignore)] = uploads.jobs(self.args.hub_strategy, None, self.args.output_dir, at_end=True)
        upload = self.uploader.push(
            folder, path, commit_message, ignore, blocking, revision=revision, token=token, private=private
        )
        return upload.url if blocking else upload

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> str | None:
        """Make the repository on the Hub now; training itself makes it at the first upload."""
        return self.uploader.create_repo(token, private) if self.dist.is_main else None

    def create_model_card(self, model_name: str | None = None, finetuned_from: str | None = None, **card: Any) -> None:
        """Write a README.md about the model into the output directory, unless a person wrote one there.

        Args:
            card: fields of `posttrain.core.hub.card.model_card`; those that describe the run are filled in.
        """
        about = of_run(self.args, self.model, self.state.log_history, self.dist.world_size)
        about |= {"base_model": finetuned_from} if finetuned_from else {}
        about["tags"] = [*names(card.pop("tags", None)), *about["tags"]]
        if self.dist.is_main:
            name = model_name or self.uploader.repo_name.split("/")[-1]
            write_model_card(self.args.output_dir, name, **(about | card))


# transformers calls some overridable methods by private names. Their counterparts in `Trainer` do the work themselves,
# until a subclass or a script replaces an old name. A method below then takes the place of that of `Trainer`, for every
# trainer of the process: it calls the old name, whose method in `TrainerNames` does the same work.


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


def follow_old_names(trainer: TrainerNames) -> None:
    """Let methods of `Trainer` go through the old names that this class, or a script, has replaced, see `HOOKS`."""
    kinds = type(trainer).__mro__
    base = next(kind for kind in kinds if kind.__module__ == "posttrain.core.trainer")
    replaced = set(vars(trainer)).union(*map(vars, kinds[: kinds.index(TrainerNames)]))
    for method in [method for name, method in HOOKS.items() if name in replaced]:
        hook = vars(base)[method.__name__]
        if "__wrapped__" not in vars(hook):  # else it goes through old names already
            setattr(base, method.__name__, functools.wraps(hook)(method))


def _groups_of(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    if optimizer is None:
        raise ValueError("There is no optimizer yet: it is made by train, or by create_optimizer.")
    return optimizer.param_groups


C = TypeVar("C", bound=type)


class FromArguments:
    """Reads the `field` of the trainer's ``args``, and sets it there, so that the two never disagree."""

    def __init__(self, field: str) -> None:
        self.field = field

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else getattr(instance.args, self.field)

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance.args, self.field, value)


def reads_from_arguments(*names: str, **renamed: str) -> Callable[[C], C]:
    """Give a trainer class an attribute for each field in `names`, and those in `renamed`, ``{attribute: field}``."""

    def decorate(trainer_class: C) -> C:
        for attribute, field in {**dict(zip(names, names, strict=True)), **renamed}.items():
            setattr(trainer_class, attribute, FromArguments(field))
        return trainer_class

    return decorate
