"""Reward functions without a model: accuracy, format, repetition, length.

Each takes lists and returns one number for each completion; completions are texts or lists of messages. Other columns
may be passed, and are not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from posttrain.core.errors import require

THOUGHT_ENDS = ("</think>",)


def text_of(completion: Any) -> str:
    """The text of a completion: of its last message, with its thoughts, where it is a list of messages."""
    if isinstance(completion, str):
        return completion
    message = completion[-1] if completion else {}
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    if thoughts := message.get("reasoning_content") or message.get("thinking"):
        goes_on = content or message.get("tool_calls")  # else they were cut
        return f"<think>\n{thoughts}\n</think>\n{content}" if goes_on else f"<think>\n{thoughts}"
    return content


# ------------------------------------------------------------------------------------------------------ right answers

_NUMBER = re.compile(
    r"-?\\[dt]?frac\s*(?:\{-?\d+\}\s*\{-?\d+\}|\d\d)|-?\d[\d,]*(?:\.\d+)?(?:\s*/\s*-?\d[\d,]*)?|-?\.\d+"
)
_NOISE = re.compile(r"\\(?:left|right|displaystyle|!|,|;|:|\s)|[\s$%°]|\\%|\\\$|^\{|\}$")
_TEXT = re.compile(r"\\(?:text|mathrm)\{([^{}]*)\}")
_FRACTION = re.compile(r"(?<!\d)\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
#: A formula at the end, between dollar signs, \(...\) or \[...\]; all of a text that has operators and no words.
_AT_END = re.compile(r"(?:\$\$|\$(?=\S)|\\[(\[])\s*+((?:(?!\$|\\[()\[\]]).)++)\s*+(?:\$\$?|\\[)\]])[\s.!]*\Z")
_FORMULA = re.compile(r"(?=.*[\\^_(\[{+*=,/])((?:(?!(?<!\\)\b[A-Za-z]{2}).)++)\Z")
_LEFT_SIDE = re.compile(r"\A[^,]*(?<![<>!])=")


def final_answer(text: str) -> str | None:
    r"""The answer that a solution ends in: the last ``\boxed{...}``, what follows ``####``, the formula at its end, all
    of it if it is one formula without words, or the last number; else None.
    """
    start = text.rfind("\\boxed{")
    if start >= 0:
        depth, begin = 1, start + len("\\boxed{")
        for place in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[begin:place].strip()
    if "####" in text:
        after = text.rpartition("####")[2].strip()
        return after.splitlines()[0].strip() if after else None
    if formula := _AT_END.search(text) or _FORMULA.match(text.strip()):
        return formula[1].strip()
    return next(reversed(_NUMBER.findall(text)), None)


def as_number(answer: str) -> Fraction | None:
    """An answer as an exact number: ``1,000``, ``0.5``, ``1/2``, ``\\frac{1}{2}``; None if it is not one."""
    plain = _FRACTION.sub(r"\1\2/\3\4", _TEXT.sub("", answer))
    plain = _NOISE.sub("", plain).replace(",", "").rstrip(".")
    over, _, under = plain.partition("/")
    try:
        return Fraction(over) / Fraction(under) if under else Fraction(over)
    except (ValueError, ZeroDivisionError):
        return None


def same_answer(left: str, right: str) -> bool:
    """Whether two answers, or right sides of equations, are the same number, or text up to spaces and LaTeX's look."""
    left, right = (_LEFT_SIDE.sub("", answer) for answer in (left, right))
    numbers = as_number(left), as_number(right)
    if None not in numbers:
        return numbers[0] == numbers[1]
    left, right = (_NOISE.sub("", _TEXT.sub(r"\1", answer)).rstrip(".").lower() for answer in (left, right))
    return left == right


def accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **others: Any,
) -> list[float | None]:
    """1 where the `final_answer` of a completion is the `same_answer` as the solution's, else 0; None without one."""
    known = ["" if text is None else str(text) for text in solution]
    gold = [final_answer(text) or text.strip() or None for text in known]
    given = [final_answer(text_of(completion)) for completion in completions]
    if log_extra is not None:
        log_extra("solution", gold)
        log_extra("answer", given)
    return [
        None if right is None else float(answer is not None and same_answer(answer, right))
        for answer, right in zip(given, gold, strict=True)
    ]


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **others: Any,
) -> list[float | None]:
    """`accuracy_reward` of what follows the thoughts; 0 where a completion has not finished thinking."""
    delimiters = THOUGHT_ENDS if reasoning_delimiters is None else tuple(reasoning_delimiters)
    texts = [text_of(completion) for completion in completions]
    ends = [max((text.rfind(mark) + len(mark) for mark in delimiters if mark in text), default=-1) for text in texts]
    answers = [text[end:] if end >= 0 else "" for text, end in zip(texts, ends, strict=True)]
    return accuracy_reward(answers, solution, log_extra)


def math_verify_reward(completions: Sequence[Any], solution: Sequence[str], **others: Any) -> list[float | None]:
    """1 where math-verify (https://github.com/huggingface/Math-Verify) finds the answers equal, else 0; None for
    solutions without an answer. It reads LaTeX: sets, intervals, matrices, equations and expressions.

    Expressions have no time limit of their own, since those of math-verify work in the main thread alone: set
    ``reward_timeout``.
    """
    math_verify = require("math_verify", "posttrain-rl[environments]", "math_verify_reward")
    parsed = partial(math_verify.parse, parsing_timeout=None)
    rewards: list[float | None] = []
    for completion, right in zip(completions, solution, strict=True):
        gold = parsed(right) or parsed(f"${right}$")
        given = parsed(text_of(completion))
        rewards.append(float(math_verify.verify(gold, given, timeout_seconds=None)) if gold else None)
    return rewards


# -------------------------------------------------------------------------------------------------- format and length


def think_format_reward(completions: Sequence[Any], **others: Any) -> list[float]:
    """1 for ``<think>...</think>`` at the beginning, once, and anything after it; else 0."""
    pattern = re.compile(r"\A<think>(?:(?!<think>).)*?</think>(?:(?!<think>).)*\Z", re.DOTALL)
    return [float(pattern.match(text_of(completion)) is not None) for completion in completions]


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    """Accuracy, with shorter right answers and longer wrong ones worth more, along half a cosine of the length.

    Yeo et al. 2025, https://arxiv.org/abs/2502.03373, appendix C.1. `max_len` is in tokens.
    """
    right, wrong = (max_value_correct, min_value_correct), (min_value_wrong, max_value_wrong)
    return _with(_cosine_scaled_reward, max_len, right, wrong)


def _cosine_scaled_reward(
    max_len: int,
    right_ends: tuple[float, float],
    wrong_ends: tuple[float, float],
    completions: Sequence[Any],
    solution: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    **others: Any,
) -> list[float | None]:
    rewards: list[float | None] = []
    for right, ids in zip(accuracy_reward(completions, solution), completion_ids, strict=True):
        shortest, longest = right_ends if right else wrong_ends
        half = 0.5 * (shortest - longest) * (1 + math.cos(min(len(ids) / max_len, 1.0) * math.pi))
        rewards.append(None if right is None else longest + half)
    return rewards


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """`max_penalty` times the share of n-grams of tokens that occurred before. Yeo et al. 2025, appendix C.2."""
    if max_penalty > 0:
        raise ValueError(f"max_penalty={max_penalty} must be <= 0: a penalty takes away.")
    if ngram_size < 1:
        raise ValueError(f"ngram_size={ngram_size} must be >= 1.")
    return _with(_repetition_penalty_reward, ngram_size, max_penalty)


def _repetition_penalty_reward(
    ngram_size: int, max_penalty: float, completion_ids: Sequence[Sequence[int]], **others: Any
) -> list[float]:
    rewards = []
    for ids in completion_ids:
        ngrams = [tuple(ids[i : i + ngram_size]) for i in range(len(ids) - ngram_size + 1)]
        repeated = 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
        rewards.append(repeated * max_penalty if repeated else 0.0)
    return rewards


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """0 up to ``max_completion_len - soft_punish_cache`` tokens, then falling to -1 at `max_completion_len`.

    DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476, equation 13.
    """
    return _with(_soft_overlong_punishment_reward, max_completion_len, soft_punish_cache)


def _soft_overlong_punishment_reward(
    max_completion_len: int, soft_punish_cache: int, completion_ids: Sequence[Sequence[int]], **others: Any
) -> list[float]:
    over = [len(ids) - (max_completion_len - soft_punish_cache) for ids in completion_ids]
    return [0.0 if by <= 0 else -by / soft_punish_cache if by <= soft_punish_cache else -1.0 for by in over]


def _with(function: Callable[..., Any], *given: Any) -> Callable[..., Any]:
    """`function` with its first arguments `given` and without its underscore, which unlike a closure can be pickled."""
    reward = partial(function, *given)
    vars(reward)["__name__"] = function.__name__.removeprefix("_")
    return reward


#: Those that a config may name.
BUILT_IN = {
    function.__name__: function
    for function in (accuracy_reward, math_verify_reward, reasoning_accuracy_reward, think_format_reward)
} | {"get_soft_overlong_punishment": get_soft_overlong_punishment(1280, 256)}  # the lengths that trl's command has
