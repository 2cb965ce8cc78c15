"""Processes, devices and precision: the only file that knows accelerate, DDP, FSDP and DeepSpeed.

Below the trainer, this is a class of verbs (`prepare_model`, `backward`, `sum`, ...). The loop above reads the same for
one process and for many.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from posttrain.core.errors import ConfigError
from posttrain.core.fields import opt


@dataclass
class DistributedArguments:
    """Devices, precision and how the processes of a run work together."""

    use_cpu: bool = opt(False, "Train on the CPU even where an accelerator is present.", aliases=("no_cuda",))
    bf16: bool = opt(False, "Compute in bfloat16 under autocast; the weights keep their own precision.")
    fp16: bool = opt(False, "Compute in float16 under autocast with loss scaling. Needs an accelerator.")
    bf16_full_eval: bool = opt(False, "Evaluate with the weights cast to bfloat16: half the memory, other metrics.")
    fp16_full_eval: bool = opt(False, "Evaluate with the weights cast to float16: half the memory, other metrics.")
    tf32: bool | None = opt(None, "Allow TF32 matrix products on Ampere and newer GPUs; None keeps torch's setting.")
    average_tokens_across_devices: bool = opt(
        True, "Divide the loss by the items of all processes, so that splitting a batch differently changes nothing."
    )
    local_rank: int = opt(-1, "Set by launchers; the environment variable LOCAL_RANK is what is read.", min=-1)
    ddp_backend: str | None = opt(
        None, "Backend of torch.distributed; None takes nccl on GPUs and gloo on CPUs.",
        choices=("nccl", "gloo", "mpi", "ccl", "hccl", "cncl", "mccl"),
    )  # fmt: skip
    ddp_timeout: int = opt(
        1800, "Seconds after which a collective that does not finish raises, on every device.", min=1
    )
    ddp_find_unused_parameters: bool | None = opt(
        None, "Let DDP look for parameters without a gradient each step. None: on, unless gradients are checkpointed."
    )
    ddp_bucket_cap_mb: int | None = opt(None, "Size in MiB of the buckets in which DDP reduces gradients.", min=1)
    ddp_broadcast_buffers: bool | None = opt(None, "Let DDP copy rank 0's buffers to all ranks before each forward.")
    ddp_static_graph: bool | None = opt(None, "Tell DDP that every step uses the same parameters.")

    def _problems(self) -> Iterator[str]:
        if self.bf16 and self.fp16:
            yield "bf16=True and fp16=True cannot both hold; keep one (bf16 needs no loss scaling)"
        if self.bf16_full_eval and self.fp16_full_eval:
            yield "bf16_full_eval=True and fp16_full_eval=True cannot both hold; keep one"
        if (self.fp16 or self.fp16_full_eval) and (self.use_cpu or not _accelerator_present()):
            name = "fp16" if self.fp16 else "fp16_full_eval"
            yield f"{name}=True needs an accelerator and this run is on the CPU; set bf16{name[4:]}=True instead"
        if self.tf32 and not torch.cuda.is_available():
            yield "tf32=True needs a CUDA GPU (Ampere or newer) and none is visible; leave it None"


def _accelerator_present() -> bool:
    return torch.cuda.is_available() or torch.backends.mps.is_available() or torch.accelerator.is_available()


def world_size() -> int:
    """Number of processes in this run; 1 where nothing was launched."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """Number of this process among all, from 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """Number of this process on its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", 0))


def barrier() -> None:
    """Wait for every process. Does nothing in a run of one process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()


def device(use_cpu: bool = False) -> torch.device:
    """The device of this process."""
    if use_cpu or not _accelerator_present():
        return torch.device("cpu")
    kind = "cuda" if torch.cuda.is_available() else torch.accelerator.current_accelerator().type
    return torch.device(kind, local_rank()) if kind != "mps" else torch.device("mps")


def precision(args: DistributedArguments) -> str:
    """``"bf16"``, ``"fp16"`` or ``"no"``; a launcher's choice (ACCELERATE_MIXED_PRECISION) holds where args say none."""
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def _leave_group() -> None:
    """Take down the process group when the program ends: gloo's threads, left running, may abort it after all is done."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Distributed:
    """What a loop asks of the machine it runs on. One per trainer.

    Args:
        args: the `DistributedArguments` of the run.
    """

    def __init__(self, args: DistributedArguments) -> None:
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs

        self.args = args
        self.precision = precision(args)
        if self.precision == "fp16" and (args.use_cpu or not _accelerator_present()):
            raise ConfigError("TrainingArguments", ["fp16 was asked for by the launcher, but this run is on the CPU"])
        group = InitProcessGroupKwargs(backend=args.ddp_backend, timeout=timedelta(seconds=args.ddp_timeout))
        # Autocast is entered by `autocast` below: accelerate's own would patch the forward of the user's model. Its
        # precision is left open, because a process has one for all accelerators, and the user may have made one.
        # Nor is it told of accumulation: its backward, which old training_steps call, would divide by it once more.
        self.accelerator = Accelerator(cpu=args.use_cpu or None, kwargs_handlers=[group])
        self.device: torch.device = self.accelerator.device
        self.rank: int = self.accelerator.process_index
        self.world_size: int = self.accelerator.num_processes
        self.local_rank: int = self.accelerator.local_process_index
        if self.world_size > 1 and self.device.type == "cpu":
            atexit.unregister(_leave_group)
            atexit.register(_leave_group)
        self.scaler = torch.amp.GradScaler(self.device.type) if self.precision == "fp16" else None
        if args.tf32 is not None and torch.cuda.is_available():
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        return self.local_rank == 0

    # ---- model ----

    def place(self, model: nn.Module) -> None:
        """Move `model` to this process' device, unless whoever loaded it placed its parts already, or the arguments forbid."""
        placed = getattr(model, "hf_device_map", None) or getattr(model, "is_quantized", False)
        asked = getattr(self.args, "place_model_on_device", None)  # a property that subclasses override
        if asked or (asked is None and not placed):
            model.to(self.device)

    def prepare_model(self, model: nn.Module, gradient_checkpointing: bool = False) -> nn.Module:
        """Move `model` to this process' device and, with several processes, wrap it so that gradients are averaged."""
        self.place(model)
        if self.world_size == 1 or not any(p.requires_grad for p in model.parameters()):
            return model
        if isinstance(model, nn.parallel.DistributedDataParallel):
            return model
        args, options = self.args, {}
        unused = args.ddp_find_unused_parameters
        options["find_unused_parameters"] = not gradient_checkpointing if unused is None else unused
        for name in ("bucket_cap_mb", "broadcast_buffers", "static_graph"):
            if getattr(args, f"ddp_{name}") is not None:
                options[name] = getattr(args, f"ddp_{name}")
        ids = [self.device.index] if self.device.type not in ("cpu", "mps") else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids, **options)

    # ---- one step ----

    def autocast(self) -> contextlib.AbstractContextManager:
        """Where the forward pass and the loss run in the precision that was asked for."""
        if self.precision == "no":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype=dtype)

    def sync_gradients(self, model: nn.Module, when: bool) -> contextlib.AbstractContextManager:
        """Average gradients over the processes in this backward pass only if `when`."""
        if when or not isinstance(model, nn.parallel.DistributedDataParallel):
            return contextlib.nullcontext()
        return model.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def clip_gradients(
        self, parameters: list[torch.Tensor], max_norm: float | None, optimizer: torch.optim.Optimizer
    ) -> torch.Tensor:
        """Scale the gradients down to `max_norm` (None or 0: leave them) and return their norm before that, shape ()."""
        if self.scaler:
            self.scaler.unscale_(optimizer)
        if max_norm:
            norm = nn.utils.clip_grad_norm_(parameters, max_norm)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer; False where the loss scaler skipped the step because it had overflowed."""
        if self.scaler is None:
            optimizer.step()
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
        """The sum of a number or tensor over all processes; the value itself in a run of one."""
        if self.world_size == 1:
            return value
        total = torch.as_tensor(value, device=self.device).clone()
        torch.distributed.all_reduce(total)
        return total

    def gather_object(self, value: Any) -> list[Any]:
        """What every process passed, in rank order, on every process."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """What rank 0 passed, on every process."""
        if self.world_size == 1:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0)
        return values[0]

    def barrier(self) -> None:
        barrier()

    @contextlib.contextmanager
    def main_first(self, local: bool = False) -> Iterator[None]:
        """Rank 0 runs the block before all others, or the first of each machine if `local`: what it writes, they read."""
        first = self.is_local_main if local else self.is_main
        if not first:
            self.barrier()
        try:
            yield
        finally:  # also after an error, else the others would wait for ever
            if first:
                self.barrier()

    def on_main(self, work: Callable[[], Any]) -> Any:
        """Run `work` on rank 0 and return its result everywhere; an error there is raised on every rank."""
        result, error = None, None
        if self.is_main:
            try:
                result = work()
            except Exception as caught:
                error = caught
        if self.world_size > 1:
            result, error = self.broadcast_object((result, error))
        if error is not None:
            raise error
        return result
