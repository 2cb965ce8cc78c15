"""``posttrain seq2seq`` trains for real: from files on the disk to a model on the disk."""

from __future__ import annotations

import dataclasses
import json

import pytest

from posttrain.cli import main
from posttrain.cli.tools import evaluate, load
from posttrain.core import registry
from posttrain.seq2seq.cli import METHOD
from tests import tiny


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The method as its package declares it, also where an older version is installed."""
    monkeypatch.setattr(registry, "methods", lambda: {"seq2seq": METHOD})


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    """A YAML file that trains on eight pairs and evaluates on two."""
    monkeypatch.chdir(tmp_path)
    tiny.seq2seq_lm().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    texts = tiny.CORPUS[:4]
    pairs = [{"en": text[:30], "de": text[30:60]} for text in texts]
    for name, rows in (("train.jsonl", pairs * 2), ("eval.jsonl", pairs[:2])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(
        "model_name_or_path: model\ndataset_name: train.jsonl\neval_dataset_name: eval.jsonl\noutput_dir: out\n"
        "source_column: en\ntarget_column: de\ntext_metrics: [exact_match]\nmax_steps: 4\nlearning_rate: 1e-2\n"
        "per_device_train_batch_size: 2\nlogging_steps: 1\neval_strategy: steps\neval_steps: 2\nsave_steps: 2\n"
        "use_cpu: yes\nreport_to: none\ndisable_tqdm: true\n"
    )
    return tmp_path / "run.yaml"


def test_a_run_leaves_a_model_that_can_be_loaded_and_scores_in_its_log(run_file, tmp_path):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    assert main(["seq2seq", "run.yaml", "--generation_max_length", "24", "--generation_num_beams", "2"]) == 0
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|endoftext|>"
    history = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    evaluations = [record for record in history if "eval_loss" in record]
    assert len(evaluations) == 2 and all("eval_exact_match" in record for record in evaluations)
    assert evaluations[1]["eval_loss"] < evaluations[0]["eval_loss"]


@pytest.mark.parametrize("adapter", [(), ("--use_peft", "--lora_task_type", "SEQ_2_SEQ_LM")])
def test_what_is_printed_at_the_end_of_a_run_measures_its_model(adapter, run_file, tmp_path, capsys):
    assert main(["seq2seq", "run.yaml", "--source_prefix", "say: ", *adapter]) == 0
    [command] = [line.split("#")[0].split() for line in capsys.readouterr().out.splitlines() if "evaluate" in line]
    command[command.index("rows.jsonl")] = "eval.jsonl"
    assert main([*command[1:], "--output", "results.json", "--max_new_tokens", "8"]) == 0
    assert "2 rows\n  exact_match" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    found = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["prompt"] for row in found] == [f"say: {row['en']}" for row in rows]
    model, tokenizer = load.load("out", device="cpu")
    for row in found:
        read = tokenizer(row["prompt"], return_tensors="pt")
        [ids] = model.generate(**read, do_sample=False, max_new_tokens=8, eos_token_id=load.ends(model, tokenizer))
        assert row["completion"] == tokenizer.decode(ids[1:], skip_special_tokens=True)


def test_the_likeliest_choice_after_a_source_is_found(run_file):
    model, tokenizer = load.load("model", device="cpu")
    question = evaluate.Question("the cat", None, ("sat", "a dog ran"), 0)
    scores = evaluate.choice_scores(model, tokenizer, question)
    for (total, count), text in zip(scores, question.choices, strict=True):
        labels = tokenizer(f" {text}", return_tensors="pt", add_special_tokens=False)["input_ids"]
        loss = model(**tokenizer("the cat", return_tensors="pt"), labels=labels).loss.detach()
        assert count == labels.shape[1] and total == pytest.approx(-float(loss) * count, rel=1e-4)


def test_sources_get_their_prefix_and_are_cut(run_file, monkeypatch):
    from posttrain.seq2seq import Seq2SeqTrainer

    read = []
    train = Seq2SeqTrainer.train
    monkeypatch.setattr(Seq2SeqTrainer, "train", lambda self, *a, **k: read.append(self) or train(self, *a, **k))
    assert (
        main(["seq2seq", "run.yaml", "--source_prefix", "say: ", "--max_source_length", "9", "--max_steps", "1"]) == 0
    )
    tokenizer = tiny.tokenizer()
    for rows in (read[0].train_dataset, read[0].eval_dataset):
        ids = [row["input_ids"] for row in rows]
        assert {len(row) for row in ids} == {9}
        assert all(tokenizer.decode(row).startswith("say: ") for row in ids)


def test_a_model_without_an_encoder(run_file, tmp_path):
    tiny.causal_lm().save_pretrained(tmp_path / "model")
    words = ["--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj", "--max_steps", "2"]
    assert main(["seq2seq", "run.yaml", *words]) == 0
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["task_type"] == "CAUSAL_LM"


@pytest.mark.parametrize(("words", "reason"), [
    (["--text_metrics", "blue"], "text_metrics holds 'blue'"),
    (["--target_column", "en"], "both 'en'"),
    (["--eval_dataset_name", "null"], "Set eval_dataset_name or eval_share"),
    (["--source_column", "fr"], "no column 'fr'"),
])  # fmt: skip
def test_what_cannot_work_is_refused(words, reason, run_file, capsys):
    assert main(["seq2seq", "run.yaml", *words]) in (1, 2)
    assert reason in capsys.readouterr().err


def test_the_names_of_the_arguments_are_those_of_transformers():
    import transformers

    theirs = {field.name: field for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}
    core = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    ours = {field.name: field for field in dataclasses.fields(METHOD.config_class.__mro__[1])}
    for name in set(theirs) - core:
        assert ours[name].default == theirs[name].default, name
