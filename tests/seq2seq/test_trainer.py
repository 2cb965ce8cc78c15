"""`Seq2SeqTrainer`: evaluations give what ``generate`` gives, for every row, in the order of the dataset."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import GenerationConfig

from posttrain.core import TrainerCallback
from posttrain.core.data.collators import DataCollatorForSeq2Seq, pad_rows
from posttrain.core.errors import ConfigError, DataError
from posttrain.seq2seq import PromptTargetCollator, Seq2SeqTrainer, Seq2SeqTrainingArguments
from tests import tiny
from tests.contract.trainers import arguments, seq2seq_rows

ROWS = seq2seq_rows(7, seed=1)


class Seen:
    """A `compute_metrics` that keeps what it was called with."""

    def __call__(self, evaluated):
        self.predictions, self.labels = evaluated
        return {"rows": len(self.predictions)}


def trainer(
    out,
    model=None,
    *,
    rows=ROWS,
    collator=None,
    tokenizer=True,
    callbacks=None,
    trainer_class=Seq2SeqTrainer,
    **changes,
):
    usual = {"predict_with_generate": True, "generation_max_length": 14, "per_device_eval_batch_size": 3}
    return trainer_class(
        tiny.seq2seq_lm() if model is None else model,
        arguments(Seq2SeqTrainingArguments, out, **(usual | changes)),
        data_collator=collator,
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tiny.tokenizer() if tokenizer else None,
        compute_metrics=Seen(),
        callbacks=callbacks,
    )


def one_by_one(model, rows=ROWS, **options) -> list[list[int]]:
    """What the model generates from each row alone, padding cut off."""
    model.eval()
    tokens = [model.generate(input_ids=torch.tensor([row["input_ids"]]), **options)[0].tolist() for row in rows]
    return [strip(row) for row in tokens]


def strip(row, pad=0) -> list[int]:
    row = list(row)
    while len(row) > 1 and row[-1] == pad:
        row.pop()
    return row


# ---------------------------------------------------------------------------------------------------- what is evaluated


@pytest.mark.parametrize("as_dataset", [list, Dataset.from_list])
def test_an_evaluation_gives_what_each_row_generates_alone_in_the_order_of_the_dataset(as_dataset, tmp_path):
    it = trainer(tmp_path, rows=as_dataset(ROWS))
    metrics = it.evaluate()
    assert [strip(row) for row in it.compute_metrics.predictions] == one_by_one(it.model, max_length=14)
    assert it.compute_metrics.labels.tolist() == pad_rows([row["labels"] for row in ROWS], -100).tolist()
    assert metrics["eval_rows"] == 7 and it.compute_metrics.predictions.dtype == np.int64


def test_the_loss_is_the_mean_over_all_labels(tmp_path):
    it = trainer(tmp_path)
    found = it.evaluate()["eval_loss"]
    it.model.eval()
    total = 0.0
    for row in ROWS:
        out = it.model(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]]))
        total += out.loss.item() * len(row["labels"])
    assert found == pytest.approx(total / sum(len(row["labels"]) for row in ROWS), rel=1e-5)


def test_inputs_of_the_decoder_that_rows_have_are_read(tmp_path):
    model = tiny.seq2seq_lm()
    rows = [row | {"decoder_input_ids": [7, *row["labels"][:-1]]} for row in ROWS]
    loss = trainer(tmp_path, model, rows=rows, prediction_loss_only=True, predict_with_generate=False).evaluate()
    model.eval()
    sums = [
        model(**{key: torch.tensor([value]) for key, value in row.items()}).loss * len(row["labels"]) for row in rows
    ]
    expected = sum(sums).item() / sum(len(row["labels"]) for row in rows)
    assert loss["eval_loss"] == pytest.approx(expected, rel=1e-5)
    usual = trainer(tmp_path, model, prediction_loss_only=True, predict_with_generate=False).evaluate()["eval_loss"]
    assert usual != pytest.approx(expected, rel=1e-3)


def test_evaluations_along_the_way_generate_and_a_callback_hears_the_metrics(tmp_path):
    heard = []

    class Ear(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            heard.append((state.global_step, metrics["eval_rows"]))

    trainer(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2, callbacks=[Ear()]).train()
    assert heard == [(2, 7), (4, 7)]


def test_the_encoder_runs_once_for_loss_and_generation(tmp_path):
    calls = []
    model = tiny.seq2seq_lm()
    model.encoder.register_forward_hook(lambda *_: calls.append(1))
    it = trainer(tmp_path, model)
    it.evaluate()
    calls.clear()
    it.evaluate()
    assert len(calls) == 3, "as many as there are batches"


def test_nothing_is_generated_where_nobody_asks(tmp_path, monkeypatch):
    model = tiny.seq2seq_lm()
    monkeypatch.setattr(model, "generate", lambda **kwargs: pytest.fail("generated"))
    it = trainer(tmp_path, model)
    it.compute_metrics = None
    assert "eval_loss" in it.evaluate()
    it = trainer(tmp_path, model, predict_with_generate=False)
    it.evaluate()
    logits = it.compute_metrics.predictions[0]  # of a T5, beside the encoder's states
    assert logits.shape == (7, max(len(row["labels"]) for row in ROWS), 384)
    assert it.prediction_fill == -100


def test_predict_returns_tokens_and_labels(tmp_path):
    it = trainer(tmp_path)
    output = it.predict(ROWS[:2], num_beams=2)
    assert [strip(row) for row in output.predictions] == one_by_one(it.model, ROWS[:2], max_length=14, num_beams=2)
    assert output.label_ids.shape[0] == 2 and "test_loss" in output.metrics


def test_rows_without_labels_are_generated_from_and_have_no_loss(tmp_path):
    it = trainer(tmp_path)
    rows = [{"input_ids": row["input_ids"]} for row in ROWS]
    output = it.predict(rows)
    assert [strip(row) for row in output.predictions] == one_by_one(it.model, max_length=14)
    assert output.label_ids is None and "test_loss" not in output.metrics


def test_generate_is_called_on_the_model_with_the_arguments_of_the_call(tmp_path, monkeypatch):
    model, calls = tiny.seq2seq_lm(), []
    stock = model.generate
    monkeypatch.setattr(model, "generate", lambda **kwargs: calls.append(kwargs) or stock(**kwargs))
    it = trainer(tmp_path, model, generation_num_beams=2)
    it.evaluate(max_length=6, do_sample=False, length_penalty=2.0)
    asked = {key: calls[0][key] for key in ("max_length", "num_beams", "do_sample", "length_penalty")}
    assert asked == {"max_length": 6, "num_beams": 2, "do_sample": False, "length_penalty": 2.0}
    assert "labels" not in calls[0] and "synced_gpus" not in calls[0]
    assert it.compute_metrics.predictions.shape[1] <= 6


def test_several_sequences_of_each_row_stay_with_it(tmp_path):
    it = trainer(tmp_path)
    assert it.evaluate(num_beams=3, num_return_sequences=2)["eval_rows"] == 14
    alone = [
        strip(tokens)
        for row in ROWS
        for tokens in it.model.generate(
            input_ids=torch.tensor([row["input_ids"]]), max_length=14, num_beams=3, num_return_sequences=2
        ).tolist()
    ]
    assert [strip(row) for row in it.compute_metrics.predictions] == alone


def test_arguments_of_the_call_hold_for_every_set_of_a_dict(tmp_path):
    it = trainer(tmp_path, rows=ROWS)
    widths = []
    it.compute_metrics = lambda evaluated: widths.append(evaluated.predictions.shape[1]) or {"x": 1.0}
    metrics = it.evaluate({"a": ROWS[:3], "b": ROWS[3:]}, max_length=4)
    assert widths == [4, 4] and {"eval_a_x", "eval_b_x"} <= set(metrics)
    it.evaluate(ROWS[:3])
    assert widths[-1] > 4, "and for no later call"


def test_logits_of_an_override_in_the_old_manner(tmp_path):
    class Old(Seq2SeqTrainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
            inputs = self._prepare_inputs(inputs)
            kwargs = self._gen_kwargs.copy()
            tokens = self.model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **kwargs)
            return None, self._pad_tensors_to_max_len(tokens, 20), inputs["labels"]

    it = trainer(tmp_path, trainer_class=Old)
    it.evaluate(num_beams=2)
    assert it.compute_metrics.predictions.shape == (7, 20)
    assert [strip(row) for row in it.compute_metrics.predictions] == one_by_one(it.model, max_length=14, num_beams=2)


def test_streaming_metrics_see_the_rows_in_the_order_of_the_dataset(tmp_path):
    class Stream:
        def reset(self):
            self.rows = []

        def update(self, predictions, labels):
            self.rows += [row[row >= 0].tolist() for row in labels]

        def compute(self):
            return {"n": len(self.rows)}

    it = trainer(tmp_path)
    it.compute_metrics = Stream()
    assert it.evaluate()["eval_n"] == 7
    assert it.compute_metrics.rows == [row["labels"] for row in ROWS]


def test_the_first_rows_are_shown_in_the_log(tmp_path, caplog):
    it = trainer(tmp_path, generation_samples=2)
    with caplog.at_level(logging.INFO, logger="posttrain"):
        it.evaluate()
    decode = it.processing_class.decode
    assert [row["target"] for row in it.generated_samples] == [decode(r["labels"][:-1]) for r in ROWS[:2]]
    assert [row["input"] for row in it.generated_samples] == [decode(r["input_ids"]) for r in ROWS[:2]]
    assert "eval at step 0, the first rows:" in caplog.text and "target" in caplog.text
    assert trainer(tmp_path, generation_samples=0).generated_samples == []


# ---------------------------------------------------------------------------------------------------- training


def test_the_loss_taken_in_the_head_is_the_loss_of_the_model(tmp_path):
    it = trainer(tmp_path, label_smoothing_factor=0.0)
    batch = it.data_collator(ROWS)
    own = it.model(**batch).loss
    assert it._in_head(it.model, batch)
    assert float(it.compute_loss(it.model, dict(batch))) == pytest.approx(float(own), rel=1e-5)
    loss, outputs = it.compute_loss(it.model, dict(batch), return_outputs=True)
    assert outputs.logits.shape[-1] == 384 and float(loss) == pytest.approx(float(own), rel=1e-5)


def test_a_model_with_a_loss_of_its_own_keeps_it(tmp_path):
    class Weighted(type(tiny.seq2seq_lm())):
        def forward(self, *args, labels=None, **kwargs):
            out = super().forward(*args, labels=labels, **kwargs)
            if labels is not None:
                out.loss = out.loss * 3
            return out

    model = Weighted(tiny.seq2seq_lm().config)
    it = trainer(tmp_path, model)
    batch = it.data_collator(ROWS)
    own = model(**batch).loss
    # A batch without labels decides nothing
    it._in_head(model, {**batch, "labels": torch.full_like(batch["labels"], -100)})
    assert it._has_loss_in_head is None
    assert not it._in_head(model, batch)
    assert float(it.compute_loss(model, dict(batch))) == pytest.approx(float(own), rel=1e-5)


@pytest.mark.parametrize("with_model", [True, False])
def test_labels_are_smoothed_whether_or_not_the_collator_shifts_them(with_model, tmp_path):
    model = tiny.seq2seq_lm()
    collator = DataCollatorForSeq2Seq(tiny.tokenizer(), model=model if with_model else None)
    it = trainer(tmp_path, model, collator=collator, label_smoothing_factor=0.1)
    batch = it._prepare_inputs(collator(ROWS))
    logps = model(**collator(ROWS)).logits.log_softmax(-1)
    labels = batch["labels"]
    nll = -logps.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    expected = (0.9 * nll - 0.1 * logps.mean(-1))[labels != -100].mean()
    assert float(it.compute_loss(model, batch)) == pytest.approx(float(expected), rel=1e-5)


def test_a_loss_function_of_the_user_gets_logits_of_the_shifted_labels(tmp_path):
    model = tiny.seq2seq_lm()
    it = trainer(tmp_path, model, collator=DataCollatorForSeq2Seq(tiny.tokenizer()))
    it.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.logits.sum() * 0 + labels.shape[1]
    batch = it._prepare_inputs(it.data_collator(ROWS))
    assert float(it.compute_loss(model, batch)) == max(len(row["labels"]) for row in ROWS)


def test_sortish_sampler_groups_by_length():
    assert Seq2SeqTrainingArguments("x", sortish_sampler=True).train_sampling_strategy == "group_by_length"
    keeps = Seq2SeqTrainingArguments("x", sortish_sampler=True, train_sampling_strategy="sequential")
    assert keeps.train_sampling_strategy == "sequential"


# --------------------------------------------------------------------------------------------------- without an encoder


def causal_rows(joined: bool) -> list[dict]:
    if not joined:
        return [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in ROWS]
    return [
        {"input_ids": row["input_ids"] + row["labels"], "labels": [-100] * len(row["input_ids"]) + row["labels"]}
        for row in ROWS
    ]  # fmt: skip


@pytest.mark.parametrize("joined", [True, False])
def test_without_an_encoder_the_prompt_alone_is_read_and_the_output_alone_returned(joined, tmp_path):
    model = tiny.causal_lm()
    it = trainer(tmp_path, model, rows=causal_rows(joined))
    it.train()
    metrics = it.evaluate()
    model.eval()
    for row, found in zip(ROWS, it.compute_metrics.predictions, strict=True):
        prompt = torch.tensor([row["input_ids"]])
        alone = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=14)
        assert strip(found) == strip(alone[0, prompt.shape[1] :].tolist())
    assert it.compute_metrics.labels.tolist() == pad_rows([row["labels"] for row in ROWS], -100).tolist()
    total = 0.0
    for row in causal_rows(True):
        out = model(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]]))
        total += out.loss.item() * sum(label != -100 for label in row["labels"])
    assert metrics["eval_loss"] == pytest.approx(total / sum(len(row["labels"]) for row in ROWS), rel=1e-5)


def test_without_an_encoder_batches_padded_on_the_right_are_put_right(tmp_path):
    model = tiny.causal_lm()
    on_the_right = trainer(tmp_path, model, rows=causal_rows(True), collator=PromptTargetCollator(0))
    on_the_right.evaluate()

    def left(rows):
        batch = {
            name: pad_rows([row[name] for row in rows], fill, "left")
            for name, fill in (("input_ids", 0), ("labels", -100))
        }
        return batch | {"attention_mask": pad_rows([[1] * len(row["input_ids"]) for row in rows], 0, "left")}

    on_the_left = trainer(tmp_path, model, rows=causal_rows(True), collator=left)
    on_the_left.evaluate()
    assert on_the_right.compute_metrics.predictions.tolist() == on_the_left.compute_metrics.predictions.tolist()


def test_a_target_that_repeats_its_prompt_is_read_as_the_other_rows_are(tmp_path):
    collate, copied = PromptTargetCollator(0), {"input_ids": [5, 6], "labels": [5, 6]}
    apart = collate([{"input_ids": [5], "labels": [6, 7]}, copied])
    assert apart["input_ids"].tolist() == [[5, 6, 7, 0], [5, 6, 5, 6]]
    assert apart["labels"].tolist() == [[-100, 6, 7, -100], [-100, -100, 5, 6]]
    joined = collate([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, copied])  # text without a prompt
    assert joined["input_ids"].tolist() == [[5, 6, 7], [5, 6, 0]]
    with pytest.raises(DataError, match="joined=False"):
        collate([copied, copied])

    def batch_of(rows):
        made = trainer(tmp_path, tiny.causal_lm(), rows=rows, per_device_train_batch_size=1)
        return {tuple(b["labels"].flatten().tolist()) for b in made.get_train_dataloader()}

    echoes = [copied] * 3 + [
        {"input_ids": [7, 8], "labels": [9, 5]}
    ]  # alone in a batch, what they mean is known of the dataset
    assert batch_of(echoes) == {(-100, -100, 5, 6), (-100, -100, 9, 5)}
    assert batch_of([copied] * 3) == {(5, 6)}


def test_rows_of_prompt_and_target_are_told_from_joined_ones():
    collate = PromptTargetCollator(0)
    apart = collate([{"input_ids": [5, 6], "labels": [7, 8]}, {"input_ids": [5], "labels": [6, 7, 8]}])
    assert apart["input_ids"].tolist() == [[5, 6, 7, 8], [5, 6, 7, 8]]
    assert apart["labels"].tolist() == [[-100, -100, 7, 8], [-100, 6, 7, 8]]
    joined = collate([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [5, 6], "labels": [-100, 6]}])
    assert joined["labels"].tolist() == [[-100, 6, 7], [-100, 6, -100]]
    assert joined["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert "labels" not in collate([{"input_ids": [5]}])
    copied = PromptTargetCollator(0, joined=False)([{"input_ids": [5, 6], "labels": [5, 6]}])
    assert copied["input_ids"].tolist() == [[5, 6, 5, 6]]
    with pytest.raises(DataError, match="2 input_ids and 1 labels"):
        PromptTargetCollator(0, joined=True)([{"input_ids": [5, 6], "labels": [5]}])


# ---------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("is_eos", [False, True])
def test_labels_padded_with_the_pad_token_are_put_right(is_eos, tmp_path, caplog):
    tokenizer = tiny.tokenizer()
    if is_eos:
        tokenizer.pad_token = tokenizer.eos_token
    pad = tokenizer.pad_token_id
    longest = max(len(row["labels"]) for row in ROWS)
    padded = [row | {"labels": row["labels"] + [pad] * (longest - len(row["labels"]))} for row in ROWS]
    right, wrong = trainer(tmp_path), trainer(tmp_path, rows=padded)
    for it in (right, wrong):
        it.processing_class = tokenizer
    loss = right.evaluate()["eval_loss"]
    with caplog.at_level("WARNING", logger="posttrain"):
        assert wrong.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert caplog.text.count("replaced by -100") == 1


def test_a_generation_length_below_the_longest_label_is_named_before_training(tmp_path, caplog):
    longest = max(len(row["labels"]) for row in ROWS)
    trainer(tmp_path, generation_max_length=5)
    assert "generation_max_length=5 is below" in caplog.text and f"length={longest + 1} is enough" in caplog.text
    trainer(tmp_path, generation_max_length=None, generation_config={"max_length": 5})
    assert "max_length=5 of the generation config is below" in caplog.text


def test_the_usual_length_is_raised_to_the_longest_label(tmp_path):
    rows = [row | {"labels": row["labels"] * 5} for row in ROWS[:2]]
    it = trainer(tmp_path, rows=rows, generation_max_length=None)
    it.evaluate()
    longest = max(len(row["labels"]) for row in rows)
    assert it._gen_kwargs == {"max_length": longest + 1} and longest > 20


def test_a_generation_config_is_used_and_an_invalid_one_refused_at_construction(tmp_path):
    it = trainer(tmp_path, generation_max_length=None, generation_config={"max_length": 17, "num_beams": 2})
    assert (it.model.generation_config.max_length, it.model.generation_config.num_beams) == (17, 2)
    with pytest.raises(ValueError, match="(?s)generation_config.*temperature"):
        trainer(tmp_path, generation_config={"do_sample": False, "temperature": 0.5})


def test_a_generation_config_without_the_ids_of_tokens_gets_those_of_the_model(tmp_path):
    own, plain = GenerationConfig(num_beams=2, max_new_tokens=6), trainer(tmp_path, generation_max_length=None)
    it = trainer(tmp_path, generation_max_length=None, generation_config=own)
    expected = plain.predict(ROWS, num_beams=2, max_new_tokens=6).predictions
    np.testing.assert_array_equal(it.predict(ROWS).predictions, expected)
    assert own.decoder_start_token_id is None, "the script's object is its own"
    assert it.predict(ROWS, max_length=4).predictions.shape[1] == 4  # of the call, before max_new_tokens


def test_models_that_cannot_generate_are_refused(tmp_path):
    with pytest.raises(TypeError, match="needs a model with a method generate"):
        trainer(tmp_path, tiny.classifier())


def test_other_arguments_are_refused(tmp_path):
    from posttrain.core import TrainingArguments

    with pytest.raises(TypeError, match="TrainingArguments; pass Seq2SeqTrainingArguments"):
        Seq2SeqTrainer(tiny.seq2seq_lm(), TrainingArguments(str(tmp_path)))
    with pytest.raises(ConfigError, match="generation_num_beams=0 must be >= 1"):
        Seq2SeqTrainingArguments("x", generation_num_beams=0)
    with pytest.raises(ConfigError, match="prediction_loss_only"):
        Seq2SeqTrainingArguments("x", predict_with_generate=True, prediction_loss_only=True)


def test_a_causal_row_without_a_prompt_is_refused(tmp_path):
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}]
    with pytest.raises(DataError, match="no prompt"):
        trainer(tmp_path, tiny.causal_lm(), rows=rows).evaluate()


def test_a_label_that_the_model_does_not_know_is_named(tmp_path):
    rows = [row | {"labels": [*row["labels"][:-1], 400, 1]} for row in ROWS]
    with pytest.raises(DataError, match="labels holds 400.*0 to 383"):
        trainer(tmp_path, rows=rows, predict_with_generate=False).train()
