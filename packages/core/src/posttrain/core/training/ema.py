"""An exponential moving average of the weights in float32, for evaluation and the final model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.core.checkpoint import codec
from posttrain.core.checkpoint.manager import AVERAGED_WEIGHTS
from posttrain.core.config import opt
from posttrain.core.errors import CheckpointError
from posttrain.core.evaluation.eval_loop import keeps_averages

logger = logging.getLogger(__name__)


@dataclass
class EMAArguments:
    """The arguments of weight averaging."""

    ema_decay: float | None = opt(
        None,
        "Decay of the average of the weights; nearer 1 it spans more optimizer steps, and 1 is SWA, the plain "
        "mean of the weights since ema_start_step. None: no average.",
        above=0,
        max=1,
    )
    ema_update_steps: int = opt(
        1, "Optimizer steps between steps of the average; more cost less time.", min=1, needs="ema_decay"
    )
    ema_start_step: int = opt(
        0,
        "Optimizer steps before averaging begins; until then the average equals the weights.",
        min=0,
        needs="ema_decay",
    )
    ema_use: str = opt(
        "both",
        "Where the average is used: evaluations during training, the final model, or both.",
        choices=("both", "eval", "final"),
        needs="ema_decay",
    )

    def _problems(self) -> Iterator[str]:
        own: Any = self  # a part of `TrainingArguments`
        optimizer = str(own.optim)
        if self.ema_decay is not None and optimizer.startswith("schedule_free"):
            yield (
                f"ema_decay={self.ema_decay} with optim={optimizer!r} would average twice, because that optimizer "
                "already evaluates an average; keep one of them"
            )


def make(model: nn.Module, args: Any, optimizer: Any) -> EMA | None:
    """The average configured in `args`, initialized with the current weights; None without one. Raises a `ValueError`
    where `optimizer` averages the weights itself.
    """
    if args.ema_decay is None:
        return None
    if keeps_averages(optimizer):
        raise ValueError(
            f"ema_decay={args.ema_decay} with {type(optimizer).__name__} would average twice, because that optimizer "
            "already evaluates an average. Set ema_decay=None, or use another optimizer."
        )
    return EMA(model, args.ema_decay, args.ema_update_steps, args.ema_start_step)


def load(ema: EMA | None, checkpoint: Path) -> None:
    """Load the averages of `checkpoint`, with a warning if it has none."""
    if ema is None:
        return
    if (checkpoint / f"{AVERAGED_WEIGHTS}.json").is_file():
        ema.load_state_dict(codec.load_tree(checkpoint / AVERAGED_WEIGHTS))
    else:
        logger.warning("%s holds no averaged weights: averaging restarts from its weights.", checkpoint)


class EMA:
    r"""The average :math:`\bar w_t = d \bar w_{t-1} + (1 - d) w_t` of the trainable parameters of a model.

    Polyak & Juditsky 1992; with a constant decay as in Tarvainen & Valpola 2017, https://arxiv.org/abs/1703.01780.
    With d = 1 the plain mean of what was averaged, as in stochastic weight averaging: Izmailov et al. 2018,
    https://arxiv.org/abs/1803.05407. Buffers are not averaged.

    Args:
        model: its trainable parameters are averaged.
        decay: d, above 0 and at most 1.
        every: optimizer steps between steps of the average.
        start: optimizer steps before averaging begins.
    """

    def __init__(self, model: nn.Module, decay: float, every: int = 1, start: int = 0) -> None:
        self.decay, self.every, self.start = decay, every, start
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._averages = {n: p.detach().to(torch.float32, copy=True) for n, p in self._parameters.items()}
        pairs = [*zip(self._averages.values(), self._parameters.values(), strict=True)]
        self._plain = [[pair[i] for pair in pairs if pair[1].dtype == torch.float32] for i in (0, 1)]
        self._others = [pair for pair in pairs if pair[1].dtype != torch.float32]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after optimizer step `step`, counted from 1."""
        if step % self.every:
            return
        weight = 1 - self.decay if step > self.start else 1.0
        if self.decay == 1:
            weight = 1 / max(1, step // self.every - self.start // self.every)
        # In float32 one kernel updates all; parameters of other types are converted one by one.
        if self._plain[0]:
            torch._foreach_lerp_(self._plain[0], self._plain[1], weight)
        for average, parameter in self._others:
            average.lerp_(parameter.float(), weight)

    def swapped_in(self) -> contextlib.AbstractContextManager[None]:
        """The model with the averages in place of its weights, which come back at the end; no copy is in float32."""
        return swapped_in(self._parameters, self._averages)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Make the averages the weights of the model."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self._averages[name])

    def state_dict(self) -> dict[str, Any]:
        return {"averages": dict(self._averages)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`. Raises a `CheckpointError` where the averages are those of other parameters."""
        saved = state["averages"]
        if saved.keys() != self._averages.keys():
            [first, *_] = sorted(saved.keys() ^ self._averages.keys())
            raise CheckpointError(
                "The averaged weights of the checkpoint are those of other parameters than this model trains "
                f"({first!r} is in one of the two alone). Train the same parameters, or set ema_decay=None."
            )
        for name, average in self._averages.items():
            average.copy_(saved[name])


@contextlib.contextmanager
def swapped_in(parameters: dict[str, nn.Parameter], values: dict[str, torch.Tensor]) -> Iterator[None]:
    """Within, the `parameters` hold `values`, by name, in their own type and on their own device."""
    weights = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = values[name].to(parameter.device, parameter.dtype)
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = weights[name]
