"""The command ``posttrain sft``."""

from __future__ import annotations

import dataclasses
from typing import Any

from posttrain.cli.source import sets_for, train
from posttrain.core.errors import ConfigError
from posttrain.core.registry import Method, Run


def run(run: Run) -> None:
    """Train as configured and save the final model and its tokenizer in ``output_dir``. Raises a `DataError` before the
    model is loaded, if evaluations are configured without an evaluation dataset.
    """
    from posttrain.sft.trainer import SFTTrainer

    run = dataclasses.replace(run, config=with_mixture(run))
    train(run, SFTTrainer, *sets_for(run))


def with_mixture(run: Run) -> Any:
    """The config of `run`, with the weights and budgets that its mixture of datasets was given. Raises a `ConfigError`
    where the config gives others.
    """
    config = run.config
    asked = {
        "dataset_weights": ("weights", run.data.weights()),
        "dataset_max_tokens": ("max_tokens", run.data.budgets()),
    }
    for field, (what, of_parts) in asked.items():
        own = vars(config)[field]
        if of_parts and own not in (None, of_parts):
            raise ConfigError("posttrain sft", [f"{field} and the {what} in dataset_mixture are both set; keep one"])
        config = dataclasses.replace(config, **{field: of_parts or own})
    return config


def preview(run: Run, count: int) -> tuple[list[Any], list[str]]:
    """What `run` would be trained on; see `posttrain.sft.preview`."""
    from posttrain.sft.preview import of_run

    return of_run(dataclasses.replace(run, config=with_mixture(run)), count)


def workload(run: Run, length: int | None) -> Any:
    """The shape of a micro-batch of `run`: rows of maximum length, each position with a target."""
    from posttrain.cli.tools.workload import Workload, longest_row, rows_of

    longest = longest_row(length, run.config.max_length)
    return Workload(rows_of(run.config, longest), longest, "tokens")


METHOD = Method(
    name="sft",
    help="Fine-tune on examples: text, prompt and completion, or conversations.",
    config="posttrain.sft.config:SFTConfig",
    run=run,
    needs=("model_name_or_path", "dataset_name|dataset_mixture|datasets"),
    preview=preview,
    workload=workload,
)
