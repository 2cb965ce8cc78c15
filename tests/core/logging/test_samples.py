"""What a model wrote during a run is on the page about it."""

import json
import os
import re

import pytest
from datasets import Dataset

from posttrain.cli.report import report
from posttrain.lm.generate import samples
from posttrain.rl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny

QUICK = dict(max_steps=2, logging_steps=1, save_strategy="no", use_cpu=True, report_to="none", disable_tqdm=True)


def section(folder, title):
    page = (folder / "report.html").read_text(encoding="utf-8")
    found = re.search(f"<h2>{title}</h2>(.*?)(<h2>|<script>)", page, re.DOTALL)
    return found and found[1]


def cells(html):
    return [re.findall(r"<td[^>]*>(.*?)</td>", line, re.DOTALL) for line in html.split("<tr>")[2:]]


def test_the_page_of_an_online_run_shows_its_completions_step_by_step(tmp_path):
    rows = Dataset.from_list([{"prompt": f"say {word}"} for word in ("yes", "no", "maybe", "never")])
    args = GRPOConfig(
        str(tmp_path), per_device_train_batch_size=4, num_generations=2, max_completion_length=4, log_completions=True,
        num_completions_to_print=0, **QUICK,
    )  # fmt: skip
    GRPOTrainer(
        tiny.causal_lm(), lambda completions, **_: [float(len(c)) for c in completions], args, rows,
        processing_class=tiny.tokenizer(),
    ).train()  # fmt: skip
    shown = section(tmp_path, "Samples")
    assert "<h3>completions</h3>" in shown and "advantage" in shown
    found = cells(shown)
    assert {line[0] for line in found} == {"0", "1"} and all(line[1].startswith("say ") for line in found)
    written = samples.read(tmp_path, last_step=2)["completions"]
    assert len(found) == len(written) == 4  # of two groups in each of two steps, one completion each
    assert samples.read(tmp_path, last_step=2, since=os.stat(tmp_path / "report.html").st_mtime + 1) == {}
    assert {row["step"] for row in samples.read(tmp_path, last_step=0)["completions"]} == {0}


def test_the_page_of_a_run_that_evaluates_by_generating_shows_answers_to_a_prompt_below_each_other(tmp_path):
    rows = Dataset.from_list([{"prompt": f"say {word} ", "completion": word} for word in ("yes", "no", "<b>")])
    args = SFTConfig(
        str(tmp_path), eval_strategy="steps", eval_steps=1, predict_with_generate=True, generation_max_length=12,
        **QUICK,
    )  # fmt: skip
    SFTTrainer(
        tiny.causal_lm(), args, train_dataset=rows, eval_dataset=rows, processing_class=tiny.tokenizer(),
        compute_metrics=lambda written: {"rows": len(written.predictions)},
    ).train()  # fmt: skip
    found = cells(section(tmp_path, "Samples"))
    assert [line[0] for line in found] == ["1", "2"] * 3
    assert [bool(line[1]) for line in found] == [True, False] * 3  # a prompt is written once
    assert "&lt;b&gt;" in section(tmp_path, "Samples")
    assert "train: 3 rows read, 3 kept" in section(tmp_path, "Data")
    assert "eval: 3 rows read" in section(tmp_path, "Data")


@pytest.mark.parametrize("steps", [3, 40])
def test_some_steps_are_read_from_the_first_to_the_last_and_an_earlier_runs_are_not(tmp_path, steps):
    for step in [*range(1, steps + 1), 1000]:
        samples.append([{"prompt": f"p{i}", "policy": f"old {step}"} for i in range(2)], step, tmp_path)
    samples.append([{"prompt": "p0", "policy": "new"}], steps, tmp_path)  # the step again, after a resume
    with (tmp_path / samples.SAMPLES).open("a") as file:
        file.write('not JSON\n[1]\n{"step": ')
    found = samples.read(tmp_path, last_step=steps)["samples"]
    chosen = sorted({row["step"] for row in found})
    assert chosen[0] == 1 and chosen[-1] == steps and len(chosen) == min(steps, samples.MOST_STEPS)
    assert [row["policy"] for row in found if row["step"] == steps] == [f"old {steps}", "new"]


def test_preference_runs_show_policy_and_reference_and_what_became_of_their_rows(tmp_path):
    pairs = Dataset.from_list([{"prompt": f"{i} ", "chosen": "yes", "rejected": "no"} for i in range(4)])
    args = DPOConfig(
        str(tmp_path), eval_strategy="steps", eval_steps=1, num_eval_samples=1, max_sample_tokens=3, **QUICK
    )  # fmt: skip
    DPOTrainer(
        tiny.causal_lm(), args=args, train_dataset=pairs, eval_dataset=pairs, processing_class=tiny.tokenizer()
    ).train()  # fmt: skip
    assert "<th>policy</th><th>reference</th>" in section(tmp_path, "Samples")
    assert len(cells(section(tmp_path, "Samples"))) == 2
    assert "4 rows read, 4 kept" in section(tmp_path, "Data")


def test_messages_are_shown_with_their_roles_and_long_texts_are_cut(tmp_path):
    turns = [{"role": "user", "content": "hello"}]
    assert report._sample(turns) == report._sample(json.dumps(turns)) == "user: hello"
    assert report._sample('[{"broken') == '[{"broken' and report._sample(0.123456) == "0.1235"
    assert report._sample("a\x00\nb") == "a\ufffd\nb"
    assert len(report._sample("x" * 5000)) == report.MOST_TEXT + 4
