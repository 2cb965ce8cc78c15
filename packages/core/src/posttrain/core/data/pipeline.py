"""Builds data loaders, selects columns, checks datasets and sets seeds."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset

from posttrain.core.config import opt
from posttrain.core.data import samplers
from posttrain.core.data.batch_samplers import make_train_sampler as make_train_sampler
from posttrain.core.data.batch_samplers import token_batches as token_batches
from posttrain.core.data.batches import Repeating, as_filler
from posttrain.core.data.batches import is_filler as is_filler
from posttrain.core.data.collators import DataCollatorWithPadding, default_data_collator
from posttrain.core.data.host_copies import send
from posttrain.core.data.samplers import BY_LENGTH as BY_LENGTH
from posttrain.core.data.samplers import has_length as has_length
from posttrain.core.data.samplers import is_stream as is_stream
from posttrain.core.data.samplers import row_lengths as row_lengths
from posttrain.core.data.stateful_dataloader import ENGINE
from posttrain.core.data.stateful_dataloader import Loader as Loader
from posttrain.core.data.streams import is_one_shot
from posttrain.core.errors import DataError, did_you_mean

logger = logging.getLogger(__name__)


@dataclass
class DataArguments:
    """How rows are ordered, read and turned into batches."""

    dataloader_drop_last: bool = opt(False, "Leave out the last batch of an epoch where it is short of rows.")
    dataloader_num_workers: int = opt(
        0, "Processes that read and collate ahead of training; 0 reads in between steps.", min=0
    )
    dataloader_pin_memory: bool = opt(True, "Put batches into pinned host memory, from where they reach a GPU sooner.")
    dataloader_persistent_workers: bool = opt(
        False, "Keep the workers from one epoch to the next; they end with train(). Needs workers."
    )
    dataloader_prefetch_factor: int | None = opt(
        None, "Batches each worker reads ahead; None: 2. Needs workers.", min=1
    )
    dataloader_multiprocessing_context: str | None = opt(
        None,
        "How workers are started; None: as the platform does. Needs workers.",
        choices=("fork", "spawn", "forkserver"),
    )
    dataloader_in_order: bool = opt(
        True,
        "Take batches in order; off takes them as workers finish, and then a run cannot be repeated or resumed "
        "exactly.",
    )
    remove_unused_columns: bool = opt(True, "Drop the columns that neither the model's forward nor the labels name.")
    on_bad_rows: str = opt(
        "drop",
        "Rows that cannot be trained on: drop leaves them out, counts them and names the first in the log; raise stops "
        "with their numbers. Trainers that prepare no rows, and online ones, always raise.",
        choices=("drop", "raise"),
    )
    label_names: list[str] | None = opt(
        None, "Inputs that are labels; None: those parameters of forward named like labels."
    )
    train_sampling_strategy: str = opt(
        "random",
        "The order of rows: shuffled, sequential, or shuffled with rows of similar length together (group_by_length), "
        "or with the rows of a step in micro-batches that cost about as much (batch_rebalance).",
        choices=samplers.STRATEGIES,
        old_flags=("group_by_length",),
    )
    length_column_name: str = opt(
        "length", "Column with each row's length, for strategies that look at it and for `max_batch_tokens`."
    )
    max_batch_tokens: int | None = opt(
        None,
        "Instead of `per_device_train_batch_size` rows, a micro-batch holds as many rows of similar length as this "
        "many tokens have room for, padding included; all processes get about as many.",
        min=1,
    )

    limit_train_batches: int | None = opt(
        None, "Micro-batches of an epoch, at most, on each process; in online RL, rollouts. Of rows by index.", min=1
    )
    limit_eval_batches: int | None = opt(
        None, "Evaluate on this many batches of each set, at most, on each process, the first ones.", min=1
    )
    overfit_batches: int | None = opt(
        None,
        "As limit_train_batches, with the same ones in each epoch: a run that cannot learn them by heart has a fault.",
        min=1,
    )

    def _problems(self) -> Iterator[str]:
        if self.limit_train_batches and self.overfit_batches:
            yield "limit_train_batches and overfit_batches are both set; keep one"
        if self.max_batch_tokens is not None:
            for name, value, why in (
                ("train_sampling_strategy", "sequential", "rows are sorted by their lengths"),
                ("train_sampling_strategy", "batch_rebalance", "each decides which rows a micro-batch holds"),
                ("dataloader_drop_last", True, "no micro-batch is short of rows"),
                ("auto_find_batch_size", True, "micro-batches hold no set number of rows"),
            ):
                if vars(self).get(name) == value:
                    yield f"{name}={value!r} does not go with max_batch_tokens: {why}; leave one of them out"
        if self.train_sampling_strategy == "batch_rebalance" and vars(self).get("auto_find_batch_size"):
            yield (
                "auto_find_batch_size=True does not go with train_sampling_strategy='batch_rebalance': micro-batches "
                "hold no set number of rows; leave one of them out"
            )
        most, steps = self.overfit_batches or self.limit_train_batches, vars(self).get("gradient_accumulation_steps", 1)
        if self.train_sampling_strategy == "batch_rebalance" and most and most % steps:
            yield (
                f"{most} micro-batches of an epoch cut a step short, whose {steps} (gradient_accumulation_steps) hold "
                "its rows only together with train_sampling_strategy='batch_rebalance'; set limit_train_batches or "
                f"overfit_batches to a multiple of {steps}"
            )
        if self.dataloader_num_workers == 0:
            for name, given in (
                ("persistent_workers", self.dataloader_persistent_workers),
                ("prefetch_factor", self.dataloader_prefetch_factor),
                ("multiprocessing_context", self.dataloader_multiprocessing_context),
            ):
                if given:
                    yield f"dataloader_{name}={given!r} needs workers; set dataloader_num_workers to 1 or more"


# ---------------------------------------------------------------------------------------------------- build


def first_rows(dataset: Any, number: int) -> Any:
    """The first `number` rows of an evaluation set. Raises a `DataError` where it is a stream without a method
    ``take``.
    """
    check_dataset(dataset, "eval_dataset")
    if is_stream(dataset):
        if not hasattr(dataset, "take"):
            raise DataError(
                f"limit_eval_batches takes the first rows, and the {type(dataset).__name__} has no method take. Give "
                "it one, or rows by index."
            )
        return dataset.take(number)
    kept = range(min(number, len(dataset)))
    return dataset.select(kept) if hasattr(dataset, "select") else Subset(dataset, kept)


def _is_of_accelerate(loader: Any) -> bool:
    return type(loader).__module__.partition(".")[0] == "accelerate"


def first_read(loader: Any, seed: int) -> str | None:
    """What a user's loader gives this process first, to be compared with what it gives the others: the rows' numbers;
    of a stream a digest of the first row, of any other loader one of the first batch. None where looking would take a
    row away, or accelerate has divided the rows.
    """
    if _is_of_accelerate(loader):
        return None
    is_plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if is_plain and not is_stream(loader.dataset):
        sampler: Any = copy.copy(loader.batch_sampler)
        if sampler is None:
            return None
        if samplers.inner_sampler(sampler) is not None:
            sampler.sampler = copy.copy(sampler.sampler)
        if not has_length(sampler):
            with samplers.private_random_numbers(seed):
                return None if is_one_shot(sampler) else repr(next(iter(sampler), None))
        return repr(Loader(loader.dataset, batch_sampler=sampler, seed=seed).rows_of(0, 0))
    source = loader.dataset if is_plain else loader  # a loader would start its workers
    copied = copy.deepcopy if is_plain and samplers.knows_position(source) else copy.copy
    with contextlib.suppress(TypeError):  # one that counts its passes or rows is to begin with the first
        source = copied(source)
    if is_one_shot(source):
        return None
    with samplers.private_random_numbers(seed):
        return hashlib.blake2b(repr(_values_in(next(iter(source), None))).encode()).hexdigest()


def _values_in(batch: Any) -> Any:
    """The numbers and texts in `batch`, to any depth; of other objects, their types."""
    if isinstance(batch, Mapping):
        return [(name, _values_in(value)) for name, value in batch.items()]
    if isinstance(batch, (list, tuple)):
        return [_values_in(value) for value in batch]
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return batch.tolist()
    return batch if isinstance(batch, (str, bytes, int, float)) else type(batch).__name__


def adopt(
    loader: Any,
    *,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    is_training: bool = True,
    own_rows: bool = False,
    whole: bool = False,
    fills: bool = False,
) -> Loader:
    """A user's loader, with a position and, over several processes, with the part of each.

    A plain `DataLoader` is rebuilt around its dataset, sampler and collator. Of anything else, batches are read as they
    come: each process keeps every `world_size`-th, and resuming reads the earlier ones again. A loader prepared by
    accelerate, one over a `DistributedSampler`, or one with `own_rows`, gives each process its own part already. An
    evaluation leaves out rows that accelerate has repeated to fill up the last batch; where a batch must be `whole`,
    as for a loss that gathers rows itself, they only do not count. With `fills`, the last batch of rows by index is
    filled up here too.
    """
    if isinstance(loader, Loader):
        return loader
    place: dict[str, Any] = {"rank": rank, "world_size": world_size, "seed": seed, "advance": is_training}
    place["own_rows"] = own_rows
    is_of_accelerate = _is_of_accelerate(loader)
    if is_of_accelerate:
        place |= {"rank": 0, "world_size": 1}
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        logger.info("Batches of the given %s are taken as they come; resuming reads them again.", type(loader).__name__)
        repeats = is_of_accelerate and not is_training and world_size > 1
        batches = _Batches(loader, rank if repeats else None, whole)
        adopted = Loader(batches, batch_size=None, collate_fn=unchanged, **place)
        adopted.__dict__["dataset"] = getattr(loader, "dataset", loader)
        return adopted
    place |= {name: vars(loader)[name] for name in (*ENGINE, "worker_init_fn", "collate_fn")}
    place["multiprocessing_context"] = loader.multiprocessing_context
    logger.info("The given %s is read through a loader that can be resumed.", type(loader).__name__)
    if is_stream(loader.dataset):
        return Loader(loader.dataset, batch_size=loader.batch_size, drop_last=loader.drop_last, **place)
    if type(loader.batch_sampler) is BatchSampler:
        size, last = loader.batch_sampler.batch_size, loader.batch_sampler.drop_last
        return Loader(
            loader.dataset, batch_size=size, sampler=loader.batch_sampler.sampler, drop_last=last, whole=fills, **place
        )
    if loader.batch_sampler is not None:
        return Loader(loader.dataset, batch_sampler=loader.batch_sampler, **place)
    raise DataError(
        "A DataLoader with batch_size=None reads one row at a time. Give it a batch_size or a batch_sampler."
    )


class _Batches(IterableDataset[Any]):
    """A foreign loader, as a stream of its batches. With a `rank`, rows that accelerate has repeated are left out, or
    marked, of batches that must be `whole`.
    """

    def __init__(self, loader: Any, rank: int | None = None, whole: bool = False) -> None:
        self.loader, self.rank, self.whole = loader, rank, whole
        # accelerate does not tell the epoch to a batch sampler of which each process has a share.
        shared = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
        setters = [one.set_epoch for one in (loader, shared) if one is not None and samplers.follows_epochs(one)]
        if setters:
            self.set_epoch = lambda epoch: [set_one(epoch) for set_one in setters]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if self.rank is not None:
                self.loader.end()  # else `gather_for_metrics` would leave out the repeated rows once more
                batch = _marked(batch, self.loader, self.rank)
                if isinstance(batch, Repeating) and not self.whole:
                    batch = batch.counted()
            yield batch

    def __len__(self) -> int:
        return len(self.loader)


def _marked(batch: Any, loader: Any, rank: int) -> Any:
    """`batch` of `loader`, which accelerate has prepared; where it has filled up the last one, marked so."""
    state, sampler = vars(loader), vars(loader.batch_sampler)
    rest, size = state.get("remainder", -1), sampler.get("batch_size")
    if not (state.get("end_of_dataloader") and rest > 0 and size and sampler.get("even_batches")):
        return batch
    if (kept := min(max(rest - rank * size, 0), size)) == 0:
        return as_filler(batch)
    return Repeating(batch, kept, size) if kept < size and isinstance(batch, Mapping) else batch


def unchanged(batch: Any) -> Any:
    """The collator of what is a batch already, such as prompts as a list of rows."""
    return batch


def check_dataset(dataset: Any, name: str) -> None:
    """Reject unusable datasets before anything expensive happens: raises a `DataError` where there is no dataset, or it
    has no rows, and a `TypeError` for a dict of splits, an iterator, which gives its rows once only, or no dataset.
    """
    if dataset is None:
        raise DataError(f"{name} is None: a dataset is needed here. Pass one.")
    if isinstance(dataset, Mapping):
        raise TypeError(
            f"`{name}` must be a `Dataset` or `IterableDataset`, or any other rows; it is a dict of datasets "
            f"({', '.join(map(str, dataset))}). Pass one of them."
        )
    if type(dataset).__name__ == "DataFrame":
        raise TypeError(
            f"{name} is a DataFrame, which gives columns by name and no rows. Pass datasets.Dataset.from_pandas(frame)."
        )
    if isinstance(dataset, Iterator):
        raise TypeError(
            f"{name} is a {type(dataset).__name__}, which gives its rows once only. Pass list(...) of it, or "
            "datasets.IterableDataset.from_generator(<the function that makes it>)."
        )
    if isinstance(dataset, str) or not (isinstance(dataset, Iterable) or hasattr(dataset, "__getitem__")):
        kind = f"the string {dataset!r}" if isinstance(dataset, str) else f"of type {type(dataset).__name__}"
        raise TypeError(
            f"{name} is {kind}; it must give rows, by index (__getitem__ and __len__) or one by one (__iter__)."
        )
    if not is_stream(dataset) and not has_length(dataset):
        raise TypeError(
            f"{name} is of type {type(dataset).__name__}, which has __getitem__ but no __len__. Define __len__."
        )
    if has_length(dataset) and len(dataset) == 0:
        raise DataError(f"{name} has no rows. If it was filtered, see what the filter kept.")


def named_dataset(datasets: Any, name: str) -> Any:
    """The dataset of that name in a dict of evaluation sets. Raises a `ValueError` where there is none."""
    if not isinstance(datasets, Mapping) or name not in datasets:
        known = "the trainer's eval_dataset is no dict of named sets"
        if isinstance(datasets, Mapping):
            known = f"those of the trainer are {', '.join(map(str, datasets))}"
        raise ValueError(f"There is no evaluation set {name!r}: {known}. Pass one of its names, or a dataset.")
    return datasets[name]


def num_examples(loader: Any) -> int:
    """Rows that `loader` reads in an epoch, over all processes; estimated from its batches if unknown."""
    dataset: Any = getattr(loader, "dataset", None)
    if isinstance(loader, Loader) and loader.total_rows is not None:
        return loader.total_rows
    if has_length(dataset):
        return len(dataset)
    rows = loader.total_batch_size if isinstance(loader, Loader) else getattr(loader, "batch_size", None)
    return len(loader) * (rows or 1)


# ---------------------------------------------------------------------------------------------------- columns


def default_collator(processing_class: Any = None) -> Callable[[list[Any]], Any]:
    """Pads with the tokenizer or feature extractor, if there is one; else stacks rows of equal shape."""
    pads = callable(getattr(processing_class, "pad", None))
    if pads and (hasattr(processing_class, "pad_token_id") or hasattr(processing_class, "padding_value")):
        return DataCollatorWithPadding(processing_class)
    return default_data_collator


def signature_columns(forward: Callable[..., Any]) -> list[str] | None:
    """The columns a model reads: the parameters of its forward and the label columns of collators. None: it may read
    any, as a ``forward(**inputs)`` that hands them on.
    """
    wild = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [name for name, parameter in inspect.signature(forward).parameters.items() if parameter.kind not in wild]
    return list(dict.fromkeys([*named, "label", "label_ids", "labels"])) if named else None


def can_drop_columns(dataset: Any) -> bool:
    """Whether columns can be dropped from `dataset` itself: a `datasets.Dataset` that transforms no rows."""
    return hasattr(dataset, "remove_columns") and not is_stream(dataset) and not samplers.transforms_rows(dataset)


def keep_columns(
    dataset: Any, collator: Callable[[list[Any]], Any], keep: Iterable[str], description: str = "dataset"
) -> tuple[Any, Callable[[list[Any]], Any]]:
    """(dataset, collator), one of which drops the columns that are not in `keep`. A `datasets.Dataset` no longer reads
    them; for others, and with a transform, they are dropped before collating.
    """
    if not can_drop_columns(dataset):
        return dataset, RemoveColumns(collator, keep, description)
    dataset, dropped = remove_unused_columns(dataset, keep)
    if dropped:
        logger.info(_DROPPED, description, ", ".join(dropped))
    return dataset, collator


_DROPPED = "%s: columns that the model does not take are left out: %s. Set remove_unused_columns=False to keep them."


def remove_unused_columns(dataset: Any, keep: Iterable[str]) -> tuple[Any, list[str]]:
    """(a `datasets` dataset with the columns in `keep` alone, the names of those dropped). Raises a `DataError` where
    no column would be left.
    """
    columns, keep = list(dataset.column_names or []), set(keep)
    dropped = [name for name in columns if name not in keep]
    if columns and len(dropped) == len(columns):
        raise DataError(_nothing_left(columns, keep))
    return (dataset.remove_columns(dropped) if dropped else dataset), dropped


class RemoveColumns:
    """A collator whose rows hold nothing but the columns in `keep`; rows that are no dicts pass unchanged."""

    def __init__(self, collator: Callable[[list[Any]], Any], keep: Iterable[str], description: str = "dataset") -> None:
        self.collator, self.keep, self.description = collator, frozenset(keep), description
        self._has_logged = False

    def __call__(self, rows: list[Any]) -> Any:
        return self.collator([self._strip(row) for row in rows])

    def _strip(self, row: Any) -> Any:
        if (type(row) is not dict and not isinstance(row, Mapping)) or row.keys() <= self.keep:
            return row
        kept = {name: value for name, value in row.items() if name in self.keep}
        if not kept:
            raise DataError(_nothing_left(list(row), self.keep))
        if not self._has_logged:
            self._has_logged = True
            logger.info(_DROPPED, self.description, ", ".join(name for name in row if name not in self.keep))
        return kept


def _nothing_left(found: list[str], wanted: Iterable[str]) -> str:
    wanted = sorted(wanted)
    closest = next((f" (column {name!r}{hint})" for name in found if (hint := did_you_mean(name, wanted))), "")
    return (
        f"No column of the dataset is one that the model takes. Found: {', '.join(found)}. Wanted: "
        f"{', '.join(wanted)}{closest}. Rename or tokenize the columns, or set remove_unused_columns=False if your "
        "collator makes batches of these."
    )


# ---------------------------------------------------------------------------------------------------- batches


def to_device(batch: Any, device: torch.device | str, non_blocking: bool = False) -> Any:
    """`batch` with every tensor in it moved; dicts, lists and tuples keep their types."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.device == device else send(batch, device, non_blocking)
    if type(batch) is dict and str(device) == "cpu":
        if all(isinstance(value, torch.Tensor) and value.is_cpu for value in batch.values()):
            return dict(batch)  # there already; a new dict, since a user's compute_loss may pop the labels
    kind: Any = type(batch)
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device, non_blocking) for key, value in batch.items()}
        return kind(moved) if kind is not dict and isinstance(batch, MutableMapping) else moved
    if isinstance(batch, (list, tuple)):
        return like(batch, [to_device(value, device, non_blocking) for value in batch])
    return batch.to(device) if hasattr(batch, "to") else batch


def like(batch: tuple[Any, ...] | list[Any], parts: list[Any]) -> Any:
    """`parts` in a tuple, a named one or a list, as `batch` is."""
    kind: Any = type(batch)
    return kind(*parts) if hasattr(batch, "_fields") else kind(parts)


# ---------------------------------------------------------------------------------------------------- seeds


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed Python, numpy and torch on all devices; with `deterministic`, also forbid nondeterministic kernels."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def enable_full_determinism(seed: int) -> None:
    """`set_seed` and all settings for deterministic results on a GPU; slower, for debugging."""
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
    set_seed(seed, deterministic=True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
