r"""A bias-corrected moving average of the weights: BEMA, Block and Zhang 2025, https://arxiv.org/abs/2508.00180.

Algorithm 1: with the weights :math:`\theta_t` after t optimizer steps, the initial ones :math:`\theta_0`, and
:math:`s_t = \rho + \gamma t`:

.. math:: m_t = (1 - \beta_t) m_{t-1} + \beta_t \theta_t, \quad \hat\theta_t = m_t + \alpha_t (\theta_t - \theta_0),
    \quad \beta_t = s_t^{-\kappa}, \quad \alpha_t = s_t^{-\eta}
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.core.callbacks import TrainerCallback
from posttrain.core.checkpoint import codec
from posttrain.core.checkpoint.weights import save_weights
from posttrain.core.distributed.sharding import is_in_pieces
from posttrain.core.models.wrapping import unwrap
from posttrain.core.state import TrainerControl, TrainerState
from posttrain.core.training.ema import swapped_in

logger = logging.getLogger(__name__)

FOLDER = "bema"


class BEMACallback(TrainerCallback):
    r"""Keeps a bias-corrected average of the trained weights and writes the averaged model into ``<output_dir>/bema``.

    Args:
        update_freq: optimizer steps between steps of the average.
        ema_power: :math:`\kappa`; 0 keeps no average, only the correction.
        bias_power: :math:`\eta`; 0 always corrects by the whole distance from the initial weights.
        lag: :math:`\rho`. multiplier: :math:`\gamma`.
        update_after: optimizer steps before it begins; the weights then are :math:`\theta_0`.
        min_ema_multiplier: the minimum of :math:`\beta_t`.
        device: of the averages, two copies of the trained weights.
    """

    def __init__(
        self,
        update_freq: int = 400,
        ema_power: float = 0.5,
        bias_power: float = 0.2,
        lag: int = 10,
        update_after: int = 0,
        multiplier: float = 1.0,
        min_ema_multiplier: float = 0.0,
        device: str = "cpu",
    ) -> None:
        if update_freq < 1:
            raise ValueError(f"BEMACallback: update_freq={update_freq} must be 1 or more.")
        self.update_freq, self.update_after = update_freq, update_after
        self.ema_power, self.bias_power = ema_power, bias_power
        self.lag, self.multiplier, self.min_ema_multiplier = lag, multiplier, min_ema_multiplier
        self.device = torch.device(device)
        self._weights: dict[str, nn.Parameter] = {}
        self._first: dict[str, torch.Tensor] = {}
        self._mean: dict[str, torch.Tensor] = {}
        self._last: dict[str, torch.Tensor] = {}

    def averaged(self) -> dict[str, torch.Tensor]:
        """The weights that it would write now, by name, in float32; those of the beginning before the first step."""
        return dict(self._last)

    @torch.no_grad()
    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Start from the current weights; a resumed run loads the averages next to its checkpoint."""
        self._weights = {name: p for name, p in unwrap(model).named_parameters() if p.requires_grad}
        if is_in_pieces(*self._weights.values()):
            raise ValueError(
                "BEMACallback averages whole weights, and this run shards them (fsdp or ZeRO-3). Leave one of the "
                "two out; ema_decay=... supports sharded weights."
            )
        self._begin()
        kept = self._file(args, state.global_step)
        if state.global_step and kept.with_suffix(".json").is_file():
            tree = codec.load_tree(kept, mmap=False)
            for name, own in (("first", self._first), ("mean", self._mean), ("last", self._last)):
                own.update({key: value.to(self.device) for key, value in tree[name].items()})
        elif state.global_step > self.update_after:
            logger.warning(
                f"BEMACallback: there are no averages of step {state.global_step} in {kept.parent}, so they restart "
                "from the weights of that step."
            )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step = state.global_step
        if step == self.update_after:
            self._begin()
        elif step > self.update_after and (step - self.update_after) % self.update_freq == 0:
            self._update_bema_weights(step)

    @torch.no_grad()
    def _update_bema_weights(self, step: int) -> None:
        """One step of the averages, after optimizer step `step`."""
        scale = self.lag + self.multiplier * step
        beta = max(scale**-self.ema_power, self.min_ema_multiplier)
        alpha = scale**-self.bias_power
        for name, weight in self._weights.items():
            now = weight.detach().to(self.device, torch.float32)
            self._mean[name].lerp_(now, beta)
            self._last[name] = self._mean[name] + alpha * (now - self._first[name])

    def _begin(self) -> None:
        now = {n: w.detach().to(self.device, torch.float32, copy=True) for n, w in self._weights.items()}
        self._first, self._last = now, dict(now)
        self._mean = {name: weight.clone() for name, weight in now.items()}

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save the averages of this step for a resume, and delete those whose checkpoint is gone."""
        if not state.is_world_process_zero or not self._weights:
            return
        here = self._file(args, state.global_step)
        here.parent.mkdir(parents=True, exist_ok=True)
        codec.save_tree({"first": self._first, "mean": self._mean, "last": self._last}, here)
        kept = {path.name.removeprefix("checkpoint-") for path in Path(args.output_dir).glob("checkpoint-*")}
        for path in here.parent.iterdir():
            if path.stem != here.name and path.stem.removeprefix("update-") not in kept:
                path.unlink()

    def on_train_end(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        """Write the model with the averages instead of its weights."""
        if not state.is_world_process_zero or not self._weights:
            return
        folder = Path(args.output_dir) / FOLDER
        with swapped_in(self._weights, self._last):
            save_weights(unwrap(model), folder)
        if hasattr(processing_class, "save_pretrained"):
            processing_class.save_pretrained(folder)
        logger.info("The averaged model is in %s.", folder)

    @staticmethod
    def _file(args: Any, step: int) -> Path:
        return Path(args.output_dir) / f"{FOLDER}-states" / f"update-{step}"
