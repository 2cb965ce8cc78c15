"""The command ``posttrain rerun``, which repeats a run from its record and reports differences."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

from posttrain.cli import parse
from posttrain.cli.method import checked
from posttrain.cli.report import run_record, trajectories
from posttrain.cli.training import train
from posttrain.core import registry
from posttrain.core.distributed import environment
from posttrain.core.errors import ConfigError
from posttrain.lm.generate.samples import lines_of
from posttrain.lm.generate.trajectories import REPLAYED

HELP = """usage: posttrain rerun FOLDER [--name value ...]

Repeat the run with the output FOLDER, with the method, the settings and the working directory of its run.json. The
output goes to FOLDER-rerun, or to --output_dir; other settings override those of the record.
Differences are reported: versions, hardware and processes at the start, rows and logged losses at the end.

  --trajectory NAME   do not train: put a trajectory that the run has stored, by its name in `posttrain trajectories`
                      such as 7/3, through the loss once more, and print what the loss reads of each token. The weights
                      are those that the run began with, or --model_name_or_path. A script that has started the run is
                      run again, up to its training"""


def run(words: list[str]) -> None:
    """Start a run again."""
    folders, flags = parse.read_flags(words)
    if len(folders) != 1:
        raise ConfigError("rerun", [f"name one folder that holds a {run_record.RECORD}, not {len(folders)}"])
    first = run_record.read(folders[0])["starts"][0]
    now = {"packages": run_record.packages(), "hardware": run_record.hardware(), "processes": environment.world_size()}
    before = {name: first[name] for name in now}
    found = run_record.differences(before, now) or ["versions, hardware and processes are as they were"]
    if environment.rank() == 0:
        print("\n".join(f"  {line}" for line in found))
    asked, directory = first["asked"], first["directory"]
    if asked is None and flags.keys() == {"trajectory"}:
        trajectory = str(flags["trajectory"].value)
        trajectories.named(trajectory, folders[0])
        done = subprocess.run(first["command"], cwd=directory, env=os.environ | {REPLAYED: trajectory})
        if done.returncode:
            raise ConfigError("rerun", [f"the program of the run has exited with {done.returncode}"])
        return
    if asked is None:
        why = "the run was started by another program, which sets its own output folder"
        how = (
            f"in {first['directory'] or 'any folder'}, with another output folder, run: {shlex.join(first['command'])}"
        )
        raise ConfigError("rerun", [f"{why}: {how}"])
    folder = Path(folders[0]).resolve()
    folder = folder if folder.is_dir() else folder.parent
    kept = asked["settings"].items()
    settings = {name: parse.Setting(f"{run_record.RECORD}: {name}", value) for name, value in kept}
    settings["output_dir"] = parse.Setting("rerun", str(folder) if "trajectory" in flags else f"{folder}-rerun")
    settings.pop("resume_from_checkpoint", None)
    if "output_dir" in flags:
        flags["output_dir"].value = str(Path(flags["output_dir"].value).resolve())
    settings |= flags
    if directory is not None:  # None: it had been deleted when the run began
        if not Path(directory).is_dir():
            problem = f"the working directory of the run, {directory}, is not there, from which it looked for its files"
            raise ConfigError("rerun", [problem])
        os.chdir(directory)
    method = registry.method(asked["method"])
    if (name := settings.pop("trajectory", None)) is not None:
        one = trajectories.named(str(name.value), folder)
        if method.replay is None:
            raise ConfigError("rerun", [f"{method.name} learns from no trajectories; leave --trajectory out"])
        print(method.replay(checked(method, settings, []), one))
        return
    train(method, settings, [], ["rerun", *words])
    if environment.rank() == 0:  # which has written the record and the log
        print("\n".join(f"  {line}" for line in compare(folder, Path(settings["output_dir"].value))))


def compare(before: Path, after: Path) -> list[str]:
    """A line for each difference between two runs that have ended, in what they were given and in logged losses."""
    then, now = (run_record.read(folder)["starts"][0] for folder in (before, after))
    given: dict[str, Any] = {"packages": {}, "hardware": {}, "processes": 1}
    found = run_record.differences(then | given, now | given)
    losses = [_losses(folder / "log.jsonl") for folder in (before, after)]
    common = sorted(losses[0].keys() & losses[1].keys())
    apart = next((step for step in common if losses[0][step] != losses[1][step]), None)
    if apart is not None:
        return [*found, f"the losses differ from optimizer step {apart} on: {losses[0][apart]} and {losses[1][apart]}"]
    if not common:
        return [*found, "the losses cannot be compared: no optimizer step has one in both logs (see logging_steps)"]
    return [*found, f"the {len(common)} losses that both logs hold are equal"]


def _losses(log: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in lines_of(log) if "loss" in record}
