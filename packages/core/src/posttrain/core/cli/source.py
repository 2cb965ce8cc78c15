"""The dataset that a command line names: files, a folder, or a dataset of the hub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.errors import DataError, require
from posttrain.core.fields import ConfigMeta, opt, validate

BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text", ".text": "text"}


@dataclass
class DataSource(metaclass=ConfigMeta):
    """Which dataset is trained on and evaluated on."""

    dataset_name: str | list[str] | None = opt(
        None, "Rows to train on: files (json, jsonl, parquet, csv, txt), a folder, or a name on the hub."
    )
    dataset_config: str | None = opt(None, "Configuration of a dataset that has several.")
    dataset_train_split: str = opt("train", "Split to train on.")
    dataset_test_split: str = opt("test", "Split to evaluate on, where the dataset has it.")
    eval_dataset_name: str | list[str] | None = opt(
        None, "Rows to evaluate on, named as in `dataset_name`; None: the test split or `eval_share`."
    )
    eval_share: float = opt(
        0.0, "Share of the training rows held out for evaluation, where there is no other set.", min=0, below=1
    )
    dataset_streaming: bool = opt(False, "Read rows while training instead of preparing them all before.")
    max_rows: int | None = opt(None, "Use only the first so many rows of each set.", min=1)
    rename_columns: dict[str, Any] | str | None = opt(
        None, 'Columns that are called otherwise here, e.g. {"question": "prompt", "answer": "completion"}.'
    )

    def __post_init__(self) -> None:
        validate(self)

    def _problems(self) -> Iterator[str]:
        for field in ("dataset_name", "eval_dataset_name"):
            names = _as_list(getattr(self, field))
            for name in names:
                if _is_file_name(name) and not Path(name).expanduser().exists():
                    yield f"{field}={name!r} does not exist (looked in {Path.cwd()})"
            if len(names) > 1 and len({_builder(name) for name in names}) > 1:
                yield f"{field} mixes kinds of files ({', '.join(names)}); give files of one kind"
        if isinstance(self.rename_columns, str):
            yield f"rename_columns={self.rename_columns!r} is not a mapping of names to names"
        if self.eval_share and self.dataset_streaming:
            yield "eval_share cannot be taken from a stream; set dataset_streaming=False or give eval_dataset_name"

    def load(self) -> tuple[Any, Any | None]:
        """Read the training rows and the evaluation rows.

        Returns:
            two datasets (`datasets.Dataset` or `IterableDataset`); the second is None where nothing was named for it.

        Raises:
            DataError: naming the splits that exist where the one asked for does not.
        """
        train, held_out = self._sets()
        return self._first(train), None if held_out is None else self._first(held_out)

    def _sets(self) -> tuple[Any, Any | None]:
        splits = self._read(self.dataset_name)
        train = _split(splits, self.dataset_train_split, self.dataset_name, "dataset_train_split")
        if self.eval_dataset_name:
            held_out = self._read(self.eval_dataset_name)
            name = self.dataset_test_split if len(held_out) > 1 else next(iter(held_out))
            return train, _split(held_out, name, self.eval_dataset_name, "dataset_test_split")
        if self.dataset_test_split in splits and self.dataset_test_split != self.dataset_train_split:
            return train, splits[self.dataset_test_split]
        if self.eval_share:
            parts = train.train_test_split(test_size=self.eval_share, seed=0)
            return parts["train"], parts["test"]
        return train, None

    def _first(self, dataset: Any) -> Any:
        """The first `max_rows` rows of `dataset`, a `Dataset` or an `IterableDataset`."""
        return dataset if self.max_rows is None else dataset.take(self.max_rows)

    def _read(self, name: str | list[str]) -> dict[str, Any]:
        """``{split: dataset}`` of the files, folder or hub dataset `name`."""
        datasets = require("datasets", "posttrain-core[datasets]", why="reading datasets")
        names = [str(Path(name).expanduser()) if _is_file_name(name) else name for name in _as_list(name)]
        if Path(names[0]).is_dir() and any(
            (Path(names[0]) / marker).exists() for marker in ("dataset_dict.json", "state.json")
        ):
            found = datasets.load_from_disk(names[0])  # what `save_to_disk` wrote
        elif _builder(names[0]) and Path(names[0]).is_file():
            found = datasets.load_dataset(_builder(names[0]), data_files=names, streaming=self.dataset_streaming)
        else:
            found = datasets.load_dataset(names[0], self.dataset_config, streaming=self.dataset_streaming)
        sets = dict(found) if isinstance(found, dict) else {self.dataset_train_split: found}
        return {split: _renamed(rows, self.rename_columns or {}) for split, rows in sets.items()}


def _split(splits: dict[str, Any], name: str, source: str | list[str], field: str) -> Any:
    if name not in splits:
        raise DataError(f"{source} has no split {name!r}; it has {', '.join(splits)}. Set {field}.")
    return splits[name]


def _renamed(rows: Any, names: dict[str, str]) -> Any:
    known = rows.column_names  # None: a stream that nobody has looked into
    missing = [] if known is None else [name for name in names if name not in known]
    taken = [new for old, new in names.items() if known is not None and new in known and new not in names]
    if missing or taken:
        said = f"there is no column {missing[0]!r}" if missing else f"there is a column {taken[0]!r} already"
        raise DataError(f"rename_columns: {said}; the columns are {', '.join(known)}.")
    return rows.rename_columns(names) if names else rows


def _as_list(name: str | list[str] | None) -> list[str]:
    return name if isinstance(name, list) else [name] if name else []


def _builder(name: str) -> str | None:
    """The reader for a file called `name`, by its ending: ``rows.jsonl.gz`` is read as json."""
    endings = [ending.lower() for ending in Path(name).suffixes]
    return next((BUILDERS[ending] for ending in reversed(endings) if ending in BUILDERS), None)


def _is_file_name(name: str) -> bool:
    """Whether `name` can only mean a file or folder, not a dataset of the hub."""
    return name.startswith((".", "/", "~")) or _builder(name) is not None or Path(name).exists()
