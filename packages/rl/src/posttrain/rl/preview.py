"""Previews preferences and prompts in the tokens that training makes of them, without loading the model."""

from __future__ import annotations

from itertools import islice
from typing import Any

from posttrain.cli.tools import preview
from posttrain.core.errors import ConfigError
from posttrain.core.registry import Run
from posttrain.lm.images.images import has_images
from posttrain.lm.loading import loading
from posttrain.lm.text import chat_template, layouts
from posttrain.rl.preference.data import prepare_preferences
from posttrain.rl.preference.rows import COMPLETIONS, preparation_options
from posttrain.rl.samples.prompts import check_prompts
from posttrain.rl.samples.rendered import codec_of


def of_preferences(run: Run, count: int, kind: str) -> tuple[list[preview.Row], list[str]]:
    """The first rows of `run` and the lines of its data report: each completion after its prompt. What the loss scores
    counts as trained on. The `kind` is as for `prepare_preferences`.
    """
    config, (rows, tokenizer) = run.config, _load(run)
    dataset, report = prepare_preferences(
        rows, tokenizer, kind=kind, num_proc=config.dataset_num_proc, **preparation_options(config)
    )
    shown = [_completions(row, number, tokenizer, kind) for number, row in enumerate(islice(iter(dataset), count))]
    reading = layouts.how_read(rows, tokenizer, (kind, *layouts.PAIRED))
    return shown, [*([f"train: {reading}"] if reading else []), *report.lines()]


def of_prompts(run: Run, count: int) -> tuple[list[preview.Row], list[str]]:
    """The first prompts of `run` as the policy reads them, without tools that only the trainer knows."""
    rows, tokenizer = _load(run)
    reading = layouts.how_read(rows, tokenizer, ("prompt_only",))
    rows = layouts.canonical(rows, tokenizer, ("prompt_only",))
    check_prompts(rows, "train_dataset")
    codec, shown = codec_of(tokenizer, run.config), []
    for number, row in enumerate(islice(iter(rows), count)):
        ids = codec.encode(row["prompt"])
        cells = preview.cells_of(ids, [-100] * len(ids), tokenizer)
        shown.append(preview.Row(f"prompt {number}: {len(ids)} tokens", [preview.Document("prompt", cells)]))
    lines = [f"train: {reading}"] if reading else []
    return shown, [*lines, "train: prompts. The policy completes them, and is trained on what it writes."]


def _load(run: Run) -> tuple[Any, Any]:
    """The training rows of `run`, and the tokenizer as training sets it up."""
    rows, _ = run.data.load()
    if has_images(rows):
        raise ConfigError("posttrain preview", ["rows with images are shown for sft alone"])
    where = {"trust_remote_code": run.config.trust_remote_code, "revision": run.model.model_revision}
    tokenizer = loading.load_tokenizer(run.model.model_name_or_path, **where)
    chat_template.set_up_tokenizer(tokenizer, run.config)
    return rows, tokenizer


def _completions(row: dict[str, Any], number: int, tokenizer: Any, kind: str) -> preview.Row:
    prompt, documents = list(row["prompt_ids"]), []
    for name in COMPLETIONS[kind]:
        ids = list(row[f"{name}_ids"])
        cells = preview.cells_of([*prompt, *ids], [-100] * len(prompt) + ids, tokenizer)
        verdict = {True: ", good", False: ", bad"}[row["label"]] if "label" in row else ""
        title = f"{name}{verdict}: {len(prompt) + len(ids)} tokens, {len(ids)} scored"
        documents.append(preview.Document(title, cells))
    only = f": {documents[0].title}" if len(documents) == 1 else ""
    return preview.Row(f"row {number}{only}", documents)
