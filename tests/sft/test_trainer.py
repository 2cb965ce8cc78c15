"""`SFTTrainer` from outside: every kind of row in, a model out that others can load."""

import json
import math

import datasets
import numpy as np
import pytest
import torch
import transformers
import yaml
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, PromptTuningConfig

import posttrain.core
from posttrain.core import DataCollatorForLanguageModeling, TrainingArguments
from posttrain.core.errors import ConfigError
from posttrain.core.losses.normalization import count_tokens
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny

TEXTS = [{"text": text} for text in tiny.CORPUS] * 2
COMPLETIONS = [{"prompt": text[:30], "completion": text[30:60]} for text in tiny.CORPUS] * 2
CHATS = [
    {"messages": [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text[20:50]}]}
    for text in tiny.CORPUS
] * 2
TOKENS = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in tiny.token_rows(10)]
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")


def config(output_dir, **changes):
    usual = dict(
        output_dir=str(output_dir), per_device_train_batch_size=4, max_steps=2, learning_rate=1e-2, logging_steps=1,
        max_length=64, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    return SFTConfig(**(usual | changes))


def make(output_dir, rows, model=None, peft_config=None, tokenizer=None, eval_rows=None, callbacks=None, **changes):
    return SFTTrainer(
        model=tiny.causal_lm() if model is None else model,
        args=config(output_dir, **changes),
        train_dataset=rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer or tiny.tokenizer(),
        peft_config=peft_config,
        callbacks=callbacks,
    )


def test_num_tokens_counts_no_padding_of_packed_rows(tmp_path):
    rows = [{"input_ids": [5] * 40}, {"input_ids": [6] * 40}, {"input_ids": [7] * 9}]
    run = make(tmp_path, rows, packing=True, packing_strategy="wrapped", num_train_epochs=1, max_steps=-1)
    run.train()  # rows of 64 and 25 tokens
    counted = [record["num_tokens"] for record in run.state.log_history if "num_tokens" in record]
    assert counted[-1] == run.state.num_input_tokens_seen == 89


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def losses(trainer):
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def batch_of(trainer):
    return next(iter(trainer.get_train_dataloader()))


# ---------------------------------------------------------------------------------------------------- what goes in


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (TEXTS, {}),
        (COMPLETIONS, {}),
        (CHATS, {}),
        (CHATS, {"assistant_only_loss": True}),
        (TOKENS, {}),
        (TEXTS, {"packing": True}),
        (TEXTS, {"packing": True, "packing_strategy": "wrapped"}),
        (TEXTS, {"packing": True, "packing_strategy": "bfd-requeue", "max_length": 16}),  # bfd_split, once
        (COMPLETIONS, {"padding_free": True}),
        (TEXTS, {"bf16": True}),
        (TEXTS, {"label_smoothing_factor": 0.1}),
    ],
    ids="text completion chat assistant-only tokens bfd wrapped bfd-split padding-free bf16 smoothing".split(),
)
@pytest.mark.parametrize("kind", [list, Dataset.from_list])
def test_every_kind_of_row_is_trained_on(rows, changes, kind, tmp_path):
    trainer = make(tmp_path, kind(rows), **({"max_steps": 6} | changes))
    before = weights(trainer.model)
    trainer.train()
    assert [name for name, value in weights(trainer.model).items() if torch.equal(value, before[name])] == []
    # A model that knows nothing pays ln(vocabulary) for a token.
    assert losses(trainer)[0] == pytest.approx(math.log(384), rel=0.03)
    assert losses(trainer)[-1] < losses(trainer)[0]
    assert {"mean_token_accuracy", "entropy", "grad_norm"} <= trainer.state.log_history[0].keys()


def test_only_what_was_asked_for_is_learned(tmp_path):
    tokenizer = tiny.tokenizer()

    def learned(rows, **changes):
        batch = batch_of(make(tmp_path, rows, train_sampling_strategy="sequential", **changes))
        row = batch["labels"][0]
        return tokenizer.decode(row[row != -100])

    prompt, completion = COMPLETIONS[0]["prompt"], COMPLETIONS[0]["completion"]
    assert learned(COMPLETIONS) == completion + "<|endoftext|>"
    assert learned(COMPLETIONS, completion_only_loss=False) == prompt + completion + "<|endoftext|>"
    answer = CHATS[0]["messages"][1]["content"]
    assert learned(CHATS, assistant_only_loss=True) == answer + "<|im_end|>\n"
    assert learned(CHATS).startswith("<|im_start|>user\n")


def test_a_column_named_label_is_left_alone(tmp_path):
    with_label = [row | {"label": i % 2} for i, row in enumerate(COMPLETIONS)]
    trained = []
    for number, rows in enumerate((COMPLETIONS, with_label, Dataset.from_list(with_label))):
        trainer = make(tmp_path / str(number), rows)
        trainer.train()
        trained.append(losses(trainer))
    assert trained[0] == trained[1] == trained[2]


def test_a_stream_is_trained_on_as_the_same_rows_by_index(tmp_path):
    shuffled = {"train_sampling_strategy": "sequential", "max_steps": 4}  # more than one pass
    by_index = make(tmp_path / "index", Dataset.from_list(TEXTS), **shuffled)
    streamed = make(tmp_path / "stream", Dataset.from_list(TEXTS).to_iterable_dataset(), **shuffled)
    for trainer in (by_index, streamed):
        trainer.train()
    assert losses(streamed) == losses(by_index)
    assert streamed.data_reports["train"].rows_kept == len(TEXTS)


def test_one_evaluation_set_or_several_and_raw_rows_later(tmp_path):
    trainer = make(
        tmp_path, TEXTS, eval_rows={"short": TOKENS, "long": COMPLETIONS}, eval_strategy="steps", eval_steps=2
    )
    trainer.train()
    logged = {key for record in trainer.state.log_history for key in record}
    assert {"eval_short_loss", "eval_long_loss", "eval_short_mean_token_accuracy"} <= logged
    raw = trainer.evaluate(COMPLETIONS)["eval_loss"]
    assert raw == trainer.evaluate()["eval_long_loss"] == trainer.evaluate(Dataset.from_list(COMPLETIONS))["eval_loss"]
    assert trainer.evaluate(trainer.eval_dataset["long"])["eval_loss"] == raw  # prepared rows are not prepared again
    assert trainer.evaluate({"a": COMPLETIONS})["eval_a_loss"] == raw


def test_packed_sets_can_be_evaluated_again_and_predict_does_not_pack(tmp_path):
    trainer = make(tmp_path, COMPLETIONS, eval_rows=COMPLETIONS, packing=True)
    packed = trainer.evaluate()["eval_loss"]
    assert trainer.evaluate(trainer.eval_dataset)["eval_loss"] == packed == trainer.evaluate(COMPLETIONS)["eval_loss"]
    output = trainer.predict(COMPLETIONS)
    assert len(output.predictions) == len(COMPLETIONS) and output.metrics["test_loss"] == pytest.approx(
        packed, rel=1e-5
    )


# ---------------------------------------------------------------------------------------------------- the loss


@pytest.mark.parametrize("changes", [{}, {"label_smoothing_factor": 0.2}, {"packing": True}, {"padding_free": True}])
@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_in_the_head_is_the_loss_of_whole_logits(changes, tied, tmp_path):
    trainer = make(tmp_path, COMPLETIONS, model=tiny.causal_lm(tie_word_embeddings=tied), **changes)
    batch, items = batch_of(trainer), torch.tensor(37)
    model, found = trainer.model, []
    for whole in (False, True):
        model.zero_grad()
        loss = trainer.compute_loss(model, batch, return_outputs=whole, num_items_in_batch=items)
        loss = loss[0] if whole else loss
        loss.backward()
        found.append((loss, {name: p.grad.clone() for name, p in model.named_parameters()}))
    (chunked, chunked_grads), (plain, plain_grads) = found
    torch.testing.assert_close(chunked, plain, rtol=1e-5, atol=0)
    for name, grad in plain_grads.items():
        torch.testing.assert_close(chunked_grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)
    pairs = trainer.metrics.drain()
    (correct, trained), (entropy, _) = pairs["mean_token_accuracy"], pairs["entropy"]
    # Both ways added the same: twice the correct tokens, twice the tokens.
    logits, targets = model(**{k: v for k, v in batch.items() if k != "labels"}).logits[:, :-1], batch["labels"][:, 1:]
    kept, logps = targets != -100, logits.log_softmax(-1)
    assert trained == 2 * kept.sum() and correct == 2 * (logits.argmax(-1)[kept] == targets[kept]).sum()
    assert entropy == pytest.approx(2 * -(logps.exp() * logps).sum(-1)[kept].sum().item(), rel=1e-5)


ATTENTION = [
    (TEXTS, {}),
    (COMPLETIONS, {"packing": True}),
    (CHATS, {"assistant_only_loss": True, "gradient_checkpointing": True}),
    (COMPLETIONS, {"padding_free": True, "bf16": True}),
]


@pytest.mark.parametrize(("rows", "changes"), ATTENTION, ids="plain packed checkpointed padding-free".split())
def test_attention_over_segments_trains_as_attention_under_a_mask_does(rows, changes, tmp_path, monkeypatch):
    trained = []
    for problem in (None, "it was not wanted"):
        if problem:
            monkeypatch.setattr(
                "posttrain.lm.attention.varlen_attention.segments_problem", lambda *args, **options: "it was not wanted"
            )
        trainer = make(tmp_path, rows, max_steps=4, train_sampling_strategy="sequential", **changes)
        assert trainer.model.config._attn_implementation == ("sdpa" if problem else "segments_sdpa")
        trainer.train()
        trained.append(losses(trainer))
    assert trained[0] == pytest.approx(trained[1], rel=3e-3 if "bf16" in changes else 1e-5)
    assert trained[0] != trained[1] or len(set(trained[0])) == 4  # they were computed in two ways


def test_a_model_that_reads_segments_is_saved_as_any_other(tmp_path):
    trainer = make(tmp_path, TEXTS)
    assert trainer.model.config._attn_implementation == "segments_sdpa"
    trainer.train()
    trainer.save_model()
    assert "segments" not in (tmp_path / "config.json").read_text()
    loaded = type(trainer.model).from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    ids = torch.tensor([trainer.train_dataset[0]["input_ids"]])
    torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits)


def test_models_whose_attention_cannot_be_replaced_are_trained_under_a_mask(tmp_path, caplog):
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=384, hidden_size=32, n_layer=2, n_head=4))
    with caplog.at_level("INFO", logger="posttrain"):
        trainer = make(tmp_path, TEXTS, model=model, max_steps=6)
    assert "Attention goes over whole rows, under a mask: BloomForCausalLM" in caplog.text
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]


def test_accuracy_and_entropy_are_means_over_trained_tokens(tmp_path):
    trainer = make(tmp_path, COMPLETIONS, eval_rows=COMPLETIONS, per_device_eval_batch_size=3)
    metrics = trainer.evaluate()
    correct = tokens = 0
    total_loss = 0.0
    for row in trainer.eval_dataset:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])[1:]
        with torch.no_grad():
            logits = trainer.model(input_ids=ids).logits[0, :-1]
        kept = labels != -100
        correct += int((logits.argmax(-1)[kept] == labels[kept]).sum())
        total_loss += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
        tokens += int(kept.sum())
    assert metrics["eval_mean_token_accuracy"] == pytest.approx(correct / tokens, abs=1e-9)
    assert metrics["eval_loss"] == pytest.approx(total_loss / tokens, rel=1e-5)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]))
    smoothed = make(tmp_path, COMPLETIONS, eval_rows=COMPLETIONS, label_smoothing_factor=0.1).evaluate()
    assert "eval_perplexity" not in smoothed


def test_compute_metrics_gets_logits_and_labels_of_every_row(tmp_path):
    seen = {}

    def compute_metrics(prediction):
        seen["shapes"] = prediction.predictions.shape, prediction.label_ids.shape
        labels, guesses = prediction.label_ids[:, 1:], prediction.predictions[:, :-1].argmax(-1)
        kept = labels != -100
        return {"accuracy": float((guesses == labels)[kept].mean())}

    trainer = make(tmp_path, COMPLETIONS, eval_rows=COMPLETIONS, per_device_eval_batch_size=4)
    plain = trainer.evaluate()
    trainer.compute_metrics = compute_metrics
    metrics = trainer.evaluate()
    width = max(len(row["input_ids"]) for row in trainer.eval_dataset)
    assert seen["shapes"] == ((10, width, 384), (10, width))
    assert metrics["eval_accuracy"] == pytest.approx(metrics["eval_mean_token_accuracy"])
    for name in ("eval_loss", "eval_mean_token_accuracy", "eval_entropy"):
        assert metrics[name] == pytest.approx(plain[name], rel=1e-5)


def test_the_predictions_of_a_mixture_of_experts_are_its_logits_and_not_those_of_its_routers(tmp_path):
    seen = []
    trainer = make(tmp_path, COMPLETIONS, tiny.mixture_of_experts(), eval_rows=COMPLETIONS)
    trainer.compute_metrics = lambda prediction: seen.append(prediction.predictions) or {}
    metrics = trainer.evaluate()
    assert metrics["eval_aux_loss"] > 0 and seen[0].shape == (*seen[0].shape[:2], 384) and len(seen[0]) == 10
    asked = trainer.predict(COMPLETIONS, ignore_keys=["logits"]).predictions
    assert len(asked) == 2 and len(asked[1]) == 2  # the loss of the routers, and their logits of two layers


@pytest.mark.parametrize("whole", [False, True])
def test_the_padding_of_packed_rows_is_no_part_of_the_routers_loss_nor_of_the_tokens(whole, tmp_path):
    found = []
    for packed in (False, True):
        options = {"packing": packed, "eval_packing": packed, "max_length": 48, "per_device_eval_batch_size": 16}
        trainer = make(tmp_path, COMPLETIONS, tiny.mixture_of_experts(), eval_rows=COMPLETIONS, **options)
        trainer.compute_metrics = (lambda prediction: {}) if whole else None
        metrics = trainer.evaluate()
        found.append([metrics[f"eval_{name}"] for name in ("aux_loss", "loss", "entropy")])
        batch = batch_of(trainer)
        if packed:
            assert batch["seq_lengths"].sum() < batch["input_ids"].numel() == count_tokens(batch, "input_ids")[1]
            assert count_tokens(batch, "input_ids")[0] == batch["seq_lengths"].sum()
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_a_loss_of_ones_own_sees_logits_labels_and_the_count(tmp_path):
    def half(outputs, labels, num_items_in_batch=None):
        logits = outputs.logits[:, :-1].reshape(-1, 384)
        return (
            0.5
            * torch.nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum")
            / num_items_in_batch
        )

    plain = make(tmp_path / "plain", COMPLETIONS, gradient_accumulation_steps=2, per_device_train_batch_size=2)
    own = make(tmp_path / "own", COMPLETIONS, gradient_accumulation_steps=2, per_device_train_batch_size=2)
    own.compute_loss_func = half
    for trainer in (plain, own):
        trainer.train()
    assert losses(own)[0] == pytest.approx(losses(plain)[0] / 2, rel=1e-5)
    assert own.state.log_history[0]["mean_token_accuracy"] == plain.state.log_history[0]["mean_token_accuracy"]


@pytest.mark.parametrize("arch", ["qwen3", "gpt2"])
@pytest.mark.parametrize("lora", [False, True])
def test_gradient_checkpointing_changes_no_weight(arch, lora, tmp_path):
    trained = []
    for on in (False, True):
        adapter = (
            LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM") if lora else None
        )
        trainer = make(tmp_path / str(on), TEXTS, tiny.causal_lm(arch), adapter, gradient_checkpointing=on)
        torch.manual_seed(0)
        trainer.train()
        trained.append(weights(trainer.model))
    for name, value in trained[0].items():
        torch.testing.assert_close(trained[1][name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("changes", [{}, {"packing": True, "bf16": True}, {"gradient_checkpointing": True}], ids=str)
def test_activations_in_host_memory_change_no_weight(changes, tmp_path, monkeypatch, caplog):
    with caplog.at_level("INFO", "posttrain"):
        plain = make(tmp_path / "plain", COMPLETIONS, activation_offloading=True, **changes)
    assert "activation_offloading=True has no effect: Activations are in host memory already" in caplog.text
    monkeypatch.setattr(
        "posttrain.lm.attention.activation_offloading.offloading_problem", lambda device: None
    )  # they are copied all the same
    moved = make(tmp_path / "moved", COMPLETIONS, activation_offloading=True, **changes)
    for trainer in (plain, moved):
        trainer.train()
    assert plain._offload is None and moved._offload.moved > 0
    expected = weights(plain.model)
    assert all(torch.equal(value, expected[name]) for name, value in weights(moved.model).items())


def mixture_of_experts():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    size = dict(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    size |= dict(num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**size, router_aux_loss_coef=0.25, pad_token_id=0, eos_token_id=1))


@pytest.mark.parametrize("changes", [{}, {"label_smoothing_factor": 0.1}, {"loss_type": "dft"}])
def test_the_routers_loss_is_added_once_to_every_kind_of_loss(changes, tmp_path):
    weighted = make(tmp_path, COMPLETIONS, model=mixture_of_experts(), router_aux_loss_coef=2.0, **changes)
    alone = make(tmp_path, COMPLETIONS, model=mixture_of_experts(), router_aux_loss_coef=0.0, **changes)
    batch, total = batch_of(weighted), torch.tensor(100)
    aux = weighted.model(**batch, output_router_logits=True).aux_loss * weighted.count_items(batch) / total
    expected = alone.compute_loss(alone.model, batch, num_items_in_batch=total) + 2 * aux
    for whole in (False, True):
        loss = weighted.compute_loss(weighted.model, batch, return_outputs=whole, num_items_in_batch=total)
        assert (loss[0] if whole else loss).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("coef", [None, 0.0, 2.0])
def test_the_routers_loss_is_weighted_as_asked_with_and_without_logits(coef, tmp_path):
    trainer = make(tmp_path, COMPLETIONS, model=mixture_of_experts(), router_aux_loss_coef=coef)
    batch, model = batch_of(trainer), trainer.model
    plain = model(**batch, output_router_logits=False).loss
    aux = model(**batch, output_router_logits=True).aux_loss
    weight = {None: 0.25}.get(coef, coef)
    items = trainer.count_items(batch)
    for total in (None, items, 3 * items):  # a third of an update has a third of its loss
        share = 1 if total is None else float(items / total)
        for whole in (False, True):
            loss = trainer.compute_loss(model, batch, return_outputs=whole, num_items_in_batch=total)
            loss = loss[0] if whole else loss
            assert loss.item() == pytest.approx(share * (plain + weight * aux).item(), rel=1e-5)
    assert aux > 1 and ("aux_loss" in trainer.metrics.drain()) == bool(weight)
    assert trainer._reads_segments == (weight == 0)  # the router's loss needs the mask


def test_the_routers_loss_is_trained_on_and_logged(tmp_path):
    balanced = make(tmp_path / "1", TEXTS, model=mixture_of_experts(), router_aux_loss_coef=5.0, max_steps=8)
    free = make(tmp_path / "0", TEXTS, model=mixture_of_experts(), router_aux_loss_coef=0.0, max_steps=8)
    for trainer in (balanced, free):
        trainer.train()
    logged = [record["aux_loss"] for record in balanced.state.log_history if "aux_loss" in record]
    batch = batch_of(free)
    found = [trainer.model(**batch, output_router_logits=True).aux_loss for trainer in (balanced, free)]
    assert len(logged) == 8 and found[0] < found[1] - 0.01
    assert not any("aux_loss" in record for record in free.state.log_history)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has none. Leave router_aux_loss_coef out"):
        make(tmp_path, TEXTS, router_aux_loss_coef=0.1)


# ---------------------------------------------------------------------------------------------------- adapters


def test_lora_trains_every_adapter_weight_and_not_one_of_the_base(tmp_path):
    model = tiny.causal_lm()
    before = {name: value.clone() for name, value in model.named_parameters()}
    trainer = make(tmp_path / "out", TEXTS, model, LORA, max_steps=3)
    adapters = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert len(adapters) == 2 * 2 * 2  # layers, projections, A and B
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        if name in adapters:
            assert not torch.equal(parameter, adapters[name]), name
        else:
            assert torch.equal(parameter, before[name.removeprefix("base_model.model.").replace(".base_layer", "")]), (
                name
            )


def test_a_saved_adapter_is_all_that_is_saved_and_loads_elsewhere(tmp_path):
    base = tmp_path / "base"
    tiny.causal_lm().save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    trainer = make(tmp_path / "out", TEXTS, str(base), LORA, max_steps=3)
    trainer.train()
    trainer.save_model()
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == {"adapter_model.safetensors"}
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(4, 20)[None]
    with torch.no_grad():
        expected = trainer.model.eval()(input_ids=ids).logits
        torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, expected, rtol=0, atol=1e-6)
        assert (expected - trainer.model.get_base_model()(input_ids=ids).logits).abs().max() == 0
        with trainer.model.disable_adapter():
            assert (expected - trainer.model(input_ids=ids).logits).abs().max() > 1e-4


def test_prompt_tuning_trains_its_virtual_tokens_alone(tmp_path):
    model = tiny.causal_lm()
    before = weights(model)
    trainer = make(tmp_path, COMPLETIONS, model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5))
    (prompt,) = (p for p in trainer.model.parameters() if p.requires_grad)
    first = prompt.detach().clone()
    batch = batch_of(trainer)
    chunked, whole = trainer.compute_loss(trainer.model, batch), trainer.compute_loss(trainer.model, batch, True)[0]
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=0)
    trainer.train()
    assert not torch.equal(prompt, first)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.get_base_model().state_dict().items())


# ---------------------------------------------------------------------------------------------------- models and names


@pytest.mark.parametrize("tied", [False, True])
def test_the_final_model_loads_as_any_other_with_its_tokenizer(tied, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base, out = tmp_path / "base", tmp_path / "out"
    tiny.causal_lm(tie_word_embeddings=tied).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    trainer = SFTTrainer(
        model=str(base), args=config(out), train_dataset=CHATS
    )  # the tokenizer is found beside the model
    assert trainer.processing_class.get_vocab() == tiny.tokenizer().get_vocab()
    trainer.train()
    trainer.save_model()
    ids = torch.arange(4, 20)[None]
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    with torch.no_grad():
        expected = trainer.model.eval()(input_ids=ids).logits
        torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, expected, rtol=0, atol=1e-6)
    assert tokenizer.chat_template == tiny.CHATML and tokenizer(TEXTS[0]["text"]) == tiny.tokenizer()(TEXTS[0]["text"])


def test_weights_are_saved_in_files_of_the_size_that_is_asked_for_and_read_back(tmp_path):
    from transformers import AutoModelForCausalLM

    trainer = make(tmp_path, TEXTS, max_shard_size="20KB", save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-1"):
        files = list(folder.glob("model-*.safetensors"))
        # Embedding and head have 48 KiB each, and a tensor is never cut.
        assert len(files) > 4 and sum(file.stat().st_size > 22_000 for file in files) == 2
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in trainer.model.state_dict().items())
    straight = weights(trainer.model)
    trainer = make(tmp_path, TEXTS, save_strategy="no")
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert all(torch.equal(value, straight[name]) for name, value in weights(trainer.model).items())
    with pytest.raises(ConfigError, match="max_shard_size='5 gallons' must be a number of bytes"):
        config(tmp_path, max_shard_size="5 gallons")


def test_a_model_given_by_name_is_loaded_as_model_init_kwargs_say(tmp_path):
    tiny.causal_lm().save_pretrained(tmp_path / "base", max_shard_size="10KB")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    for given, dtype in (
        ({}, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ('{"torch_dtype": "float64"}', torch.float64),
    ):
        args = config(tmp_path / "out", model_init_kwargs=given)
        assert SFTTrainer(model=tmp_path / "base", args=args, train_dataset=TEXTS).model.dtype == dtype


def test_arguments_of_earlier_versions_still_work(tmp_path):
    rows = [{"body": row["text"]} for row in TEXTS]
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=1, use_cpu=True, save_strategy="no", disable_tqdm=True)
    with pytest.warns(FutureWarning) as warned:
        trainer = SFTTrainer(
            model=tiny.causal_lm(), args=args, train_dataset=rows, tokenizer=tiny.tokenizer(),
            dataset_text_field="body", max_seq_length=24, packing=True,
        )  # fmt: skip
    said = " ".join(str(warning.message) for warning in warned)
    assert all(name in said for name in ("dataset_text_field", "max_seq_length", "packing", "tokenizer"))
    assert (trainer.args.dataset_text_field, trainer.args.max_length, trainer.args.packing) == ("body", 24, True)
    assert trainer.args.max_steps == 1 and trainer.tokenizer is trainer.processing_class
    assert max(len(row["input_ids"]) for row in trainer.train_dataset) <= 24
    trainer.train()
    with pytest.raises(ConfigError, match="max_length=24.*max_length=64"):
        SFTTrainer(model=tiny.causal_lm(), args=config(tmp_path), max_seq_length=24, train_dataset=rows)


def test_a_chat_template_of_ones_own_is_used_and_saved(tmp_path):
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    tiny.tokenizer(chat_template=template).save_pretrained(tmp_path / "other")
    tokenizer = tiny.tokenizer(chat_template=None)
    for source in (tmp_path / "chat.jinja", tmp_path / "other"):
        trainer = make(tmp_path / "out", CHATS, tokenizer=tokenizer, chat_template_path=str(source))
        text = tokenizer.decode(trainer.train_dataset[0]["input_ids"])
        assert (
            text == "[user]" + CHATS[0]["messages"][0]["content"] + "[assistant]" + CHATS[0]["messages"][1]["content"]
        )
        tokenizer.chat_template = None
    trainer.processing_class.chat_template = template
    trainer.save_model()
    saved = tmp_path / "out" / "chat_template.jinja"
    assert saved.read_text() == template


def test_an_eos_token_of_ones_own_ends_rows_and_reaches_the_model(tmp_path):
    trainer = make(tmp_path, TEXTS, eos_token="<|im_end|>")
    end = trainer.processing_class.convert_tokens_to_ids("<|im_end|>")
    assert all(row["input_ids"][-1] == row["labels"][-1] == end for row in trainer.train_dataset)
    trainer.train()
    trainer.save_model()
    assert trainer.model.config.eos_token_id == end
    assert end in np.atleast_1d(json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"])


def test_the_users_rows_and_arguments_are_left_as_they_were(tmp_path):
    rows, args = [dict(row) for row in COMPLETIONS], config(tmp_path)
    dataset, before = Dataset.from_list(COMPLETIONS), args.to_dict()
    for given in (rows, dataset):
        SFTTrainer(model=tiny.causal_lm(), args=args, train_dataset=given, processing_class=tiny.tokenizer()).train()
    assert rows == COMPLETIONS and dataset.column_names == ["prompt", "completion"] and args.to_dict() == before


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_stream_of_texts_resumes_where_it_stopped(step, packing, monkeypatch, tmp_path):
    monkeypatch.setattr("posttrain.sft.packing.ROWS_PER_WINDOW", 3)
    changes = {
        "max_steps": 5,
        "save_strategy": "steps",
        "save_steps": 1,
        "packing": packing,
    }  # an epoch is three steps, or two
    stream = datasets.IterableDataset.from_generator(lambda: iter(TEXTS))
    straight = make(tmp_path, stream, **changes)
    straight.train()
    resumed = make(tmp_path, stream, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert losses(resumed) == losses(straight)
    expected = weights(straight.model)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed.model).items())


def test_rows_taken_as_they_are_need_labels_where_they_have_masks(tmp_path):
    rows = Dataset.from_list([{"input_ids": [5, 6, 7, 8], "assistant_masks": [0, 0, 1, 1]}] * 2)
    options = {"dataset_kwargs": {"skip_prepare_dataset": True}, "report_to": "none"}

    def make(dataset):
        return SFTTrainer(tiny.causal_lm(), SFTConfig(str(tmp_path), **options), train_dataset=dataset,
        processing_class=tiny.tokenizer())  # fmt: skip

    with pytest.raises(ValueError, match="assistant_masks but no labels.*Add a 'labels' column"):
        make(rows)
    trainer = make(rows.add_column("labels", [[-100, -100, 7, 8]] * 2))
    assert next(iter(trainer.get_train_dataloader()))["labels"].tolist() == [[-100, -100, 7, 8]] * 2


def test_a_trainer_without_any_dataset_is_refused(tmp_path):
    def make(**datasets):
        args = SFTConfig(str(tmp_path), report_to="none")
        return SFTTrainer(tiny.causal_lm(), args, processing_class=tiny.tokenizer(), **datasets)

    with pytest.raises(ValueError, match="`train_dataset` is required"):
        make()
    evaluates = make(eval_dataset=Dataset.from_list([{"text": "Two and two are four."}]))
    assert evaluates.evaluate()["eval_loss"] > 0


def test_the_model_and_its_card_say_how_it_was_trained(tmp_path):
    args = SFTConfig(str(tmp_path), report_to="none", max_steps=1)
    rows = Dataset.from_list([{"text": "Two and two are four."}])
    trainer = SFTTrainer(tiny.causal_lm(), args, train_dataset=rows, processing_class=tiny.tokenizer())
    assert {"sft", "posttrain"} <= set(trainer.model.model_tags)
    trainer.train()
    trainer.create_model_card(tags=["mine"])
    card = (tmp_path / "README.md").read_text()
    tags = yaml.safe_load(card.split("---")[1])["tags"]
    assert {"posttrain", "sft", "mine"} <= set(tags)


def test_arguments_of_the_first_versions_are_taken_with_a_word(tmp_path):
    rows = [{"text": "Betty is saving money."}] * 4
    with pytest.warns(FutureWarning, match="num_of_sequences has no effect: packing"):
        trainer = SFTTrainer(
            tiny.causal_lm(), args=config(tmp_path), train_dataset=rows, tokenizer=tiny.tokenizer(),
            neftune_noise_alpha=5, num_of_sequences=1024, chars_per_token=3.6, infinite=True, dataset_batch_size=1000,
        )  # fmt: skip
    assert trainer.args.neftune_noise_alpha == 5


@pytest.mark.parametrize("rows", [COMPLETIONS, CHATS, TEXTS], ids=["completions", "chats", "texts"])
def test_a_collator_for_language_modeling_trains_on_what_the_trainers_own_trains_on(rows, tmp_path):
    own, given = (make(tmp_path, rows, completion_only_loss=None, assistant_only_loss=rows is CHATS) for _ in "12")
    given.data_collator = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
    own.train(), given.train()
    losses = [[record["loss"] for record in each.state.log_history if "loss" in record] for each in (own, given)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6) and len(losses[0]) == 2


@pytest.mark.parametrize("name", ["packing", "padding_free"])
@pytest.mark.parametrize("collators", [posttrain.core, transformers], ids=lambda module: module.__name__)
def test_a_collator_that_leaves_out_where_texts_begin_gives_way_to_the_trainers_own(collators, name, tmp_path, caplog):
    collator = collators.DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
    own, given = (
        SFTTrainer(tiny.causal_lm(), config(tmp_path, **{name: True}), each, TEXTS, processing_class=tiny.tokenizer())
        for each in (None, collator)
    )
    assert f"DataCollatorForLanguageModeling is not used: {name}=True" in caplog.text
    own.train(), given.train()
    assert losses(own) == losses(given) and losses(own)


def test_a_collator_of_ones_own_that_leaves_out_where_texts_begin_is_refused_for_packed_rows(tmp_path):
    class Mine(DataCollatorForLanguageModeling):
        pass

    with pytest.raises(ValueError, match="packing=True puts several texts into a row, and Mine makes batches without"):
        SFTTrainer(tiny.causal_lm(), config(tmp_path, packing=True), Mine(tiny.tokenizer(), mlm=False), TEXTS)


def test_a_tokenizer_that_cannot_be_saved_is_refused_before_training(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path / "words")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "words", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"loaded with dtype=torch.float32.*load it without dtype"):
        make(tmp_path, TEXTS, tokenizer=words)


def test_a_data_report_prints_its_sentences(tmp_path):
    assert str(make(tmp_path, TEXTS).data_reports["train"]).startswith(f"train: {len(TEXTS)} rows read")
