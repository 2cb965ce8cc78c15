"""``--accelerate_config NAME`` starts what the file of that name in trl starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.cli.tools import launch
from posttrain.cli.tools.launch_presets import PRESETS

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
trl = pytest.importorskip("trl")
FILES = Path(trl.__file__).parent / "accelerate_configs"


def environment_of(*words):
    args, _ = launch.read(launch.split([*words, "--num_processes", "1"])[0])
    return launch.environment(args)


def test_there_is_a_preset_for_each_file():
    assert set(PRESETS) == {path.stem for path in FILES.glob("*.yaml")}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_up_processes_as_the_file_does(name):
    assert environment_of("--accelerate_config", name) == environment_of("--config_file", str(FILES / f"{name}.yaml"))


def test_a_method_starts_itself_with_a_preset(monkeypatch):
    started = []
    monkeypatch.setattr(launch, "start", lambda words: started.append(words) or 0)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert main(["sft", "run.yaml", "--accelerate_config", "fsdp2", "--max_steps", "3"]) == 0
    assert started[0][-6:] == ["--module", "posttrain.cli", "sft", "run.yaml", "--max_steps", "3"]
    assert os.environ["FSDP_VERSION"] == "2" and os.environ["ACCELERATE_USE_FSDP"] == "true"


def test_a_name_that_is_no_preset_is_refused_with_those_there_are(capsys):
    assert main(["sft", "run.yaml", "--accelerate_config", "fspd2"]) == 2
    said = capsys.readouterr().err
    assert "'fspd2' is neither a file nor one of single_gpu, multi_gpu, fsdp1" in said and "fsdp2'?" in said
