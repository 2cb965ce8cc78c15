import copy
import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from posttrain.core import Trainer, TrainingArguments
from posttrain.core.evaluation import eval_loop, predictions
from posttrain.core.logging.metrics import Metrics
from tests import programs, tiny
from tests.contract.trainers import TRAINERS, classification_rows, weights

VALUES = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])


def loader(size):
    return [{"x": VALUES[i : i + size], "labels": VALUES[i : i + size]} for i in range(0, 5, size)]


def run(batches, **options):
    defaults = dict(count_items=lambda batch: len(batch["x"]), metrics=Metrics(), keep=True)
    return eval_loop.run(batches, lambda b: (b["x"].mean(), b["x"] * 2, b["labels"]), **(defaults | options))


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


def test_batch_metrics_see_each_batch_and_the_last_one_is_marked():
    calls = []

    def metric(batch, compute_result):
        calls.append((len(batch.predictions), compute_result))
        return {"rows": sum(n for n, _ in calls)}

    kept, metrics, _ = run(loader(2), batch_metrics=eval_loop.by_batch(metric, batch_eval_metrics=True))
    assert calls == [(2, False), (2, False), (1, True)] and metrics["rows"] == 5 and kept.predictions is None


class Sums:
    """A streaming metric: how many rows, the sum of their labels, and the labels in the order they came in."""

    def __init__(self):
        self.rows, self.total, self.seen = 0, 0.0, []

    def update(self, predictions, labels):
        assert torch.equal(predictions, labels * 2)
        self.rows, self.total, self.seen = (
            self.rows + len(labels),
            self.total + labels.sum(),
            self.seen + labels.tolist(),
        )

    def compute(self):
        return {"rows": self.rows, "total": float(self.total)}


class Resets(Sums):
    reset = Sums.__init__


class Merges(Sums):
    def merge(self, others):
        for other in others:
            self.rows, self.total, self.seen = self.rows + other.rows, self.total + other.total, self.seen + other.seen


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("kind", [Sums, Resets, Merges])
def test_a_streaming_metric_counts_each_row_once_in_every_evaluation_and_nothing_is_kept(kind, size):
    metric = kind()
    for _ in range(2):
        kept, metrics, _ = run(loader(size), batch_metrics=eval_loop.by_batch(metric))
        assert (metrics["rows"], metrics["total"]) == (5, 31) and kept.predictions is None
    assert metric.rows == (5 if kind is Resets else 0)  # without reset the object stays as it was given


FILLER = {"x": torch.full((1,), 1e9), "labels": torch.zeros(1)}


def in_turns(batches_of, **options):
    """What two processes find that run in one: each waits in `gather` until both have said something."""
    parts, barrier, found = [None, None], threading.Barrier(2, timeout=20), [None, None]

    def process(rank):
        def gather(value):
            parts[rank] = value
            barrier.wait()
            everyone = copy.deepcopy(parts)
            barrier.wait()
            return everyone

        mine = {name: make() for name, make in options.items()}
        found[rank] = run(batches_of[rank], gather=gather, is_filler=lambda b: bool(b["x"].max() > 1e8), **mine)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in (0, 1)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
def test_processes_are_joined_in_the_order_of_the_dataset(accumulate):
    batches = loader(2)
    for kept, metrics, rows in in_turns([batches[::2], [batches[1], FILLER]], accumulate=lambda: accumulate):
        np.testing.assert_array_equal(kept.label_ids, VALUES.numpy())
        assert rows == 5 and metrics["loss"] == pytest.approx(31 / 5)


@pytest.mark.parametrize("kind", [Sums, Merges])
def test_a_streaming_metric_is_exact_over_processes(kind):
    batches = loader(2)
    streaming = lambda: eval_loop.by_batch(kind())  # noqa: E731
    for _, metrics, rows in in_turns([batches[::2], [batches[1], FILLER]], batch_metrics=streaming):
        assert rows == metrics["rows"] == 5 and metrics["total"] == 31


def test_a_streaming_metric_that_returns_no_dict_is_named():
    class Wrong(Sums):
        def compute(self):
            return 3.0

    with pytest.raises(TypeError, match=r"Wrong.compute\(\) returned 3.0"):
        run(loader(2), batch_metrics=eval_loop.by_batch(Wrong()))


@pytest.mark.parametrize(("accumulate", "moves"), [(None, [1, 1, 1, 1, 1]), (2, [2, 2, 1]), (9, [5])])
def test_predictions_leave_the_device_every_so_many_batches(accumulate, moves, monkeypatch):
    seen = []
    whole, _, _ = run(loader(1), accumulate=accumulate, gather=lambda value: seen.append(value) or [value])
    assert [len(part) for part in seen if isinstance(part, list)] == moves
    np.testing.assert_array_equal(whole.predictions, VALUES.numpy() * 2)


def test_logits_are_replaced_before_they_are_kept_and_extras_are_kept_on_demand():
    kept, _, _ = run(
        loader(2), preprocess_logits=lambda logits, labels: logits > 4, include=["inputs", "loss"], main_input="x"
    )
    assert kept.predictions.dtype == bool and kept.inputs.tolist() == VALUES.tolist() and kept.losses[0] == 1.5


def test_predictions_larger_than_memory_are_refused_at_the_first_batch(monkeypatch):
    seen = []
    options = {"num_batches": 3, "on_batch": lambda: seen.append(1)}
    need = 3 * 2 * 2 * 4  # batches x (predictions and labels) x rows x bytes
    monkeypatch.setattr(predictions, "free_memory", lambda: need - 1)
    with pytest.raises(MemoryError, match="3 evaluation batches .*preprocess_logits_for_metrics"):
        run(loader(2), **options)
    assert seen == []
    run(loader(2), **options, batch_metrics=eval_loop.by_batch(Sums()))
    run(loader(2), **options, keep=False)


def test_predictions_near_the_free_memory_are_warned_of_once(monkeypatch, caplog):
    monkeypatch.setattr(predictions, "free_memory", lambda: 2 * 48 - 1)
    run(loader(2), num_batches=3)
    monkeypatch.setattr(predictions, "free_memory", lambda: 2 * 48)
    run(loader(2), num_batches=3)
    assert [r.levelname for r in caplog.records if "preprocess_logits_for_metrics" in r.getMessage()] == ["WARNING"]


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads the memory of the process from /proc")
@pytest.mark.parametrize("ragged", [False, True])
def test_the_peak_is_all_predictions_once(ragged):
    code = f"""
import torch
from posttrain.core.evaluation import eval_loop
from posttrain.core.logging.metrics import Metrics

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

def batch(number):  # 8 MiB of predictions
    width = 256 * 1024 - (number if {ragged} else 0)
    return torch.ones(1, width, dtype=torch.double).expand(4, width).clone()

batches = [{{"x": torch.zeros(4)}}] * 40
numbers = iter(range(40))
predict = lambda inputs: (torch.zeros(()), batch(next(numbers)), inputs["x"])
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
before = peak()
kept, _, _ = eval_loop.run(batches, predict, count_items=lambda b: 4, metrics=Metrics(), keep=True)
print((peak() - before) / (kept.predictions.nbytes / 2**20))
"""
    done = programs.run(["-c", code], check=True)
    assert 1 < float(done.stdout) < 1.8  # 320 MiB, two blocks of 40 and a batch are 1.28; held twice they are 2


def test_a_metric_is_found_with_and_without_its_prefix_and_a_wrong_one_lists_the_rest():
    metrics = {"eval_loss": 1.0, "eval_accuracy": 0.5}
    assert eval_loop.named_metric(metrics, "accuracy") == eval_loop.named_metric(metrics, "eval_accuracy") == 0.5
    with pytest.raises(KeyError, match="eval_accuracy, eval_loss.*did you mean 'eval_accuracy'"):
        eval_loop.named_metric(metrics, "acuracy")


# ---- through the trainer ----


class Accuracy:
    """Right answers over answers, counted batch by batch."""

    def __init__(self):
        self.right = self.rows = 0

    def update(self, predictions, labels):
        self.right, self.rows = self.right + (predictions.argmax(-1) == labels).sum(), self.rows + len(labels)

    def compute(self):
        return {"accuracy": self.right / self.rows, "rows": self.rows}


def classifier(tmp_path, compute_metrics, **options):
    parts = {name: options.pop(name) for name in ("preprocess_logits_for_metrics",) if name in options}
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, disable_tqdm=True, **({"per_device_eval_batch_size": 4} | options)
    )
    rows, tokenizer = classification_rows(10), tiny.tokenizer()
    return Trainer(tiny.classifier(), arguments, eval_dataset=rows, processing_class=tokenizer,
                   compute_metrics=compute_metrics, **parts)  # fmt: skip


def test_a_streaming_metric_is_the_metric_of_all_rows_and_predict_still_returns_them(tmp_path):
    whole = classifier(tmp_path, lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())})
    streamed = classifier(tmp_path, Accuracy())
    expected, found = whole.evaluate(), streamed.evaluate()
    assert found["eval_accuracy"] == pytest.approx(expected["eval_accuracy"]) and found["eval_rows"] == 10
    assert found["eval_loss"] == expected["eval_loss"] and isinstance(found["eval_accuracy"], float)
    output = streamed.predict(streamed.eval_dataset)
    np.testing.assert_array_equal(output.predictions, whole.predict(whole.eval_dataset).predictions)
    assert output.metrics["test_rows"] == 10


def test_a_streaming_metric_sees_what_was_made_of_the_logits(tmp_path):
    class Sees:
        def update(self, predictions, labels):
            self.shape = tuple(predictions.shape)

        def compute(self):
            return {"dimensions": len(self.shape)}

    options = {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1), "batch_eval_metrics": True}
    assert classifier(tmp_path, Sees(), **options).evaluate()["eval_dimensions"] == 1


@pytest.mark.parametrize(("option", "dtype"), [("bf16_full_eval", torch.bfloat16), ("fp16_full_eval", torch.float16)])
def test_an_evaluation_in_half_precision_casts_the_weights_and_changes_little(option, dtype, tmp_path):
    whole, half = classifier(tmp_path, None), classifier(tmp_path, None, **{option: True})
    assert half.evaluate()["eval_loss"] == pytest.approx(whole.evaluate()["eval_loss"], rel=1e-2)
    assert {parameter.dtype for parameter in half.model.parameters()} == {dtype}


def test_metrics_that_cannot_be_computed_are_refused_at_construction(tmp_path):
    with pytest.raises(TypeError, match="compute_metrics is of type dict.*update"):
        classifier(tmp_path, {"accuracy": 1.0})
    with pytest.raises(ValueError, match=r"include_for_metrics=\['inputs'\] has no effect.*Accuracy"):
        classifier(tmp_path, Accuracy(), include_for_metrics=["inputs"])


if __name__ == "__main__":  # two processes, started by tests/distributed/test_metrics.py
    torch.set_num_threads(1)
    streamed = classifier(sys.argv[1], Accuracy(), per_device_eval_batch_size=2)
    metrics = streamed.evaluate() | {"predicted": len(streamed.predict(streamed.eval_dataset).predictions)}
    (Path(sys.argv[1]) / f"rank-{streamed.args.process_index}.json").write_text(json.dumps(metrics))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["lables", "label"])
def test_a_name_of_labels_that_nothing_has_is_reported_once(name, tmp_path, caplog):
    eval_loop._warn_of_strange_labels.cache_clear()  # once in a process
    args = dict(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, per_device_eval_batch_size=2
    )
    rows = [{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": 1}] * 4
    plain = Trainer(tiny.classifier(), TrainingArguments(**args), eval_dataset=rows)
    assert "eval_loss" in plain.evaluate()
    plain.predict(
        [{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}] * 4
    )  # labels may be missing, under a known name
    assert "label_names" not in caplog.text
    wrong = Trainer(tiny.classifier(), TrainingArguments(**args, label_names=[name]), eval_dataset=rows)
    assert "eval_loss" not in wrong.evaluate()
    (said,) = [record.message for record in caplog.records if "label_names" in record.message]
    assert f"label_names holds {name!r}" in said and "input_ids" in said and "did you mean 'labels'?" in said


@pytest.mark.parametrize("option", ["bf16_full_eval", "fp16_full_eval"])
def test_a_model_that_was_trained_comes_back_from_half_precision_to_the_bit(option, tmp_path):
    trainer = TRAINERS["causal-lm"](tmp_path, max_steps=2, **{option: True})
    trainer.train()
    before = weights(trainer)
    buffers = {name: value.dtype for name, value in trainer.model.named_buffers()}
    trainer.evaluate()
    after = weights(trainer)
    assert all(after[name].dtype == torch.float32 and torch.equal(after[name], before[name]) for name in before)
    assert {name: value.dtype for name, value in trainer.model.named_buffers()} == buffers


def test_a_part_that_was_in_evaluation_mode_is_so_after_an_evaluation_too():
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout())
    model[0].eval()
    with eval_loop.eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, False, True]


def test_metrics_that_are_measured_and_returned_are_named_and_chosen_as_in_transformers(caplog):
    assert eval_loop.with_returned({"loss": 1.0}, {"accuracy": 0.5, "eval_f1": 0.2}) == {
        "loss": 1.0,
        "accuracy": 0.5,
        "eval_f1": 0.2,
    }
    assert caplog.text == ""
    assert eval_loop.with_returned({"loss": 1.0}, {"loss": 2.0}) == {"loss": 2.0}
    assert (
        "returned 'loss', and the evaluation measures 'loss' itself: what was returned takes its place" in caplog.text
    )
    assert eval_loop.with_returned({"loss": 1.0}, {"test_loss": 2.0}, "test") == {"loss": 1.0}
    assert "'test_loss', and the evaluation measures 'loss' itself: what was returned is left" in caplog.text
    with pytest.raises(TypeError, match="returned a metric under 1, which is no name"):
        eval_loop.with_returned({}, {1: 2.0})
