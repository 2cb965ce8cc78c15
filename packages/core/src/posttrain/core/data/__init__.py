"""Datasets to batches: chat templates, tokenization, collators, samplers and a data loader that can resume."""
