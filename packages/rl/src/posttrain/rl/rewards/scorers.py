"""Reward models, of texts and of images, and judges as reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from posttrain.core.data.collators import pad_rows
from posttrain.core.models.wrapping import base_name, config_of, sees
from posttrain.lm.images.image_features import features_once
from posttrain.lm.images.images import IMAGE_COLUMNS, VIDEO_COLUMNS, ImageReader
from posttrain.lm.images.vision import Shown
from posttrain.lm.loading.loading import READING, SEEING, load_tokenizer
from posttrain.rl.rewards.score_heads import set_pad_token
from posttrain.rl.samples.images import ImagePrompts, RolloutImages, same_images
from posttrain.rl.samples.prompts import PromptCodec


class RewardModel:
    """A sequence classifier with one output, as a reward function. Reads prompt and completion, in one chat if they are
    messages.

    Args:
        model: as ``AutoModelForSequenceClassification`` loads it, with one label.
        tokenizer: its own.
        batch_size: completions that it reads at a time.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, batch_size: int = 8) -> None:
        self.model, self.tokenizer, self.batch_size = model.eval().requires_grad_(False), tokenizer, batch_size
        self.__name__ = (base_name(model) or type(model).__name__).split("/")[-1]
        if getattr(config_of(model), "num_labels", 1) != 1:
            raise ValueError(
                f"The reward model {self.__name__} gives {config_of(model).num_labels} numbers for a text; it must "
                "give one. Load it with num_labels=1."
            )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        set_pad_token(model, tokenizer.pad_token_id)

    @torch.inference_mode()
    def __call__(self, prompts: list[Any], completions: list[Any]) -> list[float]:
        if isinstance(prompts[0], str):
            texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        else:
            chats = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
            texts = [self.tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        device, rewards = next(self.model.parameters()).device, []
        for start in range(0, len(texts), self.batch_size):
            batch = texts[start : start + self.batch_size]
            inputs = self.tokenizer(
                batch, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
            )
            rewards += self.model(**inputs.to(device)).logits[:, 0].float().tolist()
        return rewards


class ImageRewardModel(RewardModel):
    """A reward model that sees the images and videos of prompts, in their columns (``images``, ``videos``) or messages.

    Prompt and completion become the tokens that `posttrain.rl.RewardTrainer` reads, and the images of adjacent equal
    prompts are read and encoded once.

    Args:
        processor: the model's own. reader: reads images. The others are as for `RewardModel`.
    """

    def __init__(self, model: nn.Module, processor: Any, batch_size: int = 8, reader: ImageReader | None = None):
        super().__init__(model, processor.tokenizer, batch_size)
        self.processor = processor
        self.prompts = ImagePrompts(processor, model, reader or ImageReader())
        self.codec = PromptCodec(processor.tokenizer, self.prompts.vision.template_kwargs())

    @torch.inference_mode()
    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        images: Any = None,
        image: Any = None,
        videos: Any = None,
        video: Any = None,
    ) -> list[float]:
        columns = dict(zip((*IMAGE_COLUMNS, *VIDEO_COLUMNS), (images, image, videos, video), strict=True))
        rows = [
            {name: values[place] for name, values in columns.items() if values is not None} | {"prompt": prompt}
            for place, prompt in enumerate(prompts)
        ]
        read = self._read(rows)
        texts = [
            [*ids, *self.prompts.encode_completion(self.codec, row, row["prompt"], completion)]
            for (ids, _), row, completion in zip(read, rows, completions, strict=True)
        ]
        rewards: list[float] = []
        for start in range(0, len(texts), self.batch_size):
            part = slice(start, start + self.batch_size)
            rewards += self._score(texts[part], read[part])
        return rewards

    def _read(self, rows: Sequence[dict[str, Any]]) -> list[tuple[list[int], Shown]]:
        """(tokens of the prompt, its images) of each row; the same object for adjacent equal prompts."""
        found: list[tuple[list[int], Shown]] = []
        for place, row in enumerate(rows):
            before = rows[place - 1]
            is_new = not place or row["prompt"] != before["prompt"] or not same_images(row, before)
            found.append(self.prompts.encode(self.codec, row, row["prompt"], None) if is_new else found[-1])
        return found

    def _score(self, texts: Sequence[list[int]], read: Sequence[tuple[list[int], Shown]]) -> list[float]:
        device = next(self.model.parameters()).device
        ids = pad_rows(texts, self.tokenizer.pad_token_id)
        mask = pad_rows([[1] * len(text) for text in texts], 0)
        shown = [images for _, images in read]
        held = RolloutImages.of(shown, [tokens for tokens, _ in read], self.prompts.vision.image_token_id)
        more = held.inputs(ids, mask, range(len(texts)))
        inputs = {"input_ids": ids, "attention_mask": mask} | more["image_inputs"]
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        with features_once(self.model, more["image_copies"], inputs) as given:
            return self.model(**given).logits[:, 0].float().tolist()


def scorer(model: nn.Module, tokenizer: Any = None, trust_remote_code: bool = False) -> RewardModel:
    """A loaded reward `model` as a reward function. It sees images if its processing class is a processor; None: the
    tokenizer or processor next to its weights.
    """
    classes = SEEING if sees(model) else READING
    tokenizer = tokenizer or load_tokenizer(model, trust_remote_code, classes[1])
    kind = ImageRewardModel if hasattr(tokenizer, "image_processor") else RewardModel
    return kind(model, tokenizer)


@runtime_checkable
class PairwiseJudge(Protocol):
    """Whatever has a method ``judge``; a judge of earlier versions of trl is one."""

    def judge(self, prompts: list[Any], completions: list[list[Any]]) -> Sequence[int]:
        """For each prompt the place of the better of its two completions, 0 or 1; -1 where it cannot tell."""
        ...


class JudgeReward:
    """A judge as a reward function: 1 for the better completion of each pair, 0 for the other, None for both where the
    judge cannot tell. Completions of a prompt are adjacent, two of each.
    """

    def __init__(self, judge: PairwiseJudge) -> None:
        self.judge = judge
        self.__name__ = type(judge).__name__

    def __call__(self, prompts: list[Any], completions: list[Any]) -> list[float | None]:
        pairs = [completions[first : first + 2] for first in range(0, len(completions), 2)]
        better = list(self.judge.judge(prompts[::2], pairs))
        if len(better) != len(pairs):
            raise ValueError(f"The judge {self.__name__} gave {len(better)} verdicts on {len(pairs)} pairs.")
        if wrong := [place for place in better if place not in (0, 1, -1, None)]:
            raise ValueError(
                f"The judge {self.__name__} gave the verdict {wrong[0]!r} on a pair. A verdict is the place of the "
                "better completion, 0 or 1, or -1 where the judge cannot tell; of a probability, return int(p < 0.5)."
            )
        rewards: list[float | None] = []
        for place in better:
            rewards += [float(place == 0), float(place == 1)] if place in (0, 1) else [None, None]
        return rewards
