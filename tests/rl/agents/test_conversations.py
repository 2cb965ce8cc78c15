"""Conversations with tools on the local engine: each on its own clock writes what it writes in lock-step."""

import asyncio
import contextlib
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.rl.agents.scheduler import TurnsTogether
from posttrain.rl.generation.local_steps import LocalSteps
from posttrain.rl.online.sampler import Sampler
from posttrain.rl.rewards import background
from posttrain.rl.tools.formats import Call
from posttrain.rl.tools.protocol import ToolProtocol, Turn
from tests import tiny

TOKENIZER = tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS)
ROWS = [{"prompt": [{"role": "user", "content": f"What is {i} and {i}?"}]} for i in range(4)]


def add(a: int, b: int):
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


NAPS = itertools.cycle([0.0, 0.03, 0.01])


async def add_later(a: int, b: int):
    """Add two numbers after a while.

    Args:
        a: One.
        b: The other.
    """
    await asyncio.sleep(next(NAPS))
    return a + b


def spread(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


@pytest.fixture(params=[add, add_later], ids=["plain", "async"])
def tool(request, monkeypatch):
    """A tool that the policy calls in each turn, whatever it writes."""
    read = Turn({"role": "assistant", "content": ""}, (Call(request.param.__name__, {"a": 1, "b": 2}),))
    monkeypatch.setattr(ToolProtocol, "read", lambda *_: read)
    return request.param


def trainer(folder, tool, **options):
    args = GRPOConfig(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=8, num_generations=4, learning_rate=1e-2,
        max_completion_length=400, max_tool_calling_iterations=3, generation_kwargs={"stop": ["e", "a", "o", "t"]},
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    model = tiny.causal_lm(max_position_embeddings=1024)
    return GRPOTrainer(model, spread, args, ROWS, processing_class=TOKENIZER, tools=[tool])


def rollout(run):
    return run.rollout_maker.sample([s for row in ROWS[:2] for s in run.new_samples([row] * 4)])


def seeded(run):
    own = run.new_samples
    run.new_samples = lambda rows: [replace(s, seed=len(rows) * 7 + i) for i, s in enumerate(own(rows))]
    return run


def test_a_conversation_writes_what_it_writes_in_lock_step(tmp_path, tool, monkeypatch):
    run = seeded(trainer(tmp_path, tool))
    found = rollout(run)
    monkeypatch.setattr(
        Sampler,
        "open_turns",
        lambda self, wake: contextlib.nullcontext(TurnsTogether(self.generate_turn, self.context)),
    )
    expected = rollout(run)
    assert len({len(one.ids) for one in found}) > 1 and max(one.num_turns for one in found) == 4
    for one, other in zip(found, expected, strict=True):
        assert (one.ids, one.learn, one.completion) == (other.ids, other.learn, other.completion)
        assert one.logps == pytest.approx(other.logps, abs=2e-5) and one.is_exact and other.is_exact


def test_turns_read_only_what_is_new(tmp_path, tool, monkeypatch):
    steps = []
    monkeypatch.setattr(LocalSteps, "__init__", noting(LocalSteps.__init__, steps))
    done = rollout(seeded(trainer(tmp_path, tool)))
    prompts = len(done[0].prompt_ids) + len(done[4].prompt_ids)  # once for a group
    answers = sum(len(one.ids) - one.num_chosen for one in done)
    behind = sum(one.num_turns - 1 for one in done)  # the last token of a turn is read with what follows it
    assert steps[-1].num_read == prompts + answers + behind


def noting(init, made):
    def note(self, *given):
        init(self, *given)
        made.append(self)

    return note


def test_runs_with_plain_tools_are_the_same_to_the_bit(tmp_path, monkeypatch):
    read = Turn({"role": "assistant", "content": ""}, (Call("add", {"a": 1, "b": 2}),))
    monkeypatch.setattr(ToolProtocol, "read", lambda *_: read)
    weights = []
    for name in "ab":
        run = trainer(tmp_path / name, add)
        run.train()
        weights.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]))
    assert torch.equal(*weights)


def test_threads_that_begin_at_the_same_time_share_one_event_loop(monkeypatch):
    """Rollouts of agents that overlap would else wait for each other's futures on another loop."""
    make = asyncio.new_event_loop

    def slowly():
        time.sleep(0.05)
        return make()

    background._event_loop.cache_clear()
    monkeypatch.setattr(asyncio, "new_event_loop", slowly)
    with ThreadPoolExecutor(8) as threads:
        loops = {*threads.map(lambda _: background.event_loop(), range(8))}
    assert len(loops) == 1
