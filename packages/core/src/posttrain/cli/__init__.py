"""The command line: ``posttrain <method> run.yaml --learning_rate 1e-5``."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence

from posttrain.core.errors import BEFORE_THE_RUN, CheckpointError, ConfigError, DataError, NonFiniteError
from posttrain.core.logging import terminal

#: Each is a module of `posttrain.cli.tools`, but for `train`: ``run(words)`` takes the words after its name and returns
#: the exit status, None for 0. It raises `ConfigError` where they are not those of the module's `HELP`, `DataError`
#: where rows cannot be read or used, `CheckpointError` where what is on the disk cannot: a model, a run, a folder.
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. `arguments`: the words after ``posttrain``; None: those of this process. Returns the exit
    status: 0, 1 where the data or a checkpoint cannot be used or a loss is not finite, 2 where an argument is wrong, 3
    where the run ended well and an upload to the Hub failed, 130 after Ctrl-C, 141 where the output is not read any
    more.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    terminal.open_streams()
    terminal.outlive_full_disk()
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
        name, problems, status = " ".join(["posttrain", *words[:1]]), error.problems, 2
        listed = [f"{len(problems)} problems", *(f"  - {problem}" for problem in problems)]
        message = f"{name}: " + (problems[0] if len(problems) == 1 else "\n".join(listed))
    except (DataError, CheckpointError, NonFiniteError) as error:
        message, status = _with_notes(words[0], error), 1
    except KeyboardInterrupt as stop:
        if isinstance(stop, SystemExit):  # of a run that has saved a checkpoint; it has its own exit code
            raise
        message, status = f"\nposttrain {words[0]}: interrupted.", 128 + signal.SIGINT
    except Exception as error:
        if BEFORE_THE_RUN not in vars(error):
            raise
        message, status = _with_notes(words[0], error), 2
    if os.environ.get("RANK", "0") == "0":  # once, not once a process
        print(message, file=sys.stderr)
    return status


def _with_notes(command: str, error: Exception) -> str:
    return "\n".join([f"posttrain {command}: {error}", *vars(error).get("__notes__", ())])


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
    terminal.quiet()
    if not terminal.is_terminal(sys.stderr):
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
        return module.run(words[1:]) or 0
    else:
        return _run_method(words[0], words[1:])
    return 0


def _run_method(name: str, words: list[str]) -> int:
    from posttrain.cli import help, method, training
    from posttrain.core import registry

    if name.startswith("-"):
        raise ConfigError("posttrain", [f"the method comes first, before {name}"])
    smoke, rest = "--smoke" in words, [word for word in words if word != "--smoke"]
    asks = bool({"-h", "--help"} & set(words))
    if name == TRAIN and asks:
        print(help.TRAIN)
        return 0
    if not asks and (flags := method.launcher_words(words)):
        from posttrain.cli.tools import launch

        return launch.run([*flags, name, *words])
    if name == TRAIN and rest and rest[0] in registry.methods():  # as the other commands are given one
        name, *rest = rest
    found = method.of_words([TRAIN, *rest], TRAIN)[0] if name == TRAIN else registry.method(name, others=COMMANDS)
    if asks:
        print(help.of_method(found, method.configs_of(found)))
        return 0
    return training.train(found, *method.settings_of(found, rest), words=[name, *rest], smoke=smoke)
