"""Distributed data parallel training: each process has the whole model, and gradients are averaged over processes.

Li et al. 2020, PyTorch Distributed, https://arxiv.org/abs/2006.15704.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from posttrain.core.distributed.strategies.base import Distributed
from posttrain.core.distributed.world import NOTHING


class DDP(Distributed):
    """Averages gradients by torch's `DistributedDataParallel`."""

    def prepare_model(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
        super().prepare_model(model)
        if isinstance(model, DistributedDataParallel) or not any(p.requires_grad for p in model.parameters()):
            return model
        args: Any = self.args
        unused = args.ddp_find_unused_parameters
        # Poolers, and the last layer of LLaVA's image encoder, are in no loss. Whether they are does not show where
        # the graph is built anew within the backward.
        reentrant = (args.activation_checkpointing_kwargs or {}).get("use_reentrant", False)
        looks = not (args.activation_checkpointing and reentrant)
        options: dict[str, Any] = {"bucket_cap_mb": args.ddp_bucket_cap_mb, "static_graph": args.ddp_static_graph}
        options["broadcast_buffers"] = args.ddp_broadcast_buffers
        options = {name: value for name, value in options.items() if value is not None}
        options["find_unused_parameters"] = looks if unused is None else unused
        ids = [self.device.index] if self.device.type not in ("cpu", "mps") else None
        return DistributedDataParallel(model, device_ids=ids, **options)

    def sync_gradients(self, model: nn.Module, when: bool) -> contextlib.AbstractContextManager[Any]:
        model = getattr(model, "_orig_mod", model)
        if when or self.args.ddp_static_graph or not isinstance(model, DistributedDataParallel):
            return NOTHING  # a static graph averages in each pass, to the same sum
        return model.no_sync()
