"""Every kind of adapter that `SFTTrainer` trains: what is trained, what a checkpoint holds, and that a run goes on
exactly.
"""

import json

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel

from posttrain.core.checkpoint import codec, weights
from posttrain.core.errors import UnsavedError
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny

ROWS = [{"prompt": text[:30], "completion": text[30:60]} for text in tiny.CORPUS] * 2
LM = {"task_type": "CAUSAL_LM"}
LORA = LM | {"r": 4, "target_modules": ["q_proj", "v_proj"]}
KINDS = {
    "lora": lambda: LoraConfig(**LORA),
    "lora-everywhere": lambda: LoraConfig(**LM, r=4, target_modules="all-linear", bias="lora_only"),
    "lora-dropout": lambda: LoraConfig(**LORA, lora_dropout=0.2),
    "dora": lambda: LoraConfig(**LORA, use_dora=True),
    "rslora": lambda: LoraConfig(**LORA, use_rslora=True),
    "head-saved-whole": lambda: LoraConfig(**LORA, modules_to_save=["lm_head"]),
    "head-and-embedding-saved-whole": lambda: LoraConfig(**LORA, modules_to_save=["lm_head", "embed_tokens"]),
    "new-tokens": lambda: LoraConfig(**LORA, trainable_token_indices=[380, 381]),
    "lora-on-the-head": lambda: LoraConfig(**LM, r=4, target_modules=["q_proj", "lm_head"]),
    "ia3": lambda: peft.IA3Config(**LM, target_modules=["k_proj", "v_proj"], feedforward_modules=[]),
    "prompt-tuning": lambda: peft.PromptTuningConfig(**LM, num_virtual_tokens=5),
    "p-tuning": lambda: peft.PromptEncoderConfig(**LM, num_virtual_tokens=5, encoder_hidden_size=16),
    "prefix-tuning": lambda: peft.PrefixTuningConfig(**LM, num_virtual_tokens=5),
    "projected-prefix-tuning": lambda: peft.PrefixTuningConfig(
        **LM, num_virtual_tokens=5, prefix_projection=True, encoder_hidden_size=16
    ),
}
NEW_TOKENS = torch.tensor([[5, 380, 9, 381, 12, 7]])


def make(out, kind, tied=False, model=None, **changes):
    usual = dict(
        output_dir=str(out), per_device_train_batch_size=4, max_steps=4, learning_rate=1e-2, logging_steps=1,
        max_length=64, save_steps=1, report_to="none", use_cpu=True, disable_tqdm=True,
        gradient_checkpointing="prefix" not in (kind or ""),
    )  # fmt: skip
    model = tiny.causal_lm(tie_word_embeddings=tied) if model is None else model
    torch.manual_seed(1)
    return SFTTrainer(
        model=model,
        args=SFTConfig(**(usual | changes)),
        train_dataset=ROWS,
        processing_class=tiny.tokenizer(),
        peft_config=KINDS[kind]() if kind else None,
    )


def losses(trainer):
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def logits(model, ids=NEW_TOKENS):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def differing(left, right):
    expected = right.state_dict()
    return [name for name, value in left.state_dict().items() if not torch.equal(value, expected[name])]


@pytest.mark.rotated
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_trained_saved_alone_resumed_to_the_bit_and_read_by_peft(kind, tied, tmp_path):
    straight = make(tmp_path, kind, tied)
    before = {name: value.clone() for name, value in straight.model.named_parameters()}
    straight.train()
    trained = {name for name, parameter in straight.model.named_parameters() if parameter.requires_grad}
    changed = {name for name, value in straight.model.named_parameters() if not torch.equal(value, before[name])}
    if kind == "new-tokens" and not tied:  # which no row holds; of a tied embedding they are learned as outputs too
        trained = {name for name in trained if "trainable_tokens" not in name}
    assert changed == trained and trained
    assert losses(straight)[-1] < losses(straight)[0]

    resumed = make(tmp_path, kind, tied)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert differing(resumed.model, straight.model) == [] and losses(resumed) == losses(straight)

    checkpoint = tmp_path / "checkpoint-4"
    saved = codec.read_tensors(checkpoint / "adapter_model.safetensors")
    assert not (checkpoint / "model.safetensors").exists()
    assert sum(t.numel() for t in saved.values()) < sum(p.numel() for p in before.values()) / 2
    assert not any("embed_tokens" in name or "lm_head" in name for name in saved) or "head" in kind or "new" in kind
    loaded = PeftModel.from_pretrained(tiny.causal_lm(tie_word_embeddings=tied), checkpoint)
    assert torch.equal(logits(loaded), logits(straight.model))
    assert not torch.equal(logits(loaded)[:, -6:], logits(tiny.causal_lm(tie_word_embeddings=tied)))


def test_a_model_that_has_an_adapter_already_is_trained_on_and_resumed_to_the_bit(tmp_path):
    def adapted():
        torch.manual_seed(3)
        model = peft.get_peft_model(tiny.causal_lm(), LoraConfig(**LORA, init_lora_weights=False))
        return model

    straight = make(tmp_path, None, model=adapted())
    straight.train()
    resumed = make(tmp_path, None, model=adapted())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert differing(resumed.model, straight.model) == [] and losses(resumed) == losses(straight)
    loaded = PeftModel.from_pretrained(tiny.causal_lm(), tmp_path / "checkpoint-4")
    assert torch.equal(logits(loaded), logits(straight.model))


def test_an_adapter_that_was_saved_is_trained_further(tmp_path):
    make(tmp_path / "first", "lora").train()
    saved = tmp_path / "first" / "checkpoint-4"
    again = make(tmp_path, None, model=PeftModel.from_pretrained(tiny.causal_lm(), saved, is_trainable=True))
    expected = codec.read_tensors(saved / "adapter_model.safetensors")
    first = {name.replace(".default", ""): p.clone() for name, p in again.model.named_parameters() if p.requires_grad}
    assert first.keys() == expected.keys() and all(torch.equal(value, expected[name]) for name, value in first.items())
    again.train()
    assert all(
        not torch.equal(p, first[n.replace(".default", "")])
        for n, p in again.model.named_parameters()
        if p.requires_grad
    )


def test_an_adapter_that_was_loaded_to_be_read_alone_is_refused_with_the_remedy(tmp_path):
    make(tmp_path / "first", "lora", max_steps=1).train()
    frozen = PeftModel.from_pretrained(tiny.causal_lm(), tmp_path / "first" / "checkpoint-1")
    with pytest.raises(ValueError, match="is_trainable=True"):
        make(tmp_path, None, model=frozen)


def test_rows_of_new_tokens_alone_are_trained_and_reach_a_reader(tmp_path):
    trainer = make(tmp_path, "new-tokens")
    tokens = {name: p for name, p in trainer.model.named_parameters() if "trainable_tokens" in name}
    assert [tuple(p.shape) for p in tokens.values() if p.requires_grad] == [(2, 32)]
    rows = [{"input_ids": [5, 380, 9, 381, 12, 7]}] * 4
    trainer = SFTTrainer(
        model=tiny.causal_lm(), args=trainer.args, train_dataset=rows, processing_class=tiny.tokenizer(),
        peft_config=KINDS["new-tokens"](),
    )  # fmt: skip
    trainer.train()
    loaded = PeftModel.from_pretrained(tiny.causal_lm(), tmp_path / "checkpoint-4")
    embeddings = loaded.get_input_embeddings()
    own = embeddings(torch.arange(384)) - tiny.causal_lm().get_input_embeddings().weight
    assert own.abs().sum(1).nonzero().flatten().tolist() == [380, 381]
    assert torch.equal(logits(loaded), logits(trainer.model))


def test_the_first_checkpoint_and_no_other_is_read_back(tmp_path, monkeypatch):
    read, compare = [], weights.check_adapters
    monkeypatch.setattr(
        weights, "check_adapters", lambda model, folder, *rest: (read.append(folder), compare(model, folder, *rest))
    )
    make(tmp_path, "lora", max_steps=3).train()
    assert len(read) == 1 and "checkpoint-1" in str(read[0])


def test_no_checkpoint_is_there_of_an_adapter_that_was_not_saved_as_it_is(tmp_path, monkeypatch, caplog):
    write = peft.peft_model.safe_save_file

    def forget(tensors, *rest, **options):
        write({name: torch.zeros_like(value) for name, value in tensors.items()}, *rest, **options)

    monkeypatch.setattr(peft.peft_model, "safe_save_file", forget)
    with pytest.raises(UnsavedError, match="checkpoint-2 is not there"):
        make(tmp_path, "lora", max_steps=2).train()
    assert "does not hold what the adapter 'default' holds in memory" in caplog.text
    assert list(tmp_path.glob("checkpoint-*")) == []


@pytest.mark.parametrize("changes", [{"packing": True}, {"padding_free": True}], ids=str)
def test_virtual_tokens_and_several_documents_in_a_row_are_refused(changes, tmp_path):
    with pytest.raises(ValueError, match="only the first of several documents would see them. Set packing=False"):
        make(tmp_path, "prompt-tuning", **changes)


def test_a_prefix_and_recomputed_layers_are_refused_with_what_to_set(tmp_path):
    with pytest.raises(ValueError, match="PREFIX_TUNING .* Set gradient_checkpointing=False"):
        make(tmp_path, "prefix-tuning", gradient_checkpointing=True)


def test_the_adapters_config_names_the_base_and_the_tokenizer_lies_beside_it(tmp_path):
    tiny.causal_lm().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    trainer = make(tmp_path / "out", "dora", model=str(tmp_path / "base"), max_steps=1)
    trainer.train()
    trainer.save_model()
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base") and config["use_dora"]
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert torch.equal(logits(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")), logits(trainer.model))
