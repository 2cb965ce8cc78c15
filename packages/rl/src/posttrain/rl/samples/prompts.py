"""Samples prompts in order, repeats each for its group, and tokenizes them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from posttrain.core.config import set_among
from posttrain.core.data.batch_limits import out_of_range
from posttrain.core.data.pipeline import check_dataset, has_length, is_stream
from posttrain.core.data.samplers import EpochSampler
from posttrain.core.errors import DataError
from posttrain.core.models.embeddings import context_of
from posttrain.core.training.preflight import Parts, Problem, caught
from posttrain.lm.images.images import has_images
from posttrain.lm.text import chat_template, layouts
from posttrain.lm.text.tokenization import explain_unreadable
from posttrain.rl.tools.protocol import (
    QUESTION,
    ToolProtocol,
    argument_types,
    behind,
    has_parser,
    parse_response,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """How the completions of a rollout are numbered and distributed over processes.

    Number i belongs to prompt ``i // group_size``. An optimizer step uses consecutive numbers for any number of
    processes: each process gets `chunk` of them for its first step, `chunk` for its second, ... ...

    Attributes:
        group_size: completions of each prompt. per_process: completions of a rollout on each process.
        chunk: of an optimizer step, on each process; divides `per_process`.
    """

    group_size: int
    per_process: int
    chunk: int
    world_size: int = 1

    @property
    def prompts(self) -> int:
        """Prompts of a rollout, over all processes."""
        return self.per_process * self.world_size // self.group_size

    def numbers(self, rank: int) -> torch.Tensor:
        """(per_process,) the numbers that a process has, in its order."""
        places = torch.arange(self.per_process)
        update, offset = places // self.chunk, places % self.chunk
        return (update * self.world_size + rank) * self.chunk + offset

    def dealt(self) -> torch.Tensor:
        """The numbers of all processes in rank order: a permutation of the rollout."""
        return torch.cat([self.numbers(rank) for rank in range(self.world_size)])


class GroupSampler(EpochSampler):
    """Repeats each prompt for its group, in whole rollouts; the rest of an epoch is not sampled."""

    def __init__(self, num_prompts: int, layout: Layout, seed: int, shuffle: bool = True) -> None:
        self.num_prompts, self.layout, self.shuffle = num_prompts, layout, shuffle
        self._before: dict[int, int] = {}  # prompts before the first whole rollout, of an epoch begun with other ones
        self.own_cut = layout.group_size
        super().__init__(num_prompts, seed)

    def resume(self, epoch: int, cut: Any, given: int) -> int:
        self.epoch, self._before = epoch, {epoch: given // cut % self.layout.prompts}
        return given // cut * self.layout.group_size

    def order(self) -> torch.Tensor:
        """Indices of the dataset, rollout by rollout, in the order of distribution."""
        prompts = torch.arange(self.num_prompts)
        if self.shuffle:
            prompts = torch.randperm(self.num_prompts, generator=self.generator())
        before, size = self._before.get(self.epoch, 0), self.layout.group_size
        rollouts = prompts[before : len(self) // size].view(-1, self.layout.prompts)
        dealt = rollouts[:, self.layout.dealt() // size].flatten()
        return torch.cat([prompts[:before].repeat_interleave(size), dealt])

    def __len__(self) -> int:
        before, each = self._before.get(self.epoch, 0), self.layout.prompts
        return (before + (self.num_prompts - before) // each * each) * self.layout.group_size


class GroupedStream(IterableDataset):
    """Rows of a stream, repeated for their group, in whole rollouts and in the order of distribution."""

    def __init__(self, rows: Iterable[Any], layout: Layout) -> None:
        self.rows, self.layout = rows, layout
        if hasattr(rows, "set_epoch"):
            self.set_epoch = rows.set_epoch

    def __iter__(self) -> Iterator[Any]:
        rows, places = iter(self.rows), (self.layout.dealt() // self.layout.group_size).tolist()
        while len(chunk := list(islice(rows, self.layout.prompts))) == self.layout.prompts:
            for place in places:
                yield chunk[place]


def require_prompts(dataset: Any, at_least: int) -> None:
    """Raise DataError where a training dataset has fewer prompts than one rollout takes, with what decides on their
    number.
    """
    if has_length(dataset) and len(dataset) < at_least:
        raise DataError(
            f"train_dataset has {len(dataset)} prompts and one rollout needs {at_least} (generation_batch_size / "
            "num_generations), so not one would be made. Give more prompts, a smaller per_device_train_batch_size "
            "or steps_per_generation, or a larger num_generations."
        )


def check_prompts(dataset: Any, name: str, columns: tuple[str, ...] = ("prompt",)) -> None:
    """Raise DataError where a dataset has no prompts, with the column, the row and the remedy."""
    check_dataset(dataset, name)
    if is_stream(dataset):
        return
    row = dataset[0]
    if not isinstance(row, Mapping) or any(column not in row for column in columns):
        found = ", ".join(row) if isinstance(row, Mapping) else type(row).__name__
        hint = layouts.rename_hint(list(row) if isinstance(row, Mapping) else (), ("prompt",))
        raise DataError(
            f"{name} has no column 'prompt' (found: {found}). Rename the column that holds the questions.{hint}"
        )
    if columns:
        _check_each(dataset, name)


def _prompts_of(dataset: Any) -> Iterator[Any] | None:
    """The prompts of `dataset`, in order; None for rows that are expensive to read, which are checked in use."""
    if isinstance(dataset, list):
        return (row.get("prompt") if isinstance(row, Mapping) else None for row in dataset)
    if not hasattr(dataset, "select_columns"):
        return None
    rows = dataset.select_columns("prompt")
    return (prompt for start in range(0, len(rows), 1000) for prompt in rows[start : start + 1000]["prompt"])


def _check_each(dataset: Any, name: str) -> None:
    """Raise DataError where a prompt is neither a text nor messages, with the reason and the first such rows."""
    faults: dict[str, list[int]] = {}
    for number, prompt in enumerate(_prompts_of(dataset) or ()):
        try:
            texts = [prompt] if isinstance(prompt, str) else chat_template.to_messages(prompt, "prompt")
            explain_unreadable(text if isinstance(text, str) else text.get("content") for text in texts)
        except DataError as error:
            faults.setdefault(str(error), []).append(number)
    if faults:
        listed = "; ".join(f"{fault} ({rows_listed(at)})" for fault, at in faults.items())
        raise DataError(
            f"{name}: {listed}. A prompt is a text, or messages with role and content; correct or filter those rows."
        )


def rows_listed(numbers: list[int]) -> str:
    """The first of the `numbers` of rows, as messages name them."""
    return f"rows {', '.join(map(str, numbers[:5]))}{', ...' if len(numbers) > 5 else ''}"


def context_length(config: Any, engine: int | None = None) -> int | None:
    """Tokens of prompt and completion together that a model reads at most, and the `engine`, where it has a limit of
    its own; None: there is none.
    """
    return min(filter(None, (context_of(config), engine)), default=None)


def with_room(
    dataset: Any,
    name: str,
    tokens_of: Callable[[dict[str, Any]], Sequence[int]],
    context: int | None,
    drops: bool,
) -> Any:
    """`dataset` without prompts that leave no room for a completion in the `context`, which are counted in a warning;
    or a DataError unless it `drops` such. The tokens of a row's prompt are asked for where that has as many bytes as
    there is room for tokens. Prompts without any token are always errors.
    """
    if is_stream(dataset) or "prompt" not in dataset[0]:
        return dataset
    if empty := [number for number, prompt in enumerate(_prompts_of(dataset) or ()) if prompt == ""]:
        try:
            tokens_of(dataset[empty[0]])  # some tokenizers begin each text with a token
        except DataError as error:
            raise DataError(f"{name}: {error} Filter such rows ({rows_listed(empty)}).") from error
    if context is None:
        return dataset
    bytes_that_fit = context - len(tokens_of(dataset[0]))  # a template adds no more than the first prompt has
    sizes = (len(repr(prompt).encode(errors="replace")) for prompt in _prompts_of(dataset) or ())
    may_be_long = [number for number, size in enumerate(sizes) if size >= bytes_that_fit]
    long = [number for number in may_be_long if len(tokens_of(dataset[number])) >= context]
    if not long:
        return dataset
    problem = (
        f"{name}: {len(long)} of {len(dataset)} prompts leave no room for a completion, of the {context} tokens that "
        f"the model reads ({rows_listed(long)})"
    )
    if not drops:
        raise DataError(f"{problem}. Shorten or filter those rows, or set long_prompts=drop.")
    logger.warning("%s; they are dropped.", problem)
    left = sorted({*range(len(dataset))} - {*long})
    kept = rows_at(dataset, left)
    check_prompts(kept, name)
    return kept


def rows_at(dataset: Any, places: Sequence[int]) -> Any:
    """The rows of `dataset` at these `places`: one of `datasets` again, or a list."""
    return dataset.select(places) if hasattr(dataset, "select") else [dataset[place] for place in places]


#: Arguments that are not for prompts with images.
OF_TEXT_ALONE = ("use_transformers_continuous_batching", "max_staleness", "cache_implementation", "renderer")


def image_problems(args: Any, parts: Parts, reads_images: bool) -> Iterator[Problem]:
    """Problems of datasets of prompts with images."""
    if not any(map(has_images, (parts.train_dataset, parts.eval_dataset))):
        return
    if not reads_images:
        yield DataError("The prompts have images, which this trainer does not read. Leave that column out.")
    for name, value in set_among(args, *OF_TEXT_ALONE).items():
        yield (
            f"{name}={value!r} is not supported for prompts with images, which the model itself or vLLM generates "
            "from; leave it out"
        )
    if args.bad_images == "drop":
        yield "bad_images='drop' is not supported online, where rollouts have whole groups; filter such rows before"


def prompt_problems(args: Any, parts: Parts) -> Iterator[Problem]:
    """Problems in a trainer's datasets of prompts."""
    environments = parts.others["environment_factory"] is not None or parts.others.get("agent") is not None
    columns = () if environments else ("prompt",)
    if parts.train_dataset is not None:
        if args.curriculum and is_stream(parts.train_dataset):
            yield DataError(
                "curriculum=True chooses prompts by their number, and train_dataset is a stream. Pass rows by index."
            )
        yield from caught(check_prompts, parts.train_dataset, "train_dataset", columns)
    elif not environments and parts.eval_dataset is None:
        yield ValueError(
            "`train_dataset` is required: pass rows with a prompt, an environment_factory whose reset() makes "
            "prompts, an agent, or an eval_dataset to evaluate alone."
        )
    elif isinstance(parts.others["environment_factory"], Mapping) and parts.eval_dataset is None:
        yield ValueError(
            "environment_factory is a dict, and rows say which of its environments they are for: it requires a "
            "`train_dataset` with a column 'environment'. Pass one, or a single factory."
        )
    elif environments and args.max_steps <= 0 and parts.eval_dataset is None:
        yield ValueError(
            "Without a train_dataset, prompts come from environments or the agent, and their number is unknown: "
            "set max_steps, or pass a train_dataset."
        )
    sets = parts.eval_dataset if isinstance(parts.eval_dataset, Mapping) else {"eval_dataset": parts.eval_dataset}
    for name, dataset in sets.items():
        if dataset is not None:
            yield from caught(check_prompts, dataset, name, columns)


class PromptCodec:
    """Prompts to tokens, of which the model knows `limit`, from 0 on, and completions to texts."""

    def __init__(
        self, tokenizer: Any, chat_template_kwargs: dict[str, Any] | None = None, limit: int | None = None
    ) -> None:
        self.tokenizer, self.kwargs, self.limit = tokenizer, chat_template_kwargs, limit
        self._before, _ = chat_template.special_tokens_around(tokenizer)
        self._protocols: dict[tuple[str, ...], ToolProtocol] = {}
        self._template: tuple[Any, chat_template.Template | None] = None, None

    def encode(
        self, prompt: Any, tools: list[Any] | None = None, show: Callable[[str], str] | None = None
    ) -> list[int]:
        """The prompt's tokens: of a text, with bos if the tokenizer adds it; of messages, with the generation prompt or
        with the assistant's last turn left open.

        Args:
            tools: schemas or functions that the chat template describes to the model.
            show: puts tokens of images into the text.

        Raises:
            DataError: the prompt is invalid, or holds a token that the model does not know.
        """
        if isinstance(prompt, str):
            prompt = prompt if show is None else show(prompt)
            try:
                ids = self._before + self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
            except TypeError:
                explain_unreadable([prompt])
                raise
        else:
            ids = self.message_ids(chat_template.to_messages(prompt, "prompt"), tools, show)
        if not ids:
            raise DataError("the prompt is empty, and a model needs at least one token")
        if self.limit is not None and (largest := max(ids)) >= self.limit:
            raise DataError(f"The prompt {prompt!r:.80}: {out_of_range('input_ids', largest, self.limit)}")
        return ids

    def message_ids(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, show: Callable[[str], str] | None
    ) -> list[int]:
        """The tokens of a conversation, up to the turn that the policy begins or goes on with."""
        unfinished = messages[-1]["role"] == "assistant"
        text = self.template(tools).render(messages, not unfinished, continue_final_message=unfinished)
        return chat_template.encode_texts(self.tokenizer, [text if show is None else show(text)])[0].ids

    def next_ids(
        self, written: Sequence[int], messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> list[int]:
        """The tokens of `messages` behind a turn of the policy, whose tokens, or the last of them, are `written`: the
        end of its turn, they, and the next beginning. Answers of tools come first, in the order of the calls. Raises
        DataError where the chat template refuses such messages, and ValueError where it does not support tools, whose
        answers are among them.
        """
        count = next((i for i, message in enumerate(messages) if message["role"] != "tool"), len(messages))
        if count:
            return self.protocol(tools).answer_ids(written, messages[:count], tools, messages[count:])
        template, unfinished = self.template(list(tools)), messages[-1]["role"] == "assistant"
        turn = {"role": "assistant", "content": chat_template.PLACEHOLDER}
        said = chat_template.to_messages(messages)
        text = template.render([QUESTION, turn, *said], not unfinished, unfinished)
        _, found, tail = text.partition(chat_template.PLACEHOLDER)
        if not found:
            raise DataError("the chat template leaves out an earlier turn of the assistant")
        ending = os.path.commonprefix([tail, template.turn_ending])
        whole, end = (encoding.ids for encoding in chat_template.encode_texts(self.tokenizer, [tail, ending]))
        return behind(written, whole, len(end), self.tokenizer)

    def encode_completion(self, prompt: Any, completion: Any) -> list[int]:
        """The tokens of a completion that is given, with the one that ends it: a text, or the messages that follow; a
        DataError where it is neither.
        """
        if isinstance(prompt, str):
            if not isinstance(completion, str):
                raise DataError(f"the prompt is a text, and its completion is of type {type(completion).__name__}")
            ids, end = self.tokenizer(completion, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id
            return ids if end is None or ids[-1:] == [end] else [*ids, end]
        turns = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        before, template = chat_template.to_messages(prompt, "prompt"), self.template()
        text = template.render([*before, *chat_template.to_messages(turns, "completion")])
        return chat_template.encode_texts(self.tokenizer, [text[template.prompt_length(before, text) :]])[0].ids

    def template(self, tools: list[Any] | None = None) -> chat_template.Template:
        """The chat template, with these tools."""
        asked = self.tokenizer.chat_template, tools or None
        before, found = self._template
        if found is None or before != asked:
            found = chat_template.Template(self.tokenizer, tools or None, self.kwargs)
            self._template = asked, found  # it knows by then how a turn ends, which takes a rendering
        return found

    def protocol(self, schemas: Sequence[dict[str, Any]]) -> ToolProtocol:
        """How tools with these schemas are called and answered under the chat template; a ValueError where they cannot
        be.
        """
        names = tuple(argument_types(schemas))
        if names not in self._protocols:
            self._protocols[names] = self.make_protocol(schemas)
        return self._protocols[names]

    def make_protocol(self, schemas: Sequence[dict[str, Any]]) -> ToolProtocol:
        return ToolProtocol(self.tokenizer, self.kwargs, schemas)

    def decode(
        self, prompt: Any, ids: list[int], prompt_ids: Sequence[int] = (), tools: Sequence[dict[str, Any]] = ()
    ) -> Any:
        """Decodes tokens of the policy into a text, or into an assistant's message, whose calls of `tools` (schemas)
        become ``tool_calls``, if the prompt is messages.
        """
        if isinstance(prompt, str):
            return self.tokenizer.decode(ids, skip_special_tokens=True)
        if tools:
            return [self.protocol(tools).read(ids, tools, prompt_ids).message]
        if has_parser(self.tokenizer):
            return [parse_response(self.tokenizer, ids, prompt_ids)]
        return [{"role": "assistant", "content": self.tokenizer.decode(ids, skip_special_tokens=True)}]
