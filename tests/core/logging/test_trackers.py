"""Where log records go: `log.jsonl` always, and trackers for real where they are installed."""

import ast
import contextvars
import importlib.util
import inspect
import json
import logging
import os
import shutil
import sqlite3
import time

import pytest

from posttrain.core import Trainer, TrainerCallback, TrainingArguments
from posttrain.core.logging.trackers import _TrackerArguments, apart, tracker_callbacks
from tests import programs, tiny
from tests.contract.trainers import arguments, pad


def make(output_dir, report_to="none", callbacks=None, **changes):
    changes = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 4} | changes
    return Trainer(
        tiny.causal_lm(), arguments(TrainingArguments, output_dir, report_to=report_to, **changes), pad,
        tiny.token_rows(8), tiny.token_rows(4, seed=1), callbacks=callbacks,
    )  # fmt: skip


def installed(module):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


def read(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def names_of(trainer):
    return [type(callback).__name__ for callback in trainer.callbacks]


class Tracker(TrainerCallback):
    """Keeps what it hears, and fails where it is told to."""

    def __init__(self, fails_in=()):
        self.fails_in, self.heard, self.run_names = fails_in, [], []

    def _hear(self, event, args):
        if event in self.fails_in:
            raise ConnectionError("the server is down")
        self.heard.append(event)
        self.run_names.append(args.run_name)

    def on_train_begin(self, args, state, control, **kwargs):
        self._hear("on_train_begin", args)
        args.run_name = None  # as the callback of W&B does in a search

    def on_log(self, args, state, control, logs=None, **kwargs):
        self._hear("on_log", args)


# ---- the file that every run has ----


@pytest.mark.parametrize("report_to", ["none", None, [], ["none"]])
def test_a_run_without_trackers_writes_log_jsonl(report_to, tmp_path):
    trainer = make(tmp_path, report_to)
    trainer.train()
    records = read(tmp_path / "log.jsonl")
    history = [{k: v for k, v in record.items() if not k.startswith("perf/")} for record in records]
    assert history == trainer.state.log_history
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4] and "eval_loss" in records[-2]


def test_the_log_is_strict_json_also_where_a_value_is_not_a_number(tmp_path):
    class Odd(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer.log_metric("odd", float("nan"))

    trainer = make(tmp_path, callbacks=[Odd()])
    trainer.train()
    assert [r["odd"] for r in read(tmp_path / "log.jsonl") if "loss" in r] == [None] * 4


def test_a_log_that_is_deleted_while_the_run_writes_it_is_written_again(tmp_path, caplog):
    class Deletes(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                shutil.rmtree(tmp_path / "run")

    trainer = make(tmp_path / "run", callbacks=[Deletes()])
    trainer.train()
    records = read(tmp_path / "run" / "log.jsonl")
    history = [{k: v for k, v in record.items() if not k.startswith("perf/")} for record in records]
    assert history == trainer.state.log_history and len(history) > 4
    assert sum("log.jsonl was deleted" in text for text in caplog.messages) == 1


def test_a_resumed_run_has_each_step_once_in_the_log(tmp_path):
    options = dict(save_strategy="steps", save_steps=2)
    make(tmp_path, **options).train()
    make(tmp_path, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    records = read(tmp_path / "log.jsonl")
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4]
    assert sum("eval_loss" in r for r in records) == 1 and sum("train_runtime" in r for r in records) == 1


# ---- which trackers ----


@pytest.mark.parametrize(("wrong", "right"), [("wandd", "wandb"), ("tensorbord", "tensorboard"), ("non", "none")])
def test_a_misspelt_tracker_is_named_with_the_nearest(wrong, right, tmp_path):
    with pytest.raises(ValueError, match=rf"report_to='{wrong}' is no tracker, did you mean '{right}'\?.*mlflow"):
        make(tmp_path, wrong)


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("wandb", "wandb", "wandb"), ("swanlab", "swanlab", "swanlab"),
     ("flyte", "flytekit", "flytekitplugins-deck-standard"), ("comet_ml", "comet_ml", "comet-ml"),
     ("tensorboard", "tensorboard", "tensorboard")],
)  # fmt: skip
def test_a_tracker_that_is_not_installed_is_said_when_the_trainer_is_made(name, module, package, tmp_path):
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    with pytest.raises(ImportError) as error:
        make(tmp_path, name)
    assert f"report_to={name!r}" in str(error.value)
    assert str(error.value).count(f"pip install {package}") == 1


def test_all_means_those_that_are_installed_each_once(monkeypatch):
    from transformers import integrations

    present = {"tensorboard": type("Board", (Tracker,), {}), "wandb": type("Bees", (Tracker,), {})}
    monkeypatch.setattr(integrations.integration_utils, "INTEGRATION_TO_CALLBACK", present)
    monkeypatch.setattr(integrations, "get_available_reporting_integrations", lambda: ["wandb"])
    assert [type(cb).__name__ for cb in tracker_callbacks(["all"])] == ["Bees"]
    assert [type(cb).__name__ for cb in tracker_callbacks(["all", "wandb", "tensorboard"])] == ["Bees", "Board"]
    assert tracker_callbacks([]) == []


# ---- a tracker that fails ----


def test_a_tracker_that_fails_in_a_log_is_warned_of_once_and_training_goes_on(tmp_path, caplog):
    tracker = apart("mine", Tracker(fails_in=["on_log"]))
    trainer = make(tmp_path, callbacks=[tracker])
    with caplog.at_level(logging.WARNING, "posttrain"):
        trainer.train()
    said = [r.getMessage() for r in caplog.records if "mine" in r.getMessage()]
    assert len(said) == 1 and "on_log (ConnectionError: the server is down)" in said[0] and "log.jsonl" in said[0]
    assert trainer.state.global_step == 4 and len(read(tmp_path / "log.jsonl")) == len(trainer.state.log_history)


def test_a_tracker_that_does_not_start_stops_the_run_before_its_first_step(tmp_path):
    trainer = make(tmp_path, callbacks=[apart("mine", Tracker(fails_in=["on_train_begin"]))])
    with pytest.raises(RuntimeError, match="report_to='mine'.*the server is down.*remove it"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_another_callback_that_fails_is_not_swallowed(tmp_path):
    with pytest.raises(ConnectionError):
        make(tmp_path, callbacks=[Tracker(fails_in=["on_log"])]).train()


def test_a_tracker_keeps_its_class_and_cannot_change_the_arguments(tmp_path):
    tracker = apart("mine", Tracker())
    trainer = make(tmp_path, callbacks=[tracker], run_name="first")
    trainer.train()
    assert tracker.heard[:2] == ["on_train_begin", "on_log"] and set(tracker.run_names) == {"first"}
    assert trainer.args.run_name == "first"
    assert trainer.pop_callback(Tracker) is tracker


@pytest.mark.long
def test_trackers_find_every_argument_that_they_read(tmp_path):
    """Each ``args.<name>`` in the callbacks of transformers."""
    from transformers.integrations import integration_utils

    read = set()
    for callback in set(integration_utils.INTEGRATION_TO_CALLBACK.values()):
        for node in ast.walk(ast.parse(inspect.getsource(callback))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args":
                read.add(node.attr)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, hub_private_repo=True, trackio_space_id="me/board")
    given = _TrackerArguments(arguments)
    assert given.hub_private_repo is True and given.trackio_space_id == "me/board"
    assert {"run_name", "project", "output_dir", "to_dict", "trackio_space_id"} <= read
    assert sorted(name for name in read if not hasattr(given, name)) == []


def test_the_progress_of_a_kubernetes_job_is_reported_without_being_asked_for(tmp_path, monkeypatch):
    with pytest.raises(ImportError, match="KUBEFLOW_TRAINER_SERVER_URL") as error:
        make(tmp_path, "kubeflow")
    assert "pip install" not in str(error.value)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://localhost:1")
    for named in ("none", "kubeflow"):
        report_to = TrainingArguments(report_to=named).report_to
        assert report_to == ["kubeflow"]
        assert [type(cb).__name__ for cb in tracker_callbacks(report_to)] == ["KubeflowCallback"]
    assert TrainingArguments(report_to="tensorboard").report_to == ["tensorboard", "kubeflow"]
    monkeypatch.setenv("DISABLE_KUBEFLOW_INTEGRATION", "TRUE")
    assert TrainingArguments(report_to="none").report_to == []


# ---- a run that is resumed ----


def test_lines_after_the_checkpoint_and_a_torn_one_are_gone_from_the_log_of_a_resumed_run(tmp_path):
    """As a process leaves it that was killed while it wrote, two steps after its last checkpoint."""
    options = dict(save_strategy="steps", save_steps=2, eval_strategy="no")
    straight = make(tmp_path / "straight", **options)
    straight.train()
    make(tmp_path / "killed", **options).train()
    log = tmp_path / "killed" / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True)[:-1]  # no last record
    log.write_text("".join(lines) + lines[-1][:20])
    shutil.rmtree(tmp_path / "killed" / "checkpoint-4")
    make(tmp_path / "killed", **options).train(resume_from_checkpoint=True)
    records = read(log)
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4]
    assert [r["loss"] for r in records if "loss" in r] == [
        r["loss"] for r in read(tmp_path / "straight/log.jsonl") if "loss" in r
    ]
    assert sum("train_runtime" in r for r in records) == 1 and records[0]["perf/step_seconds"] > 0


def stop_and_go(tmp_path, report_to, **options):
    """Two trainers: the second goes on at step 2 of 4."""
    options = dict(save_strategy="steps", save_steps=2, eval_strategy="no") | options
    first = make(tmp_path, report_to, **options)
    first.train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    again = make(tmp_path, report_to, **options)
    return first, again


# ---- for real ----


@pytest.mark.rotated("what they get")
@installed("tensorboard")
def test_tensorboard_gets_the_scalars_of_the_log(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = make(tmp_path, ["tensorboard"])
    trainer.train()
    assert "TensorBoardCallback" in names_of(trainer)
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    records = read(tmp_path / "log.jsonl")
    for tag, key in [("train/loss", "loss"), ("train/learning_rate", "learning_rate"), ("eval/loss", "eval_loss")]:
        written = [(e.step, e.value) for e in events.Scalars(tag)]
        logged = [(r["step"], r[key]) for r in records if key in r]
        assert [s for s, _ in written] == [s for s, _ in logged]
        assert [v for _, v in written] == pytest.approx([v for _, v in logged], rel=1e-6)


@pytest.mark.rotated("runs that go on")
@installed("tensorboard")
def test_tensorboard_goes_on_in_its_folder_with_each_step_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first, again = stop_and_go(tmp_path, "tensorboard")
    again.train(resume_from_checkpoint=True)
    files = list(tmp_path.rglob("events.out.tfevents.*"))
    assert len(files) == 2 and len({file.parent for file in files}) == 1
    assert again.state.tracker_runs == first.state.tracker_runs
    scalars = EventAccumulator(str(files[0].parent)).Reload().Scalars("train/loss")
    assert [event.step for event in scalars] == [1, 2, 3, 4]
    time.sleep(1.1)  # folders are named by the second
    make(tmp_path, "tensorboard").train()
    assert len({file.parent for file in tmp_path.rglob("events.out.tfevents.*")}) == 2  # a new run, a new folder


@pytest.mark.rotated("runs that go on")
@pytest.mark.long
@installed("mlflow")
def test_mlflow_goes_on_with_its_run(tmp_path, monkeypatch):
    import mlflow

    uri = f"sqlite:///{tmp_path}/mlflow.db" if importlib.util.find_spec("sqlalchemy") else f"file://{tmp_path}/mlruns"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(uri)
    first, again = stop_and_go(tmp_path, "mlflow")
    again.train(resume_from_checkpoint=True)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert {"mlflow": run.info.run_id} == first.state.tracker_runs == again.state.tracker_runs
    assert "MLFLOW_RUN_ID" not in os.environ


@pytest.mark.rotated("runs that go on")
@pytest.mark.long
@installed("trackio")
def test_trackio_goes_on_with_its_run(tmp_path):
    code = f"""
import sys
from pathlib import Path
from tests.core.logging.test_trackers import stop_and_go
first, again = stop_and_go(Path({str(tmp_path / "out")!r}), "trackio", project="my-project")
again.train(resume_from_checkpoint=True)
assert first.state.tracker_runs == again.state.tracker_runs and first.state.tracker_runs["trackio"]
"""
    done = programs.run(["-c", code], env=os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")})
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "trackio").glob("my-project*.db")
    with sqlite3.connect(file) as database:
        assert len(database.execute("SELECT DISTINCT run_name FROM metrics").fetchall()) == 1


@pytest.mark.rotated("what they get")
@pytest.mark.long
@installed("mlflow")
def test_mlflow_gets_the_run_name_the_arguments_and_the_losses(tmp_path, monkeypatch):
    import mlflow

    uri = f"sqlite:///{tmp_path}/mlflow.db" if importlib.util.find_spec("sqlalchemy") else f"file://{tmp_path}/mlruns"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(uri)
    trainer = make(tmp_path, "mlflow", run_name="my-run")
    trainer.train()
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert run.info.run_name == "my-run" and run.data.params["learning_rate"] == "0.05"
    history = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")]
    assert history == [(r["step"], r["loss"]) for r in trainer.state.log_history if "loss" in r]


@pytest.mark.rotated("runs that go on")
@pytest.mark.long
@installed("wandb")
def test_wandb_gets_the_run_name_and_the_losses_offline_and_goes_on_with_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    import wandb

    wandb.teardown()  # a session of another test in this process would keep its folder
    first, again = stop_and_go(tmp_path / "out", "wandb", run_name="my-run")
    run = wandb.run
    assert run.name == "my-run" and run.config["learning_rate"] == 0.05
    last = [r["loss"] for r in first.state.log_history if "loss" in r][-1]
    assert run.summary["train/loss"] == pytest.approx(last) and run.summary["train/global_step"] == 4
    assert list(tmp_path.rglob("*.wandb"))
    wandb.finish()
    again.train(resume_from_checkpoint=True)
    try:
        assert {"wandb": run.id} == {"wandb": wandb.run.id} == first.state.tracker_runs == again.state.tracker_runs
        assert wandb.run.name == "my-run"
    finally:
        wandb.finish()


@pytest.mark.rotated("what they get")
@pytest.mark.long
@installed("trackio")
def test_trackio_gets_the_run_name_and_the_losses(tmp_path):
    # Trackio keeps its folder and its run for the process, and a thread that writes: a process of its own.
    code = f"""
from tests.core.logging.test_trackers import make
trainer = make({str(tmp_path / "out")!r}, "trackio", run_name="my-run", project="my-project")
trainer.train()
"""
    done = programs.run(["-c", code], env=os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "failed in" not in done.stderr
    (file,) = (tmp_path / "trackio").glob("my-project*.db")
    with sqlite3.connect(file) as database:
        rows = [
            (name, json.loads(logged)) for name, logged in database.execute("SELECT run_name, metrics FROM metrics")
        ]
    losses = [(name, logged["train/loss"]) for name, logged in rows if "train/loss" in logged]
    expected = [r["loss"] for r in read(tmp_path / "out" / "log.jsonl") if "loss" in r]
    assert [name for name, _ in losses] == ["my-run"] * 4
    assert [loss for _, loss in losses] == pytest.approx(expected)


@pytest.mark.rotated("what they get")
@installed("trackio")
@pytest.mark.parametrize("frozen", ["me/frozen", False])
def test_trackio_is_given_the_names_of_its_spaces_and_freezes_one_at_the_end(frozen, tmp_path, monkeypatch):
    import trackio

    class Settings(dict):
        def update(self, values, allow_val_change):
            super().update(values)

    def init(**options):
        calls["init"] = options
        trackio.context_vars.current_space_id.set(options["space_id"])

    def freeze(**options):
        calls["freeze"] = options
        return options["new_space_id"]

    calls, settings = {}, Settings()
    for name, stand_in in {"init": init, "freeze": freeze, "log": dict, "finish": dict, "config": settings}.items():
        monkeypatch.setattr(trackio, name, stand_in)
    options = dict(project="my-project", run_name="my-run", hub_private_repo=True, trackio_space_id="me/board")
    trainer = make(tmp_path, "trackio", trackio_bucket_id="me/files", trackio_static_space_id=frozen, **options)
    contextvars.copy_context().run(trainer.train)  # the name of the Space goes with it
    names = dict(project="my-project", name="my-run", space_id="me/board", bucket_id="me/files", private=True)
    assert calls.pop("init") == names | {"resume": "allow"} and settings["learning_rate"] == 0.05
    board = dict(space_id="me/board", project="my-project", new_space_id="me/frozen", private=True)
    assert calls == ({"freeze": board} if frozen else {})
