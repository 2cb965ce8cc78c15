"""Evaluation and prediction, by loss, by logits and by generated text."""
