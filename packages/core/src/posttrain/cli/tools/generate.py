"""The command ``posttrain generate``: completes the prompts of a JSONL file."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.cli import parse
from posttrain.cli.tools import load
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.files import naming, write_text
from posttrain.core.logging.terminal import is_terminal

HELP = f"""posttrain generate MODEL PROMPTS.jsonl OUTPUT.jsonl [--batch_size N] [--temperature T] ...

Complete the prompt of each line: a text (prompt), or messages (prompt or messages; a last message of the assistant is
left out). Each line is written with its completion added, in the order of the input. Completions are kept in
OUTPUT.jsonl.part as they are made; the same command goes on from there after an interruption.

  --batch_size N       prompts completed together; those of like length are [default 16]
  --temperature T      0 takes the most probable token [default 0]
  --max_new_tokens N   length of a completion at most [default 256]
  --num_return N       completions of each prompt: completion is then a list; needs a temperature [default 1]
  --seed N             for completions that can be repeated
{load.FLAGS}"""
KINDS = load.KINDS | {"batch_size": int, "temperature": float, "max_new_tokens": int, "num_return": int, "seed": int}


def run(words: list[str]) -> int | None:
    """Complete the prompts; 130 where it is interrupted."""
    what = "a model, the file with the prompts and the file to write"
    (name, source, target), given = parse.typed_flags("generate", words, KINDS, names=3, what=what)
    if problem := _all_the_same(given.get("num_return", 1), given.get("temperature", 0.0)):
        raise ConfigError("generate", [problem])
    if Path(target).is_dir():
        raise ConfigError("generate", [f"{target} is a folder; name the file to write, such as {target}/out.jsonl"])
    rows = read_prompts(source)
    kept = KeptCompletions(f"{target}.part", facts_of(name, source, given))
    model, tokenizer = load.of_command("generate", name, given)
    if tokenizer.chat_template is None and any(isinstance(prompt, list) for prompt, _ in rows):
        raise DataError(f"{source} holds messages. {load.NO_TEMPLATE}")
    from tqdm import tqdm

    with tqdm(total=len(rows), initial=len(kept.found), unit="prompt", disable=not is_terminal(sys.stderr)) as bar:
        try:
            for batch in in_batches(model, tokenizer, [prompt for prompt, _ in rows], done=kept.found, **given):
                bar.update(kept.add(batch))
        except KeyboardInterrupt:
            print(
                f"Completions of {len(kept.found)} of {len(rows)} prompts are in {kept.path}; the same command goes on."
            )
            return 130
    lines = (row | {"completion": kept.found[number]} for number, (_, row) in enumerate(rows))
    whole = Path(f"{target}.whole")
    write_text(whole, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    os.replace(whole, target)  # a file that is there is whole
    kept.path.unlink(missing_ok=True)
    print(f"{len(rows) * given.get('num_return', 1)} completions of {len(rows)} prompts are in {target}.")
    return None


def facts_of(model: str, source: str | os.PathLike[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """What completions depend on: the model, the prompts and the flags. The batch size may change between two starts.

    A folder of weights is known by the sizes and times of its files.
    """
    folder = Path(model)
    files = sorted(file for file in folder.iterdir() if file.is_file()) if folder.is_dir() else []
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    facts = {"model": model, "weights": hashlib.sha256(repr(stats).encode()).hexdigest()}
    facts["prompts"] = hashlib.sha256(Path(source).read_bytes()).hexdigest()
    return facts | {name: value for name, value in given.items() if name not in ("batch_size", "device")}


class KeptCompletions:
    """Completions in a file, each written when it is made, so that an interrupted command can go on.

    The first line holds what they depend on, each other line the number of a prompt, from 0, and its completion.
    `facts`: what the completions depend on, from `facts_of`. Raises a `ConfigError` where the file holds completions
    that depend on something else.
    """

    def __init__(self, path: str | os.PathLike[str], facts: Mapping[str, Any]) -> None:
        self.path = Path(path)
        text = self.path.read_bytes() if self.path.exists() else b""
        text = text[: text.rfind(b"\n") + 1]  # without a line that was cut off
        head, *lines = [json.loads(line) for line in text.splitlines()] or [dict(facts)]
        others = [name for name in {**facts, **head} if head.get(name) != facts.get(name)]
        if others:
            problem = (
                f"{self.path} holds completions of another command: {', '.join(others)} "
                f"{'differ' if len(others) > 1 else 'differs'}. Repeat that command to finish it, or delete the file."
            )
            raise ConfigError("generate", [problem])
        self._beginning = text or (json.dumps(head) + "\n").encode()  # written with the first batch
        self.found: dict[int, Any] = {line["number"]: line["completion"] for line in lines}
        if self.found:
            print(f"Completions of {len(self.found)} prompts are in {self.path} already.")

    def add(self, batch: Mapping[int, Any]) -> int:
        """Keep the completions of a batch by the numbers of their prompts; of how many prompts they are new."""
        new = {number: completion for number, completion in batch.items() if number not in self.found}
        if self._beginning:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(self._beginning)
            self._beginning = b""
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            for number, completion in new.items():
                file.write(json.dumps({"number": number, "completion": completion}, ensure_ascii=False) + "\n")
        self.found |= new
        return len(new)


def read_prompts(path: str | os.PathLike[str]) -> list[tuple[str | list[dict[str, Any]], dict[str, Any]]]:
    """``(prompt, row)`` of each line of a JSONL file: a text or messages before an answer; `DataError` if faulty."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number} is no JSON: {error}") from error
        prompt = row.get("prompt", row.get("messages")) if isinstance(row, dict) else None
        if not isinstance(prompt, (str, list)) or not prompt:
            raise DataError(f"{path}, line {number} has neither a prompt (a text or messages) nor messages.")
        if isinstance(prompt, list) and not all(isinstance(turn, dict) and "role" in turn for turn in prompt):
            raise DataError(f"{path}, line {number}: messages are objects with a role and a content.")
        if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            prompt = prompt[:-1]
        rows.append((prompt, row))
    if not rows:
        raise DataError(f"{path} holds no prompt.")
    return rows


def complete(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | list[dict[str, Any]]],
    **options: Any,
) -> list[Any]:
    """A completion of each prompt, as text; a list of `num_return` of each where that is more than one. Raises a
    `ValueError` where several completions of each are asked for at temperature 0, where all are the same.

    Args:
        prompts: texts, or conversations before an answer.
        options: those of `in_batches`.
    """
    found: dict[int, Any] = {}
    for batch in in_batches(model, tokenizer, prompts, **options):
        found |= batch
    return [found[number] for number in range(len(prompts))]


def in_batches(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | list[dict[str, Any]]],
    *,
    batch_size: int = 16,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    num_return: int = 1,
    seed: int | None = None,
    done: Collection[int] = (),
) -> Iterator[dict[int, Any]]:
    """Batches of completions as they are made, by the number of their prompt; the longest prompts come first.

    Args:
        prompts, num_return: as in `complete`.
        batch_size: prompts of like length that are completed together.
        temperature: 0 takes the most probable token.
        seed: of the first batch; each further one has its own, so that a batch needs none of those before it.
        done: numbers of prompts that need no completion; a batch is left out if none of its prompts does.
    """
    if problem := _all_the_same(num_return, temperature):
        raise ValueError(problem)
    encoded = [load.encode(tokenizer, prompt) for prompt in prompts]
    order = sorted(range(len(encoded)), key=lambda number: -len(encoded[number]))
    options = load.sampling(temperature) | {"max_new_tokens": max_new_tokens, "num_return_sequences": num_return}
    for at in range(0, len(order), batch_size):
        numbers = order[at : at + batch_size]
        if all(number in done for number in numbers):
            continue
        if seed is not None:
            torch.manual_seed(seed + at)
        rows = load.write(model, tokenizer, [encoded[number] for number in numbers], **options)
        texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
        own = [texts[place * num_return : (place + 1) * num_return] for place in range(len(numbers))]
        yield {number: one[0] if num_return == 1 else one for number, one in zip(numbers, own, strict=True)}


def _all_the_same(num_return: int, temperature: float) -> str | None:
    """Why several completions of a prompt are of no use; None where they are."""
    if num_return == 1 or temperature > 0:
        return None
    return f"num_return={num_return} at temperature=0 gives the same completion again; set a temperature."
