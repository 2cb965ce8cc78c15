"""Writes the model card of a trained model."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import logging
import math
import numbers
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.core.checkpoint.codec import read_json
from posttrain.core.checkpoint.manifest import RECORD
from posttrain.core.errors import CheckpointError
from posttrain.core.fields.redaction import is_secret, masked
from posttrain.core.files import write_text
from posttrain.core.hub.uploads import is_repo_id
from posttrain.core.models.wrapping import adapters_of, base_model, base_name, is_encoder_decoder, is_peft_model

logger = logging.getLogger(__name__)

MARK = "<!-- Written by posttrain. A card without this line is never overwritten. -->"
_PERFORMANCE = re.compile(
    r"(.*_)?(runtime|samples_per_second|steps_per_second|epoch|step|num_(input_tokens_seen|tokens))"
)
_MAX_ROWS = 20
_NOT_OF_MODELS = ("loss", "grad_norm", "learning_rate", "total_flos")
_COLUMNS = ("Epoch", "Step", "Training loss")

# Always in the table, in this order; other arguments only where they were changed.
_MAIN = """
    learning_rate per_device_train_batch_size gradient_accumulation_steps seed optim lr_scheduler_type warmup_steps
    weight_decay max_grad_norm num_train_epochs max_steps bf16 fp16
""".split()
# About the machine, the logs and the files of a run, not about the model.
_ASIDE = re.compile(
    r"(hub|logging|log|save|eval|dataloader|ddp|do|push|report|run|dataset_num_proc|include|torch_compile)(_.*)?"
    r"|.*(_dir|_token|_path|name_or_path)|project|disable_tqdm|use_cpu|remove_unused_columns|.*resume.*|restore_.*"
    r"|debug|accelerator_config|load_best_model_at_end|metric_for_best_model|greater_is_better|label_names|prediction_loss_only|local_rank"
)


#: {class of the arguments: (the method, its paper on arxiv.org)}.
METHODS = {
    "SFTConfig": ("supervised fine-tuning (SFT)", ""),
    "Seq2SeqConfig": ("sequence-to-sequence training", ""),
    "DPOConfig": ("DPO", "2305.18290"),
    "KTOConfig": ("KTO", "2402.01306"),
    "ORPOConfig": ("ORPO", "2403.07691"),
    "CPOConfig": ("CPO", "2401.08417"),
    "TPOConfig": ("TPO", "2405.16681"),
    "GMPOConfig": ("GMPO", "2507.20673"),
    "GRPOConfig": ("GRPO", "2402.03300"),
    "RewardConfig": ("reward modelling", "2203.02155"),
    "RLOOConfig": ("RLOO", "2402.14740"),
    "ReinforcePlusPlusConfig": ("REINFORCE++", "2501.03262"),
    "OnlineDPOConfig": ("online DPO", "2402.04792"),
    "GOLDConfig": ("general on-policy logit distillation (GOLD)", "2402.12030"),
    "IWOPDConfig": ("importance-weighted on-policy distillation", "2606.22600"),
    "SDFTConfig": ("self-distillation fine-tuning (SDFT)", "2601.19897"),
    "SDPOConfig": ("self-distillation policy optimization (SDPO)", "2601.20802"),
    "A2POConfig": ("A*-PO", "2505.20686"),
    "DistillationConfig": ("on-policy distillation", "2306.13649"),
}
CURVE = "training_loss.svg"


def method_of(args: Any) -> str | None:
    """How a run with these arguments trains, with its paper, as Markdown; None where it is not known."""
    for kind in type(args).__mro__:
        if kind.__name__ in METHODS:
            name, paper = METHODS[kind.__name__]
            return f"{name} ([paper](https://arxiv.org/abs/{paper}))" if paper else name
    return None


def hyperparameters(args: Any, world_size: int = 1, model: Any = None) -> dict[str, Any]:
    """The arguments of a run that make the model: the usual ones, those that differ from their defaults, and those of
    the adapters of `model`.
    """
    values = vars(args)
    table = {name: values[name] for name in _MAIN if name in values}
    for name, value in _changed(args).items():
        aside = name in table or _ASIDE.fullmatch(name) or is_secret(name)
        if not aside and isinstance(value, (str, int, float, list, tuple, dict)):
            table[name] = masked(value, name)
    if table.get("max_steps", -1) > 0:
        table.pop("num_train_epochs", None)
    table = {name: value for name, value in table.items() if value is not None and value is not False and value != -1}
    table |= adapter_arguments(model)
    rows = table.get("per_device_train_batch_size", 0) * table.get("gradient_accumulation_steps", 1) * world_size
    return table | ({"number of processes": world_size} if world_size > 1 else {}) | {"rows per update": rows}


_NOT_OF_ADAPTERS = ("peft_type", "task_type", "peft_version")


def adapter_arguments(model: Any) -> dict[str, Any]:
    """What the configs of the adapters of `model` set; of a model without adapters nothing."""
    found: dict[str, Any] = {}
    for config in adapters_of(model).values():
        kind = str(config.peft_type).rpartition(".")[2].lower()
        for name, value in _changed(config, ("r", "lora_alpha")).items():
            if not name.startswith("base_model_name") and name not in _NOT_OF_ADAPTERS and _is_plain(value):
                found[f"{kind}: {name}"] = ", ".join(sorted(value)) if isinstance(value, set) else value
    return found


def _changed(config: Any, always: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, and those in `always` that it has."""
    found = {}
    for field in dataclasses.fields(config):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if (value := vars(config).get(field.name)) != default or field.name in always:
            found[field.name] = value
    return found


def _is_plain(value: Any) -> bool:
    texts = isinstance(value, (set, list)) and all(isinstance(one, str) for one in value)
    return texts or isinstance(value, (str, int, float))


def framework_versions() -> dict[str, str]:
    """Versions of what this process has used of the libraries that a result depends on; posttrain's if installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["posttrain"] = importlib.metadata.version("posttrain-core")
    names = [n for n in ("torch", "transformers", "peft", "datasets", "tokenizers", "accelerate") if n in sys.modules]
    return found | {name: str(sys.modules[name].__version__) for name in names}


def model_card(
    model_name: str,
    *,
    log_history: Sequence[Mapping[str, Any]] = (),
    hyperparameters: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
    base_model: str | None = None,
    datasets: str | Iterable[str] | None = (),
    titles: str | Iterable[str] | None = (),
    dataset_args: str | Iterable[str] | None = (),
    method: str | None = None,
    language: str | list[str] | None = None,
    license: str | None = None,
    tags: str | Iterable[str] | None = (),
    tasks: str | Iterable[str] | None = (),
    library_name: str | None = "transformers",
    best_step: int | None = None,
    rows: Sequence[str] = (),
    hardware: Mapping[str, str] | None = None,
    curve: str | None = None,
    loading: str | None = None,
) -> str:
    """The card of a trained model: Markdown, with the Hub's metadata as YAML in front.

    Args:
        model_name: title of the card.
        log_history: the records of ``TrainerState.log_history``; its evaluations become the metrics and the table.
        hyperparameters, versions: tables to show, see the functions `hyperparameters` and `framework_versions`.
        base_model, datasets: names on the Hub; other names appear only in the text, not in the metadata.
        titles: what the text calls the datasets, one each; None: as they are named.
        dataset_args: the configuration of the datasets, such as ``"mrpc"`` of ``"glue"``.
        method: how it was trained, such as "SFT".
        tasks: the Hub's names of tasks, such as ``"text-generation"``.
        best_step: the optimizer step of the model's weights; None: that of the last evaluation.
        rows: what became of the rows, in lines. hardware: a table to show. curve: the file of a picture of the loss.
        loading: a Python program that loads the model.
    """
    datasets, tasks, part = names(datasets), names(tasks), ", ".join(names(dataset_args))
    titles = names(titles) or datasets
    places = datasets if len(datasets) == len(titles) else [""] * len(titles)
    records = results(log_history)
    evaluations = [row for row in records if any(name not in _COLUMNS for name in row)]
    best = [row for row in evaluations if best_step is not None and row.get("Step") == best_step]
    metrics = {k: v for k, v in (best or evaluations)[-1].items() if k not in _COLUMNS} if evaluations else {}
    metadata = {
        "library_name": library_name,
        "base_model": base_model if base_model and is_repo_id(base_model) else None,
        "datasets": [name for name in datasets if is_repo_id(name)],
        "language": language,
        "license": license,
        "pipeline_tag": tasks[0] if tasks else None,
        "tags": list(dict.fromkeys(["posttrain", "generated_from_trainer", *names(tags)])),
        "model-index": [{"name": model_name, "results": _index(metrics, datasets, titles, tasks, part)}],
    }
    import yaml

    kept = {name: value for name, value in metadata.items() if value not in (None, [])}
    front = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)
    origin = f"A fine-tuned version of {_link(base_model, '')}" if base_model else "A model trained from scratch"
    how = f" with {method}" if method else ""
    linked = [_link(name, "datasets/", title) for name, title in zip(places, titles, strict=True)]
    data = (f", on {', '.join(linked)}" + (f" ({part})" if part else "")) if linked else ""
    parts = [f"---\n{front}---\n{MARK}\n\n# {_cell(model_name)}\n", f"{origin}, trained{how}{data}.\n"]
    step = -(-len(records) // _MAX_ROWS)
    shown = records[::-1][:: step or 1][::-1]  # thinned from the end, so that the last one stays
    picture = f"![Training by optimizer step]({curve})\n\n" if curve else ""
    arguments = [{"Argument": f"`{name}`", "Value": value} for name, value in (hyperparameters or {}).items()]
    sections = {
        "## Usage": f"```python\n{loading}\n```\n" if loading else "",
        "## Evaluation": _table([{"Metric": name, "Value": value} for name, value in metrics.items()]),
        "## Training\n\n### Hyperparameters": _table(arguments),
        "### Data": "".join(f"- {_cell(line)}\n" for line in rows),
        "### Training results": f"{picture}{_table(shown)}{_at_the_end(log_history)}",
        "### Hardware": "".join(f"- {name}: {_cell(value)}\n" for name, value in (hardware or {}).items()),
        "### Framework versions": "".join(f"- {name} {value}\n" for name, value in (versions or {}).items()),
    }
    parts += [f"{title}\n\n{text}" for title, text in sections.items() if text]
    return "\n".join(parts)


def _at_the_end(log_history: Sequence[Mapping[str, Any]]) -> str:
    """A line of the last value of each metric of training, rewards among them; "" where nothing was logged."""
    last: dict[str, str] = {}
    for name, value in (metric for record in log_history for metric in record.items()):
        aside = _PERFORMANCE.fullmatch(name) or name in _NOT_OF_MODELS or name.startswith("eval_")
        if isinstance(value, numbers.Real) and not aside and ("/" not in name or name.startswith("rewards/")):
            last[name] = f"`{name}` {_cell(value)}"
    return f"\nAt the end of training: {', '.join(last.values())}.\n" if last else ""


def results(log_history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each evaluation: epoch, step, the last logged training loss, and the metrics by name.

    Without any evaluation, a row for each record of the training loss.
    """
    rows: dict[int | None, dict[str, Any]] = {}
    losses, last = [], {}
    for record in log_history:
        where = {"Epoch": record.get("epoch"), "Step": record.get("step")}
        if "loss" in record:
            last = {"Training loss": record["loss"]}
            losses.append(where | last)
        metrics = {
            name.removeprefix("eval_"): value
            for name, value in record.items()
            if name.startswith("eval_") and not _PERFORMANCE.fullmatch(name) and isinstance(value, numbers.Real)
        }
        if metrics:  # several evaluation sets leave a record each, at the same step
            row = rows.setdefault(record.get("step"), where | last)
            row |= {"Validation loss" if name == "loss" else name: value for name, value in metrics.items()}
    return list(rows.values()) or losses


def write_model_card(directory: str | Path, model_name: str | None = None, **fields: Any) -> Path | None:
    """Write the card into ``README.md`` of `directory`, in place of one written here before or a template left empty.
    Returns the file, or None if there is a card that a person wrote, which stays. Facts of the run that is recorded in
    the directory, and a picture of its loss, are added.

    Args:
        model_name: None: the name of the directory.
        fields: the arguments of `model_card`, `datasets` also as trl's ``dataset_name`` and transformers'
            ``dataset_tags``, and `titles` as its ``dataset``; `versions` defaults to those of this process.
    """
    path = Path(directory) / "README.md"
    if path.is_file():
        there = path.read_text(encoding="utf-8", errors="replace")
        if there.strip() and MARK not in there and there.count("[More Information Needed]") < 5:
            logger.info("%s was not written by posttrain; it is not changed.", path)
            return None
    for field, its in {"dataset_name": "datasets", "dataset_tags": "datasets", "dataset": "titles"}.items():
        given = fields.pop(field, None)
        fields[its] = fields.get(its) or given
    for field, value in _of_record(path.parent).items():
        fields[field] = fields.get(field) or value
    base = fields.get("base_model")
    if base and os.path.isdir(base):  # a local folder is no name on the Hub, even if it looks like one
        fields["base_model"] = os.path.join(".", Path(base).name)
    fields.setdefault("versions", framework_versions())
    path.parent.mkdir(parents=True, exist_ok=True)
    if picture := loss_picture(fields.get("log_history", ())):
        write_text(path.parent / CURVE, picture)
        fields["curve"] = CURVE
    write_text(path, model_card(model_name or path.parent.absolute().name, **fields))
    return path


def of_run(args: Any, model: Any, log_history: Sequence[Mapping[str, Any]], world_size: int) -> dict[str, Any]:
    """The fields of `write_model_card` that follow from a run of `model`."""
    return {
        "loading": _loading(args.hub_model_id or args.output_dir, model),
        "log_history": log_history,
        "base_model": base_name(model) or None,
        "hyperparameters": hyperparameters(args, world_size, model),
        "method": method_of(args),
        "library_name": "peft" if is_peft_model(model) else "transformers",
        "tags": names(getattr(base_model(model), "model_tags", None)),
    }


def _of_record(directory: Path) -> dict[str, Any]:
    """What the record of a run in `directory` adds to its card; nothing where there is none."""
    try:
        record = read_json(directory / RECORD)["starts"][-1]
    except (CheckpointError, KeyError, IndexError, TypeError):  # no record, or a damaged one, which its reader reports
        return {}
    settings = (record.get("asked") or {}).get("settings", {})
    return {
        "datasets": [name if not os.path.exists(name) else f"./{name}" for name in names(settings.get("dataset_name"))],
        "rows": [line for lines in (record.get("data_reports") or {}).values() for line in lines],
        "hardware": record.get("hardware"),
    }


def _loading(name: str, model: Any) -> str | None:
    """A program that loads `model`, or its adapter, by `name`."""
    whole = base_model(model)
    kind = type(whole).__name__
    if kind.endswith("ForCausalLM"):
        return (
            f'from transformers import pipeline\n\nwriter = pipeline("text-generation", "{name}")\n'
            'messages = [{"role": "user", "content": "Hello!"}]\n'
            'print(writer(messages, max_new_tokens=100)[0]["generated_text"])'
        )
    auto, given = "", f'"{name}"'
    if kind.endswith("ForSequenceClassification"):
        auto = "SequenceClassification"  # of an adapter, the base has a head of another size
        given += f", num_labels={whole.config.num_labels}" if is_peft_model(model) else ""
    elif is_encoder_decoder(whole):
        auto = "Seq2SeqLM"
    elif kind.endswith("ForConditionalGeneration"):
        auto = "ImageTextToText"
    load = f"from transformers import AutoModelFor{auto}\n\nmodel = AutoModelFor{auto}.from_pretrained({given})"
    return load if auto else None


def loss_picture(log_history: Sequence[Mapping[str, Any]], title: str | None = None) -> str | None:
    """The losses of training (line) and of evaluations (dashed) by optimizer step, as SVG; None of fewer than two. In
    online training the rewards.
    """
    width, height = 640, 240
    what = "reward" if any("reward" in record for record in log_history) else "loss"
    curves = [
        [(r["step"], r[key]) for r in log_history if isinstance(r.get(key), (int, float)) and math.isfinite(r[key])]
        for key in (what, f"eval_{what}")
    ]
    points = [point for curve in curves for point in curve]
    if len(curves[0]) < 2:
        return None
    (left, low), (right, high) = (tuple(edge(one) for one in zip(*points, strict=True)) for edge in (min, max))

    def place(point: tuple[float, float]) -> str:
        x = 60 + (point[0] - left) / ((right - left) or 1) * (width - 80)
        return f"{x:.1f},{20 + (high - point[1]) / ((high - low) or 1) * (height - 60):.1f}"

    text = '<text font-family="sans-serif" font-size="12" fill="#777"'
    lines = [
        f'<polyline fill="none" stroke="{color}" stroke-width="2" {dashes}points="{" ".join(map(place, curve))}"/>'
        for curve, color, dashes in zip(curves, ("#3b6fe0", "#e07b39"), ("", 'stroke-dasharray="6 4" '), strict=True)
        if curve
    ]
    legend = title or f"{what} by optimizer step" + ("; dashed: evaluation" if curves[1] else "")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            *lines,
            f'{text} x="4" y="24">{high:.4g}</text>',
            f'{text} x="4" y="{height - 36}">{low:.4g}</text>',
            f'{text} x="60" y="{height - 20}">{left}</text>',
            f'{text} x="{width - 20}" y="{height - 20}" text-anchor="end">{right}</text>',
            f'{text} x="{width / 2}" y="{height - 4}" text-anchor="middle">{legend}</text>',
            "</svg>",
            "",
        ]
    )


def _index(
    metrics: Mapping[str, float], datasets: list[str], titles: list[str], tasks: list[str], part: str
) -> list[dict[str, Any]]:
    """The results of a model-index; the Hub wants a task and a dataset with each."""
    values = [
        {"type": "loss" if name == "Validation loss" else name, "name": name, "value": float(value)}
        for name, value in metrics.items()
        if math.isfinite(value)
    ]
    task, dataset = tasks[0] if tasks else "text-generation", datasets[0] if datasets else "unknown"
    place = {"type": dataset if is_repo_id(dataset) else "unknown", "name": titles[0] if titles else dataset}
    place |= {"config": part} if part else {}
    return [{"task": {"type": task}, "dataset": place, "metrics": values}] if values else []


def names(value: str | Iterable[str] | None) -> list[str]:
    """One name, several or none, as a list."""
    return [value] if isinstance(value, str) else list(value or ())


def _link(name: str, kind: str, title: str = "") -> str:
    if is_repo_id(name):
        return f"[{_cell(title or name)}](https://huggingface.co/{kind}{name})"
    return _cell(title) if title and title != name else f"`{_cell(name)}`"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(name, "")) for name in columns] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) and not value.is_integer() else str(value)
    return " ".join(text.split()).replace("|", r"\|")
