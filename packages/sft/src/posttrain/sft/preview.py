"""Previews prepared rows without loading the model; of each image its size, its tokens and a small copy."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from types import SimpleNamespace
from typing import Any

from posttrain.cli.tools import preview
from posttrain.core.data.pipeline import has_length
from posttrain.core.registry import Run
from posttrain.lm.images.images import ROW_NUMBER, Video, described, has_images, read_images
from posttrain.lm.images.vision import VisionProcessor, place_images
from posttrain.lm.loading import loading
from posttrain.lm.preparation.pipeline import counts_of
from posttrain.lm.text import chat_template, layouts
from posttrain.sft.dataset import DataReport, prepare_sets
from posttrain.sft.mixture import named_sets
from posttrain.sft.rows import Draft
from posttrain.sft.vision import PACKED, TALKS, VisionPreparation, check_config, preparation, ready_rows


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
        return first_rows(train_rows, tokenizer, run, count)
    step = config.per_device_train_batch_size * config.gradient_accumulation_steps
    done = prepare_sets(train_rows, tokenizer, config, packing=config.packing, rows_per_step=step)
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
    return _shown(f"row {number}", documents, f", {start} tokens")


def first_rows(dataset: Any, processor: Any, run: Run, count: int) -> tuple[list[preview.Row], list[str]]:
    """The first `count` rows of `dataset` as training reads them, and the lines of their data report.

    Rows with images are prepared while batches are made, so only these are here. With packing, the lengths of all are
    measured.
    """
    config = run.config
    check_config(config, processor)
    model, where = run.model.model_name_or_path, {"revision": run.model.model_revision}
    holder = SimpleNamespace(config=loading.config_of(model, where, config.trust_remote_code))  # and no weights
    prepare = preparation(VisionProcessor(processor, holder), config)
    rows = ready_rows(dataset, config, prepare, config.packing)
    is_sized = has_length(rows)
    first = [rows[i] for i in range(min(count, len(rows)))] if is_sized else list(islice(iter(rows), count))
    report, shown = DataReport("train"), []
    for number, row in enumerate(first):
        parts = {part.get(ROW_NUMBER, number): part for part in row.get(PACKED, [row])}
        by_number = {n: {k: v for k, v in part.items() if k != ROW_NUMBER} for n, part in parts.items()}
        drafts = prepare(list(by_number.values()), list(by_number))
        report.add(**counts_of(drafts, prepare))
        documents = [_document(draft, by_number[draft.row], prepare) for draft in drafts if not draft.fault]
        if documents:
            shown.append(_shown(f"row {number if PACKED in row else next(iter(by_number))}", documents))
    kind = f"packed rows of {config.max_length:,} tokens at most" if config.packing else "rows"
    number_of = f"{len(rows):,} " if is_sized else ""
    lines = [f"train: {number_of}{kind}, which are prepared while batches are made. Of the first {len(first):,}:"]
    return shown, lines + report.lines()


def _document(draft: Draft, row: Mapping[str, Any], prepare: VisionPreparation) -> preview.Document:
    """One prepared row, whose images are read once more."""
    title = f"row {draft.row}: {len(draft.ids):,} tokens, {draft.trained:,} trained on"
    cells = preview.cells_of(draft.ids.tolist(), draft.labels.tolist(), prepare.tokenizer)
    _, values = place_images(row, TALKS)
    texts = [draft.shown.text[first:last] for _, (first, last) in draft.shown.places]
    tokens = map(len, prepare.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else ())
    pictures = []
    for place, (shown, count, value) in enumerate(
        zip(read_images(values, prepare.reader), tokens, values, strict=True), start=1
    ):
        caption = f"image {place}: {described(value, shown)}, {count:,} tokens"
        pictures.append(preview.picture(shown.frames[0] if isinstance(shown, Video) else shown, caption))
    return preview.Document(title, preview.joined(cells, draft.shown.ids), pictures)


def _shown(title: str, documents: list[preview.Document], more: str = "") -> preview.Row:
    what = documents[0].title.partition(": ")[2] if len(documents) == 1 else f"{len(documents)} documents{more}"
    return preview.Row(f"{title}: {what}", documents)
