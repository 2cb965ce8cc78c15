"""Time to save and to load a model with its AdamW state: posttrain against safetensors and torch.save written in place.

    python benchmarks/checkpoint.py [--millions 100] [--rounds 5] [--directory DIR]

The peer does what transformers' Trainer does: weights through safetensors, the optimizer through `torch.save`, straight
into ``checkpoint-N``, nothing hashed, nothing fsynced. posttrain's time is split: `write` fills the temporary directory,
`commit` hashes and fsyncs every file and renames. `snapshot` is all that an asynchronous save makes training wait for.
Contestants take turns; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from results import write as write_results
from safetensors.torch import load_file, save_file
from torch import nn

from posttrain.core.checkpoint import AsyncWriter, Store, load_tree, save_tree, snapshot

WIDTH = 1000


def make(millions: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A stack of linear layers of one million weights each, and an AdamW that has made one step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(millions)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def peer_save(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    path.mkdir()
    save_file(model.state_dict(), path / "model.safetensors", metadata={"format": "pt"})
    torch.save(optimizer.state_dict(), path / "optimizer.pt")


def peer_load(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    model.load_state_dict(load_file(path / "model.safetensors"))
    optimizer.load_state_dict(torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True))


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    save_tree(model.state_dict(), path / "model")
    save_tree(optimizer.state_dict(), path / "optimizer")


def load(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, mmap: bool) -> None:
    model.load_state_dict(load_tree(path / "model"))
    optimizer.load_state_dict(load_tree(path / "optimizer", mmap=mmap))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=100, help="Parameters, in millions.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=None, help="Where to write; a disk, not a file system in memory.")
    args = parser.parse_args()
    model, optimizer = make(args.millions)
    root = Path(tempfile.mkdtemp(dir=args.directory))
    store, writer, frozen = Store(root / "posttrain"), AsyncWriter(), None
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)  # name -> (wall, CPU) seconds of each round

    def timed(name: str, action: Callable[..., Any], *arguments: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = action(*arguments)
        times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        return result

    def save_tree_as(step: int, tree: Any) -> Path:
        temp = store.begin(step)
        save_tree(tree, temp / "state")
        return store.commit(temp)

    try:
        for number in range(args.rounds + 1):
            peer, temp = root / "peer", store.begin(1)
            timed("peer: save", peer_save, model, optimizer, peer)
            timed("posttrain: write", fill, model, optimizer, temp)
            path = timed("posttrain: commit", store.commit, temp)

            tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            frozen = timed("posttrain: snapshot", snapshot, tree, frozen)
            writer.submit(partial(save_tree_as, 2, frozen))
            timed("posttrain: write and commit in the background", writer.wait)

            timed("peer: load", peer_load, model, optimizer, peer)
            problems = timed("posttrain: verify", store.verify, path)
            assert problems == [], problems
            timed("posttrain: load, mapped", load, model, optimizer, path, True)
            timed("posttrain: load, read", load, model, optimizer, path, False)
            shutil.rmtree(peer)
            shutil.rmtree(store.output_dir)
            if number == 0:  # the first round asks the system for memory that the later ones use again
                times.clear()
    finally:
        shutil.rmtree(root, ignore_errors=True)

    table = {}
    for name, spent in times.items():
        peer = times["peer: load" if "load" in name or "verify" in name else "peer: save"]
        wall, cpu = (statistics.median(column) for column in zip(*spent, strict=True))
        ratios = [statistics.median(a[i] / b[i] for a, b in zip(spent, peer, strict=True)) for i in (0, 1)]
        table[name] = {"seconds": wall, "cpu_seconds": cpu, "times_peer": ratios[0], "cpu_times_peer": ratios[1]}
        print(f"{name:46s} {wall:6.3f} s ({ratios[0]:5.2f} x peer)   CPU {cpu:6.3f} s ({ratios[1]:5.2f} x peer)")
    write_results("checkpoint", {"millions": args.millions, "rounds": args.rounds, "table": table})


if __name__ == "__main__":
    main()
