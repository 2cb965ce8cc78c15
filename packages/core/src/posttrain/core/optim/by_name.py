"""The registry of optimizers, and the selection of matrices for low-rank optimizers.

A factory is a function ``(args, model, *, option=default, ...) -> (class, arguments)``. Its keyword-only parameters are
the options that `optim_args` may set, with their types and defaults; libraries are imported when it is called.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import re
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from posttrain.core.distributed import sharding
from posttrain.core.errors import ConfigError, did_you_mean, require
from posttrain.core.models.wrapping import output_embedding
from posttrain.core.optim import lr_scheduler
from posttrain.core.optim.adam import BF16AdamW, GrokAdamW
from posttrain.core.optim.layerwise import Layerwise
from posttrain.core.optim.low_rank import SIDES, Apollo, GaLore, galore
from posttrain.core.optim.lr_scheduler import plain
from posttrain.core.optim.muon import MuonWithAdamW
from posttrain.core.optim.resumable import adafactor_class, torchao_adamw

logger = logging.getLogger(__name__)

ClassAndArguments = tuple[type[torch.optim.Optimizer], dict[str, Any]]
Factory = Callable[..., ClassAndArguments]
PYTORCH_OPTIMIZER = "pytorch-optimizer>=4.1"
TORCHDISTX = "torchdistx @ git+https://github.com/pytorch/torchdistx"


# ------------------------------------------------------------------------------------------------ which matrices

_HEAD_NAME = re.compile(r"(^|\.)(lm_head|embed_out|score|classifier|qa_outputs|v_head)(\.|$)")


def target_matrices(model: nn.Module, targets: str | list[str]) -> list[torch.Tensor]:
    """Trainable weights of the linear layers that `targets` selects. `targets`: ``"all-linear"``; or a regular
    expression for whole module names; or a list whose entries are each a name, a part of one, or such an expression.
    Raises a `ConfigError` where nothing is selected.
    """
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    chosen = {name: m.weight for name, m in linear.items() if m.weight.requires_grad and _selects(targets, name)}
    if not chosen:
        trainable = [name for name, module in linear.items() if module.weight.requires_grad]
        names = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in trainable))
        listed = ", ".join(names[:40]) + (", ..." if len(names) > 40 else "") or "none"
        wrong = f"optim_target_modules={targets!r} selects no trainable linear layer; those of the model are {listed}"
        raise ConfigError("optim", [wrong])
    for target in [] if isinstance(targets, str) else targets:
        if not any(_selects([target], name) for name in chosen):
            logger.warning("optim_target_modules: %r selects no trainable linear layer of this model.", target)
    logger.info("optim_target_modules selects %d of %d linear layers.", len(chosen), len(linear))
    return list(chosen.values())


def _selects(targets: str | list[str], name: str) -> bool:
    if isinstance(targets, str):
        return _is_all(targets) or re.fullmatch(targets, name) is not None
    if any(map(_is_all, targets)):  # as a command line gives it
        return True
    return any(target in name or re.fullmatch(target, name) is not None for target in targets)


def _is_all(target: str) -> bool:
    return target.replace("_", "-") == "all-linear"


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Trainable 2-D weights that are neither an embedding nor the layer that makes the output."""
    outer = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    outer.add(id(getattr(output_embedding(model), "weight", None)))
    return [
        p
        for name, p in model.named_parameters()
        if p.requires_grad and p.dim() == 2 and id(p) not in outer and not _HEAD_NAME.search(name)
    ]


# --------------------------------------------------------------------------------------------------------- factories


def _rate(args: Any) -> dict[str, Any]:
    return {"lr": args.learning_rate}


def _momentum(args: Any) -> dict[str, Any]:
    return _rate(args) | {"betas": (args.adam_beta1, args.adam_beta2)}


def _adam(args: Any) -> dict[str, Any]:
    return _momentum(args) | {"eps": args.adam_epsilon}


def _taking(make: Callable[..., ClassAndArguments], options: dict[str, Any]) -> Factory:
    """The factory `make` with a signature that lists `options`, defaults of the type that the option has; that of None
    is a number, or true or false.
    """
    kind, number = inspect.Parameter.KEYWORD_ONLY, float | bool | None
    types = {name: number if value is None else type(value) for name, value in options.items()}
    listed = [inspect.Parameter(name, kind, default=options[name], annotation=types[name]) for name in options]
    vars(make)["__signature__"] = inspect.Signature([*list(inspect.signature(make).parameters.values())[:2], *listed])
    return make


def _plain(
    kind: Any, base: Callable[[Any], dict[str, Any]], fixed: dict[str, Any] | None = None, **options: Any
) -> Factory:
    """The factory of the class `kind`, or what that returns: it gets `base` of the arguments, `fixed` and `options`."""

    def make(args: Any, model: Any, **given: Any) -> ClassAndArguments:
        return kind if isinstance(kind, type) else kind(), base(args) | (fixed or {}) | options | given

    return _taking(make, options)


def _own_options(kind: type) -> dict[str, Any]:
    """The options of one of our classes that no argument of a run sets, with their defaults."""
    known = ("params", "lr", "betas", "eps", "matrices", "low_rank_parameters", "kwargs", "adam")
    return {name: option.default for name, option in inspect.signature(kind).parameters.items() if name not in known}


def _apart(
    factory: Factory,
    options: dict[str, Any],
    wrap: Callable[[Any], type] = lambda kind: kind,
    name: str = "low_rank_parameters",
    **choices: Any,
) -> Factory:
    """An optimizer that trains the matrices of `optim_target_modules`, or without it all that are neither embedding
    nor head, apart from the rest: `wrap` of the class that `factory` gives. `choices` are the values of options.
    """

    def make(args: Any, model: Any, **given: Any) -> ClassAndArguments:
        for option, known in choices.items():
            if (value := (options | given)[option]) not in known:
                listed = f"{', '.join(known)}{did_you_mean(value, known)}"
                raise ConfigError("optim_args", [f"{option}={value!r} is not one of {listed}"])
        if model is None:
            raise TypeError(f"optim={plain(args.optim)!r} depends on the layers of the model; pass it too")
        targets, (kind, kwargs) = args.optim_target_modules, factory(args, model)
        matrices = hidden_matrices(model) if targets is None else target_matrices(model, targets)
        return wrap(kind), kwargs | {name: matrices} | options | given

    return _taking(make, options)


def _galore(name: str) -> Factory:
    """GaLore over the optimizer of that name."""
    return _apart(lambda args, model: OPTIMIZERS[name](args, model), _own_options(GaLore), galore, proj_type=SIDES)


def layerwise(factory: Factory) -> Factory:
    """The same optimizer, stepped in the backward pass."""

    @wraps(factory)
    def make(args: Any, model: Any, **options: Any) -> ClassAndArguments:
        optimizer_class, kwargs = factory(args, model, **options)
        return Layerwise, {"optimizer_class": optimizer_class} | kwargs

    return make


# --------------------------------------------------------------------------------------------------------- by libraries


def _of(module: str, package: str, name: str, why: str = "optim") -> Any:
    """The class `name` of a library that is imported now."""
    return getattr(require(module, package, why=why), name)


_bitsandbytes = partial(_of, "bitsandbytes.optim", "posttrain-core[quantization]")


def _ademamix(bits: int, paged: bool = False) -> Factory:
    """Pagliardini et al. 2024, https://arxiv.org/abs/2409.03137: AdamW with a second, slow momentum."""
    options = dict.fromkeys(("beta1", "beta2", "eps", "t_alpha", "t_beta3")) | {"beta3": 0.9999, "alpha": 5.0}

    def make(args: Any, model: Any, **given: Any) -> ClassAndArguments:
        own = {"beta1": args.adam_beta1, "beta2": args.adam_beta2, "eps": args.adam_epsilon}
        taken = {name: own.get(name) if value is None else value for name, value in (options | given).items()}
        betas = tuple(taken.pop(f"beta{number}") for number in (1, 2, 3))
        return _bitsandbytes("AdEMAMix"), _rate(args) | taken | {"betas": betas, "optim_bits": bits, "is_paged": paged}

    return _taking(make, options)


def schedule_free(
    kind: str, args: Any, model: Any, *, r: float = 0.0, weight_lr_power: float = 2.0
) -> ClassAndArguments:
    """Defazio et al. 2024, https://arxiv.org/abs/2405.15682: averaged weights instead of a decaying rate.

    The optimizer has its own warm-up (RAdam needs none) and has ``train()`` and ``eval()``: only after ``eval()`` does
    the model hold the averaged weights.
    """
    library = require("schedulefree", "schedulefree>=1.4", why="optim")
    kwargs = {"lr": args.learning_rate} if kind == "SGD" else _adam(args)
    if kind != "RAdam":
        kwargs["warmup_steps"] = lr_scheduler.warmup_steps(args, args.max_steps)
    kwargs |= {"weight_decay": args.weight_decay, "r": r, "weight_lr_power": weight_lr_power}
    return getattr(library, f"{kind}ScheduleFree"), kwargs


def stable_adamw_problem() -> str | None:
    """Why torch-optimi does not work here, as a sentence: it may ask Triton for a GPU's driver where there is none."""
    if importlib.util.find_spec("triton") is None or torch.accelerator.is_available():
        return None
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    try:
        importlib.import_module("optimi").StableAdamW([parameter], lr=1e-3).step()
    except RuntimeError as error:
        return (
            f"optim='stable_adamw' does not work on this machine: torch-optimi asks Triton for a GPU ({error}), and "
            "there is none; set optim='adamw_torch_fused', or remove Triton (pip uninstall triton)"
        )
    return None


def of_pytorch_optimizer(name: str, args: Any, model: Any, **options: Any) -> ClassAndArguments:
    """The class of that name in pytorch-optimizer, with its own defaults but for the learning rate and weight decay."""
    kind = require("pytorch_optimizer", PYTORCH_OPTIMIZER, why=f"optim={name!r}").load_optimizer(name)
    known = {n: o.default for n, o in inspect.signature(kind).parameters.items() if n not in ("params", "kwargs")}

    def is_set(field: str) -> bool:
        return bool(vars(args)[field] != type(args).__dataclass_fields__[field].default)

    given: dict[str, Any] = {"lr": args.learning_rate}
    given |= {"weight_decay": args.weight_decay} if args.weight_decay else {}
    given |= {"eps": args.adam_epsilon} if is_set("adam_epsilon") else {}
    if is_set("adam_beta1") or is_set("adam_beta2"):
        given["betas"] = args.adam_beta1, args.adam_beta2
        if len(own := known.get("betas", given["betas"])) != 2 and "betas" not in options:
            wrong = f"adam_beta1 and adam_beta2 are two, and optim={name!r} has betas={own}; set those in optim_args"
            raise ConfigError("optim", [wrong])
    if unknown := [option for option in {**given, **options} if option not in known]:
        raise ConfigError("optim", [f"optim={name!r} has no {', '.join(unknown)}; it takes {', '.join(known)}"])
    if "foreach" in known and model is not None and any(map(sharding.is_piece, model.parameters())):
        given["foreach"] = False  # torch has few of those kernels for pieces
    return kind, given | options


def anyprecision_adamw(args: Any, model: Any, **given: Any) -> ClassAndArguments:
    library = require("torchdistx.optimizers", TORCHDISTX, why="optim='adamw_anyprecision'")
    taken = {name: vars(torch)[v] if isinstance(v, str) else v for name, v in (_ANY_PRECISION | given).items()}
    return library.AnyPrecisionAdamW, _adam(args) | taken


def _bnb(name: str, base: Callable[[Any], dict[str, Any]], bits: int, paged: bool = False, **options: Any) -> Factory:
    """An optimizer with state in blocks of `bits`, Dettmers et al. 2022, https://arxiv.org/abs/2110.02861; `paged`, it
    moves to the CPU when the GPU is full. On the CPU nothing is paged.
    """
    fixed = {"optim_bits": bits} | ({} if name == "RMSprop" else {"is_paged": paged})
    return _plain(partial(_bitsandbytes, name), base, fixed, **options)


#: Of pytorch-optimizer, those that train any model by its gradients alone, and go on exactly from their state.
OF_PYTORCH_OPTIMIZER = (
    "accsgd adabelief adabound adadelta adagc adalite adam adamax adamc adamg adamod adamp adams adamwsn adan adanorm "
    "adapnm adasmooth adatam adopt aggmo aida amos ano apollodqn avagrad bcos came dadaptadam dadaptadan diffgrad "
    "dualadam exadam fadam flashadamw focus fromage grams grokfastadamw lamb laprop lars lion madgrad mars msvag nadam "
    "nero novograd padam pid pnm prodigy qhadam qhm racs radam ranger scion scionlight sgdp sgdsai sgdw signsgd "
    "simplifiedademamix sm3 soap srmm stableadamw swats tam tiger vsgd yogi"
).split()
#: Why its others are refused.
_REASONS = {
    "does not go on exactly from its state": "adashift alice conda dadaptadagrad dadaptlion dadaptsgd dash "
    "gravity kron magma rose sara scalableshampoo shampoo spam stablespam",
    "needs the loss or its second derivatives in a step": "adahessian alig emofact emolynx emonavi lbfgs sophiah",
    "needs the length of the run or of the data": "bsam ranger21",
    "treats layers by a mark on them; set 'muon'": "adago adamuon distributedmuon muonclip normuon spectralsphere",
    "treats layers by a mark on them; set 'galore_adamw' or 'apollo_adamw'": "apollo fira galore",
    "reads the layers of a model of its own": "adammini demo lorarite",
    "trains with other weights than the model's; set 'schedule_free_adamw'": "schedulefreeadamw schedulefreeradam "
    "schedulefreesgd splus",
    "breaks at a learning rate of 0, where a warm-up begins": "asgd ftrl",
    "does not follow the learning rate": "a2grad kate",
    "overflows in bfloat16": "adai",
    "is 'adamw_torch_fused'": "adamw",
}
REFUSED = {name: why for why, names in _REASONS.items() for name in names.split()}
_APOLLO = _apart(
    _plain(Apollo, _adam),
    _own_options(Apollo),
    proj=("random", "svd"),
    scale_type=("channel", "tensor"),
    proj_type=("std",),
)
_FACTORED: dict[str, Any] = {"clip_threshold": 1.0, "decay_rate": -0.8}
_ANY_PRECISION: dict[str, Any] = {"use_kahan_summation": False, "compensation_buffer_dtype": "bfloat16"}
_ANY_PRECISION |= {"momentum_dtype": "float32", "variance_dtype": "float32"}
_ROUNDED: dict[str, Any] = {"block_size": 256, "bf16_stochastic_round": False}
_ON = "that optimizer, which trains on {} only"
_MEAN_SQUARE: dict[str, Any] = {"momentum": 0.0, "alpha": 0.99, "eps": 1e-8}
OPTIMIZERS: dict[str, Factory] = {
    # Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101. Fused, one kernel for all parameters is twice as fast
    # as the loop, on the CPU too.
    "adamw_torch": _plain(torch.optim.AdamW, _adam, amsgrad=False),
    "adamw_torch_fused": _plain(torch.optim.AdamW, _adam, {"fused": True}, amsgrad=False),
    "adamw_bf16": _plain(BF16AdamW, lambda args: _adam(args) | {"seed": args.seed}, stochastic_rounding=True),
    "adamw_torch_xla": _plain(partial(_of, "torch_xla.amp.syncfree", "torch_xla", "AdamW", _ON.format("TPUs")), _adam),
    "adamw_torch_npu_fused": _plain(
        partial(_of, "torch_npu.optim", "torch-npu", "NpuFusedAdamW", _ON.format("Ascend NPUs")), _adam
    ),
    "adafactor": _plain(adafactor_class, _rate, scale_parameter=False, **_FACTORED, beta1=None),
    "adamw_anyprecision": _taking(anyprecision_adamw, _ANY_PRECISION),
    # Stochastic rounding lets weights in bfloat16 train without a float32 copy.
    "adamw_torch_4bit": _plain(partial(torchao_adamw, 4), _adam, **_ROUNDED),
    "adamw_torch_8bit": _plain(partial(torchao_adamw, 8), _adam, **_ROUNDED),
    "sgd": _plain(torch.optim.SGD, _rate, momentum=0.0, dampening=0.0, nesterov=False),
    "adagrad": _plain(torch.optim.Adagrad, _rate, lr_decay=0.0, eps=1e-10),
    "rmsprop": _plain(torch.optim.RMSprop, _rate, **_MEAN_SQUARE, centered=False),
    "muon": _apart(_plain(MuonWithAdamW, _adam), _own_options(MuonWithAdamW), name="matrices"),
    "adamw_bnb_8bit": _bnb("AdamW", _adam, 8),
    "adamw_8bit": _bnb("AdamW", _adam, 8),
    "paged_adamw_32bit": _bnb("AdamW", _adam, 32, paged=True),
    "paged_adamw_8bit": _bnb("AdamW", _adam, 8, paged=True),
    "ademamix": _ademamix(32),
    "ademamix_8bit": _ademamix(8),
    "paged_ademamix_32bit": _ademamix(32, paged=True),
    "paged_ademamix_8bit": _ademamix(8, paged=True),
    # Chen et al. 2023, https://arxiv.org/abs/2302.06675: the sign of a momentum. Needs a rate 3 to 10 times smaller.
    "lion_32bit": _bnb("Lion", _momentum, 32),
    "lion_8bit": _bnb("Lion", _momentum, 8),
    "paged_lion_32bit": _bnb("Lion", _momentum, 32, paged=True),
    "paged_lion_8bit": _bnb("Lion", _momentum, 8, paged=True),
    "rmsprop_bnb": _bnb("RMSprop", _rate, 32, **_MEAN_SQUARE),
    "rmsprop_bnb_32bit": _bnb("RMSprop", _rate, 32, **_MEAN_SQUARE),
    "rmsprop_bnb_8bit": _bnb("RMSprop", _rate, 8, **_MEAN_SQUARE),
    "galore_adamw": _galore("adamw_torch_fused"),
    "galore_adamw_8bit": _galore("adamw_8bit"),
    "galore_adafactor": _galore("adafactor"),
    "galore_adamw_layerwise": layerwise(_galore("adamw_torch")),
    "galore_adafactor_layerwise": layerwise(_galore("adafactor")),
    "galore_adamw_8bit_layerwise": layerwise(_galore("adamw_8bit")),
    "apollo_adamw": _APOLLO,
    "apollo_adamw_layerwise": layerwise(_APOLLO),
    "lomo": layerwise(_plain(torch.optim.SGD, _rate)),
    # Adafactor, with rates in proportion to the size of each parameter.
    "adalomo": layerwise(_plain(adafactor_class, _rate, {"scale_parameter": True}, **_FACTORED)),
    "grokadamw": _plain(GrokAdamW, _adam, **_own_options(GrokAdamW)),
    "schedule_free_radam": partial(schedule_free, "RAdam"),
    "schedule_free_adamw": partial(schedule_free, "AdamW"),
    "schedule_free_sgd": partial(schedule_free, "SGD"),
    # Wortsman et al. 2023, https://arxiv.org/abs/2304.13013: AdamW with Adafactor's clipping of updates.
    "stable_adamw": _plain(
        partial(_of, "optimi", "torch-optimi", "StableAdamW", "optim='stable_adamw'"),
        lambda args: _adam(args) | {"weight_decay": args.weight_decay},
        **dict.fromkeys(("max_lr", "kahan_sum")),
        decouple_lr=False,
    ),
    **{name: partial(of_pytorch_optimizer, name) for name in OF_PYTORCH_OPTIMIZER},
}
#: Those that train all layers alike. One that a user adds may read `optim_target_modules`.
WITHOUT_TARGETS = frozenset(n for n in OPTIMIZERS if n != "muon" and not n.startswith(("galore_", "apollo_")))


def package_of(name: str) -> tuple[str, str] | None:
    """(module, what pip installs) that the optimizer `name` comes from; None for those of torch and our own."""
    if name.startswith("schedule_free_"):
        return "schedulefree", "schedulefree>=1.4"
    if name in ("adamw_torch_4bit", "adamw_torch_8bit"):
        return "torchao", "torchao>=0.11"
    if name in OF_PYTORCH_OPTIMIZER:
        return "pytorch_optimizer", PYTORCH_OPTIMIZER
    of_bitsandbytes = ("paged_", "ademamix", "lion_", "rmsprop_bnb", "adamw_bnb", "adamw_8bit", "galore_adamw_8bit")
    if name.startswith(of_bitsandbytes):
        return "bitsandbytes", "posttrain-core[quantization]"
    others = {"stable_adamw": ("optimi", "torch-optimi"), "adamw_torch_npu_fused": ("torch_npu", "torch-npu")}
    others |= {"adamw_torch_xla": ("torch_xla", "torch_xla"), "adamw_anyprecision": ("torchdistx", TORCHDISTX)}
    return others.get(name)
