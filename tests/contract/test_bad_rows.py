"""A row that cannot be trained on is counted and named with its number by every trainer that prepares rows, and refused
with `on_bad_rows="raise"`.
"""

from functools import partial

import pyarrow
import pytest
from datasets import Dataset, IterableDataset

from posttrain.core.errors import ConfigError, DataError
from posttrain.rl import (
    CPOConfig,
    CPOTrainer,
    DPOConfig,
    DPOTrainer,
    GKDConfig,
    GKDTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    ORPOConfig,
    ORPOTrainer,
    RewardConfig,
    RewardTrainer,
)
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny
from tests.contract.trainers import TRAINERS

WORDS = tiny.CORPUS[0].split()
PAIR = {"prompt": "What is", "chosen": " four", "rejected": " two and two"}
TEXT = {"prompt": "What is", "completion": " two and two"}
HALF = " half \ud83d"  # of a surrogate pair, as a text that was cut between two code units ends
#: trainer, its config, a good row, bad rows
KINDS = {
    "sft": (SFTTrainer, SFTConfig, TEXT, [{"completion": None}, {"completion": ""}, {"completion": HALF}]),
    "dpo": (DPOTrainer, DPOConfig, PAIR, [
        {"chosen": None}, {"chosen": PAIR["rejected"]}, {"rejected": ""}, {"prompt": None},
    ]),
    "orpo": (ORPOTrainer, ORPOConfig, PAIR, [{"chosen": None}, {"prompt": None}]),
    "cpo": (CPOTrainer, CPOConfig, PAIR, [{"chosen": None}, {"prompt": None}]),
    "reward": (RewardTrainer, RewardConfig, PAIR, [{"rejected": None}, {"prompt": None}]),
    "kto": (KTOTrainer, KTOConfig, TEXT | {"label": True}, [
        {"completion": None}, {"label": None}, {"prompt": None},
    ]),
}  # fmt: skip


def rows_of(kind):
    good, bad = KINDS[kind][2:]
    rows = [dict(good) for _ in range(6)]
    if kind == "kto":
        rows = [row | {"label": bool(number % 2)} for number, row in enumerate(rows)]
    return rows + [good | change for change in bad]


def make(kind, folder, rows, **changes):
    trainer, config, *_ = KINDS[kind]
    usual = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "gradient_checkpointing": False}
    model = tiny.reward_model() if kind == "reward" else tiny.causal_lm()
    args = config(output_dir=str(folder), per_device_train_batch_size=2, max_steps=2, **(usual | changes))
    return trainer(model, args=args, train_dataset=rows, processing_class=tiny.tokenizer())


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_cannot_be_used_is_named_or_refused(kind, tmp_path, caplog):
    rows = rows_of(kind)
    numbers = list(range(6, len(rows)))
    made = make(kind, tmp_path, rows)
    assert len(made.train_dataset) == 6
    assert sorted(n for _, first in made.data_reports["train"].dropped.values() for n in first) == numbers
    assert all(f"rows {', '.join(map(str, first))}" in caplog.text
               for _, first in made.data_reports["train"].dropped.values())  # fmt: skip
    with pytest.raises(DataError, match=f"{len(numbers)} of {len(rows)} rows cannot be trained on.*(?s:.*rows 6)"):
        make(kind, tmp_path, rows, on_bad_rows="raise")
    assert len(make(kind, tmp_path, rows[:6], on_bad_rows="raise").train_dataset) == 6


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto"])
def test_rows_of_a_stream_are_named_again_with_their_number_at_the_end(kind, tmp_path, caplog):
    def stream():
        return IterableDataset.from_generator(rows_of, gen_kwargs={"kind": kind})

    make(kind, tmp_path, stream()).train()
    assert "(rows 6" in caplog.text
    with pytest.raises(DataError, match="cannot be trained on"):
        make(kind, tmp_path, stream(), on_bad_rows="raise").train()


@pytest.mark.parametrize("kind", ["dpo", "orpo", "kto", "reward"])
@pytest.mark.parametrize(("value", "says"), [(HALF, "surrogates not allowed"), (5, "int")])
def test_a_row_that_forms_no_table_with_the_others_is_refused_with_its_number(kind, value, says, tmp_path):
    column = "completion" if kind == "kto" else "chosen"
    rows = [dict(KINDS[kind][2]) for _ in range(9)]
    rows[5][column] = value
    with pytest.raises(DataError, match=f"row 5 does not form a table with those before it .{column}: .*{says}"):
        make(kind, tmp_path, rows)


@pytest.mark.parametrize("wrong", [0, 4])
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_bytes_that_are_no_utf_8_are_refused_with_their_row(kind, wrong, tmp_path):
    rows = Dataset.from_list([PAIR if kind == "grpo" else KINDS[kind][2]] * 6)
    column = {"sft": "completion", "dpo": "chosen", "grpo": "prompt"}[kind]
    texts = [b" good"] * 6
    texts[wrong] = b" caf\xe9"
    at = rows.column_names.index(column)
    rows = Dataset(rows.data.table.set_column(at, column, pyarrow.array(texts).view(pyarrow.string())))
    with pytest.raises(DataError, match=f"train: row {wrong} holds bytes that are no text in UTF-8 .*0xe9"):
        if kind == "grpo":
            args = GRPOConfig(str(tmp_path), use_cpu=True, num_generations=2)
            GRPOTrainer(tiny.causal_lm(), lambda **_: [], args, rows, processing_class=tiny.tokenizer())
        make(kind, tmp_path, rows)


def test_rows_that_another_argument_leaves_out_are_not_refused(tmp_path):
    long = {"text": " ".join(WORDS * 20)}
    made = make("sft", tmp_path, [{"text": "a b c d"}, long], max_length=16, too_long="drop", on_bad_rows="raise")
    assert len(made.train_dataset) == 1


def test_an_unknown_answer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="on_bad_rows"):
        SFTConfig(str(tmp_path), on_bad_rows="ignore")


def test_the_reason_is_that_of_the_value_that_is_missing(tmp_path):
    rows = [{"chosen": "two and two", "rejected": "two and one"}] * 4 + [{"rejected": "two and one"}]
    with pytest.raises(DataError, match="chosen is null"):
        make("reward", tmp_path, rows, on_bad_rows="raise")


def test_a_conversation_that_distillation_cannot_read_is_named(tmp_path):
    good = {"messages": [{"role": "user", "content": "What"}, {"role": "assistant", "content": " four"}]}
    for rows in ([good] * 8 + [{"messages": None}], Dataset.from_list([good] * 8 + [{"messages": None}])):
        with pytest.raises(DataError, match=r"train_dataset: messages is null \(rows 8\)"):
            GKDTrainer(
                tiny.causal_lm(), args=GKDConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none"),
                teacher_model=tiny.causal_lm(seed=3), train_dataset=rows, processing_class=tiny.tokenizer(),
            )  # fmt: skip


def test_a_column_of_texts_that_is_not_there_is_named_with_those_that_are(tmp_path):
    with pytest.raises(DataError, match="no column 'txt', the one that dataset_text_field names. It has text, did you"):
        make("sft", tmp_path, [{"text": "two and two"}] * 4, dataset_text_field="txt")


@pytest.mark.parametrize("kind", ["grpo", "rloo", "online-dpo", "sdft", "sdpo", "gkd", "distillation"])
def test_a_prompt_with_a_token_that_the_model_does_not_know_is_refused_before_sampling(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "causal_lm", partial(tiny.causal_lm, vocab_size=40))
    with pytest.raises(DataError, match=r"The prompt .* input_ids holds \d+, and the model's range is 0 to 39"):
        TRAINERS[kind](tmp_path).train()
