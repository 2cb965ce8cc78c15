"""Ten data files as people have them train from one YAML of five lines."""

from __future__ import annotations

import csv
import json

import pytest

from posttrain.cli import main
from tests import tiny
from tests.core.tools.test_after_training import TEMPLATE

pytest.importorskip("posttrain.sft"), pytest.importorskip("posttrain.rl")

TALK = "\n\nHuman: What is 2 + 3?\n\nAssistant: "
TURNS = [{"from": "human", "value": "What is 2 + 3?"}, {"from": "gpt", "value": "5"}]
MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "5"}]
FILES = {
    "alpaca.json": {"instruction": "Add.", "input": "2 and 3", "output": "5"},
    "gsm8k.jsonl": {"question": "What is 2 + 3?", "answer": "It is <<2+3=5>>5.\n#### 5"},
    "hh-rlhf.jsonl": {"chosen": TALK + "It is 5.", "rejected": TALK + "I do not know."},
    "sharegpt.json": {"conversations": TURNS, "id": "1"},
    "two-columns.csv": {"question": "What is 2 + 3?", "answer": "5"},
    "two-columns.tsv": {"prompt": "What is 2 + 3?", "response": "5"},
    "lines.txt": {"text": "Two and three are five."},
    "dolly.jsonl": {"instruction": "Add.", "context": "2 and 3", "response": "5", "category": "math"},
    "orca-pairs.jsonl": {"system": "Be brief.", "question": "2 + 3?", "chosen": "5", "rejected": "Well, it depends."},
    "messages.jsonl": {"messages": MESSAGES},
}


@pytest.mark.parametrize("name", FILES)
def test_a_common_file_trains_from_five_lines(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny.causal_lm("llama", vocab_size=384).save_pretrained("model")
    tiny.tokenizer(chat_template=TEMPLATE).save_pretrained("model")
    row, kind = FILES[name], name.rpartition(".")[2]
    with (tmp_path / name).open("w", newline="") as file:
        if kind == "json":
            json.dump([row] * 4, file)
        elif kind in ("csv", "tsv"):
            writer = csv.DictWriter(file, list(row), delimiter="," if kind == "csv" else "\t")
            writer.writeheader()
            writer.writerows([row] * 4)
        else:
            file.write(f"{row['text'] if kind == 'txt' else json.dumps(row)}\n" * 4)
    lines = ["model_name_or_path: model", f"dataset_name: {name}", "output_dir: out", "max_steps: 1", "use_cpu: true"]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    assert main(["train", "run.yaml"]) == 0
    captured = capsys.readouterr()
    assert f"method: {'dpo' if 'chosen' in row else 'sft'}, inferred from" in captured.err
    assert "The run finished after 1 of 1 steps." in captured.out and (tmp_path / "out" / "README.md").is_file()
