"""Recipes are whole: each is written out, says what it is, and trains."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from posttrain.cli import main, parse
from posttrain.cli.tools import new
from posttrain.core import registry
from tests import programs, tiny, tiny_vision

ROOT = Path(__file__).resolve().parents[4]
RECIPES = {recipe.name: recipe for recipe in new.recipes()}
#: Their loss needs nothing but a small model, and they take the longest among those that are alike.
QUICK = ["sft-chat", "sft-vision", "simpo"]


@pytest.fixture
def model(tmp_path):
    def make(name: str) -> str:
        folder = tmp_path / "model"
        if name == "sft-vision":
            for part in tiny_vision.FAMILIES["idefics3"]():
                part.save_pretrained(folder)
            return str(folder)
        if name.startswith("seq2seq"):
            tiny.seq2seq_lm().save_pretrained(folder)
        else:
            tiny.causal_lm(vocab_size=384).save_pretrained(folder)
        tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS).save_pretrained(folder)
        return str(folder)

    return make


def test_there_are_recipes_for_what_people_train():
    assert len(RECIPES) >= 14
    families = " ".join(recipe.model for recipe in RECIPES.values())
    assert all(family in families for family in ("Qwen3", "Llama-3", "gemma-3", "gpt-oss"))


def test_the_first_recipe_of_the_readme_has_a_model_that_anybody_may_load():
    named = re.findall(r"^posttrain new (\S+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert named and all("# Model:" not in (RECIPES[n].folder / "run.yaml").read_text() for n in named)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_is(name):
    recipe = RECIPES[name]
    text = (recipe.folder / "run.yaml").read_text(encoding="utf-8")
    head = [line.split(":")[0] for line in text.splitlines() if line.startswith("# ") and line[2].isupper()]
    assert {"# Run", "# Data", "# Expect", "# Memory"} <= set(head)
    assert ("# Model" in head) == recipe.model.startswith(("meta-llama/", "google/gemma-")), "the Hub asks for consent"
    assert text.startswith(f"# {name}: ") and recipe.memory > 0
    rows = [json.loads(line) for line in (recipe.folder / "rows.jsonl").read_text(encoding="utf-8").split("\n") if line]
    assert len(rows) == 20 and len({tuple(sorted(row)) for row in rows}) == 1
    assert max(len(line) for line in text.splitlines()) <= 120


@pytest.mark.long
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in RECIPES])
def test_a_recipe_trains(name, model, tmp_path, monkeypatch):
    if name == "sft-qlora":
        pytest.importorskip("bitsandbytes")
    if name.startswith("seq2seq"):
        pytest.importorskip("sacrebleu")
    written = new.write(name, tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    words = f"run.yaml --model_name_or_path {model(name)} --max_steps 2 --logging_steps 1 --eval_steps 2 --save_steps 2"
    words += " --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --use_cpu --bf16 false --dtype float32"
    words += " --report_to none"
    if name == "agent":
        pytest.importorskip("uvicorn")
    if name.startswith("grpo") or name == "agent":
        words += f" --num_generations 2 --max_completion_length {1024 if name == 'agent' else 8}"
    settings, _ = parse.read_words(["run.yaml"])
    if "max_length" in settings:
        words += " --max_length 256"
    command = RECIPES[name].command.split()
    if command[0] == "python":
        assert tmp_path / "run" / "train.py" in written
        done = programs.run(["train.py", *words.split()], cwd=Path.cwd())
        assert done.returncode == 0, done.stderr[-2000:]
    else:
        assert registry.method(command[1]) and main([command[1], *words.split()]) == 0
    history = json.loads((tmp_path / "run" / "out" / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    logged = {key for record in history for key in record}
    assert "loss" in logged and ("eval_loss" in logged or "eval_strategy" not in settings)


@pytest.mark.long
def test_a_plan_and_a_preview_need_no_rewards(model, tmp_path, monkeypatch, capsys):
    """The reward of this recipe is in its train.py."""
    new.write("grpo-tools", tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    words = ["grpo", "run.yaml", "--model_name_or_path", model("grpo-tools"), "--dtype", "float32", "--use_cpu"]
    assert main(["plan", *words]) == 0
    assert "peak (estimate)" in capsys.readouterr().out
    assert main(["preview", *words]) == 0
    assert main(words) == 2
    assert "reward_funcs is needed" in capsys.readouterr().err


def test_recipes_are_listed_and_written_out(tmp_path, monkeypatch, capsys):
    assert main(["new"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in RECIPES)
    monkeypatch.chdir(tmp_path)
    assert main(["new", "grpo-tools", "mine"]) == 0
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["rows.jsonl", "run.yaml", "train.py"]
    assert "cd mine && python train.py run.yaml" in capsys.readouterr().out
    (tmp_path / "mine" / "train.py").unlink()
    assert main(["new", "grpo-tools", "mine"]) == 1
    assert "is there already" in capsys.readouterr().err and not (tmp_path / "mine" / "train.py").exists()
    assert main(["new", "sft-lor"]) == 2
    assert "did you mean 'sft-lora'?" in capsys.readouterr().err
    assert main(["new", "a", "b", "c"]) == 2


def test_the_page_lists_every_recipe():
    page = (Path(__file__).resolve().parents[4] / "docs" / "recipes.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    memory = {r.name: f"{r.memory:.1f}" for r in RECIPES.values()}
    texts = {r.name: (r.folder / "run.yaml").read_text(encoding="utf-8").replace("\n#", "") for r in RECIPES.values()}
    named = {name: re.search(r"GPU +of ([\d, or]+) +GB", text) for name, text in texts.items()}
    gpus = {name: re.findall(r"\d+", found[1]) if found else [] for name, found in named.items()}
    for recipe in RECIPES.values():  # a tenth of a GPU is left free; one of 16 GB has 16 * 1000**3 / 1024**3 GiB
        fits = [gpu for gpu in ("16", "24", "80") if recipe.memory <= 0.9 * int(gpu) * 1000**3 / 1024**3]
        assert gpus[recipe.name] == fits, (recipe.name, recipe.memory)
    assert [re.sub(r" +", " ", row) for row in rows] == [
        re.sub(r" +", " ", f"| `{r.name}` | {r.title} | {r.model} | {memory[r.name]} | {', '.join(gpus[r.name])} |")
        for r in RECIPES.values()
    ]
