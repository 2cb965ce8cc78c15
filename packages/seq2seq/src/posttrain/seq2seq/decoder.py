"""A fast decoder step of the T5 and BART families for greedy and beam search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from posttrain.core.data.host_copies import host_copy

#: Projections of more weights than this are not fused: a copy of them would cost more than the calls that it saves.
FUSE_BELOW = 2**20


class Unsupported(Exception):
    """Why a model or an option is left to ``generate``."""


#: A part of a decoder: (N, width of its input) -> (N, width of its output).
Part = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Layer:
    """The parts of one decoder layer; `query_key_value` and `key_value` give what several projections do, joined."""

    self_norm: Part
    query_key_value: Part
    self_out: Part
    cross_norm: Part
    cross_query: Part
    key_value: Part
    cross_out: Part
    feed_norm: Part
    feed: Part


@dataclass
class DecoderWeights:
    """The weights and settings of a decoder of either family.

    Attributes:
        positions: ``length -> (length, d_model)``, what is added to the embeddings; None for none.
        position_bias: ``length -> (heads, length, length)``, what is added to the scores of self-attention; None for
            none.
        pre_norm: each part normalises its input (T5, mBART, Pegasus) rather than its sum with the residual (BART,
            Marian).
        final: what follows the last layer, before the product with `head`, the output embedding and its bias.
        scale: of the attention scores.
    """

    layers: list[Layer]
    embedding: torch.Tensor
    embedding_scale: float
    embedding_norm: Part | None
    positions: Callable[[int], torch.Tensor] | None
    position_bias: Callable[[int], torch.Tensor] | None
    pre_norm: bool
    final: Part | None
    head: tuple[torch.Tensor, torch.Tensor | None]
    num_heads: int
    scale: float


def read_decoder(model: nn.Module) -> DecoderWeights:
    """The decoder of `model`, a conditional generation model of transformers. Raises an `Unsupported` where the decoder
    has an unknown architecture.
    """
    decoder = getattr(model, "get_decoder", lambda: None)()
    try:
        if hasattr(decoder, "block"):
            return _read_t5(model, decoder)
        if hasattr(decoder, "layers"):
            return _read_bart(model, decoder)
    except (AttributeError, IndexError, TypeError) as error:
        raise Unsupported(f"its decoder has an unknown architecture ({error})") from error
    raise Unsupported("its decoder has an unknown architecture")


def projection(*modules: Any) -> Part:
    """What `modules` give side by side: by one joined projection where a copy of their weights is cheap."""
    for module in modules:
        if type(module) is not nn.Linear:
            raise Unsupported(f"a projection is a {type(module).__name__}, not a plain nn.Linear")
    first, *others = modules
    if not others:
        return partial(F.linear, weight=first.weight, bias=first.bias)
    if sum(module.weight.numel() for module in modules) > FUSE_BELOW:
        return lambda x: torch.cat([F.linear(x, module.weight, module.bias) for module in modules], -1)
    bias = None if first.bias is None else torch.cat([module.bias for module in modules])
    return partial(F.linear, weight=torch.cat([module.weight for module in modules]), bias=bias)


def _read_t5(model: Any, decoder: Any) -> DecoderWeights:
    def norm(module: Any) -> Part:
        shape, eps = module.weight.shape, module.variance_epsilon
        return partial(F.rms_norm, normalized_shape=shape, weight=module.weight, eps=eps)

    def feed(module: Any) -> Part:
        down = projection(module.wo)
        if not hasattr(module, "wi_0"):
            up = projection(module.wi)
            return lambda x: down(module.act(up(x)))
        both = projection(module.wi_0, module.wi_1)

        def gated(x: torch.Tensor) -> torch.Tensor:
            gate, value = both(x).chunk(2, -1)
            return down(module.act(gate) * value)

        return gated

    layers = []
    for block in decoder.block:
        own, cross, forward = block.layer
        a, c = own.SelfAttention, cross.EncDecAttention
        layers.append(
            Layer(
                norm(own.layer_norm),
                projection(a.q, a.k, a.v),
                projection(a.o),
                norm(cross.layer_norm),
                projection(c.q),
                projection(c.k, c.v),
                projection(c.o),
                norm(forward.layer_norm),
                feed(forward.DenseReluDense),
            )
        )
    first = decoder.block[0].layer[0].SelfAttention
    if any(block.layer[0].SelfAttention.has_relative_attention_bias for block in list(decoder.block)[1:]):
        raise Unsupported("its layers have separate position biases")
    projection(model.lm_head)  # it is a plain one
    final, scale = norm(decoder.final_layer_norm), model.config.d_model**-0.5
    return DecoderWeights(
        layers=layers,
        embedding=decoder.embed_tokens.weight,
        embedding_scale=1.0,
        embedding_norm=None,
        positions=None,
        position_bias=lambda length: first.compute_bias(length, length)[0],
        pre_norm=True,
        final=(lambda x: final(x) * scale) if getattr(model.config, "scale_decoder_outputs", False) else final,
        head=(model.lm_head.weight, model.lm_head.bias),
        num_heads=first.n_heads,
        scale=1.0,
    )


def _read_bart(model: Any, decoder: Any) -> DecoderWeights:
    def norm(module: Any) -> Part:
        shape = module.weight.shape
        return partial(F.layer_norm, normalized_shape=shape, weight=module.weight, bias=module.bias, eps=module.eps)

    def optional_norm(name: str) -> Part | None:
        module = getattr(decoder, name, None)
        return None if module is None else norm(module)

    def feed(layer: Any) -> Part:
        up, down = projection(layer.fc1), projection(layer.fc2)
        return lambda x: down(layer.activation_fn(up(x)))

    layers = []
    for layer in decoder.layers:
        a, c = layer.self_attn, layer.encoder_attn
        layers.append(
            Layer(
                norm(layer.self_attn_layer_norm),
                projection(a.q_proj, a.k_proj, a.v_proj),
                projection(a.out_proj),
                norm(layer.encoder_attn_layer_norm),
                projection(c.q_proj),
                projection(c.k_proj, c.v_proj),
                projection(c.out_proj),
                norm(layer.final_layer_norm),
                feed(layer),
            )
        )
    embedding, places_of, attention = decoder.embed_tokens, decoder.embed_positions, decoder.layers[0].self_attn
    limit = places_of.num_embeddings - getattr(places_of, "offset", 0)

    def positions(length: int) -> torch.Tensor:
        if length > limit:
            raise Unsupported(f"it has positions for {limit} tokens, and {length} are requested")
        places = torch.arange(length, device=embedding.weight.device)
        return places_of(places[None], 0, position_ids=places).reshape(-1, embedding.embedding_dim)

    bias, final = getattr(model, "final_logits_bias", None), optional_norm("layer_norm")
    return DecoderWeights(
        layers=layers,
        embedding=embedding.weight,
        embedding_scale=float(getattr(embedding, "embed_scale", getattr(decoder, "embed_scale", 1.0))),
        embedding_norm=optional_norm("layernorm_embedding"),
        positions=positions,
        position_bias=None,
        # The layers of the family differ in nothing but the order of norm and sum, which the norm at the end goes with.
        pre_norm=final is not None,
        final=final,
        head=(model.lm_head.weight, None if bias is None else bias[0]),
        num_heads=attention.num_heads,
        scale=attention.scaling,
    )


class Steps:
    """The steps of one batch: caches, and the next logits of each row.

    Args:
        weights: of the decoder.
        encoded: (B, S, d) the encoder's last hidden states.
        mask: (B, S) 1 at inputs, 0 at padding; None without padding.
        width: rows of the decoder for each row of the encoder: the number of beams.
        length: the maximum tokens of a row.
    """

    def __init__(
        self, weights: DecoderWeights, encoded: torch.Tensor, mask: torch.Tensor | None, width: int, length: int
    ) -> None:
        self.weights, self.width, self.place = weights, width, 0
        batch, source, _ = encoded.shape
        heads = weights.num_heads
        self.mask = None
        if mask is not None and not bool((mask if (known := host_copy(mask)) is None else known).all()):
            lowest = torch.finfo(encoded.dtype).min
            self.mask = (1 - mask[:, None, None, :].to(encoded.dtype)) * lowest
        self.cross = []  # for each layer (2, B, heads, S, width of a head)
        for layer in weights.layers:
            both = layer.key_value(encoded)
            self.cross.append(both.view(batch, source, 2, heads, -1).permute(2, 0, 3, 1, 4).contiguous())
        shape = (len(weights.layers), 2, batch * width, heads, length, self.cross[0].shape[-1])
        self.cache = encoded.new_zeros(shape, dtype=self.cross[0].dtype)
        self.positions = None if weights.positions is None else weights.positions(length)
        self.bias = None if weights.position_bias is None else weights.position_bias(length)[None]
        self.logits: torch.Tensor | None = None

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits (N, V) that follow `tokens` (N,), in float32; overwritten by the next step."""
        w, t = self.weights, self.place
        x = F.embedding(tokens, w.embedding)
        if w.embedding_scale != 1.0:
            x = x * w.embedding_scale
        if self.positions is not None:
            x = x + self.positions[t]
        if w.embedding_norm is not None:
            x = w.embedding_norm(x)
        bias = None if self.bias is None else self.bias[:, :, t : t + 1, : t + 1].to(x.dtype)
        for number, layer in enumerate(w.layers):
            x = self._part(x, layer.self_norm, partial(self._attend_self, number=number, bias=bias))
            x = self._part(x, layer.cross_norm, partial(self._attend_encoder, number=number))
            x = self._part(x, layer.feed_norm, layer.feed)
        self.place += 1
        return self._head(x if w.final is None else w.final(x))

    def _part(self, x: torch.Tensor, norm: Part, part: Part) -> torch.Tensor:
        return x + part(norm(x)) if self.weights.pre_norm else norm(x + part(x))

    def _attend_self(self, x: torch.Tensor, number: int, bias: torch.Tensor | None) -> torch.Tensor:
        layer, t, rows = self.weights.layers[number], self.place, len(x)
        joint = layer.query_key_value(x).view(rows, 3, self.weights.num_heads, -1)
        keys, values = self.cache[number]
        self.cache[number, :, :, :, t] = joint[:, 1:].transpose(0, 1)
        mixed = F.scaled_dot_product_attention(
            joint[:, 0].unsqueeze(2), keys[:, :, : t + 1], values[:, :, : t + 1], bias, scale=self.weights.scale
        )
        return layer.self_out(mixed.reshape(rows, -1))

    def _attend_encoder(self, x: torch.Tensor, number: int) -> torch.Tensor:
        layer, rows, heads = self.weights.layers[number], len(x), self.weights.num_heads
        # The beams of a row are queries on one copy of its keys.
        query = layer.cross_query(x).view(rows // self.width, self.width, heads, -1).transpose(1, 2)
        keys, values = self.cross[number]
        mixed = F.scaled_dot_product_attention(query, keys, values, self.mask, scale=self.weights.scale)
        return layer.cross_out(mixed.transpose(1, 2).reshape(rows, -1))

    def _head(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weights.head
        if torch.is_autocast_enabled(x.device.type) or x.dtype != torch.float32:
            return F.linear(x, weight, bias).float()
        # One buffer for all steps: memory of this size would be paged in at each allocation.
        if self.logits is None or len(self.logits) != len(x):
            self.logits = x.new_empty(len(x), len(weight))
        if bias is None:
            return torch.mm(x, weight.t(), out=self.logits)
        return torch.addmm(bias, x, weight.t(), out=self.logits)

    def keep(self, rows: torch.Tensor) -> None:
        """Read on from these of the encoder's rows alone, given by number; `reorder` must follow."""
        self.cross = [both[:, rows] for both in self.cross]
        self.mask = None if self.mask is None else self.mask[rows]

    def reorder(self, rows: torch.Tensor) -> None:
        """Row i continues from the cache of row ``rows[i]``."""
        chosen = self.cache[..., : self.place, :].index_select(2, rows)
        if len(rows) != self.cache.shape[2]:
            self.cache = self.cache[:, :, : len(rows)].contiguous()
        self.cache[..., : self.place, :] = chosen
