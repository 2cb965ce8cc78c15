"""The SDK tinker, unchanged, as a program of an environment of its own: `make test-agents` makes it."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

peft = pytest.importorskip("peft")
pytest.importorskip("uvicorn")

from tests import tiny  # noqa: E402
from tests.rl.training_server.client import ROWS, Client, logps_of  # noqa: E402

PYTHON = Path(__file__).parents[3] / ".venv-agents" / "bin" / "python"
PROGRAM = Path(__file__).parent / "programs" / "tinker_sdk.py"

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-agents: run make test-agents"),
    pytest.mark.long,
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the program got, and the client with the server."""
    client = Client(tmp_path_factory.mktemp("server"))
    about = {"TINKER_BASE_URL": client.address, "TINKER_API_KEY": "tml-test", "TINKER_TELEMETRY": "0", "NO_PROXY": "*"}
    words = [str(PYTHON), str(PROGRAM), "tiny", json.dumps(ROWS)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=os.environ | about)
    client.close()
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"client": client}


def adapter(found, name):
    run, kind, which = found[name].removeprefix("tinker://").split("/")
    (folder,) = (found["client"].training.output / run.replace(":", "-") / kind / which).glob("checkpoint-*")
    return peft.PeftModel.from_pretrained(tiny.causal_lm(), folder, is_trainable=True).eval()


def test_its_losses_equal_a_loop_of_peft_and_torch(found):
    hand = adapter(found, "start")
    parameters = [p for p in hand.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    place = 0
    for _ in range(3):
        for tokens, targets, weights in ROWS:
            logps = logps_of(hand, tokens, targets)
            loss = -(logps * torch.tensor(weights)).sum()
            loss.backward()
            assert found["losses"][place] == pytest.approx(float(loss.detach()), abs=1e-5)
            assert found["logprobs"][place] == pytest.approx(logps.tolist(), abs=1e-5)
            place += 1
        adam.step()
        adam.zero_grad()
    with torch.no_grad():
        text = ROWS[0][0] + found["sampled"][0][0]
        logps = logps_of(hand, text[:-1], text[1:]).tolist()
    assert found["sampled"][0] == found["sampled"][1] and found["sampled"][0][2] == "length"
    assert found["sampled"][0][1] == pytest.approx(logps[4:], abs=1e-4)
    assert found["prompt"][0] is None and found["prompt"][1:] == pytest.approx(logps[:4], abs=1e-4)
    assert found["scored"] == found["prompt"]


def test_what_it_saves_goes_on_and_is_sampled_from(found):
    mine, loaded = found["continued"]
    assert mine == loaded
    with torch.no_grad():
        end, text = adapter(found, "end"), list(ROWS[0][0])
        for (tokens, targets, _), logps in zip(ROWS, mine, strict=True):
            assert logps == pytest.approx(logps_of(end, tokens, targets).tolist(), abs=1e-5)
        for _ in range(5):
            text.append(int(end(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
    assert found["saved"] == text[5:] and found["many"] == 1200


def test_its_errors_say_what_and_what_to_do(found):
    loss, model, sample = found["errors"]
    assert loss.startswith("RequestFailedError") and "loss_fn='gspo' is not done here; there are cross_entropy" in loss
    assert "base_model='other' is not served here; this server has 'tiny'" in model
    assert sample.startswith("BadRequestError") and "max_tokens=1000000 must be 1 to 507" in sample
