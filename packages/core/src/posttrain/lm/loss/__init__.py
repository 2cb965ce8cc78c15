"""The losses of next tokens, computed from the output head without storing logits."""
