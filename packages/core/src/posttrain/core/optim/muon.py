"""Muon for the matrices inside a network and AdamW for everything else, as one optimizer.

Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. The length of its updates is matched to AdamW's
(Liu et al. 2025, https://arxiv.org/abs/2502.16982, Eq. 4), so that one learning rate serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from posttrain.core.optim.galore import split_groups


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` on `matrices`, fused AdamW on the rest.

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
        muon: dict[str, Any] = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        self._parts: dict[str | None, torch.optim.Optimizer] = {}
        if by_muon:
            self._parts["muon"] = torch.optim.Muon(by_muon, lr=lr, weight_decay=0.0, **muon)
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
