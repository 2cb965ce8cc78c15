"""Groups that are scored while others are written: what is learned is what it would be afterwards."""

import asyncio
import json
import threading
from dataclasses import replace

import pytest
import torch

from posttrain.rl import GRPOTrainer
from posttrain.rl.rewards.scoring import GroupScores, RewardArguments, RewardError, Rewards
from posttrain.rl.samples.samples import Sample
from tests.rl.agents.scripted import ScriptedEngine, call
from tests.rl.agents.test_agent import TOKENIZER, add, calls_tools, right, scripted, trainer, weights_of

TWO_GROUPS = dict(max_completion_length=400, per_device_train_batch_size=8, num_generations=4)


def told(folder):
    return [json.loads(line) for line in (folder / "samples-0.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("through", ["tools", "agent"])
def test_results_are_those_of_scoring_all_at_the_end(tmp_path, through):
    sizes = []

    def logs_too(completions, sum, log_metric, log_extra):
        sizes.append(len(completions))
        rewards = right(completions, sum)
        for reward in rewards:
            log_metric("right", reward)
        log_extra("sums", sum)
        return rewards

    given = {"tools": [add]} if through == "tools" else {"agent": calls_tools}
    runs = []
    for name, at_once in (("end", 1), ("early", 2)):
        args = TWO_GROUPS | dict(reward_concurrency=at_once, sample_ledger=True, log_completions=True)
        run = trainer(tmp_path / name, logs_too, generator=scripted(), args=args, **given)
        weights = weights_of(run)
        logs = [{k: v for k, v in one.items() if "seconds" not in k and "perf" not in k and k != "step_time"}
                for one in run.state.log_history if "reward" in one]  # fmt: skip
        runs.append((weights, logs, told(tmp_path / name)))
    (weights, logs, lines), (early_weights, early_logs, early_lines) = runs
    assert sizes == [8, 8, 4, 4, 4, 4]
    assert lines == early_lines and len(lines) == 1 + 16 and len(logs) == 2
    times = ("agent/seconds",)
    for one, other in zip(logs, early_logs, strict=True):
        assert {k: v for k, v in one.items() if k not in times} == {k: v for k, v in other.items() if k not in times}
        assert "right" in one
    assert all(torch.equal(weights[name], early_weights[name]) for name in weights)


@pytest.mark.parametrize("through", ["tools", "agent"])
def test_a_group_is_scored_while_another_waits_for_its_tools(tmp_path, through):
    scored, in_time = threading.Event(), []

    async def look(number: int) -> str:
        """Look.

        Args:
            number: of the question.
        """
        if number % 2:
            in_time.append(await asyncio.to_thread(scored.wait, 60))
        return "."

    def answer(prompt):
        number, *answers = prompt.split("What is ")[1].split("<tool_response>")
        return "Done" if answers else call("look", number=int(number.split()[0]))

    async def looks(episode, row):
        said = await episode.generate(row["prompt"], tools=[look])
        await look(**said["tool_calls"][0]["function"]["arguments"])

    def reward(completions):
        scored.set()
        return [float(i % 2) for i in range(len(completions))]

    given = {"tools": [look]} if through == "tools" else {"agent": looks}
    rows = [{"prompt": [{"role": "user", "content": f"What is {i} ?"}]} for i in range(2)]
    args = TWO_GROUPS | dict(reward_concurrency=2, max_steps=1)
    engine = ScriptedEngine(TOKENIZER, answer)
    trainer(tmp_path, reward, rows=rows, generator=engine, args=args, **given).train()
    assert in_time == [True] * 4


def samples_of(*numbers):
    return [
        Sample({}, "question", [1], ids=[number], completion=str(number), place=i) for i, number in enumerate(numbers)
    ]


def scores_of(rewards, groups, ended):
    found = GroupScores(lambda some: rewards.of_part(some, None), groups, 2)
    for place in reversed(range(len(ended))):
        found.ended(place, ended[place])
    rewards.groups = found
    return rewards.of(ended, None)


def test_groups_without_a_reward_are_no_rollout_without_one(caplog):
    def first(completions):
        return [1.0 if text == "0" else None for text in completions]

    rewards = Rewards([first], RewardArguments(reward_on_none="raise"))
    scores = scores_of(rewards, [0, 0, 1, 1], samples_of(0, 1, 2, 3))
    assert scores.rewards[:, 0].nan_to_num(-1).tolist() == [1, -1, -1, -1] and "3 of 4 completions" in caplog.text
    with pytest.raises(RewardError, match="any of 2 completions"):
        scores_of(rewards, [0, 1], samples_of(5, 6))


def test_a_failure_leaves_out_its_own_group_and_columns_stay_in_their_rows():
    def reward(completions, log_extra, log_metric):
        if "2" in completions:
            raise OSError("the judge is away")
        log_extra("texts", completions)
        log_metric("number", float(completions[0]))
        return [(float(text),) for text in completions]

    rewards = Rewards([reward], RewardArguments(reward_on_error="mask"))
    scores = scores_of(rewards, [0, 0, 3, 3, 4], samples_of(0, 1, 2, 3, 4))
    assert scores.rewards[:, 0].nan_to_num(-1).tolist() == [0, 1, -1, -1, 4]
    assert scores.failed[:, 0].tolist() == [False, False, True, True, False]
    assert scores.columns == {"texts": ["0", "1", None, None, "4"]} and scores.metrics == {"number": [0.0, 4.0]}
    assert [turns[0].turns if turns else None for turns in scores.turns] == [[0], [1], None, None, [4]]
    assert rewards.groups is None and len(scores.seconds) == 1


def test_a_failure_that_stops_the_run_does_so_before_all_is_written():
    def reward(completions):
        raise OSError("the judge is away")

    found = GroupScores(lambda some: Rewards([reward]).of_part(some, None), [0, 1, 1], 1)
    one, *others = samples_of(1, 2, 3)
    found.ended(0, one)
    found._threads.shutdown(wait=True)
    with pytest.raises(RewardError, match="the judge is away"):
        found.ended(1, others[0])


def test_completions_that_were_changed_after_their_end_are_scored_as_they_are(tmp_path):
    seen = []

    def reward(completions):
        seen.append(completions)
        return [float(len(text[-1]["content"])) for text in completions]

    class Shortens(GRPOTrainer):
        def generate(self, samples, sampling):
            done = super().generate(samples, sampling)
            return [replace(one, completion=[{"role": "assistant", "content": "short"}]) for one in done]

    args = TWO_GROUPS | dict(reward_concurrency=2, max_steps=1)
    run = trainer(tmp_path, reward, kind=Shortens, generator=scripted(), tools=[add], args=args)
    run.train()
    (scored,) = [some for some in seen if len(some) == 8]  # a thread may still be scoring a group
    assert all(text[-1]["content"] == "short" for text in scored)
