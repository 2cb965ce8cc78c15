"""Scores of completions: functions, reward models and judges."""
