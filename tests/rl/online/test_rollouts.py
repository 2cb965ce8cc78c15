"""The rollouts of a run without a trainer: from batches of prompts to micro-batches, and where it stands."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from posttrain.core.logging.metrics import Clock, Metrics
from posttrain.rl import DistillationTrainer, GRPOTrainer
from posttrain.rl.losses.credit import TurnRewards
from posttrain.rl.online import setup
from posttrain.rl.online.reporting import Summary, with_errors
from posttrain.rl.online.rollouts import Rollouts
from posttrain.rl.rewards.scoring import Scores
from posttrain.rl.samples.prompts import Layout
from posttrain.rl.samples.samples import Rollout, Sample

ALONE = SimpleNamespace(
    rank=0, world_size=1, num_processes=1, peer_rank=0, is_main=True, gather_object=lambda value: [value]
)


class Scripted(Rollouts):
    """Completes each prompt by itself, and gives the rewards of each rollout in turn."""

    def __init__(self, *rewards, turns=(), credits_turns=False, **changes):
        self.rewards, self.begun_samples = iter(rewards), []
        self.turns = [[{0: TurnRewards(one)} for one in turns]]
        args = SimpleNamespace(
            steps_per_generation=2, num_iterations=2, max_staleness=0, dynamic_sampling=False,
            dynamic_sampling_rounds=2, seed=1, pass_threshold=1.0,
        )  # fmt: skip
        vars(args).update(changes)
        sampler = SimpleNamespace(synced_at=None, can=SimpleNamespace(has_own_weights=False))
        owner = SimpleNamespace(
            layout=Layout(group_size=2, per_process=4, chunk=4), credits_turns=credits_turns, sampler=sampler,
            dist=ALONE, metrics=Metrics(), clock=Clock(), train_batch_size=2,
            new_samples=lambda rows: [Sample(row, row["prompt"], [row["number"]]) for row in rows],
        )  # fmt: skip
        super().__init__(owner, args)

    def sample_to_score(self, rows, number):
        self.begun_samples.append(self.begin(rows, number))
        return self.begun_samples[-1]

    def sync(self):
        raise AssertionError("the weights are those of the trainer")

    def score(self, samples):
        rewards = torch.tensor(next(self.rewards), dtype=torch.float32)[:, None]
        turns = self.turns.pop() if self.turns else []
        return Scores(rewards, torch.zeros_like(rewards, dtype=torch.bool), [0.0], turns=turns)


def replaced(rollouts):
    """The samples of the next rollout, with others in the place of groups that teach nothing."""
    read = batches(3)
    return rollouts.with_signal(*rollouts.next_scored(read), read)


def batches(count):
    for batch in range(count):
        yield [{"prompt": f"{batch}.{i // 2}", "number": 10 * batch + i // 2} for i in range(4)]


def test_a_seed_depends_on_the_rollout_and_the_place_in_it_alone():
    made = Scripted([1, 2, 3, 4], [1, 2, 3, 4])
    read = batches(2)
    first, second = made.next_scored(read)[0], made.next_scored(read)[0]
    assert [(s.rollout, s.place) for s in first + second] == [(r, p) for r in range(2) for p in range(4)]
    assert len({sample.seed for sample in first + second}) == 8
    again, _ = Scripted([1, 2, 3, 4]).next_scored(batches(1))
    assert [sample.seed for sample in again] == [sample.seed for sample in first]
    assert made.next_scored(read) is None


def test_an_evaluation_means_the_weighted_rewards_and_passes_by_the_first_function():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [0.5, -1.0]])
    lengths, none = torch.tensor([2, 3, 4, 5]), torch.zeros(4, 2, dtype=torch.bool)
    weights = torch.tensor([1.0, 0.5])
    found = Summary(rewards, none, lengths, lengths, lengths > 2, None, ["one", "other"], weights).sums(2, 1.0)
    assert found["avg@2"] == (1.75, 2) and found["avg@2/squares"] == (1 + 0.75**2, "sum")  # of 1, 1 and 1.5, 0
    assert found["pass@1"] == (1.0, 2) and found["pass@2"] == (2.0, 2)


def errors_of(rewards, group_size=2):
    """What an evaluation with these rewards of one function logs, prompt by prompt in two batches."""
    metrics, rewards = Metrics(), torch.tensor(rewards)[:, None]
    for part in rewards.split(2 * group_size):
        lengths, none = torch.full((len(part),), 3), torch.zeros(len(part), 1, dtype=torch.bool)
        summary = Summary(part, none, lengths, lengths, lengths > 2, None, ["one"], torch.ones(1))
        metrics.update(summary.sums(group_size, 1.0))
    return with_errors({name: value / count for name, (value, count) in metrics.drain().items()})


def test_intervals_are_over_the_prompts_whose_rewards_are_known():
    none = float("nan")
    found = errors_of([1.0, 0.0, none, none, 0.0, 0.0, none, 1.0])
    assert found["avg@2"] == pytest.approx(0.5)  # of 0.5, 0 and 1
    assert found["avg@2_stderr"] == pytest.approx((0.5 / 3 / 2) ** 0.5)
    assert found["reward"] == found["rewards/one/mean"] == pytest.approx(0.4)  # of 1, 0, 0, 0 and 1
    assert found["pass@1"] == 0.25 and found["pass@2"] == 0.5  # what is not known has not passed
    assert not any(name.endswith(("/squares", "/prompts")) for name in found)


def test_prompts_that_come_out_alike_have_an_interval_of_nothing():
    found = errors_of([1.0, 1.0, 1.0, 1.0, 0.0] * 3, group_size=5)  # the variance of 0.8 rounds below 0
    assert found["avg@5"] == pytest.approx(0.8) and found["avg@5_stderr"] == found["pass@5_stderr"] == 0


def test_an_engine_of_the_trainers_weights_is_asked_once():
    class Gone(Scripted):
        def sample_to_score(self, rows, number):
            super().sample_to_score(rows, number)
            raise ConnectionError("it is gone")

    rollouts = Gone()
    with pytest.raises(ConnectionError, match="it is gone"):
        rollouts.next_scored(batches(1))
    assert len(rollouts.begun_samples) == 1


@pytest.mark.parametrize(
    ("changes", "processes", "is_left"),
    [
        ({}, 2, True),
        ({"rollout_func": len}, 2, False),
        ({"generate": DistillationTrainer.generate}, 2, False),
        ({"sampler": SimpleNamespace(session=lambda: None)}, 2, False),
        ({"peers": 2}, 2, False),
        ({"rollout_func": len, "sampler": SimpleNamespace(session=lambda: None), "peers": 1}, 1, True),
    ],
    ids=["alone", "function", "own method", "session", "split rows", "one process"],
)
def test_rollouts_are_left_where_no_process_waits_for_another(changes, processes, is_left):
    usual = dict(rollout_func=None, generate=GRPOTrainer.generate, sampler=SimpleNamespace(session=nullcontext))
    dist = SimpleNamespace(num_processes=processes, peers=changes.get("peers", 1))
    assert setup.generates_alone(SimpleNamespace(dist=dist, **(usual | changes))) == is_left


def test_groups_that_teach_nothing_are_replaced():
    rollouts = Scripted([1, 1, 0, 1], [0, 1, 5, 5], dynamic_sampling=True)
    samples, scores = replaced(rollouts)
    assert [sample.prompt for sample in samples] == ["0.1", "0.1", "1.0", "1.0"]
    assert scores.rewards[:, 0].tolist() == [0, 1, 0, 1] and len(rollouts.begun_samples) == 2


@pytest.mark.parametrize("credits_turns", [True, False])
def test_a_group_whose_turns_were_rewarded_differently_teaches(credits_turns):
    given = dict(turns=[[1, 0], [0, 1], [1, 0], [1, 0]], credits_turns=credits_turns)
    rollouts = Scripted([1, 1, 1, 1], [0, 1, 5, 5], dynamic_sampling=True, **given)
    samples, _ = replaced(rollouts)
    prompts = ["0.0", "0.0", "1.0", "1.0"]  # those that teach, then the rest
    assert [sample.prompt for sample in samples] == (prompts if credits_turns else [*prompts[2:], *prompts[:2]])


def test_the_rounds_of_dynamic_sampling_end():
    rollouts = Scripted([1, 1, 1, 1], [2, 2, 2, 3], dynamic_sampling=True)
    samples, scores = replaced(rollouts)
    assert [sample.prompt for sample in samples] == ["1.1", "1.1", "0.0", "0.0"]  # those that teach, then the rest
    assert scores.rewards[:, 0].tolist() == [2, 3, 1, 1] and len(rollouts.begun_samples) == 2


@pytest.mark.parametrize("used", [1, 3, 4])
def test_rollouts_go_on_where_others_stood(used):
    rollout = Rollout.of([Sample({}, "", [1], [2], logps=[0.5])])
    parts = [{"part": 0}, {"part": 1}]

    def stream(made, rollouts):
        made.parts_of, made.owner.make_rollout = (lambda _: parts), (lambda read: next(read, None))
        return made.micro_batches(rollouts)

    made = Scripted()
    whole = [part["part"] for part in stream(made, iter([rollout]))]
    assert whole == [0, 1, 0, 1]  # gone through num_iterations times
    made = Scripted()
    running = stream(made, iter([rollout]))
    begun = [next(running)["part"] for _ in range(used)]
    state, other = made.state_dict(), Scripted()
    other.load_state_dict(state)
    assert begun + [part["part"] for part in stream(other, iter([]))] == whole
    assert ("rollout" in state) == (used < 4)


def test_a_rollout_that_was_distributed_otherwise_is_skipped(caplog):
    made = Scripted()
    made.parts_of, made.owner.make_rollout = (lambda _: [{}, {}]), (lambda read: next(read, None))
    next(made.micro_batches(iter([Rollout.of([Sample({}, "", [1], [2])])])))
    other = Scripted()
    other.owner.layout = Layout(group_size=2, per_process=2, chunk=2, world_size=2)
    other.load_state_dict(made.state_dict())
    assert other.rollout is None and "distributed differently" in caplog.text


def test_a_reward_that_applies_to_no_completion_has_neither_mean_nor_deviation():
    rewards = torch.tensor([[1.0, torch.nan], [3.0, torch.nan]])
    lengths, ended = torch.tensor([4, 2]), torch.tensor([True, True])
    summary = Summary(rewards, rewards < 0, lengths, lengths, ended, names=("length", "code"))
    found = summary.metrics(group_size=2)
    assert (found["rewards/length/mean"], found["rewards/length/std"]) == ((2.0, 1), (pytest.approx(2**0.5), 1))
    assert not {"rewards/code/mean", "rewards/code/std"} & found.keys()
