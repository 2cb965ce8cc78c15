"""The record of a run, its samples and plots, and the page made of them."""
