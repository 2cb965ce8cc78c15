"""The server is started with what a trainer needs, under the names of vLLM and of trl."""

from __future__ import annotations

import os
import sys

import pytest

from posttrain import cli
from posttrain.cli.tools import vllm_serve
from posttrain.core.errors import ConfigError


def test_the_command_has_what_a_trainer_needs():
    made = vllm_serve.server_command(["Qwen/Qwen3-0.6B", "--port", "9000"], has_gpu=True)
    assert made[:3] == ["vllm", "serve", "Qwen/Qwen3-0.6B"]
    options = dict(zip(made[3::2], made[4::2], strict=True))
    assert options == {
        "--weight-transfer-config": '{"backend": "nccl"}', "--logprobs-mode": "processed_logprobs", "--port": "9000",
    }  # fmt: skip
    assert '{"backend": "gloo"}' in vllm_serve.server_command(["m"], has_gpu=False)


def test_the_names_of_trl_are_understood_and_given_ones_win():
    words = ["--model", "m", "--tensor_parallel_size", "2", "--vllm_model_impl=transformers", "--enforce_eager", "True"]
    made = vllm_serve.server_command([*words, "--trust_remote_code", "false", "--logprobs-mode", "raw_logprobs"], True)
    assert made[:3] == ["vllm", "serve", "m"] and "--enforce-eager" in made and "--no-trust-remote-code" in made
    for pair in (
        ["--tensor-parallel-size", "2"],
        ["--model-impl", "transformers"],
        ["--logprobs-mode", "raw_logprobs"],
    ):
        assert made[made.index(pair[0]) + 1] == pair[1]
    assert "processed_logprobs" not in made


def test_options_are_read_from_a_file_and_those_beside_it_win(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: m\nport: 9000\ntensor_parallel_size: 2\nenforce_eager: true\nrevision: null\nvllm_model_impl: auto\n"
        "allowed-origins: [a, b]\nspeculative_config: {method: ngram, num_speculative_tokens: 2}\n"
    )
    made = vllm_serve.server_command(["--config", str(file), "--port", "8000"], True)
    assert made[:3] == ["vllm", "serve", "m"] and "--revision" not in made and made.count("--port") == 1
    assert " ".join(made[made.index("--port") :]).split(" --") == [
        "--port 8000", "tensor-parallel-size 2", "enforce-eager", "model-impl auto", "allowed-origins a b",
        'speculative-config {"method": "ngram", "num_speculative_tokens": 2}',
    ]  # fmt: skip
    assert vllm_serve.server_command(["other", f"--config={file}"], True)[2] == "other"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "none.yaml"], "none.yaml: No such file"),
        (["m", "--config"], "--config has no value"),
    ],
)
def test_a_file_of_options_that_cannot_be_read_is_named(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        vllm_serve.server_command(words, True)


def test_a_missing_model_is_said():
    with pytest.raises(ConfigError, match="name a model"):
        vllm_serve.server_command(["--port", "9000"], True)
    assert cli.main(["vllm-serve"]) == 2


def test_the_server_takes_the_place_of_the_command(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(vllm_serve, "missing", lambda *names: None)
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    assert cli.main(["vllm-serve", "m", "--dry-run"]) == 0 and not started
    assert "VLLM_SERVER_DEV_MODE=1 vllm serve m" in capsys.readouterr().out
    cli.main(["vllm-serve", "m"])
    ((program, command, environment),) = started
    assert program == command[0] == sys.executable  # where `vllm` is not on the PATH too
    assert command[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", "m"]
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
