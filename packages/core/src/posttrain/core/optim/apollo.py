"""APOLLO, Zhu et al. 2024, https://arxiv.org/abs/2412.05270: gradients scaled per channel like AdamW's.

Not from apollo-torch 1.0.3: its license forbids commercial use, and its state holds Python objects, which no checkpoint
without pickle can keep.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch

from posttrain.core.optim.adam import AdamVariant, correction
from posttrain.core.optim.galore import projection, split_groups

GROWTH = 1.01  # maximum growth of an update's norm in one step: Fira, Chen et al. 2024, arXiv:2410.01623


class Apollo(AdamVariant):
    r"""AdamW with the moments of some matrices in a random subspace, used only to scale the gradient.

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
