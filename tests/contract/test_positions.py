"""With any other batch size, accumulation or number of processes a resumed run reads every row once an epoch, and ends
with its last epoch.
"""

import json
from collections import Counter
from itertools import islice

import pytest

from posttrain.core import Trainer, TrainerCallback, TrainingArguments
from posttrain.core.data.batch_samplers import BalancedBatchSampler, TokenBatchSampler
from posttrain.core.data.pipeline import is_filler
from posttrain.core.data.samplers import EpochSampler, LengthGroupedSampler
from posttrain.core.data.stateful_dataloader import Loader
from posttrain.core.training.plan import make_plan, resumed
from posttrain.rl.samples.prompts import GroupSampler, Layout
from tests import tiny
from tests.contract.trainers import TRAINERS, pad

NUM_ROWS, EPOCHS, GROUP = 23, 2, 2
LENGTHS = [3 + 7 * i % 11 for i in range(NUM_ROWS)]
#: (batch on each process, accumulation, processes)
SHAPES = [(2, 2, 1), (2, 4, 1), (1, 3, 1), (5, 1, 1), (3, 2, 2), (1, 2, 2)]


def grouped(batch, processes):  # each rollout is of two steps: whole groups, on any number of processes
    return Layout(GROUP, 2 * batch * processes * GROUP // processes, batch * GROUP, processes)


def sampled(kind, batch, accumulation, processes):
    if kind == "batch_rebalance":
        parts = accumulation * processes
        return {"batch_sampler": BalancedBatchSampler(LENGTHS, batch * parts, parts, 7)}
    if kind == "max_batch_tokens":
        return {"batch_sampler": TokenBatchSampler(LENGTHS, 13 + 5 * batch, 7, processes)}
    if kind == "rollouts":
        layout = grouped(batch, processes)
        return {"batch_size": layout.per_process, "sampler": GroupSampler(NUM_ROWS, layout, 7)}
    orders = {"random": EpochSampler(NUM_ROWS, 7), "group_by_length": LengthGroupedSampler(LENGTHS, batch, 7)}
    return {"batch_size": batch, "sampler": orders[kind]}


class Run:
    """The positions of a run of `shape`, without a model."""

    def __init__(self, kind, shape, drop_last=False, epochs=EPOCHS):
        self.shape = shape
        _, accumulation, self.processes = shape
        self.loaders = [
            Loader(
                range(NUM_ROWS), collate_fn=lambda rows: {"rows": rows}, rank=rank, world_size=self.processes,
                drop_last=drop_last, **sampled(kind, *shape),
            )
            for rank in range(self.processes)
        ]  # fmt: skip
        self.plan = make_plan(len(self.loaders[0]), accumulation, epochs, -1)
        self.step = self.epoch = self.batches = 0
        self.read = []  # (epoch, row)

    def resume(self, other):
        """Go on where `other` stands."""
        saved = other.loaders[0].state_dict()
        left = 0 if saved["epoch"] > other.epoch else self.loaders[0].batches_left(saved)
        self.step, self.epoch = other.step, other.epoch
        if other.shape == self.shape:
            self.plan = resumed(self.plan, *other.plan.resized_at, False) if other.plan.resized_at else self.plan
        else:
            self.plan = resumed(self.plan, self.step, self.epoch, left, False)
        for loader in self.loaders:
            loader.load_state_dict(json.loads(json.dumps(saved)))
        self.batches = self.plan.batches_per_epoch - left
        return self

    def until(self, step):
        """Train to `step`, or to the end."""
        for epoch in range(self.epoch, self.plan.num_epochs):
            self.epoch = epoch
            if self.loaders[0].epoch != self.epoch:
                continue  # saved with the last step of an epoch
            streams = [iter(loader) for loader in self.loaders]
            while self.step < min(step, self.plan.max_steps):
                windows = [list(islice(stream, self.plan.accumulation)) for stream in streams]
                if not windows[0]:
                    break
                self.step, self.batches = self.step + 1, self.batches + len(windows[0])
                for batch in (batch for window in windows for batch in window if not is_filler(batch)):
                    self.read += [(self.epoch, row) for row in batch["rows"]]
            if self.step >= step:
                return self
            self.batches = 0
        return self


def legs(kind, shapes, stops, **options):
    """The runs of `shapes`, each stopped at the step of `stops` and resumed by the next."""
    runs = [Run(kind, shapes[0], **options).until(stops[0])]
    for shape, stop in zip(shapes[1:], [*stops[1:], 10**6], strict=True):
        runs.append(Run(kind, shape, **options).resume(runs[-1]).until(stop))
    return runs


@pytest.mark.parametrize("first", SHAPES)
@pytest.mark.parametrize("kind", ["random", "group_by_length", "batch_rebalance", "max_batch_tokens", "rollouts"])
def test_every_row_is_read_once_an_epoch_whatever_the_sizes(kind, first):
    for second in SHAPES:
        for stop in range(1, Run(kind, first).plan.max_steps + 1):
            # The last leg has the shape of the second: a run that goes on with the size it has got used to.
            runs = legs(kind, [first, second, second], [stop, stop + 2])
            counts = Counter(one for run in runs for one in run.read)
            where, each = f"{first} -> {second} after step {stop}", GROUP if kind == "rollouts" else 1
            assert {*counts.values()} == {each}, where
            if kind != "rollouts":  # of which an epoch has whole ones
                assert len(counts) == EPOCHS * NUM_ROWS, where
            assert runs[-1].step == runs[-1].plan.max_steps and runs[-1].epoch == EPOCHS - 1, where


@pytest.mark.parametrize(("drop_last", "epochs"), [(True, 2), (False, 1.5), (True, 0.75)])
def test_a_run_ends_with_its_plan_also_where_an_epoch_is_cut(drop_last, epochs):
    for first in SHAPES:
        for second in SHAPES:
            for stop in range(1, Run("random", first, drop_last, epochs).plan.max_steps):
                runs = legs("random", [first, second], [stop], drop_last=drop_last, epochs=epochs)
                read = Counter(one for run in runs for one in run.read)
                assert {*read.values()} == {1} and runs[-1].step == runs[-1].plan.max_steps
                step = max(batch * accumulation * processes for batch, accumulation, processes in (first, second))
                assert abs(len(read) / NUM_ROWS - epochs) <= 2 * step / NUM_ROWS, (first, second, stop)


# ---- real trainers ----


class StopAt(TrainerCallback):
    """Stops a run after a step, with a checkpoint."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def train(folder, batch, accumulation, stop=None, resume=None, **changes):
    """(rows that a run reads, its trainer)."""
    read = []

    def collate(rows):
        read.extend(row["number"] for row in rows)
        return pad(rows)

    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
        num_train_epochs=EPOCHS, remove_unused_columns=False, save_steps=100, report_to="none", use_cpu=True,
        disable_tqdm=True, optim="sgd", **changes,
    )  # fmt: skip
    rows = [{"number": number} | row for number, row in enumerate(tiny.token_rows(NUM_ROWS))]
    trainer = Trainer(tiny.causal_lm(), args, collate, rows, callbacks=[StopAt(stop)])
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return read, trainer


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"save_only_model": True},
        *({"train_sampling_strategy": way} for way in ("group_by_length", "batch_rebalance")),
    ],
)
@pytest.mark.parametrize(("first", "second"), [((2, 2), (2, 4)), ((3, 2), (2, 1)), ((2, 3), (5, 1))])
def test_a_trainer_ends_with_its_last_epoch_whatever_the_sizes(first, second, changes, tmp_path):
    read, _ = train(tmp_path, *first, stop=3, **changes)
    more, _ = train(tmp_path, *second, stop=5, resume=tmp_path / "checkpoint-3", **changes)
    rest, last = train(tmp_path, *second, resume=tmp_path / "checkpoint-5", **changes)
    assert last.state.epoch == EPOCHS and last.state.global_step == last.state.max_steps
    assert {*Counter(read + more + rest).values()} == {EPOCHS}
    assert {*Counter((read + more + rest)[:NUM_ROWS]).values()} == {1}


def test_max_steps_is_the_number_of_steps_whatever_their_sizes(tmp_path):
    train(tmp_path, 4, 2, stop=2, max_steps=9)
    train(tmp_path, 1, 2, stop=4, resume=tmp_path / "checkpoint-2", max_steps=9)
    assert train(tmp_path, 1, 2, resume=tmp_path / "checkpoint-4", max_steps=9)[1].state.global_step == 9


@pytest.mark.parametrize(
    ("changes", "num_prompts"),  # of the 9, as many as make whole rollouts
    [({"per_device_train_batch_size": 4}, 8), ({"gradient_accumulation_steps": 1}, 9)],
)
def test_prompts_are_sampled_once_an_epoch_whatever_the_sizes(changes, num_prompts, tmp_path):
    prompts = []

    def run(stop=None, resume=None, **changes):
        usual = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "optim": "sgd"} | changes
        trainer = TRAINERS["grpo"](tmp_path, callbacks=[StopAt(stop)], **usual)
        new_samples = trainer.new_samples
        trainer.new_samples = lambda rows: prompts.extend(str(row["prompt"]) for row in rows) or new_samples(rows)
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / f"checkpoint-{resume}"))
        return trainer

    run(stop=2)  # 4 prompts
    run(stop=4, resume=2, **changes)
    last = run(resume=4, **changes)
    state, once = last.state, last.num_generations
    assert state.epoch == last.args.num_train_epochs and state.global_step == state.max_steps
    for epoch in (0, 1):
        assert {*Counter(prompts[epoch * num_prompts * once :][: num_prompts * once]).values()} == {once}
    assert len(prompts) == 2 * num_prompts * once
