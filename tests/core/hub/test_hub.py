"""Uploads against a hub of our own on 127.0.0.1: what arrives, and what happens when it does not."""

from __future__ import annotations

import base64
import importlib.metadata
import json
import logging
import math
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
import types
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import pytest
import torch
import transformers
import yaml

from posttrain.core import Trainer, TrainerCallback, TrainingArguments, config
from posttrain.core.checkpoint.store import Store
from posttrain.core.errors import ConfigError
from posttrain.core.hub.card import (
    framework_versions,
    hyperparameters,
    loss_picture,
    model_card,
    of_run,
    results,
    write_model_card,
)
from posttrain.core.hub.uploads import HubArguments, Uploader, jobs
from tests import tiny

TOKEN = "hf_secret"


class FakeHub(ThreadingHTTPServer):
    """Repositories as dicts ``{path: bytes}`` per branch, with the calls that creating and committing make."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.created: list[dict] = []
        self.calls: list[str] = []
        self.failures: list[int] = []  # statuses to answer the next calls with
        self.token = f"Bearer {TOKEN}"
        self.gate = threading.Event()  # commits wait for it
        self.gate.set()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        parts = [unquote(part) for part in path.split("?")[0].strip("/").split("/")]
        if self.failures:
            return self.failures.pop(0), {"error": "out of order"}
        if parts[1:] == ["repos", "create"]:
            wanted = json.loads(body)
            self.created.append(wanted)
            name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            status = 409 if (name, "main") in self.files else 200
            self.files.setdefault((name, "main"), {".gitattributes": b""})
            return status, {"url": f"{self.url}/{name}"}
        if parts[1:] == ["validate-yaml"]:
            return 200, {}
        repo, action, revision = "/".join(parts[2:4]), parts[4], parts[5]
        if (repo, "main") not in self.files:
            return 404, {"error": "no such repository"}
        if action == "branch":
            self.files.setdefault((repo, revision), dict(self.files[repo, "main"]))
            return 200, {}
        files = self.files.get((repo, revision))
        if files is None:
            return 404, {"error": "no such branch"}
        if action == "revision":
            return 200, {"id": repo, "sha": "0" * 40, "siblings": []}
        if action == "tree":
            return 200, [{"type": "file", "path": name, "size": len(f), "oid": "1" * 40} for name, f in files.items()]
        if action == "preupload":
            asked = json.loads(body)["files"]
            return 200, {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]}
        assert (method, action) == ("POST", "commit")
        self.gate.wait(20)
        for line in body.decode().splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "header":
                self.commits.append(value["summary"])
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        oid = f"{len(self.commits):040x}"
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/{oid}", "commitOid": oid}


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    timeout = 20

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.calls.append(self.path)
        if self.headers.get("Authorization") != self.server.token:
            status, answer = 401, {"error": "Invalid credentials"}
        else:
            status, answer = self.server.answer(self.command, self.path, body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if status == 404 and "branch" in str(answer):
            self.send_header("X-Error-Code", "RevisionNotFound")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    point_at(server.url, monkeypatch)
    yield server
    server.gate.set()
    server.shutdown()
    server.server_close()
    thread.join(10)


def point_at(url, monkeypatch):
    import huggingface_hub
    from huggingface_hub.utils import _http

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    # The library has a patience of its own, of seconds.
    monkeypatch.setattr(_http, "time", types.SimpleNamespace(sleep=lambda seconds: None, time=time.time))


def uploader(output_dir, **options):
    args = HubArguments(**{"push_to_hub": True, "hub_token": TOKEN, "hub_model_id": "me/model"} | options)
    return Uploader(args, output_dir, retry_waits=(0.01, 0.02, 0.03))


def make_checkpoint(output_dir, step, **more) -> Path:
    store = Store(output_dir)
    temp = store.begin(step)
    content = {"model.safetensors": f"weights {step}", "config.json": "{}", "README.md": "a template"}
    content |= {"optimizer.json": "{}", "optimizer.safetensors": "moments", "scheduler.json": "{}"}
    content |= {"rank-0.json": "{}", "trainer_state.json": "{}", "training_args.json": "{}"} | more
    for name, text in content.items():
        (temp / name).write_text(text)
    return store.commit(temp)


def push_all(to, strategy, checkpoint, output_dir, at_end=False):
    for folder, path, ignore in jobs(strategy, checkpoint, output_dir, at_end):
        to.push(folder, path, "step", ignore)


def on_hub(hub, revision="main", repo="me/model"):
    return sorted(set(hub.files[repo, revision]) - {".gitattributes"})


# ---- what each strategy uploads ----


def test_strategies_say_which_folder_goes_where():
    where = {
        s: [(str(f), path) for f, path, _ in jobs(s, "out/checkpoint-5", "out")]
        for s in ("end", "every_save", "checkpoint", "all_checkpoints")
    }
    root = ("out/checkpoint-5", "")
    assert where == {
        "end": [],
        "every_save": [root],
        "checkpoint": [root, ("out/checkpoint-5", "last-checkpoint")],
        "all_checkpoints": [root, ("out/checkpoint-5", "checkpoint-5")],
    }
    for strategy in where:
        assert [(str(f), path) for f, path, _ in jobs(strategy, None, "out", at_end=True)] == [("out", "")]
        assert jobs(strategy, None, "out") == []


def test_no_optimizer_is_uploaded_by_default(hub, tmp_path):
    up = uploader(tmp_path)
    push_all(up, "every_save", make_checkpoint(tmp_path, 1), tmp_path)
    assert up.finish(20)
    assert on_hub(hub) == ["config.json", "model.safetensors", "training_args.json"]
    assert hub.files["me/model", "main"]["model.safetensors"] == b"weights 1"


def test_checkpoint_keeps_a_last_checkpoint_that_a_run_resumes_from(hub, tmp_path):
    up = uploader(tmp_path)
    push_all(up, "checkpoint", make_checkpoint(tmp_path, 1, **{"rank-1.json": "{}"}), tmp_path)
    assert up.finish(20) and "last-checkpoint/rank-1.json" in on_hub(hub)
    newest = make_checkpoint(tmp_path, 2)
    push_all(up, "checkpoint", newest, tmp_path)
    assert up.finish(20)
    received = tmp_path / "received" / "last-checkpoint"
    received.mkdir(parents=True)
    for name, data in hub.files["me/model", "main"].items():
        if name.startswith("last-checkpoint/"):
            (received / name.removeprefix("last-checkpoint/")).write_bytes(data)
    assert sorted(f.name for f in received.iterdir()) == sorted(f.name for f in newest.iterdir())  # no rank-1 left
    assert Store(tmp_path).resolve(received) == received
    assert (received / "optimizer.safetensors").read_text() == "moments"
    assert hub.files["me/model", "main"]["model.safetensors"] == b"weights 2"


def test_all_checkpoints_keeps_a_folder_of_each_even_when_the_hub_is_slow(hub, tmp_path):
    hub.gate.clear()
    up = uploader(tmp_path)
    for step in (1, 2, 3):
        push_all(up, "all_checkpoints", make_checkpoint(tmp_path, step), tmp_path)
    hub.gate.set()
    assert up.finish(20)
    for step in (1, 2, 3):
        assert hub.files["me/model", "main"][f"checkpoint-{step}/model.safetensors"] == f"weights {step}".encode()
    assert hub.files["me/model", "main"]["model.safetensors"] == b"weights 3"


def test_the_end_uploads_the_output_folder_without_checkpoints_and_hidden_files(hub, tmp_path):
    make_checkpoint(tmp_path, 1)
    for name in ("model.safetensors", "README.md", "log.jsonl", ".env", "_scratch", "optimizer.pt"):
        (tmp_path / name).write_text("x")
    up = uploader(tmp_path)
    push_all(up, "end", None, tmp_path, at_end=True)
    assert up.finish(20)
    assert on_hub(hub) == ["README.md", "log.jsonl", "model.safetensors"]


# ---- the repository ----


def test_the_repository_is_made_with_the_first_upload_and_only_then(hub, tmp_path):
    up = uploader(tmp_path, hub_private_repo=True)
    assert hub.calls == []
    folder = make_checkpoint(tmp_path, 1)
    first, second = up.push(folder, blocking=True), up.push(folder, "again", blocking=True)
    assert [(c["name"], c["organization"], c["visibility"]) for c in hub.created] == [("model", "me", "private")]
    assert first.url == f"{hub.url}/me/model/commit/{1:040x}" and second.url.endswith(f"{2:040x}")


def test_without_a_name_the_output_folder_names_the_repository(hub, tmp_path):
    up = uploader(tmp_path / "my run!", hub_model_id=None)
    up.push(make_checkpoint(tmp_path / "my run!", 1), blocking=True)
    assert up.repo_id == "me/my-run" and ("me/my-run", "main") in hub.files


def test_a_repository_that_exists_is_used(hub, tmp_path):
    hub.files["me/model", "main"] = {"old.txt": b"old"}
    up = uploader(tmp_path)
    up.push(make_checkpoint(tmp_path, 1), ignore=["*.json"], blocking=True)
    assert up.finish(20) and on_hub(hub) == ["README.md", "model.safetensors", "old.txt", "optimizer.safetensors"]


def test_a_revision_is_a_branch_that_is_made(hub, tmp_path):
    up = uploader(tmp_path, hub_revision="trial")
    up.push(make_checkpoint(tmp_path, 1), blocking=True)
    assert up.finish(20) and "model.safetensors" in on_hub(hub, "trial") and on_hub(hub) == []


def test_a_model_that_no_run_has_trained_is_pushed_too(hub, tmp_path):
    args = TrainingArguments(str(tmp_path / "model"), hub_token=TOKEN, use_cpu=True, report_to="none")
    assert Trainer(tiny.causal_lm(), args).push_to_hub()
    assert {"config.json", "model.safetensors"} <= set(on_hub(hub))


# ---- one after another, in the background ----


def test_a_checkpoint_of_a_scripts_own_is_uploaded_by_the_method_of_transformers(hub, tmp_path):
    class Script(Trainer):
        def _save_checkpoint(self, model, trial):
            folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
            self.save_model(str(folder), _internal_call=True)
            (folder / "mine.txt").write_text("beside the model")
            if self.args.push_to_hub:
                self._push_from_checkpoint(folder)

    options = {"push_to_hub": True, "hub_model_id": "me/model", "hub_token": TOKEN, "hub_strategy": "all_checkpoints"}
    args = TrainingArguments(
        tmp_path / "out", use_cpu=True, max_steps=2, save_strategy="steps", save_steps=1, report_to="none", **options
    )
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}] * 16
    Script(tiny.causal_lm(), args, train_dataset=rows).train()
    files = on_hub(hub)
    for step in (1, 2):
        assert {f"checkpoint-{step}/mine.txt", f"checkpoint-{step}/model.safetensors"} <= set(files)


@pytest.mark.parametrize(("strategy", "heard"), [("end", [2]), ("every_save", [1, 2, 2])])
def test_callbacks_hear_of_an_upload_as_it_begins_and_of_nothing_else(strategy, heard, hub, tmp_path):
    class Hears(TrainerCallback):
        def on_push_begin(self, args, state, control, **kwargs):
            steps.append(state.global_step)

    steps = []
    options = {"push_to_hub": True, "hub_model_id": "me/model", "hub_token": TOKEN, "hub_strategy": strategy}
    args = TrainingArguments(
        tmp_path / "out", use_cpu=True, max_steps=2, save_strategy="steps", save_steps=1, report_to="none", **options
    )
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}] * 16
    trainer = Trainer(tiny.causal_lm(), args, train_dataset=rows, callbacks=[Hears])
    trainer.train()
    assert steps == heard
    trainer.push_to_hub()
    assert steps == [*heard, 2]


def test_pushing_does_not_wait_and_says_what_is_in_use(hub, tmp_path):
    hub.gate.clear()
    up, folder = uploader(tmp_path), make_checkpoint(tmp_path, 1)
    upload = up.push(folder)
    assert not upload.done.is_set() and up.in_use == [folder]
    hub.gate.set()
    assert up.finish(20) and upload.url and up.in_use == []


def wait_until_committing(hub):
    deadline = time.monotonic() + 20
    while not any("/commit/" in call for call in hub.calls):
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(("always", "commits"), [(False, ["one", "three"]), (True, ["one", "two", "three"])])
def test_a_newer_upload_replaces_a_waiting_one_unless_all_are_wanted(hub, tmp_path, always, commits):
    hub.gate.clear()
    up = uploader(tmp_path, hub_always_push=always)
    folders = [make_checkpoint(tmp_path, step) for step in (1, 2, 3)]
    first = up.push(folders[0], message="one")
    wait_until_committing(hub)
    second, third = up.push(folders[1], message="two"), up.push(folders[2], message="three")
    assert up.in_use == (folders if always else [folders[0], folders[2]])
    hub.gate.set()
    assert up.finish(20)
    assert hub.commits == commits
    assert first.url and third.url and second.replaced is not always and second.done.is_set()


def test_the_thread_ends_with_the_last_upload_and_starts_again(hub, tmp_path):
    up, folder = uploader(tmp_path), make_checkpoint(tmp_path, 1)
    up.push(folder)
    assert up.finish(20)
    deadline = time.monotonic() + 10
    while any(thread.name == "posttrain-upload" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert up.push(folder, "again", blocking=True).url


# ---- what goes wrong never stops the run ----


def test_an_error_of_the_server_is_tried_again(hub, tmp_path, caplog):
    hub.failures = [500, 500]
    up = uploader(tmp_path)
    with caplog.at_level(logging.WARNING, "posttrain"):
        up.push(make_checkpoint(tmp_path, 1))
        assert up.finish(20)
    assert len(hub.created) == 1 and len(hub.commits) == 1 and up.failed == []
    assert [r for r in caplog.records if r.name.startswith("posttrain")] == []


def test_a_hub_that_is_down_is_reported_once_with_the_command_that_makes_up_for_it(tmp_path, monkeypatch, caplog):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    point_at(f"http://127.0.0.1:{port}", monkeypatch)
    up, folder = uploader(tmp_path, hub_private_repo=True), make_checkpoint(tmp_path, 1)
    with caplog.at_level(logging.WARNING, "posttrain"):
        upload = up.push(folder, "last-checkpoint", ignore=["rank-*"], blocking=True)
        assert not up.finish(20)
    [warning] = [r.getMessage() for r in caplog.records if r.name.startswith("posttrain")]
    command = f"hf upload me/model {folder} last-checkpoint --private --delete '*' --exclude 'rank-*'"
    assert warning.startswith(f"{folder} was not uploaded to me/model: ") and warning.endswith(command)
    assert "attempt 4" in upload.error and up.failed == [upload] and upload.url is None


@pytest.mark.long
def test_the_command_uploads_what_was_left_behind(hub, tmp_path):
    up, folder = uploader(tmp_path, hub_revision="trial"), make_checkpoint(tmp_path, 1)
    hub.failures = [400]
    upload = up.push(folder, "last-checkpoint", ignore=["rank-*", "*.safetensors"], blocking=True)
    words = shlex.split(upload.command("me/model"))
    assert upload.error and words[0] == "hf"
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}
    command = [sys.executable, "-m", "huggingface_hub.cli.hf", *words[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    left_out = {"rank-0.json", "model.safetensors", "optimizer.safetensors"}
    expected = {f.name for f in folder.iterdir()} - left_out
    assert on_hub(hub, "trial") == sorted(f"last-checkpoint/{name}" for name in expected)


def test_a_refused_token_is_not_tried_again_and_never_shown(hub, tmp_path, caplog):
    up = uploader(tmp_path, hub_token="hf_wrong")
    with caplog.at_level(logging.DEBUG, "posttrain"):
        up.push(make_checkpoint(tmp_path, 1))
        assert not up.finish(20)
    assert sum("repos/create" in call for call in hub.calls) == 1
    assert "401" in up.failed[0].error and "hf_wrong" not in caplog.text + repr(up.failed)


def test_a_machine_in_offline_mode_fails_at_once(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    up = Uploader(HubArguments(push_to_hub=True), tmp_path)  # waits of seconds, were it tried again
    started = time.monotonic()
    upload = up.push(make_checkpoint(tmp_path, 1), blocking=True)
    assert "offline" in upload.error.lower() and time.monotonic() - started < 5


def test_a_folder_that_is_gone_is_a_failure_like_any_other(hub, tmp_path):
    up = uploader(tmp_path)
    upload = up.push(tmp_path / "checkpoint-9", blocking=True)
    assert upload.error and up.failed == [upload] and hub.commits == []


def test_a_later_success_clears_the_failure_of_the_same_place(hub, tmp_path):
    up, folder = uploader(tmp_path), make_checkpoint(tmp_path, 1)
    hub.failures = [403, 403]  # the second answers the question whether the repository exists
    assert up.push(folder, blocking=True).error
    assert up.push(folder, "elsewhere", blocking=True).url and len(up.failed) == 1
    assert up.push(folder, blocking=True).url and up.failed == []


def test_a_server_that_stays_silent_holds_nobody_for_ever(hub, tmp_path):
    hub.gate.clear()
    up, folder = uploader(tmp_path), make_checkpoint(tmp_path, 1)
    upload = up.push(folder)
    started = time.monotonic()
    assert not up.finish(timeout=0.2)
    assert time.monotonic() - started < 5 and up.failed == [upload] and "0.2 s" in upload.error
    hub.gate.set()
    assert up.finish(20) and upload.url and upload.error is None


def test_while_trying_again_an_upload_gives_way_to_a_newer_one(hub, tmp_path):
    args = HubArguments(hub_token=TOKEN, hub_model_id="me/model")
    up, folder = Uploader(args, tmp_path, retry_waits=(60.0,)), make_checkpoint(tmp_path, 1)
    hub.failures = [503]
    first = up.push(folder, message="first")
    deadline = time.monotonic() + 20
    while hub.failures:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    second = up.push(folder, message="second")
    assert up.finish(20) and first.replaced and second.url and hub.commits == ["second"]


def test_a_program_ends_while_an_upload_hangs(hub, tmp_path):
    hub.gate.clear()
    folder = make_checkpoint(tmp_path, 1)
    code = (
        "import sys, time\nfrom posttrain.core.hub import HubArguments, Uploader\n"
        f"up = Uploader(HubArguments(hub_token={TOKEN!r}, hub_model_id='me/model'), '.')\n"
        "up.push(sys.argv[1])\nuntil = time.monotonic() + 30\n"
        "while up.repo_id is None and time.monotonic() < until: time.sleep(0.01)\n"
        "print(up.finish(0.2))\n"
    )
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.strip() == "False", done.stderr
    assert hub.created  # HF_ENDPOINT led it here


# ---- arguments ----


@dataclass
class Arguments(HubArguments):
    def __post_init__(self):
        config.validate(self)


def test_the_token_stays_out_of_the_repr():
    assert TOKEN not in repr(Arguments(hub_token=TOKEN)) and Arguments(hub_token=TOKEN).hub_token == TOKEN


@pytest.mark.parametrize("name", ["a/b/c", "my model", "", "owner/", "a--b", "-a", "x.git"])
def test_a_name_that_no_repository_can_have_is_refused(name):
    with pytest.raises(ConfigError, match="hub_model_id"):
        Arguments(hub_model_id=name, push_to_hub=True)
    with pytest.warns(UserWarning, match="hub_model_id.* before you upload"):  # where it is not used
        assert Arguments(hub_model_id=name).hub_model_id == name


def test_names_of_repositories_are_accepted():
    for name in ("gpt2", "owner/a.b_c-1", None):
        assert Arguments(hub_model_id=name).hub_model_id == name


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ConfigError, match="every_save"):
        Arguments(hub_strategy="evry_save")


# ---- the card ----

HISTORY = [
    {"loss": 2.0, "epoch": 0.5, "step": 5, "grad_norm": 1.0, "learning_rate": 1e-4},
    {
        "eval_loss": 1.8,
        "eval_accuracy": 0.5,
        "eval_runtime": 1.0,
        "eval_samples_per_second": 9,
        "epoch": 0.5,
        "step": 5,
    },
    {"loss": 1.5, "epoch": 1.0, "step": 10},
    {
        "eval_loss": 1.9,
        "eval_accuracy": 0.45,
        "eval_steps_per_second": 3.0,
        "eval_num_tokens": 640,
        "epoch": 1.0,
        "step": 10,
    },
    {"train_runtime": 3.0, "train_loss": 1.75, "epoch": 1.0, "step": 10},
]


def front_matter(card):
    return yaml.safe_load(card.split("---\n")[1])


def test_results_pair_each_evaluation_with_the_training_loss_before_it():
    assert results(HISTORY) == [
        {"Epoch": 0.5, "Step": 5, "Training loss": 2.0, "Validation loss": 1.8, "accuracy": 0.5},
        {"Epoch": 1.0, "Step": 10, "Training loss": 1.5, "Validation loss": 1.9, "accuracy": 0.45},
    ]


def test_several_evaluation_sets_share_the_row_of_their_step():
    history = [
        {"eval_a_loss": 1.0, "eval_a_runtime": 2.0, "step": 3, "epoch": 1.0},
        {"eval_b_loss": 2.0, "step": 3, "epoch": 1.0},
    ]
    assert results(history) == [{"Epoch": 1.0, "Step": 3, "a_loss": 1.0, "b_loss": 2.0}]


def test_without_evaluations_the_training_losses_are_shown_thinned_to_the_last():
    history = [{"loss": float(step), "epoch": 0.0, "step": step} for step in range(1, 101)]
    lines = [line for line in model_card("m", log_history=history).splitlines() if line.startswith("| 0.0 ")]
    assert len(lines) == 20 and lines[-1] == "| 0.0 | 100 | 100.0 |"


def test_the_card_carries_the_metrics_of_the_last_evaluation_or_the_best():
    card = front_matter(model_card("m", log_history=HISTORY, datasets="owner/data", tasks="text-generation"))
    [result] = card["model-index"][0]["results"]
    assert result["dataset"] == {"type": "owner/data", "name": "owner/data"}
    assert result["task"] == {"type": "text-generation"}
    assert {m["type"]: m["value"] for m in result["metrics"]} == {"loss": 1.9, "accuracy": 0.45}
    best = front_matter(model_card("m", log_history=HISTORY, best_step=5))
    assert {m["type"]: m["value"] for m in best["model-index"][0]["results"][0]["metrics"]} == {
        "loss": 1.8,
        "accuracy": 0.5,
    }


def test_the_card_shows_its_tables():
    card = model_card(
        "My model", log_history=HISTORY, hyperparameters={"learning_rate": 1e-5, "optim_args": "a|b\nc"},
        versions={"torch": "2.13"}, base_model="owner/base", datasets=["owner/data"], method="SFT",
    )  # fmt: skip
    assert "# My model\n" in card and "[owner/base](https://huggingface.co/owner/base), trained with SFT" in card
    assert "[owner/data](https://huggingface.co/datasets/owner/data)" in card
    assert "| `learning_rate` | 1e-05 |\n" in card and "| `optim_args` | a\\|b c |\n" in card
    assert "| Epoch | Step | Training loss | Validation loss | accuracy |\n| --- | --- | --- | --- | --- |\n" in card
    assert "| 1.0 | 10 | 1.5 | 1.9 | 0.45 |\n" in card and "- torch 2.13\n" in card
    assert front_matter(card)["base_model"] == "owner/base" and front_matter(card)["datasets"] == ["owner/data"]


@pytest.mark.parametrize("names", [
    {"finetuned_from": "owner/base", "tasks": "text-classification", "language": "en", "dataset": "GLUE MRPC",
     "dataset_tags": "glue", "dataset_args": "mrpc", "license": "mit", "tags": "x"},  # as the examples of transformers
    {"dataset_name": "glue", "tags": ["x"], "finetuned_from": "owner/base"},  # as those of trl
], ids=["transformers", "trl"])  # fmt: skip
def test_the_card_takes_the_names_that_scripts_of_transformers_and_trl_give(names, tmp_path):
    trainer = Trainer(tiny.causal_lm(), TrainingArguments(str(tmp_path / "out"), use_cpu=True, disable_tqdm=True))
    trainer.state.log_history = HISTORY
    trainer.create_model_card(**names)
    card = (tmp_path / "out" / "README.md").read_text()
    assert front_matter(card)["datasets"] == ["glue"] and front_matter(card)["base_model"] == "owner/base"
    assert "x" in front_matter(card)["tags"]
    [result] = front_matter(card)["model-index"][0]["results"]
    assert result["dataset"].get("config") == names.get("dataset_args")
    assert ("[GLUE MRPC](https://huggingface.co/datasets/glue) (mrpc)." in card) == ("dataset_args" in names)
    assert result["dataset"]["type"] == "glue" and result["dataset"]["name"] == names.get("dataset", "glue")
    if "dataset" in names:
        about = front_matter(card)
        assert about["language"] == "en" and about["license"] == "mit"
        assert about["pipeline_tag"] == result["task"]["type"] == "text-classification"


@pytest.mark.parametrize(("given", "text", "its"), [
    ({"dataset": "SQuAD"}, "on SQuAD.", None),  # a title is no name on the Hub, even if it looks like one
    ({"dataset": ["SQuAD", "My rows"], "dataset_tags": ["rajpurkar/squad", "me/rows"], "model_name": "My model"},
     "on [SQuAD](https://huggingface.co/datasets/rajpurkar/squad), [My rows](https://huggingface.co/datasets/me/rows).",
     ["rajpurkar/squad", "me/rows"]),
    ({"dataset": "Both", "dataset_tags": ["me/a", "me/b"]}, "on Both.", ["me/a", "me/b"]),
    ({"dataset_tags": "me/rows"}, "on [me/rows](https://huggingface.co/datasets/me/rows).", ["me/rows"]),
])  # fmt: skip
def test_a_title_names_the_data_in_the_text_and_a_tag_in_the_metadata(given, text, its, tmp_path):
    """As transformers' `create_model_card` means them: ``dataset`` is what the text says, ``dataset_tags`` the ids."""
    trainer = Trainer(tiny.causal_lm(), TrainingArguments(str(tmp_path / "out"), use_cpu=True, disable_tqdm=True))
    trainer.state.log_history = HISTORY
    trainer.create_model_card(**given)
    card = (tmp_path / "out" / "README.md").read_text()
    assert text in card and f"# {given.get('model_name', 'out')}\n" in card
    assert front_matter(card).get("datasets") == its
    [result] = front_matter(card)["model-index"][0]["results"]
    first = given.get("dataset", given.get("dataset_tags"))
    assert result["dataset"]["name"] == (first if isinstance(first, str) else first[0])
    assert result["dataset"]["type"] == (its[0] if its else "unknown")


def test_the_hub_library_reads_the_card_back():
    from huggingface_hub import ModelCard

    data = ModelCard(model_card("m", log_history=HISTORY, license="mit", tags=["sft"], language="en")).data
    assert data.tags == ["posttrain", "generated_from_trainer", "sft"] and data.license == "mit"
    assert {r.metric_type: r.metric_value for r in data.eval_results} == {"loss": 1.9, "accuracy": 0.45}
    assert {r.dataset_name for r in data.eval_results} == {"unknown"}


def test_the_card_ends_its_results_with_the_last_metrics_of_training_evaluated_or_not():
    history = [
        {"loss": 2.0, "reward": 0.1, "rewards/f/mean": 0.1, "kl": 0.5, "grad_norm": 1.0, "epoch": 0.5, "step": 5},
        {"reward": 0.25, "rewards/f/mean": 0.25, "timing/forward": 1.0, "epoch": 1.0, "step": 10},
        {"train_loss": 1.5, "train_runtime": 9.0, "epoch": 1.0, "step": 10},
    ]
    said = "At the end of training: `reward` 0.25, `rewards/f/mean` 0.25, `kl` 0.5, `train_loss` 1.5.\n"
    assert said in model_card("m", log_history=history)
    assert "reward by optimizer step" in loss_picture(history) and 'points="60.0,200.0 620.0,20.0"' in loss_picture(
        history
    )


def test_a_run_without_any_record_has_a_card_too():
    assert front_matter(model_card("m"))["model-index"] == [{"name": "m", "results": []}]


def test_values_that_the_hub_refuses_stay_out_of_the_metadata(tmp_path):
    history = [{"eval_loss": math.nan, "eval_accuracy": 0.5, "step": 1, "epoch": 1.0}]
    card = model_card("m: 'x'", log_history=history, base_model="/home/me/model", datasets=["./rows.jsonl"])
    data = front_matter(card)
    assert "base_model" not in data and "datasets" not in data and data["model-index"][0]["name"] == "m: 'x'"
    assert [m["type"] for m in data["model-index"][0]["results"][0]["metrics"]] == ["accuracy"]
    assert "| nan |" in card  # but are told


def test_a_folder_of_this_machine_is_no_base_model_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    path = write_model_card("out", base_model="out")
    assert path == Path("out/README.md") and "base_model" not in front_matter(path.read_text())


def test_a_card_of_ours_is_renewed_and_one_that_somebody_wrote_stays(tmp_path):
    path = write_model_card(tmp_path, "first")
    assert "# first" in path.read_text() and f"- torch {framework_versions()['torch']}" in path.read_text()
    assert write_model_card(tmp_path, "second") == path and "# second" in path.read_text()
    path.write_text("---\nlicense: mit\n---\n# By hand\n")
    assert write_model_card(tmp_path, "third") is None and "# By hand" in path.read_text()


def test_a_card_names_no_version_of_posttrain_where_it_runs_without_being_installed(monkeypatch):
    version = importlib.metadata.version

    def without_ours(name):
        if name.startswith("posttrain"):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    assert framework_versions()["posttrain"] == version("posttrain-core")
    monkeypatch.setattr(importlib.metadata, "version", without_ours)
    found = framework_versions()
    assert "posttrain" not in found and found["torch"] == torch.__version__


def test_the_template_of_peft_is_replaced(tmp_path):
    (tmp_path / "README.md").write_text(
        "---\nlibrary_name: peft\n---\n" + "- **Field:** [More Information Needed]\n" * 9
    )
    path = write_model_card(tmp_path, library_name="peft")
    assert front_matter(path.read_text())["library_name"] == "peft" and "More Information" not in path.read_text()


def test_the_card_of_a_run_has_its_rows_its_adapter_its_machine_and_its_curve(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny.causal_lm(), peft.LoraConfig(r=4, target_modules=["q_proj"]))  # and no task_type
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}] * 8
    args = TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True, max_steps=3, logging_steps=1)
    trainer = Trainer(model, args, train_dataset=rows)
    trainer.data_reports = {"train": SimpleNamespace(rows_in=8, lines=lambda: ["train: 8 rows"], log_more=print)}
    trainer.train()
    trainer.save_model()
    card = (tmp_path / "README.md").read_text()
    assert "- train: 8 rows\n" in card and "| `lora: r` | 4 |" in card and "- cpu: " in card
    assert 'pipeline("text-generation"' in card and "(training_loss.svg)" in card and "More Information" not in card
    assert "<polyline" in (tmp_path / "training_loss.svg").read_text()
    assert front_matter(card)["library_name"] == "peft" and "trl" not in front_matter(card)["tags"]
    assert not (tmp_path / "checkpoint-3" / "README.md").exists()


def test_the_program_of_a_card_loads_the_adapter_of_a_reward_model(tmp_path):
    peft = pytest.importorskip("peft")
    tiny.causal_lm().save_pretrained(tmp_path / "base")  # whose head would be of two numbers
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "out")
    loaded: dict = {}
    exec(of_run(TrainingArguments(str(tmp_path / "out"), use_cpu=True), model, [], 1)["loading"], loaded)
    head = [layer.modules_to_save.default.weight for layer in (model.score, loaded["model"].score)]
    assert torch.equal(*head) and head[0].shape[0] == 1


def test_the_program_of_a_card_loads_an_encoder_decoder(tmp_path):
    tiny.seq2seq_lm().save_pretrained(tmp_path)
    loaded: dict = {}
    exec(of_run(TrainingArguments(str(tmp_path), use_cpu=True), tiny.seq2seq_lm(), [], 1)["loading"], loaded)
    assert type(loaded["model"]) is type(tiny.seq2seq_lm())


def test_a_curve_needs_two_losses_and_leaves_out_those_that_are_not_finite():
    assert loss_picture([{"loss": 1.0, "step": 1}]) is None
    picture = loss_picture([{"loss": 2.0, "step": 1}, {"loss": math.nan, "step": 2}, {"loss": 1.0, "step": 3}])
    assert 'points="60.0,20.0 620.0,200.0"' in picture


def test_hyperparameters_are_the_usual_ones_and_what_was_changed():
    from posttrain.core import TrainingArguments

    plain = hyperparameters(TrainingArguments(seed=0))
    assert plain["learning_rate"] == 5e-5 and plain["seed"] == 0 and plain["num_train_epochs"] == 3.0
    assert plain["rows per update"] == 8 and "label_smoothing_factor" not in plain
    args = TrainingArguments(
        output_dir="out", max_steps=7, per_device_train_batch_size=2, gradient_accumulation_steps=3,
        label_smoothing_factor=0.1, eval_strategy="steps", logging_steps=1, save_steps=9, use_cpu=True,
    )  # fmt: skip
    table = hyperparameters(args, world_size=4)
    assert table["rows per update"] == 24 and table["number of processes"] == 4
    assert table["label_smoothing_factor"] == 0.1 and table["max_steps"] == 7 and "num_train_epochs" not in table
    assert set(table) - set(plain) == {"max_steps", "label_smoothing_factor", "number of processes"}
