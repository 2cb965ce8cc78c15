"""Callbacks that record where the time of optimizer steps goes, what holds memory, how busy the machine is, and how
large gradients, weights, updates and activations are.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.core.callbacks import ClosingCallback, TrainerCallback
from posttrain.core.data import accelerator
from posttrain.core.errors import require
from posttrain.core.files import write_text
from posttrain.core.logging import memory
from posttrain.core.models.wrapping import full_tensor
from posttrain.core.state import TrainerControl, TrainerState

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

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._folder, self._rank = Path(args.output_dir) / "profile", args.process_index
        self._done = 0

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._done == self.first_step:
            self._profiler = torch.profiler.profile(profile_memory=self.memory, with_stack=self.stacks)
            self._profiler.start()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._done += 1
        if self._done == self.first_step + self.steps:
            self.close()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.close()
        if self._done <= self.first_step:
            logger.warning(
                f"ProfilerCallback: the run had {self._done} optimizer steps and first_step={self.first_step}, so "
                "nothing was profiled."
            )

    def close(self) -> None:
        """Write what was recorded, also before an error."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"trace-rank-{self._rank}.json"
        profiler.export_chrome_trace(str(trace))
        order = "self_device_time_total" if accelerator.gpu() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=40)
        write_text(trace.with_name(f"operations-rank-{self._rank}.txt"), table + "\n")
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
        self._history: Any = None  # torch's own, where it keeps one

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        self._device, self._parts, self._state = args.device, (model, optimizer), state
        self._history = accelerator.history(args.device)
        name = f"snapshot-rank-{args.process_index}.pickle" if self._history else f"live-rank-{args.process_index}.json"
        self._path = Path(args.output_dir) / "memory" / name
        self._entries = []
        if self._history:
            self._history._record_memory_history(max_entries=self.entries)
        else:
            logger.info(
                f"MemorySnapshotCallback: torch keeps no history of allocations on this device; {self._path} gets the "
                "tensors that are live at the end of optimizer steps."
            )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self._history and state.global_step % self.every == 0:
            self._look("the end of the step")

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._write()

    def close(self) -> None:
        """Write what is live after an error."""
        error = sys.exc_info()[1]
        if self._path is not None and error is not None and not self._history:
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
        if self._history:
            self._history._dump_snapshot(str(path))
            self._history._record_memory_history(enabled=None)
        else:
            write_text(path, json.dumps(self._entries, indent=1) + "\n")
        self._parts = (None, None)


class UtilizationCallback(TrainerCallback):
    """Logs ``perf/cpu_utilization`` and, on a CUDA device, ``perf/gpu_utilization``: shares between 0 and 1.

    The first is of all cores of the machine, with other programs and the workers of the data loader, over each step.
    The second is the share of the last moments in which the driver saw a kernel run; it needs the package nvidia-ml-py.
    """

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._psutil = require("psutil", "psutil", why="UtilizationCallback")
        if accelerator.gpu() == accelerator.CUDA:
            require("pynvml", "nvidia-ml-py", why="UtilizationCallback on a GPU")
        self._psutil.cpu_percent()  # each call measures since the one before

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.log_metric("perf/cpu_utilization", self._psutil.cpu_percent() / 100)
        if accelerator.gpu() == accelerator.CUDA:
            self.log_metric("perf/gpu_utilization", accelerator.module(accelerator.CUDA).utilization() / 100)


class ParameterMonitorCallback(TrainerCallback):
    """Logs ``grad_norm/<part>``, ``weight_norm/<part>`` and ``update_ratio/<part>`` of trained parameters.

    A part is a layer (``model.layers.0``), or a module outside the layers (``lm_head``). Norms are Euclidean;
    gradients are measured after clipping, and ``update_ratio`` is the norm of what a step has changed over that of the
    weights before it: about 1e-3 is usual for a matrix under Adam, and 0 is a part that does not learn. Sharded weights
    are measured whole. Nothing waits for the device before the record.

    Args:
        every: optimizer steps between two measurements; a record holds their mean.
        updates: also measure updates, which needs a copy of the trained weights in measured steps.
    """

    def __init__(self, every: int = 10, updates: bool = True) -> None:
        if every < 1:
            raise ValueError(f"ParameterMonitorCallback: every={every} must be >= 1.")
        self.every, self.updates = every, updates
        self._before: dict[str, list[torch.Tensor]] = {}

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        self._before = {}
        if state.global_step % self.every:
            return
        for part, parameters in parts(model).items():
            gradients = [p.grad for p in parameters if p.grad is not None]
            if gradients:
                self.log_metric(f"grad_norm/{part}", norm(gradients))
            self.log_metric(f"weight_norm/{part}", norm(parameters))
            if self.updates:
                self._before[part] = [p.detach().clone() for p in parameters]

    def on_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        before, self._before = self._before, {}
        for part, parameters in parts(model).items() if before else ():
            changes = [p.detach() - old for p, old in zip(parameters, before[part], strict=True)]
            self.log_metric(f"update_ratio/{part}", norm(changes) / norm(before[part]).clamp(min=1e-30))


class ActivationMonitorCallback(ClosingCallback):
    """Logs ``activation_rms/<layer>`` and ``activation_max/<layer>`` of the output of each layer (``model.layers.0``).

    The first is the root of the mean of the squares, the second the mean over forward passes of the largest absolute
    value; padding counts. A maximum that grows from record to record overflows in float16 at 65,504. Nothing waits for
    the device before the record.

    Args:
        every: optimizer steps between two measurements; a record holds their mean.
    """

    def __init__(self, every: int = 10) -> None:
        if every < 1:
            raise ValueError(f"ActivationMonitorCallback: every={every} must be >= 1.")
        self.every, self._measures = every, False
        self._hooks: list[Any] = []
        self._found: list[tuple[str, torch.Tensor]] = []

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        self.close()
        layers = [(name, module) for name, module in model.named_modules() if re.fullmatch(r"\D+\.\d+", name)]
        self._hooks = [layer.register_forward_hook(functools.partial(self._measure, name)) for name, layer in layers]

    def _measure(self, name: str, layer: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._measures and layer.training:
            output = (outputs[0] if isinstance(outputs, tuple) else outputs).detach().float()
            self._found.append((f"activation_rms/{name}", output.square().mean().sqrt()))
            self._found.append((f"activation_max/{name}", output.abs().amax()))

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._measures = state.global_step % self.every == 0

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        found, self._found, self._measures = self._found, [], False
        for name, value in found:
            self.log_metric(name, value)

    def close(self) -> None:
        """Take the hooks off the model."""
        while self._hooks:
            self._hooks.pop().remove()


def parts(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The trained parameters by part: their names up to the first number, or else up to the module."""
    found: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layer = re.match(r"(.*?\.\d+)\.", name)
            part = layer.group(1) if layer else name.rpartition(".")[0] or name
            found.setdefault(part, []).append(parameter)
    return found


def norm(tensors: Iterable[Any]) -> torch.Tensor:
    """The Euclidean norm of all `tensors` together, shape (), in float32; of sharded ones over all processes."""
    squares = [tensor.detach().float().square().sum() for tensor in tensors]
    return torch.stack([*map(full_tensor, squares)]).sum().sqrt()
