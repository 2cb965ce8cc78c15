import numpy as np
import pytest
import torch

from posttrain.compat.completion_only import DataCollatorForCompletionOnlyLM
from posttrain.core import DataCollatorForTokenClassification, DataCollatorWithFlattening
from posttrain.core.data.collators import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
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
    assert default_data_collator([{"label_ids": np.float64([1, 0])}])["labels"].dtype == torch.float32
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
    own = [
        row | {"decoder_input_ids": ids, "decoder_attention_mask": [1] * len(ids)}
        for row, ids in zip(rows, ([3, 9], [3, 4, 8]), strict=True)
    ]
    batch = DataCollatorForSeq2Seq(tok, model=seq2seq_lm())(own)
    assert batch["decoder_input_ids"].tolist() == [[3, 9, 0], [3, 4, 8]]
    assert batch["decoder_attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
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


@pytest.mark.parametrize("side", ["right", "left"])
def test_causal_labels_of_a_row_are_kept_where_there_is_one_for_each_token(side):
    import copy

    tok = copy.deepcopy(tokenizer())
    tok.padding_side = side
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 9]}, {"input_ids": [8, 9], "labels": torch.tensor([-100, 9])}]
    batch = DataCollatorForLanguageModeling(tok, mlm=False, pad_to_multiple_of=4)(rows)
    filled = [[-100, 6, 9, -100], [-100, 9, -100, -100]] if side == "right" else [[-100, -100, 6, 9], [-100] * 3 + [9]]
    assert batch["labels"].tolist() == filled
    classes = [{"input_ids": [5, 6], "labels": 1}, {"input_ids": [7, 8], "labels": [1]}, {"input_ids": [9]}]
    labels = DataCollatorForLanguageModeling(tok, mlm=False)(classes)["labels"].tolist()
    assert labels == [[5, 6], [7, 8], [9, -100] if side == "right" else [-100, 9]]


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


def test_subclasses_override_the_call_and_the_masking_under_the_names_of_transformers(tok, masking_tok):
    class Prompts(DataCollatorForLanguageModeling):
        def torch_call(self, examples):
            batch = super().torch_call(examples)
            batch["labels"][:, :2] = -100
            return batch

    class FirstTokens(DataCollatorForLanguageModeling):
        def torch_mask_tokens(self, inputs, special_tokens_mask=None):
            labels = torch.full_like(inputs, -100)
            labels[:, 0] = inputs[:, 0]
            self.seen = special_tokens_mask.tolist()
            return inputs.masked_fill(labels != -100, self.tokenizer.mask_token_id), labels

    class Tags(DataCollatorForTokenClassification):
        def torch_call(self, features):
            return super().torch_call(features) | {"rows": torch.tensor(len(features))}

    rows = [{"input_ids": [10, 11, 12]}, {"input_ids": [13, 14]}]
    assert Prompts(tok, mlm=False)(rows)["labels"].tolist() == [[-100, -100, 12], [-100, -100, -100]]
    in_numpy = Prompts(tok, mlm=False)(rows, return_tensors="np")["labels"]
    assert in_numpy.tolist() == [[-100, -100, 12], [-100, -100, -100]] and not isinstance(in_numpy, torch.Tensor)
    first = FirstTokens(masking_tok)
    batch = first(rows)
    assert batch["labels"][:, 0].tolist() == [10, 13] and first.seen == [[False] * 3, [False, False, True]]
    assert batch["input_ids"][:, 0].tolist() == [masking_tok.mask_token_id] * 2
    tagged = Tags(tok)([{"input_ids": [5, 6], "labels": [1, 0]}, {"input_ids": [7], "labels": [1]}])
    assert tagged["labels"].tolist() == [[1, 0], [1, -100]] and tagged["rows"] == 2


def test_masked_modeling_refuses_what_cannot_work(tok, masking_tok):
    with pytest.raises(ValueError, match="mask token"):
        DataCollatorForLanguageModeling(tok)
    with pytest.raises(ValueError, match="must not exceed 1"):
        DataCollatorForLanguageModeling(masking_tok, mask_replace_prob=0.9, random_replace_prob=0.2)
    with pytest.raises(ValueError, match="mlm_probability=1.5"):
        DataCollatorForLanguageModeling(masking_tok, mlm_probability=1.5)
    with pytest.raises(ValueError, match="mlm_probability=None"):
        DataCollatorForLanguageModeling(masking_tok, mlm_probability=None)
    assert DataCollatorForLanguageModeling(tok, mlm=False, mlm_probability=None)  # nothing is masked


def test_flattening_restarts_positions_and_predicts_nothing_across_a_border():
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 4]}, {"input_ids": [8, 9], "labels": [8, 3]}]
    batch = DataCollatorWithFlattening()(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert batch["labels"].tolist() == [[-100, 6, 4, -100, 3]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert "position_ids" not in DataCollatorWithFlattening(return_position_ids=False)(ROWS)


def test_flattening_tells_flash_attention_where_rows_begin():
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, position_ids_start=1)
    batch = collate(rows)
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 5]
    assert batch["cu_seq_lens_q"].dtype == batch["seq_idx"].dtype == torch.int32
    assert (batch["max_length_q"], batch["max_length_k"]) == (3, 3)
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1]] and batch["position_ids"].tolist() == [[1, 2, 3, 1, 2]]


class WordPieces:
    """A tokenizer as far as the collator needs one: ids are places in a vocabulary of pieces."""

    def __init__(self, pieces):
        self.pieces, self.padding_side, self.mask_token, self.mask_token_id = pieces, "right", "[M]", 1
        self.model_input_names = ["input_ids", "attention_mask"]

    def __len__(self):
        return len(self.pieces)

    def pad(self, rows, **options):
        length = max(len(row["input_ids"]) for row in rows)
        return {
            name: torch.tensor([list(row[name]) + [0] * (length - len(row[name])) for row in rows]) for name in rows[0]
        }

    def convert_ids_to_tokens(self, ids):
        return [self.pieces[i] for i in ids]

    def get_special_tokens_mask(self, ids, already_has_special_tokens):
        return [int(i < 3) for i in ids]


PIECES = ["[P]", "[M]", "[S]", "play", "##ing", "##s", "we", "go"]
MARKED = ["[P]", "[M]", "[S]", "\u0120play", "ing", "s", "\u0120we", "\u0120go"]


@pytest.mark.parametrize("told_by", ["pieces", "marks", "offsets"])
def test_all_tokens_of_a_word_are_predicted_or_none(told_by):
    row = {"input_ids": [2, 3, 4, 5, 6, 3, 4, 7, 2]}  # we: playings we playing go
    words = [[1, 2, 3], [4], [5, 6], [7]]
    if told_by == "offsets":
        row["offset_mapping"] = [(0, 0), (0, 4), (4, 7), (7, 8), (9, 11), (12, 16), (16, 19), (20, 22), (0, 0)]
    short = {"input_ids": [2, 6, 2]} | ({"offset_mapping": [(0, 0), (0, 2), (0, 0)]} if told_by == "offsets" else {})
    tokenizer = WordPieces({"pieces": PIECES, "marks": MARKED, "offsets": ["x"] * 8}[told_by])
    collate = DataCollatorForLanguageModeling(tokenizer, whole_word_mask=True, mlm_probability=0.5, seed=0)
    chosen = torch.zeros(9)
    for _ in range(200):
        labels = collate([dict(row), dict(short)])["labels"]
        predicted = labels != -100
        assert not predicted[0, [0, 8]].any() and not predicted[1, 2:].any() and not predicted[1, 0]
        for word in words:
            assert len(set(predicted[0, word].tolist())) == 1
        chosen += predicted[0]
    assert all(0.4 < chosen[word[0]] / 200 < 0.6 for word in words)


def test_whole_words_need_masked_modeling(tok):
    with pytest.raises(ValueError, match="mlm=False masks nothing"):
        DataCollatorForLanguageModeling(tok, mlm=False, whole_word_mask=True)


@pytest.mark.parametrize(
    ("instruction", "trained"),
    [(None, [(10, 13)]), ([2], [(2, 4), (10, 13)])],
)
def test_what_follows_the_response_template_alone_is_trained_on(tok, instruction, trained, caplog):
    rows = [{"input_ids": [2, 3, 40, 41, 2, 50, 51, 52, 53, 3, 60, 61, 1]}, {"input_ids": [7, 8, 9]}]
    batch = DataCollatorForCompletionOnlyLM([3], instruction, tokenizer=tok)(rows)
    expected = torch.full((2, 13), -100)
    for start, end in trained:
        expected[0, start:end] = batch["input_ids"][0, start:end]
    assert torch.equal(batch["labels"], expected)
    assert "response template [3] is not in a row" in caplog.text and tok.decode([7, 8, 9]) in caplog.text


def test_a_response_template_may_be_text_and_trains_an_sft_trainer(tok, tmp_path):
    from posttrain.sft import SFTConfig, SFTTrainer
    from tests import tiny

    text = "the model was trained"
    collator = DataCollatorForCompletionOnlyLM(" was", tokenizer=tok)
    args = SFTConfig(str(tmp_path), max_steps=1, report_to="none", use_cpu=True, dataset_text_field="text")
    trainer = SFTTrainer(tiny.causal_lm(), args, train_dataset=[{"text": text}] * 4, processing_class=tok,
                         data_collator=collator)  # fmt: skip
    (labels, *_) = next(iter(trainer.get_train_dataloader()))["labels"].tolist()
    end = [] if tok.eos_token_id not in labels else [tok.eos_token_id]
    assert [token for token in labels if token != -100] == tok.encode(" trained", add_special_tokens=False) + end
    assert trainer.train().global_step == 1


def test_the_response_template_masks_padded_rows_of_prompts(tok):
    for wrong in ({"mlm": True}, {"padding_free": True}):
        with pytest.raises(ValueError, match="leave mlm=False"):
            DataCollatorForCompletionOnlyLM([3], tokenizer=tok, **wrong)
