"""``run.json``: what a run was, without secrets, once for each start."""

import itertools
import json
import subprocess
import sys
from importlib import metadata

import datasets
import psutil
import pytest

from posttrain.cli.report import run_record
from posttrain.core import Trainer, TrainingArguments
from posttrain.core.errors import CheckpointError, ConfigError
from tests import tiny
from tests.contract.trainers import pad


def trained(folder, steps=2, resume=None, **options):
    args = TrainingArguments(
        str(folder), max_steps=steps, save_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, seed=7, **options
    )
    trainer = Trainer(tiny.causal_lm(), args, pad, train_dataset=tiny.token_rows(8))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_a_run_leaves_its_record_and_one_that_goes_on_adds_to_it(tmp_path):
    trainer = trained(tmp_path)
    (first,) = run_record.read(tmp_path)["starts"]
    assert first["arguments"]["seed"] == 7 and first["arguments"] == json.loads(trainer.args.to_json_string())
    assert first["model"]["parameters"] == sum(p.numel() for p in trainer.model.parameters())
    assert first["data"]["rows"] == 8 and first["packages"]["torch"] == metadata.version("torch")
    assert (first["from_step"], first["processes"], first["asked"]) == (0, 1, None)
    assert first["command"][0] == sys.orig_argv[0]
    trained(tmp_path, steps=3, resume=True)
    assert [start["from_step"] for start in run_record.read(tmp_path)["starts"]] == [0, 2]
    trained(tmp_path, overwrite_output_dir=True)
    assert [start["from_step"] for start in run_record.read(tmp_path)["starts"]] == [0]


def test_a_run_needs_no_working_directory(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    trained(tmp_path / "before")  # what is imported on the way asks for it
    gone.rmdir()
    trained(tmp_path / "out")
    (first,) = run_record.read(tmp_path / "out")["starts"]
    assert first["directory"] is None
    with pytest.raises(ConfigError, match="output_dir='out' is relative to the working directory, which has been del"):
        trained("out")


def test_no_secret_is_written_down(tmp_path, monkeypatch):
    words = ["python", "train.py", "--hub_token", "abc123", "--hub-token=abc123", "--eos_token", "<end>", "--seed", "3"]
    monkeypatch.setattr(sys, "orig_argv", words)
    with run_record.asked("sft", {"hub_token": "abc123", "eos_token": "<end>"}):
        trained(tmp_path, hub_token="abc123")
    assert "abc123" not in (tmp_path / run_record.RECORD).read_text()
    (first,) = run_record.read(tmp_path)["starts"]
    shown = ["--hub_token", "***", "--hub-token=***", "--eos_token", "<end>", "--seed", "3"]
    assert first["command"][2:] == shown
    assert first["asked"] == {"method": "sft", "settings": {"eos_token": "<end>"}}


def test_rows_are_told_by_what_they_hold():
    rows = [{"text": f"row {i}", "n": [i, i + 1]} for i in range(50)]
    whole = datasets.Dataset.from_list(rows)
    known = run_record.of_rows(whole)
    assert known["rows"] == 50 and known["columns"] == ["text", "n"]
    again = datasets.concatenate_datasets([whole.select(range(20)), whole.select(range(20, 50))])  # cut in other pieces
    assert run_record.of_rows(again) == known
    for other in (
        whole.select([*range(1, 50), 0]),
        datasets.Dataset.from_list([*rows[:-1], rows[-1] | {"text": "another"}]),
        whole.rename_column("n", "m"),
    ):
        assert run_record.of_rows(other)["xxh128"] != known["xxh128"]
    assert run_record.of_rows(iter(rows)) == {"class": "list_iterator"}


def test_of_many_rows_the_first_and_the_last_count(monkeypatch):
    monkeypatch.setattr(run_record, "HASHED_ROWS", 10)
    values = list(range(1000))
    known = run_record.of_rows(datasets.Dataset.from_dict({"n": values}))
    for changed in (0, 999):
        other = [-1 if i == changed else i for i in values]
        assert run_record.of_rows(datasets.Dataset.from_dict({"n": other}))["xxh128"] != known["xxh128"]


def test_large_rows_cost_a_run_little_memory(tmp_path):
    def large():
        for number in range(64):
            yield {"sound": bytes([number]) * 2**21}

    rows = datasets.Dataset.from_generator(large, cache_dir=str(tmp_path), keep_in_memory=False)
    process = psutil.Process()
    before = process.memory_info().rss
    known = run_record.of_rows(rows)
    assert process.memory_info().rss - before < 64 * 2**20  # of 128 MiB
    changed = rows.select(range(63)).with_format("arrow")
    assert known["rows"] == 64 and run_record.of_rows(changed)["xxh128"] != known["xxh128"]
    assert run_record.of_rows(rows.select(range(64))) == known


@pytest.mark.parametrize("count", [0, 1, 2, 3, 9, 10, 11, 100])
def test_any_beginning_of_the_rows_that_count_is_spread(count):
    found = run_record._spread(count, 10)
    assert len(found) == len(set(found)) == min(count, 10)
    assert set(found) == set(range(count)) or {0, count - 1} <= set(found[:2])
    if count == 100:
        assert max(b - a for a, b in itertools.pairwise(sorted(found[:6]))) <= 40


def test_code_is_told_by_its_commit(tmp_path):
    def git(*words):
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b", *words], check=True)

    assert run_record.code(str(tmp_path / "nowhere")) == {}
    git("init", "-q")
    (tmp_path / "train.py").write_text("one")
    git("add", "."), git("commit", "-qm", "one")
    facts = run_record.code.__wrapped__(str(tmp_path))
    assert len(facts["commit"]) == 40 and facts["changed"] is False
    (tmp_path / "train.py").write_text("two")
    assert run_record.code.__wrapped__(str(tmp_path)) == facts | {"changed": True}


def test_what_differs_is_said_by_name(tmp_path):
    trained(tmp_path)
    (then,) = run_record.read(tmp_path)["starts"]
    assert run_record.differences(then, then) == []
    now = json.loads(json.dumps(then))
    now["packages"]["torch"], now["processes"] = "1.0", 2
    del now["hardware"]["cpu"]
    assert run_record.differences(then, now) == [
        f"packages: torch was {metadata.version('torch')!r} and is '1.0'",
        f"hardware: cpu was {then['hardware']['cpu']!r} and is None",
        "there were 1 processes and there are 2",
    ]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format": "posttrain-run", "version": 9, "starts": [1]}'])
def test_what_is_no_record_is_refused_and_does_not_keep_a_run_from_going_on(content, tmp_path):
    trained(tmp_path, steps=1)
    (tmp_path / run_record.RECORD).write_text(content)
    with pytest.raises(CheckpointError, match=run_record.RECORD):
        run_record.read(tmp_path)
    trained(tmp_path, steps=2, resume=True)
    assert [start["from_step"] for start in run_record.read(tmp_path)["starts"]] == [1]


def test_a_run_without_the_callback_leaves_none(tmp_path):
    args = TrainingArguments(str(tmp_path), max_steps=1, save_strategy="no", report_to="none", use_cpu=True)
    trainer = Trainer(tiny.causal_lm(), args, pad, train_dataset=tiny.token_rows(4))
    trainer.remove_callback(run_record.RunRecordCallback)
    trainer.train()
    assert not (tmp_path / run_record.RECORD).exists()


@pytest.mark.parametrize("kind", ["more", "others", "same"])
def test_a_run_that_goes_on_with_other_rows_says_so(kind, tmp_path, caplog):
    def train(rows, steps, resume=None):
        args = TrainingArguments(
            str(tmp_path), max_steps=steps, save_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
        )
        trainer = Trainer(tiny.causal_lm(), args, pad, train_dataset=datasets.Dataset.from_list(rows))
        trainer.train(resume_from_checkpoint=resume)

    train(tiny.token_rows(16), 1)
    rows = {"more": tiny.token_rows(20), "others": tiny.token_rows(16, seed=5), "same": tiny.token_rows(16)}[kind]
    train(rows, 2, resume=True)
    said = {"more": "there were 16 and there are 20", "others": "their checksum was", "same": ""}[kind]
    assert ("The training rows are not those" in caplog.text) == (kind != "same") and said in caplog.text


def test_arguments_that_others_have_set_are_not_among_those_that_were_changed(tmp_path):
    args = TrainingArguments(str(tmp_path), eval_strategy="steps", logging_steps=3)
    assert (args.do_eval, args.eval_steps) == (True, 3)
    assert not {"do_eval", "eval_steps"} & {*run_record.changed(args)}
    assert {"eval_strategy", "logging_steps"} <= {*run_record.changed(args)}
    assert "eval_steps" in run_record.changed(TrainingArguments(str(tmp_path), eval_strategy="steps", eval_steps=3))
