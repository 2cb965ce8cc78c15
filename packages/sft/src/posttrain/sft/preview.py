"""Previews prepared rows without loading the model."""

from __future__ import annotations

from itertools import islice
from typing import Any

from posttrain.cli.tools import preview
from posttrain.core.registry import Run
from posttrain.lm.images.images import has_images
from posttrain.lm.loading import loading
from posttrain.lm.text import chat_template, layouts
from posttrain.sft import vision_preview
from posttrain.sft.dataset import prepare_sets
from posttrain.sft.mixture import named_sets


def of_run(run: Run, count: int) -> tuple[list[preview.Row], list[str]]:
    """The first `count` training rows of `run` and the lines of its data report, made as for training.

    Only the tokenizer is loaded, or the processor for rows with images. Tokens outside the model's vocabulary are found
    when the trainer is created.
    """
    config = run.config
    train_rows, _ = run.data.load()
    where = {"trust_remote_code": config.trust_remote_code, "revision": run.model.model_revision}
    if sees := has_images(train_rows):
        where["auto_class"] = loading.SEEING[1]
    tokenizer = loading.load_tokenizer(run.model.model_name_or_path, **where)
    chat_template.set_up_tokenizer(tokenizer, config)
    if sees:
        return vision_preview.first_rows(train_rows, tokenizer, run, count)
    done = prepare_sets(train_rows, tokenizer, config, packing=config.packing)
    rows = [
        show_row(row, number, tokenizer, done.sources) for number, row in enumerate(islice(iter(done.dataset), count))
    ]
    lines = [line for report in done.reports.values() for line in report.lines()]
    for name, part in reversed(named_sets(train_rows, "train")):
        if reading := layouts.how_read(part, tokenizer, ("prompt_completion",)):
            lines.insert(0, f"{name}: {reading}")
    if done.mixture is not None:
        lines += ["train: a mixture", *done.mixture.lines()]
    if config.packing:
        lines.append(f"train: packed into {len(done.dataset):,} rows of {config.max_length:,} tokens at most")
    return rows, lines


def show_row(row: dict[str, Any], number: int, tokenizer: Any, sources: tuple[str, ...] = ()) -> preview.Row:
    """One prepared row, packed or not. `sources`: the names of mixed datasets."""
    lengths = row.get("seq_lengths") or [len(row["input_ids"])]
    of = row.get("sources") or ([row["source"]] if "source" in row else [])
    documents, start = [], 0
    for i, length in enumerate(lengths):
        ids, labels = (row[name][start : start + length] for name in ("input_ids", "labels"))
        trained = sum(label != -100 for label in labels[1:])
        source = f"{sources[of[i]]}, " if of else ""
        title = f"document {i + 1}: {source}{length} tokens, {trained} trained on"
        documents.append(preview.Document(title, preview.cells_of(ids, labels, tokenizer)))
        start += length
    title = (
        documents[0].title.partition(": ")[2] if len(documents) == 1 else f"{len(documents)} documents, {start} tokens"
    )
    return preview.Row(f"row {number}: {title}", documents)
