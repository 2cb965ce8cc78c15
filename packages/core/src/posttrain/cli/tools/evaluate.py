"""The command ``posttrain evaluate``: rows of the user's own, environments and agents, or benchmarks of EleutherAI's
lm-evaluation-harness.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import os
import re
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.cli import parse
from posttrain.cli.method import FILES, data_of
from posttrain.cli.source import read
from posttrain.cli.tools import generate, load
from posttrain.core import registry
from posttrain.core.errors import ConfigError, DataError, require
from posttrain.core.files import write_text
from posttrain.core.losses import selective_log_softmax
from posttrain.core.models.wrapping import base_model, is_encoder_decoder
from posttrain.lm.text import layouts

EXTRA = "posttrain-core[evaluate]"
HELP = f"""posttrain evaluate MODEL --data ROWS [--judge MODULE:FUNCTION] [--limit N] [--output FILE.json] ...
posttrain evaluate run.yaml
posttrain evaluate MODEL --env MODULE:OBJECT [--data ROWS] [--k N] [--limit N] [--output FILE.json] ...
posttrain evaluate MODEL --tasks TASK ... [--limit N] [--num_fewshot N] [--output FILE.json] ...

Evaluate a model, or an adapter on its base: on rows of your own, on the evaluation rows of a run, in an environment or
through an agent, or on tasks of lm-eval (pip install '{EXTRA}'), such as gsm8k, ifeval or hellaswag;
`lm-eval ls tasks` lists them.

  --data ROWS            a file, a folder or a dataset of the Hub. A prompt and its completion (under any names that
                         training reads, or in the columns of the run) are compared word by word, or by the number
                         after ####; of a prompt with choices and an answer, or of chosen and rejected, the likeliest
                         counts, or the one that MODEL, a reward model, gives the highest score
  --judge MODULE:FUNCTION  also scores the answers: (prompts, completions) -> numbers
  --env MODULE:OBJECT    an agent (episode, row), or arguments of an online trainer: environment_factory, tools,
                         reward_funcs, eval_dataset ...; or reasoning_gym:TASK, verifiers:TASKSET
  --k N                  episodes of each row, for avg@k and pass@k [default 1]
  --temperature T        of sampling in them; 0 takes the most probable tokens [default 1]
  --pass_threshold R     an episode passes from this reward on [default 1]
  --max_new_tokens N     length of an answer at most [default 256]
  --tasks TASK ...       names of tasks
  --include_path FOLDER  where the YAML files of your own tasks are
  --num_fewshot N        examples in the prompt; by default those of the task
  --limit N              rows of each task; by default all
  --batch_size N         rows in a batch [default 8]
  --chat                 ask through the chat template where the rows are plain texts
  --output FILE.json     also write the results with their settings there
{load.FLAGS}"""
KINDS: dict[str, type] = {"tasks": list, "chat": bool, "temperature": float, "pass_threshold": float}
KINDS |= dict.fromkeys(("data", "judge", "env", "include_path", "output"), str)
KINDS |= dict.fromkeys(("num_fewshot", "limit", "batch_size", "k", "max_new_tokens"), int)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def run(words: list[str]) -> None:
    """Evaluate a model, and print what was found."""
    name, given = load.read_words("evaluate", words, KINDS)
    if "env" in given:
        _evaluate_environment(name, given)
        return
    if only := [flag for flag in ("k", "temperature", "pass_threshold") if flag in given]:
        raise ConfigError("evaluate", [f"--{only[0]} is for episodes; name an environment or an agent: --env"])
    if name.endswith(FILES) or "data" in given:
        _evaluate_rows(name, given)
        return
    if not given.get("tasks"):
        raise ConfigError("evaluate", ["name your rows, as in --data rows.jsonl, or tasks: --tasks gsm8k ifeval"])
    output = given.pop("output", None)
    with parse.reported("evaluate"):
        require("lm_eval", EXTRA, why="posttrain evaluate")
    model, tokenizer = load.of_command("evaluate", name, given)
    with parse.reported("evaluate"):
        try:
            results = evaluate(model, tokenizer, **given)
        except OSError as error:  # of the network too
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(
                f"lm-eval could not read the rows of {', '.join(given['tasks'])}: {reason}. They come from the Hub; a "
                "task of your own (--include_path) reads a file."
            ) from error
    from lm_eval.utils import make_table

    print(make_table(results))
    if output is not None:
        kept = ("results", "versions", "n-shot", "n-samples")
        _write(output, {"model": name} | {key: results[key] for key in kept if key in results}, "results")


def _evaluate_rows(name: str, given: dict[str, Any]) -> None:
    """Evaluate on rows, and print the metrics."""
    if others := [flag for flag in ("tasks", "include_path", "num_fewshot") if flag in given]:
        raise ConfigError("evaluate", [f"--{others[0]} is for tasks of lm-eval, and these are rows; leave it out"])
    output, judge, limit = given.pop("output", None), given.pop("judge", None), given.pop("limit", None)
    chats = given.pop("chat", False)
    if name.endswith(FILES):
        name, rows = _of_run(name)
    if "data" in given:
        rows = _split_of(given.pop("data"))
    with parse.reported("evaluate"):
        function = None if judge is None else judge_of(judge)
    rows = layouts.as_messages(rows) if chats else as_trained(rows, load.arguments_of_run(name))
    model, tokenizer = load.of_command("evaluate", name, given, may_score=True)
    asked = questions(rows, tokenizer, limit)
    if function is None and output is None and not any(one.choices or one.answer is not None for one in asked):
        raise DataError(
            "the rows hold prompts alone, so there is nothing to compare. Give answers beside them, choices, or chosen "
            "and rejected; or --judge, which scores what the model writes, or --output, which keeps it."
        )
    metrics, results = evaluate_rows(model, tokenizer, asked, function, **given)
    print("\n".join([f"{len(asked)} rows", *(f"  {metric:<14} {value:.4f}" for metric, value in metrics.items())]))
    if output is not None:
        _write(output, {"model": name, "results": metrics, "rows": results}, "results with all answers")


def _evaluate_environment(name: str, given: dict[str, Any]) -> None:
    """Evaluate in an environment, and print the metrics with intervals."""
    evaluation: Any = require("posttrain.rl.evaluation", "posttrain-rl[agents]", "posttrain evaluate --env")
    if others := [flag for flag in ("tasks", "judge", "include_path", "num_fewshot", "chat") if flag in given]:
        raise ConfigError("evaluate", [f"--{others[0]} is not for environments; leave it out"])
    spec, output, data = given.pop("env"), given.pop("output", None), given.pop("data", None)
    try:
        environment = evaluation.environment_of(spec)
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError("evaluate", [f"--env: {error}"]) from error
    if data is not None:
        environment["eval_dataset"] = _split_of(data)
    model, tokenizer = load.of_command("evaluate", name, given)
    renamed = {"max_new_tokens": "max_completion_length", "batch_size": "per_device_eval_batch_size"}
    renamed |= {"temperature": "eval_temperature"}
    options = {renamed.get(flag, flag): value for flag, value in given.items()}
    metrics, episodes = evaluation.evaluate(model, tokenizer, environment, **options)
    shown = {metric: value for metric, value in metrics.items() if metric.startswith(("avg@", "pass@", "rewards/"))}
    for metric, value in shown.items():
        if not metric.endswith("_stderr"):
            spread = metrics.get(f"{metric}_stderr")
            interval = "" if spread is None else f" ± {1.96 * spread:.4f} (95%)"
            print(f"  {metric:<24} {value:.4f}{interval}")
    print(f"{len(episodes)} episodes, {metrics['completions/mean_length']:.0f} sampled tokens each.")
    if output is not None:
        kept = {"model": name, "environment": spec, "results": metrics, "episodes": episodes}
        _write(output, kept, "results with all answers")


def _split_of(data: str) -> Any:
    """The rows of a file, a folder or a dataset of the Hub: of its test split, or of the one that there is."""
    found = read(data, None, streaming=False)
    splits = found if isinstance(found, dict) else {"test": found}
    return next(splits[split] for split in ("test", "validation", *splits) if split in splits)


def _write(output: str, kept: dict[str, Any], what: str) -> None:
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    write_text(Path(output), json.dumps(kept, indent=2, default=str) + "\n")
    print(f"The {what} are in {output}.")


def _of_run(file: str) -> tuple[str, Any]:
    """(the model of the run that `file` describes, or the one that it starts from, its evaluation rows)."""
    settings, problems = parse.read_words([file])
    source = data_of(settings, problems)
    start = settings["model_name_or_path"].value if "model_name_or_path" in settings else None
    folder = settings["output_dir"].value if "output_dir" in settings else "trainer_output"
    trained = any((Path(folder) / name).is_file() for name in ("config.json", "adapter_config.json"))
    if not trained and start is None:
        raise ConfigError("evaluate", [f"{file} names no model_name_or_path, and no model is in {folder}"])
    if (rows := source.load()[1]) is None:
        raise DataError(f"{file} has no evaluation rows; set eval_dataset_name or eval_share, or name --data")
    name = folder if trained else str(start)
    print(f"Evaluates {name}{'' if trained else ', for the run has not ended yet'}.")
    return name, rows


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
    """What ``lm_eval.simple_evaluate`` returns for a loaded model. Raises an `ImportError` where lm-eval is not
    installed, and a `ValueError` where there is no such task.

    Args:
        tasks: names of tasks of lm-eval. include_path: where the YAML files of other tasks are.
        num_fewshot: examples in the prompt; None: those of the task. limit: rows of each task; None: all.
        chat: ask through the chat template.
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


# ----------------------------------------------------------------------------------------------- rows of the user's own


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
    """`rows` as prompts and completions, where a seq2seq run with these `arguments` read their sources and targets."""
    source, target = ([*arguments.get(f"{name}_column", "").split(".")] for name in ("source", "target"))
    if not {source[0], target[0]} <= set(layouts.columns(rows)):
        return rows
    read = functools.partial(functools.reduce, operator.getitem)
    prefix = arguments["source_prefix"]
    return [{"prompt": prefix + read(source, row), "completion": read(target, row)} for row in rows]


def questions(rows: Any, tokenizer: Any, limit: int | None = None) -> list[Question]:
    """The questions in `rows`: prompt and completion (or columns that `layouts.find` recognises), messages that end in
    the answer, a prompt with choices and the number, letter or text of the right one, or pairs; else a `DataError`.
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


def evaluate_rows(
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
    """Whether `text` is the `answer`, see `evaluate_rows`."""
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
