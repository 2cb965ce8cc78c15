"""Evaluation and prediction with losses, logits and generated texts."""
