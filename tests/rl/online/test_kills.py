"""Processes of an online run that are killed at random moments, as `tests.rl.online.kills` does it."""

import random

import pytest

from tests.rl.online import kills


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "bound"), [(v, b) for v in kills.VICTIMS for b in (0, 2) if b or v != "worker"])
def test_whatever_is_killed_no_sample_is_lost_or_used_twice(victim, bound, tmp_path):
    """3 times here, and 50 times by ``python -m tests.rl.online.kills``."""
    run = kills.Run(tmp_path, steps=30, bound=bound, victim=victim)
    found = kills.kill_again_and_again(run, victim, 3, random.Random(bound))
    assert found["kills"] >= 1 and found["problems"] == [] and found["stalest"] <= bound
    assert victim not in ("server", "agent") or found["resumed"] == 0  # it is waited for; others go on
