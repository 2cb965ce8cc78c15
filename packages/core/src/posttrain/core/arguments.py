"""`TrainingArguments`: all groups of arguments, the rules between them, and old names."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from posttrain.core import files, registry
from posttrain.core.checkpoint.arguments import CheckpointArguments
from posttrain.core.config import ConfigMeta, Resolved, opt, plain_data, validate, values_of
from posttrain.core.data.pipeline import DataArguments
from posttrain.core.distributed import environment, strategies
from posttrain.core.distributed.accelerator_config import AcceleratorArguments
from posttrain.core.distributed.arguments import DistributedArguments
from posttrain.core.evaluation.eval_loop import EvaluationArguments
from posttrain.core.fields import durations
from posttrain.core.fields.choices import ChoiceOfEnum
from posttrain.core.fields.old_names import AnswersToOldNames, Removed, Renamed
from posttrain.core.fields.redaction import masked
from posttrain.core.hub.uploads import HubArguments
from posttrain.core.logging import terminal
from posttrain.core.logging.trackers import LoggingArguments, level_of_program
from posttrain.core.models.arguments import ModelSideArguments
from posttrain.core.optim import builder, lr_scheduler
from posttrain.core.optim.builder import OptimizerArguments
from posttrain.core.optim.lr_scheduler import FOLLOW_A_METRIC, ScheduleArguments
from posttrain.core.training.allocator import AllocatorArguments
from posttrain.core.training.ema import EMAArguments
from posttrain.core.training.loss_spikes import SpikeArguments
from posttrain.core.training.nonfinite import HealthArguments
from posttrain.core.training.preemption import InterruptArguments

if TYPE_CHECKING:
    from posttrain.compat.argument_setters import ArgumentSetters
else:  # of what stands on the core, which therefore does not import it
    ArgumentSetters = registry.load(registry.ARGUMENT_SETTERS)

# Names that are only another spelling are aliases of their field, in its group.
OLD_NAMES: dict[str, Renamed | Removed] = {
    # Numbers below 1 are shares of all optimizer steps, so 100% is the largest such number.
    "warmup_ratio": Renamed(
        "warmup_steps",
        lambda share: math.nextafter(1.0, 0) if share == 1 else share,
        (None, 0),
        lambda steps: steps if steps < 1 else 0.0,
        most=1,
    ),
    "group_by_length": Renamed(
        "train_sampling_strategy",
        lambda on: "group_by_length",
        (None, False),
        lambda strategy: strategy == "group_by_length",
    ),
    "include_inputs_for_metrics": Renamed(
        "include_for_metrics", lambda on: ["inputs"], (None, False), lambda names: "inputs" in (names or [])
    ),
    "adafactor": Renamed("optim", lambda on: "adafactor", (None, False), lambda name: name == "adafactor"),
    "evaluate_during_training": Renamed(
        "eval_strategy", lambda on: "steps", (None, False), lambda strategy: strategy != "no"
    ),
    "torchdynamo": Renamed("torch_compile_backend"),
    "xpu_backend": Renamed("ddp_backend"),
    **{
        name: Removed(f"it is set in a dict, parallelism_config={{{name!r}: ...}}", (None, 1))
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "ep_size")
    },
    "push_to_hub_organization": Removed("name the organization in the model id, hub_model_id='organization/name'"),
    "use_mps_device": Removed("Apple's GPU is used wherever there is one; set use_cpu=True to keep off it", None),
    "save_safetensors": Removed("weights are always written as safetensors, never as a pickle", (None, True)),
    "fp16_backend": Removed("mixed precision is torch's autocast; choose it by bf16 or fp16", (None, "auto", "amp")),
    "half_precision_backend": Removed(
        "mixed precision is torch's autocast; choose it by bf16 or fp16", (None, "auto", "amp", "cuda_amp", "cpu_amp")
    ),
    "fp16_opt_level": Removed("it set Apex, which torch's autocast replaced; set fp16=True", (None, "O1")),
    "include_tokens_per_second": Removed("perf/tokens_per_second is always measured", (None, True, False)),
    "dispatch_batches": Removed("every process reads its own rows; leave it out", (None, False)),
    "split_batches": Removed("set accelerator_config={'split_batches': True}", (None, False)),
    "past_index": Removed("outputs of one batch are not fed to the next; do so in compute_loss", (None, -1)),
    "jit_mode_eval": Removed("TorchScript is retired; set torch_compile=True", (None, False)),
    "use_ipex": Removed("torch holds these kernels itself; bf16=True uses them on the CPU", (None, False)),
    "use_legacy_prediction_loop": Removed("there is one evaluation loop", (None, False)),
    "ray_scope": Removed("the trials of hyperparameter_search are compared by their last evaluation", (None, "last")),
    "sharded_ddp": Removed("fairscale is retired; set fsdp='full_shard'", (None, False, "", [])),
    "mp_parameters": Removed("SageMaker's model parallel library is not supported; launch with torchrun", (None, "")),
    "fsdp_transformer_layer_cls_to_wrap": Removed("set fsdp_config={'transformer_layer_cls_to_wrap': ...}"),
    "fsdp_min_num_params": Removed("set fsdp_config={'min_num_params': ...}", (None, 0)),
    "tpu_num_cores": Removed("TPUs are not supported; run on GPUs or the CPU"),
    "tpu_metrics_debug": Removed("TPUs are not supported; run on GPUs or the CPU", (None, False)),
    # `on_nonfinite` handles a non-finite loss; the log shows its value.
    "logging_nan_inf_filter": Removed(
        "a non-finite loss is logged unchanged; on_nonfinite sets how it is handled", None, says_nothing=(False,)
    ),
}


@dataclass
class RunArguments:
    """Where a run writes, how long it is, how a step is made up and where its randomness comes from."""

    output_dir: Resolved[str | None, str] = opt(
        None, "Folder of checkpoints, logs and the final model; None: trainer_output."
    )
    overwrite_output_dir: bool = opt(
        False, "Start a new run in a folder with checkpoints of an earlier run, without a warning. Nothing is deleted."
    )
    do_train: bool = opt(False, "For scripts; the trainer itself does not read it.")
    do_eval: bool = opt(False, "For scripts; True unless `eval_strategy` is no.")
    do_predict: bool = opt(False, "For scripts; the trainer itself does not read it.")
    per_device_train_batch_size: int = opt(
        8,
        "Rows of one micro-batch on each device; more need more memory.",
        min=1,
        aliases=("per_gpu_train_batch_size",),
    )
    gradient_accumulation_steps: int = opt(
        1, "Micro-batches of one optimizer step: a larger effective batch with the same memory.", min=1
    )
    num_train_epochs: float = opt(
        3.0, "Passes over the training data; a fraction stops within one, and 0 trains nothing.", min=0
    )
    max_steps: int = opt(
        -1, "Number of optimizer steps, which overrides `num_train_epochs`; -1: num_train_epochs decides.", min=-1
    )
    max_duration: str | None = opt(
        None,
        "Length of the run with its unit, instead of the two above and max_time: 500st (optimizer steps), 2ep "
        "(epochs), 90min or 2h, or 10Mtok (input tokens, which the learning rate then follows; the two above may end "
        "the run earlier).",
    )
    label_smoothing_factor: float = opt(
        0.0, "Share of the target spread evenly over all classes; more makes a less certain model.", min=0, below=1
    )
    seed: int = opt(42, "Seed of weights, data order and dropout.", min=0, max=2**32 - 1)
    data_seed: int | None = opt(None, "Seed of the data order alone; None: `seed`.", min=0, max=2**32 - 1)
    full_determinism: bool = opt(False, "Only bit-reproducible kernels: slower, and an error where torch has none.")
    torch_empty_cache_steps: int | None = opt(
        None, "Free cached device memory every this many optimizer steps: a lower peak, slower steps.", min=1
    )
    auto_find_batch_size: bool = opt(
        False,
        "If memory runs out, halve the micro-batches and continue: the same optimizer step with twice as many "
        "micro-batches.",
    )
    skip_memory_metrics: bool = opt(
        True, "Off: report how much memory training, each evaluation and each prediction took; slows them a little."
    )

    def _normalize(self) -> None:
        self.output_dir = os.path.expanduser("trainer_output" if self.output_dir is None else self.output_dir)

    def _problems(self) -> Iterator[str]:
        for name in ("max_duration", "logging_steps", "eval_steps", "save_steps"):
            if isinstance(value := vars(self).get(name), str):
                try:
                    durations.parse(value)
                except ValueError as problem:
                    yield f"{name}={problem}"
        if self.max_steps == 0:
            yield "max_steps=0 would train nothing; give a positive number, or -1 to follow num_train_epochs"
        if self.auto_find_batch_size and environment.world_size() > 1:
            yield (
                "auto_find_batch_size=True works in one process: of several, the others would wait for ever for the "
                "one that has run out of memory. Find the size with one process, then set per_device_train_batch_size"
            )

    def _preflight(self) -> Iterator[str | Exception]:
        if getattr(self, "should_save", True) and (problem := files.folder_problem(self.output_dir)):
            yield f"output_dir={self.output_dir!r} {problem}; set another output_dir"


@dataclass
class TrainingArguments(  # a dataclass takes the fields of its last base first: output_dir must be the very first
    HubArguments,
    AcceleratorArguments,
    DistributedArguments,
    SpikeArguments,
    HealthArguments,
    EMAArguments,
    ModelSideArguments,
    AllocatorArguments,
    DataArguments,
    InterruptArguments,
    CheckpointArguments,
    EvaluationArguments,
    LoggingArguments,
    OptimizerArguments,
    ScheduleArguments,
    RunArguments,
    AnswersToOldNames,
    ArgumentSetters,
    metaclass=ConfigMeta,
):
    """All arguments of a run, under flat names.

    Each group is written in the module that reads it. Subclass it as a dataclass to add fields; a subclass may define
    ``_normalize(self)`` and ``_problems(self)`` (see `posttrain.core.config.validate`) and a table ``OLD_NAMES``. The
    constructor has no side effects: it uses no folder, device or process group.

    Raises:
        ConfigError: a `ValueError` and a `TypeError` that lists everything wrong with the arguments.
    """

    OLD_NAMES: ClassVar[dict[str, Renamed | Removed]] = OLD_NAMES

    def __post_init__(self) -> None:
        terminal.quiet()
        self.validate()
        strategies.meet_launched(self)

    def validate(self) -> None:
        """Check every argument again, after some were assigned; raises `ConfigError` with all problems."""
        validate(self)

    @classmethod
    def unknown_argument_hint(cls, name: str) -> str:
        owners = [owner for owner in registry.configs_with(name) if owner != cls.__name__]
        if name in registry.OF_TRAINERS:
            return f": pass {name}=... to the trainer"
        if name in registry.OF_LOADING:
            takes = "model_init_kwargs" in cls.__dataclass_fields__
            how = f"set {cls.__name__}(model_init_kwargs={{{name!r}: ...}})" if takes else "load the model with it"
            return f", which from_pretrained takes: {how}"
        if not owners:
            return ""
        listed = f"{', '.join(owners[:-1])} and {owners[-1]} have" if len(owners) > 1 else f"{owners[0]} has"
        return f", which {listed}; use {'one of those' if len(owners) > 1 else 'that class'} instead of {cls.__name__}"

    # ---- rules between the groups ----

    def _normalize(self) -> None:
        lengths = (self.max_duration, self.warmup_steps, self.logging_steps, self.eval_steps, self.save_steps)
        in_tokens = any(isinstance(each, str) and durations.parse(each).unit == "tokens" for each in lengths)
        if in_tokens and self.include_num_input_tokens_seen == "no":
            self.include_num_input_tokens_seen = "all"  # counted at each step
        value, unit = (0.0, "") if self.max_duration is None else durations.parse(self.max_duration)
        if unit == "steps":
            self.max_steps = int(value)
        elif unit == "epochs":
            self.num_train_epochs, self.max_steps = value, -1
        elif unit == "seconds":
            self.max_time = value
        self.do_eval = self.eval_strategy != "no" or (False if self.do_eval is None else self.do_eval)
        if self.eval_strategy == "steps" and not self.eval_steps:
            self.eval_steps = self.logging_steps
        if self.save_strategy == "steps" and isinstance(self.save_steps, (int, float)) and self.save_steps <= 0:
            logging.getLogger(__name__).warning(
                f"save_steps={self.save_steps} saves no step but the last: a run that is ended before has no "
                "checkpoint. Set a number of steps, or save_strategy='no' if none is wanted."
            )
            self.save_steps = durations.NEVER
        for name, strategy, unused in (
            ("logging_steps", self.logging_strategy, 500),
            ("eval_steps", self.eval_strategy, None),
            ("save_steps", self.save_strategy, 500),
        ):
            value = vars(self)[name]
            if isinstance(value, str) and (length := durations.parse(value)).unit == "steps":
                setattr(self, name, int(length.value))
            if strategy != "steps" and value in (0, None):  # scripts write it for a strategy that counts no steps
                setattr(self, name, unused)
            if isinstance(value, float) and value.is_integer():
                setattr(self, name, int(value))
        if self.metric_for_best_model is None and (
            self.load_best_model_at_end or self.save_top_k or self.lr_scheduler_type in FOLLOW_A_METRIC
        ):
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")
        if self.use_cpu and self.dataloader_pin_memory is True:
            self.dataloader_pin_memory = False

    def _problems(self) -> Iterator[str]:
        for name, strategy in (("logging", self.logging_strategy), ("eval", self.eval_strategy)):
            steps = vars(self)[f"{name}_steps"]
            if strategy == "steps" and not isinstance(steps, str) and steps > 1 and steps != int(steps):
                yield f"{name}_steps={steps} must be whole above 1; below 1 it is a share of all optimizer steps"
        if self.eval_strategy == "no":
            for name, asks in (
                ("load_best_model_at_end=True", self.load_best_model_at_end),
                ("save_strategy='best'", self.save_strategy == "best"),
                (f"save_top_k={self.save_top_k}", self.save_top_k is not None),
                ("eval_on_start=True", self.eval_on_start),
                (f"lr_scheduler_type={str(self.lr_scheduler_type)!r}", self.lr_scheduler_type in FOLLOW_A_METRIC),
            ):
                if asks:
                    yield f"{name} needs evaluations and eval_strategy is 'no'; set eval_strategy='steps' or 'epoch'"
        elif self.load_best_model_at_end or self.save_top_k is not None:
            yield from self._problems_of_comparing_checkpoints()
        if self.save_strategy == "best" and self.metric_for_best_model is None:
            yield (
                "save_strategy='best' needs metric_for_best_model to compare checkpoints; set it, for instance to "
                "'loss'"
            )
        yield from builder.problems_with_others(self)
        yield from lr_scheduler.length_problems(self)

    @property
    def goes_by_time(self) -> bool:
        """Whether anything is done at intervals of time, which processes would notice at different steps."""
        intervals = (self.logging_steps, self.eval_steps, self.save_steps)
        return any(isinstance(each, str) and durations.parse(each).unit == "seconds" for each in intervals)

    @property
    def max_tokens(self) -> float:
        """Input tokens after which a run ends; infinity where `max_duration` names none."""
        value, unit = durations.parse(self.max_duration) if self.max_duration else (math.inf, "tokens")
        return value if unit == "tokens" else math.inf

    @property
    def epochs_of_stream(self) -> float | None:
        """Passes over data without a known length that a run without `max_steps` makes: infinitely many where tokens or
        time end it. None: `max_duration` does not say, or the schedule needs a number of steps.
        """
        unit = durations.parse(self.max_duration).unit if self.max_duration else None
        if unit == "tokens":
            return math.inf
        if unit is None or self.lr_scheduler_type not in lr_scheduler.ENDLESS:
            return None
        return self.num_train_epochs if unit == "epochs" else math.inf

    def _problems_of_comparing_checkpoints(self) -> Iterator[str]:
        """Every saved checkpoint must have been evaluated."""
        asker = "load_best_model_at_end=True" if self.load_best_model_at_end else f"save_top_k={self.save_top_k}"
        if self.save_strategy not in ("best", self.eval_strategy):
            yield (
                f"{asker} needs an evaluation at each checkpoint, but eval_strategy="
                f"{str(self.eval_strategy)!r} and save_strategy={str(self.save_strategy)!r}; make them equal, "
                "or set save_strategy='best'"
            )
        elif self.save_strategy == "steps":
            evaluate, save = self.eval_steps or self.logging_steps, self.save_steps
            (first, unit), (last, other) = durations.measured(evaluate), durations.measured(save)
            ratio = last / first
            if unit != other:
                yield (
                    f"{asker} needs save_steps to be a multiple of eval_steps, which {unit} and {other} cannot "
                    f"guarantee (save_steps={save}, eval_steps={evaluate}); give both the same way"
                )
            elif round(ratio) < 1 or not math.isclose(ratio, round(ratio), rel_tol=1e-9):
                nearest = max(1, round(ratio)) * first
                yield (
                    f"{asker} needs save_steps to be a multiple of eval_steps, but save_steps={save} "
                    f"and eval_steps={evaluate}; set save_steps={nearest:g}{durations.SUFFIXES.get(unit, '')}"
                )

    # ---- derived values ----

    def per_process(self, size: int) -> int:
        """Rows of one process for a batch size argument `size`."""
        return size // self.data_parallel_size if self.accelerator_config["split_batches"] else size

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device asynchronously; by default if memory is pinned."""
        asked = self.accelerator_config["non_blocking"]
        return self.dataloader_pin_memory if asked is None else asked

    @property
    def train_batch_size(self) -> int:
        """Rows of one micro-batch in this process."""
        return self.per_process(self.per_device_train_batch_size)

    @property
    def eval_batch_size(self) -> int:
        """Rows of one evaluation batch in this process."""
        return self.per_process(self.per_device_eval_batch_size)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return environment.world_size()

    @property
    def process_index(self) -> int:
        """Number of this process among all."""
        return environment.rank()

    @property
    def local_process_index(self) -> int:
        """Number of this process on its machine."""
        return environment.local_rank()

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return environment.device(self.use_cpu)

    @property
    def n_gpu(self) -> int:
        """1 where this process has an accelerator, else 0: a process never drives more than one."""
        return int(self.device.type != "cpu")

    @property
    def _n_gpu(self) -> int:
        """What scripts for transformers' trainer call `n_gpu`."""
        return self.n_gpu

    @_n_gpu.setter
    def _n_gpu(self, number: int) -> None:
        if number > 1:
            raise ValueError(
                f"_n_gpu={number}: a process never drives more than one accelerator. Leave it out, and start "
                f"{number} processes (torchrun --nproc-per-node {number})."
            )

    @property
    def distributed_state(self) -> Any:
        """accelerate's `PartialState` of this process, which starts the process group if there is none."""
        return strategies.process_state(self)

    @property
    def parallel_mode(self) -> ChoiceOfEnum:
        """``"distributed"`` in a run of several processes, else ``"not_parallel"``."""
        return ChoiceOfEnum("distributed" if self.world_size > 1 else "not_parallel")

    @property
    def place_model_on_device(self) -> bool | None:
        """Override to keep the trainer from moving the model (False), or make it (True); None lets it decide."""
        return None

    @property
    def should_log(self) -> bool:
        """Whether this process writes logs."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes checkpoints."""
        return (self.local_process_index if self.save_on_each_node else self.process_index) == 0

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """`ddp_timeout` as torch.distributed takes it."""
        return timedelta(seconds=self.ddp_timeout)

    def get_process_log_level(self) -> int:
        """Level of messages in this process, as in `logging`; passive means INFO unless the program set one."""
        name = self.log_level if self.should_log else self.log_level_replica
        if name == "passive":
            return level_of_program() or logging.INFO
        return logging.DEBUG if name == "detail" else logging.getLevelNamesMapping()[name.upper()]

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Warm-up steps in a run of `num_training_steps`."""
        return lr_scheduler.warmup_steps(self, num_training_steps)

    def main_process_first(self, local: bool = True, desc: str = "work") -> contextlib.AbstractContextManager[None]:
        """Run the block on the main process first, so that the others find its results in a cache.

        Args:
            local: the first process of each machine runs first; False if all machines share one file system.
            desc: a description for the log.
        """
        if self.world_size == 1:
            return contextlib.nullcontext()
        logging.getLogger(__name__).debug("The main process goes first with: %s", desc)
        # Starts the process group if there is none; the trainer uses it later.
        return strategies.make_strategy(self).main_first(local)

    # ---- as plain data ----

    def to_dict(self) -> dict[str, Any]:
        """Every argument as plain data: enums and dtypes as strings, secrets masked at any depth."""
        return masked(plain_data(values_of(self)))

    def to_json_string(self) -> str:
        """`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, bool | int | float | str | torch.Tensor]:
        """`to_dict` with everything that is no number, string or tensor written as a string, as trackers need it."""
        sizes = {"train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return {
            name: value if type(value) in (bool, int, float, str, torch.Tensor) else str(value)
            for name, value in (self.to_dict() | sizes).items()
        }

    def __str__(self) -> str:
        lines = "".join(f"{name}={value!r},\n" for name, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}(\n{lines})"
