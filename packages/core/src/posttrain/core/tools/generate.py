"""The command ``posttrain generate``: completes the prompts of a JSONL file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.core.cli import parse
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.tools import load

HELP = f"""posttrain generate MODEL PROMPTS.jsonl OUTPUT.jsonl [--batch_size N] [--temperature T] ...

Complete the prompt of each line: a text (prompt), or messages (prompt or messages; a last message of the assistant is
left out). Each line is written with its completion added, in the order of the input.

  --batch_size N       prompts completed together; those of like length are [default 16]
  --temperature T      0 takes the most probable token [default 0]
  --max_new_tokens N   length of a completion at most [default 256]
  --num_return N       completions of each prompt: completion is then a list; needs a temperature [default 1]
  --seed N             for completions that can be repeated
{load.FLAGS}"""
KINDS = load.KINDS | {"batch_size": int, "temperature": float, "max_new_tokens": int, "num_return": int, "seed": int}


def run(words: list[str]) -> None:
    """The command.

    Raises:
        ConfigError: the words are not those of `HELP`. CheckpointError: the model cannot be loaded.
        DataError: a line has no prompt, or messages for a model without a chat template.
    """
    if {"-h", "--help"} & set(words):
        print(HELP)
        return
    what = "a model, the file with the prompts and the file to write"
    (name, source, target), given = parse.typed_flags("generate", words, KINDS, names=3, what=what, least=load.LEAST)
    if problem := _all_the_same(given.get("num_return", 1), given.get("temperature", 0.0)):
        raise ConfigError("generate", [problem])
    rows = read_prompts(source)
    model, tokenizer = load.of_command("generate", name, given)
    if tokenizer.chat_template is None and any(isinstance(prompt, list) for prompt, _ in rows):
        raise DataError(f"{source} holds messages. {load.NO_TEMPLATE}")
    if (seed := given.pop("seed", None)) is not None:
        torch.manual_seed(seed)
    from tqdm import tqdm

    with tqdm(total=len(rows), unit="prompt", disable=not sys.stderr.isatty()) as bar:
        done = complete(model, tokenizer, [prompt for prompt, _ in rows], progress=bar.update, **given)
    lines = [
        json.dumps(row | {"completion": text}, ensure_ascii=False) for (_, row), text in zip(rows, done, strict=True)
    ]
    part = Path(f"{target}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    os.replace(part, target)  # a file that is there is whole
    print(f"{len(rows)} completions are in {target}.")


def read_prompts(path: str | os.PathLike[str]) -> list[tuple[str | list[dict[str, Any]], dict[str, Any]]]:
    """``(prompt, row)`` of each line of a JSONL file; the prompt is a text, or messages that end before an answer.

    Raises:
        DataError: the file cannot be read, or a line has no prompt.
    """
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


@torch.no_grad()
def complete(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | list[dict[str, Any]]],
    *,
    batch_size: int = 16,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    num_return: int = 1,
    progress: Callable[[int], Any] = lambda count: None,
) -> list[Any]:
    """A completion of each prompt, as text; a list of `num_return` of each where that is more than one.

    Args:
        prompts: texts, or conversations before an answer.
        batch_size: prompts of like length that are completed together.
        temperature: 0 takes the most probable token.
        progress: called with the number of prompts just completed.

    Raises:
        ValueError: several completions of each are asked for at temperature 0, where all are the same.
    """
    if problem := _all_the_same(num_return, temperature):
        raise ValueError(problem)
    device, encoded = next(model.parameters()).device, [load.encode(tokenizer, prompt) for prompt in prompts]
    order = sorted(range(len(encoded)), key=lambda number: -len(encoded[number]))
    found: list[Any] = [None] * len(encoded)
    options = load.sampling(temperature) | {"max_new_tokens": max_new_tokens, "num_return_sequences": num_return}
    options["eos_token_id"] = load.ends(model, tokenizer)
    for at in range(0, len(order), batch_size):
        numbers = order[at : at + batch_size]
        batch = tokenizer.pad(
            {"input_ids": [encoded[number] for number in numbers]}, padding_side="left", return_tensors="pt"
        ).to(device)
        rows = model.generate(**batch, pad_token_id=tokenizer.pad_token_id, **options)  # type: ignore[operator]
        texts = tokenizer.batch_decode(rows[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        for place, number in enumerate(numbers):
            own = texts[place * num_return : (place + 1) * num_return]
            found[number] = own[0] if num_return == 1 else own
        progress(len(numbers))
    return found


def _all_the_same(num_return: int, temperature: float) -> str | None:
    """Why several completions of a prompt are of no use; None where they are."""
    if num_return == 1 or temperature > 0:
        return None
    return f"num_return={num_return} at temperature=0 gives the same completion again; set a temperature."
