"""Attention over packed, padded and split rows."""
