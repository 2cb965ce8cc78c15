"""Context parallelism: the processes of one group read the same rows, and each computes a slice of their tokens.

    enable(model, group)
    logits = model(input_ids=rows).logits       # on every process, of all tokens; layers have seen a slice of them

The rows of a batch are laid one after another and cut into 2 P chunks for P processes. Process p computes chunks p and
2 P - 1 - p, so that all have as many earlier tokens to attend to (Llama 3, Sec. 3.3.2, https://arxiv.org/abs/2407.21783).
Each layer gathers the keys and values of all chunks; queries stay where they are. Which token sees which is described
by `Segments`, cut where the row is cut, so packed documents, shared prompts, padding and sliding windows are right.

Gradients: each process computes the loss of whole rows, from what it and the others have computed of them. What leads
from a slice to whole rows multiplies its gradient by P, so that the mean over processes, which DDP and FSDP take, is
the gradient.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from posttrain.core.data.host_copies import on_host, send
from posttrain.core.distributed.world import WHOLE_ROWS, whole_rows
from posttrain.core.models.wrapping import base_model, body_of, replaced, setting
from posttrain.lm.attention import varlen_attention
from posttrain.lm.attention.attention_blocks import Blocks, Layout, piece_by_piece
from posttrain.lm.attention.flash_attention import is_flash
from posttrain.lm.attention.segments import Segments

# ----------------------------------------------------------------------------------------------------- slicing a model


@dataclass(eq=False)
class _Slicing:
    """What is known of a model that computes slices.

    group: the processes with the same rows. current: the slice of the forward that runs, or ran last; None where it
    computed whole rows. head_reads_slices: leave hidden states in slices: the head in use does not need whole rows.
    """

    group: Any
    current: RowSlice | None = None
    head_reads_slices: bool = False


SLICING: WeakKeyDictionary[nn.Module, _Slicing] = WeakKeyDictionary()  # by the body of a model


def enable(model: nn.Module, group: Any) -> None:
    """Let `model` compute a slice of the rows of each forward on each process of `group`. May be called again. Raises a
    `ValueError` for a problem from `problem_of`.
    """
    body = body_of(model)
    if body in SLICING:
        return
    if problem := problem_of(model):
        raise ValueError(f"cp_size={torch.distributed.get_world_size(group)}: {problem} Set cp_size=1.")
    varlen_attention.enable_segments(body)
    SLICING[body] = _Slicing(group)
    body.register_forward_pre_hook(_enter, with_kwargs=True)
    body.register_forward_hook(_leave)


def problem_of(model: nn.Module) -> str | None:
    """Why the rows of `model` cannot be cut into slices, as a sentence; None if they can."""
    base, body = base_model(model), body_of(model)
    name = type(base).__name__
    if body is base:
        return f"{name} has no body apart from its head, whose rows could be cut."
    if setting(base.config, "output_router_logits"):
        return f"{name} adds a loss over the routes of all tokens (output_router_logits); each process has a slice."
    if is_flash(body):
        return f"{name} has flash attention, which knows no slices; load it with attn_implementation='sdpa'."
    with whole_rows():
        return varlen_attention.segments_problem(body)


@contextlib.contextmanager
def head_reads_slices(model: nn.Module) -> Iterator[_Slicing | None]:
    """Within this context the head of `model` is given the hidden states of this process's slice, if it computes
    slices: ``.current`` then says which.
    """
    slicing = SLICING.get(body_of(model))
    if slicing is None:
        yield None
        return
    with replaced(slicing, "head_reads_slices", True):
        yield slicing


def _enter(body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The inputs of `body` for the slice of this process."""
    slicing = SLICING[body]
    slicing.current = None
    cache = kwargs.get("cache", kwargs.get("past_key_values"))  # so named before transformers 5.24
    cached = cache is not None or kwargs.get("use_cache") is True
    replaced = not body.config._attn_implementation.startswith(varlen_attention.PREFIX)  # while it generates
    if WHOLE_ROWS.get() or replaced or (cached and not torch.is_grad_enabled()):
        return None
    if cache is not None:
        raise ValueError(
            "cp_size: keys that no token has made (prefix tuning) cannot be cut with the row. Use LoRA, or set "
            "cp_size=1."
        )
    for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
        if kwargs.get(name):
            raise ValueError(f"cp_size: {name}=True needs whole rows, and each process has a slice. Set cp_size=1.")
    kwargs = dict(zip(("input_ids", "attention_mask"), args, strict=False)) | kwargs
    given = kwargs["input_ids"] if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    shape, device = given.shape[:2], given.device
    mask, positions, segments = (kwargs.pop(name, None) for name in ("attention_mask", "position_ids", "segments"))
    if segments is None:
        segments = segments_of(shape, mask, positions)
    if positions is None:
        positions = torch.arange(shape[1], device=device)[None]
    part = RowSlice(segments, tuple(shape), slicing.group)
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and value.shape[:2] == shape:
            kwargs[name] = part.cut(value)
    kwargs |= {"position_ids": part.cut(positions.expand(shape)), "segments": part, "use_cache": False}
    kwargs["attention_mask"] = torch.zeros(1, 1, 1, 1, device=device)  # as `Segments.model_inputs` has it
    slicing.current = part
    return (), kwargs


def _leave(body: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """The hidden states of whole rows, unless the head reads slices."""
    slicing = SLICING[body]
    if slicing.current is None or slicing.head_reads_slices:
        return output
    if isinstance(output, tuple):
        return slicing.current.join(output[0], 1), *output[1:]
    output.last_hidden_state = slicing.current.join(output.last_hidden_state, 1)
    return output


def segments_of(shape: tuple[int, ...], mask: torch.Tensor | None, positions: torch.Tensor | None) -> Segments:
    """Which tokens see each other in (B, T) rows under a padding mask (B, T).

    Padding is a document of its own. Without a mask, positions that do not go on begin a document, as transformers has
    it for packed rows.
    """
    rows, width = shape
    if mask is not None and mask.ndim != 2:
        raise ValueError(
            f"cp_size: an attention mask of shape {tuple(mask.shape)} cannot be cut with the row; pass one of (rows, "
            "tokens), or set cp_size=1."
        )
    if mask is None and positions is None:
        return Segments.documents([width] * rows)
    kept = torch.ones(shape, dtype=torch.bool) if mask is None else on_host(mask).bool()[:, -width:]
    starts = torch.zeros(shape, dtype=torch.bool)
    if mask is None and positions is not None:
        starts[:, 1:] = on_host(positions.expand(shape)).diff(dim=1) != 1
    begins = starts.clone()
    begins[:, 0] = True
    begins[:, 1:] |= kept[:, 1:] != kept[:, :-1]
    places = begins.flatten().nonzero().squeeze(1)
    lengths = places.diff(append=torch.tensor([rows * width])).tolist()
    parents, last = [], -1  # the piece of text that a later one of its row continues
    columns = [column.tolist() for column in (kept.flatten()[places], starts.flatten()[places], places % width)]
    for i, (text, starts_document, column) in enumerate(zip(*columns, strict=True)):
        last = -1 if column == 0 else last
        parents.append(last if text and not starts_document else -1)
        last = i if text else last
    return Segments(tuple(lengths), tuple(parents))


# ---------------------------------------------------------------------------------------------------- a slice of a row


class RowSlice:
    """The part of some rows that this process computes. Passed through a model in place of its `Segments`.

    Args:
        segments: of the B * T tokens of the rows, laid one after another.
        shape: (B, T).
        group: the P processes that compute them together.

    Attributes:
        width: T.
        num_tokens: of the slice: at least B * T / P, since the row is filled up to a multiple of 2 P.
    """

    def __init__(self, segments: Segments, shape: tuple[int, int], group: Any) -> None:
        self.shape, self.group = shape, group
        self.width = shape[1]
        self.rank, self.parts = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        self.chunk = -(-segments.num_tokens // (2 * self.parts))
        self.num_tokens = 2 * self.chunk
        self.layout = cut_segments(segments, self.chunk, self.parts, self.rank)

    def cut(self, rows: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """(1, N, ...) this process's tokens of (B, T, ...) `rows`; those that fill the last chunks are `fill`."""
        flat = rows.flatten(0, 1)
        missing = self.chunk * 2 * self.parts - len(flat)
        if missing:
            flat = F.pad(flat, (0, 0) * (flat.ndim - 1) + (0, missing), value=fill)
        chunks = flat.unflatten(0, (2 * self.parts, self.chunk))
        return torch.cat([chunks[self.rank], chunks[2 * self.parts - 1 - self.rank]])[None]

    def join(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Whole rows of what the processes computed: (..., B, T, ...) of (..., 1, N, ...), N the dimension `dim`."""
        flat = tensor.movedim(dim, 0).squeeze(dim)
        gathered = _Join.apply(flat, self.group).unflatten(0, (2 * self.parts, self.chunk))
        inverse = send(torch.tensor(_order(self.parts)).argsort(), tensor.device)
        whole = gathered[inverse].flatten(0, 1)[: self.shape[0] * self.width].unflatten(0, self.shape)
        return whole.movedim((0, 1), (dim - 1, dim))

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of what the processes computed of their slices, on each of them."""
        return _Total.apply(tensor, self.group)

    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Any, **rule: Any
    ) -> torch.Tensor:
        """Softmax attention of the slice's queries to the keys of whole rows; all arguments, and the result, as of
        `varlen_attention.segment_attention`.
        """
        device = query.device.type
        query, key, value = varlen_attention.in_one_type(query, key, value)
        with torch.autocast(device, enabled=False):
            both = torch.cat([key, value], -1)[0].transpose(0, 1)  # one message for both
            both = _Gather.apply(both, self.group).transpose(0, 1)[None]
            sizes = [key.shape[-1], value.shape[-1]]
            key, value = both.split(sizes, -1)
            plain = rule["window"] is None and rule["sinks"] is None and not rule["softcap"] and not rule["dropout"]
            if device == "cpu" and plain and sizes[0] == sizes[1]:
                return Blocks.apply(query, key, value, self.layout, rule["scale"])
            return piece_by_piece(query, key, value, self.layout, **rule)


def _order(parts: int) -> list[int]:
    """The chunks of a row in the order in which they are gathered."""
    return [chunk for part in range(parts) for chunk in (part, 2 * parts - 1 - part)]


@functools.lru_cache(maxsize=64)
def cut_segments(segments: Segments, chunk: int, parts: int, rank: int) -> Layout:
    """`segments` cut at multiples of `chunk` and filled up to `parts` pairs of these, as the process `rank` has them.

    A segment that is cut becomes two, of which the second continues the first.
    """
    whole = 2 * parts * chunk
    missing = whole - segments.num_tokens
    lengths: list[int] = []
    parents: list[int] = []
    starts: list[int] = []
    last: list[int] = []  # the last piece of each segment
    filled = (*segments.lengths, missing), (*segments.parents, -1), (*segments.starts, whole - missing)
    for length, parent, start in zip(*filled, strict=True):
        above, stop = last[parent] if parent >= 0 else -1, start + length
        while start < stop:
            end = min(stop, (start // chunk + 1) * chunk)
            parents.append(above)
            above = len(lengths)
            lengths.append(end - start)
            starts.append(start)
            start = end
        last.append(above)
    place = {number: at for at, number in enumerate(_order(parts))}  # of each chunk among the gathered ones
    keys = tuple(place[start // chunk] * chunk + start % chunk for start in starts)
    own = tuple(i for i, start in enumerate(starts) if start // chunk in (rank, 2 * parts - 1 - rank))
    return Layout(Segments(tuple(lengths), tuple(parents)), own, keys)


# torch 2.14 has new names for these two, and warns of the old ones.
_all_gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
_reduce_scatter = getattr(torch.distributed, "reduce_scatter_single", None) or torch.distributed.reduce_scatter_tensor


class _Gather(torch.autograd.Function):
    """(P * N, ...) of the (N, ...) of each process; each part's gradient is the sum of those of all processes."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        found = tensor.new_empty(tensor.shape[0] * torch.distributed.get_world_size(group), *tensor.shape[1:])
        _all_gather(found, tensor.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        own = gradient.new_empty(gradient.shape[0] // torch.distributed.get_world_size(ctx.group), *gradient.shape[1:])
        _reduce_scatter(own, gradient.contiguous(), group=ctx.group)
        return own, None


class _Join(_Gather):
    """As `_Gather`, where every process goes on to compute the same: a part's gradient is its own, times P."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        parts = torch.distributed.get_world_size(ctx.group)
        return gradient.chunk(parts)[torch.distributed.get_rank(ctx.group)] * parts, None


class _Total(torch.autograd.Function):
    """The sum over processes, which all go on to compute the same from: the gradient, times P."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        total = tensor.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * torch.distributed.get_world_size(ctx.group), None
