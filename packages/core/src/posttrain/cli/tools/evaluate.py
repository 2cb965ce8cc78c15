"""The command ``posttrain evaluate``: benchmarks of EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import nn

from posttrain.cli import parse
from posttrain.cli.tools import load
from posttrain.core.errors import CheckpointError, ConfigError, DataError, require

EXTRA = "posttrain-core[evaluate]"
HELP = f"""posttrain evaluate MODEL --tasks TASK ... [--limit N] [--num_fewshot N] [--output FILE.json] ...

Evaluate a model, or an adapter on its base, on tasks of lm-eval (pip install '{EXTRA}'), such as gsm8k, ifeval or
hellaswag. `lm-eval ls tasks` lists them.

  --tasks TASK ...       names of tasks
  --include_path FOLDER  where the YAML files of your own tasks are
  --num_fewshot N        examples in the prompt; by default those of the task
  --limit N              rows of each task; by default all
  --batch_size N         rows in a batch [default 8]
  --chat                 ask through the chat template
  --output FILE.json     also write the results with their settings there
{load.FLAGS}"""
KINDS = load.KINDS | {
    "tasks": list, "include_path": str, "num_fewshot": int, "limit": int, "batch_size": int, "chat": bool,
    "output": str,
}  # fmt: skip


def run(words: list[str]) -> None:
    """The command.

    Raises:
        ConfigError: the words are not those of `HELP`. CheckpointError: the model or lm-eval cannot be loaded.
        DataError: the rows of a task cannot be had.
    """
    if {"-h", "--help"} & set(words):
        print(HELP)
        return
    what = "a model: its folder or its name"
    names, given = parse.typed_flags("evaluate", words, KINDS, names=1, what=what, least=load.LEAST)
    if not given.get("tasks"):
        raise ConfigError("evaluate", ["name the tasks, as in --tasks gsm8k ifeval"])
    output = given.pop("output", None)
    try:
        require("lm_eval", EXTRA, why="posttrain evaluate")
    except ImportError as error:
        raise CheckpointError(str(error)) from error
    model, tokenizer = load.of_command("evaluate", names[0], given)
    try:
        results = evaluate(model, tokenizer, **given)
    except OSError as error:  # of the network too
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"lm-eval could not read the rows of {', '.join(given['tasks'])}: {reason}. They come from the Hub; a task "
            "of your own (--include_path) reads a file."
        ) from error
    except ValueError as error:
        raise ConfigError("evaluate", [str(error)]) from error
    from lm_eval.utils import make_table

    print(make_table(results))
    if output is not None:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        kept = {name: results[name] for name in ("results", "versions", "n-shot", "n-samples") if name in results}
        Path(output).write_text(json.dumps({"model": names[0], **kept}, indent=2, default=str) + "\n", encoding="utf-8")
        print(f"The results are in {output}.")


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    tasks: list[str],
    *,
    include_path: str | os.PathLike[str] | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    chat: bool = False,
) -> dict[str, Any]:
    """What ``lm_eval.simple_evaluate`` returns for a loaded model.

    Args:
        tasks: names of tasks of lm-eval. include_path: where the YAML files of other tasks are.
        num_fewshot: examples in the prompt; None: those of the task. limit: rows of each task; None: all.
        chat: ask through the chat template.

    Raises:
        ImportError: lm-eval is not installed. ValueError: there is no such task.
    """
    harness: Any = require("lm_eval", EXTRA, why="evaluate")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if include_path is None else os.fspath(include_path))
    if absent := [task for task in tasks if not manager.match_tasks([task])]:
        raise ValueError(f"lm-eval has no task {absent[0]!r}; `lm-eval ls tasks` lists them, include_path adds others.")
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    return harness.simple_evaluate(
        model=wrapped, tasks=tasks, num_fewshot=num_fewshot, limit=limit, task_manager=manager, apply_chat_template=chat
    )
