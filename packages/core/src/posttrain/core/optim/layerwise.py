"""Optimizers that update each parameter inside the backward pass, so that gradients are never all in memory.

This is how LOMO (Lv et al. 2023, https://arxiv.org/abs/2306.09782), AdaLomo (https://arxiv.org/abs/2310.10195) and the
layerwise forms of GaLore and APOLLO save the memory of the gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch


class Layerwise(torch.optim.Optimizer):
    """Any optimizer, stepped for each parameter as soon as its gradient is computed, which is then freed.

    ``step()`` does nothing. Gradients cannot be accumulated, clipped by their total norm or averaged over processes,
    because each is used at once. A non-finite gradient has already changed its parameter.

    Args:
        params: parameters or groups.
        optimizer_class: the optimizer of a parameter, created with `kwargs`.
    """

    #: A trainer checks the loss before the backward pass, because afterwards it is too late.
    steps_in_backward = True

    def __init__(self, params: Iterable[Any], optimizer_class: type[torch.optim.Optimizer], **kwargs: Any) -> None:
        # Holds all state, so that saving and loading are the inner optimizer's own.
        self._inner = optimizer_class(params, **kwargs)
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self._share()
        # One optimizer for each parameter: on several devices, gradients arrive in several threads.
        self._workers = {
            parameter: (index, optimizer_class([{**group, "params": [parameter]}], **kwargs))
            for index, group in enumerate(self.param_groups)
            for parameter in group["params"]
        }
        this = weakref.ref(self)

        def on_gradient(parameter: torch.Tensor) -> None:
            optimizer = this()  # None: replaced by another optimizer of the same model
            if optimizer is not None:
                optimizer._update(parameter)

        for parameter in self._workers:
            parameter.register_post_accumulate_grad_hook(on_gradient)

    def _share(self) -> None:
        self.state, self.param_groups = self._inner.state, self._inner.param_groups

    def workers(self) -> list[Any]:
        """The optimizer of each parameter."""
        return [worker for _, worker in self._workers.values()]

    def _update(self, parameter: torch.Tensor) -> None:
        index, worker = self._workers[parameter]
        worker.state = self.state
        worker.param_groups = [{**self.param_groups[index], "params": [parameter]}]
        worker.step()
        parameter.grad = None

    def step(self, closure: Any = None) -> Any:
        """Does nothing: the backward pass made the step."""

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)
        self._share()
