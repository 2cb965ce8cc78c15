import numpy as np
import pytest
import torch

from posttrain.core.collators import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    default_data_collator,
    pad_rows,
)
from tests.tiny import seq2seq_lm, tokenizer

ROWS = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]


@pytest.fixture
def tok():
    return tokenizer()


@pytest.fixture
def masking_tok():
    import copy

    masked = copy.deepcopy(tokenizer())
    masked.add_special_tokens({"mask_token": "<|mask|>"})
    return masked


def test_pad_rows_fills_the_side_it_is_told_to():
    assert pad_rows([[1, 2, 3], [4], []], 9).tolist() == [[1, 2, 3], [4, 9, 9], [9, 9, 9]]
    assert pad_rows([[1, 2, 3], [4]], 9, side="left").tolist() == [[1, 2, 3], [9, 9, 4]]
    assert pad_rows([[1, 2, 3]], 9, pad_to_multiple_of=4).tolist() == [[1, 2, 3, 9]]
    assert pad_rows([], 9).shape == (0, 0)
    assert pad_rows([np.array([1], dtype=np.int32)], 0).dtype == torch.long
    with pytest.raises(ValueError, match="side='up'"):
        pad_rows([[1]], 0, side="up")


@pytest.mark.parametrize(("label", "dtype"), [(1, torch.long), (0.5, torch.float32), (True, torch.long)])
def test_default_collator_makes_labels_of_the_right_kind(label, dtype):
    batch = default_data_collator([{"x": [1, 2], "label": label, "id": "a"}, {"x": [3, 4], "label": label, "id": "b"}])
    assert set(batch) == {"x", "labels"}
    assert batch["labels"].dtype == dtype and batch["labels"].shape == (2,)
    assert batch["x"].tolist() == [[1, 2], [3, 4]]


def test_default_collator_takes_arrays_tensors_label_ids_and_objects():
    batch = default_data_collator([{"x": np.float64([1, 2]), "label": np.float64(0.5), "n": None}] * 2)
    assert batch["labels"].dtype == torch.float32 and "n" not in batch and batch["x"].shape == (2, 2)
    assert default_data_collator([{"label_ids": [1, 2]}])["labels"].tolist() == [[1, 2]]
    assert default_data_collator([{"label": torch.tensor(3)}])["labels"].tolist() == [3]
    assert isinstance(default_data_collator([{"x": [1]}], return_tensors="np")["x"], np.ndarray)

    class Row:
        def __init__(self):
            self.x = [1, 2]

    assert default_data_collator([Row()])["x"].tolist() == [[1, 2]]


def test_padding_collator_pads_and_renames_the_label(tok):
    batch = DataCollatorWithPadding(tok)([row | {"label": i} for i, row in enumerate(ROWS)])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [0, 1] and "label" not in batch
    assert DataCollatorWithPadding(tok, padding="max_length", max_length=6)(ROWS)["input_ids"].shape == (2, 6)
    assert DataCollatorWithPadding(tok, pad_to_multiple_of=8)(ROWS)["input_ids"].shape == (2, 8)


def test_seq2seq_collator_pads_labels_with_minus_100_and_makes_decoder_inputs(tok):
    rows = [{"input_ids": [5, 6, 7], "labels": [9, 1]}, {"input_ids": [8], "labels": [4, 3, 1]}]
    batch = DataCollatorForSeq2Seq(tok, model=seq2seq_lm())(rows)
    assert batch["labels"].tolist() == [[9, 1, -100], [4, 3, 1]]
    assert batch["decoder_input_ids"].tolist() == [[0, 9, 1], [0, 4, 3]]
    assert rows[0] == {"input_ids": [5, 6, 7], "labels": [9, 1]}
    wide = DataCollatorForSeq2Seq(tok, padding="max_length", max_length=6)(rows)
    assert wide["labels"].shape == wide["input_ids"].shape == (2, 6)
    assert "labels" not in DataCollatorForSeq2Seq(tok)(ROWS)
    with pytest.raises(ValueError, match="labels of 4 tokens do not fit max_length=3"):
        DataCollatorForSeq2Seq(tok, padding="max_length", max_length=3)([{"input_ids": [8], "labels": [4, 3, 2, 1]}])


def test_seq2seq_collator_pads_labels_on_the_tokenizers_side():
    import copy

    left = copy.deepcopy(tokenizer())
    left.padding_side = "left"
    batch = DataCollatorForSeq2Seq(left)([row | {"labels": row["input_ids"]} for row in ROWS])
    assert batch["labels"].tolist() == [[5, 6, 7], [-100, -100, 8]]
    assert batch["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]


def test_token_classification_collator_gives_labels_the_inputs_length(tok):
    rows = [{"input_ids": [5, 6, 7], "labels": [1, 0, 1]}, {"input_ids": [8], "labels": [1]}]
    batch = DataCollatorForTokenClassification(tok, pad_to_multiple_of=4)(rows)
    assert batch["labels"].tolist() == [[1, 0, 1, -100], [1, -100, -100, -100]]
    assert batch["input_ids"].shape == (2, 4)


def test_causal_labels_keep_an_eos_that_is_also_the_pad_token():
    import copy

    same = copy.deepcopy(tokenizer())
    same.pad_token = same.eos_token
    batch = DataCollatorForLanguageModeling(same, mlm=False)([{"input_ids": [5, 6, 1]}, {"input_ids": [1]}])
    assert batch["input_ids"].tolist() == [[5, 6, 1], [1, 1, 1]]
    assert batch["labels"].tolist() == [[5, 6, 1], [1, -100, -100]]
    assert DataCollatorForLanguageModeling(same, mlm=False)([[5, 6], [7]])["labels"].tolist() == [[5, 6], [7, -100]]


def test_masked_labels_are_the_shares_that_were_asked_for(masking_tok):
    mask, size = masking_tok.mask_token_id, 200
    rows = [{"input_ids": [1] + [9] * size}, {"input_ids": [1] + [9] * (size - 50)}] * 30
    torch.manual_seed(0)
    batch = DataCollatorForLanguageModeling(masking_tok, mlm_probability=0.3)(rows)
    chosen = batch["labels"] != -100
    assert not chosen[:, 0].any() and not chosen[1::2, -50:].any()  # special tokens and padding are never chosen
    assert (batch["labels"][chosen] == 9).all()
    assert chosen.sum().item() / (30 * (2 * size - 50)) == pytest.approx(0.3, abs=0.02)
    assert (batch["input_ids"][chosen] == mask).float().mean().item() == pytest.approx(0.8, abs=0.03)
    assert (batch["input_ids"][chosen] == 9).float().mean().item() == pytest.approx(0.1, abs=0.03)
    # everything that was not chosen is shown as it was
    original = DataCollatorForLanguageModeling(masking_tok, mlm_probability=0.0)(rows)["input_ids"]
    assert torch.equal(batch["input_ids"][~chosen], original[~chosen])


def test_masking_is_drawn_from_torchs_generator_or_from_an_own_one(masking_tok):
    rows = [{"input_ids": list(range(5, 200))}]
    collate = DataCollatorForLanguageModeling(masking_tok)
    torch.manual_seed(1)
    first, second = collate(rows)["labels"], collate(rows)["labels"]
    torch.manual_seed(1)
    assert torch.equal(first, collate(rows)["labels"]) and not torch.equal(first, second)
    own = [DataCollatorForLanguageModeling(masking_tok, seed=3)(rows)["labels"] for _ in range(2)]
    assert torch.equal(*own)


def test_masked_modeling_refuses_what_cannot_work(tok, masking_tok):
    with pytest.raises(ValueError, match="mask token"):
        DataCollatorForLanguageModeling(tok)
    with pytest.raises(ValueError, match="must not exceed 1"):
        DataCollatorForLanguageModeling(masking_tok, mask_replace_prob=0.9, random_replace_prob=0.2)
    with pytest.raises(ValueError, match="mlm_probability=1.5"):
        DataCollatorForLanguageModeling(masking_tok, mlm_probability=1.5)


def test_flattening_restarts_positions_and_predicts_nothing_across_a_border():
    batch = DataCollatorWithFlattening()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 3]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 3]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert "position_ids" not in DataCollatorWithFlattening(return_position_ids=False)(ROWS)
