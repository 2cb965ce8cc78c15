"""Joins datasets one behind another, as configuration files for trl list them under ``datasets``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from posttrain.cli.source import DataSource, divided, of_mapping, read, split_of
from posttrain.core.config import ConfigMeta, opt
from posttrain.core.errors import DataError, require
from posttrain.core.fields.old_names import Removed, Renamed

if TYPE_CHECKING:
    from datasets import DatasetDict


@dataclass
class DatasetConfig:
    """One dataset of a `DatasetMixtureConfig`.

    Args:
        path: a file, a folder, a name on the hub, or a reader of `datasets`, such as ``"json"``, of `data_files`.
        name: the configuration of a dataset that has several.
        data_dir, data_files: which files of it; see `datasets.load_dataset`.
        split: which split; of all but what ``save_to_disk`` wrote also a part of one: ``"train[:10%]"``.
        columns: those to keep; None: all.
        fraction: its share of the joined rows, relative to the fractions of the others, which need one too. No row is
            repeated: the dataset that is smallest for its share is used whole, and of the others the first rows.
    """

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclass
class DatasetMixtureConfig:
    """Datasets to be joined, for `get_dataset`.

    Args:
        datasets: a `DatasetConfig` each, or mappings with its fields, which are turned into them.
        streaming: whether rows are read as they are needed.
        test_split_size: the share of the rows, or their number, that is held out as the split ``"test"``.

    Raises:
        DataError: a mapping has no path, or an unknown key.
    """

    datasets: list[Any] = field(
        default_factory=list, metadata={"help": "Datasets to join: mappings of path, name, split, columns, ..."}
    )
    streaming: bool = field(default=False, metadata={"help": "Whether rows are read as they are needed."})
    test_split_size: float | int | None = field(
        default=None, metadata={"help": "Share of the rows that is held out as the split 'test', or their number."}
    )

    def __post_init__(self) -> None:
        self.datasets = listed(self.datasets)


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict:
    """The joined rows of `mixture_config` as the split ``"train"``, and with `test_split_size` also ``"test"``.

    Raises:
        DataError: there is no dataset, or the fractions or `test_split_size` cannot be followed.
    """
    datasets = require("datasets", "posttrain-core[datasets]", why="reading datasets")
    rows = joined(mixture_config.datasets, mixture_config.streaming)
    if mixture_config.test_split_size is None:
        return datasets.DatasetDict({"train": rows})
    if mixture_config.streaming:
        raise DataError("test_split_size cannot be taken from a stream; set streaming=False")
    return divided(rows, mixture_config.test_split_size, "test_split_size")


def listed(given: Sequence[Any]) -> list[DatasetConfig]:
    """`given` with each mapping as a `DatasetConfig`; `DataError` where that is not possible."""
    if not isinstance(given, (list, tuple)):
        raise DataError(f"datasets={given!r} must be a list of mappings, each with a path")
    made = []
    for place, value in enumerate(given):
        config = of_mapping(DatasetConfig, value, f"datasets[{place}]") if isinstance(value, dict) else value
        if not isinstance(config, DatasetConfig):
            known = ", ".join(field.name for field in dataclasses.fields(DatasetConfig))
            raise DataError(f"datasets[{place}]={value!r} must be a mapping of {known}")
        if not isinstance(config.path, str) or not config.path:
            raise DataError(f"datasets[{place}] has no path")
        made.append(config)
    return made


def problems_of(configs: Sequence[DatasetConfig], streaming: bool) -> Iterator[str]:
    """Why `configs` cannot be joined, as far as is known before they are read."""
    if not configs:
        yield "datasets is empty, so there are no rows; list one dataset at least"
    shares = [config.fraction for config in configs]
    for place, share in enumerate(shares):
        if share is not None and (isinstance(share, (bool, str)) or not 0 < share < float("inf")):
            yield f"datasets[{place}]: the fraction {share!r} must be a number above 0"
    if any(share is not None for share in shares):
        if None in shares:
            yield f"datasets[{shares.index(None)}] has no fraction and others have one; set it for all, or for none"
        if streaming:
            yield "the fraction of a dataset needs a known length, which a stream does not have; set streaming=False"


def joined(configs: Sequence[DatasetConfig], streaming: bool = False) -> Any:
    """The rows of `configs` one behind another, by their fractions if they have any; `DataError` if they cannot be."""
    datasets = require("datasets", "posttrain-core[datasets]", why="reading datasets")
    for problem in problems_of(configs, streaming):
        raise DataError(problem)
    parts = [_rows(config, streaming) for config in configs]
    shares = [config.fraction for config in configs if config.fraction is not None]
    if shares:
        each = min(len(part) / share for part, share in zip(parts, shares, strict=True))  # rows for a share of one
        parts = [part.take(round(each * share)) for part, share in zip(parts, shares, strict=True)]
    return datasets.concatenate_datasets(parts)


def _rows(config: DatasetConfig, streaming: bool) -> Any:
    part = None if config.split.isidentifier() else config.split  # "train[:10%]", "train+test"
    where = {"data_dir": config.data_dir, "data_files": config.data_files}
    found = read(config.path, config.name, streaming, part, **{key: value for key, value in where.items() if value})
    rows = split_of(found, config.split, config.path, "its split") if isinstance(found, dict) else found
    return rows if config.columns is None else rows.select_columns(config.columns)


@dataclass
class CommandSource(DataSource, metaclass=ConfigMeta):
    """What a command trains and evaluates on: a `DataSource`, or several datasets joined."""

    OLD_NAMES: ClassVar[dict[str, Renamed | Removed]] = {
        "streaming": Renamed("dataset_streaming"),
        "test_split_size": Renamed("eval_share"),
        "ignore_bias_buffers": Removed(
            "DDP sends buffers of booleans as others; ddp_broadcast_buffers=False sends none.", harmless=None
        ),
    }

    datasets: list[Any] | None = opt(
        None,
        "Several datasets, joined one behind another: for each a mapping of path, name, data_dir, data_files, split, "
        "columns and fraction, its share of the joined rows.",
    )

    def _problems(self) -> Iterator[str]:
        if self.datasets is None:
            return
        for other in ("dataset_name", "dataset_mixture"):
            if vars(self)[other] is not None:
                yield f"{other} and datasets are both set; keep one"
        try:
            yield from problems_of(listed(self.datasets), self.dataset_streaming)
        except DataError as error:
            yield str(error)

    def _training_sets(self) -> tuple[Any, Any | None]:
        if self.datasets is None:
            return super()._training_sets()
        return self._divided(self._with_new_names(joined(listed(self.datasets), self.dataset_streaming)))
