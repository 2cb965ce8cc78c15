"""Implements attention over `Segments` of one flattened row.

A model reads them after `enable_segments`:

    enable_segments(model)
    segments = Segments.groups([(256, [64, 48])])
    logits = model(input_ids=row, **segments.model_inputs(row.shape)).logits        # row: (1, 368)

Segments are passed as a keyword of the forward to the attention function, so they are available when a layer is
recomputed in the backward pass, under any wrapper. No (N, N) mask is built: see `attention_blocks`.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from posttrain.core.data.pipeline import to_device
from posttrain.core.evaluation.eval_loop import eval_mode
from posttrain.core.models import wrapping
from posttrain.core.models.trainable import is_quantized
from posttrain.lm.attention import document_positions
from posttrain.lm.attention.attention_blocks import Blocks, layout_of, piece_by_piece
from posttrain.lm.attention.document_kernels import block_mask, bounds_of, document_kernel
from posttrain.lm.attention.flash_attention import is_flash, without_flash
from posttrain.lm.attention.segments import Segments
from posttrain.lm.images.image_positions import ImageExample, ImagePositions, shared_positions

# ---------------------------------------------------------------------------------------- how a model is made to use it

PREFIX = "segments_"
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")
LAYER_TYPES = ("full_attention", "sliding_attention")


def enable_segments(model: nn.Module, example: ImageExample | None = None) -> None:
    """Let the forward of `model` accept ``segments``. Without them its results do not change.

    Registers an attention function with transformers and sets it as ``segments_<previous one>``, of a model that sees
    for its decoder of text. In place of flash attention that is ``sdpa`` or ``eager``, and the kernel that was named
    computes the documents. Raises a `ValueError` for a problem from `segments_problem`.
    """
    if problem := segments_problem(model, example):
        raise ValueError(problem)
    _set_implementation(wrapping.text_part(wrapping.base_model(model)), PREFIX + _underlying(model))


def segments_problem(model: nn.Module, example: ImageExample | None = None) -> str | None:
    """Why `model` cannot compute `Segments` rightly, as a sentence; None if it can.

    Tried by two forwards of 27 tokens, without dropout: the logits of packed documents and of completions behind a
    shared prompt must be those of each text alone. On a GPU, packed documents have a kernel of their own and are tried
    once more by themselves. Call it in the precision of training: kernels differ by it. The answer is remembered for as
    long as the model lives.

    Args:
        example: of a model that sees, what it is tried with instead. Without one, such a model has a problem.
    """
    base = wrapping.base_model(model)
    name = type(base).__name__
    if not wrapping.is_of_transformers(base):
        return f"{name} is no model of transformers, whose attention can be replaced."
    if wrapping.is_compiled(model):
        return "The model is compiled, and would be compiled anew for each batch."
    if problem := document_positions.invocation_problem(model):
        return problem
    if problem := reading_problem(base, example):
        return problem
    if unknown := sorted({*(wrapping.setting(wrapping.text_part(base).config, "layer_types") or ())} - {*LAYER_TYPES}):
        return f"{name} has layers of {', '.join(unknown)}, which do not keep segments apart."
    if _underlying(model) not in IMPLEMENTATIONS:
        return (
            f"{name} uses attn_implementation={_underlying(model)!r}; load it with one of "
            f"{', '.join(IMPLEMENTATIONS)}, which segments support."
        )
    device = next(base.parameters()).device
    if device.type == "meta":
        return f"{name} is on the meta device, where nothing can be tried."
    tried = _TRIED.setdefault(wrapping.unwrap(model), {})
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    # Where the config asks for the routers' loss, that reads a mask, which segments stand in for.
    reads = bool(wrapping.setting(wrapping.text_part(base).config, "output_router_logits"))
    key = device.type, _underlying(model), autocast, reads
    if key not in tried:
        from torch._subclasses.fake_tensor import FakeTensor

        if isinstance(next(base.parameters()), FakeTensor):  # of a memory plan, without numbers
            tried[key] = None
        else:
            trial = _texts(base) if example is None else _prompts(base, example)
            tried[key] = _try(wrapping.unwrap(model), base, trial)
    return tried[key]


def reading_problem(base: wrapping.PretrainedModel, example: ImageExample | None = None) -> str | None:
    """Why `base` cannot be tried on one row of text, or of text with images like those of `example`, as a sentence.

    None if it can.
    """
    name = type(base).__name__
    if base.config.is_encoder_decoder:
        return f"{name} reads two rows, one in its encoder and one in its decoder."
    if wrapping.text_part(base) is not base and example is None:
        return f"{name} sees images, and on such a model rows of text alone are not tried."
    return None


_TRIED: WeakKeyDictionary[nn.Module, dict[tuple[str, str, torch.dtype | None, bool], str | None]] = WeakKeyDictionary()


def _underlying(model: nn.Module) -> str:
    reader = wrapping.text_part(wrapping.base_model(model))
    if is_flash(reader):
        return without_flash(reader)
    return (reader.config._attn_implementation or "eager").removeprefix(PREFIX)


def _set_implementation(base: wrapping.PretrainedModel, name: str) -> None:
    if name.startswith(PREFIX):
        _register(name.removeprefix(PREFIX))
    if base.config._attn_implementation != name:
        base.set_attn_implementation(name)


@functools.cache
def _register(underlying: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = None if underlying == "eager" else ALL_ATTENTION_FUNCTIONS[underlying]
    AttentionInterface.register(PREFIX + underlying, functools.partial(_attention_function, function))
    AttentionMaskInterface.register(PREFIX + underlying, ALL_MASK_ATTENTION_FUNCTIONS[underlying])


#: The segments of a row, the inputs of a forward of it besides those of `Segments.model_inputs`, some of which they
#: replace, and the inputs of a forward of one text for each segment: it, behind what it continues.
Trial = tuple[Segments, dict[str, torch.Tensor], dict[str, torch.Tensor]]


def _trial(parents: tuple[int, ...], pieces: Mapping[str, list[list[int]]]) -> Trial:
    """That of segments with these `parents`, and of each input its numbers for each segment's tokens."""
    segments = Segments(tuple(map(len, pieces["input_ids"])), parents)
    chains = [[*segments.ancestors(i), i] for i in range(len(parents))]
    row, alone = {}, {}
    for name, numbers in pieces.items():
        row[name] = torch.tensor([sum(numbers, [])])
        texts = [torch.tensor([number for i in chain for number in numbers[i]]) for chain in chains]
        alone[name] = nn.utils.rnn.pad_sequence(texts, batch_first=True)  # on the right it is seen by nothing
    return segments, row, alone


def _texts(base: wrapping.PretrainedModel) -> Trial:
    lengths, parents = (7, 5, 4, 6, 5), (-1, -1, 1, 1, 2)
    row = torch.arange(1, 1 + sum(lengths)).mul(7).remainder(base.config.vocab_size)
    return _trial(parents, {"input_ids": [piece.tolist() for piece in row.split(lengths)]})


def _prompts(base: wrapping.PretrainedModel, example: ImageExample) -> Trial:
    """Two prompts with an image, the first with two completions behind it and the second with one."""
    (prompt, later), words = example.prompts(), list(example.words)
    first, other = words[:5], words[:1:-1]
    pieces = {"input_ids": [list(prompt.ids), first, other, list(later.ids), other]}
    for name, numbers in prompt.numbers.items():
        pieces[name] = [list(numbers), [0] * len(first), [0] * len(other), list(later.numbers[name]), [0] * len(other)]
    segments, row, alone = _trial((-1, 0, 0, -1, 3), pieces)
    row |= {name: torch.cat([tensor] * 2) for name, tensor in prompt.tensors.items()}
    alone |= {name: torch.cat([tensor] * 5) for name, tensor in prompt.tensors.items()}
    if (positions := ImagePositions.of(base)) is not None:
        groups = [(len(prompt.ids), [len(first), len(other)]), (len(later.ids), [len(other)])]
        row["position_ids"] = shared_positions(map(positions, (prompt, later)), groups)
    return segments, row, alone


@torch.no_grad()
def _try(model: nn.Module, base: wrapping.PretrainedModel, trial: Trial) -> str | None:
    name, reader, segments = type(base).__name__, wrapping.text_part(base), trial[0]
    before, lengths, plain = reader.config._attn_implementation, segments.lengths, _underlying(base)
    row, texts = to_device(trial[1:], next(base.parameters()).device)
    alone = texts["input_ids"]
    documents: Sequence[torch.Tensor] = ()
    try:
        with eval_mode(model):
            _set_implementation(reader, plain)
            expected = _scores(model(**texts, use_cache=False))
            _set_implementation(reader, PREFIX + plain)
            if reader.config._attn_implementation != PREFIX + plain:
                return f"{name} does not look its attention up in transformers' AttentionInterface."
            found = _logits_of(model, row, segments)
            if alone.is_cuda and reader is base:
                sizes = [offset + length for offset, length in zip(segments.offsets, lengths, strict=True)]
                packed = {"input_ids": torch.cat([line[:n] for line, n in zip(alone, sizes, strict=True)])[None]}
                documents = _logits_of(model, packed, Segments.documents(sizes)).split(sizes)
    except ImportError:
        raise  # a package of the kernels is broken, which is no property of the model
    except Exception as error:  # any model may fail here, and is then trained without segments
        return f"{name} could not be tried on segments: {type(error).__name__}: {error}"
    finally:
        if reader.config._attn_implementation != before:
            reader.set_attn_implementation(before)
    if found.shape[0] != segments.num_tokens or expected.shape[:2] != alone.shape:
        return f"{name} gives logits for {tuple(found.shape[:1])} of {segments.num_tokens} tokens."
    pairs = [*zip(found.split(lengths), expected, segments.offsets, strict=True)]
    pairs += [(part, line, 0) for part, line in zip(documents, expected, strict=bool(documents))]
    gaps = [(part.float() - line[at : at + len(part)].float()).abs().max() for part, line, at in pairs]
    wrong = float(torch.stack(gaps).max() / expected.float().abs().max().clamp_min(1e-12))
    if not wrong < tolerance(base):
        return (
            f"{name} does not keep segments apart: its logits differ by {wrong:.2g} of the largest from those of "
            "each text alone. Recurrent and convolution layers and learned sums over the whole row cannot, and neither "
            "can tokens of an image that see those behind them."
        )
    return None


def tolerance(base: nn.Module) -> float:
    """Of logits that two kernels compute, the difference as a share of the largest that is rounding.

    In float32 it was 6e-5 at most on an H200, and texts that see each other differ by 1e-2 and more.
    """
    parameter = next(base.parameters())
    exact = parameter.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(parameter.device.type)
    return 2e-4 if exact and not is_quantized(base) else 5e-2


def _logits_of(model: nn.Module, inputs: Mapping[str, torch.Tensor], segments: Segments) -> torch.Tensor:
    ids = inputs["input_ids"]
    return _scores(model(**segments.model_inputs(ids.shape, ids.device) | dict(inputs), use_cache=False))[0]


def _scores(output: Any) -> torch.Tensor:
    """(B, T, V) logits, or the (B, T, H) hidden states of a model without a head."""
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def _attention_function(
    underlying: Callable[..., Any] | None,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What transformers calls in each attention layer: (B, T, H, D) of (B, H, T, D) queries, keys and values."""
    if segments is None:
        function = underlying or _eager_function(module)
        return function(module, query, key, value, attention_mask, *args, **kwargs)
    rows, _, width, _ = query.shape
    attention = getattr(segments, "attention", segment_attention)  # of a slice of a row, its own
    if key.shape[2] != width or rows * width != segments.num_tokens:
        raise ValueError(
            f"Segments of {segments.num_tokens} tokens were given to {rows} x {width} queries and {rows} x "
            f"{key.shape[2]} keys; pass the whole row at once, without a cache."
        )
    if rows > 1:
        query, key, value = map(_flat, (query, key, value))
    scaling = kwargs.get("scaling", args[0] if args else None)
    rule = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "window": layer_window(module, kwargs.get("sliding_window")),
        "softcap": kwargs.get("softcap"),
        "sinks": kwargs.get("s_aux"),
        "dropout": kwargs.get("dropout", 0.0),
    }
    out = attention(query, key, value, segments, **rule)
    return out.transpose(1, 2).reshape(rows, width, out.shape[1], out.shape[-1]), None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """(B, H, T, D) -> (1, H, B * T, D); a view where the memory is that of (B, T, H, D), as projections give it."""
    rows, heads, width, size = tensor.shape
    return tensor.transpose(1, 2).reshape(1, rows * width, heads, size).transpose(1, 2)


def _eager_function(module: nn.Module) -> Callable[..., Any]:
    """The `eager_attention_forward` in the file of `module`'s class."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise ValueError(f"{type(module).__name__} has no eager_attention_forward in its file; load the model with sdpa.")


def layer_window(module: nn.Module, window: int | None) -> int | None:
    """The sliding window of a layer. Some models apply it only in their masks, which are not used here."""
    config: Any = module.config
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[layer] if kinds and layer is not None else None
    expected = kind == "sliding_attention" or (not kinds and getattr(config, "sliding_window", None) is not None)
    if expected and window is None:
        raise ValueError("its sliding window is not passed to its attention function")
    return window


# ------------------------------------------------------------------------------------------------------ the computation


def in_one_type(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`tensors` in the type of autocast, or else in the widest of their own."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return tuple(tensor.to(dtype) for tensor in tensors)


def segment_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    blocks: type[Blocks] = Blocks,
) -> torch.Tensor:
    """Softmax attention of one flattened row under ``segments.dense_mask(window)``, without building it. Returns (1, H,
    N, E), laid out as (1, N, H, E), in the type of the inputs or of autocast.

    Args:
        query: (1, H, N, D). key: (1, G, N, D) and value: (1, G, N, E), where G divides H.
        scale: multiplies the scores.
        softcap: bounds them to (-softcap, softcap) by a tanh (Gemma 2).
        sinks: (H,) the score of each head's attention sink (GPT-OSS).
        blocks: computes long documents on the CPU.
    """
    device = query.device.type
    query, key, value = in_one_type(query, key, value)
    if window is not None and window >= max(map(sum, zip(segments.offsets, segments.lengths, strict=True))):
        window = None  # it reaches over every document
    with torch.autocast(device, enabled=False):
        if sinks is not None or dropout or (device != "cpu" and query.shape[-1] < SMALLEST_HEAD):
            return piece_by_piece(query, key, value, layout_of(segments), scale, window, softcap, sinks, dropout)
        if device != "cpu":
            return _on_gpu(query, key, value, segments, scale, window, softcap)
        if window is None and not softcap and query.shape[-1] == value.shape[-1]:
            if (tiles := tiles_of(segments)) is not None:
                return _by_tiles(query, key, value, tiles, scale)
            return blocks.apply(query, key, value, layout_of(segments), scale)
        return piece_by_piece(query, key, value, layout_of(segments), scale, window, softcap, sinks, dropout)


#: Numbers of a head that flex attention has kernels for, at least.
SMALLEST_HEAD = 16
#: Documents of at most this many tokens, and at most the second number on average, are computed in one call with a
# mask: up to nine times as fast on the CPU, where a call for each block takes longer than its work.
TILE, TILE_PIECE = 64, 16


@functools.lru_cache(maxsize=8)
def tiles_of(segments: Segments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Each document as a separate row, for short ones; None if blocks are faster.

    Returns:
        (T, W) where in the flattened row the tokens of the T documents are, padded with 0; (T, 1, W, W) bool, their
        mask; (N,) and (N,) the document of each token of the flattened row, and its position there.
    """
    if segments.num_tokens > TILE_PIECE * len(segments.lengths):
        return None
    roots: list[int] = []
    for i, parent in enumerate(segments.parents):
        roots.append(i if parent < 0 else roots[parent])
    document = torch.tensor(roots).unique(return_inverse=True)[1].repeat_interleave(torch.tensor(segments.lengths))
    sizes = document.bincount()
    width = int(sizes.max())
    if width > TILE or width * len(sizes) > 2 * segments.num_tokens:
        return None
    order = document.argsort(stable=True)
    place = torch.empty_like(document)
    place[order] = torch.arange(len(document)) - (sizes.cumsum(0) - sizes)[document[order]]
    tokens = torch.zeros(len(sizes), width, dtype=torch.long)
    tokens[document, place] = torch.arange(len(document))
    ids, positions = segments.segment_ids()[tokens], segments.position_ids()[0][tokens]
    sees, seen, above = ids[:, :, None] == ids[:, None, :], ids, torch.tensor(segments.parents)
    while seen.max() >= 0:
        seen = torch.where(seen >= 0, above[seen], -1)  # what the one before continues
        sees |= seen[:, :, None] == ids[:, None, :]
    sees &= positions[:, :, None] >= positions[:, None, :]
    sees &= (torch.arange(width) < sizes[:, None])[:, None, :]
    sees |= torch.eye(width, dtype=torch.bool)  # a row of padding must see something, or its softmax is not a number
    return tokens, sees.unsqueeze(1), document, place


def _by_tiles(query, key, value, tiles, scale) -> torch.Tensor:
    tokens, sees, document, place = tiles
    kind = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (tensor[0].transpose(0, 1)[tokens].transpose(1, 2).to(kind) for tensor in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, sees, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)[document, place].to(query.dtype).transpose(0, 1).unsqueeze(0)


# ------------------------------------------------------------------------------------------------------------- on a GPU


def _on_gpu(query, key, value, segments, scale, window, softcap) -> torch.Tensor:
    """Documents of one length as a batch, others in 16 bits by flash-attn or torch's kernel, else flex attention."""
    count, longest = len(segments.lengths), max(segments.lengths)
    if max(segments.parents) < 0 and count * longest == segments.num_tokens and window is None and not softcap:
        q, k, v = (tensor[0].unflatten(1, (count, longest)).transpose(0, 1) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)
    half = query.dtype in (torch.bfloat16, torch.float16)
    if (
        half
        and query.device.type not in ("xpu", "mps")
        and max(segments.parents) < 0
        and (kernel := document_kernel(bool(softcap))) is not None
    ):
        bounds = bounds_of(segments, query.device)
        rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return kernel(*rows, bounds, longest, scale, window, softcap or 0.0)[None].transpose(1, 2)
    # Of itself torch takes its kernel for decoding where a row is short, and finds none that fits these blocks.
    options: dict[str, Any] = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    options["kernel_options"] = {"BACKEND": "TRITON"}
    if softcap:
        cap = torch.full((), softcap, device=query.device)  # a float is traced as one that changes, which flex refuses
        options["score_mod"] = lambda score, b, h, q, kv: cap * torch.tanh(score / cap)
    trained = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    sizes = (*query.shape[1::2], *key.shape[1::2], value.shape[3])
    flex = _flex_attention((query.dtype, trained, window is None, softcap, scale, *sizes))
    return flex(query, key, value, block_mask=block_mask(segments, window, query.device), **options)


@functools.cache
def _flex_attention(kind: tuple[Any, ...], backend: str = "inductor") -> Callable[..., torch.Tensor]:
    """Compiled flex attention for inputs of one `kind`, anything that needs a kernel of its own.

    Each has its own code object, because torch compiles one of them 8 times at most; what comes later would run
    uncompiled, with all N x N scores in memory.
    """
    from torch.nn.attention.flex_attention import flex_attention

    def attend(query, key, value, **options):
        return flex_attention(query, key, value, **options)

    code = attend.__code__.replace(co_name=f"flex_attention_{_flex_attention.cache_info().currsize}")
    function = types.FunctionType(code, attend.__globals__, code.co_name, None, attend.__closure__)
    return torch.compile(function, dynamic=True, backend=backend)
