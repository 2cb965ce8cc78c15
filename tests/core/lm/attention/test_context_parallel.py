"""Slices of a row, without processes: what each of several would compute makes up the whole. tests/distributed/
test_context.py runs them.
"""

import pytest
import torch

from posttrain.lm.attention import context_parallel
from posttrain.lm.attention.attention_blocks import Blocks, piece_by_piece
from posttrain.lm.attention.segments import Segments
from posttrain.lm.attention.varlen_attention import segment_attention
from tests.tiny import causal_lm, classifier

TREE = Segments((7, 5, 4, 6, 3, 2), (-1, -1, 1, 1, 3, 3))
LONG = Segments.documents([29])
RULES = [{}, {"window": 4}, {"softcap": 5.0}, {"sinks": torch.tensor([0.3, -1.0, 0.0, 2.0])}]


def slices(segments, parts):
    """(chunk, the places in the row of each process' tokens, and of all as they are gathered)."""
    chunk = -(-segments.num_tokens // (2 * parts))
    chunks = torch.arange(2 * parts * chunk).view(2 * parts, chunk)
    own = [torch.cat([chunks[rank], chunks[2 * parts - 1 - rank]]) for rank in range(parts)]
    return chunk, own, torch.cat(own)


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("segments", [TREE, LONG, Segments.documents([1, 2, 1])], ids=["tree", "long", "short"])
@pytest.mark.parametrize("rule", RULES, ids=["plain", "window", "softcap", "sinks"])
def test_the_slices_make_up_the_attention_of_the_row_and_its_gradients(segments, parts, rule):
    random = torch.Generator().manual_seed(parts)
    count, (chunk, own, gathered) = segments.num_tokens, slices(segments, parts)
    whole = [
        torch.randn(1, heads, count, 8, generator=random, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    ]
    expected = segment_attention(*whole, segments, scale=0.3, **rule)
    weights = torch.randn(expected.shape, generator=random, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weights).sum(), whole)
    filled = [torch.nn.functional.pad(tensor, (0, 0, 0, len(gathered) - count)) for tensor in whole]
    query, key, value = filled[0], *(tensor[:, :, gathered] for tensor in filled[1:])
    found = torch.zeros_like(filled[0])
    for rank, places in enumerate(own):
        layout = context_parallel.cut_segments(segments, chunk, parts, rank)
        if rule:
            options = {"window": None, "softcap": None, "sinks": None} | rule
            part = piece_by_piece(query[:, :, places], key, value, layout, 0.3, dropout=0.0, **options)
        else:
            part = Blocks.apply(query[:, :, places], key, value, layout, 0.3)
        found = found.index_add(2, places, part)
    found = found[:, :, :count]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for one, other in zip(torch.autograd.grad((found * weights).sum(), whole), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_each_process_has_as_much_to_attend_to():
    segments, parts = Segments.documents([64]), 4
    seen = []
    for rank in range(parts):
        layout = context_parallel.cut_segments(segments, 8, parts, rank)
        pieces = layout.segments
        seen.append(sum(pieces.lengths[i] * (pieces.offsets[i] + (pieces.lengths[i] + 1) / 2) for i in layout.own))
    assert seen == [64 * 65 / 2 / parts] * parts


def test_padding_is_seen_by_no_text():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 1, 0]])
    found = context_parallel.segments_of((3, 5), mask, None).dense_mask()
    for row in range(3):
        text = [5 * row + at for at in range(5) if mask[row, at]]
        for number, token in enumerate(text):
            assert found[token].nonzero().flatten().tolist() == text[: number + 1]


def test_positions_that_start_again_begin_a_document_unless_there_is_a_mask():
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    assert context_parallel.segments_of((2, 5), None, positions) == Segments.documents([3, 2, 5])
    assert context_parallel.segments_of((2, 5), torch.ones(2, 5), positions) == Segments.documents([5, 5])
    assert context_parallel.segments_of((2, 5), None, None) == Segments.documents([5, 5])


def test_a_mask_of_four_dimensions_is_refused():
    with pytest.raises(ValueError, match=r"attention mask of shape \(1, 1, 4, 4\)"):
        context_parallel.segments_of((1, 4), torch.ones(1, 1, 4, 4), None)


def test_models_that_cannot_be_cut_are_refused_by_name():
    import transformers

    small = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1}
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**small, state_size=4))
    hybrid = transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(
            **small, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2, layer_types=["conv"]
        )
    )
    for model, name in [(mamba, "Mamba"), (hybrid, "conv"), (classifier(), "Bert")]:
        problem = context_parallel.problem_of(model)
        assert problem is not None and name in problem
    moe = causal_lm()
    moe.config.output_router_logits = True
    assert "routes" in context_parallel.problem_of(moe)
    assert context_parallel.problem_of(causal_lm()) is None
