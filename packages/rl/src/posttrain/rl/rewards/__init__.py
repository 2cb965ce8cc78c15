"""Scores of completions: functions, reward models and judges."""

from posttrain.rl.rewards.functions import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    math_verify_reward,
    reasoning_accuracy_reward,
    think_format_reward,
)

__all__ = [
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "math_verify_reward",
    "reasoning_accuracy_reward",
    "think_format_reward",
]
