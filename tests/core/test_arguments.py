"""TrainingArguments: the names and defaults that scripts know, checked when the object is made."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import subprocess
import sys
import typing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import yaml
from transformers import HfArgumentParser, SchedulerType
from transformers.training_args import ParallelMode

from posttrain.cli import parse
from posttrain.core import registry
from posttrain.core.arguments import OLD_NAMES, TrainingArguments
from posttrain.core.config import check, field_types, opt
from posttrain.core.errors import ConfigError
from posttrain.core.training.plan import NEVER
from posttrain.lm.loading.arguments import ModelConfig
from tests import programs

# Defaults that differ from transformers' on purpose, each with its reason.
MEANT = {
    "restore_callback_states_from_checkpoint": (True, "a resumed run stops early when the straight one would have"),
}
# Fields of transformers that do not exist here yet; `OLD_NAMES` says what to do instead.
TO_COME = {
    "logging_nan_inf_filter",  # non-finite numbers are never hidden
}  # fmt: skip
# Fields that transformers does not have (any more).
OURS = {"overwrite_output_dir", "on_nonfinite", "max_nonfinite_steps"}
OURS |= {"keep_freed_memory", "ema_decay", "ema_update_steps", "ema_start_step", "ema_use"}
OURS |= {"logging_dir", "report"}
OURS |= {"save_async", "save_top_k", "remote_dir", "save_on_signal", "save_on_exception", "max_time"}
OURS |= {"max_duration", "max_shard_size", "check_saved_model", "on_loss_spike", "loss_spike_threshold"}
OURS |= {"loraplus_lr_ratio", "on_bad_rows", "limit_train_batches", "limit_eval_batches", "overfit_batches"}
OURS |= {"allow_pickle", "max_batch_tokens", "global_batch_size", "fp8"}


def problems_of(**kwargs) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        TrainingArguments(**kwargs)
    return caught.value.problems


def default_of(field: dataclasses.Field):
    return field.default_factory() if field.default is dataclasses.MISSING else field.default


# ---- names and defaults ----


def test_names_and_defaults_are_those_of_transformers():
    from transformers import TrainingArguments as Theirs

    theirs = {field.name: default_of(field) for field in dataclasses.fields(Theirs)}
    ours = {field.name: default_of(field) for field in dataclasses.fields(TrainingArguments)}
    assert set(theirs) - set(ours) - TO_COME == set()
    newer = {"activation_checkpointing", "activation_checkpointing_kwargs"}  # than transformers 5.17
    assert set(ours) - set(theirs) - newer == OURS
    expected = theirs | {name: default for name, (default, _) in MEANT.items()}
    assert {n: d for n, d in ours.items() if n in theirs and d != expected[n]} == {}


def test_what_is_to_come_says_what_to_do_instead():
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert TO_COME - fields <= set(OLD_NAMES)
    assert all(OLD_NAMES[name].why.strip() for name in TO_COME)


def test_the_first_argument_is_the_output_folder():
    assert TrainingArguments("out").output_dir == "out"
    assert TrainingArguments(Path("out")).output_dir == "out"


def test_the_output_folder_has_a_default_and_expands_the_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert TrainingArguments().output_dir == "trainer_output"
    assert TrainingArguments("~/runs").output_dir == "/home/someone/runs"


def test_every_field_has_help_that_argparse_can_print():
    for known in dataclasses.fields(TrainingArguments):
        text = known.metadata["help"]
        assert text.endswith("."), known.name
        assert text % {} == text, f"{known.name}: argparse would format the help"


@pytest.mark.long
def test_making_arguments_touches_nothing(tmp_path):
    code = (
        "import sys, os; from posttrain.core.arguments import TrainingArguments; "
        "TrainingArguments('out', bf16=True, eval_strategy='epoch'); "
        "print(sorted(set(sys.modules) & {'transformers', 'accelerate', 'datasets', 'peft', 'bitsandbytes'}),"
        " os.listdir(), __import__('torch').distributed.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] [] False"


# ---- strategies and derived values ----


def test_strategies_are_strings_that_also_answer_as_enums():
    from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType
    from transformers.training_args import OptimizerNames

    args = TrainingArguments(
        eval_strategy=IntervalStrategy.EPOCH, save_strategy=SaveStrategy.EPOCH, optim=OptimizerNames.ADAMW_TORCH,
        lr_scheduler_type=SchedulerType.COSINE,
    )  # fmt: skip
    assert args.eval_strategy == "epoch" == args.eval_strategy.value
    assert args.eval_strategy == IntervalStrategy.EPOCH and args.eval_strategy != IntervalStrategy.NO
    assert (args.save_strategy, args.optim, args.lr_scheduler_type) == ("epoch", "adamw_torch", "cosine")
    assert type(args.to_dict()["eval_strategy"]) is str


def test_eval_steps_follow_the_logging_steps():
    assert TrainingArguments(eval_strategy="steps", logging_steps=7).eval_steps == 7
    assert TrainingArguments(eval_strategy="steps", logging_steps=7, eval_steps=3).eval_steps == 3
    assert TrainingArguments(eval_strategy="epoch", logging_steps=7).eval_steps is None


def test_none_is_what_it_is_to_the_peer_where_scripts_write_it():
    args = TrainingArguments(bf16=None, remove_unused_columns=None, save_strategy="no", save_steps=None)
    assert (args.bf16, args.remove_unused_columns, args.save_steps) == (False, False, 500)
    with pytest.raises(ConfigError, match="save_steps=None must be of type"):
        TrainingArguments(save_strategy="steps", save_steps=None)


def test_do_eval_is_switched_on_by_the_strategy():
    assert TrainingArguments(eval_strategy="epoch").do_eval
    assert not TrainingArguments().do_eval


def test_steps_above_one_are_whole_and_below_one_a_share():
    args = TrainingArguments(logging_steps=10.0, save_steps=0.25)
    assert args.logging_steps == 10 and isinstance(args.logging_steps, int) and args.save_steps == 0.25
    for name in ("logging", "save"):
        (problem,) = problems_of(**{f"{name}_steps": 2.5})
        assert problem.startswith(f"{name}_steps=2.5 must be") and "whole" in problem
    assert "eval_steps=2.5 must be whole" in problems_of(eval_strategy="steps", eval_steps=2.5)[0]


def test_the_metric_of_the_best_model_has_a_default_and_a_direction():
    keep = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
    args = TrainingArguments(**keep)
    assert (args.metric_for_best_model, args.greater_is_better) == ("loss", False)
    for metric, greater in (("accuracy", True), ("eval_loss", False), ("loss_ratio", True)):
        assert TrainingArguments(**keep, metric_for_best_model=metric).greater_is_better is greater
    assert (
        TrainingArguments(**keep, metric_for_best_model="accuracy", greater_is_better=False).greater_is_better is False
    )
    assert TrainingArguments().metric_for_best_model is None and TrainingArguments().greater_is_better is None


def test_a_backend_or_a_mode_switches_compiling_on_and_the_backend_is_named():
    for given in (
        {"torch_compile": True},
        {"torch_compile_mode": "max-autotune"},
        {"torch_compile_backend": "inductor"},
    ):
        args = TrainingArguments(**given)
        assert (args.torch_compile, args.torch_compile_backend) == (True, "inductor")
    assert (TrainingArguments().torch_compile, TrainingArguments().torch_compile_backend) == (False, None)


def test_the_cpu_has_no_memory_to_pin():
    assert TrainingArguments(use_cpu=True).dataloader_pin_memory is False
    assert TrainingArguments().dataloader_pin_memory is True


def test_trackers_may_be_named_in_every_way():
    for given, kept in ((None, []), ("none", []), (["none"], []), ("wandb", ["wandb"]), (("a", "b"), ["a", "b"])):
        assert TrainingArguments(report_to=given).report_to == kept


def test_a_text_in_place_of_a_list_is_one_problem():
    assert problems_of(include_for_metrics="inputs") == ["include_for_metrics='inputs' must be of type list"]
    assert problems_of(include_for_metrics=["inputz"]) == [
        "include_for_metrics holds 'inputz'; it may hold 'inputs' and 'loss'"
    ]


def test_json_strings_become_dicts():
    args = TrainingArguments(lr_scheduler_type="cosine", lr_scheduler_kwargs='{"num_cycles": 2}')
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}
    assert "lr_scheduler_kwargs='{num' looks like JSON" in problems_of(lr_scheduler_kwargs="{num")[0]


def test_json_strings_may_quote_numbers_true_and_false():
    args = TrainingArguments(
        accelerator_config='{"split_batches": "False", "gradient_accumulation_kwargs": {"num_steps": "2"}}',
        gradient_checkpointing_kwargs='{"use_reentrant": "false", "determinism_check": "none"}',
        lr_scheduler_type="cosine",
        lr_scheduler_kwargs='{"num_cycles": "2.5"}',
    )
    assert args.accelerator_config.split_batches is False
    assert args.gradient_accumulation_steps == 2
    assert args.activation_checkpointing_kwargs == {"use_reentrant": False, "determinism_check": "none"}
    assert args.lr_scheduler_kwargs == {"num_cycles": 2.5}


def test_a_quoted_false_in_a_dict_is_refused():
    """It counted as true."""
    (said,) = problems_of(accelerator_config={"split_batches": "False"})
    assert said == "accelerator_config: split_batches='False' is neither true nor false"
    (said,) = problems_of(activation_checkpointing_kwargs={"use_reentrant": "no"})
    assert said.endswith("use_reentrant='no' is neither true nor false")


# ---- what is refused ----


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"per_device_train_batch_size": -4}, ("per_device_train_batch_size=-4", ">= 1")),
        ({"per_device_eval_batch_size": 0}, ("per_device_eval_batch_size=0", ">= 1")),
        ({"gradient_accumulation_steps": 0}, ("gradient_accumulation_steps=0", ">= 1")),
        ({"gradient_accumulation_steps": -2}, ("gradient_accumulation_steps=-2", ">= 1")),
        ({"max_steps": 0}, ("max_steps=0", "-1")),
        ({"max_steps": -2}, ("max_steps=-2", ">= -1")),
        ({"num_train_epochs": -1}, ("num_train_epochs=-1", ">= 0")),
        ({"label_smoothing_factor": 2}, ("label_smoothing_factor=2", "< 1")),
        ({"learning_rate": -1e-5}, ("learning_rate=-1e-05", ">= 0")),
        ({"learning_rate": "1e-5"}, ("learning_rate='1e-5'", "float")),
        ({"logging_steps": 0}, ("logging_steps=0", "> 0")),
        ({"seed": -1}, ("seed=-1", ">= 0")),
        ({"torch_empty_cache_steps": 0}, ("torch_empty_cache_steps=0", ">= 1")),
        ({"eval_strategy": "epochs"}, ("eval_strategy='epochs'", "did you mean 'epoch'")),
        ({"save_strategy": "bets"}, ("save_strategy='bets'", "did you mean 'best'")),
        ({"lr_scheduler_type": "cosin"}, ("lr_scheduler_type='cosin'", "did you mean 'cosine'")),
        ({"optim": "adamw_torchh"}, ("optim='adamw_torchh'", "did you mean 'adamw_torch'")),
        ({"bf16": True, "fp16": True, "use_cpu": False}, ("bf16", "fp16")),
        ({"warmup_steps": -1}, ("warmup_steps=-1", ">= 0")),
        ({"dataloader_prefetch_factor": 2}, ("dataloader_prefetch_factor", "dataloader_num_workers")),
        ({"dataloader_persistent_workers": True}, ("dataloader_persistent_workers", "dataloader_num_workers")),
        ({"eval_on_start": True}, ("eval_on_start=True", "eval_strategy")),
        ({"load_best_model_at_end": True}, ("load_best_model_at_end=True", "eval_strategy is 'no'")),
        ({"save_top_k": 3}, ("save_top_k=3 needs evaluations", "eval_strategy is 'no'")),
        ({"save_top_k": 3, "eval_strategy": "epoch"}, ("save_top_k=3 needs an evaluation at each checkpoint",)),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, ("reduce_lr_on_plateau", "eval_strategy")),
        ({"save_strategy": "best", "eval_strategy": "epoch"}, ("save_strategy='best'", "metric_for_best_model")),
        (
            {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "steps"},
            ("eval_strategy='epoch'", "save_strategy='steps'"),
        ),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 30, "save_steps": 100},
            ("save_steps=100", "eval_steps=30", "set save_steps=90"),
        ),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 100},
            ("save_steps=100", "eval_steps=0.1", "the same way"),
        ),
        ({"learning_rte": 1e-5}, ("unknown argument 'learning_rte'", "did you mean 'learning_rate'")),
        ({"attn_implementation": "sdpa"}, ("which from_pretrained takes: load the model with it",)),
        ({"peft_config": None}, (": pass peft_config=... to the trainer",)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_refused_when_the_object_is_made(kwargs, words):
    text = " ".join(problems_of(**kwargs))
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    "steps",
    [{"eval_steps": 50, "save_steps": 100}, {"eval_steps": 0.1, "save_steps": 0.3}, {"eval_steps": 7, "save_steps": 7}],
)
def test_keeping_the_best_accepts_multiples(steps):
    TrainingArguments(load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps", **steps)


@pytest.mark.parametrize("asked", [{"load_best_model_at_end": True}, {"save_top_k": 2}])
def test_saving_the_best_needs_no_equal_strategies(asked):
    args = TrainingArguments(**asked, eval_strategy="epoch", save_strategy="best")
    assert args.metric_for_best_model == "loss"


def test_everything_wrong_is_reported_at_once():
    found = problems_of(learning_rte=1, learning_rate=-1, max_steps=0, eval_on_start=True, bf16=True, fp16=True)
    assert len(found) >= 5
    for name in ("learning_rte", "learning_rate", "max_steps", "eval_on_start", "bf16"):
        assert any(name in problem for problem in found)


def test_an_argument_of_another_config_names_its_class(monkeypatch):
    monkeypatch.setattr(registry, "configs_with", lambda name: ["SFTConfig"] if name == "max_length" else [])
    assert problems_of(max_length=512) == [
        "unknown argument 'max_length', which SFTConfig has; use that class instead of TrainingArguments"
    ]


def test_arguments_assigned_later_can_be_checked_again():
    args = TrainingArguments()
    args.learning_rate = -1.0
    with pytest.raises(ConfigError, match="learning_rate=-1.0 must be >= 0"):
        args.validate()


# ---- old names ----


@pytest.mark.parametrize(
    ("old", "given", "new", "kept"),
    [
        ("evaluation_strategy", "epoch", "eval_strategy", "epoch"),
        ("warmup_ratio", 0.1, "warmup_steps", 0.1),
        ("group_by_length", True, "train_sampling_strategy", "group_by_length"),
        ("group_by_length", False, "train_sampling_strategy", "random"),
        ("no_cuda", True, "use_cpu", True),
        ("per_gpu_train_batch_size", 3, "per_device_train_batch_size", 3),
        ("per_gpu_eval_batch_size", 3, "per_device_eval_batch_size", 3),
        ("include_inputs_for_metrics", True, "include_for_metrics", ["inputs"]),
        ("adafactor", True, "optim", "adafactor"),
        ("save_safetensors", True, "seed", 42),
        ("half_precision_backend", "auto", "seed", 42),
        ("use_mps_device", True, "seed", 42),
    ],
)
def test_old_names_still_work_with_a_warning(old, given, new, kept):
    with pytest.warns(FutureWarning, match=old):
        args = TrainingArguments(**{old: given})
    assert getattr(args, new) == kept


def test_a_warmup_ratio_of_one_is_the_whole_run():
    with pytest.warns(FutureWarning):
        args = TrainingArguments(warmup_ratio=1.0)
    assert [args.get_warmup_steps(n) for n in (1, 7, 100, 12345)] == [1, 7, 100, 12345]


def test_a_share_of_warm_up_is_rounded_up_and_a_number_is_kept():
    assert TrainingArguments(warmup_steps=0.1).get_warmup_steps(95) == 10
    assert TrainingArguments(warmup_steps=30).get_warmup_steps(95) == 30


@pytest.mark.parametrize(
    ("old", "given", "advice"),
    [
        ("save_safetensors", False, "safetensors"),
        ("fp16_backend", "apex", "autocast"),
        ("sharded_ddp", "simple", "set fsdp='full_shard'"),
        ("split_batches", True, "set accelerator_config={'split_batches': True}"),
        ("dispatch_batches", True, "leave it out"),
        ("fp16_opt_level", "O2", "set fp16=True"),
        ("tpu_num_cores", 8, "TPUs are not supported"),
        ("mp_parameters", "x", "SageMaker"),
    ],
)
def test_old_names_without_a_successor_say_why_and_what_to_do(old, given, advice):
    (problem,) = problems_of(**{old: given})
    assert problem.startswith(f"{old}={given!r}") and advice in problem


def test_an_old_and_a_new_name_together_are_refused():
    assert "both given" in problems_of(warmup_ratio=0.1, warmup_steps=100)[0]


def test_names_to_come_are_silent_when_they_ask_for_nothing(recwarn):
    TrainingArguments(push_to_hub=False, deepspeed=None, fsdp="", hub_token=None)
    assert not recwarn


# ---- subclasses and parsers ----


@dataclass
class ActionArguments(TrainingArguments):
    """A user's subclass."""

    using_ema: bool = field(default=False, metadata={"help": "Average the weights."})
    compute_dtype: torch.dtype = field(default=torch.float32)
    names: list[str] | None = opt(None, "Names.")
    learning_rate: float = opt(1e-3, "Peak learning rate.", min=0)


@dataclass
class PlainArguments:
    model_name: str = field(default="none")
    lazy_preprocess: bool = field(default=True)


def test_a_subclass_adds_fields_and_changes_defaults():
    args = ActionArguments("out", using_ema=True)
    assert (args.output_dir, args.learning_rate, args.using_ema) == ("out", 1e-3, True)
    assert args.to_dict()["compute_dtype"] == "float32"
    with pytest.raises(ConfigError, match="ActionArguments: learning_rate=-1 must be >= 0"):
        ActionArguments(learning_rate=-1)


def test_a_subclass_may_annotate_a_field_of_ours_anew():
    """As the script of QLoRA does with nearly all that it sets."""

    @dataclasses.dataclass
    class Script(TrainingArguments):
        report_to: str = dataclasses.field(default="none")
        eval_steps: int = dataclasses.field(default=5)
        gradient_checkpointing_kwargs: str = dataclasses.field(default='{"use_reentrant": false}')
        lr_scheduler_type: SchedulerType = dataclasses.field(default=SchedulerType.COSINE)
        optim: str = dataclasses.field(default="adamw_torch")

    assert Script("out").report_to == [] and Script("out", report_to="wandb").report_to == ["wandb"]
    assert Script("out").lr_scheduler_type == "cosine"
    with pytest.raises(ConfigError, match="report_to=7 must be of type list or str"):
        Script("out", report_to=7)


def test_types_of_fields_that_a_user_declared_are_the_users_business_and_those_of_ours_are_not():
    @dataclass
    class Mine(TrainingArguments):
        layers: int = None
        scale: float = 0.0
        learning_rate: float = 1e-4  # a default changed without opt

    mine = Mine("out", layers="all", scale=torch.ones(2))
    assert mine.layers == "all" and mine.scale.tolist() == [1, 1]
    with pytest.raises(ConfigError, match="learning_rate='high' must be of type float"):
        Mine("out", learning_rate="high")


def test_hf_argument_parser_reads_arguments_and_subclasses():
    parser = HfArgumentParser((PlainArguments, ActionArguments))
    flags = (
        "--output_dir out --model_name tiny --lazy_preprocess false --using_ema --names a b --bf16 "
        "--no_dataloader_pin_memory --learning-rate 2e-5 --warmup_steps 0.1 --report_to tensorboard --max_grad_norm "
        "0.5 --eval_strategy epoch --evaluation_strategy epoch --lr_scheduler_type cosine --no_cuda "
        "--dataloader_num_workers 2 --tf32 false --optim sgd --label_names a b"
    ).split()
    plain, args = parser.parse_args_into_dataclasses([*flags, "--lr_scheduler_kwargs", '{"num_cycles": 2}'])
    assert plain == PlainArguments(model_name="tiny", lazy_preprocess=False)
    assert isinstance(args, ActionArguments) and args.using_ema and args.names == ["a", "b"]
    assert (args.learning_rate, args.warmup_steps, args.max_grad_norm, args.optim) == (2e-5, 0.1, 0.5, "sgd")
    assert (args.bf16, args.tf32, args.use_cpu, args.dataloader_pin_memory) == (True, False, True, False)
    assert (args.eval_strategy, args.report_to, args.label_names) == ("epoch", ["tensorboard"], ["a", "b"])
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}
    assert "--per_device_train_batch_size" in parser.format_help()


def test_hf_argument_parser_keeps_every_default():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([])
    assert args == TrainingArguments()
    assert check(args) == []  # the parser rewrites the types of the fields


# What a field needs beside a value of its kind, or instead of one.
SAMPLES = {
    "optim_args": {"amsgrad": True}, "lr_scheduler_kwargs": {"min_lr": 1e-6}, "include_for_metrics": ["inputs"],
    "trackio_static_space_id": "me/board", "include_num_input_tokens_seen": "all", "remote_dir": "memory://run",
}  # fmt: skip
COMPANIONS = {
    "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine_with_min_lr"},
    "eval_on_start": {"eval_strategy": "epoch"},
    "load_best_model_at_end": {"eval_strategy": "steps"},
    "save_top_k": {"eval_strategy": "steps"},
    "load_in_4bit": {"use_peft": True},
    "load_in_8bit": {"use_peft": True},
}
OF_WORKERS = ("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context")
COMPANIONS |= {name: {"dataloader_num_workers": 1} for name in OF_WORKERS}


def sample(config: type, known: dataclasses.Field) -> object:
    """A value other than the default, of the first kind that fits."""
    kinds, bounds = field_types(config).get(known.name, ()), getattr(known.metadata.get("help"), "bounds", {})
    if known.name in SAMPLES:
        return SAMPLES[known.name]
    if bounds.get("choices"):
        return next(choice for choice in bounds["choices"] if choice != known.default)
    simple = ((bool, known.default is not True), (int, 4), (float, 0.5), (dict, {"a": 1}), (list, ["x", "y"]))
    return next((value for kind, value in simple if kind in kinds), "x")


def parser_configs() -> list[type]:
    return [TrainingArguments, ModelConfig, *(method.config_class for method in registry.methods().values())]


@pytest.mark.long
@pytest.mark.rotated
@pytest.mark.parametrize("config", parser_configs())
@pytest.mark.parametrize("way", ["flags", "dict", "json", "yaml"])
def test_hf_argument_parser_sets_a_field_as_the_config_does(config, way, tmp_path):
    types = {known.name: known.type for known in dataclasses.fields(config)}
    parser, wrong, refused = HfArgumentParser(config), [], []
    for known in dataclasses.fields(config):
        name, path = known.name, tmp_path / f"run.{way}"
        if not known.init or (name, way) == ("include_num_input_tokens_seen", "flags"):
            continue  # the latter is a flag without a value, as it ever was; values come from code or a file
        given = {name: sample(config, known)} | COMPANIONS.get(name, {})
        try:
            expected = getattr(config(**given), name)
        except (ConfigError, ImportError):  # not alone, or not on this machine
            refused.append(name)
            continue
        try:
            if way == "flags":
                words = [[f"--{key}", *as_words(value)] for key, value in given.items()]
                (args,) = parser.parse_args_into_dataclasses(sum(words, []), look_for_args_file=False)
            elif way == "dict":
                (args,) = parser.parse_dict(given)
            elif way == "json":
                path.write_text(json.dumps(given))
                (args,) = parser.parse_json_file(str(path))
            else:
                path.write_text(yaml.safe_dump(given))
                (args,) = parser.parse_yaml_file(str(path))
            if getattr(args, name) != expected:
                wrong.append((name, getattr(args, name), expected))
        except (ConfigError, SystemExit, ValueError) as error:
            wrong.append((name, error))
    assert wrong == [] and len(refused) < 0.2 * len(types), refused


@pytest.mark.parametrize("config", parser_configs())
def test_every_switch_stands_alone_on_a_command_line(config):
    types = field_types(config)
    switches = [f.name for f in dataclasses.fields(config) if f.init and bool in types.get(f.name, ())]
    assert len(switches) > 2
    namespace = HfArgumentParser(config).parse_args([f"--{name}" for name in switches if name not in NO_SWITCHES])
    for name in set(switches) - set(NO_SWITCHES) - {"include_num_input_tokens_seen"}:
        assert getattr(namespace, name) is True, name


NO_SWITCHES = ("trackio_static_space_id",)  # a name, or False


def test_every_flag_of_transformers_is_read():
    import transformers

    theirs, ours = HfArgumentParser(transformers.TrainingArguments), HfArgumentParser(TrainingArguments)
    known = {flag for action in ours._actions for flag in action.option_strings}
    assert {flag for action in theirs._actions for flag in action.option_strings} - known == set()
    for action in theirs._actions:
        for flag in action.option_strings:
            if action.nargs in ("?", 0) and flag.startswith("--") and flag != "--help":
                ours.parse_args([flag])  # alone, too
                if action.nargs == "?":
                    ours.parse_args([flag, "true" if action.const is True else str(action.const)])


@pytest.mark.parametrize("config", [c for c in parser_configs() if issubclass(c, TrainingArguments)])
@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        ("--gradient_checkpointing", "activation_checkpointing", True), ("--warmup_ratio 0.1", "warmup_steps", 0.1),
        ("--warmup-ratio 1", "warmup_steps", math.nextafter(1.0, 0)), ("--num_train_epochs 0", "num_train_epochs", 0),
        ("--activation_checkpointing", "gradient_checkpointing", True), ("--warmup_ratio 0", "warmup_steps", 0),
        ("--logging_nan_inf_filter", "on_nonfinite", "stop"),
        ("--logging_nan_inf_filter false", "on_nonfinite", "stop"),
        ("--no_logging_nan_inf_filter", "on_nonfinite", "stop"), ("--adafactor", "optim", "adafactor"),
        ("--group_by_length", "train_sampling_strategy", "group_by_length"),
        ("--group_by_length false", "train_sampling_strategy", "random"),
        ("--push_to_hub_token abc", "hub_token", "abc"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_flags_mean_what_the_argument_meant(config, words, name, expected):
    if words == "--group_by_length" and hasattr(config, "num_generations"):
        pytest.skip("refused for prompts, under any name")
    (args,) = HfArgumentParser(config).parse_args_into_dataclasses(words.split())
    assert getattr(args, name) == expected
    settings, problems = parse.read_words(words.split())
    assert getattr(parse.configs([config], settings, problems)[0], name) == expected


def test_a_run_of_no_epochs_trains_nothing(tmp_path, caplog):
    from tests.contract.trainers import TRAINERS, weights

    caplog.set_level("INFO", logger="posttrain")

    trainer = TRAINERS["causal-lm"](tmp_path, num_train_epochs=0)
    before = {name: value.clone() for name, value in weights(trainer).items()}
    output = trainer.train()
    assert output.global_step == 0
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
    assert "eval_loss" in trainer.evaluate()
    assert "num_train_epochs=0: nothing is trained" in caplog.text and "checkpoint is of step" not in caplog.text


def as_words(value: object) -> list[str]:
    return (
        [str(v) for v in value]
        if isinstance(value, list)
        else [json.dumps(value) if isinstance(value, dict) else str(value)]
    )


# ---- as plain data ----


def test_arguments_are_plain_data_that_json_reads_back():
    args = TrainingArguments("out", eval_strategy="epoch", report_to=["tensorboard"])
    read = json.loads(args.to_json_string())
    assert read == args.to_dict()
    assert TrainingArguments(**read) == args


def test_tokens_are_masked():
    @dataclass
    class Secret(TrainingArguments):
        api_token: str | None = None

    args = Secret(api_token="hf_123")
    assert args.to_dict()["api_token"] == "<API_TOKEN>"
    assert "hf_123" not in str(args) and "hf_123" not in args.to_json_string()


def test_tokens_of_a_tokenizer_are_no_secrets():
    from posttrain.sft import SFTConfig

    assert SFTConfig(eos_token="<|end|>").to_dict()["eos_token"] == "<|end|>"


def test_sanitized_arguments_hold_only_what_trackers_take():
    values = TrainingArguments(report_to=["a", "b"]).to_sanitized_dict()
    assert {type(value) for value in values.values()} <= {bool, int, float, str, torch.Tensor}
    assert values["report_to"] == "['a', 'b']" and values["train_batch_size"] == 8


def test_replacing_an_argument_keeps_the_others():
    args = TrainingArguments("out", eval_strategy="steps", logging_steps=5, seed=3)
    other = dataclasses.replace(args, seed=4)
    assert other.seed == 4 and other.to_dict() == args.to_dict() | {"seed": 4}


# ---- processes ----


def test_one_process_is_the_main_one():
    args = TrainingArguments(use_cpu=True)
    assert (args.world_size, args.process_index, args.local_process_index) == (1, 0, 0)
    assert (args.n_gpu, args.device, args.parallel_mode) == (0, torch.device("cpu"), "not_parallel")
    args._n_gpu = 1  # so scripts keep transformers' trainer to one GPU
    assert args._n_gpu == 0 and not any("n_gpu" in name for name in args.to_dict())
    with pytest.raises(ValueError, match="_n_gpu=2: a process never drives more than one .*--nproc-per-node 2"):
        args._n_gpu = 2
    assert args.should_save and args.should_log and args.place_model_on_device is None
    assert (args.train_batch_size, args.eval_batch_size, args.ddp_timeout_delta.total_seconds()) == (8, 8, 1800)
    with args.main_process_first(desc="nothing"):
        pass


def test_only_the_main_process_saves_and_logs_by_default(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")  # the first process of the second machine
    args = TrainingArguments()
    assert (args.world_size, args.process_index, args.local_process_index) == (4, 2, 0)
    assert args.parallel_mode.value == "distributed" and {args.parallel_mode: 1} == {"distributed": 1}
    assert args.parallel_mode == ParallelMode.DISTRIBUTED and args.parallel_mode != ParallelMode.NOT_DISTRIBUTED
    assert not args.should_save and args.should_log
    assert TrainingArguments(save_on_each_node=True).should_save
    assert not TrainingArguments(log_on_each_node=False).should_log


@pytest.mark.slow
def test_the_main_process_goes_first_and_releases_the_others_even_after_an_error(tmp_path):
    (tmp_path / "script.py").write_text(
        "import pathlib, time\n"
        "from posttrain.core.arguments import TrainingArguments\n"
        "args, cache = TrainingArguments(use_cpu=True, ddp_timeout=60), pathlib.Path('cache')\n"
        "with args.main_process_first(desc='tokenising'):\n"
        "    if args.process_index == 0:\n"
        "        time.sleep(0.5)\n"
        "        cache.write_text('rows')\n"
        "    pathlib.Path(f'seen{args.process_index}').write_text(cache.read_text())\n"
        "try:\n"
        "    with args.main_process_first():\n"
        "        assert args.process_index, 'broken'\n"
        "except AssertionError:\n"
        "    pathlib.Path('raised').touch()\n"
    )
    programs.together(2, ["script.py"], timeout=120, cwd=tmp_path).check_returncode()
    assert [(tmp_path / f"seen{rank}").read_text() for rank in (0, 1)] == ["rows", "rows"]
    assert (tmp_path / "raised").exists()


def test_passive_means_the_level_of_the_program_and_not_that_of_an_earlier_trainer():
    from posttrain.core.logging import trackers

    log = logging.getLogger("posttrain")
    log.setLevel(logging.NOTSET)
    trackers.set_verbosity(logging.DEBUG)
    assert TrainingArguments().get_process_log_level() == logging.INFO
    log.setLevel(logging.WARNING)
    trackers.set_verbosity(logging.ERROR)
    trackers.set_verbosity(logging.DEBUG)
    assert TrainingArguments().get_process_log_level() == logging.WARNING


def test_replicas_log_less(monkeypatch):
    args = TrainingArguments(log_level="error", log_level_replica="debug")
    assert args.get_process_log_level() == logging.ERROR
    assert TrainingArguments().get_process_log_level() == logging.INFO
    assert TrainingArguments(log_level="detail").get_process_log_level() == logging.DEBUG
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert args.get_process_log_level() == logging.DEBUG
    assert TrainingArguments().get_process_log_level() == logging.WARNING


# ---- setters ----


def test_setters_set_their_group_and_return_the_arguments():
    args = TrainingArguments("out")
    assert args.set_training(learning_rate=1e-4, batch_size=32, num_epochs=2, gradient_accumulation_steps=3) is args
    assert (args.do_train, args.learning_rate, args.per_device_train_batch_size) == (True, 1e-4, 32)
    assert (args.num_train_epochs, args.gradient_accumulation_steps) == (2, 3)
    args.set_evaluate(strategy="steps", steps=100, batch_size=4)
    assert (args.do_eval, args.eval_strategy.value, args.eval_steps, args.per_device_eval_batch_size) == (
        True,
        "steps",
        100,
        4,
    )
    args.set_testing(batch_size=16, loss_only=True)
    assert (args.do_predict, args.per_device_eval_batch_size, args.prediction_loss_only) == (True, 16, True)
    args.set_save(strategy="steps", steps=100, total_limit=2)
    assert (args.save_steps, args.save_total_limit) == (100, 2)
    args.set_logging(steps=50, report_to="tensorboard", first_step=True)
    assert (args.logging_steps, args.report_to, args.logging_first_step) == (50, ["tensorboard"], True)
    args.set_optimizer(name="adafactor", learning_rate=3e-4, beta1=0.8)
    assert (args.optim, args.learning_rate, args.adam_beta1) == ("adafactor", 3e-4, 0.8)
    args.set_lr_scheduler(name="cosine", warmup_steps=0.05, max_steps=10)
    assert (args.lr_scheduler_type, args.warmup_steps, args.max_steps) == ("cosine", 0.05, 10)
    args.set_dataloader(train_batch_size=16, num_workers=2, prefetch_factor=4, sampler_seed=1)
    assert (args.per_device_train_batch_size, args.dataloader_prefetch_factor, args.data_seed) == (16, 4, 1)
    args.validate()


def test_a_setter_that_fails_changes_nothing():
    args = TrainingArguments("out")
    before = args.to_dict()
    with pytest.raises(ValueError, match="learning_rate=-1"):
        args.set_training(learning_rate=-1, batch_size=64)
    with pytest.raises(ValueError, match="hub_strategy='sometimes'"):
        args.set_push_to_hub("me/model", strategy="sometimes")
    assert args.to_dict() == before


def test_the_whole_run_is_the_largest_share_below_one():
    assert math.ceil(10**9 * math.nextafter(1.0, 0)) == 10**9
    assert typing.get_type_hints(TrainingArguments)["warmup_steps"] == float | str


def test_a_run_without_checkpoints_along_the_way_is_pointed_out(caplog):
    assert TrainingArguments("out", save_steps=0, use_cpu=True).save_steps == NEVER
    assert "save_steps=0 saves no step but the last" in caplog.text
