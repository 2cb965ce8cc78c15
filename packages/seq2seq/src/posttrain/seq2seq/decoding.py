"""A lean decoder for the encoder-decoder models of the T5 and BART families, and greedy and beam search on it.

`transformers`' ``generate`` serves every model and every option, and pays for that at each token. Evaluations generate the
same way thousands of times, so for the two families that most of them use, one decoder step is written out here: keys and
values of the encoder computed once and not copied per beam, a cache of fixed size, fused projections, rows that leave the
batch when they are finished, and a search for the best tokens that reads the logits once.

`LeanGenerator` is what to use: it compares itself with ``generate`` on a few rows first, and says no where it differs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

logger = logging.getLogger(__name__)

#: Scores of what is not to be chosen, as ``generate`` has them.
NEVER = -1.0e9
#: Rows and new tokens of the comparison with ``generate``.
TRIAL_ROWS, TRIAL_TOKENS = 4, 12
#: Projections of more weights than this are not fused: a copy of them would cost more than the calls that it saves.
FUSE_BELOW = 2**20
#: Options of ``generate`` that are left to it.
UNUSUAL = """
    return_dict_in_generate stop_strings max_time token_healing low_memory encoder_repetition_penalty
    encoder_no_repeat_ngram_size guidance_scale watermarking_config remove_invalid_values renormalize_logits
""".split()
#: Classes of logits processors that look at one row at a time, so that rows may leave the batch.
ROW_BY_ROW = """
    ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor MinLengthLogitsProcessor
    MinNewTokensLengthLogitsProcessor NoBadWordsLogitsProcessor NoRepeatNGramLogitsProcessor
    RepetitionPenaltyLogitsProcessor SequenceBiasLogitsProcessor SuppressTokensLogitsProcessor
    SuppressTokensAtBeginLogitsProcessor ExponentialDecayLengthPenalty
""".split()


class Unsupported(Exception):
    """Why a model or an option is left to ``generate``."""


# ---------------------------------------------------------------------------------------------------- one decoder step


@dataclass
class Norm:
    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    rms: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.rms:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass
class Linear:
    """``x @ weight.T + bias``; several of equal input may be joined into one."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    @classmethod
    def of(cls, *modules: nn.Module) -> Linear:
        for module in modules:
            if type(module) is not nn.Linear:
                raise Unsupported(f"a projection is a {type(module).__name__}, not a plain nn.Linear")
        if len(modules) == 1:
            return cls(modules[0].weight, modules[0].bias)
        bias = None if modules[0].bias is None else torch.cat([module.bias for module in modules])
        return cls(torch.cat([module.weight for module in modules]), bias)


@dataclass
class Layer:
    """The weights of one decoder layer; `query_key_value`, `key_value` and `up` hold one projection or several."""

    self_norm: Norm
    query_key_value: list[Linear]
    self_out: Linear
    cross_norm: Norm
    cross_query: Linear
    key_value: list[Linear]
    cross_out: Linear
    feed_norm: Norm
    up: list[Linear]
    gated: bool
    activation: Callable[[torch.Tensor], torch.Tensor]
    down: Linear


def fused(*modules: nn.Module) -> list[Linear]:
    """One joined projection where that is cheap, else one of each module."""
    joins = len(modules) > 1 and sum(module.weight.numel() for module in modules) <= FUSE_BELOW
    return [Linear.of(*modules)] if joins else [Linear.of(module) for module in modules]


def project(parts: list[Linear], x: torch.Tensor) -> torch.Tensor:
    """What the joined projection of `parts` gives: (N, all their outputs)."""
    return parts[0](x) if len(parts) == 1 else torch.cat([part(x) for part in parts], -1)


@dataclass
class DecoderWeights:
    """A decoder of either family, as weights and numbers.

    Attributes:
        positions: ``length -> (length, d_model)``, what is added to the embeddings; None for none.
        position_bias: ``length -> (heads, length, length)``, what is added to the scores of self-attention; None for none.
        pre_norm: each part normalises its input (T5, mBART, Pegasus) rather than its sum with the residual (BART, Marian).
        scale: of the attention scores.
    """

    layers: list[Layer]
    embedding: torch.Tensor
    embedding_scale: float
    embedding_norm: Norm | None
    positions: Callable[[int], torch.Tensor] | None
    position_bias: Callable[[int], torch.Tensor] | None
    pre_norm: bool
    final_norm: Norm | None
    final_scale: float
    head: Linear
    num_heads: int
    scale: float


def read_decoder(model: nn.Module) -> DecoderWeights:
    """The decoder of `model`, a conditional generation model of transformers.

    Raises:
        Unsupported: it is built in neither of the two ways that are known here.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    try:
        if hasattr(decoder, "block"):
            return _read_t5(model, decoder)
        if hasattr(decoder, "layers"):
            return _read_bart(model, decoder)
    except (AttributeError, IndexError, TypeError) as error:
        raise Unsupported(f"its decoder is built in another way ({error})") from error
    raise Unsupported("its decoder is built in another way")


def _read_t5(model: nn.Module, decoder: nn.Module) -> DecoderWeights:
    def norm(module: nn.Module) -> Norm:
        return Norm(module.weight, None, module.variance_epsilon, rms=True)

    layers = []
    for block in decoder.block:
        own, cross, feed = block.layer
        a, c, ff = own.SelfAttention, cross.EncDecAttention, feed.DenseReluDense
        gated = hasattr(ff, "wi_0")
        layers.append(
            Layer(
                norm(own.layer_norm), fused(a.q, a.k, a.v), Linear.of(a.o), norm(cross.layer_norm), Linear.of(c.q),
                fused(c.k, c.v), Linear.of(c.o), norm(feed.layer_norm),
                fused(ff.wi_0, ff.wi_1) if gated else [Linear.of(ff.wi)], gated, ff.act, Linear.of(ff.wo),
            )
        )  # fmt: skip
    first = decoder.block[0].layer[0].SelfAttention
    if any(block.layer[0].SelfAttention.has_relative_attention_bias for block in list(decoder.block)[1:]):
        raise Unsupported("each of its layers has a position bias of its own")
    scaled = bool(getattr(model.config, "scale_decoder_outputs", False))
    return DecoderWeights(
        layers=layers, embedding=decoder.embed_tokens.weight, embedding_scale=1.0, embedding_norm=None, positions=None,
        position_bias=lambda length: first.compute_bias(length, length)[0], pre_norm=True,
        final_norm=norm(decoder.final_layer_norm), final_scale=model.config.d_model**-0.5 if scaled else 1.0,
        head=Linear.of(model.lm_head), num_heads=first.n_heads, scale=1.0,
    )  # fmt: skip


def _read_bart(model: nn.Module, decoder: nn.Module) -> DecoderWeights:
    def norm(module: nn.Module | None) -> Norm | None:
        return None if module is None else Norm(module.weight, module.bias, module.eps, rms=False)

    layers = []
    for layer in decoder.layers:
        a, c = layer.self_attn, layer.encoder_attn
        layers.append(
            Layer(
                norm(layer.self_attn_layer_norm), fused(a.q_proj, a.k_proj, a.v_proj), Linear.of(a.out_proj),
                norm(layer.encoder_attn_layer_norm), Linear.of(c.q_proj), fused(c.k_proj, c.v_proj),
                Linear.of(c.out_proj), norm(layer.final_layer_norm), [Linear.of(layer.fc1)], False, layer.activation_fn,
                Linear.of(layer.fc2),
            )
        )  # fmt: skip
    embedding = decoder.embed_tokens
    scale = getattr(embedding, "embed_scale", getattr(decoder, "embed_scale", 1.0))
    attention = decoder.layers[0].self_attn
    device, limit = (
        embedding.weight.device,
        decoder.embed_positions.num_embeddings - getattr(decoder.embed_positions, "offset", 0),
    )

    def positions(length: int) -> torch.Tensor:
        if length > limit:
            raise Unsupported(f"it has positions for {limit} tokens, and {length} are asked for")
        places = torch.arange(length, device=device)
        return decoder.embed_positions(places[None], 0, position_ids=places).reshape(-1, embedding.embedding_dim)

    bias = getattr(model, "final_logits_bias", None)
    final_norm = norm(getattr(decoder, "layer_norm", None))
    head = Linear(model.lm_head.weight, None if bias is None else bias[0])
    return DecoderWeights(
        layers=layers, embedding=embedding.weight, embedding_scale=float(scale),
        embedding_norm=norm(getattr(decoder, "layernorm_embedding", None)), positions=positions, position_bias=None,
        # The layers of the family differ in nothing but the order of norm and sum, which the norm at the end goes with.
        pre_norm=final_norm is not None, final_norm=final_norm, final_scale=1.0, head=head,
        num_heads=attention.num_heads, scale=attention.scaling,
    )  # fmt: skip


class Steps:
    """The steps of one batch: caches, and the next logits of each row.

    Args:
        weights: of the decoder.
        encoded: (B, S, d) the encoder's last hidden states.
        mask: (B, S) 1 where the input is, 0 at its padding; None where there is none.
        width: rows of the decoder for each row of the encoder: the number of beams.
        length: the most tokens that a row can have.
    """

    def __init__(
        self, weights: DecoderWeights, encoded: torch.Tensor, mask: torch.Tensor | None, width: int, length: int
    ) -> None:
        self.weights, self.width, self.place = weights, width, 0
        batch, source, _ = encoded.shape
        heads = weights.num_heads
        self.mask = None
        if mask is not None and not bool(mask.all()):
            lowest = torch.finfo(encoded.dtype).min
            self.mask = (1 - mask[:, None, None, :].to(encoded.dtype)) * lowest
        self.cross = []  # for each layer (2, B, heads, S, width of a head)
        for layer in weights.layers:
            both = project(layer.key_value, encoded)
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
            x = self._part(x, layer.self_norm, lambda y, n=number, b=bias: self._attend_self(y, n, b))
            x = self._part(x, layer.cross_norm, lambda y, n=number: self._attend_encoder(y, n))
            x = self._part(x, layer.feed_norm, lambda y, one=layer: _feed(y, one))
        if w.final_norm is not None:
            x = w.final_norm(x)
        if w.final_scale != 1.0:
            x = x * w.final_scale
        self.place += 1
        return self._head(x)

    def _part(self, x: torch.Tensor, norm: Norm, part: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return x + part(norm(x)) if self.weights.pre_norm else norm(x + part(x))

    def _attend_self(self, x: torch.Tensor, number: int, bias: torch.Tensor | None) -> torch.Tensor:
        layer, t, rows = self.weights.layers[number], self.place, len(x)
        joint = project(layer.query_key_value, x).view(rows, 3, self.weights.num_heads, -1)
        keys, values = self.cache[number]
        self.cache[number, :, :, :, t] = joint[:, 1:].transpose(0, 1)
        mixed = F.scaled_dot_product_attention(
            joint[:, 0].unsqueeze(2), keys[:, :, : t + 1], values[:, :, : t + 1], bias, scale=self.weights.scale
        )
        return layer.self_out(mixed.reshape(rows, -1))

    def _attend_encoder(self, x: torch.Tensor, number: int) -> torch.Tensor:
        layer, rows, heads = self.weights.layers[number], len(x), self.weights.num_heads
        # The beams of a row are so many queries on one copy of its keys.
        query = layer.cross_query(x).view(rows // self.width, self.width, heads, -1).transpose(1, 2)
        keys, values = self.cross[number]
        mixed = F.scaled_dot_product_attention(query, keys, values, self.mask, scale=self.weights.scale)
        return layer.cross_out(mixed.transpose(1, 2).reshape(rows, -1))

    def _head(self, x: torch.Tensor) -> torch.Tensor:
        head = self.weights.head
        if torch.is_autocast_enabled(x.device.type) or x.dtype != torch.float32:
            return head(x).float()
        # One buffer for all steps: memory of this size, asked for anew at each step, would be paged in each time.
        if self.logits is None or len(self.logits) != len(x):
            self.logits = x.new_empty(len(x), len(head.weight))
        if head.bias is None:
            return torch.mm(x, head.weight.t(), out=self.logits)
        return torch.addmm(head.bias, x, head.weight.t(), out=self.logits)

    def keep(self, rows: torch.Tensor) -> None:
        """Read on from these of the encoder's rows alone, given by number; `reorder` must follow."""
        self.cross = [both[:, rows] for both in self.cross]
        self.mask = None if self.mask is None else self.mask[rows]

    def reorder(self, rows: torch.Tensor) -> None:
        """Row i goes on from what row ``rows[i]`` has read."""
        chosen = self.cache[..., : self.place, :].index_select(2, rows)
        if len(rows) != self.cache.shape[2]:
            self.cache = self.cache[:, :, : len(rows)].contiguous()
        self.cache[..., : self.place, :] = chosen


def _feed(x: torch.Tensor, layer: Layer) -> torch.Tensor:
    if not layer.gated:
        return layer.down(layer.activation(layer.up[0](x)))
    gate, value = project(layer.up, x).chunk(2, -1)
    return layer.down(layer.activation(gate) * value)


# ---------------------------------------------------------------------------------------------------- search


BLOCK = 64


def best_of_each_row(scores: torch.Tensor) -> torch.Tensor:
    """``scores.argmax(-1)`` of (N, V), by way of the maxima of blocks, which are found several times faster."""
    rows, size = scores.shape
    whole = size // BLOCK * BLOCK
    if scores.device.type != "cpu" or whole < 2 * BLOCK:
        return scores.argmax(-1)
    blocks = scores[:, :whole].unflatten(1, (-1, BLOCK))
    best = blocks.amax(-1).argmax(-1)
    token = best * BLOCK + blocks[torch.arange(rows), best].argmax(-1)
    if whole < size:
        rest, place = scores[:, whole:].max(-1)
        token = torch.where(rest > scores.gather(1, token[:, None])[:, 0], place + whole, token)
    return token


def top_of_each_row(scores: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``scores.topk(number)`` of (N, V): the top `number` lie in the `number` blocks with the largest maxima."""
    rows, size = scores.shape
    if scores.device.type != "cpu" or size % BLOCK or size // BLOCK < 4 * number:
        return scores.topk(number)
    blocks = scores.view(rows, -1, BLOCK)
    _, chosen = blocks.amax(-1).topk(number)
    values, place = blocks[torch.arange(rows)[:, None], chosen].flatten(1).topk(number)
    return values, chosen.gather(1, place // BLOCK) * BLOCK + place % BLOCK


@dataclass
class Search:
    """What a search needs to know; the names and meanings are those of ``GenerationConfig``."""

    start: int
    pad: int
    eos: torch.Tensor
    max_length: int
    processors: Any
    num_beams: int = 1
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False


def greedy(steps: Steps, batch: int, search: Search) -> torch.Tensor:
    """The most probable token at each step: (B, length of the longest row), rows that ended filled up with the pad token."""
    device = search.eos.device
    tokens = torch.full((batch, search.max_length), search.pad, dtype=torch.long, device=device)
    tokens[:, 0] = search.start
    live = torch.arange(batch, device=device)  # the row of `tokens` that each row of the steps is
    unfinished = torch.ones(batch, dtype=torch.bool, device=device)
    length = 1
    last = tokens[:, 0]
    while length < search.max_length:
        scores = steps(last)
        if search.processors:
            scores = search.processors(tokens[live, :length], scores)
        last = best_of_each_row(scores).where(unfinished, search.pad)
        tokens[live, length] = last
        length += 1
        unfinished = unfinished & ~torch.isin(last, search.eos)
        left = int(unfinished.sum())
        if not left:
            break
        if left <= 0.75 * len(live):
            rows = unfinished.nonzero()[:, 0]
            steps.keep(rows)
            steps.reorder(rows)
            live, last, unfinished = live[rows], last[rows], unfinished[rows]
    return tokens[:, :length]


def beam(steps: Steps, batch: int, search: Search) -> torch.Tensor:
    """Beam search as ``generate`` has it: (B x num_return_sequences, length of the longest row).

    A row leaves the batch when none of its running beams can still take the place of a finished one.
    """
    device, beams, limit, returned = search.eos.device, search.num_beams, search.max_length, search.num_return_sequences
    candidates = max(2, 1 + len(search.eos)) * beams
    among_first = torch.arange(candidates, device=device) < beams
    live = torch.arange(batch, device=device)  # the row of the result that each row below is
    running = torch.full((batch, beams, limit), search.pad or int(search.eos[0]), device=device)
    running[:, :, 0] = search.start
    running_scores = torch.full((batch, beams), NEVER, device=device)
    running_scores[:, 0] = 0  # all beams are the same at first: only one of them counts
    best, lengths = running.clone(), torch.ones(batch, beams, dtype=torch.long, device=device)
    scores = torch.full((batch, beams), NEVER, device=device)
    done = torch.zeros(batch, beams, dtype=torch.bool, device=device)
    is_open = torch.ones(batch, dtype=torch.bool, device=device)
    found, found_lengths = best[:, :returned].clone(), lengths[:, :returned].clone()
    logps = torch.empty(0)
    for size in range(1, limit):
        logits = steps(running[:, :, size - 1].flatten())
        logps = logps if logps.shape == logits.shape else torch.empty_like(logits)
        given = torch.log_softmax(logits, -1, out=logps)
        if search.processors:
            given = search.processors(running[:, :, :size].flatten(0, 1), given)
        totals = given.view(len(live), beams, -1) + running_scores[:, :, None]
        top, index = top_of_each_row(totals.flatten(1), candidates)
        parent, token = index // totals.shape[-1], index % totals.shape[-1]
        extended = _pick(running, parent)
        extended[:, :, size] = token
        stops = torch.isin(token, search.eos) if size + 1 < limit else torch.ones_like(token, dtype=torch.bool)

        going = top + stops * NEVER
        choice = going.topk(beams)[1]
        running, running_scores, parent = _pick(extended, choice), _pick(going, choice), _pick(parent, choice)

        finished = stops & among_first
        shut = ~finished | ~is_open[:, None]
        merged = torch.cat([scores, top / size**search.length_penalty + shut * NEVER], 1)
        choice = merged.topk(beams)[1]
        best, scores = _pick(torch.cat([best, extended], 1), choice), _pick(merged, choice)
        lengths = _pick(torch.cat([lengths, torch.full_like(token, size + 1)], 1), choice)
        done = _pick(torch.cat([done, finished], 1), choice)

        # What the best running beam could still reach, against the worst finished one.
        reach = limit - 1 if search.early_stopping == "never" and search.length_penalty > 0 else size
        worst = torch.where(done, scores.min(1, keepdim=True)[0], NEVER)
        is_open = is_open & (running_scores[:, :1] / reach**search.length_penalty > worst).any(1)
        if search.early_stopping is True:
            is_open = is_open & ~done.all(1)
        left = 0 if bool(stops.all()) else int(is_open.sum())
        rows = torch.arange(len(live), device=device)
        if left <= 0.75 * len(live):
            found[live], found_lengths[live] = best[:, :returned], lengths[:, :returned]
            rows = is_open.nonzero()[:, 0]
            if not left:
                break
            steps.keep(rows)
            parts = (live, running, running_scores, best, lengths, scores, done, is_open)
            live, running, running_scores, best, lengths, scores, done, is_open = (part[rows] for part in parts)
        steps.reorder((parent[rows] + rows[:, None] * beams).flatten())
    return found.flatten(0, 1)[:, : int(found_lengths.max())]


def _pick(values: torch.Tensor, beams: torch.Tensor) -> torch.Tensor:
    """Of (B, K, ...) the beams (B, k) of each row: (B, k, ...)."""
    return torch.take_along_dim(values, beams if values.ndim == 2 else beams[:, :, None], 1)


# ---------------------------------------------------------------------------------------------------- in place of generate


class LeanGenerator:
    """``model.generate`` for the models and options that it can prove itself equal on.

    Call `refresh` when the weights may have changed, since some are kept joined. At the first batch under new options a
    few rows are generated both ways; where a token differs, the answer is None from then on.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.refused: str | None = None
        self._weights: DecoderWeights | None = None
        self._proved: dict[str, bool] = {}

    def refresh(self) -> None:
        """Read the weights again at the next call."""
        self._weights = None

    @torch.no_grad()
    def __call__(self, inputs: dict[str, Any], encoded: Any, options: dict[str, Any]) -> torch.Tensor | None:
        """The tokens that ``generate(**inputs, **options)`` gives, (B x num_return_sequences, T), or None: not supported.

        Args:
            inputs: of the encoder; a dict of tensors.
            encoded: what the encoder made of them.
            options: arguments of ``generate``.
        """
        try:
            config = self._config(inputs, options)
            if self._weights is None:
                self._weights = read_decoder(self.model)
            key = f"{torch.is_autocast_enabled(encoded[0].device.type)} {config.to_diff_dict()}"
            if key not in self._proved:
                self._proved[key] = self._try(inputs, encoded, config)
                if not self._proved[key]:
                    raise Unsupported("its tokens differed from those of generate on a short try")
            return self._search(inputs, encoded[0], config) if self._proved[key] else None
        except Unsupported as reason:
            if str(reason) != self.refused:
                self.refused = str(reason)
                logger.info("Evaluations call generate of %s: %s.", type(self.model).__name__, reason)
            return None

    def _config(self, inputs: dict[str, Any], options: dict[str, Any]) -> Any:
        """The options as ``generate`` would complete them, its lengths in `max_length` alone."""
        from transformers import GenerationMixin

        model = self.model
        if "generate" in vars(model) or getattr(type(model), "generate", None) is not GenerationMixin.generate:
            raise Unsupported("it has a generate of its own")
        if not set(inputs) <= {"input_ids", "attention_mask"}:
            raise Unsupported(f"it is given more than tokens ({', '.join(inputs)})")
        try:
            options = {name: value for name, value in options.items() if name != "synced_gpus"}
            base = options.pop("generation_config", None)
            config, rest = model._prepare_generation_config(base, **options)
            unset = all(one is None or one.max_length is None for one in (base, model.generation_config))
            config = model._prepare_generated_length(
                config, options.get("max_length") is None and unset, True, "input_ids", 1, inputs["input_ids"]
            )
            mode, usual = config.get_generation_mode().value, config._get_default_generation_params()
        except (AttributeError, TypeError) as error:
            raise Unsupported(f"this version of transformers prepares generation in another way ({error})") from error
        if rest:
            raise Unsupported(f"it is given {', '.join(rest)}")
        if mode not in ("greedy_search", "beam_search"):
            raise Unsupported(f"its mode is {mode}")
        for name in UNUSUAL:
            if getattr(config, name, None) not in (None, False, usual.get(name)):
                raise Unsupported(f"{name} is set")
        config.max_new_tokens = None
        return config

    def _try(self, inputs: dict[str, Any], encoded: Any, config: Any) -> bool:
        from transformers.modeling_outputs import BaseModelOutput

        few = {name: value[:TRIAL_ROWS] for name, value in inputs.items()}
        states = encoded[0][:TRIAL_ROWS]
        short = copy.deepcopy(config)
        short.max_length = min(config.max_length, 1 + TRIAL_TOKENS)
        short.min_length = min(config.min_length or 0, short.max_length)
        # In an object of its own, in which generate may repeat the rows for each beam.
        own = BaseModelOutput(last_hidden_state=states)
        expected = self.model.generate(**few, encoder_outputs=own, generation_config=short)
        return torch.equal(self._search(few, states, short), expected)

    def _search(self, inputs: dict[str, Any], states: torch.Tensor, config: Any) -> torch.Tensor:
        model = self.model
        batch, device, config = len(states), states.device, copy.deepcopy(config)
        model._prepare_special_tokens(config, True, device=device, batch_size=batch)
        start, eos, pad = config._decoder_start_token_tensor, config._eos_token_tensor, config._pad_token_tensor
        if eos is None or start is None or start.numel() != 1:
            raise Unsupported("it has no single start token, or no end token")
        processors = model._get_logits_processor(config, input_ids_seq_length=1, device=device, model_kwargs={})
        if others := [name for name in (type(one).__name__ for one in processors) if name not in ROW_BY_ROW]:
            raise Unsupported(f"its scores are changed by {', '.join(others)}")
        search = Search(
            start=int(start), pad=int(pad), eos=eos, max_length=config.max_length, processors=processors,
            num_beams=config.num_beams, num_return_sequences=config.num_return_sequences,
            length_penalty=config.length_penalty, early_stopping=config.early_stopping,
        )  # fmt: skip
        steps = Steps(self._weights, states, inputs.get("attention_mask"), search.num_beams, search.max_length)
        return (greedy if search.num_beams == 1 else beam)(steps, batch, search)
