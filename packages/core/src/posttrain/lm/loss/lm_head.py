"""Finds a language model's output head by a test forward and computes the loss in it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from posttrain.core.data.collators import IGNORE_INDEX
from posttrain.core.distributed.sharding import is_in_pieces
from posttrain.core.distributed.world import whole_rows
from posttrain.core.evaluation.eval_loop import eval_mode
from posttrain.core.losses.logits import shift_labels
from posttrain.core.models import wrapping
from posttrain.core.models.wrapping import PretrainedModel, base_model, has_virtual_tokens, output_embedding, unwrap
from posttrain.lm.attention import context_parallel
from posttrain.lm.attention.context_parallel import RowSlice
from posttrain.lm.loss import vocabulary_slices
from posttrain.lm.loss.distillation import HeadStates, Measure, TopK, linear_divergence, logits_of
from posttrain.lm.loss.language_modeling import labelled_places, linear_cross_entropy, token_logps
from posttrain.lm.loss.tiles import product_dtype

SOFTCAP_NAMES = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "softcap")
SCALE_NAMES = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")


@dataclass(frozen=True)
class CausalHead:
    """A head whose logits are ``softcap * tanh(scale * linear(hidden) / softcap)``; plain ``linear(hidden)`` by
    default.

    Its attributes are the arguments of `linear_cross_entropy` and `token_logps`.
    """

    linear: nn.Linear
    softcap: float | None = None
    scale: float = 1.0
    softcap_switch: str | None = None
    """The config field that turns the model's softcap off when None; no field if this is None."""

    def own(self) -> tuple[torch.Tensor, dict[str, Any]]:
        """(weight, its other arguments of `linear_cross_entropy`): where tensor parallelism has split the head, those
        of this process, whose `part` says which tokens of the vocabulary they are of.
        """
        weight: torch.Tensor = self.linear.weight
        bias: torch.Tensor | None = self.linear.bias
        part: vocabulary_slices.Slice | None = None
        if hasattr(weight, "full_tensor"):
            weight, part = vocabulary_slices.of_weight(weight)
            bias, part_of_bias = (None, part) if bias is None else vocabulary_slices.of_weight(bias)
            if part != part_of_bias:
                weight, bias, part = self.weight, self.bias, None
        return weight, {"bias": bias, "part": part, "softcap": self.softcap, "scale": self.scale}

    @property
    def weight(self) -> torch.Tensor:
        return wrapping.full_tensor(self.linear.weight)

    @property
    def bias(self) -> torch.Tensor | None:
        return None if self.linear.bias is None else wrapping.full_tensor(self.linear.bias)


def supports_loss_in_head(model: nn.Module) -> str | None:
    """Why `loss_in_head` cannot be used on `model`, as a sentence; None if it can."""
    return find_head(model)[1]


def loss_in_head(
    model: nn.Module,
    labels: torch.Tensor,
    *,
    shifted: bool = False,
    label_smoothing: float = 0.0,
    chunk_size: int = 256,
    return_stats: bool = True,
    dft: bool = False,
    groups: torch.Tensor | None = None,
    num_groups: int = 0,
) -> contextlib.AbstractContextManager[None]:
    """Within this context the model's head computes the loss without whole logits, under any wrapper.

    DDP sees an ordinary forward, and FSDP has gathered the head's weight when it is used. Call the model without
    labels; its `logits` are then a tensor of 3 numbers: the summed loss, with its graph, and, detached, the number of
    correctly predicted targets and the summed entropy in nats (`LossStats`); without `return_stats` only the loss.
    ``model(**inputs).loss`` does not exist: add its other terms, such as the auxiliary loss of a mixture of experts.
    With `groups` 2 G more numbers follow: the summed loss and the targets of each group. Raises a `ValueError` for a
    problem from `supports_loss_in_head`.

    Args:
        labels: (B, T), for the inputs of the forward.
        shifted: the labels are aligned with the logits already, as after `shift_labels`.
        dft: weight each loss as `posttrain.core.losses.logits.dynamic_weights` has it.
        groups: (B, T) the group of each label, 0 to G - 1 = `num_groups` - 1; aligned as the labels are.
    """
    targets = labels if shifted else shift_labels(labels)
    if groups is not None and not shifted:
        groups = shift_labels(groups, 0)

    def loss(hidden: torch.Tensor, head: CausalHead, part: RowSlice | None) -> torch.Tensor:
        weight, options = head.own()
        found = linear_cross_entropy(
            hidden,
            weight,
            _aligned(model, targets, hidden, part=part),
            **options,
            chunk_size=chunk_size,
            label_smoothing=label_smoothing,
            return_stats=return_stats,
            dft=dft,
            groups=None if groups is None else _aligned(model, groups, hidden, 0, part),
            num_groups=num_groups,
        )
        if isinstance(found, torch.Tensor):
            sums = found.unsqueeze(0)
        else:
            loss, stats, *by_group = found
            sums = torch.cat([torch.stack([loss, *stats]), *(by_group[0] if by_group else ())])
        return sums if part is None else part.total(sums)

    return _head_replaced(model, loss, by_slices=True)


def logps_in_head(
    model: nn.Module,
    labels: torch.Tensor,
    head: CausalHead | None = None,
    *,
    shifted: bool = False,
    temperature: float = 1.0,
    stats: tuple[str, ...] = (),
) -> contextlib.AbstractContextManager[None]:
    """As `loss_in_head`, but the model's `logits` are the (B, T) log-probabilities of the labels, 0 where ignored.
    `head` is that which `find_head` has found; None: it is looked for here.

    With S names of `posttrain.lm.loss.language_modeling.TOKEN_STATS` as `stats` they are (1 + S, B, T), those detached.
    """
    targets = labels if shifted else shift_labels(labels)

    def logps(hidden: torch.Tensor, head: CausalHead, part: RowSlice | None) -> torch.Tensor:
        weight, options = head.own()
        own = _aligned(model, targets, hidden, IGNORE_INDEX, part)
        scores = token_logps(hidden, weight, own, **options, temperature=temperature, stats=stats)
        scores = scores if isinstance(scores, torch.Tensor) else torch.stack(scores)
        if part is not None:
            scores = part.join(scores, scores.ndim - 1)
        return scores[..., scores.shape[-1] - targets.shape[1] :]

    return _head_replaced(model, logps, by_slices=True, head=head)


@contextlib.contextmanager
def states_in_head(model: nn.Module, labels: torch.Tensor) -> Iterator[list[HeadStates]]:
    """Within this context the model's head computes no logits. What they would come from is left in the list. `labels`:
    (B, T), aligned with the logits; the M positions that have one are kept, in their order.
    """
    found: list[HeadStates] = []
    shares = _is_sharded(model)  # the weight is whole during the forward alone

    def keep(hidden: torch.Tensor, head: CausalHead) -> torch.Tensor:
        rows = labelled_places(_aligned(model, labels, hidden)).to(hidden.device)
        states = hidden.detach().reshape(-1, hidden.shape[-1])[rows]
        own = [None if part is None else part.detach() for part in (head.weight, head.bias)]
        weight, bias = (part.clone() if shares and part is not None else part for part in own)
        found.append(HeadStates(states, cast(torch.Tensor, weight), bias, head.softcap, head.scale))
        return hidden[..., :1]

    with _head_replaced(model, keep):
        yield found


def divergence_in_head(
    model: nn.Module, labels: torch.Tensor, teacher: HeadStates | TopK, measure: Measure, *, chunk_size: int = 256
) -> contextlib.AbstractContextManager[None]:
    """As `loss_in_head`, but the model's `logits` are two numbers: the divergence from `teacher`, summed over the
    positions that have a label, with its graph; and the summed entropy in nats, detached. See
    `posttrain.lm.loss.distillation.linear_divergence`. `labels`: (B, T), aligned with the logits.
    """

    def loss(hidden: torch.Tensor, head: CausalHead) -> torch.Tensor:
        compared = hidden, head.weight, _aligned(model, labels, hidden), teacher, measure
        options: dict[str, Any] = {"bias": head.bias, "softcap": head.softcap, "scale": head.scale}
        return torch.stack(linear_divergence(*compared, **options, chunk_size=chunk_size))

    return _head_replaced(model, loss)


def function_in_head(
    model: nn.Module, labels: torch.Tensor, function: Callable[[Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]
) -> contextlib.AbstractContextManager[None]:
    """As `loss_in_head`, but the model's `logits` are what `function` makes of ``places -> logits``, (n,) -> (n, V) in
    float32, of the M positions that have a label: (B, T), aligned with the logits.
    """

    def of_labelled(hidden: torch.Tensor, head: CausalHead) -> torch.Tensor:
        rows = labelled_places(_aligned(model, labels, hidden, IGNORE_INDEX)).to(hidden.device)
        states = hidden.reshape(-1, hidden.shape[-1])[rows]
        return function(lambda places: logits_of(states[places], head))

    return _head_replaced(model, of_labelled)


PACKED_FROM = 2**22
"""Minimum size of weights that are packed: smaller ones stay in the cache and gain nothing."""


def packed_head(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within this context the head multiplies few rows 1.5 times as fast, with a copy of its weight in oneDNN's layout.

    For many forwards of few tokens without gradients, as in generation: the copy costs about four of them. The weight
    must not change meanwhile. Only on the CPU, for an unsharded `nn.Linear` with products in float32.
    """
    linear = output_embedding(model)
    if type(linear) is not nn.Linear or {"forward", "_old_forward"} & set(vars(linear)):
        return contextlib.nullcontext()
    weight = linear.weight
    if not gains_from_packing(weight, product_dtype(weight, weight), weight.numel()) or _is_sharded(model):
        return contextlib.nullcontext()
    packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().float())
    bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(hidden.float(), packed, bias, "none", [], "")

    return wrapping.replaced(linear, "forward", forward)


def gains_from_packing(weight: torch.Tensor, dtype: torch.dtype, size: int) -> bool:
    """Whether products of few rows with weights like `weight`, `size` numbers in all that each forward reads, are
    faster in oneDNN's layout, for products in `dtype`.
    """
    enabled = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    return enabled and weight.device.type == "cpu" and dtype == torch.float32 and size >= PACKED_FROM


def _aligned(
    model: nn.Module,
    targets: torch.Tensor,
    hidden: torch.Tensor,
    ignore_index: int = IGNORE_INDEX,
    part: RowSlice | None = None,
) -> torch.Tensor:
    """(B, T) `targets` for (B, P + T, H) hidden states, where prompt tuning put P virtual tokens before the inputs; of
    those (1, N) for the (1, N, H) hidden states of a `part` of the rows.
    """
    extra = (hidden.shape[1] if part is None else part.width) - targets.shape[1]
    if extra > 0 and has_virtual_tokens(model):
        targets = F.pad(targets, (extra, 0), value=ignore_index)
    return targets if part is None else part.cut(targets, ignore_index)


@contextlib.contextmanager
def _head_replaced(
    model: nn.Module, function: Callable[..., torch.Tensor], by_slices: bool = False, head: CausalHead | None = None
) -> Iterator[None]:
    """Let the head return ``function(hidden, head)`` as the logits.

    Args:
        by_slices: it is ``function(hidden, head, part)``; where processes compute slices of the rows, `hidden` are the
            states of this one's slice, which is `part`. None: whole rows.
    """
    found, reason = (head, None) if head is not None else find_head(model)
    if found is None:
        raise ValueError(reason)
    # accelerate's device hooks call the forward they found; replace that one and let them move the tensors.
    name = "_old_forward" if "_old_forward" in vars(found.linear) else "forward"
    with contextlib.ExitStack() as stack:
        slicing = None
        if by_slices and context_parallel.SLICING:
            slicing = stack.enter_context(context_parallel.head_reads_slices(model))
        if found.softcap_switch is not None:
            config = base_model(model).config.get_text_config()
            setattr(config, found.softcap_switch, None)
            stack.callback(setattr, config, found.softcap_switch, found.softcap)

        def scored(hidden: torch.Tensor) -> torch.Tensor:
            part = [None if slicing is None else slicing.current] if by_slices else []
            return function(hidden, found, *part) / found.scale  # the model will multiply it by the scale

        stack.enter_context(wrapping.replaced(found.linear, name, scored))
        yield


#: (softcap, scale, the field that turns the softcap off) of a head, or why logits do not follow from it.
Found = tuple[float | None, float, str | None] | str
_HEADS: WeakKeyDictionary[nn.Module, Found] = WeakKeyDictionary()


def find_head(model: nn.Module) -> tuple[CausalHead | None, str | None]:
    """The output embedding of `model` if it determines the logits exactly and can be replaced, or None and why not.

    Test: the model runs with known numbers instead of its head's output, and its logits must equal these, up to a
    softcap and a scale in its config. The trial is made once for each head.
    """
    wrapped = cast("PretrainedModel", model)
    while wrapped is not unwrap(wrapped):
        if hasattr(wrapped, "_orig_mod"):
            return None, "The model is compiled: its head is part of the compiled graph."
        if type(wrapped) is nn.DataParallel:
            return None, "The model is in nn.DataParallel, which copies it for every forward."
        wrapped = wrapped.module
    if isinstance(wrapped, nn.Module) and wrapped._compiled_call_impl is not None:  # a reference is no module
        return None, "The model is compiled: its head is part of the compiled graph."
    linear = output_embedding(model)
    if linear is None:
        return None, f"{_name(model)} names no output embedding (get_output_embeddings())."
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        kind = f"{type(linear).__module__}.{type(linear).__name__}"
        return None, f"The head of {_name(model)} is a {kind}, not a plain nn.Linear."
    if not linear.weight.is_floating_point():
        return None, f"The head of {_name(model)} is quantized."
    if linear not in _HEADS:
        try:
            _HEADS[linear] = _try_head(base_model(model), linear)
        except Exception as error:  # any model may be unable to read two tokens, and then it keeps its own loss
            return None, f"{_name(model)} could not be tried on two tokens: {type(error).__name__}: {error}"
    found = _HEADS[linear]
    if isinstance(found, str):
        return None, found
    softcap, scale, switch = found
    if softcap is not None and switch is None:
        return None, f"{_name(model)} caps its logits, and no field of its config turns that off."
    return CausalHead(linear, softcap, scale, switch), None


def _name(model: nn.Module) -> str:
    return type(base_model(model)).__name__


@torch.no_grad()
def _try_head(base: PretrainedModel, linear: nn.Linear) -> Found:
    name, config = type(base).__name__, base.config.get_text_config()

    def named(names: tuple[str, ...]) -> list[tuple[str, float]]:
        values = [(name, wrapping.setting(config, name)) for name in names]
        return [(name, float(value)) for name, value in values if isinstance(value, (int, float)) and value]

    scales = [1.0] + [each for _, value in named(SCALE_NAMES) for each in (value, 1 / value)]
    given, logits, tolerance = _logits_for(base, linear)
    if logits.shape != given.shape:
        return f"The logits of {name} are not of the shape its head gives."
    for (switch, softcap), scale in itertools.product([(None, None), *named(SOFTCAP_NAMES)], scales):
        expected = given * scale if softcap is None else softcap * torch.tanh(given * scale / softcap)
        if not torch.allclose(logits, expected, rtol=tolerance, atol=tolerance):
            continue
        if softcap is not None and switch is not None and not _turns_off(base, linear, switch, scale, tolerance):
            switch = None
        return softcap, scale, switch
    return f"{name} computes its logits from its head's output in an unknown way."


def _turns_off(base: PretrainedModel, linear: nn.Linear, switch: str, scale: float, tolerance: float) -> bool:
    """Whether the logits are not capped while the config field `switch` is None."""
    config = base.config.get_text_config()
    softcap = getattr(config, switch)
    try:
        setattr(config, switch, None)
        given, logits, _ = _logits_for(base, linear)
    except Exception:  # a config that does not allow None, a forward that does not expect it
        return False
    finally:
        setattr(config, switch, softcap)
    return torch.allclose(logits, given * scale, rtol=tolerance, atol=tolerance)


class _BodyOutput(tuple):
    """The output of a body without cache or router: the last hidden state, and None for other names."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None


def _logits_for(base: nn.Module, linear: nn.Linear) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Run two tokens with known numbers in [-100, 100] as the head's output: (those numbers, logits, tolerance).

    The body is skipped if it is a separate module: this costs no time and no collective, and quantized layers choose no
    layout at a test forward.
    """
    given: list[torch.Tensor] = []

    def put(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        spread = torch.linspace(-100, 100, output.numel(), device=output.device).view_as(output).to(output.dtype)
        given.append(spread)
        return spread

    ids = torch.tensor([[0, 1]], device=linear.weight.device)
    inputs = {"input_ids": ids}
    if wrapping.is_encoder_decoder(base):
        inputs["decoder_input_ids"] = ids
    hidden = torch.zeros(1, 2, linear.in_features, dtype=linear.weight.dtype, device=linear.weight.device)
    body = wrapping.body_of(base)
    skipped: Any = contextlib.nullcontext()
    if body is not base:
        skipped = wrapping.replaced(body, "forward", lambda *args, **kwargs: _BodyOutput([hidden]))
    with linear.register_forward_hook(put, prepend=True), eval_mode(base), whole_rows(), skipped:
        logits = base(**inputs).logits
    if len(given) != 1:
        raise ValueError(f"its head ran {len(given)} times in one forward")
    tolerance = 1e-4 if logits.dtype in (torch.float32, torch.float64) and given[0].dtype == logits.dtype else 3e-2
    return given[0].float(), logits.float(), tolerance


def _is_sharded(model: nn.Module) -> bool:
    """Whether parameters are in parts, even if only between forwards: by FSDP, DeepSpeed or tensor parallelism."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    return bool(kinds & {"FSDPModule", "FullyShardedDataParallel"}) or is_in_pieces(*model.parameters())
