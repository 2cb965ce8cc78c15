"""A saved model is read back, as another program would, and compared with the one that was trained."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartForQuestionAnswering,
    BartForSequenceClassification,
    BartModel,
    BertConfig,
    PreTrainedModel,
)
from transformers.models.bert import modeling_bert

from posttrain.core import Trainer, TrainingArguments
from posttrain.core.checkpoint import reload, weights
from posttrain.core.errors import CheckpointError
from tests import tiny
from tests.contract.trainers import pad

LOGGER = "posttrain.core.checkpoint.reload"


class Forecaster(PreTrainedModel):
    """Of numbers: it names no embedding, as a model of time series. There, transformers raises NotImplementedError."""

    config_class = BertConfig

    def __init__(self, config):
        super().__init__(config)
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.post_init()

    def forward(self, x, labels=None):
        found = self.head(self.body(x).relu())[:, 0]
        return {"loss": (found - labels).square().mean(), "logits": found}


def trainer(folder, model=None, **changes):
    options = dict(max_steps=2, save_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1)
    args = TrainingArguments(str(folder), per_device_train_batch_size=2, **(options | changes))
    return Trainer(model or tiny.causal_lm(), args, pad, tiny.token_rows(8))


@pytest.fixture
def read(monkeypatch):
    """(folder, whether logits are compared) of each model that is read back."""
    found, check = [], reload.check

    def record(model, folder, state_dict=None, logits=True):
        found.append((str(folder).rpartition("/")[2].removeprefix(".tmp-"), logits))
        check(model, folder, state_dict, logits)

    monkeypatch.setattr(reload, "check", record)
    return found


def damaged(monkeypatch):
    """Every file of weights is written with a changed number."""
    write = weights.codec.write_tensors

    def change(tensors, *rest, **options):
        write({name: value + 1 for name, value in tensors.items()}, *rest, **options)

    monkeypatch.setattr(weights.codec, "write_tensors", change)


@pytest.mark.parametrize("tied", [False, True])
def test_the_first_checkpoint_and_the_final_model_are_read_back(tmp_path, read, caplog, tied):
    one = trainer(tmp_path, tiny.causal_lm(tie_word_embeddings=tied))
    with caplog.at_level(logging.INFO, LOGGER):
        one.train()
        one.save_model()
    assert [(name.startswith("checkpoint-1"), logits) for name, logits in read] == [(True, False), (False, True)]
    assert not [record for record in caplog.records if record.name == LOGGER and record.levelno >= logging.WARNING]
    assert "and logits that differ by 0 of their size at most" in caplog.text
    assert "checkpoint-1 was read back" in caplog.text and ".tmp-" not in caplog.text


@pytest.mark.parametrize(
    ("changes", "count"),
    [({"check_saved_model": False}, 0), ({"check_saved_model": True}, 1), ({"save_async": True}, 1)],
    ids=str,
)
def test_which_models_are_read_back(tmp_path, read, changes, count):
    one = trainer(tmp_path, **changes)
    one.train()
    one.save_model()
    assert len(read) == count


def test_where_memory_is_short_nothing_is_read_back(tmp_path, read, monkeypatch):
    monkeypatch.setattr(reload.memory, "free_memory", lambda: 1000)
    trainer(tmp_path).train()
    assert not read


class Plain(nn.Module):
    """A module that transformers knows nothing of."""

    def __init__(self):
        super().__init__()
        self.lm = tiny.causal_lm()

    def forward(self, input_ids, attention_mask=None, labels=None):
        return self.lm(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


@pytest.mark.parametrize("written", ["whole", "damaged"])
def test_messages_on_a_checkpoint_name_the_folder_that_stays(tmp_path, monkeypatch, caplog, written):
    if written == "damaged":
        damaged(monkeypatch)
    with caplog.at_level(logging.INFO, LOGGER):
        trainer(tmp_path, Plain()).train()
    assert f"{tmp_path}/checkpoint-1" in caplog.text and ".tmp-" not in caplog.text


@pytest.mark.parametrize("kind", ["transformers", "module"])
def test_a_difference_is_a_warning_or_as_asked_an_error(tmp_path, monkeypatch, caplog, kind):
    damaged(monkeypatch)
    one = trainer(tmp_path, Plain() if kind == "module" else None)
    one.save_model()
    said = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert len(said) == 1 and "is not the one that was trained: different: " in said[0]
    assert "check_saved_model=True makes this an error" in said[0]
    one.args.check_saved_model = True
    with pytest.raises(CheckpointError, match="is not the one that was trained: different: "):
        one.save_model()


def test_a_config_that_describes_another_model_shows_in_the_logits(tmp_path, caplog):
    one = trainer(tmp_path, check_saved_model=True)
    one.model.config.rms_norm_eps = 1.0  # the modules were made with another
    with pytest.raises(CheckpointError, match="its config does not describe what was trained"):
        one.save_model()


def test_reading_back_changes_no_number_of_the_run(tmp_path):
    model = tiny.causal_lm(attention_dropout=0.5)
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    before = torch.get_rng_state()
    model.save_pretrained(tmp_path)
    reload.check(model, tmp_path)
    assert torch.equal(before, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]


SMALL = dict(vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
HEADS = [
    (kind, BertConfig(**SMALL)) for kind in vars(modeling_bert).values() if isinstance(kind, type)
    and issubclass(kind, modeling_bert.BertPreTrainedModel) and kind is not modeling_bert.BertPreTrainedModel
] + [
    (kind, BartConfig(vocab_size=32, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                      decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, eos_token_id=7))
    for kind in (BartModel, BartForConditionalGeneration, BartForQuestionAnswering, BartForSequenceClassification)
]  # fmt: skip


@pytest.mark.parametrize(("kind", "config"), HEADS, ids=lambda value: getattr(value, "__name__", ""))
def test_models_with_any_head_are_read_back(tmp_path, caplog, kind, config):
    """The last token that is read is the end of a text (7), which Bart's classifier looks for."""
    torch.manual_seed(0)
    model = kind(config)
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, LOGGER):
        reload.check(model, tmp_path)
    compared = "logits that differ by 0 of their size" in caplog.text
    assert compared == (kind.__name__ != "BertForMultipleChoice"), caplog.text


def test_adapters_of_a_model_without_embeddings_are_saved_and_go_on(tmp_path):
    rows = [{"x": [0.1 * i, 1.0, -0.2 * i, 0.5], "labels": float(i)} for i in range(8)]
    args = TrainingArguments(str(tmp_path), max_steps=4, save_steps=2, use_cpu=True, report_to="none", logging_steps=1)
    torch.manual_seed(0)
    start = Forecaster(BertConfig()).state_dict()
    found = []
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        torch.manual_seed(1)  # of the adapters
        model = Forecaster(BertConfig())
        model.load_state_dict(start)
        run = Trainer(get_peft_model(model, LoraConfig(target_modules=["body"])), args, None, rows)
        run.train(resume_from_checkpoint=checkpoint)
        found.append([record["loss"] for record in run.state.log_history if "loss" in record])
    assert found[0] == found[1] and len(found[0]) == 4
    saved = load_file(tmp_path / "checkpoint-4" / "adapter_model.safetensors")
    assert {name.rpartition(".lora")[0] for name in saved} == {"base_model.model.body"}
