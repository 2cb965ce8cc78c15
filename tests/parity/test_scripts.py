"""TRL's own scripts run on posttrain after ``posttrain migrate``, with no other change, on tiny models and local rows.

The scripts that trl installs run always. Those of its repository are not installed: name the folder, and they run too.

    TRL_EXAMPLES=~/trl/examples/scripts python -m pytest tests/parity/test_scripts.py
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

from posttrain.cli import method, parse
from posttrain.compat import migration
from posttrain.core import registry
from tests import tiny

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
trl = pytest.importorskip("trl")
pytest.importorskip("peft")

INSTALLED = Path(trl.__file__).parent / "scripts"
EXAMPLES = Path(os.environ["TRL_EXAMPLES"]) if "TRL_EXAMPLES" in os.environ else None
#: What the scripts may leave with its library.
STAY = {"HfArgumentParser"}

SHORT = (
    "--output_dir out --max_steps 2 --per_device_train_batch_size 2 --report_to none --use_cpu true --bf16 false "
    "--save_strategy no --learning_rate 0.01"
)
MODEL, EVALUATE = "--model_name_or_path local/model", "--eval_strategy steps --eval_steps 2"
LORA = "--use_peft --lora_r 4 --lora_target_modules all-linear"
SAMPLE = "--num_generations 2 --max_completion_length 4"
REWARDS = "--reward_funcs think_format_reward get_soft_overlong_punishment"
WORDS = {
    "sft": f"{MODEL} --dataset_name local/messages {EVALUATE}",
    "dpo": f"{MODEL} --dataset_name local/pairs {LORA}",
    "grpo": f"{MODEL} --dataset_name local/prompts {SAMPLE} {REWARDS} {LORA}",
    "rloo": f"{MODEL} --dataset_name local/prompts {SAMPLE} --reward_model_name_or_path local/reward",
    "kto": f"{MODEL} --dataset_name local/labels {EVALUATE}",
    "reward": f"--model_name_or_path local/reward --dataset_name local/pairs {EVALUATE}",
    "distillation": f"{MODEL} --dataset_name local/prompts --teacher_model_name_or_path local/model "
    "--max_completion_length 4",
}
OF_EXAMPLES = {
    "cpo": f"{MODEL} --dataset_name local/pairs {EVALUATE}",
    "distillation": WORDS["distillation"],
    "gkd": f"{MODEL} --dataset_name local/messages --teacher_model_name_or_path local/model --max_new_tokens 4",
    "grpo_continuous_batching": f"{MODEL} --dataset_name openai/gsm8k --dataset_config default {SAMPLE}",
    "gspo": f"{MODEL} {SAMPLE} --importance_sampling_level sequence --dtype float32 {LORA}",
    "kto": f"{MODEL} --dataset_name local/labels {EVALUATE}",
    "online_dpo": f"{MODEL} --dataset_name local/prompts --reward_model_path local/reward --max_new_tokens 4 "
    f"--dtype auto {EVALUATE}",  # the script hands it to a tokenizer, which saves no torch.float32
    "orpo": f"{MODEL} --dataset_name local/pairs {LORA}",
    "reward_modeling": f"--model_name_or_path local/reward --dataset_name local/pairs {EVALUATE}",
    "sft_nemotron_3": f"{MODEL} --dataset_name local/messages {EVALUATE}",
    "tpo": f"{MODEL} --dataset_name local/triples {EVALUATE} --dtype float32",
}


def turn(role, text):
    return [{"role": role, "content": text}]


def rows():
    """Rows of each kind, by the name that a script asks for."""
    texts = [tiny.CORPUS[n % 5] for n in range(11)]
    triples = [
        {"prompt": turn("user", ask[:20]), "chosen": turn("assistant", good[:30]),
         "rejected": turn("assistant", bad[:12]), "reference": turn("assistant", good[5:30])}
        for ask, good, bad in zip(texts, texts[1:], texts[2:], strict=False)
    ]  # fmt: skip
    labels = [(row["prompt"], row[("chosen", "rejected")[n % 2]], n % 2 == 0) for n, row in enumerate(triples)]
    return {
        "local/triples": triples,
        "local/pairs": [{k: v for k, v in row.items() if k != "reference"} for row in triples],
        "local/messages": [{"messages": row["prompt"] + row["chosen"]} for row in triples],
        "local/prompts": [{"prompt": row["prompt"], "solution": "4"} for row in triples],
        "local/labels": [{"prompt": p, "completion": c, "label": label} for p, c, label in labels],
        "openai/gsm8k": [{"question": text[:20], "answer": "2 + 2 #### 4"} for text in texts],
        "AI-MO/NuminaMath-TIR": [{"problem": t[:20], "messages": turn("user", t), "solution": "4"} for t in texts * 8],
    }


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder in which the names of models and datasets are those of local ones: scripts run in it."""
    folder = tmp_path_factory.mktemp("hub")
    for name, model in {"local/model": tiny.causal_lm(), "local/reward": tiny.reward_model()}.items():
        model.save_pretrained(folder / name)
        tiny.tokenizer().save_pretrained(folder / name)
    for name, content in rows().items():
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            text = "".join(json.dumps(row) + "\n" for row in content)
            (folder / name / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return folder


def weights_at(folder):
    from safetensors.torch import load_file

    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def run_migrated(script, words, hub, monkeypatch):
    """Run a copy of `script` that posttrain migrate rewrote; the folder that it saved its model in."""
    done = migration.migrate(script.read_text(encoding="utf-8"))
    assert {note.text.split()[3].rstrip(":") for note in done.notes} <= STAY, done.notes
    copy = hub / f"migrated_{script.stem}.py"
    copy.write_text(done.text, encoding="utf-8")
    shutil.rmtree(hub / "out", ignore_errors=True)
    monkeypatch.chdir(hub)
    monkeypatch.setattr(sys, "argv", [str(copy), *words.split(), *SHORT.split()])
    runpy.run_path(str(copy), run_name="__main__")
    return hub / "out"


def assert_trained_here(out):
    assert (out / "training_args.json").is_file() and not (out / "training_args.bin").exists()  # posttrain's
    records = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert any("train_loss" in record for record in records)
    weights = weights_at(out)
    assert weights and all(torch.isfinite(value).all() for value in weights.values())


@pytest.mark.parametrize("name", WORDS)
def test_the_scripts_that_trl_installs_train_after_migrate(name, hub, monkeypatch):
    assert_trained_here(run_migrated(INSTALLED / f"{name}.py", WORDS[name], hub, monkeypatch))


def test_no_script_that_trl_installs_is_left_out():
    beside = {"__init__", "_hf_argparser", "env", "utils", "vllm_serve"}
    assert {path.stem for path in INSTALLED.glob("*.py")} - beside == set(WORDS)


@pytest.mark.skipif(EXAMPLES is None, reason="TRL_EXAMPLES names no folder of trl's examples/scripts")
@pytest.mark.parametrize("name", OF_EXAMPLES)
def test_the_scripts_of_trls_repository_train_after_migrate(name, hub, monkeypatch):
    assert_trained_here(run_migrated(EXAMPLES / f"{name}.py", OF_EXAMPLES[name], hub, monkeypatch))


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo", "kto", "reward", "rloo", "distillation"])
def test_every_flag_of_a_command_of_trl_is_one_of_ours(name):
    """Of its script, with all of its dataclasses."""
    known = importlib.import_module(f"trl.scripts.{name}").make_parser().dataclass_types
    fields = [field.name for kind in known for field in dataclasses.fields(kind) if field.init]
    assert len(fields) > 100 and "learning_rate" in fields
    settings = {field: parse.Setting(f"--{field}", "1") for field in fields}
    assert parse.unknown(method.configs_of(registry.method(name)), settings) == []
