"""What is wrong is said before the first step: what happened, where, why, and what to set."""

import json
import logging
import os
import pickle
import re
import signal
import sys

import datasets
import pandas
import pytest
import torch
from datasets import Dataset
from transformers import BartConfig, BartForConditionalGeneration, Qwen3ForCausalLM

from posttrain.core import DataCollatorForSeq2Seq, Trainer, TrainingArguments
from posttrain.core.data import pipeline
from posttrain.core.data.batch_limits import check_limits
from posttrain.core.errors import ConfigError, DataError, NonFiniteError
from posttrain.core.evaluation import eval_loop
from posttrain.core.models import embeddings
from posttrain.lm.loading import arguments
from posttrain.rl import DPOTrainer, GRPOTrainer, KTOTrainer, ORPOTrainer, TPOTrainer
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny
from tests.contract.trainers import pad, preference_rows

RAW = (KeyError, IndexError, AttributeError, StopIteration, AssertionError, ZeroDivisionError)


def base(out, rows, collator=pad, model=None, **changes):
    own = {name: changes.pop(name) for name in ("eval_dataset", "processing_class", "callbacks") if name in changes}
    usual = dict(max_steps=2, use_cpu=True, disable_tqdm=True, save_strategy="no", report_to="none")
    args = TrainingArguments(output_dir=str(out), **(usual | changes))
    return Trainer(model or tiny.causal_lm(), args, data_collator=collator, train_dataset=rows, **own)


def sft(out, rows, model=None, **changes):
    own = ("eval_dataset", "processing_class", "peft_config", "formatting_func", "data_collator")
    own = {name: changes.pop(name) for name in own if name in changes}
    usual = dict(
        max_steps=2, use_cpu=True, disable_tqdm=True, save_strategy="no", max_length=32, gradient_checkpointing=False
    )
    args = SFTConfig(output_dir=str(out), **(usual | changes))
    options = {"processing_class": tiny.tokenizer()} | own
    return SFTTrainer(model or tiny.causal_lm(), args, train_dataset=rows, **options)


def refused(error, *parts, run):
    """`run` raises `error`, whose message holds every one of `parts`, and not what Python raises out of the depths."""
    with pytest.raises(error) as caught:
        run()
    message = str(caught.value)
    assert not isinstance(caught.value, RAW), repr(caught.value)
    assert [part for part in parts if part not in message] == [], message


# ---------------------------------------------------------------------------------------------------- arguments


def test_an_unknown_argument_is_answered_before_a_model_is_loaded(tmp_path):
    folder = tmp_path / "not there"  # would be refused with another error
    wanted = "'dataset', did you mean 'train_dataset'"
    refused(TypeError, "SFTTrainer", wanted, run=lambda: SFTTrainer(str(folder), dataset=[]))
    refused(TypeError, "SFTTrainer", "'train_dateset'", "did you mean 'train_dataset'",
            run=lambda: SFTTrainer(str(folder), train_dateset=[]))  # fmt: skip
    refused(TypeError, "'learning_rate'", "SFTConfig(learning_rate=...)",
            run=lambda: SFTTrainer(str(folder), learning_rate=1e-4))  # fmt: skip
    refused(TypeError, "Trainer", "'processing_clas'", "did you mean 'processing_class'",
            run=lambda: Trainer(tiny.causal_lm(), TrainingArguments(str(tmp_path)), processing_clas=None))  # fmt: skip
    refused(ConfigError, "learning_rat", "did you mean 'learning_rate'", run=lambda: SFTConfig(learning_rat=1))


def test_all_problems_of_a_config_are_told_at_once_and_before_anything_is_touched(tmp_path):
    out = tmp_path / "out"
    refused(
        ConfigError, "per_device_train_batch_size=-4 must be >= 1", "gradient_accumulation_steps=0 must be >= 1",
        "max_length=-3 must be >= 2", "label_smoothing_factor=2 must be < 1", "packing_strategy='bdf'",
        "did you mean 'bfd'", "unknown argument 'pack'", "max_steps=0", "dataset_kwargs='x' is not a JSON object",
        run=lambda: SFTTrainer(
            model=str(tmp_path / "not there"),
            args=SFTConfig(
                str(out), per_device_train_batch_size=-4, gradient_accumulation_steps=0, max_length=-3,
                dataset_kwargs="x", label_smoothing_factor=2, packing_strategy="bdf", pack=True, max_steps=0,
            ),
        ),
    )  # fmt: skip
    assert not out.exists()


def test_an_argument_that_was_made_wrong_after_construction_is_found_too(tmp_path):
    trainer = sft(tmp_path, [{"text": "one two"}])
    trainer.args.gradient_accumulation_steps = 0
    refused(ConfigError, "gradient_accumulation_steps=0 must be >= 1", run=trainer.train)


def test_data_are_looked_at_before_a_model_is_loaded(tmp_path):
    folder = str(tmp_path / "not there")
    for rows, error in (([], DataError), ("openai/gsm8k", TypeError), (5, TypeError), ({"train": []}, DataError)):
        refused(
            error,
            "train_dataset",
            run=lambda rows=rows: SFTTrainer(folder, SFTConfig(str(tmp_path)), train_dataset=rows),
        )
        wanted = (
            (TypeError, "dict") if isinstance(rows, dict) else (error, "dev_dataset")
        )  # parts are mixed to train alone
        refused(*wanted, run=lambda rows=rows: SFTTrainer(
            folder, SFTConfig(str(tmp_path)), train_dataset=[{"text": "a b"}], eval_dataset={"dev": rows}))  # fmt: skip
    refused(
        FileNotFoundError, folder, "does not exist", run=lambda: SFTTrainer(folder, train_dataset=[{"text": "a b"}])
    )


@pytest.mark.parametrize("model", [None, 5, torch.nn.Linear(2, 2), "classifier", "seq2seq"])
def test_what_is_no_causal_language_model_is_refused_by_name(model, tmp_path):
    made = {"classifier": tiny.classifier, "seq2seq": tiny.seq2seq_lm}
    model = made[model]() if model in ("classifier", "seq2seq") else model
    refused(TypeError, type(model).__name__, "causal language model", run=lambda: SFTTrainer(
        model, SFTConfig(str(tmp_path)), train_dataset=[{"text": "a b"}],
        processing_class=tiny.tokenizer()))  # fmt: skip


def test_what_is_no_config_is_refused_by_type(tmp_path):
    for args in ("out", {"output_dir": "out"}):
        refused(TypeError, type(args).__name__, "SFTConfig(output_dir=...)", run=lambda args=args: SFTTrainer(
            tiny.causal_lm(), args, train_dataset=[{"text": "a b"}]))  # fmt: skip


def test_other_arguments_that_cannot_work_are_refused_with_what_can(tmp_path):
    rows = [{"text": "one two"}]
    for changes, error, *parts in (
        ({"eos_token": "<nope>"}, ValueError, "eos_token='<nope>'", "vocabulary"),
        ({"chat_template_path": "/nope/chat.jinja"}, FileNotFoundError, "chat_template_path='/nope/chat.jinja'"),
        ({"peft_config": {"r": 8}}, TypeError, "peft_config", "LoraConfig()", "{'r': 8}"),
        ({"formatting_func": "x"}, TypeError, "formatting_func", "'x'"),
        ({"formatting_func": lambda row: row["question"]}, DataError, "formatting_func", "row 0", "question", "text"),
        ({"processing_class": None}, ValueError, "Pass processing_class"),
        ({"model_init_kwargs": {"dtype": "float32"}}, ValueError, "model_init_kwargs", "A model was passed"),
        ({"assistant_only_loss": True}, DataError, "assistant_only_loss=True needs conversations", "rows 0"),
        ({"completion_only_loss": True}, DataError, "prompt and completion", "assistant_only_loss"),
    ):
        refused(error, *parts, run=lambda changes=changes: sft(tmp_path, rows, **changes))
    refused(DataError, "no chat template", "chat_template_path", run=lambda: sft(
        tmp_path, [{"messages": [{"role": "user", "content": "a"}]}],
        processing_class=tiny.tokenizer(chat_template=None)))  # fmt: skip
    refused(TypeError, "'chat'", run=lambda: SFTTrainer(tiny.causal_lm(), chat="x"))


def test_model_that_is_frozen_is_refused(tmp_path):
    frozen = tiny.causal_lm().requires_grad_(False)
    refused(
        ValueError,
        "no parameter of the model requires a gradient",
        run=sft(tmp_path, [{"text": "a b c"}], frozen).train,
    )


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    for package in ("peft", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, package, None)
    refused(ImportError, "'peft' is not installed", "peft_config", "pip install 'posttrain-core[peft]'",
            run=lambda: sft(tmp_path, [{"text": "a b"}], peft_config=object()))  # fmt: skip
    refused(ImportError, "'bitsandbytes' is not installed", "pip install 'posttrain-core[quantization]'",
            run=lambda: arguments.ModelConfig(load_in_4bit=True, use_peft=True).quantization_config())  # fmt: skip


def test_an_unknown_tracker_is_answered_with_those_known(tmp_path):
    refused(
        ValueError, "tensorbord", "did you mean 'tensorboard'", run=lambda: base(tmp_path, [], report_to="tensorbord")
    )


# ---------------------------------------------------------------------------------------------------- rows for SFT


GOOD = {
    "text": {"text": "one two three"},
    "chat": {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]},
    "completion": {"prompt": "one", "completion": " two"},
    "tokens": {"input_ids": [5, 6, 7], "labels": [5, 6, 7]},
}
BAD = [
    ("text", {"text": None}, "text is null"),
    ("text", {"text": ""}, "text is empty"),
    ("text", {"text": 5}, "not a text but of type int"),
    ("text", None, "not a dict but of type NoneType"),
    ("text", "a string", "not a dict but of type str"),
    ("text", 5, "not a dict but of type int"),
    ("chat", {"messages": None}, "messages is null"),
    ("chat", {"messages": []}, "messages is empty"),
    ("chat", {"messages": "hello"}, "not a list of messages"),
    ("chat", {"messages": [{"content": "x"}]}, "has no role"),
    ("chat", {"messages": [{"role": "user", "content": None}]}, "content of a message in messages is null"),
    ("completion", {"prompt": None, "completion": "x"}, "prompt is null"),
    ("completion", {"prompt": "one", "completion": None}, "completion is null"),
    ("completion", {"prompt": "one", "completion": ""}, "completion is empty"),
    ("completion", {"prompt": "one " * 100, "completion": "x"}, "nothing to train on is left after truncation"),
    ("tokens", {"input_ids": None}, "not a list of whole numbers"),
    ("tokens", {"input_ids": []}, "input_ids is empty"),
    ("tokens", {"input_ids": [5]}, "nothing to train on"),
    ("tokens", {"input_ids": [5.0, 6.5]}, "not a list of whole numbers"),
    ("tokens", {"input_ids": [[5], [6, 7]]}, "not a list of whole numbers"),
    ("tokens", {"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}, "nothing to train on"),
    ("tokens", {"input_ids": [5, 6, 7], "labels": [5]}, "differ in length"),
]


@pytest.mark.parametrize(("kind", "bad", "reason"), BAD)
def test_a_bad_row_is_dropped_counted_and_told_before_training(kind, bad, reason, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "posttrain"):
        trainer = sft(tmp_path, [GOOD[kind], bad, GOOD[kind]])
    (warning,) = [r.getMessage() for r in caplog.records if "dropped" in r.getMessage()]
    assert re.search(rf"dropped 1: .*{reason}", warning), warning
    assert "(rows 1)" in warning
    assert trainer.data_reports["train"].rows_kept == 2
    trainer.train()
    assert trainer.state.global_step == 2
    refused(DataError, "no row can be trained on", reason, "rows 0", run=lambda: sft(tmp_path, [bad, bad]))


def test_columns_that_fit_nothing_are_named_beside_those_that_would(tmp_path):
    for rows in (
        [{"txt": "a"}],
        Dataset.from_list([{"txt": "a"}]),
        Dataset.from_list([{"txt": "a"}]).to_iterable_dataset(),
    ):
        refused(DataError, "train", "['txt']", "input_ids", "messages", "completion and prompt", "dataset_text_field",
                run=lambda rows=rows: sft(tmp_path, rows))  # fmt: skip


@pytest.mark.parametrize("column", ["input_ids", "labels"])
@pytest.mark.parametrize("token", [384, -7])
def test_a_token_that_the_model_does_not_know_is_named_with_its_row_before_training(column, token, tmp_path):
    rows = [GOOD["tokens"], GOOD["tokens"] | {column: [5, token, 7]}]
    refused(DataError, f"{column} holds {token} in row 1", "0 to 383", run=lambda: sft(tmp_path, rows))
    refused(DataError, f"eval: {column} holds {token}", run=lambda: sft(tmp_path, rows[:1], eval_dataset=rows))


def test_streams_that_cannot_work(tmp_path):
    def stream(rows):
        return datasets.IterableDataset.from_generator(lambda: iter(rows))

    refused(
        ValueError,
        "length",
        "Set max_steps",
        run=lambda: sft(tmp_path, stream([GOOD["text"]]), max_steps=-1).train(),
    )
    refused(DataError, "train_dataset has no rows", run=lambda: sft(tmp_path, stream([])))
    refused(
        DataError,
        "no row can be trained on",
        "text is null",
        run=lambda: sft(tmp_path, stream([{"text": None}] * 3)).train(),
    )
    refused(TypeError, "generator", "once", "list(...)", run=lambda: sft(tmp_path, (row for row in [GOOD["text"]])))


def test_fewer_rows_than_a_batch_are_trained_on_unless_they_are_all_dropped(tmp_path):
    trainer = sft(tmp_path, [GOOD["text"]] * 3, per_device_train_batch_size=8)
    trainer.train()
    assert trainer.state.global_step == 2 and trainer.state.epoch == 2.0
    for make, rows in ((sft, [GOOD["text"]] * 3), (base, tiny.token_rows(3))):
        refused(ValueError, "no batch", "dataloader_drop_last=True", "per_device_train_batch_size",
                run=lambda make=make, rows=rows: make(tmp_path, rows, dataloader_drop_last=True).train())  # fmt: skip


def test_no_data_at_all_is_said_when_they_are_needed(tmp_path):
    trainer = base(tmp_path, None)
    refused(ValueError, "training requires a train_dataset", run=trainer.train)
    refused(ValueError, "evaluation requires an eval_dataset", run=trainer.evaluate)
    refused(ValueError, "`train_dataset` is required", "eval_dataset", run=lambda: sft(tmp_path, None))


# ---------------------------------------------------------------------------------------------------- rows for Trainer


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class WithoutLength:
    def __getitem__(self, i):
        return GOOD["tokens"]


SEEN = {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        (None, ["type NoneType", "dict"]),
        ("text", ["type str", "dict"]),
        (5, ["type int", "dict"]),
        ([5, 6], ["type list", "dict"]),
        ({"text": "a"}, ["Found: text", "Wanted:", "input_ids", "remove_unused_columns=False"]),
        (SEEN | {"labels": None}, ["'labels'", "null", "row "]),
        ({"input_ids": [5, 6, 7], "attention_mask": None, "labels": [5, 6, 7]}, ["'attention_mask'", "null"]),
        (SEEN | {"labels": [5, 6]}, ["'labels'", "data_collator"]),
        ({"input_ids": [[5], [6, 7]], "attention_mask": [1, 1], "labels": [5, 6]}, ["'input_ids'"]),
    ],
    ids=str,
)
def test_rows_that_make_no_batch_are_named_with_the_reason(row, parts, tmp_path):
    rows = [SEEN | {"labels": [5, 6, 7]}, row]
    trainer = base(tmp_path, Rows(rows), None, train_sampling_strategy="sequential")
    refused(
        DataError,
        "Rows 0, 1 of the dataset could not be made into a batch by default_data_collator",
        *parts,
        run=trainer.train,
    )


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        (
            [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [5], "labels": [5]}],
            ["'labels'", "DataCollatorForSeq2Seq"],
        ),
        ([{"labels": 1, "text": "a"}] * 2, ["no column 'input_ids'", "Tokenize"]),
        ([{"input_ids": [5], "label": "good"}] * 2, ["'label' holds null or text"]),
        ([{"input_ids": [5], "label": None}] * 2, ["'label' holds null or text"]),
    ],
    ids=["ragged-labels", "not-tokenized", "label-text", "label-null"],
)
def test_rows_that_the_tokenizer_cannot_pad_are_named_with_the_remedy(rows, parts, tmp_path):
    for dataset in (rows, Dataset.from_list(rows)):
        trainer = base(
            tmp_path, dataset, None, tiny.classifier(), processing_class=tiny.tokenizer(), remove_unused_columns=False
        )
        refused(DataError, "could not be made into a batch by DataCollatorWithPadding", *parts, run=trainer.train)
    remedied = base(tmp_path, tiny.token_rows(4), DataCollatorForSeq2Seq(tiny.tokenizer()))
    remedied.train()
    assert remedied.state.global_step == 2


@pytest.mark.parametrize(
    ("collator", "parts"),
    [
        (lambda rows: None, ["returned None", "return statement"]),
        (lambda rows: rows[0]["nope"], ["KeyError: 'nope'", "input_ids (list)"]),
        (lambda rows: rows[99], ["IndexError"]),
        (lambda rows: torch.tensor([row["input_ids"] for row in rows]), ["ValueError", "length"]),
    ],
    ids=["none", "key", "index", "ragged"],
)
def test_an_error_in_a_collator_names_it_and_its_rows(collator, parts, tmp_path):
    trainer = base(tmp_path, tiny.token_rows(8), collator, train_sampling_strategy="sequential")
    refused(DataError, "Rows 0, 1, 2, 3, 4, 5, 6, 7 of the dataset", "<lambda>", *parts, run=trainer.train)


def test_an_error_in_a_worker_says_the_same(tmp_path):
    trainer = base(tmp_path, tiny.token_rows(2), lambda rows: rows[99], dataloader_num_workers=1)
    refused(DataError, "of the dataset could not be made into a batch by <lambda>", "IndexError", run=trainer.train)
    with pytest.raises(DataError, match=r"^Rows [01], [01] of the dataset") as caught:  # not the worker's traceback
        trainer.train()
    assert "in DataLoader worker process 0" in str(caught.value.__cause__)


class Ending(torch.utils.data.Dataset):
    """Row 17 ends the process that reads it."""

    def __init__(self, end):
        self.end, self.rows = end, tiny.token_rows(32)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        if i == 17:
            self.end()
        return self.rows[i]


@pytest.mark.parametrize(
    ("end", "parts"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), ["by SIGKILL", "memory", "smaller dataloader_num_workers"]),
        (lambda: os.kill(os.getpid(), signal.SIGBUS), ["by SIGBUS", "/dev/shm", "--shm-size"]),
        (lambda: os._exit(3), ["with exit code 3", "dataloader_num_workers=0"]),
    ],
    ids=["killed", "no shared memory", "exit"],
)
def test_a_worker_that_ends_is_named_with_its_rows_the_cause_and_what_to_set(end, parts, tmp_path):
    run = base(tmp_path, Ending(end), dataloader_num_workers=2, train_sampling_strategy="sequential", max_steps=4)
    with pytest.raises(RuntimeError, match="DataLoader worker") as caught:
        run.train()
    (note,) = [note for note in caught.value.__notes__ if note.startswith("Worker ")]
    assert note.startswith("Worker 0 of 2 (dataloader_num_workers) ended ")
    assert all(part in note for part in parts)


def test_an_evaluation_names_a_worker_that_ends_and_its_rows(tmp_path):
    run = base(tmp_path, Ending(lambda: None), dataloader_num_workers=1, per_device_eval_batch_size=4)
    with pytest.raises(RuntimeError, match="DataLoader worker") as caught:
        run.evaluate(Ending(lambda: os._exit(3)))
    (note,) = [note for note in caught.value.__notes__ if note.startswith("Worker ")]
    assert re.search(
        r"while it read rows of the dataset among these: .*16, 17, 18, 19.*; it ended with exit code 3", note
    )


def test_what_workers_cannot_be_given_is_named(tmp_path):
    run = base(tmp_path, Ending(lambda: None), dataloader_num_workers=1, dataloader_multiprocessing_context="spawn")
    with pytest.raises((AttributeError, pickle.PicklingError)) as caught:
        run.train()
    assert any("dataloader_num_workers=0" in note and "spawn" in note for note in caught.value.__notes__)


def test_an_error_in_a_dataset_names_the_rows_and_keeps_its_type_where_that_says_something(tmp_path):
    class Broken(Rows):
        def __getitem__(self, i):
            raise self.rows[i]

    refused(DataError, "Rows 0 of the dataset could not be read: IndexError: list index out of range",
            run=base(tmp_path, Broken([IndexError("list index out of range")])).train)  # fmt: skip
    with pytest.raises(FileNotFoundError, match="picture.png") as caught:
        base(tmp_path, Broken([FileNotFoundError("picture.png")])).train()
    assert caught.value.__notes__ == ["Rows 0 of the dataset could not be read."]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stop_iteration_of_a_dataset_or_a_collator_does_not_end_the_run_without_a_word(workers, tmp_path):
    class Ends(Rows):
        def __getitem__(self, i):
            return next(iter(())) if i == 3 else self.rows[i]

    def collate(rows):
        return next(iter(()))

    rows = tiny.token_rows(8)
    with pytest.raises(DataError, match=r"3.* of the dataset could not be read: StopIteration"):
        base(tmp_path / "rows", Ends(rows), dataloader_num_workers=workers).train()
    with pytest.raises(DataError, match="could not be made into a batch by collate: StopIteration"):
        base(tmp_path / "batches", rows, collate, dataloader_num_workers=workers).train()


@pytest.mark.parametrize(
    ("rows", "error", "parts"),
    [
        ([], DataError, ["train_dataset has no rows"]),
        (Dataset.from_dict({"input_ids": []}), DataError, ["train_dataset has no rows"]),
        ("data.jsonl", TypeError, ["the string 'data.jsonl'", "__getitem__"]),
        (5, TypeError, ["type int"]),
        ({"input_ids": [[1]]}, TypeError, ["dict of datasets (input_ids)"]),
        (WithoutLength(), TypeError, ["WithoutLength", "__len__"]),
        (pandas.DataFrame({"input_ids": [[1]]}), TypeError, ["DataFrame", "from_pandas"]),
        (Dataset.from_dict({"txt": ["a"]}), DataError, ["Found: txt", "Wanted:"]),
    ],
    ids=["empty", "empty-arrow", "string", "int", "dict", "no-length", "frame", "columns"],
)
def test_what_is_no_training_set_is_refused(rows, error, parts, tmp_path):
    refused(error, *parts, run=lambda: base(tmp_path, rows).train())


def test_a_stream_without_max_steps_says_what_to_set(tmp_path):
    stream = Dataset.from_list(tiny.token_rows(4)).to_iterable_dataset()
    refused(ValueError, "length", "Set max_steps", run=lambda: base(tmp_path, stream, max_steps=-1).train())


def test_inputs_without_labels_say_how_to_get_a_loss(tmp_path):
    refused(
        ValueError,
        "no loss",
        "input_ids",
        "compute_loss_func",
        run=base(tmp_path, [{"input_ids": [5, 6]}] * 2, None).train,
    )


@pytest.mark.parametrize("make", [base, sft])
def test_labels_that_are_all_masked_never_count_as_a_loss_of_zero(make, tmp_path):
    rows = [{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [-100] * 3}] * 4
    changes = {"dataset_kwargs": {"skip_prepare_dataset": True}} if make is sft else {}
    trainer = make(tmp_path, rows, **changes)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    refused(NonFiniteError, "-100", run=trainer.train)
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))


def test_a_nan_in_the_data_stops_the_run_with_the_weights_untouched(tmp_path):
    class Line(torch.nn.Linear):
        def forward(self, x, labels):
            return {"loss": (super().forward(x)[:, 0] - labels).square().mean()}

    model = Line(2, 1)
    before = model.weight.clone()
    trainer = base(tmp_path, [{"x": [1.0, float("nan")], "labels": 1.0}] * 4, None, model, max_grad_norm=0)
    refused(NonFiniteError, "Step 1", "nan", "not applied", "rows of this batch", run=trainer.train)
    assert torch.equal(model.weight, before)


# ---------------------------------------------------------------------------------------------------- limits of a model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: tiny.causal_lm(), {"input_ids": 384, "labels": 384, "labels_per_token": 1, "context": 512}),
        (
            lambda: tiny.causal_lm("gpt2", n_positions=64),
            {"input_ids": 384, "labels": 384, "labels_per_token": 1, "positions": 64, "context": 64},
        ),
        (lambda: tiny.classifier(num_labels=3), {"input_ids": 384, "labels": 3, "positions": 64, "context": 64}),
        (lambda: tiny.classifier(num_labels=1), {"input_ids": 384, "positions": 64, "context": 64}),  # a regression
        (lambda: tiny.seq2seq_lm(), {"input_ids": 384, "labels": 384}),
        (lambda: torch.nn.Linear(2, 2), {}),
    ],
    ids=["qwen3", "gpt2", "classifier", "regression", "t5", "linear"],
)
def test_the_limits_of_a_model_are_read_off_it(model, expected):
    assert embeddings.id_limits(model()) == expected


@pytest.mark.parametrize(
    ("model", "row", "parts"),
    [
        (
            tiny.causal_lm,
            {"input_ids": [5, 600, 7]},
            ["input_ids holds 600 in row 1", "0 to 383", "resize_token_embeddings"],
        ),
        (tiny.causal_lm, {"input_ids": [5, -1, 7]}, ["input_ids holds -1 in row 1"]),
        (tiny.causal_lm, {"labels": [5, 6, 999]}, ["labels holds 999 in row 1", "-100"]),
        (tiny.causal_lm, {"labels": [5, 6, -1]}, ["labels holds -1 in row 1"]),
        (tiny.classifier, {"labels": 3}, ["labels holds 3 in row 1", "0 to 2"]),
        (tiny.classifier, {"input_ids": [5] * 65, "attention_mask": [1] * 65}, ["65 tokens", "positions for 64"]),
    ],
    ids=["input", "negative-input", "label", "negative-label", "class", "too-long"],
)
def test_a_batch_that_the_model_cannot_read_is_refused_before_it_reaches_it(model, row, parts):
    model = model()
    good = SEEN | {"labels": [5, 6, 7] if isinstance(model, Qwen3ForCausalLM) else 1}
    args = TrainingArguments("unused", per_device_train_batch_size=2, dataloader_pin_memory=False)
    collator, limits = pipeline.default_collator(tiny.tokenizer()), embeddings.id_limits(model)
    loader = tiny.build_loader(Rows([good, good | row]), True, args, collator, device="cuda", limits=limits)
    refused(DataError, "Rows 0, 1 of the dataset", *parts, run=lambda: next(iter(loader)))


LONG = {
    "sft": (sft, {"text": "word " * 30}, {}),
    "sft-packed": (sft, {"text": "word " * 30}, {"packing": True}),
    "dpo": (DPOTrainer, {"prompt": "Say", "chosen": " a" * 90, "rejected": " b"}, {}),
    "kto": (KTOTrainer, {"prompt": "Say", "completion": " a" * 90, "label": True}, {}),
    "orpo": (ORPOTrainer, {"prompt": "Say " * 30, "chosen": " a", "rejected": " b"}, {"truncation_mode": "keep_end"}),
    "tpo": (TPOTrainer, {"prompt": "Say", "chosen": " a", "rejected": " b", "reference": " c" * 90}, {}),
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", LONG)
def test_rows_longer_than_the_positions_of_a_model_are_refused_and_others_named(kind, streams, tmp_path, caplog):
    """Behind its positions a model with a table raises an IndexError, which on a GPU ends the process."""
    make, row, options = LONG[kind]
    short = {name: value[:9] if isinstance(value, str) else value for name, value in row.items()}
    every = [short, short, short | {"label": False} if "label" in short else short, row]
    rows = datasets.IterableDataset.from_generator(lambda: iter(every)) if streams else every

    def train(model):
        if make is sft:
            made = sft(tmp_path, rows, model, max_steps=4, max_length=1024, **options)
        else:
            common = dict(per_device_train_batch_size=2, use_cpu=True, max_steps=4, report_to="none")
            args = make.config_class(str(tmp_path), **common, **options)
            made = make(model, args=args, train_dataset=rows, processing_class=tiny.tokenizer())
        made.train()

    with pytest.raises(DataError, match="a row has .* tokens, and the model has positions for 64. Set max_length=64"):
        train(tiny.causal_lm("gpt2", n_positions=64))
    train(tiny.causal_lm(max_position_embeddings=64))
    assert caplog.text.count("was made to read 64") == 1
    train(tiny.causal_lm(max_position_embeddings=64, rope_parameters={"rope_type": "yarn", "factor": 16.0}))
    assert caplog.text.count("was made to read") == 1


def test_labels_that_padding_would_put_at_other_tokens_are_refused(tmp_path, caplog):
    rows = [SEEN | {"labels": [5, 6, 7]}, SEEN | {"labels": [7]}]
    padded = DataCollatorForSeq2Seq(tiny.tokenizer())
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=2, per_device_train_batch_size=2)
    trainer = Trainer(tiny.causal_lm(), args, padded, rows)
    parts = ["Row 1 of the dataset has 3 input_ids and 1 labels", "DataCollatorForSeq2Seq", "-100"]
    refused(DataError, *parts, run=trainer.train)
    # A collator of the user's may make up the labels that are missing: it is asked, once.
    Trainer(tiny.causal_lm(), args, lambda rows: padded([row | {"labels": [5, 6, 7]} for row in rows]), rows).train()
    assert caplog.text.count("labels are at the wrong tokens") == 1
    # A model with an encoder has targets of any length.
    Trainer(tiny.seq2seq_lm(), args, padded, rows).train()
    assert caplog.text.count("labels are at the wrong tokens") == 1


def test_labels_of_minus_100_and_multi_label_rows_are_within_the_limits():
    limits = {"input_ids": 10, "labels": 3, "positions": 4}
    check_limits({"input_ids": torch.tensor([[0, 9]]), "labels": torch.tensor([[-100, 2]])}, limits)
    check_limits({"labels": torch.tensor([[0.0, 7.0]]), "input_ids": torch.zeros(0, 4, dtype=torch.long)}, limits)
    check_limits(
        {"input_ids": torch.zeros(1, 9, dtype=torch.long), "position_ids": torch.zeros(1, 9)}, limits
    )  # packed
    check_limits([torch.tensor([99])], limits)
    refused(DataError, "empty rows", run=lambda: check_limits({"input_ids": torch.tensor([[], []])}, limits))


def test_the_report_of_the_rows_is_plain_data(tmp_path):
    trainer = sft(tmp_path, [GOOD["text"], {"text": None}])
    report = json.loads(json.dumps(trainer.data_reports["train"].to_dict()))
    assert report["dropped"] == {"text is null": [1, [1]]} and report["rows_in"] == 2 and report["rows_kept"] == 1


# ---------------------------------------------------------------------------------------------------- forward passes


def classes(length=8, **changes):
    return [{"input_ids": [5] * length, "attention_mask": [1] * length, "label": 1} | changes] * 4


@pytest.mark.parametrize("evaluating", [False, True])
@pytest.mark.parametrize(
    ("rows", "model", "parts"),
    [
        (classes(100), {}, ["100 tokens", "positions for 64"]),
        (classes(input_ids=None), {}, ["reads input_ids", "attention_mask, labels", "null"]),
        (classes(label=1.0), {}, ["labels are fractions", "0 to 2", "num_labels=1"]),
        (classes(label=None, labels=[1, 0, 1]), {"problem_type": "multi_label_classification"}, ["0.0 and 1.0"]),
        (classes(label="good"), {}, ["returned no loss", "a column of texts"]),
    ],
    ids=["too-long", "no-ids", "fractions", "whole-numbers", "texts"],
)
def test_a_batch_that_the_model_failed_on_is_explained(rows, model, parts, evaluating, tmp_path):
    trainer = base(tmp_path, rows, None, tiny.classifier(**model), eval_dataset=rows)
    if evaluating and "returned no loss" in parts:
        assert "eval_loss" not in trainer.evaluate()
    else:
        refused((DataError, ValueError), *parts, run=trainer.evaluate if evaluating else trainer.train)


@pytest.mark.parametrize(
    ("read", "written", "said"), [(65, 5, "these rows has 65"), (5, 65, "label of these rows has")]
)
def test_rows_and_labels_beyond_the_positions_of_an_encoder_decoder_are_named(read, written, said, tmp_path):
    size = dict(vocab_size=384, d_model=16, max_position_embeddings=64, encoder_layers=1, decoder_layers=1)
    size |= {f"{part}_{name}": 16 for part in ("encoder", "decoder") for name in ("ffn_dim", "attention_heads")}
    model = BartForConditionalGeneration(BartConfig(**size, pad_token_id=0, bos_token_id=2, eos_token_id=1))
    rows = [{"input_ids": [5] * read, "attention_mask": [1] * read, "labels": [5] * written}] * 8
    refused(DataError, said, "positions for 64", run=base(tmp_path, rows, model=model).train)


def test_labels_of_another_length_than_the_tokens_are_explained_for_a_collator_of_ones_own(tmp_path):
    def collate(rows):
        return {"input_ids": torch.tensor([[5, 6]] * len(rows)), "labels": torch.tensor([[5, 6, 7]] * len(rows))}

    trainer = base(tmp_path, tiny.token_rows(8), collate)
    refused(DataError, "input_ids has the shape (8, 2) and labels (8, 3)", run=trainer.train)


def test_a_column_that_a_collator_of_ones_own_does_not_make_is_seen_from_what_it_makes(tmp_path):
    ids = torch.full((8, 4), 5)
    batch = {"input_ids": ids, "attention_mask": ids > 0}
    trainer = sft(tmp_path, [{"text": "one two"}] * 8, data_collator=lambda rows: batch)
    with pytest.raises(KeyError, match="labels") as caught:
        trainer.train()
    assert caught.value.__notes__ == ["The batch holds input_ids, attention_mask."]


def test_texts_that_nobody_tokenized_are_named(tmp_path):
    rows = Dataset.from_dict({"text": ["a b", "c d"], "label": [0, 1]})
    refused(DataError, "reads input_ids", "only labels", "tokenizer(row['text'])",
            run=base(tmp_path, rows, None).train)  # fmt: skip


def test_a_model_may_return_its_loss_alone(tmp_path):
    class Mean(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, input_ids):
            return self.weight * input_ids.float().mean()

    trainer = base(tmp_path, [{"input_ids": [4, 6]}] * 4, None, Mean())
    trainer.train()
    assert trainer.model.weight < 1


def test_a_loss_without_a_gradient_is_refused(tmp_path):
    class Detached(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).loss.detach()

    args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, disable_tqdm=True, report_to="none")
    rows = tiny.token_rows(4)
    refused(ValueError, "no gradient", "detaches",
            run=Detached(tiny.causal_lm(), args, data_collator=pad, train_dataset=rows).train)  # fmt: skip


@pytest.mark.parametrize("returned", [0.5, None, ("accuracy", 0.5)])
def test_metrics_that_are_no_dict_are_refused(returned, tmp_path):
    trainer = base(tmp_path, None, eval_dataset=tiny.token_rows(4))
    trainer.compute_metrics = lambda predicted: returned
    refused(TypeError, "compute_metrics returned", type(returned).__name__, "{'accuracy': 0.5}", run=trainer.evaluate)


def test_an_evaluation_set_that_is_not_there_is_answered_with_those_that_are(tmp_path):
    named = base(tmp_path, None, eval_dataset={"maths": tiny.token_rows(4)})
    refused(ValueError, "'math'", "maths", run=lambda: named.evaluate("math"))
    alone = base(tmp_path, None, eval_dataset=tiny.token_rows(4))
    refused(ValueError, "'math'", "no dict", run=lambda: alone.evaluate("math"))


def test_an_evaluation_of_which_no_batch_is_left_says_so(tmp_path, caplog):
    trainer = base(tmp_path, None, eval_dataset=tiny.token_rows(7), dataloader_drop_last=True)
    assert "eval_loss" not in trainer.evaluate()
    assert "7 rows, less than one batch of 8" in caplog.text and "per_device_eval_batch_size to 7" in caplog.text
    trainer.args.per_device_eval_batch_size = 7
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("trainer", [DPOTrainer, KTOTrainer, ORPOTrainer, GRPOTrainer])
def test_a_classifier_is_refused_where_next_tokens_are_needed(trainer, tmp_path):
    args = trainer.config_class(str(tmp_path), use_cpu=True, report_to="none")
    rows, rewards = preference_rows(8), {"reward_funcs": len} if trainer is GRPOTrainer else {}
    refused(TypeError, "Qwen3ForSequenceClassification", "causal language model",
            run=lambda: trainer(tiny.reward_model(), args=args, train_dataset=rows,
                                processing_class=tiny.tokenizer(), **rewards))  # fmt: skip


@pytest.mark.parametrize(
    ("run", "error", "parts"),
    [
        (lambda out: TrainingArguments(str(out), tp_size=2), ConfigError, ["tp_size=2", "parallelism_config={"]),
        (lambda out: base(out, tiny.token_rows(2)).predict([]), DataError, ["test_dataset has no rows"]),
        (
            lambda out: sft(out, Dataset.from_list([{"text": None}] * 256).to_iterable_dataset()).train(), DataError,
            ["gave not one batch", "dropped 256: text is null (rows 0, 1, 2, 3, 4, ...)"],
        ),
        (lambda out: eval_loop.named_metric({"eval_acc": 1.0}, "eval_ac"), KeyError, ["'eval_acc'? Return it"]),
    ],
)  # fmt: skip
def test_a_sentence_says_where_to_look(run, error, parts, tmp_path):
    with pytest.raises(error) as caught:
        run(tmp_path)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_data_frame_is_refused_with_what_to_make_of_it_by_sft_too(tmp_path):
    refused(TypeError, "DataFrame", "datasets.Dataset.from_pandas(frame)",
            run=lambda: sft(tmp_path, pandas.DataFrame([{"text": "two"}])))  # fmt: skip
