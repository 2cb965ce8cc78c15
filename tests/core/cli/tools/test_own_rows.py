"""A trained model is measured on rows of the user's own, served on this machine, and described to Ollama."""

from __future__ import annotations

import json
import math
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from posttrain.cli import main
from posttrain.cli.tools import chat, evaluate, export, load, serve
from posttrain.core.errors import ConfigError, DataError
from tests import tiny
from tests.core.cli.tools.test_after_training import TEMPLATE

AGENTS = Path(__file__).parents[4] / ".venv-agents" / "bin" / "python"


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.causal_lm("llama", vocab_size=384).save_pretrained("base")
    tiny.tokenizer(chat_template=TEMPLATE).save_pretrained("base")
    return "base"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_answers_are_compared_and_written_and_a_judge_scores_them(base, tmp_path, monkeypatch, capsys):
    model, tokenizer = load.load(base)
    right = chat.reply(model, tokenizer, [{"role": "user", "content": "Hi"}], temperature=0, max_new_tokens=4)
    rows = [{"question": "Hi", "answer": f" {right}\n"}, {"question": "Hi", "answer": "something else"}]
    write(tmp_path / "rows.jsonl", rows)
    (tmp_path / "mine.py").write_text("def score(prompts, completions):\n    return [1.0, 0.5]\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = ["evaluate", base, "--data", "rows.jsonl", "--max_new_tokens", "4", "--judge", "mine:score"]
    assert main([*words, "--output", "results.json"]) == 0
    out = capsys.readouterr().out
    assert "2 rows" in out and "exact_match    0.5000" in out and "judge          0.7500" in out
    kept = json.loads((tmp_path / "results.json").read_text())
    assert [row["exact_match"] for row in kept["rows"]] == [1.0, 0.0] and kept["rows"][0]["completion"] == right


def test_the_likeliest_choice_is_the_one_with_the_largest_log_likelihood(base):
    model, tokenizer = load.load(base)
    question = evaluate.Question("Two and two are", None, ("four", "a bird and a half"), 0)
    scores = evaluate.choice_scores(model, tokenizer, question)
    prompt = tokenizer("Two and two are")["input_ids"]
    for choice, (score, count) in zip(question.choices, scores, strict=True):
        ids = tokenizer(" " + choice, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logps = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        alone = float(logps.gather(1, torch.tensor(ids)[:, None]).sum())
        assert score == pytest.approx(alone, abs=1e-4) and count == len(ids)
    metrics, rows = evaluate.evaluate_rows(model, tokenizer, [question])
    assert metrics["accuracy"] == float(scores[0][0] > scores[1][0]) and rows[0]["right"] == 0


@pytest.mark.parametrize(
    "answer", [{"answer": 1}, {"answer": "B"}, {"answerKey": "B"}, {"label": "1"}, {"answer": "no"}]
)
def test_the_right_choice_is_named_by_number_letter_or_text(base, answer):
    tokenizer = load.load(base)[1]
    [one] = evaluate.questions([{"question": "Is it?", "choices": ["yes", "no"], **answer}], tokenizer)
    assert one.right == 1 and one.prompt == [{"role": "user", "content": "Is it?"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "A dog", "chosen": " sat", "rejected": " sold"},
        {"chosen": "A dog sat", "rejected": "A dog sold"},
        {"prompt": [{"role": "user", "content": "A dog"}], "chosen": "sat", "rejected": "sold"},
        {
            "chosen": [{"role": "user", "content": "A dog"}, {"role": "assistant", "content": "sat"}],
            "rejected": [{"role": "user", "content": "A dog"}, {"role": "assistant", "content": "sold"}],
        },
    ],
)
def test_of_a_pair_the_chosen_answer_is_the_right_choice(base, row):
    [one] = evaluate.questions([row], load.load(base)[1])
    assert one.prompt in ("A dog", [{"role": "user", "content": "A dog"}]) and one.right == 0
    assert [choice.strip() for choice in one.choices] == ["sat", "sold"]


def test_a_reward_model_is_measured_on_pairs_and_asked_for_nothing_else(base, tmp_path, capsys):
    from peft import LoraConfig

    from posttrain.lm.loading.adapters import add_adapter

    model = tiny.reward_model(vocab_size=384)
    model.save_pretrained("reward")
    load.load(base)[1].save_pretrained("reward")
    model.name_or_path = str(tmp_path / "reward")
    add_adapter(model, LoraConfig(r=2, init_lora_weights=False)).save_pretrained("adapter")
    talks = [[{"role": "user", "content": "A dog"}, {"role": "assistant", "content": text}] for text in ("sat", "sold")]
    write(tmp_path / "pairs.jsonl", [{"chosen": one, "rejected": other} for one, other in (talks, talks[::-1])])
    for folder in ("reward", "adapter"):
        scored, tokenizer = load.load(folder, may_score=True)
        question = evaluate.Question(talks[0][:1], None, ("sat", "sold"), 0)
        with torch.no_grad():
            alone = [
                scored(torch.tensor([tokenizer.apply_chat_template(t, return_dict=True)["input_ids"]])).logits.item()
                for t in talks
            ]
        assert [score for score, _ in evaluate.rewards(scored, tokenizer, question)] == alone
        assert main(["evaluate", folder, "--data", "pairs.jsonl"]) == 0
        assert capsys.readouterr().out == "2 rows\n  accuracy       0.5000\n"
        assert main(["chat", folder]) == 2 and "is a reward model" in capsys.readouterr().err
    write(tmp_path / "rows.jsonl", [{"question": "Hi", "answer": "no"}])
    assert main(["evaluate", "reward", "--data", "rows.jsonl"]) == 1
    assert "row 0 has no choices" in capsys.readouterr().err


def test_prompts_alone_are_not_measured_in_silence(base, tmp_path, capsys):
    write(tmp_path / "rows.jsonl", [{"prompt": "Hi"}])
    words = ["evaluate", base, "--data", "rows.jsonl", "--max_new_tokens", "2"]
    assert main(words) == 1 and "nothing to compare" in capsys.readouterr().err
    assert main([*words, "--output", "results.json"]) == 0
    assert "completion" in json.loads((tmp_path / "results.json").read_text())["rows"][0]


def test_numbers_after_four_hashes_are_compared_and_rows_without_an_answer_named(base):
    assert evaluate.matches("so it is 1,072.", "70 + 1002\n#### 1072") and not evaluate.matches("7", "#### 72")
    with pytest.raises(DataError, match="row 0 has no prompt with an answer or choices"):
        evaluate.questions([{"a": "b"}], load.load(base)[1])


def test_one_file_of_a_run_names_its_model_and_its_evaluation_rows(base, tmp_path, capsys):
    write(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}] * 4)
    (tmp_path / "run.yaml").write_text(f"model_name_or_path: {base}\ndataset_name: rows.jsonl\noutput_dir: out\n")
    assert main(["evaluate", "run.yaml"]) == 1
    assert "set eval_dataset_name or eval_share, or name --data" in capsys.readouterr().err
    with (tmp_path / "run.yaml").open("a") as file:
        file.write("eval_share: 0.5\n")
    assert main(["evaluate", "run.yaml", "--max_new_tokens", "2"]) == 0
    out = capsys.readouterr().out
    assert "Evaluates base, for the run has not ended yet." in out and "2 rows" in out


def test_a_model_answers_as_the_api_of_openai_does_and_only_to_this_machine(base):
    model, tokenizer = load.load(base)
    server = serve.make_server(model, tokenizer, "mine")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    messages = [{"role": "user", "content": "Hi"}]

    def ask(path, body=None, **headers):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}{path}", data, headers)
        with urllib.request.urlopen(request) as response:
            return response.read().decode()

    try:
        assert json.loads(ask("/v1/models"))["data"][0]["id"] == "mine"
        body = {"messages": messages, "temperature": 0, "max_tokens": 4}
        expected = chat.reply(model, tokenizer, messages, temperature=0, max_new_tokens=4)
        assert json.loads(ask("/v1/chat/completions", body))["choices"][0]["message"]["content"] == expected
        counted = json.loads(ask("/v1/chat/completions", body))["usage"]
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        *parts, usage, done = ask("/v1/chat/completions", streamed).removesuffix("\n\n").split("\n\n")
        choices = [json.loads(part[6:])["choices"][0] for part in parts]
        assert "".join(choice["delta"]["content"] for choice in choices) == expected and done == "data: [DONE]"
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert json.loads(usage[6:])["usage"] == counted and counted["completion_tokens"] == 4
        assert "text" in json.loads(ask("/v1/completions", {"prompt": "a", "max_tokens": 1}))["choices"][0]
        refused = [{"prompt": 3}, {"prompt": "a", "stop": ["x"]}, {"prompt": "a", "n": 2}, {"stream": True}]
        refused += [{"prompt": ""}, {"prompt": [1]}, {"prompt": "a", "max_tokens": math.inf}]
        elsewhere = ({"prompt": "a"}, {"Host": "evil.example:80"}, 404)
        for body, headers, status in (*((body, {}, 400) for body in refused), elsewhere):
            with pytest.raises(urllib.error.HTTPError) as raised:
                ask("/v1/completions", body, **headers)
            assert raised.value.code == status
    finally:
        server.shutdown()
        server.server_close()


def test_an_answer_is_sent_while_it_is_written_and_ends_when_its_reader_leaves(base, monkeypatch):
    model, tokenizer = load.load(base)
    sent, written = [], []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: f"{len(decode(ids, **options))} ")

    def send(part, is_first):
        sent.append(is_first)
        if len(sent) == 3:
            raise BrokenPipeError

    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *args, **kwargs: written.append(1) or forward(*args, **kwargs))
    with pytest.raises(BrokenPipeError):
        serve.Answer({"prompt": "a", "max_tokens": 50, "stream": True}).write(model, tokenizer, "mine", False, send)
    assert sent == [True, False, False] and len(written) < 50


ASK = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
asked = dict(model="mine", messages=[{"role": "user", "content": "Hi"}], temperature=0, max_tokens=8)
whole = client.chat.completions.create(**asked)
parts = [part.choices[0] for part in client.chat.completions.create(**asked, stream=True)]
assert "".join(part.delta.content for part in parts) == whole.choices[0].message.content
assert parts[-1].finish_reason == whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 8
"""


@pytest.mark.skipif(not AGENTS.exists(), reason="there is no .venv-agents: run make test-agents")
def test_the_sdk_of_openai_reads_its_answers(base):
    server = serve.make_server(*load.load(base), "mine")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        subprocess.run([AGENTS, "-c", ASK, f"http://127.0.0.1:{server.server_port}/v1"], check=True, timeout=120)
    finally:
        server.shutdown()
        server.server_close()


def test_vllm_serves_whole_models_alone(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="posttrain merge"):
        serve.vllm_command(str(tmp_path), 8000, {})
    with pytest.raises(ConfigError, match="vLLM has no --device"):
        serve.vllm_command("model", 8000, {"device": "cpu"})
    command = serve.vllm_command("model", 8001, {"dtype": "bfloat16"})
    assert command[1:] == [
        "-m", "vllm.entrypoints.cli.main", "serve", "model", "--host", "127.0.0.1", "--port", "8001", "--dtype",
        "bfloat16",
    ]  # fmt: skip


def test_a_modelfile_has_the_turns_of_the_template_and_its_own_system_message(tmp_path):
    tokenizer = tiny.tokenizer(chat_template=(
        "{% if messages[0]['role'] != 'system' %}<s>system\nBe kind.</s>{% endif %}"
        "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    ))  # fmt: skip
    text = export.write_modelfile(tmp_path / "model.gguf", tokenizer, ["</s>"]).read_text()
    assert "FROM ./model.gguf" in text and 'SYSTEM """Be kind."""' in text and 'PARAMETER stop "</s>"' in text
    assert '{{ if eq .Role "system" }}<s>system\n{{ .Content }}</s>{{ else if eq .Role "user" }}<s>user\n' in text
    assert '{{ end }}{{ end }}<s>assistant\n"""' in text
    odd = tiny.tokenizer(chat_template="{% for m in messages %}{{ loop.index }}{{ m['content'] }}{% endfor %}")
    assert "Ollama reads the one in the file" in export.write_modelfile(tmp_path / "odd.gguf", odd, []).read_text()
