"""The shape of a micro-batch in a training method, which a memory plan runs, and what of a run's model tells it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from posttrain.core.checkpoint import codec
from posttrain.core.config import value_of
from posttrain.core.errors import ConfigError, DataError, require
from posttrain.core.registry import Run
from posttrain.lm.images import vision
from posttrain.lm.images.image_positions import SeenPrompt
from posttrain.lm.loading import loading


@dataclass(frozen=True)
class Workload:
    """The shape of a micro-batch in a training method.

    Args:
        rows: of one forward. length: maximum tokens of each.
        loss: "tokens" (`linear_cross_entropy`) and "logps" (`token_logps`) never hold whole logits; "logits": the
            model's own loss, which does; "score": one number a row.
        target_length: tokens of an encoder-decoder's output.
        reference: a frozen copy of the model is evaluated too, if there is no adapter to disable.
        teacher: bytes of the model that is evaluated instead. others: of those that score, whole on each process.
        group, prompt: so many rows of a forward share one copy of their first tokens, `prompt` of them.
        engine: the share of the device's memory that an engine beside the trainer keeps.
        generated: tokens in the key/value cache, if the model itself generates between optimizer steps.
        image: with which each row begins; None for rows of text alone, and where images are not counted.
        untrained: tokens of it that stand for what it shows, which no loss is taken of.
        auto_class: of transformers, with which the method loads models.
        make: ``(config, **keywords of from_config)``, what makes its models where no such class does.
    """

    rows: int
    length: int
    loss: str = "logits"
    target_length: int | None = None
    reference: bool = False
    teacher: int = 0
    others: int = 0
    group: int = 1
    prompt: int = 0
    engine: float = 0.0
    generated: int = 0
    image: SeenPrompt | None = None
    untrained: int = 0
    auto_class: str = "AutoModelForCausalLM"
    make: Callable[..., nn.Module] | None = None

    @property
    def computed(self) -> int:
        """Tokens of a row, of those that it shares its part alone. Rows of so many are measured."""
        return self.length - self.prompt + math.ceil(self.prompt / self.group)

    @property
    def unseen(self) -> float:
        """Pairs of tokens that attention computes for a micro-batch beyond those of the rows that are measured."""
        own, prompt = self.length - self.prompt, self.prompt
        return self.rows * (own * prompt + own**2 / 2 + prompt**2 / 2 / self.group - self.computed**2 / 2)


def rows_of(config: Any, longest: int, sides: int = 1) -> int:
    """Rows of a micro-batch of `config`, each of `sides` texts of `longest` tokens."""
    if config.max_batch_tokens is None:
        return sides * config.per_device_train_batch_size
    return sides * max(config.max_batch_tokens // (sides * longest), 1)


def longest_row(*lengths: int | None) -> int:
    """The first of `lengths` that is not None, in tokens; `ConfigError` if none is."""
    found = next((length for length in lengths if length), None)
    if found is None:
        raise ConfigError(
            "posttrain plan", ["the config does not limit the length of rows; set it, as in --length 2048"]
        )
    return found


def load_config(run: Run) -> Any:
    """The config of the model that `run` trains, which for a folder is one file; `ConfigError` if there is none."""
    from transformers import AutoConfig

    path = run.model.model_name_or_path
    try:
        path = loading.base_of_adapter(path) if loading.is_adapter(path) else path
        with loading.explain_missing(path, "model"):
            return AutoConfig.from_pretrained(path, revision=run.model.model_revision, trust_remote_code=trusts(run))
    except (OSError, ValueError) as error:
        raise ConfigError("posttrain plan", [str(error).strip().splitlines()[0]]) from error


def size_of(name: str, run: Run, dtype: Any = None, make: Callable[..., nn.Module] | None = None) -> int:
    """Bytes of the model `name` beside the one that `run` trains, in float32 unless `dtype` says otherwise."""
    from transformers import AutoModelForCausalLM

    config = load_config(dataclasses.replace(run, model=type(run.model)(model_name_or_path=name)))
    config.num_labels = 1
    numbers = codec.dtype_named(dtype or "float32") if dtype != "auto" else config.dtype
    with torch.device("meta"):
        model = (make or AutoModelForCausalLM.from_config)(config, dtype=numbers, trust_remote_code=trusts(run))
    return sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})


def trusts(run: Run) -> bool:
    return bool(value_of(run.config, "trust_remote_code"))


def with_image(work: Workload, run: Run, size: tuple[int, int]) -> Workload:
    """`work` with an image of `size` (width, height) in each row, as its processor shows it; else a `ConfigError`."""
    path, most = run.model.model_name_or_path, value_of(run.config, "max_image_pixels")
    if most is not None and size[0] * size[1] > most:
        raise ConfigError("posttrain plan", [f"--image_size: an image has more than max_image_pixels={most} pixels"])
    try:
        processor = loading.load_tokenizer(path, trusts(run), loading.SEEING[1], revision=run.model.model_revision)
        blank = require("PIL.Image", "pillow", why="--image_size").new("RGB", size, (128, 128, 128))
        shown = vision.VisionProcessor(processor).show(processor.image_token, [blank])
    except (ImportError, OSError, TypeError, ValueError, DataError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        problem = f"--image_size needs the processor of {path}, which does not count: {reason[0]}"
        raise ConfigError("posttrain plan", [problem]) from error
    ids = processor.tokenizer(shown.text, add_special_tokens=False)["input_ids"]
    if len(ids) > work.computed:
        problem = f"--image_size: an image becomes {len(ids)} tokens, and rows have {work.computed}"
        raise ConfigError("posttrain plan", [problem])
    return dataclasses.replace(work, image=shown.prompt(ids), untrained=sum(token in shown.ids for token in ids))


def with_images(work: Workload) -> dict[str, torch.Tensor]:
    """The inputs of a micro-batch of `work`, whose rows have an image, and text after it."""
    assert work.image is not None
    rows, length, image = work.rows, work.computed, work.image
    numbers = {"input_ids": image.ids, **image.numbers}
    return {name: torch.tensor([[*own, *[0] * (length - len(own))]] * rows) for name, own in numbers.items()} | (
        vision.join_tensors([image.tensors] * rows)
    )
