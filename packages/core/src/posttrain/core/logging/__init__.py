"""Metrics, experiment trackers, the record of a run, and plots."""
