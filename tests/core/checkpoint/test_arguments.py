"""`CheckpointArguments`: refusals say what was set and what to set. The defaults are frozen in test_arguments.py."""

import pytest

from posttrain.core.checkpoint.arguments import CheckpointArguments
from posttrain.core.config import validate
from posttrain.core.errors import ConfigError


def problems(**kwargs):
    try:
        validate(CheckpointArguments(**kwargs))
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"save_steps": 0.1},
        {"save_steps": 1},
        {"save_steps": 10.0},
        {"save_strategy": "no"},
        {"save_strategy": "epoch", "save_total_limit": 1},
        {"save_total_limit": 0},
        {"resume_from_checkpoint": "out/checkpoint-5"},
    ],
)
def test_what_makes_sense_is_taken(good):
    assert problems(**good) == []


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"save_steps": 0}, "save_steps=0 must be > 0"),
        ({"save_steps": -5}, "save_steps=-5 must be > 0"),
        ({"save_steps": 2.5}, "whole number of optimizer steps"),
        ({"save_steps": float("inf")}, "save_steps=inf must be finite"),
        ({"save_strategy": "step"}, "did you mean 'steps'"),
        ({"save_total_limit": -1}, "save_total_limit=-1 must be >= 0"),
        ({"save_total_limit": 1.5}, "save_total_limit=1.5 must be of type int"),
        ({"save_top_k": 0}, "save_top_k=0 must be >= 1"),
    ],
)
def test_what_does_not_is_refused_with_its_value(bad, words):
    (problem,) = problems(**bad)
    assert words in problem
