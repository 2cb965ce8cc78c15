"""The losses of the training API by name, of each token: those of https://tinker-docs.thinkingmachines.ai/losses.

Shapes: N rows of up to T tokens, (N, T) each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from posttrain.core.errors import did_you_mean
from posttrain.rl.losses.policy_losses import cispo, clipped, importance_ratio

Tensors = Mapping[str, torch.Tensor]
Options = Mapping[str, float]


@dataclass(frozen=True)
class Loss:
    """A loss, whose sum over tokens is minimized.

    of_tokens: ``(log-probabilities, what it reads, its options) -> (N, T)``; 0 where both of the first are. reads: the
    inputs of each row beside ``target_tokens``. options: their defaults; None where a request must have it.
    """

    of_tokens: Callable[[torch.Tensor, Tensors, Options], torch.Tensor]
    reads: tuple[str, ...] = ("logprobs", "advantages")
    options: Mapping[str, float | None] = field(default_factory=dict)


def _ratio(logps: torch.Tensor, x: Tensors) -> torch.Tensor:
    return importance_ratio(logps, x["logprobs"], torch.ones_like(logps))


def _ppo(logps: torch.Tensor, x: Tensors, o: Options) -> torch.Tensor:
    low, high = 1 - o["clip_low_threshold"], o["clip_high_threshold"] - 1
    return clipped(_ratio(logps, x), x["advantages"], low, high)


def _cispo(logps: torch.Tensor, x: Tensors, o: Options) -> torch.Tensor:
    ratio = _ratio(logps, x).clamp(min=o["clip_low_threshold"])
    return cispo(logps, ratio, x["advantages"], o["clip_high_threshold"])


def _dro(logps: torch.Tensor, x: Tensors, o: Options) -> torch.Tensor:
    """Richemond et al. 2024, https://arxiv.org/abs/2405.19107, with advantages for rewards less values."""
    return -(logps * x["advantages"] - 0.5 * o["beta"] * (logps - x["logprobs"]).square())


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(lambda logps, x, o: -logps * x["weights"], ("weights",)),
    "importance_sampling": Loss(lambda logps, x, o: -_ratio(logps, x) * x["advantages"]),
    "ppo": Loss(_ppo, options={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": Loss(_cispo, options={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": Loss(_dro, options={"beta": None}),
}
"""``loss_fn`` -> the loss."""


def find(name: str, given: Mapping[str, float | str]) -> tuple[Loss, dict[str, float]]:
    """(the loss `name`, its options, of which a request has `given` some).

    Raises:
        ValueError: there is no such loss, or an option is unknown, missing, or no number.
    """
    if name not in LOSSES:
        raise ValueError(
            f"loss_fn={name!r} is not done here; there are {', '.join(LOSSES)}{did_you_mean(name, LOSSES, '.')} "
            "forward_backward_custom computes any other in your program."
        )
    loss, found = LOSSES[name], {**LOSSES[name].options, **given}
    for option, value in found.items():
        if option not in loss.options or not isinstance(value, (int, float)):
            takes = ", ".join(loss.options) or "none"
            raise ValueError(
                f"loss_fn_config: {option}={value!r} is no option of {name} with a number; it has {takes}."
            )
    return loss, {option: float(value) for option, value in found.items() if not isinstance(value, (str, type(None)))}
