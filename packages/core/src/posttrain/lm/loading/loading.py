"""Loads models and tokenizers from a folder or the Hub, with checks before any weight is read."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from posttrain.core.checkpoint.weights import check_files
from posttrain.core.data import accelerator
from posttrain.core.errors import BEFORE_THE_RUN, CheckpointError, MissingModelError, did_you_mean, missing, require
from posttrain.core.files import lfs_pointer
from posttrain.core.models import wrapping
from posttrain.core.models.trainable import is_quantized
from posttrain.core.models.wrapping import base_model, base_name, unwrap
from posttrain.core.training.preflight import caught
from posttrain.lm.loading.offline import cache_where_unknown
from posttrain.lm.loading.quantization import asked_bits, quantization_kwargs, tell_left, to_one_type

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
#: A file that a tokenizer is loaded from, by what its name holds.
TOKENIZER_FILES = re.compile(r"token|vocab|\.model$|\.spm$")
#: Of the parameters of the angles, those that no rule changes; and those that a rule needs.
ROPE_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
ROPE_NEEDS: dict[str, tuple[str, ...]] = dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",))
ROPE_NEEDS |= {"llama3": ("factor", "low_freq_factor", "high_freq_factor")}
ROPE_NEEDS |= {"longrope": ("short_factor", "long_factor")}

#: The classes of transformers that load a model and what reads its rows, of text alone and with images.
READING = ("AutoModelForCausalLM", "AutoTokenizer")
SEEING = ("AutoModelForImageTextToText", "AutoProcessor")
CANNOT_SEE = (
    "The rows are vision-related: they have images, and {} reads text alone. Pass a vision-language model, as "
    "AutoModelForImageTextToText loads it, or leave the images out."
)


def load_causal_lm(
    name_or_path: str | os.PathLike[str],
    model_init_kwargs: dict[str, Any] | None = None,
    quantization_config: Any | None = None,
    trust_remote_code: bool = False,
    auto_class: str | type = "AutoModelForCausalLM",
) -> nn.Module:
    """Load a model by folder or Hub name, in float32 unless `model_init_kwargs` has a dtype.

    float32, because a change of one millionth of a weight, usual at a learning rate of 1e-6 to 1e-5, would be rounded
    away in bfloat16. Raises a `MissingModelError` where there is no such folder, and the Hub gave nothing under that
    name; a `CheckpointError` where an index in the folder names files outside of it, or an adapter does not name its
    base; and a `ValueError` where `auto_class` sees images, and the model reads text alone, or `rope_parameters` is no
    rule.

    Args:
        model_init_kwargs: given to ``from_pretrained``; `dtype` may be a string such as "bfloat16" or "auto". For
            `rope_parameters` see `angles`.
        quantization_config: a config of transformers, such as `BitsAndBytesConfig`, `TorchAoConfig` or `GPTQConfig`, or
            a dict of its fields. `model_init_kwargs` may have it instead, or the fields of a `BitsAndBytesConfig` one
            by one.
        auto_class: the class to load with, or its name in transformers.

    The folder of an adapter gives a `peft.PeftModel` of it on its base, and the adapter is trained.

    A vision-language model is loaded whole for rows of text alone, also where transformers has a class for its text
    part: what is saved is the same kind of model, with all of its parts.
    """
    import transformers

    kwargs = dict(model_init_kwargs or {})
    dtype = kwargs.pop("torch_dtype", None) or "float32"
    kwargs["dtype"] = _checked_dtype(kwargs.get("dtype") or dtype)
    kwargs |= quantization_kwargs(kwargs, quantization_config)
    kwargs.setdefault("trust_remote_code", trust_remote_code)
    path = os.fspath(name_or_path)
    check_files(os.path.join(path, kwargs.get("subfolder") or ""))
    if is_adapter(path):
        peft = require("peft", "posttrain-core[peft]", why=f"the adapter in {path}")
        model = load_causal_lm(base_of_adapter(path), kwargs, None, trust_remote_code, auto_class)
        return peft.PeftModel.from_pretrained(model, path, is_trainable=True)
    with explain_missing(path, "model"):
        config = _config(path, kwargs)
        # transformers puts it in the place of the config's, and the base of the angles would be lost with that.
        if rope := kwargs.pop("rope_scaling", None) or kwargs.get("rope_parameters"):
            kwargs["rope_parameters"] = angles(wrapping.setting(config, "rope_parameters") or {}, rope)
        name = auto_class
        if auto_class in (READING[0], SEEING[0]):
            name = whole_class(config, auto_class, path)
        loader: Any = getattr(transformers, name) if isinstance(name, str) else name
        model = loader.from_pretrained(path, **kwargs)
    if asked_bits(kwargs):
        tell_left(model)
    obey_softcap(model)
    stored_otherwise = wrapping.setting(config, "quantization_config") is not None
    return to_one_type(model) if stored_otherwise and not is_quantized(model) else model


def angles(own: Mapping[str, Any], given: Any) -> dict[str, Any]:
    """The ``rope_parameters`` of a model, whose `own` are changed to the rule `given`, such as ``{"rope_type": "yarn",
    "factor": 4.0}``; what no rule has, such as the base of the angles, stays unless it is given. Where layers have
    rules by their kind, the rule is that of full attention, unless it says by kind. Raises a `ValueError` where it is
    no rule of transformers.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    wrong = f"model_init_kwargs: rope_parameters={given!r}"
    if not isinstance(given, Mapping):
        raise ValueError(f"{wrong} must be a mapping, such as {{'rope_type': 'yarn', 'factor': 4.0}}.")
    if kinds := [name for name, rule in own.items() if isinstance(rule, Mapping)]:
        rules = given if any(isinstance(rule, Mapping) for rule in given.values()) else {"full_attention": given}
        if others := [kind for kind in rules if kind not in kinds]:
            raise ValueError(f"{wrong}: this model has no {others[0]!r}; give rules by kind, of {', '.join(kinds)}.")
        return {**own, **{kind: angles(own[kind], rule) for kind, rule in rules.items()}}
    rule = {"rope_type": given.get("type", "default")} | {
        name: value for name, value in given.items() if name != "type"
    }
    if (name := rule["rope_type"]) not in (known := ["default", *ROPE_INIT_FUNCTIONS]):
        raise ValueError(f"{wrong}: {name!r} is no rule{did_you_mean(str(name), known)} ({', '.join(known)}).")
    if missing := [each for each in ROPE_NEEDS.get(name, ()) if each not in rule]:
        raise ValueError(f"{wrong}: {name} needs {', '.join(missing)} too.")
    if "factor" in rule and not (isinstance(rule["factor"], (int, float)) and rule["factor"] >= 1):
        raise ValueError(f"{wrong}: the factor must be a number of at least 1.")
    return {each: own[each] for each in ROPE_KEPT if each in own} | rule


def obey_softcap(model: nn.Module) -> None:
    """Give `model` eager attention where its config bounds the scores, and torch's attention would not.

    So it is with Gemma 2 in transformers 5.17, which chooses torch's attention for it; later ones do not.
    """
    base = base_model(model)
    if not wrapping.is_of_transformers(base):
        return
    reader = wrapping.text_part(base)
    softcap = vars(reader.config).get("attn_logit_softcapping")
    if softcap and reader.config._attn_implementation == "sdpa":
        logger.warning(
            f"{type(reader).__name__} has eager attention now: its config bounds attention scores "
            f"(attn_logit_softcapping={softcap}), and attn_implementation='sdpa' leaves them as they are."
        )
        reader.set_attn_implementation("eager")


def whole_class(config: Any, auto_class: str, name_or_path: str) -> str:
    """The class of `READING` or `SEEING` that loads every part of a model with this config. Raises a `ValueError` where
    the model was to see images, and only `READING` has a class for it.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    reader: Any
    seer: Any
    reader, seer = (
        classes[type(config)] if type(config) in classes else None
        for classes in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    )
    if auto_class == SEEING[0] and reader is not None and seer is None:
        raise ValueError(CANNOT_SEE.format(f"{name_or_path!r} ({type(config).__name__})"))
    saved_as_reader = reader is not None and reader.__name__ in (config.architectures or ())
    return SEEING[0] if seer is not None and not saved_as_reader else auto_class


def _config(path: str, kwargs: dict[str, Any]) -> Any:
    """The config of the model at `path`; None where transformers reads none, which loading then explains."""
    try:
        return config_of(path, kwargs)
    except (OSError, ValueError):
        return None


def is_adapter(model: Any) -> bool:
    """Whether `model` is the folder of an adapter."""
    return isinstance(model, (str, os.PathLike)) and os.path.isfile(os.path.join(os.fspath(model), ADAPTER_CONFIG))


def base_of_adapter(folder: str) -> str:
    """The name of the model, or its folder, that the adapter in `folder` was trained on."""
    with open(os.path.join(folder, ADAPTER_CONFIG), encoding="utf-8") as file:
        if base := json.load(file).get("base_model_name_or_path"):
            return base
    raise CheckpointError(
        f"{os.path.join(folder, ADAPTER_CONFIG)} does not name the base of the adapter (base_model_name_or_path). "
        "Write it there, or pass PeftModel.from_pretrained(base, folder, is_trainable=True)."
    )


def config_of(name_or_path: str | os.PathLike[str], kwargs: Mapping[str, Any], trust_remote_code: bool = False) -> Any:
    """The config of the model that ``from_pretrained(name_or_path, **kwargs)`` loads, without its weights."""
    import transformers

    names = ("trust_remote_code", "revision", "subfolder", "token", "cache_dir", "local_files_only")
    where = {"trust_remote_code": trust_remote_code} | {name: kwargs[name] for name in names if name in kwargs}
    return kwargs.get("config") or transformers.AutoConfig.from_pretrained(os.fspath(name_or_path), **where)


def load_tokenizer(
    source: str | os.PathLike[str] | nn.Module,
    trust_remote_code: bool = False,
    auto_class: str = "AutoTokenizer",
    **kwargs: Any,
) -> Any:
    """The tokenizer at a folder or Hub name, or the one next to the weights of a loaded model. `auto_class`: the class
    of transformers to load with; AutoProcessor for models with images. Raises a `ValueError` for a model that was not
    loaded from anywhere, and a `MissingModelError` where the folder holds no tokenizer.
    """
    import transformers

    if isinstance(source, nn.Module):
        path = base_name(source)
        if not path:
            raise ValueError(
                f"This {type(unwrap(source)).__name__} was not loaded from a folder or the Hub, so there is no "
                "tokenizer to load with it. Pass processing_class=<its tokenizer>."
            )
    else:
        path = os.fspath(source)
    elsewhere = kwargs.keys() & {"gguf_file", "subfolder"}
    if os.path.isdir(path) and not elsewhere and not any(map(TOKENIZER_FILES.search, os.listdir(path))):
        raise MissingModelError(  # transformers makes an empty tokenizer for some models
            f"The folder {path!r} holds no tokenizer, such as tokenizer.json. Save that of its base model there: "
            f"AutoTokenizer.from_pretrained('BASE').save_pretrained({path!r})."
        )
    with explain_missing(path, "tokenizer"):
        return getattr(transformers, auto_class).from_pretrained(path, trust_remote_code=trust_remote_code, **kwargs)


def loading_problems(
    name_or_path: str | os.PathLike[str], kwargs: dict[str, Any] | None = None, quantization_config: Any = None
) -> Iterator[str | Exception]:
    """Problems with the arguments of `load_causal_lm`, checked before any weight is read."""
    kwargs = kwargs if isinstance(kwargs, dict) else {}
    elsewhere = any(kwargs.get(name) for name in ("config", "gguf_file", "subfolder"))
    if (absent := missing_folder(name_or_path, needs_config=not elsewhere)) is not None:
        yield absent
    if dtype := kwargs.get("dtype") or kwargs.get("torch_dtype"):
        yield from caught(_checked_dtype, dtype)
    if asked_bits(kwargs, quantization_config):
        if error := missing("bitsandbytes", "posttrain-core[quantization]", "load_in_4bit and load_in_8bit"):
            yield error
    if problem := attention_problem(kwargs.get("attn_implementation")):
        yield problem


def attention_problem(implementation: Any) -> str | None:
    """Why a model cannot be loaded with this `attn_implementation`, as a sentence; None if it can, or if unknown."""
    if not isinstance(implementation, str):
        return None
    from transformers import utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils.import_utils import KERNELS_MAX_VERSION, KERNELS_MIN_VERSION, is_kernels_available

    kernels = f"'kernels>={KERNELS_MIN_VERSION},<{KERNELS_MAX_VERSION}'"
    if "/" in implementation:
        needs = f"attn_implementation={implementation!r} is a kernel of the Hub. Run: pip install {kernels}"
        return None if is_kernels_available() else needs
    known = sorted({"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()})
    name = implementation.removeprefix("paged|")
    if name not in known:
        near = did_you_mean(name, known)
        return (
            f"attn_implementation={implementation!r} is not one of {', '.join(k for k in known if '|' not in k)}{near}"
        )
    version = name.removeprefix("flash_attention_")
    if version == name or getattr(utils, f"is_flash_attn_{version}_available")():
        return None
    has_gpu, package = accelerator.gpu() is not None, {"2": "flash-attn", "4": "flash-attn-4"}.get(version)
    if has_gpu and is_kernels_available():
        return None
    packages = f"{package}, or {kernels}," if package else kernels
    return (
        f"attn_implementation={implementation!r} cannot be used here: "
        f"{'its package is not installed' if has_gpu else 'no GPU is visible'}. Run: pip install {packages} on a "
        "machine with a GPU, or set attn_implementation='sdpa'"
    )


def missing_folder(name_or_path: str | os.PathLike[str], needs_config: bool = True) -> MissingModelError | None:
    """What to raise for a model's folder that is not there; None for one that is, and for a name on the Hub."""
    path = os.fspath(name_or_path)
    if _looks_local(path) and not os.path.exists(path):
        return MissingModelError(f"The model folder {path!r} does not exist (looked from {os.getcwd()}).")
    configs = ("config.json", ADAPTER_CONFIG, "params.json")
    if needs_config and os.path.isdir(path) and not any(os.path.isfile(os.path.join(path, name)) for name in configs):
        found = ", ".join(sorted(os.listdir(path))[:8]) or "nothing"
        return MissingModelError(
            f"The model folder {path!r} holds no config.json, so it is no model. It holds: {found}."
        )
    return None


@contextlib.contextmanager
def explain_missing(path: str, what: str) -> Iterator[None]:
    """Explain whether a folder, a file in it or an answer of the Hub is missing if loading from `path` fails. Raises a
    `MissingModelError` instead of transformers' error in this context, and a `CheckpointError` where a file of JSON
    there is damaged, or the weights have other shapes than the config says.
    """
    if _looks_local(path) and not os.path.exists(path):
        raise MissingModelError(f"The {what} folder {path!r} does not exist (looked from {os.getcwd()}).")
    try:
        with cache_where_unknown(path):
            yield
    except json.JSONDecodeError as error:
        files = [os.path.join(path, name) for name in sorted(os.listdir(path))] if os.path.isdir(path) else []
        damaged = f"A file of the {what} in {path!r} is damaged: {error}. Save it there again."
        raise CheckpointError(next(filter(None, map(lfs_pointer, files)), damaged)) from error
    except ValueError as error:  # as of a model type that this transformers does not know, which its text explains
        setattr(error, BEFORE_THE_RUN, True)
        raise
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise CheckpointError(
            f"The weights of the {what} in {path!r} have other shapes than its config.json says, as transformers lists "
            "above. Take both from one model."
        ) from error
    except OSError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if os.path.isdir(path):
            raise MissingModelError(f"The {what} in the folder {path!r} cannot be loaded: {reason}") from error
        raise MissingModelError(
            f"{path!r} is not a folder here (looked from {os.getcwd()}), and the Hugging Face Hub gave no {what} under "
            f"that name: {reason} Check the name, or download it first if this machine is offline."
        ) from error


def has_routers(config: Any) -> bool:
    """Whether a model with this config, of its text, is a mixture of experts that tells what its routers say."""
    return hasattr(config, "output_router_logits")


def router_coefficient(model: nn.Module, given: float | None) -> float:
    """The weight of the load-balancing loss: `given`, or that of a mixture of experts' config, or 0. Raises a
    `ValueError` where `model` is no mixture of experts, and a weight is given.
    """
    base = base_model(model)
    config = wrapping.text_config(wrapping.config_of(base))
    if has_routers(config):
        return (wrapping.setting(config, "router_aux_loss_coef") or 0.0) if given is None else given
    if given:
        raise ValueError(
            f"router_aux_loss_coef={given} weighs the load-balancing loss of routers, and {type(base).__name__} has "
            "none. Leave router_aux_loss_coef out: the model is no mixture of experts."
        )
    return 0.0


def _checked_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    if isinstance(name, torch.dtype) or name == "auto" or isinstance(getattr(torch, name, None), torch.dtype):
        return name
    raise ValueError(
        f"dtype={dtype!r} is not a type of torch{did_you_mean(name, DTYPES, '.')} Set one of {', '.join(DTYPES)}."
    )


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~", "\\")) or path.count("/") > 1


def has_other_head(model: nn.Module) -> bool:
    """Whether the head of `model`, by its class, gives no probabilities of next tokens: a classifier, BERT, ..."""
    return any(head in type(model).__name__ for head in ("Classification", "QuestionAnswering", "MaskedLM"))
