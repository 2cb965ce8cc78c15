"""One file describes a run: it names its method, or the method is inferred and said."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from posttrain.cli import COMMANDS, main, method
from posttrain.core import registry
from posttrain.core.errors import ConfigError

pytest.importorskip("posttrain.sft"), pytest.importorskip("posttrain.rl")


@pytest.fixture
def write(tmp_path, monkeypatch):
    """`write(row, lines)`: a file ``run.yaml`` of a run on `row`."""
    monkeypatch.chdir(tmp_path)

    def made(row, lines=""):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        (tmp_path / "run.yaml").write_text(f"model_name_or_path: none\ndataset_name: rows.jsonl\n{lines}")

    return made


@pytest.mark.parametrize(
    ("row", "lines", "name"),
    [
        ({"text": "a"}, "method: dpo\n", "dpo"),
        ({"instruction": "a", "output": "b"}, "", "sft"),
        ({"chosen": "a", "rejected": "b"}, "", "dpo"),
        ({"prompt": "a", "completion": "b", "label": True}, "", "kto"),
        ({"prompt": "a"}, "reward_funcs: accuracy_reward\n", "grpo"),
    ],
)
def test_the_file_names_the_method_or_its_rows_and_arguments_do(write, capsys, row, lines, name):
    write(row, lines)
    for words in (["run.yaml"], ["train", "run.yaml"]):
        assert method.of_words(words, "plan")[0].name == name
    said = f"method: {name}, inferred from " in capsys.readouterr().err
    assert said == (not lines.startswith("method"))


def test_a_method_before_the_file_counts_and_must_agree_with_it(write, capsys):
    write({"text": "a"}, "method: dpo\n")
    found, words = method.of_words(["sft", "run.yaml"], "plan")
    assert (found.name, words) == ("sft", ["run.yaml"])
    for command in ("check", "train"):
        assert main([command, "sft", "run.yaml"]) == 2
        assert "run.yaml:3: method='dpo' and the command is sft; keep one" in capsys.readouterr().err


def test_what_is_no_method_is_named_with_the_nearest(write):
    write({"text": "a"}, "method: sftt\n")
    with pytest.raises(ConfigError, match="did you mean 'sft'"):
        method.of_words(["run.yaml"], "train")
    with pytest.raises(ConfigError, match="name the method first, or a file"):
        method.of_words([], "plan")
    with pytest.raises(ConfigError, match=r"absent.yaml: No such file or directory$"):  # and nothing is inferred
        method.of_words(["absent.yaml"], "plan")


def test_the_environment_of_a_file_is_set_before_anything_reads_it(write, monkeypatch, capsys):
    monkeypatch.setenv("A_VARIABLE", "before")
    write({"text": "a"}, "env:\n  A_VARIABLE: 1e-3\n")
    monkeypatch.setattr(method, "_inferred", lambda settings: {"0.001": "sft"}[os.environ["A_VARIABLE"]])
    assert method.of_words(["run.yaml"], "plan")[0].name == "sft" and os.environ["A_VARIABLE"] == "0.001"
    monkeypatch.setenv("A_VARIABLE", "before")
    settings, problems = method.settings_of(registry.method("sft"), ["run.yaml"])
    assert os.environ["A_VARIABLE"] == "0.001" and "env" not in settings and problems == []
    write({"text": "a"}, "env: A_VARIABLE\n")
    assert main(["check", "sft", "run.yaml"]) == 2
    assert "run.yaml:3: env must hold `NAME: value` lines" in capsys.readouterr().err


HELP = """
import contextlib, io, sys
from posttrain.cli import main
for words in {words}:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([words, "--help"]) == 0, words
    assert len(out.getvalue()) > 100, words
heavy = {{"transformers", "datasets", "peft", "vllm", "pandas", "optuna", "lm_eval", "matplotlib", "trl"}}
print(sorted(heavy & set(sys.modules)))
"""


def test_help_of_every_command_and_method_loads_nothing_heavy():
    words = sorted({*COMMANDS, *registry.methods()} - {"env"})
    program = HELP.format(words=words)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
