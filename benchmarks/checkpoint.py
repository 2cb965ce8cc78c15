"""Time to save and to resume a model with its AdamW state: posttrain's trainer against transformers' in one run.

    python benchmarks/checkpoint.py [--millions 100] [--rounds 5] [--directory DIR] [--only posttrain]

Both contestants do all that their trainers do for a checkpoint: `save` is `Trainer._save_checkpoint`, `resume` is what
`train` does before the first step of a resumed run, on a fresh model. The peer neither fsyncs nor hashes; posttrain's
checkpoint is on the disk and has SHA-256 and XXH128 of every file when `save` returns, and is verified before it is
resumed from. So the peer is measured once more until its files are on the disk too ("and fsync"). `stands still` is
what training waits for with ``save_async=True``; `background` is how long that save takes in all. Contestants take
turns, each after the disk has taken what the one before left it; figures are medians.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results import write as write_results
from torch import nn

WIDTH = 1000
USUAL = dict(max_steps=2, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, logging_strategy="no")


class Stack(nn.Module):
    """Linear layers of one million weights each, of which a step uses only the first row: what it learns is no
    matter.
    """

    def __init__(self, millions: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(millions))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": sum((layer.weight * x.mean()).mean() for layer in self.layers) * labels.float().mean()}


ROWS = [{"x": [1.0], "labels": 1}] * 8


def made(contestant: str, millions: int, folder: Path, **changes: Any) -> Any:
    torch.manual_seed(0)
    if contestant == "peer":
        from transformers import Trainer, TrainingArguments

        # It has no name for the fsync and the hash that it lacks.
        return Trainer(Stack(millions), TrainingArguments(str(folder), **USUAL | changes), train_dataset=ROWS)
    from posttrain.core import Trainer, TrainingArguments

    return Trainer(Stack(millions), TrainingArguments(str(folder), **USUAL | changes), train_dataset=ROWS)


def trained(contestant: str, millions: int, folder: Path, **changes: Any) -> Any:
    """A trainer that has made its updates and can save."""
    trainer = made(contestant, millions, folder, **changes)
    trainer.train()
    return trainer


def peak_mib() -> float:
    """Of this program alone: ``ru_maxrss`` goes on from the process that started it."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def resume(contestant: str, millions: int, folder: Path) -> tuple[float, float]:
    """(seconds until the first step of a resumed run, MiB by which the peak of memory rises over the model made).

    In a process of its own: what a resume takes from the system anew must not be lent by the runs before.
    """
    code = f"""
import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, checkpoint
class Stop(BaseException): pass
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # the first of a process imports torch._dynamo, for seconds
trainer = checkpoint.made({contestant!r}, {millions}, {str(folder)!r}, max_steps=3)
if {contestant!r} == "peer":
    from transformers import TrainerCallback
else:
    from posttrain.core import TrainerCallback
class Cut(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        print("RESULT", time.perf_counter() - started, checkpoint.peak_mib() - peak, state.global_step); raise Stop
trainer.add_callback(Cut())
peak, started = checkpoint.peak_mib(), time.perf_counter()
try:
    trainer.train(resume_from_checkpoint=True)
except Stop:
    pass
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        raise RuntimeError(done.stderr[-3000:])
    assert lines[0][3] == "2", "it did not resume"
    return float(lines[0][1]), float(lines[0][2])


def save_and_fsync(trainer: Any, folder: Path) -> None:
    """Save into `folder`, and return once the files would survive a loss of power."""
    trainer._save_checkpoint(trainer.model, None)
    for path in folder.rglob("*"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=100, help="Parameters, in millions.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=None, help="Where to write; a disk, not a file system in memory.")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    root = Path(tempfile.mkdtemp(dir=args.directory))
    times: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, action: Callable[..., Any], *arguments: Any) -> None:
        gc.collect()
        os.sync()
        wall, spent = time.perf_counter(), time.process_time()
        action(*arguments)
        times[name].append(time.perf_counter() - wall)
        cpu[name].append(time.process_time() - spent)

    try:
        peer = trained("peer", args.millions, root / "peer")
        ours = trained("posttrain", args.millions, root / "ours")
        for number in range(args.rounds + 1):
            for folder in ("peer", "ours"):
                shutil.rmtree(root / folder, ignore_errors=True)
                (root / folder).mkdir()
            timed("peer: save", peer._save_checkpoint, peer.model, None)
            shutil.rmtree(root / "peer")
            timed("peer: save and fsync", save_and_fsync, peer, root / "peer")
            timed("posttrain: save", ours._save_checkpoint, ours.model, None)
            shutil.rmtree(root / "ours")
            ours.args.save_async = True
            timed("posttrain: stands still", ours._save_checkpoint, ours.model, None)
            timed("posttrain: background", ours.saving.settle)
            ours.args.save_async = False
            if number == 0:  # the first round asks the system for memory that the later ones use again
                first = {name: spent[0] for name, spent in times.items()}
                times.clear(), cpu.clear()
        del peer, ours
        gc.collect()
        memory: dict[str, list[float]] = defaultdict(list)
        for number in range(max(args.rounds // 2, 1) + 1):
            for contestant in ("peer", "posttrain"):
                folder = root / {"peer": "peer", "posttrain": "ours"}[contestant]
                seconds, mib = resume(contestant, args.millions, folder)
                if number:  # the first reads from the disk what the later ones find in memory
                    times[f"{contestant}: resume"].append(seconds)
                    memory[f"{contestant}: resume"].append(mib)
                else:
                    first[f"{contestant}: resume"] = seconds
    finally:
        shutil.rmtree(root, ignore_errors=True)

    table = {}
    for name, spent in times.items():
        peer_times = times["peer: resume" if "resume" in name else "peer: save"]
        seconds = statistics.median(spent)
        ratio = statistics.median(a / b for a, b in zip(spent, peer_times, strict=True))
        table[name] = {"seconds": seconds, "times_peer": ratio, "first_round_seconds": first[name]}
        line = f"{name:26s} {seconds:6.3f} s = {ratio:5.2f} x peer (first round {first[name]:6.3f} s)"
        if name in cpu:
            table[name]["cpu_seconds"] = statistics.median(cpu[name])
            line += f"   CPU {table[name]['cpu_seconds']:6.3f} s"
        if name in memory:
            table[name]["extra_mib"] = statistics.median(memory[name])
            line += f"   peak memory +{table[name]['extra_mib']:,.0f} MiB"
        print(line)
    write_results("checkpoint", {"millions": args.millions, "rounds": args.rounds, "table": table})


if __name__ == "__main__":
    main()
