"""The tiled losses give the numbers of the plain ones: values, gradients, and at every edge."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from posttrain.core.losses import cross_entropy, selective_log_softmax, shift_labels
from posttrain.core.losses.logits import dynamic_weights
from posttrain.lm.loss import tiles
from posttrain.lm.loss.language_modeling import linear_cross_entropy, token_logps

VOCAB, WIDTH = 50, 16
OPTIONS = [
    {},
    {"softcap": 3.0},
    {"scale": 0.3},
    {"label_smoothing": 0.1},
    {"softcap": 2.0, "scale": 1.5, "label_smoothing": 0.2},
]


def problem(dtype=torch.float64, ignored=0.3, bias=True, shape=(3, 37), seed=0):
    """hidden, weight, bias and labels; 111 rows, no multiple of the chunk of 10 that the tests use."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    offset = torch.randn(VOCAB, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    labels = torch.randint(VOCAB, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < ignored] = -100
    return hidden, weight, offset, labels


def plain_logits(hidden, weight, bias, softcap=None, scale=1.0):
    logits = scale * F.linear(hidden, weight, bias)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def plain_loss(hidden, weight, bias, labels, label_smoothing=0.0, **options):
    logits = plain_logits(hidden, weight, bias, **options).flatten(0, -2)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, labels.flatten(), label_smoothing=label_smoothing, reduction="sum")


def grads(loss, *tensors):
    return torch.autograd.grad(loss, [t for t in tensors if t is not None])


def assert_near(actual, expected, relative):
    """The error of each tensor, relative to its own size."""
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        assert (a.double() - e.double()).norm() <= relative * e.double().norm() + 1e-30


# ---- linear_cross_entropy ----


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_loss_and_gradients_are_those_of_the_plain_loss(dtype, relative, options, bias, reduction):
    hidden, weight, offset, labels = problem(dtype, bias=bias)
    expected = plain_loss(hidden, weight, offset, labels, **options)
    actual = linear_cross_entropy(
        hidden, weight, labels, bias=offset, chunk_size=10, reduction=reduction, **options
    ).sum()
    assert_near([actual], [expected], relative)
    assert_near(grads(actual * 0.37, hidden, weight, offset), grads(expected * 0.37, hidden, weight, offset), relative)


@pytest.mark.parametrize("chunk_size", [1, 7, 111, 1000])
def test_the_chunk_changes_nothing(chunk_size):
    hidden, weight, _, labels = problem(ignored=0.0)
    expected = plain_loss(hidden, weight, None, labels)
    actual = linear_cross_entropy(hidden, weight, labels, chunk_size=chunk_size)
    assert_near([actual, *grads(actual, hidden, weight)], [expected, *grads(expected, hidden, weight)], 1e-13)


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_no_label_at_all_gives_zero_and_zero_gradients(reduction):
    hidden, weight, offset, labels = problem()
    labels.fill_(-100)
    loss, stats = linear_cross_entropy(hidden, weight, labels, bias=offset, reduction=reduction, return_stats=True)
    assert not loss.any() and stats.num_correct == 0 and stats.entropy_sum == 0
    for gradient in grads(loss.sum(), hidden, weight, offset):
        assert not gradient.any()


def test_an_empty_batch_gives_zero():
    hidden, weight, _, labels = problem(shape=(0, 5))
    loss = linear_cross_entropy(hidden, weight, labels)
    assert loss == 0 and not grads(loss, weight)[0].any()


def test_mean_divides_by_the_labelled_positions():
    hidden, weight, _, labels = problem()
    count = (labels != -100).sum()
    mean = linear_cross_entropy(hidden, weight, labels, reduction="mean")
    assert_close(mean, plain_loss(hidden, weight, None, labels) / count)


def test_none_gives_each_position_its_own_loss():
    hidden, weight, _, labels = problem()
    expected = F.cross_entropy((hidden @ weight.t()).flatten(0, 1), labels.flatten(), reduction="none")
    assert_close(linear_cross_entropy(hidden, weight, labels, reduction="none"), expected.view(labels.shape))


def test_stats_come_from_the_same_distribution_as_the_loss():
    hidden, weight, offset, labels = problem()
    logits = plain_logits(hidden, weight, offset, softcap=3.0)
    labels[0] = logits[0].argmax(-1)  # some are right
    kept = labels != -100
    loss, stats = linear_cross_entropy(
        hidden, weight, labels, bias=offset, softcap=3.0, chunk_size=10, return_stats=True
    )
    assert stats.num_correct == (logits.argmax(-1) == labels)[kept].sum()
    assert_close(stats.entropy_sum, torch.distributions.Categorical(logits=logits).entropy()[kept].sum().detach())
    assert not stats.num_correct.requires_grad and not stats.entropy_sum.requires_grad
    assert_close(loss, plain_loss(hidden, weight, offset, labels, softcap=3.0))


@pytest.mark.parametrize("vocab", [50, 128, 300, 512])
def test_the_first_of_several_highest_logits_is_the_prediction(vocab):
    torch.manual_seed(0)
    logits = torch.randint(4, (64, vocab)).float()  # many are the highest
    logits[:8] = -math.inf
    logits[:8, vocab - 1] = 0.0
    highest, place = tiles._highest(logits)
    assert torch.equal(highest, logits.amax(1)) and torch.equal(place, logits.argmax(1))


def test_uniform_logits_cost_log_vocab_and_have_entropy_log_vocab():
    loss, stats = linear_cross_entropy(
        torch.zeros(5, WIDTH), torch.randn(VOCAB, WIDTH), torch.arange(5), return_stats=True
    )
    assert loss.item() == pytest.approx(5 * math.log(VOCAB), rel=1e-6)
    assert stats.entropy_sum.item() == pytest.approx(5 * math.log(VOCAB), rel=1e-6)


def test_masked_words_do_not_make_the_entropy_nan():
    bias = torch.zeros(VOCAB)
    bias[10:] = -math.inf
    loss, stats = linear_cross_entropy(
        torch.zeros(4, WIDTH), torch.ones(VOCAB, WIDTH), torch.arange(4), bias=bias, return_stats=True
    )
    assert loss.item() == pytest.approx(4 * math.log(10), rel=1e-6)
    assert stats.entropy_sum.item() == pytest.approx(4 * math.log(10), rel=1e-6)


def test_huge_logits_stay_finite():
    hidden, weight, _, labels = problem(torch.float32)
    hidden = (hidden * 1e4).detach().requires_grad_()
    loss, stats = linear_cross_entropy(hidden, weight, labels, return_stats=True)
    assert_near([loss], [plain_loss(hidden, weight, None, labels)], 1e-6)
    assert all(torch.isfinite(t).all() for t in (*grads(loss, hidden, weight), *stats))


def products(call):
    """The result of `call`, and how many matrix products it took."""
    with torch.profiler.profile() as profile:
        result = call()
    return result, sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm_"))


def test_gradients_that_nobody_needs_cost_no_matrix_product():
    hidden, weight, _, labels = problem(torch.float32, ignored=0.0)
    frozen = weight.detach()
    chunks = math.ceil(labels.numel() / 10)
    _, whole = products(lambda: linear_cross_entropy(hidden, weight, labels, chunk_size=10))
    loss, without_head = products(lambda: linear_cross_entropy(hidden, frozen, labels, chunk_size=10))
    with torch.no_grad():
        evaluated, without_any = products(lambda: linear_cross_entropy(hidden, weight, labels, chunk_size=10))
    assert (whole, without_head, without_any) == (3 * chunks, 2 * chunks, chunks)
    assert_near(grads(loss, hidden), grads(plain_loss(hidden, frozen, None, labels), hidden), 1e-6)
    assert not evaluated.requires_grad


def test_a_frozen_body_still_trains_the_head():
    hidden, weight, _, labels = problem()
    loss = linear_cross_entropy(hidden.detach(), weight, labels)
    assert_near(grads(loss, weight), grads(plain_loss(hidden, weight, None, labels), weight), 1e-13)


def test_tied_weights_get_both_gradients():
    _, weight, _, labels = problem()
    ids = labels.clamp(min=0)

    def hidden_states(weight):
        return torch.tanh(F.embedding(ids, weight))

    expected = grads(plain_loss(hidden_states(weight), weight, None, labels), weight)
    assert_near(grads(linear_cross_entropy(hidden_states(weight), weight, labels), weight), expected, 1e-13)


def test_the_gradient_is_only_scaled_by_what_comes_from_upstream():
    hidden, weight, _, labels = problem()
    expected = grads(plain_loss(hidden, weight, None, labels).square(), hidden, weight)  # upstream is 2 * loss
    assert_near(grads(linear_cross_entropy(hidden, weight, labels).square(), hidden, weight), expected, 1e-13)


def test_gradients_accumulate_over_micro_batches():
    hidden, weight, _, labels = problem()
    for rows in ([0], [1, 2]):
        (linear_cross_entropy(hidden[rows], weight, labels[rows]) / 7).backward()
    assert_near([weight.grad], grads(plain_loss(hidden, weight, None, labels) / 7, weight), 1e-13)


def test_a_second_backward_is_refused_with_a_remedy():
    hidden, weight, _, labels = problem()
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="reduction='none'"):
        loss.backward()


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_bfloat16_takes_its_softmax_in_float32(reduction):
    hidden, weight, _, labels = problem(torch.bfloat16, bias=False)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = plain_loss(*exact, None, labels)
    actual = linear_cross_entropy(hidden, weight, labels, chunk_size=10, reduction=reduction).sum()
    assert actual.dtype == torch.float32
    # What is left is the rounding of the logits themselves, which the plain loss has too.
    assert actual.item() == pytest.approx(plain_loss(hidden, weight, None, labels).item(), rel=1e-6)
    ours, plain = grads(actual, hidden, weight), grads(plain_loss(hidden, weight, None, labels), hidden, weight)
    for our, theirs, true in zip(ours, plain, grads(expected, *exact), strict=True):
        assert our.dtype == torch.bfloat16
        assert (our.double() - true).norm() <= 1.1 * (theirs.double() - true).norm() + 1e-3 * true.norm()


def test_confident_predictions_keep_their_gradient_in_bfloat16():
    hidden = torch.eye(WIDTH, dtype=torch.bfloat16).mul(8).requires_grad_()
    weight = torch.eye(VOCAB, WIDTH, dtype=torch.bfloat16)
    labels = torch.arange(WIDTH)  # p(label) is 0.984: the gradient is small against the probabilities it comes from
    exact = hidden.detach().double().requires_grad_()
    expected = grads(plain_loss(exact, weight.double(), None, labels), exact)
    actual = grads(linear_cross_entropy(hidden, weight, labels), hidden)
    assert_near([actual[0].double()], expected, 0.01)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_float16_gradients_survive_the_loss_scale(reduction):
    hidden, weight, _, labels = problem(torch.float16)
    scale = 2.0**10
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = grads(plain_loss(*exact, None, labels), *exact)
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction).sum()
    actual = [g.double() / scale for g in grads(loss * scale, hidden, weight)]
    assert_near(actual, expected, 5e-3)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_autocast_computes_as_the_plain_loss_under_autocast(reduction):
    hidden, weight, offset, labels = problem(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain_loss(hidden, weight, offset, labels)
        actual = linear_cross_entropy(hidden, weight, labels, bias=offset, reduction=reduction).sum()
    assert actual.item() == pytest.approx(expected.item(), rel=1e-5)
    ours, plain = grads(actual, hidden, weight, offset), grads(expected, hidden, weight, offset)
    assert [g.dtype for g in ours] == [torch.float32] * 3
    assert_near(ours, plain, 1e-2)


def test_a_float32_head_on_bfloat16_states_computes_in_float32():
    hidden, weight, _, labels = problem(torch.bfloat16, bias=False)
    weight = weight.detach().float().requires_grad_()
    expected = plain_loss(hidden.float(), weight, None, labels)
    actual = linear_cross_entropy(hidden, weight, labels)
    assert_near([actual, *grads(actual, weight)], [expected, *grads(expected, weight)], 1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reduction": "avg"}, "reduction='avg' is not one of"),
        ({"chunk_size": 0}, "chunk_size=0 must be >= 1"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    hidden, weight, _, labels = problem()
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(hidden, weight, labels, **arguments)


def test_shapes_that_do_not_fit_are_named():
    hidden, weight, _, labels = problem()
    with pytest.raises(ValueError, match=r"hidden \(3, 37, 16\) must be the shape of labels \(3, 36\)"):
        linear_cross_entropy(hidden, weight, labels[:, 1:])


# ---- token_logps ----


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"softcap": 2.0, "scale": 1.5}], ids=str)
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_logps_take_any_upstream_gradient(dtype, relative, options, temperature):
    hidden, weight, offset, labels = problem(dtype)
    kept = labels != -100
    logits = plain_logits(hidden, weight, offset, **options) / temperature
    expected = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) * kept
    actual, entropy = token_logps(
        hidden, weight, labels, bias=offset, temperature=temperature, chunk_size=10, stats=("entropy",), **options
    )
    assert actual.shape == labels.shape and not actual[~kept].any() and not entropy[~kept].any()
    assert_near([actual], [expected], relative)
    assert_near([entropy], [torch.distributions.Categorical(logits=logits).entropy().detach() * kept], relative)
    upstream = torch.randn(labels.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    ours = grads((actual.exp() * upstream).sum(), hidden, weight, offset)
    assert_near(ours, grads((expected.exp() * upstream * kept).sum(), hidden, weight, offset), relative)


def test_logps_tell_of_each_distribution_what_is_asked_for():
    hidden, weight, offset, labels = problem(torch.float64)
    kept, logits = labels != -100, plain_logits(hidden, weight, offset)
    expected = {
        "log_collision": logits.softmax(-1).square().sum(-1).log(),
        "correct": (logits.argmax(-1) == labels).double(),
        "mean_logit": logits.mean(-1),
        "entropy": torch.distributions.Categorical(logits=logits).entropy(),
    }
    _, *found = token_logps(hidden, weight, labels, bias=offset, chunk_size=10, stats=tuple(expected))
    for stat, value in zip(found, expected.values(), strict=True):
        assert not stat.requires_grad
        assert_near([stat], [value.detach() * kept], 1e-13)
    with pytest.raises(ValueError, match="stats holds 'mean'"):
        token_logps(hidden, weight, labels, stats=("mean",))


def test_logps_can_be_differentiated_twice_over_the_same_graph():
    hidden, weight, _, labels = problem()
    logps = token_logps(hidden, weight, labels)
    first = torch.autograd.grad(logps.sum(), weight, retain_graph=True)
    assert_near(torch.autograd.grad(2 * logps.sum(), weight), [2 * first[0]], 1e-13)


def test_logps_pass_gradcheck():
    hidden, weight, offset, labels = problem(shape=(2, 4))
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_logps(h, w, labels, bias=b, softcap=5.0, temperature=0.9, chunk_size=3),
        (hidden, weight, offset),
    )


def test_logps_of_nothing_are_zero():
    hidden, weight, _, labels = problem()
    logps = token_logps(hidden, weight, torch.full_like(labels, -100))
    assert not logps.any() and not grads(logps.sum(), hidden)[0].any()


def test_logps_in_bfloat16_are_float32():
    hidden, weight, _, labels = problem(torch.bfloat16, bias=False)
    expected = selective_log_softmax(hidden @ weight.t(), labels.clamp(min=0)) * (labels != -100)
    assert_close(token_logps(hidden, weight, labels), expected, rtol=1e-6, atol=1e-6)


def test_a_temperature_of_zero_is_refused():
    hidden, weight, _, labels = problem()
    with pytest.raises(ValueError, match=r"temperature=0.0 must be > 0"):
        token_logps(hidden, weight, labels, temperature=0.0)


def test_selective_log_softmax_is_the_gathered_log_softmax():
    logits = torch.randn(2, 3, 7)
    index = torch.randint(7, (2, 3))
    assert_close(selective_log_softmax(logits, index), logits.log_softmax(-1).gather(-1, index[..., None])[..., 0])
    assert selective_log_softmax(logits.bfloat16(), index).dtype == torch.float32


# ---- on whole logits ----


def test_labels_are_shifted_to_where_they_are_predicted():
    labels = torch.tensor([[1, 2, 3], [4, -100, 6]])
    assert shift_labels(labels).tolist() == [[2, 3, -100], [-100, 6, -100]]


def test_cross_entropy_shifts_and_averages_as_transformers_does():
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits, labels = torch.randn(2, 6, 9), torch.randint(9, (2, 6))
    labels[0, :3] = -100
    assert_close(cross_entropy(logits, labels), ForCausalLMLoss(logits, labels, 9))
    for num_items in (5, torch.tensor(5)):
        expected = ForCausalLMLoss(logits, labels, 9, num_items_in_batch=torch.tensor(5))
        assert_close(cross_entropy(logits, labels, num_items=num_items), expected)
    assert cross_entropy(logits.bfloat16(), labels).dtype == torch.float32


@pytest.mark.parametrize("num_items", [None, 5])
@pytest.mark.parametrize("shift", [False, True])
def test_label_smoothing_is_that_of_transformers(shift, num_items):
    from transformers.trainer_pt_utils import LabelSmoother

    logits, labels = torch.randn(2, 6, 9), torch.randint(9, (2, 6))
    labels[0, :3] = -100
    expected = LabelSmoother(epsilon=0.1)({"logits": logits}, labels, shift_labels=shift, num_items_in_batch=num_items)
    assert_close(cross_entropy(logits, labels, num_items, shift, label_smoothing=0.1), expected)


def test_cross_entropy_of_nothing_is_zero_with_zero_gradients():
    logits, labels = torch.randn(2, 6, 9, requires_grad=True), torch.full((2, 6), -100)
    for num_items in (None, 0, torch.tensor(0), 4):
        loss = cross_entropy(logits, labels, num_items)
        assert loss == 0 and not grads(loss, logits)[0].any()


def test_the_tiled_loss_is_the_plain_one_on_shifted_labels():
    hidden, weight, _, labels = problem()
    plain = cross_entropy(hidden @ weight.t(), labels, num_items=11, label_smoothing=0.1)
    tiled = linear_cross_entropy(hidden, weight, shift_labels(labels), label_smoothing=0.1) / 11
    assert_close(tiled, plain)


# ---- Dynamic Fine-Tuning, and losses by group


def dft_reference(hidden, weight, bias, labels, **options):
    """The equation, on whole logits: each log-probability times the probability, a constant."""
    logps = plain_logits(hidden, weight, bias, **options).double().log_softmax(-1)
    chosen = logps[labels != -100].gather(1, labels[labels != -100][:, None]).squeeze(1)
    return -(chosen.detach().exp() * chosen).sum()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"scale": 0.3}, {"softcap": 2.0, "scale": 1.5}])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_dft_is_cross_entropy_times_the_probability(dtype, relative, reduction, options, bias):
    hidden, weight, offset, labels = problem(dtype, bias=bias)
    loss = linear_cross_entropy(
        hidden, weight, labels, bias=offset, reduction=reduction, dft=True, chunk_size=10, **options
    )
    expected = dft_reference(hidden, weight, offset, labels, **options)
    if reduction == "mean":
        expected = expected / (labels != -100).sum()
    loss, expected = (loss.sum(), expected.to(loss.dtype))
    assert_near([loss], [expected], max(relative, 1e-6))
    tensors = hidden, weight, offset
    assert_near(grads(loss, *tensors), grads(expected, *tensors), relative)


def test_dft_on_whole_logits_is_the_same_and_a_certain_target_costs_nothing():
    hidden, weight, bias, labels = problem()
    logits = plain_logits(hidden, weight, bias)
    expected = linear_cross_entropy(hidden, weight, shift_labels(labels), bias=bias, dft=True)
    assert cross_entropy(logits, labels, 1, dft=True).item() == pytest.approx(expected.item(), rel=1e-6)
    uniform = cross_entropy(torch.zeros(1, 3, VOCAB), torch.tensor([[1, 2, 3]]), 1, dft=True)
    assert uniform.item() == pytest.approx(2 * math.log(VOCAB) / VOCAB, rel=1e-6)  # p log(1/p), twice
    assert dynamic_weights(torch.tensor([0.0, math.inf])).tolist() == [1.0, 0.0]


def test_dft_and_label_smoothing_are_refused_together():
    hidden, weight, _, labels = problem()
    with pytest.raises(ValueError, match="Set it to 0"):
        linear_cross_entropy(hidden, weight, labels, dft=True, label_smoothing=0.1)


@pytest.mark.parametrize("dft", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_the_losses_of_groups_are_told_and_sum_up_to_the_loss(dft, reduction):
    hidden, weight, _, labels = problem()
    groups = torch.randint(3, labels.shape, generator=torch.Generator().manual_seed(1))
    options = {"reduction": reduction, "dft": dft, "chunk_size": 10}
    loss, stats, (sums, counts) = linear_cross_entropy(
        hidden, weight, labels, return_stats=True, groups=groups, num_groups=4, **options
    )
    each = linear_cross_entropy(hidden, weight, labels, reduction="none", dft=dft).detach()
    for group in range(4):
        assert sums[group].item() == pytest.approx(each[groups == group].sum().item(), rel=1e-6)
        assert counts[group] == ((groups == group) & (labels != -100)).sum()
    assert sums.sum().item() == pytest.approx(loss.sum().item(), rel=1e-6) and not sums.requires_grad
    plain = linear_cross_entropy(hidden, weight, labels, return_stats=True, **options)
    assert_close(plain[0], loss)
    assert plain[1] == stats
