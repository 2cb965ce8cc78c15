"""Padding of batches of rows with images, and what it takes to measure their lengths.

    python benchmarks/image_lengths.py

Rows have answers of a log-normal number of words and no, one or two pictures of varied sizes, stored as JPEG. Pictures
become tokens as in Qwen2-VL: one for 28 x 28 pixels. Padding is the share of tokens of an epoch's batches that are no
token of a row. Rows of similar length are found by counting the tokens of images; for comparison, by counting each
image as one token, as its placeholder is.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

WORDS = "the of and to in is it on as by first second red green blue which one there".split()


def rows_of(number: int, draws: random.Random, noise: np.random.Generator) -> list[dict[str, Any]]:
    from PIL import Image

    rows = []
    for _ in range(number):
        images = []
        for _ in range(draws.choice([0, 1, 1, 1, 2])):
            size = [min(max(int(noise.lognormal(6, 0.5)), 56), 1600) for _ in range(2)]
            small = Image.fromarray(noise.integers(0, 256, (8, 8, 3), dtype=np.uint8))
            small.resize(size).save(file := io.BytesIO(), "JPEG")
            images.append({"bytes": file.getvalue(), "path": None})
        words = " ".join(draws.choices(WORDS, k=max(int(noise.lognormal(4, 0.8)), 1)))
        talk = [{"role": "user", "content": "what is shown ?"}, {"role": "assistant", "content": words}]
        rows.append({"images": images, "messages": talk})
    return rows


def padding(batches: list[list[int]], lengths: list[int]) -> float:
    whole = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    return 1 - sum(lengths) / whole


def batches_of(sampler: Any, size: int) -> list[list[int]]:
    order = [int(i) for i in sampler]
    return [order[start : start + size] for start in range(0, len(order), size)]


def main() -> None:
    from transformers import Qwen2VLImageProcessorPil, Qwen2VLProcessor

    from posttrain.core.data.samplers import EpochSampler, LengthGroupedSampler, TokenBatchSampler
    from posttrain.lm.images.images import numbered
    from posttrain.lm.images.vision import VisionProcessor
    from posttrain.sft import SFTConfig
    from posttrain.sft.packing import pack
    from posttrain.sft.vision import preparation, row_lengths
    from tests import tiny_vision

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8)
    given = parser.parse_args()
    rows = rows_of(given.rows, random.Random(0), np.random.default_rng(0))
    pixels = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28})
    shown = tiny_vision.template("<|vision_start|><|image_pad|><|vision_end|>")
    processor = tiny_vision.build_processor(Qwen2VLProcessor, pixels, tiny_vision.tokenizer(), chat_template=shown)
    args = SFTConfig("out", max_length=None, use_cpu=True, report_to="none")
    prepare = preparation(VisionProcessor(processor), args)

    started = time.perf_counter()
    lengths = row_lengths(numbered(rows), prepare)
    measured = time.perf_counter() - started
    some, started = rows[:100], time.perf_counter()
    assert [len(draft.ids) for draft in prepare(some, range(len(some)))] == lengths[: len(some)]
    made = (time.perf_counter() - started) * len(rows) / len(some)
    print(f"{len(rows)} rows: measured in {measured:.1f} s; making their batches takes about {made:.1f} s")
    print(f"tokens of a row: median {np.median(lengths):.0f}, longest {max(lengths)}")

    images = [len(row["images"]) for row in rows]
    briefs = row_lengths(numbered([row | {"images": []} for row in rows]), prepare)
    texts = [3 * count + brief for count, brief in zip(images, briefs, strict=True)]
    size, most = given.batch, max(given.batch * int(np.mean(lengths)), *lengths)
    packed = pack(np.array(lengths), most)
    for name, batches in (
        ("random", batches_of(EpochSampler(len(rows), 0), size)),
        ("grouped, an image counted as one token", batches_of(LengthGroupedSampler(texts, size, 0), size)),
        ("train_sampling_strategy='group_by_length'", batches_of(LengthGroupedSampler(lengths, size, 0), size)),
        (f"max_batch_tokens={most}", list(TokenBatchSampler(lengths, most, 0))),
    ):
        print(f"{name:<45} {padding(batches, lengths):6.1%} padding, {len(batches)} batches")
    print(f"{f'packing=True, max_length={most}':<45} {1 - packed.fill:6.1%} padding, {len(packed)} rows")


if __name__ == "__main__":
    main()
