"""The arguments about the model: of every trainer of language models, and of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain.core.arguments import TrainingArguments
from posttrain.core.config import ConfigMeta, JSONObject, Resolved, opt, set_among, validate
from posttrain.core.data import accelerator
from posttrain.core.errors import missing, require
from posttrain.core.fields.old_names import AnswersToOldNames
from posttrain.lm.loading.adapters import is_same_adapter, saved_config
from posttrain.lm.loading.loading import DTYPES, is_adapter, loading_problems
from posttrain.lm.loading.quantization import BITS


@dataclass
class LanguageModelArguments(TrainingArguments):
    """What every trainer of language models has, where the model may be given by name."""

    logging_steps: float | str = opt(
        10, "Optimizer steps between log records; below 1 a share of all steps; or 0.5ep, 10Mtok or 30min.", above=0
    )
    activation_checkpointing: bool | None = opt(
        True, "Recompute activations in the backward pass: about a third slower, far less memory."
    )
    activation_offloading: bool = opt(
        False,
        "Keep activations in host memory between forward and backward: far less memory of the GPU, somewhat slower.",
    )
    bf16: Resolved[bool | None, bool] = opt(
        None, "Compute in bfloat16 under autocast. None: on a GPU that has it, off on the CPU.", flag=True
    )
    model_init_kwargs: JSONObject = opt(None, "Arguments of from_pretrained, for a model given by name.")
    trust_remote_code: bool = opt(False, "Run code from the model's repository. Only for code that you have read.")
    router_aux_loss_coef: float | None = opt(
        None,
        "Weight of a mixture of experts' load-balancing loss; None: as in the model's config. 0 turns it off.",
        min=0,
    )

    def _normalize(self) -> None:
        if self.bf16 is None:
            self.bf16 = not (self.fp16 or self.use_cpu) and accelerator.computes_bfloat16()


@dataclass
class ModelConfig(AnswersToOldNames, metaclass=ConfigMeta):
    """Which model a command line trains, how it is loaded, and its adapter."""

    model_name_or_path: str | None = opt(None, "Model to train: a folder, or a name on the Hugging Face Hub.")
    model_revision: str = opt("main", "Branch, tag or commit on the Hub.")
    dtype: str | None = opt(
        "float32", "Type of the weights; auto takes that of the checkpoint.", choices=DTYPES, aliases=("torch_dtype",)
    )
    attn_implementation: str | None = opt(None, "Attention implementation, e.g. sdpa, eager or flash_attention_2.")
    use_peft: bool = opt(False, "Train a LoRA adapter instead of all weights.")
    lora_r: int = opt(16, "Rank of the LoRA matrices. Larger learns more and stores more.", min=1, needs="use_peft")
    lora_alpha: int = opt(32, "The LoRA weights are multiplied by lora_alpha / lora_r.", above=0, needs="use_peft")
    lora_dropout: float = opt(0.05, "Dropout on the input of the LoRA matrices.", min=0, below=1, needs="use_peft")
    lora_target_modules: list[str] | None = opt(
        None, "Modules with an adapter; all-linear: every linear but the head.", needs="use_peft"
    )
    lora_target_parameters: list[str] | None = opt(
        None, "Names of parameters with an adapter, for experts in one tensor.", needs="use_peft"
    )
    lora_modules_to_save: list[str] | None = opt(
        None, "Modules trained and stored whole, e.g. lm_head.", needs="use_peft"
    )
    lora_task_type: str = opt(
        "CAUSAL_LM",
        "Task type given to peft; of a classifier or an encoder-decoder, its own.",
        choices=("CAUSAL_LM", "SEQ_CLS", "SEQ_2_SEQ_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"),
        needs="use_peft",
    )
    use_rslora: bool = opt(
        False, "Multiply the LoRA weights by lora_alpha / sqrt(lora_r), stable at high ranks.", needs="use_peft"
    )
    init_lora_weights: str | None = opt(
        None,
        "How the LoRA matrices begin: pissa and olora take the largest part of the weights over. None: B at 0.",
        choices=("gaussian", "olora", "orthogonal", "pissa"),
        needs="use_peft",
    )
    use_dora: bool = opt(
        False, "Learn the magnitude of the weights apart from their direction (DoRA); slower.", needs="use_peft"
    )
    load_in_8bit: bool = opt(False, "Load the frozen base in 8 bits (bitsandbytes); needs use_peft.")
    load_in_4bit: bool = opt(False, "Load the frozen base in 4 bits (bitsandbytes, QLoRA); needs use_peft.")
    bnb_4bit_quant_type: str = opt("nf4", "4-bit number format.", choices=("nf4", "fp4"), needs="load_in_4bit")
    use_bnb_nested_quant: bool = opt(
        False, "Quantize the 4-bit scales too: about 0.4 bits a weight less.", needs="load_in_4bit"
    )
    bnb_4bit_quant_storage: str | None = opt(
        None,
        "Type the 4-bit weights are packed in; FSDP needs that of dtype.",
        choices=("uint8", "int8", *DTYPES[1:]),
        needs="load_in_4bit",
    )

    def __post_init__(self) -> None:
        validate(self)

    def _problems(self) -> Iterator[str]:
        if self.load_in_8bit and self.load_in_4bit:
            yield "load_in_8bit=True and load_in_4bit=True cannot both hold; keep one"
        elif (self.load_in_8bit or self.load_in_4bit) and not self.use_peft:
            bits = "load_in_8bit" if self.load_in_8bit else "load_in_4bit"
            yield f"{bits}=True: quantized weights are not trained themselves; set use_peft=True to train an adapter"
        if self.use_peft and self.lora_target_modules == [] and not self.lora_target_parameters:
            yield "lora_target_modules=[] adapts nothing; leave it out for those of peft, or name some, as all-linear"
        if self.use_peft and self.lora_target_parameters and self.lora_dropout:
            yield f"lora_dropout={self.lora_dropout}: adapters of lora_target_parameters have no dropout; set it to 0"

    def _preflight(self) -> Iterator[str | Exception]:
        if self.model_name_or_path is not None:
            quantized = dict.fromkeys(set_among(self, *BITS), True)
            yield from loading_problems(self.model_name_or_path, self.model_init_kwargs() | quantized)
        if self.use_peft:
            error = missing("peft", "posttrain-core[peft]", "use_peft=True")
            yield from [error] if error else self._problems_of_another_adapter()

    def _problems_of_another_adapter(self) -> Iterator[str]:
        folder = self.model_name_or_path
        if folder is None or not is_adapter(folder):
            return
        if not is_same_adapter(saved_config(folder), self.peft_config(), ""):
            yield (
                f"model_name_or_path={folder!r} holds an adapter, and use_peft=True would put another on it. Leave "
                f"use_peft out to train that one further, or merge it first: posttrain merge {folder} {folder}-merged"
            )

    #: Scripts read it here; it is an argument of the trainers' configs, which load the model.
    trust_remote_code: ClassVar[bool] = False

    @classmethod
    def accept_old_names(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        """``trust_remote_code=False``, which earlier versions took here."""
        return {name: value for name, value in kwargs.items() if (name, value) != ("trust_remote_code", False)}

    @classmethod
    def unknown_argument_hint(cls, name: str) -> str:
        return ": set it in the trainer's config, such as SFTConfig" if name == "trust_remote_code" else ""

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
        targets: list[str] | str | None = self.lora_target_modules
        if isinstance(targets, list) and len(targets) == 1 and not targets[0].isidentifier():
            targets = targets[0]  # a pattern, or all-linear, which peft accepts only as a string
        return peft.LoraConfig(
            task_type=self.lora_task_type,
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=targets,
            target_parameters=self.lora_target_parameters,
            modules_to_save=self.lora_modules_to_save,
            use_rslora=self.use_rslora,
            init_lora_weights=self.init_lora_weights or True,
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
