"""The command ``posttrain plan``, which estimates the memory, computation and communication of a run."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

from posttrain.cli import parse
from posttrain.cli.method import of_words, read
from posttrain.core import registry
from posttrain.core.errors import ConfigError
from posttrain.core.registry import Run

HELP = """usage: posttrain plan [<method>] run.yaml ... [--memory SIZE] [--processes N | --cards N] [--length N]
                      [--prompt_length N] [--image_size WIDTHxHEIGHT] [--per_machine N] [--bandwidth INSIDE,BETWEEN]
                      [--tflops N] [--name value ...]

Estimates the peak memory of one process of a run and suggests changes if it does not fit, and says what an optimizer
step computes and sends. Takes all arguments of the method (posttrain <method> --help); nothing is loaded, trained or
written.

  --memory SIZE  available memory, such as 24GiB [default: free memory of the training device]
  --processes N  processes of the run, each with so much memory; fsdp and parallelism_config divide the model over them
  --cards N      propose how to divide the model over N cards, each with so much memory: measures the ways there are,
                 first those that compute most rows at a time and divide least, until one fits
  --length N     tokens of each row, if rows are shorter than the config allows or it sets no limit
  --prompt_length N
                 tokens of a row's prompt, of which completions share one copy [default: none, for preferences; what
                 max_completion_length leaves of --length, for rollouts]
  --image_size WIDTHxHEIGHT
                 counts an image of that size in pixels in each row: what the model's vision part computes for it, and
                 how many of the row's tokens it becomes
  --per_machine N
                 processes of a machine [default: 8]
  --bandwidth INSIDE,BETWEEN
                 GB a second that a process can send to others of its machine, and to other machines [default: 450,50]
  --tflops N     10^12 operations a second that a device reaches in training [default: 400 on a GPU]

Weights, gradients and optimizer state are exact. Activations, loss and the peak are estimates from torch operations on
fake tensors, without workspaces of kernels and fragmentation; keep a tenth free for these."""
UNITS = {"": 1, "B": 1, **{f"{letter}iB": 1024**n for n, letter in enumerate("KMGT", 1)}}
UNITS |= {f"{letter}B": 1000**n for n, letter in enumerate("KMGT", 1)}
TIGHT = 0.9
OF_IMAGES = """
The model sees images. Their tokens are among those of a row: {}.
What its vision part computes for them is {}.
"""


def run(words: list[str]) -> None:
    """Print the memory plan of a run."""
    words, options = parse.take_options("plan", words, OPTIONS)
    method, words = of_words(words, "plan")
    of_run: Any = method.workload
    if of_run is None:
        having = ", ".join(name for name, one in registry.methods().items() if one.workload) or "no method"
        raise ConfigError("posttrain plan", [f"{method.name} does not say what its batches are; {having} does"])
    if options["processes"] and options["cards"]:
        raise ConfigError("posttrain plan", ["--processes plans one way, and --cards looks for one; leave one out"])
    from posttrain.cli.tools import memory_mesh, memory_plan  # once the words are known to be right: it imports torch
    from posttrain.cli.tools import workload as shapes
    from posttrain.core.models.wrapping import sees_images

    with memory_mesh.imagined(options["processes"] or options["cards"] or 1):
        asked = read(method, words, needs=("model_",))
        size, plan, of_image = options["image_size"], None, dict[str, Any]()
        if not (sees := sees_images(shapes.load_config(asked))) and size is not None:
            raise ConfigError("posttrain plan", ["--image_size: the model reads text alone; leave it out"])

        def workload(run: Run) -> Any:
            work, prompt = of_run(run, options["length"]), options["prompt_length"]
            if prompt is not None and (work.group == 1 or prompt >= work.length):
                why = "no row shares its prompt" if work.group == 1 else f"rows have {work.length} tokens"
                raise ConfigError("posttrain plan", [f"--prompt_length {prompt}: {why}; leave it out"])
            work = work if prompt is None else dataclasses.replace(work, prompt=prompt)
            return dataclasses.replace(work, **of_image)

        of_images = OF_IMAGES.format("--image_size WIDTHxHEIGHT says how many they are", "not counted without it")
        if size is not None:
            work = shapes.with_image(workload(asked), asked, size)
            of_image |= {"image": work.image, "untrained": work.untrained}
            how_many = f"one of {size[0]} x {size[1]} pixels becomes {len(of_image['image'].ids):,}"
            try:
                plan, counted = memory_plan.measure(asked, work), "counted, one a row"
            except ConfigError as error:  # what some models compute of images hangs on more than sizes
                of_image.clear()
                counted = f"not counted: {error.problems[0]}"
            of_images = OF_IMAGES.format(how_many, counted)
        of_images = of_images if sees else ""
        if options["cards"]:
            _choose(asked, workload, options["memory"])
            print(of_images, end="")
        else:
            plan = _show(asked, workload, plan, options["memory"], of_images)
            on_cpu = memory_plan.device_type(asked.config) == "cpu" and plan.exchanges == ()
            timed = not on_cpu or bool(options["tflops"] or options["memory"])
            print(f"\n{_of_step(plan, options, timed)}", end="")


def _choose(asked: Run, workload: Callable[[Run], Any], memory: int | None) -> None:
    from posttrain.cli.tools import memory_mesh, memory_plan, memory_proposals

    work, head = workload(asked), ("way", "rows at a time", "weights", "gradients", "optimizer", "peak")
    device, tokens = memory_plan.device_type(asked.config), f"{work.rows} rows of {work.length} tokens"
    memory, left_of = _left(memory or _free(device), work)
    print(f"{memory_mesh.processes()} cards ({device}) of {in_words(memory)}{left_of}, micro-batches of {tokens}:\n")
    print(_line(*head), flush=True)
    least: tuple[int, str] | None = None
    for found in memory_proposals.choices(asked, workload):
        plan = found.footprint
        if plan is None:
            print(f"{_line(found.what, str(found.rows))}  {found.problem}", flush=True)
            continue
        sizes = map(in_words, (plan.weights, plan.gradients + plan.buckets, plan.optimizer, plan.peak))
        fits = plan.peak <= memory
        print(f"{_line(found.what, str(found.rows), *sizes)}{'  fits' * fits}", flush=True)
        if fits:
            print(f"\nPropose: {_flags(found.changes) or 'nothing needs to be set'}\n{_verdict(plan.peak, memory)}.")
            return
        if least is None or least[0] > plan.peak:
            least = plan.peak, f"{found.what}: --processes {memory_mesh.processes()} {_flags(found.changes)}"
    print("\nNone of them fits." + ("" if least is None else f" See what helps beside {least[1]}"))


def _line(name: str, rows: str, *sizes: str) -> str:
    return f"  {name:<32}{rows:>14}" + "".join(f"{size:>14}" for size in sizes)


def _flags(changes: dict[str, Any]) -> str:
    return " ".join(f"--{name} {_as_word(value)}" for name, value in changes.items() if name not in ALIASES)


def _show(asked: Run, workload: Callable[[Run], Any], plan: Any, memory: int | None, of_images: str) -> Any:
    from posttrain.cli.tools import memory_mesh, memory_plan, memory_proposals

    work, processes, device = workload(asked), memory_mesh.processes(), memory_plan.device_type(asked.config)
    is_host = memory is None and device == "cpu"
    memory, whose = (_free(device), f"free on this {device}") if memory is None else (memory, "as --memory says")
    memory, left_of = _left(memory, work)
    plan = plan or memory_plan.measure(asked, work)
    tokens = f"{work.rows} rows of {work.length}" + (f" and {work.target_length}" if work.target_length else "")
    shared = f", of which {work.group} share one copy of {work.prompt} tokens (where the model's attention allows it)"
    where = "in one process" if processes == 1 else f"in each of {processes} processes"
    print(f"A micro-batch of {tokens} tokens{shared if work.prompt else ''}, {where} on the {device}:\n")
    width = max(map(len, plan.parts))
    for name, size in plan.parts.items():
        print(f"  {name:<{width}}  {in_words(size):>12}")
    print(f"  {'peak (estimate)':<{width}}  {in_words(plan.peak):>12}\n{of_images}")
    if plan.host:
        same = ", which is the same here" if is_host else ""
        print(f"Moved to the host's memory{same}: up to {in_words(plan.host)} for each process.\n")
    taken = plan.peak + (plan.host if is_host else 0)
    print(f"{_verdict(taken, memory)}: {in_words(memory)}{left_of} {whose}.", flush=True)
    if taken > memory:
        _propose(memory_proposals.proposals(asked, workload, memory, plan.peak), memory)
    return plan


def _left(memory: int, work: Any) -> tuple[int, str]:
    """What an engine beside the trainer leaves of `memory`, and how that is said."""
    taken = int(work.engine * memory)
    said = f" beside the {in_words(taken)} that vLLM keeps without vllm_enable_sleep_mode," if taken else ""
    return memory - taken, said


def _of_step(plan: Any, options: dict[str, Any], timed: bool) -> str:
    """What an optimizer step of `plan` computes and sends, in paragraphs."""
    from posttrain.cli.tools.communication import Links, table

    inside, between = options["bandwidth"] or (None, None)
    given = {"per_machine": options["per_machine"], "inside": inside, "between": between}
    given |= {"operations": options["tflops"] and options["tflops"] * 1e12}
    links = Links(**{name: value for name, value in given.items() if value})
    return table(plan.exchanges, plan.operations, links, timed)


def _verdict(peak: int, memory: int) -> str:
    if peak > memory:
        return "It does not fit"
    return "It fits" if peak <= TIGHT * memory else "It fits barely, and what is not counted may be too much"


def _propose(proposals: Any, memory: int) -> None:
    print("\nWhat helps, the cheapest first, each measured in the same way:\n", flush=True)
    fits = False
    for one in proposals:
        changes = _flags(one.changes)
        fits = one.peak <= memory
        print(f"  {in_words(one.peak):>12}  {'fits' if fits else '    '}  {changes}\n{'':>22}{one.what}", flush=True)
    if not fits:
        print(
            "\nNothing that is known here makes it fit: take shorter rows, a smaller model, or more processes "
            "(--processes)."
        )


ALIASES = {"activation_checkpointing"}  # the other name is set too, and wins over either of the two in a file


def _as_word(value: Any) -> str:
    if isinstance(value, dict):
        return f"'{json.dumps(value)}'"
    if value is None:
        return "null"
    return " ".join(value) if isinstance(value, list) else str(value).lower() if isinstance(value, bool) else str(value)


def in_words(size: int) -> str:
    """`size` bytes in GiB, or in MiB below one."""
    return f"{size / 2**30:,.2f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:,.2f} MiB"


def _free(device: str) -> int:
    """Bytes that can be had on the device."""
    import torch

    from posttrain.core.data import accelerator
    from posttrain.core.logging.memory import free_memory

    if accelerator.has_memory(torch.device(device)):
        return int(accelerator.module(device).mem_get_info()[0])
    return free_memory()


def _bytes(word: str) -> int | None:
    size = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?(\w*)", word)
    return (int(float(size[1]) * UNITS[size[2]]) or None) if size is not None and size[2] in UNITS else None


def _sides(word: str) -> tuple[int, int] | None:
    sides = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", word)
    return None if sides is None else (int(sides[1]), int(sides[2]))


def _bandwidths(word: str) -> tuple[float, float] | None:
    """Bytes a second, of GB a second."""
    found = re.fullmatch(r"(\d+\.?\d*),(\d+\.?\d*)", word)
    sizes = (0.0, 0.0) if found is None else (1e9 * float(found[1]), 1e9 * float(found[2]))
    return sizes if all(sizes) else None


OPTIONS: dict[str, tuple[Any, Callable[[str], Any], str]] = {
    name: (None, parse.whole(), "a number above 0")
    for name in ("length", "prompt_length", "processes", "cards", "per_machine", "tflops")
} | {
    "memory": (None, _bytes, "a size such as 24GiB"),
    "bandwidth": (None, _bandwidths, "a pair of numbers such as 450,50, in GB a second"),
    "image_size": (None, _sides, "a size such as 1024x768, in pixels"),
}
