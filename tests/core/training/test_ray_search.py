"""A search with Ray Tune itself, where it is installed (``pip install "ray[tune]"``)."""

from __future__ import annotations

import pytest

from posttrain.core.errors import ConfigError, NonFiniteError
from tests.core.training.test_hyperparameter_search import Slope, loss_after, make

pytest.importorskip("optuna")
tune = pytest.importorskip("ray.tune")
pytestmark = [pytest.mark.long, pytest.mark.slow]  # it starts processes of its own


@pytest.fixture(autouse=True, scope="module")
def ended():
    yield
    import ray

    ray.shutdown()


def find(trainer, space, **options):
    return trainer.hyperparameter_search(lambda _: space, n_trials=1, backend="ray", **options)


def test_the_best_of_a_grid_has_the_loss_that_is_counted_by_hand(tmp_path):
    best = find(make(tmp_path), {"learning_rate": tune.grid_search([0.01, 0.2, 0.05])})
    assert best.hyperparameters == {"learning_rate": 0.2}
    assert best.objective == pytest.approx(loss_after(4, 0.2), rel=1e-5)
    found = {trial.config["learning_rate"]: trial.last_result for trial in best.run_summary.trials}
    assert {rate: last["training_iteration"] for rate, last in found.items()} == {0.01: 4, 0.2: 4, 0.05: 4}
    losses = {rate: last["objective"] for rate, last in found.items()}
    assert losses == pytest.approx({rate: loss_after(4, rate) for rate in found}, rel=1e-5)
    assert (tmp_path / f"run-{best.run_id}").is_dir()


def test_a_scheduler_ends_trials_that_do_worse(tmp_path):
    from ray.tune.schedulers import MedianStoppingRule

    rule = MedianStoppingRule(grace_period=0, min_samples_required=2, time_attr="training_iteration")
    best = find(make(tmp_path), {"learning_rate": tune.grid_search([0.2, 0.1, 0.001])}, scheduler=rule)
    assert best.hyperparameters == {"learning_rate": 0.2}
    assert [trial.last_result["training_iteration"] for trial in best.run_summary.trials] == [4, 4, 1]


def test_other_values_are_for_model_init(tmp_path):
    trainer = make(tmp_path, model_init=lambda trial: Slope(trial["start"] if trial else 0.0))
    best = find(trainer, {"learning_rate": tune.grid_search([0.01]), "start": tune.grid_search([0.0, 1.9])})
    assert best.hyperparameters["start"] == 1.9 and best.objective == pytest.approx(loss_after(4, 0.01, 1.9), rel=1e-4)


def test_a_name_that_is_no_argument_ends_the_search(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
        find(make(tmp_path), {"lerning_rate": tune.uniform(0.1, 0.2)})


def test_a_trial_without_a_finite_loss_has_failed(tmp_path):
    def objective(metrics):
        if metrics["eval_loss"] > 3:
            raise NonFiniteError("the loss is not finite")
        return metrics["eval_loss"]

    space = {"learning_rate": tune.grid_search([0.001, 0.2])}
    best = find(make(tmp_path), space, compute_objective=objective)
    assert best.hyperparameters == {"learning_rate": 0.2}
    assert [trial.status for trial in best.run_summary.trials] == ["ERROR", "TERMINATED"]
