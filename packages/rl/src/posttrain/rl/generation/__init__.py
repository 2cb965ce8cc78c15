"""Generation of completions: one protocol and its engines."""

from posttrain.rl.generation.protocol import Completions, Generator, Sampling

__all__ = ["Completions", "Generator", "Sampling"]
