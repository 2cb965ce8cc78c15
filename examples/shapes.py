"""A vision-language model that learns to count shapes and name their colour, from nothing, on one core of a CPU.

The pictures are drawn, so that there are as many as are wanted: one to four circles, squares or triangles, all of
one of four colours. "How many?" is answered by a number and a colour. Each of the 16 answers is as frequent as the
others, so that guessing is right for 6%.

Fine-tuning teaches a model of 0.14 million parameters most of them. A second one, that fine-tuning left halfway,
goes on with GRPO, told by an exact checker which of its own answers are right. Accuracy is that of the most probable
answers to held-out pictures. A fifth of all pictures that can be drawn are held out, chosen by a checksum of their
pixels, so that none of them equals one that was trained on.

python examples/shapes.py
python examples/shapes.py --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.sft import SFTConfig, SFTTrainer

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "black": (20, 20, 20)}
SHAPES = ("circle", "square", "triangle")
MOST = 4  # shapes of a picture
CELL, CELLS = 8, 3  # pixels of a cell, cells of a side
HELD_OUT = 5  # one of so many pictures is not trained on
WORDS = ("<pad>", "<end>", "<image>", "<user>", "<assistant>", "how", "many", *COLOURS, *map(str, range(1, MOST + 1)))
CHAT = (
    "{% for message in messages %}<{{ message['role'] }}> {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}"
    "{% if message['role'] == 'assistant' %}<end> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def is_held_out(image: Image.Image) -> bool:
    """Whether a picture is one that no model is trained on, by a checksum of its pixels."""
    return zlib.crc32(image.tobytes()) % HELD_OUT == 0


def draw(draws: random.Random, held_out: bool) -> tuple[Image.Image, str]:
    """(a picture for training, or a held-out one; how many shapes it shows and of which colour)."""
    colour, count = draws.choice(list(COLOURS)), draws.randint(1, MOST)
    while is_held_out(image := picture(draws, colour, count)) != held_out:
        pass
    return image, f"{count} {colour}"


def picture(draws: random.Random, colour: str, count: int) -> Image.Image:
    """So many shapes of a colour, anywhere."""
    image = Image.new("RGB", (CELL * CELLS, CELL * CELLS), (255, 255, 255))
    pen = ImageDraw.Draw(image)
    for cell in draws.sample(range(CELLS**2), count):
        left, top, size = cell % CELLS * CELL + 1, cell // CELLS * CELL + 1, CELL - 3
        corners, shape = (left, top, left + size, top + size), draws.choice(SHAPES)
        if shape == "triangle":
            pen.polygon([(left, top + size), (left + size, top + size), (left + size // 2, top)], fill=COLOURS[colour])
        else:
            (pen.ellipse if shape == "circle" else pen.rectangle)(corners, fill=COLOURS[colour])
    return image


def rows(number: int, seed: int, held_out: bool = False) -> list[dict[str, Any]]:
    """So many questions about pictures, with their answers."""
    draws, found = random.Random(seed), []
    asked = [{"role": "user", "content": "how many"}]
    for _ in range(number):
        image, answer = draw(draws, held_out)
        told = [{"role": "assistant", "content": answer}]
        found.append({"images": [image], "prompt": asked, "completion": told, "answer": answer})
    return found


def make(seed: int) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """A small model of the LLaVA family, which has learned nothing, and its processor."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special: dict[str, Any] = {"pad_token": "<pad>", "eos_token": "<end>", "extra_special_tokens": ["<image>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    side = CELL * CELLS
    sight = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, image_size=side,
        patch_size=CELL, projection_dim=64,
    )  # fmt: skip
    text = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=sight,
            text_config=text,
            image_token_index=WORDS.index("<image>"),
            vision_feature_layer=-1,
            tie_word_embeddings=True,
        )
    )
    pixels = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    rest = {"patch_size": CELL, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return model, LlavaProcessor(pixels, tokenizer, chat_template=CHAT, **rest)


def fine_tune(
    model: Any, processor: Any, pictures: list[dict[str, Any]], steps: int, seed: int, out: Path, **changes: Any
) -> SFTTrainer:
    usual = dict(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=32, learning_rate=1e-3, warmup_steps=20,
        lr_scheduler_type="cosine", gradient_checkpointing=False, logging_steps=50, save_strategy="no", seed=seed,
        report_to="none", disable_tqdm=True, weight_decay=0.0, use_cpu=True,
    )  # fmt: skip
    trainer = SFTTrainer(model, SFTConfig(**(usual | changes)), train_dataset=pictures, processing_class=processor)
    trainer.train()
    return trainer


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """The reward: 1 for exactly the right number and colour, else 0."""
    return [float(told[0]["content"].split() == text.split()) for told, text in zip(completions, answer, strict=True)]


def reinforcer(
    model: Any, processor: Any, pictures: list[dict[str, Any]], held_out: list[dict[str, Any]], steps: int, seed: int,
    out: Path, **changes: Any,
) -> GRPOTrainer:  # fmt: skip
    """GRPO with the exact checker, whose evaluation takes the most probable answer."""
    usual = dict(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=256, num_generations=8,
        max_completion_length=3, learning_rate=5e-4, lr_scheduler_type="cosine", warmup_steps=5,
        gradient_checkpointing=False, logging_steps=25, save_strategy="no", seed=seed, report_to="none",
        disable_tqdm=True, use_cpu=True, eval_temperature=0.0, num_generations_eval=1, weight_decay=0.0,
        per_device_eval_batch_size=200,
    )  # fmt: skip
    asked = [{name: row[name] for name in ("images", "prompt", "answer")} for row in pictures]
    return GRPOTrainer(
        model, right, GRPOConfig(**(usual | changes)), train_dataset=asked, eval_dataset=held_out,
        processing_class=processor,
    )  # fmt: skip


def accuracy(trainer: GRPOTrainer) -> float:
    """The share of held-out pictures whose most probable answer is right."""
    return trainer.evaluate()["eval_reward"]


def run(
    seed: int, steps: int = 300, weak_steps: int = 80, updates: int = 250, pictures: int = 4000, held_out: int = 400
) -> dict[str, float]:
    """Accuracies on held-out pictures, by name: before training, after fine-tuning, after a brief one, after GRPO."""
    train, measured = rows(pictures, 1000 + seed), rows(held_out, 2000 + seed, held_out=True)
    found: dict[str, float] = {}
    started = time.process_time()
    with tempfile.TemporaryDirectory() as out:

        def measure(name: str, model: Any, processor: Any, **changes: Any) -> GRPOTrainer:
            trainer = reinforcer(model, processor, train, measured, updates, seed, Path(out), **changes)
            found[name] = accuracy(trainer)
            return trainer

        model, processor = make(seed)
        measure("before", model, processor)
        fine_tune(model, processor, train, steps, seed, Path(out))
        measure("sft", model, processor)
        model, processor = make(seed)
        fine_tune(model, processor, train, weak_steps, seed, Path(out))
        trainer = measure("weak_sft", model, processor)
        trainer.train()
        found["grpo"] = accuracy(trainer)
    return found | {"cpu_seconds": time.process_time() - started}


def with_error(values: list[float]) -> str:
    """Mean and standard error over the seeds, in percent."""
    error = 100 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{100 * statistics.mean(values):.1f}% +- {error:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of pictures, first weights and samples")
    parser.add_argument("--out", type=Path, help="a JSON file for the accuracies of each seed")
    given = parser.parse_args()
    torch.set_num_threads(1)  # more threads bring such a small model nothing
    found = [{"seed": seed} | run(seed) for seed in given.seeds]
    print("\nHeld-out pictures answered rightly (standard error over the seeds)\n")
    for name, title in (
        ("before", "before training"), ("sft", "fine-tuned"), ("weak_sft", "fine-tuned briefly"),
        ("grpo", "and then by GRPO"),
    ):  # fmt: skip
        print(f"  {title:<20} {with_error([each[name] for each in found])}")
    print(f"\n{statistics.mean([each['cpu_seconds'] for each in found]):.0f} s of one core for each seed")
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
