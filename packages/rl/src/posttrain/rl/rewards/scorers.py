"""Reward models, of texts and of images, and judges as reward functions; and functions by their names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from posttrain.core.data.collators import pad_rows
from posttrain.core.errors import MissingModelError, did_you_mean
from posttrain.core.models.embeddings import id_limits
from posttrain.core.models.wrapping import base_name, config_of, sees
from posttrain.core.training.preflight import caught
from posttrain.lm.images.image_features import features_once
from posttrain.lm.images.images import IMAGE_COLUMNS, VIDEO_COLUMNS, ImageReader
from posttrain.lm.images.vision import Shown
from posttrain.lm.loading.loading import READING, SEEING, load_tokenizer, missing_folder
from posttrain.rl.rewards import background
from posttrain.rl.rewards.functions import BUILT_IN
from posttrain.rl.rewards.score_heads import load_reward_model, set_pad_token
from posttrain.rl.rewards.scoring import PASSED, RESERVED, RewardArguments, asked_for
from posttrain.rl.samples.images import ImagePrompts, RolloutImages, same_images
from posttrain.rl.samples.prompts import PromptCodec

NO_REWARDS = "No reward source provided: pass reward_funcs, or an environment_factory whose class has get_reward()."


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
        pad, limit = tokenizer.pad_token_id, id_limits(model).get("input_ids")
        if pad is None or (limit is not None and pad >= limit):
            raise ValueError(
                f"The reward model {self.__name__} reads token ids below {limit}, and its tokenizer pads with "
                f"{tokenizer.pad_token!r}, whose id is {pad}. Set pad_token to one that both have, such as the "
                "eos_token, and pass the tokenizer in reward_processing_classes."
            )
        set_pad_token(model, pad)

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
        masks = [[1] * len(text) for text in texts]
        batch = {"input_ids": pad_rows(texts, self.tokenizer.pad_token_id), "attention_mask": pad_rows(masks, 0)}
        shown = [images for _, images in read]
        held = RolloutImages.of(shown, [tokens for tokens, _ in read], self.prompts.vision.image_token_id)
        more = held.inputs(batch, range(len(texts)))
        inputs = {name: tensor.to(device) for name, tensor in (batch | more["image_inputs"]).items()}
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


def functions_by_name(args: RewardArguments) -> list[str] | None:
    """The names that a config has, the reward model's first; None where it has none."""
    model = [args.reward_model_name_or_path] if args.reward_model_name_or_path else []
    return [*model, *(args.reward_funcs or [])] or None


def is_function_name(name: str) -> bool:
    """Whether `name` is that of a function, such as ``accuracy_reward`` or ``module:function``, and not of a model."""
    dotted = "." in name.strip(".") and not {"/", os.sep} & set(name) and not os.path.exists(name)
    return name in BUILT_IN or ":" in name or dotted


def named_function(name: str, what: str = "reward_funcs: ") -> Callable[..., Any]:
    """A reward function of ours by its name, or one of any module that can be imported, or is in this folder. Raises
    ValueError, whose message begins with `what`, where it cannot be imported.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if not {"", os.getcwd()} & set(sys.path):  # programs that pip installs do not look where they are called
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:  # a name without a module: a ValueError
        raise ValueError(
            f"{what}{name!r} cannot be imported: {error}. Give module:function, of a module in this folder or "
            "one that is installed."
        ) from error


def reward_problems(
    given: Any, weights: Any, environment_factory: Any = None, columns: Sequence[str] = ()
) -> Iterator[str | Exception]:
    """Problems with the names, types, number and parameters of reward functions, without loading a model. `columns` are
    those of all rows; empty where they are not known beforehand.
    """
    functions = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    available = dict.fromkeys([*PASSED, *(name for name in columns if name not in RESERVED)])
    for function in functions:
        if callable(function) or (isinstance(function, str) and is_function_name(function)):
            yield from caught(_check_function, function, available if columns else None)
        elif not isinstance(function, (str, os.PathLike)):
            yield TypeError(f"reward_funcs holds {function!r}; give functions, reward models or names of such.")
        elif (error := missing_folder(function)) is not None:
            yield ValueError(f"reward_funcs: {error}")
    if environment_factory is not None:
        return  # whose get_reward may be one more
    if not functions:
        yield ValueError(NO_REWARDS)
    elif weights is not None and len(weights) != len(functions):
        named = (os.fspath(f) if isinstance(f, (str, os.PathLike)) else background.name_of(f) for f in functions)
        yield ValueError(
            f"reward_weights has {len(weights)} numbers and there are {len(functions)} reward functions "
            f"({', '.join(named)}). Give one for each."
        )


def _check_function(function: Any, available: Mapping[str, Any] | None) -> None:
    named = named_function(function) if isinstance(function, str) else function
    if available is not None and not isinstance(named, nn.Module):
        asked_for(named, background.name_of(named), available)


def reward_functions(given: Any, tokenizers: Any, trust_remote_code: bool) -> list[Callable[..., Any]]:
    """`given`, one or several functions, models or names of models, as a list of functions."""
    functions = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    if tokenizers is None:
        tokenizers = [None] * len(functions)
    elif not isinstance(tokenizers, (list, tuple)):  # it belongs to one model, and would misread the texts of another
        tokenizers = [tokenizers]
    if len(tokenizers) != len(functions):
        raise ValueError(
            f"The number of reward processing classes ({len(tokenizers)}) must match the number of reward functions "
            f"({len(functions)}); give None for those that need none."
        )
    made: list[Callable[..., Any]] = []
    for function, tokenizer in zip(functions, tokenizers, strict=True):
        if isinstance(function, str) and is_function_name(function):
            function = named_function(function)
        elif isinstance(function, (str, os.PathLike)):
            try:
                model = load_reward_model(os.fspath(function), trust_remote_code=trust_remote_code)
            except MissingModelError as error:
                instead = did_you_mean(os.fspath(function), BUILT_IN) or f" ({', '.join(BUILT_IN)})."
                raise MissingModelError(f"reward_funcs: {error} It is no built-in function{instead}") from error
            name, function = Path(function).name, scorer(model, tokenizer, trust_remote_code)
            function.__name__ = name  # that of an adapter, and not of its base
        elif isinstance(function, nn.Module):
            function = scorer(function, tokenizer, trust_remote_code)
        made.append(function)
    return made
