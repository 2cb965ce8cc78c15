"""Steps of the local engine: completions that are written together, and join and leave at any token.

Each prompt is read once and its keys and values are shared by its completions. Rows that were read together are a
block of the cache, see `posttrain.rl.generation.decoding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from posttrain.core.data import accelerator
from posttrain.core.data.host_copies import send
from posttrain.core.distributed.expert_parallel import config_problem
from posttrain.core.models.wrapping import base_model
from posttrain.lm.images.image_positions import ImagePositions, SeenPrompt
from posttrain.lm.images.vision import join_tensors
from posttrain.rl.generation.decoding import DecoderStep, Decoding, Known, StepGraph
from posttrain.rl.generation.protocol import Completions, Sampling
from posttrain.rl.generation.sampling import check_logps, ends_with_stop, sample, uniforms

if TYPE_CHECKING:
    from posttrain.rl.generation.block import Block, Text
    from posttrain.rl.generation.local import Routes
    from posttrain.rl.samples.images import RolloutImages

MAX_TOKENS_READ = 16_384
"""Tokens of prompts that are read in one forward, unless one prompt is longer."""
PADDING = 4.0
"""Prompts share a block while the longest is at most this many times the shortest."""
REFILL = 0.25
"""Prompts are read for places that became free when this share of all is: each reading is one more forward."""
LOOK_EVERY = 16
"""Tokens generated on a GPU between two checks for finished completions: each check waits for the device."""
TILE = 16
"""Rows that are read at a time where each is to be written as it is alone. Places without one are filled up."""


class LocalSteps:
    """The steps of the local engine: each writes one more token of every completion that goes on.

        call = steps.add(prompts, n, sampling)     # at any time
        while steps:
            for call, rows in steps.step():        # completions that have ended
                ids, logps, finished = call.completion(rows[0])

    Args:
        step: reads one token of each row, instead of `model`. is_exact: see `Completions`. max_rows, max_tokens,
            batch_invariant: see `posttrain.rl.generation.local.LocalGenerator`.

    Attributes:
        tile: rows that are read at a time, each with a block of its own; 0: all.
        texts: what was read and written, for prompts that go on from it; None: nothing is kept. They and what is being
            written are at most `max_rows` and `max_tokens` together: the oldest are dropped.
        num_read: tokens of prompts that were read.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        step: DecoderStep | None,
        max_rows: int,
        max_tokens: int,
        is_exact: bool,
        batch_invariant: bool = False,
    ) -> None:
        self.model, self.tokenizer, self.max_rows, self.max_tokens = model, tokenizer, max_rows, max_tokens
        self.texts: dict[tuple[int, ...], Text] | None = None
        self.num_read, self.is_exact, self.tile = 0, is_exact, 0
        self._step: DecoderStep | StepGraph | None = step
        self.decoding = Decoding(next(model.parameters()).device)
        if batch_invariant:  # as many tokens as choose an expert are one product
            has_experts = config_problem(base_model(model).config, size=1) is None
            self.tile, self.decoding.is_fixed = 1 if has_experts else TILE, False
        elif step is not None and self.decoding.device.type == accelerator.CUDA:
            self._step = StepGraph(step, self.decoding)
        self._calls: list[Call] = []

    def __bool__(self) -> bool:
        """Whether there is something to write."""
        return bool(self._calls)

    def add(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seeds: Sequence[int] | None = None,
        most: Sequence[int] | None = None,
        images: RolloutImages | None = None,
    ) -> Call:
        """Begin `n` completions of each prompt, of `most` tokens each; None: ``max_new_tokens``. For `seeds` see
        `Generator.generate`.
        """
        if seeds is None:
            seeds = torch.randint(2**31, (len(prompts) * n,)).tolist()
        self._calls.append(Call(self, prompts, n, sampling, seeds, most, images))
        return self._calls[-1]

    def run(self, call: Call) -> Completions:
        """All completions of `call`, written to their ends."""
        while call.waiting or call.parts:
            self.step()
        return call.completions()

    def step(self) -> list[tuple[Call, list[int]]]:
        """Write one more token of each completion; those that have ended, by their calls."""
        for call in self._calls:
            while call.waiting and (most := self._most(call)):
                self._read(call, most)
        if going := [call for call in self._calls if call.parts]:
            self._go_on(going)
        ended = [(call, call.ended) for call in self._calls if call.ended]
        for call, _ in ended:
            call.ended = []
        if self.texts:
            self._bound_texts()
        self._calls = [call for call in self._calls if call.waiting or call.parts]
        return ended

    def _most(self, call: Call) -> int:
        """How many prompts of `call` may be read now; 0 while too little of the room is free."""
        written = sum(len(one.index) for one in self._calls)
        rows, tokens = self.max_rows - written, self.max_tokens - self.decoding.reserved
        each = len(call.prompts[call.waiting[-1]]) + call.n * call.sampling.max_new_tokens
        if written and (rows < max(call.n, REFILL * self.max_rows) or tokens < max(each, REFILL * self.max_tokens)):
            return 0
        return max(min(rows // call.n, tokens // each), 1)

    def _read(self, call: Call, most: int) -> None:
        """Read up to `most` of the prompts that wait, and write the first token of each of their completions."""
        longest = len(call.prompts[call.waiting[-1]])
        most = 1 if self.tile else min(most, max(MAX_TOKENS_READ // longest, 1))
        some = call.waiting[: -most - 1 : -1]  # which become shorter
        numbers = [number for number in some if longest <= PADDING * len(call.prompts[number])]
        del call.waiting[-len(numbers) :]
        lengths = [len(call.prompts[number]) for number in numbers]
        known = [self._known(call.prompts[number]) for number in numbers] if self.texts else []
        inputs = call.prompts_read.inputs(numbers, [before for before, _ in known])
        self.num_read += sum(inputs[0])
        block, logits = self.decoding.read(self.model, inputs, call.n, call.sampling.max_new_tokens, known)
        call.begin(numbers, lengths, block.rows() if self.tile else [block], logits)
        self._look()

    def _known(self, prompt: Sequence[int]) -> Known:
        """Take the longest text that `prompt` goes on from."""
        texts, begun = self.texts or {}, tuple(prompt)
        fitting = (text for text in texts if len(text) < len(begun) and begun[: len(text)] == text)
        found = max(fitting, key=len, default=())
        return len(found), texts.pop(found, None)

    def _bound_texts(self) -> None:
        """Drop the oldest texts while there are too many."""
        texts, rows = self.texts or {}, sum(len(call.index) for call in self._calls)
        tokens = self.decoding.reserved + sum(map(len, texts))
        for text in list(texts):
            if rows + len(texts) > self.max_rows or tokens > self.max_tokens:
                tokens -= len(text)
                del texts[text]

    def _go_on(self, calls: list[Call]) -> None:
        """Write one more token of each row of these calls."""
        tokens, positions = zip(*(call.newest() for call in calls), strict=True)
        read = _joined(tokens), _joined(positions)
        logits = self._in_tiles(*read) if self.tile else self.decoding.next_logits(self.model, self._step, *read)
        for call, own in zip(calls, logits.split([len(each) for each in tokens]), strict=True):
            call.go_on(own)
        self._look()

    def _in_tiles(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`Decoding.next_logits`, of `tile` rows at a time: a product of another size may round otherwise."""
        decoding, found = self.decoding, []
        blocks = decoding.blocks
        for ids, places in zip(torch.split(tokens, self.tile), torch.split(positions, self.tile), strict=True):
            decoding.filler = self.tile - len(ids)
            decoding.blocks, blocks = blocks[: len(ids)], blocks[len(ids) :]
            filled = [nn.functional.pad(each, (0, decoding.filler)) for each in (ids, places)]
            found.append(decoding.next_logits(self.model, self._step, *filled)[: len(ids)])
        return torch.cat(found)

    def _look(self) -> None:
        """Let rows leave that are done, of all calls at once: each reading waits for the device."""
        if any(call.is_due for call in self._calls):
            unseen = iter(_lists([tokens for call in self._calls for tokens in call.unseen()]))
            for call in self._calls:
                call.see([next(unseen) for _ in call.parts])
            if self.texts is not None:  # so that each is taken as it ends
                _read_logps([call for call in self._calls if call.unread])
        self.decoding.blocks = [part.block for call in self._calls for part in call.parts]


@dataclass
class _Part:
    """The rows of a block: which completions they are, and how many of their tokens were looked at."""

    block: Block
    rows: list[int]
    looked: int = 0


class Call:
    """Completions that were begun together: those that wait, those that are written, and what has been written.

    Attributes:
        waiting: numbers of the prompts that are not read yet; the last is the next.
        parts: the rows that are written, by their blocks. index: (R,) which completions they are.
        ids: of each completion, the tokens that were looked at. ended: those that have ended since the last step.
        read: log-probabilities of completions that have ended. unread: those that it lacks.
    """

    def __init__(
        self,
        steps: LocalSteps,
        prompts: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seeds: Sequence[int],
        most: Sequence[int] | None = None,
        images: RolloutImages | None = None,
    ) -> None:
        self.texts, self.tokenizer, self.is_exact = steps.texts, steps.tokenizer, steps.is_exact
        self.prompts, self.n, self.sampling = prompts, n, sampling
        self.device, size, longest = steps.decoding.device, len(prompts) * n, sampling.max_new_tokens
        self.most = [longest] * size if most is None else [*most]
        self.numbers = uniforms(seeds, longest if sampling.temperature else 0).to(
            self.device, torch.float32, non_blocking=True
        )
        self.tokens = torch.zeros(size, longest, dtype=torch.long, device=self.device)
        self.logps = torch.zeros(size, longest, device=self.device)
        self.ids: list[list[int]] = [[] for _ in range(size)]
        self.finished = [False] * size
        self.seen: torch.Tensor | None = None
        if sampling.repetition_penalty != 1:
            vocabulary = base_model(steps.model).get_output_embeddings().weight.shape[0]
            seen = torch.zeros(len(prompts), vocabulary, dtype=torch.bool)
            for row, prompt in zip(seen, prompts, strict=True):
                row[list(set(prompt))] = True
            self.seen = send(seen, self.device).repeat_interleave(n, 0)
        self.shifts: torch.Tensor | None = None
        if images is None:
            self.prompts_read = PromptsRead([SeenPrompt(prompt) for prompt in prompts])
        else:
            shown = [images.prompt(images.prompts[i], list(prompt)) for i, prompt in enumerate(prompts)]
            self.prompts_read = PromptsRead.seen(steps.model, shown)
            self.shifts = self.prompts_read.shifts(n, self.device)
        self.routes: Routes | None = None  # None: not asked for
        # The longest first, so that those that are read last take least memory.
        self.waiting = sorted(range(len(prompts)), key=[*map(len, prompts)].__getitem__)
        self.parts: list[_Part] = []
        self.ended: list[int] = []
        self.unread: list[int] = []
        self.read: dict[int, list[float]] = {}
        self._place()

    def completions(self) -> Completions:
        """All of them, once they have ended."""
        logps = [row[: len(ids)] for row, ids in zip(self.logps.tolist(), self.ids, strict=True)]
        check_logps(logps)
        routes = None if self.routes is None else self.routes.of([*map(len, self.ids)])
        return Completions(self.ids, logps, self.finished, self.is_exact, routes=routes)

    def completion(self, row: int) -> Completions:
        """One of them that has ended."""
        _read_logps([self] if self.unread else [])
        logps = self.read.pop(row)
        check_logps([logps])
        return Completions([self.ids[row]], [logps], [self.finished[row]], self.is_exact)

    def begin(self, numbers: list[int], lengths: list[int], blocks: list[Block], logits: torch.Tensor) -> None:
        """Write the first tokens behind prompts that were read as `blocks`: (P, V) logits."""
        if self.routes is not None:
            self.routes.of_prompts(numbers, lengths)
        rows = iter([number * self.n + copy for number in numbers for copy in range(self.n)])
        parts = [_Part(block, [*islice(rows, len(block.owners))]) for block in blocks]
        self.parts += parts
        self._place()
        owners = _joined([block.owners for block in blocks])
        self._draw(logits[owners], self.index[-len(owners) :], parts)

    def newest(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(R,) the newest token of each row, and its position."""
        self._steps = _joined([part.block.steps for part in self.parts])
        positions = _joined([part.block.positions for part in self.parts])
        if self.shifts is not None:
            positions = positions + self.shifts[self.index]
        return self.tokens[self.index, self._steps], positions

    def go_on(self, logits: torch.Tensor) -> None:
        """Write the tokens behind the `newest`: (R, V) logits."""
        if self.routes is not None:
            self.routes.of_tokens(self.index, self._steps)
        for part in self.parts:
            part.block.advance()
        self._draw(logits, self.index, self.parts)

    def _draw(self, logits: torch.Tensor, rows: torch.Tensor, parts: list[_Part]) -> None:
        steps = _joined([part.block.steps for part in parts])
        numbers = self.numbers[rows, steps] if self.sampling.temperature else None
        seen = None if self.seen is None else self.seen[rows]
        tokens, logps = sample(logits, numbers, self.sampling, seen)
        self.tokens[rows, steps], self.logps[rows, steps] = tokens, logps
        if self.seen is not None:
            self.seen[rows, tokens] = True

    @property
    def is_due(self) -> bool:
        """Whether what was written and not looked at is worth a wait for the device."""
        longest, every = max(self.most), 1 if self.device.type == "cpu" else LOOK_EVERY
        pairs = [(part.block.step + 1, part.looked) for part in self.parts]
        return any(written > looked and (written >= longest or written - looked >= every) for written, looked in pairs)

    def unseen(self) -> list[torch.Tensor]:
        """Of each part, (R, T) the tokens that were not looked at."""
        pairs = zip(self.parts, torch.split(self.index, [len(part.rows) for part in self.parts]), strict=True)
        return [self.tokens[rows, part.looked : part.block.step + 1] for part, rows in pairs]

    def see(self, unseen: list[list[list[int]]]) -> None:
        """Take down what was `unseen`, and let the rows go that are done."""
        stop, last, before = self.sampling.stop, self.sampling.eos_token_ids, len(self.ended)
        for part, new in zip(self.parts, unseen, strict=True):
            left: list[int] = []
            for place, (row, tokens) in enumerate(zip(part.rows, new, strict=True)):
                ids = self.ids[row]
                for token in tokens:
                    ids.append(token)
                    self.finished[row] = token in last or (bool(stop) and ends_with_stop(self.tokenizer, ids, stop))
                    if self.finished[row] or len(ids) >= self.most[row]:
                        self.ended.append(row)
                        self.unread.append(row)
                        if self.texts is not None and self.most[row]:  # else no one waits for it
                            step = min(part.block.step, len(ids))
                            self.texts[(*self.prompts[row // self.n], *ids[:step])] = part.block.text(place, step)
                        break
                else:
                    left.append(place)
            part.looked = part.block.step + 1
            if len(left) < len(part.rows):
                part.rows = [part.rows[i] for i in part.block.keep(left)] if left else []
        if len(self.ended) > before:
            self.parts = [part for part in self.parts if part.rows]
            self._place()

    def _place(self) -> None:
        index = torch.tensor([row for part in self.parts for row in part.rows], dtype=torch.long)
        self.index = index.to(self.device, non_blocking=True)


def _read_logps(calls: Sequence[Call]) -> None:
    """Read the log-probabilities of the completions of `calls` that have ended and are unread."""
    rows = [send(torch.tensor(call.unread), call.device) for call in calls]
    ends = [max(len(call.ids[row]) for row in call.unread) for call in calls]
    found = _lists([call.logps[own, :end] for call, own, end in zip(calls, rows, ends, strict=True)])
    for call, logps in zip(calls, found, strict=True):
        call.read |= {row: own[: len(call.ids[row])] for row, own in zip(call.unread, logps, strict=True)}
        call.unread = []


def _lists(tensors: Sequence[torch.Tensor]) -> list[list[list[Any]]]:
    """The numbers of (R, T) tensors, read at once: each reading waits for the device."""
    if len(tensors) < 2:
        return [tensor.tolist() for tensor in tensors]
    numbers = iter(torch.cat([tensor.flatten() for tensor in tensors]).tolist())
    return [[[*islice(numbers, tensor.shape[1])] for _ in range(len(tensor))] for tensor in tensors]


def _joined(parts: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class PromptsRead:
    """What a model reads of prompts.

    Attributes:
        prompts: the prompts. positions: of each, (A, P + 1) where the model numbers them on A axes; None: it counts.
    """

    prompts: Sequence[SeenPrompt]
    positions: list[torch.Tensor] | None = None

    @classmethod
    def seen(cls, model: nn.Module, prompts: Sequence[SeenPrompt]) -> PromptsRead:
        count = ImagePositions.of(model)
        return cls(prompts, None if count is None else list(map(count, prompts)))

    def shifts(self, copies: int, device: torch.device) -> torch.Tensor | None:
        """(P * copies,) by how much the positions behind each prompt differ from the number of tokens before them."""
        if self.positions is None:
            return None
        found = [int(row[0, -1]) - len(one.ids) for row, one in zip(self.positions, self.prompts, strict=True)]
        return send(torch.tensor(found).repeat_interleave(copies), device)

    def inputs(self, numbers: Sequence[int], known: Sequence[int] = ()) -> tuple[list[int], dict[str, torch.Tensor]]:
        """(tokens of each of these prompts, inputs of the model that reads them in one row). `known`: of each prompt,
        without images, how many tokens are not read.
        """
        some = [self.prompts[number] for number in numbers]
        new = list(zip(known or [0] * len(some), some, strict=True))
        inputs = {"input_ids": torch.tensor([[token for before, one in new for token in one.ids[before:]]])}
        for name in some[0].numbers:
            inputs[name] = torch.tensor([[number for one in some for number in one.numbers[name]]])
        if self.positions is None:
            inputs["position_ids"] = torch.cat([torch.arange(b, len(one.ids)) for b, one in new]).unsqueeze(0)
        else:
            inputs["position_ids"] = torch.cat([self.positions[i][:, :-1] for i in numbers], 1).unsqueeze(1)
        tensors = join_tensors([one.tensors for one in some]) if any(one.tensors for one in some) else {}
        return [len(one.ids) - before for before, one in new], inputs | tensors
