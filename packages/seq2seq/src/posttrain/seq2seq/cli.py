"""The command ``posttrain seq2seq``."""

from __future__ import annotations

from typing import Any

from posttrain.cli.source import sets_for, train_and_save
from posttrain.core.registry import Method, Run


def run(run: Run) -> None:
    """Train as configured and save the final model and its tokenizer in ``output_dir``. Raises a `DataError` before the
    model is loaded, if evaluations are configured without an evaluation dataset.
    """
    from posttrain.core.models import special_tokens
    from posttrain.lm.loading import adapters, loading
    from posttrain.seq2seq.dataset import tokenize
    from posttrain.seq2seq.metrics import text_metrics
    from posttrain.seq2seq.trainer import Seq2SeqTrainer

    config, options = run.config, run.model
    train_rows, eval_rows = sets_for(run)
    model = load_model(options)
    tokenizer = loading.load_tokenizer(options.model_name_or_path, revision=options.model_revision)
    special_tokens.ensure_pad_token(tokenizer)
    if (adapter := options.peft_config()) is not None:
        model = adapters.add_adapter(model, adapter)
    text = {"prefix": config.source_prefix, "max_source_length": config.max_source_length}
    text |= {"max_target_length": config.max_target_length, "on_bad_rows": config.on_bad_rows}
    columns = (config.source_column, config.target_column)
    trainer = Seq2SeqTrainer(
        model=model,
        args=config,
        train_dataset=tokenize(train_rows, tokenizer, *columns, **text),
        eval_dataset=None if eval_rows is None else tokenize(eval_rows, tokenizer, *columns, **text, name="eval"),
        processing_class=tokenizer,
        compute_metrics=text_metrics(tokenizer, config.text_metrics) if config.predict_with_generate else None,
    )
    train_and_save(trainer, run.keeps_model)


def load_model(options: Any) -> Any:
    """The model of a `posttrain.lm.loading.arguments.ModelConfig`: with an encoder where it has one, else a causal
    one.
    """
    from posttrain.lm.loading import loading

    name, kwargs = options.model_name_or_path, options.model_init_kwargs()
    encodes = loading.config_of(name, kwargs).is_encoder_decoder
    auto = "AutoModelForSeq2SeqLM" if encodes else "AutoModelForCausalLM"
    return loading.load_causal_lm(name, kwargs, options.quantization_config(), auto_class=auto)


def workload(run: Run, length: int | None) -> Any:
    """The shape of a micro-batch of `run`: sources and targets of maximum length."""
    from posttrain.cli.tools.workload import Workload, load_config, rows_of

    config, encodes = run.config, load_config(run).is_encoder_decoder
    size = length or config.max_source_length
    return Workload(
        rows_of(config, size),
        size if encodes else size + config.max_target_length,
        target_length=config.max_target_length if encodes else None,
        auto_class="AutoModelForSeq2SeqLM" if encodes else "AutoModelForCausalLM",
    )


METHOD = Method(
    name="seq2seq",
    help="Train on pairs of source and target text; evaluate generated texts with BLEU, chrF or ROUGE.",
    config="posttrain.seq2seq.arguments:Seq2SeqConfig",
    run=run,
    workload=workload,
)
