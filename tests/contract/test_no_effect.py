"""Arguments that once were accepted and ignored: each acts, or is refused or warned of by name."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from posttrain.cli import method, parse
from posttrain.cli.tools import launch
from posttrain.core import ModelConfig, Trainer, TrainingArguments, registry
from posttrain.core.errors import ConfigError
from posttrain.core.models import regularization
from posttrain.rl import CPOConfig, DPOConfig, KTOConfig, ORPOConfig, RewardConfig
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny
from tests.contract.trainers import text_rows

ROWS = [{"text": row["prompt"] + row["completion"]} for row in text_rows(12)]
QUIET = {
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
    "gradient_checkpointing": False,
}


def sft(folder, rows, **changes):
    args = SFTConfig(str(folder), **(QUIET | {"max_steps": 1, "max_length": 32} | changes))
    return SFTTrainer(tiny.causal_lm(), args, train_dataset=rows, processing_class=tiny.tokenizer())


@pytest.mark.parametrize("how", ["map", "list", "stream", "skipped", "packed stream"])
def test_shuffle_dataset_acts_on_every_kind_of_rows(how, tmp_path):
    changes = {"packing": how == "packed stream", "train_sampling_strategy": "sequential"}
    if how == "skipped":
        changes["dataset_kwargs"] = {"skip_prepare_dataset": True}

    def rows(shuffles):
        dataset = Dataset.from_list(ROWS) if how != "skipped" else [{**r, "labels": r["input_ids"]} for r in TOKENS]
        dataset = dataset.to_iterable_dataset() if "stream" in how else ROWS if how == "list" else dataset
        trained = sft(tmp_path, dataset, shuffle_dataset=shuffles, **changes).train_dataset
        return [list(row["input_ids"]) for row in trained]

    plain, mixed, again = rows(False), rows(True), rows(True)
    assert mixed == again != plain
    assert sorted(sum(mixed, [])) == sorted(sum(plain, []))


TOKENS = [{name: row[name] for name in ("input_ids",)} for row in tiny.token_rows(12)]


@pytest.mark.parametrize("config_class", [DPOConfig, KTOConfig, ORPOConfig, CPOConfig, RewardConfig])
def test_label_smoothing_factor_is_refused_where_there_are_no_classes(config_class):
    with pytest.raises(ConfigError, match=r"label_smoothing_factor=0.1 .* no effect") as caught:
        config_class("out", label_smoothing_factor=0.1)
    assert ("set label_smoothing" in str(caught.value)) == hasattr(config_class, "label_smoothing")


def test_logging_dir_is_where_tensorboard_writes(tmp_path):
    pytest.importorskip("tensorboard")
    args = TrainingArguments(
        str(tmp_path / "out"), report_to="tensorboard", logging_dir=str(tmp_path / "board"), max_steps=2,
        logging_steps=1, use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    Trainer(tiny.causal_lm(), args, train_dataset=tiny.token_rows(4)[:1] * 4).train()
    assert list((tmp_path / "board").glob("events.out.tfevents.*"))
    assert not list(Path(args.output_dir).rglob("events.out.tfevents.*"))


def test_logging_nan_inf_filter_is_answered_where_it_asks_for_something():
    with pytest.warns(FutureWarning, match="logging_nan_inf_filter has no effect: .*on_nonfinite"):
        TrainingArguments("out", logging_nan_inf_filter=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TrainingArguments("out", logging_nan_inf_filter=False)


def test_dataset_kwargs_that_do_nothing_are_named():
    with pytest.raises(ConfigError, match="'skip_prepare_datasett' has no effect.*did you mean 'skip_prepare_dataset'"):
        SFTConfig("out", dataset_kwargs={"skip_prepare_datasett": True})
    with pytest.warns(FutureWarning, match="'append_concat_token' has no effect: each row ends in its own eos token"):
        SFTConfig("out", dataset_kwargs={"append_concat_token": False})


def test_a_sampling_strategy_that_a_stream_cannot_follow_is_refused(tmp_path):
    stream = Dataset.from_list(tiny.token_rows(8)).to_iterable_dataset()
    args = TrainingArguments(str(tmp_path), max_steps=1, train_sampling_strategy="group_by_length", **QUIET)
    with pytest.raises(ConfigError, match="group_by_length.*no effect on a stream"):
        Trainer(tiny.causal_lm(), args, train_dataset=stream)
    with pytest.raises(ConfigError, match="group_by_length.*no effect on a stream"):
        sft(tmp_path, Dataset.from_list(ROWS).to_iterable_dataset(), train_sampling_strategy="group_by_length")


def test_the_launchers_dynamo_config_sets_torch_compile(monkeypatch):
    setting = parse.Setting("file:1", {"dynamo_backend": "AOT_EAGER", "dynamo_mode": "default"})
    args, _ = launch.read({"dynamo_config": setting})
    for name, value in launch.environment(args).items():
        monkeypatch.setenv(name, value)
    made = TrainingArguments("out")
    assert made.torch_compile and made.torch_compile_backend == "aot_eager" and made.torch_compile_mode is None
    assert TrainingArguments("out", torch_compile_backend="eager").torch_compile_backend == "eager"
    with pytest.raises(ConfigError, match="dynamo_use_fullgraph=.* has no effect"):
        launch.read({"dynamo_config": parse.Setting("file:1", {"dynamo_use_fullgraph": "true"})})


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_neftune_reaches_what_an_encoder_reads(family):
    model = tiny.seq2seq_lm() if family == "t5" else bart()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    regularization.disable_dropout(model)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([[9, 10, 1]])}
    model.train()
    plain = model(**inputs).encoder_last_hidden_state
    with regularization.neftune(model, 5.0):
        noisy = model(**inputs).encoder_last_hidden_state
    assert not torch.allclose(noisy, plain)
    assert torch.equal(model(**inputs).encoder_last_hidden_state, plain)


def bart():
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    small = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return BartForConditionalGeneration(
        BartConfig(vocab_size=64, d_model=16, max_position_embeddings=32, **small, **heads)
    )


@pytest.mark.parametrize(
    ("name", "value", "needs"),
    [("lora_r", 4, "use_peft"), ("use_dora", True, "use_peft"), ("bnb_4bit_quant_type", "fp4", "load_in_4bit")],
)
def test_arguments_of_an_adapter_are_warned_of_where_there_is_none_and_once(name, value, needs, tmp_path, capsys):
    with pytest.warns(UserWarning, match=f"{name}=.* has no effect without {needs}"):
        ModelConfig(**{name: value})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ModelConfig(**{name: value}, use_peft=True, **({} if needs == "use_peft" else {needs: True}))
    words = ["--model_name_or_path", str(tmp_path), "--dataset_name", str(tmp_path), f"--{name}", str(value)]
    method.read(registry.methods()["sft"], [*words, "--output_dir", str(tmp_path)])
    assert capsys.readouterr().err.count(f"has no effect without {needs}") == 1
