"""GaLore, Zhao et al. 2024, https://arxiv.org/abs/2403.03507: optimizer state in the subspace of the gradient.

Not from galore-torch 1.0: its state holds Python objects, which no checkpoint without pickle can keep, and its 8-bit
form runs only with CUDA. Its other forms are equal to these, see tests/core/optim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

SIDES = ("std", "reverse_std", "left", "right", "full")


def split_groups(params: Iterable[Any], chosen: Iterable[torch.Tensor], **options: Any) -> list[dict[str, Any]]:
    """Parameter groups in which the parameters in `chosen` stand apart from the rest of their group, with `options`.
    `params`: parameters, or parameter groups. Groups that end up empty are left out.
    """
    groups = list(params)
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    identities = {id(parameter) for parameter in chosen}
    rest = [{**group, "params": [p for p in group["params"] if id(p) not in identities]} for group in groups]
    apart = [{**group, **options, "params": [p for p in group["params"] if id(p) in identities]} for group in groups]
    return [group for group in rest + apart if group["params"]]


def projection(grad: torch.Tensor, rank: int, side: str = "std") -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The leading singular vectors of a gradient. Returns (left, right) of shapes (m, r) and (r, n); None on a side
    that is not projected. ``left.T @ grad @ right.T`` is the gradient in the subspace, and ``left @ that @ right``
    brings it back.

    Args:
        grad: (m, n).
        rank: r; no more than min(m, n) vectors are returned.
        side: ``"left"``, ``"right"`` or ``"full"``, both; ``"std"`` is the shorter side, ``"reverse_std"`` the other.
    """
    if side in ("std", "reverse_std"):
        side = "left" if (grad.shape[0] < grad.shape[1]) == (side == "std") else "right"
    u, _, vh = torch.linalg.svd(grad.float(), full_matrices=False)
    # Copies: a slice would keep all singular vectors in memory. Contiguous, because a checkpoint does not keep strides,
    # and a product can differ in its last bit with them.
    keep = {"dtype": grad.dtype, "copy": True, "memory_format": torch.contiguous_format}
    left = u[:, :rank].to(**keep) if side in ("left", "full") else None
    right = vh[:rank].to(**keep) if side in ("right", "full") else None
    return left, right


class GaLore(torch.optim.Optimizer):
    """Runs the optimizer that it is mixed into on projected gradients of some matrices. Made by `galore`.

    A matrix W (m, n) with gradient G is updated by ``W - scale * left @ step(left.T @ G)`` (Algorithm 2 of the paper),
    so that the state of the optimizer has r n entries instead of m n. Weight decay acts on W.

    Args:
        params: parameters or groups, as for the optimizer below.
        low_rank_parameters: the matrices among them to project.
        rank: r, dimension of the subspace.
        update_proj_gap: optimizer steps after which the subspace is recomputed from the gradient.
        scale: how far an update of the subspace goes, next to one of a full matrix (alpha in the paper).
        proj_type: the side to project, see `projection`.
        kwargs: of the optimizer below.
    """

    def __init__(
        self,
        params: Iterable[Any],
        low_rank_parameters: Iterable[torch.Tensor] = (),
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        proj_type: str = "std",
        **kwargs: Any,
    ) -> None:
        options = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale, "proj_type": proj_type}
        super().__init__(split_groups(params, low_rank_parameters, **options), **kwargs)
        # A gradient scaler must skip a non-finite step itself: the projection runs before the kernel that could.
        self._step_supports_amp_scaling = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        projected = [
            (parameter, group, *self._project(parameter, parameter.grad, group))
            for group in self.param_groups
            if "rank" in group
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        super().step()
        for parameter, group, weights, grad, saved in projected:
            left, right, update = saved["left"], saved["right"], parameter.data
            update = update if left is None else left @ update
            update = update if right is None else update @ right
            weights.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=group["scale"])
            parameter.data, parameter.grad = weights, grad
            self.state[parameter].update(saved)
        return loss

    def _project(
        self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Replace a parameter by a small zero matrix with its gradient; returns (weights, gradient, state)."""
        weights, state = parameter.data, self.state[parameter]
        # Taken out for the step: optimizers set up a parameter whose state is empty.
        saved: dict[str, Any] = {
            name: state.pop(name, default) for name, default in (("age", 0), ("left", None), ("right", None))
        }
        if saved["age"] % group["update_proj_gap"] == 0:
            saved["left"], saved["right"] = projection(grad, group["rank"], group["proj_type"])
        saved["age"] += 1
        low_rank = grad if saved["left"] is None else saved["left"].T @ grad
        low_rank = low_rank if saved["right"] is None else low_rank @ saved["right"].T
        parameter.data = torch.zeros_like(low_rank, dtype=weights.dtype)
        parameter.grad = low_rank.contiguous()
        return weights, grad, saved


@cache
def galore(optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The class of GaLore over `optimizer_class`, such as AdamW; its weight decay must be decoupled."""
    return type(f"GaLore{optimizer_class.__name__}", (GaLore, optimizer_class), {"__doc__": GaLore.__doc__})
