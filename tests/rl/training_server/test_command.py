"""The command ``posttrain serve-training``: what it serves, and what it refuses before a model is loaded."""

import socket

import pytest
import torch

pytest.importorskip("uvicorn")
peft = pytest.importorskip("peft")

from posttrain.cli import main  # noqa: E402
from posttrain.rl.training_server.server import TrainingServer  # noqa: E402
from tests import tiny  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.causal_lm().to(dtype=torch.bfloat16).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("TINKER_API_KEY", raising=False)


def test_its_help_says_what_the_flags_do(capsys):
    assert main(["serve-training", "--help"]) == 0
    said = capsys.readouterr().out
    assert "TINKER_BASE_URL" in said and "--batch_tokens N" in said and "--base" not in said
    assert "by default float32" in said


def test_it_serves_the_model_in_float32_on_this_machine(model, tmp_path, monkeypatch):
    served = []
    monkeypatch.setattr(TrainingServer, "serve", lambda self, host, port: served.append((self, host, port)))
    output = str(tmp_path / "states")
    assert main(["serve-training", model, "--port", "8123", "--output", output, "--batch_tokens", "64"]) == 0
    ((training, host, port),) = served
    assert (host, port, training.is_local, training.key) == ("127.0.0.1", 8123, True, None)
    assert training.base.name == model and training.base.most == 64 and str(training.output) == output
    assert {str(p.dtype) for p in training.base.model.parameters()} == {"torch.float32"}
    assert not any(p.requires_grad for p in training.base.model.parameters())
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    assert main(["serve-training", model, "--host", "0.0.0.0", "--dtype", "bfloat16"]) == 0
    training = served[1][0]
    assert (training.key, training.is_local) == ("tml-secret", False)
    assert {str(p.dtype) for p in training.base.model.parameters()} == {"torch.bfloat16"}


def test_what_cannot_be_served_is_refused(model, tmp_path, capsys):
    def said(status, *words):
        assert main(["serve-training", *words]) == status
        return capsys.readouterr().err

    assert "--host=0.0.0.0 lets other machines train here: set TINKER_API_KEY" in said(2, model, "--host", "0.0.0.0")
    assert "unknown flag --rank" in said(2, model, "--rank", "8")
    assert "it takes a model" in said(2)
    assert "does not exist" in said(1, str(tmp_path / "none"))
    peft.get_peft_model(tiny.causal_lm(), peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "a")
    config = tmp_path / "a" / "adapter_config.json"
    config.write_text(
        config.read_text().replace('"base_model_name_or_path": null', f'"base_model_name_or_path": "{model}"')
    )
    assert "is an adapter, and new ones are trained here" in said(1, str(tmp_path / "a"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} cannot be used" in said(2, model, "--port", str(port))
