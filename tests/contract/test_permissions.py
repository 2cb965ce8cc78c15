"""Who may read a folder may read what is written into it: a server runs as another user than training does."""

import os
import stat

import peft
import pytest
import torch

from posttrain.cli.tools.export import export
from posttrain.cli.tools.merge import merge
from posttrain.core import BEMACallback, Trainer, TrainingArguments
from posttrain.core.checkpoint.weights import write_file
from posttrain.core.errors import CheckpointError
from posttrain.lm.loading import loading
from posttrain.rl.generation.transfer import write_shards
from tests import tiny
from tests.contract.trainers import arguments, pad


def model_in(folder):
    tiny.causal_lm().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def adapter_in(folder, base):
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    peft.get_peft_model(loading.load_causal_lm(base, {}), config).save_pretrained(folder)
    return str(folder)


def trained(tmp_path, *callbacks):
    args = arguments(TrainingArguments, tmp_path / "out", max_steps=1, save_strategy="steps", save_steps=1)
    trainer = Trainer(tiny.causal_lm(), args, pad, tiny.token_rows(8), callbacks=[*callbacks])
    trainer.train()
    trainer.save_model()


WRITERS = {
    "run": trained,
    "averages": lambda tmp_path: trained(tmp_path, BEMACallback(update_freq=1)),
    "model": lambda tmp_path: export(model_in(tmp_path / "base"), tmp_path / "out" / "model"),
    "merged": lambda tmp_path: merge(
        adapter_in(tmp_path / "adapter", model_in(tmp_path / "base")), tmp_path / "out" / "model"
    ),
    "sent": lambda tmp_path: write_shards(iter([("a", torch.ones(2, 2).T)]), tmp_path / "out"),
    "rare types": lambda tmp_path: write_file({"a": torch.ones(2, dtype=torch.uint16)}, tmp_path / "out" / "a"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_files_have_the_permissions_that_the_user_gives_new_ones(kind, tmp_path):
    (tmp_path / "out").mkdir()
    before = os.umask(0o027)
    try:
        WRITERS[kind](tmp_path)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert modes and {path: oct(mode) for path, mode in modes.items() if mode != 0o640} == {}


def test_weights_without_permission_are_not_said_to_be_missing(tmp_path, monkeypatch):
    folder = model_in(tmp_path / "base")

    def refuse(path, *args):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("posttrain.core.checkpoint.codec.open", refuse, raising=False)  # root may read everything
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: Permission denied"):
        loading.load_causal_lm(folder, {})
