"""BEMA as a reference that follows the policy: the bias-corrected average of `posttrain.compat.bema` instead of the
initial weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from posttrain.compat import bema
from posttrain.core.models import wrapping
from posttrain.rl.policy.reference import MovableReference


class BEMACallback(bema.BEMACallback):
    """As `posttrain.core.BEMACallback`, and moves the reference to the average.

    Args:
        update_ref_model: move the reference of the trainer, which then holds weights of its own.
        ref_model_update_freq: optimizer steps between moves. ref_model_update_after: steps before the first one.

    The other arguments are those of `posttrain.core.BEMACallback`.
    """

    def __init__(
        self,
        *args: Any,
        update_ref_model: bool = False,
        ref_model_update_freq: int = 400,
        ref_model_update_after: int = 0,
        **others: Any,
    ) -> None:
        if ref_model_update_freq < 1:
            raise ValueError(f"BEMACallback: ref_model_update_freq={ref_model_update_freq} must be 1 or more.")
        super().__init__(*args, **others)
        self.update_ref_model = update_ref_model
        self.ref_model_update_freq, self.ref_model_update_after = ref_model_update_freq, ref_model_update_after
        self.reference: MovableReference | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """As the base's. Raise ValueError if there is no reference to move."""
        if self.update_ref_model and self.reference is None:
            raise ValueError(
                "BEMACallback(update_ref_model=True) moves a reference, and this trainer holds none. Set beta above 0 "
                "in online training, or leave update_ref_model out."
            )
        super().on_train_begin(args, state, control, model, **kwargs)

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        since = state.global_step - self.ref_model_update_after
        if self.update_ref_model and self.reference is not None and since >= 0:
            if since % self.ref_model_update_freq == 0:
                own = self.reference.weights()
                for name, value in self.averaged().items():
                    own[name].copy_(value)


def movers(callbacks: Iterable[Any], policy: nn.Module, is_precomputed: bool = False) -> list[BEMACallback]:
    """Those of `callbacks` that move the reference of `policy`; give them one as `reference`. Raise ValueError if the
    reference cannot be moved.
    """
    found = [one for one in callbacks if isinstance(one, BEMACallback) and one.update_ref_model]
    if found and wrapping.is_peft_model(policy):
        raise ValueError(
            "BEMACallback(update_ref_model=True) averages whole weights, and the policy trains an adapter. Train "
            "without peft_config, or leave update_ref_model out."
        )
    if found and is_precomputed:
        raise ValueError(
            "BEMACallback(update_ref_model=True) changes the reference, and precompute_ref_log_probs=True fixes its "
            "log-probabilities. Set one of them to False."
        )
    return found
