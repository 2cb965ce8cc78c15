"""Trackers of fewer users: each, where its package is installed, offline and in a process of its own, gets the losses
of a run. `pip install --target DIR PACKAGE` and ``PYTHONPATH=...:DIR`` bring one beside the environment.
"""

import csv
import dataclasses
import importlib.util
import json
import os
import re
import sqlite3
import subprocess
import sys
import threading
import types
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

from posttrain.core import TrainingArguments
from posttrain.core.logging.trackers import _TrackerArguments, tracker_callbacks
from tests import programs
from tests.core.logging.test_trackers import make, read


def of_dvclive(folder, said):
    with open(folder / "dvclive/plots/metrics/loss.tsv") as file:
        return [float(row["loss"]) for row in csv.DictReader(file, delimiter="\t")]


def of_clearml(folder, said):
    (file,) = folder.rglob("metrics.jsonl")
    events = [event for line in file.read_text().splitlines() for event in json.loads(line)]
    return [event["value"] for event in events if (event["metric"], event["variant"]) == ("train", "loss")]


def of_comet(folder, said):
    (archive,) = folder.glob("*.zip")
    lines = zipfile.ZipFile(archive).read("messages.json").decode().splitlines()
    metrics = [message["payload"]["metric"] for message in map(json.loads, lines) if message["type"] == "metric_msg"]
    return [metric["metricValue"] for metric in metrics if metric["metricName"] == "train/loss"]


def of_neptune(folder, said):
    (file,) = folder.rglob("data-1.log")
    found = re.findall(r'"path": \["finetuning", "train", "loss"\], "values": \[\{"value": ([\d.]+)', file.read_text())
    return [float(value) for value in found]


def of_azure(folder, said):
    return [float(value) for value in re.findall(r"scalar metric loss:\n([\d.]+)", said)]


def of_dagshub(folder, said):
    with sqlite3.connect(folder / "me" / "repo.mlflow") as database:
        return [value for (value,) in database.execute("SELECT value FROM metrics WHERE key='loss' ORDER BY step")]


RUN = 'from tests.core.logging.test_trackers import make\nmake("out", "{name}", run_name="my-run").train()\n'
#: It asks its server for the name of the run.
NEPTUNE = 'import neptune.handler\nneptune.handler.Handler.fetch = lambda self: "RUN-1"\n'
TASK = """
from flytekit import current_context, task
@task
def go() -> None:
    from tests.core.logging.test_trackers import make
    make("out", "flyte", save_strategy="steps", save_steps=2).train()
    (deck,) = current_context().decks
    print("DECK", deck.html)
if __name__ == "__main__":
    go()
"""
#: (tracker, module, program, variables, what it has got)
TRACKERS = [
    ("dvclive", "dvclive", RUN, {}, of_dvclive),
    ("clearml", "clearml", RUN, {"CLEARML_OFFLINE_MODE": "1", "CLEARML_CACHE_DIR": "."}, of_clearml),
    ("comet_ml", "comet_ml", RUN, {"COMET_START_ONLINE": "0", "COMET_OFFLINE_DIRECTORY": ".", "COMET_API_KEY": "x"},
     of_comet),
    ("neptune", "neptune", NEPTUNE + RUN,
     {"NEPTUNE_MODE": "offline", "NEPTUNE_PROJECT": "a/b", "NEPTUNE_API_TOKEN": "x"}, of_neptune),
    ("azure_ml", "azureml", RUN, {}, of_azure),
    ("dagshub", "dagshub", RUN, {"DAGSHUB_USER_TOKEN": "x"}, of_dagshub),
    ("swanlab", "swanlab", RUN, {"SWANLAB_MODE": "offline"}, None),
    ("codecarbon", "codecarbon", RUN, {}, None),
    ("flyte", "flytekitplugins", TASK, {}, None),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("name", "module", "code", "variables", "got"), TRACKERS, ids=[case[0] for case in TRACKERS])
def test_a_tracker_offline_has_the_losses_of_the_run(name, module, code, variables, got, tmp_path):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    (tmp_path / "program.py").write_text(code.replace("{name}", name))
    path = os.pathsep.join([*programs.PACKAGES, str(programs.ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/me/repo.mlflow", "PYTHONPATH": path} | variables
    (tmp_path / "me").mkdir()
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{name} failed in" not in done.stderr
    losses = [record["loss"] for record in read(tmp_path / "out" / "log.jsonl") if "loss" in record]
    if got is not None:
        assert got(tmp_path, done.stdout) == pytest.approx(losses)
    elif name == "codecarbon":
        (row,) = csv.DictReader((tmp_path / "out" / "emissions.csv").open())
        assert float(row["energy_consumed"]) > 0
    elif name == "flyte":
        assert all(f"<td>{loss:.6f}" in done.stdout for loss in losses)
    else:
        (file,) = tmp_path.rglob("run-*.swanlab")
        assert b"my-run" in file.read_bytes() and file.read_bytes().count(b"train/loss") > len(losses)


# ---- without their packages ----


def test_trackers_see_the_fields_of_the_arguments_and_may_copy_them(tmp_path):
    import copy

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, run_name="mine", hub_token="hf_secret")
    given = _TrackerArguments(arguments)
    assert dataclasses.fields(given) == dataclasses.fields(arguments)
    assert copy.deepcopy(given).run_name == "mine"
    torch.save(given, tmp_path / "training_args.bin")  # as transformers does beside a model
    assert torch.load(tmp_path / "training_args.bin", weights_only=True)["run_name"] == "mine"
    assert b"hf_secret" not in (tmp_path / "training_args.bin").read_bytes()
    assert given.accelerator_config.to_dict() == dict(arguments.accelerator_config)


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("under_way", [True, False])
def test_a_run_of_swanlab_is_begun_where_there_is_none(raises, under_way, tmp_path, monkeypatch):
    """swanlab 0.10 raises where it is asked for a run that is not there; 0.7 returned None."""
    swanlab = types.ModuleType("swanlab")
    swanlab.__spec__ = importlib.util.spec_from_loader("swanlab", None)
    swanlab.run, swanlab.begun, swanlab.config, swanlab.logged = object() if under_way else None, [], {}, []

    def get_run():
        if raises and swanlab.run is None:
            raise RuntimeError("No active Run. Call swanlab.init() first.")
        return swanlab.run

    def init(**options):
        swanlab.begun.append(options)
        swanlab.run = object()

    swanlab.get_run, swanlab.init = get_run, init
    swanlab.log = lambda data, step=None: swanlab.logged.append(data)
    monkeypatch.setitem(sys.modules, "swanlab", swanlab)
    monkeypatch.setenv("SWANLAB_PROJECT", "ours")
    trainer = make(tmp_path, "swanlab", run_name="my-run")
    trainer.train()
    assert swanlab.begun == ([] if under_way else [{"project": "ours", "experiment_name": "my-run"}])
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert [data["train/loss"] for data in swanlab.logged if "train/loss" in data] == losses


def test_what_is_not_a_missing_package_is_not_answered_with_a_pip_command(monkeypatch):
    from transformers.integrations import integration_utils

    def unusable():
        raise ValueError("Checkpointing is not available, please check the version of the platform.")

    def without_a_part():
        raise ModuleNotFoundError("No module named 'flytekitplugins'")

    monkeypatch.setattr(integration_utils, "is_flytekit_available", lambda: True)
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "flyte", unusable)
    with pytest.raises(ImportError, match=r"report_to='flyte': .*version of the platform\.$"):
        tracker_callbacks(["flyte"])
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "flyte", without_a_part)
    with pytest.raises(ImportError, match=r"'flytekitplugins' Run: pip install flytekitplugins-deck-standard$"):
        tracker_callbacks(["flyte"])


def test_the_controller_of_a_kubernetes_job_is_told_progress_and_losses(tmp_path, monkeypatch):
    class Controller(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            told.append((self.headers["Authorization"], body["trainerStatus"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args): ...

    told = []
    server = HTTPServer(("127.0.0.1", 0), Controller)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{server.server_port}/status")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    trainer = make(tmp_path / "out")
    trainer.train()
    server.shutdown()
    server.server_close()
    thread.join(10)
    (_, first), *_, (token, last) = told
    metrics = {metric["name"]: metric["value"] for metric in last["metrics"]}
    assert (first["progressPercentage"], last["progressPercentage"], token) == (0, 100, "Bearer secret")
    assert float(metrics["loss"]) == [record["loss"] for record in trainer.state.log_history if "loss" in record][-1]


@pytest.mark.long
def test_wandb_gets_the_model_at_the_end_where_it_is_asked_for(tmp_path, monkeypatch):
    """Its callback saves the model with a trainer of transformers, which it makes of the arguments."""
    wandb = pytest.importorskip("wandb")
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("LOG_MODEL", "end")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()
    kept = {}

    def log_artifact(run, artifact, aliases=None, **options):
        files = {name: open(entry.local_path, "rb").read() for name, entry in artifact.manifest.entries.items()}
        kept.update(dict.fromkeys(aliases, files))

    monkeypatch.setattr(wandb.Run, "log_artifact", log_artifact)
    trainer = make(tmp_path / "out", "wandb")
    trainer.train()
    wandb.finish()
    trainer.save_model(str(tmp_path / "model"))
    assert kept["final_model"]["model.safetensors"] == (tmp_path / "model" / "model.safetensors").read_bytes()
