"""Every public name of trl 1.16, every field of its configs and every public method of its trainers: ours too, or
missing on purpose, for a reason.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import os

import pytest
import transformers

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
trl = pytest.importorskip("trl")

from posttrain.compat import absent_names  # noqa: E402
from posttrain.core.fields.old_names import old_names  # noqa: E402
from tests.contract import trainers as contract  # noqa: E402

FACES = ("posttrain.core", "posttrain.sft", "posttrain.rl")
#: Where trl's trainers are, and what they are called before "Trainer" and "Config".
TRAINERS = dict.fromkeys(("DPO", "KTO", "GRPO", "RLOO", "Reward", "SFT", "Distillation"), "trl")
TRAINERS |= {"GKD": "trl.experimental.gkd", "OnlineDPO": "trl.experimental.online_dpo", "TPO": "trl.experimental.tpo",
             "CPO": "trl.experimental.cpo", "ORPO": "trl.experimental.orpo",
             "IWOPD": "trl.experimental.iw_opd", "A2PO": "trl.experimental.a2po",
             "SDPO": "trl.experimental.sdpo", "SDFT": "trl.experimental.sdft", "GOLD": "trl.experimental.gold",
             "GMPO": "trl.experimental.gmpo", "AsyncGRPO": "trl.experimental.async_grpo",
             "ServerDistillation": "trl.experimental.server_distillation",
             "AsyncDistillation": "trl.experimental.async_distillation"}  # fmt: skip

#: Names of the package that are missing on purpose. Each is answered with what to use instead.
ABSENT = {
    "init_zero_verbose": "DeepSpeed's own logger",
    "pack_dataset": "SFTConfig(packing=True)",
}
#: Methods that are missing on purpose.
METHODS = {
    "create_accelerator_and_postprocess": "transformers calls it in its constructor; set accelerator_config",
    "config_cls": "it is called config_class",
    "sample_rollouts": "override generate",
    "get_gamma_weights": "a step inside trl's VESPO loss; override policy_loss",
    "process_vision_row": "images are not generated from in this version",
    "tokenize_row": "trl calls it on each row of the dataset; pass rows of tokens",
    "build_tokenized_answer": "a step inside trl's tokenize_row",
    "concatenated_forward": "override score",
    "concatenated_inputs": "override the collator",
    "cpo_loss": "override preference_loss",
    "odds_ratio_loss": "override preference_loss; the formula is posttrain.rl.algorithms.orpo.odds_ratio",
    "get_batch_logps": "override score",
    "get_batch_loss_metrics": "override compute_loss",
    "generate_from_model": "num_eval_samples writes answers of policy and reference",
}
#: What transformers' arguments have beside their fields and methods, and ours do not.
OF_ARGUMENTS = {
    "default_optim": "the default of optim",
    "fsdp_plugin_args": "what transformers hands to accelerate's plugin; the sizes are in fsdp_config",
    "is_torch_greater_or_equal_than_2_8": "of its own",
}
FIELDS = {"ORPO": {"padding_value": "padding is masked, and its value has no effect"}}


def ours(name):
    for face in FACES:
        module = importlib.import_module(face)
        if name in module.__all__:
            return getattr(module, name)
    return None


def test_every_name_is_ours_or_missing_on_purpose():
    names = {name for group in trl._import_structure.values() for name in group}
    assert {name for name in names if ours(name) is None} == set(ABSENT)
    for name in ABSENT:
        assert absent_names.elsewhere("posttrain.rl", name), name


@pytest.mark.parametrize("name", TRAINERS)
def test_every_field_is_known(name):
    theirs = getattr(importlib.import_module(TRAINERS[name]), f"{name}Config")
    kind = ours(f"{name}Config")
    known = {field.name for field in dataclasses.fields(kind)} | set(old_names(kind)) | set(FIELDS.get(name, ()))
    assert [field.name for field in dataclasses.fields(theirs) if field.init and field.name not in known] == []


@pytest.mark.parametrize("name", TRAINERS)
def test_every_public_method_is_there_or_missing_on_purpose(name):
    theirs = getattr(importlib.import_module(TRAINERS[name]), f"{name}Trainer")
    kind = ours(f"{name}Trainer")
    public = [method for method, value in inspect.getmembers(theirs) if callable(value) and not method.startswith("_")]
    assert "compute_loss" in public
    assert [method for method in public if not hasattr(kind, method) and method not in METHODS] == []


def test_the_lists_hold_nothing_that_is_there():
    assert not [name for name in ABSENT if ours(name) is not None]
    kinds = [ours(f"{name}Trainer") for name in TRAINERS]
    assert not [method for method in METHODS if all(hasattr(kind, method) for kind in kinds)]


def test_what_scripts_read_of_arguments_is_there_or_missing_on_purpose(tmp_path):
    theirs = transformers.TrainingArguments(tmp_path, use_cpu=True)
    args = ours("TrainingArguments")(tmp_path, use_cpu=True)
    public = [name for name in dir(theirs) if not name.startswith("_")]
    assert {name for name in public if not hasattr(args, name)} == set(OF_ARGUMENTS)
    assert (args.mixed_precision, args.deepspeed_plugin) == (theirs.mixed_precision, theirs.deepspeed_plugin)
    args.deepspeed = {"zero_optimization": {"stage": 3}}
    assert args.deepspeed_plugin.zero_stage == 3


def attributes_from_the_config(kind, fields):
    """The attributes that the constructor of trl's `kind` copies from its config: ``self.beta = args.beta``."""
    module = ast.parse(inspect.getsource(inspect.getmodule(kind)))
    own = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    constructor = next(node for node in own.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    stores = [n for n in ast.walk(constructor) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    set_there = {n.attr for n in stores if isinstance(n.value, ast.Name) and n.value.id == "self"}
    return set_there & fields


OF_TRL = {"DPO": "dpo", "KTO": "kto", "GRPO": "grpo", "RLOO": "rloo", "SFT": "sft", "TPO": "tpo", "CPO": "cpo",
          "ORPO": "orpo", "Distillation": "distillation"}  # fmt: skip


@pytest.mark.parametrize("name", OF_TRL)
def test_what_trls_trainers_copy_from_their_config_is_read_from_ours(name, tmp_path):
    theirs = getattr(importlib.import_module(TRAINERS[name]), f"{name}Trainer")
    trainer = contract.TRAINERS[OF_TRL[name]](tmp_path)
    copied = attributes_from_the_config(theirs, {field.name for field in dataclasses.fields(trainer.args)})
    assert copied and [attribute for attribute in sorted(copied) if not hasattr(trainer, attribute)] == []
