"""An NVIDIA GPU that is not there, for compilers alone: Triton and Inductor compile for it to machine code.

    gpu = AbsentGpu(90)
    gpu.install()                   # for the rest of this process
    torch.compile(function, backend=gpu.backend)(tensor_of_the_cpu)
    gpu.kernels                     # [Kernel(name="triton_poi_fused_mul_0", registers=16, spills=0, ...)]

Nothing is run on it. What is asked of a driver, Triton's own tools answer: a kernel's registers and spills are read
from its machine code by ``cuobjdump``, and one that needs more shared memory than the architecture has is refused, as
the driver refuses it. `backend` traces on the CPU, moves the graph to ``cuda:0``, and lets Inductor compile it; the
values come from the traced graph itself.
"""

from __future__ import annotations

import contextlib
import copy
import re
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import fx
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.runtime import driver

CUDA = torch.device("cuda", 0)


@dataclass(frozen=True)
class Architecture:
    """What compilers ask of one. shared: bytes of shared memory that a block may have at most."""

    card: str
    capability: tuple[int, int]
    multiprocessors: int
    shared: int
    memory: int
    cache: int


#: By Triton's number. Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
ARCHITECTURES = {
    80: Architecture("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 * 2**10, 80 * 2**30, 40 * 2**20),
    90: Architecture("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 * 2**10, 80 * 2**30, 50 * 2**20),
    100: Architecture("NVIDIA B200", (10, 0), 148, 227 * 2**10, 180 * 2**30, 126 * 2**20),
}


@dataclass(frozen=True)
class Kernel:
    """One kernel that was compiled, in one configuration.

    Attributes:
        architecture: as ptxas names it. seconds: from the source to machine code. registers: of a thread.
        spills: bytes of a thread's local memory. shared: bytes of a block. matrices: the instruction that multiplies
            matrices, "-" for none. size: bytes of machine code.
    """

    name: str
    architecture: str
    warps: int
    stages: int
    seconds: float
    registers: int
    spills: int
    shared: int
    matrices: str
    size: int


class AbsentGpu:
    """One of `ARCHITECTURES`.

    Attributes:
        kernels: each `Kernel` that was compiled so far.
    """

    def __init__(self, number: int) -> None:
        self.number, self.architecture = number, ARCHITECTURES[number]
        self.kernels: list[Kernel] = []

    def install(self) -> None:
        """Let torch and Triton take this GPU for the current device. There is no way back in this process."""
        _answer_for_torch(self.architecture)
        driver.set_active(_Driver(self))
        triton.knobs.compilation.listener = self._compiled

    def backend(self, graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """A backend of ``torch.compile`` that compiles for this GPU and runs the traced graph on the CPU."""
        from torch._inductor import compile_fx

        return compile_fx.compile_fx(graph, inputs, inner_compile=self._compile)

    def _compile(self, graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        from torch._inductor import compile_fx

        moved = copy.deepcopy(graph)
        _move(moved)
        compile_fx.compile_fx_inner(moved, [_on_cuda(one) for one in inputs], **options)

        def run(arguments: list[Any]) -> Any:
            values = list(arguments)
            arguments.clear()
            return graph.forward(*values)

        run._boxed_call = True
        return run

    def _compiled(self, *, src: Any, metadata: dict, metadata_group: dict, times: Any, cache_hit: bool) -> None:
        if cache_hit:
            return
        paths = {Path(name).suffix: Path(path) for name, path in metadata_group.items()}
        used = resources(paths[".cubin"])
        lowering = sum(duration for _, duration in times.lowering_stages)
        ptx = paths[".ptx"].read_text()
        found = [word for word in ("tcgen05.mma", "wgmma", "mma.sync") if word in ptx]
        self.kernels.append(
            Kernel(
                metadata["name"],
                nvidia.sm_arch_from_capability(self.number),
                metadata["num_warps"],
                metadata["num_stages"],
                (times.ir_initialization + lowering + times.store_results) / 1e6,
                used["REG"],
                used["LOCAL"] + used["STACK"],
                metadata["shared"],
                found[0] if found else "-",
                paths[".cubin"].stat().st_size,
            )
        )


def resources(cubin: Path) -> dict[str, int]:
    """What ``cuobjdump`` says that a kernel uses: registers (REG), and bytes of the stack and of local memory."""
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


# --------------------------------------------------------------------------------------------- what Triton asks


class _Driver:
    """What Triton asks of a driver of CUDA."""

    def __init__(self, gpu: AbsentGpu) -> None:
        self.gpu, self.utils = gpu, self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.gpu.number, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_capability(self, *device: Any) -> tuple[int, int]:
        return self.gpu.architecture.capability

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cuda

    @staticmethod
    def is_active() -> bool:
        return True

    def get_device_properties(self, device: int) -> dict[str, int]:
        chip = self.gpu.architecture
        count = chip.multiprocessors
        return {"max_shared_mem": chip.shared, "multiprocessor_count": count, "max_num_regs": 65536, "warpSize": 32}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """The module, the function, a thread's registers, its words in local memory, and threads of a block."""
        kernel = next(one for one in reversed(self.gpu.kernels) if one.name == name and one.size == len(cubin))
        return 0, 0, kernel.registers, kernel.spills // 4, 1024

    class launcher_cls:
        def __init__(self, *args: Any, **options: Any) -> None:
            pass

        def __call__(self, *args: Any, **options: Any) -> None:
            pass


# --------------------------------------------------------------------------------------------- what torch asks


def _answer_for_torch(chip: Architecture) -> None:
    """Let torch say that `chip` is there, before its compilers are imported: they keep the functions they find."""
    if "torch._dynamo.device_interface" in sys.modules:
        raise RuntimeError("torch's compilers are imported already; install the GPU before.")
    properties = _properties(chip)
    guard = contextlib.nullcontext
    answers: dict[Any, dict[str, Callable[..., Any]]] = {
        torch.cuda: {
            "is_available": lambda: True, "is_initialized": lambda: True, "_lazy_init": lambda: None,
            "device_count": lambda: 1, "current_device": lambda: 0, "set_device": lambda device: None,
            "get_device_properties": lambda *device: properties, "get_device_name": lambda *device: chip.card,
            "get_device_capability": lambda *device: chip.capability, "synchronize": lambda *device: None,
            "is_bf16_supported": lambda *args, **options: True, "is_current_stream_capturing": lambda: False,
            "current_stream": lambda *device: types.SimpleNamespace(cuda_stream=0), "device": lambda device: guard(),
            "_exchange_device": lambda device: 0, "_maybe_exchange_device": lambda device: 0,
            "_DeviceGuard": lambda device: guard(), "get_rng_state": lambda *device: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda *args: None,
        },
        torch._C: {
            "_cuda_getCurrentRawStream": lambda device: 0, "_cuda_getDevice": lambda: 0,
            "_cuda_setDevice": lambda device: None, "_cuda_exchangeDevice": lambda device: 0,
            "_cuda_maybeExchangeDevice": lambda device: 0, "_cuda_isCurrentStreamCapturing": lambda: False,
            "_accelerator_getDeviceIndex": lambda: 0, "_accelerator_setDeviceIndex": lambda device: None,
            "_accelerator_exchangeDevice": lambda device: 0, "_accelerator_maybeExchangeDevice": lambda device: 0,
            "_accelerator_getStream": lambda *args: torch.Stream(stream_id=0, device_index=0, device_type=1),
        },
    }  # fmt: skip
    for module, functions in answers.items():
        for name, function in functions.items():
            setattr(module, name, function)
    # The method enters the device of its tensor, the operator does not.
    torch.Tensor.copy_ = lambda tensor, source, non_blocking=False: torch.ops.aten.copy_(tensor, source, non_blocking)
    torch.cuda.default_generators = (torch.Generator(),)
    torch.version.cuda = "13.0"

    import torch._inductor.config as config
    from torch._inductor.fx_passes import joint_graph, post_grad

    config.compile_threads = 1
    config.use_static_cuda_launcher = False  # it loads a kernel through the driver itself
    # Patterns are traced on tensors of the device, which are not to be had; they replace products and attention by
    # kernels that are not compiled here.
    config.pattern_matcher = False
    for passes in (joint_graph, post_grad):
        passes.lazy_init = lambda *args: None
    from torch._inductor.runtime import triton_helpers

    triton_helpers.set_driver_to_gpu = lambda: None  # it would take the driver of CUDA


def _properties(chip: Architecture) -> types.SimpleNamespace:
    major, minor = chip.capability
    return types.SimpleNamespace(
        name=chip.card, major=major, minor=minor, multi_processor_count=chip.multiprocessors, warp_size=32,
        total_memory=chip.memory, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        regs_per_multiprocessor=65536, shared_memory_per_block=49152, shared_memory_per_block_optin=chip.shared,
        shared_memory_per_multiprocessor=chip.shared + 1024, L2_cache_size=chip.cache, gcnArchName="", is_integrated=0,
        uuid="0", clock_rate=1980000, memory_clock_rate=2619000, memory_bus_width=5120,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------- graphs on the GPU


def _on_cuda(value: Any) -> Any:
    """A tensor without values on the GPU, of the shape of one on the CPU."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return value
    mode = torch._guards.detect_fake_mode(value)
    with mode or contextlib.nullcontext():
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=CUDA)


def _move(graph: fx.GraphModule) -> None:
    """Make `graph`, traced on the CPU, one of the GPU; those inside it too."""
    for module in graph.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            place = lambda value: CUDA if value == torch.device("cpu") else value  # noqa: E731
            node.args = fx.node.map_aggregate(node.args, place)
            node.kwargs = fx.node.map_aggregate(node.kwargs, place)
            if "val" in node.meta:
                node.meta["val"] = tree_map(_on_cuda, node.meta["val"])
        module.recompile()
