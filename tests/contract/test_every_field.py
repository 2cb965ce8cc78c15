"""No argument is accepted and ignored: product code reads every field of every config, or a sentence below says why
not.
"""

from __future__ import annotations

import ast
import dataclasses
from functools import cache

import pytest

from posttrain.core import ModelConfig, TrainingArguments
from posttrain.core.cli.mixture import CommandSource
from posttrain.core.cli.scripts import ScriptArguments
from posttrain.core.tools.launch import LaunchArguments
from posttrain.rl import (
    CPOConfig,
    DistillationConfig,
    DPOConfig,
    GKDConfig,
    GRPOConfig,
    KTOConfig,
    OnlineDPOConfig,
    ORPOConfig,
    ReinforcePlusPlusConfig,
    RewardConfig,
    RLOOConfig,
    TPOConfig,
)
from posttrain.seq2seq import Seq2SeqConfig
from posttrain.sft import SFTConfig
from tests.test_architecture import sources, tree

CONFIGS = [
    TrainingArguments, SFTConfig, Seq2SeqConfig, DPOConfig, KTOConfig, ORPOConfig, CPOConfig, RewardConfig, GRPOConfig,
    RLOOConfig, ReinforcePlusPlusConfig, DistillationConfig, GKDConfig, OnlineDPOConfig, TPOConfig,
    ModelConfig, CommandSource, LaunchArguments, ScriptArguments,
]  # fmt: skip
#: Where a field is only checked, or brought into another form, which is no use of it.
CHECKS = ("_problems", "_normalize", "_preflight", "__post_init__", "_accumulation_problems")
#: Fields that no code names, and why they are accepted.
MEANT = {
    "ddp_broadcast_buffers": "handed to DDP under its name, in a loop over three of them",
    "ddp_bucket_cap_mb": "handed to DDP under its name, in a loop over three of them",
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
    """The names of attributes that are read, and the words that `getattr` is given, outside of checks."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name not in CHECKS and not node.name.startswith("set_"):
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self.names.add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1:
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
        )
    )
    assert reads.names == {"c", "d"}
