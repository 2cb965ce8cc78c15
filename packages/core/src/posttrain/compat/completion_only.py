"""Masks the prompts of rows by the text that begins a response."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from posttrain.core.data.collators import IGNORE_INDEX, Batch, DataCollatorForLanguageModeling

logger = logging.getLogger(__name__)


@dataclass
class DataCollatorForCompletionOnlyLM(DataCollatorForLanguageModeling):
    """Pad rows, and train on what follows a response template alone. As early versions of trl had it; rows of prompt
    and completion, or of messages, need no template.

    Args:
        response_template: text, or its tokens, that begins a response. Its last occurrence counts, or with an
            `instruction_template` each one.
        instruction_template: text, or its tokens, that begins the next instruction; up to it a response is trained on.
    """

    response_template: str | list[int] = ""
    instruction_template: str | list[int] | None = None
    mlm: bool = False
    ignore_index: int = IGNORE_INDEX

    def __init__(
        self,
        response_template: str | list[int],
        instruction_template: str | list[int] | None = None,
        *args: Any,
        mlm: bool = False,
        ignore_index: int = IGNORE_INDEX,
        padding_free: bool = False,
        **kwargs: Any,
    ) -> None:
        if mlm or padding_free:
            raise ValueError(
                "DataCollatorForCompletionOnlyLM masks prompts of padded rows: leave mlm=False, and set "
                "SFTConfig(padding_free=True) with rows of prompt and completion instead of padding_free here."
            )
        super().__init__(*args, **kwargs | {"mlm": False})
        self.response_template, self.instruction_template = response_template, instruction_template
        self.ignore_index = ignore_index
        self._response, self._instruction = self._ids(response_template), self._ids(instruction_template)

    def torch_call(self, features: list[Any]) -> Batch:
        batch = super().torch_call(features)
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"], strict=True):
            trained = self._trained(ids)
            if not trained:
                logger.warning(
                    f"The response template {self.response_template!r} is not in a row, which is not trained on: "
                    f"{self.tokenizer.decode(ids)[:200]!r}. The template must be written, and split into tokens, as in "
                    "the rows; pass its tokens."
                )
            labels[[place for place in range(len(ids)) if not any(place in part for part in trained)]] = IGNORE_INDEX
        if self.ignore_index != IGNORE_INDEX:
            batch["labels"] = batch["labels"].masked_fill(batch["labels"] == IGNORE_INDEX, self.ignore_index)
        return batch

    def _ids(self, template: str | list[int] | None) -> list[int]:
        if isinstance(template, str):
            return list(self.tokenizer.encode(template, add_special_tokens=False))
        return list(template or ())

    def _trained(self, ids: list[int]) -> list[range]:
        """The places of `ids` that are trained on."""
        starts = [place + len(self._response) for place in _places(self._response, ids)]
        if not self._instruction:
            return [range(start, len(ids)) for start in starts[-1:]]
        ends = [*_places(self._instruction, ids), len(ids)]
        return [range(start, min(end for end in ends if end >= start)) for start in starts]


def _places(part: list[int], ids: list[int]) -> list[int]:
    """Where `part` begins in `ids`."""
    return [place for place in range(len(ids) - len(part) + 1) if part and ids[place : place + len(part)] == part]
