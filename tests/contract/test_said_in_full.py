"""Messages on rows say which row, which limit, and what to set."""

from __future__ import annotations

import dataclasses
import logging
import re

import pytest
from datasets import Dataset

from posttrain.core import TrainingArguments
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.logging import trackers
from posttrain.rl import DPOTrainer, GRPOTrainer, RewardTrainer
from posttrain.rl.agents.environments import schema_of
from posttrain.rl.tools.protocol import ToolProtocol
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny
from tests.contract.trainers import TRAINERS, arguments, digit_sum
from tests.test_architecture import sources


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


def test_no_sentence_ends_twice_after_a_hint():
    """``, did you mean 'x'?`` ends a sentence; where more follows, a full stop stands for a missing hint alone."""
    wrong = [
        f"{where}: {found[0]}"
        for where, path in sources().items()
        if (found := re.search(r"\{(did_you_mean\([^{}]*\)|near)\}\.", path.read_text(encoding="utf-8")))
    ]
    assert not wrong


def test_an_argument_of_several_configs_is_said_to_be_theirs():
    with pytest.raises(ConfigError) as caught:
        TrainingArguments("out", packing=True, max_completion_length=3)
    one, several = sorted(caught.value.problems, key=lambda text: "max_completion" in text)
    assert ", which SFTConfig has; use that class instead of TrainingArguments" in one
    assert " and " in several and " have; use one of those instead of TrainingArguments" in several


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["neptune", "flyte"])
def test_a_tracker_without_its_package_is_named_with_the_command(name):
    with pytest.raises(ImportError, match=rf"report_to='{name}': .*pip install"):
        trackers.tracker_callbacks([name])


def test_a_loss_without_a_count_is_said_to_be_taken_for_a_mean(tmp_path, caplog):
    for trainer, said in (("causal-lm", False), ("three-arguments", True)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "posttrain"):
            TRAINERS[trainer](tmp_path, max_steps=1).train()
        assert ("takes no num_items_in_batch: its loss is treated as a mean" in caplog.text) == said


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_plain_arguments_of_sft_are_kept_and_its_own_defaults_listed(tmp_path, caplog):
    rows = [{"prompt": "one", "completion": " two"}]
    plain = TrainingArguments(str(tmp_path), learning_rate=0.25, report_to="none", use_cpu=True)
    with caplog.at_level(logging.INFO, "posttrain"):
        options = dict(train_dataset=rows, processing_class=tiny.tokenizer())
        trainer = SFTTrainer(tiny.causal_lm(), plain, packing=False, **options)
    assert trainer.args.learning_rate == 0.25
    assert "The rest is SFTConfig's default: " in caplog.text
    assert "max_length=1024" in caplog.text and ", packing=" not in caplog.text  # packing was given


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("given", [1024, 64])
def test_an_argument_that_the_config_holds_too_is_not_overruled_silently(given, tmp_path):
    """1024 is the default: it counts where it was written, and not in a copy that holds every field."""
    quiet = {"report_to": "none", "use_cpu": True}
    rows = [{"prompt": "one", "completion": " two"}]
    parts = {"train_dataset": rows, "processing_class": tiny.tokenizer(), "max_seq_length": 32}
    with pytest.raises(
        ConfigError, match=f"max_length=32 was passed to SFTTrainer, and max_length={given} in its args; give it"
    ):
        SFTTrainer(tiny.causal_lm(), SFTConfig(str(tmp_path), max_length=given, **quiet), **parts)
    copied = dataclasses.replace(SFTConfig(str(tmp_path), **quiet), logging_steps=1)
    assert SFTTrainer(tiny.causal_lm(), copied, **parts).args.max_length == 32
    plain = TrainingArguments(str(tmp_path), **quiet)  # in which neither is written
    trainer = SFTTrainer(tiny.causal_lm(), plain, neftune_noise_alpha=5.0, **parts)
    assert (trainer.args.neftune_noise_alpha, trainer.args.max_length) == (5.0, 32)
    plain = TrainingArguments(str(tmp_path), neftune_noise_alpha=1.0, **quiet)
    with pytest.raises(
        ConfigError, match="neftune_noise_alpha=5.0 was passed to SFTTrainer, and neftune_noise_alpha=1"
    ):
        SFTTrainer(tiny.causal_lm(), plain, neftune_noise_alpha=5.0, **parts)


def test_a_reason_from_elsewhere_ends_without_a_stop_of_its_own(tmp_path):
    """The remedy follows behind one full stop, and the numbers of the rows directly."""
    talk = [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}] * 2
    with pytest.raises(DataError) as caught:
        args = SFTConfig(str(tmp_path), report_to="none", use_cpu=True)
        SFTTrainer(tiny.causal_lm(), args, train_dataset=talk, processing_class=tiny.tokenizer(chat_template=None))
    assert "or give rows of text (rows 0, 1)" in str(caught.value)
    with pytest.raises(ValueError, match="with this chat template: .* give rows of text. Set chat_template_path to"):
        ToolProtocol(tiny.tokenizer(chat_template=None))

    def double(value: int):
        return 2 * value

    with pytest.raises(TypeError, match="because it has no docstring. A tool has a type hint"):
        schema_of(double)
