"""The arguments of distributed training and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.core.config import opt
from posttrain.core.distributed import deepspeed, division, shard_settings
from posttrain.core.distributed.environment import accelerator_present, world_size
from posttrain.core.errors import missing
from posttrain.core.models import float8


def dealt(rows: int, processes: int, most: int) -> tuple[int, int]:
    """(rows of a micro-batch, micro-batches) of each of the `processes` that read rows of their own, in an optimizer
    step of `rows` rows over all, where a micro-batch may have `most`. Where `rows` cannot be dealt equally, the step
    holds the nearest number that can be.
    """
    each = max((2 * rows + processes) // (2 * processes), 1)
    size = max(size for size in range(1, min(most, each) + 1) if each % size == 0)
    return size, each // size


def note(rows: int, processes: int) -> str | None:
    """A warning where `rows` cannot be dealt equally to `processes`."""
    if rows % processes == 0:
        return None
    size, steps = dealt(rows, processes, rows)
    return (
        f"global_batch_size={rows} cannot be dealt equally to {processes} processes, so an optimizer step holds "
        f"{size * steps * processes} rows. A multiple of each number of processes that the job may have stays the same."
    )


@dataclass
class DistributedArguments:
    """Devices, precision and how the processes of a run work together."""

    use_cpu: bool = opt(False, "Train on the CPU even where an accelerator is present.", aliases=("no_cuda",))
    bf16: bool = opt(False, "Compute in bfloat16 under autocast; the weights keep their own precision.")
    fp16: bool = opt(False, "Compute in float16 under autocast with loss scaling. Needs an accelerator.")
    fp8: bool = opt(
        False,
        "Multiply matrices in float8, through torchao, on GPUs that can; weights keep their precision. Set bf16 too.",
    )
    bf16_full_eval: bool = opt(False, "Evaluate with the weights cast to bfloat16: half the memory, other metrics.")
    fp16_full_eval: bool = opt(False, "Evaluate with the weights cast to float16: half the memory, other metrics.")
    tf32: bool | None = opt(
        None, "Allow TF32 matrix products on Ampere and newer GPUs; None keeps torch's setting.", flag=True
    )
    average_tokens_across_devices: bool = opt(
        True, "Divide the loss by the items of all processes, so that splitting a batch differently changes nothing."
    )
    global_batch_size: int | None = opt(
        None,
        "Rows of an optimizer step over all processes. It overrides gradient_accumulation_steps, and "
        "per_device_train_batch_size is then the most rows of a micro-batch: a job that goes on with other processes "
        "keeps its step.",
        min=1,
    )
    local_rank: int = opt(-1, "Set by launchers; the trainer reads the environment variable LOCAL_RANK.", min=-1)
    ddp_backend: str | None = opt(
        None,
        "Backend of torch.distributed; None takes nccl on GPUs and gloo on CPUs.",
        choices=("nccl", "gloo", "mpi", "ccl", "hccl", "cncl", "mccl"),
    )
    ddp_timeout: int = opt(
        1800,
        "Seconds that a process waits for the others in a step, on every device; then each writes its stacks and the "
        "job ends. Preparation of data, and what the main process does alone, has no limit.",
        min=1,
    )
    ddp_find_unused_parameters: bool | None = opt(
        None,
        "Let DDP look for parameters without a gradient each step. None: on, unless gradients are checkpointed with "
        "`use_reentrant`.",
        flag=True,
    )
    ddp_bucket_cap_mb: int | None = opt(None, "Size in MiB of DDP's gradient buckets.", min=1)
    ddp_broadcast_buffers: bool | None = opt(
        None, "Let DDP copy rank 0's buffers to all ranks before each forward.", flag=True
    )
    ddp_static_graph: bool | None = opt(None, "DDP's static_graph: every step uses the same parameters.", flag=True)
    fsdp: list[str] | str | None = opt(
        None,
        "Shard weights, gradients and optimizer state over the processes (FSDP2): full_shard, or shard_grad_op, "
        "hybrid_shard, offload.",
        flag="full_shard",
    )
    fsdp_config: dict[str, Any] | str | None = opt(
        None,
        "Options of FSDP, or a JSON file of them, e.g. {'cpu_offload': true, 'state_dict_type': 'SHARDED_STATE_DICT'}.",
    )
    deepspeed: dict[str, Any] | str | None = opt(
        None, "DeepSpeed's configuration, or a JSON file of it; 'auto' values follow from the other arguments."
    )
    parallelism_config: dict[str, Any] | str | Any | None = opt(  # in this order, HfArgumentParser reads it as text
        None,
        "Sizes of the groups of processes (accelerate's ParallelismConfig, or a dict): dp_replicate_size, "
        "dp_shard_size, tp_size (tensor parallelism), cp_size (context parallelism), ep_size (expert parallelism).",
    )

    @property
    def data_parallel_size(self) -> int:
        """Parts into which rows are dealt: the processes, but those that split a matrix or a row share theirs."""
        return world_size() // shard_settings.peers(shard_settings.sizes_of(self.parallelism_config))

    def _normalize(self) -> None:
        if isinstance(self.fsdp, bool):
            self.fsdp = "full_shard" if self.fsdp else None
        settings, problems = shard_settings.read(self.fsdp, self.fsdp_config, self.parallelism_config)
        if settings is not None and not problems and settings.activation_checkpointing:
            vars(self).update(activation_checkpointing=True, gradient_checkpointing=True)
        if self.global_batch_size is not None and self.global_batch_size > 0:
            own: Any = self
            size, steps = dealt(self.global_batch_size, self.data_parallel_size, own.per_device_train_batch_size)
            vars(self).update(per_device_train_batch_size=size, gradient_accumulation_steps=steps)

    def _problems(self) -> Iterator[str]:
        if self.bf16 and self.fp16:
            yield "bf16=True and fp16=True cannot both hold; keep one (bf16 needs no loss scaling)"
        if self.fp8 and self.fp16:
            yield "fp8=True and fp16=True cannot both hold; set bf16=True beside fp8"
        if self.fp8 and self.deepspeed is not None:
            yield "fp8=True changes layers that deepspeed divides; set one of the two to its default"
        if self.bf16_full_eval and self.fp16_full_eval:
            yield "bf16_full_eval=True and fp16_full_eval=True cannot both hold; keep one"
        if self.fp16 and (self.use_cpu or not accelerator_present()):
            yield "fp16=True needs an accelerator and this run is on the CPU; set bf16=True instead"
        own: Any = self  # a part of `TrainingArguments`
        if self.global_batch_size is not None and own.max_batch_tokens is not None:
            yield "global_batch_size counts rows, and max_batch_tokens takes as many as fit; set one of them to None"
        if self.tf32 and not torch.cuda.is_available():
            yield "tf32=True needs a CUDA GPU (Ampere or newer) and none is visible; leave it None"
        sizes = self.parallelism_config
        if sizes is not None and not (isinstance(sizes, (dict, str)) or hasattr(sizes, "dp_shard_size")):
            yield f"parallelism_config={sizes!r} is no dict, nor a ParallelismConfig of accelerate"
        settings, problems = shard_settings.read(self.fsdp, self.fsdp_config, self.parallelism_config)
        yield from problems
        groups = shard_settings.sizes_of(sizes)
        if self.fp8 and (size := groups.get("tp_size", 1)) > 1:
            yield f"fp8=True does not work on split matrices; set it to False, or tp_size=1 in place of {size}"
        yield from division.argument_problems(groups, self)
        if settings is not None:
            for name in ("bf16_full_eval", "fp16_full_eval"):
                if vars(self)[name]:
                    yield f"{name}=True casts whole weights, and fsdp shards them; set bf16=True instead"
            yield from shard_settings.optimizer_problems(own.optim, offloads=settings.cpu_offload)
            if self.deepspeed is not None:
                yield "fsdp and deepspeed both shard the model; set one of them to None"
        try:
            deepspeed.read({} if self.deepspeed is None else self.deepspeed)
        except ValueError as error:
            yield str(error)

    def _preflight(self) -> Iterator[str | Exception]:
        yield from shard_settings.world_problems(shard_settings.sizes_of(self.parallelism_config), world_size())
        if deepspeed.is_asked_for(self.deepspeed) and (error := missing("deepspeed", "deepspeed", "deepspeed=...")):
            yield error
        if self.fp8:
            if why := float8.problem(self.use_cpu):
                yield why
            elif error := missing("torchao", float8.PACKAGE, "fp8=True"):
                yield error
        if (self.bf16 or self.bf16_full_eval) and not self.use_cpu and torch.cuda.is_available():
            if not torch.cuda.is_bf16_supported():
                name = "bf16" if self.bf16 else "bf16_full_eval"
                yield (
                    f"{name}=True needs a GPU that has bfloat16 (Ampere or newer), and this one lacks it; set fp16 "
                    "instead"
                )
