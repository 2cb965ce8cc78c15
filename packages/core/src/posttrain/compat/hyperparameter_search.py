"""Searches for hyperparameters with many runs of one trainer.

The runner sets the trainer's arguments, folder and callbacks for each trial and restores them afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from posttrain.compat import ray_search
from posttrain.core.callbacks import CallbackHandler, TrainerCallback
from posttrain.core.checkpoint import Store
from posttrain.core.data.pipeline import set_seed
from posttrain.core.distributed import make_strategy
from posttrain.core.errors import ConfigError, NonFiniteError, UnsavedError, did_you_mean, require
from posttrain.core.fields.old_names import translate_old_names
from posttrain.core.logging.metrics import is_timing
from posttrain.core.logging.trackers import as_new
from posttrain.core.models.trainable import takes_trial
from posttrain.core.optim.lr_scheduler import plain
from posttrain.core.state import TrainerControl, TrainerState, has_state, with_state

if TYPE_CHECKING:
    from posttrain.core.trainer import Trainer

logger = logging.getLogger(__name__)

BACKENDS = ("optuna", "ray")
DIRECTIONS = ("minimize", "maximize")
# Arguments that a trainer uses when it is built: changing them between trials would silently have no effect.
FIXED = {
    *"output_dir resume_from_checkpoint report_to disable_tqdm full_determinism".split(),
    *"log_level log_level_replica log_on_each_node".split(),
}
_NOT_MADE: Any = None
OPTIONS_OF_OPTIMIZE = ("timeout", "gc_after_trial", "callbacks", "show_progress_bar")


class Pruned(Exception):
    """The backend has ended a trial early."""


class BestRun(NamedTuple):
    """The best trial of a search.

    Args:
        run_id: number of the trial; its files lie in ``run-<run_id>`` below the output folder, unless ``hp_name`` named
            it.
        objective: its value; a list for several objectives.
        hyperparameters: the suggested values.
        run_summary: the whole `optuna.Study` or `ray.tune.ExperimentAnalysis`, on the main process.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any = None


def default_hp_space(trial: Any) -> dict[str, Any]:
    """Learning rate, epochs, seed and batch size, within the bounds that transformers searches."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [4, 8, 16, 32, 64]),
    }


def default_compute_objective(metrics: dict[str, float]) -> float | None:
    """The sum of all metrics except the loss, speed and progress; ``eval_loss`` if there is no other."""
    beside = ("eval_loss", "epoch", "num_input_tokens_seen")
    others = [value for name, value in metrics.items() if name not in beside and not is_timing(name)]
    return sum(others) if others else metrics.get("eval_loss")


def search(
    trainer: Trainer,
    hp_space: Callable[[Any], dict[str, Any]] | None = None,
    compute_objective: Callable[[dict[str, float]], Any] | None = None,
    n_trials: int | None = 20,
    direction: str | list[str] = "minimize",
    backend: str | None = None,
    hp_name: Callable[[Any], str] | None = None,
    **kwargs: Any,
) -> BestRun | list[BestRun]:
    """Train `trainer` repeatedly with arguments that Optuna or Ray Tune suggests.

    Each trial has a new model or the first weights, new callback states and its own folder. Every evaluation is
    reported; a trial that the study's pruner stops ends there, and its trackers are closed. A trial with a non-finite
    loss counts as failed, and the search continues. With several processes, the first one runs the study and all train;
    then suggest everything in `hp_space`, nothing in ``model_init``. Raises a `ConfigError` where a suggested argument
    does not exist, or cannot have that value, and a `RuntimeError` where no trial was completed.

    Args:
        trainer: its ``model_init``, which may take the trial, makes the model of each trial. Without one, each trial
            begins with the weights that the trainer has now. Its arguments, and then its weights, are restored
            afterwards.
        hp_space: ``trial -> {argument: value}``; by default `default_hp_space`.
        compute_objective: ``metrics -> number``, or one number for each direction. By default the evaluation loss, or
            `default_compute_objective` where the trainer computes metrics.
        n_trials: number of runs; None: until ``timeout``.
        direction: "minimize" or "maximize"; a list for several objectives.
        backend: "optuna", the default, or "ray", whose `hp_space` returns a space of Ray Tune. Ray chooses and ends the
            trials, and they are trained in this process, one after the other. Values that are no arguments of the
            trainer are for ``model_init``, which gets all of them as a dict.
        hp_name: ``trial -> name`` of its folder and its run in the trackers; by default ``run-<number>``.
        **kwargs: for `optuna.create_study` (sampler, pruner, storage, ...) and `optuna.Study.optimize` (timeout, catch,
            callbacks, gc_after_trial, show_progress_bar); or for `ray.tune.run`.

    Returns:
        The best run; of several objectives, the list of those that no other run beats in all of them.
    """
    backend = plain(backend or "optuna")
    _check(trainer, compute_objective, direction, backend, kwargs)
    several, by_ray = not isinstance(direction, str), backend == "ray"
    given_trial = ray_search.RayTrial if by_ray else _optuna().trial.FixedTrial
    objective = compute_objective or _default_objective(trainer)
    hp_space, dist = hp_space or (ray_search.default_hp_space if by_ray else default_hp_space), trainer.dist
    catch = kwargs.pop("catch", ())
    caught = (NonFiniteError, *([catch] if isinstance(catch, type) else catch))
    start = _Start(trainer.model) if trainer.model_init is None else None

    def run(trial: Any, name: str, values: dict[str, Any]) -> Any:
        if start is not None:
            start.put_back(trainer.model)
            trainer.optimizer = _NOT_MADE  # a new one is made, with the arguments of the trial
            set_seed(values.get("seed", trainer.args.seed))
        reporter = _Reporter(trial, name, objective, trainer, reports=not several)
        with _lent(trainer, _trial_arguments(trainer, name, values), reporter):
            with contextlib.suppress(UnsavedError):  # the trial has its value, and a warning names the checkpoint
                trainer.train(trial=trial)
            if reporter.value is None:
                metrics = trainer.evaluate()
                reporter.value = reporter.measure(metrics) if reporter.value is None else reporter.value
        if reporter.pruned:
            raise Pruned
        return reporter.value

    def run_everywhere(trial: Any, values: dict[str, Any]) -> Any:
        name = f"run-{trial.number}" if hp_name is None else str(hp_name(trial))
        dist.broadcast_object(((trial.number, trial.params, name, values), None))
        return run(trial, name, values)

    best: Any = None
    if not dist.is_main:
        while (message := dist.broadcast_object(None))[0] is not None:
            number, params, name, values = message[0]
            with contextlib.suppress(Pruned, *caught):
                run(given_trial(params, number), name, values)
        if message[1] is None:
            raise RuntimeError("The search failed on the main process; see its error.")
        return message[1]
    try:
        wanted = _Wanted(run_everywhere, hp_space, n_trials, direction, caught)
        study, best = _with_ray(wanted, trainer, kwargs) if by_ray else _with_optuna(wanted, kwargs)
    finally:
        dist.broadcast_object((None, best))
        if start is not None:
            start.put_back(trainer.model)
    if isinstance(best, list):
        return [one._replace(run_summary=study) for one in best]
    return best._replace(run_summary=study)


def _optuna() -> Any:
    return require("optuna", "optuna", why="a search for hyperparameters")


class _Wanted(NamedTuple):
    """What a backend searches: `run` trains one trial, with values of `hp_space`; errors `caught` end a trial alone."""

    run: Callable[[Any, dict[str, Any]], Any]
    hp_space: Callable[[Any], dict[str, Any]]
    n_trials: int | None
    direction: str | list[str]
    caught: tuple[type[Exception], ...]


def _with_optuna(wanted: _Wanted, kwargs: dict[str, Any]) -> tuple[Any, BestRun | list[BestRun]]:
    optuna, several = _optuna(), not isinstance(wanted.direction, str)
    options = {name: kwargs.pop(name) for name in OPTIONS_OF_OPTIMIZE if name in kwargs}
    goal = {"directions": list(wanted.direction)} if several else {"direction": wanted.direction}

    def objective(trial: Any) -> Any:
        try:
            return wanted.run(trial, _space(wanted.hp_space, trial))
        except Pruned:
            raise optuna.TrialPruned from None

    study = optuna.create_study(**goal, **kwargs)
    study.optimize(objective, n_trials=wanted.n_trials, catch=wanted.caught, **options)
    return study, _best(study, several)


def _with_ray(wanted: _Wanted, trainer: Trainer, kwargs: dict[str, Any]) -> tuple[Any, BestRun]:
    space, direction = _space(wanted.hp_space, None), str(wanted.direction)
    fields = {field.name for field in dataclasses.fields(trainer.args)}
    for_model = trainer.model_init is not None and takes_trial(trainer.model_init)
    known = fields if for_model else space.keys()  # what is neither an argument nor for `model_init` is refused

    def train(trial: ray_search.RayTrial) -> float | None:
        try:
            return wanted.run(trial, {name: value for name, value in trial.items() if name in known})
        except Pruned:
            return None
        except wanted.caught as error:
            logger.warning("Trial %s has failed: %s", trial.number, error)
            return None

    kwargs.setdefault("storage_path", os.path.abspath(trainer.args.output_dir))
    analysis = ray_search.Search(direction, kwargs).run(train, space, wanted.n_trials)
    best = analysis.get_best_trial(metric="objective", mode=direction[:3])
    if best is None:
        raise RuntimeError("search: no trial was completed, so none is the best.")
    return analysis, BestRun(best.trial_id, best.last_result["objective"], best.config)


def _space(hp_space: Callable[[Any], dict[str, Any]], trial: Any) -> dict[str, Any]:
    values = hp_space(trial)
    if not isinstance(values, dict):
        raise TypeError(f"hp_space must return a dict of arguments, but returned {values!r}.")
    return values


def _check(trainer: Trainer, compute_objective: Any, direction: Any, backend: Any, kwargs: dict[str, Any]) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"search: backend={backend!r} is not supported; use one of {', '.join(BACKENDS)}.")
    if backend == "ray" and not isinstance(direction, str):
        raise ValueError("search: Ray Tune compares trials by one objective; give one direction, or use optuna.")
    if trainer.model_init is None and (trainer.dist.shards or trainer.dist.uses_deepspeed):
        raise ValueError(
            "search: each trial needs the first weights, and these are divided over the processes. Build the trainer "
            "with model_init instead of model."
        )
    if trainer.model_init is None and trainer.optimizer not in (None, trainer._made_optimizer):
        raise ValueError(
            "search: each trial needs an optimizer of its own; leave optimizers out, or pass optimizer_cls_and_kwargs."
        )
    if trainer.eval_dataset is None:
        raise ValueError("search: trials are compared by their evaluations; build the trainer with an eval_dataset.")
    if kwargs.pop("n_jobs", 1) != 1:
        raise ValueError(
            "search: a trainer runs one trial at a time (n_jobs=1); start the program several times with one "
            "`storage`, study_name and load_if_exists=True to share the trials between processes."
        )
    for one in [direction] if isinstance(direction, str) else direction:
        if one not in DIRECTIONS:
            raise ValueError(f"search: direction={one!r} is not minimize or maximize{did_you_mean(one, DIRECTIONS)}")
    if not isinstance(direction, str) and compute_objective is None:
        raise ValueError(
            f"search: direction={direction!r} has {len(direction)} objectives; pass compute_objective, which returns "
            "one number for each."
        )


def _default_objective(trainer: Trainer) -> Callable[[dict[str, float]], float | None]:
    if trainer.compute_metrics is not None:
        return default_compute_objective
    # Not the sum of the trainer's own metrics, which include token counts.
    sets = trainer.eval_dataset
    losses = [f"eval_{name}_loss" for name in sets] if isinstance(sets, dict) else ["eval_loss"]
    return lambda metrics: sum(metrics[name] for name in losses) if metrics.keys() >= set(losses) else None


def _trial_arguments(trainer: Trainer, name: str, values: dict[str, Any]) -> Any:
    """The trainer's arguments with those of one trial in their place, checked."""
    args = trainer.args
    values, problems = translate_old_names(type(args), values)
    fixed = FIXED | set(trainer.fixed_at_construction)
    problems += [
        f"{field} is used when the trainer is built, so a trial cannot change it" for field in values if field in fixed
    ]
    if problems:
        raise ConfigError(f"Trial {name}", problems)
    # Trackers group the trials of a search by the name of the run.
    mine: dict[str, Any] = {
        "output_dir": os.path.join(args.output_dir, name),
        "run_name": args.run_name or args.output_dir,
    }
    return dataclasses.replace(args, **mine, resume_from_checkpoint=None, **values)


class _Start:
    """The values of trained parameters and of buffers when the search began, in host memory."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._values = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._tensors(model)}

    def put_back(self, model: torch.nn.Module) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors(model):
                tensor.copy_(self._values[name])

    def _tensors(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
        yield from model.named_buffers()


class _Reporter(TrainerCallback):
    """Reports each evaluation to the trial and ends the run when the study prunes it."""

    def __init__(
        self, trial: Any, name: str, objective: Callable[[dict[str, float]], Any], trainer: Trainer, reports: bool
    ) -> None:
        self.trial, self.name, self.objective, self.dist = trial, name, objective, trainer.dist
        self.reports = reports  # studies of several objectives take no reports
        self.num_sets = len(trainer.eval_dataset) if isinstance(trainer.eval_dataset, dict) else 1
        self.value: Any = None
        self.pruned = False
        self._parts: list[dict[str, float]] = []

    def measure(self, metrics: dict[str, float]) -> Any:
        """The objective as plain numbers. It gets a copy of the metrics, because it may modify them."""
        value = self.objective(dict(metrics))
        if value is None:
            raise ValueError(
                f"search: the evaluation gave no objective, only {', '.join(metrics)}; pass compute_objective."
            )
        return [float(one) for one in value] if isinstance(value, (list, tuple)) else float(value)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        state.trial_name, state.trial_params = self.name, dict(self.trial.params)

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if not any(name.startswith("eval_") for name in metrics):
            return  # of another dataset, that other code asked for
        self._parts.append(metrics)
        if len(self._parts) < self.num_sets:
            return
        self.value = self.measure({name: value for part in self._parts for name, value in part.items()})
        self._parts = []
        if self.reports:
            self.trial.report(self.value, state.global_step)
            # Only the main process has the study, and all must stop together.
            self.pruned = self.dist.broadcast_object(self.trial.should_prune())
            control.should_training_stop = control.should_training_stop or self.pruned


@contextlib.contextmanager
def _lent(trainer: Trainer, args: Any, reporter: _Reporter) -> Iterator[None]:
    """`trainer` with everything that hangs on its arguments made anew for one trial; put back at the end."""
    names = ("args", "store", "dist", "accelerator", "callback_handler", "_train_batch_size")
    own, handler = {name: vars(trainer)[name] for name in names}, trainer.callback_handler
    handler.model = handler.optimizer = handler.lr_scheduler = None  # those of the trial before need not live on
    fresh = [with_state(cb, cb.state()) if has_state(cb) else as_new(cb) for cb in handler.callbacks]
    trainer.args, trainer.store = args, Store(args.output_dir)
    kept, trainer.loaders.kept = trainer.loaders.kept, {}
    trainer.dist = make_strategy(args)
    trainer.accelerator, trainer._train_batch_size = trainer.dist.accelerator, args.train_batch_size
    trainer.callback_handler = CallbackHandler([reporter, *fresh], processing_class=trainer.processing_class)
    try:
        yield
    except BaseException:  # the trackers of this trial must not take in the records of the next
        trainer.callback_handler.call_event("on_train_end", args, trainer.state, trainer.control)
        raise
    finally:
        vars(trainer).update(own)
        trainer.loaders.kept = kept
        handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler


def _best(study: Any, several: bool) -> BestRun | list[BestRun]:
    states = Counter(trial.state.name for trial in study.trials)
    if not states["COMPLETE"]:
        counts = ", ".join(f"{count} {state.lower()}" for state, count in states.items()) or "there was none"
        raise RuntimeError(f"search: no trial was completed ({counts}), so none is the best.")
    if several:
        return [BestRun(str(trial.number), trial.values, trial.params) for trial in study.best_trials]
    return BestRun(str(study.best_trial.number), study.best_value, study.best_params)
