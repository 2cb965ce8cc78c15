"""Prompts, and the completions sampled for them."""
