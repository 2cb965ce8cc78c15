"""GRPO on the command line reads GSM8K as it comes: its questions are the prompts, its answers go to the reward."""

from __future__ import annotations

import json

from posttrain.cli import main
from tests import tiny
from tests.core.cli.tools.test_after_training import TEMPLATE


def test_questions_are_prompts_and_answers_stay_for_the_reward(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny.causal_lm("llama", vocab_size=384).save_pretrained("model")
    tiny.tokenizer(chat_template=TEMPLATE).save_pretrained("model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "2 + 3?", "answer": "#### 5"}) + "\n")
    (tmp_path / "mine.py").write_text(
        "def score(prompts, completions, answer, **kwargs):\n"
        "    assert prompts[0][-1]['content'] == '2 + 3?' and answer[0] == '#### 5'\n"
        "    return [float(len(str(one))) for one in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "model_name_or_path: model\ndataset_name: rows.jsonl\noutput_dir: out\nmax_steps: 1\nuse_cpu: true\n"
        "reward_funcs: mine:score\nnum_generations: 2\nper_device_train_batch_size: 2\nmax_completion_length: 4\n"
    )
    assert main(["preview", "run.yaml"]) == 0
    assert "reads question as prompt, in messages of the chat template" in capsys.readouterr().out
    assert main(["train", "run.yaml"]) == 0
    captured = capsys.readouterr()
    assert "method: grpo, inferred from reward_funcs" in captured.err and "finished after 1 of 1 steps" in captured.out
