"""``posttrain sft``: supervised fine-tuning from the command line."""

from __future__ import annotations

import dataclasses
from typing import Any

from posttrain.core.errors import DataError
from posttrain.core.registry import Method, Run


def run(run: Run) -> None:
    """Train as `run` says, and leave the final model and its tokenizer in ``output_dir``.

    Raises:
        DataError: before the model is loaded, where evaluations are asked for and there is nothing to evaluate on.
    """
    from posttrain.sft.trainer import SFTTrainer

    config, model = run.config, run.model
    train_rows, eval_rows = run.data.load()
    if config.eval_strategy != "no" and eval_rows is None:
        raise DataError(
            f"eval_strategy={str(config.eval_strategy)!r} asks for evaluations and there is nothing to evaluate on: the "
            f"dataset has no split {run.data.dataset_test_split!r}. Set eval_dataset_name or eval_share, "
            "or eval_strategy=no."
        )
    extra = config.model_init_kwargs if isinstance(config.model_init_kwargs, dict) else {}
    # On a command line "true" stands for the newest checkpoint and "false" for none; anything else is a path.
    resume = {"true": True, "false": None}.get(
        str(config.resume_from_checkpoint).lower(), config.resume_from_checkpoint
    )
    trainer = SFTTrainer(
        model=model.model_name_or_path,
        args=dataclasses.replace(
            config, model_init_kwargs=model.model_init_kwargs() | extra, resume_from_checkpoint=None
        ),
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        peft_config=model.peft_config(),
        quantization_config=model.quantization_config(),
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()


def preview(run: Run, count: int) -> tuple[list[Any], list[str]]:
    """What `run` would be trained on; see `posttrain.sft.preview`."""
    from posttrain.sft.preview import of_run

    return of_run(run, count)


METHOD = Method(
    name="sft",
    help="Fine-tune on examples: text, prompt and completion, or conversations.",
    config="posttrain.sft.config:SFTConfig",
    run=run,
    preview=preview,
)
