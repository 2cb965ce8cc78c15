"""Prepares the datasets of a run: tokenizes, masks, mixes and packs rows. The trainer and the preview share it.

`posttrain.sft.rows` prepares a row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from posttrain.core.data.pipeline import check_dataset
from posttrain.core.data.samplers import columns_of, has_places, is_stream
from posttrain.core.errors import DataError
from posttrain.lm.preparation.pipeline import TokenReport, prepare_rows
from posttrain.lm.text import layouts
from posttrain.sft.config import SFTConfig
from posttrain.sft.mixture import MixedStream, Mixture, mix_datasets
from posttrain.sft.packing import pack_columns, pack_dataset, pack_stream
from posttrain.sft.rows import Preparation, preparation_options


@dataclass
class Prepared:
    """Rows to train or evaluate on.

    dataset: the rows. reports: what became of those that went in, by the name of each dataset.
    sources: the names of the datasets that are mixed, none where it is one. mixture: how the rows are made up of them.
    """

    dataset: Any
    reports: dict[str, DataReport] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    mixture: Mixture | None = None


def shuffled(dataset: Any, seed: int) -> Any:
    """`dataset` in another order: whole, or of a stream within the rows that its buffer holds. Raises a `DataError`
    where it is neither a sequence of rows nor of a kind that can be shuffled.
    """
    if hasattr(dataset, "shuffle"):
        return dataset.shuffle(seed=seed)
    if not has_places(dataset):
        raise DataError(
            f"shuffle_dataset=True, and a stream of type {type(dataset).__name__} has no shuffle(). Shuffle it where "
            "it is made, or pass a datasets.IterableDataset; or set shuffle_dataset=False."
        )
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()
    return torch.utils.data.Subset(dataset, order)


def refuse_mixing(args: SFTConfig) -> None:
    """Reject arguments that mix several datasets, where there is one. Raises a `DataError` that names the first of
    them.
    """
    asked = {
        "dataset_weights_of='tokens'": args.dataset_weights_of == "tokens",
        "dataset_weights": args.dataset_weights is not None,
        "dataset_max_tokens": args.dataset_max_tokens is not None,
    }
    if given := next((field for field, is_set in asked.items() if is_set), None):
        raise DataError(f"{given} mixes several datasets, and train_dataset is one. Pass a dict of datasets by name.")


def refuse_stream(name: str, args: SFTConfig) -> None:
    """Reject a mixture with the stream `name` that cannot follow the run. Raises a `DataError`."""
    what = "A weight that changes, or dataset_max_tokens, is laid over the run"
    if args.mixes_over_the_run and args.max_steps < 1:
        raise DataError(f"{what}, and {name!r} is a stream, which has no known length. Set max_steps.")
    if args.mixes_over_the_run and args.dataloader_num_workers > 1:
        raise DataError(
            f"{what}, and of {name!r}, a stream, each of dataloader_num_workers={args.dataloader_num_workers} reads a "
            "part and does not know what the others gave. Set dataloader_num_workers to 1 or 0."
        )


def prepare_sets(
    dataset: Any,
    tokenizer: Any,
    args: SFTConfig,
    *,
    name: str = "train",
    packing: bool = False,
    formatting_func: Callable[[dict[str, Any]], Any] | None = None,
    limits: Mapping[str, int] | None = None,
    invocation: Sequence[int] = (),
    rows_per_step: int = 1,
) -> Prepared:
    """Prepare a dataset, or a dict of several by name, which are mixed. Raises a `DataError` as `prepare_dataset` and
    `mix_datasets`, or where a mixture with a stream cannot follow the run.

    Args:
        name: "train", or the name of an evaluation set. packing: whether its rows are packed.
        formatting_func, limits: as for `prepare_dataset`. invocation: of `Preparation`.
        rows_per_step: rows of an optimizer step, over all processes.
    """
    several = isinstance(dataset, Mapping)
    if name == "train" and not several:
        refuse_mixing(args)
    # The wrapped strategy cuts rows when packing, so they must stay whole before.
    max_length = None if packing and args.packing_strategy != "bfd" else args.max_length
    parts, reports = {}, {}
    for part, rows in dataset.items() if several else [(name, dataset)]:
        label = f"{name}/{part}" if several else name
        check_dataset(rows, f"{label}_dataset")
        if formatting_func is None:
            rows = layouts.canonical(rows, tokenizer, ("prompt_completion",), label)
        parts[str(part)], reports[label] = prepare_dataset(
            rows,
            tokenizer,
            **preparation_options(args) | {"max_length": max_length, "invocation": invocation},
            formatting_func=formatting_func,
            num_proc=args.dataset_num_proc,
            limits=limits,
            on_bad_rows=args.on_bad_rows,
            name=label,
        )
        if args.shuffle_dataset and name == "train":
            parts[str(part)] = shuffled(parts[str(part)], args.seed)
    done = Prepared(next(iter(parts.values())), reports)
    done.sources = tuple(parts) if several else ()
    capacity = (args.max_length if packing else None) or 0
    how = args.dataset_weights, args.dataset_weights_of == "tokens", args.dataset_max_tokens
    over_run = several and args.mixes_over_the_run
    rows = max(args.max_steps, 0) * rows_per_step if over_run else 0
    if streams := [part for part in parts if is_stream(parts[part])]:
        if several:
            refuse_stream(streams[0], args)
            pack = functools.partial(pack_columns, capacity=capacity, strategy=args.packing_strategy)
            done.dataset = MixedStream(parts, *how, rows or None, pack if capacity else None, capacity or 1)
        elif capacity:
            done.dataset = pack_stream(done.dataset, capacity, args.packing_strategy)
        return done

    def lay_out(epochs: float) -> None:
        if several:
            done.dataset, done.mixture = mix_datasets(parts, *how, args.seed, epochs)
        if capacity:
            stages = () if done.mixture is None else tuple(map(sum, done.mixture.stages))
            done.dataset = pack_dataset(done.dataset, capacity, args.packing_strategy, name, stages)

    lay_out(epochs := args.epochs_of_mixture if several else 1.0)
    for more in (0, 1, 2, 4, 8) if rows else ():  # a little more where the rows of the run pack more closely
        if len(done.dataset) < rows or (len(done.dataset) > rows and not more):
            lay_out(epochs := epochs * (rows + more) / len(done.dataset))
    if len(done.dataset) < rows and args.dataset_max_tokens:
        raise DataError(
            f"max_steps={args.max_steps} reads {rows:,} rows, and dataset_max_tokens leave {len(done.dataset):,}. "
            f"Raise them, leave one out, or set max_steps={len(done.dataset) // rows_per_step}."
        )
    return done


def prepare_dataset(
    dataset: Any,
    tokenizer: Any,
    *,
    num_proc: int | None = None,
    limits: Mapping[str, int] | None = None,
    on_bad_rows: str = "drop",
    name: str = "train",
    **options: Any,
) -> tuple[Any, DataReport]:
    """Tokenize and label a dataset. Returns what `prepare_rows` does, with the columns ``input_ids`` and ``labels``
    (-100 where not trained on), and the report. Raises a `DataError` as `prepare_rows`, or where the dataset has a
    transform.

    Args:
        dataset, num_proc, limits, on_bad_rows: as for `posttrain.lm.preparation.pipeline.prepare_rows`.
        tokenizer: or the processor that holds it.
        name: the dataset's, in the report.
        options: of `Preparation`.
    """
    import datasets

    prepare, report = Preparation(tokenizer, **options), DataReport(name)
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] == "custom":
        raise DataError(
            f"{name}: the dataset has a transform (set_transform or Dataset.with_transform()), which runs when "
            'a row is read. Apply it with dataset.map, or set dataset_kwargs={"skip_prepare_dataset": True} and let it '
            "return trainer-ready rows, with input_ids and labels."
        )
    how: dict[str, Any] = {"num_proc": num_proc, "limits": limits, "on_bad_rows": on_bad_rows}
    return prepare_rows(dataset, prepare, report, what="sft", **how), report


def check_ready(dataset: Any, name: str) -> None:
    """Reject rows with masks but no labels if preparation, which makes labels from masks, is skipped."""
    columns = columns_of(dataset)
    masks = sorted({"completion_mask", "assistant_masks"} & set(columns))
    if masks and "labels" not in columns:
        raise DataError(
            f"{name}: the rows have {' and '.join(masks)} but no labels, and skip_prepare_dataset=True skips the "
            "preparation that makes labels from masks, so every token would be trained on. Add a 'labels' column, "
            "-100 at tokens without a loss, or leave skip_prepare_dataset out."
        )


ENOUGH_ENDINGS = 0.5


@dataclass
class DataReport(TokenReport):
    """What became of the rows of a dataset.

    rows_kept: more than were read where rows are split. split: rows cut into several.
    tokens: of the kept rows. trained_tokens: those that the loss predicts.
    eos_share: share of kept rows whose last trained token ends a text or a turn; without it a model does not stop.
    doubled_bos: rows that began with bos twice; one was taken out.
    notes: further remarks, as sentences.
    """

    remedies: ClassVar[Mapping[str, str]] = {
        "after truncation": ": max_length cut off all trained tokens; raise it, or set truncation_mode or too_long",
        "longer than max_length": ": raise max_length, or set too_long=truncate or split",
    }

    split: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    ended: int = 0
    doubled_bos: int = 0
    cut: int = 0

    @property
    def eos_share(self) -> float:
        return self.ended / self.rows_kept if self.rows_kept else 0.0

    @property
    def notes(self) -> list[str]:
        notes = []
        if self.rows_kept and self.eos_share < ENOUGH_ENDINGS:
            notes.append(
                f"Only {self.eos_share:.0%} of the rows end in a trained end-of-sequence token: the model may not "
                "learn to stop. Check eos_token and max_length."
            )
        if self.doubled_bos:
            notes.append(f"{self.doubled_bos:,} rows began with the bos token twice; one of the two was taken out.")
        if self.cut:
            notes.append(
                f"In {self.cut:,} rows a token would have crossed the border between prompt and completion; they "
                "were tokenized separately, as in generation."
            )
        return notes

    def add(self, facts: Mapping[str, np.ndarray], lengths: Mapping[str, np.ndarray]) -> None:
        super().add(facts, lengths)
        self.rows_in += len(np.unique(facts["row"]))
        kept = facts["fault"] == ""
        tokens = lengths["input_ids"][kept]
        self.split += int(facts["split"].sum())
        self.tokens += int(tokens.sum())
        self.longest = max(self.longest, int(tokens.max(initial=0)))
        self.trained_tokens += int(facts["trained"][kept].sum())
        self.ended += int(facts["ends"][kept].sum())
        self.doubled_bos += int(facts["doubled_bos"].sum())
        self.cut += int(facts["cut"].sum())

    def lines(self) -> list[str]:
        """The report as sentences for the log."""
        share = self.trained_tokens / self.tokens if self.tokens else 0.0
        lines = [
            f"{self.name}: {self.rows_in:,} rows read, {self.rows_kept:,} kept, {self.tokens:,} tokens of which "
            f"{self.trained_tokens:,} ({share:.1%}) are trained on; longest {self.longest:,}, "
            f"{self.eos_share:.1%} end in a trained end token"
        ]
        if self.truncated:
            lines.append(f"  truncated to max_length: {self.truncated:,} rows")
        if self.split:
            lines.append(f"  split: {self.split:,} rows")
        return [*lines, *self.lines_of("dropped"), *(f"  note: {note}" for note in self.notes)]

    @property
    def is_wrong(self) -> bool:
        return bool(self.dropped or self.doubled_bos or (self.rows_kept and self.eos_share < ENOUGH_ENDINGS))

    def to_dict(self) -> dict[str, Any]:
        """All numbers, ready for JSON."""
        counts = {k: value for k, value in dataclasses.asdict(self).items() if k not in ("ended", "cut", "_logged")}
        return counts | {"eos_share": self.eos_share, "notes": self.notes}
