"""GRPO with a replay buffer: which groups are kept, drawn and replaced, and that a run resumes with them."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from posttrain.compat.migration import migrate
from posttrain.rl import GRPOWithReplayBufferConfig, GRPOWithReplayBufferTrainer, ReplayBuffer
from posttrain.rl.samples.samples import Rollout
from tests import tiny

ROWS = [{"prompt": f"Question {i}", "kind": i % 4} for i in range(16)]


def test_the_best_are_kept_and_drawn_in_proportion_to_their_scores():
    buffer = ReplayBuffer(3)
    assert buffer.sample(2) == []
    buffer.add([0.5, 3.0], ["b", "d"])
    buffer.add([0.1, 1.0, 0.5], ["a", "c", "e"])
    assert buffer.heap == [(0.5, "b"), (1.0, "c"), (3.0, "d")]
    drawn = Counter(buffer.sample(1, seed)[0] for seed in range(2000))
    assert {name: number / 2000 for name, number in drawn.items()} == pytest.approx(
        {"b": 0.5 / 4.5, "c": 1 / 4.5, "d": 3 / 4.5}, abs=0.03
    )
    assert sorted(buffer.sample(3)) == ["b", "c", "d"] and len(buffer.sample(5)) == 5


def test_joined_rollouts_keep_every_completion_and_are_filled_up_to_the_longest():
    def rollout(length, first):
        ids = first + torch.arange(2 * length).view(2, length)
        return Rollout(ids, torch.tensor([length, 1]), ids + 100, torch.tensor([length, 1]), ids > 0,
                       advantages=torch.tensor([1.0, -1.0]), correction=torch.ones(2, 1))  # fmt: skip

    short, long = rollout(2, 1), rollout(3, 50)
    joined = Rollout.joined([short, long])
    assert joined.completion_ids.tolist() == [[101, 102, 0], [103, 104, 0], [150, 151, 152], [153, 154, 155]]
    assert joined.loss_mask[:2, 2].tolist() == [False, False] and joined.correction.shape == (4, 1)
    for name, values in short.state_dict().items():
        found = joined.part(0, 2).state_dict()[name]
        assert torch.equal(found[:, : values.shape[1]] if values.ndim > 1 else found, values)


def reward(kind, completion_ids, **_):
    """Kinds 0 and 1 always earn the same."""
    return [float(k) if k < 2 else sum(ids) % 7 / 7 for k, ids in zip(kind, completion_ids, strict=True)]


def trainer(folder, agent=None, reward_funcs=reward, **options):
    usual = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4, max_steps=12,
                 max_completion_length=4, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
                 logging_steps=1, learning_rate=1e-2, replay_buffer_size=4)  # fmt: skip
    args = GRPOWithReplayBufferConfig(output_dir=str(folder), **usual | options)
    made = GRPOWithReplayBufferTrainer(
        tiny.causal_lm(), reward_funcs, args, train_dataset=ROWS, processing_class=tiny.tokenizer(), agent=agent
    )
    made.seen = []
    inner = made.complete_scored

    def seen(rollout, samples, scores):
        made.seen.append((rollout, inner(rollout, samples, scores)))
        return made.seen[-1][1]

    made.complete_scored = seen
    return made


def groups(rollout, size=4):
    return [rollout.part(i, i + size) for i in range(0, rollout.num_trajectories, size)]


def same(one, other):
    width = min(one.completion_ids.shape[1], other.completion_ids.shape[1])
    if len(one) != len(other):
        return False
    return torch.equal(one.completion_ids[:, :width], other.completion_ids[:, :width])


def test_equal_groups_give_way_to_earlier_ones_with_the_log_probabilities_they_were_sampled_with(tmp_path):
    run, before = trainer(tmp_path), []
    run.train()
    replayed = 0
    for made, used in run.seen:
        for one, other in zip(groups(made), groups(used), strict=True):
            has_signal = bool(one.advantages.abs().sum())
            before += [one] if has_signal else []
            if has_signal or not before:
                assert same(one, other)
                continue
            replayed += 1
            (source,) = [group for group in before if same(group, other)]
            for name in ("old_logps", "advantages"):
                mask = other.loss_mask if name == "old_logps" else torch.ones(4).bool()
                values, kept = getattr(other, name), getattr(source, name)
                width = min(values.shape[-1], kept.shape[-1])
                assert torch.equal(values[..., :width] * mask[..., :width], kept[..., :width] * mask[..., :width])
    assert replayed > 3 and len(run.replay_buffer.heap) == 4
    shares = [record["replay_buffer/replayed"] for record in run.state.log_history if "loss" in record]
    assert sum(shares) * 2 == pytest.approx(replayed)


def test_a_resumed_run_draws_the_same_groups(tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.train()
    trainer(tmp_path / "cut", save_strategy="steps", save_steps=7, save_total_limit=2).train()
    again = trainer(tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-7"))
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert [score for score, _ in whole.replay_buffer.heap] == [score for score, _ in again.replay_buffer.heap]


def test_groups_that_the_engine_tells_less_of_are_not_mixed_with_others(tmp_path):
    run = trainer(tmp_path, max_steps=2)
    run.train()
    kept = run.replay_buffer.heap
    assert kept
    run.replay_buffer.heap = [(score, replace(group, sampling_logps=None)) for score, group in kept]
    made, _ = run.seen[-1]
    equal = replace(made, advantages=torch.zeros_like(made.advantages))
    samples, scores = run.rollout_maker.sample(run.new_samples(ROWS[:1] * 8)), None
    scores = run.score(samples)
    scores = replace(scores, rewards=torch.zeros_like(scores.rewards))
    used = GRPOWithReplayBufferTrainer.complete_scored(run, equal, samples, scores)
    assert torch.equal(used.completion_ids, equal.completion_ids) and run.replay_buffer.heap == []


def test_the_score_of_a_group_is_the_size_of_its_advantages_times_the_spread_of_its_rewards(tmp_path):
    run = trainer(tmp_path, max_steps=1)
    run.train()
    rollout = replace(run.seen[-1][0], advantages=torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0, 0.0, -2.0, 1.0]))
    samples = run.rollout_maker.sample(run.new_samples([row for row in ROWS[:2] for _ in range(4)]))
    rewards = torch.tensor([[0.0], [1.0], [0.0], [1.0], [0.2], [0.0], [0.2], [0.0]])
    run.replay_buffer.heap = []
    scores = replace(run.score(samples), rewards=rewards)
    GRPOWithReplayBufferTrainer.complete_scored(run, rollout, samples, scores)
    spread = 3**-0.5  # of 0, 1, 0, 1
    assert [score for score, _ in run.replay_buffer.heap] == pytest.approx([5 * 0.2 * spread, 4 * spread])


def test_trajectories_of_several_sequences_stay_whole_when_they_are_divided_and_joined():
    def rollout(numbers, width):
        ids = torch.arange(len(numbers) * width).view(len(numbers), width) + 1
        lengths = torch.full((len(numbers),), width)
        several = None if len(set(numbers)) == len(numbers) else torch.tensor(numbers)
        advantages = torch.tensor([float(number) for number in numbers])
        return Rollout(ids, lengths, ids + 100, lengths, ids > 0, advantages, trajectories=several)

    whole = rollout([0, 0, 1, 2, 2, 2, 3], 2)
    first, last = whole.part(0, 2), whole.part(2, 4)
    assert first.trajectories.tolist() == [0, 0, 1] and last.trajectories.tolist() == [0, 0, 0, 1]
    for name, values in Rollout.joined([first, last]).state_dict().items():
        assert torch.equal(values, getattr(whole, name))
    mixed = Rollout.joined([rollout([0, 1], 3), last])
    assert mixed.trajectories.tolist() == [0, 1, 2, 2, 2, 3] and mixed.advantages.tolist() == [0, 1, 2, 2, 2, 3]
    assert Rollout.joined([rollout([0, 1], 3), whole.part(1, 2)]).trajectories is None
    assert [len(part["loss_mask"]) for part in mixed.micro_batches(2)] == [2, 4]


def test_groups_of_an_agent_are_replayed_with_all_their_conversations(tmp_path):
    async def agent(episode, row):
        """Two conversations, of which the second does not continue the first, in every other episode."""
        answer = await episode.generate([{"role": "user", "content": row["prompt"]}])
        if int(row["prompt"][9:]) % 2:
            await episode.generate([{"role": "user", "content": "And now?"}])
        return float(row["kind"]) if row["kind"] < 2 else sum(map(ord, answer["content"] or "")) % 7 / 7

    run = trainer(tmp_path, agent=agent, reward_funcs=None, max_steps=10)
    run.train()
    replayed = several = 0
    kept = []
    for made, used in run.seen:
        assert used.num_trajectories == made.num_trajectories == 8
        kept += [one for one in groups(made) if one.advantages.abs().sum() > 0]
        for one, other in zip(groups(made), groups(used), strict=True):
            if one.advantages.abs().sum() > 0:
                assert same(one, other)
            elif not same(one, other):
                (source,) = [group for group in kept if same(group, other)]
                assert torch.equal(source.advantages, other.advantages)
                replayed, several = replayed + 1, several + (other.trajectories is not None)
    assert replayed > 3 and several > 0


def test_scripts_of_trl_find_the_buffer_and_are_told_of_the_method_that_nothing_calls():
    trls = "from trl.experimental.grpo_with_replay_buffer import GRPOWithReplayBufferTrainer, ReplayBuffer\n"
    own = "class Own(GRPOWithReplayBufferTrainer):\n    def update_with_replay_buffer(self, *args): ...\n"
    found = migrate(trls + own)
    assert found.text == trls.replace("trl.experimental.grpo_with_replay_buffer", "posttrain.rl") + own
    assert [note.text for note in found.notes] == [
        "Own.update_with_replay_buffer is never called: override complete_scored"
    ]
