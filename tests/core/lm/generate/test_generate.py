"""The room behind `predict_with_generate`: prompts, lengths, the order of rows, and what is shown of the outputs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from datasets import Dataset

from posttrain.core.errors import DataError
from posttrain.core.evaluation import eval_loop
from posttrain.lm.generate import generate
from posttrain.lm.generate.generate import GenerationArguments, options, split_prompts
from tests import tiny

PAD = 9


def batch(*rows):
    """``(input_ids, labels)`` of each row, None where there is no token."""
    ids = torch.tensor([[PAD if i is None else i for i in ids] for ids, _ in rows])
    mask = torch.tensor([[int(i is not None) for i in ids] for ids, _ in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([labels for _, labels in rows])}


# ---------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("side", ["right", "left"])
def test_prompts_are_cut_before_the_target_and_padded_on_the_left(side):
    long, short = ([1, 2, 3, 4, 5], [-100, -100, -100, 4, 5]), ([6, 7, 8], [-100, 7, 8])
    padded = ([*short[0], None, None], [*short[1], -100, -100])
    if side == "left":
        padded = ([None, None, *short[0]], [-100, -100, *short[1]])
    prompts, targets = split_prompts(batch(long, padded), PAD)
    assert prompts["input_ids"].tolist() == [[1, 2, 3], [PAD, PAD, 6]]
    assert prompts["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert targets.tolist() == [[4, 5], [7, 8]]


def test_the_last_answer_of_a_conversation_is_the_target_and_earlier_ones_are_prompt():
    prompts, targets = split_prompts(batch(([1, 2, 3, 4, 5, 6], [-100, 2, -100, -100, 5, 6])), PAD)
    assert prompts["input_ids"].tolist() == [[1, 2, 3, 4]]
    assert targets.tolist() == [[5, 6]]


def test_a_row_without_labels_is_all_prompt():
    prompts, targets = split_prompts(batch(([1, 2, None], [-100] * 3), ([3, 4, 5], [-100, -100, 5])), PAD)
    assert prompts["input_ids"].tolist() == [[1, 2], [3, 4]]
    assert targets.tolist() == [[-100], [5]]
    prompts, targets = split_prompts({"input_ids": torch.tensor([[1, 2]])}, PAD)
    assert prompts["input_ids"].tolist() == [[1, 2]] and targets is None


def test_what_belongs_to_rows_is_kept_and_what_belongs_to_tokens_is_not():
    inputs = batch(([1, 2], [-100, 2])) | {"pixels": torch.zeros(1, 3, 2), "position_ids": torch.tensor([[0, 1]])}
    assert set(split_prompts(inputs, PAD)[0]) == {"input_ids", "attention_mask", "pixels"}


def test_rows_without_a_prompt_are_refused():
    with pytest.raises(DataError, match="Row 1 of the batch has no prompt.*predict_with_generate=False"):
        split_prompts(batch(([1, 2], [-100, 2]), ([1, 2], [1, 2])), PAD)


def test_labels_of_another_length_are_refused():
    inputs = batch(([1, 2], [-100, 2])) | {"labels": torch.tensor([[2]])}
    with pytest.raises(DataError, match=r"\(1, 1\) do not match"):
        split_prompts(inputs, PAD)


# ---------------------------------------------------------------------------------------------------- options


@pytest.fixture
def t5():
    return tiny.seq2seq_lm()


@pytest.fixture
def lm():
    return tiny.causal_lm()


def test_the_call_goes_before_the_arguments_and_those_before_the_model(t5):
    t5.generation_config.update(max_length=30, num_beams=2)
    assert options(GenerationArguments(), {}, t5, 5) == {}
    args = GenerationArguments(generation_max_length=12, generation_num_beams=3)
    assert options(args, {}, t5, 5) == {"max_length": 12, "num_beams": 3}
    assert options(args, {"max_length": 7, "num_beams": None}, t5, 5) == {"max_length": 7, "num_beams": 3}
    assert options(args, {"max_new_tokens": 7}, t5, 5) == {"max_new_tokens": 7, "num_beams": 3}


def test_a_length_of_the_arguments_goes_before_max_new_tokens_of_the_model(t5):
    t5.generation_config.max_new_tokens = 99
    assert options(GenerationArguments(generation_max_length=12), {}, t5, 5) == {"max_new_tokens": 11}
    assert options(GenerationArguments(), {"max_length": 9}, t5, 5) == {"max_new_tokens": 8}  # and one of the call
    own = type(t5.generation_config)(max_new_tokens=5)
    given = options(GenerationArguments(), {"max_length": 9, "generation_config": own}, t5, 5)
    assert given["max_new_tokens"] == 8 and "max_length" not in given


def test_without_an_encoder_lengths_count_what_is_generated(lm):
    assert options(GenerationArguments(generation_max_length=12), {}, lm, 5) == {"max_new_tokens": 12}
    assert options(GenerationArguments(), {"max_length": 4}, lm, 5) == {"max_new_tokens": 4}


def test_a_length_that_nobody_asked_for_is_raised_to_the_longest_label(t5, lm, caplog):
    with caplog.at_level("INFO", logger="posttrain"):
        assert options(GenerationArguments(), {}, t5, 40) == {"max_length": 41}
    assert "40 tokens" in caplog.text and "generation_max_length" in caplog.text
    assert options(GenerationArguments(), {}, lm, 40) == {"max_new_tokens": 40}


def test_a_length_that_was_asked_for_and_is_too_short_is_kept_and_named(t5, caplog):
    args = GenerationArguments(generation_max_length=12)
    assert options(args, {}, t5, 40) == {"max_length": 12}
    assert "generation_max_length=12 is below" in caplog.text and "generation_max_length=41 is enough" in caplog.text
    caplog.clear()
    assert options(args, {"max_length": 5}, t5, 40) == {"max_length": 5}, "cut short on purpose"
    assert options(args, {}, t5, 12) == {"max_length": 12}
    assert not caplog.text


def test_a_generation_config_may_be_an_object_a_dict_a_file_or_a_folder(tmp_path):
    from transformers import GenerationConfig

    config = GenerationConfig(max_length=33, num_beams=2)
    config.save_pretrained(tmp_path)
    (tmp_path / "other.json").write_text(json.dumps({"max_length": 34}))
    load = generate.load_generation_config
    assert load(config) is not config
    for source in (
        config,
        {"max_length": 33, "num_beams": 2},
        tmp_path,
        str(tmp_path),
        tmp_path / "generation_config.json",
    ):
        assert (load(source).max_length, load(source).num_beams) == (33, 2)
    assert load(tmp_path / "other.json").max_length == 34
    with pytest.raises(TypeError, match="int"):
        load(3)


def test_a_generation_config_that_could_not_be_saved_is_refused():
    with pytest.raises(ValueError, match="(?s)generation_config.*temperature"):
        generate.load_generation_config({"do_sample": False, "temperature": 0.5})


def test_padding_is_the_pad_token_or_else_the_eos_token(lm):
    assert generate.padding_id(tiny.tokenizer(), lm) == 0
    lm.generation_config.pad_token_id, lm.generation_config.eos_token_id = None, [5, 6]
    assert generate.padding_id(None, lm) == 5
    lm.generation_config.eos_token_id = lm.config.pad_token_id = lm.config.eos_token_id = None
    with pytest.raises(ValueError, match="pad"):
        generate.padding_id(None, lm)


# ---------------------------------------------------------------------------------------------------- the order of rows

ROWS = [{"input_ids": [1] * n, "labels": [1] * m + [-100]} for n, m in ((3, 2), (1, 1), (4, 9), (3, 2))]


@pytest.mark.parametrize(
    "dataset", [ROWS, tuple(ROWS), Dataset.from_list(ROWS), Dataset.from_list(ROWS).with_format("torch")]
)
def test_rows_are_read_longest_first(dataset):
    sampler = generate.longest_first(dataset)
    assert list(sampler) == [2, 0, 3, 1]
    assert sampler.longest_target == 9


def test_padding_by_a_token_of_its_own_is_no_label():
    rows = [{"input_ids": [1], "labels": [5, 6, PAD, PAD]}]
    assert generate.longest_first(rows).longest_target == 4
    assert generate.longest_first(rows, pad_token_id=PAD).longest_target == 2


def test_rows_that_would_be_read_twice_are_not_ordered():
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            raise AssertionError("read")

    assert generate.longest_first(Rows()) is None
    assert generate.longest_first([]) is None
    assert generate.longest_first([{"text": "a"}]) is None
    assert generate.longest_first(Dataset.from_list(ROWS).to_iterable_dataset()) is None
    assert generate.longest_first(Dataset.from_list(ROWS).with_transform(lambda rows: rows)) is None


def test_results_go_back_to_the_order_of_the_dataset():
    order = np.array([2, 0, 1])
    assert eval_loop.restore(np.array([[20], [0], [10]]), order).tolist() == [[0], [10], [20]]
    several = np.array([20, 21, 0, 1, 10, 11])  # two sequences of each row
    assert eval_loop.restore(several, order).tolist() == [0, 1, 10, 11, 20, 21]
    both = eval_loop.restore((np.array([2, 0, 1]), None), order)
    assert both[0].tolist() == [0, 1, 2] and both[1] is None


# ---------------------------------------------------------------------------------------------------- to be looked at


def test_the_first_rows_are_shown_as_text():
    tokenizer = tiny.tokenizer()
    encode = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
    rows = [{"input_ids": encode("user question"), "labels": encode("answer")} for _ in range(3)]
    outputs = np.array([encode("tool") + [0] * 5] * 6)
    labels = np.array([[*encode("answer"), -100]] * 3)
    shown = generate.samples(rows, outputs, labels, tokenizer, 2)
    assert shown == [{"input": "user question", "target": "answer", "output": "tool"}] * 2
    table = generate.table(shown).splitlines()
    assert len(table) == 6 and table[2].split() == ["output", "tool"]


def test_without_an_encoder_the_input_shown_is_the_prompt():
    tokenizer = tiny.tokenizer()
    prompt, target = tokenizer("user question")["input_ids"], tokenizer(" answer")["input_ids"]
    rows = [{"input_ids": prompt + target, "labels": [-100] * len(prompt) + target}]
    [shown] = generate.samples(rows, np.array([target]), np.array([target]), tokenizer, 3, encodes=False)
    assert shown == {"input": "user question", "target": " answer", "output": " answer"}


# ---------------------------------------------------------------------------------------------------- one batch


@pytest.mark.parametrize("synced", [False, True])
def test_processes_that_share_the_weights_step_together_and_run_no_encoder_apart(synced, t5, monkeypatch):
    asked, stock = [], t5.generate

    def run_alone(synced_gpus=None, **kwargs):  # there is no other process to step with
        asked.append({*kwargs, *(["synced_gpus"] if synced_gpus else [])})
        return stock(**kwargs)

    monkeypatch.setattr(t5, "generate", run_alone)
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[8, 1]])}
    loss, tokens, labels = generate.predict_batch(
        t5, inputs, lambda model, batch: model(**batch).loss, {"max_length": 5}, label_names=["labels"], pad_token_id=0,
        synced=synced,
    )  # fmt: skip
    assert asked == [{"input_ids", "max_length", "synced_gpus" if synced else "encoder_outputs"}]
    assert loss.item() == pytest.approx(t5(**inputs).loss.item()) and labels.tolist() == [[8, 1]]
    assert tokens.tolist() == stock(input_ids=inputs["input_ids"], max_length=5).tolist()


def test_the_answer_is_not_given_to_the_decoder(t5):
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[8, 9, 1]])}
    shifted = inputs | {"decoder_input_ids": t5.prepare_decoder_input_ids_from_labels(inputs["labels"])}
    found = [
        generate.predict_batch(
            t5,
            batch,
            lambda model, batch: model(**batch).loss,
            {"max_length": 6},
            label_names=["labels"],
            pad_token_id=0,
        )[1].tolist()
        for batch in (inputs, shifted)
    ]
    assert found[0] == found[1] == t5.generate(input_ids=inputs["input_ids"], max_length=6).tolist()
