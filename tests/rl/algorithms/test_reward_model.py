"""Reward models: the loss by hand, margins and centering, what is refused, and that pairs are learned."""

import math

import datasets
import pytest
import torch

from posttrain.core.errors import ConfigError
from posttrain.rl import RewardConfig, RewardTrainer
from posttrain.rl.algorithms.reward_model import bradley_terry
from tests import tiny
from tests.contract.trainers import arguments, preference, preference_rows


def test_the_loss_by_hand():
    chosen, rejected = torch.tensor([2.0, 0.0]), torch.tensor([0.5, 1.0])
    expected = [math.log1p(math.exp(-1.5)), math.log1p(math.exp(1.0))]
    assert bradley_terry(chosen, rejected).tolist() == pytest.approx(expected)
    shifted = bradley_terry(chosen, rejected, torch.tensor([1.0, 0.0]), centering=0.1)
    assert shifted.tolist() == pytest.approx([math.log1p(math.exp(-0.5)) + 0.1 * 2.5**2, expected[1] + 0.1])


def test_rewards_do_not_depend_on_padding(tmp_path):
    trainer = preference(RewardTrainer)(tmp_path)
    rows = [trainer.train_dataset[i] for i in range(5)]
    _, together = trainer.compute_loss(trainer.model, trainer.data_collator(rows), return_outputs=True)
    for row, rewards in zip(rows, together["rewards"], strict=True):
        _, alone = trainer.compute_loss(trainer.model, trainer.data_collator([row]), return_outputs=True)
        torch.testing.assert_close(alone["rewards"][0], rewards, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lora", [False, True])
def test_pairs_are_learned(lora, tmp_path):
    peft_config = None
    if lora:
        from peft import LoraConfig

        peft_config = LoraConfig(r=8, target_modules="all-linear", task_type="SEQ_CLS")
    args = arguments(RewardConfig, tmp_path, num_train_epochs=15, learning_rate=1e-2, optim="adamw_torch")
    rows = preference_rows(16)
    trainer = RewardTrainer(tiny.reward_model(), args, train_dataset=rows, eval_dataset=rows,
                            processing_class=tiny.tokenizer(), peft_config=peft_config)  # fmt: skip
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_accuracy"] > 0.9 > before["eval_accuracy"]
    assert after["eval_margin"] > before["eval_margin"] and after["eval_loss"] < before["eval_loss"]
    predicted = trainer.predict(rows)
    assert predicted.predictions.shape == (16, 2)


@pytest.mark.parametrize("task", [None, "CAUSAL_LM", "SEQ_CLS"])
def test_the_head_is_trained_and_saved_with_an_adapter_of_any_task(task, tmp_path):
    """Else a new head, with random weights, would be another one each time that the adapter is loaded."""
    from peft import LoraConfig

    from posttrain.rl.rewards.scorers import reward_functions

    tiny.causal_lm("qwen3").save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    args = arguments(RewardConfig, tmp_path / "out", max_steps=2, learning_rate=0.1)
    config, rows = LoraConfig(r=4, task_type=task), preference_rows(8)
    trainer = RewardTrainer(str(tmp_path / "base"), args, train_dataset=rows, peft_config=config)
    trainer.train()
    trainer.save_model()
    assert config.task_type == task
    (function,) = reward_functions([tmp_path / "out"], None, False)
    found = function(["the cat"] * 2, [" sat", " sold"])
    trainer.model.eval()
    with torch.no_grad():
        ids = [trainer.processing_class(text, return_tensors="pt") for text in ("the cat sat", "the cat sold")]
        assert found == pytest.approx([trainer.model(**one).logits.item() for one in ids], abs=1e-5)
    assert function.__name__ == "out" and abs(found[0] - found[1]) > 1e-4


@pytest.mark.parametrize(("rows_at_once", "accumulation", "steps"), [(8, 1, 1), (2, 4, 1), (2, 1, 4)])
def test_the_extreme_rewards_of_a_record_are_those_of_all_its_rows(rows_at_once, accumulation, steps, tmp_path):
    args = arguments(
        RewardConfig, tmp_path, learning_rate=0.0, per_device_train_batch_size=rows_at_once, max_steps=steps,
        gradient_accumulation_steps=accumulation, logging_steps=steps, per_device_eval_batch_size=3,
    )  # fmt: skip
    rows = preference_rows(8)
    trainer = RewardTrainer(tiny.reward_model(), args, train_dataset=rows, eval_dataset=rows,
                            processing_class=tiny.tokenizer())  # fmt: skip
    rewards = torch.from_numpy(trainer.predict(rows).predictions)
    trainer.train()
    record, evaluated = trainer.state.log_history[0], trainer.evaluate()
    for logged in (record, {name.removeprefix("eval_"): value for name, value in evaluated.items()}):
        assert logged["min_reward"] == pytest.approx(rewards.min().item(), abs=1e-6)
        assert logged["max_reward"] == pytest.approx(rewards.max().item(), abs=1e-6)


def test_a_pair_with_a_text_that_is_too_long_is_dropped_and_counted(tmp_path, caplog):
    short, long = preference_rows(1)[0], " " + "a b " * 40
    rows = [short, short | {"chosen": long}, short | {"rejected": long}]

    def made(**changes):
        args = arguments(RewardConfig, tmp_path, max_length=32, **changes)
        return RewardTrainer(tiny.reward_model(), args, train_dataset=rows, processing_class=tiny.tokenizer())

    assert len(made().train_dataset) == 1  # a reward is that of a whole text
    assert "dropped 2: longer than max_length=32 (rows 1, 2): raise max_length, or set long_rows" in caplog.text
    assert len(made(long_rows="truncate").train_dataset) == 3


def test_a_margin_of_each_pair_is_read(tmp_path):
    rows = [row | {"margin": float(i % 3)} for i, row in enumerate(preference_rows(4))]
    args = arguments(RewardConfig, tmp_path)
    trainer = RewardTrainer(tiny.reward_model(), args, train_dataset=rows, processing_class=tiny.tokenizer())
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    assert inputs["margin"].tolist() == [0, 1, 2, 0]
    loss, outputs = trainer.compute_loss(trainer.model, inputs, return_outputs=True)
    difference = outputs["rewards"][:, 0] - outputs["rewards"][:, 1]
    assert loss.item() == pytest.approx(torch.log1p(torch.exp(inputs["margin"] - difference)).mean().item(), rel=1e-5)


def test_a_model_loaded_by_name_gets_one_output(tmp_path):
    tiny.causal_lm().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    trainer = RewardTrainer(str(tmp_path / "base"), arguments(RewardConfig, tmp_path), train_dataset=preference_rows(3))
    assert trainer.model.config.num_labels == 1 and "SequenceClassification" in type(trainer.model).__name__


def test_a_class_of_ones_own_with_one_output_is_trained(tmp_path):
    class Scorer(type(tiny.reward_model())):
        """Named by nobody's rule, as classes in the repository of a model are."""

    Scorer.__module__ = "transformers_modules.scorer"
    model = tiny.reward_model()
    model.__class__ = Scorer
    before = model.score.weight.clone()
    args = arguments(RewardConfig, tmp_path, max_steps=1)
    RewardTrainer(model, args, None, preference_rows(8), None, tiny.tokenizer()).train()
    assert not torch.equal(before, model.score.weight)


def test_what_cannot_work_is_refused(tmp_path):
    rows, tokenizer = preference_rows(3), tiny.tokenizer()
    with pytest.raises(ValueError, match="num_labels=1"):
        RewardTrainer(tiny.reward_model(num_labels=3), arguments(RewardConfig, tmp_path), None, rows, None, tokenizer)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM with 1 labels"):
        model = tiny.causal_lm(num_labels=1)
        RewardTrainer(model, arguments(RewardConfig, tmp_path), None, rows, None, tokenizer)
    with pytest.raises(ValueError, match="num_labels=1"):
        RewardTrainer(tiny.causal_lm(), arguments(RewardConfig, tmp_path), None, rows, None, tokenizer)
    with pytest.raises(ConfigError, match="padding_free"):
        RewardConfig("out", padding_free=True)
    with pytest.raises(ConfigError, match="center_rewards_coefficient"):
        RewardConfig("out", center_rewards_coefficient=-0.1)


@pytest.mark.parametrize(
    "names",
    [
        ("chosen_ids", "rejected_ids"),
        ("chosen_input_ids", "rejected_input_ids"),
        ("input_ids_chosen", "input_ids_rejected"),
        ("input_ids_chosen", "input_ids_rejected", "attention_mask_chosen", "attention_mask_rejected"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_whole_texts_may_be_tokens_already(names, tmp_path):
    rejected = [5, 8, 0, 0] if len(names) > 2 else [5, 8]
    rows = [
        dict(zip(names, ([5, 6, 7 + i], rejected, [1, 1, 1], [1, 1, 0, 0])[: len(names)], strict=True))
        for i in range(3)
    ]
    dataset = datasets.Dataset.from_list(rows)
    trainer = RewardTrainer(
        tiny.reward_model(), arguments(RewardConfig, tmp_path), train_dataset=dataset, processing_class=tiny.tokenizer()
    )
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [5, 6, 8], [5, 6, 9], [5, 8, 0], [5, 8, 0], [5, 8, 0]]


def test_pictures_are_not_passed_over_in_silence(tmp_path):
    rows = [row | {"images": [0]} for row in preference_rows(3)]
    with pytest.raises(TypeError, match=r"rows have images, which a .* cannot read.*processor"):
        RewardTrainer(
            tiny.reward_model(),
            arguments(RewardConfig, tmp_path),
            train_dataset=rows,
            processing_class=tiny.tokenizer(),
        )


def test_rows_are_prepared_as_the_whole_texts_that_the_model_reads(tmp_path):
    tokenizer = tiny.tokenizer(
        chat_template=tiny.CHATML.replace("<|im_start|>{{", "<|im_start|>{{ shout or '' }}{{", 1)
    )
    rows = [
        {
            "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}],
            "chat_template_kwargs": {"shout": "!" * i},
        }
        for i in range(1, 3)
    ]
    trainer = RewardTrainer(tiny.reward_model(), arguments(RewardConfig, tmp_path), None, rows, None, tokenizer)
    assert trainer.train_dataset.column_names == ["chosen_ids", "rejected_ids"]
    for i, row in enumerate(rows):
        whole = tokenizer.apply_chat_template(row["chosen"], tokenize=False, shout="!" * (i + 1))
        assert tokenizer.decode(trainer.train_dataset[i]["chosen_ids"]) == whole
    assert "!!" in whole


def test_earlier_names_of_columns_are_taken_with_a_word(tmp_path):
    rows = datasets.Dataset.from_list([{"chosen_input_ids": [5, 6, 7], "rejected_input_ids": [5, 6, 8]}] * 3)
    with pytest.warns(FutureWarning, match="will not be supported in v1"):
        trainer = RewardTrainer(
            tiny.reward_model(), arguments(RewardConfig, tmp_path), None, rows, None, tiny.tokenizer()
        )
    assert trainer.train_dataset[0] == {"chosen_ids": [5, 6, 7], "rejected_ids": [5, 6, 8]}
