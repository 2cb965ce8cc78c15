"""The command line: ``posttrain <method> run.yaml --learning_rate 1e-5``."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.core.errors import BEFORE_THE_RUN, CheckpointError, ConfigError, DataError
from posttrain.core.logging import noise

# Each is a module of `posttrain.cli.tools` with a function `run`; `train` is here.
COMMANDS = {
    "train": "Train as a file describes: its `method`, or the one that its rows ask for.",
    "new": "List recipes, or write one out as a starting config.",
    "launch": "Start a program, or a method, in several processes.",
    "check": "Find what is wrong with the arguments of a run, and write them as one file.",
    "preview": "Show the training tokens of a run.",
    "data": "Look for rows that are trained on twice, and for rows of evaluation sets among them.",
    "bench": "Measure the speed and the memory of a run in a few optimizer steps.",
    "sweep": "Search for better arguments of a run with Optuna.",
    "plan": "Estimate the memory that a run needs, and what would make it fit.",
    "chat": "Talk to a model or an adapter in the terminal.",
    "generate": "Complete the prompts of a JSONL file.",
    "evaluate": "Evaluate a model or an adapter on rows of yours, or on tasks of lm-eval.",
    "serve": "Serve a model on this machine, through vLLM where it is installed.",
    "serve-training": "Train LoRA models on this machine through the SDK tinker.",
    "export": "Write one model for other programs: safetensors, or GGUF for llama.cpp.",
    "consolidate": "Make one model of weights that were saved in parts.",
    "merge": "Add an adapter into the weights it was trained on, and compare.",
    "migrate": "Rewrite scripts for transformers' Trainer or trl; shows the change, or makes it.",
    "vllm-serve": "Start a vLLM server that online training can send weights to.",
    "verify-resume": "Kill and resume a run, and compare it with an uninterrupted one bit by bit.",
    "rerun": "Start a run again from its record, and compare.",
    "report": "Write a page about a run, or about several side by side.",
    "trajectories": "Show what a run has sampled, token for token.",
    "schema": "Print the arguments of a method as a JSON schema.",
    "env": "Versions and hardware, for a bug report.",
}

TRAIN = "train"
#: Commands that print their help where they are given nothing.
EXPLAINED = ("data", "report", "rerun", "trajectories")
# Two optimizer steps with every part of a run: logging, evaluation, a checkpoint.
SMOKE: dict[str, Any] = {
    "max_steps": 2,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 2,
    "overwrite_output_dir": True,
    "resume_from_checkpoint": None,
    "report_to": "none",
    "push_to_hub": False,
    "check_saved_model": True,
}
# Then one more, from the checkpoint.
SMOKE_RESUME: dict[str, Any] = {"max_steps": 3, "resume_from_checkpoint": "true"}
SMOKE_ROWS = 32


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the words after ``posttrain``; None: those of this process.

    Returns:
        the exit status: 0, 1 where the data or a checkpoint cannot be used, 2 where an argument is wrong, 3 where the
        run ended well and an upload to the Hub failed, 130 after Ctrl-C, 141 where the output is not read any more.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    _quiet_others()
    try:
        status = _dispatch(words)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        return 128 + 13  # as a program that SIGPIPE ends
    except ConfigError as error:
        name, status = " ".join(["posttrain", *words[:1]]), 2
        problems = error.problems
        message = (
            f"{name}: {problems[0]}"
            if len(problems) == 1
            else "\n".join([f"{name}: {len(problems)} problems", *(f"  - {problem}" for problem in problems)])
        )
    except (DataError, CheckpointError) as error:
        message, status = "\n".join([f"posttrain {words[0]}: {error}", *getattr(error, "__notes__", ())]), 1
    except KeyboardInterrupt as stop:
        if isinstance(stop, SystemExit):  # of a run that has saved a checkpoint; it has its own exit code
            raise
        message, status = f"\nposttrain {words[0]}: interrupted.", 128 + signal.SIGINT
    except Exception as error:
        if BEFORE_THE_RUN not in vars(error):
            raise
        message, status = f"posttrain {words[0]}: {error}", 2
    if os.environ.get("RANK", "0") == "0":  # once, not once a process
        print(message, file=sys.stderr)
    return status


def _reader_has_gone() -> bool:
    """Whether no program reads the output any more; a pipe may also have broken between two processes of a run."""
    try:
        print(flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more when it ends
        return True
    return False


def _quiet_others() -> None:
    """Leave out what libraries tell each other's developers, and progress bars where they would go into a file."""
    noise.quiet()
    if not sys.stderr.isatty():
        for name in ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft|torch)\.")


def _dispatch(words: list[str]) -> int:
    from posttrain.cli import help

    if not words or words[0] in ("-h", "--help", "help"):
        print(help.overview(COMMANDS))
    elif words[0] == "--version":
        from importlib.metadata import version

        print(f"posttrain {version('posttrain-core')}")
    elif words[0] in COMMANDS and words[0] != TRAIN:
        module = importlib.import_module(f"posttrain.cli.tools.{words[0].replace('-', '_')}")
        asks = {"-h", "--help"} & set(words[1:]) or (words[0] in EXPLAINED and not words[1:])
        if asks and "HELP" in vars(module):  # `launch` may be asked for that of its program
            print(module.HELP.rstrip())
            return 0
        makes_runs: dict[str, tuple[Any, ...]] = {
            "check": (_read_and_check,),
            "preview": (_read_rows,),
            "plan": (functools.partial(_read, needs=("model_name_or_path",)),),
            "bench": (_read,),
            "sweep": (_settings, _checked),
            "rerun": (functools.partial(_train, words=words), _checked),
            "schema": (_classes,),
        }
        return module.run(words[1:], *makes_runs.get(words[0], ())) or 0
    elif "--accelerate_config" in words[1:]:  # the method in several processes
        place = words.index("--accelerate_config")
        launch = importlib.import_module("posttrain.cli.tools.launch")
        return launch.run([*words[place : place + 2], *words[:place], *words[place + 2 :]])
    else:
        return _run_method(words[0], words[1:])
    return 0


def _run_method(name: str, words: list[str]) -> int:
    from posttrain.cli import help, parse
    from posttrain.cli.method import of_words
    from posttrain.core import registry

    if name.startswith("-"):
        raise ConfigError("posttrain", [f"the method comes first, before {name}"])
    smoke, rest = "--smoke" in words, [word for word in words if word != "--smoke"]
    asks = bool({"-h", "--help"} & set(words))
    if name == TRAIN and asks:
        print(help.TRAIN)
        return 0
    if name == TRAIN and rest and rest[0] in registry.methods():  # as the other commands are given one
        name, *rest = rest
    method = of_words([TRAIN, *rest], TRAIN)[0] if name == TRAIN else registry.method(name, others=COMMANDS)
    if asks:
        print(help.of_method(method, _classes(method)))
        return 0
    return _train(method, *_settings(method, rest), words=[name, *rest], smoke=smoke)


def _train(
    method: Any, settings: dict[str, Any], problems: list[str], words: Sequence[str] = (), smoke: bool = False
) -> int:
    """Run `method` with `settings`, `problems` having been found in them before; the exit status.

    Args:
        words: the command line, after ``posttrain``.
    """
    run = _checked(method, settings, problems)
    from posttrain.cli.report import run_record
    from posttrain.core.hub import uploads  # after the checks: this imports torch

    uploads.USED.clear()
    with run_record.asked(method.name, {name: setting.value for name, setting in settings.items()}):
        if smoke:
            _smoke(method, run)
        else:
            _run_to_its_end(method, run, words)
    return 3 if any(one.failed for one in uploads.USED) else 0


def _run_to_its_end(method: Any, run: Any, words: Sequence[str]) -> None:
    """Train, and say what is there afterwards and what can follow."""
    from posttrain.cli import ending

    began, is_main = time.time(), run.config.process_index == 0
    try:
        method.run(run)
    except BaseException as error:
        if is_main and ending.has_begun(run.config, began):
            text = ending.stopped(run.config, words)
            if isinstance(error, Exception):
                error.add_note(text)
            else:
                print(f"\n{text}", file=sys.stderr)
        raise
    if is_main and ending.has_begun(run.config, began):
        print(ending.finished(run.config, words))


def _checked(method: Any, settings: dict[str, Any], problems: list[str]) -> Any:
    """The `Run` that `settings` make, once nothing is found that is wrong with it or that this machine lacks."""
    run = _configs(method, settings, problems)
    from posttrain.core.optim import builder
    from posttrain.core.training import preflight  # after the checks: this imports torch

    wrong = [*preflight.of_arguments(run.config, run.model, run.data), *builder.package_problems(run.config)]
    if found := [str(problem) for problem in wrong]:
        raise ConfigError(f"posttrain {method.name}", found)
    return run


def _classes(method: Any) -> tuple[type, type, type]:
    """The configs that the words of a method are read into."""
    from posttrain.cli.mixture import CommandSource
    from posttrain.lm.loading.arguments import ModelConfig

    return method.config_class, ModelConfig, CommandSource


def _read(method: Any, words: list[str], needs: tuple[str, ...] = ()) -> Any:
    """The `Run` of a method from `words`, its files and flags; `needs`: in place of what training needs."""
    return _configs(dataclasses.replace(method, needs=needs or method.needs), *_settings(method, words))


def _read_rows(method: Any, words: list[str]) -> Any:
    """The `Run` of a method whose rows are to be seen: rewards and a teacher may be missing."""
    return _read(method, words, tuple(need for need in method.needs if need.startswith(("model_", "dataset_"))))


def _settings(method: Any, words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The settings of a method from `words`, its files and flags, and the problems that were found in them."""
    from posttrain.cli import parse
    from posttrain.cli.method import without_method

    settings, problems = parse.read_words(words)
    return without_method(method, settings, problems), problems


def _read_and_check(method: Any, words: list[str]) -> dict[str, Any]:
    """The settings of a method from `words`, its files and flags, by name, as text; checked as for training."""
    settings, problems = _settings(method, words)
    _checked(method, settings, problems)
    return {name: setting.value for name, setting in settings.items()}


def _configs(method: Any, settings: dict[str, Any], problems: list[str]) -> Any:
    """The `Run` that `settings` make; `ConfigError` with their problems and those found before."""
    from posttrain.cli import parse
    from posttrain.core import registry

    with warnings.catch_warnings():
        warnings.simplefilter("always", FutureWarning)
        warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)
        return registry.Run(*parse.configs(_classes(method), settings, problems, method.needs))


def _smoke(method: Any, run: Any) -> None:
    """Train two optimizer steps on a few rows in a temporary folder, read the model back, resume and train a third."""
    from posttrain.core.fields import durations

    folder = Path(f"{run.config.output_dir}-smoke")  # the same in every process of the run
    evaluate = {} if run.config.eval_strategy == "no" else {"eval_strategy": "steps", "eval_steps": 2}
    duration = durations.if_tokens(run.config.max_duration)  # the schedule follows it
    run.config = dataclasses.replace(run.config, output_dir=str(folder), max_duration=duration, **SMOKE, **evaluate)
    run.data = dataclasses.replace(run.data, max_rows=SMOKE_ROWS)
    try:
        method.run(run)
        if run.config.process_index == 0:
            print("Two optimizer steps are made. Now the run is resumed from their checkpoint, for a third one.")
        method.run(dataclasses.replace(run, config=dataclasses.replace(run.config, **SMOKE_RESUME)))
    finally:
        if run.config.process_index == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if run.config.process_index == 0:
        evaluation = "evaluation, " if evaluate else ""
        print(
            f"The smoke run passed: data, model, training, {evaluation}a checkpoint, resuming from it and reading the "
            "saved model back work. Nothing was kept."
        )
