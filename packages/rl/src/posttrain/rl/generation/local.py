"""The local engine: generates with any causal language model of transformers whose attention can be replaced.

Each prompt is read once and its keys and values are shared by its completions; finished completions leave the batch and
others take their place. `posttrain.rl.generation.sampling` draws the tokens, with one seed for each completion, and
keeps their log-probabilities.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from posttrain.core.data.host_copies import send
from posttrain.core.models.wrapping import base_model, text_part, unwrap
from posttrain.lm.attention.document_positions import invocation_problem
from posttrain.lm.attention.router_replay import Recorder
from posttrain.lm.attention.varlen_attention import LAYER_TYPES, reading_problem
from posttrain.lm.images.image_positions import ImageExample, ImagePositions, SeenPrompt
from posttrain.lm.images.vision import join_tensors
from posttrain.lm.loss.lm_head import packed_head
from posttrain.rl.generation.decoder_step import DecoderStep
from posttrain.rl.generation.group_cache import IMPLEMENTATION, Decoding, HandsNothingOn, decoding_attention
from posttrain.rl.generation.protocol import MAX_ROWS, Completions, PromptImages, Sampling
from posttrain.rl.generation.routes import Routes
from posttrain.rl.generation.sampling import check_logps, sample, uniforms
from posttrain.rl.generation.transformers import (
    TransformersGenerator,
    ends_with_stop,
    evaluating,
    is_float32,
    rope_limit,
)

if TYPE_CHECKING:
    from posttrain.core.models.wrapping import PretrainedModel

logger = logging.getLogger(__name__)

MAX_TOKENS_READ = 16_384
"""Tokens of prompts that are read in one forward, unless one prompt is longer."""
PADDING = 4.0
"""Prompts share a block while the longest is at most this many times the shortest."""
REFILL = 0.25
"""Prompts are read for places that became free when this share of all is: each reading is one more forward."""
LOOK_EVERY = 16
"""Tokens generated on a GPU between two checks for finished completions: each check waits for the device."""


class LocalGenerator:
    """Generates with the model in training; falls back to its ``generate`` if `problem` returns a reason.

    Args:
        tokenizer: decodes what is searched for stop strings.
        max_rows: completions that are written at once. The rest wait.
        max_tokens: tokens that the cache has room for, unless one prompt with its completions needs more. A prompt
            counts once for all its completions, and each of these with as many tokens as it can get. None: no bound.
        example: of a model that sees, what it is tried with.
        with_routes: return the experts that a mixture chose. Its routers must be those of
            `posttrain.lm.attention.router_replay`.
    """

    shares_weights = True
    model: nn.Module  # that of `sync_weights`

    def __init__(
        self,
        tokenizer: Any,
        max_rows: int = MAX_ROWS,
        max_tokens: int | None = None,
        example: ImageExample | None = None,
        with_routes: bool = False,
    ) -> None:
        self.tokenizer, self.max_rows, self.max_tokens, self.example = tokenizer, max_rows, max_tokens, example
        self.with_routes = with_routes
        self.fallback = TransformersGenerator(tokenizer)
        self._told = False

    def sync_weights(self, model: nn.Module) -> None:
        """Generate with `model` itself, so there is nothing to copy."""
        self.model = unwrap(model)
        self.fallback.sync_weights(model)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seeds: Sequence[int] | None = None,
        images: PromptImages | None = None,
    ) -> Completions:
        """See `Generator.generate`.

        Args:
            images: those of the prompts.
        """
        if not prompts:
            return Completions([], [], [])
        why = problem(self.model, None if images is None else self.example)
        if why is None and max(map(len, prompts)) + sampling.max_new_tokens > (limit := rope_limit(self.model)):
            why = f"in a text of more than {limit:,} tokens its rotary embeddings turn all tokens by other angles."
        if why is not None:
            if not self._told:
                logger.info("Completions come from transformers' generate, which is slower: %s", why)
                self._told = True
            return self.fallback.generate(prompts, n, sampling, seeds, images)
        if seeds is None:
            seeds = torch.randint(2**31, (len(prompts) * n,)).tolist()
        with evaluating(self.model), decoding_attention(self.model), packed_head(self.model):
            run = _Run(self.model, self.tokenizer, prompts, n, sampling, seeds, images)
            room = self.max_rows, self.max_tokens or sys.maxsize
            if not self.with_routes:
                return run.completions(*room)
            with Recorder(self.model) as recorder:
                run.routes = Routes(recorder, prompts, n, sampling.max_new_tokens)
                return run.completions(*room)


class _Run:
    """One call of `generate`: the completions that wait, those that are written, and what has been written."""

    def __init__(self, model, tokenizer, prompts, n, sampling: Sampling, seeds, images=None) -> None:
        self.model, self.tokenizer, self.prompts, self.n, self.sampling = model, tokenizer, prompts, n, sampling
        parameter = next(model.parameters())
        self.device, size, longest = parameter.device, len(prompts) * n, sampling.max_new_tokens
        self.numbers = uniforms(seeds, longest if sampling.temperature else 0).to(
            self.device, torch.float32, non_blocking=True
        )
        self.tokens = torch.zeros(size, longest, dtype=torch.long, device=self.device)
        self.logps = torch.zeros(size, longest, device=self.device)
        self.lengths, self.finished = [0] * size, [False] * size
        self.seen: torch.Tensor | None = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(size, _vocabulary(model), dtype=torch.bool, device=self.device)
            for i, prompt in enumerate(prompts):
                self.seen[i * n : (i + 1) * n, list(set(prompt))] = True
        self.prompts_read = _PromptsRead.of(model, prompts, images)
        self.shifts = self.prompts_read.shifts(n, self.device)
        self.decoding = Decoding(self.device, max_new=longest)
        self.step, self.is_exact = _step_of(model), is_float32(model) and rope_limit(model) == math.inf
        self.routes: Routes | None = None  # None: not asked for
        self.rows: list[list[int]] = []  # of each block, which completions its rows are
        self.looked: list[int] = []  # and the number of their tokens that were checked
        self._place()

    def completions(self, max_rows: int, max_tokens: int) -> Completions:
        """Write all of them, about `max_rows` at a time; places that become free are filled with the next prompts."""
        # The longest first, so that those that are read last take least memory.
        waiting = sorted(range(len(self.prompts)), key=lambda number: len(self.prompts[number]))
        while waiting or self.rows:
            while waiting and (most := self._most(len(self.prompts[waiting[-1]]), max_rows, max_tokens)):
                self._read(_next_batch(self.prompts, waiting, most))
            if self.rows:
                self._go_on()
        ids = [row[:length] for row, length in zip(self.tokens.tolist(), self.lengths, strict=True)]
        logps = [row[:length] for row, length in zip(self.logps.tolist(), self.lengths, strict=True)]
        check_logps(logps)
        routes = None if self.routes is None else self.routes.of(self.lengths)
        return Completions(ids, logps, self.finished, self.is_exact, routes=routes)

    def _most(self, length: int, max_rows: int, max_tokens: int) -> int:
        """How many prompts of `length` tokens may be read now; 0 while too little of the room is free."""
        rows, tokens = max_rows - len(self.index), max_tokens - self.decoding.reserved
        each = length + self.n * self.sampling.max_new_tokens
        if self.rows and (rows < max(self.n, REFILL * max_rows) or tokens < max(each, REFILL * max_tokens)):
            return 0
        return max(min(rows // self.n, tokens // each), 1)

    def _read(self, numbers: list[int]) -> None:
        """Read the prompts of these numbers, and write the first token of each of their completions."""
        lengths = [len(self.prompts[number]) for number in numbers]
        with self.decoding.read(lengths, self.n) as block:
            logits = read_prompts(self.model, self.decoding, self.prompts_read.inputs(numbers))
        if self.routes is not None:
            self.routes.of_prompts(numbers, lengths)
        self.rows.append([number * self.n + copy for number in numbers for copy in range(self.n)])
        self.looked.append(0)
        index = send(torch.tensor(self.rows[-1]), self.device)
        self._draw(logits[block.owners], index, torch.zeros_like(index))
        self._look()

    def _go_on(self) -> None:
        """Write one more token of each row."""
        blocks = self.decoding.blocks
        steps = _joined([block.steps for block in blocks])
        newest = self.tokens[self.index, steps]
        positions = _joined([block.positions for block in blocks])
        if self.shifts is not None:
            positions = positions + self.shifts[self.index]
        logits = _logits(self.model, self.step, self.decoding, newest, positions)
        if self.routes is not None:
            self.routes.of_tokens(self.index, steps)
        for block in blocks:
            block.advance()
        self._draw(logits, self.index, _joined([block.steps for block in blocks]))
        self._look()

    def _draw(self, logits: torch.Tensor, rows: torch.Tensor, steps: torch.Tensor) -> None:
        numbers = self.numbers[rows, steps] if self.sampling.temperature else None
        seen = None if self.seen is None else self.seen[rows]
        tokens, logps = sample(logits, numbers, self.sampling, seen)
        self.tokens[rows, steps], self.logps[rows, steps] = tokens, logps
        if self.seen is not None:
            self.seen[rows, tokens] = True

    def _look(self) -> None:
        """Let rows leave that are done."""
        longest, every = self.sampling.max_new_tokens, 1 if self.device.type == "cpu" else LOOK_EVERY
        changed = len(self.index) != sum(map(len, self.rows))
        for place, (block, rows) in enumerate(zip(self.decoding.blocks, self.rows, strict=True)):
            written, looked = block.step + 1, self.looked[place]
            if written < longest and written - looked < every:
                continue
            new = self.tokens[send(torch.tensor(rows), self.device), looked:written].tolist()
            left = [i for i, tokens in enumerate(new) if not self._ends(rows[i], looked, tokens)]
            self.looked[place] = written
            if written == longest:
                left = []
            if len(left) < len(rows):
                order, changed = block.keep(left), True
                self.rows[place] = [rows[i] for i in order]
        if changed:
            going = [place for place, rows in enumerate(self.rows) if rows]
            self.decoding.blocks = [self.decoding.blocks[place] for place in going]
            self.rows, self.looked = [self.rows[i] for i in going], [self.looked[i] for i in going]
            self._place()

    def _place(self) -> None:
        index = torch.tensor([row for rows in self.rows for row in rows], dtype=torch.long)
        self.index = send(index, self.device)

    def _ends(self, row: int, looked: int, tokens: list[int]) -> bool:
        """Whether completion `row` ends within its newest `tokens`; takes down where."""
        stop = self.sampling.stop
        written = self.tokens[row, :looked].tolist() if stop else []
        for place, token in enumerate(tokens, start=1):
            self.lengths[row] = looked + place
            if token in self.sampling.eos_token_ids or (
                stop and ends_with_stop(self.tokenizer, written + tokens[:place], stop)
            ):
                self.finished[row] = True
                return True
        return False


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _logits(
    model: nn.Module, step: DecoderStep | None, decoding: Decoding, tokens: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """(R, V) logits behind one more token of each row."""
    if step is not None:
        step.prepare(max(block.longest for block in decoding.blocks))
        with torch.autocast(tokens.device.type, enabled=False):
            return step(tokens, positions, decoding.attend_rows)
    ids, places = tokens.unsqueeze(1), positions.unsqueeze(1)
    return model(input_ids=ids, position_ids=places, use_cache=False, decoding=decoding).logits[:, -1]


def _next_batch(prompts: Sequence[Sequence[int]], waiting: list[int], most: int) -> list[int]:
    """Take from the end of `waiting` up to `most` numbers of prompts that are read together."""
    batch = [waiting.pop()]
    longest = len(prompts[batch[0]])
    while waiting and len(batch) < most and (len(batch) + 1) * longest <= MAX_TOKENS_READ:
        if longest > PADDING * len(prompts[waiting[-1]]):
            break
        batch.append(waiting.pop())
    return batch


@dataclass(frozen=True)
class _PromptsRead:
    """What a model reads of prompts.

    Attributes:
        prompts: the prompts. positions: of each, (A, P + 1) where the model numbers them on A axes; None: it counts.
    """

    prompts: Sequence[SeenPrompt]
    positions: list[torch.Tensor] | None = None

    @classmethod
    def of(cls, model: nn.Module, prompts: Sequence[Sequence[int]], images: PromptImages | None) -> _PromptsRead:
        if images is None:
            return cls([SeenPrompt(prompt) for prompt in prompts])
        return cls.seen(model, [images.prompt(images.prompts[i], list(prompt)) for i, prompt in enumerate(prompts)])

    @classmethod
    def seen(cls, model: nn.Module, prompts: Sequence[SeenPrompt]) -> _PromptsRead:
        count = ImagePositions.of(model)
        return cls(prompts, None if count is None else list(map(count, prompts)))

    def shifts(self, copies: int, device: torch.device) -> torch.Tensor | None:
        """(P * copies,) by how much the positions behind each prompt differ from the number of tokens before them."""
        if self.positions is None:
            return None
        found = [int(row[0, -1]) - len(one.ids) for row, one in zip(self.positions, self.prompts, strict=True)]
        return send(torch.tensor(found).repeat_interleave(copies), device)

    def inputs(self, numbers: Sequence[int]) -> tuple[list[int], dict[str, torch.Tensor]]:
        """(tokens of each of these prompts, inputs of the model that reads them in one row)."""
        some = [self.prompts[number] for number in numbers]
        inputs = {"input_ids": torch.tensor([[token for one in some for token in one.ids]])}
        for name in some[0].numbers:
            inputs[name] = torch.tensor([[number for one in some for number in one.numbers[name]]])
        if self.positions is None:
            inputs["position_ids"] = torch.cat([torch.arange(len(one.ids)) for one in some]).unsqueeze(0)
        else:
            inputs["position_ids"] = torch.cat([self.positions[i][:, :-1] for i in numbers], 1).unsqueeze(1)
        return [len(one.ids) for one in some], inputs | join_tensors([one.tensors for one in some])


def read_prompts(
    model: nn.Module, decoding: Decoding, prompts: tuple[list[int], dict[str, torch.Tensor]]
) -> torch.Tensor:
    """(P, V) logits behind the last token of each prompt, as `_PromptsRead.inputs` has them. Within `Decoding.read`."""
    lengths, inputs = prompts
    inputs = {name: send(tensor, decoding.device) for name, tensor in inputs.items()}
    last = send(torch.tensor(lengths).cumsum(0) - 1, decoding.device)
    options = {}
    if "logits_to_keep" in inspect.signature(base_model(model).forward).parameters:
        options["logits_to_keep"] = last
    logits = model(**inputs, use_cache=False, decoding=decoding, **options).logits[0]
    return logits if options else logits[last]


def _vocabulary(model: nn.Module) -> int:
    return base_model(model).get_output_embeddings().weight.shape[0]


# ----------------------------------------------------------------------------------------------- whether it can be done


def problem(model: nn.Module, example: ImageExample | None = None) -> str | None:
    """Why `model` cannot generate here, as a sentence; None if it can.

    Tests the cache with two prompts and two completions each, of which one leaves: the logits must equal those of the
    whole texts. The result is cached while the model exists.

    Args:
        example: of a model that sees, what the prompts are made of. Without one, such a model has a problem.
    """
    base = base_model(model)
    name, config = type(base).__name__, getattr(base, "config", None)
    if config is None or not hasattr(base, "set_attn_implementation"):
        return f"{name} is no model of transformers, whose attention can be replaced."
    if getattr(base.generate, "__module__", "") != "transformers.generation.utils":
        return f"{name} overrides generate."
    if problem := invocation_problem(model):
        return problem
    if problem := reading_problem(base, example):
        return problem
    if unknown := sorted({*(getattr(text_part(base).config, "layer_types", None) or ())} - {*LAYER_TYPES}):
        return f"{name} has layers of {', '.join(unknown)}, whose cache cannot be shared."
    parameter = next(base.parameters())
    if parameter.device.type == "meta":
        return f"{name} is on the meta device, where nothing can be tried."
    tried = _TRIED.setdefault(unwrap(model), {})
    key = parameter.device.type, text_part(base).config._attn_implementation
    if key not in tried:
        tried[key] = _try(unwrap(model), name, parameter, _Trial.of(base, example))
    return tried[key]


_TRIED: WeakKeyDictionary[nn.Module, dict[tuple[str, str], str | None]] = WeakKeyDictionary()


@torch.no_grad()
def _try(model: nn.Module, name: str, parameter: torch.Tensor, trial: _Trial) -> str | None:
    base, device = text_part(base_model(model)), parameter.device
    before = base.config._attn_implementation
    try:
        with evaluating(model):
            expected = []
            for text in trial.texts():
                inputs = {name: tensor.to(device) for name, tensor in text.items()}
                expected.append(model(**inputs, use_cache=False).logits[0, -_NEW - 1 :].float())
            with decoding_attention(model):
                if base.config._attn_implementation != IMPLEMENTATION:
                    return f"{name} does not look its attention up in transformers' AttentionInterface."
                found = _written(model, trial, device)
    except HandsNothingOn:
        return f"the layers of {name} do not hand on what the model is called with, such as a cache of another kind."
    except Exception as error:  # any model may fail here; the fallback is its own generate
        return f"{name} could not be tried: {type(error).__name__}: {error}"
    finally:
        if base.config._attn_implementation != before:
            base.set_attn_implementation(before)
    gap, limit = _gap({place: expected[place[0]][place[1]] for place in found}, found), _tolerance(parameter)
    if not gap < limit:
        return f"the logits of {name} differ by {gap:.2g} of the largest from those of the whole text."
    return None


@torch.no_grad()
def _step_of(model: nn.Module) -> DecoderStep | None:
    """The `DecoderStep` of `model`, if it has one whose logits are those of the model. Within `decoding_attention`.

    Whether they are is tried once for each precision, as in `problem`.
    """
    parameter = next(base_model(model).parameters())
    autocast = torch.get_autocast_dtype if torch.is_autocast_enabled(parameter.device.type) else lambda kind: None
    key = parameter.device.type, parameter.dtype, autocast(parameter.device.type)
    tried = _HAVE_STEPS.setdefault(unwrap(model), {})
    if not tried.get(key, True):
        return None
    try:
        step = DecoderStep.of(model)
        if step is not None and key not in tried:
            trial = _Trial.of(base_model(model))
            gap = _gap(_written(model, trial, parameter.device), _written(model, trial, parameter.device, step))
            tried[key] = gap < _tolerance(parameter)
    except Exception as error:  # its modules are called instead, which know what they hold
        name = type(base_model(model)).__name__
        logger.info(
            "The modules of %s are called for each token, which is slower: its weights could not be read (%s).",
            name,
            error,
        )
        tried[key] = False
    return step if tried.get(key) else None


_HAVE_STEPS: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], bool]] = WeakKeyDictionary()
_NEW = 3


@dataclass(frozen=True)
class _Trial:
    """Two prompts, and two completions of `_NEW` tokens of each."""

    read: _PromptsRead
    completions: list[list[int]]

    @classmethod
    def of(cls, base: PretrainedModel, example: ImageExample | None = None) -> _Trial:
        if example is not None:
            words = [*example.words, *example.words]
            return cls(_PromptsRead.seen(base, example.prompts()), [words[i : i + _NEW] for i in range(4)])
        size = base.config.vocab_size
        prompts = [[(7 * i + 3) % size for i in range(7)], [(5 * i + 2) % size for i in range(4)]]
        completions = [[(11 * i + 3 * j + 1) % size for j in range(_NEW)] for i in range(4)]
        return cls(_PromptsRead([SeenPrompt(prompt) for prompt in prompts]), completions)

    def texts(self) -> Iterator[dict[str, torch.Tensor]]:
        """The inputs of each completion behind its prompt, alone."""
        for number, completion in enumerate(self.completions):
            prompt = self.read.prompts[number // 2]
            numbers = {name: torch.tensor([[*row, *[0] * _NEW]]) for name, row in prompt.numbers.items()}
            yield {"input_ids": torch.tensor([[*prompt.ids, *completion]]), **numbers, **prompt.tensors}


def _tolerance(parameter: torch.Tensor) -> float:
    exact = parameter.dtype in (torch.float32, torch.float64)
    return 5e-5 if exact and not torch.is_autocast_enabled(parameter.device.type) else 5e-2


def _gap(expected: dict[Any, torch.Tensor], found: dict[Any, torch.Tensor]) -> float:
    """The largest difference, as a share of the largest logit."""
    wrong = max(float((expected[place] - logits).abs().max()) for place, logits in found.items())
    return wrong / (max(float(logits.abs().max()) for logits in expected.values()) or 1.0)


def _written(model, trial: _Trial, device, step: DecoderStep | None = None) -> dict[tuple[int, int], torch.Tensor]:
    """The logits of each (text, step) after that many tokens. The third text leaves after the first token."""
    decoding, rows = Decoding(device), [0, 1, 2, 3]
    found: dict[tuple[int, int], torch.Tensor] = {}
    prompts, shifts = trial.read.inputs([0, 1]), trial.read.shifts(2, device)
    with decoding.read(prompts[0], 2) as block:
        logits = read_prompts(model, decoding, prompts)
    found |= {(row, 0): logits[row // 2].float() for row in rows}
    for place in range(_NEW):
        tokens = torch.tensor([trial.completions[row][place] for row in rows], device=device)
        positions = block.positions if shifts is None else block.positions + shifts[rows]
        logits = _logits(model, step, decoding, tokens, positions)
        block.advance()
        found |= {(row, place + 1): logits[number].float() for number, row in enumerate(rows)}
        if place == 0:
            rows = [rows[number] for number in block.keep([0, 1, 3])]
    return found
