"""Loads the dataset of a command line: files, a folder, or a dataset of the Hub."""

from __future__ import annotations

import dataclasses
import logging
import lzma
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.core.config import ConfigMeta, JSONObject, opt, validate
from posttrain.core.errors import DataError, UnsavedError, did_you_mean, missing, require
from posttrain.core.files import lfs_pointer, means_disk_full
from posttrain.lm.text import layouts

logger = logging.getLogger(__name__)

BUILDERS = {
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".text": "text",
    ".tar": "webdataset",
}


@dataclass(frozen=True)
class Part:
    """One dataset of a mixture.

    path: files, a folder, or a name on the hub. config, split: as for `DataSource`. columns: those to keep, None for
    all. fraction: share of its rows that is used, from the first on. weight: its share of the rows of an epoch, or
    ``{share of the epoch: weight from there on}``. max_tokens: most of its tokens that are trained on.
    """

    path: str | list[str]
    config: str | None = None
    split: str | None = None
    columns: list[str] | None = None
    fraction: float | None = None
    weight: float | dict[Any, float] | None = None
    max_tokens: int | None = None


@dataclass
class DataSource(metaclass=ConfigMeta):
    """Which dataset is trained on and evaluated on."""

    dataset_name: list[str] | str | None = opt(
        None, "Rows to train on: files (json, jsonl, parquet, csv, tsv, txt, tar), a folder, or a name on the hub."
    )
    dataset_mixture: list[Any] | str | dict[str, Any] | None = opt(
        None,
        "Several datasets by name, to be mixed: for each what dataset_name takes, or a mapping of path, config, "
        "split, columns, fraction, weight and max_tokens.",
    )
    dataset_config: str | None = opt(None, "Configuration of a dataset that has several.")
    dataset_train_split: str = opt("train", "Split to train on.")
    dataset_test_split: str = opt("test", "Split to evaluate on, where the dataset has it.")
    eval_dataset_name: list[str] | str | None = opt(
        None, "Rows to evaluate on, named as in `dataset_name`; None: the test split or `eval_share`."
    )
    eval_share: float = opt(
        0.0, "Share of the training rows held out for evaluation, if there is no other set.", min=0, below=1
    )
    dataset_streaming: bool = opt(False, "Read rows while training instead of preparing them all before.")
    max_rows: int | None = opt(None, "Use only this many rows of each set, from the start.", min=1)
    rename_columns: JSONObject = opt(None, 'Columns to rename, e.g. {"question": "prompt", "answer": "completion"}.')

    as_messages: bool = opt(
        False, "Make messages of prompts and completions that are plain texts, for a model with a chat template."
    )

    def __post_init__(self) -> None:
        validate(self)

    def _problems(self) -> Iterator[str]:
        yield from self._mixture_problems()
        for field in ("dataset_name", "eval_dataset_name"):
            names = _as_list(vars(self)[field])
            if any(not isinstance(name, str) for name in names):
                continue  # the field's own check reports it
            for name in names:
                if _is_absent(name):
                    yield f"{field}={name!r} does not exist{_looked_in(name)}"
                elif Path(name).expanduser().is_file() and _builder(name) is None:
                    yield f"{field}={name!r} is no file of rows; convert it to one that ends in {', '.join(BUILDERS)}"
            if len(names) > 1 and (None in (kinds := {_builder(name) for name in names}) or len(kinds) > 1):
                yield f"{field} mixes kinds of files ({', '.join(names)}); give files of one kind, or one folder"
        if isinstance(self.rename_columns, str):
            yield f"rename_columns={self.rename_columns!r} is not a mapping of names to names"
        if self.eval_share and self.dataset_streaming:
            yield "eval_share cannot be taken from a stream; set dataset_streaming=False or give eval_dataset_name"

    def _preflight(self) -> Iterator[str | Exception]:
        if error := missing("datasets", "posttrain-core[datasets]", "reading datasets"):
            yield error

    def _mixture_problems(self) -> Iterator[str]:
        if self.dataset_mixture is None:
            return
        if self.dataset_name is not None:
            yield "dataset_name and dataset_mixture are both set; keep one"
        try:
            parts = self.parts()
        except DataError as error:
            yield str(error)
            return
        weighted = [name for name, part in parts.items() if part.weight is not None]
        for name, part in parts.items():
            if weighted and part.weight is None:
                yield f"dataset_mixture: {weighted[0]} has a weight and {name} has none; give all of them one, or none"
            for field, most in (("weight", float("inf")), ("fraction", 1), ("max_tokens", float("inf"))):
                value = vars(part)[field]
                if field == "weight" and isinstance(value, dict):  # its method checks where it changes
                    continue
                if value is not None and (isinstance(value, (bool, str)) or not 0 < value <= most):
                    bounds = f"above 0{' and at most 1' * (most == 1)}"
                    yield f"dataset_mixture: the {field} {value!r} of {name} must be {bounds}"
            for path in filter(_is_absent, _as_list(part.path)):
                yield f"dataset_mixture: {path!r} of {name} does not exist{_looked_in(path)}"

    def parts(self) -> dict[str, Part]:
        """The datasets of `dataset_mixture` by name; those of a list are named after their files or folders.

        `DataError`: a part without a path, with an unknown key, or two of one name.
        """
        given = self.dataset_mixture or {}
        if isinstance(given, str):
            raise DataError(
                f"dataset_mixture={given!r} must be a mapping of names to datasets; for one set dataset_name"
            )
        found: dict[str, Part] = {}
        for name, value in given.items() if isinstance(given, dict) else ((None, value) for value in given):
            part, whose = of_mapping(Part, value if isinstance(value, dict) else {"path": value}), name or "a dataset"
            if not part.path:
                raise DataError(f"dataset_mixture: {whose} has no path")
            if any(not isinstance(path, str) for path in _as_list(part.path)):
                what = "no name of files or a dataset"
                raise DataError(f"dataset_mixture: the path {part.path!r} of {whose} is {what}")
            name = str(name or Path(_as_list(part.path)[0]).name.partition(".")[0])
            if name in found:
                how = "write a mapping, with a name for each"
                raise DataError(f"dataset_mixture: two datasets are called {name!r}; {how}")
            found[name] = part
        return found

    def weights(self) -> dict[str, Any] | None:
        """The weights of `dataset_mixture` by name, None where it has none."""
        return {name: part.weight for name, part in self.parts().items() if part.weight is not None} or None

    def budgets(self) -> dict[str, int] | None:
        """The most trained tokens of datasets of `dataset_mixture` by name, None where it has no such limits."""
        return {name: part.max_tokens for name, part in self.parts().items() if part.max_tokens is not None} or None

    def load(self) -> tuple[Any, Any | None]:
        """Read the training rows and the evaluation rows.

        Returns:
            two datasets (`datasets.Dataset` or `IterableDataset`); the second is None if it is not configured. Of a
            mixture the first is a dict of datasets by name, and with `eval_share` so is the second.

        Raises:
            DataError: a split does not exist; names the existing ones.
        """
        train, held_out = self._training_sets()
        return self._first(train), None if held_out is None else self._first(held_out)

    def _training_sets(self) -> tuple[Any, Any | None]:
        return self._sets() if self.dataset_mixture is None else self._mixed()

    def _mixed(self) -> tuple[dict[str, Any], Any | None]:
        train, held_out = {}, {}
        for name, part in self.parts().items():
            split = part.split or self.dataset_train_split
            splits = self._read(part.path, part.config, split)
            rows = split_of(splits, split, part.path, f"the split of {name}")
            rows = rows if part.columns is None else rows.select_columns(part.columns)
            if part.fraction is not None:
                if self.dataset_streaming:
                    raise DataError(
                        f"dataset_mixture: the fraction of {name} needs a known length, which a stream does not "
                        "have; set max_rows, or dataset_streaming=False"
                    )
                rows = rows.take(max(1, round(part.fraction * len(rows))))
            if self.eval_share and not self.eval_dataset_name:
                rows, held_out[name] = self._divided(rows)
            train[name] = rows
        return train, self._held_out() if self.eval_dataset_name else held_out or None

    def _sets(self) -> tuple[Any, Any | None]:
        name = self.dataset_name or []
        splits = self._read(name)
        train = split_of(splits, self.dataset_train_split, name, "dataset_train_split")
        has_test_split = self.dataset_test_split in splits and self.dataset_test_split != self.dataset_train_split
        if has_test_split and not self.eval_dataset_name:
            return train, splits[self.dataset_test_split]
        return self._divided(train)

    def _divided(self, train: Any) -> tuple[Any, Any | None]:
        """The rows of `train` that are trained on, and those to evaluate on: of another dataset, or held out of it."""
        if self.eval_dataset_name:
            return train, self._held_out()
        if self.eval_share:
            parts = divided(train, self.eval_share, "eval_share")
            return parts["train"], parts["test"]
        return train, None

    def _held_out(self) -> Any:
        name = self.eval_dataset_name or []
        held_out = self._read(name)
        split = self.dataset_test_split if len(held_out) > 1 else next(iter(held_out))
        return split_of(held_out, split, name, "dataset_test_split")

    def _first(self, dataset: Any) -> Any:
        """The first `max_rows` rows of `dataset`, a `Dataset` or an `IterableDataset`, or of each in a dict."""
        if isinstance(dataset, dict):
            return {name: self._first(part) for name, part in dataset.items()}
        return dataset if self.max_rows is None else dataset.take(self.max_rows)

    def _read(self, name: str | list[str], config: str | None = None, split: str | None = None) -> dict[str, Any]:
        """``{split: dataset}`` of the files, folder or hub dataset `name`; rows without splits are called `split`."""
        found = read(name, config or self.dataset_config, self.dataset_streaming)
        sets = dict(found) if isinstance(found, dict) else {split or self.dataset_train_split: found}
        sets = {name: self._with_new_names(rows) for name, rows in sets.items()}
        return {name: layouts.as_messages(rows) for name, rows in sets.items()} if self.as_messages else sets

    def _with_new_names(self, rows: Any) -> Any:
        """`rows` with the columns of `rename_columns` renamed."""
        names = self.rename_columns or {}
        known = rows.column_names  # None: a stream with unknown columns
        missing = [] if known is None else [name for name in names if name not in known]
        taken = [new for old, new in names.items() if known is not None and new in known and new not in names]
        if missing or taken:
            said = f"there is no column {missing[0]!r}" if missing else f"there is a column {taken[0]!r} already"
            raise DataError(f"rename_columns: {said}; the columns are {', '.join(known)}.")
        return rows.rename_columns(names) if names else rows


def of_mapping(kind: type[Any], value: dict[str, Any], where: str = "dataset_mixture") -> Any:
    """A dataset of the dataclass `kind`, which begins with its path; `DataError` where it has no such key."""
    known = [field.name for field in dataclasses.fields(kind)]
    for key in value:
        if key not in known:
            raise DataError(f"{where}: unknown key {key!r}{did_you_mean(key, known)} (known: {', '.join(known)})")
    return kind(**{"path": None} | value)


def sets_for(run: Any) -> tuple[Any, Any | None]:
    """The training rows of a `posttrain.core.registry.Run`, and those to evaluate on; None where it evaluates nothing.

    `DataError` as for `DataSource.load`, or where the run evaluates, and there is nothing to evaluate on.
    """
    train, held_out = run.data.load()
    if run.config.eval_strategy == "no":
        return train, None
    if held_out is None:
        raise DataError(
            f"eval_strategy={str(run.config.eval_strategy)!r} needs an evaluation dataset, and the dataset has no "
            f"split {run.data.dataset_test_split!r}. Set eval_dataset_name or eval_share, or eval_strategy=no."
        )
    return train, held_out


def divided(rows: Any, held_out: float, argument: str) -> Any:
    """The splits "train" and "test" of `rows`, by `held_out`; a `DataError` naming `argument` where one is empty."""
    try:
        return rows.train_test_split(test_size=held_out, seed=0)
    except ValueError as error:
        raise DataError(
            f"{argument}={held_out} leaves no row to train on, or none to evaluate on: there are {len(rows)}. Set "
            f"another {argument}, or give the rows of the evaluation as a dataset of their own."
        ) from error


def train(run: Any, trainer_class: Any, train_rows: Any, eval_rows: Any) -> None:
    """Train `trainer_class` as `run` is configured, and save the final model and its tokenizer if it keeps them."""
    train_and_save(made(run, trainer_class, train_rows, eval_rows), run.keeps_model)


def train_and_save(trainer: Any, keeps_model: bool = True) -> None:
    """Train, and save the final model in ``output_dir`` if `keeps_model`."""
    try:
        trainer.train()
    except UnsavedError as error:  # there may be room for the model without its optimizer
        logger.warning("%s", error)
    if not keeps_model:
        return
    try:
        trainer.save_model()
    except Exception as error:
        if not means_disk_full(error):
            raise
        folder = trainer.args.output_dir
        raise UnsavedError(
            f"The disk is full ({error}): the model in {folder} is not whole. Free some space."
        ) from error


def made(run: Any, trainer_class: Any, train_rows: Any, eval_rows: Any) -> Any:
    """A `trainer_class` as `run` is configured."""
    config, model = run.config, run.model
    extra = config.model_init_kwargs if isinstance(config.model_init_kwargs, dict) else {}
    return trainer_class(
        model=model.model_name_or_path,
        args=dataclasses.replace(config, model_init_kwargs=model.model_init_kwargs() | extra),
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        peft_config=model.peft_config(),
        quantization_config=model.quantization_config(),
    )


def read(path: str | list[str], config: str | None, streaming: bool, part: str | None = None, **where: Any) -> Any:
    """The rows of files, a folder or a hub dataset, by split: a `Dataset`, an `IterableDataset`, or a dict of them.
    Raises a `DataError` where there is no such dataset, or it cannot be read by `part` or `where`.

    Args:
        path: files of one kind, a folder, or a name on the hub.
        config: of a dataset that has several.
        part: read only this, ``"train[:10%]"``, and return its rows without a dict.
        where: ``data_dir`` and ``data_files`` of `datasets.load_dataset`.
    """
    from posttrain.lm.loading.offline import cache_where_unknown  # here, because the package imports torch

    datasets = require("datasets", "posttrain-core[datasets]", why="reading datasets")
    names = [str(Path(name).expanduser()) if _is_file_name(name) else name for name in _as_list(path)]
    for name in filter(_is_absent, names):
        raise DataError(f"{name} cannot be read: it does not exist{_looked_in(name, end='.')}")
    for pointer in filter(None, map(lfs_pointer, names)):
        raise DataError(pointer)
    saved = Path(names[0]).is_dir() and any(
        (Path(names[0]) / marker).exists() for marker in ("dataset_dict.json", "state.json")
    )
    builder = _builder(names[0]) if Path(names[0]).is_file() else None
    if (saved or builder) and where:
        raise DataError(f"{path} is read whole; leave out {' and '.join(where)}")
    if saved and part:
        raise DataError(f"{path} was written by save_to_disk, which can only be read whole; name a split, not {part!r}")
    if saved:
        return datasets.load_from_disk(names[0])
    kind = _kind(names[0]) if Path(names[0]).is_dir() and not where else builder
    if builder:
        where = {"data_files": names}
    if kind in ("csv", "tsv"):  # "007", "True" and "NA" are texts
        where |= {"converters": dict.fromkeys(layouts.TEXTS, str), "keep_default_na": False, "na_values": [""]}
        where |= {"sep": "\t"} if kind == "tsv" else {}
    is_archived = kind == "webdataset"
    for archive in names if builder and is_archived else Path(names[0]).rglob("*.tar*") if is_archived else ():
        if not streaming or _is_plain(archive):  # of a stream, the others are checked when their turn comes
            _check_archive(archive)
    builder = "csv" if builder == "tsv" else builder
    reader, config = (builder, None) if builder else (names[0], config)
    try:
        with nullcontext() if builder else cache_where_unknown(reader):
            found = datasets.load_dataset(reader, config, streaming=streaming, split=part, **where)
    except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:
        reason = _reason(error).rstrip(".")
        if isinstance(error, OSError) and Path(datasets.config.HF_DATASETS_CACHE).is_relative_to(error.filename or "-"):
            reason += ", below which datasets keeps its cache. Set HF_HOME to a folder that can be written"
        elsewhere = "" if Path(names[0]).exists() else f". It is no file or folder here (looked from {Path.cwd()})."
        raise DataError(f"{path} cannot be read: {reason}{elsewhere}") from error
    for rows in (found.values() if isinstance(found, dict) else [found]) if streaming and is_archived else ():
        rows._ex_iterable.generate_examples_fn = partial(_by_archive, rows._ex_iterable.generate_examples_fn)
    return found


def _by_archive(
    generate: Callable[..., Iterator[Any]], tar_paths: list[str], tar_iterators: list[Any]
) -> Iterator[Any]:
    """What `generate` makes of archives, one after the other. Raises a `DataError` that names one with a broken row."""
    for path, files in zip(tar_paths, tar_iterators, strict=True):
        if Path(path).is_file() and not _is_plain(path):
            _check_archive(path)
        try:
            yield from generate(tar_paths=[path], tar_iterators=[files])
        except (ValueError, OSError) as error:
            raise DataError(
                f"{path} has a row that cannot be read: {_reason(error)}. Correct or leave it out."
            ) from error


def _is_plain(archive: str | Path) -> bool:
    """Whether an archive is not compressed, so that its end is found without reading all of it."""
    return Path(archive).suffix.lower() == ".tar"


def _check_archive(name: str | Path) -> None:
    """Raise a `DataError` where the tar file `name` is damaged: its rows would end there, and nothing would say so."""
    try:
        with tarfile.open(name, "r:*") as archive:
            files = len(archive.getmembers())
            archive.fileobj.seek(archive.offset)
            is_damaged = any(archive.fileobj.read(tarfile.BLOCKSIZE))  # zeros end it
            while not _is_plain(name) and archive.fileobj.read(2**20):  # a checksum is behind them
                pass
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{name} cannot be read: {error}. Copy or make that archive again, or leave it out.") from error
    if is_damaged:
        raise DataError(
            f"{name} is damaged behind its file {files}, at byte {archive.offset}, and what follows would be left out. "
            "Copy or make that archive again, or leave it out."
        )


def _reason(error: Exception) -> str:
    """Why `datasets` could not read rows, without its hints to programmers."""
    if isinstance(error, StopIteration):  # what its reader of JSON makes of a file without rows
        return "it has no rows."
    text = str(error.__cause__ or error)  # the error itself says that there was an error
    configs = re.search(r"available configs: (\[.*?\])", text)
    return text if configs is None else f"it has several configs. Set dataset_config to one of {configs[1]}."


def split_of(splits: dict[str, Any], name: str, source: str | list[str], field: str) -> Any:
    """The rows of the split `name` of `source`; `DataError` naming `field`, the argument that chose it, without it."""
    if name not in splits:
        raise DataError(f"{source} has no split {name!r}; it has {', '.join(splits)}. Set {field}.")
    return splits[name]


def _as_list(name: str | list[str] | None) -> list[str]:
    return list(name) if isinstance(name, (list, tuple)) else [name] if name else []


def _builder(name: str) -> str | None:
    """The reader for a file called `name`, by its ending: ``rows.jsonl.gz`` is read as json."""
    endings = [ending.lower() for ending in Path(name).suffixes]
    return next((BUILDERS[ending] for ending in reversed(endings) if ending in BUILDERS), None)


def _kind(folder: str) -> str | None:
    """The reader for the files of a folder of rows; None where they are of several kinds, and its card names some, else
    a `DataError`. Texts beside rows, no more of them than of rows, are a licence or notes.
    """
    from datasets.data_files import FILES_TO_IGNORE

    card, kinds = Path(folder, "README.md"), dict[str, list[Path]]()
    is_named = card.is_file() and "data_files:" in card.read_text(encoding="utf-8")
    for file in (file.relative_to(folder) for file in sorted(Path(folder).rglob("*"))):
        is_hidden = file.name in FILES_TO_IGNORE or any(part.startswith((".", "__")) for part in file.parts)
        if not is_hidden and (reader := _builder(file.name)):
            kinds.setdefault(reader, []).append(file)
    notes = kinds.pop("text", []) if len(kinds) == 2 else []
    endings = Counter(file.suffix for files in kinds.values() for file in files)
    if not is_named and (len(kinds) > 1 or len(notes) > max(endings.values(), default=0)):
        shown = ", ".join(str(files[0]) for files in [*kinds.values(), notes] if files)
        raise DataError(
            f"{folder} holds files of several kinds, and only one kind would be read: {shown}. Set dataset_name to the "
            "files of one kind, or dataset_mixture to files of each."
        )
    return next(iter(kinds)) if len(kinds) == 1 else None


def _is_absent(name: str) -> bool:
    """Whether `name` means a file or folder that is not there."""
    return _is_file_name(name) and not Path(name).expanduser().exists()


def _looked_in(name: str, end: str = "") -> str:
    """The folder that `name` was looked for in, and the file beside it that may be meant; else `end`."""
    beside = [str(path) for path in Path(name).parent.glob("*")]
    return f" (looked in {Path.cwd()}){did_you_mean(str(Path(name)), beside, end)}"


def _is_file_name(name: str) -> bool:
    """Whether `name` can only mean a file or folder, not a dataset of the hub."""
    return name.startswith((".", "/", "~")) or _builder(name) is not None or Path(name).exists()
