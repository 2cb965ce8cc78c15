"""Evaluation in environments and of agents, by `posttrain evaluate --env`."""

import importlib
import json
import sys

import pytest

from posttrain.cli import main
from posttrain.rl.evaluation import PUBLIC, environment_of, evaluate
from posttrain.rl.rewards.functions import text_of
from tests import tiny

MODULE = """
from posttrain.rl import Agent

ASKED = []
ROWS = [{"prompt": [{"role": "user", "content": f"Say {i}"}], "i": i} for i in range(3)]


async def agent(episode, row):
    answer = await episode.generate(row["prompt"], max_tokens=4)
    return float(row["i"] % 2)


def even(i, **_):
    ASKED.append(list(i))
    return [float(one % 2 == 0) for one in i]


def environment():
    return {"reward_funcs": [even], "eval_dataset": ROWS}


def one(row):
    pass


def three(episode, row, more):
    pass


class Bounded:
    async def __call__(self, episode, row, more=None):
        return await agent(episode, row)


nothing, shared, bounded = 3, environment(), Agent(Bounded(), turns=1)
other = Bounded()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "posttrain_test_environment.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "posttrain_test_environment"
    sys.modules.pop("posttrain_test_environment", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.causal_lm(max_position_embeddings=256).save_pretrained(folder)
    tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS).save_pretrained(folder)
    return folder


def test_an_environment_is_evaluated_with_intervals(tmp_path, module, folder, capsys):
    output = tmp_path / "results.json"
    words = [str(folder), "--env", f"{module}:environment", "--k", "2", "--max_new_tokens", "4", "--device", "cpu"]
    assert main(["evaluate", *words, "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    # 1, 0, 1 in the three rows, in each of the two completions
    assert "avg@2                    0.6667 ± 0.6533 (95%)" in shown and "6 episodes" in shown
    assert "log.jsonl" not in shown  # there is none
    found = json.loads(output.read_text(encoding="utf-8"))
    assert found["results"]["pass@2"] == pytest.approx(2 / 3)
    assert [one["reward"] for one in found["episodes"]] == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert {"prompt", "completion", "rewards", "ending", "turns", "tokens"} < found["episodes"][0].keys()


def test_an_agent_is_evaluated_on_rows_that_are_named(tmp_path, module, folder, capsys):
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": [{"role": "user", "content": "Say"}], "i": i} for i in (1, 1, 2)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = [str(folder), "--env", f"{module}:agent", "--data", str(data), "--limit", "2", "--device", "cpu"]
    assert main(["evaluate", *words]) == 0
    shown = capsys.readouterr().out
    assert "pass@1                   1.0000 ± 0.0000 (95%)" in shown and "2 episodes" in shown


def test_rows_that_are_named_stand_for_those_of_the_environment(tmp_path, module, folder, capsys):
    data = tmp_path / "rows"
    data.mkdir()
    for split, numbers in (("train", (0, 2)), ("test", (1, 1, 2))):
        rows = [{"prompt": [{"role": "user", "content": "Say"}], "i": i} for i in numbers]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = [str(folder), "--env", f"{module}:environment", "--data", str(data), "--batch_size", "2", "--device", "cpu"]
    words += ["--max_new_tokens", "4", "--pass_threshold", "1.5"]
    assert main(["evaluate", *words]) == 0
    assert sys.modules[module].ASKED == [[1, 1], [2]]
    shown = capsys.readouterr().out
    assert "avg@1                    0.3333" in shown and "pass@1                   0.0000" in shown


def test_at_temperature_0_all_episodes_of_a_row_are_the_same(tmp_path, module, folder):
    output = tmp_path / "results.json"
    words = [str(folder), "--env", f"{module}:environment", "--k", "3", "--max_new_tokens", "6", "--device", "cpu"]
    texts = {}
    for temperature in ("0", "3"):
        assert main(["evaluate", *words, "--temperature", temperature, "--output", str(output)]) == 0
        texts[temperature] = [json.dumps(one["completion"]) for one in json.loads(output.read_text())["episodes"]]
    assert [len({*texts["0"][i : i + 3]}) for i in (0, 3, 6)] == [1, 1, 1] and len({*texts["3"]}) > 3


@pytest.mark.parametrize(("words", "said"), [
    (["--env", "posttrain_test_environment:nothing"], "is of type int"),
    (["--env", "posttrain_test_environment:absent"], "--env: 'posttrain_test_environment:absent' cannot be imported"),
    (["--env", "posttrain_test_environment"], "Give module:function"),
    (["--env", "posttrain_test_environment:agent", "--tasks", "gsm8k"], "--tasks is not for environments"),
    (["--k", "2", "--data", "rows.jsonl"], "--k is for episodes"),
])  # fmt: skip
def test_what_cannot_be_evaluated_is_named(module, folder, words, said, capsys):
    assert main(["evaluate", str(folder), *words]) == 2
    assert said in capsys.readouterr().err


def test_an_object_of_a_module_is_an_agent_or_arguments_and_nothing_else(module, monkeypatch):
    monkeypatch.setitem(PUBLIC, "theirs", lambda task: {"task": task})
    assert environment_of("theirs:one:two") == {"task": "one:two"}
    found = importlib.import_module(module)
    for name in ("agent", "bounded", "other"):
        assert environment_of(f"{module}:{name}") == {"agent": getattr(found, name)}
    for name in ("one", "three"):
        with pytest.raises(TypeError, match=f"{module}:{name} is of type function; give an agent"):
            environment_of(f"{module}:{name}")
    given = environment_of(f"{module}:shared")
    given["eval_dataset"] = []  # as --data does
    assert environment_of(f"{module}:shared")["eval_dataset"] == found.ROWS


def test_rows_and_settings_of_an_evaluation_are_those_that_are_asked_for(folder):
    seen = []

    def score(i, **_):
        seen.append(list(i))
        return [float(one > 0) for one in i]

    rows = [{"prompt": [{"role": "user", "content": f"Say {i}"}], "i": i} for i in range(5)]
    given = {"reward_funcs": [score], "eval_dataset": rows[:4], "train_dataset": rows[4:]}
    tokenizer = tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS)
    settings = {"max_completion_length": 4, "per_device_eval_batch_size": 4}
    metrics, episodes = evaluate(tiny.causal_lm(), tokenizer, given, k=2, **settings)
    assert seen == [[0, 0, 1, 1], [2, 2, 3, 3]] and len(episodes) == 8
    assert metrics["avg@2"] == metrics["pass@2"] == 0.75
    assert metrics["pass@2_stderr"] == pytest.approx((0.75 * 0.25 / 3) ** 0.5)
    del given["eval_dataset"]
    assert evaluate(tiny.causal_lm(), tokenizer, given, **settings)[0]["pass@1"] == 1.0 and seen[-1] == [4]


async def asks(episode, row):
    await episode.generate([{"role": "user", "content": "Say"}], max_tokens=8)


def codes(completions, **_):
    return [float(sum(map(ord, text_of(said)))) for said in completions]


@pytest.mark.parametrize("agent", [None, asks], ids=["plain", "agent"])
def test_what_is_sampled_of_a_row_depends_on_no_order_and_no_batch(agent):
    """Nor does the loss, also where rewards are divided by the deviation of a batch."""
    rows = [{"prompt": [{"role": "user", "content": "Say" if agent else f"Say {i}"}], "i": i} for i in range(4)]
    given = {"reward_funcs": [codes]} | ({"agent": agent} if agent else {})
    tokenizer, model = tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS), tiny.causal_lm(initializer_range=0.1)
    texts, losses = [], []
    for some, size in ((rows, 8), (rows[::-1], 2)):
        settings = {"max_completion_length": 8, "per_device_eval_batch_size": size, "scale_rewards": "batch"}
        metrics, episodes = evaluate(model, tokenizer, given | {"eval_dataset": some}, k=2, **settings)
        said = [text_of(one["completion"]) for one in episodes]
        texts.append({row["i"]: said[2 * place : 2 * place + 2] for place, row in enumerate(some)})
        losses.append(metrics["loss"])
    assert texts[0] == texts[1] and len({text for some in texts[0].values() for text in some}) == 8
    assert losses[0] == pytest.approx(losses[1], abs=1e-6), losses


def test_an_environment_without_rows_is_refused(module):
    with pytest.raises(ValueError, match="has no rows to evaluate on"):
        evaluate(tiny.causal_lm(), tiny.tokenizer(), environment_of(f"{module}:agent"))
