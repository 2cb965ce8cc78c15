"""Where completions come from: one protocol, and the engines behind it."""

from posttrain.rl.generation.protocol import Completions, Generator, Sampling

__all__ = ["Completions", "Generator", "Sampling"]
