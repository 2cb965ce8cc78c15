"""Muon for the matrices inside a network and AdamW for everything else, as one optimizer.

Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. The length of its updates is matched to AdamW's
(Liu et al. 2025, https://arxiv.org/abs/2502.16982, Eq. 4), so that one learning rate serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from posttrain.core.distributed import sharding
from posttrain.core.optim.low_rank import split_groups


class Muon(torch.optim.Muon):
    """`torch.optim.Muon`, also where each process has a part of a matrix (FSDP): every process gathers the matrix'
    update, makes it orthogonal, and keeps its own part. The momentum stays in parts (Liu et al. 2025, Algorithm 1).
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every matrix that has a gradient; every process must have the same ones."""
        found = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        of_wholes: Any = super()
        if not any(sharding.is_piece(matrix) for matrix, _ in found):
            return of_wholes.step(closure)
        loss = None if closure is None else torch.enable_grad()(closure)()
        for matrix, group in found:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix.grad)
            momentum = self.state[matrix]["momentum_buffer"]
            momentum.lerp_(matrix.grad, 1 - group["momentum"])
            update = matrix.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
            whole = torch.zeros(matrix.shape, dtype=matrix.dtype, device=matrix.device)
            whole.grad = sharding.whole(update)
            options = {name: group[name] for name in KEPT} | {"weight_decay": 0.0, "momentum": 0.0}
            optimizer: Any = torch.optim.Muon([whole], **options)
            optimizer.step()
            moved = sharding.piece_like(sharding.part_of(whole, matrix), matrix)
            matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(moved)
        return loss


KEPT = ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
"""Options of Muon that make an update of the momentum."""


class MuonWithAdamW(torch.optim.Optimizer):
    """`Muon` on `matrices`, fused AdamW on the rest.

    Args:
        params: parameters or groups.
        matrices: the 2-D parameters among them that Muon trains.
        lr: learning rate of both.
        betas, eps: of AdamW.
        momentum, nesterov, ns_steps: of Muon.
        adjust_lr_fn: how Muon's rate follows the shape of a matrix: ``"match_rms_adamw"`` or ``"original"``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        matrices: Iterable[torch.Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        groups = split_groups(params, matrices, algorithm="muon")
        by_muon = [group for group in groups if "algorithm" in group]
        by_adamw = [group for group in groups if "algorithm" not in group]
        muon: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        self._parts: dict[str | None, torch.optim.Optimizer] = {}
        if by_muon:
            self._parts["muon"] = Muon(by_muon, lr=lr, weight_decay=0.0, adjust_lr_fn=adjust_lr_fn, **muon)
        if by_adamw:
            self._parts[None] = torch.optim.AdamW(by_adamw, lr=lr, betas=betas, eps=eps, weight_decay=0.0, fused=True)
        super().__init__([group for part in self._parts.values() for group in part.param_groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for algorithm, part in self._parts.items():
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group.get("algorithm") == algorithm]
            part.step()
        return loss
