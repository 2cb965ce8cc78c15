"""Callbacks that record where the time of some optimizer steps goes, what holds memory, and how busy the machine is."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

from posttrain.core.callbacks import ClosingCallback, TrainerCallback
from posttrain.core.errors import require
from posttrain.core.logging import memory

logger = logging.getLogger(__name__)


class ProfilerCallback(ClosingCallback):
    """Profiles some optimizer steps with `torch.profiler`.

    Writes ``profile/trace-rank-N.json``, for https://ui.perfetto.dev or chrome://tracing, and the operations that took
    most, as a table, ``profile/operations-rank-N.txt``, into the output directory.

    Args:
        first_step: optimizer steps of this run before the first that is profiled; the first ones warm up.
        steps: how many are profiled. Each makes a trace larger by some megabytes.
        memory: also record allocations. stacks: also record lines of Python.
    """

    def __init__(self, first_step: int = 3, steps: int = 3, memory: bool = False, stacks: bool = False) -> None:
        if first_step < 0 or steps < 1:
            raise ValueError(f"ProfilerCallback: first_step={first_step} must be >= 0 and steps={steps} >= 1.")
        self.first_step, self.steps, self.memory, self.stacks = first_step, steps, memory, stacks
        self._profiler: Any = None
        self._done = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self._folder, self._rank = Path(args.output_dir) / "profile", args.process_index
        self._done = 0

    def on_step_begin(self, args, state, control, **kwargs):
        if self._done == self.first_step:
            self._profiler = torch.profiler.profile(profile_memory=self.memory, with_stack=self.stacks)
            self._profiler.start()

    def on_step_end(self, args, state, control, **kwargs):
        self._done += 1
        if self._done == self.first_step + self.steps:
            self._write()

    def on_train_end(self, args, state, control, **kwargs):
        self._write()
        if self._done <= self.first_step:
            logger.warning(
                f"ProfilerCallback: the run had {self._done} optimizer steps and first_step={self.first_step}, so "
                "nothing was profiled."
            )

    def close(self) -> None:
        """Write what was recorded before an error."""
        self._write()

    def _write(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"trace-rank-{self._rank}.json"
        profiler.export_chrome_trace(str(trace))
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=40)
        trace.with_name(f"operations-rank-{self._rank}.txt").write_text(table + "\n", encoding="utf-8")
        logger.info("The profile is in %s; open it at https://ui.perfetto.dev.", trace)


class MemorySnapshotCallback(ClosingCallback):
    """Records what holds memory, for a look at why it runs out.

    On CUDA, every allocation and its line of Python is recorded, and ``memory/snapshot-rank-N.pickle`` written into the
    output directory when training ends or memory runs out: open it at https://pytorch.org/memory_viz. Elsewhere torch
    keeps no such history: ``memory/live-rank-N.json`` holds, for some optimizer steps, the bytes of each owner and the
    largest tensors at the end of the step, and at an error.

    Args:
        every: optimizer steps between two entries, without CUDA. entries: allocations that are kept, with CUDA.
    """

    def __init__(self, every: int = 100, entries: int = 100_000) -> None:
        if every < 1 or entries < 1:
            raise ValueError(f"MemorySnapshotCallback: every={every} and entries={entries} must be >= 1.")
        self.every, self.entries = every, entries
        self._path: Path | None = None
        self._entries: list[dict[str, Any]] = []
        self._on_cuda = False

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self._device, self._parts, self._state = args.device, (model, optimizer), state
        self._on_cuda = args.device.type == "cuda"
        name = f"snapshot-rank-{args.process_index}.pickle" if self._on_cuda else f"live-rank-{args.process_index}.json"
        self._path = Path(args.output_dir) / "memory" / name
        self._entries = []
        if self._on_cuda:
            torch.cuda.memory._record_memory_history(max_entries=self.entries)
        else:
            logger.info(
                f"MemorySnapshotCallback: torch keeps no history of allocations on this device; {self._path} gets the "
                "tensors that are live at the end of optimizer steps."
            )

    def on_step_end(self, args, state, control, **kwargs):
        if not self._on_cuda and state.global_step % self.every == 0:
            self._look("the end of the step")

    def on_train_end(self, args, state, control, **kwargs):
        self._write()

    def close(self) -> None:
        """Write what is live after an error."""
        error = sys.exc_info()[1]
        if self._path is not None and error is not None and not self._on_cuda:
            self._look(f"{type(error).__name__}: {error}")
        self._write()

    def _look(self, when: str) -> None:
        model, optimizer = self._parts
        found = memory.live(model, optimizer, self._device)
        self._entries.append({"step": self._state.global_step, "when": when, **found})

    def _write(self) -> None:
        path, self._path = self._path, None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._on_cuda:
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            path.write_text(json.dumps(self._entries, indent=1) + "\n", encoding="utf-8")
        self._parts = (None, None)


class UtilizationCallback(TrainerCallback):
    """Logs ``perf/cpu_utilization`` and, on a CUDA device, ``perf/gpu_utilization``: shares between 0 and 1.

    The first is of all cores of the machine, with other programs and the workers of the data loader, over each step.
    The second is the share of the last moments in which the driver saw a kernel run; it needs the package nvidia-ml-py.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        self._psutil = require("psutil", "psutil", why="UtilizationCallback")
        if torch.cuda.is_available():
            require("pynvml", "nvidia-ml-py", why="UtilizationCallback on a GPU")
        self._psutil.cpu_percent()  # each call measures since the one before

    def on_step_end(self, args, state, control, **kwargs):
        self.log_metric("perf/cpu_utilization", self._psutil.cpu_percent() / 100)
        if torch.cuda.is_available():
            self.log_metric("perf/gpu_utilization", torch.cuda.utilization() / 100)
