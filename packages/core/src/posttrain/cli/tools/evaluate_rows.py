"""Evaluates a model on rows of the user's own: exact match, the choice that it finds likeliest, or a judge."""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from posttrain.cli.tools import generate, load
from posttrain.core import registry
from posttrain.core.errors import DataError
from posttrain.core.losses import selective_log_softmax
from posttrain.core.models.wrapping import base_model, is_encoder_decoder
from posttrain.lm.text import layouts

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclasses.dataclass(frozen=True)
class Question:
    """One row.

    Args:
        prompt: a text, or messages that end before the answer.
        answer: the right text; None where a judge alone decides.
        choices: texts of which `right` is the number of the right one.
    """

    prompt: str | list[dict[str, Any]]
    answer: str | None = None
    choices: tuple[str, ...] = ()
    right: int | None = None


def as_trained(rows: Any, arguments: Mapping[str, Any]) -> Any:
    """`rows` with sources and targets as prompts and completions, as the run of ``posttrain seq2seq`` with these
    `arguments` read them; as they are where it was another run, or they have no such columns.
    """
    source, target = ([*arguments.get(f"{name}_column", "").split(".")] for name in ("source", "target"))
    if not {source[0], target[0]} <= set(layouts.columns(rows)):
        return rows
    read = functools.partial(functools.reduce, operator.getitem)
    prefix = arguments["source_prefix"]
    return [{"prompt": prefix + read(source, row), "completion": read(target, row)} for row in rows]


def questions(rows: Any, tokenizer: Any, limit: int | None = None) -> list[Question]:
    """The questions in `rows`: prompt and completion (or columns that `layouts.find` recognises), messages whose last
    turn is the answer, a prompt with choices and the number, the letter or the text of the right one, or pairs. Raises
    a `DataError` where a row is none of these.
    """
    known = layouts.columns(rows)
    kinds = ("prompt_only",) if "choices" in known else ("preference", "prompt_completion", "prompt_only")
    found = []
    for number, row in enumerate(layouts.canonical(rows, tokenizer, kinds, "data")):
        if limit is not None and number == limit:
            break
        try:
            found.append(_question(row))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            hint = layouts.rename_hint(known, ("prompt", "completion"))
            raise DataError(
                f"row {number} has no prompt with an answer or choices ({type(error).__name__}: {error}); its columns "
                f"are {', '.join(row)}.{hint}"
            ) from error
    if not found:
        raise DataError("there are no rows to evaluate on.")
    return found


def _question(row: Mapping[str, Any]) -> Question:
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return _pair(row.get("prompt"), row["chosen"], row["rejected"])
    if "messages" in row and "prompt" not in row:
        *prompt, last = row["messages"]
        return Question(prompt, last["content"]) if last["role"] == "assistant" else Question([*prompt, last])
    if row.get("choices") is None:
        answer = row.get("completion")
        return Question(row["prompt"], answer[-1]["content"] if isinstance(answer, list) else answer)
    choices = row["choices"]
    choices = tuple(choices["text"] if isinstance(choices, Mapping) else choices)  # AI2's ARC has texts and letters
    right = next(row[name] for name in ("answerKey", "answer", "label", "completion") if row.get(name) is not None)
    if right in choices:
        right = choices.index(right)
    elif isinstance(right, str) and right.strip() in tuple(string.ascii_uppercase):
        right = string.ascii_uppercase.index(right.strip())
    choices[int(right)]
    return Question(row["prompt"], None, choices, int(right))


def _pair(prompt: Any, chosen: Any, rejected: Any) -> Question:
    """Two choices of which the first is right; without a prompt, what both begin with is it."""
    if not isinstance(chosen, str):
        prompt = chosen[:-1] if prompt is None else prompt
        return Question(prompt, None, (chosen[-1]["content"], rejected[-1]["content"]), 0)
    if prompt is None:
        prompt = os.path.commonprefix([chosen, rejected]).rpartition(" ")[0]
        chosen, rejected = chosen.removeprefix(prompt), rejected.removeprefix(prompt)
    if not prompt:
        raise ValueError("chosen and rejected do not begin alike")
    return Question(prompt, None, (chosen, rejected), 0)


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    asked: Sequence[Question],
    judge: Callable[[list[Any], list[str]], Sequence[float]] | None = None,
    **options: Any,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The metrics, and what the model did with each question.

    ``exact_match``: the share of answers that are written as they are, apart from white space; where the right answer
    ends in ``#### 72``, as in GSM8K, that number is compared with the last one. ``accuracy``: the share of questions
    whose right choice has the highest log-likelihood, or score of a reward model; ``accuracy_norm``: with the
    log-likelihood of a token. ``judge``: the mean of its scores. Raises a `DataError` where a reward model was asked
    for an answer.

    Args:
        judge: ``(prompts, completions) -> scores``. options: of `generate.complete`.
    """
    rows: list[dict[str, Any]] = [{"prompt": one.prompt} for one in asked]
    written = [place for place, one in enumerate(asked) if not one.choices]
    scores_texts = type(base_model(model)).__name__.endswith("ForSequenceClassification")
    if scores_texts and written:
        raise DataError(f"row {written[0]} has no choices, and a reward model compares some: give chosen and rejected.")
    prompts = [asked[place].prompt for place in written]
    texts = generate.complete(model, tokenizer, prompts, **options) if written else []
    for place, text in zip(written, texts, strict=True):
        rows[place]["completion"] = text
        if (answer := asked[place].answer) is not None:
            rows[place] |= {"answer": answer, "exact_match": float(matches(text, answer))}
    for row, one in zip(rows, asked, strict=True):
        if one.choices:
            scores = (rewards if scores_texts else choice_scores)(model, tokenizer, one)
            by_token = [total / count for total, count in scores]
            best, best_norm = _largest([total for total, _ in scores]), _largest(by_token)
            row |= {"choices": list(one.choices), "chosen": best, "right": one.right}
            row["accuracy"] = float(best == one.right)
            row |= {} if scores_texts else {"accuracy_norm": float(best_norm == one.right)}
    if judge is not None:
        verdicts = judge(prompts, texts)
        for place, verdict in zip(written, verdicts, strict=True):
            rows[place]["judge"] = float(verdict)
    names = dict.fromkeys(n for row in rows for n in ("exact_match", "accuracy", "accuracy_norm", "judge") if n in row)
    values = {name: [row[name] for row in rows if name in row] for name in names}
    return {name: sum(of) / len(of) for name, of in values.items()}, rows


def matches(text: str, answer: str) -> bool:
    """Whether `text` is the `answer`, see `evaluate`."""
    if "####" in answer:
        wanted, found = _NUMBER.findall(answer.rpartition("####")[2]), _NUMBER.findall(text)
        return bool(wanted and found) and float(wanted[0].replace(",", "")) == float(found[-1].replace(",", ""))
    return " ".join(text.split()) == " ".join(answer.split())


@torch.no_grad()
def choice_scores(model: nn.Module, tokenizer: Any, question: Question) -> list[tuple[float, int]]:
    """(log-likelihood, number of tokens) of each choice after the prompt."""
    prompt = load.encode(tokenizer, question.prompt)
    joined = not isinstance(question.prompt, str) or question.prompt[-1:].isspace()
    texts = [choice if joined or choice[:1].isspace() else f" {choice}" for choice in question.choices]
    answers = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    if is_encoder_decoder(model):
        read = torch.tensor([prompt], device=next(model.parameters()).device)
        labels = [torch.tensor([ids], device=read.device) for ids in answers]
        scores = [selective_log_softmax(model(input_ids=read, labels=one).logits.float(), one) for one in labels]
        return [(float(each.sum()), each.shape[1]) for each in scores]
    whole = {"input_ids": [[*prompt, *ids] for ids in answers]}
    batch = tokenizer.pad(whole, padding_side="right", return_tensors="pt").to(next(model.parameters()).device)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, len(prompt) - 1 : -1]
    logps = selective_log_softmax(logits.float(), ids[:, len(prompt) :]) * mask[:, len(prompt) :]
    return [(float(total), len(ids)) for total, ids in zip(logps.sum(1), answers, strict=True)]


@torch.no_grad()
def rewards(model: nn.Module, tokenizer: Any, question: Question) -> list[tuple[float, int]]:
    """(score, 1) of each choice after the prompt, by a reward model."""
    found = []
    for choice in question.choices:
        if isinstance(question.prompt, str):
            ids = tokenizer(question.prompt + choice + (tokenizer.eos_token or ""))["input_ids"]
        else:
            talk = [*question.prompt, {"role": "assistant", "content": choice}]
            ids = tokenizer.apply_chat_template(talk, return_dict=True)["input_ids"]
        scores = model(input_ids=torch.tensor([ids], device=next(model.parameters()).device)).logits
        found.append((float(scores[0, 0]), 1))
    return found


def _largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def judge_of(name: str) -> Callable[[list[Any], list[str]], Sequence[float]]:
    """The function at ``module:function``; `ValueError` where there is none."""
    try:
        judge: Callable[[list[Any], list[str]], Sequence[float]] = registry.load(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"judge={name!r} is no function: write module:function ({error})") from error
    return judge
