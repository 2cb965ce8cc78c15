"""A stored trajectory goes through the loss of its trainer as it did in training, or the trainer says why it cannot."""

import pytest
import torch

from posttrain.core.errors import ConfigError
from posttrain.lm.generate import trajectories
from posttrain.rl.online.trainer import RolloutTrainer
from posttrain.rl.online.trajectories import replayed
from tests.contract.trainers import TRAINERS

#: Those that learn from completions that they sample. Images come with the rows, which are not stored.
ONLINE = [
    name for name in TRAINERS if name.startswith(("grpo", "rloo", "online", "distil", "gkd", "iw", "gold", "sdft"))
]
ONLINE += ["sdpo", "a2po", "gmpo", "reinforce++"]
REFUSED = {
    "online-dpo": "the other completion of its pair",
    "sdpo": "the other completions of its group",
    "sdft": "the privileged_context of its row",
    "a2po": "the value of its prompt",
    "grpo-adaptive": "the entropies of its rollout",
} | dict.fromkeys((name for name in ONLINE if name.endswith("-images")), "the images of its row")


@pytest.mark.parametrize("name", ONLINE)
def test_a_stored_trajectory_has_the_loss_that_it_had(name, tmp_path):
    run = TRAINERS[name](tmp_path, max_steps=1, learning_rate=0.0, log_trajectories=64, save_strategy="no")
    assert isinstance(run, RolloutTrainer)
    rollouts, make = [], run.make_rollout
    run.make_rollout = lambda batches: rollouts.append(make(batches)) or rollouts[-1]
    run.train()
    stored = [one for one in trajectories.read(tmp_path) if one["step"] == 1]
    if name in REFUSED:
        with pytest.raises(ConfigError, match=f"reads {REFUSED[name]}, which trajectories do not hold"):
            replayed(run, stored[0])
        return
    (rollout, *_) = rollouts
    assert len(stored) == len(rollout) > 1
    compared = 0
    for number, one in enumerate(stored):
        ids = rollout.completion_ids[number, : rollout.completion_lengths[number]].tolist()
        if ids != one["sequences"][0]["ids"]:  # the replay buffer has put another in its place
            continue
        compared += 1
        (inputs,) = map(run.prepare_inputs, run.rollout_maker.parts_of(rollout.part(number, number + 1)))
        with torch.no_grad(), run.compute_loss_context_manager():
            loss = run.compute_loss(run.model, inputs, num_items_in_batch=run.count_items(inputs)).item()
        assert float(replayed(run, one).split()[-1]) == pytest.approx(loss, rel=1e-3, abs=1e-4)
    assert compared == len(stored) or (name == "grpo-replay" and compared)


def test_every_trainer_that_samples_is_here(tmp_path):
    others = {name: TRAINERS[name](tmp_path / name) for name in TRAINERS.keys() - {*ONLINE}}
    assert [name for name, run in others.items() if isinstance(run, RolloutTrainer)] == []
