"""Distributions over two vocabularies: which tokens are of which text, and what is compared, by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from posttrain.rl import ULDLoss
from posttrain.rl.losses.universal_logits import (
    Texts,
    Vocabularies,
    by_rank,
    common_texts,
    entropy,
    merged,
    of_tokens,
    universal_divergence,
)
from posttrain.rl.online.teachers import align
from tests import tiny

STUDENT = tiny.tokenizer()
TEACHER = STUDENT.train_new_from_iterator([word[1:] for text in tiny.CORPUS for word in text.split()] * 9, 330)
EMOJI = "\N{GRINNING FACE}"


@pytest.mark.parametrize(
    "text", ["".join(tiny.CORPUS), f"a {EMOJI}{EMOJI} b", "  x\n\ny", "é\u0301 \N{HIRAGANA LETTER A}"]
)
def test_texts_are_the_shortest_that_tokens_of_both_cover_and_leave_nothing_out(text):
    ids = [*STUDENT(text)["input_ids"], 1]
    made, texts = align(ids, STUDENT, TEACHER, {1}, with_end=True)
    assert [i for own, _ in texts for i in range(len(ids))[own]] == [*range(len(ids))]
    assert [i for _, other in texts for i in range(len(made))[other]] == [*range(len(made))]
    for own, other in texts[:-1]:
        assert STUDENT.decode(ids[own]) == TEACHER.decode(made[other])
    edges = {len(STUDENT.decode(ids[:i])) for i in range(len(ids)) if text.startswith(STUDENT.decode(ids[:i]))}
    others = {len(TEACHER.decode(made[:i])) for i in range(len(made)) if text.startswith(TEACHER.decode(made[:i]))}
    assert len(texts) == len(edges & others)  # the last one is the end, the first edge 0
    assert texts[-1] == (slice(len(ids) - 1, len(ids)), slice(len(made) - 1, len(made)))
    assert align(ids, STUDENT, TEACHER, {1})[1] == texts[:-1]


def test_a_part_of_a_character_is_in_no_text():
    ids = STUDENT(f"so {EMOJI}")["input_ids"][:-1]
    made, texts = align(ids, STUDENT, TEACHER)
    assert "".join(STUDENT.decode(ids[own]) for own, _ in texts).rstrip() == "so"
    assert all("\ufffd" not in TEACHER.decode(made[other]) for _, other in texts)


def test_an_empty_completion_has_no_text():
    assert align([], STUDENT, TEACHER, {1})[1] == [] and align([1], STUDENT, TEACHER, {1})[1] == []
    groups = torch.tensor([[-1, -2]])
    texts = Texts.marked(groups)
    assert [len(part) for part in texts] == [0, 0, 0, 0]
    logits = torch.zeros(1, 3, requires_grad=True)
    given = logits.__getitem__, torch.tensor([0]), texts, None, torch.tensor([]), texts, Vocabularies(), 1
    found = universal_divergence(*given)
    found.sum().backward()
    assert found.tolist() == [0] and logits.grad.abs().sum() == 0


def test_tokens_are_numbered_among_those_with_a_logit():
    texts = Texts.marked(torch.tensor([[0, 0, -1, 1], [-2, 0, -1, -2]]))
    assert [part.tolist() for part in texts] == [[0, 1, 3, 4], [0, 0, 1, 2], [1, 2, 3], [0, 0, 1]]
    assert [part.tolist() for part in texts.part(1, 3)] == [[3, 4], [0, 1], [0, 1], [0, 1]]


def test_the_distribution_of_a_text_is_that_of_its_last_token_times_those_before():
    logits = torch.tensor([[0.5, 0.5], [0.8, 0.2], [0.3, 0.7]]).log()
    texts = Texts.marked(torch.tensor([[0, 0, 1]]))
    found = merged(logits, torch.tensor([0, 1, 1]), texts).exp()
    torch.testing.assert_close(found, torch.tensor([[0.4, 0.1], [0.3, 0.7]]))


def test_losses_by_hand():
    p, q = torch.tensor([[0.4, 0.1, 0.0]]), torch.tensor([[0.5, 0.25]])
    assert by_rank(p, q).item() == pytest.approx(0.1 + 0.15)
    shared = torch.tensor([1]), torch.tensor([0])  # token 1 of the student is token 0 of the teacher
    forward = 0.5 * math.log(0.5 / 0.1)
    found = Vocabularies(shared, 0.0, (2.0, 10.0)).compare(p.log(), q.log()).item()
    assert found == pytest.approx(2 * forward + 10 * abs(0.4 - 0.25))
    found = Vocabularies(shared, 0.0).compare(p.log(), q.log()).item()
    assert found == pytest.approx(0.5 * forward + 0.5 * 0.15)  # one of the teacher's two tokens is shared
    logits = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]).log()
    assert entropy(logits).tolist() == pytest.approx([math.log(2), 0])


def test_texts_are_averaged_over_each_completion_whatever_is_held_at_once(monkeypatch):
    torch.manual_seed(0)
    marks = torch.tensor([[0, 0, 1, 2], [0, 1, 1, 1], [-1, -1, -2, -2]])
    own, other = Texts.marked(marks), Texts.marked(torch.tensor([[0, 1, 2, 2], [0, 0, 0, 1], [-2, -2, -2, -2]]))
    student, teacher = torch.randn(10, 7, requires_grad=True), torch.randn(8, 5)
    tokens, others = torch.randint(7, (10,)), torch.randint(5, (8,))

    held = []

    def logits(at):
        held.append(len(at))
        return student[at]

    def losses():
        held.clear()
        found = universal_divergence(logits, tokens, own, lambda at: teacher[at], others, other, Vocabularies(), 3)
        every = of_tokens(lambda at, ids: torch.nn.functional.cross_entropy(logits(at), ids, reduction="none"), tokens)
        return found, every, *(torch.autograd.grad(part.sum(), student)[0] for part in (found, every))

    whole = losses()
    monkeypatch.setattr("posttrain.rl.losses.universal_logits.TEXTS_AT_ONCE", 2)
    torch.testing.assert_close(losses(), whole)
    assert max(held) == 3  # tokens of two texts, of 10
    each = by_rank(merged(student[own.at], tokens[own.at], own).exp(), merged(teacher, others, other).exp())
    expected = torch.stack([each[:3].mean(), each[3:].mean(), torch.zeros(())])
    torch.testing.assert_close(whole[0], expected)


# -------------------------------------------------------------------------------------------------- the loss of scripts


def test_texts_are_cut_where_tokens_of_both_end():
    assert common_texts([3, 5, 9], [1, 5, 7, 9]) == [(slice(0, 2), slice(0, 2)), (slice(2, 3), slice(2, 4))]
    assert common_texts([2, 4, 4], [4, 4]) == [(slice(0, 2), slice(0, 1)), (slice(2, 3), slice(1, 2))]  # the ends
    assert common_texts([2, 4], [2, 5]) == [(slice(0, 1), slice(0, 1))] and common_texts([], [1]) == []


def settings(**changed):
    usual = dict(
        uld_crossentropy_weight=0.0,
        uld_distillation_weight=1.0,
        uld_student_temperature=1.0,
        uld_teacher_temperature=1.0,
        uld_skip_student_eos=False,
        uld_skip_teacher_eos=False,
        beta=0.5,
    )
    return SimpleNamespace(**usual | changed)


def scripted(config, **changed):
    """(loss, what it was given, the module) of three tokens beside two of the same six bytes. Of the two rows behind
    them, one has no completion and one no prompt.
    """
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 5, requires_grad=True)
    others = [[[0, 0]] * 4, [[0, 2], [2, 6], [0, 0], [0, 0]]]
    given = dict(
        student_logits=logits,
        teacher_logits=torch.randn(3, 4, 6),
        student_labels=torch.tensor([[-100, 1, 2, 3], [-100] * 4, [1, 2, -100, -100]]),
        teacher_labels=torch.tensor([[-100, -100, 4, 5], [-100] * 4, [4, 5, -100, -100]]),
        student_input_ids=torch.tensor([[0, 1, 2, 3], [0] * 4, [1, 2, 0, 0]]),
        teacher_input_ids=torch.tensor([[0, 0, 4, 5], [0] * 4, [4, 5, 0, 0]]),
        student_byte_offsets=torch.tensor([[[0, 0], [0, 2], [2, 4], [4, 6]], *others]),
        teacher_byte_offsets=torch.tensor([[[0, 0], [0, 0], [0, 4], [4, 6]], *others]),
    )
    loss_of = ULDLoss(config, *changed.pop("tokenizers", ()))
    return loss_of(**given | changed), given, loss_of


def test_the_loss_of_whole_logits_by_hand():
    loss, given, _ = scripted(settings(uld_student_temperature=2.0, uld_distillation_weight=0.5))
    own, other = (given["student_logits"] / 2).softmax(-1), given["teacher_logits"].softmax(-1)
    first = by_rank((own[0, 0, 1] * own[0, 1])[None], other[0, 1][None])  # a text of two tokens beside one of one
    second = by_rank(own[0, 2][None], other[0, 2][None])
    third = by_rank(own[2, 0][None], other[2, 0][None])  # nothing predicts the first token of the row
    expected = 0.5 * ((first + second) / 2 + third).sum() / 3
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert given["student_logits"].grad[0].abs().sum() > 0 and given["student_logits"].grad[1].abs().sum() == 0


def test_it_can_leave_out_ends_and_add_a_cross_entropy():
    loss, given, _ = scripted(
        settings(uld_skip_student_eos=True, uld_skip_teacher_eos=True, uld_crossentropy_weight=0.3)
    )
    logits = given["student_logits"]
    own, other = logits.softmax(-1), given["teacher_logits"].softmax(-1)
    compared = by_rank((own[0, 0, 1] * own[0, 1])[None], other[0, 1][None]).sum() / 3
    predicted = torch.cat([logits[0, :3], logits[2, :1]])
    crossed = torch.nn.functional.cross_entropy(predicted, torch.tensor([1, 2, 3, 2]))
    torch.testing.assert_close(loss, compared + 0.3 * crossed)


def test_its_hybrid_parts_are_there_without_their_weights():
    words = SimpleNamespace(get_vocab=lambda: {"a": 1, "b": 2}), SimpleNamespace(get_vocab=lambda: {"a": 4, "c": 3})
    weights = dict(uld_use_hybrid_loss=True, uld_hybrid_matched_weight=0.7, uld_hybrid_unmatched_weight=0.2)
    loss, given, made = scripted(settings(**weights), tokenizers=words)
    torch.testing.assert_close(loss, 0.7 * made.last_matched_loss + 0.2 * made.last_unmatched_loss)
    shared = Vocabularies((torch.tensor([1]), torch.tensor([4])), 0.5, (1.0, 0.0))
    own, other = given["student_logits"].log_softmax(-1), given["teacher_logits"].log_softmax(-1)
    of_first = shared.compare(torch.stack([own[0, 0, 1] + own[0, 1], own[0, 2]]), other[0, 1:3]).mean()
    expected = (of_first + shared.compare(own[2, :1], other[2, :1])[0]) / 3
    torch.testing.assert_close(made.last_matched_loss, expected)
    by_share, _, made = scripted(settings(uld_use_hybrid_loss=True), tokenizers=words)
    torch.testing.assert_close(by_share, made.last_matched_loss / 6 + made.last_unmatched_loss * 5 / 6)


def test_without_offsets_it_compares_token_by_token_or_refuses(caplog):
    none = dict(student_byte_offsets=None, teacher_byte_offsets=None)
    loss, given, _ = scripted(settings(use_extended_uld=False, uld_token_merge_strategy="observed"), **none)
    own, other = given["student_logits"].softmax(-1), given["teacher_logits"].softmax(-1)
    pairs = by_rank(own[0, :2], other[0, 1:3]).mean() + by_rank(own[2, :1], other[2, :1]).mean()
    torch.testing.assert_close(loss, pairs / 3)
    assert "'observed' reads a token's probability at the position behind it" in caplog.text
    with pytest.raises(ValueError, match="Byte offsets are required"):
        scripted(settings(), **none)
