"""What `verify-resume` says of two checkpoints."""

import json
import shutil

import pytest
import torch

from posttrain.cli.tools import verify_resume
from posttrain.core.checkpoint import codec
from tests.contract.trainers import TRAINERS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    TRAINERS["causal-lm"](folder, max_steps=2, save_strategy="steps", save_steps=2, optim="adamw_torch").train()
    return folder / "checkpoint-2"


def change_tree(folder, name, change):
    tree = codec.load_tree(folder / name, mmap=False)
    change(tree)
    codec.save_tree(tree, folder / name)


def one_bit(folder):
    tensors = {name: tensor.clone() for name, tensor in codec.read_tensors(folder / "model.safetensors").items()}
    next(iter(tensors.values())).view(torch.int32).view(-1)[3] ^= 1
    codec.write_tensors(tensors, folder / "model.safetensors")


def other_loss(folder):
    state = json.loads((folder / "trainer_state.json").read_text())
    state["log_history"][1]["loss"] += 1e-9
    (folder / "trainer_state.json").write_text(json.dumps(state))


DIFFERENCES = {
    "weights": one_bit,
    "optimizer": lambda folder: change_tree(folder, "optimizer", lambda tree: tree["state"][0]["exp_avg"].add_(1)),
    "scheduler": lambda folder: change_tree(folder, "scheduler", lambda tree: tree.update(last_epoch=7)),
    "random numbers": lambda folder: change_tree(folder, "rank-0", lambda tree: tree["rng"]["torch"].add_(1)),
    "data, metrics, own state": lambda f: change_tree(f, "rank-0", lambda t: t["trainer"]["loader"].update(given=[1])),
    "log": other_loss,
}


def test_equal_checkpoints_are_equal(checkpoint):
    assert verify_resume.compare(checkpoint, checkpoint) == dict.fromkeys(DIFFERENCES, "")


@pytest.mark.parametrize("part", DIFFERENCES)
def test_the_part_that_differs_is_named_and_no_other(part, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "other")
    DIFFERENCES[part](tmp_path / "other")
    found = verify_resume.compare(checkpoint, tmp_path / "other")
    assert [name for name, text in found.items() if text] == [part]


def test_flags_that_the_proof_sets_itself_are_left_out():
    words = ["sft", "run.yaml", "--max-steps", "9", "--lr", "1", "--output_dir=x", "--tags", "a", "b", "--seed", "3"]
    assert verify_resume._without(words, {"max_steps", "output_dir", "tags"}) == [
        "sft",
        "run.yaml",
        "--lr",
        "1",
        "--seed",
        "3",
    ]
