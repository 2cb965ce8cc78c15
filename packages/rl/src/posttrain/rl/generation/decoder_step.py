"""One token of each row through a decoder of Llama's kind, with few operations: Llama, Mistral, Qwen 2 and 3.

The modules of such a model cost some 100 operations a layer for each token, which on a GPU is what a small batch waits
for. Here the projections that share an input are one product, and weights are cast, and adapters merged, once for each
rollout instead of in each forward. The residual stream keeps the type that it has in training.

What a model computes otherwise is not guessed from its name: `DecoderStep.of` looks at its modules, and
`posttrain.rl.generation.local` compares the logits with those of the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from posttrain.core.data import accelerator
from posttrain.core.models.wrapping import PretrainedModel, base_model
from posttrain.lm.attention.padding_masks import has_other_hooks
from posttrain.lm.attention.varlen_attention import layer_window
from posttrain.rl.generation import decode_kernels
from posttrain.rl.generation.sampling import FIXED_ROPE

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float, "int | None"], torch.Tensor]


class _Projection(NamedTuple):
    """``x @ weight + bias``; the weight is (inputs, outputs)."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def added(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``total + self(x)``."""
        if self.bias is None and total.dtype == x.dtype:
            return torch.addmm(total, x, self.weight)
        return total + self(x)


class _Layer(NamedTuple):
    qkv: _Projection
    out: _Projection
    gate_up: _Projection
    down: _Projection
    before_attention: torch.Tensor | None
    before_mlp: torch.Tensor | None
    """What the normalised inputs are multiplied by; None where the projections behind them hold it already."""
    of_heads: torch.Tensor | None
    """(H + G, D) what normalised queries and keys are multiplied by; None where they are not normalised."""
    scale: float
    window: int | None


class DecoderStep:
    """The weights of a model, ready for the steps of one rollout. The model must not change meanwhile."""

    def __init__(self, base: PretrainedModel, dtype: torch.dtype) -> None:
        body, config = base.model, base.config
        self.dtype, self.eps = dtype, float(config.rms_norm_eps)
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.embed, self.rotary, self.head = body.embed_tokens, body.rotary_emb, base.get_output_embeddings()
        if self.head.weight.dtype != dtype:
            self.head = self._joined(self.head)
        self.activation = body.layers[0].mlp.act_fn
        self.norm = body.norm.weight
        self.size = body.layers[0].self_attn.head_dim
        self.layers = [self._layer(layer) for layer in body.layers]
        self.constant = torch.full((1,), self.eps, device=self.norm.device)
        self.has_kernels = accelerator.has_kernels(self.constant)
        self.turns: list[torch.Tensor] | None = None
        self.sign = torch.ones(self.size, device=self.norm.device)
        self.sign[: self.size // 2] = -1  # a half turn of (a, b) is (-b, a)

    @classmethod
    def of(cls, model: nn.Module) -> DecoderStep | None:
        """That of `model` as it is now, in the precision of its products; None for modules of another kind."""
        base = base_model(model)
        if not _is_known(model, base):
            return None
        device = base.get_output_embeddings().weight.device.type
        dtype = base.model.layers[0].input_layernorm.weight.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        return cls(base, dtype)

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        window, of_heads = getattr(attention, "sliding_window", None), None
        if not hasattr(attention, "sliding_window") and not getattr(attention.config, "layer_types", None):
            window = getattr(attention.config, "sliding_window", None)  # layers of these kinds pass on their config's
        if getattr(attention, "q_norm", None) is not None:
            weights = (attention.q_norm.weight, self.heads), (attention.k_norm.weight, self.groups)
            of_heads = torch.cat([weight.expand(count, -1) for weight, count in weights])
        norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        folds = self.dtype == norms[0].dtype == torch.float32  # in 16 bits it would round in another place
        inputs = norms if folds else (None, None)
        before_attention, before_mlp = (None, None) if folds else norms
        return _Layer(
            self._joined(attention.q_proj, attention.k_proj, attention.v_proj, norm=inputs[0]),
            self._joined(attention.o_proj),
            self._joined(mlp.gate_proj, mlp.up_proj, norm=inputs[1]),
            self._joined(mlp.down_proj),
            before_attention,
            before_mlp,
            of_heads,
            attention.scaling,
            layer_window(attention, window),
        )

    def _joined(self, *linears: Any, norm: torch.Tensor | None = None) -> _Projection:
        weights = [_weight(linear).to(self.dtype) for linear in linears]
        biases = [_plain(linear).bias for linear in linears]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        weight = weight if norm is None else weight * norm
        return _Projection(weight.t(), None if biases[0] is None else torch.cat([b.to(self.dtype) for b in biases]))

    def prepare(self, longest: int) -> None:
        """Be ready for positions up to `longest`. Outside of the step, whose graph must not depend on it."""
        if getattr(self.rotary, "rope_type", None) not in FIXED_ROPE:
            return
        while self.turns is None or longest >= len(self.turns[0]):
            size = 1024 if self.turns is None else 2 * len(self.turns[0])
            self.turns = self._of_rotary(self.embed.weight, torch.arange(size, device=self.norm.device))

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """(R, V) logits behind the (R,) `tokens` at `positions`, for which it was prepared.

        Args:
            attend: ``(layer, queries (R, H, D), keys (R, G, D), values (R, G, D), scale, window) -> (R, H * D)``.
        """
        x = self.embed(tokens)
        # (R, 1, D) what a head is multiplied by, and what its halves are when they have changed places.
        turns = self.turns
        cosine, sine = self._of_rotary(x, positions) if turns is None else [table[positions] for table in turns]
        turned = self.heads + self.groups
        in_kernel = self.has_kernels and cosine.shape[-1] == self.size
        for number, layer in enumerate(self.layers):
            mixed = layer.qkv(self._normalised(x, layer.before_attention)).view(len(tokens), -1, self.size)
            turning, values = mixed.split((turned, self.groups), 1)
            if in_kernel:
                turning = decode_kernels.turn(mixed, turned, layer.of_heads, self.eps, cosine, sine)
            else:
                if layer.of_heads is not None:
                    turning = self._normalised(turning, layer.of_heads)
                turning = torch.addcmul(turning * cosine, turning.roll(self.size // 2, -1), sine)
            queries, keys = turning.split((self.heads, self.groups), 1)
            x = layer.out.added(x, attend(number, queries, keys, values, layer.scale, layer.window))
            gate, up = layer.gate_up(self._normalised(x, layer.before_mlp)).chunk(2, -1)
            x = layer.down.added(x, self.activation(gate) * up)
        return self.head(self._normalised(x, self.norm))

    def _of_rotary(self, x: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        cosine, sine = (part.transpose(0, 1).to(self.dtype) for part in self.rotary(x, positions.unsqueeze(0)))
        return [cosine, sine * self.sign.to(self.dtype)]

    def _normalised(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if x.is_cuda and x.ndim == 2:  # one kernel, which elsewhere is as many operations as these
            return functional.rms_norm(x, x.shape[-1:], weight, self.eps).to(self.dtype)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        found = x * torch.addcmul(self.constant, length, length, value=1 / x.shape[-1]).rsqrt_()
        if weight is not None:  # the product rounds to the type of x first, as the modules have it
            found = found.to(x.dtype).mul(weight)
        return found.to(self.dtype)


def _is_known(model: nn.Module, base: PretrainedModel) -> bool:
    body: Any = getattr(base, "model", None)
    config = base.config
    if any(not hasattr(body, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb")):
        return False
    if any(not hasattr(config, name) for name in ("rms_norm_eps", "num_attention_heads", "num_key_value_heads")):
        return False
    hooked = has_other_hooks(model) or any(hasattr(m, "_hf_hook") for m in model.modules())
    if hooked or base.get_output_embeddings() is None or not len(body.layers):
        return False
    if {p.device for p in base.parameters()} != {body.norm.weight.device}:
        return False
    return all(_is_known_layer(layer) for layer in body.layers)


_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def _is_known_layer(layer: Any) -> bool:
    if {name for name, _ in layer.named_children()} != _CHILDREN:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    norms = {"q_norm", "k_norm"} & {name for name, _ in attention.named_children()}
    linears = [getattr(attention, f"{name}_proj", None) for name in "qkvo"]
    linears += [getattr(mlp, f"{name}_proj", None) for name in ("gate", "up", "down")]
    return (
        {name for name, _ in attention.named_children()} - norms == {"q_proj", "k_proj", "v_proj", "o_proj"}
        and {name for name, _ in mlp.named_children()} - {"act_fn"} == {"gate_proj", "up_proj", "down_proj"}
        and hasattr(attention, "scaling")
        and hasattr(attention, "head_dim")
        and all(linear is not None and _can_be_read(linear) for linear in linears)
    )


def _plain(linear: Any) -> Any:
    """The layer itself, or the one that an adapter is put around."""
    return linear.get_base_layer() if hasattr(linear, "get_base_layer") else linear


def _can_be_read(linear: Any) -> bool:
    plain = _plain(linear)
    if type(plain) is not nn.Linear or type(plain.weight) is not nn.Parameter or "forward" in vars(plain):
        return type(plain) is nn.Linear and "forward" not in vars(plain) and not hasattr(plain.weight, "placements")
    if plain is linear:
        return True
    names = getattr(linear, "active_adapters", ())
    if not hasattr(linear, "lora_A") or getattr(linear, "lora_variant", {}) or any(linear.lora_bias.values()):
        return False  # other tuners do not add to the weight, or add to the bias too
    return not any(getattr(linear, "use_dora", {}).get(name) for name in names)


def _weight(linear: Any) -> torch.Tensor:
    weight = _plain(linear).weight.detach()
    if _plain(linear) is linear or linear.merged or linear.disable_adapters:
        return weight
    for name in linear.active_adapters:
        if name in linear.lora_A:
            weight = weight + linear.get_delta_weight(name).to(weight.dtype)
    return weight
