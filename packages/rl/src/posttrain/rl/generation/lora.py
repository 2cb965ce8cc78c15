"""Sends a LoRA adapter to vLLM servers as an adapter: megabytes instead of the whole model.

The servers are started with ``--enable-lora --max-lora-rank R`` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, on the model
below the adapter, and read the adapter from a folder that they share with the trainer (``vllm_weight_folder``).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.core.distributed.sharding import is_in_pieces, whole
from posttrain.core.models import wrapping
from posttrain.rl.generation.server import Server
from posttrain.rl.generation.transfer import everywhere, version_of
from posttrain.rl.generation.weights import OneByOne, Weights

NAME = "posttrain-policy"
"""The name under which the servers know the adapter."""
BESIDE = (
    "use_dora",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "lora_bias",
    "alpha_pattern",
    "rank_pattern",
    "layer_replication",
    "exclude_modules",
)
"""Options of LoRA that change more than vLLM reads from a file of adapters."""


def is_servable(model: nn.Module, max_rank: int | None) -> bool:
    """Whether servers that take adapters of `max_rank` (None: none) serve that of `model` as it is.

    If not, its product with the weights below is sent (`Weights`).
    """
    if max_rank is None or not wrapping.is_peft_model(model):
        return False
    peft_model = wrapping.unwrap(model)
    (config, *others) = peft_model.peft_config.values()
    if others or config.peft_type != "LORA" or config.r > max_rank:
        return False
    starts_plain = config.init_lora_weights in (
        True,
        False,
        "gaussian",
        "orthogonal",
    )  # others change the weights below
    plain = starts_plain and config.bias == "none" and not any(getattr(config, name, None) for name in BESIDE)
    layers: list[Any] = [module for module in peft_model.modules() if hasattr(module, "lora_A")]
    return plain and all(type(layer.get_base_layer()) is nn.Linear for layer in layers)


class AdapterWeights(OneByOne):
    """The adapter of `model` as peft writes it to a file: ``(name, tensor)`` one by one, gathered if sharded.

    If the weights are in pieces, every process must iterate over all of them.
    """

    def __init__(self, model: nn.Module) -> None:
        peft_model = wrapping.unwrap(model)
        (active,) = peft_model.active_adapters
        self.config: Any = peft_model.peft_config[active]
        self._named = {
            name.replace(f".{active}.", "."): parameter
            for name, parameter in peft_model.named_parameters()
            if any(part.startswith("lora_") for part in name.split(".")) and active in name.split(".")
        }

    @property
    def are_in_pieces(self) -> bool:
        """Whether the weights are sharded."""
        return is_in_pieces(*self._named.values())

    @torch.no_grad()
    def _each(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._named.items():
            yield name, whole(parameter).detach()


class AdapterFolder:
    """A transport for `AdapterWeights`, see `posttrain.rl.generation.transfer.Transport`.

    Args:
        path: a folder, by the same name for trainer and servers. What is in ``adapter`` there is replaced.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute() / "adapter"

    def send(self, weights: Weights | AdapterWeights, servers: Sequence[Server], version: str) -> None:
        """Write the adapter, and have the servers load it in the place of the one before.

        Raises:
            ValueError: a server has had the weights below the adapter replaced.
        """
        from safetensors.torch import save_file

        assert isinstance(weights, AdapterWeights)
        for server in servers:
            if (found := version_of(server)).startswith("posttrain-weights"):
                raise ValueError(
                    f"The vLLM server at {server.url} has whole weights of another run ({found}), not the model below "
                    "the adapter. Start it anew."
                )
        self.path.mkdir(parents=True, exist_ok=True)
        save_file({name: w.to("cpu").contiguous() for name, w in weights}, self.path / "adapter_model.safetensors")
        config = copy.copy(weights.config)
        config.inference_mode = True
        config.save_pretrained(str(self.path))
        where = {"lora_name": NAME, "lora_path": str(self.path), "load_inplace": True}
        everywhere(servers, "/v1/load_lora_adapter", where)
        everywhere(servers, "/update_weight_version", {"new_version": version})
