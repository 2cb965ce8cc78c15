"""The interface of the training loop to the processes of a run, and what one process does of it."""

from __future__ import annotations

import contextlib
import logging
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from posttrain.core.data import accelerator
from posttrain.core.distributed.arguments import DistributedArguments
from posttrain.core.distributed.environment import has_bfloat16_instructions
from posttrain.core.distributed.shard_settings import Sharding
from posttrain.core.distributed.world import NOTHING, World, whole_rows
from posttrain.core.models import rms_norm

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

#: The type of matrix products under autocast.
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: What is done to the attention of language models. Found by name, because the core imports none of them.
ANNOUNCE_MASKS = "posttrain.lm.attention.padding_masks:announce_masks"
CONTEXT_PARALLEL = "posttrain.lm.attention.context_parallel:enable"

Names = Callable[[str], bool]


class Distributed(World):
    """How a run spreads its model over processes, for the training loop. One per trainer, from `make_strategy`.

    This is the strategy of one process. Each subclass overrides what several processes do differently.
    """

    uses_deepspeed: ClassVar[bool] = False  # whose engine runs backward, clipping and step
    shards: ClassVar[bool] = False  # each process holds its part of the weights alone

    def __init__(
        self,
        args: DistributedArguments,
        accelerator: Accelerator,
        sizes: dict[str, int],
        sharding: Sharding | None = None,
    ) -> None:
        super().__init__(args, accelerator, sizes)
        self.sharding = sharding  # of the weights; None: they are not
        self._rows_group, self._peers_group = self._groups()
        self._gathered: set[int] = set()
        self._warns_of_bfloat16 = self.device.type == "cpu" and not has_bfloat16_instructions()
        self.scaler = torch.amp.GradScaler(self.device.type) if self._needs_scaler else None  # of the loss, under fp16
        # A training_step of a script calls `accelerator.backward`.
        self.accelerator.scaler = self.scaler

    @property
    def _needs_scaler(self) -> bool:
        return self.precision == "fp16"

    def _groups(self) -> tuple[Any, Any]:
        """The processes that read other rows than this one, with itself, and those that read the same; None: all."""
        if self.cp_size == 1:
            return None, None
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(self.device.type, (self.world_size, self.cp_size), mesh_dim_names=("rows", "cp"))
        return mesh.get_group("rows"), mesh.get_group("cp")

    # ---- model ----

    def moves(self, model: nn.Module) -> bool:
        """Whether `model` is moved to this process's device; by default not one that was placed or quantized."""
        args: Any = self.args
        placed = getattr(model, "hf_device_map", None) or getattr(model, "is_quantized", False)
        return not placed if args.place_model_on_device is None else args.place_model_on_device

    def place(self, model: nn.Module, trained: bool = False) -> None:
        """Move `model` to this process's device, unless it was loaded with a device map or the arguments forbid it; one
        that is `trained` and will be sharded is moved layer by layer. Raises a `ValueError` where it has no values.
        """
        if not (trained and self.shards) and self.moves(model):
            if any(parameter.is_meta for parameter in model.parameters()):
                raise ValueError(
                    f"The weights of this {type(model).__name__} are on the meta device, where they have no values. "
                    "Load it with from_pretrained, or make it outside of torch.device('meta') and init_empty_weights()."
                )
            model.to(self.device)
        self._use_device(model)
        if trained and self._warns_of_bfloat16:
            if self.precision == "bf16" or any(p.dtype == torch.bfloat16 for p in model.parameters()):
                self._warns_of_bfloat16 = False  # one warning is enough
                logger.warning(
                    "This processor has no bfloat16 instructions (AVX-512, AMX). torch emulates them: a step takes "
                    "ten times as long as in float32. Set bf16=False, and load the model with dtype='float32'."
                )

    def _use_device(self, model: nn.Module) -> None:
        """Let `model` run as it is fastest on a device other than the CPU."""
        if self.device.type == "cpu":
            return
        args: Any = self.args
        pkgutil.resolve_name(ANNOUNCE_MASKS)(model)
        if self.tp_size == 1 and not args.torch_compile:  # the compiler makes kernels of its own
            rms_norm.use_kernels(model)

    def prepare_model(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
        """Move `model` to this process's device and, with several processes, wrap it so that gradients are averaged.
        The `optimizer`, if the user made one, follows the parameters where sharding replaces them.
        """
        self.place(model, trained=True)
        return self.shard(model, optimizer)

    def shard(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
        """Shard `model` in place, unless it is sharded already, or none is to be."""
        self._slice_rows(model)
        return model

    def prepare_frozen(self, model: nn.Module, rounds: bool = False) -> nn.Module:
        """Place `model`, which is never trained, like the trained one: on this process's device, and sharded if that
        is. Every process must call it. `rounds`: store weights rounded to bfloat16 or float16 if the forward rounds
        them anyway; the results are equal.
        """
        if rounds and self.precision in LOW:
            round_weights(model, LOW[self.precision])
        self.place(model)
        self._slice_rows(model)
        return model

    def _slice_rows(self, model: nn.Module) -> None:
        """Let each process compute a slice of the rows, where that is asked for."""
        if self.cp_size > 1:
            with self.autocast():
                pkgutil.resolve_name(CONTEXT_PARALLEL)(model, self._peers_group)

    def start(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        """(what runs forward and backward, what steps) in place of the prepared `model` and of `optimizer`."""
        return model, optimizer

    def writable(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Where weights may be loaded into `model`, by every process."""
        return NOTHING

    @contextlib.contextmanager
    def gathered(self, *models: nn.Module) -> Iterator[None]:
        """Within this context every process holds the weights of all `models` whole, as for generating with them, and
        need not keep in step with the others.
        """
        with contextlib.ExitStack() as stack:
            if self.num_processes > 1:
                stack.enter_context(whole_rows())
            for model in models:
                if id(model) not in self._gathered:
                    stack.enter_context(self._whole(model))
                    self._gathered.add(id(model))
                    stack.callback(self._gathered.discard, id(model))
            if self.num_processes > 1:  # generation is work of its own, where this wait would not be seen
                accelerator.synchronize(self.device)
            yield

    def _whole(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Within this context the weights of `model` are whole."""
        return NOTHING

    def whole_state_dict(
        self, model: nn.Module, only: Names = lambda name: True, keep: Names | None = None
    ) -> dict[str, torch.Tensor] | None:
        """The gathered weights of a sharded `model` in host memory, of the names in `only`; None if it is not sharded.
        Every process must call it, and gets the names to `keep`; None: rank 0 gets all of them, and the others an empty
        dict.
        """
        return None

    def engine_state(self) -> dict[str, Any] | None:
        """The state of DeepSpeed's engine on this process, for a checkpoint; None without DeepSpeed."""
        return None

    def load_engine_state(self, state: dict[str, Any]) -> None:
        """The inverse of `engine_state`."""

    # ---- one step ----

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast context of the forward pass and the loss."""
        return torch.autocast(self.device.type, dtype=LOW[self.precision]) if self.precision in LOW else NOTHING

    def in_step(self) -> contextlib.AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch, in which processes may wait for each other, for sharded weights
        and DDP's buffers.
        """
        return self._waiting("the forward pass")

    def sync_gradients(self, model: nn.Module, when: bool) -> contextlib.AbstractContextManager[Any]:
        """Average gradients over the processes in this backward pass only if `when`."""
        return NOTHING

    def backward(self, loss: torch.Tensor) -> None:
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
        if self.scaler is not None:
            if self.scaler._scale is None:
                raise RuntimeError(
                    "fp16=True: the gradients were not made by the loss scaler, so they cannot be scaled back. In a "
                    "training_step of your own, call self.accelerator.backward(loss) where it calls loss.backward()."
                )
            self.scaler.unscale_(optimizer)
        with self._waiting("the norm of the gradients"):
            return self._clip(parameters, max_norm)

    def _clip(self, parameters: Sequence[torch.Tensor], max_norm: float | None) -> torch.Tensor:
        if max_norm:
            return nn.utils.clip_grad_norm_(parameters, max_norm)
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer; False where the loss scaler skipped the step because it had overflowed."""
        if self.scaler is None:
            optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before


def round_weights(model: nn.Module, dtype: torch.dtype, everything: bool = False) -> None:
    """Round the weights of `to_round`."""
    for parameter in to_round(model, everything):
        parameter.data = parameter.data.to(dtype)


def to_round(model: nn.Module, everything: bool = False) -> Iterator[nn.Parameter]:
    """The weights of `model` that its forward would round each time: those of matrix products under autocast, or
    `everything` under FSDP, which gathers weights in that type. Weights tied to an embedding stay.
    """
    shared = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    for module in model.modules():
        if everything or isinstance(module, nn.Linear):
            for parameter in module.parameters(recurse=False):
                if parameter.dtype == torch.float32 and (everything or id(parameter) not in shared):
                    yield parameter
