"""Pure functions that give each turn of a trajectory an advantage of its own.

N trajectories of up to T turns in groups of size G, one group for each prompt: rows ``i * G`` to ``(i + 1) * G`` are
group i. NaN stands where a turn has no reward, or a trajectory no such turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from posttrain.rl.losses.advantages import EPSILON, group_advantages, total_rewards
from posttrain.rl.samples.samples import Sample


@dataclass(frozen=True)
class TurnRewards:
    """What a reward function gives a completion of several turns: `turns`, each turn of the policy, None where it has
    none; `outcome`, the whole, beside them.
    """

    turns: Sequence[float | None]
    outcome: float = 0.0

    @property
    def total(self) -> float:
        """The reward of the completion."""
        return self.outcome + sum(reward for reward in self.turns if reward is not None)


@dataclass(frozen=True)
class Turns:
    """The turns of N trajectories.

    Attributes:
        rewards: (N, T) of each turn, weighted and summed over reward functions; NaN without one.
        outcomes: (N,) the same of the whole trajectories, beside those; NaN without one.
        lengths: (N,) turns of each trajectory.
        states: (N, T) int64, equal for turns that answer the same tokens.
    """

    rewards: torch.Tensor
    outcomes: torch.Tensor
    lengths: torch.Tensor
    states: torch.Tensor

    @classmethod
    def of(cls, trajectories: Sequence[tuple[TurnRewards, list[int]]]) -> Turns:
        """Of the rewards and the states of each trajectory."""
        lengths = [len(states) for _, states in trajectories]
        rooms = [[None] * (max([1, *lengths]) - length) for length in lengths]
        turns = [[*rewards.turns, *room] for (rewards, _), room in zip(trajectories, rooms, strict=True)]
        states = [[*states, *[0] * len(room)] for (_, states), room in zip(trajectories, rooms, strict=True)]
        return cls(
            torch.tensor([[torch.nan if reward is None else reward for reward in row] for row in turns]),
            torch.tensor([rewards.outcome for rewards, _ in trajectories]),
            torch.tensor(lengths),
            torch.tensor(states),
        )

    def ordered(self, order: torch.Tensor) -> Turns:
        """The trajectories taken in this `order`."""
        return Turns(*(values[order] for values in (self.rewards, self.outcomes, self.lengths, self.states)))

    @property
    def exist(self) -> torch.Tensor:
        """(N, T) bool, which turns there are."""
        return torch.arange(self.rewards.shape[1]) < self.lengths.unsqueeze(1)

    def returns(self, discount: float) -> torch.Tensor:
        r"""(N, T) the discounted return of each turn, where the outcome is a reward of the last one:
        :math:`R_t = r_t + \gamma R_{t+1}`; NaN for turns that do not exist, and for trajectories without any reward.
        """
        rewards, last = self.rewards.nan_to_num(nan=0.0), (self.lengths - 1).clamp(min=0).unsqueeze(1)
        rewards = rewards.scatter_add(1, last, self.outcomes.nan_to_num(nan=0.0).unsqueeze(1))
        after, found = torch.zeros_like(self.outcomes), []
        for reward in reversed(rewards.unbind(1)):
            after = reward + discount * after
            found.append(after)
        unknown = self.outcomes.isnan() & self.rewards.isnan().all(1)
        return torch.stack(found[::-1], 1).masked_fill(~self.exist | unknown.unsqueeze(1), torch.nan)


def return_advantages(returns: torch.Tensor, group_size: int, scale: str = "group") -> torch.Tensor:
    r""":math:`(R_{it} - \bar R) / (\sigma + 10^{-4})` over all turns of a group, of (N, T) `Turns.returns`: (N, T). For
    `scale` see `group_advantages`.
    """
    return group_advantages(returns.flatten(), group_size * returns.shape[1], scale).view_as(returns)


def process_advantages(rewards: torch.Tensor, group_size: int, scale: str = "group") -> torch.Tensor:
    r"""GRPO's process supervision, Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.3:
    :math:`A_{it} = \sum_{k \ge t} (r_{ik} - \bar r) / \sigma`, normalised over all rewards of turns of a group: (N, T),
    NaN without one, -> (N, T). For `scale` see `group_advantages`.
    """
    return return_advantages(rewards, group_size, scale).flip(1).cumsum(1).flip(1)


def step_advantages(returns: torch.Tensor, states: torch.Tensor, group_size: int, scale: str = "group") -> torch.Tensor:
    r"""GiGPO, Feng et al. 2025, https://arxiv.org/abs/2505.10978, equation 7:
    :math:`A^S_{it} = (R_{it} - \bar R) / F_{norm}` over the turns of a group that begin in the same state: (N, T), 0
    where no other turn does.

    Args:
        returns: (N, T), NaN for turns that do not exist. states: (N, T).
        scale: "none" for :math:`F_{norm} = 1`; else the standard deviation of those turns.
    """
    known = ~returns.isnan()
    group = (torch.arange(len(returns)) // group_size).unsqueeze(1).expand_as(states)
    keys = torch.stack([group[known], states[known]], 1)
    _, same, count = torch.unique(keys, dim=0, return_inverse=True, return_counts=True)
    values, zeros = returns[known], returns.new_zeros(len(count))
    apart = values - (zeros.index_add(0, same, values) / count)[same]
    if scale != "none":
        variance = zeros.index_add(0, same, apart.square()) / (count - 1).clamp(min=1)
        apart = apart / (variance.sqrt()[same] + EPSILON)
    return torch.zeros_like(returns).masked_scatter(known, apart)


def weighted(
    samples: Sequence[Sample], rewards: torch.Tensor, turns: Sequence[Mapping[int, TurnRewards]], weights: torch.Tensor
) -> list[tuple[TurnRewards, list[int]]]:
    """Of each of n `samples`, its rewards summed over the reward functions, and the states of its turns.

    Args:
        rewards: (n, F), NaN where a function does not apply. turns: of each, what functions gave its turns.
        weights: (F,) of the functions.
    """
    found = []
    for sample, own, given in zip(samples, rewards, turns or [{}] * len(samples), strict=True):
        outcomes, states = own.clone(), states_of(sample)
        summed: list[float | None] = [None] * len(states)
        for function, one in given.items():
            outcomes[function] = one.outcome
            for place, reward in enumerate(one.turns):
                if reward is not None:
                    summed[place] = (summed[place] or 0.0) + weights[function].item() * reward
        found.append((TurnRewards(summed, total_rewards(outcomes.unsqueeze(0), weights).item()), states))
    return found


def differ(group: Sequence[Mapping[int, TurnRewards]]) -> bool:
    """Whether turns of a group were rewarded differently: then it teaches something though its totals are equal."""
    first, *others = [{of: [*given.turns] for of, given in turns.items()} for turns in group]
    return any(other != first for other in others)


def states_of(sample: Sample) -> list[int]:
    """Of each turn of the trajectory of `sample`, a number of the tokens that it answers: equal for equal ones. They
    begin behind the turn before, which for the first turn of a branch is one of another sequence.
    """
    found: dict[int, int] = {}
    texts = [[*one.prompt_ids, *one.ids] for one in sample.sequences]
    spans = [
        [(number, len(one.prompt_ids) + start, len(one.prompt_ids) + stop) for number, (start, stop) in one.turn_spans]
        for one in sample.sequences
    ]
    ends = [(text, stop) for text, own in zip(texts, spans, strict=True) for _, _, stop in own]
    for text, own in zip(texts, spans, strict=True):
        first = own[0][1] if own else 0
        before = max((stop for other, stop in ends if stop <= first and other[:stop] == text[:stop]), default=0)
        for number, start, stop in own:
            found[number], before = hash(tuple(text[before:start])), stop
    return [found[number] for number in sorted(found)]


def of_tokens(advantages: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """The (N, T) advantages of turns at their tokens, 0 elsewhere: (sequences of the N trajectories, C tokens of the
    longest).
    """
    pairs = [(one, own) for sample, own in zip(samples, advantages, strict=True) for one in sample.sequences]
    found = advantages.new_zeros(len(pairs), max(len(one.ids) for one, _ in pairs))
    for row, (one, own) in enumerate(pairs):
        for number, (start, stop) in one.turn_spans:
            found[row, start:stop] = own[number]
    return found
