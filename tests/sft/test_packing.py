import contextlib
import shutil
import time

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value

from posttrain.core.errors import DataError
from posttrain.lm.attention.document_positions import check_packing
from posttrain.lm.attention.segments import Segments, with_segments, without_padding
from posttrain.lm.attention.varlen_attention import enable_segments
from posttrain.sft import SFTConfig, SFTTrainer
from posttrain.sft.collators import SFTCollator
from posttrain.sft.packing import documents_leak, pack, pack_dataset, pack_stream
from tests.tiny import causal_lm, tokenizer

ARCHITECTURES = ["qwen3", "llama", "mistral", "gemma", "gpt2"]


def one_by_one(lengths, capacity):
    """Best fit, longest first, as the textbook says it: the room left in each bin."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


def prepared(lengths, seed=0):
    generator = np.random.default_rng(seed)
    ids = [generator.integers(4, 384, length).tolist() for length in lengths]
    labels = [[-100] * (len(row) // 2) + row[len(row) // 2 :] for row in ids]
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


def model(arch, attention="sdpa"):
    window = {"sliding_window": 8} if arch == "mistral" else {}
    return causal_lm(arch, attn_implementation=attention, **window).eval()


def test_best_fit_is_the_textbooks():
    generator = np.random.default_rng(0)
    for _ in range(200):
        lengths = generator.integers(1, 60, generator.integers(0, 80))
        packing = pack(lengths, 64)
        assert sorted(64 - sum(stop - start for _, start, stop in pieces) for pieces in packing) == one_by_one(
            lengths, 64
        )
        assert sorted(row for pieces in packing for row, _, _ in pieces) == list(range(len(lengths)))


def test_each_row_goes_where_it_leaves_the_least_room():
    packing = pack([6, 5, 3, 4], 10)
    assert list(packing) == [[(0, 0, 6), (3, 0, 4)], [(1, 0, 5), (2, 0, 3)]]
    assert packing.fill == 18 / 20


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_cutting_strategies_keep_every_token_once(strategy):
    generator = np.random.default_rng(1)
    for _ in range(50):
        lengths = generator.integers(0, 200, 30)
        packing = pack(lengths, 50, strategy)
        tokens = sorted((row, i) for pieces in packing for row, start, stop in pieces for i in range(start, stop))
        assert tokens == [(row, i) for row, length in enumerate(lengths) for i in range(length)]
        assert all(0 < sum(stop - start for _, start, stop in pieces) <= 50 for pieces in packing)


def test_wrapped_is_one_stream_cut_at_every_capacity():
    assert list(pack([3, 4, 2], 4, "wrapped")) == [[(0, 0, 3), (1, 0, 1)], [(1, 1, 4), (2, 0, 1)], [(2, 1, 2)]]


def test_rows_that_fit_no_bin_are_refused_with_what_to_set():
    with pytest.raises(DataError, match="Row 1 has 9 tokens .* bin of 8.*bfd_split"):
        pack([3, 9], 8)
    with pytest.raises(ValueError, match="'ffd' is not one of bfd"):
        pack([3], 8, "ffd")
    with pytest.raises(ValueError, match="capacity=0"):
        pack([3], 0)


def test_packing_is_deterministic_and_keeps_the_datasets_order():
    lengths = np.random.default_rng(2).integers(1, 100, 500)
    first, again = pack(lengths, 128), pack(lengths, 128)
    assert list(first) == list(again)
    leaders = [min(row for row, _, _ in pieces) for pieces in first]
    assert np.corrcoef(leaders, np.arange(len(leaders)))[0, 1] > 0.9


def test_a_hundred_thousand_rows_are_packed_in_a_moment():
    lengths = np.random.default_rng(3).integers(10, 2000, 100_000)
    start = time.process_time()
    packing = pack(lengths, 2048)
    assert time.process_time() - start < 1.0
    assert packing.fill > 0.98


def test_packed_rows_hold_whole_documents_and_predict_nothing_across_a_border():
    dataset = prepared([7, 3, 5, 8, 2])
    packed = pack_dataset(dataset, 10)
    found = {}
    for row in packed:
        assert len(row["input_ids"]) == len(row["labels"]) == sum(row["seq_lengths"]) <= 10
        start = 0
        for length in row["seq_lengths"]:
            ids, labels = (row[name][start : start + length] for name in ("input_ids", "labels"))
            assert labels[0] == -100
            found[tuple(ids)] = labels[1:]
            start += length
    assert found == {tuple(row["input_ids"]): row["labels"][1:] for row in dataset}


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_pieces_of_a_document_are_documents_of_their_own(strategy):
    packed = pack_dataset(prepared([25, 4, 13]), 10, strategy)
    for row in packed:
        starts = np.cumsum(row["seq_lengths"]) - row["seq_lengths"]
        assert all(row["labels"][start] == -100 for start in starts)
    assert sum(len(row["input_ids"]) for row in packed) == 42


def test_the_log_says_how_full_the_packed_rows_are(caplog):
    caplog.set_level("INFO", logger="posttrain")
    pack_dataset(prepared([6, 6, 4]), 12, name="eval")
    assert "eval: packed into 2 rows, 66.7% full." in caplog.text


def test_a_selection_of_a_dataset_is_packed_as_selected():
    dataset = prepared([4, 5, 6, 7]).select([3, 1])
    packed = pack_dataset(dataset, 12)
    assert packed[0]["input_ids"] == dataset[0]["input_ids"] + dataset[1]["input_ids"]
    assert packed[0]["seq_lengths"] == [7, 5]


def test_plain_rows_are_padded_with_a_mask():
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9]}]
    batch = SFTCollator(pad_token_id=1, pad_to_multiple_of=4)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 1], [8, 9, 1, 1]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100], [8, 9, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]


def test_packed_rows_restart_positions_and_pad_with_a_document_of_its_own():
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8], "seq_lengths": [2, 2]},
        {"input_ids": [9, 4], "labels": [-100, 4], "seq_lengths": [2]},
    ]
    batch = SFTCollator(pad_token_id=0)(rows)
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1], [0, 1, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 6, -100, 8], [-100, 4, -100, -100]]
    flat = SFTCollator(pad_token_id=0, padding_free=True, pad_to_multiple_of=8)(rows)
    assert flat["input_ids"].tolist() == [[5, 6, 7, 8, 9, 4, 0, 0]]
    assert flat["position_ids"].tolist() == [[0, 1, 0, 1, 0, 1, 0, 1]]
    assert flat["labels"].tolist() == [[-100, 6, -100, 8, -100, 4, -100, -100]]


def test_padding_free_takes_plain_rows_too():
    batch = SFTCollator(pad_token_id=0, padding_free=True)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9]]


def test_the_documents_of_a_batch_are_there_for_models_that_read_segments():
    rows = [{"input_ids": [5, 6, 7, 8], "seq_lengths": [1, 3]}, {"input_ids": [9, 4], "seq_lengths": [2]}]
    batch = SFTCollator(pad_token_id=0, seq_lengths=True)(rows)
    assert batch["seq_lengths"].tolist() == [[1, 3], [2, 0]]
    read = with_segments(batch)
    assert read["segments"] == Segments.documents([1, 3, 2, 2]) and "seq_lengths" not in read
    assert torch.equal(read["position_ids"], batch["position_ids"])
    row = without_padding(batch)
    assert row["segments"] == Segments.documents([1, 3, 2])
    assert row["input_ids"].tolist() == [[5, 6, 7, 8, 9, 4]] and row["labels"].tolist() == [[-100, -100, 7, 8, -100, 4]]
    flat = SFTCollator(pad_token_id=0, padding_free=True, seq_lengths=True)(rows)
    assert with_segments(flat)["segments"] == Segments.documents([1, 3, 2])
    assert "seq_lengths" not in SFTCollator(pad_token_id=0, seq_lengths=True)([{"input_ids": [5, 6]}])


@pytest.mark.parametrize("padding_free", [False, True], ids=["packed", "padding_free"])
@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "segments"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_packed_documents_logits_are_those_of_the_document_alone(arch, attention, strategy, padding_free):
    lm, dataset = model(arch, "sdpa" if attention == "segments" else attention), prepared([12, 7, 20, 1, 9, 15])
    if attention == "segments":
        enable_segments(lm)
    capacity = 40 if strategy == "bfd" else 18  # which cuts the longest
    packed = list(pack_dataset(dataset, capacity, strategy))
    assert max(len(row["seq_lengths"]) for row in packed) > 1
    assert len({len(row["input_ids"]) for row in packed}) > 1 and (
        strategy == "bfd" or sum(len(row["seq_lengths"]) for row in packed) > len(dataset)
    )
    batch = SFTCollator(pad_token_id=0, padding_free=padding_free, seq_lengths=attention == "segments")(packed)
    batch = with_segments(batch)
    batch.pop("labels")
    with torch.no_grad():
        logits = lm(**batch, use_cache=False).logits
        start = 0
        for i, row in enumerate(packed):
            start = start if padding_free else 0
            for length in row["seq_lengths"]:
                ids = batch["input_ids"][0 if padding_free else i, start : start + length]
                alone = lm(input_ids=ids[None], use_cache=False).logits[0]
                found = logits[0 if padding_free else i, start : start + length]
                torch.testing.assert_close(found, alone, rtol=0, atol=1e-5)
                start += length


@pytest.mark.slow  # kernels are compiled; one length each: torch 2.13 fails to compile a second for the CPU
@pytest.mark.skipif(shutil.which("g++") is None, reason="flex attention is compiled")
@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch != "gpt2"])  # which has no flex attention
def test_flex_attention_keeps_packed_documents_apart(arch):
    lm, dataset = model(arch), prepared([52, 37, 60, 11, 39])
    (row,) = pack_dataset(dataset, 256)
    batch = SFTCollator(pad_token_id=0)([row])
    with torch.no_grad():
        alone = torch.cat(
            [lm(input_ids=ids[None]).logits[0] for ids in batch["input_ids"][0].split(row["seq_lengths"])]
        )
        lm.set_attn_implementation("flex_attention")
        found = lm(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_packing_changes_neither_the_number_of_trained_tokens_nor_their_loss(arch):
    lm, dataset = model(arch), prepared([12, 7, 20, 9, 15])

    def summed_loss(batch):
        with torch.no_grad():
            logits = lm(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits
        targets = batch["labels"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")
        return loss, (targets != -100).sum()

    collate = SFTCollator(pad_token_id=0)
    plain, packed = summed_loss(collate(list(dataset))), summed_loss(collate(list(pack_dataset(dataset, 40))))
    assert plain[1] == packed[1]
    torch.testing.assert_close(plain[0], packed[0])


SHORT, LONG, THETA = [1.0, 1.1, 1.2, 1.3], [4.0, 5.0, 6.0, 7.0], {"rope_theta": 1e4}
ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "factor": 4.0, "original_max_position_embeddings": 16, "short_factor": SHORT, "long_factor": LONG
    },
    "llama3": {
        "factor": 4.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0
    },
    "proportional": {},
}  # fmt: skip


def test_every_rope_of_transformers_is_tried():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert {*ROPE_INIT_FUNCTIONS} <= {*ROPES}


@pytest.mark.parametrize("kind", ROPES)
def test_a_rope_whose_frequencies_depend_on_the_longest_document_is_refused_exactly_where_it_leaks(kind):
    rule = {"rope_type": kind, **THETA, **ROPES[kind]}
    model = causal_lm(rope_parameters=rule, max_position_embeddings=16).eval()
    enable_segments(model)
    document, alone = list(range(7, 13)), torch.arange(7, 13)[None]

    def change(before):
        """How far a document of 6 behind one of so many tokens is from itself alone."""
        row, segments = [*range(20, 20 + before), *document], Segments.documents([before, 6])
        with torch.no_grad():
            packed = model(input_ids=torch.tensor([row]), **segments.model_inputs((1, len(row)))).logits[0, before:]
            return (packed - model(input_ids=alone).logits[0]).abs().max().item()

    assert change(16) < 1e-4
    check_packing(model, 16)
    for longest in (40, None):
        with pytest.raises(ValueError, match=kind) if change(40) > 1e-3 else contextlib.nullcontext():
            check_packing(model, longest)


@pytest.mark.parametrize("layout", ["packing", "padding_free", "eval_packing"])
def test_a_run_that_would_pack_such_documents_is_refused(layout, tmp_path):
    model = causal_lm(rope_parameters={"rope_type": "longrope", **THETA, **ROPES["longrope"]})
    rows = [{"input_ids": [5, 6, 7]}] * 2
    args = {"max_length": 64, "use_cpu": True, "report_to": "none", layout: True}
    with pytest.raises(ValueError, match="is longrope: one document of more than 16 .* max_length=16 in place of 64"):
        SFTTrainer(model, SFTConfig(str(tmp_path), **args), train_dataset=rows, processing_class=tokenizer())


def test_models_that_let_documents_see_each_other_are_found_out():
    from transformers import AutoModelForCausalLM, OPTConfig

    for arch in ARCHITECTURES:
        lm = model(arch).train()
        assert documents_leak(lm) < 1e-6 and lm.training
    torch.manual_seed(0)
    size = {"vocab_size": 384, "hidden_size": 32, "ffn_dim": 64, "word_embed_proj_dim": 32}
    opt = AutoModelForCausalLM.from_config(OPTConfig(**size, num_hidden_layers=2, num_attention_heads=4))
    assert documents_leak(opt) > 1e-3


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_a_stream_is_packed_window_by_window(strategy, monkeypatch):
    monkeypatch.setattr("posttrain.sft.packing.ROWS_PER_WINDOW", 7)
    lengths = [3, 8, 1, 0, 5, 8, 2, 4, 4, 6, 1, 7, 3, 3, 2, 8, 5]
    rows = [{"input_ids": list(range(100 * i, 100 * i + n)), "labels": list(range(100 * i, 100 * i + n))}
            for i, n in enumerate(lengths)]  # fmt: skip
    features = Features({name: List(Value("int32")) for name in ("input_ids", "labels")})
    dataset = Dataset.from_list(rows, features=features)
    packed = list(pack_stream(dataset.to_iterable_dataset(), 8, strategy))
    windows = [
        pack_dataset(dataset.select(range(i, min(i + 7, len(rows)))), 8, strategy) for i in range(0, len(rows), 7)
    ]
    assert packed == [row for window in windows for row in window]
    assert sorted(token for row in packed for token in row["input_ids"]) == sorted(
        token for row in rows for token in row["input_ids"]
    )
