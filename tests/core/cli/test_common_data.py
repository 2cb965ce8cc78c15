"""Data files as people have them train from one YAML of five lines, on the text and the mask that they should."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.core import trainer
from posttrain.core.callbacks import TrainerCallback
from tests import tiny
from tests.core.cli.tools.test_after_training import TEMPLATE

pytest.importorskip("posttrain.sft"), pytest.importorskip("posttrain.rl")

TALK = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: What is 2 + 3?\n\nAssistant: "
SUM = "<|user|>What is 2 + 3?</s><|assistant|>"
TURNS = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5"}]
MESSAGES = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
#: {file: (its rows, what becomes of each; what is trained stands in brackets)}. A pair has two texts.
FILES = {
    "alpaca.json": (
        [
            {"instruction": "Add.", "input": "2 and 3", "output": "5"},
            {"instruction": "What is 2 + 3?", "input": "", "output": "5"},
        ],
        ["<|user|>Add.\n\n2 and 3</s><|assistant|>[5</s>]", f"{SUM}[5</s>]"],
    ),
    "gsm8k.jsonl": (
        [{"question": "What is 2 + 3?", "answer": "It is 2+3=<<2+3=5>>5.\n#### 5"}],
        [f"{SUM}[It is 2+3=<<2+3=5>>5.\n#### 5</s>]"],
    ),
    "hh-rlhf.jsonl.gz": (
        [{"chosen": f"{TALK}It is 5.", "rejected": f"{TALK}No idea."}],
        [f"{TALK[:-1]}[ {answer}<|endoftext|>]" for answer in ("It is 5.", "No idea.")],
    ),
    "sharegpt.json": (
        [{"id": "1", "conversations": TURNS}],
        ["[<|system|>Be brief.</s><|user|>2 + 3?</s><|assistant|>5</s>]"],
    ),
    "two-columns.csv": ([{"question": "What is 2 + 3?", "answer": "5"}], [f"{SUM}[5</s>]"]),
    "spreadsheet.csv": (  # the empty cell makes floats of the column
        [{"Question": "What is 2 + 3?", "Answer": "5"}, {"Question": "Why?", "Answer": ""}],
        [f"{SUM}[5</s>]"],
    ),
    "codes.csv": ([{"prompt": "Agent?", "completion": "007"}], ["Agent?[007<|endoftext|>]"]),
    "truths.csv": ([{"question": "What is 2 + 3?", "answer": "True"}], [f"{SUM}[True</s>]"]),
    "missing.csv": ([{"prompt": "Symbol of sodium?", "completion": "NA"}], ["Symbol of sodium?[NA<|endoftext|>]"]),
    "two-columns.tsv": ([{"prompt": "What is 2 + 3?", "response": "5"}], [f"{SUM}[5</s>]"]),
    "lines.txt": (
        [{"text": "2 and 3 are 5."}, {"text": "1 and 1 are 2."}],
        ["[2 and 3 are 5.<|endoftext|>]", "[1 and 1 are 2.<|endoftext|>]"],
    ),
    "rows.parquet": ([{"problem": "What is 2 + 3?", "solution": "5"}], [f"{SUM}[5</s>]"]),
    "folder": ([{"messages": MESSAGES}], ["[<|user|>2 + 3?</s><|assistant|>5</s>]"]),
    "answers.jsonl": ([{"question": "What is 2 + 3?", "answer": "5"}], [f"{SUM}[5</s>]"]),
    "outputs.jsonl": ([{"instruction": "What is 2 + 3?", "output": "5"}], [f"{SUM}[5</s>]"]),
    "dolly.jsonl": (
        [{"instruction": "Add.", "context": "2 and 3", "response": "5", "category": "math"}],
        ["<|user|>Add.\n\n2 and 3</s><|assistant|>[5</s>]"],
    ),
    "orca-pairs.jsonl": (
        [{"system": "Be brief.", "question": "2 + 3?", "chosen": "5", "rejected": "Well."}],
        [f"<|system|>Be brief.</s><|user|>2 + 3?</s><|assistant|>[{answer}</s>]" for answer in ("5", "Well.")],
    ),
}


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.causal_lm("llama", vocab_size=384).save_pretrained("model")
    tiny.tokenizer(chat_template=TEMPLATE).save_pretrained("model")


@pytest.mark.parametrize("name", FILES)
def test_a_common_file_trains_from_five_lines(name, monkeypatch, capsys):
    rows, expected = FILES[name]
    _write(rows * 4, Path(name))
    assert _trained(monkeypatch, f"dataset_name: {name}", "output_dir: out") == sorted(set(expected))
    captured = capsys.readouterr()
    assert f"method: {'dpo' if 'chosen' in rows[0] else 'sft'}, inferred from" in captured.err
    assert "The run finished after 1 of 1 steps." in captured.out and Path("out", "README.md").is_file()


def test_dialogues_in_one_text_train_as_messages_where_that_is_asked(monkeypatch):
    _write([{"chosen": f"{TALK}It is 5.", "rejected": f"{TALK}No idea."}] * 4, Path("train.jsonl"))
    turns = f"<|user|>Hi</s><|assistant|>Yes?</s>{SUM}"
    expected = [f"{turns}[It is 5.</s>]", f"{turns}[No idea.</s>]"]
    assert _trained(monkeypatch, "dataset_name: train.jsonl", "as_messages: true") == expected


def _trained(monkeypatch, *lines) -> list[str]:
    """What a run on the CPU whose file has `lines` and the model trains on, as `_Seen` shows it."""
    seen = _Seen()
    monkeypatch.setattr(trainer, "DEFAULT_CALLBACKS", [*trainer.DEFAULT_CALLBACKS, seen])
    Path("run.yaml").write_text("\n".join(["model_name_or_path: model", "max_steps: 1", "use_cpu: true", *lines]))
    assert main(["train", "run.yaml"]) == 0
    return seen.texts


class _Seen(TrainerCallback):
    """The different texts of the first batch, sorted, what is trained in brackets."""

    def on_train_begin(self, args, state, control, train_dataloader, processing_class, **kwargs):
        batch, decode = next(iter(train_dataloader)), processing_class.decode
        if "segments" in batch:
            texts = _pairs(batch, decode)
        else:
            rows = zip(batch["input_ids"], batch["labels"], batch["attention_mask"].bool(), strict=True)
            texts = [
                _bracketed(ids[mask].tolist(), labels[mask].ne(-100).tolist(), decode) for ids, labels, mask in rows
            ]
        self.texts = sorted(set(texts))


def _pairs(batch, decode) -> list[str]:
    """The texts of pairs that share their prompt: its last token is the first of both completions' segments."""
    ids, labels, segments = batch["input_ids"][0], batch["shift_labels"][0], batch["segments"]
    parts = ids.split(segments.lengths)
    completions = zip(batch["completion_places"], batch["completion_mask"].bool(), strict=True)
    trained = [labels[places[mask]] for places, mask in completions]
    children = [(parts[parent], part[:1]) for part, parent in zip(parts, segments.parents, strict=True) if parent >= 0]
    in_order = [children[0::2], children[1::2]]  # the chosen ones come first
    prompts = [decode([*prompt, *last]) for half in in_order for prompt, last in half]
    return [f"{prompt}[{decode(tokens)}]" for prompt, tokens in zip(prompts, trained, strict=True)]


def _bracketed(ids, is_trained, decode) -> str:
    runs = itertools.groupby(zip(ids, is_trained, strict=True), key=lambda pair: pair[1])
    texts = [(decode([token for token, _ in run]), is_on) for is_on, run in runs]
    return "".join(f"[{text}]" if is_on else text for text, is_on in texts)


def _write(rows, path) -> None:
    if path.suffix == "":
        path.mkdir()
        for part in range(2):
            _write(rows[part::2], path / f"part-{part}.jsonl")
    elif path.suffix == ".parquet":
        pytest.importorskip("datasets").Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="," if path.suffix == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    else:
        text = "".join(f"{row['text'] if path.suffix == '.txt' else json.dumps(row)}\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
