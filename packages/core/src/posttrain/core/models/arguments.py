"""The arguments about how a run changes its model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from posttrain.core.config import JSONObject, opt
from posttrain.core.data import accelerator
from posttrain.core.errors import did_you_mean, missing
from posttrain.core.models.gradient_checkpointing import CHECKPOINT_OPTIONS, CHECKPOINT_SWITCHES

#: What torch.compile takes as `mode`.
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass
class ModelSideArguments:
    """How a run changes its model."""

    activation_checkpointing: bool | None = opt(
        None,
        "Recompute activations in the backward instead of keeping them: less memory, about a third more time.",
        flag=True,
    )
    activation_checkpointing_kwargs: JSONObject = opt(
        None,
        "Options of torch.utils.checkpoint, such as use_reentrant (False unless set); every_n_layers and offload; and "
        "mlp_tile, the tokens for which an MLP is recomputed at a time: less memory for long rows, at one more forward "
        "pass of the MLPs.",
    )
    gradient_checkpointing: bool | None = opt(None, "The older name of activation_checkpointing.", flag=True)
    gradient_checkpointing_kwargs: JSONObject = opt(None, "The older name of activation_checkpointing_kwargs.")
    torch_compile: bool = opt(
        False, "Compile the model's layers with torch.compile; setting a backend or a mode implies it."
    )
    torch_compile_backend: str | None = opt(None, "Backend of torch.compile; None takes inductor.")
    torch_compile_mode: str | None = opt(
        None, "Mode of torch.compile, such as max-autotune-no-cudagraphs.", choices=COMPILE_MODES
    )
    use_liger_kernel: bool = opt(
        False, "Replace layers by Liger's Triton kernels where the package, the GPU and the architecture allow it."
    )
    liger_kernel_config: JSONObject = opt(
        None, 'Which kernels Liger applies, e.g. {"rope": true, "fused_linear_cross_entropy": false}.'
    )
    use_cache: bool = opt(False, "Keep the key/value cache on in training, which costs memory and helps no loss.")
    neftune_noise_alpha: float | None = opt(
        None, "Strength of the uniform noise added to input embeddings in training; papers use 5 to 15.", min=0
    )

    def _normalize(self) -> None:
        for new, old in (
            ("activation_checkpointing", "gradient_checkpointing"),
            ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
        ):
            default = type(self).__dataclass_fields__[new].default
            value, alias = vars(self)[new], vars(self)[old]
            if alias is not None and (not value or value == default):
                value = alias
            if new == "activation_checkpointing" and value is None:
                value = False
            setattr(self, new, value)
            setattr(self, old, value)
        # As posttrain launch and accelerate set it.
        launched = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
        if launched not in ("no", "") and not self.torch_compile:
            mode = os.environ.get("ACCELERATE_DYNAMO_MODE", "default")
            self.torch_compile_backend = self.torch_compile_backend or launched
            self.torch_compile_mode = self.torch_compile_mode or (None if mode == "default" else mode)
        if self.torch_compile_backend is not None or self.torch_compile_mode is not None:
            self.torch_compile = True
        if self.torch_compile and self.torch_compile_backend is None:
            self.torch_compile_backend = "inductor"

    def _problems(self) -> Iterator[str]:
        where = "activation_checkpointing_kwargs (or gradient_checkpointing_kwargs)"
        options = self.activation_checkpointing_kwargs
        for name, value in options.items() if isinstance(options, dict) else ():
            if name not in CHECKPOINT_OPTIONS:
                near = did_you_mean(name, CHECKPOINT_OPTIONS)
                yield f"{where}: {name!r} is not one of {', '.join(CHECKPOINT_OPTIONS)}{near}"
            elif name in CHECKPOINT_SWITCHES and value not in (None, True, False):
                yield f"{where}: {name}={value!r} is neither true nor false"
        if isinstance(self.liger_kernel_config, dict) and self.liger_kernel_config and not self.use_liger_kernel:
            yield "liger_kernel_config has no effect without use_liger_kernel=True; set that, or leave it out"
        for name, on in self.liger_kernel_config.items() if isinstance(self.liger_kernel_config, dict) else ():
            if not isinstance(on, bool):
                yield f"liger_kernel_config: {name}={on!r} is neither true nor false"
        if self.torch_compile_backend not in (None, "inductor"):
            known = torch.compiler.list_backends(exclude_tags=())
            if self.torch_compile_backend not in known:
                near = did_you_mean(self.torch_compile_backend, known)
                yield f"torch_compile_backend={self.torch_compile_backend!r} is not one of {', '.join(known)}{near}"

    def _preflight(self) -> Iterator[str | Exception]:
        if self.torch_compile_mode in CUDA_GRAPHS and accelerator.gpu():
            yield (
                f"torch_compile_mode={self.torch_compile_mode!r} records CUDA graphs, one for each shape and layer, "
                "and the shapes of batches change here; this has not run on a GPU. Set "
                "torch_compile_mode='max-autotune-no-cudagraphs', or leave it out"
            )
        if self.use_liger_kernel and (error := missing("liger_kernel", "liger-kernel", "use_liger_kernel=True")):
            yield ImportError(
                f"{error}; or leave use_liger_kernel out: SFT, preference training, GRPO and seq2seq compute their "
                "losses in the head without it, and hold no logits either",
                name="liger_kernel",
            )
