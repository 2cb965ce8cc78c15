"""Training with DeepSpeed's engine: ZeRO sharding, clipping and steps.

Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054. DeepSpeed shards the state of optimizer and schedule.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from posttrain.core.distributed.deepspeed import fill, gathered, is_piece, read
from posttrain.core.distributed.strategies.base import Distributed, Names
from posttrain.core.distributed.world import NOTHING
from posttrain.core.errors import CheckpointError, require


class DeepSpeed(Distributed):
    """Lets DeepSpeed's engine, made when training starts, run backward, clip and step. Under ZeRO-3 each process holds
    its part of the weights alone.
    """

    uses_deepspeed = True
    engine: Any = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        require("deepspeed", "deepspeed", why="deepspeed=...")
        # Contradictions are reported before anything is loaded.
        config = fill(read(self.args.deepspeed), self.args, self.precision)
        self.stage = int(config.get("zero_optimization", {}).get("stage", 0))
        self.accelerator.backward = self.backward

    @property
    def _needs_scaler(self) -> bool:
        return False  # the engine has its own

    def prepare_model(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
        """As `Distributed.prepare_model`. Raises a `RuntimeError` where a training has begun: DeepSpeed leaves its
        hooks in the model, and its parts of the weights.
        """
        if self.engine is not None:
            raise RuntimeError(
                "A trainer with deepspeed trains once, because DeepSpeed changes the model for good. Save the model, "
                "and make a new trainer of it."
            )
        return super().prepare_model(model)

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        import deepspeed

        config = fill(read(self.args.deepspeed), self.args, self.precision, model)
        self.engine, stepping, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        self._norm = torch.zeros((), device=self.engine.device)
        return self.engine, stepping

    def writable(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Within this context every process holds the weights whole; what rank 0 writes into them stays."""
        if self.stage < 3 or self.engine is None:
            return NOTHING
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0)

    @contextlib.contextmanager
    def _whole(self, model: nn.Module) -> Iterator[None]:
        """Within this context every process may call the model as often as it likes: DeepSpeed's hooks are taken off,
        which give weights back after each layer, and compare how often the processes call the model.
        """
        if self.engine is None or not any(map(is_piece, model.parameters())):
            yield
            return
        import deepspeed

        offload = self.engine.optimizer.parameter_offload
        with deepspeed.zero.GatheredParameters(list(self.engine.module.parameters())):
            for hook in [offload.fwd_pre_hook, *offload.forward_hooks, *offload.backward_hooks]:
                hook.remove()
            offload.forward_hooks, offload.backward_hooks = [], []
            try:
                yield
            finally:
                offload.setup_zero_stage3_hooks()

    def whole_state_dict(
        self, model: nn.Module, only: Names = lambda name: True, keep: Names | None = None
    ) -> dict[str, torch.Tensor] | None:
        if self.stage < 3 or self.engine is None:
            return None
        whole = {}
        with self._waiting("gathering the weights"):
            for name, tensor in model.state_dict(keep_vars=True).items():
                if only(name):
                    with gathered(tensor):
                        if keep(name) if keep is not None else self.is_main:
                            whole[name] = tensor.detach().to("cpu", copy=True)
        return whole

    # ---- one step ----

    def sync_gradients(self, model: nn.Module, when: bool) -> contextlib.AbstractContextManager[Any]:
        self.engine.set_gradient_accumulation_boundary(when)
        return NOTHING

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        self.engine.backward(loss, scale_wrt_gas=False, **options)

    def clip_gradients(
        self, parameters: Sequence[torch.Tensor], max_norm: float | None, optimizer: torch.optim.Optimizer
    ) -> torch.Tensor:
        """Shape (); DeepSpeed computes the norm within the step, which fills it in."""
        self._norm = torch.zeros_like(self._norm)
        return self._norm

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Clip, step and clear the gradients; False where the engine's loss scaler skipped the step."""
        with self._waiting("the optimizer's step"):
            self.engine.step()
            norm = self.engine.get_global_grad_norm()
            self._norm.fill_(math.nan if norm is None else float(norm))
            return bool(self.engine.was_step_applied())

    # ---- checkpoints: a part for each process, for the same number of processes ----

    def engine_state(self) -> dict[str, Any]:
        """The optimizer's state of this process, and its part of the weights in full precision."""
        inner, masters = self._inner(), self._masters()
        options = [{name: value for name, value in group.items() if name != "params"} for group in inner.param_groups]
        state = [dict(inner.state.get(master, {})) for master in masters]
        return {"groups": options, "state": state, "masters": [master.detach() for master in masters]}

    def load_engine_state(self, state: dict[str, Any]) -> None:
        """The inverse of `engine_state`. Raises a `CheckpointError` where it is of another model, or another stage."""
        inner, masters = self._inner(), self._masters()
        if [m.shape for m in masters] != [m.shape for m in state["masters"]]:
            raise CheckpointError(
                "The state of DeepSpeed's optimizer is sharded differently. Set the stage of ZeRO and the number of "
                "processes of the first run."
            )
        for group, options in zip(inner.param_groups, state["groups"], strict=True):
            group.update(options)
        with torch.no_grad():
            for master, saved, values in zip(masters, state["masters"], state["state"], strict=True):
                master.copy_(saved)
                inner.state[master] = {
                    k: v.to(master.device) if isinstance(v, torch.Tensor) and v.shape == master.shape else v
                    for k, v in values.items()
                }

    def _inner(self) -> Any:
        return getattr(self.engine.optimizer, "optimizer", self.engine.optimizer)

    def _masters(self) -> list[torch.Tensor]:
        for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
            if (found := getattr(self.engine.optimizer, name, None)) is not None:
                return list(found)
        return []
