"""Files that mean harm, in every place of a checkpoint or of a model: nothing in them is run, and they are refused by
name.
"""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from posttrain.core.checkpoint import codec, manifest
from posttrain.core.checkpoint import weights as weight_files
from posttrain.core.errors import CheckpointError
from posttrain.lm.loading.loading import load_causal_lm
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny
from tests.contract.trainers import TRAINERS

ARGS = dict(optim="adamw_torch", max_steps=2, save_strategy="steps", save_steps=1)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path):
    """A folder that appears where code of a file was run."""
    path = tmp_path / "was-run"
    yield path
    assert not path.exists(), "code from a file was run"


def payloads(mark):
    torch.save({"a": Evil(mark)}, mark.parent / "zip.pt")
    torch.save({"a": Evil(mark)}, mark.parent / "old.pt", _use_new_zipfile_serialization=False)
    zipped, old = (mark.parent / "zip.pt").read_bytes(), (mark.parent / "old.pt").read_bytes()
    return {"pickle": pickle.dumps(Evil(mark)), "torch.save": zipped, "old torch.save": old}


def test_the_payloads_are_sharp(tmp_path):
    for number, content in enumerate(payloads(tmp_path / "mark").values()):
        (tmp_path / "file").write_bytes(content)
        with open(tmp_path / "file", "rb") as file:
            pickle.load(file) if number == 0 else torch.load(tmp_path / "file", weights_only=False)
        (tmp_path / "mark").rmdir()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    made = {}

    def run(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            TRAINERS[name](made[name], **ARGS).train()
        return made[name]

    return run


def seal(checkpoint):
    """Make the manifest agree with the files, as one who means harm would."""
    (checkpoint / "manifest.json").unlink()
    manifest.write_manifest(checkpoint, 1, {})


FILES = ["model.safetensors", "optimizer.safetensors", "optimizer.json", "scheduler.json", "rank-0.json",
"rank-0.safetensors",
         "trainer_state.json", "training_args.json"]  # fmt: skip


@pytest.mark.parametrize("name", ["causal-lm", "sft-lora"])
@pytest.mark.parametrize("kind", ["pickle", "torch.save", "old torch.save"])
def test_a_pickle_in_the_place_of_any_file_of_a_checkpoint_is_refused_by_name(name, kind, runs, mark, tmp_path):
    content = payloads(mark)[kind]
    for file in FILES:
        file = file.replace("model.", "adapter_model.") if name == "sft-lora" and file.startswith("model") else file
        out = tmp_path / file
        shutil.copytree(runs(name), out)
        (out / "checkpoint-1" / file).write_bytes(content)
        for sealed in (False, True):
            if sealed:
                seal(out / "checkpoint-1")
            with pytest.raises(CheckpointError, match=file):
                TRAINERS[name](out, **ARGS).train(resume_from_checkpoint=str(out / "checkpoint-1"))


def test_pickles_that_other_trainers_would_read_are_left_alone(runs, mark, tmp_path):
    shutil.copytree(runs("causal-lm"), tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint-1"
    names = (
        "pytorch_model.bin optimizer.pt optimizer.bin scheduler.pt scaler.pt rng_state.pth rng_state_0.pth "
        "training_args.bin"
    )
    for number, name in enumerate(f"{names} adapter_model.bin trainer_state.pt .metadata".split()):
        (checkpoint / name).write_bytes(list(payloads(mark).values())[number % 3])
    seal(checkpoint)
    trainer = TRAINERS["causal-lm"](tmp_path / "run", **ARGS)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 2


@pytest.mark.parametrize(
    "tree",
    [
        {"$array": "a", "dtype": "|O", "shape": [1]},
        {"$scalar": "00" * 8, "dtype": "|O"},
        {"$dtype": "load"},
        {"$dtype": "__class__"},
        {"$object": "os.system", "args": ["true"]},
        {"$tensor": "../../outside"},
        {"$counter": [[["a"], 1]]},
    ],
    ids=str,
)
def test_a_tree_can_name_no_class_no_function_and_no_other_file(tree, tmp_path):
    codec.save_tree({"a": torch.zeros(8, dtype=torch.uint8)}, tmp_path / "state")
    document = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps(document | {"tree": tree}))
    with pytest.raises(CheckpointError, match=r"state"):
        codec.load_tree(tmp_path / "state")


OUTSIDE = [
    "../outside/x.safetensors",
    "/etc/passwd",
    "..",
    "a/b.safetensors",
    "..\\x.safetensors",
    "C:x.safetensors",
    "",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_leads_no_model_out_of_its_folder(name, tmp_path):
    """transformers would read the file: the index is looked at before."""
    folder, outside = tmp_path / "model", tmp_path / "outside"
    tiny.causal_lm().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    outside.mkdir()
    shutil.move(folder / "model.safetensors", outside / "x.safetensors")
    tensors = list(tiny.causal_lm().state_dict())
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, name)})
    for kind in ("model.safetensors.index", "pytorch_model.bin.index", "model.safetensors.index.fp16"):
        (folder / f"{kind}.json").write_text(index)
        with pytest.raises(CheckpointError, match=rf"{kind}.json names"):
            SFTTrainer(str(folder), SFTConfig(str(tmp_path / "out"), use_cpu=True), train_dataset=[{"text": "a b c"}])
        with pytest.raises(CheckpointError, match=rf"{kind}.json names"):
            load_causal_lm(tmp_path, {"subfolder": "model"})
        (adapter := tmp_path / "adapter").mkdir(exist_ok=True)
        (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
        with pytest.raises(CheckpointError, match=rf"{kind}.json names"):
            load_causal_lm(adapter)
        (folder / f"{kind}.json").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="names"):
        weight_files.load_weights(tiny.causal_lm(), folder)


def trainer_of(folder, out, rows=None, **changes):
    args = SFTConfig(str(out), use_cpu=True, max_steps=1, save_strategy="no", report_to="none", **changes)
    return SFTTrainer(str(folder), args, train_dataset=rows or [{"text": "one two three"}])


@pytest.mark.parametrize("kind", ["pickle", "torch.save", "old torch.save"])
def test_weights_that_are_a_pickle_are_not_run(kind, mark, tmp_path):
    folder = tmp_path / "model"
    tiny.causal_lm().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(payloads(mark)[kind])
    with pytest.raises(Exception, match=r"(?i)weights.only|unsafe|unpickl|load"):
        trainer_of(folder, tmp_path / "out")


def test_code_that_comes_with_a_model_runs_only_if_an_argument_says_so(mark, tmp_path):
    folder = tmp_path / "model"
    tiny.causal_lm().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nclass Config: pass\nclass Model: pass\n")
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trust_remote_code"):
        trainer_of(folder, tmp_path / "out")


@pytest.mark.parametrize("load", ["reward model", "seq2seq", "consolidate"])
def test_nobody_is_asked_at_the_terminal_whether_such_code_may_run(load, mark, tmp_path, monkeypatch):
    from posttrain.cli.tools.consolidate import consolidate
    from posttrain.core import ModelConfig
    from posttrain.core.checkpoint import Store
    from posttrain.rl.rewards.score_heads import load_reward_model
    from posttrain.seq2seq.cli import load_model

    folder = tmp_path / "model"
    tiny.causal_lm().save_pretrained(folder)
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nclass Config: pass\n")
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "evil.Config"}}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr(Store, "verify", lambda *_: [])
    monkeypatch.setattr("posttrain.core.checkpoint.sharded.processes", lambda *_: 1)
    monkeypatch.setattr("posttrain.core.checkpoint.sharded.load", lambda *_: {})
    calls = {
        "reward model": lambda: load_reward_model(folder),
        "seq2seq": lambda: load_model(ModelConfig(model_name_or_path=str(folder))),
        "consolidate": lambda: consolidate(folder, tmp_path / "whole"),
    }
    with pytest.raises(ValueError, match="trust_remote_code"):
        calls[load]()


def test_code_that_comes_with_a_tokenizer_is_not_run(mark, tmp_path):
    folder = tmp_path / "model"
    tiny.causal_lm().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nclass Tokenizer: pass\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}, "tokenizer_class": "EvilTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    try:
        trainer_of(folder, tmp_path / "out")
    except (ValueError, OSError, AttributeError) as error:
        assert "trust_remote_code" in str(error) or "okenizer" in str(error)


REACHES = {
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['os'].mkdir('MARK') }}",
    "import": "{{ cycler.__init__.__globals__.os.mkdir('MARK') }}",
    "changes its input": "{{ messages.append(1) }}",
}


@pytest.mark.parametrize("kind", REACHES)
def test_a_chat_template_that_reaches_for_attributes_is_stopped(kind, mark, tmp_path):
    tokenizer = tiny.tokenizer(chat_template=REACHES[kind].replace("MARK", str(mark)))
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    args = SFTConfig(str(tmp_path), use_cpu=True, max_steps=1, save_strategy="no", report_to="none")
    with pytest.raises(Exception, match=r"(?i)unsafe|security|undefined|template") as caught:
        SFTTrainer(tiny.causal_lm(), args, train_dataset=rows, processing_class=tokenizer)
    assert not isinstance(caught.value, (KeyError, AttributeError))


@pytest.mark.parametrize("kind", ["pickle", "torch.save", "old torch.save"])
def test_an_adapter_that_is_a_pickle_is_not_run(kind, runs, mark, tmp_path):
    shutil.copytree(Path(runs("sft-lora")) / "checkpoint-1", tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(payloads(mark)[kind])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is missing"):
        weight_files.load_weights(TRAINERS["sft-lora"](tmp_path / "out", **ARGS).model, tmp_path / "adapter")
