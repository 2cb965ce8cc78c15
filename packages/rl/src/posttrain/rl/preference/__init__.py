"""Preference training: from pairs in a dataset to a loss for each pair."""
