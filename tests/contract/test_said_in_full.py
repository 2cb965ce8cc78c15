"""Messages on rows say which row, which limit, and what to set."""

from __future__ import annotations

import logging

import pytest
from datasets import Dataset

from posttrain.core.errors import DataError
from posttrain.rl import DPOTrainer, GRPOTrainer, RewardTrainer
from posttrain.sft import SFTTrainer
from tests import tiny
from tests.contract.trainers import arguments, digit_sum


def make(trainer_class, folder, rows, **changes):
    more = {"reward_funcs": digit_sum} if trainer_class is GRPOTrainer else {}
    quiet = {"gradient_checkpointing": False, "max_steps": 1}
    model = tiny.reward_model() if trainer_class is RewardTrainer else tiny.causal_lm()
    args = arguments(trainer_class.config_class, folder, **(quiet | changes))
    return trainer_class(model=model, args=args, train_dataset=rows, processing_class=tiny.tokenizer(), **more)


def test_a_row_that_was_cut_to_nothing_names_the_limit_and_the_remedy(tmp_path, caplog):
    rows = [{"prompt": "one", "completion": " two"}, {"prompt": "one " * 60, "completion": " two"}]
    with caplog.at_level(logging.WARNING, "posttrain"):
        make(SFTTrainer, tmp_path, rows, max_length=16)
    (said,) = [record.getMessage() for record in caplog.records if "dropped 1" in record.getMessage()]
    assert (
        "after truncation (rows 1): max_length cut off all trained tokens; raise it, or set truncation_mode or too_long"
        in said
    )


@pytest.mark.parametrize(("mode", "part"), [
    ("keep_start", "the prompt alone fills max_length=16 (rows 1): raise max_length, or set truncation_mode=keep_end"),
    ("keep_end", "truncated to max_length: 1 rows, of which 1 lost the beginning of their prompt"),
])  # fmt: skip
def test_a_prompt_longer_than_the_limit_is_said_by_dpo(mode, part, tmp_path, caplog):
    short = {"prompt": "one", "chosen": " two", "rejected": " three"}
    with caplog.at_level(logging.INFO, "posttrain"):
        make(DPOTrainer, tmp_path, [short, short | {"prompt": "one " * 60}], max_length=16, truncation_mode=mode)
    assert part in caplog.text


@pytest.mark.parametrize(("prompt", "part"), [
    (5, "prompt is not a list of messages but of type int (rows 2)"),
    (["hello"], "prompt is not a list of messages but holds str (rows 2)"),
    (None, "prompt is null (rows 2)"),
    ([], "prompt is empty (rows 2)"),
    ([{"content": "x"}], "a message in prompt has no role (rows 2)"),
], ids=str)  # fmt: skip
def test_a_prompt_that_is_none_is_named_with_its_row_and_type_before_training(prompt, part, tmp_path):
    with pytest.raises(DataError) as caught:
        make(GRPOTrainer, tmp_path, [{"prompt": "a"}, {"prompt": "b"}, {"prompt": prompt}, {"prompt": "c"}])
    assert part in str(caught.value) and "train_dataset" in str(caught.value)


@pytest.mark.parametrize("margin", [None, float("nan"), float("inf")])
def test_a_margin_that_is_no_number_is_named_with_its_row_before_training(margin, tmp_path):
    rows = [{"prompt": "a", "chosen": " b c", "rejected": " d e", "margin": m} for m in (0.5, margin, 1.0)]
    for dataset in (rows, Dataset.from_list(rows)):
        with pytest.raises(DataError, match="train: margin is no finite number in rows 1 "):
            make(RewardTrainer, tmp_path, dataset)


def test_a_completion_that_is_no_messages_says_what_it_is(tmp_path, caplog):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, {"messages": 7}]
    make(SFTTrainer, tmp_path, rows)
    assert "messages is not a list of messages but of type int (rows 1)" in caplog.text
