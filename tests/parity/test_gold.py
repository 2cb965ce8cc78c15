"""With a teacher of other tokens, the loss of GOLD is that of trl's `ULDLoss` on the same logits, by its chain rule."""

from __future__ import annotations

import copy
import itertools
import os

import pytest
import torch

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytest.importorskip("trl")
gold = pytest.importorskip("trl.experimental.gold")

from trl.experimental.gold.gold_trainer import ULDLoss, build_teacher_inputs_from_texts  # noqa: E402
from trl.experimental.utils import DataCollatorForChatML, DataCollatorForVisionLanguageChatML  # noqa: E402

from posttrain import rl  # noqa: E402
from posttrain.core.data.collators import IGNORE_INDEX  # noqa: E402
from posttrain.rl import GOLDConfig, GOLDTrainer  # noqa: E402
from tests import tiny, tiny_vision  # noqa: E402

WORDS = " ".join(tiny.CORPUS).split()
ROWS = [
    {"prompt": " ".join(WORDS[i : i + 3]), "completion": " " + " ".join(WORDS[i + 4 : i + 6 + 3 * i])} for i in range(4)
]
STUDENT = tiny.tokenizer()
#: Learned from the ends of words alone, so that tokens of both cross.
TEACHER = STUDENT.train_new_from_iterator([word[1:] for word in WORDS for _ in range(9)], vocab_size=330)
SIZE = 336  # of the teacher's head, which is padded


def ends(tokenizer, ids):
    """The bytes of the completion that the tokens reach up to; of a vocabulary of bytes."""
    return list(itertools.accumulate(len(tokenizer.convert_ids_to_tokens(one)) for one in ids))


def side(model, tokenizer, row):
    """(logits, labels, ids, offsets) of one row, as trl's collator makes them: the end token has no width."""
    prompt, ids = tokenizer(row["prompt"])["input_ids"], tokenizer(row["completion"])["input_ids"]
    whole, edges = torch.tensor([prompt + ids + [tokenizer.eos_token_id]]), [0, *ends(tokenizer, ids)]
    offsets = [(0, 0)] * len(prompt) + list(itertools.pairwise(edges)) + [(edges[-1], edges[-1])]
    labels = whole.clone()
    labels[:, : len(prompt)] = IGNORE_INDEX
    return model(whole).logits, labels, whole, torch.tensor([offsets])


OPTIONS = [
    {},
    {"uld_student_temperature": 1.7, "uld_teacher_temperature": 0.6, "uld_distillation_weight": 0.5},
    {"uld_skip_student_eos": False, "uld_skip_teacher_eos": False, "uld_crossentropy_weight": 0.3},
    *({"uld_use_hybrid_loss": True, "beta": beta} for beta in (0.0, 0.5, 1.0)),
    {"uld_use_hybrid_loss": True, "uld_hybrid_matched_weight": 0.7, "uld_hybrid_unmatched_weight": 0.2},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gold")
    TEACHER.save_pretrained(path / "tokens")
    return path


def trainer(folder, rows, **options):
    usual = dict(output_dir=str(folder / "out"), use_uld_loss=True, lmbda=0.0, max_completion_length=64, use_cpu=True,
                 teacher_tokenizer_name_or_path=str(folder / "tokens"), report_to="none", disable_tqdm=True,
                 per_device_train_batch_size=len(rows), shuffle_dataset=False, max_steps=1, learning_rate=1.0,
                 max_grad_norm=None, optim="sgd", save_strategy="no", logging_steps=1, lr_scheduler_type="constant",
                 gradient_checkpointing=False)  # fmt: skip
    teacher = tiny.causal_lm(seed=3, initializer_range=0.3, hidden_size=48, vocab_size=SIZE)
    return GOLDTrainer(
        tiny.causal_lm(initializer_range=0.2), teacher, GOLDConfig(**usual | options), train_dataset=rows,
        processing_class=STUDENT,
    )  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loss_and_gradient_are_those_of_trl(options, folder, monkeypatch):
    """But for trl's lower bound of probabilities, 1e-8, which that of a text of several tokens is often below."""
    bounded = torch.Tensor.clamp_min
    monkeypatch.setattr(torch.Tensor, "clamp_min", lambda x, least: bounded(x, 1e-38 if least == 1e-8 else least))
    ours = trainer(folder, ROWS, **options)
    before = {name: value.detach().clone() for name, value in ours.model.named_parameters()}
    args = gold.GOLDConfig(
        output_dir=str(folder / "theirs"), use_uld_loss=True, uld_token_merge_strategy="bayesian", use_cpu=True,
        bf16=False, report_to="none", **options,
    )  # fmt: skip
    loss_fn = ULDLoss(args, STUDENT, TEACHER, device=torch.device("cpu"))
    losses = []
    for row in ROWS:  # of one row at a time: cross-entropies of trl are means over a micro-batch
        own = side(ours.model, STUDENT, row)
        with torch.no_grad():
            other = side(ours.teacher_model, TEACHER, row)
        logits, labels, ids, offsets = zip(own, other, strict=True)
        losses.append(loss_fn(*logits, *labels, *ids, *offsets))
    expected = torch.stack(losses).mean()
    expected.backward()
    slopes = {name: value.grad.clone() for name, value in ours.model.named_parameters()}
    ours.model.zero_grad()
    ours.train()
    assert ours.state.log_history[0]["loss"] == pytest.approx(expected.item(), abs=1e-5)
    for name, value in ours.model.named_parameters():
        torch.testing.assert_close(before[name] - value.detach(), slopes[name], rtol=1e-3, atol=1e-5)


def test_some_texts_are_of_several_tokens_on_both_sides(folder):
    """Else the comparison above would say nothing of the chain rule."""
    ours = trainer(folder, ROWS)
    rollout = ours.make_rollout(iter(ours.get_train_dataloader()))
    sizes = set()
    for own, other in zip(rollout.groups, rollout.teacher_groups, strict=True):
        for text in range(int(own.max()) + 1):
            sizes.add((int((own == text).sum()), int((other == text).sum())))
    assert {(1, 1), (1, 2)} <= sizes and any(a > 1 and b > 1 for a, b in sizes), sizes


def test_without_other_tokens_it_is_generalised_knowledge_distillation(folder):
    from posttrain.rl import GKDTrainer

    given = dict(use_uld_loss=False, teacher_tokenizer_name_or_path=None, temperature=1.0, beta=0.3)
    teacher = tiny.causal_lm(seed=3, initializer_range=0.3, hidden_size=48)
    found = []
    for kind in (GOLDTrainer, GKDTrainer):
        args = kind.config_class(
            output_dir=str(folder / "gkd"), lmbda=0.0, use_cpu=True, max_steps=1, report_to="none", logging_steps=1,
            per_device_train_batch_size=4, save_strategy="no", disable_tqdm=True, shuffle_dataset=False,
            **(given if kind is GOLDTrainer else {"temperature": 1.0, "beta": 0.3}),
        )  # fmt: skip
        made = kind(tiny.causal_lm(), teacher, args, train_dataset=ROWS, processing_class=STUDENT)
        made.train()
        found.append(made.state.log_history[0]["loss"])
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("options", [*OPTIONS, {"use_extended_uld": False}], ids=str)
def test_the_loss_of_scripts_is_that_of_trl_for_texts_of_its_functions(options, folder, monkeypatch):
    """A batch of padded rows, with the bound of probabilities of above."""
    bounded = torch.Tensor.clamp_min
    monkeypatch.setattr(torch.Tensor, "clamp_min", lambda x, least: bounded(x, 1e-38 if least == 1e-8 else least))
    args = gold.GOLDConfig(
        output_dir=str(folder / "theirs"),
        use_uld_loss=True,
        uld_token_merge_strategy="bayesian",
        use_cpu=True,
        bf16=False,
        report_to="none",
        **options,
    )
    models = tiny.causal_lm(initializer_range=0.2), tiny.causal_lm(seed=3, initializer_range=0.3, vocab_size=SIZE)
    prompts, completions = ([row[name] for row in ROWS] for name in ("prompt", "completion"))
    sides = []
    for tokenizer, model in zip((STUDENT, TEACHER), models, strict=True):
        found = rl.build_teacher_inputs_from_texts(tokenizer, prompts, completions)
        theirs = build_teacher_inputs_from_texts(tokenizer, prompts, completions)
        assert all(map(torch.equal, found, theirs))
        ids, labels, mask, spans = found
        sides.append((model(ids, attention_mask=mask.long()).logits, labels, ids, spans))
    logits, labels, ids, spans = zip(*sides, strict=True)
    given = *logits, *labels, *ids, *spans
    losses = []
    for kind in (rl.ULDLoss, ULDLoss):
        made = kind(args, STUDENT, TEACHER, device=torch.device("cpu"))
        loss = made(*given)
        loss.backward(retain_graph=True)
        losses.append((loss, models[0].lm_head.weight.grad.clone()))
        models[0].zero_grad()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)


def test_conversations_become_the_tensors_of_trl():
    rows = [
        {
            "messages": [
                {"role": "user", "content": " ".join(WORDS[: 9 * i + 2])},
                {"role": "assistant", "content": answer},
            ]
        }
        for i, answer in enumerate(["Yes \N{GRINNING FACE}\N{GRINNING FACE}!", "é\u0301 no", " ".join(WORDS[:8])])
    ]
    for most in (None, 48):
        ours = rl.DataCollatorForChatML(STUDENT, max_length=most)(rows)
        theirs = DataCollatorForChatML(STUDENT, max_length=most)(rows)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("family", ["smolvlm", "qwen2_vl", "gemma3"])
def test_rows_with_images_become_the_tensors_of_trl(family):
    processor = tiny_vision.FAMILIES[family]()[1]
    rows = [
        {
            "images": [tiny_vision.image(seed)],
            "prompt": [{"role": "user", "content": " ".join(WORDS[: 3 * seed + 1])}],
            "completion": [{"role": "assistant", "content": answer}],
        }
        for seed, answer in enumerate(["Yes \N{GRINNING FACE}!", "é\u0301 no", " ".join(WORDS[:8])])
    ]
    ours = rl.DataCollatorForVisionLanguageChatML(processor)(rows)
    whole = ours["input_ids"].shape[1]
    for most in (None, whole - 3):
        ours = rl.DataCollatorForVisionLanguageChatML(processor, max_length=most)(rows)
        theirs = DataCollatorForVisionLanguageChatML(processor, max_length=most)(copy.deepcopy(rows))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if torch.is_tensor(value):
                torch.testing.assert_close(ours[name], value, rtol=0, atol=0, msg=name)
            else:
                assert ours[name] == value
