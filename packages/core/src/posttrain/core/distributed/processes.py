"""Implements the distributed operations of a run (`prepare_model`, `backward`, `sum`, ...).

The loop is the same for one process and many, for whole and sharded models.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from posttrain.core.distributed import (
    attempts,
    deepspeed,
    division,
    expert_parallel,
    global_batch,
    shard_settings,
    sharding,
    tensor_parallel,
)
from posttrain.core.distributed.arguments import DistributedArguments
from posttrain.core.distributed.environment import (
    accelerator_present,
    device,
    forget_another_device,
    has_bfloat16_instructions,
    lost_processes,
    precision,
    without_plugins,
)
from posttrain.core.distributed.maximum import Maximum
from posttrain.core.distributed.waits import LostProcessError, Waits, portable
from posttrain.core.distributed.watchdog import FOLDER, Watchdog, report_failures
from posttrain.core.errors import ConfigError
from posttrain.core.losses.normalization import scalar
from posttrain.lm.attention import context_parallel
from posttrain.lm.attention.padding_masks import announce_masks
from posttrain.lm.loading import parts

logger = logging.getLogger(__name__)

# The watchdog ends a wait for another process, because it knows who waits for whom; torch's limit is longer.
GRACE = 20

# Entered several times in every step; one can be entered again and again.
_NOTHING = contextlib.nullcontext()


_watchdog: Watchdog | None = None  # one for the process, as the process group is
_waits: Waits | None = None


def _leave_group() -> None:
    """Destroy the process group at exit, because gloo's threads may abort the program afterwards."""
    global _watchdog, _waits
    if _watchdog is not None:
        _watchdog.stop()
        _watchdog = _waits = None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _watch(args: DistributedArguments, rank: int, world_size: int) -> Watchdog:
    """The watchdog of this process, started if necessary."""
    global _watchdog, _waits
    if _watchdog is None or _waits is None or not _watchdog.is_alive():
        from torch.distributed.distributed_c10d import _get_default_store

        folder = Path(getattr(args, "output_dir", None) or ".") / FOLDER
        _watchdog = Watchdog(_get_default_store(), rank, world_size, args.ddp_timeout, folder)
        _watchdog.start()
        _waits = Waits(_watchdog.store, rank, world_size, args.ddp_timeout)
    _watchdog.seconds = _waits.seconds = args.ddp_timeout
    return _watchdog


def _round(model: nn.Module, dtype: torch.dtype, everything: bool) -> None:
    """Round the weights of `model` that its forward would round each time: those of matrix products under autocast, or
    `everything` under FSDP, which gathers weights in that type. Weights tied to an embedding stay.
    """
    shared = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    for module in model.modules():
        if everything or isinstance(module, nn.Linear):
            for parameter in module.parameters(recurse=False):
                if parameter.dtype == torch.float32 and (everything or id(parameter) not in shared):
                    parameter.data = parameter.data.to(dtype)


class Distributed:
    """The interface of the training loop to processes and devices. One per trainer.

    Args:
        args: the `DistributedArguments` of the run.
        model: the one to train, if it is there already: it may have been loaded in parts.

    Attributes:
        process_index, num_processes: of this process, among all.
        rank, world_size: of its rows, among as many parts. Processes that split a matrix (tensor parallelism) or a row
            (context parallelism) read the same rows and have the same rank: a run of two such processes has a world
            size of 1.
        peer_rank, peers: of this process among those that read the same rows.
        tp_size, cp_size: processes that split a matrix, or a row; one of them is 1.
        ep_size: processes that have all experts of a mixture between them. They read rows of their own, but those that
            also split a matrix.
    """

    def __init__(self, args: DistributedArguments, model: nn.Module | None = None) -> None:
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs

        self.args = args
        self.precision = precision(args)
        if self.precision == "fp16" and (args.use_cpu or not accelerator_present()):
            raise ConfigError("TrainingArguments", ["the launcher sets fp16, but this run is on the CPU"])
        if (lost := lost_processes()) is not None:
            logger.warning(lost)
        self.sharding = self._read_sharding()
        group = InitProcessGroupKwargs(
            self._backend(), attempts.init_method(), timedelta(seconds=args.ddp_timeout + GRACE)
        )
        # `autocast` below handles autocast, because accelerate would patch the forward of the user's model. Its
        # precision is not set, because all accelerators of a process share it. Its accumulation is not set either: its
        # backward, which old training_steps call, would divide the loss again.
        forget_another_device(device(args.use_cpu))
        with without_plugins():
            self.accelerator = Accelerator(cpu=args.use_cpu or None, kwargs_handlers=[group])
        self.device: torch.device = self.accelerator.device
        self.process_index: int = self.accelerator.process_index
        self.num_processes: int = self.accelerator.num_processes
        self.tp_size, self.cp_size, self.ep_size = self._read_sizes(model)
        self.peers = self.tp_size * self.cp_size
        self.rank, self.peer_rank = divmod(self.process_index, self.peers)
        self.world_size = self.num_processes // self.peers
        self.local_rank: int = self.accelerator.local_process_index
        if args.global_batch_size and (note := global_batch.note(args.global_batch_size, self.world_size)):
            logger.warning(note)
        self._is_slow_in_bfloat16 = self.device.type == "cpu" and not has_bfloat16_instructions()
        self._waiting: Callable[[str], contextlib.AbstractContextManager] = lambda what: _NOTHING
        self._waits: Waits | None = None
        if self.num_processes > 1:
            self._waiting, self._waits = _watch(args, self.process_index, self.num_processes), _waits
            report_failures()
            atexit.unregister(_leave_group)
            if self.device.type == "cpu":
                atexit.register(_leave_group)
        if self.num_processes == self.tp_size and self.sharding is not None:
            logger.warning("fsdp is ignored: the world size is 1.")
        sizes = {"tp_size": self.tp_size, "cp_size": self.cp_size, "ep_size": self.ep_size}
        sizes = shard_settings.sizes_of(args.parallelism_config) | sizes
        self.sharding = division.sharding_of(self.sharding, sizes, self.num_processes)
        self._mesh: Any = None
        self._mesh_of_experts: Any = None
        self._rows_group, self._peers_group = self._groups()
        self._gathered: set[int] = set()
        self._split: WeakSet[nn.Module] = WeakSet()
        self.engine = deepspeed.Engine(args, self.precision) if deepspeed.is_asked_for(args.deepspeed) else None
        self.scaler = torch.amp.GradScaler(self.device.type) if self.precision == "fp16" and not self.engine else None
        # A training_step of a script calls `accelerator.backward`.
        self.accelerator.scaler = self.scaler
        if self.engine is not None:
            self.accelerator.backward = self.engine.backward
        if args.tf32 is not None and torch.cuda.is_available():
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32

    def _read_sharding(self) -> shard_settings.Sharding | None:
        args = self.args
        settings, problems = shard_settings.read(args.fsdp, args.fsdp_config, args.parallelism_config)
        if settings is None and not problems:
            settings, problems = shard_settings.from_environment()
            if settings is not None:
                problems += shard_settings.optimizer_problems(getattr(args, "optim", ""))
        if problems:
            raise ConfigError("TrainingArguments", problems)
        for note in settings.notes if settings is not None else ():
            logger.info("fsdp_config: %s", note)
        return settings

    def _read_sizes(self, model: nn.Module | None) -> tuple[int, int, int]:
        """(processes that split a matrix, that split a row, that have all experts between them)."""
        sizes, problems = dict(shard_settings.sizes_of(self.args.parallelism_config)), []
        loaded = {"tp_size": tensor_parallel.loaded_size(model), "ep_size": expert_parallel.loaded_size(model)}
        for name, size in loaded.items():
            if size > 1 and sizes.get(name, 1) not in (1, size):
                problems.append(
                    f"parallelism_config: {name}={sizes[name]}, and from_pretrained(distributed_config=...) loaded the "
                    f"model with {name}={size}; leave {name} out, or load the model without distributed_config"
                )
            sizes[name] = max(size, sizes.get(name, 1))
        if sharding.is_sharded_by_transformers(model):
            problems.append(
                "from_pretrained(distributed_config=...) sharded the model (fsdp_size); load it without "
                "distributed_config, and set fsdp='full_shard', and of parallelism_config ep_size, if experts were "
                "divided"
            )
        problems += division.problems(sizes, self.num_processes, self.args)
        if problems:
            raise ConfigError("TrainingArguments", problems)
        return sizes["tp_size"], sizes.get("cp_size", 1), sizes["ep_size"]

    def _backend(self) -> str | None:
        """Weights that live in host memory are gathered there too, which nccl cannot do."""
        offloads = self.sharding is not None and self.sharding.cpu_offload
        if self.args.ddp_backend is None and offloads and torch.cuda.is_available() and not self.args.use_cpu:
            return "cpu:gloo,cuda:nccl"
        return self.args.ddp_backend

    @property
    def is_main(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main(self) -> bool:
        return self.local_rank == 0

    def enter_step(self, step: int, batches: int) -> None:
        """Optimizer step `step` begins, from 1, `batches` into the epoch: where the processes hang, each says so."""
        if isinstance(self._waiting, Watchdog):
            self._waiting.step, self._waiting.batches = step, batches

    def seconds_waited(self) -> float:
        """How long this process has waited for the others so far, within steps and evaluations."""
        return self._waiting.waited if isinstance(self._waiting, Watchdog) else 0.0

    @property
    def shards(self) -> bool:
        """Whether each process holds its part of the weights alone, by FSDP, tensor or expert parallelism."""
        return self.sharding is not None or self.tp_size > 1

    # ---- model ----

    def place(self, model: nn.Module, trained: bool = False) -> None:
        """Move `model` to this process's device, unless it was loaded with a device map or the arguments forbid it.

        Args:
            trained: the model is trained; if it will be sharded, it is moved layer by layer.
        """
        placed = getattr(model, "hf_device_map", None) or getattr(model, "is_quantized", False)
        asked = getattr(self.args, "place_model_on_device", None)  # a property that subclasses override
        if not (trained and self.shards) and (asked or (asked is None and not placed)):
            model.to(self.device)
        if self.device.type != "cpu":
            announce_masks(model)
        if trained and self._is_slow_in_bfloat16:
            if self.precision == "bf16" or any(p.dtype == torch.bfloat16 for p in model.parameters()):
                self._is_slow_in_bfloat16 = False  # one warning is enough
                logger.warning(
                    "This processor has no bfloat16 instructions (AVX-512, AMX). torch emulates them: a step takes "
                    "ten times as long as in float32. Set bf16=False, and load the model with dtype='float32'."
                )

    def prepare_model(
        self, model: nn.Module, gradient_checkpointing: bool = False, optimizer: torch.optim.Optimizer | None = None
    ) -> nn.Module:
        """Move `model` to this process' device and, with several processes, wrap it so that gradients are averaged.

        Args:
            optimizer: made by the user from the parameters of `model`, which sharding replaces.
        """
        if self.engine is not None:
            self.engine.check_unused()
        self.place(model, trained=True)
        self._slice_rows(model)
        if self.shards:
            return self.shard(model, optimizer)
        if self.num_processes == 1 or self.engine is not None or not any(p.requires_grad for p in model.parameters()):
            return model
        if isinstance(model, nn.parallel.DistributedDataParallel):
            return model
        args = self.args
        options: dict[str, Any] = {}
        unused = args.ddp_find_unused_parameters
        # LLaVA takes the features from a layer before the last, whose weights are then in no loss.
        reentrant = (getattr(args, "activation_checkpointing_kwargs", None) or {}).get("use_reentrant", False)
        looks = not gradient_checkpointing or (parts.sees(model) and not reentrant)
        options["find_unused_parameters"] = looks if unused is None else unused
        for name in ("bucket_cap_mb", "broadcast_buffers", "static_graph"):
            if getattr(args, f"ddp_{name}") is not None:
                options[name] = getattr(args, f"ddp_{name}")
        ids = [self.device.index] if self.device.type not in ("cpu", "mps") else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids, **options)

    def shard(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
        """Shard `model` in place, unless it is sharded already, or none is to be."""
        settings = self.sharding
        if settings is not None and sharding.is_sharded(model):
            sharding.scatter(model, settings)  # after a forward without a backward
            return model
        self._slice_rows(model)
        if not self.shards or model in self._split:
            return model
        before = {id(parameter): name for name, parameter in model.named_parameters()}
        self._cut(model)
        sharding.follow(optimizer, before, model)
        return model

    def _cut(self, model: nn.Module, frozen: bool = False) -> None:
        """Split the matrices of `model` and shard it, as far as that is asked for."""
        # torch counts its own use of a deprecated call against us.
        with self._waiting("sharding the model"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            if self.tp_size > 1:
                self._split.add(model)
            keepers = self._experts() if self._exchanges_tokens else None
            how = division.Division(self.sharding, self._processes(), self.ep_size, keepers)
            division.cut(model, how, self.device, self.precision, frozen)

    def _slice_rows(self, model: nn.Module) -> None:
        """Let each process compute a slice of the rows, where that is asked for."""
        if self.cp_size > 1:
            with self.autocast():
                context_parallel.enable(model, self._peers_group)

    def _processes(self) -> Any:
        """All processes, as a device mesh."""
        if self._mesh is None:
            total, local = self.num_processes, int(os.environ.get("LOCAL_WORLD_SIZE", self.num_processes))
            sizes = {"tp": self.tp_size, "cp": self.cp_size}
            self._mesh = sharding.make_mesh(self.sharding, self.device.type, total, local, **sizes)
        return self._mesh

    @property
    def _exchanges_tokens(self) -> bool:
        """Whether processes with rows of their own have the experts between them."""
        return self.ep_size > 1 and self.tp_size == 1

    @property
    def _has_several_meshes(self) -> bool:
        """Whether some weights are divided over other processes than others, which no kernel takes together."""
        return self.tp_size * self.ep_size > 1

    def _experts(self) -> Any:
        """All processes by the experts that they keep, as a device mesh."""
        if self._mesh_of_experts is None:
            self._mesh_of_experts = sharding.make_expert_mesh(self._processes(), self.ep_size)
        return self._mesh_of_experts

    def _groups(self) -> tuple[Any, Any]:
        """The processes that read other rows than this one, with itself, and those that read the same; None: all."""
        if self.cp_size > 1:
            from torch.distributed.device_mesh import init_device_mesh

            mesh = init_device_mesh(self.device.type, (self.world_size, self.cp_size), mesh_dim_names=("rows", "cp"))
            return mesh.get_group("rows"), mesh.get_group("cp")
        if self.tp_size > 1:
            return self._data_parallel().get_group(), self._processes().get_group("tp")
        return None, None

    def _data_parallel(self) -> Any:
        """Those of the processes that read other rows than this one, with itself: a device mesh of one dimension."""
        dims = division.data_dims(self._processes())
        return self._processes()[dims]._flatten("rows") if len(dims) > 1 else self._processes()[dims[0]]

    def prepare_frozen(self, model: nn.Module, rounds: bool = False) -> nn.Module:
        """Place `model`, which is never trained, like the trained one: on this process's device, and sharded if that
        is. Every process must call it.

        Args:
            rounds: store weights rounded to bfloat16 or float16 if the forward rounds them anyway; the results are
                equal.
        """
        dtype, settings = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision), self.sharding
        if settings is not None:
            dtype = settings.param_dtype or dtype
        if rounds and dtype is not None:
            _round(model, dtype, everything=self.shards)
        if not self.shards:
            self.place(model)
        self._slice_rows(model)
        if not self.shards:
            return model
        self._cut(model, frozen=True)
        return model

    @property
    def saves_in_parts(self) -> bool:
        """Whether each process writes its own part of the weights into a checkpoint."""
        return self.sharding is not None and self.sharding.state_dict_type == "sharded"

    def start(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        """(what runs forward and backward, what steps) in place of the prepared `model` and of `optimizer`."""
        return (model, optimizer) if self.engine is None else self.engine.start(model, optimizer)

    def writable(self, model: nn.Module) -> contextlib.AbstractContextManager:
        """Where weights may be loaded into `model`, by every process."""
        return contextlib.nullcontext() if self.engine is None else self.engine.gathered(model)

    @contextlib.contextmanager
    def gathered(self, *models: nn.Module) -> Iterator[None]:
        """Within this context every process holds the weights of all `models` whole, as for generating with them, and
        need not keep in step with the others."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(context_parallel.whole_rows())
            for model in models:
                stack.enter_context(self._one_gathered(model))
            yield

    @contextlib.contextmanager
    def _one_gathered(self, model: nn.Module) -> Iterator[None]:
        whole: Callable[[], contextlib.AbstractContextManager]
        if self.engine is not None and self.engine.has_pieces_of(model):
            whole = self.engine.whole
        elif self.sharding is not None and sharding.is_sharded(model):
            whole = functools.partial(self._whole, model, self.sharding)
        else:
            whole = contextlib.nullcontext
        if id(model) in self._gathered:
            yield
            return
        self._gathered.add(id(model))
        try:
            with whole():
                yield
        finally:
            self._gathered.remove(id(model))

    @contextlib.contextmanager
    def _whole(self, model: nn.Module, settings: shard_settings.Sharding) -> Iterator[None]:
        """Within this context the weights of `model`, which FSDP sharded, are whole."""
        with self._waiting("gathering the weights"):
            sharding.gather(model)
        try:
            with expert_parallel.whole(model) if self._exchanges_tokens else _NOTHING:
                yield
        finally:
            sharding.scatter(model, settings)

    def whole_state_dict(
        self,
        model: nn.Module,
        only: Callable[[str], bool] = lambda name: True,
        keep: Callable[[str], bool] | None = None,
    ) -> dict[str, torch.Tensor] | None:
        """The gathered weights of a sharded `model` in host memory; None if it is not sharded.

        Every process must call it.

        Args:
            only: the names that are gathered.
            keep: the names that this process gets; None: rank 0 gets all of them, and the others an empty dict.
        """
        if not self.shards and self.engine is None:
            return None
        keep = keep or (lambda name: self.is_main)
        with self._waiting("gathering the weights"):
            if self.engine is not None:
                return self.engine.whole_state_dict(model, keep, only)
            if not (sharding.is_sharded(model) or tensor_parallel.is_split(model)):
                return None
            return sharding.whole_state_dict(model, keep, only)

    # ---- one step ----

    def autocast(self) -> contextlib.AbstractContextManager:
        """The autocast context of the forward pass and the loss."""
        if self.precision == "no":
            return _NOTHING
        return torch.autocast(self.device.type, dtype=torch.bfloat16 if self.precision == "bf16" else torch.float16)

    def in_step(self) -> contextlib.AbstractContextManager:
        """Around forward and backward of a micro-batch, in which processes may wait for each other, for sharded weights
        and DDP's buffers.
        """
        return self._waiting("the forward pass")

    def sync_gradients(self, model: nn.Module, when: bool) -> contextlib.AbstractContextManager:
        """Average gradients over the processes in this backward pass only if `when`."""
        if self.engine is not None:
            self.engine.at_boundary(when)
        elif self.sharding is not None:
            sharded: Any = model
            sharded.set_requires_gradient_sync(when)
        elif (
            not when
            and isinstance(model := getattr(model, "_orig_mod", model), nn.parallel.DistributedDataParallel)
            and not self.args.ddp_static_graph
        ):
            return model.no_sync()  # which a static graph does not allow: it averages more often, to the same sum
        return _NOTHING

    def backward(self, loss: torch.Tensor) -> None:
        if self.engine is not None:
            return self.engine.backward(loss)
        if not loss.requires_grad:
            raise ValueError(
                "The loss has no gradient, so nothing can be learned from it: compute_loss detaches it, computes it "
                "under torch.no_grad() or from numbers alone, or all parameters that it depends on are frozen."
            )
        with self._waiting("the backward pass"):
            (self.scaler.scale(loss) if self.scaler else loss).backward()

    def clip_gradients(
        self, parameters: Sequence[torch.Tensor], max_norm: float | None, optimizer: torch.optim.Optimizer
    ) -> torch.Tensor:
        """Scale the gradients down to `max_norm` (None or 0: leave them) and return their norm before that, shape
        ().
        """
        if self.engine is not None:
            return self.engine.gradient_norm()
        if self.scaler:
            if self.scaler._scale is None:
                raise RuntimeError(
                    "fp16=True: the gradients were not made by the loss scaler, so they cannot be scaled back. In a "
                    "training_step of your own, call self.accelerator.backward(loss) where it calls loss.backward()."
                )
            self.scaler.unscale_(optimizer)
        with self._waiting("the norm of the gradients"):
            if self._has_several_meshes:
                gradients = [p.grad for p in parameters if p.grad is not None]
                norm = tensor_parallel.total_norm(gradients)
                if max_norm:
                    tensor_parallel.clip(gradients, norm, max_norm)
            elif max_norm:
                norm = nn.utils.clip_grad_norm_(parameters, max_norm)
            else:
                norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            return sharding.whole(norm) if self.shards else norm

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer; False where the loss scaler skipped the step because it had overflowed."""
        if self.engine is not None:
            with self._waiting("the optimizer's step"):
                return self.engine.step()
        if self.scaler is None:
            tensor_parallel.step(optimizer) if self._has_several_meshes else optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before

    def empty_cache(self) -> None:
        """Give cached device memory back; nothing to do on the CPU."""
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    # ---- between processes ----

    def sum(self, value: Any) -> Any:
        """The sum of a number or tensor over all parts of the rows; the value itself where there is one part."""
        if self.world_size == 1:
            return value
        total = scalar(value, self.device) if isinstance(value, (int, float)) else value.to(self.device)
        total = total.clone()
        with self._waiting("a sum"):
            torch.distributed.all_reduce(total, group=self._rows_group)
        return total

    def highest(self, numbers: list[int]) -> list[int]:
        """The largest of each of `numbers` over all processes. Waits for them, but not for a device that has a network
        on the host's side beside its own."""
        if self.num_processes == 1:
            return numbers
        with self._waiting("the largest of some numbers"):
            return Maximum(numbers, self.device).read()

    def gather_object(self, value: Any) -> list[Any]:
        """What every process passed, in rank order, on every process; of those that read the same rows, one."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self._waiting("a gathering of values"):
            torch.distributed.all_gather_object(values, value, group=self._rows_group)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """What the main process passed, on every process."""
        if self.num_processes == 1:
            return value
        values = [value]
        with self._waiting("what rank 0 says"):
            torch.distributed.broadcast_object_list(values, src=0)
        return values[0]

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the first of the processes that read the same rows; its result, or its error, on all of them.
        For what need not come out alike twice, such as a reward that a model gives."""
        if self.peers == 1:
            return work()
        values: list[Any] = [None, None]
        if self.peer_rank == 0:
            try:
                with context_parallel.whole_rows():
                    values[0] = work()
            except Exception as error:
                values[1] = portable(error)
        with self._waiting("work of the first of the processes that read the same rows"):
            torch.distributed.broadcast_object_list(values, group=self._peers_group, group_src=0)
        if values[1] is not None:
            raise values[1]
        return values[0]

    # ---- waits without a limit: for work that only some do, as long as it takes ----

    def gather_patiently(self, value: Any, what: str = "that all come here") -> list[Any]:
        """What every process passed, in the order of `process_index`. They may come hours apart: `ddp_timeout` does not
        count here.

        Args:
            value: small, because it goes through the store.
            what: a description of the wait, for the log.
        """
        return [value] if self._waits is None else self._waits.gather(value, what)

    def meet(self, what: str = "that all come here") -> None:
        """Wait until every process is here, however long that takes."""
        self.gather_patiently(None, what)

    def all_come(self, name: str, seconds: float = 30) -> bool:
        """Whether every process comes here with the same `name` within `seconds`, as after an error on all of them."""
        return self._waits is None or self._waits.all_come(name, seconds)

    @contextlib.contextmanager
    def main_first(self, local: bool = False, what: str = "work that is done once for all") -> Iterator[None]:
        """Rank 0 runs the block before all others, or the first of each machine if `local`, so that they read what it
        writes.

        All continue when all have run it; an error of one is raised on all.
        """
        if self._waits is None:
            yield
            return
        leader, waits, error = self.process_index - self.local_rank if local else 0, self._waits, None
        name = waits.next()
        if self.process_index != leader:
            error = waits.hear(name, leader, what)
        if error is None:
            try:
                yield
            except BaseException as caught:
                error = caught
                raise
            finally:
                if self.process_index == leader:
                    waits.tell(name, portable(error))
                if error is None or isinstance(error, Exception):
                    errors = waits.gather(portable(error), what)
        else:
            errors = [error] if isinstance(error, LostProcessError) else waits.gather(error, what)
        for error in filter(None, errors):
            raise error

    def on_main(self, work: Callable[[], Any], what: str = "work of the main process") -> Any:
        """Run `work` on rank 0 and return its result everywhere; an error there is raised on every rank."""
        if self._waits is None:
            return work()
        name = self._waits.next()
        if not self.is_main:
            result, error = self._waits.hear(name, 0, what)
        else:
            result, error = None, None
            try:
                result = work()
            except Exception as caught:
                error = caught
            self._waits.tell(name, (result, portable(error)))
        if error is not None:
            raise error
        return result
