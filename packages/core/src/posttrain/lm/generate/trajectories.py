"""Trajectories of a run, token for token: lines of ``trajectories-<rank>.jsonl`` in its output folder.

A line is one trajectory: a completion of a prompt, or an episode of an agent.

    {"step": 8, "rollout": 7, "sample": 3, "prompt": "...", "completion": [...], "rewards": {"right": 1.0},
     "reward": 1.0, "turn_rewards": [0.1, null], "advantage": 0.7, "ending": "finished", "turns": 2, "tokens": 90,
     "sequences": [{"prompt": "...", "prompt_ids": [...], "ids": [...], "tokens": ["It", " is", ...],
                    "learn": [1, 1, 0, ...], "logps": [...], "versions": [...]}]}

``ending`` is "finished" where it ended by itself, "failed" where the agent did, else the bound that ended it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.lm.generate.samples import lines_of

FINISHED = "finished"
REPLAYED = "POSTTRAIN_REPLAYED"
"""The variable with the name of a trajectory that a program puts through its loss, in place of training."""

Trajectory = dict[str, Any]


def path_of(folder: str | Path, rank: int) -> Path:
    """The file that the process `rank` writes."""
    return Path(folder) / f"trajectories-{rank}.jsonl"


def files_of(folder: str | Path) -> list[Path]:
    """The files of all processes that are there."""
    return sorted(Path(folder).glob("trajectories-*.jsonl"))


def name_of(one: Trajectory) -> str:
    """How it is named: ``rollout/sample``."""
    return f"{one['rollout']}/{one['sample']}"


@dataclass(frozen=True)
class Filter:
    """Which trajectories are shown.

    Attributes:
        step: of this optimizer step alone. min_reward, max_reward: bounds of the reward, which is known then.
        min_tokens: of the policy, at least. unfinished: that did not end by themselves. contains: in the completion.
    """

    step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int = 0
    unfinished: bool = False
    contains: str | None = None

    def takes(self, one: Trajectory) -> bool:
        """Whether it is shown."""
        reward, as_json = one["reward"], partial(json.dumps, ensure_ascii=False)
        said = as_json(one["completion"])
        return (
            (self.step is None or one["step"] == self.step)
            and (self.min_reward is None or (reward is not None and reward >= self.min_reward))
            and (self.max_reward is None or (reward is not None and reward <= self.max_reward))
            and one["tokens"] >= self.min_tokens
            and not (self.unfinished and one["ending"] == FINISHED)
            and (self.contains is None or any(text in said for text in (self.contains, as_json(self.contains)[1:-1])))
        )


def read(folder: str | Path, wanted: Filter | None = None) -> list[Trajectory]:
    """The trajectories of all processes in the order of their rollouts.

    What a run has repeated after it was resumed counts once, as it was written last.
    """
    wanted = wanted or Filter()
    found: dict[tuple[int, int], Trajectory] = {}
    for path in files_of(folder):
        for one in lines_of(path):
            key = one["rollout"], one["sample"]
            found.pop(key, None)
            if wanted.takes(one):
                found[key] = one
    return [found[key] for key in sorted(found)]
