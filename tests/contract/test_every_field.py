"""No argument is accepted and ignored: product code reads every field of every config, or a sentence below says why
not. What stands within a dict, and what another field decides over, changes something or is named.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
import warnings
from functools import cache

import pytest
import torch

import posttrain.rl
import posttrain.sft
from posttrain.cli.mixture import CommandSource
from posttrain.cli.scripts import ScriptArguments
from posttrain.cli.tools.launch import LaunchArguments
from posttrain.core import ModelConfig, TrainingArguments
from posttrain.core.config import field_types
from posttrain.core.distributed import accelerator_config, shard_settings
from posttrain.core.errors import ConfigError
from posttrain.lm.loading.adapters import add_adapter
from posttrain.lm.loading.loading import load_causal_lm
from posttrain.rl import GRPOConfig, GRPOTrainer, RLOOConfig
from posttrain.seq2seq import Seq2SeqConfig
from posttrain.sft import SFTConfig
from tests import tiny
from tests.contract.trainers import arguments
from tests.test_architecture import sources, tree

CONFIGS = [
    *(TrainingArguments, SFTConfig, Seq2SeqConfig, ModelConfig, CommandSource, LaunchArguments, ScriptArguments),
    *sorted((getattr(posttrain.rl, name) for name in posttrain.rl.__all__
             if name.endswith("Config") and name not in posttrain.sft.__all__), key=lambda kind: len(kind.__mro__)),
]  # fmt: skip
#: Where a field is only checked, or brought into another form, which is no use of it.
CHECKS = ("_problems", "_normalize", "_preflight", "__post_init__", "_accumulation_problems")
#: Fields that no code names, and why they are accepted.
MEANT = {
    "ds3_gather_for_generation": "refused as False for a sharded model, and elsewhere there is nothing to gather",
    "ignore_bias_buffers": "for the script to read, as its help says",
    "do_train": "for scripts that ask, as its help says",
    "do_predict": "for scripts that ask, as its help says",
    "do_eval": "for scripts that ask, as its help says",
    "eval_use_gather_object": "its help says that predictions of any kind are gathered, with and without it",
    "gradient_checkpointing_kwargs": "the older name of activation_checkpointing_kwargs, kept equal to it",
    "sortish_sampler": "the older name of train_sampling_strategy='group_by_length', which it sets",
    "trackio_bucket_id": "read by transformers' tracker, which is shown all arguments",
    "trackio_static_space_id": "read by transformers' tracker, which is shown all arguments",
    "trackio_space_id": "read by transformers' tracker, which is shown all arguments",
    "distributed_type": "it sets use_fsdp, use_deepspeed and use_cpu",
    "compute_environment": "one value is allowed, which says nothing",
}


class Reads(ast.NodeVisitor):
    """The names of attributes that are read, and the words that `getattr` and `value_of` are given, outside of
    checks.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name not in CHECKS and not re.match("set_(?!up_)", node.name):
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self.names.add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "value_of") and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant):
                self.names.add(name.value)
            elif isinstance(name, ast.JoinedStr):  # getattr(args, f"{name}_steps")
                self.endings.add("".join(part.value for part in name.values if isinstance(part, ast.Constant)))
        self.generic_visit(node)

    endings: set[str] = set()


@cache
def read() -> set[str]:
    reads = Reads()
    for where in sources():
        reads.visit(tree(where))
    return reads.names


@pytest.mark.parametrize("config_class", CONFIGS, ids=lambda c: c.__name__)
def test_product_code_reads_every_field(config_class):
    names = {field.name for field in dataclasses.fields(config_class) if field.init}
    assert sorted(names - read() - set(MEANT)) == []


def test_the_list_of_exceptions_holds_no_field_that_is_read_or_gone():
    fields = {field.name for config_class in CONFIGS for field in dataclasses.fields(config_class)}
    assert sorted(set(MEANT) - fields) == []
    assert sorted(name for name in MEANT if name in read()) == []


def test_the_search_sees_what_is_only_checked():
    reads = Reads()
    reads.visit(
        ast.parse(
            "class C:\n def _problems(self):\n  self.a\n def use(self):\n  self.b = 1; getattr(self, 'c'); self.d"
            "\n  value_of(self, 'e')"
        )
    )
    assert reads.names == {"c", "d", "e"}


@pytest.mark.parametrize("config_class", CONFIGS, ids=lambda c: c.__name__)
def test_no_field_takes_a_tuple_alone_which_neither_a_file_nor_a_flag_can_give(config_class):
    assert [name for name, kinds in field_types(config_class).items() if tuple in kinds and list not in kinds] == []


@pytest.mark.parametrize("given", [(-1.0, 0.5), [-1.0, 0.5], "flags", "dict"])
def test_two_bounds_are_read_from_wherever_they_come(given):
    from transformers import HfArgumentParser

    parser, own = HfArgumentParser(RLOOConfig), ["--output_dir", "out", "--use_cpu", "True"]
    if given == "flags":
        (args,) = parser.parse_args_into_dataclasses([*own, "--reward_clip_range", "-1", "0.5"])
    elif given == "dict":
        (args,) = parser.parse_dict({"output_dir": "out", "use_cpu": True, "reward_clip_range": [-1, 0.5]})
    else:
        args = RLOOConfig("out", use_cpu=True, reward_clip_range=given)
    assert args.reward_clip_range == [-1, 0.5]
    assert RLOOConfig("out", use_cpu=True, reward_clip_range=(0, float("inf"))).reward_clip_range[1] == float("inf")


#: Fields that read a dict or an empty list although their type does not say so.
READS = {"generation_config={'a': 1}", "teacher_server_urls=[]"}


@pytest.mark.parametrize("config_class", [kind for kind in CONFIGS if issubclass(kind, TrainingArguments)])
def test_a_value_of_another_type_is_refused_by_the_name_of_its_field(config_class, tmp_path):
    own = field_types(config_class)
    inherited = [field_types(base) for base in config_class.__mro__[1:] if base in CONFIGS]  # tested with that class
    types = {name: str(kind) for name, kind in own.items() if all(kind != of.get(name) for of in inherited)}
    accepted = []
    for name, value in itertools.product(types.keys() - {"output_dir"}, (object(), {"a": 1}, [])):
        if f"{name}={value!r}" in READS or re.search(f"Any|Callable|{type(value).__name__}", types[name]):
            continue
        try:
            config_class(str(tmp_path), use_cpu=True, **{name: value})
            accepted.append(f"{name}={value!r}")
        except (ValueError, TypeError) as error:
            assert name in str(error)
    assert accepted == []


# ---------------------------------------------------------------- fields that others decide over


def conditional() -> list[tuple[type, dataclasses.Field, str]]:
    """(config, field, what it needs) of every field that has an effect beside some values of others alone."""
    known: dict[tuple[str, str], tuple[type, dataclasses.Field, str]] = {}
    for config_class in CONFIGS:
        for field in dataclasses.fields(config_class):
            if needs := getattr(field.metadata.get("help"), "bounds", {}).get("needs"):
                known.setdefault((field.name, needs), (config_class, field, needs))
    return list(known.values())


#: A value other than the default, where the half or the double of a number will not do.
OTHER = {
    "vllm_mode": "server", "vllm_model_impl": "auto", "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_min": 0.5, "ema_use": "eval", "packing_strategy": "wrapped",
    "transformers_continuous_batching_config": {"block_size": 16}, "eval_steps": 7, "log_multimodal": False,
    "use_bias_correction_kl": False, "vllm_gpu_memory_utilization": 0.4,
    "ref_model_mixup_alpha": 0.5, "entropy_coef_min": 0.5, "curriculum_explore": 0.5, "curriculum_update": 0.25,
    "teacher_update_rate": 0.5, "lora_dropout": 0.5, "lora_target_modules": ["q_proj"],
    "lora_modules_to_save": ["norm"], "lora_target_parameters": ["experts"], "lora_task_type": "SEQ_CLS",
    "init_lora_weights": "olora", "bnb_4bit_quant_type": "fp4",
    "bnb_4bit_quant_storage": "int8",
}  # fmt: skip
#: What is set beside a field that cannot be set alone.
TOGETHER = {
    "uld_hybrid_matched_weight": {"uld_hybrid_unmatched_weight": 3},
    "uld_hybrid_unmatched_weight": {"uld_hybrid_matched_weight": 3},
}


def another(config_class: type, field: dataclasses.Field) -> object:
    """A value of `field` that is not its default."""
    if field.name in OTHER:
        return OTHER[field.name]
    if isinstance(field.default, bool):
        return not field.default
    if field.default is None:
        return "x" if str in field_types(config_class)[field.name] else 3
    return "x" if isinstance(field.default, str) else type(field.default)(field.default * 0.75 + 2)


def told(make) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return " ".join(str(one.message) for one in caught)


@pytest.mark.parametrize(
    ("config_class", "field", "needs"), conditional(), ids=lambda value: getattr(value, "name", "")
)
def test_a_field_that_others_leave_without_effect_is_named(config_class, field, needs):
    usual = {"output_dir": "out", "use_cpu": True, "use_vllm": False}
    usual = {name: value for name, value in usual.items() if name in {f.name for f in dataclasses.fields(config_class)}}
    value = another(config_class, field)
    given = {field.name: value} | TOGETHER.get(field.name, {})
    for need in needs.split():
        name, _, values = need.partition("|")[0].partition("=")
        off = values.split(",")[0] == "False" if values in ("True", "False") else None
        declared = {f.name: f for f in dataclasses.fields(config_class)}[name]
        if off is None and values:
            choices = [c for c in declared.metadata["help"].bounds["choices"] if c not in values.split(",")]
            wrong = [choices[0]] if list in field_types(config_class)[name] else choices[0]
        else:
            wrong = True if off else None if declared.default is None else type(declared.default)(0)
        changes = {name: wrong}
        if name == "use_transformers_continuous_batching":
            changes["use_vllm"] = False
        changes |= dict.fromkeys(need.split("|")[1:], wrong)
        said = told(lambda changes=changes: config_class(**usual | changes | given))
        without = f"no effect without {needs.split()[0]}".replace("|", " or ")
        assert (f"{field.name}=" in said and without in said) or need in said, said
        assert f"{field.name}=" not in told(lambda changes=changes: config_class(**usual | changes)), field.name


def test_what_a_field_needs_is_a_field():
    for config_class, field, needs in conditional():
        for need in needs.split():
            names = {one.partition("=")[0] for one in need.split("|")}
            assert names <= {f.name for f in dataclasses.fields(config_class)}, f"{field.name} needs {need}"


# ---------------------------------------------------------------- keys within dicts

#: A value of each option of ``fsdp_config`` that is not its default, with what it needs.
FSDP = {
    "version": {"version": 1}, "reshard_after_forward": {"reshard_after_forward": False},
    "sharding_strategy": {"sharding_strategy": "SHARD_GRAD_OP"}, "cpu_offload": {"cpu_offload": True},
    "offload_params": {"offload_params": True}, "activation_checkpointing": {"activation_checkpointing": True},
    "cpu_ram_efficient_loading": {"cpu_ram_efficient_loading": True},
    "state_dict_type": {"state_dict_type": "SHARDED_STATE_DICT"},
    "auto_wrap_policy": {"auto_wrap_policy": "NO_WRAP"},
    "transformer_layer_cls_to_wrap": {"transformer_layer_cls_to_wrap": "A"},
    "transformer_cls_names_to_wrap": {"transformer_cls_names_to_wrap": ["A"]},
    "transformer_cls_to_wrap": {"transformer_cls_to_wrap": "A"},
    "min_num_params": {"min_num_params": 5},
    "mixed_precision_policy": {"mixed_precision_policy": "bf16"}, "xla": {"xla": True},
}  # fmt: skip


@pytest.mark.parametrize("name", [*shard_settings.NAMES, *shard_settings.WITHOUT_EFFECT])
def test_every_option_of_fsdp_config_changes_something_or_is_named(name):
    plain, _ = shard_settings.read("full_shard", None)
    settings, problems = shard_settings.read("full_shard", FSDP.get(name, {name: True}))
    said = " ".join([*problems, *settings.notes])
    changed = dataclasses.replace(settings, notes=()) != dataclasses.replace(plain, notes=())
    assert changed or name in said or (name == "version" and "version 1" in said)
    if name != "reshard_after_forward":  # False, as others are where nothing is asked for
        assert any(name in problem for problem in shard_settings.read(None, FSDP.get(name, {name: True}))[1])


@pytest.mark.parametrize(("fsdp", "config", "said"), [
    ("full_shard", {"min_num_params": 5, "auto_wrap_policy": "NO_WRAP"}, "min_num_params"),
    ("full_shard", {"auto_wrap_policy": "NO_WRAP", "transformer_cls_to_wrap": "A"}, "transformer_layer_cls_to_wrap"),
    ("full_shard", {"mixed_precision_policy": {"param_dtype": "bf16", "output_dtype": "fp32"}}, "output_dtype"),
    ("full_shard", {"mixed_precision_policy": {"cast_forward_inputs": False}}, "cast_forward_inputs"),
    (None, {"cpu_offload": True}, "cpu_offload"),
], ids=str)  # fmt: skip
def test_options_of_fsdp_that_shadow_one_another_are_named(fsdp, config, said):
    assert any(said in problem for problem in shard_settings.read(fsdp, config)[1])
    assert shard_settings.read(None, {"min_num_params": 0, "xla": False, "version": None}) == (None, [])


@pytest.mark.parametrize("name", ["tp_sise", "cp_sise", "sp_sise", "dp_size"])
def test_a_misspelled_size_is_named(name):
    problems: list[str] = []
    shard_settings.parallel_sizes({name: 2}, problems)
    assert any(name in problem for problem in problems)


#: Options of `accelerator_config` that change something, and where a test sees it: the others are refused by name.
ACCELERATOR = {
    "split_batches": "train_batch_size is a share", "even_batches": "rows are never repeated, with and without it",
    "non_blocking": "args.non_blocking", "gradient_accumulation_kwargs": "args.gradient_accumulation_steps",
    "use_configured_state": "another precision is refused (tests/core/test_drop_in.py)",
}  # fmt: skip


@pytest.mark.parametrize("name", accelerator_config.DEFAULTS)
def test_every_option_of_accelerator_config_changes_something_or_is_refused(name):
    usual = {"output_dir": "out", "use_cpu": True}
    value = {"gradient_accumulation_kwargs": {"num_steps": 3}}.get(name, not accelerator_config.DEFAULTS[name])
    if name not in ACCELERATOR:
        with pytest.raises(ConfigError, match=f"{name}=.* has no effect"):
            TrainingArguments(**usual, accelerator_config={name: value})
        return
    made = TrainingArguments(**usual, accelerator_config={name: value})
    plain = TrainingArguments(**usual)
    if name == "gradient_accumulation_kwargs":
        assert (made.gradient_accumulation_steps, plain.gradient_accumulation_steps) == (3, 1)
    elif name == "non_blocking":
        assert made.non_blocking != plain.non_blocking


#: A value of each field of peft's LoraConfig that changes the adapter, or of which something is said.
LORA = {
    "r": 3, "target_modules": ["v_proj"], "exclude_modules": ["v_proj"], "lora_alpha": 3, "lora_dropout": 0.5,
    "bias": "lora_only", "use_rslora": True, "modules_to_save": ["lm_head"], "init_lora_weights": False,
    "layers_to_transform": [0], "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"q_proj": 3},
    "trainable_token_indices": [3], "use_dora": True, "lora_bias": True, "target_parameters": ["gate_proj.weight"],
    "ensure_weight_tying": True, "fan_in_fan_out": True,
}  # fmt: skip
#: What has no effect on a model here, and is said or refused in words that name it.
SAID = {"use_qalora": True, "qalora_group_size": 8, "layer_replication": [(0, 2), (1, 2)]}
#: Fields that are not in the tables above, by the reason.
OF_PEFT = {
    "what peft writes about an adapter": "task_type peft_type auto_mapping peft_version",
    "what names the base, for loading": "base_model_name_or_path revision",
    "whether it is loaded to train: refused by check_trainable": "inference_mode",
    "refused or warned of by peft": "layers_pattern loftq_config eva_config corda_config use_bdlora",
    "for Megatron's layers": "megatron_config megatron_core",
    "gradients, and not what is computed": "velora_config",
    "adapters of these kinds have tests of their own": "alora_invocation_tokens",
    "other computations, by a config of peft": "monteclora_config kasa_config lora_ga_config runtime_config",
    "refused, see below": "arrow_config",
}
#: Names that match nothing.
ASTRAY = {
    "target_modules": ["q_proj", "nothing"], "target_parameters": ["nothing.weight"], "modules_to_save": ["nothing"],
    "exclude_modules": ["nothing"], "rank_pattern": {"nothing": 3}, "alpha_pattern": {"nothing": 3},
    "layers_to_transform": [0, 7],
}  # fmt: skip


def adapter(**changes):
    """What an adapter trains and computes, and what was said about it."""
    from peft import LoraConfig

    usual = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    model = tiny.causal_lm("qwen2")  # whose q_proj has a bias
    torch.manual_seed(0)
    made = []
    said = told(lambda: made.append(add_adapter(model, LoraConfig(**usual | changes))))
    trained = {name: p for name, p in made[0].named_parameters() if p.requires_grad}
    start = [(name, p.detach().clone()) for name, p in trained.items()]
    with torch.no_grad():
        for number, p in enumerate(trained.values()):
            p.add_(0.01 * (1 + number))
    torch.manual_seed(0)
    with torch.no_grad():
        logits = made[0].train()(input_ids=torch.arange(2, 10)[None]).logits
    return [name for name, _ in start], torch.cat([p.flatten() for _, p in start]), logits, said


@pytest.mark.parametrize("name", LORA)
def test_every_field_of_a_lora_config_changes_the_adapter_or_is_named(name):
    names, start, logits, _ = adapter()
    other, begun, computed, said = adapter(**{name: LORA[name]})
    same = other == names and torch.equal(begun, start) and torch.equal(computed, logits)
    assert not same or name in said


@pytest.mark.parametrize("name", SAID)
def test_a_field_of_a_lora_config_without_effect_is_named(name):
    try:
        said = adapter(**{name: SAID[name]})[-1]
    except ValueError as error:
        said = str(error)
    assert name in said


def test_arrow_routing_which_trains_nothing_is_refused_by_name():
    from peft.tuners.lora.config import ArrowConfig

    with pytest.raises(ValueError, match="arrow_config"):
        adapter(arrow_config=ArrowConfig())


def test_no_field_of_a_lora_config_is_missing_from_these_tables():
    from peft import LoraConfig

    others = {name for names in OF_PEFT.values() for name in names.split()}
    assert {field.name for field in dataclasses.fields(LoraConfig)} <= {*LORA, *SAID, *others}


@pytest.mark.parametrize("name", ASTRAY)
def test_a_name_in_a_lora_config_that_matches_nothing_is_said(name):
    said = adapter(**{name: ASTRAY[name]})[-1]
    assert name in said and ("nothing" in said or "7" in said)


@pytest.mark.parametrize(("kwargs", "seen"), [
    ({"dtype": "bfloat16"}, lambda model: model.dtype == torch.bfloat16),
    ({"torch_dtype": "float16"}, lambda model: model.dtype == torch.float16),
    ({"attn_implementation": "eager"}, lambda model: model.config._attn_implementation == "eager"),
    ({"use_cache": False}, lambda model: model.config.use_cache is False),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
     lambda model: model.config.rope_parameters["rope_theta"] == 77.0),
    ({"dtipe": "bfloat16"}, "dtipe"), ({"output_looding_info": True}, "output_looding_info"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")  # fmt: skip
def test_every_key_of_model_init_kwargs_reaches_the_model_or_is_refused(kwargs, seen, tmp_path):
    tiny.causal_lm().save_pretrained(tmp_path)
    if isinstance(seen, str):
        with pytest.raises((TypeError, ValueError), match=seen):
            load_causal_lm(str(tmp_path), kwargs)
    else:
        assert seen(load_causal_lm(str(tmp_path), kwargs)) and not seen(load_causal_lm(str(tmp_path)))


#: Fields of GenerationConfig that a trainer's own arguments stand for, with a value that differs from them.
SAMPLED = {
    "temperature": 0.3, "top_k": 3, "top_p": 0.4, "min_p": 0.2, "repetition_penalty": 1.7, "max_new_tokens": 3,
    "max_length": 9, "do_sample": False, "eos_token_id": 7,
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLED)
def test_every_key_of_generation_kwargs_that_the_arguments_stand_for_is_followed_or_refused(name, tmp_path):
    def sampling(**changes):
        args = arguments(
            GRPOConfig, tmp_path, num_generations=2, max_completion_length=5, per_device_train_batch_size=2, **changes
        )
        rows = [{"prompt": "How many ?"}] * 2
        trainer = GRPOTrainer(tiny.causal_lm(), len, args, rows, processing_class=tiny.tokenizer())
        return trainer.sampling()

    try:
        assert sampling(generation_kwargs={name: SAMPLED[name]}) != sampling()
    except ConfigError as error:
        assert name in str(error)
