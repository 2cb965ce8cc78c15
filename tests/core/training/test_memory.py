"""Memory that runs out: the same update in smaller parts; and how much of it a stage took."""

import mmap
import time

import pytest
import torch

from posttrain.core import Trainer
from posttrain.core.data.batches import Filler, is_filler
from posttrain.core.data.collators import default_data_collator
from posttrain.core.errors import ConfigError
from posttrain.core.logging.memory import halves, is_out_of_memory
from posttrain.rl import DPOTrainer
from posttrain.sft import SFTTrainer
from tests.contract.trainers import PAIRS, TRAINERS, causal_lm, image_rows, images, sft, weights

CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "9 bytes."
)


class Small(Trainer):
    """A device on which at most `limit` rows fit from update `since` on."""

    limit, since = 3, 0
    error = staticmethod(lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB."))
    seen: list[int]

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.seen = [*getattr(self, "seen", []), len(inputs["input_ids"])]
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self.metrics.add_sum("rows", len(inputs["input_ids"]), 1)
        if model.training and len(inputs["input_ids"]) > self.limit and self.state.global_step >= self.since:
            raise self.error()
        return result


@pytest.mark.parametrize("since", [0, 2])
@pytest.mark.parametrize("error", [Small.error, lambda: RuntimeError(CPU), MemoryError])
def test_a_step_that_does_not_fit_is_made_in_smaller_parts(error, since, tmp_path, caplog):
    trainer = causal_lm(Small)(tmp_path / "small", auto_find_batch_size=True)
    trainer.error = error
    trainer.since = since
    trainer.train()
    expected = causal_lm()(tmp_path / "large")
    expected.train()
    for name, value in weights(expected).items():
        torch.testing.assert_close(weights(trainer)[name], value, rtol=0, atol=1e-6, msg=name)
    losses = [[r["loss"] for r in t.state.log_history if "loss" in r] for t in (trainer, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert trainer.state.train_batch_size == 2 and caplog.text.count("auto_find_batch_size: step") == 2
    assert f"step {since + 1} did not fit" in caplog.text and "gradient_accumulation_steps=4 to start" in caplog.text
    assert trainer.state.global_step == expected.state.global_step == 6
    assert trainer.seen[-1] <= 3
    rows = {r["step"]: r["rows"] for r in trainer.state.log_history if "rows" in r}
    # 8 in four calls, or the 6 that an epoch ends with in two: those that failed are forgotten
    assert rows[since + 1] == (2 if since == 0 else 3)


def test_with_dropout_the_run_is_the_one_that_starts_with_the_size_that_fits(tmp_path):
    """The step is begun again with the same random numbers. Rows of one length: padding is then the same."""
    rows = [{"input_ids": list(range(i, i + 8)), "labels": list(range(i, i + 8))} for i in range(4, 20)]
    runs = []
    for folder, changes in [("found", {"auto_find_batch_size": True}),
                            ("given", {"per_device_train_batch_size": 2,
                            "gradient_accumulation_steps": 4})]:  # fmt: skip
        trainer = causal_lm(Small, arch="gpt2", resid_pdrop=0.1)(tmp_path / folder, **changes)
        trainer.train_dataset, trainer.data_collator = rows, default_data_collator
        trainer.train()
        runs.append(weights(trainer))
    assert all(torch.equal(value, runs[1][name]) for name, value in runs[0].items())


def test_a_resumed_run_keeps_the_size_that_was_found(tmp_path):
    options = {"auto_find_batch_size": True, "save_strategy": "steps", "save_steps": 2}
    straight, resumed = causal_lm(Small)(tmp_path, **options), causal_lm(Small)(tmp_path, **options)
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert max(resumed.seen) == 2
    assert all(torch.equal(value, weights(straight)[name]) for name, value in weights(resumed).items())


@pytest.mark.long
def test_what_cannot_be_cut_is_said_and_how_to_make_it_fit(tmp_path):
    trainer = causal_lm(Small)(tmp_path, auto_find_batch_size=True)
    trainer.limit = 0
    with pytest.raises(torch.OutOfMemoryError, match="one row, and cannot be cut any more.*gradient_checkpointing"):
        trainer.train()
    packed = sft(packing=True, max_length=48, padding_free=True)(tmp_path, auto_find_batch_size=True)
    packed.compute_loss = lambda *a, **k: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory"))
    with pytest.raises(torch.OutOfMemoryError, match="cannot be cut"):
        packed.train()


@pytest.mark.parametrize("options", [{"packing": True, "max_length": 48}, {"padding_free": True}], ids=str)
@pytest.mark.parametrize("texts", [False, True])
def test_a_packed_row_is_cut_between_its_documents(options, texts, tmp_path):
    """Also rows of texts, whose first token of each document has a label that nothing predicts."""

    def make(folder, **changes):
        size = 1 if "packing" in options else 4  # several packed rows are cut by rows
        trainer = sft(**options)(tmp_path / folder, max_steps=2, per_device_train_batch_size=size, **changes)
        if texts:
            trainer.train_dataset = trainer.train_dataset.map(lambda row: {"labels": row["input_ids"]})
        return trainer

    straight, split = make("straight"), make("split", auto_find_batch_size=True)
    whole, sizes = split.training_step, []

    def small(model, inputs, num_items_in_batch=None):
        sizes.append(inputs["input_ids"].numel())
        if sizes[-1] > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(model, inputs, num_items_in_batch)

    split.training_step = small
    straight.train(), split.train()
    assert max(sizes) > 40 and sizes[-1] <= 40
    for name, value in weights(straight).items():
        torch.testing.assert_close(weights(split)[name], value, rtol=0, atol=1e-6, msg=name)
    losses = [[r["loss"] for r in t.state.log_history if "loss" in r] for t in (split, straight)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("name", ["dpo-padded", "reward", "sft-images"])
def test_pairs_and_images_stay_together_when_a_step_is_made_in_smaller_parts(name, tmp_path):
    def make(**changes):
        return TRAINERS[name](tmp_path, max_steps=2, **changes)

    straight, split = make(), make(auto_find_batch_size=True)
    whole, sizes = split.training_step, []

    def small(model, inputs, num_items_in_batch=None):
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(model, inputs, num_items_in_batch)

    split.training_step = small
    straight.train(), split.train()
    assert max(sizes) > 4 and sizes[-1] <= 4
    for key, value in weights(straight).items():
        torch.testing.assert_close(weights(split)[key], value, rtol=0, atol=1e-6, msg=key)


def test_a_batch_with_as_many_images_as_rows_is_cut_by_the_rows_of_the_images(tmp_path):
    rows = [{name: row[name] for name in ("images", "prompt", "completion")} for row in image_rows(2)]
    trainer = images(SFTTrainer, "prompt completion", "llava")(tmp_path)
    batch = trainer.data_collator(rows)
    assert len(batch["pixel_values"]) == len(batch["input_ids"]) == 2  # both of the first row
    first, second = halves(batch)
    assert torch.equal(first["pixel_values"], batch["pixel_values"]) and "pixel_values" not in second
    assert first.take_facts() is not None and second.take_facts() is None
    for name in ("input_ids", "labels"):
        assert torch.equal(torch.cat([first[name], second[name]]), batch[name])
    pairs = images(DPOTrainer, PAIRS, "llava")(tmp_path).data_collator(image_rows(2))
    with pytest.raises(ValueError, match="several completions of prompts with images cannot be cut"):
        halves(pairs)
    with pytest.raises(ValueError, match="holds images of prompts for several completions"):
        halves({"ids": torch.ones(2), "image_inputs": batch})


def test_without_it_running_out_of_memory_says_what_to_set(tmp_path):
    trainer = causal_lm(Small)(tmp_path)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    note, held = caught.value.__notes__
    assert held.startswith("What held memory: weights ")
    assert (
        "per_device_train_batch_size=4 with gradient_accumulation_steps=2" in note
        and "auto_find_batch_size=True" in note
    )


def test_other_errors_are_not_taken_for_it(tmp_path):
    trainer = causal_lm(Small)(tmp_path, auto_find_batch_size=True)
    trainer.error = lambda: RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError, match="shapes do not match"):
        trainer.train()
    assert not is_out_of_memory(ValueError("out of memory"))


def test_of_several_processes_one_that_runs_out_cannot_be_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="auto_find_batch_size=True works in one process"):
        TRAINERS["causal-lm"](tmp_path, auto_find_batch_size=True)


def test_a_batch_is_cut_by_rows():
    batch = {"ids": torch.arange(10).reshape(5, 2), "names": list("abcde"), "scale": torch.tensor(2.0), "flag": True}
    first, second = halves(batch)
    assert first["ids"].tolist() == [[0, 1], [2, 3], [4, 5]] and second["ids"].tolist() == [[6, 7], [8, 9]]
    assert (first["names"], second["names"]) == (list("abc"), list("de"))
    assert first["scale"] == second["scale"] == 2 and second["flag"] is True
    assert all(map(is_filler, halves(Filler(ids=torch.ones(2, 2)))))
    assert [part[1].tolist() for part in halves((torch.ones(2), torch.arange(2)))] == [[0], [1]]
    with pytest.raises(ValueError, match="ids of 2 rows, lengths of 3 rows"):
        halves({"ids": torch.ones(2), "lengths": torch.ones(3)})


# ---- how much a stage took ----


def test_memory_is_reported_under_the_known_names_when_asked_for(tmp_path):
    def keys(metrics):
        return {name for name in metrics if "_mem_" in name}

    trainer = TRAINERS["causal-lm"](
        tmp_path, skip_memory_metrics=False, max_steps=2, eval_strategy="steps", eval_steps=1
    )
    trained = trainer.train().metrics
    of_init = {"before_init_mem_cpu", "init_mem_cpu_alloc_delta", "init_mem_cpu_peaked_delta"}
    assert keys(trained) == of_init | {"train_mem_cpu_alloc_delta", "train_mem_cpu_peaked_delta"}
    assert trained["before_init_mem_cpu"] > 2**25 and all(isinstance(trained[name], int) for name in keys(trained))
    assert not any(keys(record) for record in trainer.state.log_history if "eval_loss" in record)  # within training
    assert keys(trainer.evaluate()) == {"eval_mem_cpu_alloc_delta", "eval_mem_cpu_peaked_delta"}
    assert keys(trainer.predict(trainer.eval_dataset).metrics) == {
        "test_mem_cpu_alloc_delta",
        "test_mem_cpu_peaked_delta",
    }
    assert keys(TRAINERS["causal-lm"](tmp_path / "not", max_steps=1).train().metrics) == set()


def test_a_peak_between_start_and_end_is_seen(tmp_path):
    trainer = TRAINERS["causal-lm"](tmp_path, skip_memory_metrics=False, max_steps=1)
    stock = trainer.compute_loss

    def hungry(*args, **kwargs):
        with mmap.mmap(-1, 2**27) as block:  # 128 MiB of fresh pages: freed memory may be kept for tensors
            for _ in range(2**7):
                block.write(b"1" * 2**20)
            time.sleep(0.1)
        return stock(*args, **kwargs)

    trainer.compute_loss = hungry
    metrics = trainer.train().metrics
    assert metrics["train_mem_cpu_peaked_delta"] > 100 * 2**20 > metrics["train_mem_cpu_alloc_delta"]


def test_the_cache_of_the_device_is_given_back_every_so_many_updates(tmp_path, monkeypatch):
    trainer, calls = TRAINERS["causal-lm"](tmp_path, max_steps=5, torch_empty_cache_steps=2), []
    monkeypatch.setattr(trainer.dist, "empty_cache", lambda: calls.append(trainer.state.global_step))
    trainer.train()
    assert calls == [2, 4]
