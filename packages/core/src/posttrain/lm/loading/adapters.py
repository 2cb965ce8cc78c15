"""Adds and checks adapters of peft."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from posttrain.core.errors import BEFORE_THE_RUN, ConfigError, require, warn
from posttrain.core.models.trainable import check_base_can_be_found_again, check_trainable, is_quantized
from posttrain.core.models.wrapping import base_model, has_virtual_tokens, is_encoder_decoder, is_peft_model, unwrap
from posttrain.lm.loading import parts

logger = logging.getLogger(__name__)

#: peft's tasks by what the names of transformers' classes end in. peft trains and saves the heads of these.
CLASSIFIERS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
OF_TENSORS = (
    "Experts that are one tensor have no dropout, bias or DoRA in their adapter: set lora_dropout=0, and leave out "
    "use_dora and lora_bias; or leave out target_parameters, and name linear layers in target_modules."
)


def check_peft_config(peft_config: Any) -> Any:
    """The module peft, after a check of `peft_config`. Raises an `ImportError` where it is not installed, a `TypeError`
    where `peft_config` is none of its configs, and a `ValueError` where it begins in a way that it alone cannot
    describe.
    """
    peft = require("peft", "posttrain-core[peft]", why="peft_config")
    if not isinstance(peft_config, peft.PeftConfig):
        raise TypeError(f"peft_config must be a peft.PeftConfig such as peft.LoraConfig(), not {peft_config!r}.")
    given = vars(peft_config)
    if given.get("init_lora_weights") == "eva":
        raise ValueError(
            "init_lora_weights='eva' begins from activations on data, and without them it is plain LoRA. Call "
            "peft.get_peft_model and peft.initialize_lora_eva_weights with your data, and pass that model without "
            "peft_config."
        )
    if given.get("arrow_config") is not None:
        raise ValueError(
            "peft_config.arrow_config routes between adapters that are trained already, and trains nothing. Leave it "
            "out here, and call peft.create_arrow_model with the trained adapters."
        )
    if given.get("target_parameters") and any(map(given.get, ("lora_dropout", "use_dora", "lora_bias"))):
        raise ValueError(f"peft_config: {OF_TENSORS}")
    if given.get("lora_ga_config") is not None and given.get("init_lora_weights") != "lora_ga":
        warn("peft_config.lora_ga_config has no effect without init_lora_weights='lora_ga'.")
    if given.get("qalora_group_size", 16) != 16 and not given.get("use_qalora"):  # 16 is peft's default
        warn("peft_config.qalora_group_size has no effect without use_qalora=True.")
    check_base_can_be_found_again(peft_config)
    return peft


def add_adapter(model: nn.Module, peft_config: Any, train_parts: str | None = None) -> nn.Module:
    """Freeze `model` and put the adapter that `peft_config` describes on it. Returns the `peft.PeftModel`.

    Args:
        train_parts: of a vision-language model, the parts that get adapters; see `parts.adapter_config`.

    On a base of 4 or 8 bits the adapter is kept in bfloat16 (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314),
    and modules trained whole in the dtype of the model.
    """
    peft = check_peft_config(peft_config)
    if is_peft_model(model):
        own: Any = model
        if not is_same_adapter(own.peft_config[own.active_adapter], peft_config, train_parts):
            raise ValueError(
                "The model already has an adapter, and peft_config would add another. Train the one it has (leave out "
                "peft_config), or pass model.merge_and_unload() to build on it."
            )
        warn("The model already has the adapter that peft_config describes: it is trained.")
        return model
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            "The model was loaded with an adapter in its layers, which would be trained and not saved beside that of "
            "peft_config. Give the trainer the adapter's folder by name, or PeftModel.from_pretrained(base, folder, "
            "is_trainable=True), and leave out peft_config."
        )
    checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if vars(peft_config).get("layer_replication") is not None and hasattr(base_model(model).config, "layer_types"):
        raise ValueError(
            f"peft_config.layer_replication cannot copy layers of this {type(model).__name__}, whose config lists the "
            "kind of each layer. Leave it out, or use a model whose layers are all alike, such as Llama."
        )
    peft_config = with_task(model, peft_config)
    linear = {name.rsplit(".", 1)[-1] for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    try:
        adapted = peft.get_peft_model(model, parts.adapter_config(model, peft_config, train_parts))
    except ValueError as error:  # peft names what it did not find, and not what there is
        layers = f"Linear layers of this {type(model).__name__}: {', '.join(sorted(linear))}"
        named = f"{layers}. Name some of them in target_modules, or set target_modules='all-linear'."
        error.add_note(OF_TENSORS if "ParamWrapper" in str(error) else named)
        setattr(error, BEFORE_THE_RUN, True)
        raise
    if vars(peft_config).get("use_qalora") and not is_quantized(model):
        warn("peft_config.use_qalora has no effect on a model that GPTQ has not quantized.")
    parts.tell_adapted(adapted)
    _tell_unmatched(adapted)
    if checkpointed and hasattr(model, "enable_input_require_grads"):
        base_model(model).enable_input_require_grads()  # or reentrant checkpoints of frozen layers would cut the graph
    if is_quantized(model):
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "modules_to_save" not in name:  # they get what layers in `dtype` compute
                parameter.data = parameter.data.to(torch.bfloat16)
    return adapted


def with_task(model: nn.Module, peft_config: Any) -> Any:
    """`peft_config` with the task that `model` is for, where it has none, or that of a plain language model. Raises a
    `ConfigError` where it is for classifiers, and `model` is a plain language model.
    """
    name = type(base_model(model)).__name__
    task = next((task for ending, task in CLASSIFIERS.items() if name.endswith(ending)), None)
    if task is None and is_encoder_decoder(model):
        task = "SEQ_2_SEQ_LM"
    if name.endswith("ForCausalLM") and peft_config.task_type in CLASSIFIERS.values():
        wrong = f"task_type={str(peft_config.task_type)!r} is for classifiers, and the model is a {name}"
        raise ConfigError("peft_config", [f"{wrong}; set 'CAUSAL_LM' (lora_task_type on the command line)"])
    if task is None or peft_config.task_type not in (None, "CAUSAL_LM"):
        return peft_config
    changed = copy.copy(peft_config)
    changed.task_type = task
    head = ", whose head is trained and saved with it" if task in CLASSIFIERS.values() else ""
    logger.info("The adapter is one for a %s%s (task_type=%r).", name, head, task)
    return changed


def _tell_unmatched(model: Any) -> None:
    """Warn of what the adapter's config names and the model does not have, which peft passes over in silence."""
    config, base = model.peft_config[model.active_adapter], base_model(model)
    adapted = getattr(model.base_model, "targeted_module_names", None)
    known = {
        "target_modules": adapted,
        "layers_to_transform": adapted and [part for name in adapted for part in name.split(".")],
        "target_parameters": getattr(model.base_model, "targeted_parameter_names", None),
        # peft itself adds the names that heads of classifiers may have
        "modules_to_save": ["classifier", "score", *(name for name, _ in base.named_modules())],
    }
    for field, names in known.items():
        given = getattr(config, field, None)
        if names is None or not isinstance(given, (list, set, tuple)):
            continue
        unmatched = sorted(one for one in given if not any(f".{name}".endswith(f".{one}") for name in names))
        if not unmatched:
            continue
        experts = [n for n, p in base.named_parameters() if ".experts." in n and p.ndim == 3 and "lora_" not in n]
        wanted = sorted({".".join(name.replace(".base_layer", "").split(".")[-3:]) for name in experts})
        hint = f" Its experts are parameters, not modules: target_parameters={wanted} adapts them." if wanted else ""
        warn(
            f"peft_config.{field}: {', '.join(map(repr, unmatched))} match nothing of this {type(base).__name__}, and "
            f"nothing is trained for them.{hint}",
        )


def set_trained(model: nn.Module, peft_config: Any, train_parts: str | None) -> nn.Module:
    """`model` with the adapter of `peft_config` if there is one, and with what else shall not be trained frozen. Raises
    a `ValueError` where nothing of it can be trained, or it has no such parts.
    """
    if peft_config is not None:
        model = add_adapter(model, peft_config, train_parts)
    elif train_parts is not None:
        parts.freeze_others(model, train_parts)
    check_trainable(model)
    names = [name for name, _ in model.named_modules() if name.endswith(".lora_A")]
    for name in names if is_peft_model(model) else ():
        layer: Any = model.get_submodule(name.removesuffix(".lora_A"))
        if not layer.lora_variant:
            layer._cast_input_dtype = _cast_outside_of_autocast
    find_cache_in_generation(model)
    return model


def find_cache_in_generation(model: nn.Module) -> None:
    """Let adapters that add virtual tokens generate with transformers 5.24, which named the key/value cache anew.

    peft 0.21.2 looks for the name of before. It then adds the tokens of prompt tuning again with each token that is
    written, and none of prefix tuning.
    """
    adapted: Any = unwrap(model)
    if has_virtual_tokens(model) and hasattr(adapted, "base_model_prepare_inputs_for_generation"):
        make = adapted.base_model_prepare_inputs_for_generation
        adapted.base_model_prepare_inputs_for_generation = functools.partial(_with_old_name_of_cache, make)


def _with_old_name_of_cache(make: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"past_key_values" if name == "cache" else name: value for name, value in make(*args, **kwargs).items()}


def _cast_outside_of_autocast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a LoRA layer reads: `x` under autocast, for which peft would copy it to float32 and autocast back."""
    return x if torch.is_autocast_enabled(x.device.type) else x.to(dtype)


def saved_config(folder: str) -> Any:
    """The config of the adapter in `folder`, to train it."""
    config = require("peft", "posttrain-core[peft]", why=f"the adapter in {folder}").PeftConfig.from_pretrained(folder)
    config.inference_mode = False
    return config


def is_same_adapter(mine: Any, peft_config: Any, train_parts: str | None) -> bool:
    """Whether `peft_config` is `mine`, that of a model's adapter, as in scripts that call ``get_peft_model`` first."""

    def described(config: Any) -> dict[str, Any]:
        # Loading fills in the rest: the base's name, its revision, and whether the adapter is trained.
        filled_in = ["base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "task_type"]
        filled_in += ["target_modules"] if getattr(peft_config, "target_modules", None) is None else []
        filled_in += ["exclude_modules"] if train_parts is not None else []
        fields = {name: value for name, value in config.to_dict().items() if name not in filled_in}
        return {name: sorted(v, key=repr) if isinstance(v, (set, list)) else v for name, v in fields.items()}

    return type(mine) is type(peft_config) and (mine is peft_config or described(mine) == described(peft_config))
