"""Finds changes to a run that make it fit into memory, the cheapest first, each measured by a memory plan."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from posttrain.cli.tools import memory_mesh
from posttrain.cli.tools.memory_plan import Footprint, measure
from posttrain.cli.tools.workload import Workload, load_config
from posttrain.core.distributed import expert_parallel, shard_settings
from posttrain.core.distributed.accelerator_config import DEFAULTS
from posttrain.core.errors import ConfigError
from posttrain.core.optim import builder
from posttrain.core.registry import Run


@dataclass(frozen=True)
class Proposal:
    """Arguments to set, and the footprint of one process of the run with them.

    Attributes:
        what: what they cost, or the sizes of the groups of processes. footprint: None: `problem` says why it cannot be.
        rows: of one forward pass of all processes together, in number.
    """

    what: str
    changes: dict[str, Any]
    footprint: Footprint | None = None
    problem: str = ""
    rows: int = 0

    @property
    def peak(self) -> float:
        return math.inf if self.footprint is None else self.footprint.peak


def proposals(run: Run, workload: Callable[[Run], Workload], memory: int, least: float) -> Iterator[Proposal]:
    """Changes that make `run` fit, the cheapest first; each measured as `measure` does.

    Changes that suffice alone, or else combinations. The last one fits, unless nothing does.

    Args:
        workload: the method's function that returns a run's workload.
        memory: available bytes.
        least: the peak of `run` as it is, in bytes.
    """

    def try_rung(run: Run, rung: Rung) -> Proposal | None:
        """The mildest form of a change that fits, else the strongest; None where nothing can be changed."""
        found = None
        for changes, price in reversed(list(rung(run, workload(run)))):
            try:
                changed = with_changes(run, changes)
                one = Proposal(price, changes, measure(changed, workload(changed)))
            except ConfigError:  # not with this model, as an adapter on layers unknown to peft, or this config
                continue
            found = one if found is None or one.peak <= memory else found
            if one.peak > memory:
                break  # a milder one needs more
        return found

    alone = []
    for rung in RUNGS:
        alone.append(found := try_rung(run, rung))
        if found is not None and found.peak <= memory:
            yield found
    if any(found.peak <= memory for found in alone if found is not None):
        return
    changes: dict[str, Any] = {}
    for rung, first in zip(RUNGS, alone, strict=True):
        found = try_rung(with_changes(run, changes), rung) if changes else first
        if found is not None and found.peak < least:
            changes, least = changes | found.changes, found.peak
            yield dataclasses.replace(found, changes=changes)
        if least <= memory:
            return


def choices(run: Run, workload: Callable[[Run], Workload]) -> Iterator[Proposal]:
    """Ways to divide the model of `run`, measured one by one: most rows at a time first, then least cut and sent."""
    cards, accumulation = memory_mesh.processes(), run.config.gradient_accumulation_steps
    for name, sizes in _ways(load_config(run), cards):
        peers = shard_settings.peers(sizes)
        changes: dict[str, Any] = {"parallelism_config": sizes or None, "gradient_accumulation_steps": accumulation}
        changes["fsdp"] = "full_shard" if name != "copies" and cards > sizes.get("tp_size", 1) else None
        if peers > 1:  # an optimizer step of the same rows
            changes |= {"gradient_accumulation_steps": accumulation * peers}
        if changes["fsdp"] and changes["gradient_accumulation_steps"] > 1:
            changes["accelerator_config"] = _synced(run)
        rows = workload(run).rows * cards // peers
        try:
            changed = with_changes(run, changes)
            new = {key: value for key, value in changes.items() if (value or None) != (vars(run.config)[key] or None)}
            yield Proposal(name, new, measure(changed, workload(changed)), rows=rows)
        except ConfigError as error:
            yield Proposal(name, changes, problem=error.problems[0], rows=rows)


def _ways(config: Any, cards: int) -> Iterator[tuple[str, dict[str, int]]]:
    """(name, ``parallelism_config``) of the ways to divide a model with this config over `cards`."""
    sizes = [size for size in range(2, cards + 1) if cards % size == 0]
    has_experts = expert_parallel.config_problem(config, 1) is None
    yield from (("copies", {}), ("shards", {}))
    yield from ((f"shards, experts in {ep}", {"ep_size": ep}) for ep in sizes if has_experts)
    for size in sizes:
        yield f"shards, rows in {size}", {"cp_size": size}
        rest = "shards, " if size < cards else ""
        yield f"{rest}matrices in {size}", {"tp_size": size}
        if has_experts:
            yield f"{rest}matrices and experts in {size}", {"tp_size": size, "ep_size": size}


def with_changes(run: Run, changes: dict[str, Any]) -> Run:
    """`run` with other arguments of its config and its model."""
    of_model = {field.name for field in dataclasses.fields(run.model)} & set(changes)
    config = dataclasses.replace(run.config, **{name: changes[name] for name in changes if name not in of_model})
    model = dataclasses.replace(run.model, **{name: changes[name] for name in of_model})
    return dataclasses.replace(run, config=config, model=model)


Rung = Callable[[Run, Workload], Iterator[tuple[dict[str, Any], str]]]


def _checkpointing(run: Run, work: Workload) -> Iterator[tuple[dict[str, Any], str]]:
    if not run.config.activation_checkpointing:
        changes = {"activation_checkpointing": True, "gradient_checkpointing": True}
        yield changes, "the same optimizer step, about a third slower"


def _sharded(run: Run, work: Workload) -> Iterator[tuple[dict[str, Any], str]]:
    if memory_mesh.processes() > 1 and not run.config.fsdp:
        yield {"fsdp": "full_shard"}, "the same optimizer step; weights are gathered layer by layer"


def _cut_rows(run: Run, work: Workload) -> Iterator[tuple[dict[str, Any], str]]:
    total, now = memory_mesh.processes(), memory_mesh.cp_size(run.config)
    for size in (2**n for n in range(1, total.bit_length()) if now == 1 and total % 2**n == 0):
        steps = run.config.gradient_accumulation_steps * size
        changes: dict[str, Any] = {"fsdp": "full_shard", "parallelism_config": {"cp_size": size}}
        price = f"{size} processes to a row, so an optimizer step takes {size} times the micro-batches"
        changes |= {"gradient_accumulation_steps": steps, "accelerator_config": _synced(run)}
        yield changes, price


def _synced(run: Run) -> dict[str, Any]:
    """`accelerator_config` with which FSDP keeps no gradients of whole weights between the micro-batches of a step."""
    given = {name: value for name, value in run.config.accelerator_config.items() if value != DEFAULTS.get(name)}
    return given | {
        "gradient_accumulation_kwargs": run.config.accelerator_config.accumulation | {"sync_each_batch": True}
    }


def _smaller_batches(run: Run, work: Workload) -> Iterator[tuple[dict[str, Any], str]]:
    rows, accumulation = run.config.per_device_train_batch_size, run.config.gradient_accumulation_steps
    if (tokens := run.config.max_batch_tokens) is not None:
        if (half := tokens // 2) >= work.length:
            changes = {"max_batch_tokens": half, "gradient_accumulation_steps": 2 * accumulation}
            yield changes, "an optimizer step of about as many tokens in smaller parts"
        return
    for smaller in sorted({n for n in (rows // 2, rows // 4, 1) if n and rows % n == 0} - {rows}, reverse=True):
        times = rows // smaller
        changes = {"per_device_train_batch_size": smaller, "gradient_accumulation_steps": accumulation * times}
        if vars(run.config).get("steps_per_generation"):
            changes["steps_per_generation"] = run.config.steps_per_generation * times
        yield changes, "the same optimizer step in smaller parts"


def _half_precision(run: Run, work: Workload) -> Iterator[tuple[dict[str, Any], str]]:
    if not (run.config.bf16 or run.config.fp16) and run.model.dtype in (None, "float32"):
        yield {"bf16": True}, "products in bfloat16, weights unchanged"


def _eight_bits(run: Run, work: Workload) -> Iterator[tuple[dict[str, Any], str]]:
    plain = builder.plain(run.config.optim).startswith("adamw_torch") and not run.config.fsdp
    if plain and importlib.util.find_spec("bitsandbytes"):
        yield {"optim": "adamw_8bit"}, "the optimizer's state is rounded to 8 bits"


def _adapter(run: Run, work: Workload) -> Iterator[tuple[dict[str, Any], str]]:
    if not run.model.use_peft:
        yield {"use_peft": True, "lora_target_modules": ["all-linear"]}, "trains an adapter, not the weights"


def _four_bits(run: Run, work: Workload) -> Iterator[tuple[dict[str, Any], str]]:
    if not (run.model.load_in_4bit or run.model.load_in_8bit) and importlib.util.find_spec("bitsandbytes"):
        changes = dict(next(_adapter(run, work), ({}, ""))[0])
        yield changes | {"load_in_4bit": True}, "trains an adapter on weights that are rounded to 4 bits"


RUNGS: tuple[Rung, ...] = (
    _sharded,
    _checkpointing,
    _smaller_batches,
    _cut_rows,
    _half_precision,
    _eight_bits,
    _adapter,
    _four_bits,
)
