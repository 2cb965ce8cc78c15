import numpy as np
import pytest
import torch

from posttrain.core import evaluation
from posttrain.core.metrics import Metrics

VALUES = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])


def loader(size):
    return [{"x": VALUES[i : i + size], "labels": VALUES[i : i + size]} for i in range(0, 5, size)]


def run(batches, **options):
    defaults = dict(count_items=lambda batch: len(batch["x"]), metrics=Metrics(), keep=True)
    return evaluation.run(batches, lambda b: (b["x"].mean(), b["x"] * 2, b["labels"]), **(defaults | options))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_loss_is_the_mean_over_items_whatever_the_batch_size(size):
    kept, metrics, rows = run(loader(size))
    assert metrics["loss"] == pytest.approx(31 / 5) and rows == 5
    np.testing.assert_array_equal(kept.predictions, VALUES.numpy() * 2)
    np.testing.assert_array_equal(kept.label_ids, VALUES.numpy())


def test_nothing_is_kept_unless_asked_for():
    kept, metrics, _ = run(loader(2), keep=False)
    assert kept.predictions is None and metrics.keys() == {"loss"}


def test_fillers_count_for_nothing():
    batches = [*loader(2), {"x": torch.full((1,), 1e9), "labels": torch.zeros(1)}]
    kept, metrics, rows = run(batches, is_filler=lambda b: bool(b["x"].max() > 1e8))
    assert rows == 5 and metrics["loss"] == pytest.approx(31 / 5) and len(kept.predictions) == 5


def test_processes_are_joined_in_the_order_of_the_dataset():
    batches, seen = loader(2), []
    run([batches[1]], gather=lambda value: seen.append(value) or [value])
    theirs = iter(seen)
    kept, metrics, rows = run([batches[0], batches[2]], gather=lambda mine: [mine, next(theirs)])
    np.testing.assert_array_equal(kept.label_ids, VALUES.numpy())
    assert rows == 5 and metrics["loss"] == pytest.approx(31 / 5)


def test_ragged_predictions_are_filled_with_minus_100():
    joined = evaluation.join([np.ones((1, 2), int), np.ones((2, 3), int)])
    assert joined.tolist() == [[1, 1, -100], [1, 1, 1], [1, 1, 1]]
    assert evaluation.join([(np.zeros(1), np.ones((1, 1))), (np.zeros(2), np.ones((2, 2)))])[1].shape == (3, 2)


def test_batch_metrics_see_each_batch_and_the_last_one_is_marked():
    calls = []

    def metric(batch, last):
        calls.append((len(batch.predictions), last))
        return {"rows": sum(n for n, _ in calls)}

    kept, metrics, _ = run(loader(2), batch_metrics=metric)
    assert calls == [(2, False), (2, False), (1, True)] and metrics["rows"] == 5 and kept.predictions is None


def test_logits_are_replaced_before_they_are_kept_and_extras_are_kept_on_demand():
    kept, _, _ = run(
        loader(2), preprocess_logits=lambda logits, labels: logits > 4, include=["inputs", "loss"], main_input="x"
    )
    assert kept.predictions.dtype == bool and kept.inputs.tolist() == VALUES.tolist() and kept.losses[0] == 1.5


def test_predictions_larger_than_memory_are_refused_with_numbers(monkeypatch):
    monkeypatch.setattr(evaluation, "_free_memory", lambda: 10)
    with pytest.raises(MemoryError, match="3 evaluation batches .*preprocess_logits_for_metrics"):
        run(loader(2), num_batches=3)


def test_a_metric_is_found_with_and_without_its_prefix_and_a_wrong_one_lists_the_rest():
    metrics = {"eval_loss": 1.0, "eval_accuracy": 0.5}
    assert evaluation.named_metric(metrics, "accuracy") == evaluation.named_metric(metrics, "eval_accuracy") == 0.5
    with pytest.raises(KeyError, match="eval_accuracy, eval_loss.*did you mean 'eval_accuracy'"):
        evaluation.named_metric(metrics, "acuracy")
