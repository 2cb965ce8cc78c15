"""Environments and tools of multi-turn completions."""
