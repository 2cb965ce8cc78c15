"""A damaged checkpoint is never gone on from: True falls back to the newest whole one, a name is refused."""

import errno
import json
import logging
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from posttrain.cli import source
from posttrain.core import TrainerCallback
from posttrain.core.checkpoint import blocks
from posttrain.core.checkpoint import weights as weight_files
from posttrain.core.checkpoint.store import Store
from posttrain.core.errors import CheckpointError, UnsavedError
from posttrain.lm.loading.loading import load_causal_lm
from tests import programs, tiny
from tests.contract.trainers import TRAINERS, causal_lm, weights

ARGS = dict(
    optim="adamw_torch", learning_rate=1e-2, per_device_train_batch_size=8, max_steps=4, save_strategy="steps",
    save_steps=2, logging_steps=1,
)  # fmt: skip


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def delete(path):
    path.unlink()


def overwrite(path):
    """Valid JSON or safetensors, and not what was saved."""
    if path.suffix == ".json":
        path.write_text(json.dumps({}))
    else:
        weight_files.codec.write_tensors({"weight": torch.zeros(2)}, path)


DAMAGES = [cut, flip, empty, delete, overwrite]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Runs from start to end, by trainer, and the weights that they led to."""
    runs = {}

    def run(name):
        if name not in runs:
            trainer = TRAINERS[name](tmp_path_factory.mktemp(name), **ARGS)
            trainer.train()
            runs[name] = trainer.args.output_dir, weights(trainer)
        return runs[name]

    return run


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", TRAINERS)
def test_the_saved_model_of_every_trainer_computes_what_the_trained_one_does(name, tmp_path):
    """A reward model gives one number for the text of the comparison."""
    TRAINERS[name](tmp_path, check_saved_model=True).save_model()


@pytest.mark.rotated
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["causal-lm", "sft-lora"])
def test_each_damaged_file_of_the_newest_checkpoint_is_named_and_the_one_before_is_taken(
    name, damage, straight, tmp_path, caplog
):
    source, expected = straight(name)
    files = [p.name for p in (Path(source) / "checkpoint-4").iterdir()]
    weights_file = "adapter_model.safetensors" if name == "sft-lora" else "model.safetensors"
    assert {weights_file, "optimizer.safetensors", "scheduler.json", "rank-0.json", "trainer_state.json"} <= {*files}
    for file in files:
        out = tmp_path / file
        shutil.copytree(source, out)
        if file == "manifest.json" and damage is flip:
            continue  # one bit of white space does not change what is said; the store's own tests flip every byte
        damage(out / "checkpoint-4" / file)
        with pytest.raises(CheckpointError, match=rf"checkpoint-4.*{file}.*resume_from_checkpoint=True"):
            TRAINERS[name](out, **ARGS).train(resume_from_checkpoint=str(out / "checkpoint-4"))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "posttrain"):
            resumed = TRAINERS[name](out, **ARGS)
            resumed.train(resume_from_checkpoint=True)
        (warning,) = [text for text in warnings_of(caplog) if "checkpoint" in text]
        assert "checkpoint-4" in warning and file in warning
        assert resumed.state.global_step == 4
        assert [key for key, value in weights(resumed).items() if not torch.equal(value, expected[key])] == []
        assert resumed.store.verify(out / "checkpoint-4") == []  # written anew


@pytest.mark.parametrize("name", ["causal-lm", "sft"])
def test_with_no_whole_checkpoint_left_the_run_is_refused_and_no_weight_touched(name, straight, tmp_path):
    shutil.copytree(straight(name)[0], tmp_path, dirs_exist_ok=True)
    for step in (2, 4):
        cut(tmp_path / f"checkpoint-{step}" / "optimizer.safetensors")
    trainer = TRAINERS[name](tmp_path, **ARGS)
    before = weights(trainer)
    with pytest.raises(CheckpointError, match="none of 2 is whole"):
        trainer.train(resume_from_checkpoint=True)
    assert all(torch.equal(value, before[key]) for key, value in weights(trainer).items())


def test_weights_of_another_model_are_refused_by_name(straight, tmp_path):
    shutil.copytree(straight("causal-lm")[0], tmp_path, dirs_exist_ok=True)
    other = TRAINERS["classifier"](tmp_path, **ARGS)
    before = weights(other)
    with pytest.raises(CheckpointError, match="not those of this BertForSequenceClassification: missing .*bert"):
        other.train(resume_from_checkpoint=True)
    assert all(torch.equal(value, before[key]) for key, value in weights(other).items())
    wider = causal_lm(hidden_size=64)(tmp_path, **ARGS)
    with pytest.raises(CheckpointError, match=r"not those of this Qwen3ForCausalLM: of another shape \['.*lm_head"):
        wider.train(resume_from_checkpoint=True)


def test_an_adapter_of_another_rank_or_of_other_layers_is_refused(straight, tmp_path):
    from peft import LoraConfig, get_peft_model

    folder = Path(straight("sft-lora")[0]) / "checkpoint-4"
    for rank, layers, reason in (
        (8, ["q_proj", "v_proj"], "of another shape .*lora_A"),
        (4, ["q_proj", "v_proj", "k_proj"], "missing .*k_proj"),
        (4, ["q_proj"], "not in the model .*v_proj"),
    ):
        model = get_peft_model(tiny.causal_lm(), LoraConfig(r=rank, target_modules=layers, task_type="CAUSAL_LM"))
        with pytest.raises(CheckpointError, match=f"not those of the adapter 'default': {reason}"):
            weight_files.load_weights(model, folder)


@pytest.mark.parametrize("damage", [cut, empty])
def test_damaged_weights_that_no_manifest_guards_are_an_error_that_names_them(damage, tmp_path):
    model = tiny.causal_lm()
    model.save_pretrained(tmp_path)
    damage(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        weight_files.load_weights(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_causal_lm(str(tmp_path))  # as after a download that broke off


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "no weight_map"),
        ('{"weight_map": {"a": 1}}', "no weight_map"),
        ('{"weight_map": {"a": "../outside/x.safetensors"}}', "not a file in its own folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not a file in its own folder"),
        ('{"weight_map": {"a": "gone.safetensors"}}', r"gone\.safetensors is missing"),
    ],
)
def test_an_index_of_weights_is_read_with_suspicion(index, reason, tmp_path):
    outside = tmp_path / "outside"
    tiny.causal_lm().save_pretrained(outside)
    (outside / "model.safetensors").rename(outside / "x.safetensors")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=reason):
        weight_files.load_weights(tiny.causal_lm(), tmp_path / "inside")


def test_no_pickle_is_written_and_none_that_lies_there_is_read(straight, tmp_path):
    shutil.copytree(straight("causal-lm")[0], tmp_path, dirs_exist_ok=True)
    assert [path for path in tmp_path.rglob("*") if path.suffix in (".pt", ".pth", ".bin", ".pkl")] == []
    for name in (
        "optimizer.pt",
        "scheduler.pt",
        "scaler.pt",
        "rng_state.pth",
        "pytorch_model.bin",
        "training_args.bin",
    ):
        (tmp_path / "checkpoint-2" / name).write_bytes(
            b"cposix\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."
        )
    trainer = TRAINERS["causal-lm"](tmp_path, **ARGS)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert not (tmp_path / "ran").exists()
    expected = straight("causal-lm")[1]
    assert all(torch.equal(value, expected[key]) for key, value in weights(trainer).items())


def test_the_best_checkpoint_is_checked_when_it_is_loaded_at_the_end(tmp_path):
    changes = dict(eval_strategy="steps", eval_steps=2, load_best_model_at_end=True)
    trainer = TRAINERS["causal-lm"](tmp_path, **ARGS | changes)

    write = trainer._save_checkpoint

    def write_and_break(model, trial=None):
        write(model, trial)
        for checkpoint in trainer.store.checkpoints():
            cut(checkpoint / "model.safetensors")

    trainer._save_checkpoint = write_and_break
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        trainer.train()


# ---- saving in the background ----


class Saves(TrainerCallback):
    """The step of each `on_save`, and whether that checkpoint was there and whole."""

    def __init__(self):
        self.heard = []

    def on_save(self, args, state, control, **kwargs):
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.heard.append((state.global_step, Store(args.output_dir).verify(path)))


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", ["causal-lm", "sft-lora"])
def test_callbacks_hear_of_each_checkpoint_under_its_step_once_it_is_there(name, later, tmp_path):
    saves = Saves()
    trainer = TRAINERS[name](
        tmp_path, callbacks=[saves], **ARGS | dict(save_steps=1, save_async=later, save_total_limit=2)
    )
    trainer.train()
    assert saves.heard == [(step, []) for step in (1, 2, 3, 4)]
    assert [path.name for path in trainer.store.checkpoints()] == ["checkpoint-3", "checkpoint-4"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("later", [False, True])
def test_a_disk_that_fills_up_at_any_byte_costs_that_checkpoint_and_is_tried_again(
    later, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(blocks, "SMALL", 1)  # the files of these models are small
    real, left = os.pwrite, {"bytes": 10**9}

    def limited(file, block, offset):
        count = min(len(block), left["bytes"])
        left["bytes"] -= count
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, block[:count], offset)

    class Fill(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            while trainer.checkpoints.saver.pending and not trainer.checkpoints.saver._written.done():
                time.sleep(0.01)
            left["bytes"] = {1: 100_000, 2: 0}.get(state.global_step, 10**9)  # of the second, of the third

    monkeypatch.setattr(os, "pwrite", limited)
    trainer = TRAINERS["causal-lm"](tmp_path, callbacks=[Fill()], **ARGS | dict(save_steps=1, save_async=later))
    with caplog.at_level(logging.WARNING, "posttrain"):
        trainer.train()
    failed = [text for text in warnings_of(caplog) if "was not saved" in text]
    assert [text.split(" ")[0] for text in failed] == ["checkpoint-2", "checkpoint-3"]
    assert all("The disk is full" in text and str(tmp_path) in text and "needed" in text for text in failed)
    assert trainer.state.global_step == 4
    assert [path.name for path in trainer.store.checkpoints()] == ["checkpoint-1", "checkpoint-4"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert all(trainer.store.verify(path) == [] for path in trainer.store.checkpoints())


def test_a_disk_too_small_is_said_before_the_first_update(tmp_path, monkeypatch, caplog):
    size = sum(p.nbytes for p in tiny.causal_lm().parameters())
    arguments = ARGS | dict(save_steps=1, save_total_limit=2, optim="adamw_torch")
    # 3 checkpoints of weights and two moments
    monkeypatch.setattr("posttrain.core.files.free_bytes", lambda directory: 9 * size - 1)
    seen = []

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            seen.extend(text for text in warnings_of(caplog) if "free and about" in text)

    TRAINERS["causal-lm"](tmp_path, callbacks=[Look()], **arguments).train()
    (warning,) = seen
    assert str(tmp_path) in warning and "3 checkpoints" in warning and "save_total_limit" in warning
    monkeypatch.setattr("posttrain.core.files.free_bytes", lambda directory: 9 * size)
    seen.clear(), caplog.clear()
    TRAINERS["causal-lm"](tmp_path, callbacks=[Look()], **arguments).train()
    assert seen == []
    monkeypatch.setattr("posttrain.core.files.free_bytes", lambda directory: size - 1)
    with pytest.raises(CheckpointError, match="weights of one checkpoint alone"):
        TRAINERS["causal-lm"](tmp_path, **arguments).train()
    TRAINERS["causal-lm"](tmp_path, **arguments | dict(save_strategy="no", max_steps=1)).train()


def test_a_checkpoint_of_an_adapter_and_one_of_a_whole_model_are_told_apart(tmp_path):
    for kind in ("sft", "sft-lora"):
        TRAINERS[kind](tmp_path / kind, max_steps=1, save_strategy="steps", save_steps=1).train()
    with pytest.raises(CheckpointError, match="It holds an adapter, of a run with peft_config"):
        TRAINERS["sft"](tmp_path / "sft-lora", max_steps=2).train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match="It holds a whole model, of a run without peft_config"):
        TRAINERS["sft-lora"](tmp_path / "sft", max_steps=2).train(resume_from_checkpoint=True)


def test_runs_in_one_folder_are_told_before_the_first_step_and_kept_apart(tmp_path, caplog):
    def run(until, **changes):
        caplog.clear()
        made = TRAINERS["causal-lm"](tmp_path, max_steps=until, save_strategy="steps", save_steps=2, **changes)
        step = made.train().global_step
        return step, " ".join(one.getMessage() for one in caplog.records if one.levelno == logging.WARNING)

    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty and holds no earlier run (notes.txt)" in run(4)[1]
    step, said = run(2)
    assert step == 2 and "holds checkpoints of an earlier run" in said
    step, said = run(3, resume_from_checkpoint="true")  # of the second run, and not the 4 of the first
    assert step == 3 and "holds checkpoint-4 of another run, and this run goes on from" in said
    assert run(3, overwrite_output_dir=True)[1] == ""
    shutil.rmtree(tmp_path)
    assert "holds" not in run(4)[1] + run(6, resume_from_checkpoint="auto")[1]


@pytest.mark.parametrize("later", [False, True])
def test_a_run_whose_last_save_failed_ends_with_an_error_and_its_weights_in_memory(later, tmp_path, monkeypatch):
    real, refused = os.open, {"on": False}

    def read_only(path, flags, *rest, **more):
        if refused["on"] and "checkpoint-4" in str(path) and flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *rest, **more)

    class Refuse(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            refused["on"] = state.global_step == 4

    monkeypatch.setattr(blocks, "SMALL", 1)  # the files of these models are small
    monkeypatch.setattr(os, "open", read_only)
    trainer = TRAINERS["causal-lm"](tmp_path / "run", callbacks=[Refuse()], **ARGS | dict(save_async=later))
    with pytest.raises(UnsavedError, match=r"checkpoint-4 is not there .*Read-only file system") as raised:
        trainer.train()
    assert str(tmp_path / "run" / "checkpoint-2") in str(raised.value) and "save_model" in str(raised.value)
    assert trainer.state.global_step == 4 and "train_loss" in trainer.state.log_history[-1]
    trainer.save_model(str(tmp_path / "model"))
    saved = load_causal_lm(str(tmp_path / "model")).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in trainer.model.state_dict().items())
    monkeypatch.undo()
    trainer.train()  # nothing of it is left in the next run


def test_no_error_where_the_model_is_on_the_disk_or_was_not_to_be_saved(tmp_path, monkeypatch):
    """The best model is that of step 2, which is loaded at the end; the save of step 4 fails."""
    commit = Store.commit

    def fails(store, temp, *rest):
        if temp.name.startswith(".tmp-checkpoint-4"):
            raise OSError(errno.EIO, "Input/output error")
        return commit(store, temp, *rest)

    monkeypatch.setattr(Store, "commit", fails)
    best = dict(eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, learning_rate=10.0)
    trainer = TRAINERS["causal-lm"](tmp_path, **ARGS | best | dict(metric_for_best_model="loss"))
    trainer.train()
    assert trainer.state.best_global_step == 2 and trainer.checkpoints.saved_step == 2


def test_the_command_line_saves_the_model_where_its_last_checkpoint_failed(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Store, "commit", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    trainer = TRAINERS["causal-lm"](tmp_path, **ARGS)
    source.train_and_save(trainer)
    assert "its last save failed" in caplog.text and "There is no other" in caplog.text
    assert (tmp_path / "model.safetensors").is_file()


TOO_LARGE = """
import os, resource, signal, sys
from tests.contract.trainers import TRAINERS
from posttrain.core import TrainerCallback

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder, limit, later = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
output, nothing, said = os.dup(1), os.open(os.devnull, os.O_WRONLY), []
for stream in (1, 2):  # they are files, to which the limit applies too
    os.dup2(nothing, stream)

class Limit(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

trainer = TRAINERS["causal-lm"](
    folder, callbacks=[Limit()], per_device_train_batch_size=8, max_steps=1, save_strategy="steps", save_steps=1,
    logging_steps=1, save_async=later, report=False,
)
for work in (trainer.train, lambda: trainer.save_model(folder + "/model")):
    try:
        work()
    except Exception as error:
        said.append(f"{type(error).__name__} {error}")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
os.write(output, "\\n".join(said).encode())
"""


@pytest.mark.parametrize(
    ("limit", "later", "files"),
    [
        (100, False, [".tmp-checkpoint-1.", "/model'"]),
        (20_000, False, [".tmp-checkpoint-1.", "/model'"]),
        (20_000, True, [".tmp-checkpoint-1.", "/model'"]),
    ],
)
def test_a_write_that_fails_names_its_file_or_the_folder(limit, later, files, tmp_path):
    """A limit to the size of files (``ulimit -f``): each of the writes fails as the system says, EFBIG."""
    done = programs.run(["-c", TOO_LARGE, str(tmp_path), str(limit), str(later)])
    lines = [line for line in done.stdout.splitlines() if "File too large" in line]
    assert len(lines) == 2 and all(file in line for file, line in zip(files, lines, strict=True)), done
