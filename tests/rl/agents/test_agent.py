"""Agents in training: what they asked is what is learned from, and they train as the trainer's own loops do."""

import pytest
import torch

from posttrain.rl import GRPOConfig, GRPOTrainer
from tests import tiny
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
    done = run._sample(samples)
    assert [len(one.sequences) for one in done] == [2] * 4
    for one in done:
        main, other = one.sequences
        assert sum(main.learn) < len(main.ids) and all(other.learn)
        assert [message["role"] for message in one.completion] == ["assistant", "user", "assistant"]
        assert one.prompt == one.row["prompt"] and one.num_chosen == sum(main.learn) + sum(other.learn)
    assert run._score(done).rewards[:, 0].tolist() == [0.0, 2.0, 4.0, 6.0]
    run.train()
    assert run.state.log_history[0]["agent/sequences"] == 2 and run.state.log_history[0]["agent/turns"] == 3
