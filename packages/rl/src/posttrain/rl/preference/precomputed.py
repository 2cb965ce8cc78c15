"""Precomputes log-probabilities under the reference on all processes and caches them.

The cache file lies next to the dataset's cache, or in the output folder if there is none. Its name is a hash of the
weights, the tokens and the settings.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.core.checkpoint import codec
from posttrain.core.data import accelerator
from posttrain.core.distributed.sharding import is_in_pieces
from posttrain.core.models import wrapping

logger = logging.getLogger(__name__)

FOLDER = "reference-logps"
ROWS_AT_ONCE = 10_000
SAMPLED = 512
OF_NO_LENGTH = (
    "{name}: precompute_ref_log_probs=True is not supported with IterableDataset, which has no known length. Set it "
    "to False, or load the rows with streaming=False."
)
TOO_LATE = (
    "{name}: Cannot compute reference log-probs for a dataset passed after training has begun: with "
    "precompute_ref_log_probs=True the reference was the untrained policy, which no longer exists. Pass these rows as "
    "eval_dataset to the constructor, pass ref_model, or set precompute_ref_log_probs=False."
)


def of_model(model: nn.Module) -> str:
    """A hash of a model: each weight's shape, sums and up to `SAMPLED` numbers, and the configuration."""
    digest = hashlib.sha256()
    for name, tensor in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
        flat = accelerator.for_float64(tensor.detach().reshape(-1))
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.is_meta or not len(flat):
            continue
        values = flat[:: max(1, len(flat) // SAMPLED)].double()
        sums = torch.stack([flat.sum(dtype=torch.float64), values.dot(values)])
        digest.update(torch.cat([values, sums]).cpu().numpy().tobytes())
    adapters: dict[str, Any] = wrapping.unwrap(model).peft_config if wrapping.is_peft_model(model) else {}
    digest.update(repr((wrapping.config_of(model), sorted(adapters.items(), key=str))).encode())
    return digest.hexdigest()


def of_reference(reference: Any) -> str:
    """A hash of the reference's weights and settings."""
    with reference.use() as model:
        if is_in_pieces(*model.parameters()):  # hashed before it was sharded
            return repr(reference.state_dict())
        return of_model(wrapping.unwrap(model)) + repr(reference.adapter)


def of_rows(dataset: Any) -> str:
    """A hash of the contents of a dataset: of each column the numbers, and of lists their lengths."""
    digest = hashlib.sha256(repr(sorted(dataset.column_names)).encode())
    table = dataset.with_format("arrow")
    for start in range(0, len(dataset), ROWS_AT_ONCE):
        part = table[start : start + ROWS_AT_ONCE]
        for name in sorted(part.column_names):
            column = part[name].combine_chunks()
            if hasattr(column, "value_lengths"):
                digest.update(column.value_lengths().to_numpy(zero_copy_only=False).tobytes())
                column = column.flatten()
            digest.update(column.to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()


def place_of(dataset: Any, output_dir: str | os.PathLike[str], facts: Mapping[str, Any]) -> Path | None:
    """The cache file of `dataset` under `facts`; None if caching is disabled in datasets."""
    from datasets import is_caching_enabled

    if not is_caching_enabled():
        return None
    key = hashlib.sha256(repr((of_rows(dataset), sorted(facts.items()))).encode()).hexdigest()[:32]
    cached = dataset.cache_files
    folder = Path(cached[0]["filename"]).parent if cached else Path(output_dir) / FOLDER
    return folder / f"reference-logps-{key}.safetensors"


def read(path: Path | None, columns: Sequence[str], size: int) -> dict[str, torch.Tensor] | None:
    """The columns that `write` stored in `path`; None if there are none of this size."""
    if path is None or not path.is_file():
        return None
    found = codec.read_tensors(path, mmap=False)
    if set(found) != set(columns) or any(len(values) != size for values in found.values()):
        return None
    return {column: found[column] for column in columns}


def write(path: Path | None, columns: Mapping[str, torch.Tensor]) -> None:
    """Store `columns` in `path` atomically. A full or read-only disk is only logged."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        codec.write_tensors(dict(columns), beside)
        beside.replace(path)
    except OSError as error:
        logger.warning("The reference's log-probabilities are not kept for the next start (%s): %s", path, error)


def compute(
    size: int, batch_size: int, columns: Sequence[str], ask: Callable[[list[int]], torch.Tensor], dist: Any
) -> dict[str, torch.Tensor]:
    """The columns (size,) of a dataset; each process computes its share. `ask`: ``(rows) -> (columns x rows,)``. Each
    process calls it equally often, because sharded weights need all processes.
    """
    most = -(-size // dist.world_size)
    mine = [min(dist.rank + i * dist.world_size, size - 1) for i in range(most)]
    logps: dict[int, tuple[float, ...]] = {}
    for start in range(0, len(mine), batch_size):
        rows = mine[start : start + batch_size]
        found = ask(rows).float().view(-1, len(rows)).t().tolist()
        logps |= dict(zip(rows, map(tuple, found), strict=True))
    dist.meet("reference log-probabilities")
    for part in dist.gather_object(logps):
        logps |= part
    table = torch.tensor([logps[row] for row in range(size)], dtype=torch.float32)
    return {column: table[:, i].contiguous() for i, column in enumerate(columns)}
