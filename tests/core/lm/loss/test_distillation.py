"""Divergences in tiles have the values and gradients of their formulas on whole logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from posttrain.lm.loss import tiles
from posttrain.lm.loss.distillation import HeadStates, Measure, TopK, divergence_terms, linear_divergence

VOCAB, WIDTH, WIDER = 50, 16, 24


def problem(dtype=torch.float64, vocabulary=VOCAB):
    """The student's hidden states, weight, bias and labels, and the teacher's states at the labelled positions."""
    make = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype)  # noqa: E731
    student = draw(3, 37, WIDTH).requires_grad_(), draw(VOCAB, WIDTH).requires_grad_(), draw(VOCAB).requires_grad_()
    labels = torch.where(torch.rand(3, 37, generator=make) < 0.3, -100, 7)
    teacher = HeadStates(draw(int((labels != -100).sum()), WIDER), draw(vocabulary, WIDER) / 3, draw(vocabulary))
    return student, labels, teacher


def logps(hidden, weight, bias, temperature=1.0, softcap=None, scale=1.0):
    logits = scale * (hidden @ weight.T + bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return (logits / temperature).log_softmax(-1)


def check(student, labels, teacher, measure, expected, relative=1e-10, **options):
    hidden, weight, bias = student
    loss, entropy = linear_divergence(hidden, weight, labels, teacher, measure, bias=bias, chunk_size=10, **options)
    assert_close(loss, expected, rtol=relative, atol=relative)
    found = torch.autograd.grad(2.5 * loss, student)
    for ours, theirs in zip(found, torch.autograd.grad(2.5 * expected, student), strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() <= relative * theirs.norm()
    assert not entropy.requires_grad
    return entropy


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"scale": 0.3}, {"softcap": 2.0, "scale": 1.5}], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_divergence_and_its_gradients_are_those_of_whole_logits(beta, options, temperature, monkeypatch):
    monkeypatch.setattr(tiles, "BLOCK_ELEMENTS", 4 * VOCAB)  # several blocks to a tile
    student, labels, teacher = problem()
    teacher = teacher._replace(softcap=4.0, scale=0.7)
    own = logps(*student, temperature, **options)[labels != -100]
    other = logps(*teacher[:3], temperature, 4.0, 0.7)
    expected = divergence_terms(own, other, beta).sum()
    entropy = check(student, labels, teacher, Measure(beta, temperature), expected, **options)
    assert_close(entropy, -(own.exp() * own).sum().detach())


def test_the_ends_and_the_middle_are_those_of_the_paper():
    """p_S = (1/4, 3/4), p_T = (1/2, 1/2), whose mixtures and divergences can be had by hand."""
    student, teacher = torch.tensor([0.25, 0.75]).log(), torch.tensor([0.5, 0.5]).log()
    assert_close(divergence_terms(student, teacher, 0.0).sum().item(), 0.5 * math.log(4 / 3))
    assert_close(divergence_terms(student, teacher, 1.0).sum().item(), 0.25 * math.log(27 / 16), rtol=1e-6, atol=1e-7)
    to_middle = 0.5 * (0.5 * math.log(4 / 3) + 0.5 * math.log(4 / 5))
    from_student = 0.5 * (0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5))
    assert_close(divergence_terms(student, teacher, 0.5).sum().item(), to_middle + from_student, rtol=1e-6, atol=1e-7)


def test_a_student_that_is_its_teacher_has_no_loss_and_no_gradient():
    (hidden, weight, bias), labels, _ = problem()
    same = HeadStates(hidden.detach()[labels != -100], weight.detach(), bias.detach())
    for beta in (0.0, 0.5, 1.0):
        loss, _ = linear_divergence(hidden, weight, labels, same, Measure(beta), bias=bias)
        assert loss.detach().abs() < 1e-9
        assert all(g.abs().max() < 1e-12 for g in torch.autograd.grad(loss, (hidden, weight, bias)))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_tokens_that_one_of_the_two_excludes_count_as_nothing_and_give_no_nan(beta):
    (hidden, weight, bias), labels, teacher = problem(torch.float32)
    closed = torch.zeros(VOCAB).index_fill(0, torch.tensor([3, 11]), -torch.inf)
    both = teacher._replace(bias=teacher.bias + closed)
    loss, entropy = linear_divergence(hidden, weight, labels, both, Measure(beta), bias=bias.detach() + closed)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    assert loss.isfinite() and entropy.isfinite() and all(g.isfinite().all() for g in gradients)
    keep = torch.tensor([i for i in range(VOCAB) if i not in (3, 11)])
    less = teacher._replace(weight=teacher.weight[keep], bias=teacher.bias[keep])
    expected, _ = linear_divergence(hidden, weight[keep], labels, less, Measure(beta), bias=bias[keep])
    assert_close(loss, expected)


def test_a_padded_vocabulary_is_compared_over_the_tokens_of_both():
    student, labels, teacher = problem(vocabulary=VOCAB + 6)
    own = logps(*student)[labels != -100]
    other = logps(teacher.hidden, teacher.weight[:VOCAB], teacher.bias[:VOCAB])
    check(student, labels, teacher, Measure(0.5), divergence_terms(own, other, 0.5).sum())
    student, labels, teacher = problem(vocabulary=VOCAB - 6)
    own = logps(student[0], student[1][:-6], student[2][:-6])[labels != -100]
    check(student, labels, teacher, Measure(1.0), divergence_terms(own, logps(*teacher[:3]), 1.0).sum())


@pytest.mark.parametrize("vocabulary", [VOCAB - 13, VOCAB, VOCAB + 13])
def test_by_rank_is_the_distance_of_sorted_probabilities(vocabulary):
    student, labels, teacher = problem(vocabulary=vocabulary)
    own = logps(*student)[labels != -100].exp().sort(-1, descending=True).values
    other = logps(*teacher[:3]).exp().sort(-1, descending=True).values
    widest = max(VOCAB, vocabulary)
    pad = torch.nn.functional.pad
    expected = (pad(own, (0, widest - VOCAB)) - pad(other, (0, widest - vocabulary))).abs().sum()
    check(student, labels, teacher, Measure(by_rank=True), expected)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("add_tail", [True, False])
def test_some_tokens_of_the_teacher_are_compared_with_the_same_tokens_of_the_student(beta, add_tail):
    student, labels, teacher = problem()
    other = logps(*teacher[:3])
    known, ids = other.topk(5)
    known = known.clone()
    known[::3, 4] = -torch.inf  # some rows know four
    own = logps(*student)[labels != -100].gather(1, ids).masked_fill(known.isinf(), -torch.inf)
    if add_tail:
        rest = [torch.log1p(-each.exp().sum(1, keepdim=True)) for each in (own, known)]
        own, target = torch.cat([own, rest[0]], 1), torch.cat([known, rest[1]], 1)
    else:
        own, target = (each - each.logsumexp(1, keepdim=True) for each in (own, known))
    expected = divergence_terms(own, target, beta).sum()
    check(student, labels, TopK(ids, known), Measure(beta, add_tail=add_tail), expected, relative=1e-8)


def test_all_tokens_of_the_teacher_give_the_whole_divergence():
    student, labels, teacher = problem()
    other = logps(*teacher[:3])
    topk = TopK(torch.arange(VOCAB).expand(len(other), -1), other)
    whole, _ = linear_divergence(*student[:2], labels, teacher, Measure(0.5), bias=student[2])
    some, _ = linear_divergence(*student[:2], labels, topk, Measure(0.5, add_tail=False), bias=student[2])
    assert_close(some, whole)


def test_half_precision_stays_near_single():
    (hidden, weight, bias), labels, teacher = problem(torch.float32)
    exact, _ = linear_divergence(hidden, weight, labels, teacher, Measure(0.5), bias=bias)
    expected = torch.autograd.grad(exact, (hidden, weight, bias))
    for dtype, tolerance in ((torch.bfloat16, 3e-2), (torch.float16, 3e-3)):
        parts = [part.detach().to(dtype).requires_grad_() for part in (hidden, weight, bias)]
        half = HeadStates(*(part.to(dtype) for part in teacher[:3]))
        loss, _ = linear_divergence(parts[0], parts[1], labels, half, Measure(0.5), bias=parts[2])
        assert_close(loss, exact, rtol=tolerance, atol=0.0)
        scaled = torch.autograd.grad(1e-4 * loss, parts)
        for ours, theirs in zip(scaled, expected, strict=True):
            assert (1e4 * ours.float() - theirs).norm() <= tolerance * 3 * theirs.norm()


def test_no_position_is_a_loss_of_zero_with_zero_gradients():
    (hidden, weight, bias), labels, teacher = problem()
    nothing = teacher._replace(hidden=teacher.hidden[:0])
    loss, entropy = linear_divergence(hidden, weight, torch.full_like(labels, -100), nothing, bias=bias)
    assert loss == 0 and entropy == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, (hidden, weight, bias)))


def test_a_frozen_head_gets_no_gradient_and_a_second_backward_is_refused():
    (hidden, weight, bias), labels, teacher = problem()
    loss, _ = linear_divergence(hidden, weight.detach(), labels, teacher, bias=bias.detach())
    loss.backward(retain_graph=True)
    assert hidden.grad.abs().sum() > 0 and weight.grad is None
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_positions_that_do_not_match_are_refused():
    (hidden, weight, bias), labels, teacher = problem()
    with pytest.raises(ValueError, match="positions to compare"):
        linear_divergence(hidden, weight, labels, teacher._replace(hidden=teacher.hidden[1:]), bias=bias)
