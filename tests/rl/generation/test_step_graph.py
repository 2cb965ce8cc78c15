"""A token's operations, recorded once and replayed at the same addresses as by a CUDA graph: the same completions."""

import functools

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from posttrain.rl.generation import local_steps
from posttrain.rl.generation.decoding import Decoding, StepGraph
from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.generation.protocol import Sampling
from tests import tiny


class Recorded(TorchDispatchMode):
    """What `work` does with tensors; a call does it again, with the same tensors."""

    replayed = 0  # by all of a test

    def __init__(self, work):
        super().__init__()
        self.operations = []
        with self:
            self.result = work()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def __call__(self):
        Recorded.replayed += 1
        for func, args, kwargs, out in self.operations:
            if any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns):
                continue  # a view
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if old is not new:
                    old.copy_(new)


def capture(work):
    recorded = Recorded(work)
    return recorded, recorded.result


@pytest.fixture
def graphs(monkeypatch):
    """Generation on the CPU replays steps, as on a GPU; `Recorded.replayed` counts."""
    Recorded.replayed = 0
    monkeypatch.setattr(local_steps, "Decoding", functools.partial(Decoding, is_fixed=True))
    monkeypatch.setattr(local_steps.accelerator, "CUDA", "cpu")
    monkeypatch.setattr(local_steps, "StepGraph", functools.partial(StepGraph, capture=capture))


def without(monkeypatch, generate):
    with monkeypatch.context() as patch:
        patch.setattr(local_steps, "StepGraph", lambda step, decoding: step)
        return generate()


PROMPTS = [[5, 6, 7, 8, 9], [40, 41], [90, 91, 92], [3] * 30]


@pytest.mark.parametrize("arch", ["qwen3", "llama", "mistral"])
@pytest.mark.parametrize("max_rows", [256, 4], ids=["all at once", "in turns"])
def test_replayed_tokens_are_those_of_the_step(arch, max_rows, graphs, monkeypatch):
    model = tiny.causal_lm(arch)
    made = LocalGenerator(tiny.tokenizer(), max_rows=max_rows)
    made.sync_weights(model)
    # 200 tokens: the cache grows at 64, 128 and 192. Rows leave at their end tokens, and others come.
    sampling = Sampling(200, temperature=1.0, eos_token_ids=tuple(range(300, 304)))
    seeds = range(4 * 3)
    expected = without(monkeypatch, lambda: made.generate(PROMPTS, 3, sampling, seeds))
    found = made.generate(PROMPTS, 3, sampling, seeds)
    assert found.ids == expected.ids and found.finished == expected.finished
    for one, other in zip(found.logps, expected.logps, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    assert len({len(ids) for ids in found.ids}) > 3 and Recorded.replayed > 50


def test_a_table_of_positions_that_grows_is_captured_again(graphs, monkeypatch):
    model = tiny.causal_lm(max_position_embeddings=4096)
    made = LocalGenerator(tiny.tokenizer())
    made.sync_weights(model)
    prompts, sampling = [[7] * 1000, [9] * 990], Sampling(60, temperature=1.0)
    expected = without(monkeypatch, lambda: made.generate(prompts, 2, sampling, range(4)))
    assert made.generate(prompts, 2, sampling, range(4)).ids == expected.ids
    assert Recorded.replayed > 40


def test_a_window_that_hides_tokens_is_not_replayed(graphs, monkeypatch):
    model = tiny.causal_lm("mistral", sliding_window=20)
    made = LocalGenerator(tiny.tokenizer())
    made.sync_weights(model)
    prompts, sampling = [[7] * 4, [9] * 4], Sampling(40, temperature=1.0)
    expected = without(monkeypatch, lambda: made.generate(prompts, 2, sampling, range(4)))
    assert made.generate(prompts, 2, sampling, range(4)).ids == expected.ids
    assert 5 < Recorded.replayed < 20


def test_where_no_graph_can_be_captured_the_step_goes_on_and_it_is_said(graphs, monkeypatch, caplog):
    def fail(work):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(local_steps, "StepGraph", lambda step, decoding: StepGraph(step, decoding, fail))
    made = LocalGenerator(tiny.tokenizer())
    made.sync_weights(tiny.causal_lm())
    sampling = Sampling(12, temperature=1.0)
    expected = without(monkeypatch, lambda: made.generate(PROMPTS, 2, sampling, range(8)))
    assert made.generate(PROMPTS, 2, sampling, range(8)).ids == expected.ids
    assert caplog.text.count("no CUDA graph (operation not permitted") == 1
