"""The command ``posttrain verify-resume``, which compares a killed and resumed run with an uninterrupted one.

Three runs of one process each: one from start to end, one that is killed (SIGKILL) between two checkpoints, and one
that resumes it. The outputs of the first and the last are compared bit by bit.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.cli import parse
from posttrain.cli.method import ALONE, of_words
from posttrain.core.checkpoint import codec
from posttrain.core.errors import CheckpointError
from posttrain.core.logging.metrics import is_timing

STEPS = 3  # optimizer steps before and after the checkpoint that is resumed


HELP = """usage: posttrain verify-resume [<method>] run.yaml ... [--steps N] [--name value ...]

Trains, kills the run, resumes it, and compares its checkpoint with that of an uninterrupted run bit by bit.

  --steps N  optimizer steps before and after the checkpoint"""


def run(words: list[str]) -> int:
    """Run the comparison, print it, and return 0 if everything is equal, else 1."""
    known = {"steps": (STEPS, parse.whole(2), "a whole number of 2 or more")}
    words, options = parse.take_options("verify-resume", words, known)
    method, words = of_words(words, "verify-resume")
    words, steps = [method.name, *words], options["steps"]
    folder = Path(tempfile.mkdtemp(prefix="verify-resume-"))
    try:
        straight, stopped = folder / "straight", folder / "stopped"
        print(f"1/3  {2 * steps} optimizer steps from start to end", flush=True)
        _train(words, straight, steps)
        print(f"2/3  killed in optimizer step {steps + 2}, after checkpoint-{steps}", flush=True)
        _train(words, stopped, steps, kill_at=steps + 1)
        print(f"3/3  on from checkpoint-{steps} to the end", flush=True)
        _train(words, stopped, steps, resume=True)
        parts = compare(straight / f"checkpoint-{2 * steps}", stopped / f"checkpoint-{2 * steps}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    width = max(map(len, parts))
    for name, found in parts.items():
        print(f"  {name:<{width}}  {'DIFFERENT' if found else 'equal'}  {found}")
    if not any(parts.values()):
        print("The killed and resumed run equals the uninterrupted run, bit by bit.")
        return 0
    print(
        "The resumed run is another run. On a GPU see first whether two straight runs are equal, with "
        "full_determinism=True; else something that your code keeps is not in its state_dict, or it draws random "
        "numbers from a generator of its own."
    )
    return 1


def compare(one: Path, other: Path) -> dict[str, str]:
    """``{part: what differs}`` of two checkpoints; an empty text: it is equal."""
    found = {"weights": _tensors(one, other)}
    for part in ("optimizer", "scheduler"):
        found[part] = _trees(_tree(one, part), _tree(other, part), part)
    left, right = (_tree(folder, "rank-0") or {} for folder in (one, other))
    found["random numbers"] = _trees(left.get("rng"), right.get("rng"), "rng")
    found["data, metrics, own state"] = _trees(_own_state(left), _own_state(right), "trainer")
    logs = (codec.read_json(folder / "trainer_state.json")["log_history"] for folder in (one, other))
    before, after = ([{k: v for k, v in record.items() if not is_timing(k)} for record in log] for log in logs)
    found["log"] = _trees(before, after, "log")
    return found


def _own_state(position: dict[str, Any]) -> dict[str, Any]:
    """The trainer's state without its stream's, which counts anew: rows, weights and log say where that stands."""
    state = dict(position.get("trainer") or {})
    return state | {"loader": {k: v for k, v in (state.get("loader") or {}).items() if k != "dataset"}}


def die_at(step: int) -> None:
    """Kill the trainers of this process when the optimizer step after `step` begins."""
    from posttrain.core import trainer
    from posttrain.core.callbacks import TrainerCallback

    class Die(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == step:
                os.kill(os.getpid(), signal.SIGKILL)

    trainer.DEFAULT_CALLBACKS.append(Die)


def _train(words: list[str], folder: Path, steps: int, kill_at: int | None = None, resume: bool = False) -> None:
    settings: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": 2 * steps,
        "save_strategy": "steps",
        "save_steps": steps,
        "logging_steps": 2,
        "save_total_limit": 0,
        "load_best_model_at_end": False,
        "report_to": "none",
        "push_to_hub": False,
        "overwrite_output_dir": True,
        "resume_from_checkpoint": "true" if resume else "false",
        "save_only_model": False,
    }
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    arguments = [*_without(words, {*settings, "logging_strategy"}), *flags]
    dies = f"from posttrain.cli.tools import verify_resume; verify_resume.die_at({kill_at}); "
    code = (
        f"import sys; {dies if kill_at is not None else ''}from posttrain.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command, alone = [sys.executable, "-c", code, *arguments], os.environ | {ALONE: "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=alone)
    expected = 0 if kill_at is None else -signal.SIGKILL
    if done.returncode != expected:
        ended = f"ended with {done.returncode}, not {expected}"
        raise CheckpointError(f"The run in {folder} {ended}:\n{(done.stderr or done.stdout)[-3000:]}")


def _without(words: list[str], names: set[str]) -> list[str]:
    """`words` without the flags `names` and their values."""
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            dropping = word[2:].partition("=")[0].replace("-", "_") in names
        if not dropping:
            kept.append(word)
    return kept


def _tree(folder: Path, name: str) -> Any:
    return codec.load_tree(folder / name) if (folder / f"{name}.json").is_file() else None


def _tensors(one: Path, other: Path) -> str:
    names, others = (sorted(path.name for path in folder.glob("*model*.safetensors")) for folder in (one, other))
    if names != others or not names:
        return f"files {names} and {others}"
    found = (_trees(codec.read_tensors(one / name), codec.read_tensors(other / name), name) for name in names)
    return "; ".join(filter(None, found))


def _trees(left: Any, right: Any, where: str) -> str:
    """The first place at which two trees differ; empty if they are equal."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.shape != right.shape or left.dtype != right.dtype:
            return f"{where}: {left.dtype} {tuple(left.shape)} and {right.dtype} {tuple(right.shape)}"
        equal = torch.equal(codec.bytes_of(left), codec.bytes_of(right))
        return "" if equal else f"{where}: by up to {(left.double() - right.double()).abs().max():.3g}"
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return "" if np.array_equal(left, right) else where
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            return f"{where}: only on one side {sorted(map(str, left.keys() ^ right.keys()))[:5]}"
        return next((text for key in left if (text := _trees(left[key], right[key], f"{where}.{key}"))), "")
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            return f"{where}: {len(left)} and {len(right)} entries"
        pairs = enumerate(zip(left, right, strict=True))
        return next((text for i, (a, b) in pairs if (text := _trees(a, b, f"{where}[{i}]"))), "")
    return "" if left == right or (left != left and right != right) else f"{where}: {left!r} and {right!r}"
