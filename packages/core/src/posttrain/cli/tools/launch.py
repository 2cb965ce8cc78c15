"""The command ``posttrain launch``, which starts a program in several processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.cli import parse
from posttrain.core import registry
from posttrain.core.config import ConfigMeta, Resolved, opt, validate
from posttrain.core.errors import ConfigError, did_you_mean

# What --accelerate_config NAME stands for: the runs that need no file. There is one process for each GPU.
_FSDP = {
    "fsdp_activation_checkpointing": False, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": True, "fsdp_offload_params": False, "fsdp_state_dict_type": "FULL_STATE_DICT",
}  # fmt: skip
_FSDP1 = {
    "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_forward_prefetch": True, "fsdp_reshard_after_forward": "FULL_SHARD",
    "fsdp_sync_module_states": True, "fsdp_use_orig_params": True, "fsdp_version": 1,
}  # fmt: skip
_ZERO = {"deepspeed_multinode_launcher": "standard", "zero3_init_flag": False}
_STAYS = {"offload_optimizer_device": "none", "offload_param_device": "none"}


def _run(kind: str, **options: Any) -> dict[str, Any]:
    return {"distributed_type": kind, "mixed_precision": "bf16", **options}


PRESETS: dict[str, dict[str, Any]] = {
    "single_gpu": _run("NO", gpu_ids="all", num_processes="1"),
    "multi_gpu": _run("MULTI_GPU", gpu_ids="all"),
    "fsdp1": _run("FSDP", fsdp_config=_FSDP | _FSDP1),
    "fsdp2": _run("FSDP", fsdp_config=_FSDP | {"fsdp_reshard_after_forward": True, "fsdp_version": 2}),
    "zero1": _run("DEEPSPEED", deepspeed_config=_ZERO | {"gradient_accumulation_steps": 1, "zero_stage": 1}),
    "zero2": _run("DEEPSPEED", deepspeed_config=_ZERO | _STAYS | {"zero_stage": 2}),
    "zero3": _run("DEEPSPEED", deepspeed_config=_ZERO | _STAYS | {
        "zero3_init_flag": True, "zero3_save_16bit_model": True, "zero_stage": 3,
    }),
}  # fmt: skip

USAGE = """usage: posttrain launch [--accelerate_config NAME | FILE] [--name value ...] PROGRAM [its arguments]

Start PROGRAM in several processes and wait for them; when one fails, the others end and its error is shown last.
PROGRAM is a Python script, -m and a module, or a method of posttrain with its YAML: posttrain launch -n 2 sft run.yaml

NAME is single_gpu, multi_gpu, fsdp1, fsdp2, zero1, zero2 or zero3. FILE is what `accelerate config` writes, also given
as --config_file. Flags win over both. Options of FSDP and DeepSpeed may be given as flags too, such as
--fsdp_state_dict_type SHARDED_STATE_DICT. A method starts itself so: posttrain sft run.yaml --accelerate_config fsdp2
--num_processes 2. These two, num_machines, machine_rank, main_process_ip and main_process_port may stand in its YAML.
"""


FILE = "config_file"


@dataclass
class LaunchArguments(metaclass=ConfigMeta):
    """The number of processes and their environment."""

    num_processes: Resolved[int | None, int] = opt(
        None, "Processes on all machines together; None: one for each GPU, or one.", min=1
    )
    num_machines: int = opt(1, "Machines; `posttrain launch` is called on each.", min=1)
    machine_rank: int = opt(0, "Number of this machine, from 0.", min=0)
    main_process_ip: str | None = opt(None, "Address of machine 0; needed for several machines.")
    main_process_port: int | None = opt(
        None, "Free port of machine 0; None finds one, on one machine.", min=0, max=65535
    )
    rdzv_backend: str = opt("static", "How machines find each other: static, c10d or etcd-v2.")
    max_restarts: int = opt(0, "How often all processes are started again after one has failed.", min=0)
    monitor_interval: float = opt(0.1, "Seconds between checks of the processes.", above=0)
    gpu_ids: str | None = opt(None, "GPUs of this machine to use, such as 0,2; None or all: all of them.")
    use_cpu: bool = opt(False, "Train on the CPU even where GPUs are present.", aliases=("cpu",))
    mixed_precision: str = opt("no", "Precision of the forward pass.", choices=("no", "bf16", "fp16"))
    num_cpu_threads_per_process: int | None = opt(None, "Threads of each process; None: one, with several.", min=1)
    use_fsdp: bool = opt(False, "Shard the model with FSDP, unless the program's own arguments differ.")
    use_deepspeed: bool = opt(False, "Train with DeepSpeed, unless the program's own arguments differ.")
    use_parallelism_config: bool = opt(False, "Read the sizes in parallelism_config.")
    fsdp_config: dict[str, Any] | None = opt(None, "Options of FSDP.")
    deepspeed_config: dict[str, Any] | None = opt(None, "Options of DeepSpeed, or deepspeed_config_file.")
    parallelism_config: dict[str, Any] | None = opt(None, "Sizes of groups of processes.")
    dynamo_config: dict[str, Any] | None = opt(
        None, "Backend and mode of torch.compile, for runs whose arguments do not set it."
    )
    distributed_type: str | None = opt(None, "Kind of run: NO, MULTI_GPU, MULTI_CPU, FSDP or DEEPSPEED.")
    compute_environment: str = opt("LOCAL_MACHINE", "Where the run takes place.", choices=("LOCAL_MACHINE",))
    module: bool = opt(False, "PROGRAM is a module rather than a file.")
    no_python: bool = opt(False, "PROGRAM is started directly, without Python.")
    ray: bool = opt(
        False, "Start the processes as actors of a Ray cluster, that at RAY_ADDRESS or one of this machine."
    )
    ray_engine: str | None = opt(
        None, "With --ray: a command that runs beside the processes, and is started again if it ends, such as a server."
    )
    ray_engine_gpus: int = opt(
        1, "GPUs that --ray_engine gets on one machine: its tensor-parallel size. With --use_cpu none.", min=0
    )
    ray_timeout: float = opt(600.0, "With --ray: seconds until the cluster has room for everything.", above=0)

    def __post_init__(self) -> None:
        validate(self)

    def _normalize(self) -> None:
        kind = str(self.distributed_type or "").upper()
        self.use_fsdp = self.use_fsdp or kind == "FSDP" or bool(self.fsdp_config)
        self.use_deepspeed = self.use_deepspeed or kind == "DEEPSPEED" or bool(self.deepspeed_config)
        self.use_cpu = self.use_cpu or kind == "MULTI_CPU"
        self.use_parallelism_config = self.use_parallelism_config or bool(self.parallelism_config)
        if self.num_processes is None:
            devices = 0 if self.use_cpu else torch.accelerator.device_count()
            self.num_processes = max(devices, 1) * self.num_machines

    def _problems(self) -> Iterator[str]:
        if self.num_processes and self.num_processes % self.num_machines:
            yield (
                f"num_processes={self.num_processes} counts those of all machines, so "
                f"num_machines={self.num_machines} must divide it"
            )
        if self.machine_rank >= self.num_machines:
            yield f"machine_rank={self.machine_rank} must be below num_machines={self.num_machines}"
        if self.num_machines > 1 and (self.main_process_ip is None or self.main_process_port is None):
            yield "num_machines above 1 needs main_process_ip and main_process_port, the address of the first machine"
        if self.use_fsdp and self.use_deepspeed:
            yield "use_fsdp and use_deepspeed cannot both hold; keep one"
        if self.ray_engine is not None and not self.ray:
            yield "ray_engine is started by Ray; set ray=True too"
        if self.ray and (self.num_machines > 1 or self.max_restarts):
            yield "with ray=True, Ray knows the machines; leave out num_machines and max_restarts"
        for name, value in (self.dynamo_config or {}).items():
            short = name.removeprefix("dynamo_")
            if short not in ("backend", "mode") and str(value).lower() not in ("false", "no", "none", ""):
                yield f"dynamo_config: {name}={value!r} has no effect; backend and mode are what torch_compile takes"
        known = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MULTI_XPU", "MULTI_NPU", "MULTI_HPU")
        if self.distributed_type is not None and str(self.distributed_type).upper() not in known:
            yield f"distributed_type={self.distributed_type!r} is not supported; it may be {', '.join(known)}"


#: What accelerate's files also hold, and why it changes nothing here.
WITHOUT_EFFECT = {
    "downcast_bf16": "it is about TPUs",
    "main_training_function": "the program is always run from its beginning",
    "same_network": "machines always connect to main_process_ip",
    "debug": "collectives are watched always, see ddp_timeout",
    "multi_gpu": "num_processes sets their number",
    "enable_cpu_affinity": "processes are not bound to cores",
    "quiet": "errors are shown",
    "fp8_config": "set fp8 in the arguments of the run",
    "megatron_lm_config": "Megatron-LM is not supported",
    "mpirun_config": "processes are started by torch, not by mpirun",
}
_OF_TPUS = "tpu_env tpu_use_cluster tpu_use_sudo tpu_name tpu_zone tpu_vm command_file commands"
WITHOUT_EFFECT |= dict.fromkeys(_OF_TPUS.split(), "TPUs are not supported")
#: Values that match the default behaviour.
NOTHING: tuple[Any, ...] = (None, "", "no", "false", "main", [], {}, ())
#: Flags that belong into a section of the file.
SECTIONS = {
    "fsdp_": "fsdp_config",
    "deepspeed_": "deepspeed_config",
    "zero": "deepspeed_config",
    "offload_": "deepspeed_config",
    "gradient_": "deepspeed_config",
    "parallelism_config_": "parallelism_config",
    "dynamo_": "dynamo_config",
}


def run(words: list[str]) -> int:
    """Start the processes; the exit status of the first that failed, or 0."""
    flags, program = split(words)
    if {"help", "h"} & set(flags):
        from posttrain.cli import help

        print("\n".join([USAGE, *help.of_configs([LaunchArguments])]))
        return 0
    args, notes = read(flags)
    if not program:
        raise ConfigError("launch", ["there is no PROGRAM to start; posttrain launch --help shows how"])
    for note in notes:
        print(f"posttrain launch: {note}", file=sys.stderr)
    if args.ray:
        from posttrain.cli.tools import launch_ray

        words = launch_ray.command(program_words(args, program))
        engine = args.ray_engine, args.ray_engine_gpus
        return launch_ray.run(
            words, args.num_processes or 1, environment(args), args.use_cpu, *engine, args.ray_timeout
        )
    os.environ |= environment(args)
    return start([*torchrun_words(args), *program_words(args, program)])


def split(words: list[str]) -> tuple[dict[str, parse.Setting], list[str]]:
    """(the flags of the launcher, the program with its arguments)."""
    switches = {"help", "h", "m", "multi_gpu", "quiet", "debug"}
    switches |= {name for name, kinds in parse.field_types(LaunchArguments).items() if kinds == (bool,)} | {"cpu"}
    flags: dict[str, parse.Setting] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        name = {"n": "num_processes", "m": "module", "config": FILE, "accelerate_config": FILE}.get(name, name)
        is_bare = False
        if not equals:
            takes_value = name not in switches or (rest and rest[0].lower() in ("true", "false"))
            is_bare = not (takes_value and rest)
            value = "true" if is_bare else rest.pop(0)
        flags[name] = parse.Setting(word.partition("=")[0], value, is_bare)
    return flags, rest


def read(flags: dict[str, parse.Setting]) -> tuple[LaunchArguments, list[str]]:
    """(the arguments of file and flags, what of them has no effect, and why); `ConfigError` with every problem."""
    flags = dict(flags)
    problems: list[str] = []
    notes: list[str] = []
    settings = {} if (file := flags.pop(FILE, None)) is None else _held(file, problems)
    for name, setting in flags.items():
        section = next(
            (s for prefix, s in SECTIONS.items() if name.startswith(prefix) and name not in SECTIONS.values()), None
        )
        if section is None:
            settings[name] = setting
        else:
            held = settings.get(section, parse.Setting(setting.where, {}))
            settings[section] = parse.Setting(held.where, {**(held.value or {}), name: setting.value})
    for name in [name for name in settings if name in WITHOUT_EFFECT]:
        setting = settings.pop(name)
        value = setting.value.lower() if isinstance(setting.value, str) else setting.value
        refused = name in ("fp8_config", "megatron_lm_config", "mpirun_config", "tpu_use_cluster")
        if value not in NOTHING:
            (problems if refused else notes).append(f"{setting.where}: {name} has no effect: {WITHOUT_EFFECT[name]}")
    return parse.configs([LaunchArguments], settings, problems)[0], notes


def _held(file: parse.Setting, problems: list[str]) -> dict[str, parse.Setting]:
    """The settings of a file, or of the preset that it names."""
    if file.is_bare:
        problems.append(parse.NO_VALUE.format(flag=file.where))
        return {}
    if file.value in PRESETS and not Path(file.value).exists():
        return {name: parse.Setting(f"{file.where} {file.value}", value) for name, value in PRESETS[file.value].items()}
    if not Path(file.value).exists() and not Path(file.value).suffix:
        problems.append(
            f"{file.where}: {file.value!r} is neither a file nor one of {', '.join(PRESETS)}"
            f"{did_you_mean(file.value, PRESETS)}"
        )
        return {}
    return parse.read_file(file.value, problems)


def environment(args: LaunchArguments) -> dict[str, str]:
    """The environment variables of the processes, named as in accelerate."""
    found = {"ACCELERATE_MIXED_PRECISION": args.mixed_precision, "ACCELERATE_USE_CPU": str(args.use_cpu).lower()}
    if args.gpu_ids is not None and args.gpu_ids.lower() != "all":
        found["CUDA_VISIBLE_DEVICES"] = args.gpu_ids.replace(" ", "")
    if args.num_cpu_threads_per_process is not None:
        found["OMP_NUM_THREADS"] = str(args.num_cpu_threads_per_process)
    used = {"FSDP": args.use_fsdp, "DEEPSPEED": args.use_deepspeed, "PARALLELISM_CONFIG": args.use_parallelism_config}
    found |= {f"ACCELERATE_USE_{name}": "true" for name, is_used in used.items() if is_used}
    found |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"} if args.use_fsdp else {}
    found |= _variables(args.fsdp_config, "fsdp_", "FSDP_")
    found |= _variables(args.deepspeed_config, "deepspeed_", "ACCELERATE_DEEPSPEED_")
    found |= _variables(args.parallelism_config, "parallelism_config_", "PARALLELISM_CONFIG_")
    return found | _variables(args.dynamo_config, "dynamo_", "ACCELERATE_DYNAMO_")


def _variables(section: dict[str, Any] | None, prefix: str, variable: str) -> dict[str, str]:
    found = {}
    for name, value in (section or {}).items():
        if value is not None:
            name = name.removeprefix(prefix).replace("transformer_layer_cls", "transformer_cls").upper()
            found[variable + name] = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return found


def torchrun_words(args: LaunchArguments) -> list[str]:
    """The same request in the words of ``torch.distributed.run``."""
    words = ["--nproc-per-node", str(args.num_processes // args.num_machines), "--nnodes", str(args.num_machines)]
    words += ["--max-restarts", str(args.max_restarts), "--monitor-interval", str(args.monitor_interval)]
    if args.num_machines == 1 and not args.main_process_port:
        return [*words, "--standalone"]
    if args.rdzv_backend == "static":
        address = args.main_process_ip or "127.0.0.1"
        words += ["--node-rank", str(args.machine_rank), "--master-addr", address]
        return [*words, "--master-port", str(args.main_process_port)]
    endpoint = f"{args.main_process_ip or '127.0.0.1'}:{args.main_process_port}"
    return [*words, "--rdzv-backend", args.rdzv_backend, "--rdzv-endpoint", endpoint, "--rdzv-id", "posttrain"]


def program_words(args: LaunchArguments, program: list[str]) -> list[str]:
    """What each process runs, in the words of ``torch.distributed.run``; `ConfigError` if it is no file or method."""
    if args.module or args.no_python:
        return ["--module" if args.module else "--no-python", *program]
    if program[0] == "posttrain":
        program = program[1:]
    if Path(program[0]).is_file():
        return program
    if program[0] in (*registry.methods(), "train"):
        return ["--module", "posttrain.cli", *program]
    known = ", ".join(registry.methods()) or "none is installed"
    raise ConfigError("launch", [f"{program[0]!r} is neither a file here nor a method of posttrain ({known})"])


def start(words: list[str]) -> int:
    """Run torch's launcher with `words`, and return the exit status."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        torchrun.run(torchrun.parse_args(words))
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        status = error.get_first_failure()[1].exitcode
        return status if status > 0 else 128 - status
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
