"""Completes prompts: the engine and its weights, the turns of the policy and those of its tools.

    prompts -> turn of the policy -> answers of tools -> turn of the policy -> ... -> completed samples

A sampler knows no trainer. `Sampler.generate_turn` is the one place where the policy generates.
"""

from __future__ import annotations

import contextlib
import logging
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from torch import nn

from posttrain.core.distributed.strategies.base import Distributed
from posttrain.core.errors import DataError
from posttrain.core.logging.metrics import Clock, Metrics
from posttrain.core.models import wrapping
from posttrain.lm.images.vision import Shown
from posttrain.rl.agents.environments import CUT, Environments
from posttrain.rl.agents.scheduler import OpenTurns, Turns, TurnsApart, TurnsTogether
from posttrain.rl.generation import Completions, Generator, Sampling
from posttrain.rl.generation.engines import FOLDED
from posttrain.rl.generation.protocol import Abilities
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.samples.images import ImagePrompts, RolloutImages, pictured, refuse_images, same_images
from posttrain.rl.samples.prompts import PromptCodec
from posttrain.rl.samples.samples import Sample, alike, complete_in_room

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
ATTEMPTS = 3
"""Times that a rollout is sampled, if the engine is lost and comes back."""
MAX_CALLS = 4096
"""Calls of an engine that are open at a time, each in a thread of its own."""


class Sampler:
    """Makes samples of rows, and completes them.

    Args:
        generator: the engine.
        codec: prompts to tokens, and completions to texts.
        environments: the tools of the policy and the environments of its completions.
        images: makes tokens of prompts with images; None for a model of text alone.
        context: tokens of prompt and completion that the model reads at most; None: any number.

    Attributes:
        can: what the engine declares. may_overlap: it completes several rollouts at a time, and takes weights
            meanwhile. session: makes the context of its calls, see `Generator`.
        version: the optimizer step of the weights that the engine was sent last.
        synced_at: the same; None where the engine must be sent the weights again.
        ends_of_calls: the tokens that end a turn with calls. image_token_id: that which stands for a feature.
        generating: held while the engine writes; a lock where other threads may want it meanwhile.
        ended: what wants to know each trajectory that has ended, by its place, while others go on; None: nothing.
    """

    def __init__(
        self,
        generator: Generator,
        codec: PromptCodec,
        environments: Environments,
        images: ImagePrompts | None,
        dist: Distributed,
        context: int | None = None,
    ) -> None:
        self.codec, self.environments, self.images = codec, environments, images
        self.dist, self.context = dist, context
        self.use(generator)
        self.image_token_id = None if images is None else images.vision.image_token_id
        self.version = 0
        self.synced_at: int | None = None
        self.ends_of_calls: set[int] = set()
        self.generating: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self.ended: Callable[[int, Sample], None] | None = None

    # ------------------------------------------------------------------------------------------------ prompts

    @property
    def has_tools(self) -> bool:
        """Whether the policy may call tools, in some completions at least."""
        return bool(self.environments.tools or self.environments.factories)

    def new_samples(self, rows: Sequence[Mapping[str, Any]], check: bool = True) -> list[Sample]:
        """A sample without a completion for each row; if `check`, prompts must describe the tools."""
        found: list[Sample] = []
        read: Any = None
        before: dict[str, Any] = {}
        ids: list[int] = []
        shown: Shown | None = None
        has_tools, again = self.has_tools, self.can.reads_images
        samples = [Sample(dict(row), row.get("prompt"), []) for row in rows]
        # Those of one prompt are adjacent, and it is tokenised once.
        for sample in self.environments.begin(samples) if has_tools else samples:
            asked = sample.prompt, self.environments.schemas_of(sample) if has_tools else []
            is_new = asked != read or (self.images is not None and not same_images(sample.row, before))
            read, before = asked, sample.row
            if is_new:
                ids, shown = encode(sample.row, *asked, self.codec, self.images, again)
            found.append(replace(sample, prompt_ids=ids, shown=shown))
            if is_new and check and asked[1]:
                self.environments.check_prompt(found[-1], asked[1], self.codec)
        return found

    # ------------------------------------------------------------------------------------------------ the engine

    def use(self, generator: Generator) -> None:
        self.generator, self.can = generator, Abilities.of(generator)
        self.may_overlap = self.can.is_concurrent and self.can.updates_in_flight
        self.session: Callable[[], contextlib.AbstractContextManager[Any]]
        self.session = getattr(generator, "session", contextlib.nullcontext)

    @contextlib.contextmanager
    def engine(self, generator: Generator) -> Iterator[None]:
        """The context in which another engine generates."""
        before = self.generator
        self.use(generator)
        try:
            yield
        finally:
            self.use(before)

    def weights_to_generate(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """The context in which the engine generates: with gathered weights, because completions differ in length
        between processes; or with the engine's own copy, without gathering.
        """
        return contextlib.nullcontext() if self.can.has_own_weights else self.dist.gathered(model)

    def sync_weights(self, model: nn.Module, step: int, clock: Clock) -> None:
        """Send the weights of `model` at the optimizer step `step`, unless the engine has them."""
        if self.synced_at == step:
            return
        if hasattr(self.generator, "version"):
            self.generator.version = step
        # An engine that does not update in flight first ends the completions that it has begun.
        generation = contextlib.nullcontext() if self.can.updates_in_flight else self.generating
        with clock("sync"), generation:
            self.generator.sync_weights(model)
            self.synced_at = self.version = step

    def with_attempts(self, call: Callable[[], Value], again: Callable[[], None]) -> Value:
        """What `call` returns, also if the engine of any process is lost meanwhile and comes back. Before each further
        attempt all processes call `again`, which sends the weights, or raises ConnectionError where the engine stays
        away.
        """
        for _ in range(ATTEMPTS - 1):
            found, lost = None, None
            try:
                found = call()
            except ConnectionError as error:
                lost = error
            if not any(self.dist.gather_object(lost is not None)):
                return cast(Value, found)
            logger.warning("The engine was lost, and is waited for: %s", lost or "another process says so.")
            self.synced_at = None
            again()
        return call()

    # ------------------------------------------------------------------------------------------------ completions

    def converse(self, samples: list[Sample], sampling: Sampling, metrics: Metrics) -> list[Sample]:
        """The `samples` after the turns of the policy and of its tools, in their order."""
        environments, has_tools = self.environments, self.has_tools
        if has_tools and any(map(environments.tools_of, samples)):
            samples = environments.converse(samples, self.codec, self.open_turns, sampling, self.context, self.ended)
        else:  # one turn of each: prompts are asked for together
            samples = complete_in_room(samples, sampling, self.context, self.generate_turn)
        if has_tools:
            counts = dict(environments.counts)
            environments.counts.update(dict.fromkeys(counts, 0))
            metrics.add_sum("tools/call_frequency", counts["calls"], len(samples))
            if counts["calls"]:
                metrics.add_sum("tools/failure_frequency", counts["failures"], counts["calls"])
            for why in CUT:
                metrics.add_sum(f"tools/cut/{why}", counts[why], len(samples))
        return samples

    def generate_turn(self, samples: list[Sample], sampling: Sampling) -> list[Sample]:
        """`samples` after one turn of the policy. Adjacent ones with the same prompt are generated together."""
        found = list(samples)
        for size, rows in alike(samples):
            version, seeds = self.version, [samples[row].seed for row in rows]
            ask = partial(self._ask, [samples[row] for row in rows[::size]], size, sampling, seeds)
            # Processes that split a row each have the whole model, and must not differ by a rounding.
            done = self.dist.on_first(ask) if self.dist.cp_size > 1 else ask()
            for number, row in enumerate(rows):
                found[row] = self.completed(samples[row], done, number, version)
        return found

    def completed(self, sample: Sample, done: Completions, number: int, version: int) -> Sample:
        """`sample` with one of the completions that the engine has `done`, with the weights of `version`."""
        ids, has_tools = done.ids[number], self.environments.tools or sample.environment is not None
        schemas = self.environments.schemas_of(sample) if has_tools else []
        return replace(
            sample,
            ids=ids,
            finished=done.finished[number],
            is_exact=done.is_exact,
            logps=None if done.logps is None else done.logps[number],
            routes=None if done.routes is None else done.routes[number],
            versions=done.versions[number] if done.versions else [version] * len(ids),
            completion=self.codec.decode(sample.prompt, ids, sample.prompt_ids, schemas),
        )

    @contextlib.contextmanager
    def open_turns(self, wake: Callable[[], None]) -> Iterator[Turns]:
        """A context in which turns are begun at any time, for this thread alone. `wake` is called from any thread when
        `step` of the turns has something to do that it had not before.
        """
        if self.can.is_concurrent:
            threads = ThreadPoolExecutor(MAX_CALLS, "posttrain-turn")
            try:
                yield TurnsApart(self.generate_turn, wake, threads)
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
            return
        make = getattr(self.generator, "steps", None)
        opened = None if make is None or self.dist.cp_size > 1 else make()
        with opened or contextlib.nullcontext() as steps:
            if steps is None:
                yield TurnsTogether(self.generate_turn, self.context)
            else:
                yield OpenTurns(lambda sample, done: self.completed(sample, done, 0, self.version), steps)

    def _ask(self, samples: list[Sample], size: int, sampling: Sampling, seeds: list[int]) -> Completions:
        """`size` completions of each prompt of `samples` by the engine."""
        prompts, shown = [sample.prompt_ids for sample in samples], [sample.shown for sample in samples]
        if self.can.reads_images:
            given: Any = list(map(pictured, prompts, shown))
            return self.generator.generate(given, size, sampling, seeds)
        more: dict[str, Any] = {}
        if len(seen := [one for one in shown if one is not None]) == len(shown):
            more["images"] = RolloutImages.of(seen, prompts, self.image_token_id)
        return self.generator.generate(prompts, size, sampling, seeds, **more)

    def sampling(self, args: RolloutConfig, model: nn.Module, temperature: float) -> Sampling:
        """How tokens are drawn: as `args` say, and ``generation_kwargs``, which replace them."""
        settings, names = args.generation_kwargs or {}, {"max_tokens": "max_new_tokens"}
        given = {names.get(k, k): value for k, value in settings.items() if k in FOLDED and value is not None}
        given |= {"top_k": max(given["top_k"], 0)} if "top_k" in given else {}  # -1 is vLLM's word for all
        given |= {"temperature": 0.0} if settings.get("do_sample") is False else {}
        stop = settings.get("stop") or settings.get("stop_strings") or ()
        own = getattr(wrapping.generation_config(model), "eos_token_id", None)
        asked = settings.get("eos_token_id")
        given_ends = [own, self.codec.tokenizer.eos_token_id] if asked in (None, [], ()) else [asked]
        ends: list[int | None] = []
        for ids in (*given_ends, settings.get("stop_token_ids"), [*self.ends_of_calls]):
            ends += ids if isinstance(ids, (list, tuple)) else [ids]
        plain = Sampling(
            max_new_tokens=args.max_completion_length,
            temperature=temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
            never=() if self.images is None else tuple(sorted(self.images.vision.placeholders)),
        )
        return replace(plain, **given)


def encode(
    row: Mapping[str, Any],
    prompt: Any,
    tools: list[Any] | None,
    codec: PromptCodec,
    images: ImagePrompts | None = None,
    keeps_images: bool = False,
) -> tuple[list[int], Shown | None]:
    """(tokens, images) of the prompt of a row. Raises DataError, which shows the row, where it is invalid."""
    try:
        if images is None:
            if not isinstance(prompt, str):
                refuse_images(prompt)
            return codec.encode(prompt, tools), None
        return images.encode(codec, row, prompt, tools, keeps_images=keeps_images)
    except DataError as error:
        raise DataError(f"{str(error).rstrip('.')}. The row is {reprlib.repr(row)}.") from error


def with_versions(samples: Sequence[Sample], version: int | None, is_exact: bool) -> list[Sample]:
    """`samples` with the `version` of the weights where the engine noted none; None: without versions. Their
    log-probabilities may be exact if `is_exact`.
    """
    found = []
    for sample in samples:
        others, versions = tuple(with_versions(sample.others, version, is_exact)), sample.versions
        if version is None or versions is None or len(versions) != len(sample.ids):
            versions = None if version is None else [version] * len(sample.ids)
        found.append(replace(sample, others=others, versions=versions, is_exact=is_exact and sample.is_exact))
    return found
