"""Stored trajectories: what they hold, and how they are shown."""

import json
import math
import re

import pytest
import torch

from posttrain.cli import main
from posttrain.cli.report import report, trajectories
from posttrain.lm.generate.samples import append_lines
from posttrain.lm.generate.trajectories import Filter, path_of, read
from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.rl.online.trajectories import stored
from posttrain.rl.rewards.scoring import Scores
from posttrain.rl.samples.samples import Sample
from tests import tiny

TOKENIZER = tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS)
ROWS = [{"prompt": [{"role": "user", "content": f"What is {i}?"}]} for i in range(4)]


async def asks_twice(episode, row):
    first = await episode.generate(row["prompt"], max_tokens=6)
    episode.reward(0.5)
    await episode.generate([*row["prompt"], first, {"role": "user", "content": "Sure?"}], max_tokens=6)
    return float(len(first["content"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    args = GRPOConfig(output_dir=str(folder), per_device_train_batch_size=4, num_generations=4, max_steps=2,
                      max_completion_length=40, log_trajectories=3, save_strategy="no", report_to="none", use_cpu=True,
                      disable_tqdm=True, logging_steps=1, max_staleness=1)  # fmt: skip
    model = tiny.causal_lm(max_position_embeddings=512)
    GRPOTrainer(model, None, args, train_dataset=ROWS, processing_class=TOKENIZER, agent=asks_twice).train()
    return folder


def test_each_token_is_stored_with_what_is_known_of_it(folder):
    found = read(folder)
    assert [(one["rollout"], one["sample"], one["step"]) for one in found] == [
        (r, s, r + 1) for r in (0, 1) for s in range(3)
    ]
    for one in found:
        (sequence,) = one["sequences"]
        assert one["turns"] == 2 and one["turn_rewards"] == [0.5, None]
        assert one["reward"] == pytest.approx(sum(one["rewards"].values()))
        assert one["tokens"] == sum(sequence["learn"]) < len(sequence["ids"])
        assert len({len(sequence[name]) for name in ("ids", "tokens", "learn", "logps", "versions")}) == 1
        assert {*sequence["versions"]} == {0}  # both rollouts were begun before the first step
        assert sequence["tokens"] == TOKENIZER.batch_decode([[token] for token in sequence["ids"]])
        assert sequence["prompt"] == TOKENIZER.decode(sequence["prompt_ids"]) and "What is" in sequence["prompt"]


def test_the_command_lists_filters_and_shows_them(folder, capsys):
    assert main(["trajectories", str(folder)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "step", "turns", "calls", "tokens", "reward", "ending", "completion"]
    assert [line.split()[0] for line in lines] == ["0/0", "0/1", "0/2", "1/0", "1/1", "1/2"]
    assert main(["trajectories", str(folder), "--step", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert main(["trajectories", str(folder), "--show", "1/2"]) == 0
    shown = capsys.readouterr().out
    assert "rewards of turns: [0.5, None]" in shown and "[user] Sure?" in shown
    assert main(["trajectories", str(folder), "--show", "9/9"]) == 2
    assert main(["trajectories", str(folder / "nothing")]) == 1


def test_the_report_has_a_page_of_them(folder):
    page = report.write([folder], folder / "report.html").read_text(encoding="utf-8")
    assert 'href="trajectories.html">6 trajectories' in page
    text = (folder / trajectories.PAGE).read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert [row["name"] for row in data] == ["0/0", "0/1", "0/2", "1/0", "1/1", "1/2"]
    for row, one in zip(data, read(folder), strict=True):
        (shown,), (whole,) = row["sequences"], one["sequences"]
        names = ("prompt", "tokens", "learn", "logps", "versions")
        assert [shown[name] for name in names] == [whole[name] for name in names] and shown["left_out"] == 0
    assert "{{" not in text.replace(json.dumps(data), "")


def test_a_page_of_many_has_the_last_ones_and_the_beginnings_of_their_sequences(monkeypatch):
    monkeypatch.setattr(trajectories, "MOST", 2)
    monkeypatch.setattr(trajectories, "MOST_TOKENS", 3)
    values = {"tokens": list("abcde"), "learn": [1, 0, 1, 1, 1], "logps": None, "versions": [0, 0, 1, 1, 1]}
    said = [{"role": "assistant", "content": "", "tool_calls": [{}, {}]}, {"role": "tool", "content": "5"}]
    whole = {"prompt": "p", "prompt_ids": [1], "ids": [5, 6, 7, 8, 9]} | values
    text = trajectories.page([line(n, completion=said, sequences=[whole]) for n in range(3)], "t")
    rows = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert [(row["name"], row["calls"]) for row in rows] == [("0/1", 2), ("0/2", 2)]
    assert "The last 2 of 3 trajectories." in text
    cut = {name: value and value[:3] for name, value in values.items()}
    assert rows[0]["sequences"] == [cut | {"prompt": "p", "left_out": 2}]


def test_how_each_sample_ended_is_stored_with_its_rewards_and_its_advantage():
    ends = {"finished": (True, ""), "length": (False, ""), "seconds": (False, "seconds"), "failed": (True, "failed")}
    samples = [Sample({}, "a", [1], [2, 3], finished=done, ending=why) for done, why in ends.values()]
    rewards = torch.tensor([[1.0, 2.0], [0.0, 1.0], [math.nan, 4.0], [math.nan, math.nan]])
    none = torch.zeros_like(rewards, dtype=torch.bool)
    scores = Scores(rewards, none, [0.0, 0.0], names=["one", "other"], weights=torch.tensor([1.0, 0.5]))
    found = stored(samples, scores, torch.tensor([0.5, -0.5, 1.5, 0.0]), 3, TOKENIZER)
    assert [one["ending"] for one in found] == list(ends)
    assert [one["advantage"] for one in found] == [0.5, -0.5, 1.5, 0.0]
    assert [one["reward"] for one in found] == [2.0, 0.5, 2.0, None]
    assert found[2]["rewards"] == {"one": None, "other": 4.0} and found[0]["sequences"][0]["learn"] == [1, 1]


def line(sample, **changes):
    usual = {"step": 1, "rollout": 0, "prompt": "a", "completion": 'b </script> "c"', "rewards": {}, "reward": 1.0}
    usual |= {"advantage": 0.0, "ending": "finished", "turns": 1, "tokens": 5, "sequences": []}
    return usual | {"sample": sample} | changes


def test_filters_and_lines_that_a_run_has_repeated(tmp_path):
    append_lines(path_of(tmp_path, 0), [line(0), line(1, reward=None), line(2, ending="failed", tokens=9)])
    append_lines(path_of(tmp_path, 0), [line(0, reward=0.0)])  # of a run that was resumed
    path_of(tmp_path, 1).write_text('{"step": 1, "roll')  # of a process that was killed
    append_lines(path_of(tmp_path, 1), [line(3, reward=None)])

    def kept(**options):
        return [one["sample"] for one in read(tmp_path, Filter(**options))]

    assert kept() == [0, 1, 2, 3] and kept(min_reward=0.5) == [2] and kept(max_reward=0.5) == [0]
    assert kept(min_reward=1.0) == [2] == kept(min_tokens=9) and kept(max_reward=0.0) == [0] and not kept(min_tokens=10)
    assert kept(unfinished=True) == [2] == kept(min_tokens=6) and kept(contains="script") == [0, 1, 2, 3]
    assert kept(contains='> "c"') == [0, 1, 2, 3] and not kept(contains="'c'")
    assert "</script> " not in trajectories.page(read(tmp_path), "t")
