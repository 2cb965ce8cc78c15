"""Text generated while training, for evaluation and for the eye."""
