"""Several datasets in one run: exact shares, a fixed order, a loss for each, and an exact resume."""

import io
import itertools
import tarfile

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, IterableDataset, List, Value
from datasets.distributed import split_dataset_by_node

from posttrain.cli.mixture import CommandSource
from posttrain.core.data.batches import as_filler
from posttrain.core.data.collators import DataCollatorForSeq2Seq
from posttrain.core.data.stateful_dataloader import Loader
from posttrain.core.errors import ConfigError, DataError
from posttrain.sft import SFTConfig, SFTTrainer
from posttrain.sft.mixture import MixedStream, mix_datasets, mix_rows, stages_of
from posttrain.sft.packing import pack_columns
from tests import tiny

MATHS = [{"prompt": f"{i} and {i}?", "completion": f" {2 * i}"} for i in range(12)]
TALES = [{"text": text} for text in tiny.CORPUS]
PARTS = {"maths": MATHS, "tales": TALES}


def trainer(tmp_path, parts=None, model=None, collator=None, **changes):
    usual = dict(
        per_device_train_batch_size=4, max_steps=4, learning_rate=1e-2, logging_steps=1, max_length=64,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    args = SFTConfig(str(tmp_path), **(usual | changes))
    return SFTTrainer(
        model or tiny.causal_lm(), args, collator, parts or dict(PARTS), processing_class=tiny.tokenizer()
    )


def records(trainer):
    return [record for record in trainer.state.log_history if "loss" in record]


# Which rows, in which order


def test_without_weights_each_row_comes_once_and_sources_are_spread_evenly():
    order, source, drawn = mix_rows([2, 6])
    assert sorted(order) == list(range(8)) and drawn.tolist() == [[2, 6]]
    assert source.tolist() == [1, 0, 1, 1, 1, 0, 1, 1]  # at 1/4 and 3/4 of the way
    assert order[source == 0].tolist() == [0, 1] and order[source == 1].tolist() == [2, 3, 4, 5, 6, 7]


def test_weights_are_shares_of_an_epoch_that_stays_as_long():
    order, source, drawn = mix_rows([10, 90], np.array([0.75, 0.25]), seed=3)
    assert drawn.tolist() == [[75, 25]] and len(order) == 100 and (source == 0).sum() == 75
    counts = np.bincount(order, minlength=100)
    assert set(counts[:10]) == {7, 8} and set(counts[10:]) == {0, 1}  # seven passes and a half; a part, no row twice
    again, other = (mix_rows([10, 90], np.array([0.75, 0.25]), seed=seed)[0] for seed in (3, 4))
    assert (order == again).all() and (order != other).any()


@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [1 / 3] * 3, [0.98, 0.01, 0.01]])
def test_the_rows_of_an_epoch_are_those_of_the_shares_to_the_row(weights):
    lengths = [7, 100, 1]
    order, source, drawn = mix_rows(lengths, np.array(weights))
    assert drawn.sum() == len(order) == 108 and np.abs(drawn[0] - np.array(weights) * 108).max() <= 1
    first = np.cumsum([0, *lengths])
    assert all(first[s] <= row < first[s + 1] for row, s in zip(order, source, strict=True))


CHANGING = {"maths": {0: 3, 0.5: 1}, "tales": {"0.25": 1}}  # keys as in Python or YAML, and as in JSON


def test_weights_that_change_make_stages_each_of_its_shares_to_the_row():
    spans, shares = stages_of(("maths", "tales"), CHANGING)
    assert spans.tolist() == [0.25, 0.25, 0.5] and shares.tolist() == [[1, 0], [0.75, 0.25], [0.5, 0.5]]
    order, source, drawn = mix_rows([20, 80], shares, seed=3, spans=spans)
    assert drawn.tolist() == [[25, 0], [19, 6], [25, 25]]
    assert [np.bincount(part, minlength=2).tolist() for part in np.split(source, [25, 50])] == drawn.tolist()
    maths = order[source == 0]  # each stage goes on where the one before it ended: pass after pass
    assert all(sorted(maths[start : start + 20]) == list(range(20)) for start in (0, 20, 40))
    assert len(set(order[source == 1])) == 31  # no row twice


def test_a_budget_is_the_most_tokens_and_the_others_take_what_it_leaves():
    tokens = [np.array([3, 4, 5] * 10), np.array([2] * 60), np.array([6] * 30)]
    lengths = [len(part) for part in tokens]

    def drawn(budgets, weights=None, **how):
        order, source, counts = mix_rows(lengths, weights, tokens=tokens, budgets=np.array(budgets), **how)
        assert counts.sum() == len(order)
        return np.bincount(source, np.concatenate(tokens)[order], minlength=3).tolist(), counts.sum(0).tolist()

    trained, _ = drawn([50, np.inf, 7])
    assert 45 < trained[0] <= 50 and trained[1:] == [120, 6]  # without weights each row once, and no others instead
    trained, _ = drawn([20, np.inf, np.inf], np.array([2, 1, 1]) / 4, by_tokens=True)
    assert 15 < trained[0] <= 20 and trained[1:] == [200, 198]  # 400 of 420 tokens are left for two equal weights
    _, rows = drawn([np.inf, 20, np.inf], np.array([1, 2, 1]) / 4)
    assert rows == [55, 10, 55]  # of 120 rows
    spans, shares = stages_of(("a", "b", "c"), {"a": {0: 1, 0.5: 0}, "b": {0.5: 1}, "c": {0.5: 1}})
    trained, _ = drawn([90, np.inf, np.inf], shares, by_tokens=True, spans=spans)
    assert 85 < trained[0] <= 90 and trained[1:] == [104, 102]  # the first stage is shorter: nothing else has a weight
    trained, _ = drawn([30, 31, 32], np.ones(3) / 3, by_tokens=True)
    assert 25 < trained[0] <= 30 and trained[1:] == [30, 30]


def test_a_mixture_of_several_epochs_has_as_many_passes_each_in_an_order_of_its_own():
    tokens = [np.array([3, 4, 5] * 4), np.array([2] * 30)]
    order, source, drawn = mix_rows([12, 30], tokens=tokens, budgets=np.array([np.inf, 90]), epochs=3)
    assert drawn.tolist() == [[36, 45]] and set(np.bincount(order[source == 0])) == {3}
    passes = order[source == 0].reshape(3, 12)
    assert all(sorted(each) == list(range(12)) for each in passes) and (passes[0] != passes[1]).any()
    assert [int((part == 1).sum()) for part in np.split(source, 3)] == [15, 15, 15]  # the budget lasts for all epochs
    spans, shares = stages_of(("maths", "tales"), CHANGING)
    order, source, drawn = mix_rows([20, 80], shares, spans=spans, epochs=2.5)
    assert drawn.tolist() == [[62, 0], [47, 16], [63, 62]] and len(order) == 250
    trained = np.bincount(source, np.concatenate(tokens)[order % 42], minlength=2)
    for share, expected in ((0.25, 0.25), (0.75, 0.75)):
        found = mix_rows([12, 30], np.array([share, 1 - share]), tokens=tokens, by_tokens=True, epochs=7)
        trained = np.bincount(found[1], np.concatenate(tokens)[found[0]])
        assert abs(trained[0] - expected * 7 * 108) < 5 and 7 * 108 - 7 < trained.sum() <= 7 * 108


# In the trainer


def test_each_dataset_is_prepared_by_its_own_format_and_reported(tmp_path, caplog):
    with caplog.at_level("INFO"):
        made = trainer(tmp_path, dataset_weights={"maths": 3, "tales": 1})
    assert set(made.data_reports) == {"train/maths", "train/tales"}
    assert made.data_reports["train/maths"].rows_in == 12 and made.mixture.drawn == (13, 4)
    assert len(made.train_dataset) == 17 and set(made.train_dataset.column_names) == {"input_ids", "labels", "source"}
    assert "maths: 13 rows an epoch (76.5%), each of its 12 rows 1.08 times" in caplog.text
    tok = tiny.tokenizer()
    row = next(row for row in made.train_dataset if row["source"] == 0)
    assert tok.decode([label for label in row["labels"] if label != -100]).startswith(" ")  # the completion alone


@pytest.mark.parametrize("packing", [False, True])
def test_weights_can_be_shares_of_the_tokens_that_are_trained_on(tmp_path, packing):
    parts = {"maths": MATHS * 8, "tales": TALES * 8}
    options = {"dataset_weights": {"maths": 3, "tales": 1}, "dataset_weights_of": "tokens", "packing": packing}
    made = trainer(
        tmp_path, parts, max_length=48, num_train_epochs=1, max_steps=-1, logging_strategy="epoch", **options
    )
    made.train()
    shares = [record["token_share/maths"] for record in records(made)]
    assert shares == [pytest.approx(0.75, abs=0.02)]
    by_rows = trainer(tmp_path, parts, **(options | {"dataset_weights_of": "rows"}))
    assert made.mixture.drawn[0] > by_rows.mixture.drawn[0]  # their completions are short


def trained_by_source(made, first, last):
    """The trained tokens of each source in the rows `first` to `last` of the training set."""
    found = np.zeros(2)
    for row in made.train_dataset.select(range(first, last)):
        edges = np.cumsum(row.get("seq_lengths") or [len(row["labels"])])
        for source, labels in zip(row.get("sources") or [row["source"]], np.split(row["labels"], edges), strict=False):
            found[source] += np.sum(labels[1:] != -100)
    return found


@pytest.mark.parametrize("packing", [False, True])
def test_stages_have_the_shares_of_trained_tokens_to_a_row_and_are_read_in_their_order(packing, tmp_path):
    parts = {"maths": MATHS * 8, "tales": TALES * 8}
    options = {"dataset_weights": CHANGING, "dataset_weights_of": "tokens", "num_train_epochs": 1, "max_steps": -1}
    options |= {"per_device_train_batch_size": 2, "packing": packing, "max_length": 48}
    made = trainer(tmp_path, parts, **options)
    reports = [made.data_reports[f"train/{name}"] for name in parts]
    total, longest = sum(report.trained_tokens for report in reports), max(report.longest for report in reports)
    places = [0, *np.cumsum([sum(stage) for stage in made.mixture.stages])]
    if packing:  # no row holds documents of two stages
        documents = np.cumsum([0, *(len(row["seq_lengths"]) for row in made.train_dataset)])
        assert set(places) <= set(documents)
        places = np.searchsorted(documents, places)
    shares = [[0.25, 0], [0.25 * 0.75, 0.25 * 0.25], [0.25, 0.25]]
    for stage, expected in enumerate(shares):
        found = trained_by_source(made, places[stage], places[stage + 1])
        assert np.abs(found - np.array(expected) * total).max() < longest, (stage, found)
    made.train()
    read = [record["token_share/tales"] for record in records(made)]
    assert read == pytest.approx(
        [
            tales / (maths + tales)
            for step in range(len(read))
            for maths, tales in [trained_by_source(made, 2 * step, min(2 * step + 2, len(made.train_dataset)))]
        ]
    )


@pytest.mark.parametrize("packing", [False, True])
def test_a_run_trains_on_no_more_tokens_of_a_dataset_than_its_budget(packing, tmp_path):
    parts = {"maths": MATHS * 8, "tales": TALES * 8}
    options = {"dataset_weights": {"maths": 1, "tales": 1}, "dataset_max_tokens": {"tales": 150}, "packing": packing}
    made = trainer(tmp_path, parts, max_length=48, num_train_epochs=1, max_steps=-1, **options)
    found = trained_by_source(made, 0, len(made.train_dataset))
    assert 150 - made.data_reports["train/tales"].longest < found[1] <= 150
    assert sum(made.mixture.drawn) == 8 * (len(MATHS) + len(TALES))  # the other takes what that leaves


def read_rows(made):
    """What the training loader reads, epoch by epoch: a batch's labels and sources."""
    loader = made.get_train_dataloader()
    return [[(batch["labels"].tolist(), batch["sources"][:, 0].tolist()) for batch in loader] for _ in range(3)]


@pytest.mark.parametrize("packing", [False, True])
def test_stages_and_budgets_are_laid_over_all_epochs(packing, tmp_path):
    parts = {"maths": MATHS * 2, "tales": TALES * 2}
    options = {"dataset_weights": CHANGING, "dataset_max_tokens": {"tales": 900}, "num_train_epochs": 3}
    made = trainer(tmp_path, parts, max_length=48, packing=packing, **(options | {"max_steps": -1}))
    rows = len(made.train_dataset)
    assert 852 < trained_by_source(made, 0, rows)[1] <= 900 and made.mixture.epochs == 3
    if not packing:
        assert rows == sum(made.mixture.drawn) == 3 * 34
        epochs = [[source for _, sources in epoch for source in sources] for epoch in read_rows(made)]
        assert [len(epoch) for epoch in epochs] == [34, 34, 34]
        assert sum(epochs, []) == [row["source"] for row in made.train_dataset]
        assert sum(epochs[0][:25]) == 0 < sum(epochs[0]) < sum(epochs[2])
    made.train()
    assert made.state.epoch == 3 and made.state.global_step == 3 * -(-(rows // 3) // 4)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("max_steps", [3, 14])
def test_stages_and_budgets_are_laid_over_the_steps_of_a_run(max_steps, packing, tmp_path):
    options = {"dataset_weights": CHANGING, "dataset_max_tokens": {"tales": 600}, "packing": packing}
    made = trainer(tmp_path, max_steps=max_steps, max_length=48, per_device_train_batch_size=2, **options)
    rows = len(made.train_dataset)
    assert 2 * max_steps <= rows <= 2 * max_steps * (1.1 if packing else 1) + 1
    assert trained_by_source(made, 0, rows)[1] <= 600
    assert trained_by_source(made, 0, 1 if packing else rows // 4)[1] == 0 < trained_by_source(made, rows // 2, rows)[1]
    made.train()
    assert made.state.global_step == max_steps


def source_losses(made):
    """The loss of each source under the weights of now, on whole logits, over the rows of the next batch."""
    batch = next(iter(made.get_train_dataloader()))
    made.model.train()
    logits = made.model(
        input_ids=batch["input_ids"],
        **{name: batch[name] for name in ("attention_mask", "position_ids") if name in batch},
        use_cache=False,
    ).logits[:, :-1]
    labels, sources = batch["labels"][:, 1:], batch["sources"][:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    if made.args.loss_type == "dft":
        losses = losses * (-losses).exp()
    taken = [(sources == i) & (labels != -100) for i in range(2)]
    return [losses[mask].mean().item() for mask in taken], [mask.sum().item() for mask in taken]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing": True},
        {"packing": True, "packing_strategy": "wrapped", "max_length": 24},
        {"padding_free": True},
        {"loss_type": "dft"},
        {"torch_compile": False, "compute_loss_func": True},
    ],
    ids=["padded", "packed", "wrapped", "padding free", "dft", "whole logits"],
)
def test_the_loss_and_the_share_of_each_dataset_are_logged(tmp_path, options):
    options = dict(options)
    whole = options.pop("compute_loss_func", False)
    made = trainer(tmp_path, max_steps=1, **options)
    if whole:
        made._needs_logits = True
    expected, counts = source_losses(trainer(tmp_path, max_steps=1, **options))
    made.train()
    (record,) = records(made)
    for name, loss, count in zip(PARTS, expected, counts, strict=True):
        assert record[f"loss/{name}"] == pytest.approx(loss, rel=1e-4)
        assert record[f"token_share/{name}"] == pytest.approx(count / sum(counts), rel=1e-4)
    assert record["loss"] == pytest.approx(np.average(expected, weights=counts), rel=1e-4)


def test_a_dataset_without_a_token_in_a_record_has_no_loss_there(tmp_path):
    parts = {"maths": MATHS, "tales": TALES[:1]}
    made = trainer(tmp_path, parts, per_device_train_batch_size=1, max_steps=13, train_sampling_strategy="sequential")
    made.train()
    with_tales = [record for record in records(made) if "loss/tales" in record]
    assert len(with_tales) == 1 and with_tales[0]["token_share/tales"] == 1.0 and "loss/maths" not in with_tales[0]
    assert all(record["token_share/tales"] == 0 for record in records(made) if record not in with_tales)


def test_a_collator_of_others_serves_too(tmp_path):
    made = trainer(tmp_path, collator=DataCollatorForSeq2Seq(tiny.tokenizer()), max_steps=1)
    made.train()
    ours = trainer(tmp_path, max_steps=1)
    ours.train()
    for name in ("loss", "loss/maths", "loss/tales"):
        assert records(made)[0][name] == pytest.approx(records(ours)[0][name], rel=1e-5)


def test_the_mixture_trains_as_its_rows_do(tmp_path):
    """The numbers of the sources change nothing: the same rows as one dataset give the same weights."""
    made = trainer(tmp_path, dataset_weights={"maths": 1, "tales": 1})
    rows = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in made.train_dataset]
    plain = trainer(tmp_path, rows)
    made.train()
    plain.train()
    for (name, a), (_, b) in zip(made.model.state_dict().items(), plain.model.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def stream(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


def prepared(lengths):
    """A prepared stream whose rows have these numbers of trained tokens."""
    rows = [{"input_ids": [5, *[6 + i] * n], "labels": [-100, *[6 + i] * n]} for i, n in enumerate(lengths)]
    return IterableDataset.from_generator(lambda: iter(rows))


def test_streams_follow_weights_budgets_and_tokens_to_a_row_and_are_read_again():
    parts = {"maths": prepared([3] * 7), "tales": prepared([4, 2] * 3)}

    def sources(*how, **options):
        rows = list(MixedStream(parts, *how, **options))
        return np.array([row["source"] for row in rows]), np.array([len(row["labels"]) - 1 for row in rows])

    source, _ = sources({"maths": 3, "tales": 1})
    assert [int(part.sum()) for part in np.split(source[:24], 6)] == [1] * 6  # until each was read once
    source, _ = sources(CHANGING, rows=40)
    assert [np.bincount(part, minlength=2).tolist() for part in np.split(source, [10, 20])] == [
        [10, 0],
        [8, 2],
        [10, 10],
    ]
    source, sizes = sources({"maths": 1, "tales": 2}, True, rows=60)
    trained = np.bincount(source, sizes)
    assert abs(2 * trained[0] - trained[1]) < 8
    source, sizes = sources({"maths": 1, "tales": 1}, False, {"maths": 20}, rows=30)
    assert len(source) == 30 and np.bincount(source, sizes)[0] == 18
    source, sizes = sources(CHANGING, False, {"maths": 20, "tales": 10}, rows=30)  # nothing has a weight any more
    assert np.bincount(source, sizes).tolist() == [18, 10] and not source[:6].any()
    packed = MixedStream(parts, CHANGING, False, {"tales": 30}, 12, lambda columns: pack_columns(columns, 12), 12)
    rows = list(packed)
    assert 12 <= len(rows) <= 13 and all(len(row["input_ids"]) <= 12 for row in rows)
    assert {source for row in rows[:3] for source in row["sources"]} == {0}
    assert sum(n - 1 for row in rows for n, s in zip(row["seq_lengths"], row["sources"], strict=True) if s) <= 30
    with pytest.raises(DataError, match="has 2 tokens for 'maths', and none of its rows came within"):
        sources({"maths": 1, "tales": 1}, False, {"maths": 2}, rows=30)
    split = [{name: split_dataset_by_node(part, rank, 2) for name, part in parts.items()} for rank in (0, 1)]
    both = [list(MixedStream(part, {"maths": 1, "tales": 1}, False, {"maths": 20}, rows=30)) for part in split]
    assert [len(rows) for rows in both] == [15, 15] and both[0][0]["input_ids"] != both[1][0]["input_ids"]
    assert sum(len(row["labels"]) - 1 for rows in both for row in rows if row["source"] == 0) == 18
    with pytest.raises(DataError, match="maths, tales some are split over the processes"):
        MixedStream(split[0] | {"tales": parts["tales"]}, {"maths": 1, "tales": 1})
    packed.set_epoch(1)
    assert list(packed) == []  # the run was laid over the first


@pytest.mark.parametrize("rows", [None, 40])
@pytest.mark.parametrize("packed", [False, True])
def test_a_mixture_of_streams_goes_on_at_each_row(packed, rows):
    def make():
        parts = {"maths": prepared([3] * 7).shuffle(seed=1, buffer_size=1), "tales": prepared([4, 2] * 3)}
        pack = (lambda columns: pack_columns(columns, 12), 12) if packed else ()
        weights, budgets = (CHANGING, {"tales": 10}) if rows else ({"maths": 1, "tales": 3}, None)
        return MixedStream(parts, weights, False, budgets, rows, *pack)

    for epoch in (0,) if rows else (0, 2):
        straight, whole, states = make(), [], []
        straight.set_epoch(epoch)
        for row in straight:
            whole.append(row)
            states.append(straight.state_dict())
        assert len(whole) >= (rows or 7)
        assert not rows or packed or sum(len(row["labels"]) - 1 for row in whole if row["source"]) == 10
        for place, state in enumerate(states):
            resumed = make()
            resumed.set_epoch(epoch)
            resumed.load_state_dict(state)
            read = iter(resumed)
            first = list(itertools.islice(read, 2))
            again = make()  # which was resumed before, and is saved after one row or none
            again.set_epoch(epoch)
            again.load_state_dict(resumed.state_dict())
            assert first + list(again) == whole[place + 1 :] == first + list(read)


@pytest.mark.parametrize("rows", [7, 600, 5000])
def test_a_stream_without_trained_tokens_is_refused_where_tokens_are_weighed(rows):
    def masked():
        for _ in range(rows):
            yield {"input_ids": [1, 2, 3], "labels": [-100] * 3}

    parts = {"maths": prepared([3] * 700), "masked": IterableDataset.from_generator(masked)}
    with pytest.raises(DataError, match="The dataset 'masked' of the mixture has no trained tokens, .*leave it out"):
        list(MixedStream(parts, {"maths": 9, "masked": 1}, True, rows=4000))
    read = list(MixedStream(parts, {"maths": 9, "masked": 1}, rows=100))
    assert sum(row["source"] for row in read) == 10


def stopped_and_resumed(make, tmp_path):
    """(a run from beginning to end, one that goes on after step 3 and has the same weights)."""
    straight = make("straight")
    straight.train()
    stopped = make("stopped", save_strategy="steps", save_steps=3)
    stopped.train()
    resumed = make("stopped")
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-3"))
    for (name, a), (_, b) in zip(straight.model.state_dict().items(), resumed.model.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    return straight, resumed


@pytest.mark.parametrize("packed", [False, True])
def test_processes_deal_a_mixture_of_streams_and_go_on_in_another_number(packed):
    def loader(rank=0, world_size=1):
        parts, pack = {"maths": prepared([3] * 7), "tales": prepared([4, 2] * 3)}, ()
        if packed:
            pack = (lambda columns: pack_columns(columns, 12), 12)
        rows = MixedStream(parts, CHANGING, False, {"tales": 60}, 40, *pack)
        return Loader(rows, batch_size=4 // world_size, collate_fn=list, rank=rank, world_size=world_size)

    whole = [row for batch in loader() for row in batch]
    assert len(whole) >= 40
    for stop in (0, 1, 7):
        read, states = [], []
        for rank in (0, 1):
            begun = loader(rank, 2)
            first = list(itertools.islice(begun, stop))
            states.append(begun.state_dict())
            again = loader(rank, 2)
            again.load_state_dict(states[-1])
            read.append([*first, *again])
        dealt = [row for batches in zip(*read, strict=True) for batch in batches for row in batch]
        assert dealt[: len(whole)] == whole and len(dealt) <= len(whole) + 1  # which keeps processes in step
        alone = loader()
        alone.load_state_dict(states[1])
        assert [row for batch in alone for row in batch] == whole[4 * stop :]


KINDS = ["rows", "streams", "staged", "staged streams", "epochs"]
KINDS += [f"packed {kind}" for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_mixture_goes_on_bit_by_bit(tmp_path, kind):
    def make(folder, **changes):
        parts = {name: stream(rows) for name, rows in PARTS.items()} if "streams" in kind else dict(PARTS)
        options = {"dataset_weights": {"maths": 2, "tales": 1}, "packing": "packed" in kind, "max_length": 48}
        if "staged" in kind or "epochs" in kind:
            options |= {"dataset_weights": CHANGING, "dataset_max_tokens": {"tales": 200}}
        options |= {"num_train_epochs": 4, "max_steps": -1} if "epochs" in kind else {"max_steps": 6}
        return trainer(tmp_path / folder, parts, per_device_train_batch_size=2, **options, **changes)

    straight, resumed = stopped_and_resumed(make, tmp_path)
    kept = [{key: value for key, value in record.items() if key.startswith(("loss", "token_share"))}
            for made in (straight, resumed) for record in records(made)]  # fmt: skip
    steps = len(kept) // 2
    assert steps >= 6 and kept[:steps] == kept[steps:] and any("loss/tales" in record for record in kept)


def test_streams_draw_by_weight(tmp_path):
    parts = {name: stream(rows * 40) for name, rows in PARTS.items()}
    made = trainer(tmp_path, parts, dataset_weights={"maths": 3, "tales": 1})
    sources = [row["source"] for row in itertools.islice(made.train_dataset, 400)]
    assert np.mean(sources) == 0.25
    assert sources == [row["source"] for row in itertools.islice(made.train_dataset, 400)]


@pytest.mark.parametrize("whole", [False, True])
def test_a_batch_that_only_keeps_processes_in_step_is_in_no_number_of_the_log(tmp_path, whole):
    made = trainer(tmp_path)
    made._needs_logits = whole
    batch = next(iter(made.get_train_dataloader()))
    made.compute_loss(made.model, as_filler(batch), num_items_in_batch=torch.tensor(10))
    assert made.metrics.drain() == {}
    made.compute_loss(made.model, dict(batch), num_items_in_batch=torch.tensor(10))
    drained = made.metrics.drain()
    assert {"entropy", "mean_token_accuracy", "loss/maths", "token_share/tales"} <= set(drained)


def test_weights_by_the_tokens_of_a_mean_row_are_shares_of_tokens(tmp_path):
    shares, reports = {"maths": 0.3, "tales": 0.7}, trainer(tmp_path).data_reports
    mean = {name: reports[f"train/{name}"].trained_tokens / reports[f"train/{name}"].rows_kept for name in shares}
    weights = {name: share / mean[name] for name, share in shares.items()}
    parts = {name: rows * 20 for name, rows in PARTS.items()}
    rows = trainer(tmp_path, parts, dataset_weights=weights).train_dataset
    counts = np.zeros(2)
    for row in rows:
        counts[row["source"]] += np.sum(np.array(row["labels"]) != -100)
    assert counts / counts.sum() == pytest.approx([shares[name] for name in parts], abs=0.02)


def archive(path, texts, ending="txt"):
    """A WebDataset: each row is a file of the archive."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for number, text in enumerate(texts):
            info = tarfile.TarInfo(f"{number:04}.{ending}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))


@pytest.mark.rotated
@pytest.mark.parametrize("packing", [False, True])
def test_streams_from_parquet_and_webdataset_are_mixed_and_go_on_bit_by_bit(packing, tmp_path):
    texts = [row["text"] for row in TALES] * 10
    for shard in range(2):
        archive(tmp_path / f"rows-{shard}.tar", [f"{shard} {number} {text}" for number, text in enumerate(texts)])
    Dataset.from_dict({"txt": [f"{text} {i}" for i, text in enumerate(texts)]}).to_parquet(tmp_path / "rows.parquet")
    source = CommandSource(
        dataset_mixture={
            "archives": {"path": [str(tmp_path / f"rows-{shard}.tar") for shard in range(2)], "weight": 2},
            "table": {"path": str(tmp_path / "rows.parquet"), "weight": 1},
        },
        dataset_streaming=True,
        rename_columns={"txt": "text"},
    )

    def make(folder, **changes):
        options = {"dataset_weights": source.weights(), "packing": packing, "max_length": 48, "max_steps": 6}
        return trainer(tmp_path / folder, source.load()[0], per_device_train_batch_size=2, **options, **changes)

    _, resumed = stopped_and_resumed(make, tmp_path)
    assert {"loss/archives", "loss/table"} <= {key for record in records(resumed) for key in record}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("damage", ["header", "end"])
def test_an_archive_that_is_damaged_is_named_and_not_read_up_to_there(damage, streaming, tmp_path):
    for shard in range(2):
        archive(tmp_path / f"rows-{shard}.tar", tiny.CORPUS * 3)
    whole, size = (tmp_path / "rows-1.tar").read_bytes(), 2 * tarfile.BLOCKSIZE  # of a row with its header
    changed = whole[: 4 * size] + b"\xff" * size + whole[5 * size :] if damage == "header" else whole[: 4 * size + 100]
    (tmp_path / "rows-1.tar").write_bytes(changed)
    for name in (str(tmp_path), [str(tmp_path / f"rows-{shard}.tar") for shard in range(2)]):
        with pytest.raises(DataError, match=rf"rows-1.tar is damaged behind its file 4, at byte {4 * size}"):
            CommandSource(dataset_name=name, dataset_streaming=streaming).load()


# What cannot be mixed


def alike(rows, label=1):
    columns = {"input_ids": [[1, 2, 3]] * rows, "labels": [[label] * 3] * rows}
    return Dataset.from_dict(columns, features=Features(dict.fromkeys(columns, List(Value("int64")))))


@pytest.mark.parametrize("rows", [None, 12], ids=["epochs", "run"])
def test_a_stream_that_runs_dry_is_named_where_its_weight_cannot_be_met(rows):
    open_iterator = iter([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 3)

    def once():
        yield from open_iterator

    weights, whole = {"maths": 1, "tales": 1}, alike(30)
    empty = alike(3).to_iterable_dataset().filter(lambda row: False)
    for stream in (empty, IterableDataset.from_generator(once)):
        with pytest.raises(DataError, match="'tales' of the mixture gives no rows when it is read from its start"):
            list(MixedStream({"maths": whole, "tales": stream}, weights, rows=rows))
    again = MixedStream({"maths": alike(1), "tales": whole.to_iterable_dataset()}, weights, rows=rows)
    assert len(list(again)) == (rows or 61)  # one that can be read again is, until the other has ended


@pytest.mark.parametrize(
    ("empty", "by_tokens", "said"), [(alike(0), False, "no rows"), (alike(2, -100), True, "no trained tokens")]
)
def test_a_dataset_whose_weight_cannot_be_met_is_named(empty, by_tokens, said):
    with pytest.raises(DataError, match=f"'tales' of the mixture has {said}"):
        mix_datasets({"maths": alike(4), "tales": empty}, {"maths": 1, "tales": 1}, by_tokens)


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ({}, {}, "an empty dict"),
        ({"train": MATHS, "test": TALES}, {}, r"dict of splits \(train, test\)"),
        (DatasetDict(a=Dataset.from_list(MATHS)), {}, "dict of splits"),
        ({"text": ["a", "b"]}, {}, "a list of strs and not of rows"),
        (PARTS, {"dataset_weights": {"maths": 1}}, "has None for 'tales'"),
        (PARTS, {"dataset_weights": {"maths": 1, "tales": 0}}, "number above 0"),
        (PARTS, {"dataset_weights": {"maths": 1, "tales": "many"}}, "has 'many' for 'tales'"),
        (PARTS, {"dataset_weights": {"maths": 1, "tale": 1}}, "names 'tale', did you mean 'tales'"),
        (PARTS, {"dataset_weights": {"maths": 1, "tales": {"late": 1}}}, "changes at shares of the run, from 0"),
        (PARTS, {"dataset_weights": {"maths": 1, "tales": {1: 1}}}, "from 0 to below 1"),
        (PARTS, {"dataset_weights": {"maths": 1, "tales": {0: 0, 0.5: 0}}}, "number above 0"),
        (PARTS, {"dataset_weights": {"maths": {0.5: 1}, "tales": {0.25: 1}}}, "no weight above 0 at 0 of the run"),
        (PARTS, {"dataset_max_tokens": {"tale": 9}}, "dataset_max_tokens names 'tale', did you mean 'tales'"),
        (PARTS, {"dataset_max_tokens": {"tales": "many"}}, "has 'many' for 'tales', which is no number of tokens"),
        (PARTS, {"dataset_max_tokens": {"tales": 1}}, "has 1 tokens for 'tales', and none of its rows"),
        (MATHS, {"dataset_max_tokens": {"maths": 9}}, "dataset_max_tokens mixes several datasets"),
        (
            {"maths": stream(MATHS), "tales": TALES},
            {"dataset_weights": CHANGING, "max_steps": -1, "max_duration": "100tok"},
            "'maths' is a stream, which has no known length. Set max_steps",
        ),
        (
            {"maths": stream(MATHS), "tales": TALES},
            {"dataset_weights": CHANGING, "dataloader_num_workers": 2},
            "does not know what the others gave. Set dataloader_num_workers to 1 or 0",
        ),
        ({"a": stream(MATHS), "b": TALES}, {}, "needs dataset_weights"),
        (MATHS, {"dataset_weights": {"maths": 1}}, "train_dataset is one"),
        (
            [{"input_ids": [5, 6], "labels": [5, 6]}],
            {"dataset_weights": {"maths": 1}, "dataset_kwargs": {"skip_prepare_dataset": True}},
            "train_dataset is one",
        ),
        (MATHS, {"dataset_weights_of": "tokens"}, "dataset_weights_of='tokens' mixes several datasets"),
        (PARTS, {"dataset_weights_of": "tokens"}, "says what dataset_weights are shares of"),
        (PARTS, {"dataset_kwargs": {"skip_prepare_dataset": True}}, "takes the rows without preparation"),
    ],
)  # fmt: skip
def test_what_cannot_be_mixed_is_refused(tmp_path, parts, options, message):
    with pytest.raises(DataError, match=message):
        SFTTrainer(
            tiny.causal_lm(),
            SFTConfig(str(tmp_path), report_to="none", use_cpu=True, **({"max_steps": 2} | options)),
            train_dataset=parts,
            processing_class=tiny.tokenizer(),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_sampling_strategy": "group_by_length"}, "so does train_sampling_strategy='group_by_length'"),
        ({"max_batch_tokens": 64}, "so does max_batch_tokens=64; set max_batch_tokens=None"),
    ],
)
def test_what_reads_the_rows_of_stages_in_another_order_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        SFTConfig("out", dataset_weights=CHANGING, **options)
    with pytest.raises(ConfigError, match=message):
        SFTConfig("out", dataset_max_tokens={"a": 9}, **options)
    SFTConfig("out", dataset_max_tokens={"a": 9}, num_train_epochs=1, **options)
    if "max_batch_tokens" in options:  # how many rows so many steps have is not known
        with pytest.raises(ConfigError, match=message):
            SFTConfig("out", dataset_max_tokens={"a": 9}, max_steps=9, **options)


def test_a_run_goes_on_with_more_steps_and_a_budget_that_cannot_last_is_named(tmp_path):
    options = {"dataset_weights": CHANGING, "save_strategy": "steps", "save_steps": 3}
    trainer(tmp_path, max_steps=3, **options).train()
    more = trainer(tmp_path, max_steps=5, **options)
    more.train(resume_from_checkpoint=True)
    assert more.state.global_step == 5
    message = "max_steps=9 reads 36 rows, and dataset_max_tokens leave 6. Raise them, leave one out, or set max_steps=1"
    with pytest.raises(DataError, match=message):
        trainer(tmp_path, max_steps=9, dataset_max_tokens={"maths": 10, "tales": 150})


def test_dft_is_refused_with_label_smoothing():
    with pytest.raises(ConfigError, match="set label_smoothing_factor=0"):
        SFTConfig("out", loss_type="dft", label_smoothing_factor=0.1)


def test_dft_learns_and_is_the_same_with_and_without_whole_logits(tmp_path):
    made = [trainer(tmp_path, loss_type="dft", max_steps=8, max_grad_norm=0.0) for _ in range(2)]
    made[1]._needs_logits = True
    for one in made:
        one.train()
    for a, b in zip(records(made[0]), records(made[1]), strict=True):
        for name in ("loss", "loss/maths", "loss/tales", "entropy", "mean_token_accuracy"):
            assert (name in a) == (name in b) and a.get(name, 0) == pytest.approx(b.get(name, 0), rel=1e-4), name
    untrained = trainer(tmp_path).evaluate(TALES)
    assert made[0].evaluate(TALES)["eval_mean_token_accuracy"] > untrained["eval_mean_token_accuracy"] + 0.1
    evaluated = made[0].evaluate(TALES)["eval_loss"]
    assert evaluated == pytest.approx(made[1].evaluate(TALES)["eval_loss"], rel=1e-5)


def test_a_broken_row_of_a_streamed_archive_is_raised_with_the_archive(tmp_path):
    rows = ['{"text": "a"}'] * 12
    for name, broken in (("good.tar", rows), ("bad.tar.gz", [*rows, '{"text": ', *rows])):
        archive(tmp_path / name, broken, "json")
    names = [str(tmp_path / name) for name in ("good.tar", "bad.tar.gz")]
    read = iter(CommandSource(dataset_name=names, dataset_streaming=True).load()[0])
    assert sum(1 for _ in itertools.islice(read, 24)) == 24
    with pytest.raises(DataError, match=r"bad.tar.gz has a row that cannot be read: Expecting value.*leave it out"):
        next(read)
    stream = CommandSource(dataset_name=names, dataset_streaming=True).load()[0]
    first = list(itertools.islice(stream, 15))
    state = stream.state_dict()
    again = CommandSource(dataset_name=names, dataset_streaming=True).load()[0]
    again.load_state_dict(state)
    assert len(first) == 15 and sum(1 for _ in itertools.islice(again, 9)) == 9


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_compressed_archive_that_is_damaged_is_named(damage, streaming, tmp_path):
    texts = [f"{number} {text}" for number, text in enumerate(tiny.CORPUS * 20)]
    for shard in range(2):
        archive(tmp_path / f"rows-{shard}.tar.gz", texts)
    name = tmp_path / "rows-1.tar.gz"
    whole = name.read_bytes()
    name.write_bytes(whole[: len(whole) // 2] if damage == "cut" else whole[:-8] + b"abcd" + whole[-4:])
    names = [str(tmp_path / f"rows-{shard}.tar.gz") for shard in range(2)]
    with pytest.raises(DataError, match=r"rows-1.tar.gz cannot be read: .*Copy or make that archive again"):
        for _ in CommandSource(dataset_name=names, dataset_streaming=streaming).load()[0]:
            pass
