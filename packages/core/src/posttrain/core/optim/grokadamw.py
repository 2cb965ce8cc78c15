"""GrokAdamW: AdamW on gradients whose slow part is amplified.

The amplification is Grokfast's, Lee et al. 2024, https://arxiv.org/abs/2405.20233, Algorithm 1; the rest follows
https://github.com/cognitivecomputations/grokadamw.

Not from grokadamw 0.1.2: it keys its state by the weights themselves, so that a resumed run starts with none; it moves
the state to the CPU and back at every step; and importing it configures the root logger. Its updates equal these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch


class GrokAdamW(torch.optim.Optimizer):
    r"""AdamW on :math:`g + \lambda h`, with :math:`h \leftarrow \alpha h + (1 - \alpha) g`.

    Args:
        lr, betas, eps, weight_decay: as in AdamW.
        alpha_init: alpha; nearer 1 makes h slower.
        lamb: lambda, how much the slow part counts.
        gamma: the i-th parameter of a group, from 0, has the first beta times ``(1 - gamma)^i``.
        grokking_signal_decay_rate: k; alpha is multiplied by exp(-k s), where s is how much higher ``"eval_loss"`` is
            than ``"train_loss"``, relative to itself. Set the two in the parameter groups; without them, s is 0.
        gradient_clipping: norm to which the gradient of each parameter alone is clipped; 0 for none.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        alpha_init: float = 0.98,
        lamb: float = 2.0,
        gamma: float = 0.1,
        grokking_signal_decay_rate: float = 0.1,
        gradient_clipping: float = 1.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "alpha_init": alpha_init}
        defaults |= {"lamb": lamb, "gamma": gamma, "grokking_signal_decay_rate": grokking_signal_decay_rate}
        super().__init__(params, defaults | {"gradient_clipping": gradient_clipping})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            signal = _overfitting(group.get("train_loss"), group.get("eval_loss"))
            alpha = group["alpha_init"] * math.exp(-group["grokking_signal_decay_rate"] * signal)
            with_grad = [parameter for parameter in group["params"] if parameter.grad is not None]
            for index, parameter in enumerate(with_grad):
                self._update(parameter, group, alpha, group["betas"][0] * (1 - group["gamma"]) ** index)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], alpha: float, momentum: float) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
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
        correction = math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        denominator = state["exp_avg_sq"].sqrt().add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] * correction)


def _overfitting(train_loss: float | None, eval_loss: float | None) -> float:
    if train_loss is None or eval_loss is None or max(train_loss, eval_loss) <= 0:
        return 0.0
    return max(0.0, eval_loss - train_loss) / max(train_loss, eval_loss)
