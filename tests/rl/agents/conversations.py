"""A stand-in for a policy in conversations with tools, and the first turns that a test gives it."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from posttrain.rl.agents.scheduler import TurnsTogether
from posttrain.rl.generation import Sampling
from posttrain.rl.rewards import background


class Policy(TurnsTogether):
    """Its first turns are those of `given`; ``go_on(samples, turn, tokens)`` writes the others, turn 1, 2, ..."""

    def __init__(self, given, go_on, context=None):
        super().__init__(self.write, context)
        self.given, self.go_on, self.number = list(given), go_on, -1

    @contextlib.contextmanager
    def open(self, wake):
        yield self

    def step(self):
        self.number += 1
        return super().step()

    def write(self, samples, sampling):
        if self.number:
            return self.go_on(samples, self.number, sampling.max_new_tokens)
        return [self.given.pop(next(i for i, g in enumerate(self.given) if g.seed == one.seed)) for one in samples]


def converse(environments, given, codec, go_on, max_tokens, context=None):
    """The `given` samples, which have their first turns, after all turns."""
    given = [replace(one, seed=place) for place, one in enumerate(given)]
    begun = [replace(one, ids=[], logps=None, learn=None) for one in given]
    return environments.converse(begun, codec, Policy(given, go_on, context).open, Sampling(max_tokens), context)


def answered(environments, asked):
    """What the tools say to the calls of each ``(sample, calls)``, one after the other."""
    found = []
    for sample, calls in asked:
        going, results = environments.answers(sample, calls), None
        while len(found) < len(asked):
            try:
                results = background.begin(going.send(results)).result()
            except StopIteration as end:
                found.append(end.value)
                break
    return found
