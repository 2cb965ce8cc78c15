"""The scheduler without a trainer: which turns are written together, in which order, and which no further."""

from contextlib import nullcontext
from dataclasses import replace
from queue import SimpleQueue

import pytest

from posttrain.rl.agents.scheduler import OpenTurns, TurnsTogether, serve
from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.generation.protocol import Sampling
from posttrain.rl.samples.samples import Sample
from tests import tiny


class Engine:
    """Writes as many tokens as may be, and notes what it was asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, samples, sampling):
        self.asked.append(([one.prompt_ids for one in samples], sampling))
        ids = [*range(sampling.max_new_tokens)]
        logps = [-float(number) for number in ids]
        return [replace(one, ids=ids, logps=logps, versions=[4] * len(ids), finished=True) for one in samples]


def asked(key, most, prompt=(5,), **others):
    return key, Sample({}, "", list(prompt), seed=key), Sampling(most, **others)


def test_turns_of_different_lengths_are_written_together_and_each_to_its_own_length():
    engine = Engine()
    turns = TurnsTogether(engine)
    turns.begin([asked(1, 3), asked(2, 5)])
    (_, short), (_, long) = turns.step()
    assert [len(prompts) for prompts, _ in engine.asked] == [2] and not turns
    assert (short.ids, short.logps, short.versions) == ([0, 1, 2], [0.0, -1.0, -2.0], [4] * 3)
    assert len(long.ids) == 5 and long.finished and not short.finished  # it was cut


def test_turns_that_are_drawn_otherwise_are_written_apart():
    engine = Engine()
    turns = TurnsTogether(engine)
    turns.begin([asked(1, 3), asked(2, 3, stop=("a",)), asked(3, 2)])
    assert [key for key, _ in turns.step()] == [1, 3, 2]
    assert [(len(prompts), sampling.stop) for prompts, sampling in engine.asked] == [(2, ()), (1, ("a",))]


@pytest.mark.parametrize("unwanted", [1, 2])
def test_a_turn_that_nobody_waits_for_is_not_begun(unwanted):
    turns = TurnsTogether(Engine())
    turns.begin([asked(1, 3), asked(2, 3)])
    turns.drop(lambda key: key == unwanted)
    assert [key for key, _ in turns.step()] == [3 - unwanted]


def test_a_turn_that_nobody_waits_for_leaves_while_others_go_on():
    engine = LocalGenerator(tiny.tokenizer())
    engine.sync_weights(tiny.causal_lm().eval())
    ended, rows = {}, []
    with engine.steps() as steps:
        turns = OpenTurns(lambda sample, done: replace(sample, ids=done.ids[0]), steps)
        turns.begin([asked(1, 40, (5, 6)), asked(2, 40, (7, 8, 9))])
        for number in range(60):
            if number == 3:
                turns.drop(lambda key: key == 1)
            if turns:
                ended |= dict(turns.step())
                rows.append(len(steps.decoding.blocks) and sum(len(call.index) for call in steps._calls))
    assert len(ended[1].ids) == 5 and len(ended[2].ids) == 40 and rows[:5] == [2, 2, 2, 1, 1]


def test_turns_that_wait_are_begun_in_the_order_of_their_trajectories():
    """Whichever agent was quicker: two runs are the same to the bit."""
    engine, requests, answers = Engine(), SimpleQueue(), []
    for place in (2, 0, 1):
        requests.put((place, *asked(place, 2, (5 + place,))))

    def answer(key, sample):
        answers.append(key)
        if len(answers) == 3:
            requests.put(None)

    serve(requests, lambda wake: nullcontext(TurnsTogether(engine)), answer)
    assert engine.asked[0][0] == [[5], [6], [7]] and answers == [0, 1, 2]
