"""Builds the optimizer of a run from its arguments."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import logging
import math
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from posttrain.core.config import has_type, opt
from posttrain.core.distributed import deepspeed, environment
from posttrain.core.errors import ConfigError, did_you_mean, missing, require
from posttrain.core.optim import by_name
from posttrain.core.optim.layerwise import Layerwise
from posttrain.core.optim.lr_scheduler import plain

logger = logging.getLogger(__name__)


# ----------------------------------------------------------------------------------------------------------- arguments


@dataclass
class OptimizerArguments:
    """The arguments of the optimizer."""

    learning_rate: float = opt(5e-5, "Peak learning rate; larger steps learn faster, until they diverge.", min=0)
    optim: str = opt("adamw_torch_fused", "Optimizer, by name.", choices=by_name.OPTIMIZERS, old_flags=("adafactor",))
    optim_args: dict | str | None = opt(None, "Options of that optimizer: 'rank=64, scale=0.1', or a dict.")
    weight_decay: float = opt(
        0.0, "Share of each weight (no norm, no bias) subtracted per optimizer step, times the learning rate.", min=0
    )
    adam_beta1: float = opt(0.9, "Decay of the mean of gradients; nearer 1 averages over more steps.", min=0, below=1)
    adam_beta2: float = opt(0.999, "Decay of the mean of squared gradients; nearer 1, slower to react.", min=0, below=1)
    adam_epsilon: float = opt(1e-8, "Added to the root of the squared gradients; larger damps small ones.", min=0)
    optim_target_modules: list[str] | None | str = opt(  # in this order, HfArgumentParser takes several words
        None,
        "Linear layers that GaLore, APOLLO or Muon train: 'all-linear', a regular expression, or names or parts of "
        "them.",
    )
    loraplus_lr_ratio: float | None = opt(
        None,
        "LoRA+: learning rate of the B matrices of LoRA, which begin at 0, as a multiple of learning_rate; papers use "
        "16.",
        above=0,
    )
    max_grad_norm: float | None = opt(
        1.0, "Norm to which larger gradients are scaled down; None or 0: no clipping.", min=0, max=math.inf
    )

    def _problems(self) -> Iterator[str]:
        name = plain(self.optim)
        if name not in by_name.OPTIMIZERS:
            if name in by_name.REFUSED:
                yield f"optim={name!r} of pytorch-optimizer {by_name.REFUSED[name]}"
            return
        yield from _option_problems(name, self.optim_args)
        if name.startswith(("galore_", "apollo_")) and self.optim_target_modules is None:
            yield (
                f"optim={name!r} needs optim_target_modules, the linear layers to project; set 'all-linear' for all "
                "of them"
            )
        targets = self.optim_target_modules or []
        for target in [targets] if isinstance(targets, str) else targets:
            try:
                re.compile(target)
            except (re.error, TypeError) as error:
                yield f"optim_target_modules: {target!r} is no regular expression ({error}); write '.*' for any text"


#: The arguments that an optimizer is made with.
OF_OPTIMIZER = tuple(f.name for f in dataclasses.fields(OptimizerArguments) if f.name != "max_grad_norm")


def package_problems(args: Any) -> Iterator[ImportError | str]:
    """Problem: the package of the optimizer ``args.optim`` is not installed, or does not work here."""
    name = plain(args.optim)
    if (needs := by_name.package_of(name)) is not None:
        if error := missing(*needs, why=f"optim={name!r}"):
            yield error
        elif name == "stable_adamw" and (problem := by_name.stable_adamw_problem()):
            yield problem


def problems_with_others(args: Any) -> Iterator[str]:
    """Why the optimizer of `args`, a `TrainingArguments`, does not go with its other arguments, as sentences."""
    name, warmup = plain(args.optim), args.warmup_steps
    if name in ("lomo", "adalomo") or name.endswith("_layerwise"):
        yield from layerwise_problems(args, f"optim={name!r}")
    elif name in ("schedule_free_adamw", "schedule_free_sgd"):
        if isinstance(warmup, str) or (0 < warmup < 1 and args.max_steps <= 0):
            yield (
                f"optim={name!r} has its own warm-up, before the length of the run is known: set warmup_steps to "
                f"a number of steps instead of {warmup}, or set max_steps"
            )
    elif name.startswith("adamw_torch_") and parse_optim_args(args.optim_args).get("bf16_stochastic_round"):
        if environment.world_size() > 1:
            yield (
                "bf16_stochastic_round=True draws from the generator of dropout, which differs between processes, so "
                "their weights would too; set optim='adamw_bf16', or leave it out"
            )


def layerwise_problems(args: Any, chosen: str) -> Iterator[str]:
    """Why an optimizer that updates in the backward pass does not go with `args`; `chosen` is how it was given."""
    why = f"{chosen} updates in the backward pass, and"
    if args.gradient_accumulation_steps != 1:
        given = args.gradient_accumulation_steps
        yield f"{why} no gradient is left to accumulate: set gradient_accumulation_steps=1 (it is {given})"
    if args.auto_find_batch_size:
        yield f"{why} cannot make up for a smaller batch by accumulation: set auto_find_batch_size=False"
    if args.fp16:
        yield f"{why} would use gradients that still carry the loss scale of fp16: set bf16=True instead"
    if environment.world_size() > 1:
        name = plain(args.optim)
        alternative = f"; use {name.removesuffix('_layerwise')!r}" if name.endswith("_layerwise") else ""
        yield f"{why} before gradients are averaged over the {environment.world_size()} processes{alternative}"


def parse_optim_args(text: dict[str, Any] | str | None) -> dict[str, Any]:
    """``"rank=64, proj_type=std"`` as ``{"rank": 64, "proj_type": "std"}``. A dict is returned unchanged. Raises a
    `ValueError` where a part is not of the form ``key=value``.
    """
    if not text or isinstance(text, dict):
        return text or {}
    options: dict[str, Any] = {}
    for part in re.split(r",(?![^(\[]*[)\]])", text):  # not at commas within brackets
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not key or not equals or not value:
            raise ValueError(f"optim_args={text!r}: {part.strip()!r} is not of the form key=value")
        options[key] = _literal(value)
    return options


def _literal(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _options(factory: by_name.Factory) -> tuple[dict[str, inspect.Parameter], bool]:
    """The options of a factory, and whether it takes others too."""
    parameters = inspect.signature(factory, eval_str=True).parameters.values()
    options = {option.name: option for option in parameters if option.kind is option.KEYWORD_ONLY}
    return options, any(option.kind is option.VAR_KEYWORD for option in parameters)


FIELDS = {"lr": "learning_rate", "betas": "adam_beta1 and adam_beta2", "beta1": "adam_beta1", "beta2": "adam_beta2"}
FIELDS |= {"eps": "adam_epsilon", "weight_decay": "weight_decay"}


def _option_problems(name: str, optim_args: Any) -> Iterator[str]:
    try:
        given = parse_optim_args(optim_args)
    except ValueError as error:
        yield str(error)
        return
    known, takes_others = _options(by_name.OPTIMIZERS[name])
    for key, value in given.items():
        if key in known:
            allowed = get_args(known[key].annotation) or (known[key].annotation,)
            if inspect.Parameter.empty not in allowed and not has_type(value, allowed):
                kinds = " or ".join(kind.__name__ for kind in allowed if kind is not types.NoneType)
                yield f"optim_args: {key}={value!r} must be of type {kinds}"
        elif not takes_others or key in ("lr", "weight_decay"):
            takes = "" if takes_others else f", which takes {', '.join(known) or 'none'}"
            field = f"; set {FIELDS[key]} instead" if key in FIELDS else did_you_mean(key, known)
            yield f"optim_args: {key!r} is not an option of optim={name!r}{takes}{field}"


def register(name: str) -> Callable[[by_name.Factory], by_name.Factory]:
    """Decorator: add a factory, ``(args, model, *, option=default) -> (class, arguments)``, as ``optim=name``."""

    def add(factory: by_name.Factory) -> by_name.Factory:
        by_name.OPTIMIZERS[name] = factory
        return factory

    return add


# ----------------------------------------------------------------------------------------------------- which parameters

_NORM_CLASS = re.compile(r"norm(\dd)?$")
_NO_DECAY_NAME = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")


def decay_parameter_names(model: nn.Module) -> list[str]:
    """Names of the parameters that weight decay shrinks, in the order of the model; embeddings are among them.

    Left out are biases and the weights of normalisation layers, known by their class or their name. A tied weight
    appears under each of its names.
    """
    modules = model.named_modules(remove_duplicate=False)
    norms = {name for name, module in modules if name and _NORM_CLASS.search(type(module).__name__.lower())}
    return [
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if name.rpartition(".")[0] not in norms and not _NO_DECAY_NAME.search(name.lower())
    ]


def parameter_groups(
    model: nn.Module, decay_names: list[str], weight_decay: float, rate_of_b: float | None = None
) -> list[dict[str, Any]]:
    """Two groups of trainable parameters in the order of the model: those that decay, and those that do not.

    With `rate_of_b`, a learning rate, the B matrices of LoRA are a third, which decays (LoRA+, Hayou et al. 2024,
    https://arxiv.org/abs/2402.12354). Raises a `ConfigError` where `rate_of_b` is given, and there are no such
    matrices.
    """
    decaying, trainable = set(decay_names), [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    second = {n for n, _ in trainable if rate_of_b is not None and {"lora_B", "lora_embedding_B"} & {*n.split(".")}}
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in trainable if n in decaying and n not in second], "weight_decay": weight_decay},
        {"params": [p for n, p in trainable if n not in decaying and n not in second], "weight_decay": 0.0},
    ]
    if rate_of_b is None:
        return groups
    if not second:
        raise ConfigError("optim", ["loraplus_lr_ratio is for LoRA, and the model has none; pass a peft_config"])
    params = [p for n, p in trainable if n in second]
    return [*groups, {"params": params, "weight_decay": weight_decay, "lr": rate_of_b, "name": "lora_B"}]


# ------------------------------------------------------------------------------------------------------------- building


def optimizer_class_and_kwargs(args: Any, model: nn.Module | None = None) -> by_name.ClassAndArguments:
    """The optimizer class that ``args.optim`` names, and its arguments but for the parameters. Raises a `ConfigError`
    where there is no such optimizer, or these arguments cannot work, and an `ImportError` where it needs a library that
    is not installed.

    Args:
        args: a `posttrain.core.TrainingArguments`.
        model: needed by optimizers that treat layers differently.
    """
    name = plain(args.optim)
    problems = [*OptimizerArguments._problems(args), *problems_with_others(args)]
    if name not in by_name.OPTIMIZERS:
        near = did_you_mean(name, by_name.OPTIMIZERS)
        problems = [f"optim={name!r} is not one of {', '.join(by_name.OPTIMIZERS)}{near}"]
    if problems:
        raise ConfigError("optim", problems)
    return by_name.OPTIMIZERS[name](args, model, **parse_optim_args(args.optim_args))


def build(
    model: nn.Module,
    args: Any,
    decay_names: list[str] | None = None,
    class_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
) -> torch.optim.Optimizer:
    """An optimizer of the trainable parameters of `model`. Raises a `ConfigError` as `optimizer_class_and_kwargs`, or
    where nothing in the model is trainable.

    Args:
        args: a `posttrain.core.TrainingArguments`.
        decay_names: parameters that weight decay shrinks; None: `decay_parameter_names`.
        class_and_kwargs: an optimizer class and its arguments, instead of the one in `args`. ``"params"`` or
            ``"model"`` among the arguments replaces the usual two parameter groups. A class that is no optimizer is
            created and then called with the model and the arguments.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("optim", ["no parameter of the model requires a gradient, so there is nothing to train"])
    optimizer_class, kwargs = class_and_kwargs or optimizer_class_and_kwargs(args, model)
    if args.optim_target_modules and plain(args.optim) in by_name.WITHOUT_TARGETS:
        logger.warning(
            f"optim={plain(args.optim)!r} trains all layers alike, so optim_target_modules="
            f"{args.optim_target_modules!r} has no effect. Leave it out, or choose an optimizer that treats those "
            "layers apart: galore_adamw, apollo_adamw or muon."
        )
    kwargs = dict(kwargs)
    is_optimizer = isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    given = [kwargs.pop(name) for name in ("params", "model", "optimizer_dict") if is_optimizer and name in kwargs]
    ratio = args.loraplus_lr_ratio
    if ratio is not None and (given or not is_optimizer):
        what = f"loraplus_lr_ratio={ratio} has no effect on an optimizer that is given its own parameters"
        raise ConfigError("optim", [f"{what}; leave it out, or set the learning rate of its groups"])
    if not is_optimizer:
        factory: Any = optimizer_class
        return factory()(model, **kwargs)
    if decay_names is None:
        decay_names = decay_parameter_names(model)
    rate_of_b = None if ratio is None else ratio * args.learning_rate
    params = given[0] if given else parameter_groups(model, decay_names, args.weight_decay, rate_of_b)
    if not given and deepspeed.is_asked_for(args.deepspeed):
        params = [group for group in params if group["params"]]  # it drops empty groups, which the schedule counts
    if optimizer_class is torch.optim.AdamW and kwargs.get("fused"):
        optimizer_class = OneKernelAdamW
    optimizer = optimizer_class(params, **kwargs)
    if kwargs.get("optim_bits") == 8:
        _keep_embeddings_in_32_bits(model, optimizer)
    _explain(optimizer, args)
    return optimizer


def _keep_embeddings_in_32_bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Their gradients are too uneven for 8-bit state: Dettmers et al. 2022, Sec. 2.3."""
    kind = require("bitsandbytes.optim", "posttrain-core[quantization]").GlobalOptimManager
    manager = kind.__new__(kind)  # that of the process knows weights by their place, also those of other models
    manager.initialize()
    workers = optimizer.workers() if isinstance(optimizer, Layerwise) else []
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight.requires_grad:
            manager.override_config(module.weight, key_value_dict={"optim_bits": 32})
            if not workers:  # each of their parameters is the first of an optimizer
                manager.register_module_override(module, "weight", {"optim_bits": 32})
    for each in (optimizer, *workers):
        each.mng = manager


def _explain(optimizer: torch.optim.Optimizer, args: Any) -> None:
    """Log how the parameters were divided, and settings that have no effect."""
    counts = [f"{sum(p.numel() for p in group['params']):,}" for group in optimizer.param_groups]
    is_low_rank = any("rank" in group for group in optimizer.param_groups)  # the user chose which layers
    level = logging.INFO if is_low_rank else logging.DEBUG
    logger.log(level, "%s trains %s parameters, by group.", type(optimizer).__name__, " + ".join(counts))
    name, schedule = plain(args.optim), plain(args.lr_scheduler_type)
    if isinstance(optimizer, Layerwise) and args.max_grad_norm:
        logger.warning(
            f"optim={name!r} uses each gradient up in the backward pass, so max_grad_norm={args.max_grad_norm} has no "
            "effect; set it to None."
        )
    if name.startswith("schedule_free_") and schedule != "constant":
        logger.warning(
            f"optim={name!r} replaces a schedule, but lr_scheduler_type={schedule!r} changes its learning rate too; "
            "set 'constant'."
        )


def check_given_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Reject a user's optimizer that would train nothing. Raises a `ValueError` where it holds none of the parameters
    of `model` that are trained.
    """
    held = {id(parameter) for group in getattr(optimizer, "param_groups", []) for parameter in group["params"]}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if held and trained and not any(id(parameter) in held for parameter in trained):
        raise ValueError(
            f"The optimizer that was given ({type(optimizer).__name__}) holds none of the parameters that are "
            "trained, so nothing would be learned: it was made from another model, or before this one got its "
            "adapters or was replaced. Make it from trainer.model.parameters() and set trainer.optimizer, or pass "
            "optimizer_cls_and_kwargs."
        )


def check_given_schedule(scheduler: Any, optimizer: Any) -> None:
    """Reject a user's schedule that was made for another optimizer. Raises a `ValueError` where it was made for another
    optimizer than `optimizer`.
    """
    its = getattr(scheduler, "optimizer", None)
    groups = getattr(its, "param_groups", None)
    if its is not optimizer and groups is not None and groups is not getattr(optimizer, "param_groups", None):
        raise ValueError(
            f"The lr_scheduler that was given ({type(scheduler).__name__}) was made for another optimizer "
            f"({type(its).__name__}) than the one that trains ({type(optimizer).__name__}), so no learning rate "
            "would follow it. Give both, as optimizers=(optimizer, lr_scheduler) or as trainer.optimizer and "
            "trainer.lr_scheduler, or override create_scheduler."
        )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """About how many bytes the state of `optimizer` will have: a copy of the parameters for each moment."""
    total = 0
    for group in optimizer.param_groups:
        moments = 2 if "betas" in group else 1 if group.get("momentum") else 0
        total += moments * sum(parameter.nbytes for parameter in group["params"])
    return total


def named_rates(optimizer: torch.optim.Optimizer, rates: list[Any]) -> dict[str, float]:
    """``learning_rate/<name>`` of each group of parameters, by its ``name`` or number; empty where all are equal.
    `rates`: one for each group; those that are tensors are left out, for reading one may wait for the device.
    """
    groups = zip(optimizer.param_groups, rates, strict=False)
    named = {f"learning_rate/{g.get('name', i)}": r for i, (g, r) in enumerate(groups) if isinstance(r, float)}
    return named if len(set(named.values())) > 1 else {}


class OneKernelAdamW(torch.optim.AdamW):
    """Fused AdamW whose groups share one kernel as long as their options are equal.

    Parameters are grouped by whether they decay. Without weight decay, the default, the groups differ in nothing, and a
    kernel for each would be a twentieth of a small model's step. State and groups are those of `torch.optim.AdamW`.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        # torch wraps the step of each class in hooks and a profiler's range when it first makes an instance. This step
        # is wrapped already; AdamW's own, where a plain AdamW was made too, would wrap it a second time.
        step: Any = torch.optim.AdamW.step
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        groups = self.param_groups
        first, *others = groups
        pairs = [(value, group.get(name)) for name, value in first.items() if name != "params" for group in others]
        # A learning rate in a tensor is compared by identity: its value would have to come from the device.
        if not (others and all(a is b or not (isinstance(a, torch.Tensor) or a != b) for a, b in pairs)):
            return step(self, closure)
        self.param_groups = [{**first, "params": [p for group in groups for p in group["params"]]}]
        try:
            return step(self, closure)
        finally:
            self.param_groups = groups
