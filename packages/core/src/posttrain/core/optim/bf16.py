"""AdamW whose state is kept in bfloat16 and rounded stochastically: half the memory of the state.

Between two bfloat16 numbers lie 65,536 float32 numbers. Rounded to the nearest, a change of less than half of that
distance is lost each time: the second moment, which moves by 1 - beta2 of itself, would stand still. Rounded up or down
with the probability that keeps the expected value, small changes add up (Gupta et al. 2015,
https://arxiv.org/abs/1502.02551; for Adam in bfloat16, Zamirai et al. 2020, https://arxiv.org/abs/2010.06192).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from posttrain.core.models.wrapping import local_part

_LOW_BITS = 16  # of a float32 that bfloat16 lacks
_MOMENTS = ("exp_avg", "exp_avg_sq")


def stochastically_rounded(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """float32 `values` in bfloat16, each as one of its two neighbours, so that the expected value is the value.

    Infinities stay, and numbers that bfloat16 holds do too.
    """
    noise = torch.randint(2**_LOW_BITS, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    return (values.view(torch.int32) + noise).bitwise_and_(-(2**_LOW_BITS)).view(torch.float32).to(torch.bfloat16)


class BF16AdamW(torch.optim.Optimizer):
    """AdamW that computes in float32 and keeps both moments in bfloat16; weights in bfloat16 are rounded likewise.

    The random bits of a step depend on `seed`, the step and the place of the weight alone. So all processes round
    alike, a resumed run continues with the same bits, and no other random number changes.

    Args:
        lr, betas, eps, weight_decay: as in AdamW.
        stochastic_rounding: off, everything is rounded to the nearest.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.stochastic_rounding, self.seed = stochastic_rounding, seed
        self._generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        places = enumerate((group, parameter) for group in self.param_groups for parameter in group["params"])
        for place, (group, parameter) in places:
            if parameter.grad is not None:
                self._update(parameter, group, place)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():  # torch gives state the type of its weight
            state |= {name: state[name].to(torch.bfloat16) for name in _MOMENTS if name in state}

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], place: int) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = 0
            state |= {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in _MOMENTS}
        state["step"] += 1
        first, second, weight = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"]), local_part(parameter)
        gradient, generator = local_part(parameter.grad).float(), self._generator(weight.device, state["step"], place)
        momentum = first.float().lerp_(gradient, 1 - beta1)
        variance = second.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction = math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        eps = group["eps"] * math.sqrt(1 - beta2 ** state["step"])
        new = weight.float().mul(1 - group["lr"] * group["weight_decay"])
        new.addcdiv_(momentum, variance.sqrt().add_(eps), value=-group["lr"] * correction)
        for kept, value in ((first, momentum), (second, variance), (weight, new)):
            rounds = self.stochastic_rounding and kept.dtype == torch.bfloat16
            kept.copy_(stochastically_rounded(value, generator) if rounds else value)

    def _generator(self, device: torch.device, step: int, place: int) -> torch.Generator:
        generator = self._generators.setdefault(device, torch.Generator(device))
        return generator.manual_seed((self.seed << 40) + (step << 16) + place)
