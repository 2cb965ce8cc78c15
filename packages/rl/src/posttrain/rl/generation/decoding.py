"""Reading with a key-value cache that stores each prompt once for all completions of its group.

A model reads a `Decoding` as a keyword of its forward, which transformers hands down to the attention function:

    with decoding_attention(model):
        decoding = Decoding(device)
        block, logits = decoding.read(model, ([5, 3], {"input_ids": row, "position_ids": ...}), copies=4)  # row: (1, 8)
        logits = model(input_ids=tokens, position_ids=..., use_cache=False, decoding=decoding).logits  # tokens: (8, 1)
        block.advance()

Rows that were admitted together are a `Block`; on a GPU a `FixedBlock`, with the same shapes for each token. Many
models have a `DecoderStep`, which is called for a token in their place.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from posttrain.core.data import accelerator
from posttrain.core.data.host_copies import send
from posttrain.core.data.pipeline import to_device
from posttrain.core.models.wrapping import PretrainedModel, base_model, setting, text_part
from posttrain.lm.attention.attention_blocks import Layout, piece_by_piece
from posttrain.lm.attention.padding_masks import has_other_hooks
from posttrain.lm.attention.segments import Segments
from posttrain.lm.attention.varlen_attention import layer_window, segment_attention
from posttrain.lm.loss.lm_head import gains_from_packing
from posttrain.rl.generation import decode_kernels
from posttrain.rl.generation.block import Block, FixedBlock, Text
from posttrain.rl.generation.sampling import FIXED_ROPE

logger = logging.getLogger(__name__)

IMPLEMENTATION = "posttrain_decoding"
Known = tuple[int, "Text | None"]
"""How many tokens of a prompt are read already, and their keys and values; None where there are none."""
LASTS = 32
"""Tokens for which a graph is worth capturing."""

Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], Any], torch.Tensor]]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float, "int | None"], torch.Tensor]


@contextlib.contextmanager
def attention_set(model: PretrainedModel, name: str) -> Iterator[None]:
    """Within this context `model` has the attention that transformers knows by `name`."""
    before = model.config._attn_implementation
    try:
        if name != before:
            model.set_attn_implementation(name)
        yield
    finally:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)


def decoding_attention(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within this context the forward of `model` takes ``decoding``, and must be given it; of a model that sees, its
    decoder of text does.
    """
    from transformers import AttentionInterface

    # Without a mask function transformers makes no masks; a `Decoding` handles visibility.
    AttentionInterface.register(IMPLEMENTATION, _attention_function)
    return attention_set(text_part(base_model(model)), IMPLEMENTATION)


class Decoding:
    """The input of a forward: the prompts of a new block, or one token of each row of all blocks.

    Attributes:
        blocks: the active ones, in the order of the rows.
        reading: the block in prefill; None in decoding.
        is_fixed: the shapes of a step do not depend on how many tokens are written; by default on a device.
        filler: rows behind those of the blocks, which attend to nothing.
    """

    def __init__(self, device: torch.device, is_fixed: bool | None = None) -> None:
        self.device = device
        self.is_fixed = device.type != "cpu" if is_fixed is None else is_fixed
        self.blocks: list[Block] = []
        self.filler = 0
        self.reading: Block | None = None
        self._segments: Segments  # and what follows: of the block in prefill
        self._known: list[Text | None] = []
        self._behind: Layout | None = None

    @property
    def reserved(self) -> int:
        """Tokens that the caches of all blocks have room for when they are as large as they can become."""
        return sum(block.reserved for block in self.blocks)

    def read(
        self,
        model: nn.Module,
        prompts: tuple[list[int], dict[str, torch.Tensor]],
        copies: int,
        max_new: int = sys.maxsize,
        known: Sequence[Known] = (),
    ) -> tuple[Block, torch.Tensor]:
        """Read `prompts`, as `local_steps.PromptsRead.inputs` has them, less those of their tokens that are `known`:
        (a block with `copies` rows of each, (P, V) logits behind their last tokens). A row gets `max_new` tokens at
        most; the cache never has room for more.
        """
        lengths, inputs = prompts
        last = send(torch.tensor(lengths).cumsum(0) - 1, self.device)
        inputs = to_device(inputs, self.device, non_blocking=True)
        if any(before for before, _ in known):
            before, self._known = map(list, zip(*known, strict=True))
            lengths = [one + own for one, own in zip(before, lengths, strict=True)]
            self._behind = _behind(before, lengths)
        block = self.reading = (FixedBlock if self.is_fixed else Block)(lengths, copies, self.device, max_new)
        self._segments = Segments.documents(lengths)
        options = {}
        if "logits_to_keep" in inspect.signature(base_model(model).forward).parameters:
            options["logits_to_keep"] = last
        logits = model(**inputs, use_cache=False, decoding=self, **options).logits[0]
        self.blocks.append(block)
        self.reading, self._behind, self._known = None, None, []
        return block, logits if options else logits[last]

    def attend(self, layer: int, query, key, value, scale, window, softcap, sinks) -> torch.Tensor:
        """(B, H, T, D) of (1, H, N, D) of prompts or (R, H, 1, D) of rows -> (B, T, H, E)."""
        if self.reading is None:
            newest = (part.squeeze(2) for part in (query, key, value))
            return self.attend_rows(layer, *newest, scale, window, softcap, sinks).view(
                len(query), 1, query.shape[1], -1
            )
        options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        if self._behind is not None:
            key, value = (self._joined(self._behind, layer, place, new) for place, new in enumerate((key, value)))
        self.reading.store(layer, key, value)
        if self._behind is not None:
            return piece_by_piece(query, key, value, self._behind, **options, dropout=0.0).transpose(1, 2)
        return segment_attention(query, key, value, self._segments, **options).transpose(1, 2)

    def _joined(self, behind: Layout, layer: int, place: int, new: torch.Tensor) -> torch.Tensor:
        """(1, G, N, D) keys, or values, of whole prompts: those that are known, and the `new` ones behind them."""
        counts = [behind.segments.lengths[own] for own in behind.own]
        parts: list[torch.Tensor] = []
        for text, own in zip(self._known, torch.split(new[0], counts, 1), strict=True):
            parts += [own] if text is None else [text[layer][place], own]
        return torch.cat(parts, 1).unsqueeze(0)

    def attend_rows(self, layer: int, query, key, value, *rule: Any) -> torch.Tensor:
        """(R, H, D) queries and (R, G, D) keys and values of the newest token of all rows -> (R, H * E)."""
        if len(self.blocks) == 1 and not self.filler:
            return self.blocks[0].attend(layer, query, key, value, *rule)
        counts = [*(block.num_rows for block in self.blocks), self.filler]
        parts = zip(self.blocks, query.split(counts), key.split(counts), value.split(counts), strict=False)
        out = torch.cat([block.attend(layer, *part, *rule) for block, *part in parts])
        return nn.functional.pad(out, (0, 0, 0, self.filler)) if self.filler else out

    def next_logits(
        self, model: nn.Module, step: DecoderStep | StepGraph | None, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """(R, V) logits behind one more token of each row."""
        if step is None:
            ids, places = tokens.unsqueeze(1), positions.unsqueeze(1)
            return model(input_ids=ids, position_ids=places, use_cache=False, decoding=self).logits[:, -1]
        step.prepare(max(block.width + block.step for block in self.blocks))
        is_one = len(self.blocks) == 1 and not self.filler
        with torch.autocast(tokens.device.type, enabled=False):
            return step(tokens, positions, self.blocks[0].attend if is_one else self.attend_rows)


def _behind(before: Sequence[int], lengths: Sequence[int]) -> Layout:
    """Prompts of these `lengths`, of which so many tokens `before` are known, and the rest is read."""
    sizes: list[int] = []
    parents: list[int] = []
    own: list[int] = []
    for known, length in zip(before, lengths, strict=True):
        sizes += [known, length - known] if known else [length]
        parents += [-1, len(sizes) - 2] if known else [-1]
        own.append(len(sizes) - 1)
    segments = Segments(tuple(sizes), tuple(parents))
    return Layout(segments, tuple(own), segments.starts)


class HandsNothingOn(Exception):
    """The layers of a model call their attention without the keyword arguments that the model was called with."""


def _attention_function(
    module: PretrainedModel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    decoding: Decoding | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each attention layer: (B, T, H, D) of (B, H, T, D) queries, keys and values."""
    if decoding is None:
        raise HandsNothingOn
    scaling = kwargs.get("scaling", args[0] if args else None)
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    with torch.autocast(device, enabled=False):
        out = decoding.attend(
            module.layer_idx,
            query.to(dtype),
            key.to(dtype),
            value.to(dtype),
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            layer_window(module, kwargs.get("sliding_window")),
            kwargs.get("softcap"),
            kwargs.get("s_aux"),
        )
    return out, None


# ------------------------------------------------------------------------------------------------- without modules


class _Projection(NamedTuple):
    """``x @ weight + bias``, added to `total` if there is one; the weight is (inputs, outputs), or (outputs, inputs) in
    oneDNN's layout.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        if self.weight.is_mkldnn:
            found = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return found if total is None else total + found
        if total is not None and self.bias is None and total.dtype == x.dtype:
            return torch.addmm(total, x, self.weight)
        found = torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)
        return found if total is None else total + found


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
    """One token of each row through a decoder of Llama's kind, with few operations: Llama, Mistral, Qwen 2 and 3.

    The modules of such a model cost some 100 operations a layer for each token, which on a GPU is what a small batch
    waits for. Here the projections that share an input are one product, and weights are cast, and adapters merged, once
    for each rollout, in which the model must not change. The residual stream keeps the type that it has in training.

    What a model computes otherwise is not guessed from its name: `of` looks at its modules, and
    `posttrain.rl.generation.local` compares the logits with those of the model itself.
    """

    def __init__(self, base: PretrainedModel, dtype: torch.dtype) -> None:
        body, config = base.model, base.config
        self.dtype, self.eps = dtype, float(config.rms_norm_eps)
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.embed, self.rotary, self.head = body.embed_tokens, body.rotary_emb, base.get_output_embeddings()
        self.activation = body.layers[0].mlp.act_fn
        self.norm = body.norm.weight
        self.packs = gains_from_packing(self.norm, dtype, sum(p.numel() for p in body.layers.parameters()))
        if self.head.weight.dtype != dtype:
            self.head = self._joined(self.head)
        self.size = body.layers[0].self_attn.head_dim
        self.layers = [self._layer(layer) for layer in body.layers]
        self.constant = torch.full((1,), self.eps, device=self.norm.device)
        self.has_kernels = self.constant.is_cuda and accelerator.has_kernels(self.constant)
        self.turns: list[torch.Tensor] | None = None
        self.sign = torch.ones(self.size, device=self.norm.device)
        self.sign[: self.size // 2] = -1  # a half turn of (a, b) is (-b, a)

    @classmethod
    def of(cls, model: nn.Module) -> DecoderStep | None:
        """That of `model` as it is now, in the precision of its products; None for modules of another kind."""
        base = base_model(model)
        try:
            if not _is_known(model, base):
                return None
        except AttributeError:  # it lacks what these models have
            return None
        device = base.get_output_embeddings().weight.device.type
        dtype = base.model.layers[0].input_layernorm.weight.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        return cls(base, dtype)

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp, of_heads = layer.self_attn, layer.mlp, None
        window = getattr(attention, "sliding_window", None)
        if not hasattr(attention, "sliding_window") and not setting(attention.config, "layer_types"):
            window = setting(attention.config, "sliding_window")  # layers of these kinds pass on their config's
        if "q_norm" in dict(attention.named_children()):
            weights = (attention.q_norm.weight, self.heads), (attention.k_norm.weight, self.groups)
            of_heads = torch.cat([weight.expand(count, -1) for weight, count in weights])
        norms, none = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight), (None, None)
        folds = self.dtype == norms[0].dtype == torch.float32  # in 16 bits it would round in another place
        folded, (before_attention, before_mlp) = (norms, none) if folds else (none, norms)
        return _Layer(
            self._joined(attention.q_proj, attention.k_proj, attention.v_proj, norm=folded[0]),
            self._joined(attention.o_proj),
            self._joined(mlp.gate_proj, mlp.up_proj, norm=folded[1]),
            self._joined(mlp.down_proj),
            before_attention,
            before_mlp,
            of_heads,
            attention.scaling,
            layer_window(attention, window),
        )

    def _joined(self, *linears: Any, norm: torch.Tensor | None = None) -> _Projection:
        weights = [_weight(linear).to(self.dtype) for linear in linears]
        biases = [linear.bias for linear in linears]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        weight = weight if norm is None else weight * norm
        weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self.packs else weight.t()
        return _Projection(weight, None if biases[0] is None else torch.cat([b.to(self.dtype) for b in biases]))

    def prepare(self, longest: int) -> None:
        """Be ready for positions up to `longest`. Outside of the step, whose graph must not depend on it."""
        if getattr(self.rotary, "rope_type", None) not in FIXED_ROPE:
            return
        while self.turns is None or longest >= len(self.turns[0]):
            size = 1024 if self.turns is None else 2 * len(self.turns[0])
            self.turns = self._of_rotary(self.embed.weight, torch.arange(size, device=self.norm.device))

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """(R, V) logits behind the (R,) `tokens` at `positions`, for which it was prepared. `attend`: ``(layer, queries
        (R, H, D), keys (R, G, D), values (R, G, D), scale, window) -> (R, H * D)``.
        """
        x = self.embed.forward(tokens)  # without hooks: it has none but those for gradients, see `_is_known`
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
            x = layer.out(attend(number, queries, keys, values, layer.scale, layer.window), x)
            gate, up = layer.gate_up(self._normalised(x, layer.before_mlp)).chunk(2, -1)
            x = layer.down(self.activation(gate) * up, x)
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


class StepGraph:
    """Replays one token of all rows as a CUDA graph: one launch for the hundreds of kernels of a decoder's layers.

    A graph reads and writes the addresses that it was captured with. Those of a `FixedBlock` and of a `DecoderStep`
    stay until rows leave, a cache grows or a table of positions does; then the step is captured again: it is called as
    it is for two tokens of new addresses, after a graph that lasted for none, and replayed from then on.

    Args:
        capture: ``work -> (replay, result)``; None: that of CUDA.
    """

    def __init__(self, step: DecoderStep, decoding: Decoding, capture: Capture | None = None) -> None:
        self.step, self.decoding, self.prepare = step, decoding, step.prepare
        self._capture: Capture | None = capture or accelerator.CaptureGraphs()
        self._addresses: tuple[Any, ...] | None = None
        self._replay: Callable[[], Any] | None = None
        self._times, self._first = 0, 2

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """As that of `DecoderStep`; the logits are overwritten by the next call."""
        if (addresses := self._now(tokens)) != self._addresses:
            # A capture for a few tokens costs more than it saves; a graph that lasted has compiled all its kernels.
            self._first = 0 if self._times >= LASTS and self._replay is not None else 2
            self._addresses, self._replay, self._times = addresses, None, 0
        if self._replay is None and self._times == self._first:
            self._try_to_capture(tokens, positions, attend)
        self._times += 1
        if addresses is None or self._replay is None:
            return self.step(tokens, positions, attend)
        self._tokens.copy_(tokens)
        self._positions.copy_(positions)
        self._replay()
        return self._logits

    def _try_to_capture(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> None:
        if self._addresses is None or self._capture is None:
            return
        self._tokens, self._positions = tokens.clone(), positions.clone()
        try:
            self._replay, self._logits = self._capture(lambda: self.step(self._tokens, self._positions, attend))
        except RuntimeError as error:
            self._capture = None
            logger.warning(
                "Each token's kernels are launched one by one, which is slower: no CUDA graph (%s).", str(error)
            )

    def _now(self, tokens: torch.Tensor) -> tuple[Any, ...] | None:
        """What changes where an address does; None for a step whose operations depend on the position."""
        blocks, turns = [block for block in self.decoding.blocks if isinstance(block, FixedBlock)], self.step.turns
        if len(blocks) < len(self.decoding.blocks):
            return None
        longest = max(block.longest for block in blocks)
        if turns is None or any(layer.window is not None and longest >= layer.window for layer in self.step.layers):
            return None
        return len(tokens), len(turns[0]), *(block.version for block in blocks)


def _is_known(model: nn.Module, base: PretrainedModel) -> bool:
    """Whether it is of Llama's kind, and nothing changes its products. AttributeError where it lacks a part."""
    body, config = base.model, base.config
    _ = body.embed_tokens, body.rotary_emb, config.rms_norm_eps, config.num_attention_heads, config.num_key_value_heads
    hooked = has_other_hooks(model) or any(hasattr(m, "_hf_hook") for m in model.modules())
    if hooked or base.get_output_embeddings() is None or not len(body.layers):
        return False
    if {p.device for p in base.parameters()} != {body.norm.weight.device}:
        return False
    for layer in body.layers:
        _ = layer.self_attn.scaling, layer.self_attn.head_dim
        attention, mlp = dict(layer.self_attn.named_children()), dict(layer.mlp.named_children())
        kinds = attention.keys() - {"q_norm", "k_norm"}, mlp.keys() - {"act_fn"}, {*dict(layer.named_children())}
        if kinds != (_ATTENTION, _MLP, _LAYER):
            return False
        if not all(_can_be_read(one) for name, one in (attention | mlp).items() if name in _ATTENTION | _MLP):
            return False
    return True


_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj"}


def _can_be_read(linear: Any) -> bool:
    plain = linear if isinstance(linear, nn.Linear) else linear.get_base_layer()  # below an adapter
    if type(plain) is not nn.Linear or "forward" in vars(plain) or hasattr(plain.weight, "placements"):
        return False
    if plain is linear or type(plain.weight) is not nn.Parameter:
        return True
    if linear.lora_variant or any(linear.lora_bias.values()):
        return False  # it adds to the bias too; other tuners, which do not add to the weight, have no such attribute
    return not any(linear.use_dora.get(name) for name in linear.active_adapters)


def _weight(linear: Any) -> torch.Tensor:
    weight = linear.weight.detach()  # of an adapter, that of the layer below it
    if not hasattr(linear, "get_base_layer") or linear.merged or linear.disable_adapters:
        return weight
    for name in linear.active_adapters:
        if name in linear.lora_A:
            weight = weight + linear.get_delta_weight(name).to(weight.dtype)
    return weight
