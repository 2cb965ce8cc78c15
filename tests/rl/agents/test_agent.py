"""Agents in training: what they asked is what is learned from, and they train as the trainer's own loops do."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from posttrain.lm.generate.trajectories import read
from posttrain.rl import (
    Agent,
    AgentCommand,
    DistillationConfig,
    DistillationTrainer,
    GRPOConfig,
    GRPOTrainer,
    OnlineDPOConfig,
    OnlineDPOTrainer,
    ReinforcePlusPlusConfig,
    ReinforcePlusPlusTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from posttrain.rl.agents import guard
from posttrain.rl.generation.engines import CopiedGenerator
from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.generation.local_steps import LocalSteps
from posttrain.rl.online.ledger import audit
from posttrain.rl.rewards import background
from posttrain.rl.samples.prompts import PromptCodec
from tests import programs, tiny
from tests.rl.agents.scripted import ScriptedEngine, call

TOKENIZER = tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS)
ROWS = [{"prompt": [{"role": "user", "content": f"What is {i} and {i}?"}], "sum": 2 * i} for i in range(8)]
QUICK = dict(max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=24, logging_steps=1,
             learning_rate=1e-2, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True)  # fmt: skip


def add(a: int, b: int):
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def spread(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


def trainer(tmp_path, reward=None, kind=GRPOTrainer, config=GRPOConfig, **given):
    args = config(output_dir=str(tmp_path), **(QUICK | given.pop("args", {})))
    model = tiny.causal_lm(max_position_embeddings=1024)
    rows = given.pop("rows", ROWS)
    return kind(model, reward, args, train_dataset=rows, processing_class=TOKENIZER, **given)


def weights_of(run):
    run.train()
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


async def asks_once(episode, row):
    await episode.generate(row["prompt"])


async def calls_tools(episode, row):
    """The loop that the trainer has for tools, outside of it."""
    messages = list(row["prompt"])
    while True:
        answer = await episode.generate(messages, tools=[add])
        messages.append(answer)
        if not answer.get("tool_calls"):
            return
        for one in answer["tool_calls"]:
            value = add(**one["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": str(value)})


def test_an_agent_that_asks_once_trains_as_its_prompt_does(tmp_path):
    plain = weights_of(trainer(tmp_path / "plain", spread))
    assert equal(plain, weights_of(trainer(tmp_path / "agent", spread, agent=asks_once)))


def scripted():
    """Calls the tool twice with what the question asks for, then tells the sum."""

    def answer(prompt):
        number, *answers = prompt.split("What is ")[1].split("<tool_response>")
        number = int(number.split()[0])
        return call("add", a=number, b=number) if len(answers) < 2 else f"It is {answers[-1].split()[0]}"

    return ScriptedEngine(TOKENIZER, answer)


def right(completions, sum, **_):
    return [float(str(total) in said[-1]["content"]) - 0.1 * len(said) * (i % 2)
            for i, (said, total) in enumerate(zip(completions, sum, strict=True))]  # fmt: skip


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_a_loop_of_tools_outside_trains_as_the_trainers_own(tmp_path, loss):
    args = dict(max_completion_length=400, loss_type=loss)
    inside, outside = scripted(), scripted()
    one = weights_of(trainer(tmp_path / "in", right, tools=[add], generator=inside, args=args))
    other = weights_of(trainer(tmp_path / "out", right, agent=calls_tools, generator=outside, args=args))
    assert sorted(inside.written) == sorted(outside.written) and len(inside.written) == 3 * 8
    assert equal(one, other)


def test_it_trains_on_the_tokens_that_were_sampled_and_on_no_others(tmp_path):
    engine = scripted()
    run = trainer(tmp_path, right, agent=calls_tools, generator=engine, args=dict(max_completion_length=400, beta=0.1))
    rollouts = []
    make = run.make_rollout
    run.make_rollout = lambda batches: rollouts.append(make(batches)) or rollouts[-1]
    run.train()
    learned = []
    for rollout in rollouts:
        for row in range(len(rollout)):
            learned += rollout.completion_ids[row][rollout.loss_mask[row]].tolist()
    assert sorted(learned) == sorted(token for _, ids in engine.written for token in ids)
    assert all(rollout.sampling_logps[rollout.loss_mask].lt(0).all() for rollout in rollouts)
    assert not run.old_logps.recomputes  # the engine's log-probabilities are those of a forward of all turns


async def forgets(episode, row):
    """Asks twice in two conversations, and goes on with the first."""
    first = await episode.generate(row["prompt"], max_tokens=8)
    await episode.generate([{"role": "user", "content": "And now?"}], max_tokens=8)
    again = [*row["prompt"], first, {"role": "user", "content": "Sure?"}]
    await episode.generate(again, max_tokens=8)
    return float(row["sum"]) if episode.api_key else 0.0


def test_a_changed_history_begins_a_sequence_that_shares_the_reward(tmp_path):
    run = trainer(tmp_path, agent=forgets, args=dict(max_steps=1, max_completion_length=60))
    samples = run.new_samples([{**row} for row in ROWS[:4]])
    done = run.rollout_maker.sample(samples)
    assert [len(one.sequences) for one in done] == [2] * 4
    for one in done:
        main, other = one.sequences
        assert sum(main.learn) < len(main.ids) and all(other.learn)
        assert [message["role"] for message in one.completion] == ["assistant", "user", "assistant"]
        assert one.prompt == one.row["prompt"] and one.num_chosen == sum(main.learn) + sum(other.learn)
    assert run.rollout_maker.score(done).rewards[:, 0].tolist() == [0.0, 2.0, 4.0, 6.0]
    of_each = run.rollout_maker.of(done).of_completions(torch.tensor([0.0, 1.0, 2.0, 3.0]))
    assert of_each.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]  # as their advantages
    run.train()
    assert run.state.log_history[0]["agent/sequences"] == 2 and run.state.log_history[0]["agent/turns"] == 3


async def branches(episode, row):
    """Goes on from its first turn in two ways."""
    said = [*row["prompt"], await episode.generate(row["prompt"], max_tokens=8)]
    for more in ("Sure?", "Why?"):
        await episode.generate([*said, {"role": "user", "content": more}], max_tokens=6)
    return 1.0


def test_a_turn_that_two_sequences_go_on_from_is_learned_from_once(tmp_path):
    run = trainer(tmp_path, agent=branches, args=dict(max_completion_length=80))
    for one in run.rollout_maker.sample(run.new_samples(ROWS[:4])):
        main, other = one.sequences
        assert sorted(number for each in one.sequences for number, _ in each.turns) == [0, 1, 2]
        (_, (_, stop)), _ = main.turn_spans
        assert other.prompt_ids[: len(main.prompt_ids) + stop] == [*main.prompt_ids, *main.ids[:stop]]
        assert all(other.learn) and one.num_chosen == sum(main.learn) + len(other.ids)


TRAINERS = {
    "rloo": (RLOOTrainer, RLOOConfig, {}),
    "reinforce++": (ReinforcePlusPlusTrainer, ReinforcePlusPlusConfig, {}),
    "online-dpo": (OnlineDPOTrainer, OnlineDPOConfig, dict(num_generations=2, per_device_train_batch_size=2)),
    "distillation": (DistillationTrainer, DistillationConfig, dict(num_generations=1)),
}


async def asks_and_asks(episode, row):
    """A conversation that goes on, one apart in every other episode."""
    first = await episode.generate(row["prompt"], max_tokens=8)
    if (await episode.generate([*row["prompt"], first, {"role": "user", "content": "?"}], max_tokens=4))["content"]:
        await episode.generate([{"role": "user", "content": "And?"}], max_tokens=4)
    return float(row["sum"] % 3) + len(first["content"]) / 10


@pytest.mark.parametrize("name", TRAINERS)
def test_other_trainers_train_agents_too(tmp_path, name):
    kind, config, more = TRAINERS[name]
    given = {"teacher_model": tiny.causal_lm(seed=1)} if name == "distillation" else {}
    args = QUICK | {"max_completion_length": 60} | more
    model = tiny.causal_lm(max_position_embeddings=256)
    run = kind(
        model,
        args=config(output_dir=str(tmp_path), **args),
        train_dataset=ROWS,
        eval_dataset=ROWS[:2],
        processing_class=TOKENIZER,
        agent=asks_and_asks,
        **given,
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run.train()
    assert not equal(before, dict(model.named_parameters()))
    logged = run.evaluate()
    assert logged["eval_reward"] > 0 and logged["eval_rewards/asks_and_asks/mean"] == logged["eval_reward"]


def test_it_can_be_evaluated_alone(tmp_path):
    args = dict(max_steps=-1, num_generations_eval=4, eval_temperature=0.0)
    run = trainer(tmp_path, agent=sync_agent, rows=None, eval_dataset=[{"sum": 1}, {"sum": 0}], args=args)
    logged = run.evaluate()
    assert logged["eval_pass@1"] == 0.5 and logged["eval_reward"] == 0.5 and "eval_loss" in logged


def sync_agent(episode, row):
    """A plain function, which runs in a thread, and asks over HTTP."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    headers = {"authorization": f"Bearer {episode.api_key}"}
    httpx.post(f"{episode.base_url}/chat/completions", json=body, headers=headers).raise_for_status()
    episode.reward(row["sum"])


async def breaks(episode, row):
    await episode.generate(row["prompt"], max_tokens=4)
    if row["sum"] == 2:
        raise KeyError("lost")
    return 1.0


async def rewards_turns(episode, row):
    """Two turns; the first earns what its text is long, the whole 1."""
    first = await episode.generate(row["prompt"], max_tokens=8)
    episode.reward(len(first["content"]))
    await episode.generate([*row["prompt"], first, {"role": "user", "content": "Sure?"}], max_tokens=8)
    return 1.0


def test_each_turn_learns_from_its_own_reward(tmp_path):
    args = dict(max_steps=1, max_completion_length=60, turn_credit="returns", scale_rewards="none")
    run = trainer(tmp_path, agent=rewards_turns, args=args)
    made, make = [], run.make_rollout
    run.make_rollout = lambda batches: made.append(make(batches)) or made[-1]
    scored, score = [], run.score
    run.score = lambda samples: scored.append((samples, score(samples))) or scored[-1][1]
    run.train()
    ((samples, scores),), (rollout,) = scored, made
    given = [turns[0] for turns in scores.turns]
    assert [one.total for one in given] == scores.rewards.flatten().tolist()
    assert all(one.outcome == 1.0 and one.turns[0] > 0 and one.turns[1] is None for one in given)
    mean = sum(one.turns[0] + 2 for one in given) / 8  # returns are x + 1 and 1
    for row, (sample, one) in enumerate(zip(samples, given, strict=True)):
        (_, (start, stop)), (_, (again, end)) = sample.turn_spans
        advantages = rollout.advantages[row]
        assert advantages[start:stop].tolist() == pytest.approx([one.turns[0] + 1 - mean] * (stop - start), abs=1e-5)
        assert advantages[again:end].tolist() == pytest.approx([1 - mean] * (end - again), abs=1e-5)
        assert not advantages[stop:again].any()


async def says_nothing(episode, row):
    first = await episode.generate([{"role": "user", "content": "hint"}], max_tokens=3)
    episode.reward(0.5)
    said = [{"role": "user", "content": "hint"}, first, {"role": "user", "content": ""}]
    await episode.generate(said, max_tokens=2)
    episode.reward(0.25)


def test_turns_with_nothing_between_them_are_two(tmp_path):
    """A template that writes contents alone writes nothing for a message without one."""
    words = tiny.tokenizer(chat_template="{% for message in messages %}{{ message.content }}{% endfor %}")
    args = GRPOConfig(str(tmp_path), **QUICK | dict(turn_credit="returns", log_trajectories=1))
    run = GRPOTrainer(tiny.causal_lm(), None, args, ROWS, processing_class=words, agent=says_nothing)
    run.train()
    (one, *_) = read(tmp_path)
    assert (one["turns"], one["turn_rewards"]) == (2, [0.5, 0.25]) and one["sequences"][0]["learn"] == [1] * 5


@pytest.mark.parametrize("how", ["raise", "value", "mask"])
def test_an_agent_that_fails_is_treated_as_a_reward_function_that_does(tmp_path, how, caplog):
    args = dict(reward_on_error=how) | (dict(reward_error_value=-1.0) if how == "value" else {})
    run = trainer(tmp_path, agent=breaks, args=args)
    samples = run.new_samples(ROWS[:3])
    if how == "raise":
        with pytest.raises(RuntimeError, match="The agent 'breaks' failed on the row .*KeyError: 'lost'"):
            run.rollout_maker.sample(samples)
        return
    done = run.rollout_maker.sample(samples)
    rewards = run.rollout_maker.score(done).rewards[:, 0]
    assert rewards[[0, 2]].tolist() == [1.0, 1.0] and caplog.text.count("failed on the row") == 1
    assert rewards[1].isnan() if how == "mask" else rewards[1] == -1
    assert [one.finished for one in done] == [False] * 3  # 4 tokens are no end


async def exits(episode, row):
    await episode.generate(row["prompt"], max_tokens=4)
    sys.exit(3)


def exits_plainly(episode, row):
    sys.exit(3)


@pytest.mark.parametrize("agent", [exits, exits_plainly])
@pytest.mark.parametrize("apart", [False, True])
def test_a_script_that_exits_has_failed(tmp_path, agent, apart):
    run = trainer(tmp_path, agent=agent, args=dict(rollout_process=apart))
    with pytest.raises(RuntimeError, match=r"failed on the row .*it called sys.exit\(3\). Mend it"):
        run.rollout_maker.sample(run.new_samples(ROWS[:2]))


async def awaits_what_it_cancelled(episode, row):
    turn = asyncio.create_task(episode.generate(row["prompt"], max_tokens=4))
    turn.cancel()
    await turn


async def cancels_itself(episode, row):
    asyncio.current_task().cancel()
    await episode.generate(row["prompt"], max_tokens=4)


@pytest.mark.parametrize("agent", [awaits_what_it_cancelled, cancels_itself])
@pytest.mark.parametrize("apart", [False, True])
def test_an_agent_that_cancels_has_failed(tmp_path, agent, apart):
    run = trainer(tmp_path, agent=agent, args=dict(rollout_process=apart))
    with pytest.raises(RuntimeError, match="failed on the row .*it cancelled itself, or what it awaited. Mend it"):
        run.rollout_maker.sample(run.new_samples(ROWS[:2]))


async def leaves_a_task_that_exits(episode, row):
    async def other():
        sys.exit(4)

    task = asyncio.create_task(other())
    await asyncio.wait([task])
    await episode.generate(row["prompt"], max_tokens=4)
    return 1.0 if isinstance(task.exception(), SystemExit) else 0.0


def test_what_exits_beside_an_agent_does_not_end_the_event_loop(tmp_path):
    run = trainer(tmp_path, agent=leaves_a_task_that_exits)
    done = run.rollout_maker.sample(run.new_samples(ROWS[:2]))
    assert run.rollout_maker.score(done).rewards.tolist() == [[1.0], [1.0]]


def test_plain_agents_wait_side_by_side_however_many(tmp_path):
    together = threading.Barrier(40, timeout=60)

    def meets(episode, row):
        return float(together.wait() >= 0)

    run = trainer(tmp_path, agent=meets)
    done = run.rollout_maker.sample(run.new_samples(ROWS * 5))
    assert run.rollout_maker.score(done).rewards.sum() == 40


async def asks_elsewhere(episode, row):
    return 1.0


def test_an_agent_that_never_asks_the_policy_is_named(tmp_path, caplog):
    trainer(tmp_path, agent=asks_elsewhere, args=dict(max_steps=1)).train()
    assert "No episode has asked the policy" in caplog.text and "all rewards were equal" not in caplog.text


async def hangs(episode, row):
    await episode.generate(row["prompt"])
    await asyncio.sleep(0.5 if row["sum"] == 2 else 0)
    return 1.0


def test_a_trajectory_that_hangs_is_named_with_what_it_waits_for(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(background, "SLOW", 0.2)
    run = trainer(tmp_path, agent=hangs)
    run.rollout_maker.sample([replace(one, place=5 + i) for i, one in enumerate(run.new_samples(ROWS[:3]))])
    (said,) = [record.getMessage() for record in caplog.records if "has gone on" in record.getMessage()]
    assert said.startswith(
        "No trajectory of the agent 'hangs' has gone on for 0.2 seconds. 1 have not ended: 0/6 waits"
    )
    assert "waits for the agent after 1 turns (row {'prompt'" in said

    class Hangs(LocalGenerator):
        is_concurrent = has_own_weights = True

        def generate(self, *given, **options):
            time.sleep(0.5)
            return super().generate(*given, **options)

    caplog.clear()
    run = trainer(tmp_path, agent=asks_once, generator=Hangs(TOKENIZER))
    run.rollout_maker.sample(run.new_samples(ROWS[:1]))
    assert "0/0 waits for the engine after 0 turns" in caplog.text


async def slow_or_long(episode, row):
    if row["sum"] == 0:
        await asyncio.sleep(60)
    said = list(row["prompt"])
    while True:
        said += [await episode.generate(said, max_tokens=10), {"role": "user", "content": "On."}]


def test_what_bounds_an_episode_is_counted(tmp_path):
    agent = Agent(slow_or_long, seconds=2.0, turns=2)
    run = trainer(tmp_path, agent=agent, args=dict(max_completion_length=60, max_steps=1), rows=ROWS[:2])
    done = run.rollout_maker.sample(run.new_samples(ROWS[:2]))
    assert len(done[0].ids) == 1 and not any(done[0].learn)  # it has asked nothing
    assert sum(done[1].learn) == 20 and run.rollout_maker.score(done).rewards[:, 0].tolist() == [0.0, 0.0]
    agent = Agent(slow_or_long, turns=None)
    run = trainer(tmp_path, agent=agent, args=dict(max_completion_length=60), rows=ROWS[1:])
    (one,) = run.rollout_maker.sample(run.new_samples(ROWS[1:2]))
    assert len(one.ids) <= 60 and sum(one.learn) >= 20
    assert {name: run.metrics.state_dict()[f"agent/cut/{name}"][0] for name in ("turns", "tokens")} == {
        "turns": 0,
        "tokens": 1,
    }


def asks(order, lengths):
    """An agent that asks for turns of so many tokens, by the row's sum, and notes when they have ended."""

    async def agent(episode, row):
        for tokens in lengths[row["sum"]]:
            await episode.generate(row["prompt"], max_tokens=tokens)
            order.append((row["sum"], tokens))
        return 1.0

    return agent


def test_a_long_turn_holds_up_no_other_episode(tmp_path):
    order = []
    run = trainer(tmp_path, agent=asks(order, {0: [90], 2: [5, 6, 7]}), args=dict(max_completion_length=90))
    run.rollout_maker.sample(run.new_samples(ROWS[:2]))
    assert order == [(2, 5), (2, 6), (2, 7), (0, 90)]


def test_turns_of_an_engine_that_takes_several_calls_are_asked_for_apart(tmp_path):
    engine, both = ScriptedEngine(TOKENIZER, lambda prompt: "Hello."), threading.Barrier(2)
    write = engine.generate

    def generate(*given):
        both.wait(20)  # for the turn of the other episode
        return write(*given)

    engine.is_concurrent, engine.generate = True, generate
    run = trainer(tmp_path, agent=asks([], {0: [8], 2: [8]}), generator=engine)
    run.rollout_maker.sample(run.new_samples(ROWS[:2]))
    assert sorted(len(ids) for _, ids in engine.written) == [len(TOKENIZER("Hello.")["input_ids"]) + 1] * 2


@pytest.mark.parametrize("is_concurrent", [False, True])
def test_rollouts_of_agents_are_made_while_the_policy_is_trained(tmp_path, is_concurrent):
    """They overlap where the engine takes several calls: then the second rollout is done before the first."""
    order, first, second = [], threading.Event(), threading.Event()

    class Engine(CopiedGenerator):
        updates_in_flight = True

        def __init__(self):
            super().__init__(LocalGenerator(TOKENIZER))
            self.is_concurrent, self.lock = is_concurrent, threading.Lock()

        def generate(self, *given):
            with self.lock:
                return super().generate(*given)

        def sync_weights(self, model):
            with self.lock:
                super().sync_weights(model)

    async def agent(episode, row):
        place = row["sum"] // 4  # rows come in their order, two groups a rollout
        (first if place == 0 else second).set()
        if is_concurrent:  # else the second would begin when the first has ended
            assert await asyncio.to_thread((second if place == 0 else first).wait, 20)
        answer = await episode.generate(row["prompt"])
        order.append(place)
        return float(len(answer["content"]) % 5)

    run = trainer(
        tmp_path,
        agent=agent,
        generator=Engine(),
        args=dict(
            max_staleness=2, max_steps=3, shuffle_dataset=False, per_device_train_batch_size=8, num_train_epochs=3
        ),
        rows=ROWS[:4],
    )
    run.train()
    assert run.state.global_step == 3 and {0, 1} <= {*order} and (not is_concurrent or second.is_set())
    logged = [record["staleness/max"] for record in run.state.log_history if "staleness/max" in record]
    assert logged and max(logged) <= 2


def test_each_token_of_an_episode_knows_the_weights_that_wrote_it(tmp_path):
    class Engine(CopiedGenerator):
        """Says that each turn of an episode was written by other weights."""

        is_concurrent, updates_in_flight, lock = True, True, threading.Lock()

        def generate(self, prompts, n, *given):
            with self.lock:
                done = super().generate(prompts, n, *given)
            turns = [TOKENIZER.decode(prompt).count("<|im_start|>assistant") for prompt in prompts for _ in range(n)]
            return replace(done, versions=[[turn] * len(ids) for turn, ids in zip(turns, done.ids, strict=True)])

    engine = Engine(LocalGenerator(TOKENIZER))
    run = trainer(tmp_path, agent=forgets, generator=engine, args=dict(max_staleness=1, max_completion_length=60))
    rollouts, make = [], run.make_rollout
    run.make_rollout = lambda batches: rollouts.append(make(batches)) or rollouts[-1]
    run.train()
    for rollout in rollouts:
        for row in range(len(rollout)):
            learned = rollout.versions[row][rollout.loss_mask[row]].tolist()
            assert learned == sorted(learned) and set(learned) == ({1, 2} if row % 2 == 0 else {1})


def test_no_more_episodes_run_than_may_where_rollouts_overlap(tmp_path):
    running, most = set(), []

    async def agent(episode, row):
        running.add(episode)
        most.append(len(running))
        await asyncio.sleep(0.05)
        running.remove(episode)
        await episode.generate(row["prompt"])

    engine = CopiedGenerator(scripted())
    engine.is_concurrent = engine.updates_in_flight = True
    run = trainer(tmp_path, spread, agent=Agent(agent, inflight=2), generator=engine, args=dict(max_staleness=2))
    run.train()
    assert run.rollout_maker.overlap and len(most) == 8 and max(most) == 2


def of_two_rollouts(numbers):
    """An async tool that is asked for one of two `numbers`, and waits until it was asked for the other."""
    asked, met = {number: threading.Event() for number in numbers}, []

    async def look(number: int) -> str:
        """Look.

        Args:
            number: of the question.
        """
        asked[number].set()
        met.append(await asyncio.to_thread(asked[sum(numbers) - number].wait, 60))
        return "."

    return look, met


@pytest.mark.parametrize("where", ["here", "other-process"])
def test_rollouts_of_conversations_overlap_where_their_tools_run_beside_each_other(tmp_path, where):
    look, met = of_two_rollouts((0, 1))

    def answer(prompt):
        number, *answers = prompt.split("What is ")[1].split("<tool_response>")
        return "Done" if answers else call("look", number=int(number.split()[0]))

    engine = CopiedGenerator(ScriptedEngine(TOKENIZER, answer))
    engine.is_concurrent = engine.updates_in_flight = True
    rows = [{"prompt": [{"role": "user", "content": f"What is {i} ?"}]} for i in range(2)]
    args = dict(max_staleness=1, shuffle_dataset=False, max_completion_length=400, sample_ledger=True,
                rollout_process=where == "other-process")  # fmt: skip
    run = trainer(tmp_path, spread, tools=[look], generator=engine, args=args, rows=rows)
    run.train()
    tools = [
        [record[f"tools/{name}_frequency"] for name in ("call", "failure")] for record in run.state.log_history[:2]
    ]
    assert run.state.global_step == 2 and tools == [[1.0, 0.0]] * 2 and audit(tmp_path).problems == []
    assert where == "other-process" or met == [True] * 8


def test_rollouts_with_plain_tools_follow_each_other(tmp_path):
    engine = CopiedGenerator(scripted())
    engine.is_concurrent = engine.updates_in_flight = True
    run = trainer(tmp_path, spread, tools=[add], generator=engine, args=dict(max_staleness=1))
    assert run.sampler.may_overlap and not run.rollout_maker.overlap


@pytest.mark.parametrize("is_concurrent", [False, True])
def test_what_the_engine_raises_ends_the_run(tmp_path, is_concurrent):
    engine = ScriptedEngine(TOKENIZER, lambda prompt: 1 / 0)
    engine.is_concurrent = is_concurrent
    run = trainer(tmp_path, agent=asks([], {0: [8], 2: [8]}), generator=engine)
    with pytest.raises(ZeroDivisionError):
        run.rollout_maker.sample(run.new_samples(ROWS[:2]))


def test_a_turn_that_nobody_waits_for_is_not_written_to_its_end(tmp_path):
    class Steps(LocalSteps):
        number = 0

        def step(self):
            Steps.number += 1
            time.sleep(0.1)
            return super().step()

    run = trainer(tmp_path, agent=Agent(asks([], {0: [900]}), seconds=1), args=dict(max_completion_length=900))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posttrain.rl.generation.local.LocalSteps", Steps)
        (one,) = run.rollout_maker.sample(run.new_samples(ROWS[:1]))
    assert not any(one.learn) and 0 < Steps.number < 30


PROGRAM = """
import json, os, sys, urllib.request
row = json.load(open("row.json"))
assert row["sum"] == int(sys.argv[1]) and os.environ["WHERE"] == os.getcwd()
body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
json.load(urllib.request.urlopen(asked))
open("answer", "w").write(str(row["sum"]))
print("done")
"""


JUDGES = {"exit": (["sh", "-c", "grep -q 2 answer"], [0.0, 1.0]), "number": (["cat", "answer"], [0.0, 2.0])}


@pytest.mark.parametrize(("verifier", "rewards"), JUDGES.values(), ids=JUDGES)
def test_a_command_is_run_for_each_row_and_its_verifier_gives_the_reward(tmp_path, verifier, rewards):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    agent = AgentCommand([sys.executable, str(program), "{sum}"], verifier, {"WHERE": "{folder}"})
    assert agent.__name__ == "program" and AgentCommand(verifier).__name__ == verifier[0]
    run = trainer(tmp_path, agent=agent)
    done = run.rollout_maker.sample(run.new_samples(ROWS[:2]))
    assert run.rollout_maker.score(done).rewards[:, 0].tolist() == rewards and [len(one.ids) for one in done] == [4, 4]


def test_what_a_row_says_is_a_word_of_a_command_whatever_is_in_it(tmp_path):
    program, row = "import sys; print(sys.argv[1].count(sys.argv[2]))", {"a": "{b}{b}", "b": "{a}"}
    run = trainer(tmp_path, agent=[sys.executable, "-c", program, "{a}", "b"])
    (done,) = run.rollout_maker.sample(run.new_samples([row]))
    assert done.extra["agent_reward"] == 2.0


def test_a_command_knows_its_folder_also_by_its_variable(tmp_path):
    """Programs that start others there, as coding agents do, go by it."""
    run = trainer(tmp_path, agent=[sys.executable, "-c", "import os; print(int(os.environ['PWD'] == os.getcwd()))"])
    (done,) = run.rollout_maker.sample(run.new_samples(ROWS[:1]))
    assert done.extra["agent_reward"] == 1.0


def test_a_command_asks_the_policy_past_a_proxy(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    program = (
        "import json, os, urllib.request as r; assert r.proxy_bypass('example.org')\n"
        "body = json.dumps({'prompt': 'a', 'max_tokens': 1}).encode()\n"
        "asked = r.Request(os.environ['OPENAI_BASE_URL'] + '/completions', body)\n"
        "asked.add_header('authorization', 'Bearer ' + os.environ['OPENAI_API_KEY'])\n"
        "print(len(json.load(r.urlopen(asked))['choices']))"
    )
    run = trainer(tmp_path, agent=[sys.executable, "-c", program])
    (done,) = run.rollout_maker.sample(run.new_samples(ROWS[:1]))
    assert done.extra["agent_reward"] == 1.0 and done.num_chosen == 1


def test_a_command_that_fails_says_what_it_printed(tmp_path):
    run = trainer(tmp_path, agent="sh -c 'echo no disk >&2; exit 3'")
    with pytest.raises(RuntimeError, match="exited with 3: no disk"):
        run.rollout_maker.sample(run.new_samples(ROWS[:1]))


def is_gone(pid):
    """Whether a process ends within seconds: a busy machine takes its time to deliver a signal."""
    status, until = Path(f"/proc/{pid}/status"), time.monotonic() + 10
    while time.monotonic() < until:
        try:
            if "zombie" in status.read_text():
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path):
    mark = tmp_path / "pid"
    agent = Agent(AgentCommand(["sh", "-c", f"sleep 60 & echo $! > {mark}; wait"]), seconds=1.0)
    run = trainer(tmp_path, agent=agent)
    run.rollout_maker.sample(run.new_samples(ROWS[:1]))
    assert is_gone(mark.read_text().strip())


RUNS = """
import asyncio, sys, types
from posttrain.rl import AgentCommand

episode = types.SimpleNamespace(base_url="http://127.0.0.1:9/v1", anthropic_base_url="", api_key="", model="")
agent = AgentCommand(["sh", "-c", "sleep 600 & echo $$ $! $PWD > {mark}.new; mv {mark}.new {mark}; wait"])


async def run():
    await AgentCommand("true")(episode, {})
    await asyncio.gather(*(agent(episode, {"mark": mark}) for mark in sys.argv[1:]))


asyncio.run(run())
"""


def test_no_command_outlives_a_trainer_that_is_killed(tmp_path):
    marks = [tmp_path / "one", tmp_path / "other"]
    trainer = programs.Program(["-c", RUNS, *map(str, marks)])
    while not all(mark.exists() for mark in marks):
        assert trainer.poll() is None, trainer.stderr.read()
        time.sleep(0.01)
    os.kill(trainer.pid, signal.SIGKILL)
    for shell, child, folder in (mark.read_text().split() for mark in marks):
        assert is_gone(shell) and is_gone(child)
        until = time.monotonic() + 10
        while Path(folder).exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert not Path(folder).exists()


def test_agents_do_not_go_with_other_ways_to_complete(tmp_path):
    with pytest.raises(ValueError, match="agent makes whole episodes, and tools"):
        trainer(tmp_path, spread, agent=asks_once, tools=[add])
    with pytest.raises(TypeError, match="pass a function"):
        trainer(tmp_path, agent=3)
    with pytest.raises(TypeError, match="agent is of type int"):
        Agent(3, seconds=1.0)
    assert Agent("sleep 9", seconds=1.0).name == "sleep"


@pytest.mark.parametrize(("reward", "shown"), [("good", "'good'"), (torch.ones(2), r"tensor\(\[1., 1.\]\)")], ids=str)
def test_what_an_agent_returns_must_be_a_reward(reward, shown, tmp_path):
    async def returns(episode, row):
        await episode.generate(row["prompt"], max_tokens=2)
        return reward

    run = trainer(tmp_path, agent=returns)
    with pytest.raises(TypeError, match=f"The agent 'returns' returned {shown}"):
        run.rollout_maker.sample(run.new_samples(ROWS[:1]))


def test_an_agent_that_goes_on_in_its_row_changes_it_for_nobody(tmp_path):
    seen = []

    async def goes_on(episode, row):
        said = row["prompt"]
        said.append(await episode.generate(said, max_tokens=3))
        said.append({"role": "user", "content": "And?"})
        await episode.generate(said, max_tokens=3)
        return 1.0

    def shown(prompts):
        seen.extend(prompts)
        return [0.0] * len(prompts)

    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("Why?", "How?")]
    run = trainer(tmp_path, shown, agent=goes_on, rows=rows, args=dict(max_completion_length=400))
    run.train()
    assert all(len(prompt) == 1 for prompt in seen) and len(seen) == 4 * run.state.global_step
    assert run.state.log_history[0]["agent/sequences"] == 1 and run.state.log_history[0]["agent/turns"] == 2


async def asks_of_nothing(episode, row):
    await episode.generate([])


def test_a_conversation_without_messages_is_the_agents_mistake(tmp_path):
    run = trainer(tmp_path, agent=asks_of_nothing)
    with pytest.raises(RuntimeError, match="The agent 'asks_of_nothing' failed on the row .*conversation cannot be"):
        run.rollout_maker.sample(run.new_samples(ROWS[:1]))


@pytest.mark.parametrize("hint", ["lower", "higher"])
def test_a_message_that_begins_as_the_turn_ended_is_read_whole(hint):
    """Where a template writes nothing between turns, only special tokens can be the end that the policy wrote."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<end>", "lower", "higher"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, chat_template=template, pad_token="<pad>", eos_token="<end>"
    )
    (asked,) = tokenizer(hint)["input_ids"]
    for written in range(4):
        assert PromptCodec(tokenizer).next_ids([written], [{"role": "user", "content": hint}], ()) == [asked]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("is_told", [True, False])
def test_the_guard_ends_a_program_also_before_it_knows_its_number(is_told, tmp_path):
    folder = tmp_path / "agent"
    folder.mkdir()
    words = [sys.executable, "-I", "-S", guard.__file__]
    watching = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    program = subprocess.Popen(["sleep", "60"], cwd=folder, start_new_session=True)
    lines = f"0 {folder}\n" + f"{program.pid} {folder}\n" * is_told
    watching.communicate(lines.encode(), timeout=30)
    assert program.wait(timeout=30) == -signal.SIGKILL and not folder.exists()
