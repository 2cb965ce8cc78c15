"""Optimizers whose state lives in a subspace of the gradient of each matrix: GaLore and APOLLO.

Not from galore-torch 1.0 and apollo-torch 1.0.3: their state holds Python objects, which no checkpoint without pickle
can keep. The 8-bit form of the first runs only with CUDA; its other forms are equal to these, see tests/core/optim. The
license of the second forbids commercial use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, cast

import torch

from posttrain.core.optim.adam import AdamVariant, correction

SIDES = ("std", "reverse_std", "left", "right", "full")
GROWTH = 1.01  # maximum growth of an update's norm in one step: Fira, Chen et al. 2024, arXiv:2410.01623


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
    """GaLore, Zhao et al. 2024, https://arxiv.org/abs/2403.03507: runs the optimizer that it is mixed into on projected
    gradients of some matrices. Made by `galore`.

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


class Apollo(AdamVariant):
    r"""APOLLO, Zhu et al. 2024, https://arxiv.org/abs/2412.05270: AdamW with the moments of some matrices in a random
    subspace, used only to scale their gradients per channel.

    For a matrix with gradient G (m, n), m < n, and a projection P (m, r) (Algorithm 1 of the paper):

    .. math::
        R = P^\top G, \quad \tilde R = \mathrm{Adam}(R), \quad s_j = \lVert \tilde R_{:,j} \rVert / \lVert R_{:,j}
        \rVert, \quad W \leftarrow W - \eta \sqrt{\text{scale}}\; G\, \mathrm{diag}(s)

    Args:
        params: parameters or groups.
        low_rank_parameters: the matrices among them for APOLLO; AdamW trains the rest.
        rank: r, dimension of the subspace.
        proj: ``"random"``, or ``"svd"`` for the leading singular vectors of the gradient.
        scale_type: ``"channel"``, one s for each of the longer side's channels; ``"tensor"``, one for a matrix.
        update_proj_gap: optimizer steps after which the projection is redrawn.
        scale: its root multiplies the update; more for a smaller rank (1 at rank 256, 128 at rank 1).
        proj_type: ``"std"``, as in GaLore: the shorter side is projected. adam: see `AdamVariant`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        low_rank_parameters: Iterable[torch.Tensor] = (),
        rank: int = 128,
        proj: str = "random",
        scale_type: str = "channel",
        update_proj_gap: int = 200,
        scale: float = 1.0,
        proj_type: str = "std",
        **adam: Any,
    ) -> None:
        options = {"rank": rank, "proj": proj, "scale_type": scale_type, "scale": scale}
        super().__init__(split_groups(params, low_rank_parameters, update_proj_gap=update_proj_gap, **options), **adam)
        self._count = sum(len(group["params"]) for group in self.param_groups)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], place: int) -> None:
        state, (beta1, beta2), whole = self.state[parameter], group["betas"], cast("torch.Tensor", parameter.grad)
        grad = self._project(whole, state, group, place) if "rank" in group else whole
        if "exp_avg" not in state:
            state["step"], state["exp_avg"], state["exp_avg_sq"] = 0, torch.zeros_like(grad), torch.zeros_like(grad)
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        # The norm that may grow by GROWTH is taken before the correction of the moments' bias, as in the authors' code.
        update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
        if "rank" in group:
            update = self._scale_gradient(whole, state, grad, update, group)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * correction(group, state["step"]))

    def _project(self, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any], seed: int) -> torch.Tensor:
        """The gradient in the subspace: (r, n) where m < n, else (m, r)."""
        wide = grad.shape[0] < grad.shape[1]
        if state.get("step", 0) % group["update_proj_gap"] == 0:
            if group["proj"] == "svd":
                left, right = projection(grad, group["rank"])
                state["projection"] = left if wide else right
            else:
                drawn = state.get("step", 0) // group["update_proj_gap"]
                # A generator for each matrix, so that the run's other random numbers do not change.
                generator = torch.Generator(grad.device).manual_seed(seed + self._count * drawn)
                shape = (grad.shape[0], group["rank"]) if wide else (group["rank"], grad.shape[1])
                noise = torch.randn(shape, generator=generator, device=grad.device, dtype=torch.float32)
                state["projection"] = (noise / math.sqrt(group["rank"])).to(grad.dtype)
        return state["projection"].T @ grad if wide else grad @ state["projection"].T

    def _scale_gradient(
        self,
        whole: torch.Tensor,
        state: dict[str, Any],
        grad: torch.Tensor,
        update: torch.Tensor,
        group: dict[str, Any],
    ) -> torch.Tensor:
        """The gradient `whole`, with the length that `update` has next to `grad` in the subspace."""
        norm = torch.linalg.vector_norm
        if group["scale_type"] == "channel":
            axis = 0 if whole.shape[0] < whole.shape[1] else 1
            factor = norm(update, dim=axis, keepdim=True) / (norm(grad, dim=axis, keepdim=True) + 1e-8)
        else:
            factor = norm(update) / (norm(grad) + 1e-8)
        scaled = whole * factor
        length = norm(scaled)
        if "length" in state:
            limit = (length / (state["length"] + 1e-8)).clamp(min=GROWTH) / GROWTH
            scaled, length = scaled / limit, length / limit
        state["length"] = length
        return scaled * math.sqrt(group["scale"])
