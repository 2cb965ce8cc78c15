"""Texts as padded tensors that say which bytes each token stands for: names of trl's, for scripts with their own loop
around `posttrain.rl.losses.universal_logits.ULDLoss` or `GOLDTrainer.generate_on_policy_outputs`.

The bytes of a token, (start, end), are those of the completion's UTF-8 text. Tokens of a prompt and padding have
(0, 0), and the end of a completion (n, n) behind its n bytes. Shapes: B rows of T tokens, with prompts of P.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby
from typing import Any

import torch

from posttrain.core.data.collators import IGNORE_INDEX, pad_rows
from posttrain.core.errors import DataError
from posttrain.lm.images.image_positions import SeenPrompt
from posttrain.lm.images.images import ImageReader, read_images
from posttrain.lm.images.vision import VisionProcessor, join_tensors, place_images

Span = tuple[int, int]


@cache
def _alphabet() -> frozenset[str]:
    """What vocabularies of bytes write for the 256 bytes."""
    from tokenizers import pre_tokenizers

    return frozenset(pre_tokenizers.ByteLevel.alphabet())


def encode_with_byte_offsets(
    backend: Any, texts: Sequence[str], add_special_tokens: bool = False
) -> list[tuple[list[int], list[Span]]]:
    """(ids, bytes of each token) of each text, by the ``backend_tokenizer`` of a fast tokenizer."""
    encoded = backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
    return [(list(one.ids), _spans(text, one)) for text, one in zip(texts, encoded, strict=True)]


def _spans(text: str, encoded: Any) -> list[Span]:
    """The bytes of `text` that each token stands for."""
    letters = _alphabet()
    sizes = [len(token) if letters.issuperset(token) else len(token.encode()) for token in encoded.tokens]
    ends = [0, *accumulate(sizes)]
    if ends[-1] == len(text.encode()):  # a vocabulary of bytes writes one letter for each
        return [(ends[i], ends[i + 1]) for i in range(len(sizes))]
    places = [0, *accumulate(len(letter.encode()) for letter in text)]
    spans: list[Span] = []
    for (first, last), run in groupby((places[start], places[stop]) for start, stop in encoded.offsets):
        number = len(list(run))  # tokens that hold parts of one character, each a byte
        inner = [min(first + i, last) for i in range(number)]
        spans += zip(inner, [*inner[1:], last], strict=True)
    return spans


def pad_byte_offsets(offsets: Sequence[Span], target_length: int, padding_side: str = "right") -> torch.Tensor:
    """(T, 2) of the spans of one row, with (0, 0) on `padding_side`."""
    sides = [start for start, _ in offsets], [end for _, end in offsets]
    return torch.stack([pad_rows([side], 0, padding_side, least=target_length)[0] for side in sides], -1)


def build_teacher_inputs_from_texts(
    tokenizer: Any, prompt_texts: Sequence[str], completion_texts: Sequence[str], use_extended_uld: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, labels, attention mask, bytes), (B, T) each and (B, T, 2), of texts in the tokens of a teacher, padded on
    the right. The end token is put behind each completion; without `use_extended_uld` bytes are zeros.
    """
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    rows, starts, spans = [], [], []
    encoded = encode_with_byte_offsets(tokenizer.backend_tokenizer, completion_texts) if use_extended_uld else None
    for number, (asked, written) in enumerate(zip(prompt_texts, completion_texts, strict=True)):
        prompt = tokenizer(asked)["input_ids"]
        prompt = prompt[:-1] if prompt and prompt[-1] == end else prompt  # the completion goes on
        ended, last = [] if end is None else [end], len(written.encode()) if use_extended_uld else 0
        if encoded is None:
            ids = tokenizer(written, add_special_tokens=False)["input_ids"]
            own = [(0, 0)] * len(ids)
        else:
            ids, own = encoded[number]
        rows.append([*prompt, *ids, *ended])
        starts.append(len(prompt))
        spans.append([(0, 0)] * len(prompt) + own + [(last, last)] * len(ended))
    ids = pad_rows(rows, 0 if pad is None else pad)
    labels = pad_rows([[IGNORE_INDEX] * start + row[start:] for start, row in zip(starts, rows, strict=True)], -100)
    mask = pad_rows([[1] * len(row) for row in rows], 0).bool()
    return ids, labels, mask, torch.stack([pad_byte_offsets(own, ids.shape[1]) for own in spans])


def build_teacher_request_inputs(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    prompt_attention_mask: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
) -> tuple[list[list[int]], list[int], list[int]]:
    """(tokens, length of the prompt, length of the completion) of each row of (B, T) padded ones, as a server is asked.

    Args:
        prompt_attention_mask: (B, P), of the prompts; else `labels`, (B, T), have a number for each token of a
            completion.

    Raises:
        ValueError: neither is given, or shapes or lengths disagree.
    """
    masks = [one.shape for one in (attention_mask, labels) if one is not None and one.shape != input_ids.shape]
    if masks:
        raise ValueError(f"input_ids have the shape {tuple(input_ids.shape)}, and another tensor {tuple(masks[0])}.")
    lengths = attention_mask.bool().sum(1)
    if prompt_attention_mask is not None:
        prompts = prompt_attention_mask.bool().sum(1)
    elif labels is not None:
        prompts = lengths - (labels != IGNORE_INDEX).sum(1)
    else:
        raise ValueError("Which tokens are the prompt? Pass prompt_attention_mask or labels.")
    if (short := (prompts < 0) | (prompts > lengths)).any():
        number = int(short.nonzero()[0])
        raise ValueError(f"Row {number} has {lengths[number]} tokens, and a prompt of {prompts[number]}.")
    rows = [row[kept].tolist() for row, kept in zip(input_ids, attention_mask.bool(), strict=True)]
    return rows, prompts.tolist(), (lengths - prompts).tolist()


@dataclass
class DataCollatorForChatML:
    """Rows of ``messages`` whose last turn is the completion, as tensors padded on the left, for scripts.

    Args:
        tokenizer: a fast tokenizer with a chat template and a pad token.
        max_length: tokens of a row at most: its first ones are left out. None: 1024, or the tokenizer's own limit.
        prompt_key: the column of a prompt that is rendered already. messages_key: the column of the conversations.

    The batch: ``input_ids``, ``attention_mask``, ``labels`` (B, T), those of the completion; ``prompts``,
    ``prompt_attention_mask`` (B, P); ``byte_offsets`` (B, T, 2).
    """

    tokenizer: Any
    ignore_index: int = IGNORE_INDEX
    max_length: int | None = None
    prompt_key: str = "prompt"
    messages_key: str = "messages"

    def __post_init__(self) -> None:
        if self.tokenizer.pad_token_id is None:
            raise ValueError("The tokenizer has no pad token. Set tokenizer.pad_token.")
        if self.max_length is None:
            self.max_length = min(self.tokenizer.model_max_length, 1024)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Raises DataError for a row whose completion fills `max_length`."""
        rows, starts, spans = zip(*map(self._row, examples, range(len(examples))), strict=True)
        pad, shown = self.tokenizer.pad_token_id, list(zip(rows, starts, strict=True))
        labels = [[self.ignore_index] * start + row[start:] for row, start in shown]
        ids = pad_rows(rows, pad, "left")
        return {
            "input_ids": ids,
            "attention_mask": pad_rows([[1] * len(row) for row in rows], 0, "left"),
            "labels": pad_rows(labels, self.ignore_index, "left"),
            "prompts": pad_rows([row[:start] for row, start in shown], pad, "left"),
            "prompt_attention_mask": pad_rows([[1] * start for start in starts], 0, "left"),
            "byte_offsets": torch.stack([pad_byte_offsets(own, ids.shape[1], "left") for own in spans]),
        }

    def _row(self, example: Mapping[str, Any], number: int) -> tuple[list[int], int, list[Span]]:
        """(ids, tokens of the prompt, bytes of each) of the last `max_length` tokens."""
        messages, render = example[self.messages_key], self.tokenizer.apply_chat_template
        prompt = example.get(self.prompt_key)
        if prompt is None:
            prompt = render(messages[:-1], add_generation_prompt=True, tokenize=False)
        text = render(messages, tokenize=False)
        [(ids, spans)] = encode_with_byte_offsets(self.tokenizer.backend_tokenizer, [text])
        asked = len(prompt.encode())
        start = next((place for place, (first, _) in enumerate(spans) if first >= asked), len(ids))
        assert self.max_length is not None
        left_out = max(len(ids) - self.max_length, 0)
        if left_out >= start:
            raise DataError(
                f"Row {number} of the batch has {len(ids) - start} tokens of completion, and max_length="
                f"{self.max_length}: no prompt tokens left after truncation. Raise max_length, or leave out the row."
            )
        own = [(first - asked, last - asked) for first, last in spans[start:]]
        return ids[left_out:], start - left_out, [(0, 0)] * (start - left_out) + own


@dataclass
class DataCollatorForVisionLanguageChatML:
    """Rows of ``prompt``, ``completion`` and ``images`` as tensors padded on the right, for scripts.

    Args:
        processor: the model's, with a chat template for rows of messages.
        max_length: tokens of a row, and of a prompt, at most; the last ones are left out. None: all.

    The batch: that of `DataCollatorForChatML`, what the processor makes of the images, such as ``pixel_values``, and
    the texts without template as ``original_prompt_text`` and ``original_completion_text``.
    """

    processor: Any
    max_length: int | None = None
    return_tensors: str = "pt"

    def __post_init__(self) -> None:
        self.vision, self.reader = VisionProcessor(self.processor), ImageReader()

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Raises DataError for a row without a prompt or a completion, or whose images do not fit their places."""
        prompts, completions, spans, texts = zip(*map(self._row, examples), strict=True)
        most, pad, starts = self.max_length, self.processor.tokenizer.pad_token_id, [len(one.ids) for one in prompts]
        rows = [[*one.ids, *ids][:most] for one, ids in zip(prompts, completions, strict=True)]
        labels = [[IGNORE_INDEX] * len(row[:start]) + row[start:] for start, row in zip(starts, rows, strict=True)]
        bytes_of = [([(0, 0)] * start + own)[:most] for start, own in zip(starts, spans, strict=True)]
        ids = pad_rows(rows, pad)
        batch: dict[str, Any] = join_tensors([one.tensors for one in prompts])
        for name in self.vision.token_inputs:  # 0 for the completion
            batch[name] = pad_rows([one.numbers[name][:most] for one in prompts], 0, least=ids.shape[1])
        return batch | {
            "input_ids": ids,
            "attention_mask": pad_rows([[1] * len(row) for row in rows], 0),
            "labels": pad_rows(labels, IGNORE_INDEX),
            "prompts": pad_rows([one.ids for one in prompts], pad, "left")[:, :most],
            "prompt_attention_mask": pad_rows([[1] * start for start in starts], 0, "left")[:, :most],
            "byte_offsets": torch.stack([pad_byte_offsets(own, ids.shape[1]) for own in bytes_of]),
            "original_prompt_text": [prompt for prompt, _ in texts],
            "original_completion_text": [completion for _, completion in texts],
        }

    def _row(self, example: Mapping[str, Any]) -> tuple[SeenPrompt, list[int], list[Span], tuple[str, str]]:
        """(the prompt with its images, ids of the completion, bytes of each, texts without template)."""
        if missing := [name for name in ("prompt", "completion") if example.get(name) is None]:
            raise DataError(f"A row has no {missing[0]!r}. Its columns are {', '.join(map(str, example))}.")
        row, values = place_images(example, ("prompt", "completion"))
        prompt, completion = row["prompt"], row["completion"]
        texts = _text_of(prompt), _text_of(completion)
        if not isinstance(prompt, str):
            render = self.processor.apply_chat_template
            whole = render([*prompt, *completion], tokenize=False)
            prompt = render(prompt, add_generation_prompt=True, tokenize=False)
            completion = whole[len(prompt) :]
        tokenizer, shown = self.processor.tokenizer, self.vision.show(prompt, read_images(values, self.reader))
        seen = shown.prompt(tokenizer(shown.text, add_special_tokens=False)["input_ids"])
        [(ids, spans)] = encode_with_byte_offsets(tokenizer.backend_tokenizer, [completion])
        return seen, ids, spans, texts


def _text_of(said: Any) -> str:
    """The text of a prompt or a completion, of messages and their parts one below the other."""
    if isinstance(said, str):
        return said
    parts = said.get("content", said.get("text", "")) if isinstance(said, Mapping) else said
    return "\n".join(filter(None, map(_text_of, parts))) if not isinstance(parts, str) else parts
