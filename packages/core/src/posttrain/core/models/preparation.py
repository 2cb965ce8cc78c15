"""What happens to a model before and around training: loading, special tokens, adapters, checkpointing, noise.

Its output head, and what lies below its wrappers, is in `posttrain.core.models.lm_head` and can be had from here too.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from posttrain.core.checkpoint.weights import check_indices
from posttrain.core.config import ConfigMeta, opt, validate
from posttrain.core.errors import did_you_mean, missing, require
from posttrain.core.models.lm_head import (
    CausalHead,
    base_model,
    causal_head,
    has_virtual_tokens,
    id_limits,
    is_peft_model,
    logps_in_head,
    loss_in_head,
    packed_head,
    supports_loss_in_head,
    unwrap,
)

logger = logging.getLogger(__name__)

__all__ = [
    "CausalHead",
    "ModelConfig",
    "ModelSideArguments",
    "add_adapter",
    "align_special_tokens",
    "apply_liger",
    "base_model",
    "causal_head",
    "check_trainable",
    "checkpointing_problem",
    "disable_dropout",
    "enable_gradient_checkpointing",
    "ensure_pad_token",
    "explain_missing",
    "has_virtual_tokens",
    "id_limits",
    "is_peft_model",
    "is_quantized",
    "load_causal_lm",
    "load_tokenizer",
    "logps_in_head",
    "loss_in_head",
    "neftune",
    "packed_head",
    "supports_loss_in_head",
    "unwrap",
]

BITS = ("load_in_4bit", "load_in_8bit")
#: What activation_checkpointing_kwargs may hold: options of torch.utils.checkpoint, and two of transformers.
CHECKPOINT_OPTIONS = (
    "use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop", "every_n_layers", "offload",
)  # fmt: skip
#: What torch.compile takes as `mode`.
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")

# -------------------------------------------------------------------------------------------------------------- config


@dataclass
class ModelSideArguments:
    """What a run does to its model."""

    activation_checkpointing: bool | None = opt(
        None,
        "Recompute activations in the backward instead of keeping them: less memory, about a third more time.",
        flag=True,
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = opt(
        None,
        "Options of torch.utils.checkpoint, such as use_reentrant (False unless set), besides every_n_layers and offload.",
    )
    gradient_checkpointing: bool | None = opt(None, "The older name of activation_checkpointing.", flag=True)
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = opt(
        None, "The older name of activation_checkpointing_kwargs."
    )
    torch_compile: bool = opt(
        False, "Compile the model's layers with torch.compile; setting a backend or a mode implies it."
    )
    torch_compile_backend: str | None = opt(None, "Backend of torch.compile; None takes inductor.")
    torch_compile_mode: str | None = opt(None, "Mode of torch.compile, such as reduce-overhead or max-autotune.")
    use_liger_kernel: bool = opt(
        False, "Replace layers by Liger's Triton kernels where the package, the GPU and the architecture allow it."
    )
    liger_kernel_config: dict[str, bool] | str | None = opt(
        None, 'Which kernels Liger applies, e.g. {"rope": true, "fused_linear_cross_entropy": false}.'
    )
    use_cache: bool = opt(False, "Keep the key/value cache on in training, which costs memory and helps no loss.")
    neftune_noise_alpha: float | None = opt(
        None, "Strength of the uniform noise added to input embeddings in training; papers use 5 to 15.", min=0
    )

    def _normalize(self) -> None:
        for new, old in (
            ("activation_checkpointing", "gradient_checkpointing"),
            ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
        ):
            default = type(self).__dataclass_fields__[new].default
            value, alias = getattr(self, new), getattr(self, old)
            if alias is not None and (not value or value == default):
                value = alias
            if new == "activation_checkpointing" and value is None:
                value = False
            setattr(self, new, value)
            setattr(self, old, value)
        launched = os.environ.get(
            "ACCELERATE_DYNAMO_BACKEND", "no"
        ).lower()  # as posttrain launch and accelerate set it
        if launched not in ("no", "") and not self.torch_compile:
            mode = os.environ.get("ACCELERATE_DYNAMO_MODE", "default")
            self.torch_compile_backend = self.torch_compile_backend or launched
            self.torch_compile_mode = self.torch_compile_mode or (None if mode == "default" else mode)
        if self.torch_compile_backend is not None or self.torch_compile_mode is not None:
            self.torch_compile = True
        if self.torch_compile and self.torch_compile_backend is None:
            self.torch_compile_backend = "inductor"

    def _problems(self) -> Iterator[str]:
        if isinstance(self.activation_checkpointing_kwargs, str):
            yield (
                f"activation_checkpointing_kwargs={self.activation_checkpointing_kwargs!r} (or gradient_checkpointing_kwargs) is not "
                "a JSON object; "
                "give a dict or a string such as '{\"use_reentrant\": false}'"
            )
        elif self.activation_checkpointing_kwargs:
            for name in self.activation_checkpointing_kwargs:
                if name not in CHECKPOINT_OPTIONS:
                    yield (
                        f"activation_checkpointing_kwargs (or gradient_checkpointing_kwargs): {name!r} is not one of "
                        f"{', '.join(CHECKPOINT_OPTIONS)}{did_you_mean(name, CHECKPOINT_OPTIONS)}"
                    )
        if isinstance(self.liger_kernel_config, str):
            yield f"liger_kernel_config={self.liger_kernel_config!r} is not a JSON object; give a dict, or one written as JSON"
        elif self.liger_kernel_config and not self.use_liger_kernel:
            yield "liger_kernel_config has no use without use_liger_kernel=True; set that, or leave it out"
        if self.torch_compile_mode is not None and self.torch_compile_mode not in COMPILE_MODES:
            near = did_you_mean(self.torch_compile_mode, COMPILE_MODES)
            yield f"torch_compile_mode={self.torch_compile_mode!r} is not one of {', '.join(COMPILE_MODES)}{near}"
        if self.torch_compile_backend not in (None, "inductor"):
            known = torch.compiler.list_backends(exclude_tags=())
            if self.torch_compile_backend not in known:
                near = did_you_mean(self.torch_compile_backend, known)
                yield f"torch_compile_backend={self.torch_compile_backend!r} is not one of {', '.join(known)}{near}"

    def _preflight(self) -> Iterator[str | Exception]:
        if self.use_liger_kernel and (error := missing("liger_kernel", "liger-kernel", "use_liger_kernel=True")):
            yield ImportError(
                f"{error}; or leave use_liger_kernel out: SFT, preference training, GRPO and seq2seq compute their losses in the "
                "head without it, and hold no logits either",
                name="liger_kernel",
            )


@dataclass
class ModelConfig(metaclass=ConfigMeta):
    """Which model a command line trains, how it is loaded, and its adapter."""

    model_name_or_path: str | None = opt(None, "Model to train: a folder, or a name on the Hugging Face Hub.")
    model_revision: str = opt("main", "Branch, tag or commit on the Hub.")
    dtype: str | None = opt(
        "float32", "Type of the weights; auto takes that of the checkpoint.", choices=DTYPES, aliases=("torch_dtype",)
    )
    attn_implementation: str | None = opt(None, "Attention implementation, e.g. sdpa, eager or flash_attention_2.")
    use_peft: bool = opt(False, "Train a LoRA adapter instead of all weights.")
    lora_r: int = opt(16, "Rank of the LoRA matrices. Larger learns more and stores more.", min=1)
    lora_alpha: int = opt(32, "The LoRA update is multiplied by lora_alpha / lora_r.", above=0)
    lora_dropout: float = opt(0.05, "Dropout on the input of the LoRA matrices.", min=0, below=1)
    lora_target_modules: list[str] | None = opt(
        None, "Names of the modules that get an adapter; all-linear takes every linear layer but the head."
    )
    lora_target_parameters: list[str] | None = opt(
        None, "Names of parameters that get an adapter, for experts that are kept as one tensor."
    )
    lora_modules_to_save: list[str] | None = opt(None, "Modules trained and stored whole, e.g. lm_head.")
    lora_task_type: str = opt("CAUSAL_LM", "Task type given to peft; SEQ_CLS for reward models.")
    use_rslora: bool = opt(False, "Multiply the LoRA update by lora_alpha / sqrt(lora_r), stable at high ranks.")
    use_dora: bool = opt(False, "Learn the magnitude of the weights apart from their direction (DoRA); slower.")
    load_in_8bit: bool = opt(False, "Load the frozen base in 8 bits (bitsandbytes); needs use_peft.")
    load_in_4bit: bool = opt(False, "Load the frozen base in 4 bits (bitsandbytes, QLoRA); needs use_peft.")
    bnb_4bit_quant_type: str = opt("nf4", "4-bit number format.", choices=("nf4", "fp4"))
    use_bnb_nested_quant: bool = opt(False, "Quantize the 4-bit scales too: about 0.4 bits a weight less.")
    bnb_4bit_quant_storage: str | None = opt(None, "Type the 4-bit weights are packed in; FSDP needs that of dtype.")

    def __post_init__(self) -> None:
        validate(self)

    def _problems(self) -> Iterator[str]:
        if self.load_in_8bit and self.load_in_4bit:
            yield "load_in_8bit=True and load_in_4bit=True cannot both hold; keep one"
        elif (self.load_in_8bit or self.load_in_4bit) and not self.use_peft:
            bits = "load_in_8bit" if self.load_in_8bit else "load_in_4bit"
            yield f"{bits}=True: quantized weights cannot be trained themselves; set use_peft=True to train an adapter on them"

    def _preflight(self) -> Iterator[str | Exception]:
        if self.model_name_or_path is not None:
            quantized = {name: True for name in BITS if getattr(self, name)}
            yield from loading_problems(self.model_name_or_path, self.model_init_kwargs() | quantized)
        if self.use_peft and (error := missing("peft", "posttrain-core[peft]", "use_peft=True")):
            yield error

    @property
    def torch_dtype(self) -> str | None:
        """`dtype` under the name that older scripts read."""
        return self.dtype

    def model_init_kwargs(self) -> dict[str, Any]:
        """What `load_causal_lm` takes as `model_init_kwargs`."""
        kwargs = {"revision": self.model_revision, "dtype": self.dtype or "float32"}
        return kwargs | ({"attn_implementation": self.attn_implementation} if self.attn_implementation else {})

    def peft_config(self) -> Any | None:
        """The `peft.LoraConfig` these fields describe, or None without `use_peft`."""
        if not self.use_peft:
            return None
        peft = require("peft", "posttrain-core[peft]", why="use_peft=True")
        targets = self.lora_target_modules
        if targets and len(targets) == 1 and not targets[0].isidentifier():
            targets = targets[0]  # a pattern, or all-linear, which peft knows as a string alone
        return peft.LoraConfig(
            task_type=self.lora_task_type,
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=targets,
            target_parameters=self.lora_target_parameters,
            modules_to_save=self.lora_modules_to_save,
            use_rslora=self.use_rslora,
            use_dora=self.use_dora,
            bias="none",
        )

    def quantization_config(self) -> Any | None:
        """The `transformers.BitsAndBytesConfig` these fields describe, or None without a `load_in_...`."""
        if not (self.load_in_8bit or self.load_in_4bit):
            return None
        require("bitsandbytes", "posttrain-core[quantization]", why="load_in_8bit and load_in_4bit")
        from transformers import BitsAndBytesConfig

        if self.load_in_8bit:
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=None if self.dtype in (None, "auto") else self.dtype,
            bnb_4bit_quant_type=self.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=self.use_bnb_nested_quant,
            bnb_4bit_quant_storage=self.bnb_4bit_quant_storage,
        )


# ------------------------------------------------------------------------------------------------------------- loading


def load_causal_lm(
    name_or_path: str | os.PathLike[str],
    model_init_kwargs: dict[str, Any] | None = None,
    quantization_config: Any | None = None,
    trust_remote_code: bool = False,
    auto_class: str = "AutoModelForCausalLM",
) -> nn.Module:
    """Load a model by folder or Hub name, in float32 unless `model_init_kwargs` has a dtype.

    float32 because an update of one millionth of a weight, usual at a learning rate of 1e-6 to 1e-5, is lost when it
    is added to bfloat16 weights.

    Args:
        model_init_kwargs: given to ``from_pretrained``; `dtype` may be a string such as "bfloat16" or "auto".
        quantization_config: a config of transformers, such as `BitsAndBytesConfig`, `TorchAoConfig` or `GPTQConfig`, or a dict of
            what one holds. `model_init_kwargs` may have it instead, or the fields of a `BitsAndBytesConfig` one by one.
        auto_class: the class of transformers to load with.

    Raises:
        FileNotFoundError: there is no such folder, and the Hub gave nothing under that name.
        CheckpointError: an index in the folder names files outside of it.
    """
    import transformers

    kwargs = dict(model_init_kwargs or {})
    dtype = kwargs.pop("torch_dtype", None) or "float32"
    kwargs["dtype"] = _checked_dtype(kwargs.get("dtype") or dtype)
    kwargs |= _quantization(kwargs, quantization_config)
    kwargs.setdefault("trust_remote_code", trust_remote_code)
    path = os.fspath(name_or_path)
    check_indices(path)
    with explain_missing(path, "model"):
        return getattr(transformers, auto_class).from_pretrained(path, **kwargs)


def loading_problems(
    name_or_path: str | os.PathLike[str], kwargs: dict[str, Any] | None = None, quantization_config: Any = None
) -> Iterator[str | Exception]:
    """Why `load_causal_lm` cannot do what it is asked, as far as it shows before any weight is read."""
    kwargs = kwargs if isinstance(kwargs, dict) else {}
    elsewhere = any(kwargs.get(name) for name in ("config", "gguf_file", "subfolder"))
    if (error := missing_folder(name_or_path, needs_config=not elsewhere)) is not None:
        yield error
    dtype = kwargs.get("dtype") or kwargs.get("torch_dtype")
    if dtype is not None:
        try:
            _checked_dtype(dtype)
        except ValueError as wrong:
            yield wrong
    if asked_bits(kwargs, quantization_config):
        if error := missing("bitsandbytes", "posttrain-core[quantization]", "load_in_4bit and load_in_8bit"):
            yield error
    if problem := attention_problem(kwargs.get("attn_implementation")):
        yield problem


def asked_bits(kwargs: dict[str, Any] | None, quantization_config: Any = None) -> str | None:
    """``load_in_4bit`` or ``load_in_8bit`` where bitsandbytes is to quantize a model that is loaded so."""
    kwargs = kwargs if isinstance(kwargs, dict) else {}
    for holder in (kwargs, kwargs.get("quantization_config"), quantization_config):
        read = holder.get if isinstance(holder, dict) else lambda name, of=holder: getattr(of, name, None)
        for name in BITS:
            if read(name):
                return name
    return None


def attention_problem(implementation: Any) -> str | None:
    """Why a model cannot be loaded with this `attn_implementation`, as a sentence; None if it can, or nobody knows yet."""
    if not isinstance(implementation, str) or "/" in implementation:  # a kernel of the Hub
        return None
    from transformers import utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = sorted({"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()})
    name = implementation.removeprefix("paged|")
    if name not in known:
        near = did_you_mean(name, known)
        return (
            f"attn_implementation={implementation!r} is not one of {', '.join(k for k in known if '|' not in k)}{near}"
        )
    there = getattr(utils, f"is_flash_attn_{name.removeprefix('flash_attention_')}_available", lambda: True)
    if name.startswith("flash_attention_") and not there() and missing("kernels", "kernels") is not None:
        lacks = "flash-attn is not installed" if torch.cuda.is_available() else "no GPU is visible"
        return (
            f"attn_implementation={implementation!r} cannot be used here: {lacks}. Run: pip install flash-attn (or kernels) on a "
            "machine with a GPU, or set attn_implementation='sdpa'"
        )
    return None


def missing_folder(name_or_path: str | os.PathLike[str], needs_config: bool = True) -> FileNotFoundError | None:
    """What to raise for a model's folder that is not there; None for one that is, and for a name on the Hub."""
    path = os.fspath(name_or_path)
    if _looks_local(path) and not os.path.exists(path):
        return FileNotFoundError(f"The model folder {path!r} does not exist (looked from {os.getcwd()}).")
    configs = ("config.json", "adapter_config.json", "params.json")
    if needs_config and os.path.isdir(path) and not any(os.path.isfile(os.path.join(path, name)) for name in configs):
        found = ", ".join(sorted(os.listdir(path))[:8]) or "nothing"
        return FileNotFoundError(
            f"The model folder {path!r} holds no config.json, so it is no model. It holds: {found}."
        )
    return None


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~", "\\")) or path.count("/") > 1


def _quantization(kwargs: dict[str, Any], given: Any | None) -> dict[str, Any]:
    """The `quantization_config` of ``from_pretrained``; what describes one is taken out of `kwargs`."""
    fields = {
        name: kwargs.pop(name) for name in list(kwargs) if name.startswith(("load_in_", "bnb_4bit_", "llm_int8_"))
    }
    inside = kwargs.pop("quantization_config", None)
    if given is not None and inside is not None:
        raise ValueError("quantization_config was given twice: as an argument and in model_init_kwargs. Keep one.")
    config = inside if given is None else given
    asked = [name for name in BITS if fields.get(name)]
    if config is None:
        config = fields if asked else None
    elif asked and not any(
        config.get(name) if isinstance(config, dict) else getattr(config, name, None) for name in asked
    ):
        raise ValueError(
            f"model_init_kwargs has {asked[0]}=True beside a quantization_config that says otherwise. Keep one."
        )
    if isinstance(config, dict) and any(config.get(name) for name in BITS):
        require("bitsandbytes", "posttrain-core[quantization]", why="load_in_4bit and load_in_8bit")
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(**{name: value for name, value in config.items() if name != "quant_method"})
    return {} if config is None else {"quantization_config": config}


def load_tokenizer(
    source: str | os.PathLike[str] | nn.Module,
    trust_remote_code: bool = False,
    auto_class: str = "AutoTokenizer",
    **kwargs: Any,
) -> Any:
    """The tokenizer at a folder or Hub name, or the one that lies beside the weights a model was loaded from.

    Args:
        auto_class: the class of transformers to load with; AutoProcessor for what reads pictures too.

    Raises:
        ValueError: a model that was not loaded from anywhere.
    """
    import transformers

    if isinstance(source, nn.Module):
        path = getattr(getattr(base_model(source), "config", None), "name_or_path", "")
        if not path:
            raise ValueError(
                f"This {type(unwrap(source)).__name__} was not loaded from a folder or the Hub, so there is no tokenizer "
                "to load with it. Pass processing_class=<its tokenizer>."
            )
    else:
        path = os.fspath(source)
    with explain_missing(path, "tokenizer"):
        loader = getattr(transformers, auto_class)
        return loader.from_pretrained(path, trust_remote_code=trust_remote_code, **kwargs)


def _checked_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    if isinstance(name, torch.dtype) or name == "auto" or isinstance(getattr(torch, name, None), torch.dtype):
        return name
    raise ValueError(
        f"dtype={dtype!r} is not a type of torch{did_you_mean(name, DTYPES)}. Set one of {', '.join(DTYPES)}."
    )


@contextlib.contextmanager
def explain_missing(path: str, what: str) -> Iterator[None]:
    """Say of a model or tokenizer that cannot be loaded from `path` whether a folder or an answer of the Hub is missing.

    Raises:
        FileNotFoundError: in the place of what transformers raises in this context.
    """
    if _looks_local(path) and not os.path.exists(path):
        raise FileNotFoundError(f"The {what} folder {path!r} does not exist (looked from {os.getcwd()}).")
    try:
        yield
    except OSError as error:
        if os.path.isdir(path):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"{path!r} is not a folder here (looked from {os.getcwd()}), and the Hugging Face Hub gave no {what} under "
            f"that name: {reason} Check the name, or download it first if this machine is offline."
        ) from error


# ------------------------------------------------------------------------------------------------------ special tokens

PAD_CANDIDATES = (
    "<|pad|>",
    "<pad>",
    "[PAD]",
    "<|padding|>",
    "<|finetune_right_pad_id|>",  # Llama 3.1
    "<|vision_pad|>",  # Qwen 2 and later
    "<|endoftext|>",
    "<unk>",
)


def ensure_pad_token(processing_class: Any) -> str | None:
    """Give a tokenizer that has no pad token one it already knows, if possible other than its eos token.

    The vocabulary does not grow. Labels are masked by length, never by id, so that eos as pad costs no training signal.

    Returns:
        A sentence about what was done, or None.
    """
    tokenizer = _tokenizer_of(processing_class)
    if tokenizer.pad_token is not None:
        return None
    vocabulary = tokenizer.get_vocab()
    for token in PAD_CANDIDATES:
        if token in vocabulary and token != tokenizer.eos_token:
            tokenizer.pad_token = token
            return f"The tokenizer had no pad token; {token!r}, which its vocabulary holds, is used."
    if tokenizer.eos_token is None:
        raise ValueError(
            "The tokenizer has neither a pad nor an eos token, so batches cannot be padded. Set tokenizer.pad_token."
        )
    tokenizer.pad_token = tokenizer.eos_token
    return f"The tokenizer had no pad token; its eos token {tokenizer.eos_token!r} is used for padding too."


def align_special_tokens(model: nn.Module, processing_class: Any) -> dict[str, int]:
    """Copy the pad, eos and bos ids that the tokenizer has to the model's config and generation config.

    A generation config that stops at several tokens goes on stopping at them.

    Returns:
        ``{name of the id: new id}`` for what changed in either config.
    """
    base = base_model(model)
    config, generation = getattr(base, "config", None), getattr(base, "generation_config", None)
    tokenizer = _tokenizer_of(processing_class)
    if config is None or not hasattr(tokenizer, "eos_token_id"):
        return {}
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    changed = {}
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        token = getattr(tokenizer, name, None)
        if token is None:
            continue
        if getattr(config, name, None) != token:
            setattr(config, name, token)
            changed[name] = token
        if generation is None:
            continue
        known = getattr(generation, name, None)
        if name == "eos_token_id" and isinstance(known, (list, tuple)):
            if token not in known:
                generation.eos_token_id = [token, *known]
                changed[name] = token
        elif known != token:
            several = name == "eos_token_id" and known is not None
            setattr(generation, name, [token, known] if several else token)
            changed[name] = token
    return changed


def _tokenizer_of(processing_class: Any) -> Any:
    return getattr(processing_class, "tokenizer", processing_class)


# ------------------------------------------------------------------------------------------------------------ adapters


def is_quantized(model: nn.Module) -> bool:
    """Whether the weights of the base are stored in quantized form."""
    base = base_model(model)
    marks = ("is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit")
    return any(getattr(base, mark, False) for mark in marks) or getattr(base, "hf_quantizer", None) is not None


def check_trainable(model: nn.Module) -> None:
    """Raise ValueError where there is nothing to train: quantized weights without an adapter, which rounding keeps from taking
    small updates (unless transformers' ``is_qat_trainable`` says otherwise), and an adapter that is frozen."""
    base = base_model(model)
    adapted = is_peft_model(model) or getattr(base, "_hf_peft_config_loaded", False)
    for_training = getattr(getattr(base, "hf_quantizer", None), "is_qat_trainable", False)
    if is_quantized(model) and not adapted and not for_training:
        raise ValueError(
            f"This {type(base).__name__} is quantized, and quantized weights cannot be trained themselves. "
            "Pass peft_config (e.g. peft.LoraConfig()) to train an adapter on them, or load the model unquantized."
        )
    if is_peft_model(model) and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"The adapter of this {type(base).__name__} is frozen, so there is nothing to train. Load it with "
            "PeftModel.from_pretrained(model, folder, is_trainable=True)."
        )
    _keep_products_differentiable(base)


def _keep_products_differentiable(model: nn.Module) -> None:
    """Hold bitsandbytes' layers of 4 bits in the form through which gradients flow.

    On processors with AVX512-BF16 an evaluation packs them for good for a kernel without a backward pass: every layer before
    them would get no gradient from then on, in silence.
    """
    for module in model.modules():
        if not getattr(module, "support_avx512bf16_for_cpu", False):
            continue
        module.support_avx512bf16_for_cpu = False
        state = getattr(module.weight, "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            module.state_dict()  # writing it down unpacks it in place


def check_peft_config(peft_config: Any) -> Any:
    """The module peft, after a look at a `peft_config`.

    Raises:
        ImportError: it is not installed. TypeError: `peft_config` is none of its configs.
    """
    peft = require("peft", "posttrain-core[peft]", why="peft_config")
    if not isinstance(peft_config, peft.PeftConfig):
        raise TypeError(f"peft_config must be a peft.PeftConfig such as peft.LoraConfig(), not {peft_config!r}.")
    return peft


def add_adapter(model: nn.Module, peft_config: Any) -> nn.Module:
    """Freeze `model` and put the adapter that `peft_config` describes on it.

    On a base of 4 or 8 bits the adapter is kept in bfloat16 (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314).

    Returns:
        The `peft.PeftModel`.
    """
    peft = check_peft_config(peft_config)
    if is_peft_model(model):
        raise ValueError(
            "The model has an adapter already and peft_config asks for another. Train the one it has (leave out "
            "peft_config), or pass model.merge_and_unload() to build on it."
        )
    checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    adapted = peft.get_peft_model(model, peft_config)
    if checkpointed and hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()  # or reentrant checkpoints of frozen layers would cut the graph
    if is_quantized(model):
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    return adapted


# ------------------------------------------------------------------------------------------- what training does to it


def checkpointing_problem(model: nn.Module) -> str | None:
    """Why layers of `model` cannot be recomputed, and what to set, as a sentence; None if they can."""
    kind = unwrap(model).active_peft_config.peft_type if is_peft_model(model) else None
    if kind in ("PREFIX_TUNING", "CARTRIDGE"):  # the names of peft's enumeration, which are strings
        return (
            f"{kind.value} hands its prefix to the model as a key/value cache, which gradient checkpointing switches off. Set "
            "gradient_checkpointing=False, or train another adapter, such as peft.PromptTuningConfig or peft.LoraConfig."
        )
    return None


def enable_gradient_checkpointing(model: nn.Module, kwargs: dict[str, Any] | None = None) -> None:
    """Recompute the activations of each layer in the backward; also switches the key/value cache off.

    Args:
        kwargs: options of `torch.utils.checkpoint.checkpoint`, with `use_reentrant` False unless given; besides them
            `every_n_layers` and `offload`, where the installed transformers has them.

    Raises:
        ValueError: where `checkpointing_problem` says why not, and for a model without a method for it.
    """
    if problem := checkpointing_problem(model):
        raise ValueError(problem)
    base = base_model(model)
    options = {"use_reentrant": False} | (kwargs or {})
    extras = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
    if hasattr(base, "activation_checkpointing_enable"):
        base.activation_checkpointing_enable(activation_checkpointing_kwargs=options, **extras)
    elif hasattr(base, "gradient_checkpointing_enable"):
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options, **extras)
    else:
        raise ValueError(
            f"{type(base).__name__} has no gradient_checkpointing_enable(). Set activation_checkpointing=False, or "
            "define that method on the model."
        )
    if is_peft_model(model) and hasattr(base, "enable_input_require_grads"):
        base.enable_input_require_grads()
    if hasattr(base, "config"):
        base.config.use_cache = False


@contextlib.contextmanager
def neftune(model: nn.Module, alpha: float | None) -> Iterator[None]:
    r"""Noise on the input embeddings, in training mode only, until the context is left.

    Jain et al. 2023, https://arxiv.org/abs/2310.05914: :math:`x + \frac{\alpha}{\sqrt{Ld}} u` with u uniform in
    [-1, 1], for L positions of width d. No noise where alpha is None or 0.
    """
    if not alpha:
        yield
        return

    def add_noise(module: nn.Module, inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return embedded
        bound = alpha / math.sqrt(embedded.shape[-2] * embedded.shape[-1])
        return embedded + torch.empty_like(embedded).uniform_(-bound, bound)

    base = base_model(model)
    reads = getattr(getattr(base, "config", None), "is_encoder_decoder", False) and hasattr(base, "get_encoder")
    # Of a model with an encoder, what that reads: its embedding may be a module of its own, with weights that are shared.
    handle = (base.get_encoder() if reads else base).get_input_embeddings().register_forward_hook(add_noise)
    try:
        yield
    finally:
        handle.remove()


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability in `model` to 0: of dropout modules, and those kept as a plain number."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("_pdrop")):
                setattr(module, name, 0.0)


def apply_liger(model: nn.Module, config: dict[str, bool] | None = None) -> str | None:
    """Replace layers by Liger's Triton kernels (https://github.com/linkedin/Liger-Kernel).

    Returns:
        None, or a sentence that says why the model was left as it is.
    """
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as SUPPORTED
    except ImportError:
        return "use_liger_kernel=True has no effect: liger-kernel is not installed. Run: pip install liger-kernel"
    base = base_model(model)
    model_type = getattr(getattr(base, "config", None), "model_type", type(base).__name__)
    if model_type not in SUPPORTED:
        return f"use_liger_kernel=True has no effect: Liger has no kernels for {model_type!r} models."
    if not torch.accelerator.is_available():
        return "use_liger_kernel=True has no effect: Triton kernels need a GPU and none is visible."
    before = {name: _forward_of(module) for name, module in base.named_modules()}
    _apply_liger_kernel_to_instance(model=base, **(config or {}))
    changed = Counter(type(m).__name__ for name, m in base.named_modules() if _forward_of(m) != before.get(name))
    listed = (
        ", ".join(f"{kind} x {count}" for kind, count in changed.items()) or "functions of the modelling code alone"
    )
    logger.info("Liger's kernels replace the forward of: %s.", listed)
    return None


def _forward_of(module: nn.Module) -> Any:
    return getattr(module.forward, "__func__", module.forward)
