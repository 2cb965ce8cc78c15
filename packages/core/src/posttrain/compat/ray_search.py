"""Lets Ray Tune choose the arguments of the trials of a search, and end trials early.

Ray runs trials in processes of its own, into which a trainer with its models, datasets and engines cannot be sent. So
each of Ray's trials sends its values to this process, which trains, and gets the evaluations to report.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from posttrain.core.errors import require

#: Seconds between two looks at whether Ray has ended.
PATIENCE = 1.0


class RayTrial(dict):
    """A trial: its values by name, as transformers hands them to ``model_init``.

    Attributes:
        number: Ray's name for it. params: the values. last: what was reported last.
    """

    def __init__(self, params: dict[str, Any], number: str, search: Search | None = None) -> None:
        super().__init__(params)
        self.params, self.number, self._search = params, number, search
        self._ended = False
        self.last: float | None = None

    def report(self, value: float, step: int) -> None:
        """Hand an evaluation to Ray, and wait for what its scheduler says."""
        if self._search is not None and not self._ended:
            self.last, self._ended = value, self._search.reported(self.number, value)

    def should_prune(self) -> bool:
        return self._ended


def default_hp_space(trial: Any = None) -> dict[str, Any]:
    """Learning rate, epochs, seed and batch size, within the bounds that transformers searches."""
    tune = require("ray.tune", "ray[tune]", why="a search for hyperparameters with Ray Tune")
    return {
        "learning_rate": tune.loguniform(1e-6, 1e-4),
        "num_train_epochs": tune.choice(list(range(1, 6))),
        "seed": tune.randint(1, 41),
        "per_device_train_batch_size": tune.choice([4, 8, 16, 32, 64]),
    }


class Search:
    """A ``ray.tune.run`` whose trials are trained here, one after the other. `options`: further arguments of it."""

    def __init__(self, direction: str, options: dict[str, Any]) -> None:
        require("ray.tune", "ray[tune]", why="a search for hyperparameters with Ray Tune")
        import ray
        from ray.util.queue import Queue

        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False)
        self._mode, self._options = direction[:3], options
        self._questions = Queue(actor_options={"num_cpus": 0})
        self._answers: dict[str, Any] = {}
        self._waiting: list[tuple[str, Any]] = []
        self._analysis: Any = None
        self._error: BaseException | None = None
        self._is_over = False

    def run(self, train: Callable[[RayTrial], float | None], space: dict[str, Any], n_trials: int | None) -> Any:
        """The `ray.tune.ExperimentAnalysis` of a search in `space`, of Ray Tune.

        Args:
            train: returns the objective; None where the trial came to no number, which counts as failed. Reports on its
                way.
            n_trials: None: until ``time_budget_s``.
        """
        thread = threading.Thread(target=self._tune, args=(space, n_trials), daemon=True)
        thread.start()
        try:
            while (asked := self._next(thread)) is not None:
                name, params = asked
                trial = RayTrial(params, name, self)
                value = train(trial)
                if not trial.should_prune():
                    self._answers[name].put(("failed" if value is None else "ends", value, value != trial.last))
        finally:
            self._is_over = True  # Ray ends too where `train` has raised
            thread.join()
        if self._error is not None:
            raise self._error
        return self._analysis

    def reported(self, name: str, value: float) -> bool:
        """Whether Ray ends the trial after this evaluation."""
        self._answers[name].put(("reports", value, True))
        while True:
            what, of, params = self._questions.get()
            if of == name:
                return what == "ended"
            if what == "new":
                self._waiting.append((of, params))

    def _next(self, thread: threading.Thread) -> tuple[str, Any] | None:
        from ray.util.queue import Empty

        while not self._waiting:
            try:
                what, name, params = self._questions.get(timeout=PATIENCE)
            except Empty:
                if not thread.is_alive():
                    return None
                continue
            if what == "new":
                self._waiting.append((name, params))
        name, (params, self._answers[name]) = self._waiting.pop(0)
        return name, params

    def _tune(self, space: dict[str, Any], n_trials: int | None) -> None:
        from ray import tune

        theirs = list(self._options.pop("callbacks", None) or [])
        usual: dict[str, Any] = {"resources_per_trial": {"cpu": 1}, "max_concurrent_trials": 1, "verbose": 0}
        usual |= {"raise_on_failed_trial": False}
        scheduler = self._options.get("scheduler")  # what it has already, `ray.tune.run` must not be given again
        if all(getattr(scheduler, f"_{name}", None) is None for name in ("metric", "mode")):
            usual |= {"metric": "objective", "mode": self._mode}
        try:
            self._analysis = tune.run(
                _asking(self._questions),
                config=space,
                num_samples=-1 if n_trials is None else n_trials,
                callbacks=[*theirs, self._listener()],
                **(usual | self._options),
            )
        except BaseException as error:
            self._error = None if self._is_over else error

    def _listener(self) -> Any:
        from ray.tune import Callback

        search = self

        class Listener(Callback):
            """Says which trials Ray has ended, and ends Ray where the search is over."""

            def on_trial_complete(self, iteration, trials, trial, **info):
                search._questions.put(("ended", trial.trial_id, None))

            on_trial_error = on_trial_complete

            def on_step_begin(self, iteration, trials, **info):
                if search._is_over:
                    raise RuntimeError("The search is over.")

        return Listener()


def _asking(questions: Any) -> Callable[[dict[str, Any]], None]:
    """What Ray runs for each trial. It is sent to Ray's process as it is, so it uses no name of this module."""

    def ask(config: dict[str, Any]) -> None:
        from ray import tune
        from ray.util.queue import Queue

        name, answers = tune.get_context().get_trial_id(), Queue(actor_options={"num_cpus": 0})
        questions.put(("new", name, (config, answers)))
        while True:
            what, value, is_new = answers.get()
            if what == "failed":
                raise RuntimeError("The trial came to no number; see the log of the search.")
            if is_new:
                tune.report({"objective": value})  # does not return where the scheduler ends the trial
            if what == "ends":
                return
            questions.put(("goes on", name, None))

    return ask
