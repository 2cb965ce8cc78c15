"""Rows with images in packed rows and in batches by tokens: their lengths, and that documents stay apart."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from posttrain.core.errors import ConfigError, DataError
from posttrain.core.models import wrapping
from posttrain.lm.attention import varlen_attention
from posttrain.lm.attention.segments import with_segments
from posttrain.lm.images.image_tokens import CHECKED, ImageTokens
from posttrain.lm.images.images import ImageReader, numbered
from posttrain.sft import SFTConfig, SFTTrainer
from posttrain.sft.vision import PACKED, PackedRows, images_leak, pack_rows, row_lengths
from tests import tiny_vision, versions
from tests.contract.trainers import images, weights
from tests.sft.test_vision_families import collator, family, loss_of, say  # noqa: F401  (a fixture)

PIL = pytest.importorskip("PIL.Image")

#: Families whose layers carry a state from one document into the next, or whose images are masked by the places of
#: another document's, and what is said of them.
LEAKY = {"qwen3_5": "Qwen3_5.* lets the documents of a packed row attend to each other"}
LEAKY |= {f"gemma{i}": f"Gemma{i}.* lets the images of a packed row's documents affect each other" for i in (3, 4)}


def rows():
    """With two images of several sizes, with none, with one in the middle of a message, and with a second size."""
    image = tiny_vision.image
    parts = [{"type": "text", "text": "look :"}, {"type": "image"}, {"type": "text", "text": "now"}]
    return [
        {"images": [image(0), image(1, 24, 16)], "messages": say("Which is red ?", "the first")},
        {"images": [], "messages": say("Is there one ?", "none of them")},
        {"images": [image(3, 16, 24)], "messages": say(parts, "yes")},
        {"images": [image(4, 40, 18)], "messages": say("What is it ?", "a bird , I think")},
    ]


def in_float64(batch):
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def lengths_in(collate, given):
    return [int(collate([row])["attention_mask"].sum()) for row in given]


def test_lengths_are_those_of_the_batches_and_no_image_is_decoded(family, monkeypatch):  # noqa: F811
    collate, given = collator(family), rows()
    expected = lengths_in(collate, given)
    stored = []
    for row in given:
        files = [io.BytesIO() for _ in row["images"]]
        for image, file in zip(row["images"], files, strict=True):
            image.save(file, "PNG")
        stored.append(row | {"images": [file.getvalue() for file in files]})
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", None)  # what decodes
    assert row_lengths(numbered(stored), collate.prepare) == expected
    capped = collator(family, max_length=max(expected) - 1).prepare
    assert row_lengths(numbered(stored), capped) == [min(length, max(expected) - 1) for length in expected]
    capped = collator(family, max_length=max(expected) - 1, too_long="drop").prepare
    kept = [length if length < max(expected) else 1 for length in expected]
    assert row_lengths(numbered(stored), capped) == kept


def test_many_sizes_are_counted_without_a_blank_of_each(family):  # noqa: F811
    collate, image = collator(family), tiny_vision.image
    sizes = [(16 + 5 * i, 20 + 7 * (i % 5)) for i in range(16)]
    given = [{"images": [image(0, *size)], "messages": say("what ?", "yes")} for size in sizes]
    assert row_lengths(numbered(given), collate.prepare) == lengths_in(collate, given)
    tokens = ImageTokens(collate.prepare.vision)
    tokens.show(family[2].image_token * len(sizes), sizes)
    # the marks of rows and columns are words of those tokenizers; here they are several tokens, and blanks are counted
    agrees = family[0] not in ("idefics3", "smolvlm")
    if family[0] == "idefics2":  # what its processor writes depends on the text around an image: all are blanks
        assert tokens.vision.reports is False
        return
    assert len(tokens._frames) == CHECKED and (len(set(tokens._frames)) == 1) == agrees


def test_a_size_is_that_of_the_picture_as_it_is_shown(tmp_path):
    for place in range(1, 9):
        exif = PIL.Exif()
        exif[0x0112] = place
        tiny_vision.image(0, 24, 16).save(tmp_path / "turned.jpg", exif=exif)
        reader = ImageReader()
        assert reader.size(str(tmp_path / "turned.jpg")) == reader(str(tmp_path / "turned.jpg")).size
    with pytest.raises(DataError, match="more than max_image_pixels=100, and was not decoded"):
        ImageReader(max_pixels=100).size(tiny_vision.image(0))


def test_packed_rows_have_the_loss_and_the_gradients_of_their_rows_alone(family, tmp_path):  # noqa: F811
    name, model, processor = family
    if name in LEAKY:
        args = SFTConfig(str(tmp_path), packing=True, max_length=256, use_cpu=True, report_to="none")
        # The mask of transformers 5.17 keeps images of Gemma 3 apart.
        kept = name == "gemma3" and not versions.IS_CURRENT
        with contextlib.nullcontext() if kept else pytest.raises(ValueError, match=LEAKY[name]):
            SFTTrainer(model, args, train_dataset=rows(), processing_class=processor)
        return
    assert images_leak(model, collator(family)) == 0
    collate = collator(family)
    exact = copy.deepcopy(model).to(torch.float64)
    for config in wrapping.configs(exact):
        config.use_cache = False  # as trainers set it
    alone = [loss_of(exact, in_float64(collate([row]))) for row in rows()]
    loss, gradients = sum(part for part, _ in alone), {}
    for parameter in alone[0][1]:
        gradients[parameter] = sum(part[parameter] for _, part in alone)
    size = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    varlen_attention.enable_segments(exact, collate.prepare.vision.example())
    for tells_lengths in (False, True):  # under a mask, and document by document
        make = dataclasses.replace(collate, seq_lengths=tells_lengths)
        joined = dataclasses.replace(make, padding_free=True)
        for batch in (make([{PACKED: rows()[:3]}, {PACKED: rows()[3:]}]), joined(rows())):
            assert "attention_mask" not in batch and len(batch["input_ids"]) in (1, 2)
            batch = with_segments(in_float64(batch))
            assert ("segments" in batch) == tells_lengths
            found, grads = loss_of(exact, batch)
            torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
            for parameter, gradient in grads.items():
                assert (gradient - gradients[parameter]).norm() < 1e-6 * size, parameter


@pytest.mark.long
def test_a_packed_run_trains_resumes_and_reports_its_rows(tmp_path):
    for name in ("llava", "qwen2_5_vl", "idefics3"):
        usual = {"packing": True, "max_length": 160, "per_device_train_batch_size": 2, "num_train_epochs": 1}
        usual |= {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 1}
        make = images(SFTTrainer, "prompt completion", name)
        straight, resumed = (make(tmp_path / name, **usual) for _ in range(2))
        assert isinstance(straight.train_dataset, PackedRows) and isinstance(straight.eval_dataset, PackedRows)
        attention = wrapping.text_part(wrapping.base_model(straight.model)).config._attn_implementation
        assert attention == "segments_sdpa" and "seq_lengths" in next(iter(straight.get_train_dataloader()))
        number = sum(len(straight.train_dataset.packing[i]) for i in range(len(straight.train_dataset)))
        assert number > len(straight.train_dataset)
        straight.train()
        resumed.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-1"))
        expected = weights(straight)
        assert [k for k, value in weights(resumed).items() if not torch.equal(value, expected[k])] == []
        assert straight.data_reports["train"].rows_in == number
        whole = make(tmp_path / "whole", **usual | {"eval_packing": False})
        assert straight.evaluate()["eval_loss"] == pytest.approx(_loss_with(whole, expected), rel=1e-5)


def _loss_with(trainer, state):
    trainer.model.load_state_dict(state, strict=False)
    return trainer.evaluate()["eval_loss"]


def test_images_of_a_bad_row_are_left_out_of_its_bin(family):  # noqa: F811
    collate = collator(family, bad_images="drop")
    bad = rows()
    bad[2] = bad[2] | {"images": ["absent.png"]}
    packed = pack_rows(numbered(bad), collate.prepare, 4096)
    batch, without = collate([packed[0]]), collate([{PACKED: [rows()[i] for i in (0, 1, 3)]}])
    assert len(packed) == 1 and batch.row_facts["facts"]["fault"].tolist().count("") == 3
    order = [row["row_number"] for row in packed[0][PACKED] if row["row_number"] != 2]
    assert order == [0, 1, 3] and all(torch.equal(batch[name], without[name]) for name in without)


def test_a_packed_batch_is_cut_by_rows_with_their_images(family):  # noqa: F811
    collate = collator(family)
    halves = collate([{PACKED: rows()[:2]}, {PACKED: rows()[2:]}]).halves()
    for half, alone in zip(halves, ([{PACKED: rows()[:2]}], [{PACKED: rows()[2:]}]), strict=True):
        expected = collate(alone)
        width = expected["input_ids"].shape[1]
        assert torch.equal(half["input_ids"][:, :width], expected["input_ids"])
        assert torch.equal(half["position_ids"][..., :width], expected["position_ids"])
        assert {n: v.shape[0] for n, v in half.items() if n in half.entries and n in expected} == {
            n: v.shape[0] for n, v in expected.items() if n in half.entries
        }


def test_a_row_with_a_video_is_not_measured(family):  # noqa: F811
    given = [{"videos": [[tiny_vision.image(0)] * 2], "messages": say("what ?", "yes")}]
    with pytest.raises(ValueError, match="Leave out packing, max_batch_tokens"):
        row_lengths(numbered(given), collator(family).prepare)


def test_what_packing_cannot_do_with_images_is_refused(tmp_path):
    make = images(SFTTrainer, "prompt completion", "llava")
    with pytest.raises(ConfigError, match="packing_strategy='wrapped' splits rows, and images cannot be split"):
        make(tmp_path, packing=True, max_length=160, packing_strategy="wrapped")
    with pytest.raises(DataError, match="packing rows with images needs the length of each row"):
        stream = Dataset.from_list([{"text": "<image>a"}]).to_iterable_dataset()
        pack_rows(stream, None, 64)


def test_batches_by_tokens_count_those_of_images(tmp_path):
    make = images(SFTTrainer, "prompt completion", "qwen2_vl")
    trainer = make(tmp_path, max_batch_tokens=200, num_train_epochs=1)
    batches = list(trainer.get_train_dataloader())
    assert max(batch["input_ids"].numel() for batch in batches) <= 200 and len(batches) > 1
    grouped = make(tmp_path, train_sampling_strategy="group_by_length")
    lengths = lengths_in(grouped.data_collator, [dict(row) for row in grouped.train_dataset])
    assert grouped.row_lengths(grouped.train_dataset) == lengths and max(lengths) > 2 * min(lengths)


def test_the_page_names_the_families_that_are_refused():
    page = (Path(__file__).resolve().parents[2] / "docs" / "images.md").read_text(encoding="utf-8")
    table = page.partition("| family | packed rows |\n|---|---|\n")[2].partition("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()]
    named = {
        re.sub(r"[-. ]", "_", name).lower().replace("mistral_3", "mistral3").replace("gemma_", "gemma"): what
        for names, what in cells
        for name in names.split(", ")
    }
    assert named.keys() == tiny_vision.FAMILIES.keys()
    assert {name for name, what in named.items() if what.startswith("refused")} == LEAKY.keys()


def test_of_padded_rows_the_log_says_how_attention_goes_over_documents(tmp_path, caplog):
    model, processor = tiny_vision.llava()
    caplog.set_level("INFO", logger="posttrain")
    args = SFTConfig(str(tmp_path), max_steps=1, report_to="none", use_cpu=True)
    SFTTrainer(model, args, train_dataset=Dataset.from_list(rows()[:1]), processing_class=processor)
    assert "Rows with images are padded" in caplog.text and "text alone" not in caplog.text
