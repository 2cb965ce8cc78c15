"""Samples of the base, of a LoRA model as it was at some step, and of saved ones; and the thread that computes."""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.core.checkpoint import weights
from posttrain.rl.agents.scheduler import OpenTurns, TurnsTogether
from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.generation.protocol import Completions, Sampling
from posttrain.rl.rewards.background import fulfil, keep_device
from posttrain.rl.samples.samples import Sample, alike
from posttrain.rl.training_server import wire
from posttrain.rl.training_server.policies import Base, config_in, newest, scores, trained

HELD = 16
"""Samplers whose weights are held in memory: those that were used last."""
MOST = 4096
"""Completions that a request asks for at most, and requests that wait."""
NOT_DONE = """
    topk_prompt_logprobs topk_sample_logprobs target_prompt_logprobs prompt_alt_tokens_k record_stability_info
""".split()
"""What a request may ask for and does not get here."""


@dataclass
class Request:
    """What a client asks of a sampler.

    Attributes:
        seeds: of its completions, one each. scored: tokens at the end of the prompt whose log-probabilities are wanted.
        prompt_logps: where these go, (P,) with NaN; None: they are not asked for. samples: those that have
            ended, by number.
    """

    prompt: list[int]
    sampling: Sampling
    seeds: list[int]
    scored: int = 0
    prompt_logps: Any = None
    answer: Future[bytes] = field(default_factory=Future)
    samples: dict[int, Sample] = field(default_factory=dict)

    def turns(self) -> list[tuple[tuple[Request, int], Sample, Sampling]]:
        """Its completions, as they are asked for."""
        samples = [Sample({}, "", self.prompt, seed=seed) for seed in self.seeds]
        return [((self, number), sample, self.sampling) for number, sample in enumerate(samples)]

    def add(self, number: int, sample: Sample) -> None:
        """Take a completion down; with the last, `answer` is given."""
        self.samples[number] = sample
        if len(self.samples) == len(self.seeds):
            samples = [self.samples[number] for number in range(len(self.seeds))]
            self.answer.set_result(wire.sample_response(samples, self.prompt_logps))


class Samplers:
    """The weights that are sampled from, by a key, and the engines: one for all LoRA models of a kind."""

    BASE = ""  # the key of the base model

    def __init__(self, base: Base) -> None:
        self.base = base
        self._held: OrderedDict[str, tuple[Any, dict[str, torch.Tensor]]] = OrderedDict()
        self._engines: dict[str, LocalGenerator] = {}  # by the kind of LoRA
        self._loaded: dict[str, str] = {}  # the key whose weights each has

    def keep(self, key: str, config: Any, model: nn.Module) -> None:
        """Hold the weights of an adapter as they are now."""
        self._held[key] = config, {name: one.detach().clone() for name, one in trained(model).items()}
        while len(self._held) > HELD:
            self._held.popitem(last=False)

    def load(self, key: str, folder: Path) -> None:
        """Hold the weights of the checkpoint in `folder`, which must be one, see `config_in`."""
        config = config_in(folder, self.base)
        model = self._engine(config).model
        self._loaded.pop(_kind(config), None)
        weights.load_weights(model, newest(folder))
        self.keep(key, config, model)

    def _engine(self, config: Any | None) -> LocalGenerator:
        """That of the base, or of a LoRA model of a kind, whose weights are any."""
        kind = _kind(config)
        if kind not in self._engines:
            self._engines[kind] = LocalGenerator(self.base.tokenizer)
            self._engines[kind].sync_weights(self.base.model if config is None else self.base.adapted(config, 0))
        return self._engines[kind]

    def engine_of(self, key: str) -> LocalGenerator:
        """The engine with the weights of `key`; a ValueError where they are not held any more."""
        if key == self.BASE:
            return self._engine(None)
        if key not in self._held:
            raise ValueError(
                f"The weights of this sampler are not held any more: {HELD} others were used since. Save weights that "
                "are needed for long with save_weights_for_sampler, and create a sampler from their path."
            )
        self._held.move_to_end(key)
        config, tensors = self._held[key]
        engine, kind = self._engine(config), _kind(config)
        if self._loaded.get(kind) != key:
            for name, parameter in trained(engine.model).items():
                parameter.data.copy_(tensors[name])
            self._loaded[kind] = key
        return engine

    @torch.no_grad()
    def run(self, key: str, take: Callable[[], list[Request]]) -> None:
        """Answer requests with the weights of `key`, written together, until `take` gives no more that have come."""
        new = take()
        while new:
            engine, later = self.engine_of(key), list[Request]()
            self._score(engine.model, new)
            with _turns(engine) as turns:
                while new or turns:
                    turns.begin([turn for request in new for turn in request.turns()])
                    for (request, number), sample in turns.step():
                        request.add(number, sample)
                    came = [] if later else take()
                    later += [one for one in came if one.scored]  # which the attention of the turns would not do
                    new = [one for one in came if not one.scored]
            new = later or take()

    def _score(self, model: nn.Module, requests: list[Request]) -> None:
        """Find the log-probabilities of prompts that were asked for."""
        asking = [request for request in requests if request.scored]
        rows = [(request.prompt[:-1], torch.tensor(request.prompt[1:])) for request in asking]
        for places, found in scores(model, rows, self.base.most):
            for place, row in zip(places, found.cpu(), strict=True):
                request, behind = asking[place], asking[place].scored
                request.prompt_logps[-behind:] = row[: len(request.prompt) - 1][-behind:]


@contextlib.contextmanager
def _turns(engine: LocalGenerator) -> Iterator[OpenTurns | TurnsTogether]:
    """Turns that the engine writes: a batch to its end, where only the `generate` of a model continues it."""

    def completed(sample: Sample, done: Completions, number: int = 0) -> Sample:
        logps = None if done.logps is None else done.logps[number]
        return replace(sample, ids=done.ids[number], logps=logps, finished=done.finished[number])

    def turn(samples: list[Sample], sampling: Sampling) -> list[Sample]:
        found = list(samples)
        for size, rows in alike(samples):
            prompts, seeds = [samples[row].prompt_ids for row in rows[::size]], [samples[row].seed for row in rows]
            done = engine.generate(prompts, size, sampling, seeds)
            for number, row in enumerate(rows):
                found[row] = completed(samples[row], done, number)
        return found

    with engine.steps() or contextlib.nullcontext() as steps:
        yield TurnsTogether(turn) if steps is None else OpenTurns(completed, steps)


def _kind(config: Any | None) -> str:
    """What LoRA models that can share modules have in common."""
    return "" if config is None else f"{config.r} {config.lora_alpha} {sorted(config.target_modules)}"


def read_request(base: Base, ends: tuple[int, ...], body: dict[str, Any]) -> Request:
    """What a client asks of a sampler; a ValueError where that is not done here. `ends` are the tokens that end an
    answer, unless the request says otherwise.
    """
    if asked := [name for name in NOT_DONE if body.get(name)]:
        raise ValueError(f"{asked[0]} is not done by this server; leave it out")
    chunks, given, longest = body["prompt"]["chunks"], body["sampling_params"], base.max_length
    if any("tokens" not in chunk for chunk in chunks):
        raise ValueError("the prompt holds an image or sound; this server reads tokens alone")
    prompt = [int(token) for chunk in chunks for token in chunk["tokens"]]
    if not prompt or not all(0 <= token < base.vocabulary for token in prompt):
        raise ValueError(f"the prompt must have a token at least, each of 0 to {base.vocabulary - 1}")
    most, count, seed = given.get("max_tokens"), int(body.get("num_samples", 1)), given.get("seed")
    most = longest - len(prompt) if most is None else int(most)
    if not 1 <= most <= longest - len(prompt):
        raise ValueError(f"max_tokens={most} must be 1 to {longest - len(prompt)}, which {base.name} has left to write")
    stop = given.get("stop")
    parts = [stop] if isinstance(stop, str) else stop or []
    strings = tuple(part for part in parts if isinstance(part, str))
    tokens = tuple(part for part in parts if isinstance(part, int)) + (ends if stop is None or strings else ())
    temperature, top_p = float(given.get("temperature", 1.0)), float(given.get("top_p", 1.0))
    if not 0 <= temperature < math.inf or not 0 < top_p <= 1 or not 1 <= count <= MOST:
        raise ValueError(f"{temperature=} must be at least 0, {top_p=} above 0 and at most 1, {count=} 1 to {MOST}")
    how = Sampling(most, temperature, top_p, max(int(given.get("top_k", 0)), 0), stop=strings, eos_token_ids=tokens)
    generator = torch.Generator().manual_seed(secrets.randbits(62) if seed is None else int(seed) % 2**62)
    request = Request(prompt, how, torch.randint(2**62, (count,), generator=generator).tolist())
    if body.get("prompt_logprobs"):
        request.scored = min(int(body.get("prompt_logprobs_last_n") or len(prompt)), len(prompt) - 1)
        request.prompt_logps = torch.full((len(prompt),), torch.nan)
    return request


class Worker:
    """The one thread that computes. What is asked of one sampler meanwhile is written together."""

    def __init__(self, samplers: Samplers) -> None:
        self.samplers = samplers
        self._pool = ThreadPoolExecutor(1, "posttrain-training-server", initializer=keep_device())
        self._asked: dict[str, list[Request]] = defaultdict(list)  # by sampler
        self._waiting, self._lock = 0, threading.Lock()

    def do(self, work: Callable[[], Any], answer: Future[Any]) -> Future[Any]:
        """Do `work` behind all that came before; `answer` gets its result."""

        def run() -> None:
            with self._lock:
                self._waiting -= 1
            fulfil(answer, work)

        with self._lock:
            self._waiting += 1
        self._pool.submit(run)
        return answer

    def sample(self, key: str, request: Request) -> None:
        """Let `request` be answered by the sampler of that key."""
        with self._lock:
            self._asked[key].append(request)
        self._pool.submit(self._sample, key)

    def _sample(self, key: str) -> None:
        taken: list[Request] = []

        def take() -> list[Request]:
            with self._lock:  # none join while other work waits
                new = [] if taken and self._waiting else self._asked.pop(key, [])
            taken.extend(new)
            return new

        try:
            self.samplers.run(key, take)
        except Exception as error:
            for request in taken:
                if not request.answer.done():
                    request.answer.set_exception(error)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
