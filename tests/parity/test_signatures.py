"""Arguments by position mean here what they mean in the peers: old calls need no rewriting."""

import importlib
import inspect

import pytest

TRL = {
    "SFTTrainer": ("trl", "posttrain.sft"),
    **dict.fromkeys(("DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer"),
    ("trl", "posttrain.rl")), "CPOTrainer": ("trl.experimental.cpo", "posttrain.rl"),
    "ORPOTrainer": ("trl.experimental.orpo", "posttrain.rl"),
    "Trainer": ("transformers", "posttrain.core"),
    "Seq2SeqTrainer": ("transformers", "posttrain.seq2seq"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRL)
def test_positional_arguments_stand_in_the_order_of_the_peer(name):
    peer, ours = TRL[name]
    pytest.importorskip(peer)
    theirs = [*inspect.signature(getattr(importlib.import_module(peer), name)).parameters]
    found = inspect.signature(getattr(importlib.import_module(ours), name)).parameters.values()
    assert [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD][: len(theirs)] == theirs
