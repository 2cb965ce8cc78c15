"""Previews rows with images: what is trained on, and of each image its size, its tokens and a small copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

from posttrain.cli.tools import preview
from posttrain.core.registry import Run
from posttrain.lm.images.images import ROW_NUMBER, Video, described, read_images
from posttrain.lm.images.vision import VisionProcessor, place_images
from posttrain.lm.preparation.pipeline import counts_of
from posttrain.sft.report import DataReport
from posttrain.sft.rows import Draft
from posttrain.sft.vision import PACKED, TALKS, VisionDraft, VisionPreparation, check_config, preparation
from posttrain.sft.vision_packing import ready_rows


def first_rows(dataset: Any, processor: Any, run: Run, count: int) -> tuple[list[preview.Row], list[str]]:
    """The first `count` rows of `dataset` as training reads them, and the lines of their data report.

    Rows with images are prepared while batches are made, so only these are here. With packing, the lengths of all are
    measured.
    """
    config = run.config
    check_config(config, processor)
    prepare = preparation(VisionProcessor(processor, _config_of(run)), config)
    rows = ready_rows(dataset, config, prepare, config.packing)
    is_sized = hasattr(rows, "__len__")
    first = [rows[i] for i in range(min(count, len(rows)))] if is_sized else list(islice(iter(rows), count))
    report, shown = DataReport("train"), []
    for number, row in enumerate(first):
        by_number = {part.get(ROW_NUMBER, number): _bare(part) for part in row.get(PACKED, [row])}
        drafts = prepare(list(by_number.values()), list(by_number))
        report.add(**counts_of(drafts, prepare))
        documents = [_document(draft, by_number[draft.row], prepare) for draft in drafts if not draft.fault]
        if documents:
            shown.append(_shown(f"row {number if PACKED in row else next(iter(by_number))}", documents))
    kind = f"packed rows of {config.max_length:,} tokens at most" if config.packing else "rows"
    number_of = f"{len(rows):,} " if is_sized else ""
    lines = [f"train: {number_of}{kind}, which are prepared while batches are made. Of the first {len(first):,}:"]
    return shown, lines + report.lines()


def _config_of(run: Run) -> Any:
    """What has the config of the model of `run`, and no weights."""
    from transformers import AutoConfig

    where = {"trust_remote_code": run.config.trust_remote_code, "revision": run.model.model_revision}
    return SimpleNamespace(config=AutoConfig.from_pretrained(run.model.model_name_or_path, **where))


def _bare(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != ROW_NUMBER}


def _document(draft: Draft, row: Mapping[str, Any], prepare: VisionPreparation) -> preview.Document:
    """One prepared row, whose images are read once more."""
    title = f"row {draft.row}: {len(draft.ids):,} tokens, {draft.trained:,} trained on"
    cells = preview.cells_of(draft.ids.tolist(), draft.labels.tolist(), prepare.tokenizer)
    if not isinstance(draft, VisionDraft):
        return preview.Document(title, cells)
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


def _shown(title: str, documents: Sequence[preview.Document]) -> preview.Row:
    if len(documents) == 1:
        return preview.Row(f"{title}: {documents[0].title.partition(': ')[2]}", list(documents))
    return preview.Row(f"{title}: {len(documents)} documents", list(documents))
