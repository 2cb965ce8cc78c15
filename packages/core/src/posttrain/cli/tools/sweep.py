"""The command ``posttrain sweep``: runs of one file with other arguments that Optuna chooses."""

from __future__ import annotations

import dataclasses
import gc
import html
from pathlib import Path
from typing import Any

from posttrain.cli import parse
from posttrain.cli.method import checked, of_words, settings_of
from posttrain.core.callbacks import TrainerCallback
from posttrain.core.distributed import environment
from posttrain.core.errors import ConfigError, NonFiniteError, require
from posttrain.core.logging.terminal import aligned
from posttrain.core.registry import Method
from posttrain.core.state import metric_key

HELP = """usage: posttrain sweep [<method>] run.yaml ... [--n_trials N] [--name value ...]

Trains again and again, each time with other arguments, evaluates, and prints which were best. The file says which:

  sweep:
    n_trials: 20            # trials altogether [default: 20]
    metric: eval_loss       # [default: metric_for_best_model, else eval_loss]
    direction: minimize     # or maximize
    space:
      learning_rate: {low: 1e-6, high: 1e-3, log: true}
      lora_r: [4, 8, 16]    # one of these
      num_train_epochs: {low: 1, high: 3}

Without a space it is the learning rate, from a tenth to ten times that of the file. The first trial has the values of
the file, if the space holds them. Trials that do worse than most at an evaluation end early. Each trial has a folder
below output_dir; the model of the best is kept. Started again, the command goes on with the trials that are missing.
Needs optuna."""
TRIALS, PAGE = "trials.log", "sweep.html"
KEYS = ("n_trials", "metric", "direction", "space")
WEIGHTS = ("*.safetensors", "*.bin")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What is searched. `space`: {argument: its values, or ``{"low", "high", "log"}``}."""

    n_trials: int
    metric: str
    direction: Any
    space: dict[str, Any]


def run(words: list[str]) -> None:
    """Search, and print the trials."""
    if environment.world_size() > 1:
        raise ConfigError("posttrain sweep", ["it runs in one process; leave the launcher out"])
    require("optuna", "optuna", why="posttrain sweep")
    rest, given = parse.take_flags(words, ("n_trials",))
    asked = {name: setting.value for name, setting in parse.read_words(rest)[0].items() if name == "sweep"}
    method, rest = of_words(rest, "sweep")
    settings, problems = settings_of(method, rest)
    if settings.get("eval_strategy", parse.Setting("", "no")).value == "no":
        settings["eval_strategy"] = parse.Setting("sweep", "steps")
    first = checked(method, settings, problems)
    if first.data.eval_dataset_name is None and not first.data.eval_share and first.data.dataset_mixture is None:
        settings.setdefault("eval_share", parse.Setting("sweep", "0.1"))
        print("Evaluates on the test split where there is one, else on a tenth of the rows (eval_share).")
    sweep = read(asked.get("sweep") or {}, dict(given), first)
    folder = Path(first.config.output_dir)
    study = search(sweep, method, settings, folder, _own_values(sweep, first))
    print(aligned(_rows(study, sweep)))
    print(f"Page: {write_page(study, sweep, folder)}")
    print(_best(study, folder))


def read(asked: Any, flags: dict[str, str], first: Any) -> Sweep:
    """The sweep that file and flags ask for, of a run with the arguments of `first`; `ConfigError` with its faults."""
    problems, config = [], first.config
    if not isinstance(asked, dict):
        raise ConfigError("posttrain sweep", [f"sweep must hold {', '.join(KEYS)}, as posttrain sweep --help shows"])
    problems += [f"sweep: unknown key {name!r}; known are {', '.join(KEYS)}" for name in asked if name not in KEYS]
    trials = str(flags.get("n_trials", asked.get("n_trials", 20)))
    if not trials.isdecimal() or not int(trials):
        problems.append(f"n_trials={trials} must be a whole number above 0")
    metric = metric_key(str(asked.get("metric") or config.metric_for_best_model or "loss"))
    largest = bool(config.greater_is_better) if config.metric_for_best_model else not metric.endswith("loss")
    direction = str(asked.get("direction") or ("maximize" if largest else "minimize"))
    if direction not in ("minimize", "maximize"):
        problems.append(f"sweep: direction={direction!r} is not minimize or maximize")
    rate = config.learning_rate
    space = asked.get("space") or {"learning_rate": {"low": rate / 10, "high": rate * 10, "log": True}}
    for name, values in space.items():
        is_range = isinstance(values, dict) and {"low", "high"} <= values.keys() <= {"low", "high", "log", "step"}
        if not is_range and not (isinstance(values, list) and values):
            problems.append(f"sweep: space of {name} must be a list of values, or low and high, with log or step")
    if problems:
        raise ConfigError("posttrain sweep", problems)
    return Sweep(int(trials), metric, direction, space)


def search(sweep: Sweep, method: Method, settings: dict[str, Any], folder: Path, own: dict[str, Any]) -> Any:
    """The `optuna.Study` of `sweep` in `folder`, with the trials of earlier calls; `own` values are tried first."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState

    from posttrain.core import trainer
    from posttrain.core.models.wrapping import replaced

    folder.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # else a traceback at Ctrl-C
    study = optuna.create_study(
        study_name="sweep",
        direction=sweep.direction,
        load_if_exists=True,
        storage=JournalStorage(JournalFileBackend(str(folder / TRIALS))),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
    # Of their own for each call: with the same seed, a search that goes on would draw its first trials again.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    done = sum(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in study.trials)
    if not done and own:
        study.enqueue_trial(own)
    elif not done:
        print("The space leaves out values of the file: the first trial is drawn as the others are.")

    def objective(trial: Any) -> float:
        chosen = {name: _suggest(trial, name, values) for name, values in sweep.space.items()}
        place = _of(folder, trial)
        print(f"Trial {trial.number}: {', '.join(f'{name} {_short(value)}' for name, value in chosen.items())}")
        mine = {name: parse.Setting("sweep", str(value)) for name, value in chosen.items()}
        mine |= {"output_dir": parse.Setting("sweep", str(place)), "save_strategy": parse.Setting("sweep", "no")}
        mine |= {"overwrite_output_dir": parse.Setting("sweep", "true")}
        reporter = Reporter(trial, sweep.metric)
        try:
            with replaced(trainer, "DEFAULT_CALLBACKS", [*trainer.DEFAULT_CALLBACKS, reporter]):
                method.run(checked(method, settings | mine, []))
        except NonFiniteError:
            trial.set_user_attr("state", "diverged")
            reporter.pruned = True
        gc.collect()  # the model of this trial goes before the next comes
        if reporter.pruned:
            raise optuna.TrialPruned
        if reporter.value is None:
            known = ", ".join(sorted(reporter.names)) or "none, for nothing was evaluated"
            raise ConfigError("posttrain sweep", [f"no evaluation gave {sweep.metric}; there were {known}"])
        return reporter.value

    def keep_the_best(study: Any, trial: Any) -> None:
        complete = [one for one in study.trials if one.state == TrialState.COMPLETE]
        for one in study.trials:
            if complete and one.number != study.best_trial.number:
                for pattern in WEIGHTS:
                    for file in _of(folder, one).glob(pattern):
                        file.unlink()

    try:
        study.optimize(objective, n_trials=max(sweep.n_trials - done, 0), callbacks=[keep_the_best])
    except KeyboardInterrupt:
        print("\nThe trials that have ended are kept. The same command goes on with those that are missing.")
        raise
    if not any(trial.state == TrialState.COMPLETE for trial in study.trials):
        raise ConfigError("posttrain sweep", ["no trial came to its end with a finite loss"])
    return study


class Reporter(TrainerCallback):
    """Hands each evaluation to a trial, and ends the run where the trial is pruned."""

    def __init__(self, trial: Any, metric: str) -> None:
        self.trial, self.metric = trial, metric
        self.value: float | None = None
        self.pruned = False
        self.names: set[str] = set()

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.names |= {name for name in metrics if name.startswith("eval_")}
        if self.metric in metrics:
            self.value = float(metrics[self.metric])
            self.trial.report(self.value, state.global_step)
            if state.global_step < state.max_steps and self.trial.should_prune():
                self.pruned = control.should_training_stop = True


def _suggest(trial: Any, name: str, values: Any) -> Any:
    if isinstance(values, list):
        return trial.suggest_categorical(name, values)
    low, high, options = values["low"], values["high"], {k: v for k, v in values.items() if k in ("log", "step")}
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(name, low, high, **options)
    return trial.suggest_float(name, float(low), float(high), **options)


def _own_values(sweep: Sweep, first: Any) -> dict[str, Any]:
    """The values of the file itself, where the space holds all of them."""
    known = vars(first.data) | vars(first.model) | vars(first.config)
    found: dict[str, Any] = {}
    for name, values in sweep.space.items():
        value = known.get(name)
        if isinstance(values, dict):
            values = [value] if isinstance(value, (int, float)) and values["low"] <= value <= values["high"] else []
        if value not in values:
            return {}
        found[name] = value
    return found


def _of(folder: Path, trial: Any) -> Path:
    return folder / f"trial-{trial.number}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _rows(study: Any, sweep: Sweep) -> list[list[str]]:
    rows = [["trial", "state", sweep.metric, *sweep.space]]
    for trial in study.trials:
        value = trial.value if trial.value is not None else next(reversed(trial.intermediate_values.values()), None)
        unfinished = trial.state.name in ("RUNNING", "FAIL")
        state = "interrupted" if unfinished else trial.user_attrs.get("state", trial.state.name.lower())
        mark = "best" if trial.number == study.best_trial.number else state
        chosen = (_short(trial.params.get(name, "")) for name in sweep.space)
        rows.append([str(trial.number), mark, "" if value is None else _short(float(value)), *chosen])
    return rows


def _best(study: Any, folder: Path) -> str:
    flags = " ".join(f"--{name} {value}" for name, value in study.best_params.items())
    return f"Best: {flags}, in {_of(folder, study.best_trial)}."


def write_page(study: Any, sweep: Sweep, folder: Path) -> Path:
    """Write the page of the sweep: its trials, a picture of their results, and the report of all runs side by side."""
    from posttrain.cli.report import report
    from posttrain.core.hub.card import loss_picture

    head, *rows = _rows(study, sweep)
    best, points = None, []
    better = max if sweep.direction == "maximize" else min
    for trial in study.trials:
        if trial.value is not None:
            best = trial.value if best is None else better(best, trial.value)
            points += [{"step": trial.number, "loss": trial.value}, {"step": trial.number, "eval_loss": best}]
    picture = loss_picture(points, title=f"{sweep.metric} by trial; dashed: the best so far") or ""
    folders = [place for trial in study.trials if (place := _of(folder, trial)) and (place / report.LOG).is_file()]
    drawn = f'<p>{html.escape(_best(study, folder))}</p><div style="max-width: 640px">{picture}</div>'
    title = f"Sweep: {len(rows)} trials, best {sweep.metric} {_short(study.best_value)}"
    return report.write(
        folders, folder / PAGE, f'<h2>Trials</h2><div class="box">{drawn}{report.table(rows, head)}</div>', title
    )
