"""The local engine: generates with any causal language model of transformers whose attention can be replaced.

`posttrain.rl.generation.local_steps` writes the completions, and `posttrain.rl.generation.sampling` draws their tokens,
with one seed for each completion, and keeps their log-probabilities.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from posttrain.core.models.wrapping import PretrainedModel, base_model, evaluating, text_part, unwrap
from posttrain.lm.attention.document_positions import invocation_problem
from posttrain.lm.attention.router_replay import Recorder
from posttrain.lm.attention.varlen_attention import LAYER_TYPES, reading_problem, tolerance
from posttrain.lm.images.image_positions import ImageExample, SeenPrompt
from posttrain.lm.loss.lm_head import packed_head
from posttrain.rl.generation.decoding import IMPLEMENTATION, DecoderStep, Decoding, HandsNothingOn, decoding_attention
from posttrain.rl.generation.local_steps import LocalSteps, PromptsRead
from posttrain.rl.generation.protocol import MAX_ROWS, Completions, Sampling
from posttrain.rl.generation.sampling import is_float32, rope_limit
from posttrain.rl.generation.transformers import TransformersGenerator, has_own_generate

if TYPE_CHECKING:
    from posttrain.rl.samples.images import RolloutImages

logger = logging.getLogger(__name__)


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
        batch_invariant: write each completion as it is written alone, bit for bit.
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
        batch_invariant: bool = False,
    ) -> None:
        self.tokenizer, self.max_rows, self.max_tokens, self.example = tokenizer, max_rows, max_tokens, example
        self.with_routes, self.batch_invariant = with_routes, batch_invariant
        self.fallback = TransformersGenerator(tokenizer)
        self._told = False

    def sync_weights(self, model: nn.Module) -> None:
        """Generate with `model` itself, so there is nothing to copy."""
        self.model = self.fallback.model = unwrap(model)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seeds: Sequence[int] | None = None,
        images: RolloutImages | None = None,
    ) -> Completions:
        """See `Generator.generate`; with the `images` of the prompts. Raise ValueError if completions are to be written
        as they are alone, which this model cannot do.
        """
        if not prompts:
            return Completions([], [], [])
        why = problem(self.model, None if images is None else self.example)
        limit = rope_limit(self.model) if why is None else math.inf
        if max(map(len, prompts)) + sampling.max_new_tokens > limit:
            why = f"in a text of more than {limit:,} tokens its rotary embeddings turn all tokens by other angles."
        if why is not None:
            if self.batch_invariant:
                raise ValueError(
                    "generation_batch_invariant=True needs the local engine, and these completions would come from "
                    f"transformers' generate: {why} Set generation_batch_invariant=False."
                )
            if not self._told:
                logger.info("Completions come from transformers' generate, which is slower: %s", why)
                self._told = True
            return self.fallback.generate(prompts, n, sampling, seeds, images)
        records = Recorder(self.model) if self.with_routes else contextlib.nullcontext()
        with self._steps(is_fixed=limit == math.inf) as steps, records as recorder:
            call = steps.add(prompts, n, sampling, seeds, images=images)
            if recorder is not None:
                call.routes = Routes(recorder, prompts, n, sampling.max_new_tokens)
            return steps.run(call)

    def steps(self) -> contextlib.AbstractContextManager[LocalSteps] | None:
        """A context in which completions are begun at any time, and are written together with those that go on.

        None: this model or these options need `generate`. The weights stay as they are within the context. What was
        written is kept for prompts that go on from it.
        """
        if self.with_routes or problem(self.model) is not None or rope_limit(self.model) < math.inf:
            return None
        return self._steps(is_fixed=True, keeps_texts=True)

    @contextlib.contextmanager
    def _steps(self, is_fixed: bool, keeps_texts: bool = False) -> Iterator[LocalSteps]:
        """`is_fixed`: its rotary embeddings turn each token by its position alone."""
        model = self.model
        with torch.no_grad(), evaluating(model), decoding_attention(model), packed_head(model):
            most = self.max_rows, self.max_tokens or sys.maxsize
            is_exact = is_fixed and is_float32(model)
            steps = LocalSteps(model, self.tokenizer, _step_of(model), *most, is_exact, self.batch_invariant)
            steps.texts = {} if keeps_texts and not self.batch_invariant else None
            yield steps


class Routes:
    """The experts of a mixture with which prompts and completions were read, taken down by `recorder`."""

    def __init__(self, recorder: Recorder, prompts: Sequence[Sequence[int]], n: int, longest: int) -> None:
        self.recorder, self.n, self.longest = recorder, n, longest
        self.prompts: list[torch.Tensor] = [torch.empty(0)] * len(prompts)
        self.tokens: torch.Tensor | None = None

    def of_prompts(self, numbers: list[int], lengths: list[int]) -> None:
        """Take down those of the prompts that were read together, one after the other."""
        for number, routes in zip(numbers, self.recorder.take().split(lengths), strict=True):
            self.prompts[number] = routes

    def of_tokens(self, rows: torch.Tensor, steps: torch.Tensor) -> None:
        """Take down those of one token of each of these completions."""
        found = self.recorder.take()
        if self.tokens is None:
            self.tokens = found.new_empty(len(self.prompts) * self.n, self.longest, *found.shape[1:])
        self.tokens[rows, steps] = found

    def of(self, lengths: list[int]) -> list[torch.Tensor]:
        """Those of each completion of so many tokens behind its prompt, on the CPU."""
        prompts = [routes.cpu() for routes in self.prompts]
        if self.tokens is None:  # no completion has more than one token, which is not read
            return [prompts[row // self.n] for row in range(len(lengths))]
        tokens = self.tokens.cpu()
        return [torch.cat([prompts[row // self.n], tokens[row, : n - 1]]) for row, n in enumerate(lengths)]


# ----------------------------------------------------------------------------------------------- whether it can be done


def problem(model: nn.Module, example: ImageExample | None = None) -> str | None:
    """Why `model` cannot generate here, as a sentence; None if it can. The answer is kept while the model exists.

    Tests the cache with two prompts, of a model that sees made of `example`, which it needs then, and two completions
    each, of which one leaves: the logits must equal those of the whole texts.
    """
    base = base_model(model)
    if not hasattr(base, "set_attn_implementation"):
        return f"{type(base).__name__} is no model of transformers, whose attention can be replaced."
    device, tried = next(base.parameters()).device, _TRIED.setdefault(model, {})
    key = device.type, base.config.get_text_config()._attn_implementation, example is None
    if key not in tried:
        tried[key] = _find_problem(model, base, device, example)
    return tried[key]


_TRIED: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], str | None]] = WeakKeyDictionary()


@torch.no_grad()
def _find_problem(
    model: nn.Module, base: PretrainedModel, device: torch.device, example: ImageExample | None
) -> str | None:
    name, reader = type(base).__name__, text_part(base)
    config: Any = reader.config
    if has_own_generate(base):
        return f"{name} overrides generate."
    if problem := invocation_problem(model) or reading_problem(base, example):
        return problem
    if unknown := sorted({*(getattr(config, "layer_types", None) or ())} - {*LAYER_TYPES}):
        return f"{name} has layers of {', '.join(unknown)}, whose cache cannot be shared."
    if device.type == "meta":
        return f"{name} is on the meta device, where nothing can be tried."
    trial = _Trial.of(base, example)
    try:
        with evaluating(model):
            expected = []
            for text in trial.texts():
                inputs = {name: tensor.to(device) for name, tensor in text.items()}
                expected.append(model(**inputs, use_cache=False).logits[0, -_NEW - 1 :].float())
            with decoding_attention(model):
                if config._attn_implementation != IMPLEMENTATION:
                    return f"{name} does not look its attention up in transformers' AttentionInterface."
                found = _written(model, trial, device)
    except HandsNothingOn:
        return f"the layers of {name} do not hand on what the model is called with, such as a cache of another kind."
    except Exception as error:  # any model may fail here; the fallback is its own generate
        return f"{name} could not be tried: {type(error).__name__}: {error}"
    gap = _gap({place: expected[place[0]][place[1]] for place in found}, found)
    if not gap < tolerance(reader):
        return f"the logits of {name} differ by {gap:.2g} of the largest from those of the whole text."
    return None


@torch.no_grad()
def _step_of(model: nn.Module) -> DecoderStep | None:
    """The `DecoderStep` of `model`, if it has one whose logits are those of the model. Within `decoding_attention`.

    Whether they are is tried once for each precision, as in `problem`.
    """
    tried, parameter = _HAVE_STEPS.setdefault(model, {}), next(model.parameters())
    device = parameter.device.type
    key = device, parameter.dtype, torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if not tried.get(key, True):
        return None
    try:
        step = DecoderStep.of(model)
        if step is not None and key not in tried:
            base = base_model(model)
            ways = (_written(model, _Trial.of(base), parameter.device, way) for way in (None, step))
            tried[key] = _gap(*ways) < tolerance(base)
    except Exception as error:  # its modules are called instead, which know what they hold
        slower = "The modules of %s are called for each token, which is slower: its weights could not be read (%s)."
        logger.info(slower, type(base_model(model)).__name__, error)
        tried[key] = False
    return step if tried.get(key) else None


_HAVE_STEPS: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], bool]] = WeakKeyDictionary()
_NEW = 3


@dataclass(frozen=True)
class _Trial:
    """Two prompts, and two completions of `_NEW` tokens of each."""

    read: PromptsRead
    completions: list[list[int]]

    @classmethod
    def of(cls, base: PretrainedModel, example: ImageExample | None = None) -> _Trial:
        if example is not None:
            words = [*example.words, *example.words]
            return cls(PromptsRead.seen(base, example.prompts()), [words[i : i + _NEW] for i in range(4)])
        size = base.config.vocab_size
        prompts = [[(7 * i + 3) % size for i in range(7)], [(5 * i + 2) % size for i in range(4)]]
        completions = [[(11 * i + 3 * j + 1) % size for j in range(_NEW)] for i in range(4)]
        return cls(PromptsRead([SeenPrompt(prompt) for prompt in prompts]), completions)

    def texts(self) -> Iterator[dict[str, torch.Tensor]]:
        """The inputs of each completion behind its prompt, alone."""
        for number, completion in enumerate(self.completions):
            prompt = self.read.prompts[number // 2]
            numbers = {name: torch.tensor([[*row, *[0] * _NEW]]) for name, row in prompt.numbers.items()}
            yield {"input_ids": torch.tensor([[*prompt.ids, *completion]]), **numbers, **prompt.tensors}


def _gap(expected: dict[Any, torch.Tensor], found: dict[Any, torch.Tensor]) -> float:
    """The largest difference, as a share of the largest logit."""
    wrong = max(float((expected[place] - logits).abs().max()) for place, logits in found.items())
    return wrong / (max(float(logits.abs().max()) for logits in expected.values()) or 1.0)


def _written(model, trial: _Trial, device, step: DecoderStep | None = None) -> dict[tuple[int, int], torch.Tensor]:
    """The logits of each (text, step) after that many tokens. The third text leaves after the first token."""
    decoding, rows = Decoding(device), [0, 1, 2, 3]
    found: dict[tuple[int, int], torch.Tensor] = {}
    block, logits = decoding.read(model, trial.read.inputs([0, 1]), 2)
    shifts = trial.read.shifts(2, device)
    found |= {(row, 0): logits[row // 2].float() for row in rows}
    for place in range(_NEW):
        tokens = torch.tensor([trial.completions[row][place] for row in rows], device=device)
        positions = block.positions if shifts is None else block.positions + shifts[rows]
        logits = decoding.next_logits(model, step, tokens, positions)
        block.advance()
        found |= {(row, place + 1): logits[number].float() for number, row in enumerate(rows)}
        if place == 0:
            rows = [rows[number] for number in block.keep([0, 1, 3])]
    return found
