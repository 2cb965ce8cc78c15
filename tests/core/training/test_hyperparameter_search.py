"""Search for hyperparameters: what each trial gets, what the study hears, and what is left of it afterwards."""

import copy
import errno
import importlib.util
import json
import math

import pytest
import torch
from torch import nn

from posttrain.compat.hyperparameter_search import BestRun, default_compute_objective, default_hp_space, search
from posttrain.core import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from posttrain.core.checkpoint import Store
from posttrain.core.errors import ConfigError
from posttrain.core.logging.trackers import apart
from tests import programs

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.ERROR)


class Slope(nn.Module):
    """``y = a x`` with the loss ``(y - 2 x)^2``: gradient descent takes `a` towards 2."""

    def __init__(self, start=0.0):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(start))

    def forward(self, x, labels=None):
        y = self.a * x
        return (((y - labels) ** 2).mean(), y)


def rows(count):
    return [{"x": torch.tensor(1.0), "labels": torch.tensor(2.0)} for _ in range(count)]


def slope():
    return Slope()


def make(output_dir, model_init=slope, callbacks=None, options=None, **changes):
    usual = dict(
        per_device_train_batch_size=4, max_steps=4, learning_rate=0.1, optim="sgd", lr_scheduler_type="constant",
        eval_strategy="steps", eval_steps=1, logging_steps=1, save_strategy="no", use_cpu=True, disable_tqdm=True,
        max_grad_norm=0,
    )  # fmt: skip
    given = {"train_dataset": rows(16), "eval_dataset": rows(3)} | (options or {})
    args = TrainingArguments(str(output_dir), **(usual | changes))
    return Trainer(args=args, model_init=model_init, callbacks=callbacks, **given)


def rates(*values):
    """A space of learning rates, and the sampler that tries each in turn."""
    space = lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", list(values))}  # noqa: E731
    return space, optuna.samplers.GridSampler({"learning_rate": list(values)}, seed=0)


def loss_after(steps, rate, start=0.0):
    """By hand: each step multiplies the distance from 2 by (1 - 2 rate)."""
    return ((2 - start) * (1 - 2 * rate) ** steps) ** 2


def try_each(trainer, *values, **kwargs):
    space, sampler = rates(*values)
    return search(trainer, space, n_trials=len(values), sampler=sampler, **kwargs)


# ---- the best run ----


def test_the_best_run_is_the_one_of_the_lowest_evaluation_loss(tmp_path):
    best = try_each(make(tmp_path), 0.01, 0.2, 0.05)
    assert isinstance(best, BestRun) and best.hyperparameters == {"learning_rate": 0.2}
    assert best.objective == pytest.approx(loss_after(4, 0.2), rel=1e-5)
    values = {trial.params["learning_rate"]: trial.value for trial in best.run_summary.trials}
    assert values == pytest.approx({rate: loss_after(4, rate) for rate in (0.01, 0.2, 0.05)}, rel=1e-5)
    assert best.run_summary.trials[int(best.run_id)].params == best.hyperparameters


def test_a_trial_whose_checkpoints_failed_still_has_its_value(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Store, "commit", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    best = try_each(make(tmp_path, save_strategy="steps", save_steps=4), 0.01, 0.2)
    assert best.hyperparameters == {"learning_rate": 0.2}
    assert caplog.text.count("checkpoint-4 was not saved") == 2


def test_maximize_and_an_objective_of_ones_own(tmp_path):
    best = try_each(make(tmp_path), 0.01, 0.2, compute_objective=lambda m: -m.pop("eval_loss"), direction="maximize")
    assert best.hyperparameters == {"learning_rate": 0.2} and best.objective == pytest.approx(-loss_after(4, 0.2))


def test_several_directions_give_the_runs_that_none_beats(tmp_path):
    both = lambda metrics: (metrics["eval_loss"], -metrics["eval_loss"])  # noqa: E731
    best = try_each(make(tmp_path), 0.01, 0.2, compute_objective=both, direction=["minimize", "minimize"])
    assert sorted(run.hyperparameters["learning_rate"] for run in best) == [0.01, 0.2]
    assert all(run.objective[0] == -run.objective[1] for run in best)


def test_without_evaluations_along_the_way_the_trial_is_evaluated_at_its_end(tmp_path):
    best = try_each(make(tmp_path, eval_strategy="no"), 0.01, 0.2)
    assert best.objective == pytest.approx(loss_after(4, 0.2), rel=1e-5)


def test_several_evaluation_sets_count_together(tmp_path):
    trainer = make(tmp_path, options={"eval_dataset": {"a": rows(2), "b": rows(3)}})
    best = try_each(trainer, 0.01, 0.2)
    assert best.objective == pytest.approx(2 * loss_after(4, 0.2), rel=1e-5)
    assert sorted(best.run_summary.best_trial.intermediate_values) == [1, 2, 3, 4]


def test_metrics_of_ones_own_are_summed(tmp_path):
    own = {"options": {"compute_metrics": lambda prediction: {"a": 1.0, "b": 2.0}}}
    assert try_each(make(tmp_path, **own), 0.1).objective == 3.0


def test_the_default_objective_is_the_loss_or_the_sum_of_the_other_metrics():
    speed = {"epoch": 2.0, "eval_runtime": 9.0, "eval_samples_per_second": 7.0, "num_input_tokens_seen": 5}
    assert default_compute_objective({"eval_loss": 0.5} | speed) == 0.5
    assert default_compute_objective({"eval_loss": 0.5, "eval_f1": 0.25, "eval_em": 0.5} | speed) == 0.75


def test_the_default_space_is_that_of_transformers():
    from transformers.trainer_utils import default_hp_space_optuna

    study = optuna.create_study()
    ours, theirs = study.ask(), study.ask()
    default_hp_space(ours), default_hp_space_optuna(theirs)
    assert ours.distributions == theirs.distributions


# ---- what a trial gets ----


def test_a_trial_has_arguments_a_folder_a_name_and_a_fresh_model_of_its_own(tmp_path):
    seen = []

    class Seen(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            seen.append((args.learning_rate, args.output_dir, state.trial_name, state.trial_params, float(model.a)))
            assert state.is_hyper_param_search

    trainer = make(tmp_path, callbacks=[Seen()], save_strategy="steps", save_steps=4)
    try_each(trainer, 0.1, 0.2)
    names = ["run-0", "run-1"]
    assert [one[1] for one in seen] == [str(tmp_path / name) for name in names]
    assert [one[2] for one in seen] == names and [one[4] for one in seen] == [0.0, 0.0]
    assert [one[3] for one in seen] == [{"learning_rate": one[0]} for one in seen]
    for name in names:
        assert (tmp_path / name / "checkpoint-4").is_dir() and (tmp_path / name / "log.jsonl").is_file()
        state = json.loads((tmp_path / name / "checkpoint-4" / "trainer_state.json").read_text())
        assert state["trial_name"] == name
    assert not (tmp_path / "log.jsonl").exists() and not list(tmp_path.glob("checkpoint-*"))


def test_the_batch_size_accumulation_and_seed_of_a_trial_are_those_trained_with(tmp_path):
    seen = []

    class Seen(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            seen.append((state.train_batch_size, state.max_steps))

    space = lambda trial: {  # noqa: E731
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [2]),
        "gradient_accumulation_steps": 4,
        "num_train_epochs": trial.suggest_int("num_train_epochs", 3, 3),
    }
    search(make(tmp_path, callbacks=[Seen()], max_steps=-1), space, n_trials=1)
    assert seen == [(2, 16 // (2 * 4) * 3)]


def test_model_init_may_take_the_trial_and_names_are_ones_own(tmp_path):
    init = lambda trial: Slope(0.0 if trial is None else trial.suggest_categorical("start", [1.0]))  # noqa: E731
    best = search(make(tmp_path, init), lambda trial: {}, n_trials=1, hp_name=lambda trial: f"try-{trial.number}")
    assert best.hyperparameters == {"start": 1.0}
    assert best.objective == pytest.approx(loss_after(4, 0.1, start=1.0), rel=1e-5)
    assert (tmp_path / "try-0" / "log.jsonl").is_file()


def test_the_patience_of_one_trial_is_not_that_of_the_next(tmp_path):
    stopping = EarlyStoppingCallback(early_stopping_patience=2)
    trainer = make(tmp_path, callbacks=[stopping], metric_for_best_model="loss", load_best_model_at_end=False)
    # 1.5 overshoots ever further: each trial of it stops after one bad evaluation more than the patience.
    best = search(trainer, lambda t: {"learning_rate": 1.5, "seed": t.suggest_int("seed", 0, 9)}, n_trials=2)
    assert [max(trial.intermediate_values) for trial in best.run_summary.trials] == [3, 3]
    assert stopping.early_stopping_patience_counter == 0 and stopping in trainer.callbacks


# ---- what is left ----


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_afterwards_the_trainer_has_its_own_arguments_folder_and_callbacks(ends, tmp_path):
    trainer = make(tmp_path)
    before, callbacks = copy.deepcopy(trainer.args), list(trainer.callbacks)
    own = trainer.args, trainer.store, trainer.dist, trainer.accelerator
    if ends == "well":
        try_each(trainer, 0.2, 0.1)
    else:
        with pytest.raises(ZeroDivisionError):
            try_each(trainer, 0.2, compute_objective=lambda metrics: 1 / 0)
    assert (trainer.args, trainer.store, trainer.dist, trainer.accelerator) == own
    assert trainer.args == before and trainer.callbacks == callbacks and trainer._train_batch_size == 4
    logs = {path: path.read_text() for path in tmp_path.glob("run-*/log.jsonl")}
    trainer.evaluate()
    assert logs and {path: path.read_text() for path in logs} == logs, "the log of a trial is closed"
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss_after(4, 0.1), rel=1e-5)
    assert (tmp_path / "log.jsonl").is_file()


def test_the_best_arguments_lead_to_the_best_objective_again(tmp_path):
    best = try_each(make(tmp_path / "search"), 0.3, 0.2)
    trainer = make(tmp_path / "again", **best.hyperparameters)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == best.objective


# ---- trials that end early ----


class StopAfterTwo(optuna.pruners.BasePruner):
    def prune(self, study, trial):
        return trial.number > 0 and len(trial.intermediate_values) >= 2


def test_a_pruned_trial_stops_there_and_its_trackers_are_closed(tmp_path):
    ended = []

    class Ended(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            ended.append(state.global_step)

    trainer = make(tmp_path, callbacks=[Ended()])
    best = try_each(trainer, 0.2, 0.01, pruner=StopAfterTwo())
    assert [trial.state.name for trial in best.run_summary.trials] == ["COMPLETE", "PRUNED"]
    assert ended == [4, 2] and best.run_id == "0"
    second = best.run_summary.trials[1]
    rate = second.params["learning_rate"]
    assert second.intermediate_values == pytest.approx({n: loss_after(n, rate) for n in (1, 2)}, rel=1e-5)


def test_a_trial_that_diverges_fails_and_the_search_goes_on(tmp_path):
    ended = []

    class Ended(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            ended.append(args.learning_rate)

    best = try_each(make(tmp_path, callbacks=[Ended()]), 1e30, 0.2)
    assert best.hyperparameters == {"learning_rate": 0.2}
    assert sorted(trial.state.name for trial in best.run_summary.trials) == ["COMPLETE", "FAIL"]
    assert sorted(ended) == [0.2, 1e30]


def test_it_is_said_when_no_trial_was_completed(tmp_path):
    with pytest.raises(RuntimeError, match=r"no trial was completed \(1 fail\)"):
        try_each(make(tmp_path), 1e30)


# ---- mistakes ----


def test_an_unknown_argument_is_named_with_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="unknown argument 'learning_rat', did you mean 'learning_rate'"):
        search(make(tmp_path), lambda trial: {"learning_rat": 0.1}, n_trials=2)


def test_a_value_out_of_bounds_is_named(tmp_path):
    with pytest.raises(ConfigError, match="learning_rate=-1"):
        search(make(tmp_path), lambda trial: {"learning_rate": -1.0}, n_trials=2)


def test_an_old_name_is_understood(tmp_path):
    seen = []

    class Seen(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            seen.append(args.warmup_steps)

    with pytest.warns(FutureWarning, match="warmup_ratio"):
        search(make(tmp_path, callbacks=[Seen()]), lambda trial: {"warmup_ratio": 0.5}, n_trials=1)
    assert seen == [0.5]


@pytest.mark.parametrize("name", ["report_to", "output_dir"])
def test_an_argument_that_the_trainer_was_built_with_cannot_be_searched(name, tmp_path):
    with pytest.raises(ConfigError, match=f"{name} is used when the trainer is built"):
        search(make(tmp_path), lambda trial: {name: "x"}, n_trials=1)


@pytest.mark.parametrize(
    ("change", "call", "message"),
    [
        ({"options": {"eval_dataset": None}, "eval_strategy": "no"}, {}, "eval_dataset"),
        ({}, {"backend": "sigopt"}, "'sigopt' is not supported; use one of optuna, ray"),
        ({}, {"backend": "ray", "direction": ["minimize"]}, "Ray Tune compares trials by one objective"),
        ({}, {"direction": "minimise"}, "did you mean 'minimize'"),
        ({}, {"direction": ["minimize", "maximize"]}, "2 objectives"),
        ({}, {"n_jobs": 2}, "n_jobs=1"),
    ],
)
def test_what_cannot_work_is_said_before_the_first_trial(change, call, message, tmp_path):
    trainer = make(tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        search(trainer, n_trials=1, **call)


def test_an_evaluation_without_a_loss_asks_for_an_objective(tmp_path):
    class Silent(Trainer):
        def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
            return {"eval_runtime": 1.0}

    args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, disable_tqdm=True, save_strategy="no")
    trainer = Silent(args=args, model_init=slope, train_dataset=rows(4), eval_dataset=rows(2))
    with pytest.raises(ValueError, match="gave no objective.*pass compute_objective"):
        search(trainer, lambda trial: {}, n_trials=1)
    best = search(trainer, lambda trial: {}, compute_objective=lambda metrics: metrics["eval_runtime"], n_trials=1)
    assert best.objective == 1.0 and math.isfinite(best.objective)


# ---- several processes, trackers ----

PAIR = """
import json, os, sys
import torch
from tests.core.training import test_hyperparameter_search as t

trainer = t.make(sys.argv[1], per_device_train_batch_size=2)
best = t.try_each(trainer, 0.2, 1e30, 0.01, pruner=t.StopAfterTwo())
with open(f"{sys.argv[1]}/rank-{trainer.args.process_index}.json", "w") as file:
    reached = float(trainer.model.a), trainer.state.global_step
    json.dump([best.run_id, best.objective, best.hyperparameters, *reached], file)
torch.distributed.destroy_process_group()
# Under load, threads of gloo may abort the interpreter's teardown after everything is done (torch 2.13).
os._exit(0)
"""


@pytest.mark.long
def test_two_processes_run_the_same_trials(tmp_path):
    done = programs.together(2, ["-c", PAIR, str(tmp_path)])
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first[2] in ({"learning_rate": 0.2}, {"learning_rate": 0.01})


def test_each_trial_has_a_tracker_as_new(tmp_path):
    class OneRun(TrainerCallback):
        runs = []

        def __init__(self):
            self.losses = None

        def on_train_begin(self, args, state, control, **kwargs):
            if self.losses is None:  # as MLflow's does, which is set up once
                self.losses = []
                self.runs.append((args.output_dir, args.learning_rate, self.losses))

        def on_log(self, args, state, control, logs, **kwargs):
            self.losses += [logs["loss"]] if "loss" in logs else []

    tracker = apart("one-run", OneRun())
    trainer = make(tmp_path, callbacks=[tracker])
    best = try_each(trainer, 0.2, 0.1)
    assert [run[0] for run in OneRun.runs] == [str(tmp_path / "run-0"), str(tmp_path / "run-1")]
    for _, rate, losses in OneRun.runs:
        assert losses == pytest.approx([loss_after(step, rate) for step in range(4)], rel=1e-5)
    assert best.objective == pytest.approx(loss_after(4, 0.2), rel=1e-5) and tracker in trainer.callbacks


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_each_trial_has_an_event_file_of_its_own(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    best = try_each(make(tmp_path, report_to="tensorboard"), 0.2, 1e30, 0.1)
    assert best.objective == pytest.approx(loss_after(4, 0.2), rel=1e-5)
    for trial in best.run_summary.trials:
        (file,) = (tmp_path / f"run-{trial.number}").rglob("events.out.tfevents.*")
        losses = EventAccumulator(str(file)).Reload().Scalars("train/loss")
        assert [event.step for event in losses] == ([1, 2, 3, 4] if trial.state.name == "COMPLETE" else [1])
