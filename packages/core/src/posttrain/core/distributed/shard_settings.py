"""How a model is divided over processes, by arguments or a launcher: sizes of groups, and the settings of FSDP."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from posttrain.core.distributed.environment import is_true
from posttrain.core.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded."""

    reshard_after_forward: bool = True  # free a layer's weights after its forward; False is faster, with more memory
    cpu_offload: bool = False  # keep the shards, their gradients and the optimizer state in host memory
    activation_checkpointing: bool = False
    wrap: str = "transformer"  # units are layers, modules of `min_num_params` ("size") or the model ("none")
    layer_classes: tuple[str, ...] = ()  # names of the classes that are layers; empty: those the model names itself
    min_num_params: int = 0
    state_dict_type: str = "full"  # the main process writes "full" checkpoints, all processes write "sharded" ones
    replicas: int = 1  # groups of processes that each hold the whole model; 0: by `shards`, or one for each machine
    shards: int = 0  # processes of such a group; 0: all
    param_dtype: torch.dtype | None = None  # in which weights are gathered; None: by bf16 and fp16
    reduce_dtype: torch.dtype | None = None  # in which gradients are reduced
    notes: tuple[str, ...] = field(default=(), compare=False)


STRATEGIES: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "shard_grad_op": {"reshard_after_forward": False},
    "hybrid_shard": {"replicas": 0},
    "hybrid_shard_zero2": {"replicas": 0, "reshard_after_forward": False},
}
_NUMBERED = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}
POLICIES = {"transformer_based_wrap": "transformer", "size_based_wrap": "size", "no_wrap": "none"}
STATE_DICTS = {"full_state_dict": "full", "sharded_state_dict": "sharded"}
# Options of FSDP 1 that FSDP2 does not need.
WITHOUT_EFFECT = """
    backward_prefetch forward_prefetch limit_all_gathers sync_module_states use_orig_params ignored_modules
    activation_checkpointing_offload xla_fsdp_settings xla_fsdp_v2 xla_fsdp_grad_ckpt
""".split()
#: Options of accelerate's own implementations of parallelism, which its launcher writes too.
OF_ACCELERATE = """
    cp_backend sp_backend tp_handler cp_handler sp_handler cp_comm_strategy sp_seq_length sp_seq_length_is_variable
    sp_attn_implementation
""".split()
NAMES = """
    version reshard_after_forward sharding_strategy cpu_offload offload_params activation_checkpointing
    cpu_ram_efficient_loading state_dict_type auto_wrap_policy transformer_layer_cls_to_wrap
    transformer_cls_names_to_wrap transformer_cls_to_wrap min_num_params mixed_precision_policy xla
""".split()


def read(
    fsdp: str | list[str] | None, fsdp_config: dict[str, Any] | str | None, parallelism: Any = None
) -> tuple[Sharding | None, list[str]]:
    """(settings of these arguments, or None without sharding; their problems)."""
    problems: list[str] = []
    options = [word for part in _listed(fsdp) for word in part.replace(",", " ").split()]
    sizes = parallel_sizes(parallelism, problems)
    config = _config(fsdp_config, problems)
    if not options and sizes.get("dp_shard_size", 1) <= 1:
        if any(value not in (None, False, 0, "", []) for value in config.values()) and not is_true(
            os.environ.get("ACCELERATE_USE_FSDP", "false")
        ):
            problems.append(f"fsdp_config sets {', '.join(config)}, and nothing is sharded; set fsdp='full_shard' too")
        return None, problems
    settings = Sharding(replicas=sizes.get("dp_replicate_size", 1), shards=sizes.get("dp_shard_size", 0))
    for option in map(str.lower, options):
        if option in STRATEGIES:
            settings = replace(settings, **STRATEGIES[option])
        elif option == "offload":
            settings = replace(settings, cpu_offload=True)
        elif option == "no_shard":
            problems.append("fsdp='no_shard' shards nothing; leave fsdp out to use DDP")
        elif option not in ("auto_wrap", "true"):
            hint = did_you_mean(option, [*STRATEGIES, "offload", "auto_wrap"])
            problems.append(
                f"fsdp holds {option!r}, which is none of {', '.join(STRATEGIES)}, offload, auto_wrap{hint}"
            )
    for name, value in config.items():
        try:
            settings = _with(settings, name, value)
        except (ValueError, TypeError) as error:
            problems.append(f"fsdp_config[{name!r}]={value!r}: {error}")
    if (replicas := sizes.get("dp_replicate_size", 1)) > 1:
        settings = replace(settings, replicas=replicas)
    elif not settings.replicas and isinstance(parallelism, dict) and parallelism.get("dp_replicate_size") == 1:
        # ParallelismConfig and accelerate launch (as text) have 1 where it is not set.
        problems.append(
            "fsdp='hybrid_shard' keeps several copies of the model, and dp_replicate_size=1 is one; set fsdp="
            "'full_shard', or leave dp_replicate_size out"
        )
    if settings.min_num_params and "auto_wrap_policy" not in config:
        settings = replace(settings, wrap="size")
    if settings.wrap == "size" and not settings.min_num_params:
        problems.append("fsdp_config['auto_wrap_policy']='SIZE_BASED_WRAP' needs min_num_params, the size of a unit")
    elif settings.min_num_params and settings.wrap != "size":
        problems.append("fsdp_config['min_num_params'] needs auto_wrap_policy='SIZE_BASED_WRAP', or none given")
    if settings.layer_classes and settings.wrap != "transformer":
        problems.append("fsdp_config: transformer_layer_cls_to_wrap needs auto_wrap_policy='TRANSFORMER_BASED_WRAP'")
    return settings, problems


def sizes_from_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """The sizes of groups of processes that ``accelerate launch`` left in the environment (PARALLELISM_CONFIG_...)."""
    if not is_true(environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false")):
        return None
    before = "PARALLELISM_CONFIG_"
    return {name.removeprefix(before).lower(): environ[name] for name in environ if name.startswith(before)}


def sizes_of(parallelism: Any) -> dict[str, int]:
    """The sizes of groups of processes by ``args.parallelism_config``, or by the launcher where that is None."""
    return parallel_sizes(sizes_from_environment() if parallelism is None else parallelism, [])


def peers(sizes: Mapping[str, int]) -> int:
    """Processes that read the same rows, by the `sizes` of groups: those that split a matrix or a row."""
    return sizes.get("tp_size", 1) * sizes.get("cp_size", 1)


def from_environment(environ: Mapping[str, str] = os.environ) -> tuple[Sharding | None, list[str]]:
    """The settings that ``accelerate launch`` left in the environment (FSDP_..., PARALLELISM_CONFIG_...), as `read`."""
    sizes = sizes_from_environment(environ)
    if not is_true(environ.get("ACCELERATE_USE_FSDP", "false")):
        return read(None, None, sizes)
    found = {name[5:].lower(): value for name, value in environ.items() if name.startswith("FSDP_")}
    found = {name: value for name, value in found.items() if value.lower() not in ("", "none")}
    # FSDP 1 has strategies, FSDP2 a switch; accelerate writes both.
    found.pop("sharding_strategy" if found.get("version") == "2" else "reshard_after_forward", None)
    found.pop("cpu_ram_efficient_loading", None)  # from_pretrained has read it
    if found.get("auto_wrap_policy", "").lower() != "size_based_wrap":  # the launcher writes a size in any case
        found.pop("min_num_params", None)
    options = {name: value for name, value in found.items() if name in (*NAMES, *WITHOUT_EFFECT)}
    return read("full_shard", {"state_dict_type": "FULL_STATE_DICT"} | options, sizes)


def of_run(args: Any) -> Sharding | None:
    """The settings of a run by its arguments or else by the launcher; None: neither asks for sharding. Raises a
    `ConfigError` for problems with them.
    """
    settings, problems = read(args.fsdp, args.fsdp_config, args.parallelism_config)
    if settings is None and not problems:
        settings, problems = from_environment()
        if settings is not None:
            problems += optimizer_problems(args.optim, offloads=settings.cpu_offload)
    if problems:
        raise ConfigError("TrainingArguments", problems)
    for note in settings.notes if settings is not None else ():
        logger.info("fsdp_config: %s", note)
    return settings


def _listed(value: Any) -> list[str]:
    return [] if not value else [str(part) for part in value] if isinstance(value, (list, tuple)) else [str(value)]


def _config(config: dict[str, Any] | str | None, problems: list[str]) -> dict[str, Any]:
    """The options by their plain names."""
    if isinstance(config, str):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            problems.append(f"fsdp_config={config!r} is not a JSON file that can be read ({error})")
            return {}
    if not isinstance(config, dict):
        return {}
    plain = {name.removeprefix("fsdp_"): value for name, value in config.items() if value is not None}
    for name in [name for name in plain if name not in (*NAMES, *WITHOUT_EFFECT)]:
        del plain[name]
        problems.append(f"fsdp_config holds {name!r}, which is no option of FSDP{did_you_mean(name, NAMES)}")
    return plain


def parallel_sizes(parallelism: Any, problems: list[str]) -> dict[str, int]:
    """The sizes that are set, by name (dp_replicate_size, dp_shard_size, tp_size, cp_size, ep_size), of accelerate's
    ParallelismConfig or a dict like it.
    """
    if parallelism is None:
        return {}
    known = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "ep_size", "sp_size")
    if isinstance(parallelism, dict):
        plain = {name.removeprefix("parallelism_config_"): value for name, value in parallelism.items()}
        for name in [name for name in plain if name not in (*known, *OF_ACCELERATE)]:
            problems.append(f"parallelism_config holds {name!r}, which is none of {', '.join(known)}")
    else:
        plain = {name: getattr(parallelism, name, None) for name in known}
    sizes: dict[str, int] = {}
    for name in known:
        if (value := plain.get(name)) is None:
            continue
        if not str(value).isdecimal() or int(value) < 1:
            problems.append(f"parallelism_config: {name}={value!r} is no number of processes; set it to 1 or more")
        else:
            sizes[name] = int(value)
    if sizes.get("sp_size", 1) not in (1, sizes.get("tp_size", 1)):
        problems.append(
            f"parallelism_config: sp_size={sizes['sp_size']} is sequence parallelism of the processes that split a "
            "matrix; set tp_size to the same number, or leave it out, and set cp_size to split long rows"
        )
    return sizes


def _with(settings: Sharding, name: str, value: Any) -> Sharding:
    """`settings` with one option of ``fsdp_config``."""
    if name in WITHOUT_EFFECT:
        return replace(settings, notes=(*settings.notes, f"{name} has no effect: FSDP2 needs no such option."))
    if name == "version":
        if int(value) not in (1, 2):
            raise ValueError("there are versions 1 and 2")
        note = "FSDP 2 is used in place of version 1: the same numbers and checkpoints, without its flat parameters."
        return settings if int(value) == 2 else replace(settings, notes=(*settings.notes, note))
    if name in ("reshard_after_forward", "sharding_strategy"):
        strategy = _NUMBERED.get(str(value), str(value).lower())
        if strategy in STRATEGIES:
            return replace(settings, **STRATEGIES[strategy])
        if name == "sharding_strategy":
            raise ValueError(f"it is none of {', '.join(STRATEGIES)}")
        return replace(settings, reshard_after_forward=is_true(value))
    if name in ("cpu_offload", "offload_params"):
        return replace(settings, cpu_offload=is_true(value))
    if name == "activation_checkpointing":
        return replace(settings, activation_checkpointing=is_true(value))
    if name == "cpu_ram_efficient_loading":
        # from_pretrained reads the launcher's variable before a trainer exists.
        note = "cpu_ram_efficient_loading has no effect here: set FSDP_CPU_RAM_EFFICIENT_LOADING, or use a launcher."
        return replace(settings, notes=(*settings.notes, note)) if is_true(value) else settings
    if name == "state_dict_type":
        return replace(settings, state_dict_type=_chosen(value, STATE_DICTS))
    if name == "auto_wrap_policy":
        return replace(settings, wrap=_chosen(value, POLICIES))
    if name.startswith("transformer_"):
        words = tuple(word.strip() for part in _listed(value) for word in part.split(","))
        return replace(settings, layer_classes=words)
    if name == "min_num_params":
        return replace(settings, min_num_params=int(value))
    if name == "mixed_precision_policy":
        return _with_types(settings, value)
    if is_true(value):  # xla
        raise ValueError("TPUs are not supported")
    return settings


def _chosen(value: Any, choices: dict[str, str]) -> str:
    text = str(value).rpartition(".")[2].lower()
    if text not in choices:
        raise ValueError(f"it is none of {', '.join(choices).upper()}{did_you_mean(text, choices)}")
    return choices[text]


def _with_types(settings: Sharding, policy: Any) -> Sharding:
    names = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    if isinstance(policy, str):
        policy = {"param_dtype": policy, "reduce_dtype": policy}
    types: dict[str, Any] = {}
    for name, dtype in dict(policy).items():
        if name not in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype", "cast_forward_inputs"):
            raise ValueError(f"{name!r} is neither param_dtype nor reduce_dtype")
        if name not in ("param_dtype", "reduce_dtype") and dtype not in (None, True):
            raise ValueError(f"{name}={dtype!r} has no effect; param_dtype and reduce_dtype alone are followed")
        if name in ("param_dtype", "reduce_dtype"):
            text = str(dtype).removeprefix("torch.")
            types[name] = getattr(torch, names.get(text, text), None)
            if not isinstance(types[name], torch.dtype):
                raise ValueError(f"{dtype!r} is no type of torch")
    return replace(settings, **types)


def world_problems(sizes: dict[str, int], processes: int) -> Iterator[str]:
    """Why a run of so many `processes` cannot have groups of these `sizes`."""
    for name in ("tp_size", "cp_size", "ep_size"):
        if processes % (size := sizes.get(name, 1)):
            yield (
                f"{name}={size} does not divide the {processes} process{'es' if processes > 1 else ''} of this run; "
                f"start it with torchrun --nproc_per_node {size} or a multiple of that, or set {name}=1"
            )
    sharing = peers(sizes)
    replicas, shards = sizes.get("dp_replicate_size", 1), sizes.get("dp_shard_size", 1)
    if processes % sharing == 0 and processes // sharing % (replicas * shards):
        yield (
            f"dp_replicate_size={replicas} times dp_shard_size={shards} does not divide the {processes // sharing} "
            f"parts into which rows are dealt ({processes} processes, {sharing} with the same rows); change these "
            "sizes, or the number of processes"
        )


def context_problems(size: int, tp_size: int, args: Any) -> Iterator[str]:
    """Why `args` cannot train with `size` processes to a row."""
    if tp_size > 1:
        yield f"cp_size={size} and tp_size={tp_size} do not work together; set one of them to 1"
    if args.deepspeed is not None:
        yield f"cp_size={size} does not work with deepspeed; set deepspeed=None, and shard the model by fsdp"
    if args.torch_compile:
        yield f"torch_compile=True does not work on rows that are cut; set it to False, or cp_size=1 in place of {size}"
    if args.neftune_noise_alpha:
        yield (
            f"neftune_noise_alpha depends on the length of a row, and with cp_size={size} each process has a slice; "
            "set it to None, or cp_size=1"
        )


def piece_problems(name: str, size: int, verb: str, parts: str, args: Any) -> Iterator[str]:
    """Why `args` cannot train weights that the argument `name` divides over `size` processes: it does `verb` to the
    model, and each process then has `parts`.
    """
    if importlib.util.find_spec("transformers.distributed.expert_parallel") is None:  # whose classes both call
        yield f"{name}={size} needs transformers 5.23 or newer: pip install -U transformers"
    if args.deepspeed is not None:
        yield f"{name}={size} and deepspeed cannot both {verb} the model; set one of them to None"
    for other in ("fp16", "bf16_full_eval", "fp16_full_eval", "torch_compile"):
        if vars(args)[other]:
            yield f"{other}=True does not work on {parts}; set it to False, or {name}=1"
    yield from optimizer_problems(args.optim, f"{name}={size}")


#: Optimizers whose step of an element depends on others of its weight.
OF_WHOLE_MATRICES = (
    "adafactor adagc adalite adamp adanorm aida amos apollodqn came fadam lamb nero novograd prodigy racs scion "
    "scionlight sgdp sm3 soap stableadamw swats"
).split()


def optimizer_problems(name: Any, setting: str = "fsdp", offloads: bool = False) -> Iterator[str]:
    """Why the optimizer `name` cannot train weights of which each process has a part, by `setting`; in host memory,
    where it `offloads` them.
    """
    name = str(name)
    if name.endswith("_layerwise") or name in ("lomo", "adalomo"):
        return  # rejected for several processes anyway
    whole = name.startswith(("galore_", "apollo_", "dadapt")) or name in OF_WHOLE_MATRICES
    whole = whole or (name == "muon" and (offloads or setting != "fsdp"))  # which gathers them on the device
    if whole or re.search(r"[48]bit|fp8|^paged_|^lion_|bnb|^ademamix", name):
        why = "uses whole matrices" if whole else "has custom kernels"
        yield (
            f"optim={name!r} {why}, and with {setting} each process has a part of them; set optim=adamw_torch_fused, "
            f"or leave {setting.partition('=')[0]} out"
        )
