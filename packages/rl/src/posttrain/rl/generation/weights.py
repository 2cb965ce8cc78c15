"""Exports weights for engines with a copy of the model, and verifies the weight sync."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

from posttrain.core.distributed.sharding import is_in_pieces, is_sharded, whole, whole_shape
from posttrain.core.losses import selective_log_softmax
from posttrain.core.models.wrapping import PretrainedModel, base_model, evaluating, is_peft_model, plain_classes, unwrap
from posttrain.lm.attention.document_positions import invocation_problem
from posttrain.rl.generation.protocol import Completions, Sampling
from posttrain.rl.generation.sampling import is_float32

LARGEST_GAP = 0.1
"""Mean difference of log-probabilities from which a weight sync counts as failed."""
LARGEST_GAP_FLOAT32 = 0.01
"""The same where trainer and engine both compute in float32."""
PROBE = Sampling(8, temperature=2.0)
"""Sampling options of the check: the temperature separates scaled from unscaled log-probabilities."""


BESIDE = (
    *"use_dora modules_to_save trainable_token_indices target_parameters lora_bias alpha_pattern rank_pattern".split(),
    *"layer_replication exclude_modules".split(),
)
"""Options of LoRA that change more than vLLM reads from a file of adapters."""
PLAIN_STARTS = (True, False, "gaussian", "orthogonal")
"""Values of ``init_lora_weights`` that leave the weights below as they are."""


class Written(NamedTuple):
    """A completion: its tokens, their log-probabilities, and whether it ended before the limit.

    syncs: of each token, the number of the sync with which the weights that wrote it came. routes: with which experts
    it was read, as in `Completions`. Each None if unknown.
    """

    ids: list[int]
    logps: list[float] | None
    finished: bool
    syncs: list[int] | None = None
    routes: torch.Tensor | None = None


def completions(written: Sequence[Written], with_logps: bool) -> Completions:
    """`written` as an engine returns it; without what one completion does not have."""
    columns = ([one[place] for one in written] for place in range(5))
    known: Any = (None if any(value is None for value in column) else column for column in columns)
    ids, logps, finished, syncs, routes = known
    return Completions(ids, logps if with_logps else None, finished, versions=syncs, routes=routes)


class OneByOne:
    """``(name, tensor)`` one by one. If they are sharded, all processes gather them together, each of them in turn."""

    _going: Iterator[tuple[str, torch.Tensor]] | None = None

    def _each(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._going = self._each()
        return self._going

    def gather_rest(self) -> None:
        """Go through what an iteration has left, or all if there was none: other processes wait for this one."""
        for _ in self if self._going is None else self._going:
            pass


class Weights(OneByOne):
    """The weights of a model as an engine loads them: ``(name, tensor)`` one by one, with adapters merged into copies.

    Names and shapes are those of a saved checkpoint of the model below all adapters, which engines read: each expert of
    a mixture by itself. At most one layer is gathered or copied at a time, and the model does not change. If weights
    are sharded, every process must iterate over all of them.

    Raises:
        ValueError: a weight is quantized, and cannot be sent as the engine would read it; or an adapter has changed one
            of two weights that are tied.
    """

    def __init__(self, model: nn.Module) -> None:
        refuse_virtual_tokens(model, "vLLM")
        self.base = base_model(model)
        self._parts = _each_once(_parts(self.base))
        weights = {part.name: part.weight for part in self._parts}
        shapes = {n: torch.empty(whole_shape(w), dtype=w.dtype, device="meta") for n, w in weights.items()}
        self._converts = saved_differently(self.base, shapes)
        saved = (one for name, shape in shapes.items() for one in self._saved(name, shape))
        self.facts = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in saved]
        """(name, dtype, shape) of each, in order, found without gathering."""

    def __len__(self) -> int:
        return len(self.facts)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.base.parameters()).device

    @property
    def are_in_pieces(self) -> bool:
        """Whether the weights are sharded."""
        return is_in_pieces(*self.base.parameters())

    @torch.no_grad()
    def _each(self) -> Iterator[tuple[str, torch.Tensor]]:
        for layer, parts in groupby(self._parts, key=lambda part: part.layer):  # those of one layer are adjacent
            merged = {} if layer is None else _merged(layer)
            for part in parts:
                weight = whole(part.weight).detach() if layer is None else merged[part.of_layer].to(part.weight.dtype)
                yield from self._saved(part.name, weight)

    def _saved(self, name: str, weight: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """`weight` as a checkpoint holds it: under its name there, or in several parts."""
        return as_saved(self.base, {name: weight}).items() if self._converts else [(name, weight)]


class AdapterWeights(OneByOne):
    """The LoRA adapter of `model` as peft writes it to a file: megabytes instead of the whole model."""

    def __init__(self, model: nn.Module) -> None:
        peft_model = unwrap(model)
        (active,) = peft_model.active_adapters
        self.config: Any = peft_model.peft_config[active]
        self._named = {
            name.replace(f".{active}.", "."): parameter
            for name, parameter in peft_model.named_parameters()
            if any(part.startswith("lora_") for part in name.split(".")) and active in name.split(".")
        }

    @staticmethod
    def are_taken(model: nn.Module, max_rank: int | None) -> bool:
        """Whether servers that take adapters of `max_rank` (None: none) serve that of `model` as it is; else `Weights`
        are sent, its product with those below.
        """
        if max_rank is None or not is_peft_model(model):
            return False
        peft_model = unwrap(model)
        (config, *others) = peft_model.peft_config.values()
        if others or config.peft_type != "LORA" or config.r > max_rank:
            return False
        plain = config.init_lora_weights in PLAIN_STARTS and config.bias == "none"
        layers: list[Any] = [module for module in peft_model.modules() if hasattr(module, "lora_A")]
        plain = plain and not any(vars(config)[name] for name in BESIDE)
        return plain and all(type(layer.get_base_layer()) is nn.Linear for layer in layers)

    @property
    def are_in_pieces(self) -> bool:
        """Whether the weights are sharded."""
        return is_in_pieces(*self._named.values())

    @torch.no_grad()
    def _each(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._named.items():
            yield name, whole(parameter).detach()


def refuse_virtual_tokens(model: nn.Module, engine: str) -> None:
    """Raise ValueError if `model` has an adapter that is no change of its weights, which `engine` would leave out."""
    configs = unwrap(model).peft_config.values() if is_peft_model(model) else ()
    names = [type(config).__name__ for config in configs if config.is_prompt_learning]
    alone = f"{engine} generates with the model's weights alone"
    if names:
        raise ValueError(
            f"{alone}, without the virtual tokens of {names[0]}. Use the local engine, or an adapter such as LoRA."
        )
    if invocation_problem(model):
        raise ValueError(
            f"{alone}, in which an adapter with alora_invocation_tokens cannot begin in the middle of a text. Use the "
            "local engine, or leave them out."
        )


def as_saved(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`weights` of `model` under the names and in the shapes of its checkpoints."""
    from transformers.core_model_loading import revert_weight_conversion

    with plain_classes(model):
        return revert_weight_conversion(model, weights)


def saved_differently(model: Any, shapes: dict[str, torch.Tensor]) -> bool:
    """Whether checkpoints of `model` hold its weights under other names or in other shapes. Raise ValueError if they
    hold several weights as one, so that no weight can be sent by itself.
    """

    def sizes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in tensors.items()}

    together = sizes(as_saved(model, shapes))
    if together == sizes(shapes):
        return False
    alone: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        alone |= as_saved(model, {name: shape})
    if together != sizes(alone):
        raise ValueError(
            f"Checkpoints of {type(model).__name__} hold several of its weights as one, and weights are sent to vLLM "
            "one by one. Leave use_vllm out."
        )
    return True


class _Part(NamedTuple):
    """A weight: `of_layer` of the adapter layer `layer`, or the plain tensor."""

    name: str
    weight: torch.Tensor
    layer: PretrainedModel | None = None
    of_layer: str = ""


def _parts(module: nn.Module, name: str = "") -> Iterator[_Part]:
    """The weights below `module`, in the order of ``named_parameters``; tied ones as often as they are used."""
    if any(kind.__name__ == "AuxiliaryTrainingWrapper" for kind in type(module).__mro__):
        module = _in_use(module)  # `modules_to_save`, or trainable tokens: a wrapper of peft that trains a replacement
    layer = module if _is_adapted(module) else None
    own = module.named_parameters(recurse=False) if layer is None else layer.get_base_layer().named_parameters()
    for path, weight in own:
        full_name = f"{name}.{path}".lstrip(".")
        if not weight.is_floating_point():
            raise ValueError(
                f"{full_name} is quantized ({weight.dtype}), and vLLM takes whole weights. Load the model without a "
                "quantization_config, or leave use_vllm out."
            )
        yield _Part(full_name, weight, layer, path)
    for child, one in module.named_children() if layer is None else ():
        yield from _parts(one, f"{name}.{child}".lstrip("."))


def _each_once(parts: Iterator[_Part]) -> list[_Part]:
    """`parts` without those that are tied to an earlier one, as engines that tie them expect."""
    kept: dict[int, _Part] = {}
    for part in parts:
        first = kept.setdefault(id(part.weight), part)
        if first is part or (first.layer is None and part.layer is None):
            continue
        if not all(hasattr(one.layer, "trainable_tokens_delta") for one in (first, part)):  # these change both alike
            raise ValueError(
                f"{first.name} and {part.name} are one weight, and an adapter has changed one of them: vLLM does not "
                "support that. Leave both out of target_modules and modules_to_save, or load the model with "
                "tie_word_embeddings=False."
            )
    return list(kept.values())


def _in_use(wrapper: Any) -> nn.Module:
    """The module that `wrapper` calls."""
    if hasattr(wrapper, "token_adapter"):
        return wrapper.token_adapter
    active = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
    return wrapper.modules_to_save[active[0]] if active and not wrapper.disable_adapters else wrapper.original_module


def _is_adapted(module: nn.Module) -> TypeGuard[PretrainedModel]:
    """Whether `module` is a layer with adapters of peft, which can merge them."""
    return any(kind.__name__ == "BaseTunerLayer" for kind in type(module).__mro__) and hasattr(module, "base_layer")


def _merged(layer: PretrainedModel) -> dict[str, torch.Tensor]:
    """The weights of the layer below `layer` with its adapters merged into them, in float32, as a copy."""
    copies: dict[int, Any] = {id(p): nn.Parameter(whole(p).detach().float().clone(), False) for p in layer.parameters()}
    base = layer.get_base_layer()
    if is_sharded(base):  # by itself, as divided experts are; such a module cannot be copied
        copies[id(base)] = nn.Module()
        for name, parameter in base.named_parameters():
            copies[id(base)].register_parameter(name, copies[id(parameter)])
    copied = copy.deepcopy(layer, copies)  # what is in `copies` is not copied again
    for module in reversed(list(copied.modules())):  # inner ones first: adapters may be nested
        if _is_adapted(module):
            module.merge()
    return dict(copied.get_base_layer().named_parameters())


def any_prompt(model: nn.Module) -> list[int]:
    """Arbitrary token ids."""
    size = base_model(model).config.get_text_config().vocab_size
    return [(37 * place + 5) % size for place in range(8)]


@torch.no_grad()
def check(model: nn.Module, prompt: list[int], written: Written, scaled: bool, who: str, in_float32: bool) -> None:
    """Compare an engine's log-probabilities of a few generated tokens with those of `model`.

    Args:
        written: the engine's completion of `prompt`, with the options `PROBE`.
        scaled: whether the engine divides logits by the temperature first.
        who: the engine, for the message. in_float32: whether it computes in float32.

    Raises:
        ValueError: they differ by `LARGEST_GAP` or more on average, or in float32 by `LARGEST_GAP_FLOAT32`.
    """
    ids, logps, device = written.ids, written.logps, next(model.parameters()).device
    if logps is None:
        raise ValueError(f"{who} returns no log-probabilities, so the weight sync cannot be verified.")
    with evaluating(model):
        logits = model(input_ids=torch.tensor([prompt + ids], device=device)).logits[0, len(prompt) - 1 : -1]
    heat = PROBE.temperature if scaled else 1.0
    mine = selective_log_softmax(logits.float() / heat, torch.tensor(ids, device=device))
    gap = float((mine.cpu() - torch.tensor(logps, dtype=torch.float32)).abs().nanmean())  # NaN without a token
    if not gap < (LARGEST_GAP_FLOAT32 if in_float32 and is_float32(base_model(model)) else LARGEST_GAP):
        raise ValueError(
            f"After the weights were sent, log-probabilities of {who} differ from the trainer's by {gap:.2g} on "
            "average: it has other weights or another model. Serve the model that is being trained."
        )
