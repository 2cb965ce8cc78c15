r"""GRPO whose groups without a signal give way to earlier ones, under trl's names.

A group of equal rewards has advantages of 0. Its place takes a group of the buffer, drawn in proportion to its score
:math:`\sigma \sum_i |A_i|`, with the standard deviation :math:`\sigma` of its rewards. The log-probabilities of the
policy that sampled it are kept with it, so that its ratios are those to that policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.core.config import opt
from posttrain.core.data.samplers import mix
from posttrain.core.training.preflight import Parts
from posttrain.rl.algorithms.grpo import GRPOConfig, GRPOTrainer
from posttrain.rl.losses.advantages import equal_groups, standard_deviation, total_rewards
from posttrain.rl.rewards.scoring import Scores
from posttrain.rl.samples.samples import Rollout, Sample


class ReplayBuffer:
    """The `max_size` groups with the highest scores, lowest first: ``heap`` holds pairs of score and group."""

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.heap: list[tuple[float, Any]] = []

    def add(self, scores: list[float], data: list[Any]) -> None:
        """Keep the best of these groups and of those before; of equal scores the earlier."""
        every = sorted([*self.heap, *zip(scores, data, strict=True)], key=lambda one: -one[0])
        self.heap = every[: self.max_size][::-1]

    def sample(self, num_samples: int, seed: int = 0) -> list[Any]:
        """So many groups in proportion to their scores, none twice where there are as many; [] of an empty buffer."""
        if not self.heap:
            return []
        scores, generator = torch.tensor([score for score, _ in self.heap]), torch.Generator().manual_seed(seed)
        drawn = scores.multinomial(num_samples, replacement=num_samples > len(scores), generator=generator)
        return [self.heap[number][1] for number in drawn.tolist()]


@dataclass
class GRPOWithReplayBufferConfig(GRPOConfig):
    """Arguments of `GRPOWithReplayBufferTrainer`."""

    replay_buffer_size: int = opt(64, "Groups with a signal that are kept; 0: none.", min=0)


class GRPOWithReplayBufferTrainer(GRPOTrainer):
    """Trains a policy on groups of completions, and on earlier ones in the place of those whose rewards are equal.

    Arguments: see `posttrain.rl.online.trainer.RolloutTrainer`. Prompts are texts.

    Raises:
        ValueError: processes share groups, so that none could keep one.
    """

    config_class = GRPOWithReplayBufferConfig
    args: GRPOWithReplayBufferConfig
    tag_names = ("posttrain", "grpo-with-replay-buffer")
    reads_images = False
    INSTEAD = GRPOTrainer.INSTEAD | {"update_with_replay_buffer": "override complete_scored"}

    def look_at_model(self, parts: Parts) -> None:
        """As the base's; makes the buffer."""
        super().look_at_model(parts)
        self.replay_buffer = ReplayBuffer(self.args.replay_buffer_size)
        if self.layout.chunk % self.num_generations and self.dist.world_size > 1:
            raise ValueError(
                f"A process has {self.layout.chunk} completions of an optimizer step (per_device_train_batch_size * "
                f"gradient_accumulation_steps), which num_generations={self.num_generations} does not divide, so it "
                "has no whole groups to keep. Set gradient_accumulation_steps so that it does."
            )

    @property
    def needs_old_logps(self) -> bool:
        """Always: the policy has moved since a group of the buffer was sampled."""
        return True

    def complete_scored(self, rollout: Rollout, samples: list[Sample], scores: Scores) -> Rollout:
        """Keeps the groups that have a signal, and replaces the others."""
        if samples[0].is_evaluated or not self.args.replay_buffer_size:
            return rollout
        size, rewards = self.num_generations, total_rewards(scores.rewards, self.rewards.weights)
        groups, equal = [rollout.part(i, i + size) for i in range(0, len(samples), size)], equal_groups(rewards, size)
        sizes = torch.stack([_size_of_advantages(group) for group in groups])
        found = sizes * standard_deviation(rewards.view(-1, size)).squeeze(1)
        numbers, kept = (self.layout.numbers(self.dist.rank)[::size] // size).tolist(), equal.logical_not().tolist()
        mine = [
            (n, score, group)
            for n, score, group, keep in zip(numbers, found.tolist(), groups, kept, strict=True)
            if keep
        ]
        good = sorted((one for part in self.dist.gather_object(mine) for one in part), key=lambda one: one[0])
        buffer, fields = self.replay_buffer, _fields(rollout)  # which depend on the engine
        buffer.heap = [one for one in buffer.heap if _fields(one[1]) == fields]
        buffer.add([score for _, score, _ in good], [group for *_, group in good])
        places = sorted({*range(self.layout.prompts)} - {number for number, *_ in good})
        number = min(self.dist.gather_object(samples[0].rollout))  # which may differ from process to process
        drawn = buffer.sample(len(places), mix(self.args.seed, number)) if places else []
        instead = dict(zip(places, drawn, strict=False))  # empty if the buffer is
        self.metrics.add_sum("replay_buffer/replayed", sum(number in instead for number in numbers), len(numbers))
        return Rollout.joined([instead.get(number, group) for number, group in zip(numbers, groups, strict=True)])

    def state_dict(self) -> dict[str, Any]:
        """Adds the buffer."""
        kept = [(score, group.state_dict()) for score, group in self.replay_buffer.heap]
        return super().state_dict() | {"replay_buffer": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        super().load_state_dict(dict(state))
        kept = [(score, Rollout.from_state(group)) for score, group in state.get("replay_buffer", ())]
        self.replay_buffer.heap = kept[-self.args.replay_buffer_size :] if self.args.replay_buffer_size else []


def _size_of_advantages(group: Rollout) -> torch.Tensor:
    """The sum of the sizes of the advantages, () float32; of a trajectory with several sequences, once."""
    advantages = group.advantages
    assert advantages is not None  # `complete_scored`
    if advantages.ndim == 1:
        advantages = advantages[group.begins([*range(group.num_trajectories)])]
    return advantages.abs().sum()


def _fields(rollout: Rollout) -> set[str]:
    """What is known of its tokens."""
    return rollout.state_dict().keys() - {"trajectories"}
