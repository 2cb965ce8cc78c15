"""Variants of AdamW that are written here, one parameter after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from posttrain.core.models.wrapping import local_part

_LOW_BITS = 16  # of a float32 that bfloat16 lacks
_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamVariant(torch.optim.Optimizer):
    """Steps every parameter that has a gradient by `_update`.

    Args:
        lr, betas, eps, weight_decay: as in AdamW. options: of the groups, beside these.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay} | options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        places = enumerate((group, parameter) for group in self.param_groups for parameter in group["params"])
        for place, (group, parameter) in places:
            if parameter.grad is not None:
                self._update(parameter, group, place)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], place: int) -> None:
        """Step `parameter`, which has this place among all."""
        raise NotImplementedError


def correction(group: dict[str, Any], step: int) -> float:
    """What the moments of Adam are corrected by after so many steps: the root of the second over the first."""
    beta1, beta2 = group["betas"]
    return float(math.sqrt(1 - beta2**step) / (1 - beta1**step))


def stochastically_rounded(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """float32 `values` in bfloat16, each as one of its two neighbours, so that the expected value is the value.

    Infinities stay, and numbers that bfloat16 holds do too.
    """
    noise = torch.randint(2**_LOW_BITS, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    return (values.view(torch.int32) + noise).bitwise_and_(-(2**_LOW_BITS)).view(torch.float32).to(torch.bfloat16)


class BF16AdamW(AdamVariant):
    """AdamW that computes in float32 and keeps both moments in bfloat16, rounded stochastically: half the memory of the
    state. Weights in bfloat16 are rounded likewise.

    Between two bfloat16 numbers lie 65,536 float32 numbers. Rounded to the nearest, a change of less than half of that
    distance is lost each time: the second moment, which moves by 1 - beta2 of itself, would stand still. Rounded up or
    down with the probability that keeps the expected value, small changes add up (Gupta et al. 2015,
    https://arxiv.org/abs/1502.02551; for Adam in bfloat16, Zamirai et al. 2020, https://arxiv.org/abs/2010.06192).

    The random bits of a step depend on `seed`, the step and the place of the weight alone. So all processes round
    alike, a resumed run continues with the same bits, and no other random number changes.

    Args:
        stochastic_rounding: off, everything is rounded to the nearest. adam: see `AdamVariant`.
    """

    def __init__(self, params: Iterable[Any], stochastic_rounding: bool = True, seed: int = 0, **adam: Any) -> None:
        super().__init__(params, **adam)
        self.stochastic_rounding, self.seed = stochastic_rounding, seed
        self._generators: dict[torch.device, torch.Generator] = {}

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
        eps = group["eps"] * math.sqrt(1 - beta2 ** state["step"])
        new = weight.float().mul(1 - group["lr"] * group["weight_decay"])
        new.addcdiv_(momentum, variance.sqrt().add_(eps), value=-group["lr"] * correction(group, state["step"]))
        for kept, value in ((first, momentum), (second, variance), (weight, new)):
            rounds = self.stochastic_rounding and kept.dtype == torch.bfloat16
            kept.copy_(stochastically_rounded(value, generator) if rounds else value)

    def _generator(self, device: torch.device, step: int, place: int) -> torch.Generator:
        generator = self._generators.setdefault(device, torch.Generator(device))
        return generator.manual_seed((self.seed << 40) + (step << 16) + place)


class GrokAdamW(AdamVariant):
    r"""AdamW on gradients whose slow part is amplified: :math:`g + \lambda h`, :math:`h \leftarrow \alpha h +
    (1 - \alpha) g`.

    The amplification is Grokfast's, Lee et al. 2024, https://arxiv.org/abs/2405.20233, Algorithm 1; the rest follows
    https://github.com/cognitivecomputations/grokadamw. Not from grokadamw 0.1.2: it keys its state by the weights
    themselves, so that a resumed run starts with none; it moves the state to the CPU and back at every step; and
    importing it configures the root logger. Its updates equal these.

    Args:
        alpha_init: alpha; nearer 1 makes h slower.
        lamb: lambda, how much the slow part counts.
        gamma: the i-th parameter of a group, from 0, has the first beta times ``(1 - gamma)^i``.
        grokking_signal_decay_rate: k; alpha is multiplied by exp(-k s), where s is how much higher ``"eval_loss"`` is
            than ``"train_loss"``, relative to itself. Set the two in the parameter groups; without them, s is 0.
        gradient_clipping: norm to which the gradient of each parameter alone is clipped; 0 for none.
        adam: see `AdamVariant`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        alpha_init: float = 0.98,
        lamb: float = 2.0,
        gamma: float = 0.1,
        grokking_signal_decay_rate: float = 0.1,
        gradient_clipping: float = 1.0,
        **adam: Any,
    ) -> None:
        adam |= {"alpha_init": alpha_init, "lamb": lamb, "gamma": gamma, "gradient_clipping": gradient_clipping}
        super().__init__(params, grokking_signal_decay_rate=grokking_signal_decay_rate, **adam)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            signal = _overfitting(group.get("train_loss"), group.get("eval_loss"))
            alpha = group["alpha_init"] * math.exp(-group["grokking_signal_decay_rate"] * signal)
            with_grad = [parameter for parameter in group["params"] if parameter.grad is not None]
            for index, parameter in enumerate(with_grad):
                self._move(parameter, group, alpha, group["betas"][0] * (1 - group["gamma"]) ** index)
        return loss

    def _move(self, parameter: torch.Tensor, group: dict[str, Any], alpha: float, momentum: float) -> None:
        state, beta2 = self.state[parameter], group["betas"][1]
        if not state:
            state["step"] = 0
            state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq", "slow_grad")}
        state["step"] += 1
        if group["gradient_clipping"] > 0:
            torch.nn.utils.clip_grad_norm_(parameter, group["gradient_clipping"])
        state["slow_grad"].lerp_(parameter.grad, 1 - alpha)
        grad = parameter.grad + group["lamb"] * state["slow_grad"]
        state["exp_avg"].lerp_(grad, 1 - momentum)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        denominator = state["exp_avg_sq"].sqrt().add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] * correction(group, state["step"]))


def _overfitting(train_loss: float | None, eval_loss: float | None) -> float:
    if train_loss is None or eval_loss is None or max(train_loss, eval_loss) <= 0:
        return 0.0
    return max(0.0, eval_loss - train_loss) / max(train_loss, eval_loss)
